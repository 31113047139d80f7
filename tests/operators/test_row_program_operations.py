"""Every operation of row programs, in each of its spellings, against torch on the same numbers.

A spelling is one function of x and y that runs on elements and on tensors alike. The numbers are
infinities, NaN, 0, 1, negative and ordinary ones, and all pairs of them; types are torch's, too.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.interpreter import inside, outside, quiet
from torch_streamkl import row_program
from torch_streamkl.program.masks import Keys
from torch_streamkl.program.operations import OPERATIONS
from torch_streamkl.program.walks import walk
from torch_streamkl.rows import functions
from torch_streamkl.rows.elements import ALIASES, FUNCTIONS, Element
from torch_streamkl.rows.functions import COMPARISONS, OPERATORS
from torch_streamkl.rows.program import PAIR, Capture
from torch_streamkl.rows.trace import Tracer

INF, NAN = math.inf, math.nan
NUMBERS = [-INF, -30.0, -2.5, -1.0, -0.25, 0.0, 0.25, 0.5, 1.0, 2.0, 3.5, 30.0, INF, NAN]
CONSTANTS = [0.0, 1.0, 2.0, -1.0, 0.5, 3, INF, -INF]
Spelling = Callable[[Any, Any], Any]

# ------------------------------------------------------------------------------- the spellings

OF_X = {
    name: [lambda x, y, n=name: getattr(x, n)(), lambda x, y, n=name: getattr(torch, n)(x)]
    for name in (*functions.UNARY, "square", "sign", "rsqrt", "reciprocal", "log2", "log10",
                 "isnan", "isinf", "isfinite", "logical_not")
    if name != "float"
}  # fmt: skip
OF_X["float"] = [lambda x, y: x.float() if isinstance(x, Element) else x.to(torch.float64)]
OF_X["abs"] += [lambda x, y: abs(x), lambda x, y: torch.absolute(x)]
OF_X["neg"] += [lambda x, y: -x, lambda x, y: +x]
OF_X["softplus"] = [
    lambda x, y: F.softplus(x),
    lambda x, y: F.softplus(x, beta=2.0),
    lambda x, y: F.softplus(x, 0.5, 3),
    lambda x, y: F.softplus(x, threshold=1.0),
]
OF_X["logsigmoid"] = [lambda x, y: F.logsigmoid(x)]
OF_X["sigmoid"] += [lambda x, y: torch.special.expit(x), lambda x, y: F.sigmoid(x)]
OF_X["relu"] += [lambda x, y: F.relu(x)]
OF_X["pow"] = [
    lambda x, y, n=n: x**n for n in (0, 1, 2, 3, 4, -1, -2, -3, 0.0, 0.5, 1.5, -0.5, 2.0, 5)
]
OF_X["pow"] += [lambda x, y: torch.pow(x, 2.5), lambda x, y: torch.pow(x, torch.tensor(3.0))]
OF_X["rpow"] = [
    lambda x, y: 2**x, lambda x, y: 0.5**x, lambda x, y: 10.0**x, lambda x, y: 1**x,
    lambda x, y: torch.pow(3.0, x), lambda x, y: torch.tensor(2.0, dtype=torch.float64) ** x,
]  # fmt: skip
OF_X["clamp"] = [
    lambda x, y: x.clamp(-1.0, 1.0), lambda x, y: torch.clamp(x, min=0.0),
    lambda x, y: x.clip(max=2), lambda x, y: x.clamp(0.5, INF),
]  # fmt: skip
OF_X["clamp_min"] = [lambda x, y: x.clamp_min(-1.0), lambda x, y: torch.clamp_min(x, 0.5)]
OF_X["clamp_max"] = [lambda x, y: x.clamp_max(-1.0), lambda x, y: torch.clamp_max(x, 0.5)]
for _special in ("expm1", "exp2", "erf", "log1p"):
    OF_X[_special] += [lambda x, y, n=_special: getattr(torch.special, n)(x)]

INFIX = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "floor_divide": operator.floordiv, "remainder": operator.mod, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq,
    "ne": operator.ne,
}  # fmt: skip


def _with_numbers(f: Callable[[Any, Any], Any]) -> Iterator[Spelling]:
    yield lambda x, y: f(x, y)
    for number in CONSTANTS:
        yield lambda x, y, n=number: f(x, n)


OF_TWO: dict[str, list[Spelling]] = {}
for _name in ("add", "sub", "mul", "div", "floor_divide", "remainder", *COMPARISONS):
    OF_TWO[_name] = [*_with_numbers(INFIX[_name]), *_with_numbers(getattr(torch, _name))]
    OF_TWO[_name] += [lambda x, y, f=INFIX[_name], n=n: f(n, x) for n in CONSTANTS]
    OF_TWO[_name] += [lambda x, y, n=_name: getattr(x, n)(y)]
OF_TWO["add"] += [lambda x, y: torch.add(x, y, alpha=2), lambda x, y: x.add(3.0, alpha=0.5)]
OF_TWO["sub"] += [
    lambda x, y: torch.sub(x, y, alpha=2), lambda x, y: x.subtract(y, alpha=0.5),
    lambda x, y: 1.0 - x, lambda x, y: torch.tensor(2.0, dtype=torch.float64) - x,
]  # fmt: skip
OF_TWO["rsub"] = [
    lambda x, y: torch.rsub(x, y), lambda x, y: torch.rsub(x, 2.0),
    lambda x, y: torch.rsub(x, y, alpha=3), lambda x, y: torch.rsub(x, 1.0, alpha=2),
]  # fmt: skip
for _mode in ("floor", "trunc", None):
    OF_TWO["div"] += [
        lambda x, y, m=_mode: torch.div(x, y, rounding_mode=m),
        lambda x, y, m=_mode: x.div(0.3, rounding_mode=m),
    ]
OF_TWO["div"] += [lambda x, y: 1 / x, lambda x, y: torch.true_divide(y, x)]
OF_TWO["mul"] += [lambda x, y: torch.tensor(3.0, dtype=torch.float64) * x, lambda x, y: x * x]
for _name in ("minimum", "maximum", "logaddexp"):
    OF_TWO[_name] = [
        lambda x, y, n=_name: getattr(torch, n)(x, y), lambda x, y, n=_name: getattr(x, n)(y),
        lambda x, y, n=_name: getattr(torch, n)(y, x),
        lambda x, y, n=_name: getattr(torch, n)(x, x),
    ]  # fmt: skip
OF_TWO["clamp"] = [lambda x, y: torch.clamp(x, min=y), lambda x, y: torch.clamp(x, max=y)]
OF_TWO["xlogy"] = [
    lambda x, y: torch.xlogy(x, y), lambda x, y: torch.xlogy(0.0, y), lambda x, y: x.xlogy(2.0),
    lambda x, y: torch.special.xlogy(2, y),
]  # fmt: skip
OF_TWO["where"] = [
    lambda x, y: torch.where(x > y, x, y), lambda x, y: torch.where(x > 0, x, 0.0),
    lambda x, y: torch.where(y == y, -INF, x), lambda x, y: x.where(x < y, 3),
    lambda x, y: torch.where(x != y, 2.0, 2.0),
]  # fmt: skip
OF_TWO["masked_fill"] = [
    lambda x, y: x.masked_fill(y > 0, -INF), lambda x, y: torch.masked_fill(x, x.isnan(), 0.0),
]  # fmt: skip
BITWISE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
for _name in BITWISE:
    OF_TWO[f"logical_{_name}"] = [
        lambda x, y, n=f"logical_{_name}": getattr(torch, n)(x, y),
        lambda x, y, n=f"logical_{_name}": getattr(x, n)(y > 0),
    ]
    OF_TWO[f"bitwise_{_name}"] = [
        lambda x, y, f=BITWISE[_name]: f(x > 0, y < 1),
        lambda x, y, n=f"bitwise_{_name}": getattr(torch, n)(x > 0, y < 1),
        lambda x, y, f=BITWISE[_name]: f(x > 0, True),
        lambda x, y, f=BITWISE[_name]: f(False, x > 0),
    ]
OF_TWO["bitwise_not"] = [lambda x, y: ~(x > y), lambda x, y: torch.bitwise_not(x > y)]
TESTED = {**OF_X, **{n: [*OF_X.get(n, []), *s] for n, s in OF_TWO.items()}}
OVER_AXES = {"sum", "mean", "logsumexp", "softmax", "log_softmax"}  # test_over_keys_and_heads
# nodes that rules and simplifications make of others
INSIDE = {"mul0", "div0", "log_div", "norm", "int", "float"}
INSIDE |= {"isnan", "isinf"}  # of the rewrite


def test_every_operation_is_tested() -> None:
    """An operation or a spelling without a case here fails."""
    assert set(TESTED) | OVER_AXES | {"where_self"} == set(FUNCTIONS)
    assert set(ALIASES.values()) <= set(FUNCTIONS)
    assert set(OPERATORS.values()) <= set(FUNCTIONS)
    tracer = _tracer()
    x, y = (Element(tracer, tracer.capture(i)) for i in (0, 1))
    made = [spelling(x, y)._node for spelling in itertools.chain(*TESTED.values())]
    assert {n.op for n in walk(made)} & set(OPERATIONS) >= set(OPERATIONS) - INSIDE


def _tracer(*dtypes: str) -> Tracer:
    captures = tuple(Capture(PAIR, dtype, 0) for dtype in dtypes or ("float", "float"))
    return Tracer((1,), captures, Keys(), {1: 2})


# ------------------------------------------------------------------------------ values, gradients


def _numbers(is_pair: bool, dtype: torch.dtype) -> list[Tensor]:
    pairs = list(itertools.product(NUMBERS, NUMBERS if is_pair else [1.0]))
    x, y = torch.tensor(pairs, dtype=dtype).unbind(1)
    # kernels have no gradients to pairs
    return [x.clone().requires_grad_(), y.clone().requires_grad_(dtype == torch.float64)]


def _program(spelling: Spelling, x: Tensor, y: Tensor, place: str, impl: str) -> Tensor:
    """Of one key, with x a dot product with 1, a tensor of rows or of pairs, and y of pairs."""
    one = torch.ones(1, 1, 1, 1, dtype=x.dtype)
    dots = {
        "dot": (x[None, None, :, None] if place == "dot" else one.expand(1, 1, len(x), 1), one)
    }
    rows = {"row": x[None, None]} if place == "row" else {}
    pairs = {"y": y[None, None, :, None]} | (
        {"pair": x[None, None, :, None]} if place == "pair" else {}
    )
    # a number of a comparison is what its sum is
    value = row_program(
        lambda e: spelling(getattr(e, place), e.y).sum("key"),
        dots=dots, rows=rows, pairs=pairs, impl=impl,
    )  # fmt: skip
    return value.flatten()


def _gradients(value: Tensor, inputs: list[Tensor]) -> Any:
    if not value.requires_grad:
        return None, None
    try:
        learned = [x for x in inputs if x.requires_grad]
        found = torch.autograd.grad(value.sum(), learned, allow_unused=True)
        return (*found, *[None] * (len(inputs) - len(learned)))
    except RuntimeError as error:  # torch's, of a quotient that is rounded down
        if "not implemented" not in str(error):
            raise
        return NotImplemented, NotImplemented


def _differences(name: str, spelling: Spelling, place: str, impl: str) -> str:
    """What is not torch's, empty if nothing is."""
    is_kernel = impl == "triton"
    dtype = torch.float32 if is_kernel else torch.float64
    rtol = 2e-5 if is_kernel else 1e-11
    inputs = _numbers(name in OF_TWO, dtype)
    got = _program(spelling, *inputs, place, impl)
    expected = torch.as_tensor(spelling(*inputs)).to(dtype)
    x, y = (t.detach() for t in inputs)
    # a product is 0 if a factor is, also with an infinity or NaN (docs/guide/row-programs.md)
    has_zero = (x == 0) | (y == 0) | (float(spelling(torch.tensor(2.0), torch.tensor(3.0))) == 0)
    if name == "xlogy":
        has_zero |= y == 1
    is_zero = has_zero & expected.isnan() & (got == 0)
    assert not is_zero.any() or name in ("mul", "xlogy")
    is_right = torch.isclose(got, expected, rtol=rtol, atol=rtol / 10, equal_nan=True) | is_zero
    if name == "pow":  # torch has roots of -inf, which are NaN, and powers, which are not
        is_right |= (x == -INF) & is_kernel
    wrong = [("value", got, expected, ~is_right)]
    grads = [_gradients(got, inputs), _gradients(expected, inputs)]
    for which, a, b in zip("xy", *grads, strict=True):
        if b is NotImplemented:
            continue
        if is_kernel and which == "y":
            continue
        a = torch.zeros_like(x) if a is None else a
        b = torch.zeros_like(x) if b is None else b
        # where torch's formula has no number, ours may have one
        is_right = torch.isclose(a, b, rtol=rtol, atol=rtol / 10) | b.isnan()
        wrong.append((f"gradient to {which}", a, b, ~is_right))
    lines = []
    for what, a, b, places in wrong:
        for i in places.nonzero().flatten().tolist()[:3]:
            lines.append(f"{what} at {x[i]:g}, {y[i]:g}: {a[i]:.17g}, torch {b[i]:.17g}")
    return "; ".join(lines)


