"""Combines formulas, and lines up the axes of tensors that are combined position by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_streamkl.fx_passes.domain.row_elements import (
    Axes,
    Chosen,
    Dim,
    Dot,
    Formula,
    Placed,
    Sum,
)
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import Size, expression, is_one

CONDITIONS = {"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"}


def is_row_level(x: Placed, axes: Axes) -> bool:
    """Returns whether the keys were summed over."""
    key = x.formula.key
    return key is not None and not set(axes.atoms((key,))) & set(axes.atoms(x.formula.axes))


def is_block_level(x: Placed, axes: Axes) -> bool:
    """Returns whether keys were summed over in blocks, so that the blocks remain."""
    f = x.formula
    while f.op == "detach":
        (f,) = f.args
    if f.op != "reduce" or f.key is None:
        return False
    keys, over = set(axes.atoms((f.key,))), set(axes.atoms(f.data.over))
    return bool(keys & over) and not keys <= over


class ElementAlgebra:
    """Combines placed formulas, whose axes are in ``axes``."""

    axes: Axes
    chosen: dict[int, Chosen]  # by the axis of the entries

    def aligned(self, *operands: Placed) -> tuple[Dim, ...]:
        """Returns the places of axes after tensors are aligned by position."""
        rank = max(len(x.dims) for x in operands)
        raised = [((),) * (rank - len(x.dims)) + x.dims for x in operands]
        result: list[Dim] = []
        for position in zip(*raised, strict=True):
            given = [dim for dim in position if self.axes.atoms(dim)]
            if any(self.chosen_in(dim) != self.chosen_in(given[0]) for dim in given):
                raise Unsupported("chosen entries of rows meet a tensor of as many")
            for other in given[1:]:
                self.axes.unify(given[0], other)
            result.append(self.axes.atoms(given[0]) if given else ())
        self._check_places(result)
        return tuple(result)

    def _check_places(self, dims: Sequence[Dim]) -> None:
        """Each axis is in one place; so are keys and the entries of them, which are such keys."""
        places = [set(self.axes.atoms(dim)) for dim in dims]
        for axis, chosen in self.chosen.items():
            keys = self.axes.atoms(chosen.hits.dims[chosen.dim])
            if {axis, *keys} <= set().union(*places):
                raise Unsupported("chosen entries of a row meet all its keys")
        if sum(map(len, places)) > len(set().union(*places)):
            raise Unsupported("an axis of the scores meets itself in another place")

    def chosen_in(self, dim: Dim) -> int | None:
        """Returns the axis of chosen entries in a dimension, if it is one."""
        atoms = self.axes.atoms(dim)
        for axis in self.chosen:
            if set(atoms) & set(self.axes.atoms((axis,))):
                if atoms != (axis,):
                    raise Unsupported("chosen entries of rows are flattened")
                return axis
        return None

    def combined(self, op: str, *operands: Placed, data: Any = None) -> Placed:
        """Returns a pointwise operation by its name in `program.operations`."""
        dims = self.aligned(*operands)
        return Placed(self.formula(op, *(x.formula for x in operands), data=data), dims)

    def formula(self, op: str, *args: Formula, data: Any = None) -> Formula:
        return Formula(
            op,
            args,
            data,
            frozenset().union(*(a.axes for a in args)),
            frozenset().union(*(a.grad_flows for a in args)),
            frozenset().union(*(a.dots for a in args)),
            self._common_key(args),
            op in CONDITIONS or (op == "where" and all(a.is_bool for a in args[1:])),
        )

    def without_gradient(self, x: Placed) -> Placed:
        if not x.formula.grad_flows:
            return x
        formula = replace(self.formula("detach", x.formula), grad_flows=frozenset())
        return replace(x, formula=formula)

    def _common_key(self, args: Sequence[Formula]) -> int | None:
        keys = {self.axes.atoms((a.key,)) for a in args if a.key is not None}
        if len(keys) > 1:
            raise Unsupported("values that were summed over different axes meet")
        (key,) = keys or {()}
        return key[0] if key else None

    def reduced(
        self,
        kind: str,
        x: Placed,
        dims: Sequence[int],
        keepdim: bool,
        scale: float = 1.0,
        divisors: tuple[Size, ...] = (),
    ) -> Placed:
        """Returns a sum or log-sum-exp over dimensions of a tensor."""
        x = self._of_all_keys(kind, x, dims)
        over = self.axes.atoms(a for d in dims for a in x.dims[d])
        formula = x.formula
        if not formula.dots:
            raise Unsupported("a sum of what is not made from scores")
        key = self._summed_key(kind, x, over)
        for d in dims:
            if not self.axes.atoms(x.dims[d]) and not is_one(x.shape[d]):
                count = expression(x.shape[d])
                if kind == "logsumexp" or not isinstance(count, int):
                    raise Unsupported("a sum over a dimension along which nothing varies")
        if kind != "sum" and len(over) != 1:
            raise Unsupported("a softmax over a dimension that is not one axis of the scores")
        what = Sum(kind, over, x.dims, x.shape, tuple(dims), keepdim, scale, divisors)
        removed = set(over)
        axes = frozenset(self.axes.atoms(formula.axes)) - removed
        result = Formula(
            "reduce", (formula,), what, axes, formula.grad_flows, formula.dots, key, False
        )
        kept = tuple(
            () if d in dims else dim for d, dim in enumerate(x.dims) if keepdim or d not in dims
        )
        return Placed(result, kept)

    def _of_all_keys(self, kind: str, x: Placed, dims: Sequence[int]) -> Placed:
        """Chosen entries that are reduced, as elements of all keys.

        Rows choose keys of their own: a sum over rows of the first entries is of different keys.
        """
        over = set(self.axes.atoms(a for d in dims for a in x.dims[d]))
        for d in range(len(x.dims)):
            axis = self.chosen_in(x.dims[d])
            if axis is None:
                continue
            chosen = self.chosen[axis]
            if d not in dims:
                if over & set(self.axes.atoms(chosen.hits.formula.axes)):
                    raise Unsupported("chosen entries are summed over their rows")
                continue
            nothing = Formula("const", (), 0.0 if kind == "sum" else -math.inf)
            formula = self.formula("where", chosen.hits.formula, x.formula, nothing)
            places, shape = list(x.dims), list(x.shape)
            places[d], shape[d] = chosen.hits.dims[chosen.dim], chosen.hits.shape[chosen.dim]
            x = Placed(formula, tuple(places), tuple(shape))
        return x

    def _summed_key(self, kind: str, placed: Placed, over: Dim) -> int | None:
        """The axis of the keys, if it is among what is summed over.

        Before a softmax says which axis it is, a sum over the last dimension is taken for one over
        keys, if that is an axis of one operand only; any other is a sum over heads so far.
        """
        x = placed.formula
        if x.key is not None:
            keys = self.axes.atoms((x.key,))
            if not set(keys) <= set(self.axes.atoms(x.axes)):
                raise Unsupported("a sum over rows: it stays as it is")  # the user's own code
            if kind != "sum" and over != keys:
                raise Unsupported("softmaxes over different axes")
            inside = [a for a in keys if a in over]
            if inside and inside != list(keys[-len(inside) :]):
                raise Unsupported("a sum over keys that are not next to each other")
            return x.key
        if kind != "sum":
            return over[0] if len(over) == 1 else None
        last = next((d for d in reversed(placed.dims) if self.axes.atoms(d)), ())
        candidates = [
            a
            for side in ("rhs", "lhs")
            for a in self.axes.atoms(last)
            if a in over and self.is_only_of(side, a, x)
        ]
        return candidates[-1] if candidates else None

    def is_only_of(self, side: str, atom: int, x: Formula) -> bool:
        """Returns whether one operand of every product has an axis, and the other has not."""
        other = {"lhs": "rhs", "rhs": "lhs"}[side]
        return all(
            atom in self.operand_axes(dot, side) and atom not in self.operand_axes(dot, other)
            for dot in x.dots
        )

    def operand_axes(self, dot: Dot, side: str) -> Dim:
        ref = dot.lhs if side == "lhs" else dot.rhs
        dims = dot.dims(ref.layout, self.axes)
        return self.axes.atoms(a for dim in dims for a in dim if a >= 0)
