"""Marks the calls of operators with the loss that they compute."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from torch_streamkl.attention import ops
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.rows import op as row_op
from torch_streamkl.topk import log_probs, logits

SITE = "streamkl_site"  # of an operator call's metadata: the name of the node that it replaced
MARKED = {
    ops.attention_kl, linear_ops.linear_kl, row_op.row_program, log_probs.entry_log_probs,
    logits.entry_logits,
}  # fmt: skip


def mark_site(added: Iterable[fx.Node], site: str) -> None:
    """Remembers which loss the inserted operators compute."""
    for node in added:
        if node.target in MARKED:
            node.meta[SITE] = site


def sum_in_any_order(graph: fx.Graph) -> None:
    """Lets the inserted operators compute gradients that are not the same bits on every run."""
    for node in graph.nodes:
        if SITE in node.meta and node.target == ops.attention_kl:
            node.kwargs = {**node.kwargs, "deterministic": False}
