"""Lists expressions as steps, each after its arguments: the form that implementations run.

The text of a program, the evaluation of a tile and the writers of kernels go through steps in
order, and name values by their numbers. A reduction over keys is a step without arguments: its
value exists before the keys are read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch_streamkl.program import graph
from torch_streamkl.program.graph import (
    BLOCK_SUM,
    FLOAT,
    INT,
    KEY,
    ROW,
    Axis,
    Node,
    const,
    head_axis,
    intern,
    made,
    reduce,
    sum_heads,
)
from torch_streamkl.program.operations import OPERATIONS
from torch_streamkl.program.walks import walk


class Step(NamedTuple):
    """Holds one value and the operation that computes it from earlier steps.

    ``value`` is a constant, or the number of a dot, captured tensor or reduction. ``head`` is the
    axis of heads that it has, 0 for none: elements of one axis have as many heads. Without
    ``by_key`` it is a value of a row.
    """

    op: str
    args: tuple[int, ...] = ()
    value: float = 0.0
    dtype: str = FLOAT
    head: int = 0
    by_key: bool = False
    is_finite: bool = True


def steps_of(parsed: Iterable[Sequence[Any]]) -> tuple[Step, ...]:
    """Returns steps that were written as JSON, which has them as lists."""
    return tuple(Step(op, tuple(args), *rest) for op, args, *rest in parsed)


def exceeds_int32(steps: Iterable[Step]) -> bool:
    """Returns whether integers that are made of positions may be more than int32 holds."""
    integers = [step for step in steps if step.dtype == INT]
    numbers = [abs(step.value) for step in integers if step.op == "const"]
    return max(numbers, default=0.0) > 2**30 or any(step.op == "mul" for step in integers)


class Reduced(NamedTuple):
    """Describes a per-row value: a reduction over the keys of a row.

    A maximum has no derivative here.
    """

    kind: str
    node: int
    head: int
    size: int = 0  # of a block_sum: keys of a block

    @property
    def is_added(self) -> bool:
        """Returns whether elements are added up, for each row or each of its blocks."""
        return self.kind in (graph.SUM, BLOCK_SUM)


def is_over_keys(x: Node) -> bool:
    """Returns whether something is a reduction over keys, and not over heads."""
    return x.op == "reduce" and x.value.axis == KEY


def is_inside(x: Node) -> bool:
    """Returns whether the arguments of something are computed where it is."""
    return not is_over_keys(x)


def row_value(number: int, head: int = 0) -> Node:
    """Returns a value of a row that a program has computed, by its number."""
    axes = {ROW, head_axis(head)} if head else {ROW}
    return intern("reduction", (), number, FLOAT, frozenset(axes))


def expand_heads(x: Node, like: Node) -> Node:
    """Returns an element for each head of another, so that a sum over heads counts it for each."""
    if x.head or not like.head:
        return x
    axes = frozenset((*x.axes, ROW, KEY, head_axis(like.head)))
    return intern("expand_heads", (x, like), None, FLOAT, axes)


class Schedule:
    """Collects steps, and grows by what is asked for.

    With ``is_sorted`` the arguments of commutative operations stand in one order, whichever way
    they were written. A literal one computes products as torch does, NaN where torch has it.
    """

    def __init__(self, is_sorted: bool = False, is_literal: bool = False) -> None:
        self.is_sorted, self.is_literal = is_sorted, is_literal
        self.steps: list[Step] = []
        self.reductions: list[Reduced] = []
        self.numbers: dict[Node, int] = {}  # of the steps; of reductions, those of their own list
        self._known: dict[Step, int] = {}
        self._reduced: dict[Node, int] = {}

    def __getitem__(self, root: Node) -> int:
        """Returns the number of an expression's step, which is made with all that it needs."""
        stack = [root]
        while stack:
            x = stack[-1]
            if x in self.numbers:
                stack.pop()
                continue
            waiting = [a for a in reversed(self._args(x)) if a not in self.numbers]
            if waiting:
                stack += waiting
            else:
                self._append(x, self._step(x))
                stack.pop()
        return self.numbers[root]

    def reduction(self, x: Node) -> int:
        """Returns the number of a reduction over keys."""
        if x not in self._reduced:
            of = Reduced(x.kind, self[x.args[0]], x.head, x.value.size)
            if of not in self.reductions:
                self.reductions.append(of)
            self._reduced[x] = self.reductions.index(of)
        return self._reduced[x]

    def begin_with(self, steps: Sequence[Step], nodes: Sequence[Node]) -> None:
        """Starts with the steps of a program, which these expressions are."""
        for step, x in zip(steps, nodes, strict=True):
            self.numbers[x] = self._known.setdefault(step, len(self.steps))
            self.steps.append(step)

    def _append(self, x: Node, step: Step) -> None:
        if step not in self._known:
            self._known[step] = len(self.steps)
            self.steps.append(step)
        self.numbers[x] = self._known[step]

    def _args(self, x: Node) -> list[Node]:
        args = list(x.args)
        if self.is_sorted and x.op in OPERATIONS and OPERATIONS[x.op].is_commutative:
            args.sort(key=lambda a: a.digest)
        return args

    def _step(self, x: Node) -> Step:
        about = x.dtype, x.head, x.by_key, x.is_finite
        if is_over_keys(x):
            op = BLOCK_SUM if x.kind == BLOCK_SUM else "reduction"
            return Step(op, (), self.reduction(x), *about)
        args = tuple(self.numbers[a] for a in self._args(x))
        match x.op:
            case "reduce":
                return Step("sum_heads", args, 0.0, *about)
            case "index":
                return Step("key_index" if x.value == KEY else "row_index", (), 0.0, *about)
            case "mul" if x.is_guarded and not self.is_literal:
                return Step("mul0", args, 0.0, *about)
        return Step(x.op, args, 0.0 if x.value is None else x.value, *about)


