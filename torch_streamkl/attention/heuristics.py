"""Chooses the implementation of a problem, and the launches of the portable kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from torch_streamkl.attention import limits
from torch_streamkl.attention.hopper_tiles import (
    columns_of,
    flop,
    has_bias,
    has_one_bias,
    hopper_launch,
    is_prepared,
    is_wide,
    num_sequences_of,
    splits_of_last_wave,
)
from torch_streamkl.attention.limits import MOST_SPLITS
from torch_streamkl.attention.pack_gqa import pack_gqa_heads
from torch_streamkl.attention.problem import AttentionProblem
from torch_streamkl.kernels import tiles
from torch_streamkl.kernels.tiles import TritonLaunch, ceil_div, hint_of, padded_dim
from torch_streamkl.runtime import launch_table
from torch_streamkl.runtime.devices import (
    device_name,
    dot_precision,
    gpu_of,
    is_interpreted,
    multiprocessors,
    require_driver,
    runs_kernels,
)
from torch_streamkl.runtime.launch_table import LaunchKey, MeasuredLaunch

LSE_UNIT = {
    "hopper": math.log(2.0),
    "triton": math.log(2.0),
    "torch": 1.0,
}  # of stored log-sum-exps, in nats

# of the forward, from which "auto" takes the kernels for Hopper: about 0.1 ms on an H200. Below,
# their launches, which make tensor descriptors on the CPU, take longer than the kernels.
HOPPER_LEAST_FLOP = 2.0**35

# the same with a mask tensor or a bias, in tiles of 64 columns
HOPPER_LEAST_MASKED_FLOP = 2.0**36

LEAST_SHARE = 0.75  # of the multiprocessors that have a program where blocks are in parts

HOPPER_LEAST_QUERIES = 128  # a block has 192 rows, those of the portable kernels 64


def select_implementation(problem: AttentionProblem, impl: str, backward: bool = False) -> str:
    """Chooses which of "hopper", "triton" and "torch" computes a problem, or its gradients.

    All kernels save the same statistics, so values and gradients may come from different ones. A
    choice that cannot run raises, and a slow automatic one is logged. A GPU whose driver has no
    compiler raises at the first call.
    """
    if impl == "torch":
        return "torch"
    if impl == "hopper" or (impl == "auto" and _prefers_hopper(problem, backward)):
        limit = limits.hopper_limit(problem)
        if limit is None:
            require_driver()
            return "hopper"
        if impl == "hopper":
            raise NotImplementedError(f"impl='hopper' {limit}; impl='triton' may compute it")
    device, limit = problem.device, limits.triton_limit(problem)
    return "triton" if runs_kernels("attention_kl", impl, device, limit) else "torch"


def _prefers_hopper(problem: AttentionProblem, backward: bool) -> bool:
    """Whether "auto" takes the Hopper kernels if they can run: measured, or decided by size."""
    if problem.device.type == "cpu" and not is_interpreted():
        return False  # without asking for sizes that only the data decides
    if problem.head_mean:
        ratio = problem.teacher.num_heads // max(1, problem.num_heads)
        return ratio * flop(problem) >= HOPPER_LEAST_FLOP
    problem = pack_gqa_heads(problem) or problem
    measured = measured_launch(problem, "forward")
    if measured is None:
        is_preferred = flop(problem) >= HOPPER_LEAST_FLOP
    else:
        is_preferred = measured.implementation == "hopper"
    return (
        is_preferred
        and problem.seqlen_q >= HOPPER_LEAST_QUERIES * num_sequences_of(problem)
        and (_fills_device(problem) or _splits_keys(problem))
        and _fills_tiles(problem)
        and not _clamps_every_row(problem)
        and (not _is_rare(problem) or _is_measured(problem, backward))
    )


def _fills_tiles(problem: AttentionProblem) -> bool:
    """Whether more than half of a Hopper tile's columns are those of the head_dims.

    At half, as with 32 of 64, the portable kernels are as fast (bench/notes/hopper_kernels.md).
    """
    dims = [side.head_dim for side in problem.sides]
    return 2 * sum(dims) > sum(columns_of(dim) for dim in dims)


def _is_rare(problem: AttentionProblem) -> bool:
    """Whether a Hopper kernel computes more than plain scores in one pass."""
    return has_bias(problem) or is_prepared(problem)


def _is_measured(problem: AttentionProblem, backward: bool) -> bool:
    """Whether Hopper kernels were measured as faster than the portable ones for a problem."""
    columns = {columns_of(side.head_dim) for side in problem.sides}
    if columns == {64}:
        return _is_measured_with_64(problem)
    if columns != {128}:
        return False
    if has_bias(problem):  # of two biases the gradients have 0.8 of the rate
        return has_one_bias(problem) or not backward
    functional = problem.functional
    return problem.mask is not None or (functional.is_short and functional.squares is None)


def _is_measured_with_64(problem: AttentionProblem) -> bool:
    """Whether they were with tiles of 64 columns."""
    if problem.mask is None and not has_bias(problem):
        return problem.functional.mixture is not None
    return (
        flop(problem) >= HOPPER_LEAST_MASKED_FLOP
        and problem.functional.guarded is None
        and not problem.has_key_mask
        and (problem.mask is not None or has_one_bias(problem))
    )


def _clamps_every_row(problem: AttentionProblem) -> bool:
    """Whether every row has a probability below a clamp: Hopper kernels compute those twice."""
    guarded = problem.functional.guarded
    if guarded is None:
        return False
    return max(guarded.teacher_floor, guarded.student_floor) > -math.log(max(1, problem.seqlen_k))


def _fills_device(problem: AttentionProblem) -> bool:
    """Whether blocks of rows alone occupy the GPU; otherwise the portable kernels split keys."""
    return triton_launch(problem, "forward").num_splits == 1


def _splits_keys(problem: AttentionProblem) -> bool:
    """Whether few blocks of rows occupy the GPU with the Hopper kernels, which split keys."""
    bounds = (problem.window_left, problem.window_right)
    if problem.is_packed or bounds != (None, None) or is_wide(problem):
        return False
    launch = hopper_launch(problem)
    rows = ceil_div(problem.seqlen_q, launch.groups * launch.block_m)
    blocks = rows * problem.num_heads * problem.batch
    tiles = ceil_div(problem.seqlen_k, launch.block_n)
    num_whole, parts = splits_of_last_wave(blocks, tiles, problem.device)
    return num_whole + (blocks - num_whole) * parts >= LEAST_SHARE * multiprocessors(
        problem.device
    )


# A share of dQ is stored in float32 and added up, which takes as long as a few tiles.
LEAST_TILES_OF_SPLIT = 32


def triton_launch(problem: AttentionProblem, kernel: str) -> TritonLaunch:
    """Returns the configuration of the "forward", "dq" or "dk" kernel.

    With a head-averaged teacher that of "lse", "mean", or "forward": all that read the mean.
    """
    device = problem.device
    measured = measured_launch(problem, kernel)
    if measured is not None:
        launch = TritonLaunch(
            measured.block_m, measured.block_n, measured.num_warps, measured.num_stages
        )
    elif device.type != "cuda":  # the interpreter: small tiles, so that small tests have several
        launch = TritonLaunch(32 if kernel == "mean" else 16, 16, 4, 1)
    else:
        choose = tiles.head_mean_launch if problem.head_mean else tiles.default_launch
        launch = choose(kernel, _operands(problem), gpu_of(device))
    if kernel == "dk":
        return launch
    return replace(launch, num_splits=_num_splits(problem, launch))


def _operands(problem: AttentionProblem) -> tiles.Operands:
    q = problem.student.q
    dims = (padded_dim(problem.student.head_dim), padded_dim(problem.teacher.head_dim))
    is_full = q.dtype == torch.float32 and dot_precision(q) == "ieee"
    return tiles.Operands(dims, q.element_size(), is_full)


def measured_launch(problem: AttentionProblem, kernel: str) -> MeasuredLaunch | None:
    """Looks up a kernel of a problem in the user's launch table (runtime/launch_table.py)."""
    table = launch_table.current(device_name(problem.device))
    if table is None or not is_tunable(problem):  # every call asks, and most have no table
        return None
    return table.find(launch_key(problem, kernel))


