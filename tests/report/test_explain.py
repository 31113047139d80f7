"""What users see: explain(), its report, streamkl.strict, streamkl.explain, errors and logging."""

import inspect
import logging
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_streamkl
from tests.support.hard_programs import PROGRAMS, make_inputs
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.explain import in_a_new_frame
from torch_streamkl.fx_passes.reporting.report import Report

EAGER = {"streamkl.inner": "eager"}


def fused(q, k, v, t):
    wanted = (t @ t.mT).softmax(-1)
    got = (q @ k.mT).log_softmax(-1)
    return F.kl_div(got, wanted, reduction="batchmean")


def unfused(q, k, v, t):
    wanted = (t @ t.mT).softmax(-1)
    ranked = (q @ k.mT).sort(-1).values
    return F.kl_div(ranked.log_softmax(-1), wanted, reduction="batchmean")


def both(q, k, v, t):
    return fused(q, k, v, t) + unfused(q, k, v, t)


def _line_of(fn, text):
    lines, start = inspect.getsourcelines(fn)
    return f"{__file__}:{start + next(i for i, line in enumerate(lines) if text in line)}"


def compiled(fn, *inputs, dynamic=None, **options):
    with torch_streamkl.reports() as report:
        given = {**EAGER, **{f"streamkl.{name}": x for name, x in options.items()}}
        torch.compile(fn, backend="streamkl", dynamic=dynamic, options=given)(*inputs)
    return report


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def test_a_report_is_of_what_its_thread_compiles():
    """And that of reports() of what all compile."""

    def elsewhere():
        new = in_a_new_frame(fused)
        torch.compile(new, backend="streamkl", options=EAGER)(*make_inputs())

    @torch.compiler.disable
    def meanwhile():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    def program(*inputs):
        meanwhile()
        return unfused(*inputs)

    with torch_streamkl.reports() as every:
        report = torch_streamkl.explain(program, *make_inputs())
        verified = torch_streamkl.verify(program, *make_inputs(), options=EAGER).report
    assert [site.fused for site in report.sites] == [False]
    assert [site.fused for site in verified.sites] == [False]
    assert every.num_fused >= 2 and every.num_unfused == 2


def test_a_report_that_another_thread_ends_meanwhile():
    def ends(_):
        backend.REPORTS.remove(ends)

    backend.REPORTS.append(ends)
    assert compiled(fused, *make_inputs()).num_graphs == 1


def test_the_location_under_a_default_device():
    """A mode of torch is the innermost frame then."""
    with torch.device("cpu"):
        report = torch_streamkl.explain(fused, *make_inputs())
    assert [site.location for site in report.sites] == [_line_of(fused, "kl_div")]


def test_sites_answer_in_the_terms_of_the_user():
    report = torch_streamkl.explain(both, *make_inputs())
    assert (report.num_fused, len(report.sites)) == (1, 2)
    good, bad = sorted(report.sites, key=lambda site: not site.fused)
    assert good.location == _line_of(fused, "kl_div")
    assert "kl_div(got, wanted" in good.code
    assert (good.kind, good.form, good.reason) == ("attention_kl", "forward_kl", "")
    # two scores, two softmaxes and the products of [2, 3, 6, 6] float64 values
    assert good.bytes_saved >= 4 * 2 * 3 * 6 * 6 * 8
    assert bad.location == _line_of(unfused, "kl_div")
    assert "sort is applied to scores" in bad.reason and "needs whole rows" in bad.hint
    assert bad.unsupported_at == _line_of(unfused, "ranked =")
    assert report.num_remaining > 0


def test_backward_in_a_loop_is_named():
    """As gradients of micro-batches are accumulated: Dynamo skips the whole function."""
    torch._dynamo.utils.counters.clear()  # of graph breaks

    def divergence(s, t):
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")

    def step(x, w):
        for part in x.chunk(2):
            divergence(part @ w.T, part @ w.detach().T).backward()

    report = torch_streamkl.explain(step, torch.randn(8, 6), torch.randn(9, 6, requires_grad=True))
    (site,) = report.sites
    assert "an input of the compiled function" in site.reason, report
    assert "call backward() outside of it" in site.hint, report


def test_equal_losses_of_layers_are_one_line():
    text = str(torch_streamkl.explain(PROGRAMS["loop_over_layers"].fn, *make_inputs()))
    assert "1. fused 3x" in text and "2. " not in text


