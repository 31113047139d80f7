"""cpu/elementwise.py against torch's own operations."""

import math

import pytest
import torch

from torch_streamkl.cpu import elementwise
from torch_streamkl.divergences.row_state import state_of_scores
from torch_streamkl.program.divergences import DIVERGENCES, Functional

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 1000])
def test_exp(dtype: torch.dtype, size: int) -> None:
    """Equal to the bit, but for denormal results, which are 0."""
    least = elementwise._LEAST[dtype]
    for spread in (1.0, -least / 2, -2 * least):
        x = torch.randn(3, size, dtype=dtype) * spread
        x.view(-1)[::5] = -math.inf
        expected = x.exp().masked_fill(x <= least, 0.0)
        assert torch.equal(elementwise.exp(x), expected)
        assert torch.equal(elementwise.exp_(x.clone()), expected)


def test_exp_keeps_nan_and_infinity() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    torch.testing.assert_close(elementwise.exp(x), x.exp(), equal_nan=True)
    x = torch.tensor([math.inf, -math.inf, -100.0, 0.0])
    assert elementwise.exp(x).tolist() == [math.inf, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [0.0, math.inf, -math.inf, math.nan])
def test_mask(hidden: float, dtype: torch.dtype) -> None:
    """Whatever a masked score is, it becomes -inf, and the others stay."""
    allowed = torch.rand(1, 1, 5, 9) < 0.6
    x = torch.randn(2, 3, 5, 9, dtype=dtype)
    expected = x.masked_fill(~allowed, -math.inf)
    x = torch.where(allowed, x, hidden)
    assert elementwise.mask_(x, elementwise.limits(allowed)) == math.isfinite(hidden)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jeffreys", "cross_entropy"])
def test_states_of_masked_scores(divergence: str) -> None:
    """What is known of a block of scores changes no state."""
    form = Functional.of(DIVERGENCES[divergence]).bilinear
    assert form is not None
    t, s = (40 * torch.randn(6, 20) for _ in range(2))
    hidden = torch.rand(6, 20) < 0.5
    hidden[0] = True
    t, s = (x.masked_fill(hidden, -math.inf) for x in (t, s))
    known = state_of_scores(t.clone(), s.clone(), form, finite=True, has_masked=True)
    unknown = state_of_scores(t.clone(), s.clone(), form, finite=False)
    for a, b in zip(known.tensors(), unknown.tensors(), strict=True):
        assert torch.equal(a, b)
