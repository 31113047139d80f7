"""Megatron-core's indexer loss as installed: compiled as it stands, and next to our operators.

`DSAttention.forward` runs with its loss and its AutoScaler. The indexer's projections are plain
products here: its own ones need CUDA (a Hadamard kernel). The package refuses packed sequences
(`packed_seq_params`) and has no context parallelism of this loss: of packed documents it is called
for each of them, next to one call of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.comparing import compare
from torch_streamkl import attention_topk_kl, row_program

SEQLEN, BATCH, HIDDEN, HEADS, HEAD_DIM = 12, 2, 10, 3, 8
INDEX_HEADS, INDEX_DIM, TOP = 4, 6, 5
COEFF, LOSS_SCALE = 0.7, 3.0
MODULE = "megatron.core.transformer.experimental_attention_variant.dsa"


def package() -> Any:
    return pytest.importorskip(MODULE, reason="megatron is not installed", exc_type=ImportError)


def one_rank() -> Any:
    return SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))


@dataclass
class Indexer:
    """Makes scores with Megatron's own function, from plain projections."""

    dsa: Any
    weights: tuple[Tensor, ...]
    pg_collection: Any

    def forward_with_scores(
        self, x: Tensor, qr: Tensor, mask: Tensor, packed_seq_params: None = None
    ) -> tuple[Tensor, Tensor]:
        q, k, w = (x @ y for y in self.weights)
        q = q.unflatten(-1, (INDEX_HEADS, INDEX_DIM))
        scores = self.dsa.DSAIndexer._compute_index_scores(None, q, w, k) + mask
        return scores, scores.topk(TOP, dim=-1)[1]


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, the indexer's three weights, query, key, value."""
    sizes = (
        (SEQLEN, BATCH, HIDDEN), (HIDDEN, INDEX_HEADS * INDEX_DIM), (HIDDEN, INDEX_DIM),
        (HIDDEN, INDEX_HEADS), *[(SEQLEN, BATCH, HEADS, HEAD_DIM)] * 3,
    )  # fmt: skip
    return [torch.randn(size).to(dtype).requires_grad_() for size in sizes]


