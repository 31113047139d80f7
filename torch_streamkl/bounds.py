"""Checks that ids, labels, lengths and offsets are in range, as torch does for its own indices.

A row program compares the ids of a row with the keys, and `linear_kl` searches the vocabulary for
a label. An id out of range would be found nowhere, and give a plausible number. On a CPU the error
names the value. On a GPU a kernel asserts, as Inductor's do, and the CPU does not wait.
Lengths and offsets are checked on a CPU alone: a kernel that asserts may take as long as the call.
Fake tensors have no values, and are not checked.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import Library

from torch_streamkl.registration import NAMESPACE, define, register

_lib = Library(NAMESPACE, "FRAGMENT")
# the ids themselves, after an error where one of them is no position along a dimension of a tensor
checked_ids = define(
    _lib,
    'checked_ids(Tensor ids, SymInt size, int dim, str of="gather") -> Tensor',
    (torch.Tag.pt2_compliant_tag,),
)


LABELS = "labels or"  # and the one value that is ignored: what `checked_ids` checks


def ignored_label(of: str) -> int | None:
    """Returns the label that is ignored, None if ids are no labels."""
    return int(of.removeprefix(LABELS)) if of.startswith(LABELS) else None


def check_labels(labels: Tensor | None, vocab_size: int, ignore_index: int) -> None:
    """Raises if a label is neither ``ignore_index`` nor a vocabulary entry."""
    if labels is None or not has_values(labels):
        return
    is_right = (labels.clamp(0, vocab_size - 1) == labels) | (labels == ignore_index)
    rule = f"labels must be in [0, {vocab_size}) or ignore_index={ignore_index}"
    if labels.device.type != "cpu":
        torch._assert_async(is_right.all(), rule)
    elif not is_right.all():
        raise IndexError(f"{rule}, got {int(labels[~is_right][0])}")  # torch's type


def check_key_lengths(lengths: Tensor, num_keys: int) -> None:
    """Raises on a CPU if a number of valid keys is not one of 0 to all keys."""
    if lengths.device.type != "cpu" or not has_values(lengths):
        return
    is_right = lengths.clamp(0, num_keys) == lengths
    if not is_right.all():
        raise ValueError(
            f"key_lengths must be in [0, {num_keys}], the number of keys, got "
            f"{int(lengths[~is_right][0])}"
        )


def check_offsets(what: str, offsets: Tensor, total: int, longest: int | None = None) -> None:
    """Raises on a CPU if offsets of packed sequences do not divide a total of queries or keys.

    ``what`` ends the names of both arguments, and ``longest`` is a bound of the lengths.
    """
    if offsets.device.type != "cpu" or not has_values(offsets):
        return
    numbers: list[int] = offsets.tolist()
    if numbers[0] != 0 or numbers[-1] != total or sorted(numbers) != numbers:
        shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        raise ValueError(
            f"cu_seqlens{what} must begin with 0, never decrease, and end with the total "
            f"{total}, got [{shown}]"
        )
    length = max(stop - start for start, stop in pairwise(numbers))
    if longest is not None and length > longest:
        raise ValueError(
            f"max_seqlen{what} must be at least {length}, the length of the longest sequence, "
            f"got {longest}"
        )


def _checked(ids: Tensor, size: int, dim: int, of: str = "gather") -> Tensor:
    """Raises as gather, indexing, one_hot or cross_entropy do; an index may count from the end."""
    is_index = of == "index"
    if has_values(ids):
        is_right = ids.clamp(-size if is_index else 0, size - 1) == ids
        ignored = ignored_label(of)
        if ignored is not None:
            is_right |= ids == ignored
        if ids.device.type != "cpu":
            torch._assert_async(is_right.all(), f"an index is out of bounds for size {size}")
        elif not is_right.all():
            first = int(ids[~is_right][0])
            if of == "one_hot":
                rule = "smaller than num_classes" if first >= size else "non-negative"
                raise RuntimeError(f"Class values must be {rule}.")
            if ignored is not None:
                raise IndexError(f"Target {first} is out of bounds.")
            error = IndexError if is_index else RuntimeError
            raise error(f"index {first} is out of bounds for dimension {dim} with size {size}")
    return torch.where(ids < 0, ids + size, ids) if is_index else ids.clone()


def _fake(ids: Tensor, size: Any, dim: int, of: str = "gather") -> Tensor:
    return torch.empty_like(ids)


def has_values(x: Tensor) -> bool:
    """Returns whether a tensor has values to check, which fake tensors do not."""
    return not (isinstance(x, FakeTensor) or x.is_meta) and x.numel() > 0


register(_lib, "checked_ids", _checked, _fake)
