"""Training steps in small: their gate, their rows, and the memory of graphs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
from bench import cuda_graphs, steps
from bench.case import Problem
from bench.providers import Provider, named
from bench.records import Row
from bench.runner import Settings, run_case
from bench.steps import Batch, LlamaStep, ShortStep
from tests.support.covering import every

CPU = torch.device("cpu")
TINY = ShortStep(
    "tiny", "of a test", 2, 8, "maps", hidden_size=24, num_layers=2, num_heads=12,
    teacher_layers=4, teacher_width=24,
)  # fmt: skip
STREAMKL = named("streamkl[streamkl.inner=eager]")  # strict: a KL that is not fused is an error


def rows_of(case: Any, *providers: Provider) -> dict[str, Row]:
    settings = Settings(CPU, 0.01, max_rounds=3)
    return {row.provider: row for row in run_case(case, list(providers), settings)}


@pytest.mark.parametrize("objective", every(2, ["relations", "maps"]))
def test_a_step_is_the_same_in_both_ways(objective: str) -> None:
    rows = rows_of(replace(TINY, objective=objective), named("eager"), STREAMKL)
    eager, ours = rows.values()
    assert (eager.status, ours.status) == ("ok", "ok"), rows
    assert ours.loss == pytest.approx(eager.loss, rel=1e-5)
    for row in rows.values():
        assert row.samples == 3
        assert row.gradient_error <= row.gradient_budget


@pytest.mark.slow
def test_a_pair_of_decoders_is_compared_with_the_first_provider() -> None:
    pair = steps.Pair("tiny", 32, 48, 4, 2, 64, (32,), teacher_layers=2, student_layers=1)
    case = LlamaStep("llama", "", 1, 32, pair, "attention+logits")
    eager, ours = rows_of(case, named("eager"), STREAMKL).values()
    assert (eager.status, ours.status) == ("ok", "ok"), ours
    assert ours.loss_error < 1e-5
    assert ours.gradient_error < 1e-4


def test_a_wrong_gradient_is_red() -> None:
    problem = TINY.problem(CPU)
    truth = TINY.truth(problem)
    right: list[Any] = [g.float() for g in truth.gradients]
    assert "status" not in truth.judge(truth.loss, right)
    last = [*right[:-1], right[-1] * float("nan")]
    for wrong in ([right[0] * 1.01, *right[1:]], [g * float("nan") for g in right], last):
        assert truth.judge(truth.loss, wrong)["status"] == "red"
    assert truth.judge(truth.loss * 1.01, right)["status"] == "red"


def test_graphs_are_weighed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two providers whose graphs lie in one pool: each has the memory of its own."""

    class Graph:
        def replay(self) -> None:
            pass

    graph, in_pool = Graph(), set()

    def with_graphs(_: Any, problem: Problem, name: str, mib: int) -> Problem:
        def loss(*inputs: Any) -> Any:
            in_pool.add((name, mib))
            for _ in range(2):
                graph.replay()
            return problem.loss(*inputs)

        return replace(problem, loss=loss)

    def snapshot() -> list[dict[str, Any]]:
        return [{"segment_pool_id": (0, 1), "total_size": sum(mib for _, mib in in_pool) * 2**20}]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(torch._dynamo, "reset", in_pool.clear)
    assert cuda_graphs.pools_bytes() == 0
    providers = [
        Provider(name, partial(with_graphs, name=name, mib=mib), "#000", graphs=True)
        for name, mib in (("a", 3), ("b", 5))
    ]
    eager, *rows = rows_of(TINY, named("eager"), *providers).values()
    assert [row.status for row in (eager, *rows)] == ["ok"] * 3, rows
    assert [row.more["graph_pool_mib"] for row in rows] == [3.0, 5.0]
    assert [row.peak_mib for row in rows] == [pytest.approx(eager.peak_mib + x) for x in (3, 5)]


def test_padding() -> None:
    batch = Batch.of(16, 32, CPU, 1)
    lengths = batch.mask.sum(1)
    assert lengths.max() == 32
    assert lengths.min() >= 16
    assert lengths.unique().numel() > 4
