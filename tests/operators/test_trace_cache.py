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
from torch import Tensor

from torch_streamkl import row_program
from torch_streamkl.rows import interface, trace_cache

ELEMENTS = frozenset({"t", "s"})
SCALE = 0.5
SETTINGS = SimpleNamespace(scale=0.5)
CALLS: list[int] = []


def _kl(e: Any, scale: float = 0.5) -> Any:
    p, s = (e.t * scale).log_softmax("key"), (e.s * scale).log_softmax("key")
    return (p.exp() * (p - s)).sum("key")


def _with_constant(scale: float) -> Callable[[Any], Any]:
    def of(e: Any) -> Any:
        return _kl(e, scale)

    return of


def _with_global(e: Any) -> Any:
    return _kl(e, SCALE * math.sqrt(4.0))


def _with_parts(e: Any) -> Any:
    return sum(torch.where(e.t > bound, e.t, 0.0).exp() for bound in (0.0, 1.0)).sum("key")


def _with_settings(e: Any) -> Any:
    return _kl(e, SETTINGS.scale)


def _with_chance(e: Any) -> Any:
    return _kl(e, random.random())


def _with_torchs_chance(e: Any) -> Any:
    return _kl(e, torch.rand(1))


def _with_a_trace(e: Any) -> Any:
    CALLS.append(1)
    return _kl(e)


def _with_an_import(e: Any) -> Any:
    import os

    return _kl(e, len(os.environ))


def _with_an_input(e: Any) -> Any:
    return _kl(e, float(input()))


def _recursive(e: Any) -> Any:
    return _kl(e) if CALLS else _recursive(e)


def _key(function: Callable[..., Any]) -> Any:
    return trace_cache.key_of(function, ELEMENTS)


@pytest.mark.parametrize("function", [_kl, _with_global, _with_parts, _with_constant(2.0)])
def test_known(function: Callable[..., Any]) -> None:
    assert _key(function) is not None
    assert _key(function) == _key(function)


@pytest.mark.parametrize(
    "function",
    [
        _with_settings, _with_chance, _with_torchs_chance, _with_a_trace, _with_an_import,
        _with_an_input, _recursive, SimpleNamespace(of=_kl).of.__call__, functools.partial(
            _kl, scale=torch.tensor(2.0)
        ),
    ],
)  # fmt: skip
def test_unknown(function: Callable[..., Any]) -> None:
    assert _key(function) is None


def test_what_a_function_uses_tells_it_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = [_with_constant(2.0), _with_constant(3.0), functools.partial(_kl, scale=2.0)]
    functions += [functools.partial(_kl, scale=x) for x in (3.0, 0.0, -0.0, 3, True)]
    keys = [_key(f) for f in (*functions, _with_global)]
    assert all(a != b or i == j for i, a in enumerate(keys) for j, b in enumerate(keys))
    assert _key(_with_constant(2.0)) == keys[0]
    monkeypatch.setitem(_with_global.__globals__, "SCALE", 0.25)
    assert _key(_with_global) != keys[-1]
    # an attribute that is an element here may be anything's elsewhere
    assert trace_cache.key_of(_kl, frozenset({"t"})) is None


def _value(function: Callable[..., Any], tensors: list[Tensor]) -> Tensor:
    dots = {"t": (tensors[0], tensors[1]), "s": (tensors[2], tensors[3])}
    value: Tensor = row_program(function, dots=dots)
    return value


def test_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients are those of the function as it is now, and a known one is not run."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(4)]
    monkeypatch.setattr(interface, "_known", {})
    runs: list[Any] = []
    trace = interface.trace
    monkeypatch.setattr(interface, "trace", lambda *a: runs.append(a) or trace(*a))
    for scale in (0.5, 1.0, 0.5):
        expected = _value(functools.partial(_kl, scale=scale), tensors)
        for function in (_with_constant(scale), _with_settings, _with_global):
            monkeypatch.setattr(SETTINGS, "scale", scale)
            monkeypatch.setitem(_with_global.__globals__, "SCALE", scale / 2)
            assert torch.equal(_value(function, tensors), expected)
    assert len(runs) == 3 * 2 + 3
    # without gradients, and where one side has none, programs are others
    runs.clear()
    detached = [x.detach() for x in tensors]
    for given in (detached, [*detached[:2], *tensors[2:]]):
        _value(_kl, given)
    assert len(runs) == 2
