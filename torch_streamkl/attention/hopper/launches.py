"""Launches the Hopper kernels: builds descriptors, grid and arguments from an AttentionProblem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.attention.hopper import atomic, head_mean_launches, packed
from torch_streamkl.attention.hopper import backward as bwd
from torch_streamkl.attention.hopper import forward as fwd
from torch_streamkl.attention.hopper import masks as hopper_masks
from torch_streamkl.attention.hopper.backward_config import Task
from torch_streamkl.attention.hopper.biases import Bias
from torch_streamkl.attention.hopper.descriptors import descriptor
from torch_streamkl.attention.hopper.masks import PreparedMask
from torch_streamkl.attention.hopper.split_kv import combine_kernel
from torch_streamkl.attention.hopper.tasks import (
    backward_task,
    forward_task,
    rows_of_block,
    sides_of,
)
from torch_streamkl.attention.hopper_tiles import (
    HOPPER_AGAIN,
    HOPPER_WIDE_AGAIN,
    HopperLaunch,
    adds_queries,
    by_tiles,
    columns_of,
    has_bias,
    hopper_backward_launch,
    hopper_launch,
    is_persistent,
    is_wide,
    splits_of_last_wave,
)
from torch_streamkl.attention.pack_gqa import packs_rows, packs_rows_backward
from torch_streamkl.attention.plans import LOG2E, NUM_STATE_FIELDS, Plan, config_of, plan_of
from torch_streamkl.attention.problem import (
    AttentionProblem,
    Gradients,
    NeedsGrad,
    RowStatistics,
    Side,
)
from torch_streamkl.attention.triton import forward as portable
from torch_streamkl.kernels.arguments import Outputs
from torch_streamkl.kernels.pointwise import helper
from torch_streamkl.kernels.splits import as_heads, combine_splits, new_splits
from torch_streamkl.kernels.tiles import ceil_div
from torch_streamkl.runtime.devices import multiprocessors

UNITED_ROWS = 128  # of a program
LOOKED_AT = 4  # blocks of a program of the kernel that repeats some
LEAST_LOOKED_AT = 8  # where each multiprocessor has so many of them


@dataclass(frozen=True)
class Blocks:
    """Counts the blocks of rows of a forward; those from num_whole on are split along the keys."""

    of_head: int
    num_whole: int
    parts: int
    num_programs: int
    first_row: int  # of those computed in parts, counted over all heads
    num_rows: int  # of those computed in parts


@packs_rows
def forward(problem: AttentionProblem) -> tuple[Tensor, RowStatistics]:
    """Returns per-row values and statistics, float32."""
    if problem.head_mean:
        return head_mean_launches.forward(problem)
    value, stats = RowStatistics.allocate(problem)
    plan = plan_of(problem)
    outputs = plan.outputs(value, stats)
    _launch_forward(problem, plan, outputs)
    again = HOPPER_WIDE_AGAIN if is_wide(problem) else HOPPER_AGAIN
    recompute_config = plan.kept("again", lambda: config_of(problem, again))
    recompute_blocks = ceil_div(problem.longest[0], again.block_m)
    works = recompute_blocks * problem.num_heads * plan.num_sequences
    each = LOOKED_AT if works >= LEAST_LOOKED_AT * multiprocessors(value.device) else 1
    plan.run(
        "again",
        portable.recompute_kernel,
        (ceil_div(works, each), 1, 1),
        (
            *plan.arguments(problem), outputs,
            recompute_blocks, problem.num_heads, works, plan.inv_temperature, plan.fill,
        ),
        (each, plan.form, plan.helper, recompute_config),
        again.options(),
        _mask_tensors(problem),
    )  # fmt: skip
    return value, stats


def _launch_forward(problem: AttentionProblem, plan: Plan, outputs: Outputs) -> None:
    """Launches forward.py, and split_kv.py if its last blocks are split along the keys.

    A mask tensor is prepared first.
    """
    _, other, weight = sides_of(problem, plan)
    value, launch = outputs.value, hopper_launch(problem)
    is_tiled = by_tiles(problem)
    blocks = plan.kept("blocks", lambda: _blocks(problem, plan, launch))
    task = plan.kept("task", lambda: forward_task(problem, plan, launch, blocks.parts))
    prepared = None if problem.mask is None else hopper_masks.prepare(problem, plan)
    num_programs, table = blocks.num_programs, None
    if is_tiled:
        num_programs = _num_programs(problem, num_programs, is_persistent(problem))
    elif problem.is_packed and not task.WIDE:
        table = packed.new_table(problem, plan, launch.groups * launch.block_m, True)
    state, strides = value, (0, 0)  # nobody writes it
    if blocks.parts > 1:
        state = value.new_empty((blocks.parts, NUM_STATE_FIELDS, blocks.num_rows))
        strides = (state.stride(1), state.stride(0))
    columns = task.OTHER.DIM if task.WIDE else 0
    rows = launch.block_m, 2 * launch.block_n if task.PAIRS else launch.block_n
    plan.run(
        "hopper",
        fwd.forward_kernel,
        (num_programs, 1, 1),
        (
            *(
                descriptor(plan, x, n, columns)
                for side in (other, weight) for x, n in zip((side.q, side.k), rows, strict=True)
            ),
            *outputs, state, *strides, blocks.first_row, blocks.num_whole,
            blocks.num_programs, blocks.of_head, problem.num_heads, problem.batch,
            other.group, weight.group, *_masks(problem), table,
            *_mask_blocks(prepared, True),
            _log2_scale(problem, other), _log2_scale(problem, weight),
            _bias(other), _bias(weight), LOG2E / problem.temperature,
        ),
        (_helper(problem, plan) if task.SECOND else None, task),
        {"num_warps": 4},
        _mask_tensors(problem),
    )  # fmt: skip
    if blocks.parts > 1:
        plan.run(
            "unite",
            combine_kernel,
            (ceil_div(blocks.num_rows, UNITED_ROWS), 1, 1),
            (state, *strides, blocks.first_row, blocks.num_rows, outputs),
            (blocks.parts, UNITED_ROWS, task.COEFFICIENTS, task.CONFIG),
            {"num_warps": 4},
            (),
        )


def _num_programs(problem: AttentionProblem, works: int, interleaved_calls: bool) -> int:
    """Counts a persistent kernel's programs: NOTE [Persistent kernels] in tile_scheduler.py."""
    return min(works, multiprocessors(problem.device)) if interleaved_calls else works


