"""Programs of what is made of inputs: a parameter's name says what a program gets.

Programs of scores, log-probabilities and so on need not make them, one after the other, again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

Function = Callable[..., Any]
Made = Mapping[str, tuple[str, Function]]  # of what it is made, and how


def with_probabilities(scores):
    """Next to scores their (log-)probabilities ``log_s`` and ``p_s``."""
    found = dict(scores)
    for name in scores:
        found[f"log_{name}"] = name, lambda x: x.log_softmax(-1)
        found[f"p_{name}"] = name, lambda x: x.softmax(-1)
    return found


def of_inputs(fn, made, names=(), inputs=()):
    """A program of inputs alone, that makes what ``fn`` asks for, and the inputs' names."""
    parameters = inspect.signature(fn).parameters.values()
    names = names or [p.name for p in parameters if p.default is p.empty]
    steps = {}
    operands = list(inputs)

    def need(name):
        if name in made and name not in steps:
            of, make = made[name][0].split(), made[name][1]
            for x in of:
                need(x)
            steps[name] = of, make
        elif name not in made and name not in operands:
            operands.append(name)

    for name in names:
        need(name)
    if list(names) == operands and not isinstance(fn, functools.partial):
        return fn, operands  # one that breaks the graph must not be called by another

    def program(*given):
        values = dict(zip(operands, given, strict=True))
        for name, (of, make) in steps.items():
            values[name] = make(*[values[x] for x in of])
        return fn(*[values[x] for x in names])

    return program, operands
