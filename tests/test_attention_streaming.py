"""The CPU implementation: values, gradients and memory against the naive code in float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from tests.support.problems import CASES, Spec, build
from tests.support.strategies import specs
from tests.support.tolerances import budget, check
from torch_streamkl import launch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that a small problem has several of each kind."""
    monkeypatch.setattr(launch, "STREAMING_BLOCK_ELEMENTS", 96)
    monkeypatch.setattr(launch, "STREAMING_MAX_KEYS", 16)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", CASES)
def test_feature(name: str) -> None:
    call = build(CASES[name])
    check(call.value_and_gradients("streaming"), budget(call))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["forward_kl", "js", "clamp_reached", "mask_additive"])
def test_dtype(name: str, dtype: torch.dtype) -> None:
    call = build(replace(CASES[name], dtype=dtype))
    check(call.value_and_gradients("streaming"), budget(call))


@pytest.mark.usefixtures("small_blocks")
def test_any_call() -> None:
    @given(specs(dtypes=DTYPES))
    @settings(max_examples=150, deadline=None, derandomize=True)
    def any_call(spec: Spec) -> None:
        call = build(spec)
        check(call.value_and_gradients("streaming"), budget(call))

    any_call()