COMPILED = "by query tiles, compiled by Inductor"
BLOCKS = "in plain torch, by blocks of queries and keys"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_attention_sites_name_their_implementation(dynamic, inner):
    (site,) = compiled(fused, *make_inputs(), dynamic=dynamic, inner=inner).sites
    assert site.runs == BLOCKS  # nothing is compiled, so there are no query tiles


@pytest.mark.parametrize(
    ("inner", "runs"), [("inductor", COMPILED), ("aot_eager", BLOCKS), ("eager", BLOCKS)]
)
def test_explanations_name_the_implementation_of_their_options(inner, runs):
    options = {"streamkl.inner": inner, "streamkl.min_mib": 0}
    (site,) = torch_streamkl.explain(fused, *make_inputs(), options=options).sites
    assert site.runs == runs


def test_averaged_teachers_say_what_they_cost():
    def indexer(q, k, teacher):
        p = (teacher @ teacher.mT).softmax(-1).mean(1, keepdim=True)
        return F.kl_div((q @ k.mT).log_softmax(-1), p, reduction="batchmean")

    q, k, teacher = (torch.randn(2, heads, 16, 8) for heads in (1, 1, 4))
    (site,) = torch_streamkl.explain(indexer, q, k, teacher).sites
    assert site.runs.startswith(f"{BLOCKS}, ")  # query tiles have no averaged heads
    assert "the mean of 4 distributions is computed again in the backward" in site.runs


def test_what_remains_of_a_graph_left_alone_is_not_known():
    def loss(q, k, v, t):
        first = fused(q, k, v, t)
        torch._dynamo.graph_break()
        return first + torch.vmap(fused)(q, k, v, t).sum()

    report = torch_streamkl.explain(loss, *make_inputs())
    assert (report.num_fused, report.not_analysed) == (1, 1)
    assert "No score- or logit-sized tensor remains" not in str(report)


def _unread(x):
    _ = x.relu() @ x  # as where a model returns more than a loss takes


def _asserted(x):
    torch._assert_async(x.relu().isfinite().all())


@pytest.mark.parametrize(("use", "remains"), [(_unread, False), (_asserted, True)])
def test_what_nothing_reads_does_not_remain(use, remains):
    def loss(q, k, v, t):
        scores = q @ k.mT
        use(scores)
        return F.kl_div(scores.log_softmax(-1), (t @ t.mT).softmax(-1), reduction="batchmean")

    report = torch_streamkl.explain(loss, *make_inputs())
    assert (report.num_fused, report.num_remaining > 0) == (1, remains)


def _tokens(x, w, t):
    logs, wanted = (x @ w.mT).log_softmax(-1), (t @ w.detach().mT).softmax(-1)
    return F.kl_div(logs, wanted, reduction="none").sum(-1)


def _shares_labels(x, w, t):
    labels = torch.zeros(len(x), dtype=torch.int64)
    return _tokens(x, w, t).mean() + F.cross_entropy(x @ w.mT, labels)