@outside
@pytest.mark.parametrize(
    ("impl", "place"), [("torch", "pair"), ("torch", "dot"), ("reference", "row")]
)
def test_numbers(impl: str, place: str) -> None:
    found = []
    for name, spellings in TESTED.items():
        for i, spelling in enumerate(spellings):
            if difference := _differences(name, spelling, place, impl):
                found.append(f"{name}[{i}]: {difference}")
    assert not found, "\n".join(found)


@inside
@quiet
def test_values_in_kernels() -> None:
    """What the table's Triton text computes, in float32: all operations in one kernel."""
    x, y = (t.detach() for t in _numbers(True, torch.float32))
    one = torch.ones(1, 1, 1, 1)
    values = row_program(
        lambda e: {n: s[0](e.dot, e.y).sum("key") for n, s in TESTED.items()},
        dots={"dot": (x[None, None, :, None], one)}, pairs={"y": y[None, None, :, None]},
        impl="triton",
    )  # fmt: skip
    found = []
    for name, got in values.items():
        expected = torch.as_tensor(TESTED[name][0](x, y)).float()
        is_zero = ((x == 0) | (y == 0) | (y == 1)) & (got.flatten() == 0) & expected.isnan()
        is_right = torch.isclose(got.flatten(), expected, rtol=2e-5, atol=2e-6, equal_nan=True)
        for i in (~(is_right | is_zero)).nonzero().flatten().tolist()[:3]:
            found.append(f"{name} at {x[i]:g}, {y[i]:g}: {got.flatten()[i]:g}, {expected[i]:g}")
    assert not found, "\n".join(found)


