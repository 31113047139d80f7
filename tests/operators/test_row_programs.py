"""Row programs against naive code: the examples of the page, values and gradients."""

from __future__ import annotations

from types import FunctionType

import pytest
import torch

from tests.support.covering import every
from tests.support.row_cases import (
    CASES,
    EXAMPLES,
    Sizes,
    check_errors,
    example,
    value_and_gradients,
)
from torch_streamkl.rows import torch_impl


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of batch, rows and keys."""
    monkeypatch.setattr(torch_impl, "BLOCK_ELEMENTS", 48)
    monkeypatch.setattr(torch_impl, "MAX_KEYS", 4)


def test_every_example_is_tested() -> None:
    functions = {name for name, f in EXAMPLES.items() if isinstance(f, FunctionType)}
    assert functions - {"row_program"} == set(CASES)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_example(name: str, impl: str, small_blocks: None) -> None:
    case = CASES[name](Sizes())
    expected = value_and_gradients(case.naive, case)
    for a, b in zip(value_and_gradients(example(name, impl), case), expected, strict=True):
        assert a.shape == b.shape
        assert b.isfinite().all()
        assert float((a - b).abs().max()) <= 1e-12 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("name", every(2, CASES))
def test_float32_errs_no_more_than_naive_code(name: str, small_blocks: None) -> None:
    check_errors(name, "torch", torch.float32)
