"""Which pairs of row and key the Hopper kernels count, and that those without a mask need none.

The kernels run on a GPU of compute capability 9.0 only. Their ranges of tiles are integers, which
are computed here by the kernels' own functions, on Python's numbers.
"""

import random
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from torch_streamkl.attention.hopper import backward_scheduler, tile_scheduler, warp_groups
from torch_streamkl.kernels import scores
from torch_streamkl.kernels.arguments import MaskArgs, Sequence

Pairs = NDArray[np.int64]
LANGUAGE = SimpleNamespace(minimum=min, maximum=max, constexpr=Any)


def on_numbers(function: Any, **others: Any) -> Callable[..., Any]:
    """A jit function as plain Python, which calls ``others`` for those that it calls by name."""
    code = function.fn
    names = {**code.__globals__, "tl": LANGUAGE, "gl": LANGUAGE, **others}
    return FunctionType(code.__code__, names)


tiles = on_numbers(scores.tiles)
RANGES = {
    "keys_of_rows": on_numbers(scores.keys_of_rows, tiles=tiles),
    "rows_of_keys": on_numbers(scores.rows_of_keys, tiles=tiles),
}
in_window = on_numbers(scores.in_window)
without_offset = on_numbers(warp_groups.without_offset)
steps_met = on_numbers(tile_scheduler.steps_met, **RANGES)
pairs_met = on_numbers(tile_scheduler.pairs_met, steps_met=steps_met)
keys_met = on_numbers(tile_scheduler.keys_met)
steps_without_mask = on_numbers(tile_scheduler.steps_without_mask, **RANGES)
tiles_met = on_numbers(backward_scheduler.tiles_met, **RANGES)
tiles_without_mask = on_numbers(backward_scheduler.tiles_without_mask, **RANGES)


def sequences() -> Iterator[tuple[int, int, int, int | None, int | None]]:
    """Rows, keys, admitted keys and bounds of a window."""
    generator = random.Random(0)
    for _ in range(400):
        rows, keys = generator.randint(1, 40), generator.randint(1, 40)
        length = generator.choice([keys, keys, 0, generator.randint(0, keys)])
        bounds = (None, 0, generator.randint(0, 4), generator.randint(0, 45))
        yield rows, keys, length, generator.choice(bounds), generator.choice(bounds)


def arguments(
    rows: int, keys: int, length: int, left: int | None, right: int | None
) -> tuple[MaskArgs, Sequence, Pairs]:
    """What the kernels make of a sequence, and the pairs [rows, keys] that count."""
    offset = keys - rows
    seq = without_offset(Sequence(0, 0, rows, keys, length, offset, 0))
    window = ((left or 0) - offset, (right or 0) + offset)
    masks = MaskArgs(None, 0, 0, 0, 0, None, *window, None, None, rows, keys)
    i, j = np.arange(rows)[:, None] + offset, np.arange(keys)[None, :]
    allowed = j < length
    if left is not None:
        allowed = allowed & (j >= i - left)
    if right is not None:
        allowed = allowed & (j <= i + right)
    return masks, seq, np.broadcast_to(allowed, (rows, keys)).astype(np.int64)


def sees(masks: MaskArgs, seq: Sequence, i: int, j: int, choices: Any) -> bool:
    return bool(
        in_window(j < seq.num_valid, masks, seq, i, j, choices.HAS_LEFT, choices.HAS_RIGHT)
    )


def count(found: Pairs, i: int, j: int) -> None:
    """One more for a pair, unless nobody stores it."""
    if i < found.shape[0] and j < found.shape[1]:
        found[i, j] += 1


@pytest.mark.parametrize("groups", [1, 3])
def test_forward(groups: int) -> None:
    for case in sequences():
        masks, seq, expected = arguments(*case)
        config = SimpleNamespace(
            BLOCK_M=4, BLOCK_N=2, HAS_LEFT=case[3] is not None, HAS_RIGHT=case[4] is not None
        )
        found, met = np.zeros_like(expected), np.zeros_like(expected)
        for m0 in range(0, seq.num_rows, 4 * groups):
            first, num_pairs = pairs_met(masks, seq, m0, 4 * groups, config)
            block = SimpleNamespace(
                window=masks, seq=seq, num_pairs=num_pairs, stop_pair=first + num_pairs
            )
            for first_row in range(m0, m0 + 4 * groups, 4):
                start, stop = steps_without_mask(block, first_row, 2 * config.BLOCK_N, config)
                assert 0 <= start <= stop <= num_pairs
                assert start > 0 or num_pairs == 0  # the first pair gives the bases
                first_key, stop_key = keys_met(masks, seq, first_row, config)
                for pair in range(num_pairs):
                    for key in range(
                        4 * (block.stop_pair - 1 - pair), 4 * (block.stop_pair - pair)
                    ):
                        tile = key // 2 * 2
                        is_masked = not start <= pair < stop
                        if is_masked and not (tile < stop_key and tile + 2 > first_key):
                            continue
                        for i in range(first_row, first_row + 4):
                            count(met, i, key)
                            if not is_masked or sees(masks, seq, i, key, config):
                                count(found, i, key)
        assert (found == expected).all(), case
        if case[2] == seq.num_keys and config.HAS_LEFT and config.HAS_RIGHT:
            # no more than the tiles of a block that the band of its rows touches
            width = (case[3] or 0) + (case[4] or 0) + 4 * groups + 6
            assert met.sum(1).max() <= width, case


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("of_rows", [True, False])
def test_backward(of_rows: bool, groups: int) -> None:
    for case in sequences():
        masks, seq, expected = arguments(*case)
        task = SimpleNamespace(
            ROWS=of_rows, BLOCK=4, INNER=3, GROUPS=groups, GROUP_SIZE=1 if of_rows else 2,
            HAS_LEFT=case[3] is not None, HAS_RIGHT=case[4] is not None,
        )  # fmt: skip
        found = np.zeros((task.GROUP_SIZE, *expected.shape), np.int64)
        length = seq.num_rows if of_rows else seq.num_keys
        for block in range(0, length, 4 * groups):
            first_tile, num_tiles = tiles_met(masks, seq, block, task)
            work = SimpleNamespace(
                masks=masks, seq=seq, first_tile=first_tile, num_tiles=num_tiles
            )
            for first in range(block, block + 4 * groups, 4):
                start, stop = tiles_without_mask(work, first, task)
                for tile in range(num_tiles):
                    member = tile % task.GROUP_SIZE
                    inner = tile // task.GROUP_SIZE
                    inner = 3 * (first_tile - inner if of_rows else first_tile + inner)
                    assert inner >= 0
                    for outer in range(first, first + 4):
                        for other in range(inner, inner + 3):
                            i, j = (outer, other) if of_rows else (other, outer)
                            if start <= tile < stop:
                                # of dQ's rows those beyond the end are not stored; a key
                                # beyond it would add to dQ where dK adds that up, too
                                assert i < seq.num_rows or of_rows, case
                                assert j < seq.num_valid, case
                                count(found[member], i, j)
                            elif sees(masks, seq, i, j, task):
                                count(found[member], i, j)
        assert (found == expected).all(), case
