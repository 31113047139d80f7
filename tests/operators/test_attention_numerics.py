"""Numbers at the edges: huge scores, underflow, masked rows, guards, impossible keys; no NaN."""

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.denominators import check_denominators, denominators
from tests.support.gpus import on_a_gpu
from tests.support.problems import INPUTS
from torch_streamkl import attention_kl
from torch_streamkl.attention import ops, reference
from torch_streamkl.divergences import row_state
from torch_streamkl.program.divergences import named

IMPLS = ["reference", "torch"]
if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
    IMPLS.append("triton")
of_impls = pytest.mark.parametrize("impl", IMPLS)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DIVERGENCES = ("forward_kl", "reverse_kl", "cross_entropy", "jeffreys", "js", "tv")
LOWEST = torch.finfo(torch.float32).min
FILLED = {
    "no_clamp": named("cross_entropy").text,
    "clamp_student": named("cross_entropy", student_clamp=1e-6).text,
    "clamp_teacher": named("jeffreys", teacher_clamp=1e-6).text,
    "clamp_both": named("reverse_kl", student_clamp=1e-6, teacher_clamp=1e-4).text,
    # weights that are clamped too: a key without probability adds nothing, or something
    "clamp_weight": "max(P,1e-3)*(max(logP,-7.0)-max(logS,-7.0))",
    "clamp_weight_adds": "max(P,1e-3)*(max(logP,-7.0)-max(logS,-20.0))",
}


