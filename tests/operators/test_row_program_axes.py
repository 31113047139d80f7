"""The shape of a row program's result and its gradients do not depend on a number's value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_streamkl import row_program
from torch_streamkl.rows.problem import RowProblem

IMPLS = ("reference", "torch")
B, H, N, K = 2, 3, 5, 7
CASES: dict[str, Callable[[Any, float], Any]] = {
    "a coefficient": lambda e, a: (a * e.t).sum("key"),
    "of a sum": lambda e, a: a * e.t.logsumexp("key"),
    "next to a mean of heads": lambda e, a: (e.t.mean("head") + a * e.t).sum("key"),
    "a power": lambda e, a: (e.t**a).sum("key"),
    "of keys alone": lambda e, a: (e.w * (e.t**a)).sum("key"),
    "two numbers": lambda e, a: torch.where(e.t > 0, a, 0.0).sum("key"),
    "of heads": lambda e, a: (a * e.t).sum("head").sum("key") + e.w.sum("key"),
    "a mean of heads": lambda e, a: (a * e.t).mean("head").logsumexp("key"),
    "a softmax": lambda e, a: ((a * e.t).softmax("key") * e.w).sum("key"),
    "a mixture": lambda e, a: (
        (m := a * e.t.softmax("key") + (1 - a) * e.s.softmax("key")) * m
    ).sum("key"),
    "a bias": lambda e, a: (e.s.mean("head") + a * e.row).sum("key"),
    "a divisor": lambda e, a: (a / (e.t * e.t + 1)).sum("key"),
    "clamped": lambda e, a: (a * e.t).clamp(-a, a).exp().sum("key"),
    "a condition": lambda e, a: torch.where((a * e.t) >= 0, e.w, a).sum("key"),
    "nested": lambda e, a: (e.t.softmax("key") * (a * e.s).softmax("key")).sum("key") * (a * 2),
    "a row value": lambda e, a: (a * e.t.sum("key") + e.w).sum("key") * (a * e.t).sum("key"),
}


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, N, 4), (B, H, K, 4), (B, H, N, 2), (B, 1, K, 2), (B, 1, K), (B, H, N)]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]


class _Naive:
    """A tensor of elements with names for its axes."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            dims = {"key": -1, "head": 1}
            given = [dims.get(a, a) if isinstance(a, str) else _plain(a) for a in args]
            if name in ("sum", "mean", "logsumexp"):
                x = self.x.expand(*self.x.shape[:-1], K) if given == [-1] else self.x
                return _Naive(getattr(x, name)(*given, keepdim=True))
            return _Naive(getattr(self.x, name)(*given))

        return call

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _Naive(f(*map(_plain, args), **(kwargs or {})))


def _plain(x: Any) -> Any:
    return x.x if isinstance(x, _Naive) else x


for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "pow",
    "gt",
    "ge",
):
    setattr(
        _Naive,
        f"__{_name}__",
        lambda self, other, n=f"__{_name}__": _Naive(getattr(self.x, n)(_plain(other))),
    )


