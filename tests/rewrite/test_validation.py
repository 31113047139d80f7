"""Every rewrite is checked when it is compiled: what computes something else stays out.

Faults are planted after the rewrite, whatever its rules are. Each must be caught, and nothing
that is right may be stopped.
"""

import math
import random
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import torch_streamkl
from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.covering import every
from tests.support.losses import elements_of_kl, kd, rows_of_kl
from tests.support.plants import PLANTS, PROGRAMS, first_call, inputs_of, planted, scaled, through
from torch_streamkl.fx_passes import backend, pipeline
from torch_streamkl.fx_passes.fx_utils.copies import copied
from torch_streamkl.fx_passes.options import RewriteOptions
from torch_streamkl.fx_passes.reporting.report import Report
from torch_streamkl.fx_passes.validation import check, records
from torch_streamkl.fx_passes.validation.isolation import isolated
from torch_streamkl.fx_passes.validation.places import Places
from torch_streamkl.fx_passes.validation.running import Result, run
from torch_streamkl.program.operations import OPERATIONS

FAILED = "the check failed: "
LENIENT = {"min_mib": 0, "verify_max_seconds": 60.0}
expects_failed_checks = pytest.mark.expects_failed_checks


@pytest.fixture(autouse=True)
def _nothing_is_known_to_pass():
    records.forget()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@pytest.fixture
