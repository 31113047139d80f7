"""Cross-entropies with labels next to naive divergences of DTensors, in one pass over logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate

from tests.distributed.test_rewritten_dtensors import (
    COPIED,
    EVERY,
    NUM_TOKENS,
    NUM_WORDS,
    OF_ROWS,
    SHARED,
    Case,
    kl,
    of_logits,
    whole,
)
from tests.support.ranks import Rank, on_ranks, on_two_ranks


def labels_beside(logits: Any, placements: Any) -> Any:
    """Labels of as many tokens, of which the last are ignored; DTensors beside DTensors."""
    labels = torch.arange(NUM_TOKENS) * 5 % NUM_WORDS
    labels = torch.where(torch.arange(NUM_TOKENS) < NUM_TOKENS // 2, labels, -100)
    if not isinstance(logits, DTensor):
        return labels
    copies = [Replicate()] * logits.device_mesh.ndim
    labels = DTensor.from_local(labels, logits.device_mesh, copies, run_check=False)
    return labels.redistribute(placements=placements)


OF_WORDS: dict[str, list[Any]] = {"x_s": COPIED, "x_t": COPIED}
BOTH: dict[str, list[Any]] = {"x_s": SHARED, "x_t": SHARED}


@on_ranks
def labels_of_tokens(me: Rank) -> None:
    """Ignored tokens are all of the last rank's, where ranks share tokens."""
    for placements, of_labels in (
        (OF_WORDS, COPIED), (OF_ROWS, SHARED), (OF_ROWS, COPIED), (BOTH, SHARED), (BOTH, COPIED),
    ):  # fmt: skip

        def mean(s: Any, t: Any, of_labels: Any = of_labels) -> Any:
            hard = F.cross_entropy(s, labels_beside(s, of_labels))
            return whole(kl(s, t) * 0.5 + hard * 2)

        def per_token(s: Any, t: Any, of_labels: Any = of_labels) -> Any:
            hard = F.cross_entropy(s, labels_beside(s, of_labels), reduction="none")
            return whole(kl(s, t, "none").sum(-1)) * 0.5 + whole(hard) * 2

        # before torch 2.13, a mean of shared rows cannot be added to a sum of theirs
        is_mean_added = placements is OF_WORDS or torch.__version__ >= (2, 13)
        for loss in (mean, per_token) if is_mean_added else (per_token,):
            report = Case(of_logits(loss), placements, wanted=EVERY).fuses(me)
            assert "cross-entropy" in report.sites[0].also, str(report)


test_on_two_ranks = on_two_ranks(__name__)
