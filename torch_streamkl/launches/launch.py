"""Chooses launch configurations from shapes and device: pure functions, frozen dataclasses."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from torch_streamkl.attention.pack_gqa import pack_gqa_heads
from torch_streamkl.launches import launch_table, tiles
from torch_streamkl.launches.devices import (
    device_name,
    gpu_limit,
    gpu_of,
    matmul_precision,
    multiprocessors,
    require_driver,
)
from torch_streamkl.launches.launch_table import LaunchKey, MeasuredLaunch
from torch_streamkl.launches.tiles import TritonLaunch

if TYPE_CHECKING:
    from torch_streamkl.attention.problem import AttentionProblem, Side

_log = logging.getLogger("torch_streamkl")

# Scores of one side in one block. About ten temporaries of this size are alive in a block, and
# they should stay in a core's cache.
STREAMING_BLOCK_ELEMENTS = 2**18
STREAMING_MAX_KEYS = 512
MOST_BIAS_STRIDE = 2**24  # of rows: offsets in a tile of 64 rows are 32-bit
MOST_SPLITS = 128  # of a block of rows or keys: their results are in memory side by side


@dataclass(frozen=True)
class StreamingBlocks:
    """Holds the block sizes of the plain torch implementation."""

    batch: int
    heads: int  # student heads, a multiple of every group of heads that shares keys
    queries: int
    keys: int


def torch_blocks(problem: AttentionProblem) -> StreamingBlocks:
    """Chooses long runs of keys first, then queries, then as many heads and batches as fit."""
    teacher_ratio = problem.teacher.num_heads // problem.num_heads
    teacher_group = problem.teacher.num_heads // problem.teacher.num_kv_heads
    group = math.lcm(
        problem.num_heads // problem.student.num_kv_heads,
        # the fewest student heads whose teacher heads are whole groups; divides num_heads
        teacher_group // math.gcd(teacher_group, teacher_ratio),
    )
    keys = min(problem.seqlen_k, STREAMING_MAX_KEYS)
    queries = min(
        problem.seqlen_q,
        max(16, STREAMING_BLOCK_ELEMENTS // max(1, keys * group * teacher_ratio)),
        256,
    )
    room = max(1, STREAMING_BLOCK_ELEMENTS // max(1, keys * queries * teacher_ratio))
    heads = min(problem.num_heads, max(1, room // group) * group)
    batch = max(1, room // heads) if heads == problem.num_heads else 1
    return StreamingBlocks(batch, heads, max(1, queries), max(1, keys))


def ceil_div(a: int, b: int) -> int:
    """Divides, rounded up; triton.cdiv takes 2 to 8 us."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Returns the least power of 2 that is at least n (1 or more); triton's takes as long."""
    return 1 << (n - 1).bit_length()


def padded_dim(dim: int) -> int:
    """Returns the dimensions of a tile that holds so many."""
    return max(16, next_power_of_2(dim))


IMPLEMENTATIONS = ("auto", "hopper", "triton", "torch", "reference")
MAX_TRITON_HEAD_DIM = 256
MAX_HALF_HEAD_DIM_OF_TURING = 128  # beyond, 2 KB of a thread's registers spill
# of every kernel: Triton 3.10 computes a product and its sum apart unless it is told otherwise
COMPILE_OPTIONS = {"enable_fp_fusion": True}
LSE_UNIT = {
    "hopper": math.log(2.0),
    "triton": math.log(2.0),
    "torch": 1.0,
}  # of stored log-sum-exps, in nats


# of the forward, from which "auto" takes the kernels for Hopper: about 0.1 ms on an H200. Below,
# their launches, which make tensor descriptors on the host, take longer than the kernels.
HOPPER_LEAST_FLOP = 2.0**35
HOPPER_HEAD_DIMS = (64, 128, 192, 256)
LEAST_SHARE = 0.75  # of the multiprocessors that have a program where blocks are in parts
HOPPER_LEAST_QUERIES = 128  # a block has 192 rows, those of the portable kernels 64


