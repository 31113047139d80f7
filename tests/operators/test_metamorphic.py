"""Laws that hold for any inputs, whatever the right answer is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.covering import every
from tests.support.problems import CASES, build
from torch_streamkl import attention_kl, attention_kl_varlen, row_program
from torch_streamkl.attention import torch_scores
from torch_streamkl.divergences import row_state
from torch_streamkl.program.divergences import Functional, named

DIVERGENCES = ("forward_kl", "reverse_kl", "cross_entropy", "jeffreys", "js", "tv")
IMPLS = ("torch", "reference")
SEEDS = st.integers(0, 2**16)
SIZES = st.sampled_from([1, 2, 7, 33])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_scores, "STREAMING_BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(torch_scores, "STREAMING_MAX_KEYS", 8)


def inputs(seed: int, rows: int, keys: int, heads: int = 2, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, 4), (keys, 4), (rows, 6), (keys, 6))
    return [
        torch.randn(batch, heads, n, d, generator=generator, dtype=torch.float64)
        for n, d in shapes
    ]


def outcome(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Values, and the gradients of their sum."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    value = attention_kl(*leaves, **options)
    return [value.detach(), *torch.autograd.grad(value.sum(), leaves)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_constant_on_all_scores_changes_nothing(divergence: str, impl: str) -> None:
    @given(SEEDS, SIZES, SIZES, st.floats(-50, 50), st.floats(-50, 50))
    @settings(max_examples=10)
    def law(seed: int, rows: int, keys: int, student: float, teacher: float) -> None:
        tensors = inputs(seed, rows, keys)
        how = {"divergence": divergence, "impl": impl}
        shifts = {
            f"{side}_bias": torch.full((1, 1, 1, 1), shift, dtype=torch.float64)
            for side, shift in (("student", student), ("teacher", teacher))
        }
        assert_equal(outcome(tensors, **how, **shifts), outcome(tensors, **how))

    law()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_order_of_keys_does_not_matter(divergence: str, impl: str) -> None:
    @given(SEEDS, SIZES, SIZES)
    @settings(max_examples=10)
    def law(seed: int, rows: int, keys: int) -> None:
        sq, sk, tq, tk = inputs(seed, rows, keys)
        order = torch.randperm(keys, generator=torch.Generator().manual_seed(seed))
        how = {"divergence": divergence, "impl": impl}
        value, dsq, dsk, dtq, dtk = outcome([sq, sk, tq, tk], **how)
        expected = [value, dsq, dsk[:, :, order], dtq, dtk[:, :, order]]
        assert_equal(outcome([sq, sk[:, :, order], tq, tk[:, :, order]], **how), expected)

    law()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("divergence", [d for d in DIVERGENCES if d != "cross_entropy"])
def test_a_distribution_does_not_diverge_from_itself(divergence: str, impl: str) -> None:
    @given(SEEDS, SIZES, SIZES, st.sampled_from([0.01, 1.0, 100.0]))
    @settings(max_examples=10)
    def law(seed: int, rows: int, keys: int, size: float) -> None:
        q, k, _, _ = inputs(seed, rows, keys)
        value, *grads = outcome([q * size, k, q * size, k], divergence=divergence, impl=impl)
        assert value.abs().max() <= 1e-12
        assert all(g.abs().max() <= 1e-10 * size for g in grads)

    law()


@pytest.mark.parametrize("impl", IMPLS)
def test_symmetric_divergences_are_symmetric(impl: str) -> None:
    @given(SEEDS, SIZES, SIZES, st.sampled_from(["jeffreys", "js", "tv"]))
    @settings(max_examples=20)
    def law(seed: int, rows: int, keys: int, divergence: str) -> None:
        sq, sk, tq, tk = inputs(seed, rows, keys)
        there = outcome([sq, sk, tq, tk], divergence=divergence, impl=impl)
        back = outcome([tq, tk, sq, sk], divergence=divergence, impl=impl)
        assert_equal(there, [back[0], *back[3:], *back[1:3]])

    law()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_causal_equals_its_mask(divergence: str, impl: str) -> None:
    @given(SEEDS, SIZES, SIZES)
    @settings(max_examples=10)
    def law(seed: int, rows: int, keys: int) -> None:
        tensors = inputs(seed, rows, keys)
        mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        how = {"divergence": divergence, "impl": impl}
        assert_equal(
            outcome(tensors, is_causal=True, **how), outcome(tensors, attn_mask=mask, **how)
        )

    law()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_window_equals_its_mask(impl: str) -> None:
    @given(SEEDS, SIZES, SIZES, st.integers(0, 9), st.integers(0, 9))
    @settings(max_examples=20)
    def law(seed: int, rows: int, keys: int, left: int, right: int) -> None:
        tensors = inputs(seed, rows, keys)
        offset = torch.arange(keys) - (torch.arange(rows)[:, None] + keys - rows)
        mask = (offset >= -left) & (offset <= right)
        found = outcome(tensors, window=(left, right), impl=impl)
        assert_equal(found, outcome(tensors, attn_mask=mask, impl=impl))

    law()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_packed_equals_padded(impl: str, is_causal: bool) -> None:
    @given(SEEDS, st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=4))
    @settings(max_examples=20)
    def law(seed: int, lengths: list[tuple[int, int]]) -> None:
        alone = [[x[0] for x in inputs(seed + i, *n, batch=1)] for i, n in enumerate(lengths)]
        packed = [
            torch.cat([x[i].transpose(0, 1) for x in alone]).requires_grad_() for i in range(4)
        ]
        offsets = [
            torch.tensor([0, *(n[i] for n in lengths)], dtype=torch.int32).cumsum(0).int()
            for i in range(2)
        ]
        longest = [max(n[i] for n in lengths) for i in range(2)]
        value = attention_kl_varlen(
            *packed, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1],
            max_seqlen_q=longest[0], max_seqlen_k=longest[1], is_causal=is_causal, impl=impl,
        )  # fmt: skip
        grads = torch.autograd.grad(value.sum(), packed)
        each = [outcome([x[None] for x in a], is_causal=is_causal, impl=impl) for a in alone]
        together = [torch.cat([e[0][0] for e in each], -1)]
        together += [torch.cat([e[i][0].transpose(0, 1) for e in each]) for i in range(1, 5)]
        assert_equal([value.detach(), *grads], together)

    law()


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "cross_entropy", "jeffreys"])
def test_states_split_and_merge(divergence: str) -> None:
    """Any split of the keys, merged in any order, with keys that a side or both exclude."""
    form = named(divergence).bilinear
    assert form is not None

    @given(SEEDS, st.integers(1, 40), st.integers(0, 40), st.sampled_from([1.0, 300.0]))
    @settings(max_examples=50)
    def law(seed: int, keys: int, cut: int, size: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        t, s = size * torch.randn(2, 5, keys, generator=generator, dtype=torch.float64)
        excluded = torch.rand(5, keys, generator=generator) < 0.3
        t, s = (x.masked_fill(excluded, -math.inf) for x in (t, s))

        def state(part: slice) -> row_state.RowState:
            if t[:, part].shape[1] == 0:
                return row_state.RowState.empty((5,), t)
            scores = (t[:, part].clone(), s[:, part].clone())
            return row_state.state_of_scores(*scores, form, finite=False)

        whole = row_state.finish(state(slice(None)), form)
        left, right = state(slice(cut)), state(slice(cut, None))
        for parts in ((left, right), (right, left)):
            merged = row_state.finish(row_state.merge(*parts, form), form)
            for name in ("value", "student_lse", "teacher_lse", "student_delta", "teacher_delta"):
                found, expected = getattr(merged, name), getattr(whole, name)
                has_keys = ~excluded.all(-1)
                torch.testing.assert_close(
                    found[has_keys], expected[has_keys], rtol=1e-11, atol=1e-9 * size
                )

    law()


@pytest.mark.parametrize(
    "name", every(2, [n for n in CASES if "mean" not in n and n != "teacher_lse"])
)
def test_a_scaled_value_has_a_scaled_gradient(name: str) -> None:
    call = build(replace(CASES[name], dtype=torch.float64)).to(torch.float64)
    value = call.run("torch")
    leaves = list(call.tensors.values())
    once, thrice = (
        torch.autograd.grad(factor * value.sum(), leaves, retain_graph=True) for factor in (1, 3)
    )
    assert_equal(list(thrice), [3 * x for x in once])


def test_mixtures_of_functionals_are_linear() -> None:
    """The value of a sum of expressions is the sum of their values."""
    from torch_streamkl.attention import ops

    tensors = inputs(0, 9, 20)
    first, second = named("forward_kl").text, named("js").text
    both = Functional.of(f"0.25*{first}+3.0*{second}").text

    def value(text: str) -> Tensor:
        return ops.attention_kl(*tensors, functional=text, impl="torch")[0]

    torch.testing.assert_close(value(both), 0.25 * value(first) + 3.0 * value(second))


# ------------------------------------------------------------------------------- row programs
def weighted(e: Any) -> Any:
    """KL with a weight of keys, renormalised."""
    p, s = e.t.softmax("key") * e.weight, e.s.softmax("key") * e.weight
    p, s = p / p.sum("key"), s / s.sum("key")
    return (p * (p.log() - s.log())).sum("key")


def of_program(tensors: list[Tensor], weight: Tensor, **options: Any) -> list[Tensor]:
    """Rows, and the gradients of their sum."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    dots = {"s": (leaves[0], leaves[1]), "t": (leaves[2], leaves[3])}
    value = row_program(weighted, dots=dots, keys={"weight": weight}, impl="torch", **options)
    return [value.detach(), *torch.autograd.grad(value.sum(), leaves)]


