"""Defines indexers: ReLU scores of many heads, which learn the teacher's summed probabilities.

`IndexerCase` compares them at all keys (the warm-up), `ChosenKeysCase` at the top keys of each
query (the sparse training stage).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.case import Build, Case, Inputs, Loss, Problem, random_tensors
from bench.measure import usual_dtype
from torch_streamkl import attention_topk_kl, row_program

HEADS, TEACHER_HEADS, DIM = 64, 128, 128
TOP = 2048  # keys that a query chooses
QUERIES = 64  # of a block of naive code


def naive(sq: Tensor, sk: Tensor, w: Tensor, tq: Tensor, tk: Tensor, first: int = 0) -> Tensor:
    """Causal; the guards are those of public code."""
    n, m = sq.shape[2], sk.shape[2]
    hidden = torch.ones(n, m, dtype=torch.bool, device=sq.device).triu(1 + first)
    teacher = (tq @ tk.mT * tq.shape[-1] ** -0.5).masked_fill(hidden, -math.inf).softmax(-1).sum(1)
    teacher = teacher / teacher.sum(-1, keepdim=True)
    student = ((sq @ sk.mT).relu() * w[..., None]).sum(1).masked_fill(hidden, -math.inf)
    student = student.softmax(-1)
    return (teacher * ((teacher + 1e-10).log() - (student + 1e-10).log())).sum(-1).mean()


def program(sq: Tensor, sk: Tensor, w: Tensor, tq: Tensor, tk: Tensor) -> Tensor:
    scale = tq.shape[-1] ** -0.5

    def kl(e: Any) -> Any:
        teacher = (e.t * scale).softmax("key").sum("head")
        teacher = teacher / teacher.sum("key")
        student = (e.w * e.s.relu()).sum("head").softmax("key")
        return (teacher * ((teacher + 1e-10).log() - (student + 1e-10).log())).sum("key")

    dots = {"t": (tq, tk), "s": (sq, sk)}
    rows: Tensor = row_program(kl, dots=dots, rows={"w": w}, is_causal=True)
    return rows.mean()


@dataclass(frozen=True)
class IndexerCase(Case):
    """Queries of the student's heads, its one key head, weights of heads; the teacher's heads."""

    seqlen: int = 0
    heads: int = HEADS

    family = "attention"
    axis = "sequence length"
    usual = ("inductor",)

    @property
    def label(self) -> str:
        return f"{self.name} N={self.seqlen}"

    @property
    def sweep(self) -> tuple[str, int]:
        return self.name, self.seqlen

    def resized(self, size: int) -> Case:
        return replace(self, seqlen=size)

    def shape(self) -> str:
        return f"{self.heads} ReLU heads of {DIM}, teacher {2 * self.heads} heads of {DIM}, causal"

    def problem(self, device: torch.device, sets: int = 1) -> Problem:
        return Problem(device, naive, [self._inputs(device, i) for i in range(sets)])

    def _inputs(self, device: torch.device, seed: int) -> Inputs:
        shapes = [(1, h, self.seqlen, DIM) for h in (self.heads, 1)]
        dtype = usual_dtype(device)
        student = random_tensors(shapes, device, dtype, seed)
        weights = [(1, self.heads, self.seqlen)]
        (w,) = random_tensors(weights, device, torch.float32, seed, [1 / self.heads])
        teacher = [(1, 2 * self.heads, self.seqlen, DIM)] * 2
        return *student, w, *random_tensors(teacher, device, dtype, seed + 1, learning=0)

    def pieces(self, inputs: Inputs, block: int = QUERIES) -> Iterator[tuple[Loss, Inputs, float]]:
        """Blocks of rows, of all heads."""
        sq, sk, w, tq, tk = inputs
        for first in range(0, self.seqlen, block):
            rows = slice(first, min(first + block, self.seqlen))
            share = (rows.stop - first) / self.seqlen
            keys = slice(rows.stop)
            piece = (sq[:, :, rows], sk[:, :, keys], w[:, :, rows], tq[:, :, rows], tk[:, :, keys])

            def of_rows(*given: Tensor, first: int = first) -> Tensor:
                return naive(*given, first=first)

            yield of_rows, piece, share

    def own(self) -> dict[str, Build]:
        return {"program": lambda case, problem: replace(problem, loss=program)}


def programs(device: str, quick: bool) -> list[Case]:
    if device == "cuda" and not quick:
        return [IndexerCase("indexer", "DeepSeek-V3.2-Exp", n) for n in (4096, 16384)]
    return [IndexerCase("indexer", "DeepSeek-V3.2-Exp", 64, heads=4)]


# --------------------------------------------------------------------------------- chosen keys
def naive_of_chosen(
    sq: Tensor, sk: Tensor, w: Tensor, tq: Tensor, tk: Tensor, ids: Tensor
) -> Tensor:
    """Scores of all keys, of which those of the chosen ones are taken; -1 is padding."""
    exists, index = ids >= 0, ids.clamp_min(0).long()
    t = (tq @ tk.mT * tq.shape[-1] ** -0.5).gather(-1, index[:, None].expand(*tq.shape[:3], -1))
    p = t.masked_fill(~exists[:, None], -math.inf).softmax(-1).mean(1)
    s = ((sq @ sk.mT).relu() * w[..., None]).sum(1).gather(-1, index)
    log_s = s.masked_fill(~exists, -math.inf).log_softmax(-1).masked_fill(~exists, 0.0)
    return (torch.special.xlogy(p, p) - p * log_s).sum(-1).mean()


def chosen(impl: str = "auto", **options: Any) -> Loss:
    def loss(sq: Tensor, sk: Tensor, w: Tensor, tq: Tensor, tk: Tensor, ids: Tensor) -> Tensor:
        more: dict[str, Any] = {"impl": impl, **options}
        return attention_topk_kl(
            sq, sk, tq, tk, ids, student_head_weights=w, reduction="mean", **more
        )

    return loss


def _of_all_keys(*inputs: Tensor) -> Tensor:
    return program(*inputs[:5])


@torch.no_grad()
def _chosen_ids(sq: Tensor, sk: Tensor, w: Tensor, top: int) -> Tensor:
    """Returns the top keys of a causal indexer's scores [1, seqlen, top]."""
    seqlen = sq.shape[2]
    ids = torch.full((1, seqlen, top), -1, dtype=torch.int32, device=sq.device)
    for first in range(0, seqlen, QUERIES):
        rows = slice(first, min(first + QUERIES, seqlen))
        s = ((sq[:, :, rows] @ sk[:, :, : rows.stop].mT).relu() * w[:, :, rows, None]).sum(1)
        hidden = torch.ones_like(s, dtype=torch.bool).triu(1 + first)
        best = s.masked_fill(hidden, -math.inf).topk(min(top, rows.stop))
        found = torch.where(best.values == -math.inf, -1, best.indices)
        ids[:, rows, : found.shape[-1]] = found.int()
    return ids


