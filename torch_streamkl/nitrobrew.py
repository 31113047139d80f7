"""Drop-in for Nitrobrew's two functions, with `linear_kl` behind them.

``from torch_streamkl.nitrobrew import forward_kl, reverse_kl``. Everything else that `linear_kl`
can do (biases, softcaps, labels, row weights, gradients to the teacher) is there, not here.
"""

from __future__ import annotations

import math

from torch import Tensor

from torch_streamkl.linear.interface import linear_kl
from torch_streamkl.linear.problem import MIB

__all__ = ["forward_kl", "reverse_kl"]


def forward_kl(
    xs: Tensor,
    xt: Tensor,
    ws: Tensor,
    wt: Tensor,
    temperature: float = 1.0,
    reduction: str = "mean",
    chunk_V: int = 2048,
) -> Tensor:
    """KL(teacher || student) of ``softmax(xt @ wt.T / temperature)`` and ``softmax(xs @ ws.T /
    temperature)``.

    Args:
        xs, xt: ``[batch, tokens, width]`` hidden states of the student and the teacher.
        ws, wt: ``[num_words, width]`` their LM heads. Gradients go to xs and ws; the teacher is
            constant.
        temperature: divides both logits; the T^2 factor is the caller's.
        reduction: ``"mean"`` over tokens, ``"sum"``, ``"batchmean"`` or ``"none"``.
        chunk_V: bounds the memory for logits by ``batch * tokens * chunk_V`` values of each side
            (at least the logits of one token).
    """
    return _kl("forward_kl", xs, xt, ws, wt, temperature, reduction, chunk_V)


def reverse_kl(
    xs: Tensor,
    xt: Tensor,
    ws: Tensor,
    wt: Tensor,
    temperature: float = 1.0,
    reduction: str = "mean",
    chunk_V: int = 2048,
) -> Tensor:
    """KL(student || teacher); arguments as in `forward_kl`."""
    return _kl("reverse_kl", xs, xt, ws, wt, temperature, reduction, chunk_V)


def _kl(
    divergence: str,
    xs: Tensor,
    xt: Tensor,
    ws: Tensor,
    wt: Tensor,
    temperature: float,
    reduction: str,
    chunk_V: int,
) -> Tensor:
    if chunk_V < 1:
        raise ValueError(f"chunk_V must be at least 1, got {chunk_V}")
    elements = max(math.prod(xs.shape[:-1]) * chunk_V, ws.shape[0] + 64)
    bytes_of_both = elements * (xs.element_size() + xt.element_size())
    return linear_kl(
        xs,
        ws,
        xt.detach(),
        wt.detach(),
        divergence=divergence,
        temperature=temperature,
        reduction=reduction,
        max_workspace_mib=-(-bytes_of_both // MIB),
    )
