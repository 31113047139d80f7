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

from torch_streamkl.kernels import (
    hopper,
    hopper_backward,
    hopper_parts,
    hopper_tiles,
    hopper_work,
    rows,
    scores,
)
from torch_streamkl.kernels.arguments import Sequence

Pairs = NDArray[np.int64]
LANGUAGE = SimpleNamespace(
    minimum=min, maximum=max, constexpr=Any, where=lambda chosen, a, b: a if chosen else b
)


def on_numbers(function: Any, **others: Callable[..., Any]) -> Callable[..., Any]:
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
without_offset = on_numbers(hopper.without_offset)
pairs_met = on_numbers(hopper_work.pairs_met, **RANGES)
tiles_of_rows = on_numbers(hopper_work.tiles_seen, **RANGES)
tiles_met = on_numbers(hopper_backward.tiles_met, **RANGES)
tiles_seen = on_numbers(hopper_backward.tiles_seen, **RANGES)
Window = hopper_work.Window


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
) -> tuple[Window, Sequence, Pairs]:
    """What the kernels make of a sequence, and the pairs [rows, keys] that count."""
    offset = keys - rows
    seq = without_offset(Sequence(0, 0, rows, keys, length, offset, 0))
    window = Window((left or 0) - offset, (right or 0) + offset)
    i, j = np.arange(rows)[:, None] + offset, np.arange(keys)[None, :]
    allowed = j < length
    if left is not None:
        allowed = allowed & (j >= i - left)
    if right is not None:
        allowed = allowed & (j <= i + right)
    return window, seq, np.broadcast_to(allowed, (rows, keys)).astype(np.int64)


def sees(window: Window, seq: Sequence, i: int, j: int, choices: Any) -> bool:
    return bool(
        in_window(j < seq.num_valid, window, seq, i, j, choices.HAS_LEFT, choices.HAS_RIGHT)
    )


def count(found: Pairs, i: int, j: int) -> None:
    """One more for a pair, unless nobody stores it."""
    if i < found.shape[0] and j < found.shape[1]:
        found[i, j] += 1


