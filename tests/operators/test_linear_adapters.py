"""A second, narrow head next to an LM head: what a low-rank adapter of the head adds to logits.

Its oracle is one head over concatenated features, [x, u] [W, B]^T, in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support.allocations import Allocations
from torch_streamkl.linear import chunks as linear_chunks
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.linear.problem import NeedsGrad, RowWeights

TOKENS, VOCAB, WIDTHS, RANKS = 41, 300, (24, 40), (4, 3)
NAMES = ("hidden", "weight", "adapter_hidden", "adapter_weight")


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Of the student, then of the teacher, in the order of `NAMES`."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for width, rank in zip(WIDTHS, RANKS, strict=True):
        for shape in ((TOKENS, width), (VOCAB, width), (TOKENS, rank), (VOCAB, rank)):
            x = torch.randn(shape, generator=generator, dtype=torch.float64) * shape[1] ** -0.5
            result.append((x * 2).to(dtype).requires_grad_())
    return result


def oracle(xs: list[Tensor], labels: Tensor, weight: Tensor) -> Tensor:
    """The weighted sum of divergences and cross-entropies, of concatenated heads."""
    x, w, u, b, xt, wt, ut, bt = (v.double() for v in xs)
    s = torch.cat([x, u], 1) @ torch.cat([w, b], 1).t()
    t = torch.cat([xt, ut], 1) @ torch.cat([wt, bt], 1).t()
    rows = torch.nn.functional.kl_div(
        (s / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="none"
    ).sum(-1)
    hard = torch.nn.functional.cross_entropy(s, labels, reduction="none")
    return ((rows + hard) * weight).sum()


def fused(xs: list[Tensor], labels: Tensor, weight: Tensor, sums: bool, mib: int) -> Tensor:
    x, w, u, b, xt, wt, ut, bt = xs
    adapters = dict(zip(linear_ops.ADAPTER_NAMES, (u, b, ut, bt), strict=True))
    inputs = (x, w, xt, wt, None, None, labels)
    options = {"temperature": 2.0, "max_workspace_mib": mib, **adapters}
    if sums:
        wanted = [v is not None and v.requires_grad for v in (*inputs[:6], u, b, ut, bt)]
        total: Tensor = linear_ops.linear_kl_sum(*inputs, weight, weight, wanted, **options)[0]
        return total
    value, hard, _ = linear_ops.linear_kl(*inputs, **options)
    return ((value + hard) * weight).sum()


@pytest.mark.parametrize("frozen", [(), (1, 5), (4, 5, 6, 7), (0, 1, 4, 5, 6, 7)])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_head_over_concatenated_features(
    dtype: torch.dtype, sums: bool, frozen: tuple[int, ...]
) -> None:
    labels = torch.arange(TOKENS) % VOCAB
    weight = torch.linspace(0.1, 1.0, TOKENS, dtype=torch.float64)
    # the row weights of the operator are of the type that it computes in
    chosen = weight if dtype == torch.float64 else weight.float()
    ours, theirs, naive = (tensors(dtype) for _ in range(3))
    for xs in (ours, theirs, naive):
        for index in frozen:
            xs[index].requires_grad_(False)
    got = fused(ours, labels, chosen, sums, mib=1)
    expected = oracle(theirs, labels, weight)
    got.backward()
    expected.backward()
    eps = torch.finfo(dtype).eps
    assert abs(float(got) - float(expected)) <= 8 * eps * abs(float(expected))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            apart = (a.grad.double() - b.grad.double()).norm()
            assert apart <= 16 * eps * b.grad.double().norm()


@pytest.mark.parametrize("vocab", [pytest.param(1, marks=pytest.mark.slow), 7, 63, 257])
def test_blocks_of_words(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward by blocks of the vocabulary and of tokens has one block's gradients."""
    labels, weight = torch.arange(TOKENS), torch.ones(TOKENS, dtype=torch.float64)
    whole, parts = tensors(torch.float64), tensors(torch.float64)
    fused(whole, labels, weight, False, 8).backward()
    monkeypatch.setattr(linear_chunks, "even_step", lambda size, *_: min(size, vocab))
    fused(parts, labels, weight, False, 8).backward()
    for a, b in zip(whole, parts, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-13)


def test_the_weight_is_not_copied() -> None:
    """Nothing as large as a frozen head is made, forward or backward."""
    xs = [x.detach() for x in tensors(torch.float32)]
    num_tokens = 8  # whose logits take less than a head
    few = [x[:num_tokens] if i % 2 == 0 else x for i, x in enumerate(xs)]
    x, w, u, b, xt, wt, ut, bt = few
    adapters = dict(zip(linear_ops.ADAPTER_NAMES, (u, b, ut, bt), strict=True))
    problem, _, _ = linear_ops.problem_of(x, w, xt, wt, **adapters)
    wanted = NeedsGrad(
        student_hidden=True, student_adapter_hidden=True, student_adapter_weight=True
    )
    weights = RowWeights(torch.ones(num_tokens), None)
    large = Allocations(w.numel())
    large.known(few)
    with large:
        rows = linear_chunks.forward(problem, 1)
        grads = linear_chunks.backward(problem, rows, weights, wanted, 1)
        linear_chunks.forward_with_gradients(problem, weights, wanted, 1)
    assert [g is not None for g in grads] == [True, *[False] * 5, True, True, False, False]
    assert not large.shapes
    with Allocations(w.numel()) as large:
        torch.cat([w, b], 1)
    assert large.shapes


def test_flops() -> None:
    xs = [x.detach() for x in tensors(torch.float32)]
    matmuls = [2 * TOKENS * VOCAB * n for n in (*WIDTHS, *RANKS)]
    with FlopCounterMode(display=False) as counter:
        fused(xs, torch.arange(TOKENS), torch.ones(TOKENS), False, 8)
    assert counter.get_total_flops() == sum(matmuls)
    for x in xs[:4]:
        x.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        fused(xs, torch.arange(TOKENS), torch.ones(TOKENS), True, 8)
    student = 2 * TOKENS * VOCAB * (WIDTHS[0] + RANKS[0])
    assert counter.get_total_flops() == sum(matmuls) + 2 * student


def test_vmap() -> None:
    xs = [x.detach() for x in tensors(torch.float64)]
    labels, weight = torch.arange(TOKENS), torch.ones(TOKENS, dtype=torch.float64)
    batched = [torch.stack([x, x.flip(0)]) if i % 2 == 0 else x for i, x in enumerate(xs)]

    def rows(x: Tensor, u: Tensor, xt: Tensor, ut: Tensor) -> Tensor:
        given = [x, xs[1], u, xs[3], xt, xs[5], ut, xs[7]]
        return fused(given, labels, weight, False, 8)

    got = torch.vmap(rows)(*batched[::2])
    flipped = [x.flip(0) if i % 2 == 0 else x for i, x in enumerate(xs)]
    expected = [fused(given, labels, weight, False, 8) for given in (xs, flipped)]
    torch.testing.assert_close(got, torch.stack(expected))
