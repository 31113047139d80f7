"""Captures the C launch call behind Triton's Python launcher so that it can be replayed.

Triton's launcher goes through all arguments in Python, and encodes a tensor map for every tensor
descriptor, which takes longer than a short kernel runs. The result depends on addresses only. So
the launcher's driver call is captured once, and tensor maps are cached by address. A map does not
own memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, FunctionType
from typing import Any

MAX_ADDRESSES = 64  # of the descriptors of a launch, for which it has maps


@dataclass(frozen=True)
class Text:
    """Stands for an argument: the text that the captured source has for it."""

    text: str


@dataclass(frozen=True)
class Base(Text):
    """Stands for the tensor of a descriptor in a captured call."""

    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True)
class DriverCall:
    """Holds the driver's function and its arguments, some of which stand for others.

    ``maps(*addresses)`` returns the tensor maps among them, for descriptors at other addresses.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    addresses: tuple[str, ...]  # of the descriptors, as text
    maps: Callable[..., tuple[Any, ...]]


def driver_call(launcher: Any, given: tuple[Any, ...]) -> DriverCall | None:
    """Captures the driver call of ``launcher(*given)``; None if the launcher is an unknown one.

    Descriptors among the arguments have a `Base`.
    """
    found = _driver_function(getattr(launcher, "launch", None))
    sizes = ("global_scratch_size", "profile_scratch_size")
    needs_memory = any(getattr(launcher, name, 1) for name in sizes)
    if found is None or needs_memory or getattr(launcher, "gsan_enabled", False):
        return None

    def collect(*arguments: Any) -> tuple[Any, ...]:
        seen: list[tuple[Any, ...]] = []
        spied = copy.copy(launcher)
        spied.launch = _with(launcher.launch, lambda *each: seen.append(each))
        spied(*arguments)
        (every,) = seen
        return every

    arguments = collect(*given)
    bases = [x.base for x in _leaves(given) if is_descriptor(x)]
    num_maps = sum(map(is_map, _leaves(arguments)))
    if num_maps not in (0, len(bases)):
        return None
    kept: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def maps(*addresses: int) -> tuple[Any, ...]:
        made = kept.get(addresses)
        if made is None:
            if len(kept) >= MAX_ADDRESSES:
                kept.clear()
            others = collect(*_rebased(given, iter(addresses)))
            made = kept[addresses] = tuple(filter(is_map, _leaves(others)))
        return made

    texts = tuple(x.text for x in bases) if num_maps else ()
    return DriverCall(found, arguments, texts, maps)


def is_descriptor(x: Any) -> bool:
    """Returns whether an argument is a tensor descriptor."""
    return type(x).__name__ == "TensorDescriptor"


def with_base(descriptor: Any, base: Any) -> Any:
    """Returns a descriptor for another tensor, unchecked, because a check takes long."""
    found = object.__new__(type(descriptor))
    vars(found).update(vars(descriptor), base=base)  # copy.copy takes three times as long
    return found


def is_map(x: Any) -> bool:
    """Returns whether an argument is an encoded tensor map."""
    return type(x).__name__ == "PyCUtensorMap"


def _driver_function(launch: Any) -> Callable[..., Any] | None:
    """Returns the function that a launcher's ``launch`` calls: itself without descriptors."""
    if isinstance(launch, BuiltinFunctionType):
        return launch
    if not isinstance(launch, FunctionType) or "launcher" not in launch.__code__.co_freevars:
        return None
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True))
    found = cells["launcher"].cell_contents
    return found if isinstance(found, BuiltinFunctionType) else None


def _with(launch: Any, function: Callable[..., Any]) -> Any:
    """Returns ``launch`` with another function in place of the driver's."""
    if isinstance(launch, BuiltinFunctionType):
        return function
    names, cells = launch.__code__.co_freevars, launch.__closure__
    closure = tuple(
        CellType(function) if name == "launcher" else cell
        for name, cell in zip(names, cells, strict=True)
    )
    return FunctionType(
        launch.__code__, launch.__globals__, launch.__name__, launch.__defaults__, closure
    )


def _leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, (tuple, list)):
        for each in x:
            yield from _leaves(each)
    else:
        yield x


def _rebased(x: Any, addresses: Iterator[int]) -> Any:
    """Replaces the addresses of descriptors among the arguments."""
    if isinstance(x, tuple):
        return tuple([_rebased(each, addresses) for each in x])
    return with_base(x, Base("", next(addresses))) if is_descriptor(x) else x
