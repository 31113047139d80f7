"""Plans row programs from formulas: which sums one operator computes, and on which axes.

The operator knows batch, heads, rows and keys. The axis that was summed over is the keys. An axis
that every product has is rows if no column operand has it, else batch and heads. Axes that only
some products have, and that are summed before the products meet, are those products' heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.elements.operands import is_symbolic_number
from torch_streamkl.fx_passes.analysis.elements.reading import FormulaInterpreter
from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.domain.row_elements import (
    Axes,
    Dim,
    Dot,
    Formula,
    Placed,
    Sum,
    formulas_in,
)
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import Size, expression, is_one
from torch_streamkl.fx_passes.planning.nan_readers import HIDES
from torch_streamkl.fx_passes.planning.special_elements import (
    UnderflowRead,
    check_readers_inside,
)
from torch_streamkl.program.derive import HeadJacobianError
from torch_streamkl.program.graph import (
    BLOCK_SUM,
    FLOAT,
    MAX,
    HeadsError,
    Node,
    apply,
    cast,
    const,
    index,
    sum_heads,
)
from torch_streamkl.program.graph import KEY as KEYS
from torch_streamkl.program.graph import ROW as ROWS
from torch_streamkl.program.identities import exponentials_in
from torch_streamkl.program.masks import Keys
from torch_streamkl.program.steps import is_inside
from torch_streamkl.program.walks import walk
from torch_streamkl.rows import derive
from torch_streamkl.rows.program import COLUMNS, KEY, PAIR, ROW, Capture, Program
from torch_streamkl.rows.trace import Tracer, dtype_of


@dataclass(frozen=True)
class Groups:
    """Holds the axes in each dimension of the operator's tensors; heads are per product."""

    batch: Dim
    heads: tuple[Dim, ...]
    rows: Dim
    keys: Dim  # several where code splits them into blocks
    is_summed: bool  # heads are summed before products meet; else all products share them


@dataclass(frozen=True)
class Captured:
    """Describes a tensor that a program reads."""

    node: fx.Node  # of the trace
    dims: tuple[Dim, ...]
    kind: str
    heads: Dim
    grad_flows: bool
    ids_dim: int = -1  # of ids: the dimension of the tensor that has several for a row


@dataclass(frozen=True)
class Output:
    """Describes a value of the user's graph that a program computes.

    It is a sum over keys, or blocks of them, or what is computed from some sums for each row.
    """

    inner: fx.Node
    node: fx.Node
    placed: Placed


@dataclass(frozen=True)
class RowPlan:
    """Holds everything that one operator call needs."""

    program: Program
    dots: tuple[Dot, ...]
    is_swapped: tuple[bool, ...]  # the rows are those of the second operand
    grad_flows: frozenset[object]
    groups: Groups
    sums: dict[Formula, tuple[int, Dim]]  # the reductions that outputs use, and their heads
    captures: tuple[Captured, ...]
    outputs: tuple[Output, ...]
    elements: FormulaInterpreter


def plan_program(roots: Sequence[fx.Node], elements: FormulaInterpreter, trace: Trace) -> RowPlan:
    """Returns one program for these sums, or raises Unsupported."""
    return _Planner(elements, [elements.placed[r] for r in roots]).plan(roots, trace)


def sums_in(root: Formula, keys: Dim, axes: Axes) -> list[Formula]:
    """Lists the sums over keys that a per-row value is computed from."""
    found: dict[Formula, None] = {}
    stack, seen = [root], {root}
    while stack:
        f = stack.pop()
        if f.op == "reduce" and set(keys) & set(axes.atoms(f.data.over)):
            found[f] = None
            continue
        if f.op == "capture":
            raise Unsupported("a value of rows inside of an operation needs another tensor")
        new = [a for a in dict.fromkeys(reversed(f.args)) if a not in seen]
        seen.update(new)
        stack += new
    return list(found)


