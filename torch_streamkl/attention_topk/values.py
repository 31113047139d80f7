"""Checks that ids are in range.

On a CPU every call does, and the error names the value. On a GPU, a query with an id past the last
key gets the value NaN, and no key is read there: the CPU does not wait. An error that names the
value has to wait, so there it is raised on request alone.
"""

from __future__ import annotations

from torch_streamkl.attention_topk.problem import ChosenKeys
from torch_streamkl.bounds import has_values


def check(problem: ChosenKeys, is_requested: bool) -> None:
    """Raises for ids out of range; fake tensors have none."""
    ids = problem.ids
    if not has_values(ids):
        return
    if ids.device.type != "cpu" and not is_requested:
        return
    for b in range(ids.shape[0]):
        wrong = problem.out_of_range(ids[b], b, slice(None))
        if wrong.any():
            raise IndexError(
                f"ids must be below the number of keys {problem.num_keys}, or negative for "
                f"padding, got {int(ids[b][wrong][0])}"
            )
