"""Every operation of row programs, in each of its spellings, against torch on the same numbers.

A spelling is one function of x and y that runs on elements and on tensors alike. The numbers are
infinities, NaN, 0, 1, negative and ordinary ones, and all pairs of them; types are torch's, too.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
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


def _of(f: Callable[..., Any], *numbers: Any, **options: Any) -> Spelling:
    """A function of x, and of numbers after it."""
    return lambda x, y: f(x, *numbers, **options)


def _to(f: Callable[..., Any], *numbers: Any) -> Spelling:
    """A function of numbers, and of x after them."""
    return lambda x, y: f(*numbers, x)


def _two(f: Callable[..., Any], **options: Any) -> Spelling:
    return lambda x, y: f(x, y, **options)


def _method(name: str) -> Callable[..., Any]:
    return lambda x, *rest, **options: getattr(x, name)(*rest, **options)


def _double(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


OF_X = {
    name: [_of(_method(name)), _of(getattr(torch, name))]
    for name in (*functions.UNARY, "square", "sign", "rsqrt", "reciprocal", "log2", "log10",
                 "isnan", "isinf", "isfinite", "logical_not")
    if name != "float"
}  # fmt: skip
OF_X["float"] = [lambda x, y: x.float() if isinstance(x, Element) else x.to(torch.float64)]
OF_X["abs"] += [_of(abs), _of(torch.absolute)]
OF_X["neg"] += [_of(operator.neg), _of(operator.pos)]
OF_X["softplus"] = [
    _of(F.softplus), _of(F.softplus, beta=2.0), _of(F.softplus, 0.5, 3),
    _of(F.softplus, threshold=1.0),
]  # fmt: skip
OF_X["logsigmoid"] = [_of(F.logsigmoid)]
OF_X["sigmoid"] += [_of(torch.special.expit), _of(F.sigmoid)]
OF_X["relu"] += [_of(F.relu)]
OF_X["pow"] = [
    _of(operator.pow, n) for n in (0, 1, 2, 3, 4, -1, -2, -3, 0.0, 0.5, 1.5, -0.5, 2.0, 5)
]
OF_X["pow"] += [_of(torch.pow, 2.5), _of(torch.pow, torch.tensor(3.0))]
OF_X["rpow"] = [_to(operator.pow, n) for n in (2, 0.5, 10.0, 1, _double(2.0))]
OF_X["rpow"] += [_to(torch.pow, 3.0)]
OF_X["clamp"] = [
    _of(_method("clamp"), -1.0, 1.0), _of(torch.clamp, min=0.0), _of(_method("clip"), max=2),
    _of(_method("clamp"), 0.5, INF),
]  # fmt: skip
for _name in ("clamp_min", "clamp_max"):
    OF_X[_name] = [_of(_method(_name), -1.0), _of(getattr(torch, _name), 0.5)]
for _name in ("expm1", "exp2", "erf", "log1p"):
    OF_X[_name] += [_of(getattr(torch.special, _name))]

INFIX = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "floor_divide": operator.floordiv, "remainder": operator.mod, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq,
    "ne": operator.ne,
}  # fmt: skip
OF_TWO: dict[str, list[Spelling]] = {}
for _name in ("add", "sub", "mul", "div", "floor_divide", "remainder", *COMPARISONS):
    _both = (INFIX[_name], getattr(torch, _name))
    OF_TWO[_name] = [_two(INFIX[_name]), _two(_both[1]), _two(_method(_name))]
    OF_TWO[_name] += [_of(f, n) for f in _both for n in CONSTANTS]
    OF_TWO[_name] += [_to(INFIX[_name], n) for n in CONSTANTS]
OF_TWO["add"] += [_two(torch.add, alpha=2), _of(_method("add"), 3.0, alpha=0.5)]
OF_TWO["sub"] += [_two(torch.sub, alpha=2), _two(_method("subtract"), alpha=0.5)]
OF_TWO["sub"] += [_to(operator.sub, _double(2.0))]
OF_TWO["rsub"] = [
    _two(torch.rsub), _of(torch.rsub, 2.0), _two(torch.rsub, alpha=3),
    _of(torch.rsub, 1.0, alpha=2),
]  # fmt: skip
for _mode in ("floor", "trunc", None):
    OF_TWO["div"] += [_two(torch.div, rounding_mode=_mode)]
    OF_TWO["div"] += [_of(_method("div"), 0.3, rounding_mode=_mode)]
OF_TWO["div"] += [lambda x, y: torch.true_divide(y, x)]
OF_TWO["mul"] += [_to(operator.mul, _double(3.0)), lambda x, y: x * x]
for _name in ("minimum", "maximum", "logaddexp"):
    _f = getattr(torch, _name)
    OF_TWO[_name] = [
        _two(_f), _two(_method(_name)), lambda x, y, f=_f: f(y, x), lambda x, y, f=_f: f(x, x)
    ]  # fmt: skip
OF_TWO["clamp"] = [lambda x, y: torch.clamp(x, min=y), lambda x, y: torch.clamp(x, max=y)]
OF_TWO["xlogy"] = [
    _two(torch.xlogy), _of(_method("xlogy"), 2.0), lambda x, y: torch.xlogy(0.0, y),
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
for _name, _f in BITWISE.items():
    _logical, _bits = (getattr(torch, f"{kind}_{_name}") for kind in ("logical", "bitwise"))
    OF_TWO[f"logical_{_name}"] = [
        _two(_logical), lambda x, y, f=_logical: f(x, y > 0)
    ]  # fmt: skip
    OF_TWO[f"bitwise_{_name}"] = [
        lambda x, y, f=_f: f(x > 0, y < 1), lambda x, y, f=_bits: f(x > 0, y < 1),
        lambda x, y, f=_f: f(x > 0, True), lambda x, y, f=_f: f(False, x > 0),
    ]  # fmt: skip
OF_TWO["bitwise_not"] = [lambda x, y: ~(x > y), lambda x, y: torch.bitwise_not(x > y)]
TESTED = {**OF_X, **{n: [*OF_X.get(n, []), *s] for n, s in OF_TWO.items()}}
OVER_AXES = {"sum", "mean", "logsumexp", "softmax", "log_softmax"}  # test_over_keys_and_heads
# nodes that rules and simplifications make of others
INSIDE = {"mul0", "div0", "log_div", "norm", "int", "float"}
INSIDE |= {"isnan", "isinf", "bfloat16", "float16"}  # of the rewrite


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
    column = x[None, None, :, None]
    given: dict[str, Any] = {"pairs": {"y": y[None, None, :, None]}}
    given["dots"] = {"dot": (column if place == "dot" else one.expand(1, 1, len(x), 1), one)}
    if place == "row":
        given["rows"] = {"row": x[None, None]}
    if place == "pair":
        given["pairs"]["pair"] = column
    # a number of a comparison is what its sum is
    value = row_program(lambda e: spelling(getattr(e, place), e.y).sum("key"), impl=impl, **given)
    return value.flatten()


def _gradients(value: Tensor, inputs: list[Tensor]) -> list[Tensor | None] | None:
    """None where torch has none, of a quotient that is rounded down."""
    learned = [x for x in inputs if x.requires_grad]
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in learned]
    try:
        found = torch.autograd.grad(value.sum(), learned, allow_unused=True)
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        return None
    return [torch.zeros_like(x) if g is None else g for x, g in zip(learned, found, strict=True)]


def _is_zero(name: str, x: Tensor, y: Tensor, spelling: Spelling, got: Tensor) -> Tensor:
    """A product is 0 if a factor is, also with an infinity or NaN (docs/guide/row-programs.md)."""
    has_zero = (x == 0) | (y == 0) | (float(spelling(torch.tensor(2.0), torch.tensor(3.0))) == 0)
    if name == "xlogy":
        has_zero |= y == 1
    return has_zero & (got == 0) if name in ("mul", "xlogy") else torch.zeros_like(has_zero)


def _differences(name: str, spelling: Spelling, place: str, impl: str) -> str:
    """What is not torch's, empty if nothing is."""
    is_kernel = impl == "triton"
    dtype = torch.float32 if is_kernel else torch.float64
    rtol = 2e-5 if is_kernel else 1e-11
    inputs = _numbers(name in OF_TWO, dtype)
    got = _program(spelling, *inputs, place, impl)
    expected = torch.as_tensor(spelling(*inputs)).to(dtype)
    x, y = (t.detach() for t in inputs)
    is_right = torch.isclose(got, expected, rtol=rtol, atol=rtol / 10, equal_nan=True)
    is_right |= _is_zero(name, x, y, spelling, got) & expected.isnan()
    if name == "pow":  # torch has roots of -inf, which are NaN, and powers, which are not
        is_right |= (x == -INF) & is_kernel
    wrong = [("value", got, expected, ~is_right)]
    grads = [_gradients(v, inputs) for v in (got, expected)]
    if grads[1] is not None:
        for which, a, b in zip("xy", *grads, strict=False):
            # where torch's formula has no number, ours may have one
            is_right = torch.isclose(a, b, rtol=rtol, atol=rtol / 10) | b.isnan()
            wrong.append((f"gradient to {which}", a, b, ~is_right))
    return "; ".join(
        f"{what} at {x[i]:g}, {y[i]:g}: {a[i]:.17g}, torch {b[i]:.17g}"
        for what, a, b, places in wrong
        for i in places.nonzero().flatten().tolist()[:3]
    )


