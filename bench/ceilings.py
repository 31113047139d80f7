"""What the machine can do in the same run: a matmul, a copy, attention at a case's shape."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cases import AttentionCase
from bench.measure import sample


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Rate of one large square matmul on random data."""
    size = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _median_ms(lambda: a @ b, device) * 1e-9


def copy_gbytes(device: torch.device) -> float:
    """Bandwidth of a large copy, bytes read plus bytes written, in GB/s."""
    count = 2**30 if device.type == "cuda" else 2**26
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    return (
        2
        * source.numel()
        * source.element_size()
        / _median_ms(lambda: target.copy_(source), device)
        * 1e-6
    )


def attention_tflops(
    case: AttentionCase, device: torch.device, dtype: torch.dtype
) -> tuple[float, float] | None:
    """Forward and backward rates of torch's attention (cuDNN's on CUDA) with the teacher's heads.

    Two matmuls forward and five backward, as everyone counts. None where there is no such form.
    """
    return _attention(
        case.batch,
        case.teacher.num_heads,
        case.seqlen,
        case.teacher.head_dim,
        case.is_causal,
        device,
        dtype,
    )


@functools.cache
def _attention(
    batch: int,
    heads: int,
    seqlen: int,
    head_dim: int,
    is_causal: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[float, float] | None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = SDPBackend.CUDNN_ATTENTION if device.type == "cuda" else SDPBackend.FLASH_ATTENTION
    q, k, v = (
        torch.randn(batch, heads, seqlen, head_dim, device=device, dtype=dtype) for _ in range(3)
    )
    for x in (q, k, v):
        x.requires_grad_()
    ones = torch.ones_like(q)

    def loss(*inputs: Tensor) -> Tensor:
        # the product with ones gives the backward a gradient without a reduction over the output
        return _Sink.apply(F.scaled_dot_product_attention(*inputs[:3], is_causal=is_causal), ones)

    try:
        with sdpa_kernel(backend):
            sample(loss, (q, k, v, ones))
            taken = [sample(loss, (q, k, v, ones), 3, warm_up=1) for _ in range(5)]
    except (RuntimeError, torch.OutOfMemoryError):
        return None
    matmul = 2.0 * batch * heads * seqlen**2 * head_dim * (0.5 if is_causal else 1.0)
    forward = statistics.median(s.forward_ms for s in taken)
    backward = statistics.median(s.backward_ms for s in taken)
    return 2 * matmul / forward * 1e-9, 5 * matmul / backward * 1e-9


class _Sink(torch.autograd.Function):
    """A scalar whose gradient with respect to x is ``ones``, at no cost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ones: Tensor) -> Tensor:
        ctx.save_for_backward(ones)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def _median_ms(call: Callable[[], object], device: torch.device) -> float:
    from bench.measure import _elapsed_ms, _now, synchronize

    times = []
    for _ in range(3):
        call()
    for _ in range(7):
        start = _now(device)
        call()
        end = _now(device)
        synchronize(device)
        times.append(_elapsed_ms(start, end))
    return statistics.median(times)