def is_tunable(problem: AttentionProblem) -> bool:
    """Returns whether launches measured for plain problems are known to fit this one.

    Mask tensors, biases and second passes need registers and shared memory that the tuner's
    problems do not: the defaults leave room for them.
    """
    sides = problem.sides
    return not (
        problem.mask is not None
        or problem.functional.bilinear is None
        or problem.head_mean
        or any(side.bias is not None or side.softcap for side in sides)
    )


def launch_key(problem: AttentionProblem, kernel: str) -> LaunchKey:
    """Returns the key of a problem's measured launch."""
    return LaunchKey(
        kernel,
        padded_dim(problem.student.head_dim),
        padded_dim(problem.teacher.head_dim),
        problem.student.q.element_size(),
        problem.window_right is not None,
        max(map(hint_of, problem.longest)),
    )


def _num_splits(problem: AttentionProblem, launch: TritonLaunch) -> int:
    """Chooses enough programs to fill the device twice, each with several tiles of keys."""
    programs = ceil_div(problem.seqlen_q, launch.block_m) * problem.num_heads * problem.batch
    return _shared_by(problem, 2, programs, ceil_div(problem.seqlen_k, launch.block_n) // 4)


def head_mean_splits(problem: AttentionProblem, programs: int, tiles: int) -> int:
    """Returns the num_splits of a block's tiles, if a tile is computed for all teacher heads.

    Sums of a row add up over shares, unless a masked key counts: that takes the whole row.
    """
    return 1 if problem.mask_value != -math.inf else _shared_by(problem, 4, programs, tiles)


def row_splits(problem: AttentionProblem, programs: int, tiles: int) -> int:
    """Returns the num_splits of the KV tiles of a block of rows, for dQ on Hopper."""
    return _shared_by(problem, 1, programs, tiles // LEAST_TILES_OF_SPLIT)


def key_splits(
    problem: AttentionProblem, group: int, programs: int, resident: int, together: int = 0
) -> int:
    """Returns the num_splits of the ``group`` query heads of a block of keys: a divisor of group.

    ``resident`` programs run on a multiprocessor at once. Causal ones differ in length: half of
    the work fills the gaps next to the longest. The heads of a share are among ``together``
    neighbours, whose first is a multiple of that (0: it does not matter).
    """
    each = resident if problem.window_right is None else 2 * resident
    least = _shared_by(problem, each, programs, group)
    return next(
        n for n in range(least, group + 1) if group % n == 0 and together % (group // n) == 0
    )


def _shared_by(problem: AttentionProblem, each: int, programs: int, most: int) -> int:
    """Chooses splits of a block: ``each`` programs per multiprocessor, at most ``most``."""
    if problem.is_packed:
        return 1
    enough = each * multiprocessors(problem.device)
    return max(1, min(enough // max(hint_of(programs), 1), hint_of(most), MOST_SPLITS))