@dataclass(frozen=True)
class ChosenKeysCase(IndexerCase):
    """Its top keys of each query; all teacher heads share a key, as in sparse attention."""

    top: int = TOP

    axis = "sequence length"
    usual = ()

    def shape(self) -> str:
        heads = f"{self.heads} ReLU heads of {DIM}, teacher {self.heads} heads of {DIM} on one key"
        return f"{heads}, top {self.top}, causal"

    def problem(self, device: torch.device, sets: int = 1) -> Problem:
        return Problem(device, naive_of_chosen, [self._inputs(device, i) for i in range(sets)])

    def _inputs(self, device: torch.device, seed: int) -> Inputs:
        sq, sk, w, tq, tk = super()._inputs(device, seed)
        ids = _chosen_ids(sq, sk, w, min(self.top, self.seqlen))
        return sq, sk, w, tq[:, : self.heads].contiguous(), tk[:, :1].contiguous(), ids

    def pieces(self, inputs: Inputs, block: int = QUERIES) -> Iterator[tuple[Loss, Inputs, float]]:
        """Blocks of rows, of all heads."""
        sq, sk, w, tq, tk, ids = inputs
        for first in range(0, self.seqlen, block):
            rows = slice(first, min(first + block, self.seqlen))
            keys = slice(rows.stop)
            own = sq[:, :, rows], sk[:, :, keys], w[:, :, rows]
            piece = (*own, tq[:, :, rows], tk[:, :, keys], ids[:, rows])
            yield naive_of_chosen, piece, (rows.stop - first) / self.seqlen

    def own(self) -> dict[str, Build]:
        losses = {
            "chosen": chosen(),
            "deterministic": chosen(deterministic=True),
            "torch": chosen("torch"),
        }
        built: dict[str, Build] = {
            name: lambda case, problem, loss=loss: replace(problem, loss=loss)
            for name, loss in losses.items()
        }
        # another loss: that of all keys, from which the chosen ones are a part
        built["all keys"] = lambda case, problem: replace(
            problem, loss=_of_all_keys, is_judged=False
        )
        return built


def chosen_keys(device: str, quick: bool) -> list[Case]:
    if device == "cuda" and not quick:
        return [ChosenKeysCase("chosen keys", "DeepSeek-V3.2-Exp", n) for n in (4096, 32768)]
    return [ChosenKeysCase("chosen keys", "DeepSeek-V3.2-Exp", 64, heads=4, top=16)]
