"""Represents what each row adds to a loss as data: a function of a program's per-row values.

If an operator knows this function, it computes the gradient to each of its values in the forward,
row by row, and does not read the logits again. The function is what the user's code has between
the values and their sum: pointwise in rows, with tensors that are known before.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torch_streamkl.program.derive import adjoints
from torch_streamkl.program.graph import ONE, ROW, ZERO, Node, apply, literally
from torch_streamkl.program.steps import Schedule, Step, nodes_of, steps_of, used_by
from torch_streamkl.program.walks import walk
from torch_streamkl.rows import tile
from torch_streamkl.rows.problem import RowProblem, Slices, part
from torch_streamkl.rows.tile import RowValue


@dataclass(frozen=True)
class LossResult:
    """Holds what each row adds to a loss, the loss's gradients, and the program's outputs."""

    values: Tensor  # [batch, 1, rows]
    grads: list[Tensor | None]
    outputs: list[Tensor]


@dataclass(frozen=True)
class RowLoss:
    """Holds the formula by which each row contributes to a reduced loss, as steps.

    "reduction" is a value of the program, by its number; "capture" a tensor of rows, by its place
    among those that come with the loss. A literal one computes what torch does of the same
    operations; one of a row program's function has that one's rules for 0 and infinity.
    """

    nodes: tuple[Step, ...]
    is_literal: bool

    @staticmethod
    def of_node(root: Node, is_literal: bool) -> RowLoss:
        """Returns the loss of an expression of `steps.row_value` and tensors of rows."""
        schedule = Schedule(is_literal=is_literal)
        last = schedule[root]
        return RowLoss(tuple(schedule.steps[: last + 1]), is_literal)

    @functools.cached_property
    def text(self) -> str:
        """Returns the loss as an argument of an operator."""
        return json.dumps([self.nodes, self.is_literal], separators=(",", ":"))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(text: str) -> RowLoss:
        """Returns the loss of a text."""
        nodes, is_literal = json.loads(text)
        return RowLoss(steps_of(nodes), is_literal)

    @functools.cached_property
    def slopes(self) -> tuple[tuple[Step, ...], dict[int, int]]:
        """Returns the derivative by each reduction, as steps after those of the loss."""
        build = literally if self.is_literal else apply
        count = 1 + max((int(n.value) for n in self.nodes if n.op == "capture"), default=-1)
        exprs = nodes_of(self.nodes, (), [frozenset((ROW,))] * count)
        schedule = Schedule(is_literal=self.is_literal)
        schedule.begin_with(self.nodes, exprs)
        gradients = adjoints([(exprs[-1], ONE)], build)
        found = {
            x.value: schedule[gradients.get(x, ZERO)]
            for x in walk(exprs[-1:])
            if x.op == "reduction"
        }
        return tuple(schedule.steps), found

    @functools.cached_property
    def is_linear(self) -> bool:
        """Returns whether the derivatives are known before the values."""
        nodes, found = self.slopes
        return not any(nodes[i].op == "reduction" for i in used_by(nodes, found.values()))


def result_of(
    problem: RowProblem,
    loss: RowLoss,
    reductions: dict[int, Tensor],
    tensors: Sequence[Tensor],
    grads: list[Tensor | None],
) -> LossResult:
    """Returns the result of a problem with these reductions and gradients."""
    roots, at = [len(loss.nodes) - 1], tile.whole(problem)
    (values,) = _evaluated(problem, loss.nodes, roots, reductions, tensors, at)
    return LossResult(values, grads, [reductions[c] for c in problem.program.outputs])


def gradients(
    problem: RowProblem,
    loss: RowLoss,
    reductions: dict[int, Tensor],
    tensors: Sequence[Tensor],
    at: Slices,
) -> dict[int, Tensor]:
    """Returns the derivative of what each row of a block adds by each reduction that it depends
    on; ``reductions`` are of the block.
    """
    nodes, found = loss.slopes
    computed = _evaluated(problem, nodes, list(found.values()), reductions, tensors, at)
    return dict(zip(found, computed, strict=True))


def _evaluated(
    problem: RowProblem,
    nodes: Sequence[Step],
    roots: Sequence[int],
    reductions: dict[int, Tensor],
    tensors: Sequence[Tensor],
    at: Slices,
) -> list[Tensor]:
    def captured(_: RowProblem, number: int, at: Slices) -> Tensor:
        x = part(tensors[number], at[0], slice(None), at[1])[..., None]
        return x.to(problem.compute_dtype) if x.is_floating_point() else x

    rows = {c: RowValue(x) for c, x in reductions.items()}
    size = (at[0].stop - at[0].start, 1, at[1].stop - at[1].start)
    found = tile.evaluate(problem, nodes, roots, at, rows, {}, captured=captured)
    return [x.expand(*size, 1)[..., 0] for x in found]