def nothing_may_be_run(tmp_path, monkeypatch):
    """A later process with the caches of this one, once what is returned is called."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def begin():
        records.forget()
        monkeypatch.setattr(check, "isolated", None)

    with torch._inductor.config.patch(force_disable_caches=False):
        yield begin


def graph_of(program, dynamic=False):
    """What Dynamo gives to a backend."""
    graphs = []
    torch._dynamo.reset()
    keep = torch.compile(
        PROGRAMS[program], backend=lambda gm, _: graphs.append(gm) or gm.forward, dynamic=dynamic
    )
    keep(*inputs_of(program))
    (graph,) = graphs
    return graph


GRAPHS = {}


def rewritten(program, dynamic=False, version="", **options):
    """The report of rewriting a copy of the graph of a program."""
    key = program, dynamic
    if key not in GRAPHS:
        GRAPHS[key] = graph_of(*key)
    copy = fx.GraphModule(GRAPHS[key], copied(GRAPHS[key].graph))
    report = pipeline.rewrite(copy, RewriteOptions(**{**LENIENT, **options}), version)
    assert not report.failures
    return report


def step_of(fn, **options):
    return compile_rewritten(fn, **{"verify_max_seconds": 60.0, **options})


def compiled(fn, inputs, **options):
    with backend.collected() as report:
        step_of(fn, **options)(*inputs)
    return report


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_right_passes(program, dynamic):
    (site,) = rewritten(program, dynamic).sites
    assert site.fused and site.check == check.PASSED


@expects_failed_checks
@pytest.mark.parametrize("plant", every(2, PLANTS), ids=lambda plant: plant.name)
def test_a_planted_fault_is_caught(plant):
    with planted(plant.edit) as edits:
        report = rewritten(plant.program)
    assert edits
    reasons = [site.reason for site in report.sites if not site.fused]
    assert any(reason.startswith(FAILED) for reason in reasons), report


@expects_failed_checks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_fault_is_caught_in_every_dtype(dtype):
    inputs = inputs_of("attention", dtype)
    assert compiled(PROGRAMS["attention"], inputs).num_fused == 1
    with planted(scaled("teacher_scale", 1.5)):
        assert compiled(PROGRAMS["attention"], inputs).num_fused == 0


@expects_failed_checks
def test_a_site_that_fails_is_as_it_was_written_and_leaves_the_others_fused():
    def two(h, w, ht, wt):
        tied = PROGRAMS["tied"]
        return tied(h, w, ht, wt) + tied(h * 2, w, ht, wt * 3)

    def only_the_first(graph):
        if first_call(graph).meta["streamkl_site"] == first_site:
            scaled("student_scale", 1.1)(graph)

    inputs = inputs_of("tied")
    first_site = compiled(two, inputs).sites[0].node
    with planted(only_the_first), backend.collected() as report:
        torch.testing.assert_close(step_of(two)(*inputs), two(*inputs))
    verdicts = {site.node: site for site in report.sites}
    wrong = verdicts.pop(first_site)
    assert wrong.reason.startswith(FAILED) and not wrong.fused
    assert [site.check for site in verdicts.values()] == [check.PASSED]


@expects_failed_checks
def test_strict_raises_the_figures_and_tests_hear_of_them(failed_checks):
    with (
        planted(scaled("student_scale", 2.0)),
        pytest.raises(backend.UnfusedError, match="the check failed: the val"),
    ):
        compiled(PROGRAMS["masked"], inputs_of("masked"), strict=True)
    assert [v.difference[:9] for v in failed_checks] == ["the value"]


# ------------------------------------------------------------------------------------------ bounds
TOO_LARGE = {"verify_max_mib": 0.01}
TOO_LONG = {"verify_max_seconds": 1e-6}
SKIPPED = r"check skipped: [\d.]+ .iB > [\d.]+ KiB limit\. Force with .*"


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        (TOO_LARGE, SKIPPED),
        (TOO_LONG, "check skipped: ~.* s > 1e-06 s limit.*"),
        ({"verify": "always", **TOO_LARGE, **TOO_LONG}, check.PASSED),
        ({"verify": "never"}, 'check skipped: streamkl.verify is "never"'),
    ],
)
def test_what_is_not_checked_is_said(options, verdict):
    (site,) = rewritten("masked", **options).sites
    assert site.fused
    assert re.fullmatch(verdict, site.check)
    if options is TOO_LARGE:
        assert site.check in str(Report([site]))
        assert site.check.removeprefix("check ") in Report([site]).details()


@expects_failed_checks
def test_smaller_sizes_where_the_traced_ones_are_too_large():
    (site,) = rewritten("attention", dynamic=True, verify_max_mib=0.2).sites
    assert site.check == check.PASSED
    (site,) = rewritten("attention", verify_max_mib=0.2).sites
    assert site.check.startswith("check skipped")
    with planted(scaled("teacher_scale", 1.01)):
        for options in ({}, {"verify_max_mib": 0.2}):
            assert rewritten("attention", dynamic=True, **options).num_fused == 0


def test_always_fuses_nothing_that_cannot_be_checked():
    def selected(h, w, ht, wt, counts):
        """Rows whose number is read from the data."""
        n = counts.sum().item()
        torch._check(n >= 2)
        torch._check(n <= h.size(0))
        s, t = h[:n] @ w.T, ht[:n] @ wt.T
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="sum")

    inputs = (*inputs_of("tied"), torch.tensor([3, 4]))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        usual = compiled(selected, inputs)
        always = compiled(selected, inputs, verify="always")
    for ours, theirs in zip(usual.sites, always.sites, strict=True):
        if ours.fused and ours.check != check.PASSED:
            assert not theirs.fused
            assert theirs.reason.startswith('streamkl.verify is "always"')


def test_options_are_part_of_cache_keys():
    options = [{}, *({"verify": x} for x in ("never", "always"))]
    options += [{name: 7.0} for name in ("verify_max_mib", "verify_max_seconds")]
    made = [torch_streamkl.inductor_options(**x)["pre_grad_custom_pass"] for x in options]
    assert len({x.uuid() for x in made}) == 5


# ----------------------------------------------------------------------------------------- records
@expects_failed_checks
def test_what_passed_is_not_run_again(monkeypatch):
    runs = []
    original = check.isolated
    monkeypatch.setattr(check, "isolated", lambda devices: runs.append(1) or original(devices))
    for _ in range(2):
        assert rewritten("masked").sites[0].check == check.PASSED
    assert len(runs) == 1
    with planted(scaled("student_scale", 1.1)):  # a pass of something else is none
        assert rewritten("masked").num_fused == 0
    rewritten("masked", dynamic=True)
    records.forget()
    rewritten("masked")
    assert len(runs) == 4


def test_passes_are_kept_for_later_processes(nothing_may_be_run, tmp_path):
    rewritten("masked", version="this")
    nothing_may_be_run()
    assert rewritten("masked", version="this").sites[0].check == check.PASSED
    assert len(list((tmp_path / "streamkl_checks").iterdir())) == 1


def test_rotary_embeddings_are_kept_for_later_processes(nothing_may_be_run):
    """Their halves are ``x[..., :n]``, whose index has an ellipsis."""

    def rotated(x, angles):
        half = x.shape[-1] // 2
        other = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * angles.cos() + other * angles.sin()

    def loss(q, k, angles):
        log_s = (rotated(q, angles) @ rotated(k, angles).mT).log_softmax(-1)
        p = (q @ k.mT).softmax(-1).detach()
        return F.kl_div(log_s, p, reduction="none").sum(-1).mean()

    inputs = [torch.randn(1, 2, 6, 8, requires_grad=i < 2) for i in range(2)]
    inputs.append(torch.randn(6, 8))
    assert compiled(loss, inputs).num_fused == 1
    nothing_may_be_run()
    assert compiled(loss, inputs).sites[0].check == check.PASSED


def test_kernels_of_a_check_are_assembled_as_inductors(monkeypatch):
    """Triton's cache has a kernel once for each ptxas, and Inductor brings its own."""
    from torch._inductor.runtime import compile_tasks

    seen = []
    original = check.isolated
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", lambda: seen.append("ptxas"))
    monkeypatch.setattr(check, "isolated", lambda x: seen.append("check") or original(x))
    graph = graph_of("masked")
    backend.rewrite_and_report(graph, RewriteOptions(**LENIENT))
    assert seen == ["ptxas", "check"]
    backend.rewrite_and_report(graph, RewriteOptions(inner="eager", **LENIENT))
    assert seen.count("ptxas") == 1  # explain() changes no setting


