"""Tiles and steps of the Hopper kernels that go by tiles, as in test_hopper_ranges.py.

A warp group's order of waits, matmuls and releases is followed by running its functions on
Python's numbers, with what touches tensors replaced.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.kernels.test_hopper_ranges import RANGES, arguments, count, on_numbers, sees, sequences
from torch_streamkl.attention.hopper import (
    backward_scheduler,
    pipeline,
    second_pass,
    tiles,
)
from torch_streamkl.attention.hopper import (
    tile_scheduler as hopper_work,
)
from torch_streamkl.attention.hopper.forward_config import Sums

LANGUAGE = SimpleNamespace(
    minimum=min,
    maximum=max,
    constexpr=Any,
    where=lambda chosen, a, b: a if chosen else b,
    expand_dims=lambda x, _: x,
)
pairs_met = on_numbers(
    hopper_work.pairs_met, steps_met=on_numbers(hopper_work.steps_met, **RANGES)
)
tiles_of_rows = on_numbers(hopper_work.tiles_seen, **RANGES, gl=LANGUAGE)
tiles_met = on_numbers(backward_scheduler.tiles_met, **RANGES)
tiles_seen = on_numbers(backward_scheduler.tiles_seen, **RANGES, gl=LANGUAGE)


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
            known[name] = on_numbers(getattr(module, name), gl=LANGUAGE, **known)
        self._start_following = known["start_following"]
        products_of, masked_keys = known["products_of"], known["masked_keys"]
        known["products_of"] = lambda t, *args: self.masked(t, products_of(t, *args))
        known["masked_row_sums"] = lambda sums, *_: sums
        known["masked_keys"] = lambda *args: self.masked(args[3], masked_keys(*args))
        self._reduce_tiles = on_numbers(tiles.reduce_tiles, gl=LANGUAGE, **known)
        self._reduce_row_sums = on_numbers(tiles.reduce_row_sums, gl=LANGUAGE, **known)
        self._sum_keys = on_numbers(second_pass.sum_keys, gl=LANGUAGE, **known)
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
def test_forward(form: str, groups: int) -> None:
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


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("of_rows", [True, False])
def test_backward(of_rows: bool, groups: int) -> None:
    for case in sequences():
        window, seq, expected = arguments(*case)
        task = SimpleNamespace(
            ROWS=of_rows, BLOCK=4, INNER=3, GROUPS=groups, GROUP_SIZE=1 if of_rows else 2,
            HAS_LEFT=case[3] is not None, HAS_RIGHT=case[4] is not None, HAS_MASK=False,
        )  # fmt: skip
        found = np.zeros((task.GROUP_SIZE, *expected.shape), np.int64)
        length = seq.num_rows if of_rows else seq.num_keys
        for block in range(0, length, 4 * groups):
            first_tile, num_tiles = tiles_met(window, seq, block, task)
            work = SimpleNamespace(
                masks=window, seq=seq, first_tile=first_tile, num_tiles=num_tiles
            )
            for first in range(block, block + 4 * groups, 4):
                begin, start, stop, end = tiles_seen(work, first, task)
                assert 0 <= begin <= end <= num_tiles
                for tile in range(begin, end):
                    member = tile % task.GROUP_SIZE
                    inner = tile // task.GROUP_SIZE
                    inner = 3 * (first_tile - inner if of_rows else first_tile + inner)
                    assert inner >= 0
                    for outer in range(first, first + 4):
                        for other in range(inner, inner + 3):
                            i, j = (outer, other) if of_rows else (other, outer)
                            if start <= tile < stop:
                                assert i < seq.num_rows or of_rows, case  # else not stored
                                assert j < seq.num_valid or outer >= length, case
                                count(found[member], i, j)
                            elif sees(window, seq, i, j, task):
                                count(found[member], i, j)
        assert (found == expected).all(), case


place_among = on_numbers(hopper_work.place_among, gl=LANGUAGE)
tile_of_step = on_numbers(hopper_work.tile_of_step, gl=LANGUAGE)
num_steps_of_program = on_numbers(hopper_work.num_steps_of_program, gl=LANGUAGE)


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
