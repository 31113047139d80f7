"""Row programs that are divergences run as `attention_kl` and `linear_kl` do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_streamkl import attention_kl, linear_kl, row_program
from torch_streamkl.program.divergences import Functional
from torch_streamkl.rows import closed, named, op
from torch_streamkl.rows.problem import RowProblem

SCALE = 0.4
Function = Callable[[Any], Any]


def _softmaxes(e: Any) -> tuple[Any, Any]:
    return (e.t * SCALE).softmax("key"), (e.s * SCALE).softmax("key")


def _kl(e: Any) -> Any:
    p, s = (e.t * SCALE).log_softmax("key"), (e.s * SCALE).log_softmax("key")
    return (p.exp() * (p - s)).sum("key")


def _reverse(e: Any) -> Any:
    p, s = _softmaxes(e)
    return (s * (s.log() - p.log())).sum("key")


def _js(e: Any, beta: float = 0.3) -> Any:
    p, s = _softmaxes(e)
    mixture = (beta * p + (1 - beta) * s).log()
    return (beta * p * (p.log() - mixture) + (1 - beta) * s * (s.log() - mixture)).sum("key")


def _tv(e: Any) -> Any:
    p, s = _softmaxes(e)
    return 0.5 * (p - s).abs().sum("key")


def _guarded(e: Any) -> Any:
    p, s = _softmaxes(e)
    return (p * ((p + 1e-3).log() - s.clamp(min=1e-2).log())).sum("key")


def _squares(e: Any) -> Any:
    p, s = _softmaxes(e)
    return ((p - s) ** 2).sum("key")


def _powers(e: Any) -> Any:
    p, s = _softmaxes(e)
    return (0.5 * p**0.75 - p**0.5 * s**0.25).sum("key")


CLOSED: dict[str, tuple[Function, dict[str, Any]]] = {
    "KL": (_kl, {}),
    "reverse KL": (_reverse, {"divergence": "reverse_kl"}),
    "JS": (_js, {"divergence": "js", "beta": 0.3}),
    "guards": (_guarded, {"teacher_eps": 1e-3, "student_clamp": 1e-2}),
    "TV": (_tv, {"divergence": "tv"}),
    "squares": (_squares, {}),
    "powers": (_powers, {}),
}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"window": (4, 1)},
    "lengths": {"key_lengths": torch.tensor([9, 0])},
    "mask": {
        "attn_mask": torch.rand(2, 1, 7, 9, generator=torch.Generator().manual_seed(0)) > 0.3
    },
}


def _operands(dtype: torch.dtype, device: str = "cpu", size: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = [
        (2, 4, 7 * size, 16),
        (2, 2, 9 * size, 16),
        (2, 4, 7 * size, 32),
        (2, 4, 9 * size, 32),
    ]
    made = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [x.to(device, dtype).requires_grad_() for x in made]


def _program(function: Function, x: list[Tensor], impl: str = "auto", **masks: Any) -> Tensor:
    if "attn_mask" in masks:
        masks["mask"] = masks.pop("attn_mask")
    rows: Tensor = row_program(
        function, dots={"t": (x[2], x[3]), "s": (x[0], x[1])}, impl=impl, **masks
    )
    return rows


def _with_gradients(value: Tensor, x: list[Tensor]) -> list[Tensor]:
    weight = torch.arange(value.numel(), device=value.device).view(value.shape) / value.numel()
    found = torch.autograd.grad((value * weight).sum(), x, allow_unused=True)
    return [
        value,
        *(torch.zeros_like(y) if g is None else g for g, y in zip(found, x, strict=True)),
    ]


def _form(
    function: Function, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> closed.ClosedForm | None:
    seen: list[closed.ClosedForm | None] = []
    original = closed.form_of

    def spy(problem: RowProblem) -> closed.ClosedForm | None:
        seen.append(original(problem))
        return seen[-1]

    monkeypatch.setattr(named, "form_of", spy)
    monkeypatch.setattr(op.closed, "form_of", spy)
    x = _operands(torch.float64)
    row_program(function, dots={"t": (x[2], x[3]), "s": (x[0], x[1])}, **more)
    return seen[0]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", CLOSED)
def test_is_what_attention_kl_computes(name: str, mask: str) -> None:
    """The same bits as the divergence by name, and what the program means."""
    function, options = CLOSED[name]
    x = _operands(torch.float64)
    got = _with_gradients(_program(function, x, **MASKS[mask]), x)
    meant = _with_gradients(_program(function, x, "reference", **MASKS[mask]), x)
    for a, b in zip(got, meant, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    if options or name == "KL":
        scales = {"student_scale": SCALE, "teacher_scale": SCALE}
        named = _with_gradients(attention_kl(*x, **scales, **options, **MASKS[mask]), x)
        for a, b in zip(got, named, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", CLOSED)
def test_is_what_linear_kl_computes(name: str) -> None:
    function, options = CLOSED[name]
    torch.manual_seed(0)
    shapes = [(5, 6), (11, 6), (5, 3), (11, 3)]
    x = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    got = _with_gradients(_program(function, x), x)
    meant = _with_gradients(_program(function, x, "reference"), x)
    for a, b in zip(got, meant, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    if options or name == "KL":
        own = dict(options) | {"temperature": 1 / SCALE, "reduction": "none"}
        value = linear_kl(*x, **own)
        torch.testing.assert_close(_program(function, x), value, rtol=1e-12, atol=1e-14)


def test_no_rows_that_the_data_has_selected() -> None:
    ((tensors, text, flag, impl),) = _calls(
        _kl, [torch.randn(shape) for shape in [(5, 6), (11, 6), (5, 3), (11, 3)]]
    )
    none = [x[:, :, :0].requires_grad_() if n % 2 == 0 else x for n, x in enumerate(tensors)]
    every = op.row_program(none, text, flag, impl)
    (value,) = (x for x in every if x.shape == (1, 1, 0))
    assert not any(g.any() for g in torch.autograd.grad(value.sum(), none[::2]))


def test_which_heads_are_linear_kls(monkeypatch: pytest.MonkeyPatch) -> None:
    x = [torch.randn(shape) for shape in [(5, 6), (11, 6), (5, 3), (11, 3)]]
    seen: list[Any] = []
    original = named.forward

    def spy(problem: RowProblem, is_differentiated: bool) -> named.Values:
        seen.append(problem.program.dot_heads)
        return original(problem, is_differentiated)

    monkeypatch.setattr(named, "forward", spy)
    _program(_kl, x)
    assert seen == [(0, 0)]
    bias = torch.randn(11)
    row_program(
        lambda e: ((e.t + e.b).softmax("key") * e.s.log_softmax("key")).sum("key"),
        dots={"t": (x[2], x[3]), "s": (x[0], x[1])},
        keys={"b": bias},
    )
    assert len(seen) == 1


def test_forms_are_those_with_the_fastest_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {}
    for name, (function, _) in CLOSED.items():
        form = _form(function, monkeypatch)
        if name == "squares":
            assert form is None  # on a CPU
            continue
        assert form is not None
        texts[name] = Functional.of(form.functional)
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
    for a, b in zip(got, meant, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    assert not got[1].any()


def _half_detached(e: Any) -> Any:
    p, s = _softmaxes(e)
    return (p.detach() * (p.log() - s.log())).sum("key")


def _other_score(e: Any) -> Any:
    p, s = _softmaxes(e)
    return (p * e.s * SCALE).sum("key") + (s * 0.5).sum("key")


def _quotient(e: Any) -> Any:
    p, s = _softmaxes(e)
    return ((p - s) ** 2 / s).sum("key")


def _log_of_zero(e: Any) -> Any:
    p, s = _softmaxes(e)
    return (p * (p - s).abs().log()).sum("key")


def _shifted(e: Any) -> Any:
    p, s = (e.t * SCALE + 1e-3).softmax("key"), (e.s * SCALE).softmax("key")
    return (p * (p.log() - s.log())).sum("key")


def _conditional(e: Any) -> Any:
    p, s = _softmaxes(e)
    return (torch.where(e.key_index < 5, p, 0.0) * (p.log() - s.log())).sum("key")


def _two_values(e: Any) -> Any:
    p, s = _softmaxes(e)
    return {"kl": (p * (p.log() - s.log())).sum("key"), "mass": (p * s).sum("key")}


NOT_CLOSED = [
    _half_detached, _other_score, _quotient, _log_of_zero, _shifted, _conditional, _two_values,
]  # fmt: skip


@pytest.mark.parametrize("function", NOT_CLOSED)
def test_what_is_no_divergence(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _form(function, monkeypatch) is None


def test_an_implementation_by_name_is_the_rows_own() -> None:
    x = _operands(torch.float32)

    def stop(*_: Any) -> None:
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op.torch_impl, "forward", stop)
        with pytest.raises(ZeroDivisionError):
            _program(_kl, x, "torch")


def test_compiled_with_symbolic_sizes() -> None:
    """The fake call allocates what the real one returns."""
    for x in (_operands(torch.float32), [torch.randn(y) for y in [(5, 6), (9, 6)] * 2]):
        ((tensors, text, flag, impl),) = _calls(_squares, x)
        torch.library.opcheck(op.row_program, (tensors, text, flag, impl))


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


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", CLOSED)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """No further from float64 than twice naive code of the dtype, and a rounding."""
    _check_errors(name, dtype, "cuda", 40)


def test_errors_on_a_cpu() -> None:
    for name in CLOSED:
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
        naive = _naive(function, x, bool(mask))
        for i, (a, bounds, c) in enumerate(zip(got, exact, naive, strict=True)):
            size = max(float(b.abs().max()) for b in bounds)
            rounding = torch.finfo(torch.float32).eps * 8 * size
            if i:  # gradients are of the inputs' dtype
                rounding += torch.finfo(dtype).eps * size
            assert c.isfinite().all()
            allowed = 2 * _distance(c, bounds) + rounding
            assert _distance(a, bounds) <= allowed, (name, mask, i)


def _exact(
    function: Function, x: list[Tensor], mask: dict[str, Any], step: float
) -> list[tuple[Tensor, Tensor]]:
    """Returns least and largest of value and gradients in float64: NOTE [Gradients next to a
    kink].
    """
    found = []
    for factor in (1.0 - step, 1.0, 1.0 + step) if step else (1.0,):
        wide = [y.detach().double() for y in x]
        wide[2] *= factor  # the teacher's queries
        wide = [y.requires_grad_() for y in wide]
        found.append(_with_gradients(_program(function, wide, "reference", **mask), wide))
    each = [torch.stack(values) for values in zip(*found, strict=True)]
    return [(values.amin(0), values.amax(0)) for values in each]


def _distance(x: Tensor, bounds: tuple[Tensor, Tensor]) -> float:
    """Returns how far a tensor is from lying between two others, at most."""
    least, largest = bounds
    wide = x.double()
    assert not wide.isnan().any()
    return float(torch.maximum(least - wide, wide - largest).clamp_min(0.0).max())


def test_a_gradient_next_to_a_kink_lies_between_those_of_both_sides() -> None:
    """P and S of one key of head 1 differ by 5e-7 of their size, those of head 0 by far more."""
    q, k, teacher_q, teacher_k = [y.detach() for y in _operands(torch.float32, "cpu", 40)]
    row, keys = slice(254, 255), slice(0, 335)  # what a causal mask lets this row see
    x = [q[1:, :2, row], k[1:, :1, keys], teacher_q[1:, :2, row], teacher_k[1:, :2, keys]]
    least, largest = _exact(_tv, x, {}, KINKED["TV"])[1]
    jumps = (largest - least).amax((0, 2, 3))
    assert jumps[1] > 1e-4
    # head 0 has weight 0, so look at the gradient of its row alone
    first = [y[:, :1] for y in x]
    least, largest = _exact(_tv, [torch.cat([y, y], 1) for y in first], {}, KINKED["TV"])[1]
    assert (largest - least).max() < 1e-6 < largest.max()


def _naive(function: Function, x: list[Tensor], is_causal: bool) -> list[Tensor]:
    """Maps in the operands' dtype, the function on them as on elements."""

    class Map:
        def __init__(self, value: Tensor) -> None:
            self.value = value

        def __getattr__(self, name: str) -> Any:
            def method(*args: Any, **kwargs: Any) -> Any:
                given = [-1 if a == "key" else a for a in args]
                return _wrapped(getattr(self.value, name)(*given, **kwargs))

            return method

    def _wrapped(value: Any) -> Any:
        return Map(value)

    for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "pow"):

        def method(self: Any, other: Any, name: str = name) -> Any:
            other = other.value if isinstance(other, Map) else other
            return Map(getattr(self.value, f"__{name}__")(other))

        setattr(Map, f"__{name}__", method)

    class Elements:
        def __getattr__(self, name: str) -> Any:
            q, k = (x[2], x[3]) if name == "t" else (x[0], x[1])
            scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
            if is_causal:
                shift = scores.shape[-1] - scores.shape[-2]
                hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + shift)
                scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
            return Map(scores)

    return _with_gradients(function(Elements()).value, x)
