"""Row programs that are divergences run as `attention_kl` and `linear_kl` do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.gpus import on_a_gpu
from tests.support.naive_rows import naive
from torch_streamkl import attention_kl, linear_kl, row_program
from torch_streamkl.program.divergences import Functional
from torch_streamkl.rows import closed, named, op
from torch_streamkl.rows.problem import RowProblem

SCALE, BETA = 0.4, 0.3
Function = Callable[[Any], Any]


def _of(terms: Callable[[Any, Any], Any]) -> Function:
    """A sum over keys of the softmaxes of both sides."""
    return lambda e: terms((e.t * SCALE).softmax("key"), (e.s * SCALE).softmax("key")).sum("key")


def _kl(e: Any) -> Any:
    p, s = (e.t * SCALE).log_softmax("key"), (e.s * SCALE).log_softmax("key")
    return (p.exp() * (p - s)).sum("key")


def _js(p: Any, s: Any) -> Any:
    mixture = (BETA * p + (1 - BETA) * s).log()
    return BETA * p * (p.log() - mixture) + (1 - BETA) * s * (s.log() - mixture)


CLOSED: dict[str, tuple[Function, dict[str, Any]]] = {
    "KL": (_kl, {"divergence": "forward_kl"}),
    "reverse KL": (_of(lambda p, s: s * (s.log() - p.log())), {"divergence": "reverse_kl"}),
    "JS": (_of(_js), {"divergence": "js", "beta": BETA}),
    "guards": (
        _of(lambda p, s: p * ((p + 1e-3).log() - s.clamp(min=1e-2).log())),
        {"teacher_eps": 1e-3, "student_clamp": 1e-2},
    ),
    "TV": (_of(lambda p, s: 0.5 * (p - s).abs()), {"divergence": "tv"}),
    "squares": (_of(lambda p, s: (p - s) ** 2), {}),
    "powers": (_of(lambda p, s: 0.5 * p**0.75 - p**0.5 * s**0.25), {}),
}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"window": (4, 1)},
    "lengths": {"key_lengths": torch.tensor([9, 0])},
    "mask": {"mask": torch.rand(2, 1, 7, 9, generator=torch.Generator().manual_seed(0)) > 0.3},
}
HEADS = "LM heads"


def _operands(dtype: torch.dtype, device: str = "cpu", size: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    n, m = 7 * size, 9 * size
    shapes = [(2, 4, n, 16), (2, 2, m, 16), (2, 4, n, 32), (2, 4, m, 32)]
    made = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [x.to(device, dtype).requires_grad_() for x in made]


def _heads(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(5, 6), (11, 6), (5, 3), (11, 3)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def _dots(x: list[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    return {"t": (x[2], x[3]), "s": (x[0], x[1])}


def _program(function: Function, x: list[Tensor], impl: str = "auto", **masks: Any) -> Tensor:
    rows: Tensor = row_program(function, dots=_dots(x), impl=impl, **masks)
    return rows


def _with_gradients(value: Tensor, x: list[Tensor]) -> list[Tensor]:
    weight = torch.arange(value.numel(), device=value.device).view(value.shape) / value.numel()
    found = torch.autograd.grad((value * weight).sum(), x, allow_unused=True)
    return [
        value,
        *(torch.zeros_like(y) if g is None else g for g, y in zip(found, x, strict=True)),
    ]


def _form(function: Function, monkeypatch: pytest.MonkeyPatch) -> closed.ClosedForm | None:
    seen: list[closed.ClosedForm | None] = []
    original = closed.form_of

    def spy(problem: RowProblem) -> closed.ClosedForm | None:
        seen.append(original(problem))
        return seen[-1]

    monkeypatch.setattr(named, "form_of", spy)
    monkeypatch.setattr(op.closed, "form_of", spy)
    row_program(function, dots=_dots(_operands(torch.float64)))
    return seen[0]


@pytest.mark.parametrize("mask", [*MASKS, HEADS])
@pytest.mark.parametrize("name", CLOSED)
def test_is_what_the_operator_computes(name: str, mask: str) -> None:
    """The same bits as the divergence by name, and what the program means."""
    function, options = CLOSED[name]
    masks = MASKS.get(mask, {})
    x = _heads(torch.float64) if mask == HEADS else _operands(torch.float64)
    got = _with_gradients(_program(function, x, **masks), x)
    meant = _with_gradients(_program(function, x, "reference", **masks), x)
    torch.testing.assert_close(got, meant, rtol=1e-11, atol=1e-13)
    if not options:
        return
    if mask == HEADS:
        own = linear_kl(*x, **options, temperature=1 / SCALE)
    else:
        scales = {"student_scale": SCALE, "teacher_scale": SCALE}
        given = {"attn_mask" if k == "mask" else k: v for k, v in masks.items()}
        own = attention_kl(*x, **scales, **options, **given)
    torch.testing.assert_close(got, _with_gradients(own, x), rtol=1e-12, atol=1e-14)


def test_no_rows_that_the_data_has_selected() -> None:
    ((tensors, text, flag, impl),) = _calls(_kl, _heads())
    none = [x[:, :, :0].detach().requires_grad_() if n % 2 == 0 else x
            for n, x in enumerate(tensors)]  # fmt: skip
    (value,) = (x for x in op.row_program(none, text, flag, impl) if x.shape == (1, 1, 0))
    assert not any(g.any() for g in torch.autograd.grad(value.sum(), none[::2]))


def test_forms_are_those_with_the_fastest_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = {name: _form(function, monkeypatch) for name, (function, _) in CLOSED.items()}
    assert [name for name, form in forms.items() if form is None] == ["squares"]  # on a CPU
    texts = {name: Functional.of(x.functional) for name, x in forms.items() if x is not None}
    assert texts["KL"].bilinear is not None
    assert texts["reverse KL"].bilinear is not None
    assert texts["JS"].mixture is not None


def test_a_side_without_gradients_is_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    def kl(e: Any) -> Any:
        p, s = (e.t * SCALE).log_softmax("key"), (e.s.detach() * SCALE).log_softmax("key")
        return (p.exp() * (p - s)).sum("key")

    form = _form(kl, monkeypatch)
    assert form is not None
    assert (form.student.dot, form.teacher.dot) == (0, 1)
    x = _operands(torch.float64)
    got, meant = (_with_gradients(_program(kl, x, impl), x) for impl in ("auto", "reference"))
    torch.testing.assert_close(got, meant, rtol=1e-11, atol=1e-13)
    assert not got[1].any()


NOT_CLOSED: dict[str, Function] = {
    "half detached": _of(lambda p, s: p.detach() * (p.log() - s.log())),
    "another score": lambda e: _of(lambda p, s: p * e.s * SCALE + s * 0.5)(e),
    "a quotient": _of(lambda p, s: (p - s) ** 2 / s),
    "a logarithm of zero": _of(lambda p, s: p * (p - s).abs().log()),
    "a shift": lambda e: (
        (p := (e.t * SCALE + 1e-3).softmax("key")) * (p.log() - (e.s * SCALE).softmax("key").log())
    ).sum("key"),
    "a condition": lambda e: _of(
        lambda p, s: torch.where(e.key_index < 5, p, 0.0) * (p.log() - s.log())
    )(e),
    "two values": lambda e: {"kl": _kl(e), "mass": _of(lambda p, s: p * s)(e)},
    "a bias": lambda e: ((e.t + e.key_index).softmax("key") * e.s.log_softmax("key")).sum("key"),
}


@pytest.mark.parametrize("name", NOT_CLOSED)
def test_what_is_no_divergence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _form(NOT_CLOSED[name], monkeypatch) is None


def test_which_implementation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An implementation by name is the rows' own; a divergence of LM heads is linear_kl's."""
    seen: list[str] = []

    def spy(name: str, original: Any) -> Any:
        return lambda *args: seen.append(name) or original(*args)

    monkeypatch.setattr(op.torch_impl, "forward", spy("rows", op.torch_impl.forward))
    monkeypatch.setattr(named, "forward", spy("divergence", named.forward))
    for function, x, impl in (
        (_kl, _operands(torch.float32), "torch"),
        (_kl, _heads(), "auto"),
        (NOT_CLOSED["a bias"], _heads(), "auto"),
    ):
        _program(function, x, impl)
    assert seen == ["rows", "divergence", "rows"]