def nodes_of(
    steps: Sequence[Step], reductions: Sequence[Reduced], axes: Sequence[frozenset[Axis]]
) -> list[Node]:
    """Returns the expressions that steps compute; ``axes`` are those of captured tensors.

    A reduction that is not among these is a value of a row by its number.
    """
    found: list[Node] = []
    for step in steps:
        args = [found[a] for a in step.args]
        own = head_axes(step.head) | ({KEY} if step.by_key else set())
        number = int(step.value) if step.op not in ("const", "pow") else 0
        match step.op:
            case "const":
                x = const(step.value, step.dtype, frozenset(own))
            case "dot":
                x = graph.dot(number, step.head)
            case "capture":
                x = graph.capture(number, step.dtype, axes[number] | own)
            case "key_index" | "row_index":
                x = graph.index(KEY if step.op == "key_index" else ROW)
            case "reduction" if number < len(reductions):
                of = reductions[number]
                x = reduce(of.kind, KEY, found[of.node], of.size)
            case "reduction":
                x = row_value(number, step.head)
            case "sum_heads":
                x = sum_heads(args[0])
            case "expand_heads":
                x = expand_heads(*args)
            case "pow":
                x = graph.made_power(args[0], step.value)
            case op:
                x = made("mul" if op == "mul0" else op, args)
        found.append(x)
    return found


def head_axes(head: int) -> frozenset[Axis]:
    """Returns the axis of heads with a number, none for 0."""
    return frozenset((head_axis(head),)) if head else frozenset()


def used_by(steps: Sequence[Step], roots: Iterable[int]) -> list[int]:
    """Returns what the wanted steps need, in the order of computation."""
    needed = set(roots)
    stack = list(needed)
    while stack:
        for a in steps[stack.pop()].args:
            if a not in needed:
                needed.add(a)
                stack.append(a)
    return sorted(needed)


def outermost(roots: Iterable[Node]) -> list[Node]:
    """Returns the reductions over keys that per-row values are computed from."""
    return [x for x in walk(roots, is_inside) if is_over_keys(x)]
