"""Programs of inputs by name: a function's parameters say which of a test's inputs it is of."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

Program = Callable[..., Any]


def given(inputs: str, made: Mapping[str, Program] | None = None) -> Callable[[Program], Program]:
    """A decorator that makes a function of some inputs one of all of them.

    Parameters that are keywords alone are no inputs. ``made`` has functions of inputs, and the
    names of the tensors that they return: those of scores for example, which programs then begin
    with.
    """

    def decorate(fn: Program) -> Program:
        parameters = inspect.signature(fn).parameters
        wanted = [n for n, x in parameters.items() if x.kind is not x.KEYWORD_ONLY]
        names, needed = inputs.split(), []
        for results, make in (made or {}).items():
            if set(results.split()) & set(wanted):
                needed.append((make, [names.index(n) for n in inspect.signature(make).parameters]))
                names += results.split()
        places = [names.index(n) for n in wanted]

        @functools.wraps(fn)
        def program(*values: Any) -> Any:
            for make, operands in needed:
                values = (*values, *make(*(values[i] for i in operands)))
            return fn(*(values[i] for i in places))

        return program

    return decorate
