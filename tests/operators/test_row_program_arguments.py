"""Every argument of `row_program` with values that it cannot have: errors name the argument.

And what is legal and was not: batches that select no row, autocast, transforms of torch.func.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_streamkl import row_program
from torch_streamkl.fx_passes import backend
from torch_streamkl.rows import interface

X = torch.ones(2, 4, 6, 8)
HEAD = {"s": (torch.ones(2, 3, 5), torch.ones(7, 5))}


def _square(e: Any) -> Any:
    return (e.s * e.s).sum("key")


NESTED = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
ANYTHING: list[Any] = [
    1, 1.5, True, "key", b"key", [1.0], (1,), (1, 2, 3), (1.5, 2), {"a": 1}, {1: X}, {"_a": X},
    {"s": None}, {"w": [X]}, {"w": X.to(torch.complex64)}, {"w": (X, X, X)}, {"w": ()}, object(),
    X, X > 0, X.int(), X.to_sparse(), NESTED, {"w": X.to_sparse()}, {"w": NESTED}, {"w": "a"},
    {"s": (NESTED, X)}, {"s": (X.to_sparse(), X)}, {"s": (X, X, X)}, {"s": [X, X]}, math.nan,
    torch.float32, len, lambda e: e.s, lambda: 0,
]  # fmt: skip
LEGAL: dict[str, Callable[[Any], bool]] = {
    "is_causal": lambda x: x is True,
    "mask": lambda x: False,
    "impl": lambda x: False,
    "function": lambda x: False,
}


@pytest.mark.parametrize("argument", inspect.signature(row_program).parameters)
def test_wrong_types(argument: str) -> None:
    """TypeError, ValueError or NotImplementedError, with the argument or a name in it."""
    wrong = []
    for value in (*ANYTHING, None):
        given: dict[str, Any] = {"function": _square, "dots": {"s": (X, X)}, argument: value}
        names = [argument, *(map(str, value) if isinstance(value, dict) else [])]
        try:
            row_program(**given)
        except (TypeError, ValueError, NotImplementedError) as error:
            text = str(error)
            if argument not in ("function", "dots") and not any(n in text for n in names):
                wrong.append(f"{value!r:.60}: {text}")
            if "NoneType' object" in text or "attribute" in text or "unpack" in text:
                wrong.append(f"{value!r:.60}: {text}")
        except Exception as error:
            wrong.append(f"{value!r:.60}: {type(error).__name__}: {error}")
        else:
            optional = inspect.signature(row_program).parameters[argument].default
            if value is not optional and not LEGAL.get(argument, lambda x: False)(value):
                wrong.append(f"{value!r:.60}: accepted")
    assert not wrong, f"{argument}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_causal", True), ("window", (1, 0)),
        ("mask", torch.ones(7) > 0), ("key_lengths", torch.tensor([7])),
    ],
)  # fmt: skip
def test_what_an_lm_head_has_none_of(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}.*the vocabulary of an LM head has none"):
        row_program(_square, dots=HEAD, **{name: value})


WRONG_CALLS: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "an argument": (lambda e: e.t.exp(base=2), TypeError, "exp of an element.*'base'"),
    "out": (lambda e: torch.exp(e.t, out=torch.ones(1)), TypeError, "exp of an element.*'out'"),
    "dtype": (lambda e: F.softmax(e.t, "key", dtype=torch.float64), TypeError, "softmax.*'dtype'"),
    "in place": (lambda e: F.relu(e.t, inplace=True), TypeError, "relu.*'inplace'"),
    "a rounding": (lambda e: torch.div(e.t, 2, rounding_mode="up"), ValueError, "rounding_mode"),
    "beta": (lambda e: F.softplus(e.t, beta=0), ValueError, "beta of softplus"),
    "no bound": (lambda e: e.t.clamp(), TypeError, "clamp"),
    "too many": (lambda e: e.t.minimum(e.s, e.s), TypeError, "minimum of an element takes"),
    "too few": (lambda e: e.t.add(), TypeError, "add of an element.*'other'"),
    "softmax": (
        lambda e: e.t.softmax(-1),
        ValueError,
        '^softmax of an element must be over "key"',
    ),
    "heads": (lambda e: e.t.log_softmax("head"), ValueError, "^log_softmax of an element"),
    "two axes": (lambda e: e.t.sum("key", dim="head"), TypeError, "sum of an element"),
    "a vocabulary entry": (lambda e: e.t * "2", TypeError, "elements combine with .* got str"),
    "a complex number": (lambda e: e.t * 2j, TypeError, "got complex"),
    "NaN": (lambda e: e.t + math.nan, ValueError, "no NaN constants"),
    "a base": (lambda e: (-2.0) ** e.t, ValueError, "base of a power"),
    "a huge integer": (lambda e: e.t + (1 << 60), ValueError, "2\\^53"),
    "alpha": (lambda e: e.t.add(e.s, alpha="2"), TypeError, "for alpha"),
    "minus a condition": (lambda e: 1 - (e.t > 0), TypeError, "sub takes numbers"),
    "a negative power": (lambda e: e.key_index**-1, ValueError, "no negative powers"),
    "bits": (lambda e: e.key_index & 1, TypeError, "& takes conditions"),
    "a maximum": (lambda e: e.t.max("key"), NotImplementedError, "cannot express max"),
    "a matmul": (lambda e: e.t @ e.s, TypeError, "@"),
    "an item": (lambda e: e.t[0], TypeError, "subscriptable"),
    "a loop": (lambda e: sum(x for x in e.t), TypeError, "iterable"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_arguments_of_operations(name: str) -> None:
    function, kind, match = WRONG_CALLS[name]
    with pytest.raises(kind, match=match):
        row_program(lambda e: function(e).sum("key"), dots={"t": (X, X), "s": (X, X)})


def test_kernels_need_a_gpu() -> None:
    with pytest.raises(NotImplementedError, match="impl='triton' must have tensors on a GPU"):
        row_program(_square, dots={"s": (X, X)}, impl="triton")


# ---------------------------------------------------------------------------------- what is legal


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize("shape", [(0, 2, 4, 3), (2, 2, 0, 3), (0, 3), (2, 0, 3)])
def test_no_rows(shape: tuple[int, ...], impl: str) -> None:
    """A result without elements, a sum of 0 with gradients of 0, and torch's mean."""
    keys = (shape[0], 1, 5, 3) if len(shape) == 4 else (5, 3)
    q, k = (torch.ones(s, requires_grad=True) for s in (shape, keys))
    w = torch.ones(shape[:-1], requires_grad=True)
    for reduction in ("none", "sum", "mean"):
        got = row_program(
            lambda e: e.w * e.t.logsumexp("key"),
            dots={"t": (q, k)}, rows={"w": w}, reduction=reduction, impl=impl,
        )  # fmt: skip
        rows = w * (q @ k.mT).logsumexp(-1)
        expected = {"none": rows, "sum": rows.sum(), "mean": rows.mean()}[reduction]
        torch.testing.assert_close(got, expected, equal_nan=True)
        for a, b in zip(
            *(torch.autograd.grad(x.sum(), (q, k, w)) for x in (got, expected)), strict=True
        ):
            torch.testing.assert_close(a, b)