def _helper(problem: AttentionProblem, plan: Plan) -> Any:
    return plan.kept("helper", lambda: helper(problem.functional.text, of_half=True))


def _blocks(problem: AttentionProblem, plan: Plan, launch: HopperLaunch) -> Blocks:
    heads = problem.num_heads * plan.num_sequences
    size = launch.groups * launch.block_m
    of_head = ceil_div(problem.longest[0], size)
    if problem.is_packed and not is_wide(problem):  # of a head of all sequences
        heads, of_head = problem.num_heads, packed.num_entries(problem, plan, size, True)
    num_whole, parts = of_head * heads, 1
    # blocks under a causal mask get shorter, those of a window are short: so is the last round
    whole_rows = problem.window_left is None and problem.window_right is None
    has_parts = not (problem.is_packed or has_bias(problem) or is_wide(problem))
    if whole_rows and has_parts and not by_tiles(problem):
        tiles = ceil_div(problem.seqlen_k, launch.block_n)
        num_whole, parts = splits_of_last_wave(of_head * heads, tiles, problem.device)
    first_row = num_whole // of_head * problem.seqlen_q
    first_row += num_whole % of_head * size
    return Blocks(
        of_head,
        num_whole,
        parts,
        num_whole + (of_head * heads - num_whole) * parts,
        first_row,
        heads * problem.seqlen_q - first_row,
    )


@packs_rows_backward
def backward(
    problem: AttentionProblem, stats: RowStatistics, grad: Tensor, needs_grad: NeedsGrad
) -> Gradients:
    """Returns the needed gradients, each summed in a fixed order unless the problem allows
    another.
    """
    if problem.head_mean:
        return head_mean_launches.backward(problem, stats, grad, needs_grad)
    gradients: dict[tuple[bool, bool], Tensor] = {}
    sums = None
    if needs_grad.student_q and needs_grad.student_k and adds_queries(problem):
        columns = (columns_of(side.head_dim) for side in problem.sides)
        launch = hopper_backward_launch(*columns, has_logarithms=False, adds=True)
        sums = atomic.new_sums(problem.student.q, launch.block_n)
    prepared = None if problem.mask is None else hopper_masks.prepare(problem, plan_of(problem))
    # dK first: where heads share keys it has few long programs, and those of dQ fill the gaps
    order = (
        (needs_grad.student_k, True, False),
        (needs_grad.student_q and sums is None, True, True),
        (needs_grad.teacher_k, False, False),
        (needs_grad.teacher_q, False, True),
    )
    found = [(student, rows) for is_needed, student, rows in order if is_needed]
    tables: dict[tuple[int, bool], Tensor] = {}
    if problem.is_packed:  # before them all: a gradient does not wait for what precedes it
        plan = plan_of(problem)
        for student, rows in found:
            size = rows_of_block(_task_of(problem, plan, student, rows, False))
            if (size, rows) not in tables:
                tables[size, rows] = packed.new_table(problem, plan, size, rows)
    for student, rows in found:
        beside = None if rows or not student else sums
        gradients[student, rows] = _gradient(
            problem, stats, grad, student, rows, beside, prepared, tables, not gradients
        )
    # added up once all kernels are on their way: the next need not wait for a sum
    inputs = {
        (True, True): problem.student.q, (True, False): problem.student.k,
        (False, True): problem.teacher.q, (False, False): problem.teacher.k,
    }  # fmt: skip
    summed = {key: combine_splits(splits, inputs[key]) for key, splits in gradients.items()}
    if sums is not None:
        summed[True, True] = _gradient_of_sums(problem, sums)
    return tuple(summed.get(key) for key in inputs)


