"""Launches the Hopper kernels: builds descriptors, grid and arguments from an AttentionProblem."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.attention.heuristics import key_splits, row_splits
from torch_streamkl.attention.hopper import atomic, head_mean_launches, packed
from torch_streamkl.attention.hopper import backward as bwd
from torch_streamkl.attention.hopper import forward as fwd
from torch_streamkl.attention.hopper import masks as hopper_masks
from torch_streamkl.attention.hopper import persistent_forward as persistent_fwd
from torch_streamkl.attention.hopper import wide_forward as wide_fwd
from torch_streamkl.attention.hopper.backward_config import Task
from torch_streamkl.attention.hopper.biases import Bias
from torch_streamkl.attention.hopper.descriptors import descriptor, padded
from torch_streamkl.attention.hopper.masks import PreparedMask
from torch_streamkl.attention.hopper.second_pass import Specialized
from torch_streamkl.attention.hopper.split_kv import combine_kernel
from torch_streamkl.attention.hopper_tiles import (
    HOPPER_AGAIN,
    HOPPER_BIASED,
    HOPPER_MASKED,
    HOPPER_WIDE_AGAIN,
    HopperLaunch,
    adds_queries,
    by_tiles,
    has_bias,
    has_one_bias,
    hopper_backward_launch,
    hopper_launch,
    is_persistent,
    is_wide,
    multiplies_pairs,
    plain_clamp,
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
from torch_streamkl.kernels.arguments import Config
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
    outputs = (value, stats.student, stats.teacher, plan.stats_stride)
    if by_tiles(problem):
        _forward_by_tiles(problem, plan, outputs)
    elif is_wide(problem):
        _forward_wide(problem, plan, outputs)
    else:
        _forward_by_blocks(problem, plan, outputs)
    again = HOPPER_WIDE_AGAIN if is_wide(problem) else HOPPER_AGAIN
    recompute_config = plan.kept("again", lambda: config_of(problem, again))
    recompute_blocks = ceil_div(_longest(problem)[0], again.block_m)
    works = recompute_blocks * problem.num_heads * plan.num_sequences
    each = LOOKED_AT if works >= LEAST_LOOKED_AT * multiprocessors(value.device) else 1
    plan.run(
        "again",
        portable.recompute_kernel,
        (ceil_div(works, each), 1, 1),
        (
            *plan.arguments(problem), *outputs,
            recompute_blocks, problem.num_heads, works, plan.inv_temperature, plan.fill,
        ),
        (each, plan.form, plan.helper, recompute_config),
        again.options(),
        _mask_tensors(problem),
    )  # fmt: skip
    return value, stats


def _sides(problem: AttentionProblem, plan: Plan) -> tuple[bool, Side, Side]:
    """Returns whether the teacher's probabilities weight the moment; the other side; that side."""
    by_teacher = plan.form.TT != 0.0 or plan.form.TS != 0.0
    sides = problem.student, problem.teacher
    return (by_teacher, *(sides if by_teacher else sides[::-1]))


def _forward_by_blocks(problem: AttentionProblem, plan: Plan, outputs: tuple[Any, ...]) -> None:
    """Launches forward.py, and split_kv.py if its last blocks are split along the keys."""
    launch = hopper_launch(problem)
    by_teacher, other, weight = _sides(problem, plan)
    value, form = outputs[0], (plan.squares or plan.form)
    blocks = plan.kept("blocks", lambda: _blocks(problem, plan, launch))
    table = None
    if problem.is_packed:
        table = packed.new_table(problem, plan, launch.groups * launch.block_m, True)
    state, strides = value, (0, 0)  # nobody writes it
    if blocks.parts > 1:
        state = value.new_empty((blocks.parts, NUM_STATE_FIELDS, blocks.num_rows))
        strides = (state.stride(1), state.stride(0))
    config = plan.kept("config", lambda: config_of(problem, launch))
    pairs = multiplies_pairs(problem)
    plan.run(
        "hopper",
        fwd.forward_kernel,
        (blocks.num_programs, 1, 1),
        (
            *_descriptors(plan, launch, other, pairs), *_descriptors(plan, launch, weight, pairs),
            *outputs, state, *strides, blocks.first_row,
            blocks.num_whole, blocks.of_head, problem.num_heads, _group(other), _group(weight),
            *_masks(problem), table, _log2_scale(problem, other), _log2_scale(problem, weight),
            _bias(other), _bias(weight), LOG2E / problem.temperature,
        ),
        (
            by_teacher, launch.groups, launch.slots, blocks.parts, has_one_bias(problem),
            form, config,
        ),
        {"num_warps": 4},
        _mask_tensors(problem),
    )  # fmt: skip
    if blocks.parts > 1:
        plan.run(
            "unite",
            combine_kernel,
            (ceil_div(blocks.num_rows, UNITED_ROWS), 1, 1),
            (state, *strides, blocks.first_row, blocks.num_rows, *outputs),
            (blocks.parts, UNITED_ROWS, form, config),
            {"num_warps": 4},
            (),
        )


