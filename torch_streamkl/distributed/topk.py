"""Runs `linear_topk_kl` with a group: ranks share a vocabulary and have the same hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from torch_streamkl.compiler_marks import is_compiling
from torch_streamkl.distributed import agreement, collectives
from torch_streamkl.distributed.arguments import Own, on_group
from torch_streamkl.distributed.summed_gradient import with_summed_gradient
from torch_streamkl.distributed.vocab_ranges import BY_RANK, ranges_of
from torch_streamkl.linear.problem import row_bytes
from torch_streamkl.topk.arguments import Options
from torch_streamkl.topk.chunks import Exchange, workspace_of
from torch_streamkl.topk.problem import RowParts, TopkProblem

# weight and bias are this rank's vocabulary shard; the operator compares where they begin
OWN: Own = {"weight": (0,), "bias": (0,), "group": None, "vocab_start": None}


def together(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``function(...)`` after ranks compared their arguments; all compute, or none does."""
    if is_compiling():  # every rank traces the same program
        return function(*args, **kwargs)
    group = collectives.group_of(kwargs["group"])
    return on_group(function, args, kwargs, group, OWN)


def shared(tensors: list[Any], options: Options) -> tuple[list[Any], tuple[str, int]]:
    """Returns tensors whose hidden states get gradients summed over ranks, and the shard's place.

    The place is what the operators take: the group, and the shard's first entry.
    """
    name = collectives.group_of(options.group).group_name
    shared = list(tensors)
    if tensors[0].requires_grad and torch.is_grad_enabled():
        shared[0] = with_summed_gradient(tensors[0], name)
    return shared, (name, BY_RANK if options.vocab_start is None else options.vocab_start)


def shard(
    problem: TopkProblem,
    max_workspace_mib: int,
    rows: str,
    group_name: str,
    vocab_start: int,
) -> tuple[TopkProblem, Exchange, int]:
    """Returns this rank's part of a call that all ranks make, and the size of the vocabulary."""
    head, linear = problem.head, problem.as_linear
    facts = agreement.agree(
        group_name,
        head.hidden.device,
        "linear_topk_kl",
        {
            "number of tokens": problem.num_tokens,
            "hidden_size": head.hidden.shape[1],
            "number of entries a token": problem.ids.shape[1],
            "dtype of hidden": head.hidden.dtype,
            "divergence": problem.functional.text,
            "tail": problem.tail,
            "temperature": problem.temperature,
            "logit_scale": head.scale,
            "softcap": head.softcap or None,
            "presence of bias": head.bias is not None,
            "max_workspace_mib": max_workspace_mib or None,
            "implementation": rows,
        },
        {
            "vocab": head.vocab_size,
            "vocab_start": vocab_start,
            "workspace": workspace_of(problem, max_workspace_mib),
            "row_bytes": row_bytes(linear)[0],
        },
    )
    ranges = ranges_of("", *([fact[x] for fact in facts] for x in ("vocab_start", "vocab")))
    mine = ranges[collectives.resolve(group_name).rank()]

    def merge(parts: RowParts) -> RowParts:
        gathered = collectives.all_gather(parts.flat, len(facts), group_name)
        return RowParts.merged(collectives.wait(gathered).unflatten(0, (len(facts), -1)))

    exchange = Exchange(
        min(fact["workspace"] for fact in facts),
        max(fact["row_bytes"] for fact in facts),
        max_workspace_mib,
        merge,
    )
    vocab_size = max(found.stop for found in ranges)
    return replace(problem, vocab_start=mine.start), exchange, vocab_size