ROWS = "as blocks of rows, compiled by Inductor"
IN_FORWARD = f"{ROWS}, gradients in the forward, by chunks of tokens"
IN_BACKWARD = f"{ROWS}, logits computed again in the backward"
STRATEGIES = {
    "a weighted sum": (lambda x, w, t: (_tokens(x, w, t) * 2.0).mean(), True, IN_FORWARD),
    "a power of rows": (lambda x, w, t: _tokens(x, w, t).square().sum(), True, IN_BACKWARD),
    "with labels": (_shares_labels, True, IN_BACKWARD),
    "without gradient": (lambda x, w, t: _tokens(x, w, t).mean(), False, ROWS),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_language_model_heads_name_their_strategy(name):
    program, training, runs = STRATEGIES[name]
    x, w, t = (torch.randn(size, 8, requires_grad=training) for size in (5, 31, 5))
    (site,) = torch_streamkl.explain(program, x, w, t.detach()).sites
    assert (site.kind, site.runs) == ("linear_kl", runs)


def test_form_names_the_clamp():
    def clamped(q, k, v, t):
        p, s = (t @ t.mT).softmax(-1), (q @ k.mT).softmax(-1)
        return (p * (p.clamp_min(1e-12).log() - s.clamp_min(1e-12).log())).sum(-1)

    (site,) = torch_streamkl.explain(clamped, *make_inputs()).sites
    assert site.form == "forward_kl, teacher clamped at 1e-12, student clamped at 1e-12"


def test_explain_neither_uses_nor_leaves_compiled_code():
    inputs = make_inputs()
    graphs = []

    def count(gm, _):
        graphs.append(gm.code)
        return gm.forward

    counted = torch.compile(fused, backend=count)
    counted(*inputs)
    first = str(torch_streamkl.explain(fused, *inputs))
    for _ in range(9):  # more than Dynamo recompiles one function
        assert str(torch_streamkl.explain(fused, *inputs)) == first
    counted(*inputs)
    assert len(graphs) == 1
    assert torch_streamkl.explain(counted, *inputs).num_fused == 1


def test_explain_of_a_module():
    class Loss(nn.Module):
        def forward(self, q, k, *, t):
            return fused(q, k, k, t)

    q, k, _, t = make_inputs()
    for module in (Loss(), torch.compile(Loss())):
        assert torch_streamkl.explain(module, q, k, t=t).num_fused == 1


@pytest.mark.parametrize("deterministic", [True, False])
def test_order_of_sums(deterministic, monkeypatch):
    from torch_streamkl.attention import hopper_tiles
    from torch_streamkl.fx_passes.reporting import execution

    found = []

    def watch(node, is_compiled):
        found.append(node.kwargs.get("deterministic", True))
        return how(node, is_compiled)

    how = execution._how
    monkeypatch.setattr(execution, "_how", watch)
    monkeypatch.setattr(hopper_tiles, "ATOMIC_LEAST_FLOP", 0.0)
    monkeypatch.setattr(execution, "select_implementation", lambda *_: "hopper")
    inputs = [x[..., :1].expand(*x.shape[:-1], 64) for x in make_inputs()]
    report = compiled(fused, *inputs, deterministic=deterministic)
    assert found == [deterministic]
    assert ("in any order" in report.details()) is not deterministic


@pytest.mark.parametrize(
    ("explains", "level", "logged", "has_details"),
    [
        (True, logging.INFO, logging.WARNING, False),
        (False, logging.INFO, logging.INFO, False),
        (False, logging.DEBUG, logging.INFO, True),
    ],
)
def test_reports_are_logged(explains, level, logged, has_details, caplog):
    with caplog.at_level(level, "torch_streamkl"):
        compiled(fused, *make_inputs(), explain=explains)
    records = [r for r in caplog.records if r.name.startswith("torch_streamkl")]
    record = next(r for r in records if r.getMessage().startswith("streamkl: 1 of 1 loss fused"))
    assert record.levelno == logged
    assert any("code  " in r.getMessage() for r in records) == has_details


def test_a_program_without_a_divergence_is_not_mentioned(
    caplog,
):
    with caplog.at_level(logging.INFO, "torch_streamkl"):
        compiled(torch.sin, torch.ones(3), strict=True, explain=True)
    assert not [r for r in caplog.records if r.name.startswith("torch_streamkl")]
    assert not Report().sites


def test_dynamo_reset_resets_the_backend(monkeypatch):
    # CUDA graphs of its programs are freed then, as with Inductor's own backend
    calls = []
    monkeypatch.setattr(backend.streamkl, "reset", lambda: calls.append("reset"))
    compiled(torch.sin, torch.ones(2))
    torch._dynamo.reset()
    assert calls == ["reset"]


def of_selected_rows(a, b, keep):
    return F.kl_div(a.log_softmax(-1)[keep], b.softmax(-1)[keep], reduction="sum")


def of_given_logits(a, b):
    return F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="sum")


@pytest.mark.parametrize("forgets", [False, True])
def test_hints_are_about_no_graph_break_of_another_program(forgets):
    """It is forgotten by a reset of Dynamo, and explain() begins anew without one."""
    given = torch.randn(3, 9), torch.randn(3, 9)
    report = torch_streamkl.explain if not forgets else compiled
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False):
        broken = report(of_selected_rows, *given, torch.tensor([True, False, True]))
        assert "rows that a mask selects break the graph" in str(broken)
        if forgets:
            torch._dynamo.reset()
        hint = report(of_given_logits, *given).sites[0].hint
    assert hint and "break" not in hint
