"""Writes expressions into the user's graph: the one way from a program back to torch code.

Operands, masks, biases and weights of operators are expressions of captured tensors, and so is
what is left around an operator's results. Each becomes a tensor with the dimensions that are asked
for. Sums over keys of scores are not written: operators compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.closed_forms.row_sites import is_score_sized, products_of
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import example, is_tensor, tensor_of
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
    BOOL,
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

    ``values`` has results of operators by the names of their sources. ``tensors`` are nodes of
    the user's graph in which symbolic sizes are looked for.
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
        self.tensors = self.tensors_of(*exprs)
        self.arranging = Arranging(build, self.tensors)
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
                placed = Placed(self._scalar(placed.node, x.dtype))
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
        args = self._in_wide(x, args)
        match x.op:
            case "const":
                is_int = x.dtype == INT and abs(x.value) < 2.0**63
                return Placed(int(x.value) if is_int else x.value)
            case "size":
                return Placed(self.arranging.inserted_size(x.value))
            case "index":
                stop = self.arranging.inserted_size(x.value.size)
                return Placed(
                    self.build.call(torch.arange, stop, device=self.device), ((x.value,),)
                )
            case "capture":
                return self._captured(x, least, is_root=is_root)
            case "linear":
                return self._sum(x.value[0], zip(x.value[1], args, strict=True), x.dtype)
            case "product":
                return self._product(x, args, least)
            case "and" | "or":
                if not args:
                    return Placed(x.op == "and")
                call = torch.logical_and if x.op == "and" else torch.logical_or
                return self._folded(call, args)
            case "nonnegative":
                return self._not_negative(x.args[0], args)
            case "where":
                return self._pointwise(torch.where, args)
            case "pow":
                return self._joined(torch.pow, args[0], Placed(x.value))
            case "logaddexp":
                args = [Placed(self._scalar(a.node, FLOAT)) if a.is_number else a for a in args]
                return self._folded(torch.logaddexp, args)
            case "log" if is_log1p(x):
                return self._pointwise(torch.log1p, [self._beyond_one(x, args)])
            case "norm":
                return self._norm(args[0])
            case "round":
                return self._rounded(args[0], getattr(torch, x.value))
            case "float":
                return args[0]
            case "log_softmax":
                return self._log_softmax(x.value, args[0])
            case "reduce":
                return self._reduced(x.kind, axes_of(x), args[0])
        if x.op in FUNCTIONS:
            if all(a.is_number for a in args) and FUNCTIONS[x.op] in OF_NUMBERS:
                return Placed(self._of_numbers(FUNCTIONS[x.op], *(a.node for a in args)))
            if x.op in ("minimum", "maximum", "clamp_min", "clamp_max"):  # take no number first
                args = [Placed(self._scalar(a.node, x.dtype)) if a.is_number else a for a in args]
            elif args[0].is_number and x.op in TURNED:
                return self._pointwise(TURNED[x.op], args[::-1])
            return self._pointwise(FUNCTIONS[x.op], args)
        raise Unsupported(f"{x.op} of a value of rows, inside of an operation")

    @property
    def device(self) -> torch.device:
        """Returns the device of the tensors."""
        for node in self.tensors:
            return tensor_of(node).device
        raise Unsupported("a mask without any tensor")

    def _scalar(self, number: Any, dtype: str) -> fx.Node:
        """A number as a tensor of at least 32 bits, as arithmetic on narrower types has.

        AOTAutograd makes tensors of symbolic floats where they meet a tensor in arithmetic.
        Anywhere else, as in `torch.full`, it makes them constants: a compilation for each value.
        """
        kind = {BOOL: torch.bool, INT: torch.int64}.get(dtype, self._wide)
        if not isinstance(number, fx.Node):
            return self.build.call(torch.full, (), number, dtype=kind, device=self.device)
        one = self.build.call(torch.ones, (), dtype=kind, device=self.device)
        return self.build.call(torch.mul, one, number)

    @property
    def _wide(self) -> torch.dtype:
        """The type of numbers that are made of integers: at least that of the user's tensors."""
        given = (*self.tensors, *self.values.values())
        types = {getattr(example(n), "dtype", None) for n in given}
        return torch.float64 if torch.float64 in types else torch.float32

    def _in_wide(self, x: Node, args: Sequence[Placed]) -> Sequence[Placed]:
        """The arguments of an operation, with integers as floating-point numbers where it has no
        others: torch would compute in the default type, which may be narrow. Arithmetic of
        integers is that of int64: expressions are exact, narrow types wrap around.
        """
        given = [a for a in args if not a.is_number]
        if x.dtype == INT or x.op == "nonnegative":
            return [self._exact(a) for a in args]
        if x.dtype != FLOAT or not given or any(a.value.is_floating_point() for a in given):
            return args
        first = args[: 1 if x.op == "where" else 0]  # the condition
        return [*first, *(self._floating(a) for a in args[len(first) :])]

    def _exact(self, a: Placed) -> Placed:
        if a.is_number or a.value.dtype in (torch.bool, torch.int64):
            return a
        is_narrow = not a.value.is_floating_point()
        return Placed(self.build.method("long", a.node), a.dims) if is_narrow else a

    def _floating(self, a: Placed) -> Placed:
        if a.is_number:
            return Placed(self._scalar(a.node, FLOAT))
        return Placed(self.build.method("to", a.node, self._wide), a.dims)

    def _pointwise(self, call: Callable[..., Any], args: Sequence[Placed]) -> Placed:
        given, dims = self.arranging.aligned(*args)
        if all(a.is_number for a in args):  # of sizes: torch's functions take no numbers alone
            given = [self._scalar(given[0], FLOAT), *given[1:]]
        return Placed(self.build.call(call, *given), dims)

    def _of_numbers(self, call: Callable[..., Any], *numbers: Any) -> Any:
        call = OF_NUMBERS.get(call, call)
        if any(isinstance(n, fx.Node) for n in numbers):
            return self.build.call(call, *numbers)
        return call(*numbers)

    def _folded(self, call: Callable[..., Any], args: Sequence[Placed]) -> Placed:
        """An operation that joins its arguments: numbers first, then the narrower tensors."""
        numbers = [a for a in args if a.is_number]
        tensors = sorted((a for a in args if not a.is_number), key=lambda a: len(a.axes))
        total: Placed | None = None
        for a in numbers:
            both = None if total is None else self._of_numbers(call, total.node, a.node)
            total = a if total is None else Placed(both)
        for a in reversed(tensors) if len(tensors) < 3 else tensors:
            total = a if total is None else self._pointwise_ordered(call, total, a)
        assert total is not None
        return total

    def _pointwise_ordered(self, call: Callable[..., Any], a: Placed, b: Placed) -> Placed:
        return self._pointwise(call, [b, a] if a.is_number else [a, b])

    def _product(self, x: Node, args: Sequence[Placed], least: torch.dtype | None) -> Placed:
        """A product; one with a logarithm is 0 where its other factors are, as in `kl_div`."""
        logs = [i for i, y in enumerate(x.args) if y.op == "log"]
        log = x.args[logs[0]] if len(logs) == 1 else None
        inside = [self._made.get((y, least)) for y in inputs_of(log)] if log is not None else []
        given = [a for a in inside if a is not None and not a.is_number]
        if log is None or len(given) < len(inside):
            return self._folded(torch.mul, args)
        rest = self._folded(torch.mul, [a for i, a in enumerate(args) if i != logs[0]])
        if is_log1p(log):
            return self._pointwise(torch.special.xlog1py, [rest, self._beyond_one(log, given)])
        return self._pointwise(torch.xlogy, [rest, *given])

    def _beyond_one(self, log: Node, args: Sequence[Placed]) -> Placed:
        """What a logarithm is of next to 1, where small numbers lose their digits."""
        return self._sum(0.0, zip(log.args[0].value[1], args, strict=True), FLOAT)

    def _not_negative(self, x: Node, args: Sequence[Placed]) -> Placed:
        """Whether a sum of integers is at least 0, as a comparison of two sums.

        A difference of captured tensors, or of one and a number, may wrap around.
        """
        if x.op != "linear":
            return self._pointwise(torch.ge, [*args, Placed(0)])
        constant, coefficients = x.value
        sides: tuple[list[tuple[float, Placed]], ...] = [], []
        has_tensors = [False, False]
        for c, a, y in zip(coefficients, args, x.args, strict=True):
            sides[c < 0.0].append((abs(c), a))
            has_tensors[c < 0.0] |= has_op(y, "capture")
        is_left = not sides[0] or (bool(sides[1]) and not has_tensors[0])
        numbers = (constant, 0.0) if is_left else (0.0, -constant)
        left, right = map(self._sum, numbers, sides, (INT, INT))
        call, pair = (torch.le, [right, left]) if left.is_number else (torch.ge, [left, right])
        return self._pointwise(call, pair)

    def _sum(self, constant: float, terms: Iterable[tuple[float, Placed]], dtype: str) -> Placed:
        """A number and multiples of others, positive ones first."""
        is_int = dtype == INT
        pairs = sorted(terms, key=lambda p: p[0] < 0.0)
        total: Placed | None = None
        for c, a in pairs:
            factor = c if total is None else abs(c)
            term = a if factor == 1 else self._scaled(a, int(factor) if is_int else factor)
            if total is None:
                total = term
            else:
                total = self._joined(torch.add if c > 0 else torch.sub, total, term)
        number = int(constant) if is_int else constant
        if total is None:
            return Placed(number)
        if constant:
            total = self._joined(torch.add, total, Placed(number))
        return total

    def _scaled(self, a: Placed, c: Any) -> Placed:
        if isinstance(c, float) and not a.is_number and not a.value.is_floating_point():
            a = self._floating(a)
        return self._joined(torch.mul, a, Placed(c))

    def _joined(self, call: Callable[..., Any], a: Placed, b: Placed) -> Placed:
        if a.is_number and b.is_number:
            return Placed(self._of_numbers(call, a.node, b.node))
        if a.is_number and call is torch.sub:  # torch.sub takes no number first
            return self._pointwise(torch.rsub, [b, a])
        return self._pointwise_ordered(call, a, b)

    def _norm(self, x: Placed) -> Placed:
        """The square root of a sum of squares, whose gradient at 0 is 0."""
        is_zero = self.build.call(torch.eq, x.node, 0)
        positive = self.build.method("masked_fill", x.node, is_zero, 1.0)
        root = self.build.call(torch.sqrt, positive)
        return Placed(self.build.method("masked_fill", root, is_zero, 0.0), x.dims)

    def _rounded(self, x: Placed, dtype: torch.dtype) -> Placed:
        value = x.value
        if not isinstance(value, Tensor) or value.dtype == dtype:
            return x
        narrow = self.build.method("to", x.node, dtype)
        return Placed(self.build.method("to", narrow, value.dtype), x.dims)

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
                x = self._scaled(x, self.arranging.inserted_size(a.size))
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
