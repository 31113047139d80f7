"""The autotuner without a GPU: in Triton's interpreter, with timers that know the answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.interpreter import inside, outside
from torch_streamkl import attention_kl, tune
from torch_streamkl.attention import heuristics, limits
from torch_streamkl.kernels.tiles import TritonLaunch
from torch_streamkl.runtime import launch_table

DEFAULT, FAST, SLOW = (TritonLaunch(n, 16, 4, 1) for n in (16, 32, 64))
SHAPE = tune.Shape(1, 2, 1, 16, 20, 40, True, "float32", "cpu")
TINY = ["--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--teacher-head-dim", "20",
        "--seqlen", "40", "--causal", "--dtype", "float32", "--jobs", "0"]  # fmt: skip


@outside
def test_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, which is not refused")
    assert tune.main(TINY) == 1
    assert "needs a GPU" in capsys.readouterr().err


@outside
@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (["--heads", "0"], "--heads: must be at least 1, got 0"),
        (["--kv-heads", "-2"], "--kv-heads: must be at least 1, got -2"),
        (["--kv-heads", "3"], "--heads must be a multiple of --kv-heads, got 2 and 3"),
        (["--seqlen", "16", "0"], "--seqlen: must be at least 1, got 0"),
        (["--head-dim", "8.5"], "--head-dim: must be an integer, got '8.5'"),
        (["--jobs", "-1"], "--jobs: must be at least 0, got -1"),
        (["--out", "."], "--out must be a file, got the folder ."),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_wrong_sizes_are_refused(
    wrong: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tune.main([*TINY, *wrong])
    assert rule in capsys.readouterr().err


@outside
@pytest.mark.parametrize(("element_bytes", "most"), [(2, 64), (4, 16)])
def test_candidates_fit_registers_and_begin_with_the_default(
    element_bytes: int, most: int
) -> None:
    found = tune.candidates(TritonLaunch(64, 64, 4, 2, num_splits=4), element_bytes)
    assert found[0] == TritonLaunch(64, 64, 4, 2)
    assert len(set(found)) == len(found) > 20
    assert all(x.block_m * x.block_n // x.num_warps // 32 <= most for x in found[1:])


@outside
@pytest.mark.parametrize("wrong", [0.01, float("nan"), float("inf")])
def test_one_wrong_row_is_a_difference(wrong: float) -> None:
    expected = torch.randn(1, 4, 4096, 64)
    found = expected + torch.randn_like(expected) * 1e-6
    assert tune.largest_error((found,), (expected,)) < 1
    found[0, 3, 4095] += wrong
    assert not tune.largest_error((found,), (expected,)) <= 1


def steps_of(workload: tune.Workload) -> Callable[[Callable[[], Any]], float]:
    """A timer: the number of query rows of a tile says how long it takes."""
    times = {16: 2.0, 32: 1.0, 64: 3.0}

    def timer(call: Callable[[], Any]) -> float:
        call()
        return times[heuristics.triton_launch(workload.problem, "forward").block_m]

    return timer


def tuned(
    *launches: tuple[TritonLaunch, str],
) -> tuple[list[tune.Trial], launch_table.MeasuredLaunch]:
    workload = tune.Workload(SHAPE)
    return tune.tune_kernel(workload, "forward", launches, steps_of(workload))


@inside
def test_the_fastest_wins() -> None:
    trials, entry = tuned((DEFAULT, ""), (SLOW, ""), (FAST, ""))
    assert [trial.runtime_ms for trial in trials] == [2.0, 3.0, 1.0]
    assert (entry.block_m, entry.runtime_ms, entry.default_ms) == (32, 1.0, 2.0)
    text = tune.table_text(trials).split("\n")
    assert text[1].split()[-1] == "2.00x"
    assert text[2].endswith("default")


@pytest.mark.slow
@inside
def test_a_launch_that_was_refused_does_not_count() -> None:
    trials, entry = tuned((DEFAULT, ""), (FAST, "out of resource: shared memory"))
    assert entry.block_m == 16
    assert "out of resource" in tune.table_text(trials)


@inside
def test_a_wrong_result_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tune.Workload.run

    def wrong(self: tune.Workload, kernel: str) -> tuple[torch.Tensor, ...]:
        value, *stats = run(self, kernel)
        if heuristics.triton_launch(self.problem, kernel).block_m == 32:
            value[..., -1] += 1.0
        return value, *stats

    monkeypatch.setattr(tune.Workload, "run", wrong)
    trials, entry = tuned((DEFAULT, ""), (FAST, ""))
    assert entry.block_m == 16
    assert "differs from the default" in trials[1].remark


@pytest.mark.slow
@inside
def test_a_launch_that_raises_does_not_count_but_the_default_must_run() -> None:
    broken = TritonLaunch(24, 16, 4, 1)  # no power of two
    trials, entry = tuned((DEFAULT, ""), (broken, ""))
    assert entry.block_m == 16
    assert trials[1].remark
    with pytest.raises(RuntimeError, match="default launch of forward failed"):
        tuned((broken, ""))


@inside
@pytest.mark.parametrize(
    ("hopper_ms", "implementation"),
    [((3.0, 1.0, 1.0), "hopper"), ((1.0, 3.0, 3.0), "triton"), ((1.0, 1.0, None), "triton")],
)
def test_all_kernels_together_decide_about_hopper(
    hopper_ms: tuple[float | None, ...],
    implementation: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Here 2 ms for each portable kernel; None is a kernel for Hopper that is wrong."""
    taken = dict(zip(launch_table.KERNELS, hopper_ms, strict=True))
    running: list[str] = []

    def run_hopper(self: tune.Workload, kernel: str) -> tuple[torch.Tensor, ...]:
        running.append(kernel)
        found = self.run(kernel)
        return found if taken[kernel] is not None else tuple(x + 1.0 for x in found)

    def timer(call: Callable[[], Any]) -> float:
        running.clear()
        call()
        return taken[running[0]] if running else 2.0

    monkeypatch.setattr(tune.Workload, "run_hopper", run_hopper)
    monkeypatch.setattr(limits, "hopper_limit", lambda _: None)
    monkeypatch.setattr(tune, "candidates", lambda default, _: [default])
    forward, dq, dk = tune.tune(SHAPE, list(launch_table.KERNELS), 0, timer)
    assert forward.implementation == implementation
    assert forward.runtime_ms == (3.0 if implementation == "hopper" else 2.0)
    assert (dq.implementation, dk.implementation) == ("triton", "triton")
    assert "together: " in capsys.readouterr().out


