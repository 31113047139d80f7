"""Row programs against naive code: the examples of the page, values and gradients."""

from __future__ import annotations

from types import FunctionType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.covering import every
from tests.support.row_cases import (
    CASES,
    EXAMPLES,
    Sizes,
    check_errors,
    example,
    value_and_gradients,
)
from torch_streamkl import row_program
from torch_streamkl.rows import torch_impl


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of batch, rows and keys."""
    monkeypatch.setattr(torch_impl, "BLOCK_ELEMENTS", 48)
    monkeypatch.setattr(torch_impl, "MAX_KEYS", 4)


def _assert_equal(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert b.isfinite().all()
        assert float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))


def test_every_example_is_tested() -> None:
    functions = {name for name, f in EXAMPLES.items() if isinstance(f, FunctionType)}
    assert functions - {"row_program"} == set(CASES)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_example(name: str, impl: str, small_blocks: None) -> None:
    torch.manual_seed(0)
    case = CASES[name](Sizes())
    expected = value_and_gradients(case.naive, case)
    _assert_equal(value_and_gradients(example(name, impl), case), expected, 1e-12)


@pytest.mark.parametrize("name", every(2, CASES))
def test_float32_errs_no_more_than_naive_code(name: str, small_blocks: None) -> None:
    check_errors(name, "torch", torch.float32)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_sums_that_differ_in_the_order_of_factors_are_one(impl: str) -> None:
    """Each has its gradient, although the program computes them once."""
    dots = [torch.randn(1, 2, n, 3, dtype=torch.float64) for n in (4, 5)] * 2
    q, k = dots[:2]

    def both(e):
        return {"a": (e.t * e.s.exp()).sum("key"), "b": (e.s.exp() * e.t).sum("key")}

    q.requires_grad_()
    found = row_program(both, dots={"s": (q, k), "t": (q.detach(), k)}, impl=impl)
    s = q @ k.mT
    expected = (s.exp() * s.detach()).sum(-1)
    weights = torch.randn(2, *expected.shape, dtype=torch.float64)
    total = sum((found[name] * w).sum() for name, w in zip("ab", weights, strict=True))
    (gradient,) = torch.autograd.grad(total, q)
    (wanted,) = torch.autograd.grad((expected * weights.sum(0)).sum(), q)
    torch.testing.assert_close(found["b"], expected)
    torch.testing.assert_close(gradient, wanted)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(CASES)),
    st.integers(1, 3),
    st.sampled_from([2, 4]),
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(1, 7),
    st.sampled_from([1.0, 30.0, 300.0]),
    st.integers(0, 2**31),
)
def test_generated_sizes(
    name: str, batch: int, heads: int, rows: int, more: int, dim: int, spread: float, seed: int
) -> None:
    torch.manual_seed(seed)
    # causal examples need a key for every row; of one vocabulary entry nothing is distilled
    case = CASES[name](Sizes(batch, heads, rows, rows + more + 1, dim, spread))
    expected = value_and_gradients(case.naive, case)
    got = value_and_gradients(EXAMPLES[name], case)
    for a, b in zip(got, expected, strict=True):
        finite = b.isfinite()  # naive logarithms of probabilities underflow
        error, size = (x[finite].abs().max() if finite.any() else 0.0 for x in (a - b, b))
        assert float(error) <= 1e-10 * max(1.0, float(size))
