"""Describes what a GPU offers to a kernel: limits that torch reports, not chip names."""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from torch_streamkl.runtime.launch import with_index

LEAST_CAPABILITY = (7, 5)


@dataclass(frozen=True)
class Gpu:
    """Holds the limits of one device."""

    name: str
    is_hip: bool
    capability: tuple[int, int]  # of an AMD GPU its gfx number: (9, 0) is MI200, too
    shared_bytes: int  # of one block of threads
    multiprocessors: int
    warp_size: int

    @property
    def is_hopper(self) -> bool:
        return not self.is_hip and self.capability == (9, 0)

    @property
    def multiplies_half(self) -> bool:
        """Returns whether Triton has matrix units for 16-bit types on it: not on sm_75."""
        return self.is_hip or self.capability >= (8, 0)

    @property
    def multiplies_tf32(self) -> bool:
        """Returns whether matrix units take float32 rounded to TF32; of AMD GPUs, only gfx942
        does.
        """
        return self.capability == (9, 4) if self.is_hip else self.capability >= (8, 0)

    @property
    def operands_in_registers(self) -> bool:
        """Returns whether matrix units read operands from registers, not from shared memory."""
        return self.is_hip or self.capability[0] not in (9, 10)


def gpu_of(device: torch.device) -> Gpu:
    """Returns the limits of a CUDA or HIP device."""
    return limits_of(device if device.index is not None else with_index(device))


@functools.cache
def limits_of(device: torch.device) -> Gpu:
    """Returns the limits of a device with an index, asked once."""
    properties: Any = torch.cuda.get_device_properties(device)
    is_hip = torch.version.hip is not None
    # An NVIDIA GPU gives more than its default to a launch that asks, which HIP has no field for.
    shared = "shared_memory_per_block" if is_hip else "shared_memory_per_block_optin"
    return Gpu(
        properties.name,
        is_hip,
        (properties.major, properties.minor),
        getattr(properties, shared),
        properties.multi_processor_count,
        properties.warp_size,
    )


def gpu_limit(device: torch.device) -> str | None:
    """Explains why no kernel runs on a CUDA or HIP device; None if kernels run."""
    gpu = gpu_of(device)
    if gpu.is_hip or gpu.capability >= LEAST_CAPABILITY:
        return None
    return f"needs compute capability 7.5 or above, got {gpu.name} of {gpu.capability}"


def matmul_precision() -> str:
    """Returns the precision of float32 matmuls, as torch.backends names it.

    "tf32" means that float32 products of a GPU may be rounded to it.
    """
    # torch.backends.cuda.matmul.fp32_precision, without the 2 us that its modules take
    precision: str = torch._C._get_fp32_precision_getter("cuda", "matmul")
    return precision


@functools.cache
def require_driver() -> None:
    """Raises, before anything is computed, if there are GPUs on which Triton cannot launch.

    Triton's first launch of a process builds a module that speaks to the driver, by a C compiler.
    """
    if not torch.cuda.is_available():
        return  # tensors are fake: nothing is launched
    try:
        from triton.runtime.driver import driver

        _ = driver.active
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise RuntimeError(
            "Triton cannot start on this machine's GPU, and the kernels need it. It takes a C "
            "compiler (gcc, clang, or what the variable CC names) and Python's headers; plain "
            "torch, which takes neither, computes the same with impl='torch'. "
            f"Triton's error: {type(error).__name__}: {lines[0]}"
        ) from error


def is_interpreted() -> bool:
    """Returns whether Triton's interpreter runs kernels, also on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def kernel_limit(device: torch.device, dtype: torch.dtype) -> str | None:
    """Explains why no kernel takes tensors of a device and dtype; None if one may."""
    if device.type != "cuda" and not is_interpreted():
        return f"needs a GPU (or TRITON_INTERPRET=1), got device {device.type}"
    if str(dtype) not in ("torch.float16", "torch.bfloat16", "torch.float32"):
        return f"takes float16, bfloat16 and float32, got {dtype}"
    return None


def runs_kernels(operator: str, impl: str, device: torch.device, limit: str | None) -> bool:
    """Returns whether Triton's kernels compute a call, and not plain torch.

    ``limit`` says why they cannot. An explicit choice that cannot run raises, a slow automatic one
    is logged, and a GPU whose driver has no compiler raises at the first call.
    """
    if impl == "triton" and limit is not None:
        raise NotImplementedError(f"impl='triton' {limit}; impl='torch' computes it")
    if impl == "torch" or limit is not None:
        if impl != "torch" and device.type != "cpu":
            warn_once(f"{operator} runs in plain torch here, which is slower: the kernel {limit}")
        return False
    if device.type == "cuda":
        require_driver()
    return True


@functools.cache
def device_name(device: torch.device) -> str:
    """Returns the name of a device in launch tables."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "interpreter"
    return gpu_of(device).name


def multiprocessors(device: torch.device) -> int:
    """Counts the programs that run side by side; for the interpreter 4."""
    return gpu_of(device).multiprocessors if device.type == "cuda" else 4


_log = logging.getLogger("torch_streamkl")

MAX_HALF_HEAD_DIM_OF_TURING = 128  # beyond, 2 KB of a thread's registers spill


def matmul_limit(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Explains why kernels that multiply matrices do not run on a CUDA or HIP device, or None."""
    limit, gpu = gpu_limit(device), gpu_of(device)
    if limit is not None or gpu.is_hip or gpu.capability >= (8, 0):
        return limit
    if str(dtype) == "torch.bfloat16":
        return f"takes bfloat16 from compute capability 8.0 on, got {gpu.name} of {gpu.capability}"
    if str(dtype) == "torch.float16" and head_dim > MAX_HALF_HEAD_DIM_OF_TURING:
        most = MAX_HALF_HEAD_DIM_OF_TURING
        return f"takes float16 of head_dim up to {most} on {gpu.name}, got {head_dim}"
    return None


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
