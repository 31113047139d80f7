"""Functions of row programs are traced once where nothing that they use can have changed."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_streamkl import row_program
from torch_streamkl.rows import interface, trace_cache

ELEMENTS = frozenset({"t", "s"})
SCALE = 0.5
SETTINGS = SimpleNamespace(scale=0.5)
CALLS: list[int] = []
X = torch.ones(2, 4, 6, 8)
Function = Callable[[Any], Any]


def _kl(e: Any, scale: float = 0.5) -> Any:
    p, s = (e.t * scale).log_softmax("key"), (e.s * scale).log_softmax("key")
    return (p.exp() * (p - s)).sum("key")


def _with_constant(scale: float) -> Function:
    return lambda e: _kl(e, scale)


def _with_global(e: Any) -> Any:
    return _kl(e, SCALE * math.sqrt(4.0))


def _with_an_import(e: Any) -> Any:
    import os

    return _kl(e, len(os.environ))


def _recursive(e: Any) -> Any:
    return _kl(e) if CALLS else _recursive(e)


KNOWN: dict[str, Function] = {
    "nothing": _kl,
    "a global": _with_global,
    "a constant": _with_constant(2.0),
    "parts": lambda e: sum(torch.where(e.t > b, e.t, 0.0).exp() for b in (0.0, 1.0)).sum("key"),
}
UNKNOWN: dict[str, Function] = {
    "settings": lambda e: _kl(e, SETTINGS.scale),
    "chance": lambda e: _kl(e, random.random()),
    "torch's chance": lambda e: _kl(e, torch.rand(1)),
    "a trace": lambda e: (CALLS.append(1), _kl(e))[1],
    "an import": _with_an_import,
    "an input": lambda e: _kl(e, float(input())),
    "recursion": _recursive,
    "a method": SimpleNamespace(of=_kl).of.__call__,
    "a tensor": functools.partial(_kl, scale=torch.tensor(2.0)),
}


def _key(function: Callable[..., Any]) -> Any:
    return trace_cache.key_of(function, ELEMENTS)


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_what_is_known(name: str) -> None:
    key = _key((KNOWN | UNKNOWN)[name])
    assert (key is not None) == (name in KNOWN)
    assert key == _key((KNOWN | UNKNOWN)[name])


def test_what_a_function_uses_tells_it_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = [_with_constant(2.0), _with_constant(3.0)]
    functions += [functools.partial(_kl, scale=x) for x in (2.0, 3.0, 0.0, -0.0, 3, True)]
    keys = [_key(f) for f in (*functions, _with_global)]
    assert len(set(keys)) == len(keys)
    assert _key(_with_constant(2.0)) == keys[0]
    monkeypatch.setitem(_with_global.__globals__, "SCALE", 0.25)
    assert _key(_with_global) != keys[-1]
    # an attribute that is an element here may be anything's elsewhere
    assert trace_cache.key_of(_kl, frozenset({"t"})) is None


class _Helper:
    pass


def _scale(x: Any) -> Any:
    return x


HELPER, NUMBERS, NAMED = _Helper(), [2.0], {"mul": 2.0}
_default: Function = lambda e, c=2.0: (e.s * c).sum("key")  # noqa: E731
USED: dict[str, tuple[Function, Callable[[float], None]]] = {
    "a function's attribute": (
        lambda e: (_scale(e.s) * _scale.mul).sum("key"), lambda v: setattr(_scale, "mul", v)
    ),
    "an object's": (lambda e: (e.s * HELPER.exp).sum("key"), lambda v: setattr(HELPER, "exp", v)),
    "a class's": (lambda e: (e.s * _Helper.log).sum("key"), lambda v: setattr(_Helper, "log", v)),
    "a list": (
        lambda e: (e.s * NUMBERS[0]).sum("key"), lambda v: NUMBERS.__setitem__(0, v)
    ),
    "a dict": (
        lambda e: (e.s * NAMED["mul"]).sum("key"), lambda v: NAMED.__setitem__("mul", v)
    ),
    "a default": (
        lambda e, c=NUMBERS: (e.s * c[0]).sum("key"), lambda v: NUMBERS.__setitem__(0, v)
    ),
    "a default's value": (_default, lambda v: setattr(_default, "__defaults__", (v,))),
    "a global": (
        lambda e: (e.s * SCALE).sum("key"), lambda v: globals().__setitem__("SCALE", v)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", USED)
def test_whatever_a_function_uses_may_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a function may depend on is in its key, or it is traced in every call."""
    monkeypatch.setattr(interface, "_known", {})
    monkeypatch.setitem(globals(), "SCALE", SCALE)
    function, change = USED[name]
    for value in (2.0, 3.0):
        change(value)
        got = row_program(function, dots={"s": (X, X)})
        assert torch.equal(got, torch.full((2, 4, 6), 48.0 * value))


def test_what_is_known_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_known", {})
    runs: list[Any] = []
    trace = interface.trace
    monkeypatch.setattr(interface, "trace", lambda *a: runs.append(a) or trace(*a))
    x = X.clone().requires_grad_()
    for scale in (0.5, 1.0, 0.5):
        row_program(_with_constant(scale), dots={"t": (x, x), "s": (x, x)})
    assert len(runs) == 2
    # where one side has no gradient, the program is another one
    row_program(_with_constant(0.5), dots={"t": (X, X), "s": (x, x)})
    assert len(runs) == 3
