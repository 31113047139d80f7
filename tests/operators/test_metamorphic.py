"""Laws that hold for any inputs, whatever the right answer is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_streamkl import attention_kl
from torch_streamkl.attention import ops, torch_scores
from torch_streamkl.divergences import row_state
from torch_streamkl.program.divergences import Functional, named

DIVERGENCES = ("forward_kl", "reverse_kl", "cross_entropy", "jeffreys", "js", "tv")
SEEDS = st.integers(0, 2**16)
SIZES = st.sampled_from([1, 2, 7, 33])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_scores, "STREAMING_BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(torch_scores, "STREAMING_MAX_KEYS", 8)


def inputs(seed: int, rows: int, keys: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 2, rows, 4), (2, 2, keys, 4), (2, 2, rows, 6), (2, 2, keys, 6))
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


Call = Callable[[list[Tensor], dict[str, Any]], list[Tensor]]


def outcome(tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Values, and the gradients of their sum."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    value = attention_kl(*leaves, **options)
    return [value.detach(), *torch.autograd.grad(value.sum(), leaves)]


def _shifted(x: list[Tensor], how: dict[str, Any]) -> list[Tensor]:
    """A constant on all scores of a side changes nothing."""
    shift = torch.full((1, 1, 1, 1), 47.0, dtype=torch.float64)
    return outcome(x, how | {"student_bias": shift, "teacher_bias": -shift})


def _permuted(x: list[Tensor], how: dict[str, Any]) -> list[Tensor]:
    """The order of keys does not matter."""
    order = torch.randperm(x[1].shape[2], generator=torch.Generator().manual_seed(0))
    moved = outcome([x[0], x[1][:, :, order], x[2], x[3][:, :, order]], how)
    back = order.argsort()
    return [y[:, :, back] if i in (2, 4) else y for i, y in enumerate(moved)]


def _swapped(x: list[Tensor], how: dict[str, Any]) -> list[Tensor]:
    """Symmetric divergences are symmetric, and reverse KL is KL with sides swapped."""
    other = {"forward_kl": "reverse_kl", "reverse_kl": "forward_kl"}.get(how["divergence"])
    if how["divergence"] == "cross_entropy":
        return outcome(x, how)
    back = outcome([*x[2:], *x[:2]], how | {"divergence": other or how["divergence"]})
    return [back[0], *back[3:], *back[1:3]]


@pytest.mark.parametrize("law", [_shifted, _permuted, _swapped], ids=lambda f: f.__name__)
@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_changes_that_change_nothing(divergence: str, impl: str, law: Call) -> None:
    @given(SEEDS, SIZES, SIZES)
    @settings(max_examples=5)
    def holds(seed: int, rows: int, keys: int) -> None:
        tensors, how = inputs(seed, rows, keys), {"divergence": divergence, "impl": impl}
        found, expected = law(tensors, how), outcome(tensors, how)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)

    holds()


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


def test_mixtures_of_functionals_are_linear() -> None:
    """The value of a sum of expressions is the sum of their values."""
    tensors = inputs(0, 9, 20)
    first, second = named("forward_kl").text, named("js").text
    both = Functional.of(f"0.25*{first}+3.0*{second}").text

    def value(text: str) -> Tensor:
        return ops.attention_kl(*tensors, functional=text, impl="torch")[0]

    torch.testing.assert_close(value(both), 0.25 * value(first) + 3.0 * value(second))
