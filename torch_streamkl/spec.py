"""Derives the flat arguments of an operator from the problem that its implementations take.

NOTE [Flat arguments]
A schema is flat and positional; implementations take a problem with two sides. The fields of the
problem and of a side decide the schema, the problem of a call, and the position of each argument.
So a new option is a new field, and the code that reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from operator import itemgetter
from typing import Any

from torch_streamkl.program.divergences import Functional

DIVERGENCE = "(P*(logP-logS))"
SIDES = ("student", "teacher")
_KINDS = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "float": "float", "bool": "bool", "str": "str",
    "int": "SymInt", "int | None": "SymInt?",
}  # fmt: skip
_NEEDED = object()


def option(default: Any, kind: str, in_schema: Any = _NEEDED) -> Any:
    """Declares a field whose type or default in the schema differs from its own.

    A default of None there stands for the field's.
    """
    shown = default if in_schema is _NEEDED else in_schema
    return field(default=default, metadata={"kind": kind, "default": shown})


@dataclass(frozen=True)
class Argument:
    """Describes one argument of the operator."""

    name: str
    kind: str  # in the schema
    default: Any  # there; _NEEDED where it has none
    of_problem: Any  # the default of the problem's field

    def __str__(self) -> str:
        text = f"{self.kind} {self.name}"
        return text if self.default is _NEEDED else f"{text}={self.default!r}"


def _argument(x: Any, name: str) -> Argument:
    if x.type == "Functional":
        return Argument(name, "str", DIVERGENCE, Functional)
    default = None if x.default is MISSING else x.default
    shown = x.metadata.get("default", _NEEDED if x.default is MISSING else default)
    return Argument(name, x.metadata.get("kind") or _KINDS[x.type], shown, default)


class Spec:
    """Lists the arguments of an operator on a problem, in the order of its schema.

    Tensors of both sides come first, then other tensors, then numbers; in each group, required
    ones come first.
    """

    def __init__(
        self,
        problem: type,
        side: type,
        *,
        first: Collection[str] = (),
        last: Collection[str] = (),
        without: Collection[str] = (),
    ) -> None:
        """Derives the arguments, in this order, from the fields of two dataclasses.

        Args:
            first: tensors of the problem that come before optional tensors of the sides.
            last: fields of a side that come after everything else.
            without: fields that the operator does not have.
        """
        own = [x for x in fields(side) if x.name not in without]
        shared = [x for x in fields(problem) if x.name not in (*SIDES, *without)]

        def by_field(is_one: Callable[[Any], bool]) -> list[Argument]:
            return [_argument(x, f"{each}_{x.name}") for x in own if is_one(x) for each in SIDES]

        def by_side(is_one: Callable[[Any], bool]) -> list[Argument]:
            return [_argument(x, f"{each}_{x.name}") for each in SIDES for x in own if is_one(x)]

        named = {x.name: _argument(x, x.name) for x in shared}
        tensors = by_side(_is_needed)
        tensors += [x for name, x in named.items() if name in first]
        tensors += by_field(lambda x: _is_optional(x) and x.name not in last)
        tensors += [named[x.name] for x in shared if _is_tensor(x) and x.name not in first]
        divergence, *numbers = [named[x.name] for x in shared if not _is_tensor(x)]
        options = [divergence, *by_field(lambda x: not _is_tensor(x)), *numbers]
        parts = (tensors, options, by_side(lambda x: x.name in last))
        self.tensors, self.options, self.last = (", ".join(map(str, part)) for part in parts)
        self.tensor_names, self.option_names, self.last_names = (
            tuple(x.name for x in part) for part in parts
        )
        self.arguments = {x.name: x for part in parts for x in part}
        self.names = tuple(self.arguments)
        self.index = {name: i for i, name in enumerate(self.names)}
        self._make, self._make_side = problem, side
        # every field, by its place in a list of the arguments and of what has no argument
        every = [(x, x.name) for x in fields(problem) if x.name not in SIDES]
        every += [(x, f"{each}_{x.name}") for each in SIDES for x in fields(side)]
        more = [(x, name) for x, name in every if name not in self.index]
        places = {name: i for i, name in enumerate((*self.names, *(name for _, name in more)))}
        self._defaults = [x.default for x in self.arguments.values()]
        self._more = [x.default for x, _ in more]
        self._converted = [(self.index[x], f) for x, f in _conversions(named.values())]
        self._of_sides = [
            itemgetter(*(places[f"{each}_{x.name}"] for x in fields(side))) for each in SIDES
        ]
        self._shared = itemgetter(
            *(places[x.name] for x in fields(problem) if x.name not in SIDES)
        )

    @property
    def schema(self) -> str:
        return ", ".join(x for x in (self.tensors, self.options, self.last) if x)

    def positions(self, *names: str) -> tuple[int, ...]:
        """Returns the positions of arguments."""
        return tuple(self.index[name] for name in names)

    def problem(self, *args: Any, **kwargs: Any) -> Any:
        """Builds the problem from an operator's flat arguments."""
        values = [*args, *self._defaults[len(args) :], *self._more]
        for name, x in kwargs.items():
            values[self.index[name]] = x
        for i, converted in self._converted:
            values[i] = converted(values[i])
        student, teacher = (self._make_side(*of_side(values)) for of_side in self._of_sides)
        return self._make(student, teacher, *self._shared(values))


def _conversions(
    arguments: Iterable[Argument],
) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Converts arguments whose type in the problem differs."""
    for x in arguments:
        if x.of_problem is Functional:
            yield x.name, Functional.of
        elif x.default is None and x.of_problem is not None:
            yield x.name, functools.partial(_or, x.of_problem)


def _or(default: Any, value: Any) -> Any:
    return default if value is None else value


def _is_tensor(x: Any) -> bool:
    found: bool = x.type.startswith("Tensor")
    return found


def _is_needed(x: Any) -> bool:
    return _is_tensor(x) and x.default is MISSING


def _is_optional(x: Any) -> bool:
    return _is_tensor(x) and x.default is not MISSING