class WarpGroup:
    """What a warp group of the forward does: tiles it sums, pairs it waits for and releases."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.released: list[int] = []
        self.tiles: list[tuple[int, bool]] = []  # and whether they are masked
        nothing: dict[str, Callable[..., Any]] = {
            name: lambda *_, **__: None
            for name in ("start_scores", "tile_at", "tile_of", "start_sums", "with_sums",
                         "without_doubtful", "sees_keys")
        }  # fmt: skip
        waits: dict[str, Callable[..., Any]] = {"wait_for": self.wait_for, "release": self.release}
        self._start_following = on_numbers(hopper_tiles.start_following, **waits, **nothing)
        self._sum_pairs = on_numbers(hopper_tiles.sum_pairs, step=self.step, **nothing)
        self.reduce_tiles = on_numbers(
            hopper_tiles.reduce_tiles,
            masked_step=self.masked_step, sum_pairs=self._sum_pairs,
            keys_of_tile=lambda *_: 0, warpgroup_mma_wait=lambda *_, **__: (None, None),
            **waits, **nothing,
        )  # fmt: skip
        self.pass_by = on_numbers(hopper_tiles.pass_by, **waits)

    def wait_for(self, _tiles: Any, pair: int, more: bool, _slots: int) -> None:
        if more:
            self.waited.append(pair)

    def release(self, _tiles: Any, pair: int, _slots: int) -> None:
        assert pair in self.waited
        self.released.append(pair)

    def visit(self, t: int, used: int, masked: bool) -> None:
        assert used + t // 2 in self.waited
        assert used + t // 2 not in self.released
        self.tiles.append((t, masked))

    def masked_step(
        self, o: Any, sums: Any, t: int, _tiles: Any, place: Any, *_: Any
    ) -> tuple[Any, Any]:
        self.visit(t, place.used, True)
        self._start_following(TILES, place, t, None, 2)
        return o, sums

    def step(
        self, o: Any, sums: Any, i: int, more: bool, _tiles: Any, place: Any, _zero: Any,
        half: int, *_: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """As hopper_tiles.step: the pair is waited for before, the next one under its end."""
        self.visit(2 * (i - place.used) + 1 - half, place.used, False)
        if half == 0:
            self.wait_for(None, i + 1, more, 2)
            self.release(None, i, 2)
        return o, sums


FORM = SimpleNamespace(TT=1.0, TS=-1.0, ST=0.0, SS=0.0)
TILES = SimpleNamespace(other_k=None, weight_k=None)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("groups", [1, 3])
def test_forward(groups: int, parts: int) -> None:
    for case in sequences():
        window, seq, expected = arguments(*case)
        config = SimpleNamespace(
            BLOCK_M=4, BLOCK_N=2, HAS_LEFT=case[3] is not None, HAS_RIGHT=case[4] is not None,
            GUARDED=False,
        )  # fmt: skip
        found = np.zeros_like(expected)
        for m0 in range(0, seq.num_rows, 4 * groups):
            first, all_pairs = pairs_met(window, seq, m0, 4 * groups, config)
            for part in range(parts):
                first_pair, stop_pair = all_pairs * part // parts, all_pairs * (part + 1) // parts
                num_pairs, used = stop_pair - first_pair, 7
                block = SimpleNamespace(
                    window=window, seq=seq, num_pairs=num_pairs, stop_pair=first + stop_pair
                )
                for first_row in range(m0, m0 + 4 * groups, 4):
                    begin, whole, edge, end = tiles_of_rows(block, first_row, config)
                    assert 0 <= begin <= whole <= edge <= end <= 2 * num_pairs
                    assert whole % 2 == edge % 2 == 0 or whole == edge == end
                    place = SimpleNamespace(
                        used=used, end=end, oq=None, wq=None, rows=None, block=block,
                        other_scale=1.0, weight_scale=1.0,
                    )  # fmt: skip
                    group = WarpGroup()
                    group.pass_by(TILES, used, used + begin // 2, 2)
                    if begin < end:
                        group.reduce_tiles(
                            TILES, place, begin, whole, edge, 0, True, 2, FORM, config
                        )
                    group.pass_by(TILES, used + (end + 1) // 2, used + num_pairs, 2)
                    # every pair once, in order
                    assert group.waited == group.released == list(range(used, used + num_pairs))
                    for t, masked in group.tiles:
                        tile = 2 * (2 * block.stop_pair - 1 - t)
                        for i in range(first_row, first_row + 4):
                            for key in range(tile, tile + 2):
                                if not masked or sees(window, seq, i, key, config):
                                    assert masked or key < seq.num_valid
                                    count(found, i, key)
                    if config.HAS_LEFT and config.HAS_RIGHT:
                        # no more than the tiles that the band of the rows touches
                        width = (case[3] or 0) + (case[4] or 0) + 4 + 2
                        assert 2 * len(group.tiles) <= width + 2, case
        assert (found == expected).all(), case


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("of_rows", [True, False])
@pytest.mark.parametrize("adds", [False, True])
def test_backward(of_rows: bool, groups: int, adds: bool) -> None:
    if of_rows and adds:
        pytest.skip("dQ is added up beside dK")
    for case in sequences():
        window, seq, expected = arguments(*case)
        task = SimpleNamespace(
            HAS_MASK=False,
            ROWS=of_rows, BLOCK=4, INNER=3, GROUPS=groups, GROUP_SIZE=1 if of_rows else 2,
            HAS_LEFT=case[3] is not None, HAS_RIGHT=case[4] is not None, ADDS=adds,
        )  # fmt: skip
        found = np.zeros((task.GROUP_SIZE, *expected.shape), np.int64)
        length = seq.num_rows if of_rows else seq.num_keys
        for block in range(0, length, 4 * groups):
            first_tile, num_tiles = tiles_met(window, seq, block, task)
            work = SimpleNamespace(
                window=window, seq=seq, first_tile=first_tile, num_tiles=num_tiles, length=length
            )
            for first in range(block, block + 4 * groups, 4):
                begin, start, stop, end = tiles_seen(work, first, task)
                assert 0 <= begin <= end <= num_tiles
                assert not adds or (begin, end) == (0, num_tiles)
                for tile in range(begin, end):
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
                                assert j < seq.num_valid or (outer >= length), case
                                count(found[member], i, j)
                            elif sees(window, seq, i, j, task):
                                count(found[member], i, j)
        assert (found == expected).all(), case


place_among = on_numbers(rows.place_among)
block_of = on_numbers(hopper_parts.block_of)
work_of_turn = on_numbers(hopper_work.work_of_turn)
num_turns = on_numbers(hopper_work.num_turns)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("programs", [1, 5, 132])
def test_every_block_once(programs: int, interleaved: bool) -> None:
    for num_blocks, num_heads, at_once in ((1, 1, 8), (3, 20, 8), (7, 16, 8), (4, 15, 12)):
        works = num_blocks * num_heads
        found = []
        for program in range(min(programs, works)):
            work = SimpleNamespace(
                program=program, num_programs=min(programs, works), num_works=works
            )
            for turn in range(num_turns(work)):
                number = work_of_turn(turn, work)
                if number < works:
                    found.append(place_among(number, num_blocks, num_heads, at_once, interleaved))
        expected = [(block, head) for block in range(num_blocks) for head in range(num_heads)]
        assert sorted(found) == expected
