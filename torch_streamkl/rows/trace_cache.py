"""Computes cache keys for traced row-program functions.

Tracing takes a millisecond, in a call that may take six. The result depends on the function's code
and on the values that the code reads from outside. The key covers these values if they are
elements and their operations, torch, math, numbers, and functions of which the same is true. A
function that reads anything else is traced in every call.
"""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional

from torch_streamkl.rows.functions import OPERATION_NAMES

MODULES = (torch, torch.nn.functional, math)
PURE = {"abs", "bool", "dict", "enumerate", "float", "int", "len", "list", "max", "min", "range"}
PURE |= {"reversed", "sum", "tuple", "zip"}
NAMES = OPERATION_NAMES | set(dir(math)) | {"nn", "functional"}  # of attributes
MOST_DEPTH = 8  # of functions in functions


class _Unknown(Exception):
    """Raised if a function may depend on something that the cache key does not hold."""


def key_of(function: Callable[..., Any], elements: frozenset[str]) -> Any:
    """Returns a key, equal for functions that do the same to elements of these names; None: not
    known.
    """
    try:
        key = _of_value(function, elements, MOST_DEPTH)
        hash(key)
    except (_Unknown, TypeError):
        return None
    return key


def _of_value(value: Any, elements: frozenset[str], depth: int) -> Any:
    if not depth:
        raise _Unknown
    if value is None or type(value) in (bool, int, float, str):
        return type(value), repr(value)  # 0.0 and -0.0 differ
    if any(value is module for module in MODULES):
        return value.__name__
    of = functools.partial(_of_value, elements=elements, depth=depth - 1)
    if getattr(value, "__dict__", None):  # a function's attribute may be named as an operation
        raise _Unknown
    if type(value) is functools.partial:
        given = sorted(value.keywords.items())
        return of(value.func), *map(of, value.args), *((name, of(x)) for name, x in given)
    if type(value) is tuple:
        return ("tuple", *map(of, value))
    if type(value) is not FunctionType:
        raise _Unknown
    found = [value.__code__, *map(of, value.__defaults__ or ())]
    found += [(name, of(x)) for name, x in sorted((value.__kwdefaults__ or {}).items())]
    try:
        found += [of(cell.cell_contents) for cell in value.__closure__ or ()]
    except ValueError:  # a variable that has no value yet
        raise _Unknown from None
    for name in sorted(set(_names(value.__code__))):
        if name in value.__globals__:
            found.append((name, of(value.__globals__[name])))
        elif hasattr(builtins, name):
            if name not in PURE and name not in NAMES:
                raise _Unknown
        elif name not in elements and name not in NAMES:
            raise _Unknown
    return tuple(found)


def _names(code: CodeType) -> Iterator[str]:
    """Lists global variables and attributes, those of functions inside included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
