"""Rows that a mask selects and branches on data, with LM heads: as backend, and under enable().

By default Dynamo breaks the graph there, and the report names the setting; under enable() these
programs are one graph and fuse, and what does not says what to write instead.
"""

import pytest
import torch
import torch._inductor.compile_fx
import torch.nn.functional as F

import torch_streamkl
from tests.support.covering import every
from tests.support.losses import kd
from tests.support.losses import rows_of_kl as rows
from tests.support.subgraphs import inductor_without_code
from torch_streamkl.fx_passes.backend import collected
from torch_streamkl.fx_passes.capture.settings import HAS_NESTED_GRAPH_BREAKS

VOCAB = 50


def selected_values(s, t, keep):
    return torch.masked_select(rows(s, t), keep).mean()


def selected_rows(s, t, keep):
    return rows(s, t)[keep].mean()


def sum_of_selected_logits(s, t, keep):
    return F.kl_div(s[keep].log_softmax(-1), t[keep].softmax(-1), reduction="sum")


def selected_entries(s, t, keep):
    """HF's DistilBERT distiller: rows are entries that are put together again."""
    mask = keep.unsqueeze(-1).expand_as(s)
    return kd(*(torch.masked_select(x, mask).view(-1, VOCAB) for x in (s, t)))


def gathered_rows(s, t, keep):
    found = torch.where(keep)
    return rows(s[found], t[found]).mean()


def branch_on_any(s, t, keep):
    values = rows(s, t)
    if keep.any():
        return values[keep].mean()
    return values.sum() * 0


def branch_on_the_count(s, t, keep):
    """torchtune's `if sum_masks == 0`."""
    values, count = rows(s, t) * keep, keep.float().sum()
    if count == 0:
        return values.sum() * 0
    return values.sum() / count


def count_as_a_number(s, t, keep):
    return (rows(s, t) * keep).sum() / max(keep.sum().item(), 1)


def branch_before_the_loss(s, t, keep):
    """The logits exist when the branch is taken: the KL is in the graph after it."""
    if not keep.any():
        return s.sum() * 0
    return (rows(s, t) * keep).sum() / keep.sum()


def entries_of_both_supports(s, t, keep):
    """TRL's IWOPDTrainer with a top k: entries of rows, which are small, are selected by rows."""
    support = torch.cat([t.topk(2, -1).indices, s.topk(2, -1).indices], -1)
    s, t = (x.log_softmax(-1).gather(-1, support) for x in (s, t))
    s, t = (x - x.logsumexp(-1, keepdim=True) for x in (s, t))
    return F.kl_div(s, t, reduction="none", log_target=True)[keep].sum()


ONE_GRAPH = (
    selected_values, selected_rows, selected_entries, sum_of_selected_logits, gathered_rows,
)  # fmt: skip
NESTED = (branch_on_any, branch_on_the_count, count_as_a_number)


@pytest.fixture(autouse=True)
def _without_code():
    """Inductor's graphs are interpreted: what it generates is not what this is about."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with inductor_without_code():
        yield


def run(loss, keeps_none=False, **options):
    """Compiled next to eager, values and gradients."""

    def step(x, w, xt, wt, keep):
        return loss(F.linear(x, w), F.linear(xt, wt), keep)

    shapes = ((2, 7, 12), (VOCAB, 12), (2, 7, 20), (VOCAB, 20))
    inputs = [torch.randn(*shape, requires_grad=i < 2) for i, shape in enumerate(shapes)]
    inputs.append(torch.rand(2, 7) < (0.0 if keeps_none else 0.6))
    with collected() as report:
        found = torch.compile(step, **options)(*inputs)
    expected = step(*inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, inputs[:2]) for x in (found, expected)))
    return report


@pytest.mark.parametrize("loss", every(2, [*ONE_GRAPH, *NESTED]), ids=lambda f: f.__name__)
def test_fused_under_enable(loss):
    """The sum also of no row, of which a mean is NaN."""
    if loss in NESTED and not HAS_NESTED_GRAPH_BREAKS:
        pytest.skip("torch before 2.13 cannot mend a break in a called function")
    with torch_streamkl.enable():
        report = run(loss, loss is sum_of_selected_logits, fullgraph=loss in ONE_GRAPH)
    assert report.num_fused == len(report.sites) == 1, report
    assert not report.num_remaining, report


@pytest.mark.parametrize("options", [
    {}, {"backend": "streamkl", "options": {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0}},
], ids=["enable", "backend"])  # fmt: skip
def test_run_time_checks_of_selected_entries_keep_no_logits(options):
    """Only topk reads logits, each side its own."""
    with torch_streamkl.enable(min_mib=0):
        report = run(entries_of_both_supports, fullgraph=True, **options)
    assert report.num_fused == len(report.sites) == 1, report
    assert {x.num_bytes for x in report.remaining} == {4 * 2 * 7 * VOCAB}, report
    assert all("topk" in str(x) for x in report.remaining), report


@pytest.mark.parametrize("loss", every(3, [*ONE_GRAPH, *NESTED]), ids=lambda f: f.__name__)
def test_the_setting_is_named_by_default(loss):
    report = run(loss, backend="streamkl", options={"streamkl.inner": "aot_eager"})
    assert report.num_fused == 0, report
    (site,) = report.sites
    name = "capture_dynamic_output_shape_ops" if loss in ONE_GRAPH else "nested_graph_breaks"
    assert f"torch._dynamo.config.{name} = True" in site.hint, report
    if name == "capture_dynamic_output_shape_ops" or HAS_NESTED_GRAPH_BREAKS:
        assert "torch_streamkl.enable()" in site.hint, report


def test_what_stays_under_enable():
    with torch_streamkl.enable():
        report = run(branch_before_the_loss)
    assert report.num_fused == 0, report
    (site,) = report.sites
    assert site.reason, report
