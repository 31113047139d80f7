"""What the machine can do in the same run: a matmul, a copy, attention at a case's shape."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cases import AttentionCase
from bench.measure import OutOfMemory, Sample, Timed, median_ms

ROUNDS = 7


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Rate of one large square matmul on random data."""
    size = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / median_ms(lambda: a @ b, device, ROUNDS) * 1e-9


def copy_gbytes(device: torch.device) -> float:
    """Bandwidth of a large copy, bytes read plus bytes written, in GB/s."""
    count = 2**30 if device.type == "cuda" else 2**26
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    return 2e-6 * source.nbytes / median_ms(lambda: target.copy_(source), device, ROUNDS)


def both(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """As a run holds them."""
    return {"matmul_tflops": matmul_tflops(device, dtype), "copy_gbytes": copy_gbytes(device)}


def attention(case: AttentionCase, device: torch.device, dtype: torch.dtype) -> Timed | None:
    """Torch's attention (cuDNN's on CUDA) with the teacher's heads, to be timed next to providers.

    None where there is no such form, or no memory for it.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = SDPBackend.CUDNN_ATTENTION if device.type == "cuda" else SDPBackend.FLASH_ATTENTION
    heads = case.teacher
    shape = (case.batch, heads.num_heads, case.seqlen, heads.head_dim)

    def loss(q: Tensor, k: Tensor, v: Tensor, ones: Tensor) -> Tensor:
        # the product with ones gives the backward a gradient without a reduction over the output
        return _Sink.apply(F.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal), ones)

    try:
        q, k, v = (
            torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
        )
        inputs = (q, k, v, torch.ones_like(q))
        timed = Timed(loss, [inputs], partial(sdpa_kernel, backend))
        timed.burst(0)
    except (RuntimeError, OutOfMemory):
        return None
    return timed


def attention_tflops(case: AttentionCase, mode: str, taken: list[Sample]) -> float:
    """Rate of a mode's part of samples of `attention`, in which two matmuls are a forward.

    A backward is five, as everyone counts.
    """
    heads = case.teacher
    pairs = case.seqlen**2 * (0.5 if case.is_causal else 1.0)
    matmul = 2.0 * case.batch * heads.num_heads * pairs * heads.head_dim
    number = 5 if mode == "backward" else 2
    ms = statistics.median(sample.ms(mode) for sample in taken)
    return number * matmul / ms * 1e-9


class _Sink(torch.autograd.Function):
    """A scalar whose gradient with respect to x is ``ones``, at no cost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ones: Tensor) -> Tensor:
        ctx.save_for_backward(ones)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None