def attention(dsa: Any, is_sparse: bool) -> Any:
    config = SimpleNamespace(
        dsa_indexer_loss_coeff=COEFF, dsa_indexer_use_sparse_loss=is_sparse, num_layers=1
    )
    dsa.DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(LOSS_SCALE))
    kind, group = dsa.AttnMaskType.causal, one_rank()

    def step(
        x: Tensor, wq: Tensor, wk: Tensor, ww: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> Any:
        layer = SimpleNamespace(
            indexer=Indexer(dsa, (wq, wk, ww), group), softmax_scale=HEAD_DIM**-0.5, training=True,
            config=config, layer_number=None,
        )  # fmt: skip
        return dsa.DSAttention.forward(layer, q, k, v, None, x, x, attn_mask_type=kind)

    return step


@pytest.mark.parametrize("is_sparse", [False, True])
def test_dsattention_as_it_stands(is_sparse: bool) -> None:
    """One row program. The index scores stay as well: a top-k of whole rows reads them."""
    step = attention(package(), is_sparse)
    outcome = compare(step, operands(), inner="aot_eager").check()
    report = outcome.report
    assert outcome.num_fused == len(report.sites) == 1 and outcome.kinds == {"row_program"}, report
    assert outcome.num_graphs == 1 and "topk needs whole rows" in str(report), report
    # the gradient of the loss alone, times the AutoScaler's scale, reaches the indexer
    assert all(outcome.truth.gradients[i].abs().max() > 0 for i in (1, 2, 3))  # type: ignore[union-attr]


def test_packed_sequences_are_refused_by_the_package() -> None:
    dsa = package()
    with pytest.raises(AssertionError, match="Packed sequence is not supported"):
        dsa.DSAIndexer.forward_with_scores(None, None, None, packed_seq_params=object())


# ------------------------------------------------------------------------ one call instead
def of_package(dsa: Any, x: list[Tensor], is_sparse: bool) -> tuple[Tensor, Tensor]:
    """The loss and the chosen keys, of index queries, keys and weights, queries and keys."""
    iq, ik, iw, q, k = x
    n = iq.shape[0]
    future = torch.full((n, n), -torch.inf).triu(1)
    scores = dsa.DSAIndexer._compute_index_scores(None, iq, iw, ik) + future
    ids = scores.topk(TOP, dim=-1)[1]
    loss = dsa.compute_dsa_indexer_loss(
        scores, ids, q.detach(), k.detach(), HEAD_DIM**-0.5, COEFF, is_sparse, one_rank()
    )
    return loss, ids


def inputs_of_loss() -> list[Tensor]:
    sizes = (
        (SEQLEN, BATCH, INDEX_HEADS, INDEX_DIM), (SEQLEN, BATCH, INDEX_DIM),
        (SEQLEN, BATCH, INDEX_HEADS), *[(SEQLEN, BATCH, HEADS, HEAD_DIM)] * 2,
    )  # fmt: skip
    return [torch.randn(size) for size in sizes]


def same(theirs: Any, ours: Any) -> None:
    """Values and gradients to the rounding of their float32, and to what their 1e-10 adds."""
    given = inputs_of_loss()
    results = []
    for run, dtype in ((theirs, torch.float32), (ours, torch.float64)):
        x = [y.clone().to(dtype).requires_grad_() for y in given]
        loss = run(x)
        loss.backward()
        results.append([loss.detach(), *(y.grad for y in x[:3])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b.float(), a, rtol=1e-4, atol=1e-6)


def test_the_sparse_loss_is_one_call() -> None:
    """The call of docs/guide/indexers.md."""
    dsa = package()

    def ours(x: list[Tensor]) -> Tensor:
        index_q, index_k, weights, query, key = x
        with torch.no_grad():
            _, topk_indices = of_package(dsa, x, True)
        q, k = (x.transpose(0, 1) for x in (index_q, index_k))
        rows = attention_topk_kl(
            q, k, query.transpose(0, 1).detach(), key.transpose(0, 1).detach(), topk_indices,
            student_head_weights=weights.transpose(0, 1), teacher_scale=HEAD_DIM**-0.5,
            is_causal=True, layout="bnhd",
        )  # fmt: skip
        return rows.mean() * COEFF

    same(lambda x: of_package(dsa, x, True)[0], ours)


def test_the_dense_loss_is_a_row_program() -> None:
    """The program of docs/guide/row-programs.md."""

    def ours(x: list[Tensor]) -> Tensor:
        index_q, index_k, weights, query, key = x
        q, k = query.permute(1, 2, 0, 3).detach(), key.permute(1, 2, 0, 3).detach()

        def kl(e: Any) -> Any:
            teacher = (e.t * HEAD_DIM**-0.5).softmax("key").sum("head")
            teacher = teacher / teacher.sum("key")
            student = (e.w * e.s.relu()).sum("head").softmax("key")
            return (teacher * ((teacher + 1e-10).log() - (student + 1e-10).log())).sum("key")

        dots = {"t": (q, k), "s": (index_q.permute(1, 2, 0, 3), index_k.transpose(0, 1)[:, None])}
        rows = row_program(kl, dots=dots, rows={"w": weights.permute(1, 2, 0)}, is_causal=True)
        return rows.mean() * COEFF

    dsa = package()
    same(lambda x: of_package(dsa, x, False)[0], ours)


def test_documents_are_one_packed_call() -> None:
    dsa, cut = package(), 7

    def theirs(x: list[Tensor]) -> Tensor:
        parts = [[y[:cut, :1] for y in x], [y[cut:, :1] for y in x]]
        losses = [of_package(dsa, part, True)[0] * part[0].shape[0] for part in parts]
        return (losses[0] + losses[1]) / SEQLEN

    def ours(x: list[Tensor]) -> Tensor:
        with torch.no_grad():
            chosen = [of_package(dsa, [y[p, :1] for y in x], True)[1][0] + p.start for p in parts]
        iq, ik, iw, q, k = (y[:, 0] for y in x)
        cu = torch.tensor([0, cut, SEQLEN], dtype=torch.int32)
        return attention_topk_kl(
            iq, ik[:, None], q.detach(), k.detach(), torch.cat(chosen), student_head_weights=iw,
            teacher_scale=HEAD_DIM**-0.5, is_causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu,
        ).mean() * COEFF  # fmt: skip

    parts = [slice(0, cut), slice(cut, SEQLEN)]
    same(theirs, ours)
