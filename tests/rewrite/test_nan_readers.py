"""Code that asks for the NaN or infinity of eager code sees them: the divergence is not fused."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.comparing import compare
from tests.support.covering import every
from tests.support.losses import rows_of_kl as kl_of_logs
from torch_streamkl import explain
from torch_streamkl.fx_passes import backend

SIZES = (5, 7, 5, 7)


def maps() -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, n, 4, generator=make, dtype=torch.float64) for n in SIZES]


def causal(scores: Tensor, fill: float) -> Tensor:
    keep = torch.ones(5, 7, dtype=torch.bool).tril(2)
    return scores.masked_fill(~keep, fill)


def by_probabilities(s: Tensor, t: Tensor) -> Tensor:
    p = t.softmax(-1)
    return (p * (p.log() - s.softmax(-1).log())).sum(-1)


def clamped(s: Tensor, t: Tensor) -> Tensor:
    p, q = t.softmax(-1).clamp(min=1e-9), s.softmax(-1).clamp(min=1e-9)
    return (p * (p.log() - q.log())).sum(-1)


def variation(s: Tensor, t: Tensor) -> Tensor:
    return (t.softmax(-1) - s.softmax(-1)).abs().sum(-1)


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "nan_to_num": lambda rows: rows.nan_to_num(),
    "nan_to_num of the total": lambda rows: torch.nan_to_num(rows.sum(), nan=3.0),
    "isnan": lambda rows: rows.isnan().sum() + rows.nansum(),
    "isfinite": lambda rows: torch.where(torch.isfinite(rows), rows, 0.0),
    "gt": lambda rows: torch.where(rows > 0.1, rows, 0.0).sum(),
}


def written(rows: Tensor) -> Tensor:
    table = torch.zeros(3, *rows.shape, dtype=rows.dtype)
    table[1] = rows
    return table.nan_to_num()


def in_a_checkpoint(rows: Tensor) -> Tensor:
    return checkpoint(torch.nan_to_num, rows, use_reentrant=False)


def in_a_branch(rows: Tensor) -> Tensor:
    return torch.cond(torch.ones(()) > 0, torch.isnan, torch.isinf, (rows,))


# what ranks, rounds or reads bits makes numbers, too
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "written to a part": written,
    "in a checkpoint": in_a_checkpoint,
    "in a branch": in_a_branch,
    "any": lambda rows: (rows * 0).any(),
    "count_nonzero": lambda rows: torch.count_nonzero(rows * 0),
    "argmax": lambda rows: rows.argmax(-1),
    "max": lambda rows: rows.max(-1).indices,
    "sort": lambda rows: torch.cat([rows, torch.ones_like(rows)], -1).sort(-1).values[..., :5],
    "long": lambda rows: rows.long(),
    "bits": lambda rows: rows.view(torch.int64),
    "bucketize": lambda rows: torch.bucketize(rows, torch.tensor([0.0, 9.0], dtype=rows.dtype)),
    "sign": torch.sign,
    "in place": lambda rows: (rows * 1).lt_(1.0),
}
OF_INFINITY: dict[str, Callable[[Tensor], Tensor]] = {
    "a quotient": lambda rows: 1 / (1 + rows),
    "a power": lambda rows: (1 + rows) ** -1,
    "a limit": lambda rows: rows.clamp(max=1e4),
    "exp": lambda rows: torch.exp(-rows / 1e3),
    "atan": torch.atan,
}


def rewritten(
    rows: Callable[[Tensor, Tensor], Tensor], read: Callable[[Tensor], Tensor], fill: float | None
) -> tuple[int, str]:
    """How many sites are fused, and the reason where none is; the numbers are eager's."""

    def program(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        s, t = q @ k.mT, qt @ kt.mT
        if fill is not None:
            s, t = causal(s, fill), causal(t, fill)
        return read(rows(s, t))

    torch._dynamo.reset()
    with backend.collected() as report:
        options = {"streamkl.inner": "eager", "streamkl.verify": "never"}
        compiled = torch.compile(program, backend="streamkl", options=options)
        torch.testing.assert_close(compiled(*maps()), program(*maps()), equal_nan=True)
    return report.num_fused, " ".join(site.reason for site in report.sites)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("rows", "fill"),
    [(kl_of_logs, -math.inf), (by_probabilities, -1e4), (by_probabilities, None)],
    ids=["masked by -inf", "masked by -1e4", "not masked"],
)
def test_left_alone(
    rows: Callable[[Tensor, Tensor], Tensor], fill: float | None, reader: str
) -> None:
    num_fused, reason = rewritten(rows, READERS[reader], fill)
    assert num_fused == 0
    assert "reads the divergence, and eager has" in reason


