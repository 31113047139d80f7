"""The bodies of compiled blocks called as they are written: their mathematics without Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from torch_streamkl.cpu import compiled


@pytest.fixture
def bodies_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled; a body gets the inputs that a compiled one would."""

    def find(
        body: compiled.Body, form: Any, inputs: dict[str, tuple[Tensor, str]]
    ) -> Callable[[list[Tensor]], Any]:
        for x, spec in inputs.values():
            assert x.dim() == len(spec)
        names = list(inputs)
        return lambda tensors: body(form, dict(zip(names, tensors, strict=True)))

    monkeypatch.setattr(compiled, "find", find)
