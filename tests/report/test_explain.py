"""What users see: explain(), its report, streamkl.strict, streamkl.explain, errors and logging."""

from __future__ import annotations

import inspect
import logging
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_streamkl
from tests.support.covering import every
from tests.support.hard_programs import PROGRAMS, make_inputs
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.reporting.hints import hint_for
from torch_streamkl.fx_passes.reporting.report import Report

EAGER = {"streamkl.inner": "eager"}


def fused(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    wanted = (t @ t.mT).softmax(-1)
    got = (q @ k.mT).log_softmax(-1)
    return F.kl_div(got, wanted, reduction="batchmean")


def unfused(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    wanted = (t @ t.mT).softmax(-1)
    ranked = (q @ k.mT).sort(-1).values
    return F.kl_div(ranked.log_softmax(-1), wanted, reduction="batchmean")


def both(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return fused(q, k, v, t) + unfused(q, k, v, t)


def _line_of(fn: Any, text: str) -> str:
    lines, start = inspect.getsourcelines(fn)
    return f"{__file__}:{start + next(i for i, line in enumerate(lines) if text in line)}"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def test_the_location_under_a_default_device() -> None:
    """A mode of torch is the innermost frame then."""
    with torch.device("cpu"):
        report = torch_streamkl.explain(fused, *make_inputs())
    assert [site.location for site in report.sites] == [_line_of(fused, "kl_div")]


def test_sites_answer_in_the_terms_of_the_user() -> None:
    report = torch_streamkl.explain(both, *make_inputs())
    assert (report.num_fused, len(report.sites)) == (1, 2)
    good, bad = sorted(report.sites, key=lambda site: not site.fused)
    assert good.location == _line_of(fused, "kl_div")
    assert "kl_div(got, wanted" in good.code
    assert (good.kind, good.form, good.reason) == ("attention_kl", "forward_kl", "")
    # two scores, two softmaxes and the products of [2, 3, 6, 6] float64 values
    assert good.bytes_saved >= 4 * 2 * 3 * 6 * 6 * 8
    assert bad.location == _line_of(unfused, "kl_div")
    assert "sort is applied to scores" in bad.reason
    assert bad.unsupported_at == _line_of(unfused, "ranked =")
    assert "needs whole rows" in bad.hint
    assert report.num_remaining > 0


def test_report_is_a_table() -> None:
    text = str(torch_streamkl.explain(both, *make_inputs()))
    assert text.startswith("streamkl: 1 of 2 losses fused, ")
    assert "1. fused " in text and "2. not fused " in text
    details = torch_streamkl.explain(both, *make_inputs()).details()
    for part in ("1. fused", "2. not fused", "code ", "form ", "saved ", "reason ", "hint "):
        assert part in details
    assert re.search(r"score- or logit-sized tensors? remains?, .*B:", details)
    same = str(torch_streamkl.explain(PROGRAMS["loop_over_layers"].fn, *make_inputs()))
    assert "1. fused 3x" in same
    assert "2. " not in same


COMPILED = "by query tiles, compiled by Inductor"
BLOCKS = "in plain torch, by blocks of queries and keys"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("inner", "runs"), [("eager", COMPILED), ("aot_eager", BLOCKS)])
def test_attention_sites_name_their_implementation(dynamic: bool, inner: str, runs: str) -> None:
    options = {"streamkl.inner": inner}
    reports: list[Report] = []
    backend.REPORTS.append(reports.append)
    try:
        torch.compile(fused, backend="streamkl", dynamic=dynamic, options=options)(*make_inputs())
    finally:
        backend.REPORTS.remove(reports.append)
    (site,) = reports[0].sites
    assert site.runs == runs
    assert f"runs      {site.runs}" in reports[0].details()


def test_averaged_teachers_say_what_they_cost() -> None:
    def indexer(q: Tensor, k: Tensor, teacher: Tensor) -> Tensor:
        p = (teacher @ teacher.mT).softmax(-1).mean(1, keepdim=True)
        return F.kl_div((q @ k.mT).log_softmax(-1), p, reduction="batchmean")

    q, k, teacher = (torch.randn(2, heads, 16, 8) for heads in (1, 1, 4))
    (site,) = torch_streamkl.explain(indexer, q, k, teacher).sites
    assert site.fused
    assert site.runs.startswith(f"{BLOCKS}, ")  # query tiles have no averaged heads
    assert "the mean of 4 distributions is computed again in the backward" in site.runs


def test_sizes_of_data_are_a_reason() -> None:
    def loss(q: Tensor, k: Tensor, t: Tensor, u: Tensor, lengths: Tensor) -> Tensor:
        n = lengths[0].item()
        got = (q[:, :, :n] @ k[:, :, :n].mT).log_softmax(-1)
        wanted = (t[:, :, :n] @ u[:, :, :n].mT).softmax(-1)
        return F.kl_div(got, wanted, reduction="batchmean")

    inputs = (*torch.randn(4, 2, 3, 16, 8), torch.tensor([5]))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        report = torch_streamkl.explain(loss, *inputs)
        value = torch.compile(loss, backend="streamkl", options=EAGER)(*inputs)
    (site,) = report.sites
    assert "sizes are read from tensors" in site.reason
    assert "mask the positions beyond the lengths" in site.hint
    assert not report.failures
    torch.testing.assert_close(value, loss(*inputs))


def test_what_remains_of_a_graph_left_alone_is_not_known() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        first = fused(q, k, v, t)
        torch._dynamo.graph_break()
        return first + torch.vmap(fused)(q, k, v, t).sum()

    report = torch_streamkl.explain(loss, *make_inputs())
    assert (report.num_fused, report.not_analysed) == (1, 1)
    assert "No score- or logit-sized tensor remains" not in str(report)
    assert "1 graph was not analysed: what else remains is not known." in str(report)
    alone = torch_streamkl.explain(fused, *make_inputs())
    assert "No score- or logit-sized tensor remains" in str(alone)


def test_what_nothing_reads_does_not_remain() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        scores = q @ k.mT
        _ = scores.relu() @ v  # as where a model returns more than a loss takes
        return F.kl_div(scores.log_softmax(-1), (t @ t.mT).softmax(-1), reduction="batchmean")

    def checked(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        scores = q @ k.mT
        torch._assert_async(scores.relu().isfinite().all())
        return F.kl_div(scores.log_softmax(-1), (t @ t.mT).softmax(-1), reduction="batchmean")

    report = torch_streamkl.explain(loss, *make_inputs())
    assert (report.num_fused, report.num_remaining) == (1, 0)
    report = torch_streamkl.explain(checked, *make_inputs())
    assert report.num_fused == 1
    assert report.num_remaining > 0


def _tokens(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    logs, wanted = (x @ w.mT).log_softmax(-1), (t @ w.detach().mT).softmax(-1)
    return F.kl_div(logs, wanted, reduction="none").sum(-1)


def _shares_labels(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    labels = torch.zeros(len(x), dtype=torch.int64)
    return _tokens(x, w, t).mean() + F.cross_entropy(x @ w.mT, labels)


ROWS = "as blocks of rows, compiled by Inductor"
IN_FORWARD = f"{ROWS}, gradients in the forward, by chunks of tokens"
IN_BACKWARD = f"{ROWS}, logits computed again in the backward"
STRATEGIES = {
    "a weighted sum": (lambda x, w, t: (_tokens(x, w, t) * 2.0).mean(), True, IN_FORWARD),
    "rows": (_tokens, True, IN_BACKWARD),
    "a power of rows": (lambda x, w, t: _tokens(x, w, t).square().sum(), True, IN_BACKWARD),
    "with labels": (_shares_labels, True, IN_BACKWARD),
    "without gradient": (lambda x, w, t: _tokens(x, w, t).mean(), False, ROWS),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_language_model_heads_name_their_strategy(name: str) -> None:
    program, training, runs = STRATEGIES[name]
    x, w, t = (torch.randn(size, 8, requires_grad=training) for size in (5, 31, 5))
    (site,) = torch_streamkl.explain(program, x, w, t.detach()).sites
    assert (site.kind, site.runs) == ("linear_kl", runs)


def test_form_names_the_clamp() -> None:
    def clamped(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        p, s = (t @ t.mT).softmax(-1), (q @ k.mT).softmax(-1)
        return (p * (p.clamp_min(1e-12).log() - s.clamp_min(1e-12).log())).sum(-1)

    (site,) = torch_streamkl.explain(clamped, *make_inputs()).sites
    assert site.form == "forward_kl, teacher clamped at 1e-12, student clamped at 1e-12"


@pytest.mark.parametrize(
    "name",
    every(
        2,
        [n for n, x in PROGRAMS.items() if x.num_fused == 0 and x.num_graphs is not None],
    ),
)
def test_every_unfused_program_says_why_and_what_to_do(name: str) -> None:
    report = torch_streamkl.explain(PROGRAMS[name].fn, *make_inputs())
    assert report.num_fused == 0
    assert report.sites
    for site in report.sites:
        assert site.reason
        assert site.hint, site.reason
        assert ":" in site.location


def test_remedies_are_for_reasons() -> None:
    assert hint_for("dropout changes the probabilities after the softmax")
    assert "lists what fuses" in hint_for("an unheard-of reason")
    assert hint_for("the check failed: the value is off") == ""


def test_explain_neither_uses_nor_leaves_compiled_code() -> None:
    inputs = make_inputs()
    graphs: list[str] = []

    def count(gm: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(gm.code)
        return gm.forward

    compiled = torch.compile(fused, backend=count)
    compiled(*inputs)
    first = str(torch_streamkl.explain(fused, *inputs))
    for _ in range(9):  # more than Dynamo recompiles one function
        assert str(torch_streamkl.explain(fused, *inputs)) == first
    compiled(*inputs)
    assert len(graphs) == 1
    assert torch_streamkl.explain(compiled, *inputs).num_fused == 1


def test_explain_of_a_module() -> None:
    class Loss(nn.Module):
        def forward(self, q: Tensor, k: Tensor, *, t: Tensor) -> Tensor:
            return fused(q, k, k, t)

    q, k, _, t = make_inputs()
    module = Loss()
    assert torch_streamkl.explain(module, q, k, t=t).num_fused == 1
    assert torch_streamkl.explain(torch.compile(module), q, k, t=t).num_fused == 1


def test_strict_raises_with_the_report() -> None:
    options = {**EAGER, "streamkl.strict": True}
    torch.compile(fused, backend="streamkl", options=options)(*make_inputs())
    with pytest.raises(Exception, match="sort is applied to scores") as caught:
        torch.compile(both, backend="streamkl", options=options)(*make_inputs())
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, backend.UnfusedError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    assert error is not None
    assert "1 of 2 losses fused" in str(error)


def test_strict_counts_a_failed_analysis(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("torch_streamkl.fx_passes.graph_rewriting.trace_region", planted)
    options = {**EAGER, "streamkl.strict": True}
    with pytest.raises(Exception, match="planted"):
        torch.compile(fused, backend="streamkl", options=options)(*make_inputs())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"streamkl.strikt": True},
            "streamkl.deterministic, streamkl.explain, streamkl.inner, streamkl.min_mib, "
            "streamkl.row_programs, streamkl.strict",
        ),
        ({"streamkl.strict": "yes"}, "streamkl.strict must be False or True, got 'yes'"),
        ({"streamkl.inner": "nvcc"}, "'inductor' or 'aot_eager' or 'eager', got 'nvcc'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        torch.compile(fused, backend="streamkl", options=options)(*make_inputs())


@pytest.mark.parametrize("deterministic", [True, False])
def test_order_of_sums(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_streamkl.attention import hopper_tiles
    from torch_streamkl.fx_passes.reporting import execution

    found: list[bool] = []

    def watch(node: torch.fx.Node, is_compiled: bool) -> str:
        found.append(node.kwargs.get("deterministic", True))
        return how(node, is_compiled)

    how = execution._how
    monkeypatch.setattr(execution, "_how", watch)
    monkeypatch.setattr(hopper_tiles, "ATOMIC_LEAST_FLOP", 0.0)
    monkeypatch.setattr(execution, "select_implementation", lambda *_: "hopper")
    reports: list[Report] = []
    monkeypatch.setattr(backend, "REPORTS", [reports.append])
    options = {**EAGER, "streamkl.deterministic": deterministic}
    inputs = [x[..., :1].expand(*x.shape[:-1], 64) for x in make_inputs()]
    torch.compile(fused, backend="streamkl", options=options)(*inputs)
    assert found == [deterministic]
    assert ("in any order" in reports[0].details()) is not deterministic


def test_wrong_option_of_inductor_options() -> None:
    with pytest.raises(TypeError, match="strikt"):
        torch_streamkl.inductor_options(strikt=True)
    with pytest.raises(ValueError, match="strict must be"):
        torch_streamkl.inductor_options(strict=3)


@pytest.mark.parametrize(("explains", "level"), [(True, logging.WARNING), (False, logging.INFO)])
def test_reports_are_logged(explains: bool, level: int, caplog: pytest.LogCaptureFixture) -> None:
    options = {**EAGER, "streamkl.explain": explains}
    with caplog.at_level(logging.INFO, "torch_streamkl"):
        torch.compile(fused, backend="streamkl", options=options)(*make_inputs())
    (record,) = [r for r in caplog.records if r.name.startswith("torch_streamkl")]
    assert record.levelno == level
    assert "1 of 1 loss fused" in record.getMessage()


def test_a_program_without_a_divergence_is_not_mentioned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "torch_streamkl"):
        options = {**EAGER, "streamkl.strict": True, "streamkl.explain": True}
        torch.compile(torch.sin, backend="streamkl", options=options)(torch.ones(3))
    assert not [r for r in caplog.records if r.name.startswith("torch_streamkl")]
    assert not Report().sites


def test_dynamo_reset_resets_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    # CUDA graphs of its programs are freed then, as with Inductor's own backend
    calls: list[str] = []
    monkeypatch.setattr(backend.streamkl, "reset", lambda: calls.append("reset"))
    torch.compile(torch.sin, backend="streamkl", options={"streamkl.inner": "eager"})(
        torch.ones(2)
    )
    torch._dynamo.reset()
    assert calls == ["reset"]
