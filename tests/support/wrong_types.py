"""Calls of a public function with every argument of a wrong type, generated from its signature.

`calls` takes any function whose arguments are annotated; a legal call of it says which tensors
it wants. A value whose kind the annotation does not name has to be refused, with a ValueError,
TypeError or NotImplementedError that names the argument and shows what came.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

ERRORS = (ValueError, TypeError, NotImplementedError)
# Values, and the kinds that they are of: an annotation that names one of those takes the value,
# or refuses it as it refuses any other.
VALUES = {
    "a string": ("x", frozenset({"str"})),
    "a name with a typo": ("meann", frozenset({"str"})),
    "nothing": (None, frozenset({"None"})),
    "True": (True, frozenset({"bool"})),
    "an integer": (3, frozenset({"int", "float"})),
    "a fraction": (2.5, frozenset({"float"})),
    "nan": (math.nan, frozenset({"float"})),
    "infinity": (math.inf, frozenset({"float"})),
    "a large integer": (10**400, frozenset({"int", "float"})),
    "a complex number": (1j, frozenset()),
    "a list": ([1.0], frozenset({"list"})),
    "an empty tuple": ((), frozenset()),
    "three integers": ((1, 2, 3), frozenset()),
    "a dictionary": ({"a": 1}, frozenset({"dict"})),
    "a function": (len, frozenset({"Callable"})),
    "an object": (object(), frozenset()),
    "a type": (float, frozenset()),
    "a dtype": (torch.float32, frozenset()),
    "an array": (torch.ones(3).numpy(), frozenset()),
    "a tensor": (torch.ones(97), frozenset({"Tensor"})),
    "a complex tensor": (torch.ones(97, dtype=torch.complex64), frozenset({"Tensor"})),
    "a sparse tensor": (torch.ones(2, 3).to_sparse(), frozenset({"Tensor"})),
    "a nested tensor": (
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        frozenset({"Tensor"}),
    ),
    "a parameter": (torch.nn.Parameter(torch.ones(97)), frozenset({"Tensor"})),
}


@dataclass(frozen=True)
class Public:
    """A public function and one legal call of it."""

    name: str
    function: Callable[..., Any]
    legal: Mapping[str, Any]
    # by argument, where errors say something else: a regular expression
    called: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, Any] | None = None  # by default the function's

    def kinds(self):
        """Arguments, and the kinds that their annotations name."""
        found = self.annotations
        if found is None:
            parameters = inspect.signature(self.function).parameters.values()
            found = {p.name: p.annotation for p in parameters if p.kind is not p.VAR_KEYWORD}
        for name, annotation in found.items():
            text = annotation if isinstance(annotation, str) else str(annotation)
            yield name, frozenset(re.findall(r"[A-Za-z]+", text))


def problems(public):
    """Wrong calls that are accepted, or whose errors do not say what has to be said."""
    public.function(**public.legal)
    found = []
    for name, kinds in public.kinds():
        for what, (value, own) in VALUES.items():
            told = _told(public, name, value, is_legal=bool(own & kinds))
            if told is not None:
                found.append(f"{public.name}({name}={what}): {told}")
    return found


def _told(public, name, value, is_legal):
    try:
        public.function(**{**public.legal, name: value})
    except ERRORS as error:
        text = str(error)
        if not re.search(public.called.get(name, rf"\b{name}\b"), text):
            return f"does not name the argument: {type(error).__name__}: {text}"
        # of arguments that do not go together, or that have no gradient, nothing else came
        if not re.search(r"\bgot\b|\bgets no gradient\b|\bneeds?\b", text):
            return f"does not say what came: {text}"
        return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None if is_legal else "accepted"
