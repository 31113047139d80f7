"""On a GPU: large tensors, streams, threads, no waiting for the device, no large allocation.

A form is a function that makes tensors, and a step on them: values and gradients.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.device_cases import ghost, indexer, squares
from tests.support.gpus import on_a_gpu
from tests.support.problems import CASES, build
from torch_streamkl import attention_kl, attention_kl_varlen, linear_kl, row_program
from torch_streamkl.distributed.shard_rows import num_fields
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.linear.problem import RowValues
from torch_streamkl.program.divergences import named
from torch_streamkl.runtime import devices
from torch_streamkl.runtime.precompile import compiled_beside
from torch_streamkl.topk.log_probs import entry_log_probs, entry_log_probs_with_gradients

pytestmark = [
    pytest.mark.gpu,
    on_a_gpu,
]
BF16 = torch.bfloat16
Step = Callable[[], list[Tensor]]
Form = Callable[[int], tuple[list[Tensor], Step]]  # of a length: leaves, and a step on them


def skip_unless_it_runs(impl: str) -> None:
    if impl == "hopper" and not devices.gpu_of(torch.device("cuda")).is_hopper:
        pytest.skip("needs a GPU of compute capability 9.0")


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16).requires_grad_()


def stepped(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    grads = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    return [value.detach(), *(x for x in grads if x is not None)]


def of_maps(function: Callable[[Any], Any]) -> Form:
    """Dot products where they are used, or maps of a block of rows in memory (an indexer)."""

    def form(n: int) -> tuple[list[Tensor], Step]:
        leaves = [leaf(1, heads, n, 64) for heads in (4, 4, 4, 2)]
        given: dict[str, Any] = {"rows": {"w": torch.rand(1, 4, n, device="cuda")}}
        given["dots"] = {"t": tuple(leaves[:2]), "s": tuple(leaves[2:])}
        return leaves, lambda: stepped(
            row_program(function, **given, is_causal=True, impl="triton"), leaves
        )

    return form


def of_vocab(n: int, reduction: str = "none") -> tuple[list[Tensor], Step]:
    """A KL over given vocabulary entries, and the others together."""
    leaves = [leaf(n, 64), leaf(4 * n, 64), leaf(n, 48), leaf(4 * n, 48)]
    given: dict[str, Any] = {"dots": {"s": tuple(leaves[:2]), "t": tuple(leaves[2:])}}
    given["columns"] = {"top": torch.randint(4 * n, (n, 16), device="cuda")}
    given["reduction"] = reduction
    return leaves, lambda: stepped(row_program(ghost, impl="triton", **given), leaves)


def head(n: int, **options: Any) -> tuple[list[Tensor], Step]:
    leaves = [leaf(m, 64) for m in (n, 4 * n, n, 4 * n)]
    options["labels"] = torch.randint(4 * n, (n,), device="cuda")
    return leaves, lambda: stepped(linear_kl(*leaves, **options), leaves)


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


def attention(impl: str, head_dim: int = 128, key_heads: int = 4, **options: Any) -> Form:
    def form(n: int) -> tuple[list[Tensor], Step]:
        skip_unless_it_runs(impl)
        leaves = [leaf(2, heads, n, head_dim) for heads in (4, key_heads) * 2]
        given = {k: x(n) if callable(x) else x for k, x in options.items()}
        return leaves, lambda: stepped(attention_kl(*leaves, impl=impl, **given), leaves)

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


hopper, portable = (functools.partial(attention, impl) for impl in ("hopper", "triton"))
FORMS: dict[str, Form] = {
    "row program": of_maps(squares),
    "row program of heads": of_maps(indexer),
    "row program of LM heads": of_vocab,
    "sum of a row program of LM heads": functools.partial(of_vocab, reduction="mean"),
    "LM head, two passes": functools.partial(head, divergence="js"),
    "LM head, sum": functools.partial(head, reduction="mean", strategy="forward"),
    "LM head, recomputed": functools.partial(head, reduction="mean", strategy="recompute"),
    "vocabulary shards": shards,
    "portable": portable(64, is_causal=True),
    "portable, two passes": portable(64, divergence="js"),
    "portable, clamped": portable(64, student_clamp=1e-9),
    "portable, groups": portable(64, 1, key_lengths=lengths),
    "hopper": hopper(is_causal=True),
    "hopper, groups": hopper(64, 1),
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
    "LM head, sum": 512,
    "LM head, recomputed": 512,
    "row program of LM heads": 256,
    "sum of a row program of LM heads": 512,
}
SUMS_IN_ANY_ORDER = ("hopper, any order",)


def same(found: list[Tensor], expected: list[Tensor], name: str) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.equal(b) or (name in SUMS_IN_ANY_ORDER and torch.allclose(a, b, 2e-2, 1e-3))


# ---------------------------------------------------------------------------------- large tensors
def attention_of_heads(impl: str, trained: int, q: Tensor, k: Tensor) -> list[Tensor]:
    skip_unless_it_runs(impl)
    leaves = [x.detach().requires_grad_(i < trained) for i, x in enumerate((q, k))]
    value = attention_kl(*leaves, k, q, impl=impl)
    return [value.detach(), *(torch.autograd.grad(value.sum(), leaves) if trained else ())]


def program_of_heads(q: Tensor, k: Tensor) -> list[Tensor]:
    def kl(e: Any) -> Any:
        p = e.t.log_softmax("key")
        return (p.exp() * (p - e.s.log_softmax("key"))).sum("key")

    return [row_program(kl, dots={"s": (q, k), "t": (k, q)}, impl="triton")]


@pytest.mark.parametrize(
    ("of_heads", "gib"),
    [
        (functools.partial(attention_of_heads, "triton", 2), 40),
        (functools.partial(attention_of_heads, "hopper", 0), 24),
        (program_of_heads, 24),
    ],
    ids=["portable", "hopper", "row program"],
)
def test_offsets_past_two_billion_elements(of_heads: Any, gib: int) -> None:
    """The last heads of q and k lie after 2^31 elements; alone they give the same."""
    rows, dim = 64, 64
    heads = 2**31 // (rows * dim) + 8  # of one tensor: 4.3 GB in bfloat16
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GB of free memory")
    q = torch.zeros(1, heads, rows, dim, device="cuda", dtype=BF16)
    q[:, -8:].normal_()
    k = torch.randn(1, heads, rows, dim, device="cuda", dtype=BF16)
    alone = of_heads(*(x[:, -8:].contiguous() for x in (q, k)))
    close = ({"rtol": 1e-5, "atol": 1e-5}, *[{"rtol": 1e-2, "atol": 1e-3}] * 2)  # and gradients
    for found, expected, limits in zip(of_heads(q, k), alone, close, strict=False):
        torch.testing.assert_close(found[:, -8:], expected, **limits)


def test_logits_past_two_billion_elements() -> None:
    """18,000 tokens of 130,000 vocabulary entries: more logits than an int32 counts."""
    tokens, vocab, width = 18_000, 130_000, 16
    assert tokens * vocab > 2**31
    tensors = [
        torch.randn(n, width, device="cuda", dtype=BF16) for n in (tokens, vocab, tokens, vocab)
    ]
    with torch.no_grad():
        whole = linear_kl(*tensors, max_workspace_mib=16384)
        tail = [tensors[0][-8:], tensors[1], tensors[2][-8:], tensors[3]]
        torch.testing.assert_close(whole[-8:], linear_kl(*tail), rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------- streams and threads
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
            same(x, y, name)


@pytest.mark.parametrize("name", ["portable", "hopper"])
def test_many_threads(name: str) -> None:
    """Threads that launch the same kernels for the first time together, each on its stream."""
    steps = [FORMS[name](200 + 8 * i)[1] for i in range(8)]
    results: dict[int, list[Tensor]] = {}
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(steps))

    def work(index: int) -> None:
        try:
            barrier.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(10):
                    results[index] = steps[index]()
                torch.cuda.current_stream().synchronize()
        except BaseException as error:  # a thread's errors reach nobody by themselves
            errors.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for index, step in enumerate(steps):
        same(results[index], step(), name)


# --------------------------------------------------------------------------------- host and device
def without_waiting(call: Callable[[], Any]) -> None:
    """Run once so that everything is compiled, then where waiting for the device is an error."""
    call()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def step_of(call: Any) -> Step:
    leaves = [x for x in call.tensors.values() if x.requires_grad]
    return lambda: stepped(call.run("triton"), leaves)


@pytest.mark.parametrize("name", CASES)
def test_attention_does_not_wait_for_the_device(name: str) -> None:
    spec = CASES[name]
    if spec.student_scale == "tensor":
        spec = replace(spec, student_scale=None)  # whose value the host reads: said in the docs
    call = build(replace(spec, dtype=BF16)).to(device="cuda")
    without_waiting(step_of(call))


@pytest.mark.parametrize("name", FORMS)
def test_does_not_wait_for_the_device(name: str) -> None:
    without_waiting(FORMS[name](300)[1])


OF_CASES = ["clamp_reached", "head_mean", "varlen_causal", "gqa", "sink"]


@pytest.mark.parametrize("name", [*FORMS, *OF_CASES])
def test_cuda_graph(name: str) -> None:
    """Captured and replayed on other numbers, a step has the bits of an ordinary one."""
    if name in FORMS:
        leaves, step = FORMS[name](300)
    else:
        call = build(replace(CASES[name], dtype=BF16)).to(device="cuda")
        leaves, step = [x for x in call.tensors.values() if x.requires_grad], step_of(call)
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in leaves:
            x.copy_(torch.randn_like(x))
    graph.replay()
    same(captured, step(), name)


def largest_allocation(call: Callable[[], Any]) -> int:
    """Bytes of the largest block that the allocator gave out in a call."""
    call()
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        call()
        torch.cuda.synchronize()
        (history, *_) = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    sizes = [entry["size"] for entry in history if entry["action"] == "alloc"]
    assert sizes, "nothing was recorded"
    return max(sizes)


@pytest.mark.parametrize("name", FORMS)
def test_no_allocation_of_all_pairs(name: str) -> None:
    """A byte for each pair would be n^2, which the mask that is given has."""
    n = 4108
    _, step = FORMS[name](n)
    pairs = n * n * (4 if "vocab" in name or "LM head" in name else 1)
    assert largest_allocation(step) < max(pairs, WORKSPACE_MIB.get(name, 0) * 2**20 + 1)


# ------------------------------------------------------------------ a check leaves nothing after
def test_gradients_after_a_check_of_attention() -> None:
    """NOTE [cuDNN's attention is not run in checks] in validation/isolation.py."""
    x = torch.randn(4, 128, 4 * 64, device="cuda", dtype=BF16)
    weights = [torch.randn(4 * 64, 4 * 64, device="cuda", dtype=BF16) / 16 for _ in range(6)]
    lengths = torch.tensor([128, 100, 90, 70], device="cuda")
    keep = (torch.arange(128, device="cuda") < lengths[:, None])[:, None, None]

    def heads(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).view(4, 128, 4, 64).transpose(1, 2)

    def step(*given: Tensor) -> Tensor:
        q, k, v, qt, kt, o = given
        scores = (heads(x, q) @ heads(x, k).mT * 0.125).masked_fill(~keep, -1e9)
        teacher = (heads(x, qt) @ heads(x, kt).mT * 0.125).masked_fill(~keep, -1e9)
        p = scores.softmax(-1)
        out = (p @ heads(x, v)).transpose(1, 2).reshape(4, 128, 4 * 64) @ o
        log_p = p.float().clamp_min(1e-12).log()
        # eager's gradient to a target is NaN where it is 0
        target = teacher.float().softmax(-1).detach()
        kl = torch.nn.functional.kl_div(log_p, target, reduction="sum")
        return out.float().square().mean() + kl / x.shape[0]

    def gradients(call: Callable[..., Tensor]) -> list[Tensor]:
        given = [w.detach().requires_grad_() for w in weights]
        q, k, v, _, _, o = given
        return list(torch.autograd.grad(call(*given), (q, k, v, o)))

    options = {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0}  # the fused attention
    compiled = torch.compile(step, backend="streamkl", options=options)
    for got, expected in zip(gradients(compiled), gradients(step), strict=True):
        assert (got - expected).norm() <= 0.05 * expected.norm()


def test_kernels_compile_at_the_same_time() -> None:
    """Before they are launched, while other code runs; a replayed call still sees them."""
    import triton

    compiled: list[str] = []
    q, k, p, r = (leaf(2, 3, 40, 24) for _ in range(4))

    def step() -> list[Tensor]:
        return stepped(attention_kl(q, k, p, r, student_scale=0.37), [q, k])

    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda src, **_: compiled.append(src.name)
    try:
        with compiled_beside(step, {q.device}):
            pass
        num_compiled = len(compiled)
        values = step()
        assert num_compiled >= 3 and len(compiled) == num_compiled
    finally:
        triton.knobs.compilation.listener = before
    want = stepped(attention_kl(q, k, p, r, student_scale=0.37, impl="reference"), [q, k])
    for value, reference in zip(values, want, strict=True):
        assert torch.allclose(value.float(), reference.float(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_log_probabilities_of_entries(dtype: torch.dtype) -> None:
    """By the row kernels, in chunks of tokens, against float64; none is above 1."""
    h, w = (torch.randn(n, 64, device="cuda").to(dtype) for n in (700, 50001))
    ids = (h @ w.mT).topk(5).indices
    tensors = [x.requires_grad_() for x in (h, w)]
    weight = torch.rand(ids.shape, device="cuda")
    log_probs, _ = entry_log_probs(*tensors, ids, 0.5)
    assert (log_probs <= 0).all()
    exact = (0.5 * (h.double() @ w.double().mT)).log_softmax(-1).gather(-1, ids)
    given = [x.detach() for x in tensors]
    stored = entry_log_probs_with_gradients(weight, [True, True], *given, ids, 0.5)
    found = torch.autograd.grad(log_probs, tensors, weight)
    expected = torch.autograd.grad(exact, tensors, weight.double())
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for each in ([log_probs, *found], [stored[0], *stored[2:]]):
        for x, y in zip(each, (exact, *expected), strict=True):
            assert (x - y).norm() <= tolerance * y.norm()
