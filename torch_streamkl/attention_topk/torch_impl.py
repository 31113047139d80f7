"""Computes `attention_topk_kl` in plain torch: the chosen keys of a block of queries at a time.

Of a block, all keys are copied next to each other, and multiplied as batches of matrices. Nothing
has the size of queries times keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_streamkl.attention_topk.problem import ChosenKeys, Gradients, NeedsGrad, RowStats
from torch_streamkl.runtime.workspace import ranges

BLOCK_ELEMENTS = 2**22  # of the keys or scores of a block


@dataclass(frozen=True)
class Block:
    """Holds scores and probabilities of a block of queries."""

    batch: int
    queries: slice
    index: Tensor  # [queries, topk]: ids, 0 where there is no entry
    exists: Tensor  # [queries, topk]
    wrong: Tensor  # [queries]: an id is out of range
    student_k: Tensor  # [queries, topk, head_dim]
    products: Tensor  # [queries, heads, topk]: the student's, scaled
    score: Tensor  # [queries, topk]
    mass: Tensor  # [queries, topk]: the mean of the teacher's heads, before it is normalised
    teacher_lse: Tensor  # [heads, queries]


def forward(problem: ChosenKeys) -> RowStats:
    """Returns values and statistics of all rows."""
    out = RowStats.allocate(problem)
    if not problem.num_keys or not problem.topk:
        return RowStats(*(x.zero_() for x in out))
    for block in _blocks(problem, problem.teacher_lse):
        b, queries = block.batch, block.queries
        if problem.teacher_lse is None:
            out.teacher_lse[b, :, queries] = block.teacher_lse
        total = block.mass.sum(-1)
        is_empty = (total < torch.finfo(total.dtype).tiny) | ~block.exists.any(-1)
        high = torch.where(is_empty, 0.0, block.score.amax(-1))
        score = torch.where(block.exists, block.score - high[:, None], 0.0)
        log_sum = torch.where(block.exists, score.exp(), 0.0).sum(-1).log()
        log_total = torch.where(is_empty, 0.0, total.log())
        p = block.mass * torch.where(is_empty, 0.0, 1.0 / total)[:, None]
        log_p = torch.where(block.mass == 0, 1.0, block.mass).log() - log_total[:, None]
        terms = torch.where(block.mass == 0, 0.0, p * (log_p - (score - log_sum[:, None])))
        value = torch.where(is_empty, 0.0, terms.sum(-1))
        log_sum = log_sum.masked_fill(is_empty, torch.inf)
        out.value[b, queries] = value.masked_fill(block.wrong, torch.nan)
        stats = torch.stack([high, log_sum.masked_fill(block.wrong, torch.nan), log_total])
        out.student[:, b, queries] = stats
    return out


def backward(
    problem: ChosenKeys, stats: RowStats, grad: Tensor, needs_grad: NeedsGrad
) -> Gradients:
    """Returns the needed gradients of ``sum(grad * value)``."""
    given = (problem.student_q, problem.student_k, problem.head_weights)
    found = [
        None if x is None or not need else x.new_zeros(x.shape, dtype=problem.compute_dtype)
        for x, need in zip(given, needs_grad, strict=True)
    ]
    for block in _blocks(problem, stats.teacher_lse):
        _add_gradients(problem, block, stats, grad, found)
    results = [
        g if g is None or x is None else g.to(x.dtype) for g, x in zip(found, given, strict=True)
    ]
    return Gradients(*results)


def _add_gradients(
    problem: ChosenKeys, block: Block, stats: RowStats, grad: Tensor, found: list[Tensor | None]
) -> None:
    b, queries, exists = block.batch, block.queries, block.exists
    high, log_sum, log_total = stats.student[:, b, queries, None]
    factor = grad[b, queries, None].to(problem.compute_dtype)
    s = (torch.where(exists, block.score, 0.0) - high - log_sum).exp()
    d = torch.where(exists & (factor != 0), (s - block.mass * (-log_total).exp()) * factor, 0.0)
    is_off = (d == 0).all(-1)  # whose operands need not be finite
    of_q, of_k, of_weights = found
    of_products = d[:, None]  # [queries, heads, topk]
    if problem.head_weights is not None:
        weights = problem.head_weights[b, :, queries].T.to(d.dtype)
        is_active = block.products > 0
        if of_weights is not None:
            products = torch.where(is_active & (d != 0)[:, None], block.products, 0.0)
            of_weights[b, :, queries] = (products @ d[:, :, None]).squeeze(-1).T
        is_active = is_active & (of_products != 0)
        of_products = torch.where(is_active, of_products * weights[:, :, None], 0.0)
    of_products = of_products * problem.student_scale
    if of_q is not None:
        added = (of_products @ block.student_k).transpose(0, 1)
        of_q[b, :, queries] = added.masked_fill(is_off[:, None], 0.0)
    if of_k is not None:
        q = problem.student_q[b, :, queries].transpose(0, 1).to(d.dtype)
        q = q.masked_fill(is_off[:, None, None], 0.0)
        added = of_products.mT @ q  # [queries, topk, head_dim]
        of_k[b].index_add_(0, block.index.flatten(), added.flatten(0, 1))


def _blocks(problem: ChosenKeys, teacher_lse: Tensor | None) -> Iterator[Block]:
    batch, seqlen_q = problem.rows
    if not problem.num_keys or not problem.topk:
        return
    of_keys = max(problem.student_k.shape[2], problem.teacher_k.shape[1::2].numel())
    of_scores = max(problem.num_student_heads, problem.num_teacher_heads)
    step = max(1, BLOCK_ELEMENTS // (problem.topk * max(of_keys, of_scores)))
    for b in range(batch):
        for queries in ranges(seqlen_q, step):
            yield _block(problem, b, queries, teacher_lse)


def _block(problem: ChosenKeys, b: int, queries: slice, teacher_lse: Tensor | None) -> Block:
    dtype, ids = problem.compute_dtype, problem.ids[b, queries]
    exists = problem.inside(ids, b, queries)
    index = torch.where(exists, ids, 0).long()
    k_t = problem.teacher_k[b][:, index].to(dtype)  # [kv_heads, queries, topk, head_dim]
    q_t = problem.teacher_q[b, :, queries].to(dtype)
    q_t = q_t.unflatten(0, (k_t.shape[0], -1)).transpose(1, 2)  # [kv_heads, queries, group, dim]
    x = (q_t @ k_t.mT).transpose(1, 2).flatten(0, 1) * problem.teacher_scale
    x = torch.where(exists, x, -torch.inf)  # [heads, queries, topk]
    if teacher_lse is None:
        is_empty = ~exists.any(-1)
        lse = x.masked_fill(is_empty[:, None], 0.0).logsumexp(-1)
    else:
        lse = teacher_lse[b, :, queries].to(dtype)
    mass = torch.where(exists, (x - lse[:, :, None]).exp(), 0.0).mean(0)
    k_s = torch.where(exists[:, :, None], problem.student_k[b][index], 0.0).to(dtype)
    q_s = problem.student_q[b, :, queries].to(dtype).transpose(0, 1)
    products = (q_s @ k_s.mT) * problem.student_scale  # [queries, heads, topk]
    if problem.head_weights is None:
        score = products.sum(1)
    else:
        weights = problem.head_weights[b, :, queries].T.to(dtype)
        score = (weights[:, None] @ products.relu()).squeeze(1)
    score = torch.where(exists, score, -torch.inf)
    wrong = problem.out_of_range(ids, b, queries).any(-1)
    return Block(b, queries, index, exists, wrong, k_s, products, score, mass, lse)
