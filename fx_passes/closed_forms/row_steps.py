"""Converts an expression of a program's axes into steps that are sound in floating point.

The normal form is one over real numbers. What is computed of it:

- a log-softmax is its score minus the log-sum-exp, which the operator makes from the largest;
- what is added to scores, and no product, is added up first: a mask and its constant cancel;
- terms with one probability are its product with the rest, whose digits a difference would lose;
- of a product, finite factors come first: NOTE [Zero annihilates] in program/graph.py;
- what is not made of products is a captured tensor, as a whole if it is not larger than its parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch_streamkl.fx_passes.closed_forms.form import NoForm
from torch_streamkl.fx_passes.closed_forms.row_arithmetic import (
    added,
    folded,
    logarithm,
    multiplied,
)
from torch_streamkl.fx_passes.closed_forms.row_leaves import Leaves
from torch_streamkl.fx_passes.closed_forms.row_sites import has_products
from torch_streamkl.program.canonical import ADDED, factors_of, linear, terms_of
from torch_streamkl.program.graph import (
    ANY,
    ARGMAX,
    BLOCK_SUM,
    BOOL,
    CONTRACT,
    FLOAT,
    LOGSUMEXP,
    MAX,
    SUM,
    Axis,
    Node,
    apply,
    cast,
    const,
    index,
    sum_heads,
)
from torch_streamkl.program.graph import KEY as KEYS
from torch_streamkl.program.graph import ROW as ROWS
from torch_streamkl.program.operations import OPERATIONS
from torch_streamkl.program.shifts import mask_terms
from torch_streamkl.rows.trace import Tracer


class Steps:
    """Makes the steps of a program from opened expressions."""

    def __init__(
        self,
        tracer: Tracer,
        leaves: Leaves,
        products: Mapping[Node, int],
        whole: Axis,
        twins: Mapping[Node, Node],
        logarithms: Mapping[Node, bool],
        *,
        are_exact: bool,
    ) -> None:
        self.tracer, self.leaves, self.axes = tracer, leaves, leaves.axes
        self.products = products  # without gradient
        self.whole, self.twins, self.logarithms = whole, twins, logarithms
        self.are_exact = are_exact  # log 0 is -inf, as in eager code
        self.nodes: dict[Node, Node] = {}

    # ------------------------------------------------------------------------ walks

    def of(self, root: Node) -> Node:
        """Returns an expression of dots, captured tensors, positions and reductions."""
        stack = [root]
        while stack:
            x = stack[-1]
            if x in self.nodes:
                stack.pop()
                continue
            waiting = [a for a in self._needs(x) if a not in self.nodes]
            if waiting:
                stack += reversed(waiting)
                continue
            self.nodes[x] = self._node(x)
            stack.pop()
        return self.nodes[root]

    def output(self, x: Node) -> Node:
        """Returns the reduction that a sum is, over all keys or over blocks of them."""
        about = x.value
        body = self.of(x.args[0])
        if about.kind == MAX:
            check_maximum(x)
        if about.kind == ANY:
            raise NoForm("whether any key meets a condition leaves the elements", x)
        if about.axis == self.whole:
            value = self.tracer.reduce(about.kind, body)
            return value.args[0] if about.kind == MAX else value  # without its detach
        part = self.leaves.parts.get(about.axis, ())
        if not part or part != self.axes.keys[-len(part) :] or about.kind != SUM:
            raise NoForm("a sum over keys that are not next to each other", x)
        return self.tracer.reduce(BLOCK_SUM, body, about.axis.size)

    def _needs(self, x: Node) -> Sequence[Node]:
        twin = self._twin(x)
        if twin is not None:
            return (twin,)
        if x.op in ("linear", "product"):
            return self._parts(x)
        if x.op in ("capture", CONTRACT, "const", "index", "size"):
            return ()
        if not has_products(x) and (self.leaves.is_whole(x) or self.leaves.ids_of(x)):
            return ()
        if x.op == "nonnegative" and x.args[0].op == "linear":
            return tuple(t for t in x.args[0].args if t.op not in ("index", "size"))
        return (self._summed(x)[1],) if x.op == "reduce" else x.args

    def _twin(self, x: Node) -> Node | None:
        """The same expression with gradient: one is computed, and cut off where it has none."""
        if x.flows or x.op == "const" or x.dtype == BOOL or not has_products(x):
            return None
        return self.twins.get(x)

    def _node(self, x: Node) -> Node:
        twin = self._twin(x)
        if twin is not None:
            return apply("detach", self.nodes[twin])
        if x.op == CONTRACT:
            return self._dot(x)
        if not has_products(x):
            free = self._free(x)
            if free is not None:
                return free
        if x.op == "reduce":
            return self._reduction(x, self.nodes[self._summed(x)[1]])
        has_args = x.op not in ("linear", "product", "nonnegative")
        args = [self.nodes[a] for a in x.args] if has_args else []
        match x.op:
            case "linear":
                return self._linear(x)
            case "product":
                return multiplied([self.nodes[f] for f in x.args], x.dtype)
            case "nonnegative":
                return self._nonnegative(x)
            case "log_softmax":
                return self._log_softmax(x, args[0])
            case "log":
                return logarithm(args[0], are_exact=self.are_exact)
            case "round" if x.args[0].op == CONTRACT and x.value in OPERATIONS:
                return apply(x.value, args[0])
            case "round":
                raise NoForm(f"scores or what is made of them are rounded to {x.value}", x)
            case "pow":
                return apply("pow", cast(args[0], FLOAT), x.value)
            case "where" if x.value == ADDED:
                removed = apply("where", args[0], const(0.0), const(-math.inf))
                return apply("add", cast(args[1], FLOAT), removed)
            case "where" if x.dtype == FLOAT:
                return apply("where", args[0], *(cast(a, FLOAT) for a in args[1:]))
            case "isnan" | "isinf":
                raise NoForm(f"{x.op} of scores", x)
            case "and" | "or" if not args:
                return const(float(x.op == "and"), BOOL)
            case "and" | "or" | "logaddexp":
                return folded(x.op, args)
        if x.op not in OPERATIONS:
            raise NoForm(f"{x.op} of scores", x)
        return apply(x.op, *args)

    def _dot(self, x: Node) -> Node:
        bare = self.leaves.detached.get(x, x)
        dot = self.tracer.dot(self.products[bare])
        return dot if x.flows else apply("detach", dot)

    # ------------------------------------------------------------------------ no products

    def _free(self, x: Node) -> Node | None:
        """An expression without products: a number, a position, or a captured tensor."""
        if x.op == "const":
            return const(x.value, x.dtype)
        if x.op == "index":
            return self._index(x)
        ids = self.leaves.ids_of(x)
        if ids is not None:
            self.tracer.captures = ()
            return self._captured(self.leaves.hits(x, ids))
        if x.op == "size":
            return self._captured(self.leaves.number(cast(x, FLOAT)))
        choice = self._choice(x)
        if choice is not None:
            return choice
        if self.leaves.is_whole(x):
            return self._captured(self.leaves.number(x))
        return None

    def _captured(self, number: int) -> Node:
        self.tracer.captures = self.leaves.declared()
        return self.tracer.capture(number)

    def _index(self, x: Node) -> Node:
        if (x.value,) == self.axes.keys or x.value == KEYS:
            return index(KEYS)
        if (x.value,) == self.axes.rows:
            return index(ROWS)
        raise NoForm("a mask that depends on the index of a batch or head", x)

    def _places(self, terms: Sequence[tuple[float, Node]]) -> list[tuple[float, Node]]:
        """Terms in which the axes of keys that code splits are one position."""
        keys = self.axes.keys
        by_axis = {t.value: c for c, t in terms if t.op == "index" and t.value in keys}
        if len(keys) == 1 or not by_axis:
            return list(terms)
        stride, scale = 1.0, by_axis.get(keys[-1], 0.0)
        for axis in reversed(keys):
            if by_axis.get(axis) != scale * stride or not isinstance(axis.size, int):
                raise NoForm("a tensor of blocks of keys meets the scores")
            stride *= axis.size
        rest = [(c, t) for c, t in terms if not (t.op == "index" and t.value in keys)]
        return [(scale, index(KEYS)), *rest]

    def _choice(self, x: Node) -> Node | None:
        """One of two numbers by a condition, which is the smaller tensor."""
        if not _chooses_numbers(x):
            return None
        constant, ((c, inner),) = terms_of(x)
        condition, *numbers = inner.args
        values = [const(constant + c * y.value if c else constant) for y in numbers]
        return apply("where", self.of(condition), *values)

    def _nonnegative(self, x: Node) -> Node:
        """A sum of coefficient * expression + constant >= 0, without negative terms."""
        constant, terms = terms_of(x.args[0])
        dtype = x.args[0].dtype  # integers stay exact
        sides: dict[bool, Node | None] = {True: None, False: None}

        def add(term: Node, is_left: bool) -> None:
            before = sides[is_left]
            sides[is_left] = term if before is None else apply("add", before, term)

        for c, t in sorted(self._places(terms), key=lambda item: item[1].op != "index"):
            if t.op == "size":
                raise NoForm("a mask whose place depends on a size that varies", x)
            place = self._index(t) if t.op == "index" else self.of(t)
            if abs(c) != 1:
                place = apply("mul", place, const(abs(c), dtype))
            add(place, c > 0)
        if constant:
            add(const(abs(constant), dtype), constant > 0)
        zero = const(0.0, dtype)
        left, right = (zero if y is None else y for y in (sides[True], sides[False]))
        return apply("ge", left, right)

    # ------------------------------------------------------------------------ sums

    def _parts(self, x: Node) -> tuple[Node, ...]:
        if not has_products(x):
            return () if self._is_leaf(x) else x.args
        free = self._free_terms(x) if x.op == "linear" else None
        kept = [a for a in x.args if has_products(a) or x.op == "product"]
        parts = [f for a in kept for f in factors_of(a)]
        return (*parts, *((free,) if free is not None and free.op != "const" else ()))

    def _is_leaf(self, x: Node) -> bool:
        return self.leaves.is_whole(x) or _chooses_numbers(x)

    def _free_terms(self, x: Node) -> Node:
        """What a sum adds to what is made of products."""
        constant, terms = terms_of(x)
        return linear(constant, [(c, t) for c, t in terms if not has_products(t)])

    def _linear(self, x: Node) -> Node:
        constant, terms = terms_of(x)
        if not has_products(x):
            made_of = [(c, self.nodes[t]) for c, t in terms]
            if masks := mask_terms(x):  # made first: others keep their digits
                others = [term for i, term in enumerate(made_of) if i not in masks]
                mask = added([made_of[i] for i in masks], constant, x.dtype)
                return added([*others, (1.0, mask)], 0.0, x.dtype)
            return added(made_of, constant, x.dtype)
        rest = self._free_terms(x)
        made = [(c, factors_of(t)) for c, t in terms if has_products(t)]
        total = self._grouped(made)
        if rest.op == "const":
            return added(total, rest.value)
        return added([*total, (1.0, cast(self.nodes[rest], FLOAT))], 0.0)

    def _grouped(
        self, terms: Sequence[tuple[float, tuple[Node, ...]]]
    ) -> list[tuple[float, Node]]:
        """Terms that share a probability as its product with the rest."""
        counts: dict[Node, int] = {}
        for _, factors in terms:
            for f in dict.fromkeys(factors):
                if f.op == "exp" and len(factors) > 1 and has_products(f):
                    counts[f] = counts.get(f, 0) + 1
        shared = max(counts, key=lambda f: counts[f], default=None)
        if shared is None or counts[shared] < 2:
            return [self._term(c, factors) for c, factors in terms]
        inside, others = [], []
        for c, factors in terms:
            if shared in factors and len(factors) > 1:
                left = list(factors)
                left.remove(shared)
                inside.append((c, tuple(left)))
            else:
                others.append((c, factors))
        difference = added(self._grouped(inside), 0.0)
        return [*self._grouped(others), (1.0, multiplied([self.nodes[shared], difference]))]

    def _term(self, c: float, factors: Sequence[Node]) -> tuple[float, Node]:
        """A coefficient and a product. The coefficient is one of the values of the row, if there
        are any: the lowest number, as masks fill it in, times one of two factors may be infinite.
        """
        nodes = [self.nodes[f] for f in factors]
        if abs(c) == 1.0 or all(x.by_key for x in nodes):
            return c, multiplied(nodes)
        return math.copysign(1.0, c), multiplied([*nodes, const(abs(c))])

    # ------------------------------------------------------------------------ logarithms

    def _log_softmax(self, x: Node, score: Node) -> Node:
        if x.value != self.whole:
            raise NoForm("softmaxes over different axes", x)
        score = cast(score, FLOAT)
        log = apply("sub", score, self.tracer.reduce(LOGSUMEXP, score))
        if x not in self.logarithms:
            return log
        made = logarithm(apply("exp", log), are_exact=self.are_exact)
        if self.logarithms[x] and made is not log:
            raise NoForm(
                "the logarithm of a softmax, which is -inf where that is 0, next to its "
                "log-softmax",
                x,
            )
        return made

    # ------------------------------------------------------------------------ reductions

    def _reduction(self, x: Node, body: Node) -> Node:
        """A reduction that elements use: over keys, or over the heads of a product."""
        kind, axis = x.kind, x.value.axis
        if axis == self.whole:
            if kind == ANY:
                count = self.tracer.reduce(SUM, cast(body, FLOAT))
                return apply("gt", count, const(0.0))
            if kind == MAX:
                check_maximum(x)
            if kind == ARGMAX:
                raise NoForm("elements use an argmax", x)
            return self.tracer.reduce(kind, body)
        if axis in self.leaves.parts:
            raise NoForm("elements use sums over blocks of keys", x)
        return self._over_heads(x, body)

    def _summed(self, x: Node) -> tuple[list[Axis], Node]:
        """The axes of a reduction, and what it is of: of a sum of sums over heads, all of them."""
        axes, inner = [x.value.axis], x.args[0]
        while (
            not set(axes) & {self.whole, *self.leaves.parts}
            and inner.op == "reduce"
            and x.kind == inner.kind == SUM
            and inner.value.axis not in (self.whole, *self.leaves.parts)
            and has_products(inner)
        ):
            axes.append(inner.value.axis)
            inner = inner.args[0]
        return axes, inner

    def _over_heads(self, x: Node, body: Node) -> Node:
        axes, _ = self._summed(x)
        heads = next((h for h in self.axes.heads if set(h) == set(axes)), None)
        is_log = x.kind == LOGSUMEXP and x.args[0].range[1] <= 0.0  # of probabilities
        if heads is None or not self.axes.is_summed or not (x.kind == SUM or is_log):
            raise NoForm("a sum over rows or some heads comes before the sum over the keys", x)
        body = apply("exp", body) if is_log else cast(body, FLOAT)
        if body.head != self.axes.numbers[heads]:
            raise NoForm("a sum over heads of what does not vary with them", x)
        return apply("log", sum_heads(body)) if is_log else sum_heads(body)


def _chooses_numbers(x: Node) -> bool:
    """Whether an expression is a multiple of one of two numbers by a condition, and a number."""
    _, terms = terms_of(x)
    is_choice = len(terms) == 1 and terms[0][1].op == "where"
    return is_choice and all(y.op == "const" for y in terms[0][1].args[1:])


def check_maximum(x: Node) -> None:
    """Raises NoForm if a maximum over the keys has a gradient."""
    if x.args[0].flows:
        raise NoForm("the gradient of a maximum over the keys", x)
