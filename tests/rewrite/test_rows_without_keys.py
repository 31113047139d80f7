"""Attention left over by a fused KL keeps eager's values and gradients in fully masked rows."""

import math

import pytest
import torch

from tests.support.compiling import compile_rewritten
from tests.support.covering import every
from torch_streamkl.fx_passes import backend

LOWEST = torch.finfo(torch.float32).min
NUM_ROWS, HEAD_DIM = 7, 8


MASKS = {
    "filled": lambda scores, keep: scores.masked_fill(~keep, LOWEST),
    "chosen": lambda scores, keep: torch.where(keep, scores, LOWEST),
    "added": lambda scores, keep: scores + torch.zeros(keep.shape).masked_fill(~keep, LOWEST),
    "scaled": lambda scores, keep: scores + (1.0 - keep.float()) * LOWEST,
    "a billion": lambda scores, keep: scores + (1.0 - keep.float()) * -1e9,
}


def compiled(fn, inner="eager"):
    return compile_rewritten(fn, inner=inner, verify="never")


@pytest.mark.parametrize("mask_scores", every(2, MASKS.values()))
def test_gradients_are_those_of_eager(mask_scores):
    def attention(q, k, v, t, keep):
        student = mask_scores(q @ k.mT * HEAD_DIM**-0.5, keep).softmax(-1)
        teacher = mask_scores(t @ t.mT, keep).softmax(-1)
        rows = (teacher * (teacher.clamp_min(1e-9).log() - student.clamp_min(1e-9).log())).sum(-1)
        return rows, student @ v

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, NUM_ROWS, HEAD_DIM, generator=generator) for _ in range(4)]
    keep = torch.ones(NUM_ROWS, NUM_ROWS, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    keep[0, ..., :3] = False  # rows 0, 1 and 2 of the first sequence have no key
    weights = torch.randn(2, 2, NUM_ROWS, HEAD_DIM, generator=generator)

    def run(fn):
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        rows, out = fn(*leaves, inputs[3], keep)
        loss = (out * weights).sum() + rows.sum()
        return [rows.detach(), out.detach(), *torch.autograd.grad(loss, leaves)]

    with backend.collected() as report:
        found = run(compiled(attention, "aot_eager"))
    assert report.num_fused == 1, report
    assert report.num_remaining == 0, report
    for name, a, b in zip(("rows", "out", "q", "k", "v"), run(attention), found, strict=True):
        # a few roundings of sums over the rows; the wrong gradient was off by a factor of NUM_ROWS
        tolerance = (
            8 * math.sqrt(NUM_ROWS) * torch.finfo(torch.float32).eps * float(a.abs().max() + 1)
        )
        torch.testing.assert_close(
            b, a, rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_scores_next_to_a_billion_have_digits_left_in_float64():
    """Float64 keeps the scores of a row that -1e9 is added to: it has eager's gradient."""
    q, k, r, s = (torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (5, 7, 5, 7))
    keep = torch.ones(5, 7, dtype=torch.bool).tril()
    keep[2] = False

    def step(q):
        student, teacher = (
            MASKS["a billion"](x, keep).log_softmax(-1) for x in (q @ k.mT, r @ s.mT)
        )
        return -(teacher.exp() * student).sum()

    leaf = q.clone().requires_grad_()
    with backend.collected() as report:
        compiled(step)(leaf).backward()
    assert report.num_fused == 1, report
    kept = keep | ~keep.any(-1, keepdim=True)  # a number for the whole row changes no softmax
    p, t = (x.masked_fill(~kept, -math.inf).softmax(-1) for x in (q @ k.mT, r @ s.mT))
    torch.testing.assert_close(leaf.grad, (p - t) @ k, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["where", "tensor", "integers"])
def test_a_mask_that_is_added_to_one_side_alone(kind):
    """The teacher is uniform in a row without keys, and the student learns from it."""
    keep = torch.ones(NUM_ROWS, NUM_ROWS, dtype=torch.bool).tril(-1)  # row 0 has no key

    def loss(q, k, t, added):
        mask = torch.zeros(keep.shape).masked_fill(~keep, -1e9) if kind == "where" else added
        mask = (mask - 1) * 1e9 if kind == "integers" else mask
        teacher = (t @ t.mT + mask).softmax(-1)
        return -(teacher * (q @ k.mT).log_softmax(-1)).sum()

    generator = torch.Generator().manual_seed(0)
    q, k, t = (torch.randn(1, 2, NUM_ROWS, HEAD_DIM, generator=generator) for _ in range(3))
    added = torch.zeros(keep.shape).masked_fill(~keep, -1e9)
    added = keep.int() if kind == "integers" else added
    leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
    with backend.collected() as report:
        found = torch.autograd.grad(compiled(loss)(*leaves, t, added), leaves)
    assert report.num_fused, report

    q, k, t = q.double(), k.double(), t.double()
    removed = (t @ t.mT).masked_fill(~keep, -torch.inf).softmax(-1)
    teacher = removed.nan_to_num(1 / NUM_ROWS)
    slope = (q @ k.mT).softmax(-1) - teacher
    for x, exact in zip(found, (slope @ k, slope.mT @ q), strict=True):
        torch.testing.assert_close(x.double(), exact, rtol=1e-4, atol=1e-5)


def float64_operands():
    make = torch.Generator().manual_seed(0)
    return [torch.randn(*n, generator=make, dtype=torch.float64) for n in ((5, 4), (7, 4)) * 2]


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float64).min])
def test_probabilities_of_a_filled_row_are_uniform(fill):
    """They sum to one, as those of any other row do; after -inf they would be NaN."""

    def loss(q, k, r, s):
        keep = torch.arange(7) <= torch.arange(5)[:, None] - 2  # rows 0 and 1 have no key
        p = (q @ k.T).masked_fill(~keep, fill).softmax(-1)
        return ((p - p.mean(-1, keepdim=True)) * (r @ s.T)).sum()

    operands = float64_operands()
    with backend.collected() as report:
        found = compiled(loss)(*operands)
    assert report.num_fused == 1, report
    torch.testing.assert_close(found, loss(*operands), rtol=1e-12, atol=1e-12)


def test_a_fill_keeps_its_digits():
    """Of float64 scores, -1.2 is no number of float32: a softcap makes it of -inf."""

    def loss(q, k, r, s):
        keep = torch.arange(7) <= 3
        a, b = (
            4.0 * torch.tanh((x @ y.T).masked_fill(~keep, -math.inf) / 4.0) * 0.3
            for x, y in ((q, k), (r, s))
        )
        return torch.nn.functional.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="sum")

    operands = float64_operands()
    with backend.collected() as report:
        found = compiled(loss)(*operands)
    assert report.num_fused == 1, report
    torch.testing.assert_close(found, loss(*operands), rtol=1e-13, atol=1e-13)