# --------------------------------------------------------------------------------------- isolation
def _state():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch.get_rng_state().tolist(),
        random.getstate(),
    )


def test_the_process_is_left_as_it_was():
    inputs = inputs_of("attention")
    rewritten("masked")  # its graph is made of inputs that are drawn
    rewritten("attention")
    before = _state()
    records.forget()
    with torch.no_grad():
        rewritten("attention")
    with torch.autocast("cpu", torch.bfloat16):
        rewritten("masked")
    records.forget()
    compiled(PROGRAMS["attention"], inputs)
    assert _state() == before


def test_other_threads_keep_their_default_dtype(monkeypatch):
    """It is one for all threads, so a check sets it for results alone that have it."""
    inputs = inputs_of("attention")
    seen = []
    monkeypatch.setattr(torch, "set_default_dtype", seen.append)
    report = compiled(PROGRAMS["attention"], inputs)
    assert [s.check for s in report.sites] == [check.PASSED]
    assert torch.float64 not in seen  # Dynamo sets what it found


def test_numbers_of_a_check_in_float64():
    def program(x):
        share = (x > 0).sum() / 3
        return x * share * torch.where(x > 0, 0.1, 1.0)

    graphs = []
    inputs = torch.tensor([1.0, -2.0])
    torch._dynamo.reset()
    torch.compile(program, backend=lambda gm, _: graphs.append(gm) or gm.forward)(inputs)
    (leaf, *nodes, output) = graphs[0].graph.nodes
    (result,) = output.args[0]
    found = run(nodes, result.name, {leaf.name: inputs}, wide=True).value
    assert found.tolist() == [0.1 * (1 / 3), -2 * (1 / 3)]
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("enabled", [True, False])
def test_cudnn_keeps_nothing_of_a_check(enabled):
    """NOTE [cuDNN's attention is not run in checks] in validation/isolation.py."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        with isolated(set()):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_under_inference_mode_and_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            report = compiled(PROGRAMS["masked"], inputs_of("masked"))
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert [s.check for s in report.sites] == [check.PASSED]


# ------------------------------------------------------------------------- programs that are right
def autocast(q, k, qt, kt, mask):
    with torch.autocast("cpu", torch.bfloat16):
        return PROGRAMS["masked"](q, k, qt, kt, mask)


def labels_change(h, w, ht, wt, y):
    y[:3] = -100
    keep = y != -100
    s, t = h @ w.T, ht @ wt.T
    rows = rows_of_kl(s, t)
    return (rows * keep).sum() / keep.sum()


def one_leaf_twice(q, k, qt, kt, mask):
    """A teacher that is the detached student of a moment ago."""
    s, t = q @ k.mT * 0.3, (q * 0.9).detach() @ k.detach().mT * 0.3
    return kd(s, t)


def dropout_of_nothing(q, k, qt, kt, mask):
    s, t = (F.dropout((x @ y.mT).softmax(-1), 0.0, True) for x, y in ((q, k), (qt, kt)))
    return (t * (t.clamp_min(1e-12).log() - s.clamp_min(1e-12).log())).sum(-1).mean()


def lengths_are_drawn_as_lengths(q, k, qt, kt, n):
    keep = torch.arange(k.shape[2])[None] < n[:, None]
    return PROGRAMS["masked"](q, k, qt, kt, keep[:, None, None])


RIGHT = {
    autocast: lambda: inputs_of("masked"),
    one_leaf_twice: lambda: inputs_of("masked"),
    dropout_of_nothing: lambda: inputs_of("masked"),
    lengths_are_drawn_as_lengths: lambda: (*inputs_of("masked")[:4], torch.tensor([10, 20])),
    labels_change: lambda: (*inputs_of("tied"), torch.arange(24)),
}


@pytest.mark.parametrize("fn", RIGHT)
def test_right_programs_pass_without_a_warning(fn, caplog):
    report = compiled(fn, RIGHT[fn]())
    assert [site.check for site in report.sites if site.fused] == [check.PASSED]
    assert not caplog.records


@expects_failed_checks
def test_a_write_that_is_dropped_is_caught():
    def weighted(q, k, qt, kt, w):
        rows = elements_of_kl(q @ k.mT, qt @ kt.mT)
        w.mul_(2)
        return (rows.sum(-1) * w).sum()

    inputs = (*inputs_of("masked")[:4], torch.rand(24))
    assert compiled(weighted, inputs).num_fused == 1
    with planted(through(0, torch.neg)):
        assert compiled(weighted, inputs).num_fused == 0


def smoothed(x):
    p = x.softmax(-1) * 0.9 + 0.1 / x.shape[-1]
    return p / p.sum(-1, keepdim=True)


def guarded(x):
    p = x.softmax(-1) + 1e-6
    return p / p.sum(-1, keepdim=True)


@pytest.mark.parametrize("num_queries", [1, 6])
@pytest.mark.parametrize("normalised", [smoothed, guarded])
def test_gradients_that_cancel_to_zero(normalised, num_queries):
    """Of one key that a mask leaves: the code as it is written gives exactly 0, by luck."""
    keys = torch.ones(num_queries, 6, dtype=torch.bool).tril().triu()

    def step(q, k, qt, kt):
        s, t = (x.masked_fill(~keys, -30000.0) for x in (q @ k.mT, qt @ kt.mT))
        p, q = normalised(t), normalised(s)
        return (p * (p.log() - q.log())).sum(-1).mean()

    shapes = ((1, 2, num_queries, 4), (1, 2, 6, 4)) * 2
    inputs = [torch.randn(s, requires_grad=i < 2) for i, s in enumerate(shapes)]
    assert compiled(step, inputs).num_fused == 1


def top_of_the_teacher(s, t):
    ids = t.topk(3, -1).indices
    return torch.zeros_like(s, dtype=torch.bool).scatter_(-1, ids, True)


def all_but_one(s, t):
    keep = torch.zeros(5, 9, dtype=torch.bool)
    keep.scatter_(-1, torch.tensor([[3]] * 5), True)
    return keep.logical_not_()


def largest_places(h, w, g, v):
    s, t = h @ w.T, g @ v.T
    with torch.no_grad():
        agreement = (s.argmax(-1) == t.max(-1).indices).float().mean()
    return kd(s, t), agreement


def _places_of(change, monkeypatch):
    """The report of a program whose kernels round the logits by `change`."""
    rounding = OPERATIONS["bfloat16"]
    monkeypatch.setitem(OPERATIONS, "bfloat16", replace(rounding, run=change))
    generator = torch.Generator().manual_seed(0)
    sizes = ((384, 32), (512, 32), (384, 48), (512, 48))
    inputs = [torch.randn(n, generator=generator).bfloat16() for n in sizes]
    inputs[:2] = [x.requires_grad_() for x in inputs[:2]]
    return compiled(largest_places, inputs, min_mib=0)


def test_places_of_maxima_that_another_rounding_finds_pass(monkeypatch):
    """Sums in another order round some logits to their other neighbour."""
    seen = []

    def cut_off(a):
        found = (a.float().view(torch.int32) & -65536).view(torch.float32).to(a.dtype)
        seen.append(int((found.argmax(-1) != a.bfloat16().argmax(-1)).sum()))
        return found

    report = _places_of(cut_off, monkeypatch)
    assert report.num_fused == len(report.sites) == 3, report
    assert sum(seen) > 10


@expects_failed_checks
def test_places_of_what_is_no_maximum_are_caught(monkeypatch):
    def shifted(a):
        return a + 0.1 * (torch.arange(a.shape[-1]) % 2)

    report = _places_of(shifted, monkeypatch)
    assert not any("maximum" in site.form for site in report.sites if site.fused), report
    assert any(FAILED in site.reason for site in report.sites), report


@pytest.mark.parametrize("hidden", [-1e30, -1e12, -math.inf])
@pytest.mark.parametrize("dim", [1, -1, 0])
def test_places_next_to_masks(hidden, dim):
    """The error of a mask is none of the scores, and of masked scores the first is the place."""
    tiny = 1e-8  # lost in float32
    rows = torch.tensor(
        [[0.7, hidden, 0.3, hidden], [0.7, 0.7 + 2 * tiny, hidden, 0.7 + tiny], [hidden] * 4],
        dtype=torch.float64,
    )
    places = Places(torch.fx.Graph().placeholder("x"), dim)
    wide = rows.T if dim == 0 else rows
    right = []
    for place in range(4):
        found = torch.full((3,), place)
        ours, given, exact = (Result(x, {}, {}) for x in (found, wide.float(), wide))
        agreed = places.agree(ours, given, exact)
        # what the check takes anyway: the places that eager code has, in float32 and in float64
        eager = (found == wide.float().argmax(dim)) | (found == wide.argmax(dim))
        right.append((agreed | eager).tolist())
    assert torch.tensor(right).T.tolist() == [
        [True, False, False, False], [True, True, False, True], [True, False, False, False],
    ]  # fmt: skip


@pytest.mark.parametrize("made", [top_of_the_teacher, all_but_one])
def test_a_mask_that_is_written_in_place_before_the_loss(made):
    """Both graphs start from the memory that is written, or both compute it."""

    def step(q, k, qt, kt):
        s, t = q @ k.mT, qt @ kt.mT
        keep = made(s, t)
        s, t = s.masked_fill(~keep, -1e9), t.masked_fill(~keep, -1e9)
        return kd(s, t)

    inputs = [torch.randn(n, 4, requires_grad=i < 2) for i, n in enumerate((5, 9, 5, 9))]
    outcome = compare(step, inputs).check()
    assert outcome.num_fused == 1, outcome.report
