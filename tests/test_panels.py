"""Panels of whole rows: what compiled graphs run on a CPU, before and after Inductor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.support.problems import CASES, Spec, build
from tests.support.strategies import specs
from tests.support.tolerances import budget, check
from torch_streamkl import compiled, ops, panels

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators run panels, whose bodies are called as they are written: no compilation."""

    def find(body: Any, form: Any, inputs: dict[str, tuple[Tensor, str]]) -> Any:
        names = list(inputs)
        return lambda tensors: body(form, dict(zip(names, tensors, strict=True)))

    monkeypatch.setattr(compiled, "find", find)
    monkeypatch.setattr(ops, "_module", lambda _: panels)


@pytest.fixture
def small_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels so small that a small problem has several."""
    monkeypatch.setattr(panels, "PANEL_ELEMENTS", 200)
    monkeypatch.setattr(panels, "LEAST_QUERIES", 4)


@pytest.mark.usefixtures("as_written", "small_panels")
@pytest.mark.parametrize("name", CASES)
def test_feature(name: str) -> None:
    call = build(CASES[name])
    check(call.value_and_gradients("streaming"), budget(call))
