"""What every row program keeps to: masks, kinks, captured gradients, errors, the operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from tests.support.covering import only
from torch_streamkl import row_program
from torch_streamkl.rows import op, torch_impl
from torch_streamkl.rows.program import Program

IMPLS = ("reference", "torch")


def _leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def _maps(heads: int = 2, rows: int = 3, keys: int = 5) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "t": (_leaf(2, heads, rows, 3), _leaf(2, 1, keys, 3)),
        "s": (_leaf(2, heads, rows, 2), _leaf(2, heads, keys, 2)),
    }


def _kl(e: Any) -> Any:
    p, s = e.t.log_softmax("key"), e.s.log_softmax("key")
    return (p.exp() * (p - s)).sum("key")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_impl, "BLOCK_ELEMENTS", 24)
    monkeypatch.setattr(torch_impl, "MAX_KEYS", 3)


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


def _keep(rows: int, keys: int, options: dict[str, Any]) -> Tensor:
    i, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    keep = torch.ones(2, 1, rows, keys, dtype=torch.bool)
    left, right = options.get("window", (None, None))
    if options.get("is_causal"):
        right = 0
    if left is not None:
        keep = keep & (j >= i - left)
    if right is not None:
        keep = keep & (j <= i + right)
    if "key_lengths" in options:
        keep = keep & (j < options["key_lengths"][:, None, None, None])
    if "mask" in options:
        keep = keep & options["mask"]
    return keep


@pytest.mark.parametrize("rows", [3, 7])  # more rows than keys: the first ones have none
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, impl: str, rows: int) -> None:
    dots, options = _maps(rows=rows), dict(MASKS[name])
    if name == "all":
        options["mask"] = options["mask"][:, :, :rows]
    keep = _keep(rows, 5, options)
    has_key = keep.any(-1)
    filled = keep | ~has_key[..., None]
    logs = []
    for q, k in dots.values():
        x = q @ k.expand(-1, q.shape[1], -1, -1).mT
        logs.append(x.masked_fill(~filled, -1e30).log_softmax(-1))
    expected = torch.where(has_key, (logs[0].exp() * (logs[0] - logs[1])).sum(-1), 0.0)
    got = row_program(_kl, dots=dots, impl=impl, **options)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    leaves = [x for pair in dots.values() for x in pair]
    weight = torch.rand_like(expected)
    grads = (torch.autograd.grad((x * weight).sum(), leaves) for x in (got, expected))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_without_keys(impl: str) -> None:
    dots = _maps()
    options = {"key_lengths": torch.zeros(2, dtype=torch.int64), "impl": impl}
    rows = row_program(lambda e: {"lse": e.t.logsumexp("key"), "kl": _kl(e)}, dots=dots, **options)
    assert (rows["lse"] == -math.inf).all() and (rows["kl"] == 0).all()
    rows["kl"].sum().backward()
    assert all((x.grad == 0).all() for pair in dots.values() for x in pair)


KINKS: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "minimum": (lambda e: torch.minimum(e.t, e.s), torch.minimum),
    "maximum": (lambda e: torch.maximum(e.t, e.s), torch.maximum),
    "clamp": (lambda e: e.t.clamp(0.0, 2.0) * e.s, lambda t, s: t.clamp(0.0, 2.0) * s),
    "relu": (lambda e: e.t.relu() * e.s, lambda t, s: t.relu() * s),
    "abs": (lambda e: (e.t - e.s).abs() + e.t.abs(), lambda t, s: (t - s).abs() + t.abs()),
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", KINKS)
def test_ties_are_shared_as_autograd_does(name: str, impl: str) -> None:
    program, naive = KINKS[name]
    # small integers: many elements tie, and many are at the bounds 0 and 2
    torch.manual_seed(3)
    operands = [torch.randint(-1, 2, (1, 1, 6, 2), dtype=torch.float64) for _ in range(4)]
    leaves = [x.requires_grad_() for x in operands]
    a, b, c, d = leaves
    got = row_program(lambda e: program(e).sum("key"), dots={"t": (a, b), "s": (c, d)}, impl=impl)
    expected = naive(a @ b.mT, c @ d.mT).sum(-1)
    torch.testing.assert_close(got, expected)
    grads = (torch.autograd.grad(x.sum(), leaves) for x in (got, expected))
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y)


POINTWISE: dict[str, Callable[[Any], Any]] = {
    "transcendental": lambda e: e.t.tanh() + e.s.sigmoid() + torch.nn.functional.softplus(e.t),
    "powers": lambda e: (e.t.square() + 1).pow(1.5) + (e.s**2 + 1).sqrt() + (e.s**2 + 1) ** -2,
    "logarithms": lambda e: (e.t**2 + 1).log() + (e.s**2).log1p() + (e.t - e.s).sigmoid().log2(),
    "logaddexp": lambda e: torch.logaddexp(e.t, 2 * e.s) / (2 + e.s.tanh()),
    "conditions": lambda e: torch.where((e.t > 0) & ~(e.s > 0) | (e.t < -1), e.t * e.s, e.s),
    "captures": lambda e: e.t * e.row.exp() + e.s * e.key * e.pair + e.row * e.pair * e.key,
    "head sums": lambda e: e.t.sum("head") * e.row + (e.t * e.key).mean("head") * e.pair,
    "causal by hand": lambda e: torch.where(e.key_index <= e.row_index, e.t, -torch.inf)
    .softmax("key") * e.s,
    "three levels": lambda e: (
        (w := (e.t.softmax("key") / 2).exp()) / w.sum("key")
        * ((e.s - (e.s.softmax("key") * e.s).sum("key")) ** 2)
    ),
    "log-sum-exp of a level": lambda e: (e.s * e.t.softmax("key")).log_softmax("key") * e.t,
    "detached": lambda e: e.t.detach() * e.s,
}  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", only(set(POINTWISE) - {"three levels"}, POINTWISE))
def test_gradcheck(name: str, impl: str) -> None:
    dots = _maps()
    captures = {"row": _leaf(2, 1, 3), "key": _leaf(1, 2, 5), "pair": _leaf(1, 1, 3, 5)}
    if name == "head sums":
        captures["key"] = _leaf(2, 2, 5)
    a, b, c, d = (x for pair in dots.values() for x in pair)
    if name == "detached":
        a, b = a.detach(), b.detach()

    def function(*tensors: Tensor) -> Tensor:
        a, b, c, d, row, key, pair = tensors
        result: Tensor = row_program(
            lambda e: POINTWISE[name](e).sum("key"),
            dots={"t": (a, b), "s": (c, d)},
            rows={"row": row},
            keys={"key": key},
            pairs={"pair": pair},
            impl=impl,
        )
        return result

    assert gradcheck(function, (a, b, c, d, *captures.values()))


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_of_column_values(impl: str) -> None:
    torch.manual_seed(0)
    hidden, weight, values = _leaf(4, 3), _leaf(6, 3), _leaf(4, 3)
    ids = torch.tensor([[0, 5, -1], [2, 2, 1], [-100, -1, 6], [3, 4, 5]])  # 2 stands twice

    def function(hidden: Tensor, weight: Tensor, values: Tensor) -> Tensor:
        result: Tensor = row_program(
            lambda e: (e.v.exp() * e.s.log_softmax("key")).sum("key"),
            dots={"s": (hidden, weight)},
            columns={"v": (ids, values)},
            impl=impl,
        )
        return result

    dense = torch.zeros(4, 7, dtype=torch.float64)
    dense = dense.scatter_add(1, ids.clamp(-1) % 7, values * (ids >= 0) * (ids < 6))[:, :6]
    expected = (dense.exp() * (hidden @ weight.T).log_softmax(-1)).sum(-1)
    torch.testing.assert_close(function(hidden, weight, values), expected)
    assert gradcheck(function, (hidden, weight, values))


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

    for impl in IMPLS:
        got = row_program(kl, dots=dots, pairs={"hide": hidden}, impl=impl)
        kept = {n: (q, k[:, :, 1:3]) for n, (q, k) in dots.items()}
        none = torch.zeros(1, 1, 1, 2, dtype=torch.bool)
        expected = row_program(kl, dots=kept, pairs={"hide": none}, impl="reference")
        leaves = [x for pair in dots.values() for x in pair]
        for name, value in got.items():
            torch.testing.assert_close(value, expected[name])
            grads = (torch.autograd.grad(x[name].sum(), leaves, retain_graph=True)
                     for x in (got, expected))  # fmt: skip
            for a, b in zip(*grads, strict=True):
                torch.testing.assert_close(a, b)


def test_extreme_scores() -> None:
    for dtype in (torch.float32, torch.float64):
        q = torch.tensor([[1e4], [-1e4], [0.0]], dtype=dtype, requires_grad=True)
        w = torch.tensor([[1.0], [0.0], [-1.0], [0.5]], dtype=dtype, requires_grad=True)
        got = row_program(lambda e: e.s.logsumexp("key"), dots={"s": (q, w)})
        torch.testing.assert_close(got, (q @ w.T).logsumexp(-1))
        kl = row_program(
            lambda e: ((p := e.t.softmax("key")) * (p.log() - e.s.log_softmax("key"))).sum("key"),
            dots={"s": (q, w), "t": (q.detach() * 0, w.detach())},
        )
        assert kl.isfinite().all()
        for x in torch.autograd.grad(kl.sum(), (q, w)):
            assert x.isfinite().all()


# ------------------------------------------------------------------------------- programs as data


def _text(function: Callable[[Any], Any], **dots: Any) -> str:
    seen: list[str] = []
    original = op.row_program

    def spy(tensors: Any, text: str, *rest: Any) -> Any:
        seen.append(text)
        return original(tensors, text, *rest)

    op.row_program = spy
    try:
        row_program(function, dots=dots)
    finally:
        op.row_program = original
    return seen[0]


def test_what_computes_the_same_is_the_same_program() -> None:
    dots = _maps()

    def spelled(e: Any) -> Any:
        unused = e.t.tanh().sum("key")  # noqa: F841  # computed by nobody
        s, p = e.s - e.s.logsumexp("key"), e.t.softmax("key")
        return ((p.log() - s) * p).sum("key")

    text = _text(_kl, **dots)
    assert _text(spelled, **dots) == text
    assert _text(spelled, **_maps(heads=4, rows=6)) == text  # sizes are no part of it
    assert _text(lambda e: (e.t.softmax("key") * (e.t - e.s)).sum("key"), **dots) != text
    program = Program.of(text)
    assert Program.of(program.text) is program and program.levels == (1, 1, 2)


def test_operator_checks() -> None:
    text = _text(_kl, **_maps())
    tensors = [x for pair in _maps().values() for x in pair]
    torch.library.opcheck(
        torch.ops.torch_streamkl.row_program.default, (tensors, text, True, "torch")
    )


def test_memory_is_bounded_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    hidden, weight = torch.randn(700, 8, requires_grad=True), torch.randn(5000, 8)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, f: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            out = f(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if isinstance(out, Tensor) else 0)
            return out

    with Sizes():
        rows = row_program(lambda e: e.s.logsumexp("key"), dots={"s": (hidden, weight)})
        rows.sum().backward()
    assert largest <= torch_impl.BLOCK_ELEMENTS < 700 * 5000


# ------------------------------------------------------------------------------------------ errors


def _refused(function: Callable[[Any], Any], error: Any, match: str, **options: Any) -> None:
    dots = options.pop("dots", None) or _maps()
    with pytest.raises(error, match=match):
        row_program(function, dots=dots, **options)


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        (lambda e: e.t.erfinv().sum("key"), NotImplementedError, "cannot express erfinv"),
        (lambda e: torch.cumsum(e.t, -1).sum("key"), NotImplementedError, "express cumsum"),
        (lambda e: e.t.topk(3), NotImplementedError, "cannot express topk"),
        (lambda e: e.t.amax("key"), NotImplementedError, "cannot express amax"),
        (lambda e: (e.t**e.s).sum("key"), NotImplementedError, "exponent that varies"),
        (lambda e: e.t, ValueError, "value must be a value of rows"),
        (lambda e: {"a": 3}, ValueError, "a must be a value of rows"),
        (lambda e: {}, ValueError, "at least one per-row value"),
        (lambda e: e.x.sum("key"), AttributeError, "has no 'x'; it has t, s"),
        (lambda e: e.t.sum(-1), ValueError, 'must be over "key" or "head", got -1'),
        (lambda e: e.t.mean("key"), ValueError, 'must be over "head"'),
        (lambda e: (e.t * torch.ones(5)).sum("key"), TypeError, "declare a tensor in rows"),
        (lambda e: (e.t * math.nan).sum("key"), ValueError, "NaN"),
        (lambda e: (e.t and e.s).sum("key"), TypeError, "no truth value"),
        (lambda e: (e.t & e.s).sum("key"), TypeError, "takes conditions"),
        (lambda e: torch.where(e.t, 1.0, 0.0).sum("key"), TypeError, "takes conditions"),
        (lambda e: (e.t**1000).sum("key"), ValueError, "exponents of pow"),
    ],
)
def test_refused_functions(function: Callable[[Any], Any], error: Any, match: str) -> None:
    _refused(function, error, match)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"rows": {"t": torch.ones(3)}}, ValueError, "distinct identifiers, got 't'"),
        ({"rows": {"w": torch.ones(4)}}, ValueError, "w must broadcast to"),
        ({"rows": {"w": torch.ones(2, 3, 3)}}, ValueError, "w must have 1 head or as many"),
        ({"keys": {"w": [1.0]}}, TypeError, "w must be a tensor, got list"),
        ({"columns": {"c": torch.ones(2, 1, 3, 1)}}, TypeError, "ids of c must be integers"),
        ({"mask": torch.ones(3, 5)}, TypeError, "mask must be boolean"),
        ({"mask": torch.ones(2, 2, 3, 5) > 0}, ValueError, "the same for all heads"),
        ({"key_lengths": torch.ones(3)}, ValueError, "key_lengths must be int32"),
        ({"window": (-1, 0)}, ValueError, "window left must be"),
        ({"impl": "fast"}, ValueError, "impl"),
    ],
)
def test_refused_tensors(options: dict[str, Any], error: Any, match: str) -> None:
    _refused(_kl, error, match, **options)


def test_refused_dots() -> None:
    q, k = torch.ones(2, 2, 3, 4), torch.ones(2, 2, 5, 4)
    for dots, error, match in (
        ({}, ValueError, "at least one dot"),
        ({"t": (q, k[..., :3])}, ValueError, "share its last dimension"),
        ({"t": (q, k.double())}, ValueError, "share dtype"),
        ({"t": (q, k[:, :, :0])}, ValueError, "no empty dimension"),
        ({"t": (q, k), "s": (q, k[:, :, :4])}, ValueError, "share batch, seqlen_q"),
        ({"t": (q, k), "s": (q[0, 0], k[0, 0])}, ValueError, "share kind"),
        ({"t": (q[:, :1], k)}, ValueError, "multiple of its key heads"),
        ({"t": q}, TypeError, "pair of tensors"),
    ):
        with pytest.raises(error, match=match):
            row_program(lambda e: e.t.logsumexp("key"), dots=dots)


def test_heads_that_differ_meet_after_a_sum() -> None:
    q, k = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 5, 4)
    r, m = torch.ones(1, 3, 3, 4), torch.ones(1, 3, 5, 4)
    with pytest.raises(ValueError, match="different numbers of heads"):
        row_program(_kl, dots={"t": (q, k), "s": (r, m)})


def test_a_jacobian_between_heads_is_refused_before_anything_runs() -> None:
    def kl(e: Any) -> Any:
        mean = e.t.softmax("key").mean("head")
        return (mean * (mean.log() - e.s.log_softmax("key"))).sum("key")

    def crossed(e: Any) -> Any:
        p = e.t.softmax("key")
        return (p * p.mean("head")).sum("key")

    dots = _maps()
    assert row_program(crossed, dots={"t": tuple(x.detach() for x in dots["t"])}).shape == (
        2,
        2,
        3,
    )
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
    grads = [torch.autograd.grad(x, inputs) for x in values]
    torch.testing.assert_close(*grads)


def test_second_derivatives_are_refused() -> None:
    dots = _maps()
    (grad,) = torch.autograd.grad(
        row_program(_kl, dots=dots).sum(), dots["s"][0], create_graph=True
    )
    with pytest.raises(NotImplementedError, match="differentiated once"):
        grad.sum().backward()
