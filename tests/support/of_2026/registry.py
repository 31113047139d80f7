"""Registers losses of 2026: trainers' natural spellings, and what each is computed by.

A loss is a function of the tensors that its parameters name (`SIZES`); those in `TRAINED` have a
gradient. The sizes are small, and of scores and logits alone many elements. `s` and `t` are the
logits of both sides, `a` and `b` the scores. ``by`` names what computes the whole loss: operators,
"row_program" among them, or `EAGER` with the reason why a tensor as large as the scores stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.made_inputs import of_inputs, with_probabilities

TOKENS, VOCAB, HIDDEN, TEACHER_HIDDEN, TOP = 12, 30, 4, 5, 3
BATCH, HEADS, ROWS, DIM, INDEX_HEADS = 2, 2, 12, 4, 3
ATTENTION, LINEAR, ROW, EAGER = "attention_kl", "linear_kl", "row_program", "eager"

SIZES = {
    "h": (TOKENS, HIDDEN), "w": (VOCAB, HIDDEN),
    "g": (TOKENS, TEACHER_HIDDEN), "v": (VOCAB, TEACHER_HIDDEN),
    "q": (BATCH, HEADS, ROWS, DIM), "k": (BATCH, HEADS, ROWS, DIM),
    "r": (BATCH, HEADS, ROWS, DIM), "u": (BATCH, HEADS, ROWS, DIM),
    # of an indexer: index queries, keys and weights, and the attention's
    "iq": (BATCH, ROWS, INDEX_HEADS, DIM), "ik": (BATCH, ROWS, DIM),
    "iw": (BATCH, ROWS, INDEX_HEADS),
    # patches of a vision transformer
    "x": (BATCH, ROWS, DIM), "y": (BATCH, ROWS, DIM),
}  # fmt: skip
TRAINED = {"h", "w", "q", "k", "iq", "ik", "iw", "x"}


MADE = with_probabilities({
    "s": ("h w", lambda h, w: h @ w.T),
    "t": ("g v", lambda g, v: g @ v.T),
    "a": ("q k", lambda q, k: q @ k.mT),
    "b": ("r u", lambda r, u: r @ u.mT),
})  # fmt: skip


@dataclass(frozen=True)
class Loss:
    """Holds a loss, what computes it, and why a part of it stays."""

    name: str
    fn: Callable[..., Any]
    arguments: list[str]
    by: tuple[str, ...]
    reason: str
    style: str  # of whose code
    is_of_findings: bool

    @property
    def is_whole(self):
        """Returns whether operators compute the whole loss."""
        return EAGER not in self.by

    def inputs(self, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        made = {
            n: torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
            for n, size in SIZES.items()
        }
        return [made[n].requires_grad_(n in TRAINED) for n in self.arguments]


LOSSES = {}


def loss(*by, style, reason="", findings=False, **named):
    """Registers a loss that is named here, or that it decorates.

    ``findings``: it is a program of the review that started this list.
    """
    assert all(x in (ATTENTION, LINEAR, ROW, EAGER) for x in by)
    assert bool(reason) == (EAGER in by)

    def register(fn, name=""):
        name = name or fn.__name__
        assert name not in LOSSES, name
        LOSSES[name] = Loss(name, *of_inputs(fn, MADE), by, reason, style, findings)
        return fn

    for name, fn in named.items():
        register(fn, name)
    return register


def batchmean(log_s, p):
    return F.kl_div(log_s, p, reduction="batchmean")


def kl_of_logs(log_s, log_p):
    """One value per entry."""
    return F.kl_div(log_s, log_p, reduction="none", log_target=True)


def cross_entropy(p, log_s):
    return -(p * log_s).sum(-1).mean()


def of_rows(p, difference):
    return (p * difference).sum(-1)


_generator = torch.Generator().manual_seed(1)
LABELS = torch.randint(0, VOCAB, (TOKENS,), generator=_generator)
KEEP = torch.arange(TOKENS) % 3 > 0
# a teacher's entries, as a server or a cache has them
IDS = torch.rand(TOKENS, VOCAB, generator=_generator).topk(TOP).indices
LOG_P = torch.randn(TOKENS, VOCAB, generator=_generator).log_softmax(-1).topk(TOP).values
REPEATED = IDS.clone()
REPEATED[::2, 1] = REPEATED[::2, 0]
PADDED, LOG_P_PADDED = IDS.clone(), LOG_P.clone()
PADDED[1::3, -1], LOG_P_PADDED[1::3, -1] = 0, float("-inf")
CAUSAL = torch.triu(torch.full((ROWS, ROWS), float("-inf")), 1)
FUTURE = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)
