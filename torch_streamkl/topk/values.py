"""Checks the values of a teacher's entries: ids in range, no id twice, probabilities up to 1.

On a CPU every call checks them, and the error names the value. On a GPU a kernel asserts that ids
are in range, as for labels (bounds.py), and the CPU does not wait. The rest is checked there on
request alone, because an error that names a value has to wait for the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_streamkl.bounds import has_values
from torch_streamkl.topk.problem import TopkProblem

# That the probabilities of a token may exceed 1: what rounding in the dtype of a cache can add.
SLACK = {torch.bfloat16: 0.1, torch.float16: 0.02}
DEFAULT_SLACK = 1e-3


def check(problem: TopkProblem, vocab_size: int, is_requested: bool) -> None:
    """Raises for values that are wrong; of fake tensors there are none."""
    ids = problem.ids
    if not has_values(ids):
        return
    present = problem.present
    in_range = (ids < vocab_size) | ~present
    rule = f"ids must be below the vocabulary size {vocab_size}, or negative for padding"
    if ids.device.type != "cpu" and not is_requested:
        torch._assert_async(in_range.all(), rule)
        return
    if not in_range.all():
        raise IndexError(f"{rule}, got {int(ids[~in_range][0])}")  # torch's type for an index
    if problem.tail == "bucket":
        _check_repeated(ids, present)
    if problem.tail != "renormalize":  # logits will do there
        _check_sums(problem.log_probs, present)


def _check_repeated(ids: Tensor, present: Tensor) -> None:
    """Each id of a tail bucket stands once: the tail is what the entries leave of 1."""
    ordered = torch.where(present, ids, -1).sort(-1).values
    is_repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if is_repeated.any():
        token = int(is_repeated.any(-1).nonzero()[0])
        again = int(ordered[:, 1:][is_repeated][0])
        raise ValueError(
            "ids of a token must differ for tail='bucket', got "
            f"{again} more than once for token {token}"
        )


def _check_sums(log_probs: Tensor, present: Tensor) -> None:
    total = log_probs.double().exp().masked_fill(~present, 0.0).sum(-1)
    most = 1.0 + SLACK.get(log_probs.dtype, DEFAULT_SLACK)
    is_right = total <= most  # NaN is not
    if not is_right.all():
        token = int((~is_right).nonzero()[0])
        raise ValueError(
            "log_probs must be log-probabilities, whose exponentials sum to at most 1 for each "
            f"token, got {float(total[token]):.6g} for token {token}; tail='renormalize' takes "
            "logits"
        )
