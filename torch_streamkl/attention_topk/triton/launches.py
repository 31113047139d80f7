"""Launches the kernels of `attention_topk_kl`. The CPU never waits for the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.attention_topk.problem import ChosenKeys, Gradients, NeedsGrad, RowStats
from torch_streamkl.attention_topk.triton.backward import Needs, gradient_kernel
from torch_streamkl.attention_topk.triton.forward import teacher_lse_kernel, value_kernel
from torch_streamkl.attention_topk.triton.tiles import Config, Rows, Student, Teacher
from torch_streamkl.kernels.tiles import ceil_div, padded_dim
from torch_streamkl.runtime.devices import dot_precision, gpu_of
from torch_streamkl.runtime.launch import launch

LEAST = 16  # rows and columns of the smallest tile of a matrix unit
MAX_TEACHER_HEADS = 128  # of a tile
MAX_TEACHER_DIM = 128  # of a product at once; the rest is added
HALF_SCALE = 1024.0
FIXED_BITS = 61  # of a sum of fixed-point gradients


@dataclass(frozen=True)
class Tile:
    """Configures one kernel."""

    block_n: int
    num_warps: int
    num_stages: int


# In the order of preference, measured on an H100 with 64 heads of 128 of both sides: the first one
# that fits a GPU's shared memory. Products of float32 are no work of matrix units, and spill.
TILES = {
    "teacher_lse": (Tile(64, 4, 2), Tile(32, 4, 2), Tile(16, 4, 1)),
    "value": (Tile(64, 4, 1), Tile(32, 4, 1), Tile(16, 4, 1)),
    "gradient": (Tile(128, 8, 1), Tile(64, 4, 1), Tile(32, 4, 1), Tile(16, 4, 1)),
}
FLOAT32_TILES = (Tile(32, 8, 1), Tile(16, 4, 1))
WIDE_TILES = (Tile(32, 8, 1), Tile(16, 8, 1))  # gradients fill the registers
LARGEST_OF_4_WARPS = 64 * 128  # of the gradient to a query, in elements


def forward(problem: ChosenKeys) -> RowStats:
    """Returns values and statistics of all rows, float32."""
    out = RowStats.allocate(problem)
    batch, seqlen_q = problem.rows
    num_rows = batch * seqlen_q
    lse = out.teacher_lse if problem.teacher_lse is None else problem.teacher_lse
    if not num_rows:
        return out
    rows, teacher, student = _arguments(problem, lse)
    if problem.teacher_lse is None:
        config, options = _config(problem, "teacher_lse")
        tiles = _num_teacher_tiles(config)
        grid = (num_rows, tiles, 1)
        launch(teacher_lse_kernel, grid, (rows, teacher), (config,), options)
    config, options = _config(problem, "value")
    arguments = (rows, teacher, student, out.value, out.student, num_rows)
    launch(value_kernel, (num_rows, 1, 1), arguments, (config,), options)
    return out


def backward(
    problem: ChosenKeys,
    stats: RowStats,
    grad: Tensor,
    needs_grad: NeedsGrad,
    deterministic: bool,
) -> Gradients:
    """Returns the needed gradients of ``sum(grad * value)``."""
    (batch, seqlen_q), given = problem.rows, problem.student_q
    num_rows, grad = batch * seqlen_q, grad.contiguous()
    q_grad = given.new_empty(given.shape) if needs_grad.q else None
    weights_grad = k_sum = k_unit = None
    if needs_grad.head_weights and problem.head_weights is not None:
        weights_grad = problem.head_weights.new_empty(problem.head_weights.shape)
    if needs_grad.k:
        dtype = torch.int64 if deterministic else torch.float32
        k_sum = torch.zeros(problem.student_k.shape, dtype=dtype, device=given.device)
        k_unit = _fixed_unit(problem, stats, grad) if deterministic else None
    if num_rows:
        needs = Needs(
            Q=q_grad is not None,
            K=k_sum is not None,
            WEIGHTS=weights_grad is not None,
            FIXED=k_unit is not None,
            HALF_SCALE=HALF_SCALE if given.dtype == torch.float16 else 1.0,
        )
        config, options = _config(problem, "gradient")
        arguments = (
            *_arguments(problem, stats.teacher_lse), grad, stats.student, num_rows,
            q_grad, k_sum, weights_grad, k_unit,
        )  # fmt: skip
        launch(gradient_kernel, (num_rows, 1, 1), arguments, (config, needs), options)
    k_grad = None
    if k_sum is not None:
        total = k_sum if k_unit is None else k_sum.double() / k_unit
        k_grad = total.to(problem.student_k.dtype)
    return Gradients(q_grad, k_grad, weights_grad)


def _fixed_unit(problem: ChosenKeys, stats: RowStats, grad: Tensor) -> Tensor:
    """Returns a power of 2 by which gradients to keys are multiplied to become integers.

    The terms that a query adds to one element sum to at most 2 grad scale sum_h weight_h max(q_h),
    because the absolute values of S - P sum to at most 2. Half of that again is room for rounding.
    If it is not finite, neither is the unit, nor what is divided by it.
    """
    largest = torch.linalg.vector_norm(problem.student_q, torch.inf, dim=-1).float()
    if problem.head_weights is not None:
        largest = largest * problem.head_weights.abs()
    bound = largest.sum(1) * (3.0 * abs(problem.student_scale)) * grad.abs()
    bound = bound.masked_fill(stats.student[1].isnan(), torch.nan)
    total = torch.where(grad == 0, 0.0, bound).sum()
    exponent = (FIXED_BITS - torch.frexp(total).exponent).clamp_max(126).to(total.dtype)
    return torch.where(total.isfinite(), torch.exp2(exponent), torch.nan)


def _arguments(problem: ChosenKeys, lse: Tensor) -> tuple[Rows, Teacher, Student]:
    ranges = (None, None) if problem.key_ranges is None else problem.key_ranges.unbind(0)
    ids, q_t, k_t = problem.ids, problem.teacher_q, problem.teacher_k
    q_s, k_s, weights = problem.student_q, problem.student_k, problem.head_weights
    rows = Rows(ids, *ids.stride(), *ranges, ids.shape[1], problem.num_keys, problem.topk)
    teacher = Teacher(
        q_t, *q_t.stride()[:3], k_t, *k_t.stride()[:3], lse, *lse.stride(), problem.teacher_scale
    )
    of_weights = (0, 0, 0) if weights is None else weights.stride()
    student = Student(
        q_s, *q_s.stride()[:3], k_s, *k_s.stride()[:2], weights, *of_weights,
        problem.student_scale,
    )  # fmt: skip
    return rows, teacher, student


def _config(problem: ChosenKeys, kernel: str) -> tuple[Config, dict[str, Any]]:
    """Returns a kernel's tiles, and the compiler's options."""
    heads = problem.num_teacher_heads
    group, t_dim = heads // problem.teacher_k.shape[1], problem.teacher_q.shape[3]
    config = Config(
        BLOCK_N=LEAST,
        T_HEADS=heads,
        T_GROUP=group,
        T_BLOCK_H=min(padded_dim(group), MAX_TEACHER_HEADS),
        T_DIM=t_dim,
        T_BLOCK_D=_block_of(t_dim),
        S_HEADS=problem.num_student_heads,
        S_BLOCK_H=padded_dim(problem.num_student_heads),
        S_DIM=problem.student_q.shape[3],
        S_BLOCK_D=padded_dim(problem.student_q.shape[3]),
        PRECISION=dot_precision(problem.student_q),
    )
    tile = _tile(problem, kernel, config)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return config._replace(BLOCK_N=tile.block_n), options


def _tile(problem: ChosenKeys, kernel: str, config: Config) -> Tile:
    device, dtype = problem.student_q.device, problem.student_q.dtype
    is_full = dtype == torch.float32 and config.PRECISION == "ieee"
    choices = FLOAT32_TILES if is_full else TILES[kernel]
    if kernel == "gradient" and config.S_BLOCK_H * config.S_BLOCK_D > LARGEST_OF_4_WARPS:
        choices = WIDE_TILES
    if device.type != "cuda":
        return choices[-1]  # the interpreter: several tiles of small problems
    room, size = gpu_of(device).shared_bytes, dtype.itemsize
    for tile in choices:
        if shared_elements(kernel, tile, config) * size <= room:
            return tile
    return choices[-1]


def shared_elements(kernel: str, tile: Tile, config: Config) -> int:
    """Estimates the elements in shared memory: queries, stages of keys, tiles of gradients."""
    of_teacher, of_student = config.T_BLOCK_D, config.S_BLOCK_D
    staged, held = tile.block_n * of_teacher, config.T_BLOCK_H * of_teacher
    is_one = config.T_DIM <= config.T_BLOCK_D
    if kernel != "teacher_lse":
        is_one = is_one and _num_teacher_tiles(config) == 1
        staged, held = staged + tile.block_n * of_student, held + config.S_BLOCK_H * of_student
    if not is_one:  # queries are read again for every tile of keys
        staged += config.T_BLOCK_H * of_teacher
    if kernel == "gradient":
        held += tile.block_n * (config.S_BLOCK_H + 2 * of_student)
    return held + tile.num_stages * staged


def _block_of(dim: int) -> int:
    """Returns how much of head_dim is multiplied at once: the fewest padded columns in all."""
    if padded_dim(dim) <= MAX_TEACHER_DIM:
        return padded_dim(dim)
    return min((MAX_TEACHER_DIM, 64, 32), key=lambda block: ceil_div(dim, block) * block)


def _num_teacher_tiles(config: Config) -> int:
    return config.T_HEADS // config.T_GROUP * ceil_div(config.T_GROUP, config.T_BLOCK_H)
