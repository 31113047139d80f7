"""Megatron-core's indexer loss as installed: compiled as it stands, and next to our operators.

`DSAttention.forward` runs with its loss and its AutoScaler. The indexer's projections are plain
products here: its own ones need CUDA (a Hadamard kernel). The package refuses packed sequences
(`packed_seq_params`), so documents are masks here, and one call each next to our packed call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from tests.integrations.libraries import optional
from tests.support.comparing import Outcome, compare
from tests.support.ranks import Rank, names_of, on_ranks, run_check
from torch_streamkl import attention_topk_kl, row_program
from torch_streamkl.fx_passes import backend

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
    pg_collection: Any = field(default_factory=one_rank)

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


def documents() -> Tensor:
    """What a causal mask of two documents hides: [batch, 1, seqlen, seqlen]."""
    document = (torch.arange(SEQLEN) >= 7).long()
    hidden = (document[:, None] != document) | torch.ones(SEQLEN, SEQLEN).triu(1).bool()
    return hidden.expand(BATCH, 1, SEQLEN, SEQLEN)


def attention(dsa: Any, is_sparse: bool, mask: Tensor | None = None) -> Any:
    config = SimpleNamespace(
        dsa_indexer_loss_coeff=COEFF, dsa_indexer_use_sparse_loss=is_sparse, num_layers=1
    )
    dsa.DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(LOSS_SCALE))
    kind = dsa.AttnMaskType.causal if mask is None else None

    def step(
        x: Tensor, wq: Tensor, wk: Tensor, ww: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> Any:
        layer = SimpleNamespace(
            indexer=Indexer(dsa, (wq, wk, ww)), softmax_scale=HEAD_DIM**-0.5, training=True,
            config=config, layer_number=None,
        )  # fmt: skip
        return dsa.DSAttention.forward(layer, q, k, v, mask, x, x, attn_mask_type=kind)

    return step


def compiled(step: Any) -> Outcome:
    outcome = compare(step, operands(), inner="aot_eager", options={"streamkl.min_mib": 0}).check()
    assert outcome.num_graphs == 1, outcome.report
    return outcome


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_dsattention_as_it_stands(is_packed: bool, is_sparse: bool) -> None:
    """One row program. The index scores stay as well: a top-k of whole rows reads them."""
    outcome = compiled(attention(package(), is_sparse, documents() if is_packed else None))
    report = outcome.report
    assert outcome.num_fused == len(report.sites) == 1 and outcome.kinds == {"row_program"}, report
    assert "topk needs whole rows" in str(report), report
    # the gradient of the loss alone, times the AutoScaler's scale, reaches the indexer
    assert all(outcome.truth.gradients[i].abs().max() > 0 for i in (1, 2, 3))
