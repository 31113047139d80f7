"""Sums over blocks of keys: next to naive code in float64, by their laws, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_streamkl import row_program
from torch_streamkl.rows import tile, torch_impl
from torch_streamkl.rows.program import Program

BATCH, HEADS, ROWS, KEYS, DIM = 2, 3, 7, 23, 5
SIZES = [1, 2, 4, 5, 23, 40]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 6 keys, whose ends are inside of blocks."""
    monkeypatch.setattr(torch_impl, "BLOCK_ELEMENTS", 96)
    monkeypatch.setattr(torch_impl, "MAX_KEYS", 6)


def operands(spread: float = 1.0, heads: int = HEADS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Not contiguous, with key heads that query heads share."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=make, dtype=torch.float64) * math.sqrt(spread)
        return x.transpose(1, 2).detach().requires_grad_()

    return normal(BATCH, ROWS, heads, DIM), normal(BATCH, KEYS, 1, DIM)


def pooled(x: Tensor, size: int) -> Tensor:
    return torch.stack([part.sum(-1) for part in x.split(size, -1)], -1)


def masks(how: str) -> tuple[dict[str, Any], Tensor]:
    """Arguments of a mask, and which keys take part."""
    every = torch.ones(BATCH, 1, ROWS, KEYS, dtype=torch.bool)
    causal = every.tril(KEYS - ROWS)
    at = torch.arange(KEYS) - (torch.arange(ROWS)[:, None] + KEYS - ROWS)
    drawn = torch.rand(BATCH, 1, ROWS, KEYS, generator=torch.Generator().manual_seed(3)) > 0.4
    drawn[0, :, 2] = False  # a row without keys
    lengths = torch.tensor([KEYS - 4, 0])
    return {
        "none": ({}, every),
        "causal": ({"is_causal": True}, causal),
        "window": ({"window": (3, 2)}, every & (at >= -3) & (at <= 2)),
        "lengths": (
            {"key_lengths": lengths},
            every & (torch.arange(KEYS) < lengths[:, None, None, None]),
        ),
        "mask": ({"mask": drawn}, drawn),
    }[how]


def weights(keys: int = KEYS) -> Tensor:
    return torch.linspace(0.2, 2.0, keys, dtype=torch.float64)[None, None].requires_grad_()


def program(size: int) -> Any:
    """Sums over blocks of two sizes next to one over all keys, of elements of two levels."""

    def function(e: Any) -> Any:
        p = (e.t * 0.4).softmax("key")
        q = p * e.w / ((p * e.w).sum("key") + 1e-3)
        return {
            "q": q.sum("key", block=size),
            "square": (q * q).sum("key"),
            "scores": (q * e.t).sum("key", block=3),
        }

    return function


def naive(q: Tensor, k: Tensor, w: Tensor, keep: Tensor, size: int) -> list[Tensor]:
    x = q @ k.mT
    p = torch.where(keep, x * 0.4, -torch.inf).softmax(-1).nan_to_num(0.0)
    p = torch.where(keep, p, 0.0) * w[:, :, None]
    p = p / (p.sum(-1, keepdim=True) + 1e-3)
    return [pooled(p, size), (p * p).sum(-1), pooled(p * x, 3)]


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Of a sum that weighs every value of every output otherwise."""
    make = torch.Generator().manual_seed(5)
    loss = sum(
        (x * torch.randn(x.shape, generator=make, dtype=torch.float64).to(x)).sum()
        for x in outputs
    )
    return [x.detach() for x in (*outputs, *torch.autograd.grad(loss, inputs, retain_graph=True))]


def assert_equal(got: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        finite = b.isfinite()  # the gradient of naive code in a row without keys
        assert float((a - b)[finite].abs().max()) <= tolerance * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("how", ["none", "causal", "window", "lengths", "mask"])
@pytest.mark.parametrize("size", SIZES)
def test_beside_naive_code(size: int, how: str, impl: str, small_blocks: None) -> None:
    q, k = operands()
    w = weights()
    options, keep = masks(how)
    found = row_program(
        program(size), dots={"t": (q, k)}, keys={"w": w}, impl=impl, **options
    ).values()
    expected = gradients(naive(q, k, w, keep, size), [q, k, w])
    assert_equal(gradients(list(found), [q, k, w]), expected)


@pytest.mark.parametrize("spread", [30.0, 3000.0])
@pytest.mark.parametrize("size", [1, 4])
def test_large_scores(size: int, spread: float, small_blocks: None) -> None:
    q, k = operands(spread)
    w = weights()
    keep = masks("causal")[1]
    found = row_program(program(size), dots={"t": (q, k)}, keys={"w": w}, is_causal=True)
    expected = gradients(naive(q, k, w, keep, size), [q, k, w])
    assert_equal(gradients(list(found.values()), [q, k, w]), expected, 1e-10)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("size", SIZES)
def test_after_a_sum_over_heads(size: int, impl: str, small_blocks: None) -> None:
    q, k = operands()

    def function(e: Any) -> Any:
        p = e.t.softmax("key").sum("head")
        return {"p": (p / p.sum("key")).sum("key", block=size)}

    found = row_program(function, dots={"t": (q, k)}, is_causal=True, impl=impl)["p"]
    assert found.shape == (BATCH, 1, ROWS, -(-KEYS // size))
    x = torch.where(masks("causal")[1], q @ k.mT, -torch.inf).softmax(-1).sum(1, keepdim=True)
    x = x / x.sum(-1, keepdim=True)
    assert_equal(gradients([found], [q, k]), gradients([pooled(x, size)], [q, k]))


def test_of_an_lm_head() -> None:
    make = torch.Generator().manual_seed(0)
    h, w = (torch.randn(s, generator=make, dtype=torch.float64) for s in ((2, 3, 4), (11, 4)))
    h.requires_grad_()
    w.requires_grad_()
    found = row_program(lambda e: e.s.softmax("key").sum("key", block=4), dots={"s": (h, w)})
    expected = pooled((h @ w.mT).softmax(-1), 4)
    assert found.shape == (2, 3, 3)
    assert_equal(gradients([found], [h, w]), gradients([expected], [h, w]))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 40), st.integers(1, 45), st.booleans(), st.integers(0, 2**31)
)
def test_laws(rows: int, keys: int, size: int, is_causal: bool, seed: int) -> None:
    """Blocks of one key are the map, and the sum of all blocks is that of the row."""
    make = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 2, n, 4, generator=make, dtype=torch.float64) for n in (rows, keys))
    q.requires_grad_()
    k.requires_grad_()

    def function(e: Any) -> Any:
        p = (e.s.softmax("key") * (e.s.detach() - 0.5)) ** 2 * e.s
        return {"map": p.sum("key", block=1), "p": p.sum("key", block=size), "row": p.sum("key")}

    found = row_program(function, dots={"s": (q, k)}, is_causal=is_causal)
    assert_equal(gradients([found["p"]], [q, k]), gradients([pooled(found["map"], size)], [q, k]))
    assert_equal(gradients([found["p"].sum(-1)], [q, k]), gradients([found["row"]], [q, k]))


def test_memory_is_that_of_rows_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of rows and keys is made, in the forward or in the backward."""
    rows, keys, size = 64, 2048, 256
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, f: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            out = f(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    monkeypatch.setattr(torch_impl, "BLOCK_ELEMENTS", 4096)
    q, k = torch.randn(1, 1, rows, 4), torch.randn(1, 1, keys, 4)
    q.requires_grad_()
    k.requires_grad_()
    with Watch():
        out = row_program(lambda e: e.s.softmax("key").sum("key", block=size), dots={"s": (q, k)})
        out.square().sum().backward()
    assert largest < rows * keys / 8


def test_the_text_of_programs_without_blocks_is_as_it_was() -> None:
    """Compiled kernels and caches are known by it."""
    from torch_streamkl.program.masks import Keys
    from torch_streamkl.rows.trace import Tracer

    tracer = Tracer((1,), (), Keys(), {})
    x = tracer.dot(0)
    whole = tracer.program([tracer.reduce("sum", x)])[0]
    by_blocks = tracer.program([tracer.reduce("block_sum", x, 4)])[0]
    assert whole.text == (
        '[[1],[],[["dot",[],0,"float",1,true,true]],[["sum",0,1]],[0],[null,null,false,false]]'
    )
    assert Program.of(by_blocks.text) == by_blocks
    assert by_blocks.text.count('["block_sum",0,1,4]') == 1


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "an element uses one": (
        lambda e: (e.s - e.s.sum("key", block=2)).sum("key"), ValueError, "returned as they are"),
    "a sum of one": (
        lambda e: e.s.sum("key", block=2).sum("key"), ValueError, "returned as they are"),
    "heads of one": (
        lambda e: e.s.sum("key", block=2).sum("head"), ValueError, "returned as they are"),
    "something is computed of one": (
        lambda e: e.s.sum("key", block=2).log(), ValueError, "returned as they are"),
    "over heads": (lambda e: e.s.sum("head", block=2).sum("key"), ValueError, 'sum over "key"'),
    "a log-sum-exp": (lambda e: e.s.logsumexp("key", block=2), ValueError, 'sum over "key"'),
    "no keys": (lambda e: e.s.sum("key", block=0), ValueError, "positive number of keys, got 0"),
    "half a key": (lambda e: e.s.sum("key", block=1.5), ValueError, "positive number of keys"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str) -> None:
    function, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        row_program(function, dots={"s": operands()})


def test_reductions_are_of_rows() -> None:
    with pytest.raises(ValueError, match="got sums over blocks of keys"):
        row_program(lambda e: e.s.sum("key", block=2), dots={"s": operands()}, reduction="sum")


@pytest.mark.parametrize("size", [22, 10**12])
def test_a_block_longer_than_a_tile_takes_no_room(size: int, small_blocks: None) -> None:
    """Nothing is as long as a block of which there are fewer keys."""
    q, k = operands()
    found = row_program(
        lambda e: e.t.softmax("key").sum("key", block=size), dots={"t": (q, k)}, impl="torch"
    )
    expected = pooled((q @ k.mT).softmax(-1), size)
    assert_equal(gradients([found], [q, k]), gradients([expected], [q, k]))


@pytest.mark.parametrize("size", [1, 2, 5, 6, 7, 100])
@pytest.mark.parametrize("first", [0, 1, 6, 13])
@pytest.mark.parametrize("count", [1, 3, 6, 11])
def test_parts_of_blocks(first: int, count: int, size: int) -> None:
    x = torch.arange(1.0, count + 1)
    blocks, sums = tile.block_sums(x, first, size, torch.float64)
    expected: dict[int, float] = {}
    for i in range(count):
        at = (first + i) // size
        expected[at] = expected.get(at, 0.0) + float(x[i])
    assert dict(zip(range(blocks.start, blocks.stop), sums.tolist(), strict=True)) == expected
