"""Finds the objects that a program can reach besides its arguments, and may read or change.

It finds tensors and mutable objects (lists, dicts, sets, attributes of objects and classes,
closure cells, named globals, generators of random numbers) of a function, of the objects that it
is bound to or closes over, and of modules and optimizers among them. It does not look into
functions and classes of installed packages, or attributes of imported modules.
"""

from __future__ import annotations

import functools
import io
import logging
import pickle
import random
import sys
import sysconfig
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MAX_OBJECTS = 100_000
PLAIN = (str, bytes, int, float, complex, bool, type(None), types.ModuleType, torch.dtype)
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_MISSING = object()
_STANDARD = sysconfig.get_paths()["stdlib"]


@dataclass
class ObservedObject:
    """Holds a mutable object, and the values that it had before the first run."""

    name: str  # as a user knows it
    owner: Any
    before: dict[Any, Any]

    def changed(self) -> Iterator[tuple[str, Any]]:
        """Yields the parts that the program replaced, added or removed, with their values now."""
        after = contents(self.owner)
        for place, key in enumerate(dict.fromkeys([*self.before, *after])):
            old, new = self.before.get(key, _MISSING), after.get(key, _MISSING)
            if old is not new and not (type(old) is type(new) and _is_equal(old, new)):
                label = _label(self.owner, key, place)
                name = f"{self.name}.{label}" if self.name and label else self.name or label
                yield name, "removed" if new is _MISSING else new

    def restore(self) -> None:
        if any(True for _ in self.changed()) or list(contents(self.owner)) != list(self.before):
            put_back(self.owner, self.before)


def reached_from(
    program: Callable[..., Any], arguments: list[Any]
) -> tuple[dict[str, Tensor], list[ObservedObject], list[str]]:
    """Returns tensors by name, mutable objects, and iterators, which cannot be restored.

    ``arguments`` are those that are no tensors and no containers.
    """
    tensors: dict[str, Tensor] = {}
    holders: list[ObservedObject] = []
    iterators: list[str] = []
    waiting = deque([("", program)])
    waiting += [(f"argument {i}", x) for i, x in enumerate(arguments) if not isinstance(x, Tensor)]
    seen: dict[int, Any] = {}  # keeps what is bound methods' temporary alive
    while waiting and len(seen) < MAX_OBJECTS:
        name, x = waiting.popleft()
        if id(x) in seen or isinstance(x, PLAIN):
            continue
        seen[id(x)] = x
        if isinstance(x, Tensor):
            tensors[_unused(name or "tensor", tensors)] = x
            continue
        if isinstance(x, Iterator) and not isinstance(x, io.IOBase):
            iterators.append(name)
        if _is_mutable(x):
            holders.append(ObservedObject(name, x, contents(x)))
        for label, part in _parts(x):
            if label:
                waiting.append((f"{name}.{label}" if name else label, part))
            else:  # as near as its owner: parameters get their names in modules
                waiting.appendleft((name, part))
    return tensors, holders, iterators


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    unused, count = name, 1
    while unused in taken:
        count += 1
        unused = f"{name} ({count})"
    return unused


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(x, functools.partial):
        yield "", x.func
        yield from ((str(i), a) for i, a in enumerate(x.args))
        yield from x.keywords.items()
    elif isinstance(x, types.MethodType):
        yield "", x.__self__
        yield "", x.__func__
    elif isinstance(x, (tuple, frozenset)):
        yield from ((str(i), value) for i, value in enumerate(x))
    elif _is_mutable(x):
        for place, (key, value) in enumerate(contents(x).items()):
            yield _label(x, key, place), value
        if isinstance(x, types.FunctionType):
            yield from ((str(i), value) for i, value in enumerate(x.__defaults__ or ()))
            yield from (x.__kwdefaults__ or {}).items()
        elif isinstance(x, type):
            for value in vars(x).values():
                value = value.fget if isinstance(value, property) else value
                yield "", getattr(value, "__func__", value)
            yield from (("", base) for base in x.__bases__)
        elif not isinstance(x, (list, deque, dict, set)):
            yield "", type(x)


def _is_users(x: types.FunctionType | type) -> bool:
    """Whether code is of the user: what libraries keep for themselves is not looked at."""
    if isinstance(x, type):
        file = getattr(sys.modules.get(x.__module__), "__file__", None) or "built in"
        file = "" if x.__module__ == "__main__" else file
    else:
        file = x.__code__.co_filename
    is_installed = "site-packages" in file or "dist-packages" in file or file.startswith("<frozen")
    is_standard = file.startswith(_STANDARD) or file == "built in"
    return not (is_installed or is_standard or str(x.__module__).startswith("torch."))