@inside
@quiet
@pytest.mark.slow
def test_numbers_in_kernels() -> None:
    found = []
    for name, spellings in TESTED.items():
        for i, spelling in enumerate(spellings):
            if difference := _differences(name, spelling, "dot", "triton"):
                found.append(f"{name}[{i}]: {difference}")
    assert not found, "\n".join(found)


# ------------------------------------------------------------------------------------------ types

OF_TYPE = {
    "bool": [torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])],
    "int": [torch.tensor([-7, 0, 3, 5]), torch.tensor([2, -3, 4, 1])],
    "float": [torch.tensor([-1.5, 0.0, 1.0, 7.0]), torch.tensor([2.0, -0.5, 1.0, 3.0])],
}
NUMBERS_OF_TYPE = {"bool": True, "int": 3, "float": 0.5}
OF_TYPES: dict[str, Callable[[Any, Any], Any]] = {
    **INFIX,
    **{n: lambda x, y, n=n: getattr(torch, n)(x, y) for n in ("minimum", "maximum", "logical_xor",
       "logical_and", "rsub", "xlogy")},
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "alpha": lambda x, y: torch.add(x, y, alpha=2),
    "neg": lambda x, y: -x, "not": lambda x, y: ~x, "abs": lambda x, y: abs(x),
    "relu": lambda x, y: torch.relu(x), "sign": lambda x, y: torch.sign(x),
    "floor": lambda x, y: torch.floor(x), "square": lambda x, y: torch.square(x),
    "cube": lambda x, y: x**3, "root": lambda x, y: x**0.5, "log1p": lambda x, y: torch.log1p(x),
    "clamp": lambda x, y: x.clamp(-1, 2), "masked": lambda x, y: x.masked_fill(x == y, 0),
    "minus": lambda x, y: 1 - x, "times": lambda x, y: x * True, "plus": lambda x, y: x + True,
}  # fmt: skip


