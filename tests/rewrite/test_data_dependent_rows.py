"""Rows that a mask selects and branches on data, with LM heads: as backend, and under enable().

By default Dynamo breaks the graph there, and the report names the setting; under enable() these
programs are one graph and fuse, and what does not says what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch.nn.functional as F
from torch import Tensor

import torch_streamkl
from tests.support.covering import every
from tests.support.losses import rows_of_kl as rows
from tests.support.subgraphs import inductor_without_code
from torch_streamkl.fx_passes.backend import collected
from torch_streamkl.fx_passes.capture.settings import HAS_NESTED_GRAPH_BREAKS
from torch_streamkl.fx_passes.reporting.report import Report

VOCAB = 50
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def selected_values(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    return torch.masked_select(rows(s, t), keep).mean()


def selected_rows(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    return rows(s, t)[keep].mean()


def selected_logits(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    return F.kl_div(s[keep].log_softmax(-1), t[keep].softmax(-1), reduction="batchmean")


def branch_on_any(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    values = rows(s, t)
    if keep.any():
        return values[keep].mean()
    return values.sum() * 0


def branch_on_the_count(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    """torchtune's `if sum_masks == 0`."""
    values, count = rows(s, t) * keep, keep.float().sum()
    if count == 0:
        return values.sum() * 0
    return values.sum() / count


def count_as_a_number(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    return (rows(s, t) * keep).sum() / max(keep.sum().item(), 1)


def branch_in_front(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    """The logits exist when the branch is taken: the KL is in the graph after it."""
    if not keep.any():
        return s.sum() * 0
    return (rows(s, t) * keep).sum() / keep.sum()


def selected_entries(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    """HF's DistilBERT distiller: rows are entries that are put together again."""
    mask = keep.unsqueeze(-1).expand_as(s)
    a = torch.masked_select(s, mask).view(-1, VOCAB)
    b = torch.masked_select(t, mask).view(-1, VOCAB)
    return F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean")


def gathered_rows(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    found = torch.where(keep)
    return rows(s[found], t[found]).mean()


ONE_GRAPH = (selected_values, selected_rows, selected_logits, selected_entries, gathered_rows)
NESTED = (branch_on_any, branch_on_the_count, count_as_a_number)


def inputs() -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    x, w, xt, wt = (
        torch.randn(*shape, generator=make)
        for shape in ((2, 7, 12), (50, 12), (2, 7, 20), (50, 20))
    )
    keep = torch.rand(2, 7, generator=make) < 0.6
    return [x.requires_grad_(), w.requires_grad_(), xt, wt, keep]


@pytest.fixture(autouse=True)
def _without_code() -> Iterator[None]:
    """Inductor's graphs are interpreted: what it generates is not what this is about."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with inductor_without_code():
        yield


def run(loss: Loss, keeps_none: bool = False, **options: Any) -> Report:
    """Compiled next to eager, values and gradients."""

    def step(x: Tensor, w: Tensor, xt: Tensor, wt: Tensor, keep: Tensor) -> Tensor:
        return loss(F.linear(x, w), F.linear(xt, wt), keep)

    ours, theirs = inputs(), inputs()
    if keeps_none:
        ours[-1].zero_(), theirs[-1].zero_()
    with collected() as report:
        got = torch.compile(step, **options)(*ours)
    expected = step(*theirs)
    got.backward()
    expected.backward()
    torch.testing.assert_close(got, expected)
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    return report


@pytest.mark.parametrize("loss", every(2, [*ONE_GRAPH, *NESTED]), ids=lambda f: f.__name__)
def test_fused_under_enable(loss: Loss) -> None:
    if loss in NESTED and not HAS_NESTED_GRAPH_BREAKS:
        pytest.skip("torch before 2.13 cannot mend a break in a called function")
    with torch_streamkl.enable():
        report = run(loss, fullgraph=loss in ONE_GRAPH)
    assert report.num_fused == len(report.sites) == 1, report
    assert not report.num_remaining, report


def test_a_mask_that_selects_no_row() -> None:
    def loss(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
        return F.kl_div(s[keep].log_softmax(-1), t[keep].softmax(-1), reduction="sum")

    with torch_streamkl.enable():
        report = run(loss, keeps_none=True, fullgraph=True)
    assert report.num_fused == 1, report


@pytest.mark.parametrize(
    "loss", every(3, [*ONE_GRAPH[:1], *ONE_GRAPH[2:], *NESTED]), ids=lambda f: f.__name__
)
def test_the_setting_is_named_by_default(loss: Loss) -> None:
    report = run(loss, backend="streamkl", options={"streamkl.inner": "aot_eager"})
    assert report.num_fused == 0, report
    (site,) = report.sites
    name = "capture_dynamic_output_shape_ops" if loss in ONE_GRAPH else "nested_graph_breaks"
    assert f"torch._dynamo.config.{name} = True" in site.hint, report
    if name == "capture_dynamic_output_shape_ops" or HAS_NESTED_GRAPH_BREAKS:
        assert "torch_streamkl.enable()" in site.hint, report


def test_what_stays_under_enable() -> None:
    with torch_streamkl.enable():
        report = run(branch_in_front)
    assert report.num_fused == 0, report
    (site,) = report.sites
    assert site.reason, report
