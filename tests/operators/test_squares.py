"""Squared differences of two attention maps from one pass."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.support.gpus import on_a_gpu
from tests.support.interpreter import inside, quiet
from torch_streamkl.attention import ops
from torch_streamkl.kernels.arguments import Form
from torch_streamkl.kernels.row_state import empty_state, finish, merge, update
from torch_streamkl.program.divergences import Functional

pytestmark = quiet
TEXTS = ["(P-S)*(P-S)", "0.5*(P*P)+0.5*(S*S)-P*S"]


def _truth(text: str, t: Tensor, s: Tensor) -> list[Tensor]:
    """Value, H and G of every row, in float64."""
    logs = [x.double().log_softmax(-1) for x in (t, s)]
    variables = {"P": logs[0].exp(), "S": logs[1].exp(), "logP": logs[0], "logS": logs[1]}
    return [x.sum(-1) for x in Functional.of(text).sums(variables)]


@pytest.mark.parametrize("text", TEXTS)
def test_gradients_are_those_of_autograd(text: str) -> None:
    t, s = (torch.randn(3, 9, dtype=torch.float64).requires_grad_() for _ in range(2))
    p, q = t.softmax(-1), s.softmax(-1)
    value = eval(text, {"P": p, "S": q}).sum(-1)
    expected = torch.autograd.grad(value.sum(), (s, t))
    functional = Functional.of(text)
    assert functional.squares is not None
    variables = {"P": p, "S": q, "logP": p.log(), "logS": q.log()}
    f, h, g = functional.sums(variables)
    torch.testing.assert_close(f.sum(-1), value)
    for own, each, grad in ((q, h, expected[0]), (p, g, expected[1])):
        torch.testing.assert_close(each - own * each.sum(-1, keepdim=True), grad)


@pytest.mark.parametrize("text", ["P*logP", "P*P", "P*P*S", "abs(P-S)", "P*S"])
def test_what_is_none(text: str) -> None:
    assert Functional.of(text).squares is None


@triton.jit
def _kernel(
    t_ptr, s_ptr, out_ptr, SPLIT: tl.constexpr, COEFFICIENTS: tl.constexpr, CONFIG: tl.constexpr
):
    """8 rows of 64 scores, in tiles of 16; from SPLIT on in a state of its own."""
    rows = tl.arange(0, 8)
    first = empty_state(8)
    second = empty_state(8)
    for n in range(0, 64, 16):
        cols = n + tl.arange(0, 16)
        place = rows[:, None] * 64 + cols[None, :]
        t = tl.load(t_ptr + place)
        s = tl.load(s_ptr + place)
        if n < SPLIT:
            first = update(first, t, s, t > -1e38, True, COEFFICIENTS, CONFIG)
        else:
            second = update(second, t, s, t > -1e38, True, COEFFICIENTS, CONFIG)
    _lse_t, _lse_s, value, h, g = finish(
        merge(first, second, COEFFICIENTS), 0.0, 0.0, COEFFICIENTS, CONFIG
    )
    tl.store(out_ptr + rows, value)
    tl.store(out_ptr + 8 + rows, h)
    tl.store(out_ptr + 16 + rows, g)


@inside
@pytest.mark.parametrize("split", [0, 16, 48, 64])
@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_running_sums(text: str, near: bool, split: int) -> None:
    """Maxima that move by hundreds, keys that are gone, a student next to its teacher."""
    from torch_streamkl.kernels.arguments import Config, SideConfig

    t = torch.randn(8, 64) * torch.tensor([1.0, 1, 1, 30, 30, 300, 1, 1])[:, None]
    s = t + 1e-3 * torch.randn(8, 64) if near else torch.randn(8, 64) * 10
    for x in (t, s):
        x[2, :40] = -torch.inf
        x[6, 5:] = -torch.inf
    factor = Functional.of(text).squares
    assert factor is not None
    form = Form(*[0.0] * 6, factor)
    side = SideConfig(*[False] * len(SideConfig._fields))
    off = {**dict.fromkeys(Config._fields, False), "STUDENT": side, "TEACHER": side}
    log2e = 1.4426950408889634
    out = torch.empty(3, 8)
    _kernel[(1,)](t * log2e, s * log2e, out, SPLIT=split, COEFFICIENTS=form, CONFIG=Config(**off))
    for got, exact in zip(out, _truth(text, t, s), strict=True):
        # scores near 300 have five digits after the point in float32, a probability near 1 seven
        torch.testing.assert_close(got.double(), exact, rtol=5e-3 if near else 1e-4, atol=2e-7)


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("near", [None, 1e-2, 0.0])
@pytest.mark.parametrize("form", ["full", "causal", "lengths", "short", "wide"])
def test_on_hopper(form: str, near: float | None) -> None:
    """Beside two passes of plain torch in float64 on the same operands, and float32's.

    A probability has 22 bits, also where a difference of two is 0.
    """
    rows, keys = {"short": (193, 70), "wide": (2500, 2500)}.get(form, (1100, 1331))
    heads, dim = 4, 64 if form == "lengths" else 128
    shapes = [(2, heads, rows, dim), (2, 2, keys, dim)]
    teacher = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    if near is None:
        student = [torch.randn_like(x) for x in teacher]
    else:
        student = [x + near * torch.randn_like(x) for x in teacher]
    spread = 3.0 if form == "wide" else 1.0
    more = {
        "student_scale": spread * dim**-0.5,
        "teacher_scale": spread * dim**-0.5,
        "window_right": 0 if form == "causal" else None,
        "key_lengths": torch.tensor([700, 0], device="cuda") if form == "lengths" else None,
    }
    results = {}
    for name, impl, dtype, text in (
        ("hopper", "hopper", torch.bfloat16, TEXTS[0]),
        ("float32", "torch", torch.float32, TEXTS[0]),
        ("truth", "torch", torch.float64, TEXTS[0]),
        ("probabilities", "torch", torch.float32, "P*P+S*S"),
    ):
        x = [y.detach().to(dtype).requires_grad_() for y in (*student, *teacher)]
        value = ops.attention_kl(*x, functional=text, impl=impl, **more)[0]
        results[name] = [value, *torch.autograd.grad(value.sum(), x)]
    every = zip(
        *(results[x] for x in ("hopper", "float32", "truth", "probabilities")), strict=True
    )
    for n, (got, same, exact, size) in enumerate(every):
        allowed = 4 * (same.double() - exact).norm() + 2.0**-22 * exact.norm()
        if n == 0:  # squares of what is off by 2^-22
            allowed += 2.0**-22 * exact.norm() + 2.0**-44 * size.norm()
        else:  # operands of the matmul are rounded to 16 bits
            allowed += 2.0**-7 * exact.norm() + 2.0**-21 * size.norm()
        assert (got.double() - exact).norm() <= allowed, n
