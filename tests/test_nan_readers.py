"""Code that asks for the NaN or infinity of eager code sees them: the divergence is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_streamkl import explain
from torch_streamkl.fx_passes import backend

SIZES = (5, 7, 5, 7)


def maps() -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, n, 4, generator=make, dtype=torch.float64) for n in SIZES]


def causal(scores: Tensor, fill: float) -> Tensor:
    keep = torch.ones(5, 7, dtype=torch.bool).tril(2)
    return scores.masked_fill(~keep, fill)


def kl_of_logs(s: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)


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
