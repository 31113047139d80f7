"""Rewrites ``softmax(softcap * tanh(scale * QK^T)) @ V``, with masks, to a call of FlexAttention.

scaled_dot_product_attention has no softcap; torch.nn.attention.flex_attention takes any function
of a score. On a GPU Inductor compiles it and its backward to kernels that never hold a [queries,
keys] tensor.

NOTE [A function that runs when the graph is traced]
The rewritten graph calls `softcapped_attention`, a Python function. AOTAutograd traces it, and
finds the higher-order operator there with the function of a score as a closure. So the graph needs
no submodules, which copies of it, DDPOptimizer and checks would have to know of. If it runs
without a compiler, as in a check, it computes the same with materialized scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.fx_passes.fx_utils.torch_names import later

ONE_BLOCK = 1 << 30  # the block mask of a call without one: everything in a single block
OPTIONS = {  # what torch.nn.attention.flex_attention gives by default
    "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True, "OUTPUT_MAX": False, "BACKEND": "AUTO",
}  # fmt: skip


def softcapped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softcap: float,
    scale: float,
    first: int | torch.SymInt | None = None,
    last: int | torch.SymInt | None = None,
    masks: Sequence[Tensor] = (),
    inner_bias: Tensor | None = None,
    bias: Tensor | None = None,
    alive: Tensor | None = None,
    has_slope: bool = False,
) -> Tensor:
    """Computes attention with scores ``softcap * tanh(scale * q k^T + inner_bias) + bias``.

    A query i sees the keys j with ``first <= j - i <= last`` at which all masks are True. A row in
    which ``alive`` is False sees all keys alike: its scores are 0, with the gradient of the capped
    scores if ``has_slope`` (see NOTE [Rows without keys]).

    Args:
        q: [batch, heads, queries, head_dim].
        k, v: [batch, key heads, keys, head_dim]; query heads from h * group on use key head h.
        masks, inner_bias, bias, alive: broadcast to [batch, heads, queries, keys]; no gradients.
    """
    captured = _Captured(q.device)
    low, high = captured.number(first), captured.number(last)
    kept = [captured.tensor(x) for x in masks]
    before_softcap, after_softcap, living = (captured.tensor(x) for x in (inner_bias, bias, alive))

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *given: Tensor) -> Tensor:
        place = (b, h, i, j)
        if before_softcap is not None:
            s = s + before_softcap(given, place)
        s = capped = softcap * torch.tanh(s)
        if after_softcap is not None:
            s = s + after_softcap(given, place)
        if low is not None:
            s = torch.where(j - i >= low(given, place), s, -math.inf)
        if high is not None:
            s = torch.where(j - i <= high(given, place), s, -math.inf)
        for keep in kept:
            assert keep is not None
            s = torch.where(keep(given, place), s, -math.inf)
        if living is not None:
            even = capped - capped.detach() if has_slope else torch.zeros_like(capped)
            s = torch.where(living(given, place), s, even)
        return s

    flex_attention = later("torch._higher_order_ops.flex_attention", "flex_attention")
    options = {**OPTIONS, "OUTPUT_LOGSUMEXP": torch.is_grad_enabled()}
    out: Tensor = flex_attention(
        q, k, v, score_mod, _one_block(q.device), scale, options, tuple(captured.tensors), ()
    )[0]
    return out


class _Captured:
    """Holds tensors that a score function reads, and how it finds them among its arguments."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: list[Tensor] = []

    def number(self, value: int | torch.SymInt | None) -> Any:
        """Returns a bound as a constant, or as a tensor of a size that varies."""
        if value is None or isinstance(value, int):
            return None if value is None else lambda given, place: value
        varies: Any = value
        self.tensors.append(torch.full((), varies, dtype=torch.int64, device=self.device))
        number = len(self.tensors) - 1
        return lambda given, place: given[number]

    def tensor(self, x: Tensor | None) -> Any:
        """Captures a tensor that broadcasts to the scores; returns how to read it at an entry."""
        if x is None:
            return None
        x = x[(None,) * (4 - x.dim())]
        varying = [d for d in range(4) if not (isinstance(x.shape[d], int) and x.shape[d] == 1)]
        self.tensors.append(x.squeeze([d for d in range(4) if d not in varying]))
        number = len(self.tensors) - 1

        def entry(given: Sequence[Tensor], place: Sequence[Tensor]) -> Tensor:
            if not varying:
                return given[number]
            found: Tensor = torch.ops.aten.index(given[number], [place[d] for d in varying])
            return found

        return entry


def _one_block(device: torch.device) -> tuple[Any, ...]:
    """Makes the block mask that the operator takes if no block is skipped."""
    block_mask = later("torch.nn.attention.flex_attention", "BlockMask")
    whole = block_mask.from_kv_blocks(
        torch.ones((1, 1, 1), dtype=torch.int32, device=device),
        torch.zeros((1, 1, 1, 1), dtype=torch.int32, device=device),
        BLOCK_SIZE=ONE_BLOCK,
        seq_lengths=(1, 1),
    )
    found: tuple[Any, ...] = whole.as_tuple()
    return found
