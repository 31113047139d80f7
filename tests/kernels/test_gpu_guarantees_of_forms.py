"""On a GPU: test_gpu_guarantees.py for row programs, shards and forms of Hopper's kernels.

A form is a function that makes tensors, and a step on them: values and gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.test_gpu_guarantees import (
    largest_allocation,
    replayed,
    skip_unless_it_runs,
    without_waiting,
)
from torch_streamkl import attention_kl, attention_kl_varlen, linear_kl, row_program
from torch_streamkl.distributed.shard_rows import num_fields
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.linear.problem import RowValues
from torch_streamkl.program.divergences import named

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
Step = Callable[[], list[Tensor]]
Form = Callable[[int], tuple[list[Tensor], Step]]  # of a length: leaves, and a step on them


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16).requires_grad_()


def stepped(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [value.detach(), *torch.autograd.grad(value.sum(), leaves)]


def in_tiles(n: int) -> tuple[list[Tensor], Step]:
    """KL weighted by key: dot products computed where they are used."""
    leaves = [leaf(1, 4, n, 64) for _ in range(4)]
    weight = torch.rand(1, 1, n, device="cuda") + 0.5

    def weighted(e: Any) -> Any:
        p = e.t.softmax("key") * e.weight
        return (p * (p.log() - e.s.log_softmax("key"))).sum("key")

    dots = {"s": (leaves[0], leaves[1]), "t": (leaves[2], leaves[3])}
    return leaves, lambda: stepped(
        row_program(weighted, dots=dots, keys={"weight": weight}, is_causal=True, impl="triton"),
        leaves,
    )


def of_heads(n: int) -> tuple[list[Tensor], Step]:
    """An indexer: maps of a block of rows in memory."""
    leaves = [leaf(1, 8, n, 64), leaf(1, 2, n, 64), leaf(1, 4, n, 32), leaf(1, 1, n, 32)]
    w = torch.rand(1, 4, n, device="cuda")

    def kl(e: Any) -> Any:
        p = e.t.softmax("key").sum("head") * 0.125
        s = (e.w * e.s.relu()).sum("head").log_softmax("key")
        return (p * ((p + 1e-10).log() - s)).sum("key")

    dots = {"t": (leaves[0], leaves[1]), "s": (leaves[2], leaves[3])}
    return leaves, lambda: stepped(
        row_program(kl, dots=dots, rows={"w": w}, is_causal=True, impl="triton"), leaves
    )


def of_vocab(n: int, reduction: str = "none") -> tuple[list[Tensor], Step]:
    """The log-probability of a label, the entropy, and a KL over given vocabulary entries."""
    leaves = [leaf(n, 64), leaf(4 * n, 64), leaf(n, 48), leaf(4 * n, 48)]
    label = torch.randint(4 * n, (n,), device="cuda")
    top = torch.randint(4 * n, (n, 16), device="cuda")

    def sums(e: Any) -> Any:
        s = e.s.log_softmax("key")
        t = torch.where(e.top, e.t, -torch.inf).log_softmax("key")
        chosen = torch.where(e.key_index == e.label, s, 0.0).sum("key")
        kl = torch.where(e.top, t.exp() * (t - s), 0.0).sum("key")
        return chosen + (s.exp() * s).sum("key") + kl

    dots = {"s": (leaves[0], leaves[1]), "t": (leaves[2], leaves[3])}
    given: dict[str, Any] = {"rows": {"label": label}, "columns": {"top": top}}
    given["reduction"] = reduction
    return leaves, lambda: stepped(row_program(sums, dots=dots, impl="triton", **given), leaves)


def head(n: int) -> tuple[list[Tensor], Step]:
    leaves = [leaf(m, 64) for m in (n, 4 * n, n, 4 * n)]
    labels = torch.randint(4 * n, (n,), device="cuda")
    return leaves, lambda: stepped(linear_kl(*leaves, labels=labels, divergence="js"), leaves)


def shards(n: int) -> tuple[list[Tensor], Step]:
    """What the ranks of a sharded vocabulary launch, one after the other; no gradients."""
    from torch_streamkl.linear.triton import shards as shard_kernels

    vocab = 4 * n
    tensors = [torch.randn(m, 64, device="cuda", dtype=BF16) for m in (n, vocab, n, vocab)]
    whole = linear_ops.problem_of(*tensors, functional=named("forward_kl").text)[0]
    parts = [whole.of_vocab(slice(*cut)) for cut in ((0, n), (n, vocab))]
    # the caller makes the logits, of a chunk of rows at a time
    logits = [[side.hidden @ side.weight.t() for side in part.heads] for part in parts]

    def step() -> list[Tensor]:
        states = torch.empty(2, num_fields(whole), n, device="cuda")
        for part, pair, state in zip(parts, logits, states, strict=True):
            shard_kernels.state(part, *pair, state)
        out = RowValues.allocate(whole)
        shard_kernels.merged(whole, states, vocab, out)
        return [out.value, out.student_lse, out.teacher_lse]

    return [x for pair in logits for x in pair], step


def hopper(head_dim: int = 128, **options: Any) -> Form:
    def form(n: int) -> tuple[list[Tensor], Step]:
        skip_unless_it_runs("hopper")
        leaves = [leaf(2, 4, n, head_dim) for _ in range(4)]
        given = {k: x(n) if callable(x) else x for k, x in options.items()}
        return leaves, lambda: stepped(attention_kl(*leaves, impl="hopper", **given), leaves)

    return form


def packed(n: int) -> tuple[list[Tensor], Step]:
    skip_unless_it_runs("hopper")
    leaves = [leaf(n, 4, 128) for _ in range(4)]
    at = torch.tensor([0, n // 3, n // 3 + 1, n], device="cuda", dtype=torch.int32)
    given: dict[str, Any] = {
        "cu_seqlens_q": at, "cu_seqlens_k": at, "max_seqlen_q": n, "max_seqlen_k": n,
    }  # fmt: skip
    return leaves, lambda: stepped(
        attention_kl_varlen(*leaves, is_causal=True, impl="hopper", **given), leaves
    )


def lengths(n: int) -> Tensor:
    return torch.tensor([n - 7, 0], device="cuda", dtype=torch.int32)


def admitted(n: int) -> Tensor:
    return torch.rand(2, 1, n, n, device="cuda") > 0.3


FORMS: dict[str, Form] = {
    "row program": in_tiles,
    "row program of heads": of_heads,
    "row program of LM heads": of_vocab,
    "sum of a row program of LM heads": functools.partial(of_vocab, reduction="mean"),
    "LM head, two passes": head,
    "vocabulary shards": shards,
    "hopper, lengths": hopper(key_lengths=lengths),
    "hopper, window": hopper(window=(100, 0)),
    "hopper, mask": hopper(attn_mask=admitted),
    "hopper, two passes": hopper(divergence="js"),
    "hopper, clamped": hopper(64, student_clamp=1e-6, is_causal=True),
    "hopper, any order": hopper(64, deterministic=False),
    "hopper, packed": packed,
}
# blocks of rows and of vocabulary entries take what a caller allows them, whatever the lengths
WORKSPACE_MIB = {
    "row program of heads": 64,
    "LM head, two passes": 256,
    "row program of LM heads": 256,
    "sum of a row program of LM heads": 512,
}
SUMS_IN_ANY_ORDER = ("hopper, any order",)


@pytest.mark.parametrize("name", FORMS)
def test_many_streams(name: str) -> None:
    cases = [FORMS[name](204 + 32 * i) for i in range(4)]  # one compilation serves them all
    expected = [step() for _, step in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(3):
        found = []
        for stream, (_, step) in zip(streams, cases, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(step())
        torch.cuda.synchronize()
        for x, y in zip(found, expected, strict=True):
            for a, b in zip(x, y, strict=True):
                assert a.equal(b) or (
                    name in SUMS_IN_ANY_ORDER and torch.allclose(a, b, 2e-2, 1e-3)
                )


@pytest.mark.parametrize("name", FORMS)
def test_does_not_wait_for_the_device(name: str) -> None:
    without_waiting(FORMS[name](300)[1])


@pytest.mark.parametrize("name", FORMS)
def test_cuda_graph(name: str) -> None:
    """Captured and replayed on other numbers, a step has the bits of an ordinary one."""
    tensors, step = FORMS[name](300)
    for a, b in replayed(step, tensors):
        assert a.equal(b) or (name in SUMS_IN_ANY_ORDER and torch.allclose(a, b, 2e-2, 1e-3))


@pytest.mark.parametrize("name", FORMS)
def test_no_allocation_of_all_pairs(name: str) -> None:
    """A byte for each pair would be n^2, which the mask that is given has."""
    n = 4108
    _, step = FORMS[name](n)
    pairs = n * n * (4 if "vocab" in name or "LM head" in name else 1)
    assert largest_allocation(step) < max(pairs, WORKSPACE_MIB.get(name, 0) * 2**20 + 1)


def test_a_row_program_past_two_billion_elements() -> None:
    """The last heads of the operands lie after 2^31 elements; alone they give the same."""
    rows, dim = 64, 64
    heads = 2**31 // (rows * dim) + 8
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GB of free memory")
    q = torch.zeros(1, heads, rows, dim, device="cuda", dtype=BF16)
    q[:, -8:].normal_()
    k = torch.randn(1, heads, rows, dim, device="cuda", dtype=BF16)

    def kl(e: Any) -> Any:
        p = e.t.log_softmax("key")
        return (p.exp() * (p - e.s.log_softmax("key"))).sum("key")

    def run(q: Tensor, k: Tensor) -> Tensor:
        return row_program(kl, dots={"s": (q, k), "t": (k, q)}, impl="triton")

    with torch.no_grad():
        whole = run(q, k)[:, -8:]
        alone = run(q[:, -8:].contiguous(), k[:, -8:].contiguous())
    torch.testing.assert_close(whole, alone, rtol=1e-5, atol=1e-5)