def _kind(x: Any) -> str:
    if isinstance(x, Element):
        return x._dtype
    return "bool" if x.dtype == torch.bool else "float" if x.is_floating_point() else "int"


def _of_types(f: Spelling, x: Tensor, y: Any, impl: str) -> tuple[Tensor, str]:
    """The values, and the type of the element."""
    one = torch.ones(1, 1, 4, 1, dtype=torch.float64)
    pairs = {"x": x[None, None, :, None]}
    if isinstance(y, Tensor):
        pairs["y"] = y[None, None, :, None]
    kinds = []

    def program(e: Any) -> Any:
        value = f(e.x, e.y if isinstance(y, Tensor) else y)
        kinds.append(_kind(value))
        return value.sum("key")

    dots = {"dot": (one, one[:, :, :1])}
    return row_program(program, dots=dots, pairs=pairs, impl=impl).flatten(), kinds[0]


@outside
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_types(impl: str) -> None:
    """Of conditions, integers and floats on either side, elements and numbers."""
    found = []
    for (name, f), a, b in itertools.product(OF_TYPES.items(), OF_TYPE, OF_TYPE):
        for x, y in ((OF_TYPE[a][0], OF_TYPE[b][1]), (OF_TYPE[a][0], NUMBERS_OF_TYPE[b])):
            x, y = (
                t.double() if isinstance(t, Tensor) and t.is_floating_point() else t
                for t in (x, y)
            )
            case = f"{name} of {a} and {b}{' number' if not isinstance(y, Tensor) else ''}"
            try:
                expected = f(x, y)
            except (RuntimeError, TypeError):
                expected = None
            try:
                got, kind = _of_types(f, x, y, impl)
            except (TypeError, ValueError, NotImplementedError, RuntimeError):
                is_ours = name in ("and", "or", "xor", "not") and "int" in (a, b)  # by bits
                if expected is not None and not is_ours and name != "alpha":
                    found.append(f"{case}: refused")
                continue
            if expected is None:
                found.append(f"{case}: torch refuses, got {got.tolist()}")
            elif kind != _kind(expected):
                found.append(f"{case}: {kind}, torch {_kind(expected)}")
            elif not torch.allclose(got, expected.double(), rtol=1e-6, equal_nan=True):
                found.append(f"{case}: {got.tolist()}, torch {expected.tolist()}")
    assert not found, "\n".join(found)


