"""Derives a row program's gradients symbolically (NOTE [The algebra] in program.py)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch_streamkl.program.derive import adjoints, tangent
from torch_streamkl.program.graph import (
    ARGMAX,
    FLOAT,
    KEY,
    LOGSUMEXP,
    MAX,
    ONE,
    ROW,
    ZERO,
    Node,
    apply,
    constant,
    seed,
)
from torch_streamkl.program.operations import OPERATIONS
from torch_streamkl.program.steps import Step, expand_heads, head_axes, is_inside, is_over_keys
from torch_streamkl.program.walks import walk
from torch_streamkl.rows.program import Program

HEAD_OPERATIONS = ("sum_heads", "expand_heads")


@dataclass(frozen=True)
class Sum:
    """Describes a sum over keys in a pass of the forward, over blocks of them if c is one."""

    level: int
    node: int
    head: int
    reduction: int  # K_cb: c. Of a reduction of kind sum: itself
    by: int = -1  # K_cb: b; -1 of a reduction
    size: int = 0  # keys of a block


@dataclass(frozen=True)
class ForwardPlan:
    """Plans what the passes of the forward compute."""

    nodes: tuple[Step, ...]
    num_passes: int
    jacobians: tuple[Sum, ...]


@dataclass(frozen=True)
class BackwardPlan:
    """Plans the backward: gradients to dot products and captured tensors, as elements."""

    nodes: tuple[Step, ...]
    dots: tuple[int | None, ...]
    captures: tuple[int | None, ...]


@functools.lru_cache(maxsize=256)
def forward_plan(program: Program, is_differentiated: bool) -> ForwardPlan:
    """Returns reductions by level; with the Jacobians where a gradient will be wanted."""
    if not is_differentiated:
        return ForwardPlan(program.nodes, max(program.levels), ())
    schedule, jacobians = program.schedule(), []
    varies = _varying(program)
    for c, value in enumerate(program.reduced):
        for b, by in enumerate(program.reduced):
            if program.levels[b] >= program.levels[c] or not (varies[b] and varies[c]):
                continue
            t, level = _jacobian(value.args[0], by), program.levels[c]
            if constant(t) == 0:
                continue
            if value.kind == LOGSUMEXP:  # its own value is known one pass later
                t, level = _softmax(value) * t, level + 1
            jacobians.append(Sum(level, schedule[t], t.head, c, b, value.value.size))
    passes = max(*program.levels, *(j.level for j in jacobians), 1)
    return ForwardPlan(tuple(schedule.steps), passes, tuple(jacobians))


def _varying(program: Program) -> list[bool]:
    """Marks the reductions that something which may need a gradient enters."""
    found: dict[Node, bool] = {}
    for x in walk(program.reduced):
        if not x.args:
            found[x] = x.op in ("dot", "capture") and x.dtype == FLOAT
            continue
        is_smooth = x.op not in OPERATIONS or OPERATIONS[x.op].rule is not None
        if x.op == "reduce":
            is_smooth = x.kind not in (MAX, ARGMAX)
        found[x] = is_smooth and any(found[a] for a in x.args)
    return [found[x] for x in program.reduced]


def _softmax(value: Node) -> Node:
    """Builds exp(e_c - R_c), the derivative of a log-sum-exp by its element."""
    return apply("exp", value.args[0] - value)


def _jacobian(root: Node, b: Node) -> Node:
    """Builds d(root)/dR_b, for each head of R_b if the root has none."""

    def known(x: Node) -> Node | None:
        if not is_over_keys(x):
            return None
        return ONE if x is b else ZERO

    return tangent(root, known, b)


def _reached(program: Program) -> set[int]:
    """Returns the reductions that a gradient of an output may reach, by number."""
    jacobians = forward_plan(program, True).jacobians
    found = set(program.outputs)
    for c in range(len(program.reductions) - 1, -1, -1):
        if c in found:
            found |= {j.by for j in jacobians if j.reduction == c}
    return found


@functools.lru_cache(maxsize=256)
def backward_plan(program: Program) -> BackwardPlan:
    """Returns the gradient of ``sum_c r_c R_c`` to what is not a value of a row, r_c being its
    seed. A reduction that no output depends on differentiably has none.
    """
    seeds, reached = [], _reached(program)
    for c, value in enumerate(program.reduced):
        if value.kind in (MAX, ARGMAX) or c not in reached:
            continue
        axes = head_axes(value.head) | ({ROW, KEY} if value.value.size else {ROW})
        t = seed(c, axes)
        seeds.append((value.args[0], t * _softmax(value) if value.kind == LOGSUMEXP else t))
    gradients, schedule = adjoints(seeds), program.schedule()
    found = {
        (x.op, x.value): schedule[expand_heads(gradients[x], x)]
        for x in walk([x for x, _ in seeds], is_inside)
        if x.op in ("dot", "capture") and constant(gradients.get(x, ZERO)) != 0
    }
    return BackwardPlan(
        tuple(schedule.steps),
        tuple(found.get(("dot", i)) for i in range(len(program.dot_heads))),
        tuple(found.get(("capture", i)) for i in range(len(program.captures))),
    )
