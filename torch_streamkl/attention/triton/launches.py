"""Launches the portable attention kernels: builds grids and arguments from an AttentionProblem.

The CPU never waits for the GPU: kernels read lengths, guards and packed offsets on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_streamkl.attention import head_mean_launches
from torch_streamkl.attention.heuristics import key_splits
from torch_streamkl.attention.pack_gqa import packs_rows, packs_rows_backward
from torch_streamkl.attention.plans import (
    NUM_STATE_FIELDS,
    NUM_SUMS,
    Plan,
    Stage,
    plan_of,
    tensors_of,
)
from torch_streamkl.attention.problem import AttentionProblem, Gradients, NeedsGrad, RowStatistics
from torch_streamkl.attention.triton import backward as bwd
from torch_streamkl.attention.triton import forward as fwd
from torch_streamkl.attention.triton import forward_splits as splits_of_keys
from torch_streamkl.kernels.splits import combine_splits, gradient_args, new_splits


@packs_rows
def forward(problem: AttentionProblem) -> tuple[Tensor, RowStatistics]:
    """Returns per-row values and statistics, float32."""
    if problem.head_mean:
        return head_mean_launches.forward(problem)
    value, stats = RowStatistics.allocate(problem)
    plan = plan_of(problem)
    stage = plan.stage(problem, "forward")
    if stage.launch.num_splits > 1:
        _split_forward(problem, plan, stage, value, stats)
    else:
        plan.run(
            "forward",
            fwd.forward_kernel,
            (stage.programs, 1, 1),
            (
                *plan.arguments(problem), plan.outputs(value, stats),
                stage.num_blocks, problem.num_heads, plan.inv_temperature, plan.fill,
            ),
            (plan.form, plan.helper, stage.config),
            stage.options,
            tensors_of(problem),
        )  # fmt: skip
    return value, stats


def _split_forward(
    problem: AttentionProblem, plan: Plan, stage: Stage, value: Tensor, stats: RowStatistics
) -> None:
    config, splits, programs = stage.config, stage.launch.num_splits, stage.programs
    arguments = plan.arguments(problem)
    aligned = tensors_of(problem)
    state = value.new_empty((splits, NUM_STATE_FIELDS, *value.shape))
    state_strides = (state.stride(1), state.stride(0))
    again = (
        torch.empty(programs, dtype=torch.int32, device=value.device) if config.GUARDED else None
    )
    heads = (stage.num_blocks, problem.num_heads)
    outputs = plan.outputs(value, stats)
    one_warp_group = {"num_warps": 4}
    plan.run(
        "state",
        splits_of_keys.state_kernel,
        (programs, splits, 1),
        (*arguments, state, *state_strides, *heads, stage.keys_per_split, plan.inv_temperature),
        (plan.form, config),
        stage.options,
        aligned,
    )
    plan.run(
        "merge",
        splits_of_keys.merge_kernel,
        (programs, 1, 1),
        (*arguments, state, *state_strides, splits, outputs, again, *heads, plan.fill),
        (plan.form, config),
        one_warp_group,
        aligned,
    )
    if not config.TWO_PASS:
        return
    sums = value.new_empty((splits, NUM_SUMS, *value.shape))
    sums_strides = (sums.stride(1), sums.stride(0))
    plan.run(
        "sums",
        splits_of_keys.sums_kernel,
        (programs, splits, 1),
        (
            *arguments, stats.student, stats.teacher, again, sums, *sums_strides,
            *heads, stage.keys_per_split, plan.inv_temperature,
        ),
        (plan.helper, config),
        stage.options,
        aligned,
    )  # fmt: skip
    plan.run(
        "merge_sums",
        splits_of_keys.merge_sums_kernel,
        (programs, 1, 1),
        (arguments[2], sums, *sums_strides, splits, again, outputs, *heads, plan.fill),
        (plan.helper, config),
        one_warp_group,
        aligned,
    )


@packs_rows_backward
def backward(
    problem: AttentionProblem, stats: RowStatistics, grad: Tensor, needs_grad: NeedsGrad
) -> Gradients:
    """Returns the needed gradients, each summed in a fixed order."""
    if problem.head_mean:
        return head_mean_launches.backward(problem, stats, grad, needs_grad)
    plan = plan_of(problem)
    shared = Shared(
        (*plan.arguments(problem), grad, stats.student, stats.teacher, plan.stats_stride),
        (*tensors_of(problem), grad, stats.student, stats.teacher),
    )
    which = [(student, of_q) for student in (True, False) for of_q in (True, False)]
    a, b, c, d = (
        _gradient(problem, plan, shared, student, of_q) if need else None
        for (student, of_q), need in zip(which, needs_grad, strict=True)
    )
    return a, b, c, d


class Shared(NamedTuple):
    """Holds the arguments that all launches of one backward pass share."""

    arguments: tuple[Any, ...]  # the first ones of the kernels
    tensors: tuple[Tensor | None, ...]  # of Plan.run


def _gradient(
    problem: AttentionProblem, plan: Plan, shared: Shared, student: bool, of_q: bool
) -> Tensor:
    """Computes dQ or dK of one side."""
    side = problem.student if student else problem.teacher
    name, x = ("dq", side.q) if of_q else ("dk", side.k)
    stage = plan.stage(problem, name)
    if of_q:
        splits, kernel = stage.launch.num_splits, bwd.dq_kernel
        grid = (stage.programs, splits, 1)
        sizes = (stage.num_blocks, problem.num_heads, stage.keys_per_split)
    else:
        programs = stage.num_key_blocks * side.num_kv_heads * plan.num_sequences
        group = side.group
        splits, kernel = key_splits(problem, group, programs, resident=2), bwd.dk_kernel
        grid = (programs * splits, 1, 1)
        sizes = (stage.num_key_blocks, problem.num_heads, group, group // splits)
    partials = new_splits(x, splits)
    plan.run(
        (name, student),
        kernel,
        grid,
        (
            *shared.arguments, gradient_args(partials, side.scale / problem.temperature), *sizes,
            plan.inv_temperature,
        ),
        (student, plan.form, plan.helper, stage.config),
        stage.options,
        shared.tensors,
    )  # fmt: skip
    return combine_splits(partials, x)