def run(impl: str, *tensors: Tensor, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Rows and gradients of their sum, on the CPU in float64."""
    options = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in options.items()}
    inputs = [x.detach().to(DEVICE).requires_grad_() for x in tensors]
    value = attention_kl(*inputs, impl=impl, **options)
    # an infinite row has no useful gradient, and infinity times 0 must not reach the others
    grads = torch.autograd.grad(value[value.isfinite()].sum(), inputs)
    return value.detach().double().cpu(), [g.double().cpu() for g in grads]


def scores_only(student: list[float], teacher: list[float]) -> list[Tensor]:
    """Inputs with one row whose scores are exactly these."""
    one = torch.ones(1, 1, 1, 1)
    keys = [torch.tensor(x).view(1, 1, -1, 1) for x in (student, teacher)]
    return [one, keys[0], one, keys[1]]


@of_impls
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_logits_of_ten_thousand(divergence: str, dtype: torch.dtype, impl: str) -> None:
    if impl == "triton" and DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16")
    torch.manual_seed(0)
    tensors = []
    for _ in range(2):
        q, k = torch.randn(1, 1, 5, 16), torch.randn(1, 1, 19, 16)
        largest = (q @ k.mT).abs().max()
        tensors += [(q * (4e4 / largest)).to(dtype), k.to(dtype)]  # the default scale divides by 4
    truth, gradients = run("reference", *(x.double() for x in tensors), divergence=divergence)
    size = max(
        float((q.double() @ k.double().mT).abs().max()) / 4 for q, k in (tensors[:2], tensors[2:])
    )
    assert size > 9e3
    value, got = run(impl, *tensors, divergence=divergence)
    # the scores themselves carry this many float32 roundings, and values are differences of them;
    # gradients of scores are, too, and the other operand multiplies what they lose
    unit = torch.finfo(torch.float32).eps * size
    assert (value - truth).abs().max() <= 4 * unit * (1 + truth.abs().max() / size)
    q, k, tq, tk = (float(x.abs().max()) / 4 for x in tensors)  # times the scale
    for x, expected, operand in zip(got, gradients, (k, q, tk, tq), strict=True):
        assert x.isfinite().all()
        bound = 8 * unit * expected.abs().max() + torch.finfo(dtype).eps * expected.abs().max()
        assert (x - expected).abs().max() <= bound + unit * operand


@of_impls
def test_probabilities_underflow(impl: str) -> None:
    # S of the second key is e^-500: no float32 holds it, its logarithm is exact all the same
    value, gradients = run(
        impl, *scores_only([0.0, -500.0], [0.0, 0.0]), student_scale=1.0, teacher_scale=1.0
    )
    assert math.isclose(value.item(), 250 - math.log(2), rel_tol=1e-6)
    assert all(g.isfinite().all() for g in gradients)
    torch.testing.assert_close(
        gradients[1].flatten(), torch.tensor([0.5, -0.5]).double(), rtol=1e-6, atol=0
    )


@of_impls
@pytest.mark.parametrize("divergence", ["forward_kl", "jeffreys"])
def test_impossible_for_the_student_is_infinite(divergence: str, impl: str) -> None:
    q, k = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4)
    bias = torch.tensor([[0.0, -math.inf, 0.0], [0.0, 0.0, 0.0]])
    value, gradients = run(impl, q, k, q, k, student_bias=bias, divergence=divergence)
    assert value[0, 0, 0] == math.inf
    assert value[0, 0, 1].isfinite()
    # the student's gradient has a value even there; the teacher's is infinity minus infinity
    assert gradients[0].isfinite().all()
    assert gradients[1].isfinite().all()


@of_impls
@pytest.mark.parametrize("divergence", ["forward_kl", "js", "tv", "cross_entropy"])
def test_impossible_for_the_teacher_is_finite(divergence: str, impl: str) -> None:
    torch.manual_seed(1)
    q, k = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4)
    bias = torch.tensor([[0.0, -math.inf, 0.0], [0.0, 0.0, -math.inf]])
    wide = (x.double() for x in (q, k, q, k))
    truth = run("reference", *wide, teacher_bias=bias.double(), divergence=divergence)
    got = run(impl, q, k, q, k, teacher_bias=bias, divergence=divergence)
    assert truth[0].isfinite().all()
    torch.testing.assert_close(got[0], truth[0], rtol=1e-5, atol=1e-6)
    for a, b in zip(got[1], truth[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@of_impls
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_rows_without_keys_are_zero(divergence: str, impl: str) -> None:
    """With sinks, too, where no key is allowed anywhere."""
    torch.manual_seed(2)
    q, k = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 5, 4)
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool)
    mask[0, 0, 1] = False
    options = {"attn_mask": mask, "key_lengths": torch.tensor([5, 0]), "divergence": divergence}
    value, gradients = run(impl, q, k, q.flip(0), k.flip(0), **options)
    assert value[0, 0, 1] == 0
    assert (value[1] == 0).all()
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][0, 0, 1] == 0).all()
    assert all((g[1] == 0).all() for g in gradients)
    assert all((g[0] != 0).any() for g in gradients)
    for sink in (None, torch.zeros(1)):
        options = {"attn_mask": ~mask[:1, :, 2:], "student_sink": sink, "teacher_sink": sink}
        value, gradients = run(impl, q, k, q, k, divergence=divergence, **options)
        assert (value == 0).all()
        assert all((g == 0).all() for g in gradients)


@of_impls
@pytest.mark.parametrize("inside", [True, False])
def test_clamp_is_exact_on_both_sides_of_its_bound(inside: bool, impl: str) -> None:
    # S = (1 - p, p) with p just above or below the clamp
    p = 0.01
    clamp = p * (1 - 1e-3 if inside else 1 + 1e-3)
    logit = math.log(p / (1 - p))
    options = {"student_clamp": clamp, "student_scale": 1.0, "teacher_scale": 1.0}
    value, gradients = run(impl, *scores_only([0.0, logit], [0.0, 0.0]), **options)
    expected = -math.log(2) - 0.5 * (math.log(1 - p) + math.log(max(p, clamp)))
    assert math.isclose(value.item(), expected, rel_tol=1e-6)
    # below the clamp only the first key's logarithm depends on the scores
    slope = (1 - p) - 0.5 if inside else 0.5 * (1 - p) - 0.5
    torch.testing.assert_close(gradients[1][0, 0, 0, 0].item(), slope, rtol=1e-5, atol=1e-6)


@of_impls
def test_eps_keeps_an_impossible_key_finite(impl: str) -> None:
    tensors = scores_only([0.0, -2e4], [0.0, 0.0])
    value, gradients = run(impl, *tensors, student_eps=1e-3, student_scale=1.0, teacher_scale=1.0)
    expected = -math.log(2) - 0.5 * (math.log(1.001) + math.log(1e-3))
    assert math.isclose(value.item(), expected, rel_tol=1e-6)
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("impl", IMPLS[1:])
@pytest.mark.parametrize(
    ("fill", "places", "num_keys"),
    [
        (-3.0, (0.0, -6.0), 9),
        (-2e3, (0.0, -1997.0, -4e3), 130),
        (-1e4, (0.0, -9997.0, -2e4), 9),
        (LOWEST, (0.0, -2e4), 130),
        # far below all rows, which decide together on a second pass
        (-1e4, (0.0, 20.0), 9),
        (LOWEST, (0.0, 20.0), 130),
    ],
)
@pytest.mark.parametrize("name", FILLED)
def test_filled_keys_near_and_far(
    name: str, fill: float, places: tuple[float, ...], num_keys: int, impl: str
) -> None:
    """NOTE [Masked keys far below] in row_state.py: a row for every two places of its scores."""
    torch.manual_seed(5)
    offsets = torch.cartesian_prod(*[torch.tensor((*places, 0.0))] * 2)
    num_rows = len(offsets)
    mask = torch.rand(1, 1, num_rows, num_keys) > 0.3
    mask[..., -1, :] = True
    if min(places) < 0.0:
        mask[..., -2, :] = False
    student_bias, teacher_bias = (x[None, None, :, None] for x in offsets.unbind(1))
    tensors = [torch.randn(1, 1, n, 8) for n in (num_rows, num_keys) * 2]
    options = {"mask_value": fill, "functional": FILLED[name]}
    options |= {"student_scale": 0.3, "teacher_scale": 0.3}
    masks = {"mask": mask, "student_bias": student_bias, "teacher_bias": teacher_bias}
    weight = torch.randn(1, 1, num_rows)

    exact = [x.double().requires_grad_() for x in tensors]
    rows = reference.attention_kl_rows(ops.problem_of(*exact, **masks, **options)[0])
    truth = [rows, *torch.autograd.grad(rows, exact, weight.double())]
    inputs = [x.to(DEVICE).requires_grad_() for x in tensors]
    masks = {key: x.to(DEVICE) for key, x in masks.items()}
    value = ops.attention_kl(*inputs, **masks, **options, impl=impl)[0]
    found = [value, *torch.autograd.grad(value, inputs, weight.to(DEVICE))]
    # roundings of scores; gradients are differences of terms as large as the values
    unit = 8 * torch.finfo(torch.float32).eps * (4.0 + max(map(abs, places)))
    for x, expected in zip(found, truth, strict=True):
        size = rows.abs() if x is value else rows.abs().max() + expected.abs().max()
        assert ((x.cpu() - expected).abs() <= unit * (1.0 + size)).all()


@of_impls
def test_equal_models_have_no_divergence(impl: str) -> None:
    torch.manual_seed(4)
    x = dict.fromkeys(INPUTS, torch.randn(1, 1, 7, 8) * 30)
    for divergence in ("forward_kl", "reverse_kl", "jeffreys", "js", "tv"):
        value, gradients = run(impl, *x.values(), divergence=divergence)
        assert value.abs().max() <= 1e-5
        assert all(g.abs().max() <= 1e-3 for g in gradients)


def test_denominators_of_any_two_sizes() -> None:
    l_t, l_s, expected = denominators()
    zero = torch.zeros_like(l_t)
    form = named("forward_kl").bilinear
    assert form is not None
    sums = row_state.finish(row_state.RowState(zero, l_t, zero, l_s, zero, zero), form)
    check_denominators(sums.value, expected)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=on_a_gpu,
        ),
    ],
)
@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_scale_without_dimensions_is_not_rounded(device: str, on_cpu: bool) -> None:
    torch.manual_seed(4)
    q, k = (torch.randn(1, 1, 8, 16).to(device, torch.bfloat16) for _ in range(2))
    scale = torch.tensor(0.31109869480133057, device="cpu" if on_cpu else device)
    scale.requires_grad_()
    exact = (q.double() * scale.double().to(device)).to(torch.bfloat16)
    value = attention_kl(q, k, k, q, student_scale=scale)
    assert torch.equal(value, attention_kl(exact, k, k, q, student_scale=1.0))
    (grad,) = torch.autograd.grad(value.sum(), scale)
    assert grad.shape == () and grad.device == scale.device and grad != 0


@pytest.mark.parametrize("head_mean", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options", [{"divergence": "tv"}, {"divergence": "reverse_kl", "teacher_clamp": 1.0}]
)
def test_gradients_of_rows_whose_sides_agree_on_one_key(
    options: dict[str, Any], dtype: torch.dtype, head_mean: bool
) -> None:
    """Forward and backward agree on which of P and S is larger, and is at a clamp."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, n, 8, generator=generator, dtype=dtype) * 5 for n in (400, 9))
    if head_mean:
        options = {**options, "head_reduction": "mean"}
    found = []
    for impl in ("torch", "reference"):
        exact = torch.float64 if impl == "reference" else dtype
        trained, keys, teacher = (x.to(exact).clone() for x in (q, k, q * 1.1))
        trained.requires_grad_()
        attention_kl(trained, keys, teacher, keys, **options, impl=impl).sum().backward()
        assert trained.grad is not None
        found.append(trained.grad.double())
    torch.testing.assert_close(*found, atol=2e-3, rtol=1e-3)
