"""Reads the computation from a row program's values to one number, as a loss of each row."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.mutation import has_effect
from torch_streamkl.fx_passes.fx_utils.nodes import (
    descendants,
    example,
    is_call,
    name_of,
    reached,
    tensor_of,
)
from torch_streamkl.fx_passes.fx_utils.op_names import (
    COPIES,
    DIFFERENCES,
    DTYPES,
    PRODUCTS,
    QUOTIENTS,
    RESHAPES,
)
from torch_streamkl.fx_passes.fx_utils.sizes import (
    Size,
    provably_equal,
    same_shape,
)
from torch_streamkl.program.graph import FLOAT, ROW, Node, capture, const, literally
from torch_streamkl.program.operations import MAX_POWER
from torch_streamkl.program.steps import row_value
from torch_streamkl.rows.losses import RowLoss
from torch_streamkl.rows.problem import RowProblem
from torch_streamkl.rows.trace import dtype_of

VIEWS = RESHAPES | COPIES | DTYPES  # which keep the order of the rows
UNARY = {"neg": "neg", "negative": "neg", "exp": "exp", "log": "log", "abs": "abs", "sqrt": "sqrt"}
BINARY = {
    "add": "add", **dict.fromkeys(DIFFERENCES, "sub"), **dict.fromkeys(PRODUCTS, "mul"),
    **dict.fromkeys(QUOTIENTS, "div"),
}  # fmt: skip


@dataclass(frozen=True)
class Term:
    """Describes a node of the graph: a value for each row, or their sum over all rows."""

    expr: Node
    is_sum: bool
    is_detached: bool = False


@dataclass(frozen=True)
class Chain:
    """Describes the computation from a program's values to one number."""

    before: tuple[fx.Node, ...]  # in the order of the graph
    total: fx.Node
    loss: RowLoss
    known: tuple[KnownTensor, ...]
    metrics: tuple[fx.Node, ...] = ()  # what detaches some of what is computed before


@dataclass(frozen=True)
class KnownTensor:
    """Describes a tensor that is read with the values, in their shape; None is the row count."""

    node: fx.Node | None
    text: str = ""  # of the shape: comparing symbolic sizes would guard
    shape: tuple[Size, ...] = field(default=(), compare=False)


def chain_of(call: fx.Node, off: Collection[fx.Node]) -> Chain | None:
    """Returns the computation from a program's values to one number, None if it is no such.

    ``off`` are the operations of the graph that autograd does not record.
    """
    return _Reader(call, off).chain()


