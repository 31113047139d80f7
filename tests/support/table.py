"""Tables of programs that one test judges: a row is as short as what it varies.

A program is a function whose parameters name what it reads of the table's inputs, or of what the
table makes of them, such as scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.named_inputs import Program, given


@dataclass(frozen=True)
class Row:
    """A program of all inputs of its table, and what is promised of it."""

    name: str
    program: Program
    promised: Mapping[str, Any]
    is_quick: bool

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["promised"][name]
        except KeyError:
            raise AttributeError(name) from None


class Table:
    """Rows of programs, in order."""

    def __init__(
        self, inputs: str, made: Mapping[str, Program] | None = None, **promised: Any
    ) -> None:
        self.of_inputs = given(inputs, made)
        self.promised = promised
        self.rows: list[Row] = []

    def add(self, name: str, program: Program, is_quick: bool = True, **promised: Any) -> None:
        assert promised.keys() <= self.promised.keys(), promised
        promised = {**self.promised, **promised}
        self.rows.append(Row(name, self.of_inputs(program), promised, is_quick))

    def __call__(self, is_quick: bool = True, **promised: Any) -> Callable[[Program], Program]:
        """A decorator: the function is a program."""

        def decorate(fn: Program) -> Program:
            self.add(fn.__name__, fn, is_quick, **promised)
            return fn

        return decorate

    def each(
        self, changes: Mapping[str, Any], step: int = 1, **promised: Any
    ) -> Callable[[Program], Program]:
        """A decorator: the function is a program for each change, its first argument.

        A change may come with what is promised of it, by the name of the table's first promise.
        Every ``step``-th is quick.
        """
        first = next(iter(self.promised), "")

        def decorate(fn: Program) -> Program:
            for i, (name, change) in enumerate(changes.items()):
                more = promised
                if isinstance(change, tuple):
                    change, more = change[0], {**promised, first: change[1]}
                program = functools.partial(fn, change)
                self.add(f"{fn.__name__}-{name}", program, i % step == 0, **more)
            return fn

        return decorate

    def parametrized(self) -> Any:
        """A decorator of the test that judges the rows, which has an argument ``row``."""
        rows = [
            pytest.param(r, id=r.name, marks=[] if r.is_quick else [pytest.mark.slow])
            for r in self.rows
        ]
        return pytest.mark.parametrize("row", rows)