def weights(seed: int, keys: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(1, 1, keys, generator=generator, dtype=torch.float64) + 0.5


def test_the_order_of_keys_does_not_matter_to_a_row_program() -> None:
    @given(SEEDS, SIZES, SIZES)
    @settings(max_examples=10)
    def law(seed: int, rows: int, keys: int) -> None:
        tensors, weight = inputs(seed, rows, keys), weights(seed, keys)
        order = torch.randperm(keys, generator=torch.Generator().manual_seed(seed))
        moved = [x[:, :, order] if i % 2 else x for i, x in enumerate(tensors)]
        expected = of_program(tensors, weight)
        expected = [x[:, :, order] if i in (2, 4) else x for i, x in enumerate(expected)]
        assert_equal(of_program(moved, weight[..., order]), expected)

    law()


def test_a_row_program_of_two_equal_maps_is_zero() -> None:
    @given(SEEDS, SIZES, SIZES)
    @settings(max_examples=10)
    def law(seed: int, rows: int, keys: int) -> None:
        q, k, *_ = inputs(seed, rows, keys)
        found = of_program([q, k, q, k], weights(seed, keys))
        assert_equal(found, [torch.zeros_like(x) for x in found])

    law()


def test_a_scale_of_the_weights_changes_nothing() -> None:
    @given(SEEDS, SIZES, SIZES, st.floats(0.01, 100.0))
    @settings(max_examples=10)
    def law(seed: int, rows: int, keys: int, scale: float) -> None:
        tensors, weight = inputs(seed, rows, keys), weights(seed, keys)
        assert_equal(of_program(tensors, weight * scale), of_program(tensors, weight))

    law()


def test_a_causal_row_program_equals_its_mask() -> None:
    @given(SEEDS, SIZES, st.integers(0, 9))
    @settings(max_examples=10)
    def law(seed: int, rows: int, more: int) -> None:
        keys = rows + more
        tensors, weight = inputs(seed, rows, keys), weights(seed, keys)
        mask = torch.ones(rows, keys, dtype=torch.bool).tril(more)[None, None]
        found = of_program(tensors, weight, is_causal=True)
        assert_equal(found, of_program(tensors, weight, mask=mask))

    law()
