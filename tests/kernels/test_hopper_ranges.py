"""Which pairs of row and key the Hopper kernels count, and that those without a mask need none.

The kernels run on a GPU of compute capability 9.0 only. Their ranges of tiles are integers, which
are computed here by the kernels' own functions, on Python's numbers. A persistent warp group's
order of waits, matmuls and releases is followed so, too, with what touches tensors replaced.
"""

import random
from collections.abc import Callable, Iterator
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from torch_streamkl.attention.hopper import (
    backward_scheduler,
    pipeline,
    second_pass,
    tile_scheduler,
    tiles,
    warp_groups,
)
from torch_streamkl.attention.hopper.forward_config import Sums
from torch_streamkl.kernels import scores
from torch_streamkl.kernels.arguments import MaskArgs, Sequence

Pairs = NDArray[np.int64]
LANGUAGE = SimpleNamespace(
    minimum=min,
    maximum=max,
    constexpr=Any,
    where=lambda chosen, a, b: a if chosen else b,
    expand_dims=lambda x, _: x,
)


def on_numbers(function: Any, **others: Any) -> Callable[..., Any]:
    """A jit function as plain Python, which calls ``others`` for those that it calls by name."""
    code = function.fn
    names = {**code.__globals__, "tl": LANGUAGE, "gl": LANGUAGE, **others}
    return FunctionType(code.__code__, names)


_tiles = on_numbers(scores.tiles)
RANGES = {
    "keys_of_rows": on_numbers(scores.keys_of_rows, tiles=_tiles),
    "rows_of_keys": on_numbers(scores.rows_of_keys, tiles=_tiles),
}
in_window = on_numbers(scores.in_window)
without_offset = on_numbers(warp_groups.without_offset)
steps_met = on_numbers(tile_scheduler.steps_met, **RANGES)
pairs_met = on_numbers(tile_scheduler.pairs_met, steps_met=steps_met)
keys_met = on_numbers(tile_scheduler.keys_met)
steps_without_mask = on_numbers(tile_scheduler.steps_without_mask, **RANGES)
tiles_of_rows = on_numbers(tile_scheduler.tiles_seen, **RANGES)
tiles_met = on_numbers(backward_scheduler.tiles_met, **RANGES)
tiles_without_mask = on_numbers(backward_scheduler.tiles_without_mask, **RANGES)
tiles_seen = on_numbers(backward_scheduler.tiles_seen, **RANGES)


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


# -------------------------------------------------------------------------------- gradients
def seen_of(work: Any, first: int, task: Any) -> tuple[int, int, int, int]:
    """Tiles of a block that is not persistent: all, and those without a mask."""
    return (0, *tiles_without_mask(work, first, task), work.num_tiles)


