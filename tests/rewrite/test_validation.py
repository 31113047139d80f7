"""Every rewrite is checked when it is compiled: what computes something else stays out.

Faults are planted after the rewrite, whatever its rules are. Each must be caught, and nothing
that is right may be stopped.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import torch_streamkl
from tests.support.comparing import compare
from tests.support.covering import every
from tests.support.plants import (
    PLANTS,
    PROGRAMS,
    Plant,
    first_call,
    inputs_of,
    planted,
    scaled,
    through,
)
from torch_streamkl.fx_passes import backend, pipeline
from torch_streamkl.fx_passes.fx_utils.copies import copied
from torch_streamkl.fx_passes.options import RewriteOptions
from torch_streamkl.fx_passes.reporting.report import Report
from torch_streamkl.fx_passes.validation import check, records
from torch_streamkl.fx_passes.validation.isolation import isolated

FAILED = "the check failed: "
expects_failed_checks = pytest.mark.expects_failed_checks


@pytest.fixture(autouse=True)
def _nothing_is_known_to_pass() -> Iterator[None]:
    records.forget()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def graph_of(fn: Callable[..., Any], inputs: Any, dynamic: bool = False) -> fx.GraphModule:
    """What Dynamo gives to a backend."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=keep, dynamic=dynamic)(*inputs)
    (graph,) = graphs
    return graph


LENIENT: dict[str, Any] = {"min_mib": 0, "verify_max_seconds": 60.0}
GRAPHS: dict[tuple[str, bool], fx.GraphModule] = {}


def rewritten(program: str, dynamic: bool = False, version: str = "", **options: Any) -> Report:
    """The report of rewriting a copy of the graph of a program."""
    key = program, dynamic
    if key not in GRAPHS:
        GRAPHS[key] = graph_of(PROGRAMS[program], inputs_of(program), dynamic)
    owner = GRAPHS[key]
    copy = fx.GraphModule(owner, copied(owner.graph))
    report = pipeline.rewrite(copy, RewriteOptions(**{**LENIENT, **options}), version)
    assert not report.failures
    return report


def compiled(fn: Callable[..., Any], inputs: Any, **options: Any) -> Report:
    torch._dynamo.reset()
    defaults = {"inner": "eager", "verify_max_seconds": 60.0}
    given = {f"streamkl.{name}": x for name, x in {**defaults, **options}.items()}
    with backend.collected() as report:
        torch.compile(fn, backend="streamkl", options=given)(*inputs)
    return report


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_right_passes(program: str, dynamic: bool) -> None:
    report = rewritten(program, dynamic)
    assert report.num_fused == len(report.sites) == 1
    assert report.sites[0].check == check.PASSED


@expects_failed_checks
@pytest.mark.parametrize("plant", every(2, PLANTS), ids=lambda plant: plant.name)
def test_a_planted_fault_is_caught(plant: Plant) -> None:
    with planted(plant.edit) as edits:
        report = rewritten(plant.program)
    assert edits
    reasons = [site.reason for site in report.sites if not site.fused]
    assert any(reason.startswith(FAILED) for reason in reasons), report


@expects_failed_checks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_fault_is_caught_in_every_dtype(dtype: torch.dtype) -> None:
    inputs = inputs_of("attention", dtype)
    assert compiled(PROGRAMS["attention"], inputs).num_fused == 1
    with planted(scaled("teacher_scale", 1.5)):
        report = compiled(PROGRAMS["attention"], inputs)
    assert report.num_fused == 0


@expects_failed_checks
def test_a_fault_is_caught_with_dynamic_shapes() -> None:
    with planted(scaled("teacher_scale", 1.01)):
        assert rewritten("attention", dynamic=True).num_fused == 0


@expects_failed_checks
def test_a_site_that_fails_leaves_the_others_fused() -> None:
    def two(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, mask: Tensor) -> Tensor:
        masked = PROGRAMS["masked"]
        return masked(q, k, qt, kt, mask) + masked(q * 2, k, qt, kt * 3, mask)

    def only_the_first(graph: fx.Graph) -> None:
        call = first_call(graph)
        if call.meta["streamkl_site"] == first_site:
            scaled("student_scale", 1.1)(graph)

    inputs = inputs_of("masked")
    first_site = compiled(two, inputs).sites[0].node
    with planted(only_the_first):
        report = compiled(two, inputs)
    verdicts = {site.node: site for site in report.sites}
    wrong = verdicts.pop(first_site)
    assert wrong.reason.startswith(FAILED) and not wrong.fused
    assert [site.check for site in verdicts.values()] == [check.PASSED]