def _is_mutable(x: Any) -> bool:
    if isinstance(x, (list, deque, dict, set)):
        return True
    if isinstance(x, (types.FunctionType, type)):
        return _is_users(x)
    if _random_state_of(x) is not None:
        return True
    if isinstance(x, (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
        return True
    if isinstance(x, (*PLAIN, tuple, frozenset, types.MethodType, functools.partial, Tensor)):
        return False
    if isinstance(x, (io.IOBase, logging.Logger, logging.Handler, types.CodeType)):
        return False
    if type(x).__module__.partition(".")[0] in ("torch", "triton", "builtins", "threading"):
        return False
    return _is_array(x) or hasattr(x, "__dict__") or bool(_slots(x))


def _random_state_of(x: Any) -> bytes | None:
    """Returns the state of a generator of random numbers; None for other objects."""
    numpy = sys.modules.get("numpy")
    if isinstance(x, torch.Generator):
        return pickle.dumps(x.get_state().tolist())
    if isinstance(x, random.Random):
        return pickle.dumps(x.getstate())
    if numpy is not None and isinstance(x, numpy.random.Generator):
        return pickle.dumps(x.bit_generator.state)
    if numpy is not None and isinstance(x, numpy.random.RandomState):
        return pickle.dumps(x.get_state())
    return None


def _set_random_state_of(x: Any, state: bytes) -> None:
    value = pickle.loads(state)
    if isinstance(x, random.Random):
        x.setstate(value)
    elif hasattr(x, "bit_generator"):
        x.bit_generator.state = value
    else:
        is_torch = isinstance(x, torch.Generator)
        x.set_state(torch.tensor(value, dtype=torch.uint8) if is_torch else value)


def _is_array(x: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray) and not x.dtype.hasobject


def _slots(x: Any) -> list[str]:
    found: list[str] = []
    for each in type(x).__mro__:
        names = vars(each).get("__slots__", ())
        found += [names] if isinstance(names, str) else list(names)
    return [n for n in found if n not in ("__dict__", "__weakref__") and not n.startswith("__")]


def contents(x: Any) -> dict[Any, Any]:
    """Returns what a mutable object holds now, by key."""
    if isinstance(x, (list, deque)):
        return dict(enumerate(x))
    if isinstance(x, dict):
        return dict(dict.items(x))
    if isinstance(x, set):
        return dict.fromkeys(x, True)
    if _is_array(x):
        return {"": x.tobytes()}
    if (state := _random_state_of(x)) is not None:
        return {"": state}
    if isinstance(x, types.FunctionType):
        return _contents_of_function(x)
    if isinstance(x, type):
        return {n: v for n, v in vars(x).items() if not _is_definition(n, v)}
    found = dict(getattr(x, "__dict__", {}))
    for name in _slots(x):
        if hasattr(x, name):
            found[name] = getattr(x, name)
    return found


def _is_definition(name: str, value: Any) -> bool:
    """Tells methods of a class and what Python keeps in it, which programs do not change."""
    kinds = (types.FunctionType, property, classmethod, staticmethod, types.MemberDescriptorType)
    is_pythons = name.startswith("__") or isinstance(value, (*kinds, types.GetSetDescriptorType))
    return is_pythons or name.startswith("_abc_")


def _contents_of_function(fn: types.FunctionType) -> dict[Any, Any]:
    found: dict[Any, Any] = {("attribute", name): value for name, value in vars(fn).items()}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            found["cell", name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in fn.__code__.co_names:
        if name in fn.__globals__:
            found["global", name] = fn.__globals__[name]
    return found


def put_back(x: Any, before: dict[Any, Any]) -> None:
    """Restores the contents of a mutable object."""
    if isinstance(x, list):
        x[:] = before.values()
    elif isinstance(x, (deque, set)):
        x.clear()
        x.update(before) if isinstance(x, set) else x.extend(before.values())
    elif isinstance(x, dict):
        kind: Any = OrderedDict if isinstance(x, OrderedDict) else dict
        kind.clear(x)
        kind.update(x, before)
    elif _is_array(x):
        x[...] = torch.frombuffer(bytearray(before[""]), dtype=torch.uint8).numpy().view(
            x.dtype
        ).reshape(x.shape)  # fmt: skip
    elif _random_state_of(x) is not None:
        _set_random_state_of(x, before[""])
    elif isinstance(x, types.FunctionType):
        _put_back_function(x, before)
    elif isinstance(x, type):
        for name in contents(x).keys() - before.keys():
            delattr(x, name)
        for name, value in before.items():
            if vars(x).get(name, _MISSING) is not value:
                setattr(x, name, value)
    else:
        for name in contents(x).keys() - before.keys():
            object.__delattr__(x, name)
        for name, value in before.items():
            if getattr(x, "__dict__", {}).get(name, _MISSING) is not value:
                if name in getattr(x, "__dict__", {}) or name not in _slots(x):
                    x.__dict__[name] = value
                else:
                    object.__setattr__(x, name, value)


def _put_back_function(fn: types.FunctionType, before: dict[Any, Any]) -> None:
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    for kind, name in contents(fn).keys() - before.keys():
        if kind == "attribute":
            delattr(fn, name)
        elif kind == "cell":
            del cells[name].cell_contents
        else:
            del fn.__globals__[name]
    for (kind, name), value in before.items():
        if kind == "attribute":
            setattr(fn, name, value)
        elif kind == "cell":
            cells[name].cell_contents = value
        elif fn.__globals__.get(name, _MISSING) is not value:
            fn.__globals__[name] = value


def _label(owner: Any, key: Any, place: int) -> str:
    if isinstance(owner, nn.Module) and key in _OF_MODULES:
        return ""
    if isinstance(owner, types.FunctionType):
        return "" if key == ("attribute", "__wrapped__") else str(key[1])
    return str(key) if isinstance(key, (str, int)) else str(place)


def _is_equal(old: Any, new: Any) -> bool:
    return isinstance(new, (str, bytes, int, float, complex, bool)) and (
        old == new or (old != old and new != new)
    )
