"""Chooses default tiles of the portable kernels by a GPU's shared memory and registers.

The first choice was measured on an H200 (bf16, seqlen 8192), and serves every GPU that it fits:
more programs on a multiprocessor beat larger tiles. On other GPUs the first entry of a list that
fits is used; offline compilation shows that it fits, and how much it spills
(docs/evidence/gpus.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from torch_streamkl.runtime.devices import Gpu


@dataclass(frozen=True)
class TritonLaunch:
    """Configures tile sizes and pipelining of one kernel."""

    block_m: int  # query rows of a tile
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int
    num_splits: int = 1  # programs that share the keys of one block of rows

    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Operands:
    """Describes what the matmuls of a kernel multiply."""

    head_dims: tuple[int, ...]  # of all dot products, padded to powers of two
    element_bytes: int
    is_full_float32: bool  # no rounding to TF32

    @property
    def widest(self) -> int:
        return max(self.head_dims)

    def of_rows(self, rows: int) -> int:
        """Counts the bytes of so many rows of both sides."""
        return rows * sum(self.head_dims) * self.element_bytes


LEAST = TritonLaunch(16, 16, 4, 1)  # the smallest tiles that a matrix unit takes


@dataclass(frozen=True)
class Rule:
    """Describes a row of the table of launches: the kernels that it is for, and launches in the
    order of preference.
    """

    launches: tuple[TritonLaunch, ...]
    numbers: tuple[str, ...]  # "half" on matrix units, "tf32" and other rounded ones, "float32"
    kernels: tuple[str, ...] = ("forward", "dq", "dk")
    above: int = 0  # the wider head_dim
    upto: int = 1 << 30
    both_above: int = 0  # both head_dims together
    on: Callable[[Gpu], bool] = lambda gpu: True


HALF, SINGLE = ("half",), ("tf32", "float32")
# beyond 64 eight warps, or gradients spill (compiled, not measured)
EIGHT_WARPS, OF_ROWS = TritonLaunch(32, 32, 8, 1), TritonLaunch(16, 16, 8, 1)
SMALL = (TritonLaunch(64, 32, 4, 2), EIGHT_WARPS, LEAST)
REST = (TritonLaunch(64, 32, 4, 1), TritonLaunch(32, 32, 4, 1), LEAST)
LARGE, LARGE_KEYS = (TritonLaunch(64, 64, 4, n) for n in (2, 1))


def _has_room(gpu: Gpu) -> bool:
    return gpu.shared_bytes >= 200 * 1024  # sm_80 spills with the larger tiles


RULES = (
    # 1.3 KB of a thread's registers would spill
    Rule((LEAST,), SINGLE, above=128, on=lambda gpu: gpu.is_hip),
    # a second pass doubles the operands in registers: 1.9 KB would spill
    Rule((OF_ROWS, LEAST), SINGLE, ("forward",), above=128, on=lambda gpu: not gpu.is_hopper),
    # queries of TF32 stay in registers: 32 rows would spill 1.6 to 6.3 KB
    Rule((TritonLaunch(16, 32, 8, 1), LEAST), ("tf32",), ("forward",), both_above=256),
    Rule(SMALL, ("tf32",), upto=64, on=lambda gpu: gpu.multiplies_half),
    # products that are added one by one keep both operands in registers
    Rule(SMALL, ("float32",), upto=32, on=lambda gpu: gpu.multiplies_half),
    Rule(SMALL, ("float32",), upto=64, on=lambda gpu: gpu.is_hopper),
    Rule((EIGHT_WARPS, OF_ROWS, LEAST), SINGLE),
    # rows of 256 fill the registers of four warps
    Rule(
        (TritonLaunch(64, 32, 8, 1), TritonLaunch(32, 32, 4, 1), LEAST), HALF, above=128,
        on=lambda gpu: gpu.operands_in_registers and not gpu.is_hip,
    ),
    Rule((TritonLaunch(32, 32, 4, 1), LEAST), HALF, ("dk",), 128, on=lambda gpu: gpu.is_hip),
    Rule((LARGE, *REST), HALF, ("forward",), upto=128),
    Rule((LARGE, *REST), HALF, ("dq",), upto=64),
    Rule((LARGE, *REST), HALF, ("dq",), upto=128, on=_has_room),
    Rule((LARGE_KEYS, *REST), HALF, ("dk",), upto=64),
    Rule((LARGE_KEYS, *REST), HALF, ("dk",), upto=128, on=_has_room),
    Rule((TritonLaunch(32, 64, 4, 1), *REST), HALF, ("dk",), above=128),
    Rule(REST, HALF),
)  # fmt: skip


def default_launch(kernel: str, operands: Operands, gpu: Gpu) -> TritonLaunch:
    """Returns the first choice for "forward", "dq" or "dk" that fits the GPU."""
    choices = _choices(kernel, operands, gpu)
    room = gpu.shared_bytes
    return next((x for x in choices if shared_bytes(x, kernel, operands, gpu) <= room), LEAST)


def head_mean_launch(kernel: str, operands: Operands, gpu: Gpu) -> TritonLaunch:
    """Returns the launch of a head-averaged teacher's "lse", "mean", or "forward" (reads it)."""
    if gpu.is_hopper and operands.element_bytes == 4 and operands.widest > 128:
        # readers of the mean keep operands of three products in registers: 2 to 5 KB would spill
        # with 32 x 32, which takes more instructions for a pair
        keeps = kernel == "forward" and operands.is_full_float32
        return TritonLaunch(16, 16, 8, 1) if keeps else TritonLaunch(32, 32, 8, 1)
    if operands.element_bytes == 4 or gpu.is_hip or gpu.shared_bytes < 120 * 1024:
        return replace(default_launch("forward", operands, gpu), num_stages=1)
    if gpu.is_hopper and kernel != "forward":
        return TritonLaunch(128, 128, 8, 2) if kernel == "lse" else TritonLaunch(64, 128, 8, 2)
    # operands of all dot products lie in shared memory where accumulators are not registers
    is_wide = operands.widest > 128 and not (gpu.is_hopper or gpu.operands_in_registers)
    return TritonLaunch(64, 32, 8, 1 if is_wide else 2)


