"""Chooses the tiles and main loops of the kernels for Hopper: tables, and rules on a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from torch_streamkl.attention.problem import AttentionProblem
from torch_streamkl.kernels.tiles import TritonLaunch, padded_dim
from torch_streamkl.runtime.devices import multiprocessors


def is_prepared(problem: AttentionProblem) -> bool:
    """Whether a Hopper kernel has a mask tensor to prepare or a second pass."""
    if problem.mask is not None:
        return True
    return problem.functional.closed_form is None and not sums_squares(problem)


def sums_squares(problem: AttentionProblem) -> bool:
    """Returns whether the Hopper forward sums squares in one pass, without persistent kernels."""
    return (
        problem.functional.squares is not None
        and problem.mask is None
        and not problem.is_packed
        and not (is_wide(problem) or has_bias(problem))
        and not is_persistent(problem)
    )


def num_sequences_of(problem: AttentionProblem) -> int:
    """Counts the packed sequences in a batch element."""
    return 1 if problem.cu_seqlens_q is None else max(1, problem.cu_seqlens_q.shape[0] - 1)


def flop(problem: AttentionProblem) -> float:
    """Estimates the FLOP of the forward's score matmuls; masks count as the share they keep."""
    batch, num_heads, seqlen_q, head_dim = problem.student.q.shape
    keys = problem.student.k.shape[2] / num_sequences_of(problem)  # of a row, if lengths are alike
    seen = 1.0 if problem.window_right is None else 0.5
    if problem.window_left is not None and problem.window_right is not None:
        width = problem.window_left + problem.window_right + 1
        keys, seen = min(width, keys), 1.0 if width < keys else seen
    pairs = batch * num_heads * seqlen_q * keys
    return 2.0 * seen * pairs * (head_dim + problem.teacher.q.shape[3])


@dataclass(frozen=True)
class HopperLaunch:
    """Configures the tiles of a kernel on Hopper."""

    block_m: int  # rows of a warp group: queries, for dK keys
    block_n: int  # rows of a tile that streams by: keys, for dK queries
    groups: int  # warp groups that compute: 2 or 3, in the forward also 4
    slots: int  # in shared memory, of streamed tiles or (forward) pairs of them; a power of two


@dataclass(frozen=True)
class HopperBackwardLaunch(HopperLaunch):
    """Configures the tiles of dQ or dK."""

    pinned: bool  # NOTE [A matmul always in flight] in attention/hopper/backward.py


# Measured on an H200 (bf16, seqlen 8192), by columns of a tile (bench/notes/hopper_kernels.md).
HOPPER_BACKWARD_LAUNCHES = {
    64: HopperBackwardLaunch(64, 64, 3, 4, True),
    128: HopperBackwardLaunch(64, 64, 2, 4, True),
    256: HopperBackwardLaunch(64, 32, 2, 3, False),  # more does not fit into shared memory
}

LEAST_COLUMNS = 64  # of a tile: rows of 128 bytes, as the matmuls read them

MAX_NARROW_HEAD_DIM = 128  # beyond, a tile of either side takes twice the shared memory

# of dK where it adds up dQ, too (attention/hopper/atomic.py), and is faster than both alone; from
# this forward on, since it takes two launches more
HOPPER_ATOMIC_LAUNCHES = {64: HopperBackwardLaunch(64, 64, 2, 4, False)}

ATOMIC_LEAST_FLOP = 2.0**34

LOWEST_CLAMP = -126 * math.log(2.0)  # of a log-probability: below, hopper.exp2 gives 0

# where logarithms of the probabilities are needed, too: three warp groups would spill
HOPPER_LOGARITHMS = HopperBackwardLaunch(64, 64, 2, 4, False)

# with a boolean mask, whose blocks have 128 queries and 128 keys (hopper/masks.py)
HOPPER_MASKED = HopperBackwardLaunch(64, 64, 2, 4, False)

# with a bias, of which a thread keeps two tiles
HOPPER_BIASED = HopperBackwardLaunch(64, 32, 2, 4, False)

HOPPER_BIASED_FORWARD = HopperLaunch(64, 64, 2, 2)

HOPPER_MASKED_FORWARD = HopperLaunch(64, 64, 2, 2)

# of head_dim 128 with few rows: shorter blocks reach less far beyond the diagonal
HOPPER_SHORT_FORWARD = HopperLaunch(64, 64, 2, 2)

# Measured on an H200 (bf16, seqlen 8192), by columns of a tile (bench/notes/hopper_kernels.md).
HOPPER_LAUNCHES = {
    64: HopperLaunch(64, 64, 3, 2),
    128: HopperLaunch(64, 64, 3, 2),
}

# of a head_dim above 128: shared memory has room for three tiles of one side next to the queries
HOPPER_WIDE = HopperLaunch(64, 64, 2, 3)

# of a head-averaged teacher: its log-sum-exps, and tiles of the mean (whose loads are chunks)
HOPPER_HEAD_LSE = HopperLaunch(64, 128, 3, 3)

HOPPER_HEAD_MEAN = HopperLaunch(64, 128, 2, 6)

# Rows of so many keys are short blocks (bench/notes/hopper_kernels.md).
PERSISTENT_MOST_KEYS = 512

# Parts of so many tiles of keys gain time, smaller ones do not (bench/notes/hopper_kernels.md).
LEAST_TILES_OF_PART = 8

# of the portable kernel that repeats blocks of rows
HOPPER_AGAIN = TritonLaunch(64, 64, 4, 2)

HOPPER_WIDE_AGAIN = TritonLaunch(64, 32, 4, 2)


