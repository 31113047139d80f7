"""Flattens a program's results to a table of numbers, under the names that a user knows."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

MAX_DEPTH = 20


@dataclass(frozen=True)
class Structure:
    """Describes a container, or an object without numbers to compare, by its type and keys."""

    text: str
    is_opaque: bool = False  # only its type can be compared


@dataclass
class Results:
    """Holds what a run returned, by name."""

    values: dict[str, Any] = field(default_factory=dict)  # tensors are copies, without gradient
    needs_grad: dict[str, bool] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)  # what it changed besides tensors

    def add(self, name: str, value: Any) -> None:
        for path, leaf in flattened(value, name):
            self.values[path] = _copied(leaf) if isinstance(leaf, Tensor) else leaf


def output_parts(output: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parts of a program's output: entries of a tuple are "output 0", "output 1"."""
    if type(output) in (tuple, list):
        yield "output", Structure(f"{type(output).__name__} of {len(output)}")
        yield from ((f"output {i}", x) for i, x in enumerate(output))
    elif isinstance(output, Tensor) or not _children(output):
        yield "output 0", output
    else:
        yield "output", output


def flattened(x: Any, name: str, log_normalizer: int = 0) -> Iterator[tuple[str, Any]]:
    """Yields tensors, numbers, texts and structures, by name."""
    if isinstance(x, Structure) or _is_leaf(x):
        yield name, x
        return
    if type(x).__module__ == "numpy":
        yield name, torch.as_tensor(x) if hasattr(x, "dtype") else Structure(_name_of(x))
        return
    children = _children(x)
    if children is None or log_normalizer > MAX_DEPTH:
        yield name, Structure(_name_of(x), is_opaque=True)
        return
    yield name, Structure(f"{_name_of(x)} of {', '.join(k for k, _ in children) or 'nothing'}")
    for key, value in children:
        yield from flattened(value, f"{name}{key}", log_normalizer + 1)


def _is_leaf(x: Any) -> bool:
    kinds = (Tensor, int, float, complex, str, bytes, type(None), enum.Enum)
    return isinstance(x, (*kinds, torch.dtype, torch.device, torch.layout, type))


def _children(x: Any) -> list[tuple[str, Any]] | None:
    if _is_leaf(x):
        return None
    if isinstance(x, Mapping):
        names = [repr(k) if isinstance(k, (str, int, float)) else f"#{i}" for i, k in enumerate(x)]
        return [(f"[{name}]", value) for name, value in zip(names, x.values(), strict=True)]
    if isinstance(x, (set, frozenset)):
        return [("[...]", sorted(map(repr, x)))]
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return [(f".{name}", value) for name, value in zip(x._fields, x, strict=True)]
    if isinstance(x, (list, tuple)):
        return [(f"[{i}]", value) for i, value in enumerate(x)]
    if dataclasses.is_dataclass(x):
        return [(f".{f.name}", getattr(x, f.name, None)) for f in dataclasses.fields(x)]
    is_code = isinstance(x, (types.FunctionType, types.ModuleType, nn.Module)) or callable(x)
    if is_code or type(x).__module__.partition(".")[0] in ("torch", "builtins"):
        return None
    found = getattr(x, "__dict__", None)
    return None if found is None else [(f".{key}", value) for key, value in found.items()]


def _name_of(x: Any) -> str:
    return type(x).__qualname__


def _copied(x: Tensor) -> Tensor:
    x = x.detach()
    if x.layout is not torch.strided and not x.is_nested:
        x = x.to_dense()
    return x.clone()
