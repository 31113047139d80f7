"""Chooses numbers for symbolic sizes: those that the graph was traced with, or smaller ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from torch_streamkl.fx_passes.fx_utils.nodes import example
from torch_streamkl.fx_passes.validation.options import NotChecked

log = logging.getLogger("torch_streamkl.rewrite")
SymNumber = (torch.SymInt, torch.SymFloat, torch.SymBool)

DATA_DECIDES = (
    "the data decides its sizes, as where a mask selects rows or entries; torch_streamkl.verify() "
    "checks it with your inputs"
)


class Sizes:
    """Maps symbols to numbers: ``smaller`` ones, or the hints of the graph."""

    def __init__(self, smaller: Mapping[sympy.Symbol, int] | None = None) -> None:
        self.smaller = dict(smaller or {})

    def number(self, x: Any) -> Any:
        """Converts a number to a Python number; NotChecked if only the data decide it."""
        if not isinstance(x, SymNumber):
            return x
        node = x.node
        constant = node.maybe_as_int() if isinstance(x, torch.SymInt) else None
        if constant is not None:
            return constant
        if self.smaller:
            known = node.expr.xreplace(self.smaller)
            if not known.free_symbols:
                kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(x)]
                return kind(known)
        if node.hint is None:
            raise NotChecked(DATA_DECIDES)
        return node.hint

    def numbers(self, xs: Any) -> list[int]:
        return [int(self.number(x)) for x in xs]

    def is_known(self, value: object) -> bool:
        """Returns whether a value is made of numbers that do not depend on data."""
        if isinstance(value, (tuple, list)):
            return len(value) > 0 and all(self.is_known(x) for x in value)
        if isinstance(value, SymNumber):
            return value.node.hint is not None
        return isinstance(value, (bool, int, float))

    def known(self, value: Any) -> Any:
        """Returns a value of which `is_known` holds, without symbols."""
        if isinstance(value, (tuple, list)):
            parts = [self.known(x) for x in value]
            return torch.Size(parts) if isinstance(value, torch.Size) else type(value)(parts)
        return self.number(value)


def smaller_sizes(graph: fx.Graph) -> list[Sizes]:
    """Returns sizes with every symbol a half, a quarter, ... of its hint, where the guards allow
    it.
    """
    try:
        return _smaller_sizes(graph)
    except AttributeError:  # private parts of symbolic shapes, in another torch
        log.warning("checks of dynamic shapes run at the sizes of the example", exc_info=True)
        return []


def _smaller_sizes(graph: fx.Graph) -> list[Sizes]:
    shapes, symbols = None, {}
    for node in graph.find_nodes(op="placeholder"):
        value = example(node)
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt) and size.node.hint is not None:
                shapes = size.node.shape_env
                for symbol in size.node.expr.free_symbols:
                    symbols[symbol] = shapes.size_hint(symbol)
    if shapes is None:
        return []
    found = []
    for factor in (2, 4, 8, 16, 32, 64):
        fewer = _divided({s: int(hint) for s, hint in symbols.items()}, factor)
        if _is_allowed(fewer, shapes):
            found.append(Sizes({s: sympy.Integer(size) for s, size in fewer.items()}))
    return found


def _divided(hints: Mapping[sympy.Symbol, int], factor: int) -> dict[sympy.Symbol, int]:
    """Divides sizes by a factor, down to 8; different sizes stay different."""
    found: dict[sympy.Symbol, int] = {}
    for symbol, hint in sorted(hints.items(), key=lambda item: item[1]):
        size = max(hint // factor, min(hint, 8))
        while size in found.values() and size < hint:
            size += 1
        found[symbol] = size
    return found


def _is_allowed(sizes: Mapping[sympy.Symbol, int], shapes: Any) -> bool:
    """Whether what the compiled program requires of its sizes holds."""
    given = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
    for symbol, size in sizes.items():
        allowed = shapes.var_to_range.get(symbol)
        if allowed is not None and not bool(allowed.lower <= size <= allowed.upper):
            return False
    return all(guard.expr.xreplace(given) in (True, sympy.true) for guard in shapes.guards)