@pytest.mark.parametrize("reader", every(2, NUMBERS))
def test_what_makes_numbers_of_nan(reader: str) -> None:
    num_fused, reason = rewritten(kl_of_logs, NUMBERS[reader], -math.inf)
    assert num_fused == 0
    assert "reads the divergence, and eager has NaN" in reason


def underflowing(s: Tensor, t: Tensor) -> Tensor:
    return by_probabilities(s * 400, t)


@pytest.mark.parametrize("reader", OF_INFINITY)
def test_what_makes_numbers_of_infinity(reader: str) -> None:
    num_fused, reason = rewritten(underflowing, OF_INFINITY[reader], None)
    assert num_fused == 0
    assert "reads the divergence, and eager has infinity" in reason
    assert rewritten(kl_of_logs, OF_INFINITY[reader], None)[0] == 1


PASSES_ON: dict[str, Callable[[Tensor], Tensor]] = {
    "mean of squares": lambda rows: rows.pow(2).mean(),
    "weights": lambda rows: (rows * torch.ones_like(rows, dtype=torch.int64)).sum() / 3,
    "a mask of its shape": lambda rows: torch.ones(5, dtype=torch.bool).expand_as(rows) * rows,
    "a size": lambda rows: rows.sum() / rows.shape[-1] * torch.arange(rows.shape[0]),
}


@pytest.mark.parametrize("passes_on", PASSES_ON)
@pytest.mark.parametrize(("rows", "fill"), [(by_probabilities, None), (kl_of_logs, -math.inf)])
def test_fuses_where_nothing_reads(
    rows: Callable[[Tensor, Tensor], Tensor], fill: float | None, passes_on: str
) -> None:
    def program(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        s, t = q @ k.mT, qt @ kt.mT
        if fill is not None:
            s, t = causal(s, fill), causal(t, fill)
        return PASSES_ON[passes_on](rows(s, t))

    assert explain(program, *maps()).num_fused == 1


@pytest.mark.parametrize("log_normalizer", [1, 2])
def test_a_reader_outside_of_the_checkpoint(log_normalizer: int) -> None:
    def rows(s: Tensor, t: Tensor) -> Tensor:
        return kl_of_logs(s, t)

    def nested(
        q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, level: int = log_normalizer
    ) -> Tensor:
        if level == 0:
            return rows(causal(q @ k.mT, -math.inf), causal(qt @ kt.mT, -math.inf))
        inner = functools.partial(nested, level=level - 1)
        return checkpoint(inner, q, k, qt, kt, use_reentrant=False)

    def read(*given: Tensor) -> Tensor:
        return nested(*given).nan_to_num()

    assert explain(nested, *maps()).num_fused == 1
    report = explain(read, *maps())
    assert report.num_fused == 0
    assert "nan_to_num reads the divergence" in str(report)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("rows", "fill"),
    [(kl_of_logs, None), (kl_of_logs, -1e4), (clamped, None), (clamped, -1e4), (variation, None)],
    ids=["no mask", "a number as mask", "clamped", "clamped and masked", "no logarithm"],
)
def test_fuses_where_eager_has_numbers(
    rows: Callable[[Tensor, Tensor], Tensor], fill: float | None, reader: str
) -> None:
    num_fused, reason = rewritten(rows, READERS[reader], fill)
    assert num_fused == 1, reason


def test_the_report_names_the_reader() -> None:
    def program(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        rows = kl_of_logs(causal(q @ k.mT, -math.inf), causal(qt @ kt.mT, -math.inf))
        return rows.nan_to_num().sum()

    report = explain(program, *maps())
    assert report.num_fused == 0
    assert "nan_to_num reads the divergence, and eager has NaN where a key" in str(report)


@pytest.mark.parametrize("learns", [False, True])
def test_a_comparison_inside_of_a_program_reads_nan(learns: bool) -> None:
    """Of sums over the rows: it has no gradient, where what it chooses has one."""

    def program(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor) -> Tensor:
        p = (h @ w.T).masked_fill(torch.ones(6, 12, dtype=torch.bool).tril(-1), -1e4).softmax(-1)
        e = (ht @ wt.T).exp()
        r = (p * (p / (e / e.sum(-1, keepdim=True))).log()).sum(-2)
        return torch.where(r > 0.1, r, 0.0).mean()

    shapes = ((6, 5), (12, 5), (6, 3), (12, 3))
    inputs = [torch.randn(*n, dtype=torch.float64) for n in shapes]
    inputs[3].requires_grad_(learns)
    outcome = compare(program, inputs, options={"streamkl.verify": "never"}).check()
    assert outcome.num_fused == 0
