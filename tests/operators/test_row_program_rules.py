"""What every row program keeps to: values, gradients, masks, kinks, numbers, positions, memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.compiling import compile_rewritten
from tests.support.naive_rows import check
from torch_streamkl import row_program
from torch_streamkl.fx_passes import backend
from torch_streamkl.rows import op, torch_impl
from torch_streamkl.rows.program import Program

of_impls = pytest.mark.parametrize("impl", ["reference", "torch"])
Function = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_impl, "BLOCK_ELEMENTS", 24)
    monkeypatch.setattr(torch_impl, "MAX_KEYS", 3)


def _leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def _maps(heads: int = 2, rows: int = 3, keys: int = 5) -> dict[str, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return {
        "t": (_leaf(2, heads, rows, 3), _leaf(2, 1, keys, 3)),
        "s": (_leaf(2, heads, rows, 2), _leaf(2, heads, keys, 2)),
    }


def _captured() -> dict[str, dict[str, Tensor]]:
    return {
        "rows": {"row": _leaf(2, 1, 3)},
        "keys": {"key": _leaf(2, 2, 5), "shared": _leaf(1, 1, 5)},
        "pairs": {"pair": _leaf(1, 1, 3, 5)},
    }


def _kl(e: Any) -> Any:
    p, s = e.t.log_softmax("key"), e.s.log_softmax("key")
    return (p.exp() * (p - s)).sum("key")


PROGRAMS: dict[str, Function] = {
    "transcendental": lambda e: e.t.tanh() + e.s.sigmoid() + softplus(e.t),
    "powers": lambda e: (e.t.square() + 1).pow(1.5) + (e.s**2 + 1).sqrt() + (e.s**2 + 1) ** -2,
    "logarithms": lambda e: (e.t**2 + 1).log() + (e.s**2).log1p() + (e.t - e.s).sigmoid().log2(),
    "logaddexp": lambda e: torch.logaddexp(e.t, 2 * e.s) / (2 + e.s.tanh()),
    "conditions": lambda e: torch.where((e.t > 0) & ~(e.s > 0) | (e.t < -1), e.t * e.s, e.s),
    "captures": lambda e: e.t * e.row.exp() + e.s * e.key * e.pair + e.row * e.pair * e.shared,
    "head sums": lambda e: e.t.sum("head") * e.row + (e.t * e.key).mean("head") * e.pair,
    "causal by hand": lambda e: torch.where(
        e.key_index <= e.row_index, e.t, -torch.inf
    ).softmax("key") * e.s,
    "three levels": lambda e: (
        (w := (e.t.softmax("key") / 2).exp()) / w.sum("key")
        * ((e.s - (e.s.softmax("key") * e.s).sum("key")) ** 2)
    ),
    "log-sum-exp of a level": lambda e: (e.s * e.t.softmax("key")).log_softmax("key") * e.t,
    "detached": lambda e: e.t.detach() * e.s,
    "at their positions": lambda e: e.row_index * e.t + e.key_index * e.s,
}  # fmt: skip


@of_impls
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients(name: str, impl: str) -> None:
    dots, captured = _maps(), _captured()
    check(lambda e: PROGRAMS[name](e).sum("key"), dots, impl=impl, rtol=1e-9, **captured)


@of_impls
def test_sums_that_differ_in_the_order_of_factors_are_one(impl: str) -> None:
    """Each has its gradient, although the program computes them once."""

    def both(e: Any) -> Any:
        return {"a": (e.t * e.s.exp()).sum("key"), "b": (e.s.exp() * e.t).sum("key")}

    q, k = _leaf(1, 2, 4, 3), torch.randn(1, 2, 5, 3, dtype=torch.float64)
    check(both, {"s": (q, k), "t": (q.detach(), k)}, impl=impl)


KINKS: dict[str, Function] = {
    "minimum": lambda e: torch.minimum(e.t, e.s),
    "maximum": lambda e: torch.maximum(e.t, e.s),
    "clamp": lambda e: e.t.clamp(0.0, 2.0) * e.s,
    "relu": lambda e: e.t.relu() * e.s,
    "abs": lambda e: (e.t - e.s).abs() + e.t.abs(),
}


@of_impls
@pytest.mark.parametrize("name", KINKS)
def test_ties_are_shared_as_autograd_does(name: str, impl: str) -> None:
    """Of small integers many elements tie, and many are at the bounds 0 and 2."""
    torch.manual_seed(3)
    a, b, c, d = torch.randint(-1, 2, (4, 1, 1, 6, 2)).double().requires_grad_().unbind(0)
    check(lambda e: KINKS[name](e).sum("key"), {"t": (a, b), "s": (c, d)}, impl=impl)


MASKS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"window": (1, 0)},
    "left only": {"window": (2, None)},
    "lengths": {"key_lengths": torch.tensor([4, 0])},
    "mask": {"mask": torch.tensor([True, False, True, True, False])},
    "all": {
        "is_causal": True,
        "key_lengths": torch.tensor([3, 5], dtype=torch.int32),
        "mask": torch.rand(2, 1, 7, 5, generator=torch.Generator().manual_seed(1)) > 0.4,
    },
}


@pytest.mark.parametrize("rows", [3, 7])  # more rows than keys: the first ones have none
@of_impls
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, impl: str, rows: int) -> None:
    """A divergence of a row without keys is 0, with gradients of 0, and its log-sum-exp -inf."""
    options = dict(MASKS[name])
    if name == "all":
        options["mask"] = options["mask"][:, :, :rows]

    def both(e: Any) -> Any:
        return {"kl": _kl(e), "lse": e.t.detach().logsumexp("key")}

    check(both, _maps(rows=rows), impl=impl, **options)


@of_impls
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_one_map_that_is_summed(name: str, impl: str) -> None:
    """One head without a batch has its gradients in the forward: 0 at keys that no row has."""
    options = dict(MASKS[name])
    for given in ("key_lengths", "mask"):
        if given in options:
            options[given] = options[given][:1]
    if name == "mask":
        options["mask"] = MASKS[name]["mask"]
    for rows, keys in ((7, 5), (5, 5), (3, 5)):
        torch.manual_seed(0)
        dots = {x: (_leaf(1, 1, rows, 3), _leaf(1, 1, keys, 3)) for x in "ts"}
        if name == "all":
            options["mask"] = MASKS[name]["mask"][:1, :, :rows]
        for reduction in ("sum", "mean"):
            check(_kl, dots, impl=impl, reduction=reduction, **options)


# ------------------------------------------------------------------------------------- numbers

# the shape of a result and its gradients do not depend on a number's value
NUMBERS: dict[str, Callable[[Any, float], Any]] = {
    "a coefficient": lambda e, a: a * e.t,
    "next to a mean of heads": lambda e, a: e.t.mean("head") + a * e.t,
    "a power": lambda e, a: e.t**a,
    "of keys alone": lambda e, a: e.key * (e.t**a),
    "two numbers": lambda e, a: torch.where(e.t > 0, a, 0.0),
    "of heads": lambda e, a: (a * e.t).sum("head") + e.shared,
    "a softmax": lambda e, a: (a * e.t).softmax("key") * e.key,
    "a mixture": lambda e, a: (a * e.t.softmax("key") + (1 - a) * e.s.softmax("key")) ** 2,
    "a bias": lambda e, a: e.s.mean("head") + a * e.row,
    "a divisor": lambda e, a: a / (e.t * e.t + 1),
    "clamped": lambda e, a: (a * e.t).clamp(-a, a).exp(),
    "a condition": lambda e, a: torch.where((a * e.t) >= 0, e.key, a),
    "nested": lambda e, a: e.t.softmax("key") * (a * e.s).softmax("key") * (a * 2),
    "a row value": lambda e, a: (a * e.t.sum("key") + e.key) * (a * e.t).sum("key"),
    "a mean of heads": lambda e, a: (a * e.t).mean("head").logsumexp("key") + e.shared,
    "of a sum": lambda e, a: a * e.t.logsumexp("key") + e.shared,
}


@of_impls
@pytest.mark.parametrize("value", [0.0, 1.0, 0.25, 0, 1])
def test_a_number(value: float, impl: str) -> None:
    """0 in a warm-up, 1 at its end."""
    for function in NUMBERS.values():
        check(
            lambda e, f=function: {"sum": f(e, value).sum("key"), "row": value * e.t.sum("key")},
            _maps(), impl=impl, **_captured(),
        )  # fmt: skip


def test_an_infinite_sum_times_zero() -> None:
    """0 next to an infinity is 0, for a number as for a tensor of numbers."""
    q, k = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 3, 2)
    for zero in (lambda e: 0.0, lambda e: e.zero):
        rows = row_program(
            lambda e, z=zero: z(e) * torch.where(e.t == 0, -math.inf, e.t).logsumexp("key"),
            dots={"t": (q, k)}, rows={"zero": torch.zeros(2)},
        )  # fmt: skip
        assert torch.equal(rows, torch.zeros(1, 1, 2))


def test_an_excluded_key_contributes_nothing() -> None:
    """Excluded on both sides by the scores themselves: P = S = 0, log P - log S = -inf + inf."""
    dots = _maps(keys=4)
    hidden = torch.tensor([True, False, False, True])[None, None, None]

    def kl(e: Any) -> Any:
        p, s = (torch.where(e.hide, -torch.inf, x).softmax("key") for x in (e.t, e.s))
        d = p.log() - s.log()
        return {"kl": (p * d).sum("key"), "squared": (p * (d * d)).sum("key"),
                "js": (p * (p.log() - (0.5 * p + 0.5 * s).log())).sum("key"),
                "power": (p**0.5 * s**0.5).sum("key")}  # fmt: skip

    kept = {n: (q, k[:, :, 1:3]) for n, (q, k) in dots.items()}
    leaves = [x for pair in dots.values() for x in pair]
    expected = check(kl, kept, impl="reference", pairs={"hide": hidden[..., 1:3]})
    for impl in ("reference", "torch"):
        got = row_program(kl, dots=dots, pairs={"hide": hidden}, impl=impl)
        for name, value in got.items():
            torch.testing.assert_close(value, expected[name])
            grads = (torch.autograd.grad(x[name].sum(), leaves, retain_graph=True)
                     for x in (got, expected))  # fmt: skip
            torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_scores(dtype: torch.dtype) -> None:
    q = torch.tensor([[1e4], [-1e4], [0.0]], dtype=dtype, requires_grad=True)
    w = torch.tensor([[1.0], [0.0], [-1.0], [0.5]], dtype=dtype, requires_grad=True)
    dots = {"s": (q, w), "t": (q.detach() * 0, w.detach())}
    rows = check(
        lambda e: {
            "lse": e.s.logsumexp("key"),
            "kl": ((p := e.t.softmax("key")) * (p.log() - e.s.log_softmax("key"))).sum("key"),
        },
        dots, rtol=1e-5, atol=1e-5,
    )  # fmt: skip
    assert all(x.isfinite().all() for x in rows.values())


# -------------------------------------------------------------------------------------- LM heads


@of_impls
def test_columns_and_positions_of_lm_heads(impl: str) -> None:
    """An id may stand twice, or be none; positions are those of the last dimension but one."""
    hidden, weight = _leaf(2, 2, 3), _leaf(6, 3)
    ids = torch.tensor([[0, 5, -1], [2, 2, 1], [-100, -1, 6], [3, 4, 5]]).view(2, 2, 3)

    def function(e: Any) -> Any:
        at = torch.where(e.key_index == e.row_index, e.s, 0.0)
        return {"columns": (e.v.exp() * e.s.log_softmax("key")).sum("key"),
                "positions": (e.row_index * at).sum("key") + at.sum("key")}  # fmt: skip

    columns = _leaf(2, 2, 3)
    check(function, {"s": (hidden, weight)}, impl=impl, columns={"v": (ids, columns)})
    # a program that reads positions is another one for another length
    flat = (x.reshape(4, 3) for x in (ids, columns))
    check(function, {"s": (hidden.flatten(0, 1), weight)}, columns={"v": tuple(flat)})


@of_impls
@pytest.mark.parametrize("shape", [(1, 2, 3), (2, 1, 3), (2, 2, 1), (1, 1, 1)])
def test_columns_broadcast(shape: tuple[int, ...], impl: str) -> None:
    values = _leaf(*shape, 4)
    ids = torch.randint(-1, 6, values.shape)
    check(lambda e: (e.v * e.t.softmax("key")).sum("key"), _maps(), impl=impl,
          columns={"v": (ids, values)})  # fmt: skip


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_no_rows_and_no_terms(reduction: str, impl: str) -> None:
    """A result without elements, a sum of 0 with gradients of 0, and torch's mean."""
    for shape in ((0, 2, 4, 3), (2, 2, 0, 3), (0, 3), (2, 0, 3)):
        dots = {"s": (_leaf(*shape), _leaf(*((shape[0], 1, 5, 3) if len(shape) == 4 else (5, 3))))}
        rows = {"w": _leaf(*shape[:-1])}
        check(
            lambda e: e.w * e.s.logsumexp("key"), dots, rows=rows, impl=impl, reduction=reduction
        )
    dots = {"s": (_leaf(2, 4, 3), _leaf(6, 3))}
    for terms in ((0.0, 0.0), (0.0, 2.0)):
        check(
            lambda e, c=terms: c[0] * e.s.logsumexp("key") ** 2 + c[1] * e.s.sum("key"),
            dots, impl=impl, reduction=reduction,
        )  # fmt: skip


