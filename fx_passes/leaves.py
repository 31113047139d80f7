"""Every tensor that a program reads: its arguments, parameters and what it closes over."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

MAX_DEPTH = 6


def closed_over(fn: Any, args: Any) -> dict[str, Tensor]:
    """Tensors that a program reads beside tensor arguments, by the name that a user knows.

    Parameters and buffers of modules, in ``fn``, in arguments, in closures, defaults, attributes
    of bound objects, and in the globals that its code names.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in _tensors(fn, "", seen, 0):
        found.setdefault(name, tensor)
    for place, argument in enumerate(args):
        if not isinstance(argument, Tensor):
            for name, tensor in _tensors(argument, f"argument {place}", seen, 0, is_argument=True):
                found.setdefault(name, tensor)
    return found


def _tensors(
    x: Any, name: str, seen: set[int], depth: int, is_argument: bool = False
) -> Iterator[tuple[str, Tensor]]:
    if id(x) in seen or depth > MAX_DEPTH:
        return
    if isinstance(x, Tensor):
        if not is_argument:  # tensors in containers of arguments are arguments
            seen.add(id(x))
            yield name or "tensor", x
        return
    if isinstance(x, (str, bytes, int, float, bool, type, types.ModuleType)) or x is None:
        return
    seen.add(id(x))
    for part, value in _parts(x):
        label = f"{name}.{part}" if name and part else name or part
        still = is_argument and isinstance(x, (list, tuple, dict))
        yield from _tensors(value, label, seen, depth + 1, still)


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(x, nn.Module):
        yield from x.named_parameters()
        yield from x.named_buffers()
    elif isinstance(x, functools.partial):
        yield "", x.func
        yield from ((str(i), a) for i, a in enumerate(x.args))
        yield from x.keywords.items()
    elif isinstance(x, types.MethodType):
        yield "", x.__self__
        yield "", x.__func__
    elif isinstance(x, types.FunctionType):
        yield from _parts_of_function(x)
    elif isinstance(x, Mapping):
        yield from ((str(key), value) for key, value in x.items())
    elif isinstance(x, (list, tuple, set, frozenset)):
        yield from ((str(i), value) for i, value in enumerate(x))
    elif hasattr(x, "__dict__") and not type(x).__module__.startswith("torch"):
        yield from vars(x).items()
        if callable(x):
            yield "", vars(type(x)).get("__call__")


def _parts_of_function(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if hasattr(fn, "__wrapped__"):
        yield "", fn.__wrapped__
    for cell_name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield cell_name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from ((str(i), x) for i, x in enumerate(fn.__defaults__ or ()))
    yield from (fn.__kwdefaults__ or {}).items()
    for name in fn.__code__.co_names:
        value = fn.__globals__.get(name)
        is_of_torch = str(getattr(value, "__module__", "")).startswith("torch")
        if not is_of_torch or isinstance(value, (Tensor, nn.Module)):
            yield name, value


def modules_of(fn: Any, args: Any) -> list[nn.Module]:
    """The modules that a program runs, as far as they can be found."""
    found: dict[int, nn.Module] = {}
    stack: list[tuple[Any, int]] = [(fn, 0), *((a, 0) for a in args)]
    seen: set[int] = set()
    while stack:
        x, depth = stack.pop()
        if id(x) in seen or depth > MAX_DEPTH or isinstance(x, (Tensor, types.ModuleType, type)):
            continue
        seen.add(id(x))
        if isinstance(x, nn.Module):
            found.update({id(m): m for m in x.modules()})
        elif not isinstance(x, (str, bytes, int, float, bool)) and x is not None:
            stack += [(value, depth + 1) for _, value in _parts(x)]
    return list(found.values())


def uncompiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What the user gave to torch.compile."""
    inner = getattr(fn, "_orig_mod", None)  # of a module that was compiled
    if isinstance(inner, nn.Module):
        return inner
    return getattr(fn, "_torchdynamo_orig_callable", fn)
