"""bench.short_steps in small: its steps, its gate, its line."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from bench import cuda_graphs, steps
from bench.models import Batch, ShortStep
from bench.steps import Schedule
from tests.support.covering import every

CPU = torch.device("cpu")
TINY = ShortStep(
    "tiny", "of a test", "maps", hidden_size=24, num_layers=2, num_heads=12,
    teacher_layers=4, teacher_width=24,
)  # fmt: skip


@pytest.mark.parametrize("objective", every(2, ["relations", "maps"]))
def test_a_step_is_the_same_in_both_ways(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    # strict: a KL that is not fused is an error
    quickly = partial(steps.with_streamkl, **{"streamkl.inner": "eager"})
    monkeypatch.setitem(steps.PROVIDERS, "streamkl", quickly)
    step = replace(TINY, objective=objective)
    rows = steps.run_step(step, 8, 2, ["eager", "streamkl"], Schedule(CPU, 3, 1))
    assert [row["status"] for row in rows] == ["ok", "ok"], rows
    assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-5)
    for row in rows:
        assert row["samples"] == 3
        assert row["gradient_error"] <= row["gradient_budget"]
    line = steps.line(rows[1], rows[0])
    assert "provider streamkl, context 8" in line
    assert "of inductor's time" in line


def test_rows_are_kept_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")

    def breaks(*_: Any) -> Any:
        raise ValueError("does not compile")

    monkeypatch.setitem(steps.PROVIDERS, "inductor", breaks)
    kept: list[list[str]] = []
    rows = steps.run_step(
        TINY, 8, 2, ["eager", "inductor"], Schedule(CPU, 0, 1),
        lambda rows: kept.append([row["status"] for row in rows]),
    )  # fmt: skip
    assert kept == [["untimed"], *[["untimed", "error"]] * 2]
    assert "gradient_error" in rows[0]
    assert "step_ms" not in rows[0]
    assert "untimed" in steps.line(rows[0], rows[1])


def test_graphs_are_weighed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two providers whose graphs lie in one pool: each has the memory of its own."""
    pytest.importorskip("transformers", reason="transformers is not installed")

    class Graph:
        def replay(self) -> None:
            pass

    names, in_pool = steps.GRAPH_PROVIDERS, set()

    def with_graphs(loss_of: Any, name: str, mib: int) -> Any:
        def loss(*inputs: Any) -> Any:
            in_pool.add((name, mib))
            for _ in range(2):
                graph.replay()
            return loss_of(*inputs)

        return loss

    def snapshot() -> list[dict[str, Any]]:
        return [{"segment_pool_id": (0, 1), "total_size": sum(mib for _, mib in in_pool) * 2**20}]

    graph = Graph()
    monkeypatch.setattr(cuda_graphs, "check", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(torch._dynamo, "reset", in_pool.clear)
    for mib, name in zip((3, 5), names, strict=True):
        provider = partial(with_graphs, name=name, mib=mib)
        monkeypatch.setitem(steps.PROVIDERS, name, provider)
    rows = steps.run_step(TINY, 8, 2, ["eager", *names], Schedule(CPU, 2, 1))
    assert [row["status"] for row in rows] == ["ok"] * 3, rows
    assert [row.get("graph_pool_mib") for row in rows] == [None, 3.0, 5.0]
    small = rows[0]["peak_mib"]
    assert [row["peak_mib"] for row in rows[1:]] == [pytest.approx(small + x) for x in (3, 5)]


def test_a_wrong_gradient_is_red() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    batch = Batch.of(2, 8, CPU, 0)
    gate = steps.gate_of(TINY, batch, CPU)
    right: list[Any] = [g.float() for g in gate.gradients]
    assert gate.judge(gate.loss, right).is_green
    last = [*right[:-1], right[-1] * float("nan")]
    for wrong in ([right[0] * 1.01, *right[1:]], [g * float("nan") for g in right], last):
        assert gate.judge(gate.loss, wrong).row()["status"] == "red"
    assert gate.judge(gate.loss * 1.01, right).row()["status"] == "red"


def test_padding() -> None:
    batch = Batch.of(16, 32, CPU, 1)
    lengths = batch.mask.sum(1)
    assert lengths.max() == 32
    assert lengths.min() >= 16
    assert lengths.unique().numel() > 4
