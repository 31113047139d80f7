"""Products of one weight that stand after each other, and products of rows inside of sums.

``stack([x @ w.T, y @ w.T])`` is one product of stacked rows. A projection of the rows, such as the
weights of an indexer's heads, is a tensor that a row program reads.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.covering import every
from tests.support.losses import kd
from tests.support.named_inputs import given

VOCAB, HIDDEN, TEACHER_HIDDEN, FIRST, SECOND = 40, 8, 12, 6, 5
BATCH, ROWS, INDEX_HEADS, DIM = 2, 10, 3, 6


def made(*sizes, trained=()):
    return [torch.randn(size).requires_grad_(i in trained) for i, size in enumerate(sizes)]


def fused(program, inputs, remaining=0):
    return compare(program, inputs).check_fused(remaining=remaining)


def teacher(rows=FIRST):
    return made((rows, TEACHER_HIDDEN), (VOCAB, TEACHER_HIDDEN))


# ------------------------------------------------------------------------ one after another
def normalized(x, y, w):
    x, y, w = (F.normalize(z, dim=-1) for z in (x, y, w))
    return torch.cat([x @ w.T, y @ w.T]) * 10.0


def split_keys(x, y, w):
    rows = torch.cat([x, y])
    return torch.cat([rows @ w[:15].T, rows @ w[15:].T], -1)


JOINED = {
    "stacked": lambda x, y, w: torch.stack([x[:SECOND] @ w.T, y @ w.T]).flatten(0, 1),
    "three": lambda x, y, w: torch.cat([x[:2] @ w.T, x[2:] @ w.T, y @ w.T]),
    "with a bias": lambda x, y, w, b: torch.cat([F.linear(x, w, b), F.linear(y, w, b)]),
    "one detached": lambda x, y, w: torch.cat([x @ w.T, y.detach() @ w.T]),
    "one temperature": lambda x, y, w: torch.cat([x @ w.T / 2.0, y @ w.T / 2.0]),
    "normalized": normalized,
    "split keys": split_keys,
}


@pytest.mark.parametrize("name", every(2, JOINED))
def test_parts_are_one_product(name):
    logits = given("x y w b")(JOINED[name])
    sizes = (FIRST, HIDDEN), (SECOND, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)
    student = made(*sizes, trained=range(4))
    outcome = fused(
        lambda x, y, w, b, g, v: kd(logits(x, y, w, b), g @ v.T),
        [*student, *teacher(logits(*student).shape[0])],
    )
    assert outcome.kinds == {"linear_kl"}, outcome.report


MASK = (torch.arange(FIRST)[:, None] + torch.arange(VOCAB)) % 2 == 0


def without_gradient_of_one(x, y, w):
    with torch.no_grad():
        other = y @ w.T
    return torch.where(MASK[:, :1], x @ w.T, other)


# chosen operands would be as large as the scores, or there is no shared one
OTHERS = {
    "a mask of scores": lambda x, y, w: torch.where(MASK, x @ w.T, y @ w.T),
    "two weights": lambda x, y, w: torch.where(MASK[:, :1], x @ w.T, y @ (w * w).T),
    "without gradient of one": without_gradient_of_one,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_parts_are_no_product(name):
    inputs = made((FIRST, HIDDEN), (FIRST, HIDDEN), (VOCAB, HIDDEN), trained=range(3))
    outcome = compare(
        lambda x, y, w, g, v: kd(OTHERS[name](x, y, w), g @ v.T), [*inputs, *teacher()]
    ).check()
    assert "linear_kl" not in outcome.kinds, outcome.report


# ------------------------------------------------------------------------ products of rows
def indexer(iq, ik, iw, q, k):
    """KL of rows; ``iw`` has a weight for each row and head."""
    future = torch.full((ROWS, ROWS), float("-inf"), dtype=q.dtype).triu(1)
    s = ((iq @ ik.mT).relu() * iw.mT[..., None]).sum(1) + future
    t = ((q @ k.mT) * 0.3 + future).softmax(-1).mean(1)
    return (t * ((t + 1e-10).log() - (s.softmax(-1) + 1e-10).log())).sum(-1)


def of_two_layers(iq, ik, x, w, q, k):
    """The second layer's weights are computed after the first layer's loss."""
    first = indexer(iq, ik, x @ w, q, k).mean()
    return first + 2.0 * indexer(iq, ik, (x * 0.5) @ w, q, k).mean()


def read_again(iq, ik, x, w, q, k):
    weights = x @ w
    return indexer(iq, ik, weights, q, k).mean(), weights.mT * 2.0


def gated(iq, ik, x, w, q, k, v):
    return (indexer(iq, ik, x @ w, q, k) * (x @ v).squeeze(-1).sigmoid()).mean()


def activated(iq, ik, x, w, q, k):
    return indexer(iq, ik, (x @ w).sigmoid() * 0.5, q, k).mean()


OF_ROWS = [activated, gated, of_two_layers, read_again]


@pytest.mark.parametrize("program", every(2, OF_ROWS), ids=lambda x: getattr(x, "__name__", ""))
def test_a_projection_of_the_rows_is_read(program):
    sizes = (
        (BATCH, INDEX_HEADS, ROWS, DIM), (BATCH, 1, ROWS, DIM), (BATCH, ROWS, HIDDEN),
        (HIDDEN, INDEX_HEADS), (BATCH, 2, ROWS, DIM), (BATCH, 2, ROWS, DIM), (HIDDEN, 1),
    )  # fmt: skip
    inputs = made(*sizes, trained=(0, 1, 2, 3, 6))
    # a projection is no score; a gate is read after the program
    remaining = None if program is gated else 0
    outcome = fused(given("iq ik x w q k v")(program), inputs, remaining)
    assert outcome.kinds == {"row_program"}, outcome.report


def a_temperature_and_a_mixture(h, w, u, g, v):
    a = (h @ u).sigmoid()
    s, p = (h @ w.T / (a + 0.5)).softmax(-1), (g @ v.T).softmax(-1)
    return (p * (p.log() - (a * p + (1 - a) * s).log())).sum(-1).mean()


def a_gate_around_a_divergence(h, w, u, g, v):
    return -((h @ u).sigmoid() * (g @ v.T).softmax(-1) * (h @ w.T).log_softmax(-1)).sum(-1).mean()


@pytest.mark.parametrize(
    ("program", "kind"),
    [(a_temperature_and_a_mixture, "row_program"), (a_gate_around_a_divergence, "linear_kl")],
)
def test_numbers_that_rows_project(program, kind):
    inputs = made((FIRST, HIDDEN), (VOCAB, HIDDEN), (HIDDEN, 1), trained=range(3))
    assert fused(program, [*inputs, *teacher()], None).kinds == {kind}


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_bias_that_a_tensor_temperature_divides(is_trained):
    """As of DINO's center: the temperature is a number that a schedule holds, or learned."""
    inputs = made((FIRST, HIDDEN), (VOCAB, HIDDEN), (VOCAB,), trained=range(3))
    schedule = torch.tensor([0.3, 0.7, 1.1]).requires_grad_(is_trained)

    def program(h, w, b, g, v, c, times):
        return kd((h @ w.T + b) / times[0], (g @ v.T - c) / times[1])

    outcome = fused(program, [*inputs, *teacher(), *made((VOCAB,)), schedule])
    assert outcome.kinds == {"linear_kl"}, outcome.report