def one_dot_launch(kernel: str, operands: Operands, gpu: Gpu) -> TritonLaunch:
    """Returns the launch of a single dot product next to materialized elements.

    An indexer with 64 heads of 128 on an H200: 8.8 ms with these tiles for dQ, 10.1 with 64 x 64.
    """
    is_one = len(operands.head_dims) == 1 and operands.widest <= 128
    if kernel == "dq" and gpu.is_hopper and operands.element_bytes == 2 and is_one:
        return TritonLaunch(64, 128, 8, 2)
    launch = default_launch(kernel, operands, gpu)
    return _of_float32_rows(kernel, launch, operands) if gpu.is_hopper else launch


def row_program_launch(kernel: str, operands: Operands, gpu: Gpu) -> TritonLaunch:
    """Returns the launch of a row program, which keeps more of a tile than a divergence.

    What replaces a default spills less and takes fewer instructions for a pair (compiled and
    counted, not measured).
    """
    launch = default_launch(kernel, operands, gpu)
    is_full, is_wide = operands.is_full_float32, operands.widest > 128
    if gpu.is_hopper:
        return _of_float32_rows(kernel, launch, operands)
    if gpu.is_hip or not gpu.operands_in_registers:
        return launch
    if kernel == "forward" and launch == TritonLaunch(64, 64, 4, 2) and operands.widest == 128:
        return TritonLaunch(64, 32, 4, 2)
    if kernel == "dk" and launch == TritonLaunch(64, 32, 4, 2) and is_full:
        return TritonLaunch(32, 64, 4, 1)
    if launch == TritonLaunch(64, 32, 8, 1) and is_wide and kernel != "dq":
        # of dK it leaves room for reductions in 99 KiB, too
        return TritonLaunch(32, 64, 8, 1) if kernel == "forward" else TritonLaunch(32, 32, 4, 1)
    return launch


def _of_float32_rows(kernel: str, launch: TritonLaunch, operands: Operands) -> TritonLaunch:
    """Returns a Hopper launch with fewer rows if 2.8 to 6 KB of a row program's dQ would spill."""
    if kernel == "dq" and operands.is_full_float32 and operands.widest > 128:
        return replace(launch, block_m=16)
    return launch


def sum_of_heads_launch(operands: Operands, gpu: Gpu) -> TritonLaunch:
    """Returns the launch of a row program's sum over heads; 2.8 KB would spill."""
    launch = head_mean_launch("mean", operands, gpu)
    if gpu.is_hip or not operands.is_full_float32 or launch.num_warps == 8:
        return launch
    return TritonLaunch(64 if operands.widest <= 32 else 32, 32, 8, 1)


def _choices(kernel: str, operands: Operands, gpu: Gpu) -> tuple[TritonLaunch, ...]:
    """Lists launches in the order of preference: those of the first rule that fits."""
    numbers = "float32" if operands.is_full_float32 else "tf32"
    if operands.element_bytes == 2 and gpu.multiplies_half:
        numbers = "half"
    return next(
        rule.launches
        for rule in RULES
        if numbers in rule.numbers
        and kernel in rule.kernels
        and rule.above < operands.widest <= rule.upto
        and rule.both_above < sum(operands.head_dims)
        and rule.on(gpu)
    )


def shared_bytes(launch: TritonLaunch, kernel: str, operands: Operands, gpu: Gpu) -> int:
    """Returns the most shared memory that a launch may take.

    The tiles that stream by, once for every stage; those that stay (queries, for dK keys) lie
    there, too, but on AMD GPUs, where matrix units read them from registers.
    """
    stays, streams = launch.block_m, launch.block_n
    if kernel == "dk":
        stays, streams = streams, stays
    total = operands.of_rows(streams * launch.num_stages)
    if gpu.is_hip:
        return total
    if kernel == "dk" and operands.element_bytes == 4 and not operands.is_full_float32:
        total += operands.of_rows(streams) // 2  # TF32 is not transposed on the way to registers
    return total + operands.of_rows(stays)


def ceil_div(a: int, b: int) -> int:
    """Returns a / b, rounded up; triton.cdiv takes 2 to 8 us."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Returns the least that is not below n, of 1 and more; triton's takes as long."""
    return 1 << (n - 1).bit_length()


def padded_dim(dim: int) -> int:
    """Returns the size of a tile's dimension: the next power of two, at least 16."""
    return max(16, next_power_of_2(dim))


def hint_of(n: int | torch.SymInt) -> int:
    """Returns the number, or a symbolic one's hint: for choices that are right for every value."""
    if not isinstance(n, torch.SymInt):
        return n
    hint = n.node.hint
    return 1 if hint is None else int(hint)