@pytest.mark.parametrize("name", ["KL", "squares"])
def test_the_fake_call_allocates_what_the_real_one_returns(name: str) -> None:
    for x in (_operands(torch.float32), _heads()):
        (arguments,) = _calls(CLOSED[name][0], x)
        torch.library.opcheck(op.row_program, arguments, test_utils="test_faketensor")


def _calls(function: Function, x: list[Tensor]) -> list[tuple[Any, ...]]:
    """What the operator is called with."""
    seen: list[tuple[Any, ...]] = []
    original = op.row_program

    def spy(*args: Any) -> Any:
        seen.append(args)
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "row_program", spy)
        _program(function, x)
    return seen


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", CLOSED)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """No further from float64 than twice naive code of the dtype, and a rounding."""
    _check_errors(name, dtype, "cuda", 40)


@pytest.mark.parametrize("name", CLOSED)
def test_errors_on_a_cpu(name: str) -> None:
    _check_errors(name, torch.bfloat16, "cpu", 4)


# NOTE [Gradients next to a kink]
# The gradient of |P - S| jumps where P equals S. Of 280 rows and 360 keys some P and S differ by
# less than a rounding of their scores, and no arithmetic of float32 can tell which one is larger:
# the derivative is then anything between those of both sides. So a gradient is compared with the
# exact ones of teachers whose scores are a few roundings smaller, the same and larger. It must
# lie between the least and the largest of the three, which are one number but next to a kink.
KINKED = {"TV": 4 * torch.finfo(torch.float32).eps}  # by how much scores are rounded


def _check_errors(name: str, dtype: torch.dtype, device: str, size: int) -> None:
    function, _ = CLOSED[name]
    x = _operands(dtype, device, size)
    if dtype == torch.float16:  # in which naive code has no logarithms of small probabilities
        x = [(y * 0.3).detach().requires_grad_() for y in x]
    # naive code of the others takes logarithms of hidden keys
    masks: list[dict[str, Any]] = [{}, {"is_causal": True}]
    for mask in masks if name in ("KL", "TV", "squares") else masks[:1]:
        exact = _exact(function, x, mask, KINKED.get(name, 0.0))
        got = _with_gradients(_program(function, x, **mask), x)
        same = _with_gradients(naive(function, _dots(x), **mask)["value"], x)
        for i, (a, bounds, c) in enumerate(zip(got, exact, same, strict=True)):
            size = max(float(b.detach().abs().max()) for b in bounds)
            rounding = torch.finfo(torch.float32).eps * 8 * size
            if i:  # gradients are of the inputs' dtype
                rounding += torch.finfo(dtype).eps * size
            assert c.isfinite().all()
            allowed = 2 * _distance(c, bounds) + rounding
            assert _distance(a, bounds) <= allowed, (name, mask, i)


def _exact(
    function: Function, x: list[Tensor], mask: dict[str, Any], step: float
) -> list[tuple[Tensor, Tensor]]:
    """Least and largest of value and gradients in float64: NOTE [Gradients next to a kink]."""
    found = []
    for factor in (1.0 - step, 1.0, 1.0 + step) if step else (1.0,):
        wide = [y.detach().double() for y in x]
        wide[2] *= factor  # the teacher's queries
        wide = [y.requires_grad_() for y in wide]
        found.append(_with_gradients(_program(function, wide, "reference", **mask), wide))
    each = [torch.stack(values) for values in zip(*found, strict=True)]
    return [(values.amin(0), values.amax(0)) for values in each]


def _distance(x: Tensor, bounds: tuple[Tensor, Tensor]) -> float:
    """How far a tensor is from lying between two others, at most."""
    least, largest = bounds
    wide = x.double()
    assert not wide.isnan().any()
    return float(torch.maximum(least - wide, wide - largest).clamp_min(0.0).max())