def _forward_by_tiles(problem: AttentionProblem, plan: Plan, outputs: tuple[Any, ...]) -> None:
    """Launches persistent_forward.py, after the kernels that prepare a mask tensor."""
    launch = hopper_launch(problem)
    by_teacher, other, weight = _sides(problem, plan)
    config = plan.kept("config", lambda: _config_by_tiles(problem, launch))
    second = config.TWO_PASS and not config.GUARDED
    num_blocks = ceil_div(problem.seqlen_q, launch.groups * launch.block_m)
    works = num_blocks * problem.num_heads * problem.batch
    prepared = None if problem.mask is None else hopper_masks.prepare(problem, plan)
    plan.run(
        "hopper",
        persistent_fwd.persistent_forward_kernel,
        (_num_programs(problem, works, is_persistent(problem)), 1, 1),
        (
            *_descriptors(plan, launch, other, second),
            *_descriptors(plan, launch, weight, second),
            *outputs, works, num_blocks, problem.num_heads, problem.batch,
            _group(other), _group(weight), *_masks(problem)[:5], *_mask_blocks(prepared, True),
            _log2_scale(problem, other), _log2_scale(problem, weight),
        ),
        (
            by_teacher, launch.groups, launch.slots, plan.form,
            _helper(problem, plan) if second else None,
            plan.kept("known", lambda: _known(problem)), config,
        ),
        {"num_warps": 4},
        _mask_tensors(problem),
    )  # fmt: skip


def _forward_wide(problem: AttentionProblem, plan: Plan, outputs: tuple[Any, ...]) -> None:
    """Launches wide_forward.py; tiles of both sides have as many columns."""
    launch = hopper_launch(problem)
    by_teacher, other, weight = _sides(problem, plan)
    num_blocks = ceil_div(_longest(problem)[0], launch.groups * launch.block_m)
    columns = padded(max(other.head_dim, weight.head_dim))
    rows = (launch.block_m, launch.block_n) * 2
    sides = (other.q, other.k, weight.q, weight.k)
    plan.run(
        "hopper",
        wide_fwd.wide_forward_kernel,
        (num_blocks * problem.num_heads * plan.num_sequences, 1, 1),
        (
            *(descriptor(plan, x, n, columns) for x, n in zip(sides, rows, strict=True)),
            *outputs, num_blocks, problem.num_heads, _group(other), _group(weight),
            *_masks(problem), _log2_scale(problem, other), _log2_scale(problem, weight),
        ),
        (
            by_teacher, columns, launch.slots, plan.form,
            plan.kept("config", lambda: config_of(problem, launch)),
        ),
        {"num_warps": 4},
        _mask_tensors(problem),
    )  # fmt: skip


def _config_by_tiles(problem: AttentionProblem, launch: HopperLaunch) -> Config:
    config = config_of(problem, launch)
    if problem.mask is None:
        return config
    return config._replace(HAS_LEFT=False, HAS_RIGHT=False)  # the prepared mask has them


def _num_programs(problem: AttentionProblem, works: int, interleaved_calls: bool) -> int:
    """Counts a persistent kernel's programs: NOTE [Persistent kernels] in tile_scheduler.py."""
    return min(works, multiprocessors(problem.student.q.device)) if interleaved_calls else works


def _helper(problem: AttentionProblem, plan: Plan) -> Any:
    return plan.kept("helper", lambda: helper(problem.functional.text, of_half=True))


def _descriptors(plan: Plan, launch: HopperLaunch, side: Side, pairs: bool) -> tuple[Any, Any]:
    """Creates descriptors of a warp group's queries, and of one key tile or (``pairs``) two."""
    rows = 2 * launch.block_n if pairs else launch.block_n
    return descriptor(plan, side.q, launch.block_m), descriptor(plan, side.k, rows)


def _known(problem: AttentionProblem) -> Specialized:
    functional = problem.functional
    quotient = functional.quotient
    return Specialized(
        *(functional.mixture or (0.0, 0.0)),
        functional.variation or 0.0,
        *((0.0, 0.0, False) if quotient is None else dataclasses.astuple(quotient)),
    )


