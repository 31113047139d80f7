"""Inserts a row program's operator call into the user's graph, and replaces its sums by the
results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.bounds import checked_ids
from torch_streamkl.fx_passes.analysis.elements.operands import is_symbolic_number
from torch_streamkl.fx_passes.capture.retrace import outer_node
from torch_streamkl.fx_passes.domain.row_elements import Axes, Dim, Formula
from torch_streamkl.fx_passes.domain.tensor_ref import TensorRef
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import example, storage_of
from torch_streamkl.fx_passes.fx_utils.sizes import Size, is_one, is_unknown, provably_equal
from torch_streamkl.fx_passes.fx_utils.strides import with_strides_of
from torch_streamkl.fx_passes.lowering.operands import (
    _grouped,
    _permuted,
    _reshaped,
    _squeezed,
    materialise,
)
from torch_streamkl.fx_passes.planning.row_plan import Captured, Output, RowPlan
from torch_streamkl.rows import op
from torch_streamkl.rows.program import COLUMNS, KEY, PAIR, ROW

Slot = tuple[object, ...]  # ("axis", atom), ("dim", contracted axis, stride) or ("one", number)


def emit(
    build: Builder,
    plan: RowPlan,
    outer: Mapping[fx.Node, fx.Node],
    written: Container[int | None],
) -> dict[fx.Node, fx.Node]:
    """Inserts the call, and returns the replacement of each of the user's nodes.

    ``written`` is the memory that the graph writes to. The operator keeps its results for the
    backward. So if they may be written to, here or by who gets them from the graph, the user's
    code gets a copy. Outputs never alias each other.
    """
    lowering = _Lowering(build, plan, outer)
    tensors: list[fx.Node] = []
    for i in range(len(plan.dots)):
        tensors += [lowering.rows(i), lowering.columns(i)]
    tensors = lowering.of_one_type(tensors)
    tensors += [lowering.captured(c) for c in plan.captures]
    call = build.call(op.row_program, tensors, plan.program.text, bool(plan.grad_flows), "auto")
    values = {
        f: (build.call(operator.getitem, call, slot), heads)
        for f, (slot, heads) in plan.sums.items()
    }
    constants: dict[Formula, tuple[fx.Node, Dim]] = {}
    if plan.grad_flows and not all(o.placed.formula.grad_flows for o in plan.outputs):
        constants = {f: (build.method("detach", x), heads) for f, (x, heads) in values.items()}
    results: dict[fx.Node, fx.Node] = {}
    returned = {storage_of(x) for x in build.graph.output_node().all_input_nodes}
    made: set[int | None] = set()
    for o in plan.outputs:
        is_constant = bool(plan.grad_flows) and not o.placed.formula.grad_flows
        x = lowering.result(o, constants if is_constant else values)
        memory = storage_of(o.node)
        if memory in written or memory in returned or storage_of(x) in made:
            x = build.method("clone", x)
        made.add(storage_of(x))
        results[o.node] = x
    return results


class _Lowering:
    """Inserts the tensors of one call."""

    def __init__(self, build: Builder, plan: RowPlan, outer: Mapping[fx.Node, fx.Node]) -> None:
        self.build, self.plan, self.outer = build, plan, outer
        self.axes: Axes = plan.elements.axes
        # where symbolic sizes are read
        self.tensors = [outer_node(x.node, outer) for d in plan.dots for x in (d.lhs, d.rhs)]

    def of_one_type(self, tensors: Sequence[fx.Node]) -> list[fx.Node]:
        """Casts operands to the narrowest dtype that represents all of them exactly."""
        dtypes = [_value(x).dtype for x in tensors]
        widest = dtypes[0]
        for dtype in dtypes[1:]:
            widest = torch.promote_types(widest, dtype)
        if not widest.is_floating_point or widest.itemsize == 1:
            raise Unsupported(f"scores of {widest} operands")
        return [
            x if dtype == widest else self.build.method("to", x, widest)
            for x, dtype in zip(tensors, dtypes, strict=True)
        ]

    def rows(self, i: int) -> fx.Node:
        groups = self.plan.groups
        x, slots, sizes = self._operand(i, is_rows=True)
        return self._arranged(
            x, slots, sizes, [groups.batch, groups.heads[i], groups.rows], expanded=(0, 1, 2)
        )

    def columns(self, i: int) -> fx.Node:
        groups = self.plan.groups
        x, slots, sizes = self._operand(i, is_rows=False)
        heads = list(groups.heads[i])
        while heads and ("axis", heads[-1]) not in slots:
            heads.pop()  # shared by the query heads
        return self._arranged(
            x, slots, sizes, [groups.batch, tuple(heads), groups.keys], expanded=(0, 1)
        )

    def _operand(self, i: int, *, is_rows: bool) -> tuple[fx.Node, list[Slot], list[Size]]:
        dot = self.plan.dots[i]
        side = "lhs" if is_rows != self.plan.is_swapped[i] else "rhs"
        ref: TensorRef = getattr(dot, side)
        grad_flows = ref.grad and (dot, side) in self.plan.grad_flows
        x = materialise(self.build, replace(ref, grad=grad_flows), self.outer)
        slots: list[Slot] = []
        sizes: list[Size] = []
        for dim in ref.layout:
            if dim == ():
                slots.append(("one", len(slots)))
                sizes.append(1)
            for piece in dim:
                if piece.axis < 0:
                    slots.append(("dim", -piece.axis, piece.stride))
                    sizes.append(piece.size)
                    continue
                (axis,) = dot.axes[piece.axis]
                for atom in self.axes.digits(axis, piece.size, piece.stride):
                    slots.append(("axis", atom))
                    sizes.append(self.axes.size(atom))
        return x, slots, sizes

    def captured(self, c: Captured) -> fx.Node:
        """Inserts a captured tensor in the dimensions of its kind."""
        groups = self.plan.groups
        if is_symbolic_number(c.node):
            x = self._number(c.node)
        else:
            grad_flows = c.grad_flows and c.node in self.plan.grad_flows
            x = materialise(self.build, TensorRef(c.node, (), (), grad_flows), self.outer)
        slots: list[Slot] = []
        sizes: list[Size] = []
        if c.kind == COLUMNS and c.node in self.plan.elements.unchecked_ids:
            size, along = self.plan.elements.unchecked_ids[c.node]
            x = self.build.call(checked_ids, x, self.build.size(size, self.tensors), along)
        if c.kind == COLUMNS:
            x = self._ids_last(x, c.ids_dim)
        for dim in c.dims:
            if not dim:
                slots.append(("one", len(slots)))
                sizes.append(1)
            for atom in dim:
                slots.append(("axis", atom))
                sizes.append(self.axes.size(atom))
        wanted = {
            ROW: [groups.batch, c.heads, groups.rows],
            KEY: [groups.batch, c.heads, groups.keys],
            PAIR: [groups.batch, c.heads, groups.rows, groups.keys],
            COLUMNS: [groups.batch, c.heads, groups.rows],
        }[c.kind]
        if c.kind == COLUMNS:
            slots.append(("dim", 0, 1))
            sizes.append(_value(x).shape[-1])
        return self._arranged(x, slots, sizes, wanted, expanded=())

    def _number(self, node: fx.Node) -> fx.Node:
        """Converts a Python number to a tensor of at least 32 bits, as arithmetic on narrower
        types has.

        AOTAutograd makes tensors of symbolic floats where they meet a tensor in arithmetic.
        Anywhere else, as in `torch.full`, it makes them constants: a compilation for each value.
        """
        operand = _value(self.tensors[0])
        dtype = torch.float64 if operand.dtype == torch.float64 else torch.float32
        number = outer_node(node, self.outer)
        one = self.build.call(torch.ones, (), dtype=dtype, device=operand.device)
        return self.build.call(torch.mul, one, number)

    def _ids_last(self, x: fx.Node, dim: int) -> fx.Node:
        """Ids of a row in the last dimension."""
        rank = _value(x).dim()
        return _permuted(self.build, x, [*(d for d in range(rank) if d != dim), dim])

    def _arranged(
        self,
        x: fx.Node,
        slots: list[Slot],
        sizes: list[Size],
        wanted: Sequence[Dim],
        expanded: Sequence[int],
    ) -> fx.Node:
        """Reshapes a tensor to one dimension for each group of axes, and one for the contracted
        axes.

        A group of which the tensor has nothing is of size 1, or whole where it is to be expanded.
        """
        build = self.build
        x = _reshaped(build, x, sizes, self.tensors)
        contracted = sorted(
            (s for s in slots if s[0] == "dim"), key=lambda s: (s[1], -_hint(s[2]))
        )
        groups: list[list[Slot]] = []
        for i, axes in enumerate(wanted):
            group: list[Slot] = [("axis", a) for a in axes]
            has_some = any(s in slots for s in group)
            groups.append(group if has_some or i in expanded else [])
        if contracted:
            groups.append(list(contracted))
        flat = [s for group in groups for s in group]
        present = [s for s in flat if s in slots]
        ones = [s for s in slots if s[0] == "one"]
        if len(present) + len(ones) != len(slots):
            raise Unsupported("a tensor varies along a dimension that it cannot have")
        x = _permuted(build, x, [slots.index(s) for s in (*present, *ones)])
        x = _squeezed(build, x, len(present), len(ones))
        missing = [i for i, s in enumerate(flat) if s not in slots]
        for i in missing:
            x = build.method("unsqueeze", x, i)
        if missing:
            shape = [
                build.size(self.axes.size(int(str(s[1]))), self.tensors) if i in missing else -1
                for i, s in enumerate(flat)
            ]
            x = build.method("expand", x, *shape)
        bounds, start = [], 0
        for group in groups:
            bounds.append((start, start + len(group)))
            start += len(group)
        return _grouped(build, x, bounds)

    def result(self, output: Output, values: Mapping[Formula, tuple[fx.Node, Dim]]) -> fx.Node:
        """Returns per-row values in the shape of the user's graph."""
        build, like = self.build, _value(output.node)
        dims = [self.axes.atoms(d) for d in output.placed.dims]
        x = self._of_rows(output.placed.formula, dims, values, like.dtype)
        if isinstance(x, float):
            raise Unsupported("the sum is a constant")
        made = _value(x).shape
        if any(is_one(a) and not is_one(b) for a, b in zip(made, like.shape, strict=True)):
            sizes = [
                build.size(b, self.tensors) if is_one(a) and not is_one(b) else -1
                for a, b in zip(made, like.shape, strict=True)
            ]
            x = build.method("expand", x, *sizes)
        if _value(x).dtype != like.dtype:
            x = build.method("to", x, like.dtype)
        if not all(
            provably_equal(a, b) or (is_unknown(a) and is_unknown(b))
            for a, b in zip(_value(x).shape, like.shape, strict=True)
        ):
            raise Unsupported(
                f"the fused value has shape {tuple(_value(x).shape)}, the user's "
                f"{tuple(like.shape)}"
            )
        return with_strides_of(build, x, like)

    def _of_rows(
        self,
        f: Formula,
        dims: Sequence[Dim],
        values: Mapping[Formula, tuple[fx.Node, Dim]],
        like: torch.dtype,
    ) -> fx.Node | float:
        """Returns a per-row value in the dimensions of an output."""
        made: dict[Formula, fx.Node | float] = {}
        stack = [f]
        while stack:
            current = stack[-1]
            waiting = [] if current in values else [a for a in current.args if a not in made]
            if waiting:
                stack += waiting
                continue
            if current not in made:
                if current in values:
                    made[current] = self._summed(current, dims, *values[current], like)
                else:
                    made[current] = self._step(current, [made[a] for a in current.args])
            stack.pop()
        return made[f]

    def _step(self, f: Formula, arguments: Sequence[fx.Node | float]) -> fx.Node | float:
        """Inserts one operation on per-row values."""
        if f.op == "const":
            return float(f.data)
        if f.op == "pow":
            return self.build.call(torch.pow, arguments[0], f.data)
        if f.op == "detach":
            (x,) = arguments
            return x if isinstance(x, float) else self.build.method("detach", x)
        if f.op not in OF_ROWS or all(isinstance(x, float) for x in arguments):
            raise Unsupported(f"{f.op} of a value of rows, inside of an operation")
        return self.build.call(OF_ROWS[f.op], *arguments)

    def _summed(
        self, f: Formula, dims: Sequence[Dim], value: fx.Node, heads: Dim, like: torch.dtype
    ) -> fx.Node:
        """Inserts a sum over keys and perhaps rows, from per-row values and values of blocks."""
        build, what, groups = self.build, f.data, self.plan.groups
        summed = set(self.axes.atoms(what.over))
        blocks = (a for a in groups.keys if a not in summed)
        order = [*groups.batch, *heads, *groups.rows, *blocks]
        x = _reshaped(build, value, [self.axes.size(a) for a in order] or [1], self.tensors)
        if not like.is_floating_point:
            x = build.method("to", x, like)  # counts, which a float would round
        over = summed - set(groups.keys)
        places = [i for i, a in enumerate(order) if a in over]
        if not over <= set(order):
            raise Unsupported("the sum has other rows than the program")
        if places:
            x = build.method("sum", x, dim=tuple(places))
        left = [a for a in order if a not in over]
        flat = [a for dim in dims for a in dim]
        if not set(left) <= set(flat):
            raise Unsupported("the sum has other rows than the program")
        if left:
            x = _permuted(build, x, [left.index(a) for a in flat if a in left])
        sizes = [self.axes.extent(a for a in dim if a in left) for dim in dims]
        x = _reshaped(build, x, sizes, self.tensors)
        repeated = [
            what.shape[d]
            for d in what.dims
            if not self.axes.atoms(what.places[d]) and not is_one(what.shape[d])
        ]
        if what.scale != 1.0:
            x = build.call(torch.mul, x, what.scale)
        if repeated:
            x = build.call(torch.mul, x, build.product(repeated, self.tensors))
        if what.divisors:
            x = build.call(torch.div, x, build.product(what.divisors, self.tensors))
        return x


OF_ROWS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "sqrt": torch.sqrt,
    "log": torch.log,
    "exp": torch.exp,
    "abs": torch.abs,
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
}


def _value(node: fx.Node) -> Tensor:
    value = example(node)
    assert isinstance(value, Tensor)
    return value


def _hint(size: Any) -> int:
    return int(size) if isinstance(size, int) else int(size.node.hint or 0)
