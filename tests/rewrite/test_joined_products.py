"""Products of one weight that stand after each other, and products of rows inside of sums.

``stack([x @ w.T, y @ w.T])`` is one product of stacked rows. A projection of the rows, such as the
weights of an indexer's heads, is a tensor that a row program reads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import Outcome, compare
from tests.support.covering import every

OPTIONS = {"streamkl.min_mib": 0}
VOCAB, HIDDEN, TEACHER_HIDDEN, FIRST, SECOND = 40, 8, 12, 6, 5
BATCH, ROWS, INDEX_HEADS, DIM = 2, 10, 3, 6


def made(*sizes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in sizes]


def trained(*tensors: Tensor) -> list[Tensor]:
    return [x.requires_grad_() for x in tensors]


def kl(s: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


def fused(program: Any, inputs: list[Tensor], **options: Any) -> Outcome:
    outcome = compare(program, inputs, options=OPTIONS, **options).check()
    report = outcome.report
    assert outcome.num_fused == len(report.sites) > 0, report
    return outcome


# ------------------------------------------------------------------------ one after another
def stacked(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.stack([x[:SECOND] @ w.T, y @ w.T]).flatten(0, 1)


def three(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.cat([x[:2] @ w.T, x[2:] @ w.T, y @ w.T])


def with_bias(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.cat([F.linear(x, w, b), F.linear(y, w, b)])


def one_detached(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.cat([x @ w.T, y.detach() @ w.T])


def one_temperature(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.cat([x @ w.T / 2.0, y @ w.T / 2.0])


def normalized(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x, y, w = (F.normalize(z, dim=-1) for z in (x, y, w))
    return torch.cat([x @ w.T, y @ w.T]) * 10.0


def split_keys(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    rows = torch.cat([x, y])
    return torch.cat([rows @ w[:15].T, rows @ w[15:].T], -1)


JOINED = [stacked, three, with_bias, one_detached, one_temperature, normalized, split_keys]


@pytest.mark.parametrize("logits", every(2, JOINED), ids=lambda x: getattr(x, "__name__", ""))
def test_parts_are_one_product(logits: Any) -> None:
    x, y, w, b = trained(*made((FIRST, HIDDEN), (SECOND, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)))
    rows = logits(x, y, w, b).shape[0]
    teacher = made((rows, TEACHER_HIDDEN), (VOCAB, TEACHER_HIDDEN), seed=1)

    def program(x: Tensor, y: Tensor, w: Tensor, b: Tensor, g: Tensor, v: Tensor) -> Tensor:
        return kl(logits(x, y, w, b), g @ v.T)

    outcome = fused(program, [x, y, w, b, *teacher])
    assert outcome.kinds == {"linear_kl"}, outcome.report
    assert outcome.report.num_remaining == 0, outcome.report


@pytest.mark.parametrize("name", ["a mask of scores", "two weights", "without gradient of one"])
def test_other_parts_are_no_product(name: str) -> None:
    """Chosen operands would be as large as the scores, or there is no shared one."""
    x, y, w = trained(*made((FIRST, HIDDEN), (FIRST, HIDDEN), (VOCAB, HIDDEN)))
    teacher = made((FIRST, TEACHER_HIDDEN), (VOCAB, TEACHER_HIDDEN), seed=1)
    mask = (torch.arange(FIRST)[:, None] + torch.arange(VOCAB)) % 2 == 0

    def program(x: Tensor, y: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        if name == "a mask of scores":
            return kl(torch.where(mask, x @ w.T, y @ w.T), g @ v.T)
        if name == "two weights":
            return kl(torch.where(mask[:, :1], x @ w.T, y @ (w * w).T), g @ v.T)
        with torch.no_grad():
            other = y @ w.T
        return kl(torch.where(mask[:, :1], x @ w.T, other), g @ v.T)

    outcome = compare(program, [x, y, w, *teacher], options=OPTIONS).check()
    assert "linear_kl" not in outcome.kinds, outcome.report


# ------------------------------------------------------------------------ products of rows
def indexer(iq: Tensor, ik: Tensor, iw: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """KL of rows; ``iw`` has a weight for each row and head."""
    future = torch.full((ROWS, ROWS), float("-inf"), dtype=q.dtype).triu(1)
    s = ((iq @ ik.mT).relu() * iw.mT[..., None]).sum(1) + future
    t = ((q @ k.mT) * 0.3 + future).softmax(-1).mean(1)
    return (t * ((t + 1e-10).log() - (s.softmax(-1) + 1e-10).log())).sum(-1)


def projected(iq, ik, x, w, q, k, v):  # type: ignore[no-untyped-def]
    return indexer(iq, ik, x @ w, q, k).mean()


def activated(iq, ik, x, w, q, k, v):  # type: ignore[no-untyped-def]
    return indexer(iq, ik, (x @ w).sigmoid() * 0.5, q, k).mean()


def cut_off(iq, ik, x, w, q, k, v):  # type: ignore[no-untyped-def]
    return indexer(iq, ik, (x @ w).detach(), q, k).mean()


def gated(iq, ik, x, w, q, k, v):  # type: ignore[no-untyped-def]
    return (indexer(iq, ik, x @ w, q, k) * (x @ v).squeeze(-1).sigmoid()).mean()


def of_two_layers(iq, ik, x, w, q, k, v):  # type: ignore[no-untyped-def]
    """The second layer's weights are computed after the first layer's loss."""
    first = indexer(iq, ik, x @ w, q, k).mean()
    return first + 2.0 * indexer(iq, ik, (x * 0.5) @ w, q, k).mean()


def read_again(iq, ik, x, w, q, k, v):  # type: ignore[no-untyped-def]
    weights = x @ w
    return indexer(iq, ik, weights, q, k).mean(), weights.mT * 2.0


OF_ROWS = [projected, gated, activated, of_two_layers, cut_off, read_again]


@pytest.mark.parametrize("program", every(2, OF_ROWS), ids=lambda x: getattr(x, "__name__", ""))
def test_a_projection_of_the_rows_is_read(program: Any) -> None:
    sizes = (
        (BATCH, INDEX_HEADS, ROWS, DIM), (BATCH, 1, ROWS, DIM), (BATCH, ROWS, HIDDEN),
        (HIDDEN, INDEX_HEADS), (BATCH, 2, ROWS, DIM), (BATCH, 2, ROWS, DIM), (HIDDEN, 1),
    )  # fmt: skip
    iq, ik, x, w, q, k, v = made(*sizes)
    outcome = fused(program, [*trained(iq, ik, x, w), q, k, *trained(v)])
    assert outcome.kinds == {"row_program"}, outcome.report
    if program is not gated:  # whose gate is read after the program
        assert outcome.report.num_remaining == 0, outcome.report  # a projection is no score


def test_temperatures_and_mixtures_that_rows_project() -> None:
    h, w, u = trained(*made((FIRST, HIDDEN), (VOCAB, HIDDEN), (HIDDEN, 1)))
    teacher = made((FIRST, TEACHER_HIDDEN), (VOCAB, TEACHER_HIDDEN), seed=1)

    def program(h: Tensor, w: Tensor, u: Tensor, g: Tensor, v: Tensor) -> Tensor:
        a = (h @ u).sigmoid()
        s, p = (h @ w.T / (a + 0.5)).softmax(-1), (g @ v.T).softmax(-1)
        return (p * (p.log() - (a * p + (1 - a) * s).log())).sum(-1).mean()

    assert fused(program, [h, w, u, *teacher]).kinds == {"row_program"}


def test_a_gate_around_a_divergence_keeps_its_operator() -> None:
    h, w, u = trained(*made((FIRST, HIDDEN), (VOCAB, HIDDEN), (HIDDEN, 1)))
    teacher = made((FIRST, TEACHER_HIDDEN), (VOCAB, TEACHER_HIDDEN), seed=1)

    def program(h: Tensor, w: Tensor, u: Tensor, g: Tensor, v: Tensor) -> Tensor:
        p = (g @ v.T).softmax(-1)
        return -((h @ u).sigmoid() * p * (h @ w.T).log_softmax(-1)).sum(-1).mean()

    assert fused(program, [h, w, u, *teacher]).kinds == {"linear_kl"}


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_bias_that_a_tensor_temperature_divides(is_trained: bool) -> None:
    """As of DINO's center: the temperature is a number that a schedule holds, or learned."""
    h, w, b = trained(*made((FIRST, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)))
    teacher = made((FIRST, TEACHER_HIDDEN), (VOCAB, TEACHER_HIDDEN), (VOCAB,), seed=1)
    schedule = torch.tensor([0.3, 0.7, 1.1]).requires_grad_(is_trained)

    def program(h, w, b, g, v, c, times):  # type: ignore[no-untyped-def]
        return kl((h @ w.T + b) / times[0], (g @ v.T - c) / times[1])

    outcome = fused(program, [h, w, b, *teacher, schedule])
    assert outcome.kinds == {"linear_kl"} and not outcome.report.num_remaining, outcome.report