class _Planner:
    """Turns formulas into a program."""

    def __init__(self, elements: FormulaInterpreter, placed: Sequence[Placed]) -> None:
        self.elements, self.axes = elements, elements.axes
        self.roots = [x.formula for x in placed]
        self.formulas = list(dict.fromkeys(f for r in self.roots for f in formulas_in(r)))
        self.dots: list[Dot] = [f.data for f in self.formulas if f.op == "dot"]
        self.dots = list(dict.fromkeys(self.dots))
        keys = {self.axes.atoms((r.key,)) for r in self.roots if r.key is not None}
        if len(keys) != 1:
            raise Unsupported("sums over different axes")
        (self.keys,) = keys
        self.sums = list(
            dict.fromkeys(f for r in self.roots for f in sums_in(r, self.keys, self.axes))
        )
        self.formulas = list(dict.fromkeys(f for x in self.sums for f in formulas_in(x)))
        self.swapped = [self._is_swapped(dot) for dot in self.dots]
        self.groups = self._groups()

    def _is_swapped(self, dot: Dot) -> bool:
        lhs, rhs = (self.elements.operand_axes(dot, side) for side in ("lhs", "rhs"))
        found = [set(self.keys) & set(x) for x in (lhs, rhs)]
        if sorted(map(len, found)) != [0, len(self.keys)]:
            raise Unsupported("the sum is not over an axis of one operand of the matmul")
        for operand in (lhs, rhs):
            if len(set(operand)) != len(operand):
                raise Unsupported("an axis of the scores meets itself in another place")
        return bool(found[0])

    def row_axes(self, i: int) -> Dim:
        """Returns the axes of the row operand of a product."""
        side = "rhs" if self.swapped[i] else "lhs"
        return self.elements.operand_axes(self.dots[i], side)

    def column_axes(self, i: int) -> Dim:
        side = "lhs" if self.swapped[i] else "rhs"
        return self.elements.operand_axes(self.dots[i], side)

    def _groups(self) -> Groups:
        common = self._common()
        every = [set(self.row_axes(i)) | set(self.column_axes(i)) for i in range(len(self.dots))]
        if not set(common) <= set().union(*every):
            raise Unsupported("a tensor gives the scores a dimension that no matmul has")
        products = range(len(self.dots))
        rows = tuple(
            a
            for a in common
            if all(a in self.row_axes(i) and a not in self.column_axes(i) for i in products)
        )
        others = [a for a in common if a not in rows]
        own = [tuple(a for a in self._of(i) if a not in (*common, *self.keys)) for i in products]
        if any(own):
            alike: dict[frozenset[int], Dim] = {}
            for x in own:
                sharing = [i for i in products if set(own[i]) == set(x)]
                alike.setdefault(frozenset(x), self._shared_last(x, sharing))
            heads = tuple(alike[frozenset(x)] for x in own)
            return Groups(tuple(others), heads, rows, self.keys, True)
        rest = self._shared_last(others[1:], list(products))
        return Groups(tuple(others[:1]), (rest,) * len(self.dots), rows, self.keys, False)

    def _of(self, i: int) -> Dim:
        return tuple(dict.fromkeys((*self.row_axes(i), *self.column_axes(i))))

    def _shared_last(self, heads: Iterable[int], products: list[int]) -> Dim:
        """Moves axes that the keys lack to the end: query head h uses key head h // group."""
        return tuple(
            sorted(heads, key=lambda a: any(a not in self.column_axes(i) for i in products))
        )

    def _common(self) -> Dim:
        found: list[Dim] = []
        for x in self.sums:
            places = self.axes.atoms(a for dim in x.data.places for a in dim)
            found.append(tuple(a for a in places if a not in self.keys))
        if len({frozenset(x) for x in found}) != 1:
            raise Unsupported("sums over different rows")
        return found[0]

    # ------------------------------------------------------------------ the program

    def plan(self, roots: Sequence[fx.Node], trace: Trace) -> RowPlan:
        groups = self.groups
        numbers = {heads: i for i, heads in enumerate(dict.fromkeys(groups.heads), 1)}
        numbers[()] = 0
        self.head_of = numbers
        self._check_maxima()
        self.captured = self._captures()
        declared = tuple(
            Capture(c.kind, _dtype_of(c.node), numbers[c.heads]) for c in self.captured.values()
        )
        dot_heads = tuple(numbers[h] for h in groups.heads)
        try:
            outputs = self._traced(Tracer(dot_heads, declared, Keys(), {}), False)
        except UnderflowRead:
            if not all(self._has_enough_digits(dot) for dot in self.dots):
                raise
            outputs = self._traced(Tracer(dot_heads, declared, Keys(), {}), True)
        try:
            different = list(dict.fromkeys(outputs))  # two sums may be one reduction
            program = self.tracer.program(different)
            derive.forward_plan(program, True)
            backward = derive.backward_plan(program)
        except (HeadJacobianError, ValueError) as reason:
            raise Unsupported(str(reason)) from reason
        grad_flows: frozenset[object] = frozenset().union(*(r.grad_flows for r in self.roots))
        for dot, x in zip(self.dots, backward.dots, strict=True):
            if (x is not None) != any((dot, side) in grad_flows for side in ("lhs", "rhs")):
                raise Unsupported("the gradient of the scores is a constant")
        for captured, x in zip(self.captured.values(), backward.captures, strict=True):
            if x is None and captured.grad_flows and captured.node in grad_flows:
                raise Unsupported("the gradient of a tensor that meets the scores is a constant")
        head_axes = {number: heads for heads, number in numbers.items()}
        slots = dict(zip(different, program.outputs, strict=True))
        return RowPlan(
            program,
            tuple(self.dots),
            tuple(self.swapped),
            grad_flows,
            groups,
            {f: (slots[x], head_axes[x.head]) for f, x in zip(self.sums, outputs, strict=True)},
            tuple(self.captured.values()),
            tuple(Output(r, trace.outer[r], self.elements.placed[r]) for r in roots),
            self.elements,
        )

    def _traced(self, tracer: Tracer, are_exact: bool) -> list[Node]:
        """The reductions that the sums are; with ``are_exact`` log 0 is -inf, as in eager code."""
        self.tracer, self.nodes = tracer, dict[Formula, Node]()
        self.logarithms_are_exact = are_exact
        used = {a for f in self.formulas for a in f.args}
        try:
            for f in self.formulas:
                if f in used:
                    self.nodes[f] = self._node(f)
            outputs = [self._output(x) for x in self.sums]
        except (HeadsError, ValueError) as reason:
            raise Unsupported(str(reason)) from reason
        check_readers_inside(self.formulas, self.nodes, logarithms_are_exact=are_exact)
        return outputs

    def _output(self, f: Formula) -> Node:
        """The reduction that a sum is, over all keys or over blocks of them."""
        what, x = f.data, self.nodes[f.args[0]]
        if not f.grad_flows:  # a metric of scores that others learn from
            x = apply("detach", x)
        inside = [a for a in self.keys if a in self.axes.atoms(what.over)]
        if len(inside) == len(self.keys):
            return self.tracer.reduce(what.kind, x)
        size = expression(self.axes.extent(inside))
        if what.kind != "sum" or not isinstance(size, int):
            raise Unsupported("blocks of keys of a size that varies")
        return self.tracer.reduce(BLOCK_SUM, x, size)

    def _has_enough_digits(self, dot: Dot) -> bool:
        """Whether probabilities of eager code underflow where those of the program do."""
        return all(dtype.itemsize >= 4 for dtype in dot.dtypes)

    def _check_maxima(self) -> None:
        """A maximum is a constant of a program: its gradient has to be cut."""
        for f in self.formulas:
            for a in f.args:
                if a.op == "reduce" and a.data.kind == MAX and a.grad_flows and f.op != "detach":
                    raise Unsupported("the gradient of a maximum over the keys")
        if any(f.data.kind == MAX for f in self.sums):
            raise Unsupported("a maximum over the keys leaves the elements")

    def _captures(self) -> dict[object, Captured]:
        found: dict[object, Captured] = {}
        for f in self.formulas:
            if f.op in ("capture", "columns"):
                found.setdefault(self._capture_key(f), self._captured(f))
        return found

    def _capture_key(self, f: Formula) -> object:
        source, places = f.data[:2]
        dims = tuple(self.axes.atoms(d) for d in places)
        return source, dims, bool(f.grad_flows), f.data[3] if f.op == "columns" else None

    def _captured(self, f: Formula) -> Captured:
        source, places = f.data[:2]
        dims = tuple(self.axes.atoms(d) for d in places)
        axes = [a for d in dims for a in d]
        if len(set(axes)) != len(axes):
            raise Unsupported("an axis of the scores meets itself in another place")
        groups = self.groups
        own = [h for h in dict.fromkeys(groups.heads) if set(h) & set(axes)]
        if len(own) > 1:
            raise Unsupported("a tensor has the heads of two products")
        heads = own[0] if own else ()
        known = {*groups.batch, *heads, *groups.rows, *groups.keys}
        if not set(axes) <= known:
            raise Unsupported("a tensor gives the scores a dimension that no matmul has")
        if f.op == "columns":
            if self.axes.atoms((f.data[2],)) != groups.keys or set(groups.keys) & set(axes):
                raise Unsupported("ids of what is not the keys")
            return Captured(source, dims, COLUMNS, heads, False, f.data[3])
        by_key, by_row = (bool(set(axes) & set(x)) for x in (groups.keys, groups.rows))
        if by_key and not set(groups.keys) <= set(axes):
            raise Unsupported("a tensor of blocks of keys meets the scores")
        kind = PAIR if by_key and by_row else KEY if by_key else ROW
        if kind == PAIR:
            for group in (groups.batch, heads, groups.rows):
                if 0 < len(set(group) & set(axes)) < len(group):
                    raise Unsupported("a mask varies along some dimensions that become one")
        if by_key and f.grad_flows and source in self.elements.behind_dots:
            raise Unsupported("a tensor with keys that is made of scores meets them")
        if kind == PAIR and f.grad_flows and known <= set(axes):
            # the map of the other side, from another graph: its gradient is as large
            raise Unsupported("a tensor as large as the scores meets them and needs a gradient")
        return Captured(source, dims, kind, heads, bool(f.grad_flows))

    def _node(self, f: Formula) -> Node:
        match f.op:
            case "dot":
                return self.tracer.dot(self.dots.index(f.data))
            case "const":
                return const(f.data)
            case "capture" | "columns":
                key = self._capture_key(f)
                return self.tracer.capture(list(self.captured).index(key))
            case "linear":
                return self._linear(*f.data)
            case "reduce":
                return self._reduction(f)
        args = [self.nodes[a] for a in f.args]
        match f.op:
            case "log":
                return self._log(args[0])
            case "pow":
                return apply("pow", cast(args[0], FLOAT), f.data)
            case "float":
                return cast(args[0], FLOAT)
            case "where" if not f.is_bool:
                return apply("where", args[0], *(cast(a, FLOAT) for a in args[1:]))
            case "where":
                condition, a, b = args
                inside = apply("and", condition, a)
                outside = apply("and", apply("not", condition), b)
                return apply("or", inside, outside)
        return apply(f.op, *args)

    def _log(self, x: Node) -> Node:
        """The logarithm of a probability is what its score gives it, or -inf where it is masked.

        A mask of finite numbers makes probabilities 0 as one of -inf does.
        """
        log = apply("log", x)
        over, under = exponentials_in(x)
        for factors, limit in ((over, -math.inf), (under, math.inf)):
            for factor in factors:
                if self.logarithms_are_exact or self._may_be_masked(factor.args[0]):
                    is_zero = apply("eq", factor, const(0.0))
                    log = apply("where", is_zero, const(limit), log)
        return log

    def _may_be_masked(self, exponent: Node) -> bool:
        """Whether a number, or a tensor of keys, may hide some of the scores in an exponent."""
        for node in walk([exponent], is_inside):
            if node.op == "const" and HIDES <= abs(node.value) < math.inf:
                return True
            if node.op == "capture" and node.dtype == FLOAT and node.by_key:
                return True
        return False

    def _linear(self, coefficients: Sequence[tuple[int, int]], constant: int) -> Node:
        """Sum of coefficient * index + constant >= 0, without negative terms."""
        sides: dict[bool, Node | None] = {True: None, False: None}

        def add(term: Node, is_left: bool) -> None:
            before = sides[is_left]
            sides[is_left] = term if before is None else apply("add", before, term)

        for axis, coefficient in coefficients:
            atoms = self.axes.atoms((axis,))
            if atoms == self.groups.keys:
                place = index(KEYS)
            elif atoms == self.groups.rows:
                place = index(ROWS)
            else:
                raise Unsupported("a mask that depends on the index of a batch or head")
            if abs(coefficient) != 1:
                place = apply("mul", place, float(abs(coefficient)))
            add(place, coefficient > 0)
        if constant:
            add(const(abs(constant)), constant > 0)
        left, right = (x if x is not None else const(0.0) for x in (sides[True], sides[False]))
        return apply("ge", left, right)

    def _reduction(self, f: Formula) -> Node:
        """Adds a sum that elements use: over keys, over the heads of a product, or both."""
        what = f.data
        assert isinstance(what, Sum)
        x = self.nodes[f.args[0]]
        over = set(self.axes.atoms(what.over))
        rest = over - set(self.keys)
        if rest:
            heads = next((h for h in self.groups.heads if set(h) == rest), None)
            if heads is None or not self.groups.is_summed or what.kind != "sum":
                raise Unsupported(
                    "a sum over rows or some heads comes before the sum over the keys"
                )
            x = cast(x, FLOAT)
            if x.head != self.head_of[heads]:
                raise Unsupported("a sum over heads of what does not vary with them")
            x = sum_heads(x)
        if set(self.keys) <= over:
            x = self.tracer.reduce(what.kind, x)
        elif set(self.keys) & over:
            raise Unsupported("elements use sums over blocks of keys")
        if what.kind != "sum":
            return x
        factor = what.scale * math.prod(_number(n) for n in self._repeats(what))
        factor /= math.prod(_number(n) for n in what.divisors)
        return x if factor == 1.0 else apply("mul", cast(x, FLOAT), const(factor))

    def _repeats(self, what: Sum) -> list[Size]:
        """Lists the extents of dimensions along which nothing varies, which a sum counts."""
        return [
            what.shape[d]
            for d in what.dims
            if not self.axes.atoms(what.places[d]) and not is_one(what.shape[d])
        ]


def _number(size: Size) -> int:
    known = expression(size)
    if not isinstance(known, int):
        raise Unsupported("a mean over a size that varies comes before the sum over the keys")
    return known


def _dtype_of(node: fx.Node) -> str:
    return FLOAT if is_symbolic_number(node) else dtype_of(_value(node))


def _value(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value