def select_implementation(problem: AttentionProblem, impl: str, backward: bool = False) -> str:
    """Chooses which of "hopper", "triton" and "torch" computes a problem, or its gradients.

    Both kinds of kernels leave the same statistics, so that the gradients may be computed by
    others than the values. A choice that cannot run raises, a slow automatic one is logged; a GPU
    whose driver has no compiler raises at the first call.
    """
    if impl == "torch":
        return "torch"
    chosen = _select(problem, impl, backward)
    if chosen != "torch" and problem.student.q.device.type == "cuda":
        require_driver()
    return chosen


def _select(problem: AttentionProblem, impl: str, backward: bool) -> str:
    if impl == "hopper" or (impl == "auto" and _prefers_hopper(problem, backward)):
        limit = hopper_limit(problem)
        if limit is None:
            return "hopper"
        if impl == "hopper":
            raise NotImplementedError(f"impl='hopper' {limit}; impl='triton' may compute it")
    limit = triton_limit(problem)
    if impl == "triton":
        if limit is not None:
            raise NotImplementedError(f"impl='triton' {limit}; impl='torch' computes it")
        return "triton"
    if limit is None:
        return "triton"
    if problem.student.q.device.type != "cpu":
        warn_once(
            "attention_kl runs its plain torch implementation here, which is slower: "
            f"the kernel {limit}"
        )
    return "torch"


def triton_limit(problem: AttentionProblem) -> str | None:
    """Explains why the Triton kernels cannot run a problem; None if they can."""
    device = problem.student.q.device.type
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a GPU (or TRITON_INTERPRET=1), got device {device}"
    dtype = problem.student.q.dtype
    if str(dtype) not in ("torch.float16", "torch.bfloat16", "torch.float32"):
        return f"takes float16, bfloat16 and float32, got {dtype}"
    widest = max(problem.student.head_dim, problem.teacher.head_dim)
    if widest > MAX_TRITON_HEAD_DIM:
        return f"takes head_dim up to {MAX_TRITON_HEAD_DIM}, got {widest}"
    return matmul_limit(problem.student.q.device, dtype, widest) if device == "cuda" else None