def _gradient(
    problem: AttentionProblem,
    stats: RowStatistics,
    grad: Tensor,
    student: bool,
    rows: bool,
    sums: Tensor | None,
    prepared: PreparedMask | None,
    tables: dict[tuple[int, bool], Tensor],
    is_first: bool,
) -> Tensor:
    """Computes splits of dQ (rows) or dK of one side; a dK kernel may add dQ to the sums.

    All kernels but the first may begin before the one before them ends.
    """
    plan = plan_of(problem)
    sides = problem.sides
    statistics = (stats.student, stats.teacher)
    own, other = sides if student else sides[::-1]
    own_stats, other_stats = statistics if student else statistics[::-1]
    x, length = (own.q if rows else own.k), problem.longest[not rows]
    outer = (own.q, other.q) if rows else (own.k, other.k)
    inner = (own.k, other.k) if rows else (own.q, other.q)
    adds = sums is not None
    task = _task_of(problem, plan, student, rows, adds)
    size = rows_of_block(task)
    table = tables.get((size, rows))
    num_blocks, sequences = ceil_div(length, size), plan.num_sequences
    if table is not None:
        num_blocks, sequences = table.shape[1], 1
    works = num_blocks * x.shape[1] * task.SPLITS * sequences
    splits = new_splits(x, task.SPLITS)
    out = as_heads(splits)
    tensors = (
        *(descriptor(plan, t, task.BLOCK) for t in outer),
        *(descriptor(plan, t, task.INNER) for t in inner),
        grad, own_stats, other_stats, plan.stats_stride,
        out, *out.stride()[:3], own.scale / problem.temperature,
    )  # fmt: skip
    scales = (_log2_scale(problem, own), _log2_scale(problem, other))
    helper_of_task = _helper(problem, plan) if task.PERSISTENT else plan.helper
    plan.run(
        ("gradient", student, rows, adds, is_first),
        bwd.backward_kernel,
        (_num_programs(problem, works, is_persistent(problem, backward=True)), 1, 1)
        if task.PERSISTENT else (works, 1, 1),
        (
            *tensors, grad if sums is None else sums,  # nobody reads it without sums
            works, num_blocks, problem.num_heads, problem.batch, own.group, other.group,
            *_masks(problem), table, *_mask_blocks(prepared, rows), *scales,
            _bias(own), _bias(other), LOG2E / problem.temperature,
        ),
        (None if _needs_no_helper(task, plan) else helper_of_task, task),
        {"num_warps": 4, "launch_pdl": not is_first},
        (grad, *_mask_tensors(problem)),
    )  # fmt: skip
    return splits


def _task_of(problem: AttentionProblem, plan: Plan, student: bool, rows: bool, adds: bool) -> Task:
    return plan.kept(
        ("task", student, rows, adds),
        lambda: backward_task(problem, plan, student, rows, adds),
    )


def _needs_no_helper(task: Task, plan: Plan) -> bool:
    return task.PLAIN or task.SQUARES != 0.0 or plan.helper is None


def _gradient_of_sums(problem: AttentionProblem, sums: Tensor) -> Tensor:
    plan, q = plan_of(problem), problem.student.q
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    head_dim = q.shape[3]
    plan.run(
        "gradient of sums",
        atomic.gradient_kernel,
        (sums.shape[0], 1, 1),
        (
            sums, out, out.stride(1), out.stride(2),
            problem.student.scale / problem.temperature * plan.form.TS, problem.seqlen_q,
        ),
        (sums.shape[1] // head_dim, head_dim),
        {"num_warps": 4},
        (),
    )  # fmt: skip
    return out


def _bias(side: Side) -> Bias:
    bias = side.bias
    if bias is None:
        return Bias(None, 0, 0, 0)
    sizes_strides = zip(bias.shape[:3], bias.stride()[:3], strict=True)
    return Bias(bias, *(0 if size == 1 else stride for size, stride in sizes_strides))


def _masks(problem: AttentionProblem) -> tuple[Any, ...]:
    return (
        problem.seqlen_q, problem.seqlen_k, problem.key_lengths,
        problem.window_left or 0, problem.window_right or 0,
        problem.cu_seqlens_q, problem.cu_seqlens_k,
    )  # fmt: skip


def _mask_blocks(prepared: PreparedMask | None, by_rows: bool) -> tuple[Any, ...]:
    if prepared is None:
        return None, None, 0, 0, 0, 0
    blocks = prepared.by_rows if by_rows else prepared.by_keys
    return *blocks, prepared.stride_b, prepared.stride_h


def _mask_tensors(problem: AttentionProblem) -> tuple[Tensor | None, ...]:
    return (
        problem.key_lengths, problem.cu_seqlens_q, problem.cu_seqlens_k, problem.mask,
        problem.student.bias, problem.teacher.bias,
    )  # fmt: skip


def _log2_scale(problem: AttentionProblem, side: Side) -> float:
    return side.scale * LOG2E / problem.temperature
