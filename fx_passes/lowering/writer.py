"""Writes expressions into the user's graph: the one way from a program back to torch code.

Operands, masks, biases and weights of operators are expressions of captured tensors, and so is
what is left around an operator's results. Each becomes a tensor with the dimensions that are asked
for. Sums over keys of scores are not written: operators compute them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.closed_forms.row_sites import is_score_sized, products_of
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import example, is_tensor, tensor_of
from torch_streamkl.fx_passes.lowering.arithmetic import Arithmetic
from torch_streamkl.fx_passes.lowering.captured import Captures
from torch_streamkl.fx_passes.lowering.inputs import axes_of, inputs_of, is_log1p
from torch_streamkl.fx_passes.lowering.live import LiveTensors
from torch_streamkl.fx_passes.lowering.placed import Arranging, Placed
from torch_streamkl.fx_passes.lowering.selected_rows import SelectedRows
from torch_streamkl.fx_passes.lowering.torch_functions import FUNCTIONS, OF_NUMBERS, TURNED
from torch_streamkl.fx_passes.reading.arrays import Dim
from torch_streamkl.fx_passes.reading.positions import (
    Positions,
    is_index,
    is_signed,
    nodes_read,
    undivided,
)
from torch_streamkl.fx_passes.reading.reader import Reading
from torch_streamkl.program.graph import (
    ANY,
    CONTRACT,
    FLOAT,
    INT,
    LOGSUMEXP,
    MAX,
    SUM,
    Axis,
    Node,
    size_of,
)
from torch_streamkl.program.walks import has_op

OF_FLOAT8 = torch.bfloat16  # has all their numbers; torch promotes and computes with none of them
INSIDE = "a sum over keys, inside of an operation"
_REDUCTIONS = {SUM: "sum", LOGSUMEXP: "logsumexp", MAX: "amax", ANY: "any"}
COMPUTED = (CONTRACT, "log_softmax")  # what operators compute, and user's code may have as well


class Writer:
    """Inserts the tensors that expressions are.

    ``values`` has results of operators by the names of their sources. Symbolic sizes are looked
    for in the user's tensors that ``exprs`` read.
    """

    def __init__(
        self,
        build: Builder,
        reading: Reading,
        outer: Mapping[fx.Node, fx.Node],
        exprs: Sequence[Node] = (),
        values: Mapping[object, fx.Node] | None = None,
    ) -> None:
        self.build, self.reading, self.outer = build, reading, outer
        self.values: dict[object, fx.Node] = dict(values or {})
        self.arranging = Arranging(build, self.tensors_of(*exprs))
        self.arithmetic = Arithmetic(self.arranging, self.values)
        self.captures = Captures(self.arranging, reading.sizes, outer)
        self.live = LiveTensors(reading, outer, build.before, self.tensors_of)
        self.rows = SelectedRows(build, reading, outer, self.tensors_of)
        self._tensors: dict[object, fx.Node] = {}
        self._made: dict[tuple[Node, torch.dtype | None], Placed] = {}

    def tensors_of(self, *exprs: Node) -> list[fx.Node]:
        """Returns the user's tensors that expressions read."""
        found = (self.outer.get(x) for x in nodes_read(*exprs))
        return list(dict.fromkeys(x for x in found if x is not None and is_tensor(x)))

    # ------------------------------------------------------------------------- what is asked for

    def tensor(
        self,
        x: Node,
        dims: Sequence[Dim],
        *,
        expand: Collection[int] = (),
        partly: str = "",
        least: torch.dtype | None = None,
    ) -> fx.Node:
        """Returns an expression as a tensor with these dimensions.

        One whose axes it lacks has size 1, or its own where it is to be expanded. ``partly`` is
        the reason for which a dimension with some of its axes is refused; else it is expanded.
        ``least`` is the narrowest type in which numbers are computed.
        """
        key = x, tuple(dims), tuple(expand), least
        if key not in self._tensors:
            placed = self.value(x, least)
            if placed.is_number:
                placed = Placed(self.arithmetic.scalar(placed.node, x.dtype))
            self._tensors[key] = self.arranging.arranged(placed, dims, expand, partly)
        return self._tensors[key]

    def size(self, x: Node) -> int | fx.Node:
        """Returns an integer that is made of sizes."""
        placed = self.value(x, None)
        if not placed.is_number:
            raise Unsupported("the place of a mask is a tensor")
        found: int | fx.Node = placed.node
        return int(found) if isinstance(found, float) else found

    def extent(self, axis: Axis) -> int | fx.Node:
        """Returns the number of positions along an axis."""
        assert axis.size is not None
        return self.size(size_of(axis.size))

    def value(self, x: Node, least: torch.dtype | None = None) -> Placed:
        """Returns an expression as a tensor, in the dimensions that it has anyhow."""
        if has_op(x, *COMPUTED):
            self._find_live(x, least)
        stack = [x]
        while stack:
            y = stack[-1]
            inputs = [] if y.op == "capture" else inputs_of(y)
            waiting = [a for a in inputs if (a, least) not in self._made]
            if (y, least) in self._made or not waiting:
                stack.pop()
                if (y, least) not in self._made:
                    given = [self._made[a, least] for a in inputs]
                    self._made[y, least] = self._written(y, given, least, is_root=y is x)
            else:
                stack += waiting
        return self._made[x, least]

    def _find_live(self, x: Node, least: torch.dtype | None) -> None:
        """Takes the user's tensors for what is computed from products."""
        todo = [x]
        while todo:
            y = todo.pop()
            if y.op == "capture" or (y, least) in self._made:
                continue
            placed = self.live.find(y)
            if placed is None:
                todo += y.args
                continue
            if not y.axes <= x.axes and is_score_sized(y, products_of(y)):
                raise Unsupported(INSIDE)
            if not y.flows and getattr(placed.value, "requires_grad", False):
                placed = Placed(self.build.method("detach", placed.node), placed.dims)
            self._made[y, least] = placed

    # ------------------------------------------------------------------------- one operation

    def _written(
        self, x: Node, args: Sequence[Placed], least: torch.dtype | None, *, is_root: bool
    ) -> Placed:
        args = self.arithmetic.in_wide(x, args)
        match x.op:
            case "const":
                is_int = x.dtype == INT and abs(x.value) < 2.0**63
                return Placed(int(x.value) if is_int else x.value)
            case "size":
                return Placed(self.arranging.inserted_size(x.value))
            case "index":
                stop = self.arranging.inserted_size(x.value.size)
                return Placed(
                    self.build.call(torch.arange, stop, device=self.arranging.device),
                    ((x.value,),),
                )
            case "capture":
                return self._captured(x, least, is_root=is_root)
            case "linear":
                return self.arithmetic.linear(x, args)
            case "product":
                return self._product(x, args, least)
            case "and" | "or":
                if not args:
                    return Placed(x.op == "and")
                call = torch.logical_and if x.op == "and" else torch.logical_or
                return self.arithmetic.folded(call, args)
            case "nonnegative":
                return self.arithmetic.not_negative(x.args[0], args)
            case "where":
                return self.arithmetic.pointwise(torch.where, args)
            case "pow":
                return self.arithmetic.joined(torch.pow, args[0], Placed(x.value))
            case "logaddexp":
                args = self.arithmetic.as_tensors(args, FLOAT)
                return self.arithmetic.folded(torch.logaddexp, args)
            case "log" if is_log1p(x):
                return self.arithmetic.pointwise(torch.log1p, [self._beyond_one(x, args)])
            case "norm":
                return self.arithmetic.norm(args[0])
            case "round":
                return self.arithmetic.rounded(args[0], getattr(torch, x.value))
            case "float":
                return args[0]
            case "log_softmax":
                return self._log_softmax(x.value, args[0])
            case "reduce":
                return self._reduced(x.kind, axes_of(x), args[0])
        if x.op in FUNCTIONS:
            if all(a.is_number for a in args) and FUNCTIONS[x.op] in OF_NUMBERS:
                return Placed(self.arithmetic.of_numbers(FUNCTIONS[x.op], *(a.node for a in args)))
            if x.op in ("minimum", "maximum", "clamp_min", "clamp_max"):  # take no number first
                args = self.arithmetic.as_tensors(args, x.dtype)
            elif args[0].is_number and x.op in TURNED:
                return self.arithmetic.pointwise(TURNED[x.op], args[::-1])
            return self.arithmetic.pointwise(FUNCTIONS[x.op], args)
        raise Unsupported(f"{x.op} of a value of rows, inside of an operation")

    def _product(self, x: Node, args: Sequence[Placed], least: torch.dtype | None) -> Placed:
        """A product; one with a logarithm is 0 where its other factors are, as in `kl_div`."""
        logs = [i for i, y in enumerate(x.args) if y.op == "log"]
        log = x.args[logs[0]] if len(logs) == 1 else None
        inside = [self._made.get((y, least)) for y in inputs_of(log)] if log is not None else []
        given = [a for a in inside if a is not None and not a.is_number]
        if log is None or len(given) < len(inside):
            return self.arithmetic.folded(torch.mul, args)
        rest = self.arithmetic.folded(torch.mul, [a for i, a in enumerate(args) if i != logs[0]])
        if is_log1p(log):
            return self.arithmetic.pointwise(
                torch.special.xlog1py, [rest, self._beyond_one(log, given)]
            )
        return self.arithmetic.pointwise(torch.xlogy, [rest, *given])

    def _beyond_one(self, log: Node, args: Sequence[Placed]) -> Placed:
        """What a logarithm is of next to 1, where small numbers lose their digits."""
        return self.arithmetic.sum(0.0, zip(log.args[0].value[1], args, strict=True), FLOAT)

    def _reduced(self, kind: str, axes: Sequence[Axis], x: Placed) -> Placed:
        over = [a for a in axes if a in x.axes]
        if kind not in _REDUCTIONS or (len(over) < len(axes) and kind != SUM):
            raise Unsupported(f"{kind} of a value of rows, inside of an operation")
        if over:
            kept = [dim for dim in x.dims if set(dim) <= set(over)]
            x = self.arranging.squeezed(self.arranging.split(x, kept))
            places = tuple(d for d, dim in enumerate(x.dims) if set(dim) <= set(over))
            dims = tuple(dim for d, dim in enumerate(x.dims) if d not in places)
            method = _REDUCTIONS[kind]
            at: tuple[Any, ...] = () if not dims and kind == SUM else (places,)
            if at and len(places) == 1:
                at = places
            x = Placed(self.build.method(method, x.node, *at), dims)
        for a in axes:
            if a not in over:
                x = self.arithmetic.scaled(x, self.arranging.inserted_size(a.size))
        return x

    def _log_softmax(self, axis: Axis, x: Placed) -> Placed:
        """Of entries that an operator returns: of scores, operators compute it."""
        x = self.arranging.squeezed(self.arranging.split(x, ()))
        if (axis,) not in x.dims:
            raise Unsupported("log_softmax of a value of rows, inside of an operation")
        return Placed(self.build.method("log_softmax", x.node, x.dims.index((axis,))), x.dims)

    # ------------------------------------------------------------------------- captured tensors

    def _captured(self, x: Node, least: torch.dtype | None, *, is_root: bool) -> Placed:
        """A tensor at positions; what is computed of it has at least 32 bits.

        The user's code may cast it, as in ``z.float().softmax(-1)``, which an expression does not
        say; if it does not, its roundings are those of results, and not of logarithms.
        """
        source = x.value
        if source.name in self.values:
            return self._result(x)
        if isinstance(source.name, Positions):
            flat = self.rows.column(source.name)
            return self._at(flat, x.args, {0} if x.args[0].op == "index" else ())
        tensor = self.captures.tensor(source)
        value = example(tensor)
        if not isinstance(value, Tensor):
            return Placed(tensor)
        if value.is_floating_point() and value.dtype.itemsize == 1:
            tensor = self.build.method("to", tensor, OF_FLOAT8)
        tensor, at = self._flattened(tensor, x.args)
        tensor, at, whole = self.rows.selected(tensor, at)
        placed = self._at(tensor, at, whole)
        value = placed.value
        if is_root or not value.dtype.is_floating_point:
            return placed
        wide = torch.promote_types(
            value.dtype, self.reading.widest.get(source.name, torch.float32)
        )
        wide = torch.promote_types(wide, least or torch.float32)
        if wide != value.dtype:
            return Placed(self.build.method("to", placed.node, wide), placed.dims)
        return placed

    def _result(self, x: Node) -> Placed:
        """A value of an operator, at the positions where it is read."""
        node = self.values[x.value.name]
        if not x.value.grad_flows and getattr(example(node), "requires_grad", False):
            node = self.build.method("detach", node)
        return self.captures.placed(node, x.args, {}, range(len(x.args)))

    def _at(self, tensor: fx.Node, at: Sequence[Node], whole: Collection[int] = ()) -> Placed:
        """A tensor at positions, those that tensors hold included."""
        sizes = map(self.reading.sizes.of, tensor_of(tensor).shape)
        signed = {p: p.args[1] for p, n in zip(at, sizes, strict=True) if is_signed(p, n)}
        index = {p: self._index(signed.get(p, p)) for p in at if self.captures.affine(p) is None}
        return self.captures.placed(tensor, at, index, whole, signed)

    def _index(self, at: Node) -> Placed:
        """Positions that a tensor holds, as indices."""
        if not is_index(at):
            raise Unsupported("gather or reshape that mixes the axes of the scores")
        self.build.selecting.append((self.tensors_of(at), []))
        placed = self.value(at)
        node = placed.node
        if placed.value.dtype not in (torch.int64, torch.int32):
            node = self.build.method("long", node)
        ignored = self.reading.ignored_at(at)
        if ignored is not None:  # it reads nothing in eager code: here the first
            where = self.build.call(torch.eq, node, ignored)
            node = self.build.method("masked_fill", node, where, 0)
        return Placed(node, placed.dims)

    def _flattened(self, tensor: fx.Node, at: Sequence[Node]) -> tuple[fx.Node, Sequence[Node]]:
        """A tensor with one dimension for those that are read at the digits of a position."""
        at = list(at)
        for d in reversed(range(len(at) - 1)):
            size = self.reading.sizes.of(tensor_of(tensor).shape[d + 1])
            whole = undivided(at[d], at[d + 1], size_of(size))
            if whole is not None:
                tensor = self.build.method("flatten", tensor, d, d + 1)
                at[d : d + 2] = [whole]
        return tensor, at