def hopper_launch(problem: AttentionProblem) -> HopperLaunch:
    """Returns the configuration of the forward kernel on Hopper."""
    if problem.mask is not None:
        return HOPPER_MASKED_FORWARD
    if has_bias(problem):
        return HOPPER_BIASED_FORWARD
    if is_wide(problem):
        return HOPPER_WIDE
    if is_persistent(problem) and problem.window_left is None:
        return HOPPER_SHORT_FORWARD
    return HOPPER_LAUNCHES[max(columns_of(side.head_dim) for side in problem.sides)]


def columns_of(head_dim: int) -> int:
    """Returns the columns of a tile: 64, 128, or 256. TMA fills those past the head_dim with 0."""
    return max(LEAST_COLUMNS, padded_dim(head_dim))


def is_wide(problem: AttentionProblem) -> bool:
    """Returns whether a side's head_dim is too wide for the narrow Hopper kernels."""
    return max(problem.student.head_dim, problem.teacher.head_dim) > MAX_NARROW_HEAD_DIM


def has_bias(problem: AttentionProblem) -> bool:
    """Returns whether a side has a bias."""
    return problem.student.bias is not None or problem.teacher.bias is not None


def has_one_bias(problem: AttentionProblem) -> bool:
    """Returns whether both sides have the same bias, such as an additive mask. Kernels read it
    once.
    """
    student, teacher = problem.student.bias, problem.teacher.bias
    if student is None or teacher is None:
        return False
    if student is teacher:
        return True
    is_alike = (student.dtype, student.shape, student.stride()) == (
        teacher.dtype, teacher.shape, teacher.stride()
    )  # fmt: skip
    has_address = type(student) is type(teacher) is torch.Tensor
    return is_alike and has_address and student.data_ptr() == teacher.data_ptr()


def by_tiles(problem: AttentionProblem, backward: bool = False) -> bool:
    """Returns whether the Hopper kernels go by tiles of warp groups (hopper/tiles.py).

    Those that go by blocks know neither mask tensors nor a second pass, and are faster elsewhere,
    but where blocks are short: under a window, and with few rows.
    """
    return is_prepared(problem) or is_persistent(problem, backward)


def multiplies_pairs(problem: AttentionProblem) -> bool:
    """Returns whether the Hopper forward by blocks multiplies pairs of tiles as one.

    It is faster here alone: NOTE [Pairs at once] in attention/hopper/warp_groups.py.
    """
    return (
        problem.window_right is not None
        and problem.functional.bilinear is not None
        and not problem.is_packed
        and not has_bias(problem)
        and all(columns_of(side.head_dim) == 128 for side in problem.sides)
    )


def is_persistent(problem: AttentionProblem, backward: bool = False) -> bool:
    """Returns whether the Hopper kernels are persistent: NOTE [Persistent kernels] in
    tile_scheduler.py.

    That hides how a block starts and ends, which short blocks gain from; but programs then have
    the same number of blocks, which costs more where long ones differ.
    """
    if problem.is_packed or problem.mask is not None or problem.window_right is None:
        return False
    if is_wide(problem) or has_bias(problem):
        return False
    if problem.student.head_dim != problem.teacher.head_dim:
        return False
    if problem.window_left is not None:
        return True
    is_short = max(problem.seqlen_q, problem.seqlen_k) <= PERSISTENT_MOST_KEYS
    is_measured = backward or columns_of(problem.student.head_dim) == 128
    return is_short and problem.key_lengths is None and is_measured


def splits_of_last_wave(blocks: int, tiles: int, device: torch.device) -> tuple[int, int]:
    """Returns the blocks to compute whole, and the num_splits of each other one.

    NOTE [Split-KV] in hopper/split_kv.py.
    """
    last = blocks % multiprocessors(device)
    if last == 0:
        return blocks, 1
    parts = min(multiprocessors(device) // last, tiles // LEAST_TILES_OF_PART)
    if parts > 4:
        parts = 1 << (parts.bit_length() - 1)
    return (blocks - last, parts) if parts > 1 else (blocks, 1)


def adds_queries(problem: AttentionProblem) -> bool:
    """Returns whether dQ may be summed in any order, and whether that is faster."""
    return (
        not problem.deterministic
        and not problem.head_mean
        and problem.mask is None
        and problem.window_left is None  # gradients by tiles are as fast there
        and not torch.are_deterministic_algorithms_enabled()
        and not problem.is_packed
        and problem.student.head_dim in HOPPER_ATOMIC_LAUNCHES
        and not (is_wide(problem) or has_bias(problem))
        and flop(problem) >= ATOMIC_LEAST_FLOP
        and plain_clamp(problem) is not None
    )


def plain_clamp(problem: AttentionProblem) -> float | None:
    """Returns the clamp of `Functional.plain_student_floor`, 0 without one.

    None where the gradient is anything else, or the kernels for Hopper would lose the clamp.
    """
    floor = problem.functional.plain_student_floor
    if floor is None or -math.inf < floor < LOWEST_CLAMP:
        return None
    return math.exp(floor)


def hopper_backward_launch(
    own_columns: int, other_columns: int, has_logarithms: bool, adds: bool = False
) -> HopperBackwardLaunch:
    """Chooses the launch of dQ or dK on Hopper; ``adds``: the dK kernel also sums dQ."""
    if max(own_columns, other_columns) > MAX_NARROW_HEAD_DIM:
        return HOPPER_BACKWARD_LAUNCHES[256]
    if adds:
        return HOPPER_ATOMIC_LAUNCHES[own_columns]
    if has_logarithms:
        return HOPPER_LOGARITHMS
    return HOPPER_BACKWARD_LAUNCHES[own_columns]