def _blocks(problem: AttentionProblem, plan: Plan, launch: HopperLaunch) -> Blocks:
    heads = problem.num_heads * plan.num_sequences
    size = launch.groups * launch.block_m
    of_head = ceil_div(_longest(problem)[0], size)
    if problem.is_packed:  # of a head of all sequences
        heads, of_head = problem.num_heads, packed.num_entries(problem, plan, size, True)
    num_whole, parts = of_head * heads, 1
    # blocks under a causal mask get shorter, those of a window are short: so is the last round
    whole_rows = problem.window_left is None and problem.window_right is None
    if whole_rows and not problem.is_packed and not has_bias(problem):
        tiles = ceil_div(problem.seqlen_k, launch.block_n)
        num_whole, parts = splits_of_last_wave(of_head * heads, tiles, problem.student.q.device)
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
        dims = problem.student.head_dim, problem.teacher.head_dim
        launch = hopper_backward_launch(*dims, has_logarithms=False, adds=True)
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
            size = _rows_of_block(_task_of(problem, plan, student, rows, False))
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
    sides = (problem.student, problem.teacher)
    statistics = (stats.student, stats.teacher)
    own, other = sides if student else sides[::-1]
    own_stats, other_stats = statistics if student else statistics[::-1]
    x, length = (own.q if rows else own.k), _longest(problem)[not rows]
    outer = (own.q, other.q) if rows else (own.k, other.k)
    inner = (own.k, other.k) if rows else (own.q, other.q)
    adds = sums is not None
    task = _task_of(problem, plan, student, rows, adds)
    size = _rows_of_block(task)
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
            works, num_blocks, problem.num_heads, problem.batch, _group(own), _group(other),
            *_masks(problem), table, *_mask_blocks(prepared, rows), *scales,
            _bias(own), _bias(other), LOG2E / problem.temperature,
        ),
        (None if _needs_no_helper(task, plan) else helper_of_task, task),
        {"num_warps": 4, "launch_pdl": not is_first},
        (grad, *_mask_tensors(problem)),
    )  # fmt: skip
    return splits


def _task_of(problem: AttentionProblem, plan: Plan, student: bool, rows: bool, adds: bool) -> Task:
    sides = (problem.student, problem.teacher)
    own, other = sides if student else sides[::-1]
    return plan.kept(
        ("task", student, rows, adds),
        lambda: _task(problem, plan, own, other, student, rows, adds),
    )


def _needs_no_helper(task: Task, plan: Plan) -> bool:
    return task.PLAIN or task.SQUARES != 0.0 or plan.helper is None


def _rows_of_block(task: Task) -> int:
    return task.GROUPS * task.BLOCK


def _gradients_by_tiles(problem: AttentionProblem) -> bool:
    return by_tiles(problem, backward=True) and not adds_queries(problem)


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


def _task(
    problem: AttentionProblem,
    plan: Plan,
    own: Side,
    other: Side,
    student: bool,
    rows: bool,
    adds: bool,
) -> Task:
    clamp = plain_clamp(problem) if student else None
    plain = clamp is not None
    squares = -2.0 * (problem.functional.squares or 0.0)
    # three warp groups, of head_dim 64, would spill with squares as with logarithms
    is_lean = plain or (bool(squares) and own.head_dim == 128)
    launch = hopper_backward_launch(
        own.head_dim, other.head_dim, has_logarithms=not is_lean, adds=adds
    )
    if problem.mask is not None:
        launch = HOPPER_MASKED
    if has_bias(problem):
        launch = HOPPER_BIASED
    group, num_splits = 1, 1
    length = problem.seqlen_q if rows else problem.seqlen_k
    blocks = ceil_div(length, launch.groups * launch.block_m) * problem.batch
    if rows and not _gradients_by_tiles(problem):
        tiles = ceil_div(problem.seqlen_k, launch.block_n)
        num_splits = row_splits(problem, blocks * problem.num_heads, tiles)
    if not rows:
        group = _group(own)
        programs = blocks * own.num_kv_heads
        num_splits = key_splits(problem, group, programs, resident=1, together=_group(other))
    return Task(
        ROWS=rows,
        STUDENT=student,
        PERSISTENT=_gradients_by_tiles(problem),
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
        HEAD_DIM=padded(own.head_dim),
        OTHER_DIM=padded(other.head_dim),
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


def _longest(problem: AttentionProblem) -> tuple[int, int]:
    """Returns the rows and keys of the longest sequence."""
    if problem.is_packed:
        return problem.max_seqlen_q, problem.max_seqlen_k
    return problem.seqlen_q, problem.seqlen_k


def _group(side: Side) -> int:
    return side.num_heads // side.num_kv_heads


def _log2_scale(problem: AttentionProblem, side: Side) -> float:
    return side.scale * LOG2E / problem.temperature
