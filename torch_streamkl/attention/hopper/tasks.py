"""Derives the compile-time choices of the Hopper kernels from an AttentionProblem."""

from __future__ import annotations

import dataclasses
import math

from torch_streamkl.attention.heuristics import key_splits, row_splits
from torch_streamkl.attention.hopper import backward_config, forward_config
from torch_streamkl.attention.hopper.second_pass import Specialized
from torch_streamkl.attention.hopper_tiles import (
    HOPPER_BIASED,
    HOPPER_MASKED,
    HopperLaunch,
    adds_queries,
    by_tiles,
    columns_of,
    has_bias,
    has_one_bias,
    hopper_backward_launch,
    is_wide,
    multiplies_pairs,
    plain_clamp,
)
from torch_streamkl.attention.plans import Plan, config_of
from torch_streamkl.attention.problem import AttentionProblem, Side
from torch_streamkl.kernels.tiles import ceil_div


def sides_of(problem: AttentionProblem, plan: Plan) -> tuple[bool, Side, Side]:
    """Returns whether the teacher's probabilities weight the moment; the other side; that side."""
    by_teacher = plan.form.TT != 0.0 or plan.form.TS != 0.0
    sides = problem.sides
    return (by_teacher, *(sides if by_teacher else sides[::-1]))


def forward_task(
    problem: AttentionProblem, plan: Plan, launch: HopperLaunch, parts: int
) -> forward_config.Task:
    """Returns the choices of the forward; ``parts`` of each of the last blocks."""
    by_teacher, *sides = sides_of(problem, plan)
    wide, persistent = is_wide(problem), by_tiles(problem)
    config = config_of(problem, launch)
    if problem.mask is not None:
        config = config._replace(HAS_LEFT=False, HAS_RIGHT=False)  # the prepared mask has them
    second = persistent and config.TWO_PASS and not config.GUARDED
    form = plan.form if wide or persistent else plan.squares or plan.form
    widest = max(columns_of(side.head_dim) for side in sides)
    teacher = (
        (form.TT, config.TEACHER.FLOOR),
        (form.TS, config.STUDENT.FLOOR),
    )  # of `weight`, `other`
    student = (form.SS, config.STUDENT.FLOOR), (form.ST, config.TEACHER.FLOOR)
    of_weight, of_other = (
        forward_config.SideTask(
            DIM=widest if wide else columns_of(side.head_dim),
            COEFFICIENT=coefficient,
            CLAMPED=config.GUARDED and floor > -math.inf,
            BIASED=side.bias is not None,
        )
        for side, (coefficient, floor) in zip(
            sides[::-1], teacher if by_teacher else student, strict=True
        )
    )
    return forward_config.Task(
        WEIGHT_IS_TEACHER=by_teacher,
        OTHER=of_other,
        WEIGHT=of_weight,
        PERSISTENT=persistent,
        WIDE=wide,
        SECOND=second,
        PAIRS=second or (not wide and not persistent and multiplies_pairs(problem)),
        SAME_BIAS=has_one_bias(problem),
        SQUARES=form.SQUARES != 0.0,
        PARTS=parts,
        GROUPS=launch.groups,
        SLOTS=launch.slots,
        COEFFICIENTS=form,
        SPECIALIZED=specialized(problem),
        CONFIG=config,
    )


def specialized(problem: AttentionProblem) -> Specialized:
    """Returns the numbers of a divergence whose second pass is known by its form."""
    functional = problem.functional
    quotient = functional.quotient
    return Specialized(
        *(functional.mixture or (0.0, 0.0)),
        functional.variation or 0.0,
        *((0.0, 0.0, False) if quotient is None else dataclasses.astuple(quotient)),
    )


def rows_of_block(task: backward_config.Task) -> int:
    """Returns the outer rows of a program's block."""
    return task.GROUPS * task.BLOCK


def gradients_by_tiles(problem: AttentionProblem) -> bool:
    """Returns whether the kernels of gradients are persistent ones."""
    return by_tiles(problem, backward=True) and not adds_queries(problem)


def backward_task(
    problem: AttentionProblem, plan: Plan, student: bool, rows: bool, adds: bool
) -> backward_config.Task:
    """Returns the choices of dQ (``rows``) or dK of a side; dK ``adds`` dQ, too."""
    sides = problem.sides
    own, other = sides if student else sides[::-1]
    clamp = plain_clamp(problem) if student else None
    plain = clamp is not None
    squares = -2.0 * (problem.functional.squares or 0.0)
    own_columns, other_columns = columns_of(own.head_dim), columns_of(other.head_dim)
    # three warp groups, of 64 columns, would spill with squares as with logarithms
    is_lean = plain or (bool(squares) and own_columns == 128)
    launch = hopper_backward_launch(
        own_columns, other_columns, has_logarithms=not is_lean, adds=adds
    )
    if problem.mask is not None:
        launch = HOPPER_MASKED
    if has_bias(problem):
        launch = HOPPER_BIASED
    group, num_splits = 1, 1
    length = problem.seqlen_q if rows else problem.seqlen_k
    blocks = ceil_div(length, launch.groups * launch.block_m) * problem.batch
    if rows and not gradients_by_tiles(problem):
        tiles = ceil_div(problem.seqlen_k, launch.block_n)
        num_splits = row_splits(problem, blocks * problem.num_heads, tiles)
    if not rows:
        group = own.group
        programs = blocks * own.num_kv_heads
        num_splits = key_splits(problem, group, programs, resident=1, together=other.group)
    return backward_config.Task(
        ROWS=rows,
        STUDENT=student,
        PERSISTENT=gradients_by_tiles(problem),
        HAS_LEFT=problem.window_left is not None and problem.mask is None,
        HAS_RIGHT=problem.window_right is not None and problem.mask is None,
        HAS_MASK=problem.mask is not None,
        IS_PACKED=problem.is_packed,
        PLAIN=plain,
        CLAMP=clamp or 0.0,
        SQUARES=squares,
        FOLDED=plain and not rows,
        COEFFICIENTS=plan.form,
        GROUP_SIZE=1 if rows else group // num_splits,
        SPLITS=num_splits,
        DIM=own.head_dim,
        HEAD_DIM=own_columns,
        OTHER_DIM=other_columns,
        BLOCK=launch.block_m,
        INNER=launch.block_n,
        GROUPS=launch.groups,
        SLOTS=launch.slots,
        PINNED=launch.pinned,
        OWN_BIAS=own.bias is not None,
        OTHER_BIAS=other.bias is not None,
        SAME_BIAS=has_one_bias(problem),
        WHOLE_TILES=_ends_with_tile(problem, rows, launch.block_n),
        ADDS=adds,
    )


def _ends_with_tile(problem: AttentionProblem, rows: bool, tile: int) -> bool:
    """Whether the last inner tile of a gradient is a whole one."""
    return not problem.is_packed and (problem.seqlen_k if rows else problem.seqlen_q) % tile == 0
