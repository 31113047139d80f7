"""Writes entries: Triton kernels without tuples that call ours, for compilers that launch kernels.

Our kernels take named tuples and jit functions. A compiler that launches kernels itself
(fx_passes/inductor_kernels.py) passes tensors and numbers one by one. `entry_of` writes a kernel
with such parameters. It builds the tuples again and calls ours, by imports of their modules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITCallable, KernelInterface

from torch_streamkl.kernels import pointwise
from torch_streamkl.kernels.generated import function_of
from torch_streamkl.runtime.trace import Launch, Untraceable


@dataclass(frozen=True)
class Parameter:
    """Describes a parameter of an entry, with the attributes that kernel compilers read."""

    name: str
    num: int
    is_constexpr: bool = False


class Entry:
    """Holds a kernel as source code: the function, followed by the definitions that its names
    refer to.

    It has the attributes that Inductor reads of a Triton kernel.
    """

    def __init__(self, src: str, parameters: Sequence[str], fn: Callable[..., Any]) -> None:
        """Stores the source; Inductor reads ``fn``, the function alone, and never calls it."""
        self.src = src
        self.arg_names = list(parameters)
        self.params = [Parameter(name, i) for i, name in enumerate(parameters)]
        self.fn = fn
        self.__name__ = fn.__name__


def entry_of(launch: Launch) -> tuple[Entry, dict[str, Any]]:
    """Returns the entry of a launch, and the arguments that it passes, by parameter."""
    writer = _Writer()
    arguments = [writer.source_of(x) for x in launch.arguments]
    arguments += [writer.constant(x) for x in launch.constants]
    kernel = writer.imported(launch.kernel.fn)
    name = f"streamkl_{launch.kernel.fn.__name__}"
    lines = [
        f"def {name}({', '.join(writer.values)}):",
        *(f"    {line}" for line in writer.constants),
        f"    {kernel}({', '.join(arguments)})",
        "",
        *sorted(writer.imports),
        *writer.functions,
    ]
    return _entry(name, "\n".join(lines) + "\n", tuple(writer.values)), writer.values


@functools.lru_cache(maxsize=1024)
def _entry(name: str, source: str, names: tuple[str, ...]) -> Entry:
    definition = source.partition("\n\n")[0]
    return Entry(source, names, function_of(source, name, "entry", {}, "entry", definition))


class _Writer:
    """Spells values as source."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}  # of parameters
        self.imports: set[str] = set()
        self.constants: list[str] = []  # assignments in the entry
        self.functions: list[str] = []  # and after it

    def source_of(self, x: Any) -> str:
        """Spells a value that a kernel gets when it is launched."""
        if isinstance(x, tuple):
            return self._tuple(x, self.source_of)
        if x is None or isinstance(x, bool):
            return repr(x)
        if isinstance(x, float):  # a parameter would be of 64 bits
            return f"tl.full((), {self._literal(x)}, tl.float32)"
        if not isinstance(x, (Tensor, int, torch.SymInt)):
            raise Untraceable(f"an argument of type {type(x).__name__}")
        name = f"a{len(self.values)}"
        self.values[name] = x
        return name

    def constant(self, x: Any) -> str:
        """Names a value that a kernel is compiled for."""
        name = f"C{len(self.constants) + len(self.functions)}"
        if isinstance(x, (JITCallable, KernelInterface)):
            text = pointwise.text_of(x)
            if text is None:
                raise Untraceable("a function that was made in this process")
            self.functions.append(f"{name} = {self.imported(pointwise.helper)}({text!r})")
        else:
            self.constants.append(f"{name}: tl.constexpr = {self._literal(x)}")
        return name

    def _literal(self, x: Any) -> str:
        if isinstance(x, tuple):
            return self._tuple(x, self._literal)
        if x is None or isinstance(x, (bool, int, str)):
            return repr(x)
        if isinstance(x, float):
            return repr(x) if math.isfinite(x) else f"float({str(x)!r})"
        raise Untraceable(f"a constant of type {type(x).__name__}")

    def _tuple(self, x: tuple[Any, ...], spell: Callable[[Any], str]) -> str:
        items = ", ".join(spell(each) for each in x)
        return f"{self.imported(type(x))}({items})" if hasattr(x, "_fields") else f"({items},)"

    def imported(self, x: Any) -> str:
        """Names a function or class of a module, which the source imports."""
        name: str = x.__name__
        self.imports.add(f"from {x.__module__} import {name}")
        return name