# ------------------------------------------------------------------------------ log-sum-exps


def _log_sum_exps_of_infinities(impl: str, dtype: torch.dtype) -> None:
    """A key of +inf makes a row +inf, wherever it lies; -inf adds nothing."""
    q, k = torch.randn(1, 3, 4, 2, dtype=dtype), torch.randn(1, 3, 70, 2, dtype=dtype)
    bias = torch.zeros(1, 3, 70, dtype=dtype)
    bias[0, 0, 1], bias[0, 1, 69], bias[0, 2, 5] = INF, INF, -INF
    bias[0, 1, :69] = -INF
    expected = ((q @ k.mT).double() + bias[:, :, None]).logsumexp(-1)
    assert expected[0, :2].isinf().all() and expected[0, 2].isfinite().all()
    got = row_program(
        lambda e: (e.t + e.b).logsumexp("key"), dots={"t": (q, k)}, keys={"b": bias}, impl=impl
    )
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    q[0, 0, 0] = INF  # dot products themselves
    k = k.abs() + 0.1
    expected = ((q.abs() @ k.mT).double() / 2).logsumexp(-1)
    got = row_program(lambda e: (e.t / 2).logsumexp("key"), dots={"t": (q.abs(), k)}, impl=impl)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@outside
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_log_sum_exps_of_infinities(impl: str) -> None:
    _log_sum_exps_of_infinities(impl, torch.float64)


@inside
@quiet
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_log_sum_exps_of_infinities_in_kernels() -> None:
    _log_sum_exps_of_infinities("triton", torch.float32)


@outside
@pytest.mark.parametrize(
    ("f", "error", "text"),
    [
        (lambda e: 3**e.n, NotImplementedError, "power of integers"),  # torch: 3 ** -1 is 0
        (lambda e: True ** (e.n > 0), NotImplementedError, "power of integers"),
        (lambda e: e.n.masked_fill(e.t > 0, -INF), TypeError, "takes an integer, got -inf"),
        (lambda e: e.n.masked_fill(e.t > 0, 0.5), TypeError, "takes an integer, got 0.5"),
    ],
)
def test_integers_that_would_not_be(f: Any, error: type[Exception], text: str) -> None:
    one, n = torch.ones(1, 1, 4, 1), torch.tensor([-1, 0, 1, 2])
    with pytest.raises(error, match=text):
        row_program(lambda e: f(e).sum("key"), dots={"t": (one, one)}, keys={"n": n})
    got = row_program(lambda e: (3.0**e.n).sum("key"), dots={"t": (one, one)}, keys={"n": n})
    torch.testing.assert_close(got, torch.full((1, 1, 4), 13 + 1 / 3))