class _Reader:
    """Follows the values of a call through the graph."""

    def __init__(self, call: fx.Node, off: Collection[fx.Node]) -> None:
        self.call, self.off = call, off
        self.terms: dict[fx.Node, Term] = {}
        self.known: list[KnownTensor] = []
        self.num_known: dict[fx.Node, int] = {}  # how many of them are there at a node
        self.followed: list[fx.Node] = []  # values, and sizes of them, which views read
        self.after_call = descendants([call])
        program: Any = call.args[1]
        tensors: Any = [tensor_of(x) for x in call.args[0]]  # type: ignore[union-attr]
        self.problem = RowProblem.of(program, tensors)
        self.device = tensors[0].device

    def chain(self) -> Chain | None:
        """Returns the operations up to the first number through which everything goes."""
        outputs = self.problem.program.outputs
        for part in self.call.users:
            if part.target is not operator.getitem or part.args[1] not in outputs:
                return None
            number = int(part.args[1])  # type: ignore[arg-type]
            head = self.problem.program.reductions[number].head
            if tensor_of(part).requires_grad:
                self.terms[part] = Term(row_value(number, head), False)
                self.followed.append(part)
            elif not tensor_of(part).is_floating_point():  # the place of a maximum: a metric
                value = literally("detach", row_value(number, head))
                self.terms[part] = Term(value, False, is_detached=True)
        for node in sorted(self.after_call):  # in the order of the graph
            if node in self.terms or not any(a in self.terms for a in node.all_input_nodes):
                continue
            term = self._term(node)
            if term is not None:
                self.terms[node], self.num_known[node] = term, len(self.known)
            is_size = name_of(node) == "size" and isinstance(example(node), (int, torch.SymInt))
            if term is not None or is_size:
                self.followed.append(node)
        for node, term in self.terms.items():
            if not term.is_sum or term.is_detached:
                continue
            later, needed = descendants([node]), reached([node], self._inputs)
            before = tuple(
                n for n in self.followed if n not in later and (n in needed or self._learns(n))
            )
            metrics = self._metrics(before, node)
            if self._is_all(node, before, metrics) and _has_finite_gradient(node):
                loss = RowLoss.of_node(term.expr, is_literal=True)
                known = tuple(self.known[: self.num_known[node]])
                return Chain(before, node, loss, known, tuple(metrics))
        return None

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        """What a node is computed from, of what is computed of the call."""
        return [a for a in node.all_input_nodes if a in self.after_call]

    def _learns(self, node: fx.Node) -> bool:
        """Whether a node is no value that is detached."""
        return node not in self.terms or not self.terms[node].is_detached

    def _metrics(self, before: Sequence[fx.Node], total: fx.Node) -> list[fx.Node]:
        """Returns detached values that are read elsewhere, too."""
        inside = {*before, total}
        found = [n for n in before if not self._learns(n) and not inside.issuperset(n.users)]
        return found + [
            u
            for n in (self.call, *before)
            for u in n.users
            if u not in inside and self._learns(n) and not self._learns(u)
        ]

    def _is_all(
        self, total: fx.Node, before: Sequence[fx.Node], metrics: Sequence[fx.Node]
    ) -> bool:
        """Whether the call's values reach other code through one number and metrics alone."""
        allowed = {*before, total, *metrics}
        learned = (n for n in (self.call, *before) if self._learns(n))
        return all(u in allowed for n in learned for u in n.users)

    # ------------------------------------------------------------------ one operation

    def _term(self, node: fx.Node) -> Term | None:
        value = example(node)
        if not is_call(node) or not isinstance(value, Tensor):
            return None
        if not self._is_computed(value) or has_effect(node):
            return None
        name, args = name_of(node), list(node.args)
        x = self.terms.get(args[0]) if args and isinstance(args[0], fx.Node) else None
        if name == "detach" and x is not None:
            return x if x.is_detached else Term(literally("detach", x.expr), x.is_sum, True)
        read = [self.terms[a] for a in node.all_input_nodes if a in self.terms]
        is_detached = all(term.is_detached for term in read)
        if value.requires_grad and (is_detached or node in self.off):
            return None  # of what else learns, or a view under no_grad, which says that it learns
        term = self._computed(node, name, args, x)
        if term is None or is_detached:
            return None if term is None else replace(term, is_detached=True)
        if not value.requires_grad:  # under no_grad
            return Term(literally("detach", term.expr), term.is_sum, True)
        return term

    def _computed(self, node: fx.Node, name: str, args: list[Any], x: Term | None) -> Term | None:
        if name in VIEWS and x is not None:
            return self._view(node, x)
        if name in ("sum", "mean") and x is not None and not x.is_sum:
            return self._total(node, x)
        if node.kwargs:
            return None
        if name in UNARY and len(args) == 1 and x is not None:
            return self._apply(node, UNARY[name], [args[0]])
        if name in BINARY and len(args) == 2:
            return self._apply(node, BINARY[name], args)
        if name == "clamp_max" and len(args) == 2 and not tensor_of(node).requires_grad:
            return self._apply(node, name, args)  # as of a row's largest probability
        if name in ("pow", "square") and x is not None and not x.is_sum:
            exponent: Any = args[1] if name == "pow" else 2
            is_number = isinstance(exponent, (int, float)) and 0 < abs(exponent) <= MAX_POWER
            if not is_number or not _as_many(node, args[0]):
                return None
            return Term(literally("pow", x.expr, float(exponent)), False)
        if name == "masked_fill" and len(args) == 3 and x is not None:
            return self._apply(node, "where", [args[1], args[2], args[0]])
        if name == "where" and len(args) == 3:
            return self._apply(node, "where", args)
        return None

    def _is_computed(self, value: Tensor) -> bool:
        """Whether a type has no more digits than the operator computes with, and its range."""
        dtype, most = value.dtype, self.problem.compute_dtype
        is_kind = dtype.is_floating_point and dtype != torch.float16 and dtype.itemsize > 1
        return is_kind and dtype.itemsize <= most.itemsize and value.device == self.device

    def _view(self, node: fx.Node, x: Term) -> Term | None:
        """Reads another shape, or another floating type, of the same values in the same order."""
        rest = (*node.args[1:], *node.kwargs.values())
        reads = any(isinstance(a, fx.Node) and isinstance(example(a), Tensor) for a in rest)
        is_cast = name_of(node) == "view" and any(isinstance(a, torch.dtype) for a in rest)
        if reads or is_cast or not _as_many(node, node.args[0]):
            return None
        return x if not x.is_sum or tensor_of(node).dim() == 0 else None

    def _total(self, node: fx.Node, x: Term) -> Term | None:
        """Matches a sum or mean over all rows, whatever dimensions it names."""
        if (
            "dtype" in node.kwargs
            or tensor_of(node).dim() != 0
            or tensor_of(node.args[0]).dim() == 0
        ):
            return None
        if name_of(node) == "sum":
            return Term(x.expr, True)
        return Term(literally("div", x.expr, self._number_of_rows()), True)

    def _number_of_rows(self) -> Node:
        rows = self.problem.num_rows
        if isinstance(rows, int):
            return const(rows)
        return self._capture(KnownTensor(None), FLOAT)

    def _apply(self, node: fx.Node, op: str, given: list[Any]) -> Term | None:
        """Applies a pointwise operation to per-row values, or to their sums if it is linear."""
        rows = [a for a in given if isinstance(a, fx.Node) and a in self.terms]
        is_sum = self.terms[rows[0]].is_sum
        if any(self.terms[a].is_sum != is_sum for a in rows) or not _as_many(node, rows[0]):
            return None
        if is_sum:
            # what is added to a sum is not added to each row, and 0 times an infinite tensor is
            # NaN where the sum is not 0
            others = [a for a in given if a not in rows]
            is_linear = {"add": not others, "sub": not others, "neg": True}
            is_factor = len(rows) == 1 and all(_is_factor(a) for a in others)
            is_linear |= {"mul": is_factor, "div": is_factor and given[0] is rows[0]}
            if not is_linear.get(op, False):
                return None
        arguments = [
            self._argument(a, node, is_condition=op == "where" and i == 0)
            for i, a in enumerate(given)
        ]
        found = [a for a in arguments if a is not None]
        return Term(literally(op, *found), is_sum) if len(found) == len(given) else None

    def _argument(self, x: Any, node: fx.Node, is_condition: bool) -> Node | None:
        """Returns a per-row value, a number, or a tensor that is known before the call."""
        if isinstance(x, (int, float)) and not isinstance(x, bool) and not is_condition:
            return const(float(x)) if math.isfinite(x) else None
        if not isinstance(x, fx.Node):
            return None
        if x in self.terms:  # of one shape: else rows meet other rows
            fits = not is_condition and same_shape(tensor_of(x).shape, tensor_of(node).shape)
            return self.terms[x].expr if fits else None
        value = example(x)
        if not isinstance(value, Tensor) or x in self.after_call or value.requires_grad:
            return None
        if (value.dtype == torch.bool) != is_condition or value.device != self.device:
            return None
        if (value.dtype.is_floating_point and not self._is_computed(value)) or value.is_complex():
            return None
        shape = tuple(tensor_of(node).shape)
        known = KnownTensor(x, str(shape), shape)
        return self._capture(known, dtype_of(value))

    def _capture(self, known: KnownTensor, dtype: str) -> Node:
        if known not in self.known:
            self.known.append(known)
        place = self.known.index(known)
        return capture(place, dtype, frozenset((ROW,)))


