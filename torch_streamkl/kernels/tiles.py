"""Chooses default tiles of the portable kernels by a GPU's shared memory and registers.

The first choice was measured on an H200 (bf16, seqlen 8192), and serves every GPU that it fits:
more programs on a multiprocessor beat larger tiles. On other GPUs the first entry of a list that
fits is used; offline compilation shows that it fits, and how much it spills
(docs/evidence/gpus.md).
"""

from __future__ import annotations

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


def _choices(kernel: str, operands: Operands, gpu: Gpu) -> list[TritonLaunch]:
    """Lists launches in the order of preference."""
    head_dim = operands.widest
    if operands.element_bytes == 4 or not gpu.multiplies_half:
        # beyond 64 eight warps, or gradients spill (compiled, not measured)
        eight_warps = TritonLaunch(32, 32, 8, 1)
        if gpu.is_hip and head_dim > 128:
            return [LEAST]  # 1.3 KB of a thread's registers would spill
        if kernel == "forward" and head_dim > 128 and not gpu.is_hopper:
            # a second pass doubles the operands in registers: 1.9 KB would spill
            return [TritonLaunch(16, 16, 8, 1), LEAST]
        is_tf32 = not operands.is_full_float32
        if kernel == "forward" and is_tf32 and sum(operands.head_dims) > 256:
            # queries of TF32 stay in registers: 32 rows would spill 1.6 to 6.3 KB
            return [TritonLaunch(16, 32, 8, 1), LEAST]
        # products that are added one by one keep both operands in registers
        spills = operands.is_full_float32 and head_dim > 32 and not gpu.is_hopper
        if head_dim <= 64 and gpu.multiplies_half and not spills:
            return [TritonLaunch(64, 32, 4, 2), eight_warps, LEAST]
        return [eight_warps, TritonLaunch(16, 16, 8, 1), LEAST]
    if head_dim > 128 and gpu.operands_in_registers:
        # rows of 256 fill the registers of four warps
        eight_warps = TritonLaunch(64, 32, 8, 1)
        if not gpu.is_hip:
            return [eight_warps, TritonLaunch(32, 32, 4, 1), LEAST]
        if kernel == "dk":
            return [TritonLaunch(32, 32, 4, 1), LEAST]
    small = gpu.shared_bytes < 200 * 1024  # sm_80 spills with the larger tiles
    if kernel == "forward":
        first = TritonLaunch(64, 64, 4, 2) if head_dim <= 128 else TritonLaunch(64, 32, 4, 1)
    elif head_dim <= 64 or (head_dim <= 128 and not small):
        first = TritonLaunch(64, 64, 4, 2) if kernel == "dq" else TritonLaunch(64, 64, 4, 1)
    elif head_dim <= 128 or kernel == "dq":
        first = TritonLaunch(64, 32, 4, 1)
    else:
        first = TritonLaunch(32, 64, 4, 1)
    return [first, TritonLaunch(64, 32, 4, 1), TritonLaunch(32, 32, 4, 1), LEAST]


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
    """Returns dimensions of a tile that holds so many."""
    return max(16, next_power_of_2(dim))


def hint_of(n: int | torch.SymInt) -> int:
    """Returns the number, or a symbolic one's hint: for choices that are right for every value."""
    if not isinstance(n, torch.SymInt):
        return n
    hint = n.node.hint
    return 1 if hint is None else int(hint)
