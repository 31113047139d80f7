"""Casts that round, reinterpret or replace numbers are the program's own, never left out."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.losses import kd
from tests.support.named_inputs import given
from torch_streamkl.fx_passes import backend

of_scores = given("q k r u", {"s t": lambda q, k, r, u: (q @ k.mT, r @ u.mT)})


def inputs(dtype=torch.float32, n=24, m=32):
    return [
        torch.randn(2, 2, size, 8, dtype=dtype, requires_grad=i < 2)
        for i, size in enumerate((n, m, n, m))
    ]


def rounded(scores=lambda x: x, probabilities=lambda x: x):
    @of_scores
    def loss(s, t):
        p = probabilities(scores(t).softmax(-1))
        return (p * (p.clamp_min(1e-9).log() - scores(s).log_softmax(-1))).sum(-1)

    return loss


ROUNDINGS = {
    "float8": lambda x: x.to(torch.float8_e4m3fn).float(),
    "half": lambda x: x.half().float(),
    "integer": lambda x: x.mul(8.0).int().float(),
}


@pytest.mark.parametrize("where", ["scores", "probabilities"])
@pytest.mark.parametrize("name", ROUNDINGS)
def test_rounding_is_kept(name, where):
    given = [x.requires_grad_(x.requires_grad and name != "integer") for x in inputs()]
    outcome = compare(rounded(**{where: ROUNDINGS[name]}), given)
    assert outcome.num_fused == 0
    for ours, eager in zip(outcome.compiled.tensors(), outcome.eager.tensors(), strict=True):
        torch.testing.assert_close(ours, eager)


@of_scores
def softmaxes_with_a_type(s, t):
    log_s, p = F.log_softmax(s, -1, dtype=torch.float32), F.softmax(t, -1, dtype=torch.float32)
    return (p * (p.log() - log_s)).sum(-1)


@of_scores
def sums_with_a_type(s, t):
    return (s.softmax(-1) * t.softmax(-1)).sum(-1, dtype=torch.float32)


@pytest.mark.parametrize("loss", [softmaxes_with_a_type, sums_with_a_type])
def test_scores_are_rounded_before_what_has_a_narrower_type(loss):
    outcome = compare(loss, inputs(torch.float64), verify="never")
    assert outcome.num_fused == 0
    assert compare(loss, inputs(), verify="never").check().num_fused
    for ours, eager in zip(outcome.compiled.tensors(), outcome.eager.tensors(), strict=True):
        torch.testing.assert_close(ours, eager)


@of_scores
def back_to_the_dtype_of_the_inputs(s, t):
    log_p = F.log_softmax(s, -1, dtype=torch.float32).to(s.dtype)
    p = F.softmax(t, -1, dtype=torch.float32).to(s.dtype)
    return F.kl_div(log_p, p, reduction="none").sum(-1)


@pytest.mark.parametrize(
    ("loss", "dtype", "dynamic"),
    [
        (rounded(lambda x: x.double()), torch.float32, False),
        (rounded(lambda x: x.double()), torch.float32, True),
        (back_to_the_dtype_of_the_inputs, torch.bfloat16, False),
        (back_to_the_dtype_of_the_inputs, torch.float16, False),
    ],
)
def test_widening_is_the_identity(loss, dtype, dynamic):
    assert compare(loss, inputs(dtype), dynamic=dynamic).check().num_fused == 1


@pytest.mark.parametrize("options", [{}, {"neginf": -100.0}, {"nan": 1.0}], ids=str)
@pytest.mark.parametrize("is_masked", [False, True])
def test_nan_to_num(is_masked, options):
    @of_scores
    def loss(s, t):
        if is_masked:
            s = s.masked_fill(torch.arange(32) > 20, float("-inf"))
        return (t.softmax(-1) * -s.log_softmax(-1).nan_to_num(**options)).sum(-1)

    outcome = compare(loss, inputs()).check()
    assert outcome.num_fused == (not is_masked and "nan" not in options), str(outcome.report)


NUMBERS = {
    "distances": lambda dtype: -(torch.arange(6)[:, None] - torch.arange(6)).abs().to(dtype) / 3,
    "ids": lambda dtype: torch.log(torch.tensor([3, 90, 17, 4, 55, 21]).to(dtype) + 1.0) / 7,
    "a mask": lambda dtype: (torch.tensor([1, 0, 1, 1, 0, 0]) > 0).to(dtype) * 0.1,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_made_of_integers_are_as_wide_as_the_scores(name):
    """torch computes ``integers / 3`` in the default type, which scripts set to bfloat16."""

    @of_scores
    def loss(s, t):
        bias = NUMBERS[name](s.dtype)
        return kd(s + bias, t + bias)

    torch.set_default_dtype(torch.bfloat16)
    try:
        outcome = compare(loss, inputs(torch.float64, 6, 6), verify="never")
    finally:
        torch.set_default_dtype(torch.float32)
    assert outcome.num_fused == 1, outcome.report
    for ours, eager in zip(outcome.compiled.tensors(), outcome.eager.tensors(), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-10, atol=1e-12)


def test_a_mask_of_float64_keeps_the_digits_of_scores_of_float32():
    """Rows that it masks as a whole have them next to -1e4, which float32 has not."""

    @of_scores
    def loss(s, t):
        keep = torch.arange(24)[:, None] == torch.arange(5, 37)
        return kd(s, t + (1 - keep.double()) * -1e4)

    outcome = compare(loss, inputs(), verify="never").check()
    assert outcome.num_fused == 0
    assert "scores become float64" in str(outcome.report)


# of log-probabilities, and of given numbers in a narrow type
GIVEN = {
    "softmax": lambda s, z: s * z.float().softmax(-1),
    "dtype": lambda s, z: s * z.softmax(-1, dtype=torch.float32),
    "kl_div": lambda s, z: F.kl_div(s, z.float().softmax(-1), reduction="none"),
    "quotient": lambda s, z: s * (z.float().abs() * 4e3 / (z.float().abs() * 4e3).sum(-1, True)),
    "difference": lambda s, z: s * (z.float() - z.float().mean(-1, keepdim=True)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", GIVEN)
def test_given_tensors_are_computed_with_in_float32(name, dtype):
    """A cached teacher's logits, which the loss casts first."""

    def loss(x, w, z):
        return GIVEN[name]((x @ w.mT).log_softmax(-1), z).sum(-1)

    torch.manual_seed(0)
    x, w, z = torch.randn(5, 4), torch.randn(11, 4), (torch.randn(5, 11) * 4).to(dtype)
    with backend.collected() as report:
        found = compile_rewritten(loss, verify="never")(x, w, z)
    assert report.num_fused == 1, report
    torch.testing.assert_close(found, loss(x, w, z))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_given_tensors_are_computed_with_in_float64(dtype):
    """As the code says in the softmax, not by a cast."""

    def loss(x, w, z):
        s, q = x @ w.mT, (z * 2).softmax(-1, dtype=torch.float64)
        mixed = 0.5 * (s.softmax(-1) + q)
        return (s.softmax(-1) * (s.log_softmax(-1) - mixed.log())).sum(-1)

    torch.manual_seed(0)
    x, w = (torch.randn(n, 4, dtype=torch.float64) for n in (5, 11))
    z = torch.randn(5, 11).to(dtype)
    with backend.collected() as report:
        found = compile_rewritten(loss, verify="never")(x, w, z)
    assert report.num_fused == 1, report
    torch.testing.assert_close(found, loss(x, w, z), rtol=1e-12, atol=1e-12)


NARROW = {
    "a number of positions": lambda n, v, t: torch.arange(300, 300 + n, dtype=t)[:, None] + v,
    "a number": lambda n, v, t: torch.full((n, 1), 300.0, dtype=t) + v,
    "a scalar": lambda n, v, t: v + torch.scalar_tensor(300.0, dtype=t).expand(n, 1),
    "a cast": lambda n, v, t: torch.arange(300, 300 + n).to(t)[:, None] + v,
}


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("name", NARROW)
def test_positions_are_rounded_next_to_floating_point_numbers(name, rows):
    """bfloat16 has even numbers alone from 256 on."""

    def loss(x, w):
        places = NARROW[name](rows, torch.arange(11), torch.bfloat16)
        return torch.where(places % 2 == 0, x @ w.mT, -1e4).log_softmax(-1).sum(-1)

    torch.manual_seed(0)
    x, w = (torch.randn(n, 4, dtype=torch.float64) for n in (rows, 11))
    torch.testing.assert_close(compile_rewritten(loss, verify="never")(x, w), loss(x, w))