def _has_finite_gradient(total: fx.Node) -> bool:
    """Whether what follows multiplies the gradient of a sum by numbers alone.

    A row that does not count has the gradient 0 in the forward. Times what is infinite or NaN that
    is NaN, where eager code masks such a gradient after the product: `sum() / mask.sum()` of an
    empty mask, or a value that a later `where` replaces because it is not finite.
    """
    todo, seen = [total], {total}
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.op == "output" or user in seen or name_of(user) == "detach":
                continue
            value = example(user)
            if isinstance(value, (int, torch.SymInt)) or not isinstance(value, Tensor):
                return False
            name = name_of(user)
            given: list[Any] = [*user.args, *user.kwargs.values()]
            others = [a for a in given if a is not node]
            is_read_once = len(others) == len(given) - 1
            op = BINARY.get(name)
            if op in ("add", "sub"):
                passes = not user.kwargs
            elif op == "mul":
                passes = is_read_once and all(map(_is_factor, others))
            elif op == "div":
                by = (_is_factor(a) or _is_a_count(a) for a in others)
                passes = is_read_once and user.args[0] is node and all(by)
            else:
                is_view = name in ("neg", "negative") or name in VIEWS
                passes = is_view and not any(isinstance(a, fx.Node) for a in others)
            if not passes or has_effect(user):
                return False
            seen.add(user)
            todo.append(user)
    return True


def _is_a_count(x: Any) -> bool:
    """Whether a node is a count of at least one, such as `clamp(min=1)` of integers."""
    if not isinstance(x, fx.Node) or name_of(x) not in ("clamp", "clip", "clamp_min"):
        return False
    given: list[Any] = [*x.args[1:], *x.kwargs.values()]
    is_count = len(given) == 1 and "max" not in x.kwargs and isinstance(given[0], int)
    return is_count and given[0] >= 1 and not tensor_of(x).is_floating_point()


def _is_factor(x: Any) -> bool:
    """Whether a number may multiply or divide a sum row by row."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < abs(x) < math.inf


def _as_many(a: Any, b: Any) -> bool:
    """Whether two tensors have equally many entries, so that no per-row value is repeated."""
    return provably_equal(tensor_of(a).numel(), tensor_of(b).numel())
