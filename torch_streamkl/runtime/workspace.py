"""Divides rows into chunks, so that their intermediate results fit into a workspace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

MIB = 2**20

# NOTE [Sums over chunks]
# A weight's gradient is summed over chunks of tokens in its own dtype. In bfloat16 each addition
# rounds the running sum once: with n chunks the error's square grows by about n/2 roundings, and
# naive bfloat16 already carries the rounding of the logit gradients. Measured against float64 the
# sum stays within twice naive's error up to about 38 chunks; this limit keeps a margin. Beyond it
# `chunks.backward` cuts vocabulary entries as well as tokens, each at most so many times.
# float32 sums add errors of a matmul's own size, in any number.
MAX_LOW_PRECISION_SUMS = 34

DEFAULT_WORKSPACE_MIB = {"cpu": 40, "cuda": 512}

# On a CPU it is at least this share of the weights: every chunk of tokens reads them, and adds to
# a gradient as large, and products of 64 tokens are slow. 49,152 vocabulary entries, width 576
# from 960, 512 tokens: 1.98 s with an eighth, 1.80 with a third, 1.76 with all tokens at once;
# 65,536 vocabulary entries and 256 tokens 1.47, 1.27, 1.26 s (one thread, compiled rows).
CPU_SHARE_OF_WEIGHTS = 3

ROW_ALIGNMENT = 64  # elements; rows of logits start aligned, which the fast matmuls need


def padded(size: int, multiple: int = ROW_ALIGNMENT) -> int:
    """Rounds a size up to a multiple."""
    return int(-(-size // multiple) * multiple)


@dataclass(frozen=True)
class Chunks:
    """Holds the numbers of tokens whose logits are alive at once.

    The teacher's logits are needed only until the student's are turned into their gradient, so
    they may cover fewer tokens (``teacher_tokens`` divides the work inside a chunk).
    """

    tokens: int
    teacher_tokens: int


def ranges(size: int, step: int) -> Iterator[slice]:
    """Yields the ranges of ``step`` that make up a size."""
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def even_ranges(size: int, limit: int, multiple: int) -> Iterator[slice]:
    """Yields the fewest ranges of at most ``limit``, nearly equal, that start at round numbers.

    Matmuls of equal and round sizes are fast: a short rest would cost nearly as much as a whole
    chunk. Without rows there is no range, because a mask may select none.
    """
    if size == 0:
        return
    num_parts = -(-size // limit)
    for unit in (max(multiple >> shift, 1) for shift in (0, 1, 2, 3, 16)):
        ends = [round(i * size / (num_parts * unit)) * unit for i in range(num_parts)]
        lengths = [stop - start for start, stop in pairwise([*ends, size])]
        if min(lengths) > 0 and max(lengths) <= limit:
            break
    for start, length in zip(ends, lengths, strict=True):
        yield slice(start, start + length)


def even_step(size: int, limit: int, multiple: int) -> int:
    """Returns length of the longest of the `even_ranges`, at least 1."""
    if limit > multiple:
        limit -= limit % multiple
    return max((int(r.stop - r.start) for r in even_ranges(size, limit, multiple)), default=1)
