"""`linear_topk_kl` next to the LM head's products, naive code and a row program.

`python -m bench.topk_cases` times 8192 and 32768 tokens of a Qwen 7B head, of which a cache has
64 entries each. "products" are the three matmuls that no loss can go without: logits, and the
gradients of hidden states and weight. The aim on a GPU is 1.15 of them, in the memory of
`linear_kl`. What is renormalised needs no product with the vocabulary.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import row_claims
from bench.row_claims import Case, Loss
from torch_streamkl import linear_topk_kl

SIZES = (8192, 32768)
# they keep all logits, in float32 too
MOST = {"torch.compile": 8192, "products": 8192}


class _Products(torch.autograd.Function):
    """Computes the gradients of half the sum of squared logits, by three matmuls and no more."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
        logits = h @ w.T
        ctx.save_for_backward(h, w, logits)
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor]:
        h, w, logits = ctx.saved_tensors
        return logits @ w, logits.T @ h


def _products(h: Tensor, w: Tensor, *_: Tensor) -> Tensor:
    value: Tensor = _Products.apply(h, w)
    return value


def _half_squares(h: Tensor, w: Tensor, *_: Tensor) -> Tensor:
    return 0.5 * (h @ w.T).square().sum()


def _naive(h: Tensor, w: Tensor, *rest: Tensor, tail: str) -> Tensor:
    logits = h @ w.T
    logits = logits if logits.dtype == torch.float64 else logits.float()
    p, s = rest[3], logits.gather(-1, rest[2]) - logits.logsumexp(-1, keepdim=True)
    if tail == "bucket":
        p, s = (torch.cat([x, _tail(x)], -1) for x in (p, s))
    if tail == "renormalize":
        p, s = p.log_softmax(-1), s.log_softmax(-1)
    return (p.exp() * (p - s)).sum(-1).mean()


def _tail(logs: Tensor) -> Tensor:
    return torch.log(-torch.expm1(logs.logsumexp(-1, keepdim=True).clamp_max(-1e-7)))


def _ours(h: Tensor, w: Tensor, *rest: Tensor, tail: str, reduction: str) -> Tensor:
    value: Tensor = linear_topk_kl(h, w, *rest[2:4], tail=tail, reduction=reduction)
    return value if reduction == "mean" else value.mean()


def _case(tail: str) -> Case:
    naive: Loss = partial(_naive, tail=tail)
    providers = {
        "products": (_half_squares, _products),
        "torch.compile": (naive, torch.compile(naive)),
        "linear_topk_kl, rows": (naive, partial(_ours, tail=tail, reduction="none")),
        "linear_topk_kl, mean": (naive, partial(_ours, tail=tail, reduction="mean")),
    }
    if tail == "none":
        of_row_program = row_claims.CASES["cached top 64"].providers
        providers["chunks of tokens"] = of_row_program["chunks of tokens"]
        providers["row program, mean"] = of_row_program["program, mean"]
    return Case(row_claims._heads, providers, SIZES, 512, MOST)


CASES = {f"top 64, tail {tail}": _case(tail) for tail in ("none", "bucket", "renormalize")}


def main(argv: list[str] | None = None) -> int:
    row_claims.CASES.update(CASES)
    return row_claims.main(["--cases", *CASES, *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