def test_autocast() -> None:
    """Operands are what a matmul makes of them; values and sums stay in float32."""
    torch.manual_seed(0)
    h, w = torch.randn(6, 8, requires_grad=True), torch.randn(9, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = row_program(lambda e: e.s.logsumexp("key"), dots={"s": (h, w.bfloat16())})
    logits = h.bfloat16().float() @ w.bfloat16().float().mT
    torch.testing.assert_close(got, logits.logsumexp(-1))
    (grad,) = torch.autograd.grad(got.sum(), h)
    assert grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        double = row_program(lambda e: e.s.sum("key"), dots={"s": (h.double(), w.double())})
    assert double.dtype == torch.float64


def test_transforms_of_torch_func() -> None:
    """What the error advises works: first and second derivatives, forward mode, vmap of them."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, 2, n, 3, dtype=torch.float64) for n in (3, 4))

    def ours(q: Tensor, impl: str = "reference") -> Any:
        def f(e: Any) -> Any:
            return ((p := e.t.log_softmax("key")).exp() * p / (e.t**2 + 1)).sum("key")

        return row_program(f, dots={"t": (q, k)}, impl=impl).sum()

    def naive(q: Tensor) -> Tensor:
        p = (x := q @ k.mT).log_softmax(-1)
        return (p.exp() * p / (x**2 + 1)).sum()

    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
        torch.testing.assert_close(transform(ours)(q), transform(naive)(q))
    many = torch.stack([q, 2 * q])
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(ours))(many), torch.func.vmap(torch.func.grad(naive))(many)
    )
    with pytest.raises(NotImplementedError, match="impl='reference'"):
        torch.func.grad(lambda q: ours(q, "torch"))(q)


def test_vmap_is_refused() -> None:
    mask = torch.ones(3, 6, 6) > 0
    for over in (lambda m: row_program(_square, dots={"s": (X, X)}, mask=m),):
        with pytest.raises(NotImplementedError, match="vmap over row_program"):
            torch.func.vmap(over)(mask)


def test_batched_gradients_of_a_compiled_step() -> None:
    """``is_grads_batched=True`` of a row program in a graph; a call of its own refuses it."""
    torch.manual_seed(0)
    q, k, a, b = (torch.randn(1, 2, n, 3, dtype=torch.float64) for n in (3, 4, 3, 4))
    a.requires_grad_()
    given = torch.randn(3, 1, 2, 3, dtype=torch.float64)

    def step(q: Tensor, k: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (((q @ k.mT).softmax(-1) - (a @ b.mT).softmax(-1)).abs() ** 1.5).sum(-1)

    options = {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0}
    with backend.collected() as report:
        rows = torch.compile(step, backend="streamkl", options=options)(q, k, a, b)
    assert report.num_fused == 1
    found = [
        torch.autograd.grad(x, a, given, is_grads_batched=True)[0]
        for x in (rows, step(q, k, a, b))
    ]
    torch.testing.assert_close(*found)
    own = row_program(lambda e: (e.s**3).sum("key"), dots={"s": (a, b)})
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(own, a, given, is_grads_batched=True)


def test_positions() -> None:
    """Of keys, and of rows in their sequence: that of an LM head's last dimension but one."""
    seen = torch.arange(3.0)

    def first(e: Any) -> Any:
        return torch.where(e.key_index == e.row_index, e.s, 0.0).sum("key")

    hidden, weight = torch.eye(3).expand(2, 3, 3).contiguous(), torch.diag(seen + 1)
    assert torch.equal(row_program(first, dots={"s": (hidden, weight)}), (seen + 1).expand(2, 3))
    flat = row_program(
        lambda e: e.row_index * e.s.sum("key"), dots={"s": (hidden.flatten(0, 1), weight)}
    )
    assert torch.equal(flat, torch.arange(6.0) * (seen + 1).repeat(2))
    q = torch.ones(2, 1, 3, 1)
    rows = row_program(lambda e: e.row_index * e.s.sum("key"), dots={"s": (q, q[:, :, :1])})
    assert torch.equal(rows, seen.expand(2, 1, 3))
    # a program that reads it is another one for another length
    other = row_program(first, dots={"s": (torch.eye(3)[None, :2], weight)})
    assert torch.equal(other, torch.tensor([[1.0, 2.0]]))


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


GLOBAL = 1.0


class _Helper:
    pass


def test_attributes_named_as_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a function may depend on is in its key, or it is traced in every call."""
    monkeypatch.setattr(interface, "_known", {})

    def scale(x: Any) -> Any:
        return x

    numbers, settings = [2.0], {"mul": 2.0}
    helper = _Helper()
    makers: dict[str, tuple[Callable[[Any], Any], Callable[[float], None]]] = {
        "a function's attribute": (
            lambda e: (scale(e.s) * scale.mul).sum("key"),
            lambda v: setattr(scale, "mul", v),
        ),
        "an object's": (
            lambda e: (e.s * helper.exp).sum("key"), lambda v: setattr(helper, "exp", v)
        ),
        "a class's": (
            lambda e: (e.s * _Helper.log).sum("key"), lambda v: setattr(_Helper, "log", v)
        ),
        "a list": (lambda e: (e.s * numbers[0]).sum("key"), lambda v: numbers.__setitem__(0, v)),
        "a dict": (
            lambda e: (e.s * settings["mul"]).sum("key"), lambda v: settings.__setitem__("mul", v)
        ),
    }  # fmt: skip
    defaults = lambda e, c=numbers: (e.s * c[0]).sum("key")  # noqa: E731
    makers["a default"] = (defaults, lambda v: numbers.__setitem__(0, v))
    plain = lambda e, c=2.0: (e.s * c).sum("key")  # noqa: E731
    makers["a default's value"] = (plain, lambda v: setattr(plain, "__defaults__", (v,)))
    makers["a global"] = (
        lambda e: (e.s * GLOBAL).sum("key"),
        lambda v: globals().__setitem__("GLOBAL", v),
    )
    for name, (function, change) in makers.items():
        for value in (2.0, 3.0):
            change(value)
            got = row_program(function, dots={"s": (X, X)})
            assert torch.equal(got, torch.full((2, 4, 6), 48.0 * value)), (name, value)
