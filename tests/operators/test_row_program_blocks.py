"""Sums over blocks of keys: next to naive code in float64, by their laws, and as text."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.naive_rows import check
from torch_streamkl.program.masks import Keys
from torch_streamkl.rows import torch_impl
from torch_streamkl.rows.program import Program
from torch_streamkl.rows.trace import Tracer

BATCH, HEADS, ROWS, KEYS, DIM = 2, 3, 7, 23, 5


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 6 keys, whose ends are inside of blocks."""
    monkeypatch.setattr(torch_impl, "BLOCK_ELEMENTS", 96)
    monkeypatch.setattr(torch_impl, "MAX_KEYS", 6)


def _operands(spread: float = 1.0) -> dict[str, tuple[Tensor, Tensor]]:
    """Not contiguous, with key heads that query heads share."""

    def normal(*shape: int) -> Tensor:
        x = torch.randn(shape, dtype=torch.float64) * math.sqrt(spread)
        return x.transpose(1, 2).detach().requires_grad_()

    return {"t": (normal(BATCH, ROWS, HEADS, DIM), normal(BATCH, KEYS, 1, DIM))}


def _mask() -> Tensor:
    drawn = torch.rand(BATCH, 1, ROWS, KEYS, generator=torch.Generator().manual_seed(3)) > 0.4
    drawn[0, :, 2] = False  # a row without keys
    return drawn


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"window": (3, 2)},
    "lengths": {"key_lengths": torch.tensor([KEYS - 4, 0])},
    "mask": {"mask": _mask()},
}


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("how", MASKS)
@pytest.mark.parametrize("size", [1, 2, 4, 5, 22, 23, 40, 10**12])
def test_beside_naive_code(size: int, how: str, impl: str) -> None:
    """Sums over blocks of two sizes next to one over all keys, of elements of two levels."""

    def function(e: Any) -> Any:
        p = (e.t * 0.4).softmax("key")
        q = p * e.w / ((p * e.w).sum("key") + 1e-3)
        heads = e.t.softmax("key").sum("head")
        return {
            "q": q.sum("key", block=size),
            "square": (q * q).sum("key"),
            "scores": (q * e.t).sum("key", block=3),
            "heads": (heads / (heads.sum("key") + 1e-3)).sum("key", block=size),
        }

    weights = torch.linspace(0.2, 2.0, KEYS, dtype=torch.float64)[None, None].requires_grad_()
    for spread in (1.0, 3000.0):
        given = {"impl": impl, "keys": {"w": weights}, **MASKS[how]}
        check(function, _operands(spread), atol=1e-10 * spread, **given)


def test_of_an_lm_head() -> None:
    h, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (11, 4)))
    found = check(lambda e: e.s.softmax("key").sum("key", block=4), {"s": (h, w)})
    assert found["value"].shape == (2, 3, 3)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 45), st.booleans())
def test_any_size(rows: int, keys: int, size: int, is_causal: bool) -> None:
    """Blocks of one key are the map, and the sum of all blocks is that of the row."""
    q, k = (torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (rows, keys))

    def function(e: Any) -> Any:
        p = (e.s.softmax("key") * (e.s.detach() - 0.5)) ** 2 * e.s
        return {"map": p.sum("key", block=1), "p": p.sum("key", block=size), "row": p.sum("key")}

    check(function, {"s": (q, k)}, is_causal=is_causal)


def test_the_text_of_programs_without_blocks_is_as_it_was() -> None:
    """Compiled kernels and caches are known by it."""
    tracer = Tracer((1,), (), Keys(), {})
    x = tracer.dot(0)
    whole = tracer.program([tracer.reduce("sum", x)])[0]
    by_blocks = tracer.program([tracer.reduce("block_sum", x, 4)])[0]
    assert whole.text == (
        '[[1],[],[["dot",[],0,"float",1,true,true]],[["sum",0,1]],[0],[null,null,false,false]]'
    )
    assert Program.of(by_blocks.text) == by_blocks
    assert by_blocks.text.count('["block_sum",0,1,4]') == 1