@expects_failed_checks
def test_the_program_is_as_it_was_written_after_a_failed_check() -> None:
    inputs = inputs_of("tied")
    with planted(scaled("student_scale", 2.0)):
        torch._dynamo.reset()
        options = {"streamkl.inner": "eager"}
        step = torch.compile(PROGRAMS["tied"], backend="streamkl", options=options)
        torch.testing.assert_close(step(*inputs), PROGRAMS["tied"](*inputs))


@expects_failed_checks
def test_strict_raises_the_figures() -> None:
    with (
        planted(scaled("student_scale", 2.0)),
        pytest.raises(backend.UnfusedError, match="the check failed: the val"),
    ):
        compiled(PROGRAMS["masked"], inputs_of("masked"), strict=True)


@expects_failed_checks
def test_tests_hear_of_failed_checks(failed_checks: list[check.CheckResult]) -> None:
    with planted(scaled("student_scale", 2.0)):
        rewritten("masked")
    assert [v.difference[:9] for v in failed_checks] == ["the value"]


# ------------------------------------------------------------------------------------------ bounds
def test_what_is_too_large_is_said() -> None:
    (site,) = rewritten("masked", verify_max_mib=0.01).sites
    assert site.fused
    limits = r"check skipped: [\d.]+ .iB > [\d.]+ KiB limit\. Force with .*"
    assert re.fullmatch(limits, site.check)
    assert site.check in str(Report([site]))
    assert site.check.removeprefix("check ") in Report([site]).details()


def test_what_takes_too_long_is_said() -> None:
    (site,) = rewritten("masked", verify_max_seconds=1e-6).sites
    assert site.fused
    assert re.match("check skipped: ~.* s > 1e-06 s limit", site.check)


def test_always_has_no_bounds() -> None:
    (site,) = rewritten(
        "masked", verify="always", verify_max_mib=0.01, verify_max_seconds=1e-6
    ).sites
    assert site.check == check.PASSED


def test_never_is_said() -> None:
    (site,) = rewritten("masked", verify="never").sites
    assert site.check == 'check skipped: streamkl.verify is "never"'


@expects_failed_checks
def test_smaller_sizes_where_the_traced_ones_are_too_large() -> None:
    (site,) = rewritten("attention", dynamic=True, verify_max_mib=0.2).sites
    assert site.check == check.PASSED
    (site,) = rewritten("attention", dynamic=False, verify_max_mib=0.2).sites
    assert site.check.startswith("check skipped")
    with planted(scaled("teacher_scale", 1.01)):
        assert rewritten("attention", dynamic=True, verify_max_mib=0.2).num_fused == 0


def selected(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor, counts: Tensor) -> Tensor:
    """Rows whose number is read from the data."""
    n = counts.sum().item()
    torch._check(n >= 2)
    torch._check(n <= h.size(0))
    s, t = h[:n] @ w.T, ht[:n] @ wt.T
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="sum")


def test_always_fuses_nothing_that_cannot_be_checked() -> None:
    inputs = (*inputs_of("tied"), torch.tensor([3, 4]))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        usual = compiled(selected, inputs)
        always = compiled(selected, inputs, verify="always")
    for ours, theirs in zip(usual.sites, always.sites, strict=True):
        if ours.fused and ours.check != check.PASSED:
            assert not theirs.fused
            assert theirs.reason.startswith('streamkl.verify is "always"')


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("verify", "sometimes"),
        ("verify", True),
        ("verify_max_mib", 0),
        ("verify_max_mib", "a lot"),
        ("verify_max_seconds", -1.0),
        ("verify_max_seconds", None),
    ],
)
def test_wrong_options_say_the_rule_and_the_value(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"streamkl.{option} must be .*got {value!r}"):
        torch_streamkl.inductor_options(**{option: value})
    with pytest.raises(ValueError, match=f"streamkl.{option} must be .*got {value!r}"):
        backend.split_options({f"streamkl.{option}": value})


def test_options_are_part_of_cache_keys() -> None:
    keys = {
        torch_streamkl.inductor_options(**options)["pre_grad_custom_pass"].uuid()
        for options in (
            {},
            {"verify": "never"},
            {"verify": "always"},
            {"verify_max_mib": 7},
            {"verify_max_seconds": 7.0},
        )
    }
    assert len(keys) == 5


# ----------------------------------------------------------------------------------------- records
def test_what_passed_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    original = check.isolated
    monkeypatch.setattr(check, "isolated", lambda devices: runs.append(1) or original(devices))
    for _ in range(2):
        assert rewritten("masked").sites[0].check == check.PASSED
    assert len(runs) == 1
    rewritten("masked", dynamic=True)
    records.forget()
    rewritten("masked")
    assert len(runs) == 3