# ------------------------------------------------------------------------------- programs as data


def _text(function: Function, dots: Any) -> str:
    seen: list[str] = []
    original = op.row_program

    def spy(tensors: Any, text: str, *rest: Any) -> Any:
        seen.append(text)
        return original(tensors, text, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "row_program", spy)
        row_program(function, dots=dots)
    return seen[0]


def test_what_computes_the_same_is_the_same_program() -> None:
    dots = _maps()

    def spelled(e: Any) -> Any:
        unused = e.t.tanh().sum("key")  # noqa: F841  # computed by nobody
        s, p = e.s - e.s.logsumexp("key"), e.t.softmax("key")
        return ((p.log() - s) * p).sum("key")

    text = _text(_kl, dots)
    assert _text(spelled, dots) == text
    assert _text(spelled, _maps(heads=4, rows=6)) == text  # sizes are no part of it
    assert _text(lambda e: (e.t.softmax("key") * (e.t - e.s)).sum("key"), dots) != text
    program = Program.of(text)
    assert Program.of(program.text) is program and program.levels == (1, 1, 2)
    # a term of weight 0 is not computed
    assert "exp" not in _text(lambda e: (e.t + 0.0 * e.t.exp()).sum("key"), dots)


@pytest.mark.parametrize("block", [None, 256])
def test_memory_is_bounded_by_blocks(block: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of rows and keys is made, in the forward or in the backward."""
    monkeypatch.undo()
    monkeypatch.setattr(torch_impl, "BLOCK_ELEMENTS", 4096)
    q, k = torch.randn(1, 1, 64, 4, requires_grad=True), torch.randn(1, 1, 2048, 4)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(
            self, f: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            out = f(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if isinstance(out, Tensor) else 0)
            return out

    with Sizes():
        options = {} if block is None else {"block": block}
        rows = row_program(
            lambda e: e.s.softmax("key").square().sum("key", **options), dots={"s": (q, k)}
        )
        rows.sum().backward()
    assert largest < 64 * 2048 / 8


def test_depth() -> None:
    """Fifty steps of a bisection, and products of products, are traced in time."""

    def bisect(e: Any) -> Any:
        low, high = e.low, e.high
        for _ in range(50):
            middle = 0.5 * (low + high)
            is_below = (e.s - middle).sigmoid().sum("key") > 2.0
            low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
        return (e.s - 0.5 * (low + high)).sigmoid().sum("key")

    def squares(e: Any) -> Any:
        p = e.s.softmax("key")
        for _ in range(50):
            p = p * p
        return p.log().sum("key")

    q, k = torch.randn(1, 1, 2, 3, requires_grad=True), torch.randn(1, 1, 6, 3)
    ends = {"low": torch.full((2,), -30.0), "high": torch.full((2,), 30.0)}
    start = time.perf_counter()
    rows = row_program(bisect, dots={"s": (q, k)}, rows=ends)
    rows.sum().backward()
    torch.testing.assert_close(rows, torch.full((1, 1, 2), 2.0))
    row_program(squares, dots={"s": (q, k)})
    assert time.perf_counter() - start < 20  # 2^50 steps would take years


# ---------------------------------------------------------------------------------- rest of torch


def test_a_jacobian_between_heads_is_refused_before_anything_runs() -> None:
    def kl(e: Any) -> Any:
        mean = e.t.softmax("key").mean("head")
        return (mean * (mean.log() - e.s.log_softmax("key"))).sum("key")

    def crossed(e: Any) -> Any:
        p = e.t.softmax("key")
        return (p * p.mean("head")).sum("key")

    dots = _maps()
    check(crossed, {n: (q.detach(), k.detach()) for n, (q, k) in dots.items()})
    for function in (kl, crossed):
        with pytest.raises(ValueError, match="sum over heads"):
            row_program(function, dots=dots)


def test_a_compiled_step_calls_it_between_two_graphs() -> None:
    dots = _maps()

    def step(scale: Tensor, q: Tensor, k: Tensor) -> Tensor:
        rows = row_program(lambda e: e.t.logsumexp("key"), dots={"t": (q * scale, k)})
        return (rows * scale).sum()

    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    inputs = (scale, dots["s"][0], dots["s"][1])
    values = [f(*inputs) for f in (step, torch.compile(step, backend="aot_eager"))]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*(torch.autograd.grad(x, inputs) for x in values))


def test_transforms_of_torch_func() -> None:
    """What errors advise works: first and second derivatives, forward mode, vmap of them."""
    q, k = (torch.randn(1, 2, n, 3, dtype=torch.float64) for n in (3, 4))

    def ours(q: Tensor) -> Any:
        def f(e: Any) -> Any:
            return ((p := e.t.log_softmax("key")).exp() * p / (e.t**2 + 1)).sum("key")

        return row_program(f, dots={"t": (q, k)}, impl="reference").sum()

    def naive(q: Tensor) -> Tensor:
        p = (x := q @ k.mT).log_softmax(-1)
        return (p.exp() * p / (x**2 + 1)).sum()

    many = torch.stack([q, 2 * q])
    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
        torch.testing.assert_close(transform(ours)(q), transform(naive)(q))
    mapped = (torch.func.vmap(torch.func.grad(f))(many) for f in (ours, naive))
    torch.testing.assert_close(*mapped)


def test_batched_gradients_of_a_compiled_step() -> None:
    """``is_grads_batched=True`` of a row program in a graph; a call of its own refuses it."""
    q, k, a, b = (torch.randn(1, 2, n, 3, dtype=torch.float64) for n in (3, 4, 3, 4))
    a.requires_grad_()
    given = torch.randn(3, 1, 2, 3, dtype=torch.float64)

    def step(q: Tensor, k: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (((q @ k.mT).softmax(-1) - (a @ b.mT).softmax(-1)).abs() ** 1.5).sum(-1)

    with backend.collected() as report:
        rows = compile_rewritten(step, inner="aot_eager")(q, k, a, b)
    assert report.num_fused == 1
    found = [
        torch.autograd.grad(x, a, given, is_grads_batched=True)[0]
        for x in (rows, step(q, k, a, b))
    ]
    torch.testing.assert_close(*found)
    own = row_program(lambda e: (e.s**3).sum("key"), dots={"s": (a, b)})
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(own, a, given, is_grads_batched=True)
