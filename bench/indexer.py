"""Defines indexers: ReLU scores of many heads, which learn the teacher's summed probabilities.

They are compared at all keys (the warm-up), or at the top keys of each query (the sparse training
stage), where all teacher heads share a key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.case import Build, Case, Inputs, Loss, blocks, mean_of, random_tensors
from bench.measure import usual_dtype
from torch_streamkl import attention_topk_kl, row_program

DIM = 128
QUERIES = 64  # of a block of naive code


def _hidden(rows: int, keys: int, first: int, device: torch.device) -> Tensor:
    """The keys after each query, from the query ``first`` on."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).triu(1 + first)


def _scores(sq: Tensor, sk: Tensor, w: Tensor) -> Tensor:
    return ((sq @ sk.mT).relu() * w[..., None]).sum(1)


def naive(sq: Tensor, sk: Tensor, w: Tensor, tq: Tensor, tk: Tensor, first: int = 0) -> Tensor:
    """Causal; the guards are those of public code."""
    hidden = _hidden(sq.shape[2], sk.shape[2], first, sq.device)
    teacher = (tq @ tk.mT * tq.shape[-1] ** -0.5).masked_fill(hidden, -math.inf).softmax(-1).sum(1)
    teacher = teacher / teacher.sum(-1, keepdim=True)
    student = _scores(sq, sk, w).masked_fill(hidden, -math.inf).softmax(-1)
    return (teacher * ((teacher + 1e-10).log() - (student + 1e-10).log())).sum(-1).mean()


def naive_of_chosen(
    sq: Tensor, sk: Tensor, w: Tensor, tq: Tensor, tk: Tensor, ids: Tensor, first: int = 0
) -> Tensor:
    """Scores of all keys, of which those of the chosen ones are taken; -1 is padding."""
    exists, index = ids >= 0, ids.clamp_min(0).long()
    t = (tq @ tk.mT * tq.shape[-1] ** -0.5).gather(-1, index[:, None].expand(*tq.shape[:3], -1))
    p = t.masked_fill(~exists[:, None], -math.inf).softmax(-1).mean(1)
    s = _scores(sq, sk, w).gather(-1, index)
    log_s = s.masked_fill(~exists, -math.inf).log_softmax(-1).masked_fill(~exists, 0.0)
    return (torch.special.xlogy(p, p) - p * log_s).sum(-1).mean()


def kl_program(e: Any) -> Any:
    teacher = (e.t * DIM**-0.5).softmax("key").sum("head")
    teacher = teacher / teacher.sum("key")
    student = (e.w * e.s.relu()).sum("head").softmax("key")
    return (teacher * ((teacher + 1e-10).log() - (student + 1e-10).log())).sum("key")


def program(
    sq: Tensor, sk: Tensor, w: Tensor, tq: Tensor, tk: Tensor, *_: Tensor, **options: Any
) -> Tensor:
    dots = {"t": (tq, tk), "s": (sq, sk)}
    return row_program(kl_program, dots=dots, rows={"w": w}, is_causal=True, **options)


@torch.no_grad()
def _chosen_ids(sq: Tensor, sk: Tensor, w: Tensor, top: int) -> Tensor:
    """Returns the top keys of a causal indexer's scores [1, seqlen, top]."""
    seqlen = sq.shape[2]
    ids = torch.full((1, seqlen, top), -1, dtype=torch.int32, device=sq.device)
    for rows, _ in blocks(seqlen, QUERIES):
        s = _scores(sq[:, :, rows], sk[:, :, : rows.stop], w[:, :, rows])
        hidden = _hidden(*s.shape[1:], rows.start, sq.device)
        best = s.masked_fill(hidden, -math.inf).topk(min(top, rows.stop))
        found = torch.where(best.values == -math.inf, -1, best.indices)
        ids[:, rows, : found.shape[-1]] = found.int()
    return ids


@dataclass(frozen=True)
class IndexerCase(Case):
    """Queries of the student's heads, its one key head, weights of heads; the teacher's heads."""

    seqlen: int = 0
    heads: int = 64
    top: int = 0  # keys of each query; 0: all

    family = "attention"

    @property
    def label(self) -> str:
        return f"{self.name} N={self.seqlen}"

    def shape(self) -> str:
        teacher = f"{2 * self.heads} heads of {DIM}, causal"
        if self.top:
            teacher = f"{self.heads} heads of {DIM} on one key, top {self.top}, causal"
        return f"{self.heads} ReLU heads of {DIM}, teacher {teacher}"

    def naive(self) -> Loss:
        return naive_of_chosen if self.top else naive

    def _inputs(self, device: torch.device, seed: int) -> Inputs:
        n, dtype = self.seqlen, usual_dtype(device)
        sq, sk = random_tensors([(1, h, n, DIM) for h in (self.heads, 1)], device, dtype, seed)
        weights = [(1, self.heads, n)]
        (w,) = random_tensors(weights, device, torch.float32, seed, [1 / self.heads])
        heads = (self.heads, 1) if self.top else (2 * self.heads,) * 2
        teacher = [(1, h, n, DIM) for h in heads]
        ids = [_chosen_ids(sq, sk, w, min(self.top, n))] if self.top else []
        return sq, sk, w, *random_tensors(teacher, device, dtype, seed + 1, learning=0), *ids

    def pieces(
        self, inputs: Inputs, block: int | None = None
    ) -> Iterator[tuple[Loss, Inputs, float]]:
        """Blocks of rows, of all heads."""
        sq, sk, w, tq, tk, *ids = inputs
        for rows, share in blocks(self.seqlen, block or QUERIES):
            keys = slice(rows.stop)
            own = sq[:, :, rows], sk[:, :, keys], w[:, :, rows]
            piece = (*own, tq[:, :, rows], tk[:, :, keys], *(x[:, rows] for x in ids))
            yield partial(self.naive(), first=rows.start), piece, share

    def direct(self, options: dict[str, Any]) -> Loss:
        if not self.top:
            return super().direct(options)

        def call(sq: Tensor, sk: Tensor, w: Tensor, *teacher: Tensor, **given: Any) -> Tensor:
            return attention_topk_kl(sq, sk, *teacher, student_head_weights=w, **given)

        return mean_of(call, **options)

    def program(self, options: dict[str, Any]) -> Loss:
        if self.top:
            return super().program(options)
        return mean_of(program, **options)

    def own(self) -> dict[str, Build]:
        if not self.top:
            return {}
        # another loss: that of all keys, from which the chosen ones are a part
        loss = mean_of(program)
        return {"all keys": lambda _, problem: replace(problem, loss=loss, is_judged=False)}