def _check_numbers(impl: str, place: str) -> None:
    found = []
    for name, spellings in TESTED.items():
        for i, spelling in enumerate(spellings):
            if difference := _differences(name, spelling, place, impl):
                found.append(f"{name}[{i}]: {difference}")
    assert not found, "\n".join(found)


@outside
@pytest.mark.parametrize(
    ("impl", "place"), [("torch", "pair"), ("torch", "dot"), ("reference", "row")]
)
def test_numbers(impl: str, place: str) -> None:
    _check_numbers(impl, place)


@inside
@quiet
@pytest.mark.slow
def test_numbers_in_kernels() -> None:
    _check_numbers("triton", "dot")


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
    for name, got in values.items():
        expected = torch.as_tensor(TESTED[name][0](x, y)).float()
        is_zero = _is_zero(name, x, y, TESTED[name][0], got.flatten()) & expected.isnan()
        expected = expected.masked_fill(is_zero, 0.0)
        is_right = torch.isclose(got.flatten(), expected, rtol=2e-5, atol=2e-6, equal_nan=True)
        assert is_right.all(), (name, x[~is_right], y[~is_right])


# ------------------------------------------------------------------------------------------ types

OF_TYPE = {
    "bool": [torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])],
    "int": [torch.tensor([-7, 0, 3, 5]), torch.tensor([2, -3, 4, 1])],
    "float": [torch.tensor([-1.5, 0.0, 1.0, 7.0]), torch.tensor([2.0, -0.5, 1.0, 3.0])],
}
NUMBERS_OF_TYPE = {"bool": True, "int": 3, "float": 0.5}
OF_TYPES: dict[str, Callable[[Any, Any], Any]] = {
    **{name: _two(f) for name, f in (*INFIX.items(), *BITWISE.items())},
    **{name: _two(getattr(torch, name)) for name in ("minimum", "maximum", "logical_xor",
       "logical_and", "rsub", "xlogy")},
    **{name: _of(getattr(torch, name)) for name in ("relu", "sign", "floor", "square", "log1p",
       "neg", "abs")},
    "trunc": _two(torch.div, rounding_mode="trunc"), "alpha": _two(torch.add, alpha=2),
    "where": lambda x, y: torch.where(x > 0, x, y), "not": _of(operator.invert),
    "cube": _of(operator.pow, 3), "root": _of(operator.pow, 0.5),
    "clamped": _of(_method("clamp"), -1, 2), "masked": lambda x, y: x.masked_fill(x == y, 0),
    "minus": _to(operator.sub, 1), "times": _of(operator.mul, True),
    "plus": _of(operator.add, True),
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


@quiet
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("impl", "dtype"),
    [
        pytest.param("torch", torch.float64, marks=outside),
        pytest.param("reference", torch.float64, marks=outside),
        pytest.param("triton", torch.float32, marks=inside),
    ],
)
def test_log_sum_exps_of_infinities(impl: str, dtype: torch.dtype) -> None:
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