@expects_failed_checks
def test_a_pass_is_no_pass_of_something_else() -> None:
    rewritten("masked")
    with planted(scaled("student_scale", 1.1)):
        assert rewritten("masked").num_fused == 0


def test_passes_are_kept_for_later_processes(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch(force_disable_caches=False):
        rewritten("masked", version="this")
        records.forget()
        monkeypatch.setattr(check, "isolated", None)  # nothing may be run
        assert rewritten("masked", version="this").sites[0].check == check.PASSED
        assert len(list((tmp_path / "streamkl_checks").iterdir())) == 1


def test_rotary_embeddings_are_kept_for_later_processes(tmp_path: Any, monkeypatch: Any) -> None:
    """Their halves are ``x[..., :n]``, whose index has an ellipsis."""

    def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        other = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * angles.cos() + other * angles.sin()

    def loss(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        log_s = (turned(q, angles) @ turned(k, angles).mT).log_softmax(-1)
        p = (q @ k.mT).softmax(-1).detach()
        return F.kl_div(log_s, p, reduction="none").sum(-1).mean()

    inputs = [torch.randn(1, 2, 6, 8, requires_grad=i < 2) for i in range(2)]
    inputs.append(torch.randn(6, 8))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch(force_disable_caches=False):
        assert compiled(loss, inputs).num_fused == 1
        records.forget()
        monkeypatch.setattr(check, "isolated", None)  # nothing may be run
        assert compiled(loss, inputs).sites[0].check == check.PASSED


def test_kernels_of_a_check_are_assembled_as_inductors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's cache has a kernel once for each ptxas, and Inductor brings its own."""
    from torch._inductor.runtime import compile_tasks

    seen: list[str] = []
    original = check.isolated
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", lambda: seen.append("ptxas"))
    monkeypatch.setattr(check, "isolated", lambda x: seen.append("check") or original(x))
    graph = graph_of(PROGRAMS["masked"], inputs_of("masked"))
    ours = RewriteOptions(**LENIENT)
    backend.rewrite_and_report(graph, ours)
    assert seen == ["ptxas", "check"]
    backend.rewrite_and_report(graph, RewriteOptions(inner="eager", **LENIENT))
    assert seen.count("ptxas") == 1  # explain() changes no setting


# --------------------------------------------------------------------------------------- isolation
def test_the_process_is_left_as_it_was() -> None:
    inputs = inputs_of("attention")
    before = torch.get_rng_state(), random.getstate()
    modes = _modes()
    with torch.no_grad():
        rewritten("attention")
    with torch.autocast("cpu", torch.bfloat16):
        rewritten("masked")
    assert _modes() == modes
    records.forget()
    compiled(PROGRAMS["attention"], inputs)
    assert _modes() == modes
    state = inputs_of("attention")  # draws from the default generator
    torch.set_rng_state(before[0])
    for x, y in zip(inputs_of("attention"), inputs, strict=True):
        assert x.shape == y.shape
    assert all(torch.isfinite(x).all() for x in state)
    assert random.getstate() == before[1]


@pytest.mark.parametrize("enabled", [True, False])
def test_cudnn_keeps_nothing_of_a_check(enabled: bool) -> None:
    """NOTE [cuDNN's attention is not run in checks] in validation/isolation.py."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        with isolated(set()):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_random_state_is_left_as_it_was() -> None:
    inputs_of("masked")
    rewritten("masked")
    records.forget()
    state = torch.get_rng_state()
    rewritten("masked")
    assert torch.equal(torch.get_rng_state(), state)


def _modes() -> tuple[object, ...]:
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
    )


def test_under_inference_mode_and_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            report = compiled(PROGRAMS["masked"], inputs_of("masked"))
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert [s.check for s in report.sites] == [check.PASSED]


# ------------------------------------------------------------------------- programs that are right
def autocast(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, mask: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return PROGRAMS["masked"](q, k, qt, kt, mask)


def labels_change(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor, y: Tensor) -> Tensor:
    y[:3] = -100
    keep = y != -100
    s, t = h @ w.T, ht @ wt.T
    rows = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)
    return (rows * keep).sum() / keep.sum()


def one_leaf_twice(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, mask: Tensor) -> Tensor:
    """A teacher that is the detached student of a moment ago."""
    s, t = q @ k.mT * 0.3, (q * 0.9).detach() @ k.detach().mT * 0.3
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


def dropout_of_nothing(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, mask: Tensor) -> Tensor:
    s, t = (F.dropout((x @ y.mT).softmax(-1), 0.0, True) for x, y in ((q, k), (qt, kt)))
    return (t * (t.clamp_min(1e-12).log() - s.clamp_min(1e-12).log())).sum(-1).mean()


def lengths(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, n: Tensor) -> Tensor:
    keep = torch.arange(k.shape[2])[None] < n[:, None]
    return PROGRAMS["masked"](q, k, qt, kt, keep[:, None, None])


@pytest.mark.parametrize("fn", [autocast, one_leaf_twice, dropout_of_nothing])
def test_right_attention_passes(fn: Callable[..., Any]) -> None:
    report = compiled(fn, inputs_of("masked"))
    assert [site.check for site in report.sites] == [check.PASSED]


def test_lengths_are_drawn_as_lengths() -> None:
    report = compiled(lengths, (*inputs_of("masked")[:4], torch.tensor([10, 20])))
    assert [site.check for site in report.sites] == [check.PASSED]


def test_labels_that_are_written_before_pass() -> None:
    report = compiled(labels_change, (*inputs_of("tied"), torch.arange(24)))
    assert [site.check for site in report.sites if site.fused] == [check.PASSED]


def test_a_failed_check_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torch_streamkl"):
        rewritten("masked")
    assert not caplog.records


@expects_failed_checks
def test_a_write_that_is_dropped_is_caught() -> None:
    def weighted(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, w: Tensor) -> Tensor:
        rows = F.kl_div((q @ k.mT).log_softmax(-1), (qt @ kt.mT).softmax(-1), reduction="none")
        w.mul_(2)
        return (rows.sum(-1) * w).sum()

    inputs = (*inputs_of("masked")[:4], torch.rand(24))
    assert compiled(weighted, inputs).num_fused == 1
    with planted(through(0, torch.neg)):
        assert compiled(weighted, inputs).num_fused == 0


def smoothed(x: Tensor) -> Tensor:
    p = x.softmax(-1) * 0.9 + 0.1 / x.shape[-1]
    return p / p.sum(-1, keepdim=True)


def guarded(x: Tensor) -> Tensor:
    p = x.softmax(-1) + 1e-6
    return p / p.sum(-1, keepdim=True)


@pytest.mark.parametrize("num_queries", [1, 6])
@pytest.mark.parametrize("normalised", [smoothed, guarded])
def test_gradients_that_cancel_to_zero(
    normalised: Callable[[Tensor], Tensor], num_queries: int
) -> None:
    """Of one key that a mask leaves: the code as it is written gives exactly 0, by luck."""
    keys = torch.ones(num_queries, 6, dtype=torch.bool).tril().triu()

    def step(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        s, t = (x.masked_fill(~keys, -30000.0) for x in (q @ k.mT, qt @ kt.mT))
        p, q = normalised(t), normalised(s)
        return (p * (p.log() - q.log())).sum(-1).mean()

    shapes = ((1, 2, num_queries, 4), (1, 2, 6, 4)) * 2
    torch._dynamo.reset()
    with backend.collected() as report:
        torch.compile(step, backend="streamkl", options={"streamkl.inner": "eager"})(
            *(torch.randn(s, requires_grad=i < 2) for i, s in enumerate(shapes))
        )
    assert report.num_fused == 1, report


def test_a_mask_that_is_written_in_place_before_the_loss() -> None:
    """Both graphs start from the memory that is written, or both compute it."""

    def top_of_the_teacher(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        s, t = q @ k.mT, qt @ kt.mT
        ids = t.topk(3, -1).indices
        keep = torch.zeros_like(s, dtype=torch.bool).scatter_(-1, ids, True)
        s, t = s.masked_fill(~keep, -1e9), t.masked_fill(~keep, -1e9)
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")

    def turned(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        s, t = q @ k.mT, qt @ kt.mT
        keep = torch.zeros(5, 9, dtype=torch.bool)
        keep.scatter_(-1, torch.tensor([[3]] * 5), True)
        keep.logical_not_()
        s, t = s.masked_fill(~keep, -1e9), t.masked_fill(~keep, -1e9)
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")

    inputs = [torch.randn(n, 4, requires_grad=i < 2) for i, n in enumerate((5, 9, 5, 9))]
    for fn in (top_of_the_teacher, turned):
        outcome = compare(fn, inputs, options={"streamkl.min_mib": 0.0}).check()
        assert outcome.num_fused == 1, outcome.report
