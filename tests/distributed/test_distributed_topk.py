"""`linear_topk_kl` on a vocabulary that two processes share: values, gradients, errors.

The truth is a formula in float64 on whole tensors; the budget is that of one process.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, distributed

from tests.operators.test_linear_topk_kl import DIVERGENCES, TAILS, entries, formula, head, leaves
from tests.support.ranks import (
    Rank,
    close,
    counted_collectives,
    on_ranks,
    on_two_ranks,
    same_error,
)
from torch_streamkl import linear_topk_kl

NUM_TOKENS, VOCAB = 20, 53
NAMES = ("hidden", "weight", "bias")


def cut_of(me: Rank, tensors: dict[str, Tensor], vocab: slice) -> dict[str, Tensor]:
    return {k: x if k == "hidden" else x[vocab] for k, x in tensors.items()}


def check(me: Rank, vocab: slice, **options: Any) -> None:
    tensors = {k: x.to(me.device) for k, x in head(NUM_TOKENS, 9, VOCAB, me.dtype).items()}
    ids, log_probs = (x.to(me.device) for x in entries(NUM_TOKENS, VOCAB, 5))
    grad = torch.rand(NUM_TOKENS, dtype=torch.float64).to(me.device)
    reduction, kept = options.pop("reduction"), dict(options)
    results = []
    for dtype, group in ((torch.float64, None), (me.dtype, None), (me.dtype, me.group)):
        given = tensors if group is None else cut_of(me, tensors, vocab)
        mine = leaves(given, dtype)
        if dtype == torch.float64:
            value = formula(mine, ids, log_probs, **kept)
            value = value if reduction == "none" else value.mean()
        else:
            value = linear_topk_kl(
                **mine, ids=ids, log_probs=log_probs, reduction=reduction, group=group, **kept
            )
        (value * grad).sum().backward()
        results.append([value.detach(), *(x.grad for x in mine.values())])
    truth, single, ours = results
    for i, got in enumerate(ours):
        part = slice(None) if i < 2 else vocab
        want, same = (x[i] if x[i].ndim == 0 else x[i][part] for x in (truth, single))
        if got.numel():
            close(got, want, same, what=f"{i} {options}")


@on_ranks
def tails_and_divergences(me: Rank) -> None:
    for tail in TAILS:
        for i, divergence in enumerate(DIVERGENCES):
            uneven = me.vocab(VOCAB, uneven=True)
            reduction = ("none", "mean")[i % 2]
            check(me, uneven, tail=tail, divergence=divergence, reduction=reduction)


@on_ranks
def every_option_and_a_rank_without_entries(me: Rank) -> None:
    whole = slice(0, VOCAB) if me.rank == 0 else slice(VOCAB, VOCAB)
    options: dict[str, Any] = {"temperature": 2.0, "logit_scale": 0.7, "softcap": 3.0}
    for tail, reduction in itertools.product(TAILS, ("none", "mean")):
        check(me, me.vocab(VOCAB), tail=tail, reduction=reduction, **options)
        check(me, whole, tail=tail, reduction=reduction)


def own_call(me: Rank) -> dict[str, Any]:
    ids, log_probs = (x.to(me.device) for x in entries(NUM_TOKENS, VOCAB, 5))
    mine = cut_of(me, head(NUM_TOKENS, 9, VOCAB, me.dtype), me.vocab(VOCAB))
    mine = leaves({k: x.to(me.device) for k, x in mine.items()})
    return {**mine, "ids": ids, "log_probs": log_probs, "group": me.group}


@on_ranks
def what_is_exchanged(me: Rank) -> None:
    """One gather of the rows' states, and the hidden states' gradient; one graph if compiled."""
    for reduction in ("none", "mean"):
        with counted_collectives() as counts:
            linear_topk_kl(**own_call(me), reduction=reduction).sum().backward()
        assert counts == {"all_gather": 1, "all_reduce": 1}, counts
    results = []
    for run in (
        linear_topk_kl, torch.compile(linear_topk_kl, backend="aot_eager", fullgraph=True)
    ):  # fmt: skip
        torch.manual_seed(0)
        given = own_call(me)
        value = run(**given, tail="bucket", reduction="mean")
        value.backward()
        results.append([value.detach(), *(given[name].grad for name in NAMES)])
    torch.testing.assert_close(*results)


@on_ranks
def what_ranks_differ_in(me: Rank) -> None:
    given, is_last = own_call(me), me.rank == me.size - 1

    def call(**changes: Any) -> Any:
        return lambda: linear_topk_kl(**{**given, **changes})

    same_error(me, call(tail=TAILS[is_last]), "same tail", "none (rank 0)", "bucket (rank 1)")
    same_error(me, call(temperature=1.0 + is_last), "same temperature", "2.0 (rank 1)")
    same_error(me, call(divergence="kl" if is_last else "js"), "forward_kl", "rank 1")
    same_error(me, call(ids=given["ids"][:, : 5 - is_last]), "rank 1", "one shape [..., k]")
    same_error(me, call(impl="reference"), "impl='torch' takes a group")
    same_error(me, call(vocab_start=5 * me.rank), "whole vocabulary", "[5, ")
    placed = distributed.tensor.distribute_tensor(
        head(NUM_TOKENS, 9, VOCAB)["weight"], me.mesh, [distributed.tensor.Shard(0)]
    )
    same_error(me, call(weight=placed), "plain tensors", "to_local()")


test_on_two_ranks = on_two_ranks(__name__)
