"""Panels of whole rows, what compiled graphs run on a CPU: their mathematics, as written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.operators.test_attention_operator import operator_arguments
from tests.support.feature_tests import (  # noqa: F401  # tests of this file
    test_any_call,
    test_dtype,
    test_feature,
    test_gradients_of_the_student_alone,
)
from tests.support.problems import CASES
from tests.support.subgraphs import bodies_as_written  # noqa: F401  # a fixture
from torch_streamkl.attention import ops, query_tiles, torch_impl
from torch_streamkl.attention.problem import NeedsGrad
from torch_streamkl.linear import rows as linear_rows
from torch_streamkl.linear import token_tiles
from torch_streamkl.linear.problem import Head, LinearProblem, RowValues, RowWeights
from torch_streamkl.linear.problem import NeedsGrad as LinearNeedsGrad
from torch_streamkl.program.divergences import named

pytestmark = pytest.mark.usefixtures("bodies_as_written", "small_parts")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators run query tiles, so small that a small problem has several."""
    monkeypatch.setattr(query_tiles, "QUERY_TILE_ELEMENTS", 200)
    monkeypatch.setattr(query_tiles, "LEAST_QUERIES", 4)
    monkeypatch.setattr(ops, "_module", lambda _: query_tiles)


@pytest.mark.parametrize(
    "wanted", [NeedsGrad(True, True, True, True), NeedsGrad(False, True, False, False)]
)
@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_gradients_in_the_forward(name: str, has_weights: bool, wanted: NeedsGrad) -> None:
    """They are those of the blocks, in float64 to its last digits."""
    args, _ = operator_arguments(name)
    wide = [x.detach().double() if _is_floating(x) else x for x in args]
    problem, _ = ops.problem_of(*wide)
    weight = torch.randn(problem.student.q.shape[:3], dtype=torch.float64) if has_weights else None
    value, stats, grads = query_tiles.forward_with_gradients(problem, weight, wanted)
    expected = torch_impl.forward_with_gradients(problem, weight, wanted)
    _close(value, expected[0])
    _close(stats.student, expected[1].student)
    _close(stats.teacher, expected[1].teacher)
    for got, x in zip(grads, expected[2], strict=True):
        assert (got is None) == (x is None)
        if got is not None and x is not None:
            _close(got, x)


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype.is_floating_point


def _close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


def test_averaged_heads_are_left_to_blocks() -> None:
    problem, _ = ops.problem_of(*operator_arguments("head_mean")[0])
    assert query_tiles.limit(problem) == (
        "take as many heads on both sides, got averaged heads of the teacher"
    )


def test_rows_that_are_too_long_are_left_to_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = ops.problem_of(*operator_arguments("gqa")[0])
    assert query_tiles.limit(problem) is None
    monkeypatch.setattr(query_tiles, "MOST_ELEMENTS", 64)
    assert query_tiles.limit(problem) == "hold 64 scores, got rows of 9 keys"


# ------------------------------------------------------------------------------------ LM heads
def linear_problem(
    labels: bool,
    bias: bool,
    softcap: float,
    temperature: float,
    divergence: str,
    dtype: torch.dtype = torch.float64,
) -> LinearProblem:
    """13 tokens, one of which does not count, and 70 vocabulary entries."""
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    heads = [
        Head(rand(13, 5), rand(70, 5), rand(70) if bias else None, 0.5, softcap) for _ in range(2)
    ]
    index = torch.randint(0, 70, (13,), generator=generator) if labels else None
    if index is not None:
        index[4] = -100
    functional = named(divergence, student_clamp=1e-3 if divergence == "forward_kl" else 0.0)
    return LinearProblem(*heads, functional, temperature, index)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "js"])
@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize(
    ("bias", "softcap", "temperature"),
    [(False, 0.0, 1.0), (True, 2.0, 1.0), (True, 0.0, 2.5), (False, 3.0, 0.7)],
)
@pytest.mark.parametrize("teacher", [False, True])
def test_rows_of_words(
    teacher: bool,
    bias: bool,
    softcap: float,
    temperature: float,
    labels: bool,
    divergence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_tiles, "BLOCK_ELEMENTS", 300)
    problem = linear_problem(labels, bias, softcap, temperature, divergence)
    wanted = LinearNeedsGrad(True, True, teacher, teacher)
    weight = torch.randn(13, dtype=torch.float64)
    weight[2] = 0.0
    weights = RowWeights(weight, weight.flip(0) if labels else None)
    results = []
    for rows in (linear_rows, token_tiles):
        logits = [torch.zeros(13, 128, dtype=torch.float64)[:, :70] for _ in range(2)]
        for x, head in zip(logits, problem.heads, strict=True):
            torch.mm(head.hidden, head.weight.t(), out=x)
        again = [x.clone() for x in logits]
        out = RowValues.allocate(problem)
        rows.values(problem, *logits, out, weights, wanted)
        rows.gradient(problem, *again, out, weights, wanted)
        kept = slice(None) if teacher else slice(1)
        results.append([out.value, out.hard, out.statistics, *logits[kept], *again[kept]])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


def test_words_that_one_side_lacks_are_left_to_linear_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = linear_problem(False, False, 0.0, 1.0, "forward_kl")
    short = Head(problem.teacher.hidden, problem.teacher.weight[:60])
    problem = LinearProblem(problem.student, short, problem.functional)
    called = []
    monkeypatch.setattr(linear_rows, "values", lambda *_: called.append(True))
    logits = [torch.randn(13, n, dtype=torch.float64) for n in (70, 60)]
    token_tiles.values(problem, *logits, RowValues.allocate(problem))
    assert called