@pytest.mark.slow
@inside
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel; what is written is what later calls launch, with the same result."""
    monkeypatch.setattr(tune, "candidates", lambda default, _: [default, FAST])
    times = iter([2.0, 1.0, *[1.0, 2.0] * tune.ROUNDS] * 3)
    path = tmp_path / "launches.json"

    def timer(call: Callable[[], Any]) -> float:
        call()
        return next(times)

    assert tune.main([*TINY, "--out", str(path)], timer) == 0
    problem = SHAPE.problem()
    q_s, k_s, q_t, k_t = (
        problem.student.q, problem.student.k, problem.teacher.q, problem.teacher.k
    )  # fmt: skip
    before = attention_kl(q_s, k_s, q_t, k_t, is_causal=True)
    monkeypatch.setenv(launch_table.VARIABLE, str(path))
    launch_table.forget()
    assert [heuristics.triton_launch(problem, k).block_m for k in ("forward", "dq", "dk")] == [
        32
    ] * 3
    after = attention_kl(q_s, k_s, q_t, k_t, is_causal=True)
    torch.testing.assert_close(after, before)
    launch_table.forget()


@outside
def test_the_help_describes_every_option() -> None:
    parser = tune.parser()
    assert not [action.option_strings for action in parser._actions if not action.help]
    text = parser.format_help()
    assert "example:\n  python -m torch_streamkl.tune --heads 32" in text
    assert "a few minutes" in text