class _Names:
    def __init__(self, **values: Tensor) -> None:
        self.__dict__.update({name: _Naive(x) for name, x in values.items()})


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.25, 0, 1])
def test_a_number(value: float, impl: str) -> None:
    """0 in a warm-up, 1 at its end: shapes, values and gradients are the tensors' code's."""
    wrong = []
    for name, function in CASES.items():
        inputs = _inputs()
        tq, tk, sq, sk, w, row = inputs
        got = row_program(
            lambda e, f=function: f(e, value),
            dots={"t": (tq, tk), "s": (sq, sk)}, keys={"w": w}, rows={"row": row}, impl=impl,
        )  # fmt: skip
        x = _Names(t=tq @ tk.mT, s=sq @ sk.mT, w=w[:, :, None], row=row[..., None])
        expected = function(x, value).x.expand(B, -1, N, 1)[..., 0]
        if got.shape != expected.shape:
            wrong.append(f"{name}: {tuple(got.shape)}, torch {tuple(expected.shape)}")
            continue
        grads = [
            torch.autograd.grad(v.sum(), inputs, allow_unused=True)
            if v.requires_grad
            else (None,) * len(inputs)
            for v in (got, expected)
        ]
        assert got.requires_grad and None not in grads[0], name
        pairs = [(got, expected), *zip(*grads, strict=True)]
        for i, (a, b) in enumerate(pairs):
            b = torch.zeros_like(a) if b is None else b.double()
            if not torch.allclose(a, b, rtol=1e-10, atol=1e-11, equal_nan=True):
                wrong.append(f"{name}, tensor {i}: off by {(a - b).abs().max():g}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_of_lm_heads(reduction: str) -> None:
    """A loss whose one term has the weight 0 is that of the other, and of nothing it is 0."""
    generator = torch.Generator().manual_seed(1)
    h, w = (torch.randn(s, generator=generator, requires_grad=True) for s in ((2, 4, 3), (6, 3)))
    for terms, expected in (((0.0, 0.0), 0.0), ((0.0, 2.0), None)):
        loss = row_program(
            lambda e, c=terms: c[0] * e.s.logsumexp("key") ** 2 + c[1] * e.s.sum("key"),
            dots={"s": (h, w)},
            reduction=reduction,
        )
        rows = 2.0 * (h @ w.T).sum(-1) if expected is None else torch.zeros(2, 4)
        want = {"none": rows, "sum": rows.sum(), "mean": rows.mean()}[reduction]
        torch.testing.assert_close(loss, want)
        loss.sum().backward()
        if expected == 0.0:
            assert not h.grad.any() and not w.grad.any()


def test_one_of_several_results_is_a_number() -> None:
    tq, tk, *_ = _inputs()
    rows = row_program(
        lambda e: {"none": 0.0 * e.t.logsumexp("key"), "lse": e.t.logsumexp("key")},
        dots={"t": (tq, tk)},
    )
    assert rows["none"].shape == rows["lse"].shape == (B, H, N)
    rows["none"].sum().backward()
    assert not tq.grad.any() and not tk.grad.any()


def test_an_infinite_sum_times_zero() -> None:
    """0 next to an infinity is 0, for a number as for a tensor of numbers."""
    q, k = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 3, 2)
    for function in (
        lambda e: 0.0 * torch.where(e.t == 0, -math.inf, e.t).logsumexp("key"),
        lambda e: e.zero * torch.where(e.t == 0, -math.inf, e.t).logsumexp("key"),
    ):
        rows = row_program(function, dots={"t": (q, k)}, rows={"zero": torch.zeros(2)})
        assert torch.equal(rows, torch.zeros(1, 1, 2))


def test_heads_of_results() -> None:
    """They are the most of what a value is computed from, and 1 after a sum over heads."""
    tq, tk, sq, sk, w, row = (x.detach() for x in _inputs())

    def shapes(e: Any) -> Any:
        return {
            "heads": e.t.sum("key"), "summed": e.t.sum("head").sum("key"), "keys": e.w.sum("key"),
            "of rows": e.row * e.w.sum("key"), "back": (e.t.mean("head") * e.s).sum("key"),
        }  # fmt: skip

    dots, given = {"t": (tq, tk), "s": (sq, sk)}, {"keys": {"w": w}, "rows": {"row": row}}
    got = row_program(shapes, dots=dots, **given)
    heads = {name: x.shape[1] for name, x in got.items()}
    assert heads == {"heads": H, "summed": 1, "keys": 1, "of rows": H, "back": H}


def test_programs_do_not_keep_what_a_number_removes() -> None:
    """A term of weight 0 is not computed."""
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    texts: list[str] = []
    of = RowProblem.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            RowProblem, "of", staticmethod(lambda text, x: texts.append(text) or of(text, x))
        )
        row_program(lambda e: (e.t + 0.0 * e.t.exp()).sum("key"), dots={"t": (q, k)})
    assert all("exp" not in text for text in texts)
