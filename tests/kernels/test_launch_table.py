"""Launch tables: what they choose, who goes first, and that a wrong one is never used silently."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_streamkl.attention import heuristics, limits
from torch_streamkl.attention.heuristics import triton_launch
from torch_streamkl.attention.ops import problem_of
from torch_streamkl.attention.problem import AttentionProblem
from torch_streamkl.kernels.tiles import TritonLaunch
from torch_streamkl.program.divergences import DIVERGENCES
from torch_streamkl.runtime import launch_table
from torch_streamkl.runtime.launch_table import LaunchKey, LaunchTable, MeasuredLaunch

KEY = LaunchKey("forward", 64, 128, 4, True, 1024)
ENTRY = MeasuredLaunch(KEY, "triton", 128, 32, 8, 3, 1.5, 2.0)
DEVICE = "interpreter"
DEFAULT = TritonLaunch(16, 16, 4, 1)
TUNED = TritonLaunch(128, 32, 8, 3)


def problem(seqlen: int = 1024, **options: Any) -> AttentionProblem:
    student, teacher = (torch.empty(1, 64, seqlen, dim) for dim in (50, 128))
    settings = {"window_right": 0, **options}
    return problem_of(student, student, teacher, teacher, **settings)[0]


def chosen(p: AttentionProblem, kernel: str = "forward") -> TritonLaunch:
    return replace(triton_launch(p, kernel), num_splits=1)


@pytest.fixture(autouse=True)
def no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(launch_table.VARIABLE, raising=False)
    launch_table.forget()
    yield
    launch_table.forget()


def write(path: Path, *entries: MeasuredLaunch, **header: Any) -> Path:
    replace(launch_table.new_table(DEVICE), entries=entries, **header).save(path)
    launch_table.forget()
    return path


def users_file() -> Path:
    return launch_table.default_path(DEVICE)


# ------------------------------------------------------------------------------------- choosing
def test_the_named_file_goes_before_the_users_and_that_before_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(problem()) == DEFAULT
    write(users_file(), ENTRY)
    assert chosen(problem()) == TUNED
    named = write(tmp_path / "named.json", replace(ENTRY, block_n=64))
    monkeypatch.setenv(launch_table.VARIABLE, str(named))
    launch_table.forget()
    assert chosen(problem()) == TritonLaunch(128, 64, 8, 3)


def test_the_nearest_length_serves() -> None:
    long = replace(ENTRY, key=replace(KEY, seqlen=8192), block_n=64)
    write(users_file(), long, ENTRY)
    lengths = {255: 16, 256: 32, 2000: 32, 6000: 64, 32768: 64, 32769: 16}
    assert {n: chosen(problem(n)).block_n for n in lengths} == lengths


@pytest.mark.parametrize(
    "options",
    [
        {"window_right": None},
        {"mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)},
        {"student_bias": torch.zeros(1, 1, 1, 1)},
        {"teacher_softcap": 20.0},
        {"functional": DIVERGENCES["tv"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_problems_keep_the_defaults(options: dict[str, Any]) -> None:
    write(users_file(), ENTRY)
    assert chosen(problem(**options)) == DEFAULT
    assert chosen(problem(), "dq") == DEFAULT


def test_keys_are_still_split() -> None:
    write(users_file(), ENTRY)
    q, k = torch.empty(1, 1, 8, 64), torch.empty(1, 1, 1024, 64)
    t, u = torch.empty(1, 1, 8, 128), torch.empty(1, 1, 1024, 128)
    assert triton_launch(problem_of(q, k, t, u, window_right=0)[0], "forward").num_splits == 8


@pytest.mark.parametrize("implementation", ["triton", "hopper"])
def test_a_measurement_decides_about_hopper(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # else a CPU has no kernels
    monkeypatch.setattr(limits, "hopper_limit", lambda _: None)
    monkeypatch.setattr(limits, "triton_limit", lambda _: None)
    least = 0.0 if implementation == "triton" else math.inf
    monkeypatch.setattr(heuristics, "HOPPER_LEAST_FLOP", least)
    write(users_file(), replace(ENTRY, implementation=implementation))
    assert heuristics.select_implementation(problem(), "auto") == implementation


# ------------------------------------------------------------------------------------- refusing
Change = Callable[[dict[str, Any]], Any]


def entry_with(**values: Any) -> Change:
    return lambda content: content["entries"][0].update(values)


WRONG: dict[str, tuple[Change, str]] = {
    "schema": (lambda c: c.update(schema=2), "schema must be 1, got 2"),
    "device": (lambda c: c.update(device="NVIDIA H200"), "device must be 'interpreter'"),
    "torch": (lambda c: c.update(torch="1.0"), "torch must be .* got '1.0'"),
    "triton": (lambda c: c.update(triton="1.0"), "triton must be .* got '1.0'"),
    "missing": (lambda c: c.pop("device"), "fields must be"),
    "entries": (lambda c: c.update(entries={}), "entries must be a list"),
    "twice": (lambda c: c["entries"].append(c["entries"][0]), "entries must differ"),
    "kernel": (entry_with(kernel="backward"), "kernel must be one of"),
    "tile": (entry_with(block_m=96), "block_m must be one of .* got 96"),
    "warps": (entry_with(num_warps=3), "num_warps must be one of"),
    "stages": (entry_with(num_stages=True), "num_stages must be one of .* got True"),
    "text": (entry_with(block_n="64"), "block_n must be one of .* got '64'"),
    "negative": (entry_with(runtime_ms=-1.0), "runtime_ms must be a positive float"),
    "nan": (entry_with(runtime_ms=float("nan")), "runtime_ms must be a positive float"),
    "seqlen": (entry_with(seqlen=0), "seqlen must be a positive int"),
    "unknown": (entry_with(colour="red"), "must have the fields"),
    "hopper": (entry_with(kernel="dq", implementation="hopper"), "must be of the kernel"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_left_aside_with_one_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, rule = WRONG[name]
    path = write(users_file(), ENTRY)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rule):
        launch_table.load(path, DEVICE)
    with caplog.at_level(logging.WARNING, "torch_streamkl"):
        assert chosen(problem()) == chosen(problem(2048)) == DEFAULT
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "the default launches are used" in record.getMessage()


@pytest.mark.parametrize("content", [None, "", "[]", '{"schema": 1}'])
def test_a_named_file_that_is_wrong_raises(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "named.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(launch_table.VARIABLE, str(path))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"launch table .*named\.json"):
            triton_launch(problem(), "forward")


def test_measurements_of_the_same_key_are_replaced() -> None:
    other = replace(ENTRY, key=replace(KEY, kernel="dq"))
    newer = replace(ENTRY, block_m=64)
    table = LaunchTable(DEVICE, "1", "2", (ENTRY, other)).updated((newer,))
    assert table.entries == (other, newer)