@pytest.mark.parametrize("seen", [seen_of, tiles_seen], ids=["blocks", "persistent"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("of_rows", [True, False])
def test_backward(of_rows: bool, groups: int, seen: Any) -> None:
    for case in sequences():
        masks, seq, expected = arguments(*case)
        task = SimpleNamespace(
            ROWS=of_rows, BLOCK=4, INNER=3, GROUPS=groups, GROUP_SIZE=1 if of_rows else 2,
            HAS_LEFT=case[3] is not None, HAS_RIGHT=case[4] is not None, HAS_MASK=False,
        )  # fmt: skip
        found = np.zeros((task.GROUP_SIZE, *expected.shape), np.int64)
        length = seq.num_rows if of_rows else seq.num_keys
        for block in range(0, length, 4 * groups):
            first_tile, num_tiles = tiles_met(masks, seq, block, task)
            work = SimpleNamespace(
                masks=masks, seq=seq, first_tile=first_tile, num_tiles=num_tiles
            )
            for first in range(block, block + 4 * groups, 4):
                begin, start, stop, end = seen(work, first, task)
                assert 0 <= begin <= end <= num_tiles
                for tile in range(begin, end):
                    member = tile % task.GROUP_SIZE
                    inner = tile // task.GROUP_SIZE
                    inner = 3 * (first_tile - inner if of_rows else first_tile + inner)
                    assert inner >= 0
                    for outer, other in product(range(first, first + 4), range(inner, inner + 3)):
                        i, j = (outer, other) if of_rows else (other, outer)
                        if start <= tile < stop:
                            # of dQ's rows those beyond the end are not stored; a key beyond it
                            # would add to dQ where dK adds that up, too
                            assert i < seq.num_rows or of_rows, case
                            is_stored = outer < length or seen is seen_of
                            assert j < seq.num_valid or not is_stored, case
                            count(found[member], i, j)
                        elif sees(masks, seq, i, j, task):
                            count(found[member], i, j)
        assert (found == expected).all(), case


# -------------------------------------------------------------------------------- persistent
def waited_for(_outstanding: int, deps: list[Any]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


# on numbers: what tensors have in them does not matter here
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "warpgroup_mma_wait": waited_for, "add": lambda x, y: x + y, "column_of": lambda x, _: x,
    "zero_of_pair": lambda _: 0.0, "keys_of_tile": lambda *_: 0,
    "with_row_sums": lambda sums, *_: sums,
    "start_sums": lambda *_: Sums(*[0.0] * 8), "with_terms": lambda sums, *_: sums,
    **{name: lambda x, *_: x for name in ("exp2", "lane_sum", "before_wait", "masked")},
    **{name: lambda *_: None for name in ("state_of", "sees_keys")},
}  # fmt: skip


class WarpGroup:
    """What a warp group of the forward does: tiles it sums, pairs it waits for and releases."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.released: list[int] = []
        self.tiles: list[tuple[int, bool]] = []  # and whether they are masked
        self._used = 0
        known: dict[str, Callable[..., Any]] = {
            "wait_for": self.wait_for, "release": self.release, "start_at": lambda *_: 0.0,
            "start_pair": self.start_pair, "step": self.step, "masked_step": self.masked_step,
            **ARITHMETIC,
        }  # fmt: skip
        for module, name in (
            (tiles, "start_following"),
            (tiles, "sum_pairs"),
            (tiles, "row_sums_step"),
            (tiles, "sum_of_row_sums"),
            (tiles, "products_of"),
            (tiles, "release_after"),
            (second_pass, "pair_of_keys"),
            (second_pass, "masked_keys"),
        ):
            known[name] = on_numbers(getattr(module, name), **known)
        self._start_following = known["start_following"]
        products_of, masked_keys = known["products_of"], known["masked_keys"]
        known["products_of"] = lambda t, *args: self.masked(t, products_of(t, *args))
        known["masked_row_sums"] = lambda sums, *_: sums
        known["masked_keys"] = lambda *args: self.masked(args[3], masked_keys(*args))
        self._reduce_tiles = on_numbers(tiles.reduce_tiles, **known)
        self._reduce_row_sums = on_numbers(tiles.reduce_row_sums, **known)
        self._sum_keys = on_numbers(second_pass.sum_keys, **known)
        self.skip_stages = on_numbers(pipeline.skip_stages, **known)

    def wait_for(self, _tiles: Any, pair: int, more: bool, _slots: int) -> None:
        if more and pair not in self.waited:
            assert not self.waited or pair == self.waited[-1] + 1
            self.waited.append(pair)

    def release(self, _tiles: Any, pair: int, _slots: int) -> None:
        assert pair in self.waited
        self.released.append(pair)

    def visit(self, t: int, masked: bool) -> None:
        assert self._used + t // 2 in self.waited
        assert self._used + t // 2 not in self.released
        self.tiles.append((t, masked))

    def masked(self, t: int, found: Any) -> Any:
        """A masked tile that is done; the first of a pass may have been read before."""
        assert self._used + t // 2 in self.waited
        if (t, True) not in self.tiles:
            self.tiles.append((t, True))
        return found

    def masked_step(
        self, o: Any, sums: Any, t: int, _tiles: Any, place: Any, *_: Any
    ) -> tuple[Any, Any]:
        self.visit(t, True)
        self._start_following(TILES, place, t, None, 2)
        return o, sums

    def step(
        self, o: Any, bias: Any, sums: Any, i: int, more: bool, _tiles: Any, place: Any,
        _zero: Any, half: int, *_: Any,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """As frozen_max.step: the pair is waited for before, the next one under its end."""
        self.visit(2 * (i - place.used) + 1 - half, False)
        if half == 0:
            self.wait_for(None, i + 1, more, 2)
            self.release(None, i, 2)
        return o, bias, sums

    def start_pair(self, _q: Any, keys: str, pair: int, *_: Any) -> float:
        if keys == "weight":  # `other`'s may be those past the end, which nobody reads
            for half in range(2):
                self.visit(2 * (pair - self._used) + half, False)
        return 0.0

    def reduce(self, form: str, place: Any, bounds: tuple[int, int, int], config: Any) -> None:
        begin, whole, edge = bounds
        self._used = place.used
        task = SimpleNamespace(CONFIG=config, SLOTS=2)
        if form == "one pass":
            self._reduce_tiles(TILES, place, begin, whole, edge, 0, task)
        elif form == "masses":
            self._reduce_row_sums(TILES, place, begin, whole, edge, 0, task)
            if begin == whole:  # read for the bases alone
                self.tiles.remove((begin, True))
        else:
            known = second_pass.Specialized(0.5, 0.5, 0.0, 0.0, 0.0, False)
            task.SPECIALIZED = known
            self._sum_keys(0.0, 0.0, TILES, place, begin, whole, edge, 0.0, None, task)


TILES = SimpleNamespace(other_k="other", weight_k="weight")
SIDE = SimpleNamespace(scale=1.0)
SIDES = SimpleNamespace(other=SIDE, weight=SIDE)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("form", ["one pass", "masses", "second pass"])
def test_persistent_forward(form: str, groups: int) -> None:
    for case in sequences():
        window, seq, expected = arguments(*case)
        config = SimpleNamespace(
            BLOCK_M=4, BLOCK_N=2, HAS_LEFT=case[3] is not None, HAS_RIGHT=case[4] is not None,
        )  # fmt: skip
        found = np.zeros_like(expected)
        used = 7
        for m0 in range(0, seq.num_rows, 4 * groups):
            first, num_pairs = pairs_met(window, seq, m0, 4 * groups, config)
            block = SimpleNamespace(
                window=window, seq=seq, num_pairs=num_pairs, stop_pair=first + num_pairs
            )
            for first_row in range(m0, m0 + 4 * groups, 4):
                begin, whole, edge, end = tiles_of_rows(block, first_row, config)
                assert 0 <= begin <= whole <= edge <= end <= 2 * num_pairs
                assert whole % 2 == edge % 2 == 0 or whole == edge == end
                place = SimpleNamespace(
                    used=used, end=end, oq=None, wq=None, rows=None, block=block, sides=SIDES,
                )  # fmt: skip
                group = WarpGroup()
                group.skip_stages(TILES, used, used + begin // 2, 2)
                if begin < end:
                    group.reduce(form, place, (begin, whole, edge), config)
                group.skip_stages(TILES, used + (end + 1) // 2, used + num_pairs, 2)
                # every pair once, in order
                assert group.waited == group.released == list(range(used, used + num_pairs))
                for t, is_masked in group.tiles:
                    tile = 2 * (2 * block.stop_pair - 1 - t)
                    for i in range(first_row, first_row + 4):
                        for key in range(tile, tile + 2):
                            if not is_masked or sees(window, seq, i, key, config):
                                assert is_masked or key < seq.num_valid
                                count(found, i, key)
                if config.HAS_LEFT and config.HAS_RIGHT:
                    # no more than the tiles that the band of the rows touches
                    width = (case[3] or 0) + (case[4] or 0) + 4 + 2
                    assert 2 * len(group.tiles) <= width + 2, case
        assert (found == expected).all(), case


place_among = on_numbers(tile_scheduler.place_among)
tile_of_step = on_numbers(tile_scheduler.tile_of_step)
num_steps_of_program = on_numbers(tile_scheduler.num_steps_of_program)


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
            for step_of_program in range(num_steps_of_program(work)):
                number = tile_of_step(step_of_program, work)
                if number < works:
                    found.append(place_among(number, num_blocks, num_heads, at_once, interleaved))
        expected = [(block, head) for block in range(num_blocks) for head in range(num_heads)]
        assert sorted(found) == expected