def matmul_limit(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Explains why kernels with matmuls do not run on a CUDA or HIP device, or None."""
    limit, gpu = gpu_limit(device), gpu_of(device)
    if limit is not None or gpu.is_hip or gpu.capability >= (8, 0):
        return limit
    if str(dtype) == "torch.bfloat16":
        return f"takes bfloat16 from compute capability 8.0 on, got {gpu.name} of {gpu.capability}"
    if str(dtype) == "torch.float16" and head_dim > MAX_HALF_HEAD_DIM_OF_TURING:
        most = MAX_HALF_HEAD_DIM_OF_TURING
        return f"takes float16 of head_dim up to {most} on {gpu.name}, got {head_dim}"
    return None


def hopper_limit(problem: AttentionProblem) -> str | None:
    """Explains why the kernels for Hopper GPUs cannot run a problem; None if they can."""
    student, teacher = problem.student, problem.teacher
    q = student.q
    if q.device.type != "cuda" or not gpu_of(q.device).is_hopper:
        return f"needs an NVIDIA GPU of compute capability 9.0, got device {q.device}"
    if not _has_gluon():
        return "needs Triton with Gluon for Hopper"
    if str(q.dtype) not in ("torch.float16", "torch.bfloat16"):
        return f"takes float16 and bfloat16, got {q.dtype}"
    if problem.head_mean:
        return _head_mean_limit(problem)
    dims = (student.head_dim, teacher.head_dim)
    if not set(dims) <= set(HOPPER_HEAD_DIMS):
        return f"takes a head_dim of {HOPPER_HEAD_DIMS} on each side, got {dims}"
    if is_wide(problem) and (_is_prepared(problem) or has_bias(problem)):
        most = MAX_NARROW_HEAD_DIM
        return f"takes head_dims up to {most} with a mask tensor, a bias or two passes, got {dims}"
    for side in (student, teacher):
        limit = None if side.bias is None else _bias_limit(problem, side.bias)
        if limit is not None:
            return limit
    if student.num_heads != teacher.num_heads:
        return "takes as many heads on both sides"
    least = _least_splits(student, teacher)
    if least > MOST_SPLITS:
        return f"takes key heads whose gradients have at most {MOST_SPLITS} shares, got {least}"
    functional = problem.functional
    form = functional.closed_form
    if form is None and problem.is_packed:
        return f"takes packed sequences with divergences of one pass, got {functional.text}"
    if form is not None and form.has_teacher_moment == form.has_student_moment:
        text = functional.text
        return f"takes a divergence with logarithms under one of P and S, got {text}"
    if problem.has_masked_keys and problem.mask_value != -math.inf:
        return f"takes masks that remove keys, got mask_value {problem.mask_value}"
    if problem.mask is not None:
        limit = _mask_limit(problem)
        if limit is not None:
            return limit
    other = (
        problem.teacher_lse,
        student.alibi_slopes, teacher.alibi_slopes,
        student.sink, teacher.sink,
    )  # fmt: skip
    if any(x is not None for x in other) or student.softcap or teacher.softcap:
        return "takes no alibi, sink, softcap, known lse"
    if problem.seqlen_q == 0 or problem.seqlen_k == 0:
        return "takes at least one query and one key"
    return _layout_limit(student.q, student.k, teacher.q, teacher.k)


def _layout_limit(*tensors: torch.Tensor) -> str | None:
    """Explains why TMA cannot load one of the tensors, or None."""
    for x in tensors:
        *outer, (_, last) = zip(x.shape, x.stride(), strict=True)
        is_odd = any(size > 1 and (n <= 0 or n % 8) for size, n in outer)
        if last != 1 or is_odd or not _aligned_to_16(x):
            return f"takes tensors aligned to 16 bytes in every row, got strides {x.stride()}"
    return None


def _head_mean_limit(problem: AttentionProblem) -> str | None:
    """Explains why the kernels of a head-averaged teacher (hopper/head_mean.py) do not run, or
    None.

    The student is the portable kernels', which read the mean.
    """
    teacher = problem.teacher
    if teacher.head_dim not in HOPPER_HEAD_DIMS or problem.student.head_dim > MAX_TRITON_HEAD_DIM:
        dims = (problem.student.head_dim, teacher.head_dim)
        return f"takes a head-averaged teacher of head_dim {HOPPER_HEAD_DIMS}, got {dims}"
    others = (teacher.bias, teacher.alibi_slopes, teacher.sink, problem.mask)
    if any(x is not None for x in others) or teacher.softcap or problem.is_packed:
        return (
            "takes a head-averaged teacher without bias, alibi, sink, softcap, "
            "mask tensor, packed sequences"
        )
    if problem.has_masked_keys and problem.mask_value != -math.inf:
        return f"takes masks that remove keys, got mask_value {problem.mask_value}"
    if problem.seqlen_q == 0 or problem.seqlen_k == 0:
        return "takes at least one query and one key"
    return _layout_limit(teacher.q, teacher.k)


def _mask_limit(problem: AttentionProblem) -> str | None:
    """Explains why a problem with a mask tensor does not run, or None."""
    mask = problem.mask
    assert mask is not None
    if problem.is_packed:
        return "takes no mask tensor next to packed sequences"
    if problem.functional.closed_form is None:
        return "takes no mask tensor with a divergence of two passes"
    groups = [x.num_heads // x.num_kv_heads for x in (problem.student, problem.teacher)]
    if mask.shape[1] > 1 and max(groups) > 1:
        return "takes a mask per head with as many key heads as heads"
    return None


def _bias_limit(problem: AttentionProblem, bias: torch.Tensor) -> str | None:
    """Explains why a problem with this bias does not run, or None."""
    if _is_prepared(problem):
        return "takes no bias next to a mask tensor or with a divergence of two passes"
    if str(bias.dtype) not in ("torch.float16", "torch.bfloat16", "torch.float32"):
        return f"takes a bias of float16, bfloat16 or float32, got {bias.dtype}"
    if bias.shape[3] == 1 or bias.stride(3) != 1 or bias.stride(2) >= MOST_BIAS_STRIDE:
        strides = bias.stride()
        return f"takes a bias whose keys are neighbours, got {tuple(bias.shape)} of {strides}"
    return None


def _least_splits(student: Side, teacher: Side) -> int:
    """Counts the splits of dK on the side that needs more: a program has one key head per side."""
    groups = [side.num_heads // side.num_kv_heads for side in (student, teacher)]
    return max(groups) // math.gcd(*groups)


def _aligned_to_16(x: torch.Tensor) -> bool:
    # a fake tensor has no address
    return type(x) not in (torch.Tensor, torch.nn.Parameter) or x.data_ptr() % 16 == 0


@functools.cache
def _has_gluon() -> bool:
    try:
        importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    except ImportError:
        return False
    return True


def _prefers_hopper(problem: AttentionProblem, backward: bool) -> bool:
    """Whether "auto" takes the Hopper kernels if they can run: measured, or decided by size."""
    if problem.student.q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return False  # without asking for sizes that only the data decides
    if problem.head_mean:
        ratio = problem.teacher.num_heads // max(1, problem.num_heads)
        return ratio * _flop(problem) >= HOPPER_LEAST_FLOP
    problem = pack_gqa_heads(problem) or problem
    measured = measured_launch(problem, "forward")
    if measured is None:
        is_preferred = _flop(problem) >= HOPPER_LEAST_FLOP
    else:
        is_preferred = measured.implementation == "hopper"
    return (
        is_preferred
        and problem.seqlen_q >= HOPPER_LEAST_QUERIES * _sequences(problem)
        and (_fills_device(problem) or _splits_keys(problem))
        and not _clamps_every_row(problem)
        and (not _is_rare(problem) or _is_measured(problem, backward))
    )


def _is_rare(problem: AttentionProblem) -> bool:
    """Whether a Hopper kernel computes more than plain scores in one pass."""
    return has_bias(problem) or _is_prepared(problem)


def _is_prepared(problem: AttentionProblem) -> bool:
    """Whether a Hopper kernel has a mask tensor to prepare or a second pass."""
    if problem.mask is not None:
        return True
    return problem.functional.closed_form is None and not sums_squares(problem)


def sums_squares(problem: AttentionProblem) -> bool:
    """Returns whether the Hopper forward sums squares in one pass: if it goes by blocks."""
    return (
        problem.functional.squares is not None
        and problem.mask is None
        and not problem.is_packed
        and not (is_wide(problem) or has_bias(problem))
        and not is_persistent(problem)
    )


def _is_measured(problem: AttentionProblem, backward: bool) -> bool:
    """Whether such a problem was measured, and is faster than with the portable kernels."""
    if (problem.student.head_dim, problem.teacher.head_dim) != (128, 128):
        return False
    if has_bias(problem):  # of two biases the gradients have 0.8 of the rate
        return has_one_bias(problem) or not backward
    functional = problem.functional
    return problem.mask is not None or (functional.is_short and functional.squares is None)


def _clamps_every_row(problem: AttentionProblem) -> bool:
    """Whether every row has a probability below a clamp: Hopper kernels compute those twice."""
    guarded = problem.functional.guarded
    if guarded is None:
        return False
    return max(guarded.teacher_floor, guarded.student_floor) > -math.log(max(1, problem.seqlen_k))


def _sequences(problem: AttentionProblem) -> int:
    """Counts the packed sequences in a batch element."""
    return 1 if problem.cu_seqlens_q is None else max(1, problem.cu_seqlens_q.shape[0] - 1)


def _flop(problem: AttentionProblem) -> float:
    batch, num_heads, seqlen_q, head_dim = problem.student.q.shape
    keys = problem.student.k.shape[2] / _sequences(problem)  # of a row, if lengths are alike
    seen = 1.0 if problem.window_right is None else 0.5
    if problem.window_left is not None and problem.window_right is not None:
        width = problem.window_left + problem.window_right + 1
        keys, seen = min(width, keys), 1.0 if width < keys else seen
    pairs = batch * num_heads * seqlen_q * keys
    return 2.0 * seen * pairs * (head_dim + problem.teacher.q.shape[3])


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
    num_whole, parts = splits_of_last_wave(blocks, tiles, problem.student.q.device)
    return num_whole + (blocks - num_whole) * parts >= LEAST_SHARE * multiprocessors(
        problem.student.q.device
    )


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


# Measured on an H200 (bf16, seqlen 8192), by head_dim (bench/notes/hopper_kernels.md).
HOPPER_BACKWARD_LAUNCHES = {
    64: HopperBackwardLaunch(64, 64, 3, 4, True),
    128: HopperBackwardLaunch(64, 64, 2, 4, True),
    256: HopperBackwardLaunch(64, 32, 2, 3, False),  # more does not fit into shared memory
}
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
# Measured on an H200 (bf16, seqlen 8192), by head_dim (bench/notes/hopper_kernels.md).
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
# A share of dQ is stored in float32 and added up, which takes as long as a few tiles.
LEAST_TILES_OF_SPLIT = 32
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
    return HOPPER_LAUNCHES[max(problem.student.head_dim, problem.teacher.head_dim)]


def is_wide(problem: AttentionProblem) -> bool:
    """Returns whether a side's head_dim is too wide for the narrow Hopper kernels."""
    return max(problem.student.head_dim, problem.teacher.head_dim) > MAX_NARROW_HEAD_DIM


def has_bias(problem: AttentionProblem) -> bool:
    """Returns whether a side has a bias."""
    return problem.student.bias is not None or problem.teacher.bias is not None


def has_one_bias(problem: AttentionProblem) -> bool:
    """Returns whether both sides have the same bias, such as an additive mask: it is read once."""
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
    """Returns whether the Hopper kernels go by tiles of warp groups (persistent_forward.py).

    Those that go by blocks know neither mask tensors nor a second pass, and are faster elsewhere,
    but where blocks are short: under a window, and with few rows.
    """
    return _is_prepared(problem) or is_persistent(problem, backward)


def multiplies_pairs(problem: AttentionProblem) -> bool:
    """Returns whether the Hopper forward by blocks multiplies pairs of tiles as one.

    It is faster here alone: NOTE [Pairs at once] in attention/hopper/warp_groups.py.
    """
    return (
        problem.window_right is not None
        and problem.functional.bilinear is not None
        and not problem.is_packed
        and not has_bias(problem)
        and problem.student.head_dim == problem.teacher.head_dim == 128
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
    is_measured = backward or problem.student.head_dim == 128
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
        and _flop(problem) >= ATOMIC_LEAST_FLOP
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
    own_dim: int, other_dim: int, has_logarithms: bool, adds: bool = False
) -> HopperBackwardLaunch:
    """Chooses the launch of dQ or dK on Hopper; ``adds``: the dK kernel also sums dQ."""
    if max(own_dim, other_dim) > MAX_NARROW_HEAD_DIM:
        return HOPPER_BACKWARD_LAUNCHES[256]
    if adds:
        return HOPPER_ATOMIC_LAUNCHES[own_dim]
    if has_logarithms:
        return HOPPER_LOGARITHMS
    return HOPPER_BACKWARD_LAUNCHES[own_dim]


def triton_launch(problem: AttentionProblem, kernel: str) -> TritonLaunch:
    """Returns the configuration of the "forward", "dq" or "dk" kernel.

    With a head-averaged teacher that of "lse", "mean", or "forward": all that read the mean.
    """
    device = problem.student.q.device
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


WHOLE_HEADS_FEW_ROWS = 128  # dQ and dK would have as many programs one after the other


def whole_heads_launch(problem: AttentionProblem, student: bool) -> TritonLaunch | None:
    """Returns the configuration of "dq_dk", which computes both gradients, or None for two
    kernels.
    """
    packed = problem.is_packed
    keys = problem.max_seqlen_k if packed else problem.seqlen_k
    rows = problem.max_seqlen_q if packed else problem.seqlen_q
    if not isinstance(keys, int) or keys == 0:  # few or many: a symbolic size is not asked
        return None
    device = problem.student.q.device
    if device.type != "cuda":  # the interpreter: up to two of its tiles
        return TritonLaunch(16, 16, 4, 1) if keys <= 32 else None
    programs = hint_of(problem.batch) * _sequences(problem) * problem.num_heads
    if hint_of(rows) > WHOLE_HEADS_FEW_ROWS and programs < multiprocessors(device):
        return None
    side = problem.student if student else problem.teacher
    has_padding = problem.mask is not None and problem.mask.shape[1:3] == (1, 1)
    has_mask = problem.mask is not None and not has_padding
    if has_mask or any(
        x.bias is not None or x.softcap for x in (problem.student, problem.teacher)
    ):
        return None  # up to 192 bytes of a thread would spill
    return tiles.whole_heads_launch(
        padded_dim(side.head_dim), keys, has_padding, _operands(problem), gpu_of(device)
    )


def _operands(problem: AttentionProblem) -> tiles.Operands:
    q = problem.student.q
    dims = (padded_dim(problem.student.head_dim), padded_dim(problem.teacher.head_dim))
    is_full = q.dtype == torch.float32 and dot_precision(q) == "ieee"
    return tiles.Operands(dims, q.element_size(), is_full)


def measured_launch(problem: AttentionProblem, kernel: str) -> MeasuredLaunch | None:
    """Looks up a kernel of a problem in the user's launch table (launches/launch_table.py)."""
    table = launch_table.current(device_name(problem.student.q.device))
    if table is None or not is_tunable(problem):  # every call asks, and most have no table
        return None
    return table.find(launch_key(problem, kernel))


def is_tunable(problem: AttentionProblem) -> bool:
    """Returns whether launches measured for plain problems are known to fit this one.

    Mask tensors, biases and second passes need registers and shared memory that the tuner's
    problems do not: the defaults leave room for them.
    """
    sides = (problem.student, problem.teacher)
    return not (
        problem.mask is not None
        or problem.functional.bilinear is None
        or problem.head_mean
        or any(side.bias is not None or side.softcap for side in sides)
    )


def launch_key(problem: AttentionProblem, kernel: str) -> LaunchKey:
    """Returns the key of a problem's measured launch."""
    packed = problem.is_packed
    lengths = (
        (problem.max_seqlen_q, problem.max_seqlen_k)
        if packed
        else (problem.seqlen_q, problem.seqlen_k)
    )
    return LaunchKey(
        kernel,
        padded_dim(problem.student.head_dim),
        padded_dim(problem.teacher.head_dim),
        problem.student.q.element_size(),
        problem.window_right is not None,
        max(hint_of(n) for n in lengths),
    )


def _num_splits(problem: AttentionProblem, launch: TritonLaunch) -> int:
    """Chooses enough programs to fill the device twice, each with several tiles of keys."""
    programs = ceil_div(problem.seqlen_q, launch.block_m) * problem.num_heads * problem.batch
    return _shared_by(problem, 2, programs, ceil_div(problem.seqlen_k, launch.block_n) // 4)


def head_mean_splits(problem: AttentionProblem, programs: int, tiles: int) -> int:
    """Returns the num_splits of a block's tiles, if one tile is computed for all teacher heads.

    Sums of a row add up over shares, unless a masked key counts: that takes the whole row.
    """
    return 1 if problem.mask_value != -math.inf else _shared_by(problem, 4, programs, tiles)


def row_splits(problem: AttentionProblem, programs: int, tiles: int) -> int:
    """Returns the num_splits of the KV tiles of a block of rows, for dQ on Hopper."""
    return _shared_by(problem, 1, programs, tiles // LEAST_TILES_OF_SPLIT)


def key_splits(
    problem: AttentionProblem, group: int, programs: int, resident: int, together: int = 0
) -> int:
    """Returns the num_splits of a key block's ``group`` query heads: a divisor of group.

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
    enough = each * multiprocessors(problem.student.q.device)
    return max(1, min(enough // max(hint_of(programs), 1), hint_of(most), MOST_SPLITS))


def hint_of(n: int | torch.SymInt) -> int:
    """Returns a number, or a symbolic one's hint, for choices that are right for every value."""
    if not isinstance(n, torch.SymInt):
        return n
    hint = n.node.hint
    return 1 if hint is None else int(hint)


def dot_precision(x: torch.Tensor) -> str:
    """Returns Triton's precision of float32 products: torch's, if the GPU can; else full."""
    if x.dtype != torch.float32 or matmul_precision() != "tf32":
        return "ieee"
    can = x.device.type != "cuda" or gpu_of(x.device).multiplies_tf32
    return "tf32" if can else "ieee"


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning the first time only."""
    _log.warning(message)
