"""What compiled graphs run on a CPU, by Inductor: a few forms, each compiled once.

test_query_tiles.py tests the mathematics of all forms without compiling them.
"""

from __future__ import annotations

import importlib
import logging
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch._inductor.utils
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import cpu_vec_isa
from torch._inductor.custom_graph_pass import CustomGraphPass

from tests.operators.test_query_tiles import linear_problem
from tests.support.covering import every
from tests.support.problems import CASES, Spec, build
from tests.support.tolerances import check_call
from torch_streamkl.attention import ops, query_tiles, torch_impl
from torch_streamkl.attention.problem import NeedsGrad
from torch_streamkl.cpu import compiled, stored
from torch_streamkl.linear import rows as linear_rows
from torch_streamkl.linear import token_tiles
from torch_streamkl.linear.problem import NeedsGrad as LinearNeedsGrad
from torch_streamkl.linear.problem import RowValues, RowWeights

STUDENT = NeedsGrad(True, True, False, False)
MASKED = replace(CASES["mask_padding"], student_clamp=1e-4, is_causal=True, heads=2)


@pytest.fixture
def always_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small query tiles, and no way around the compiler."""
    monkeypatch.setattr(query_tiles, "QUERY_TILE_ELEMENTS", 200)
    monkeypatch.setattr(query_tiles, "LEAST_QUERIES", 4)
    monkeypatch.setattr(ops, "_module", lambda _: query_tiles)
    for name in ("forward", "backward", "forward_with_gradients"):
        monkeypatch.setattr(torch_impl, name, _refuse)


def _refuse(*_: Any) -> None:
    raise AssertionError("the blocks of attention/torch_impl.py were asked")


def problem_of(seqlen: int = 33, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    tensors = [torch.randn(2, 3, seqlen, 16).to(dtype) for _ in range(4)]
    return ops.problem_of(*tensors, **options)[0]


# one form of each body, at odd sizes, in three sizes of scores
@pytest.mark.vectorized
@pytest.mark.usefixtures("always_compiled")
@pytest.mark.parametrize(
    "spec",
    [
        MASKED,
        pytest.param(replace(MASKED, seqlen_q=1, seqlen_k=63), marks=pytest.mark.slow),
        replace(MASKED, score_size=200.0, seqlen_q=64, seqlen_k=127),
        pytest.param(replace(MASKED, strides="padded", layout="bnhd"), marks=pytest.mark.slow),
        replace(MASKED, dtype=torch.bfloat16),
        pytest.param(replace(MASKED, dtype=torch.float16), marks=pytest.mark.slow),
    ],
    ids=["odd", "one_query", "extreme", "strided", "bfloat16", "float16"],
)
def test_against_float64(spec: Spec) -> None:
    call = build(spec)
    check_call(call, "torch")


def test_gradients_of_biased_scores_with_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which Inductor cannot compile where they are written over the products."""
    monkeypatch.setattr(compiled, "_warn_once", _refuse)
    options = {"mask_value": -1e4, "window_right": 0, "student_softcap": 2.0, "temperature": 2.0}
    problem = problem_of(35, student_bias=torch.randn(1, 3, 1, 35), **options)
    weight = torch.randn(2, 3, 35)
    _, stats = query_tiles.forward(problem)
    expected = torch_impl.forward_with_gradients(problem, weight, STUDENT)[2]
    for got, x in zip(
        query_tiles.backward(problem, stats, weight, STUDENT), expected, strict=True
    ):
        torch.testing.assert_close(got, x, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("always_compiled")
def test_rows_with_infinities_have_the_same_bits_on_every_run() -> None:
    """A row without keys is 0, one that the student excludes is infinite, and nothing is NaN."""
    mask = torch.ones(2, 1, 33, 33, dtype=torch.bool)
    mask[0, 0, 5] = False
    bias = torch.zeros(1, 1, 33, 33)
    bias[..., 7, 3] = -math.inf
    problem = problem_of(mask=mask, student_bias=bias)
    value, stats, grads = query_tiles.forward_with_gradients(problem, None, STUDENT)
    assert (value[0, :, 5] == 0).all() and (stats.student_lse[0, :, 5] == -math.inf).all()
    assert (value[1, :, 7] == math.inf).all()
    assert not any(x.isnan().any() for x in (value, *grads) if x is not None)
    again = query_tiles.forward_with_gradients(problem, None, STUDENT)
    for x, y in zip((value, *grads[:2]), (again[0], *again[2][:2]), strict=True):
        assert x is not None and y is not None and torch.equal(x, y)


@pytest.mark.usefixtures("always_compiled")
def test_one_compilation_for_all_lengths_and_numbers() -> None:
    compiled._runs.clear()
    for seqlen in (1, 2, 7, 16, 33, 64):
        scale = 1.0 / seqlen
        query_tiles.forward(problem_of(seqlen, student_scale=scale, temperature=1.0 + seqlen))
    assert len(compiled._runs) == 1


@pytest.mark.usefixtures("always_compiled")
def test_threads_share_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled._runs.clear()
    calls = []
    original = compiled.compile_body
    monkeypatch.setattr(compiled, "compile_body", lambda key: calls.append(key) or original(key))
    problems = [problem_of(20 + i) for i in range(4)]
    found: dict[int, Tensor] = {}

    def run(index: int) -> None:
        found[index] = query_tiles.forward(problems[index])[0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls and len(set(calls)) == len(calls)
    for index, problem in enumerate(problems):
        torch.testing.assert_close(found[index], query_tiles.forward(problem)[0])


def test_other_threads_while_a_row_kernel_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot compile, or torch.fx's state of both would be mixed up; they call what is
    compiled.
    """
    x = torch.ones(3)
    known = torch.compile(torch.sin, backend="eager")
    known(x)
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(compile_fx, "compile_fx_inner", lambda graph, _: graph)
    monkeypatch.setattr(compiled, "_runs", {})
    compile_lock = importlib.import_module("torch._dynamo.convert_frame").compile_lock
    has_session = hasattr(torch.compiler, "_compile_session_context")
    seen: list[Any] = []

    def elsewhere() -> None:
        seen.append(compile_lock.acquire(blocking=False))
        seen.append(torch.equal(known(x), x.sin()) if has_session else True)

    def body(form: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return (inputs["a"] + 1,)

    found = compiled.find(body, None, {"a": (torch.zeros(5, 7), "rk")})
    assert found is not None
    assert seen == [False, True]


def test_without_a_compiler_it_says_so_once_and_runs_the_blocks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled._runs.clear()
    compiled._warn_once.cache_clear()
    problem = problem_of(temperature=3.0)
    vocab, weights = linear_problem(True, False, 0.0, 1.0, "forward_kl"), RowWeights(None, None)
    logits = [torch.randn(13, 128, dtype=torch.float64)[:, :70] for _ in range(2)]
    with (
        caplog.at_level(logging.WARNING, "torch_streamkl"),
        torch._inductor.config.patch(
            {"force_disable_caches": True, "cpp.cxx": (None, "/no/such/compiler")}
        ),
    ):
        for _ in range(2):
            value, _, grads = query_tiles.forward_with_gradients(problem, None, STUDENT)
            rows = RowValues.allocate(vocab)
            copies = [x.clone() for x in logits]
            token_tiles.values(vocab, *copies, rows, weights, LinearNeedsGrad(True))
    compiled._runs.clear()
    messages = [r.message for r in caplog.records if "Inductor cannot compile" in r.message]
    assert len(messages) == 1 and "eager mode instead" in messages[0], messages
    expected = torch_impl.forward_with_gradients(problem, None, STUDENT)
    assert torch.equal(value, expected[0])
    assert grads[0] is not None and expected[2][0] is not None
    assert torch.equal(grads[0], expected[2][0])
    out = RowValues.allocate(vocab)
    linear_rows.values(vocab, *logits, out)
    assert torch.equal(rows.value, out.value)


@pytest.mark.vectorized
@pytest.mark.parametrize("dtype", every(2, [torch.bfloat16, torch.float32]), ids=str)
def test_rows_of_words(dtype: torch.dtype) -> None:
    wide = [torch.randn(13, 128, dtype=torch.float64)[:, :70] for _ in range(2)]
    wide = [x.to(dtype).double() for x in wide]  # what both start from
    weight = torch.randn(13, dtype=torch.float64)
    results = []
    for rows, narrow in ((linear_rows, False), (linear_rows, True), (token_tiles, True)):
        problem_of_rows = linear_problem(
            True, True, 2.0, 2.5, "forward_kl", dtype if narrow else torch.float64
        )
        weights = RowWeights(*(weight.to(problem_of_rows.compute_dtype),) * 2)
        logits = [torch.empty(13, 128, dtype=dtype if narrow else x.dtype)[:, :70] for x in wide]
        for x, y in zip(logits, wide, strict=True):
            x.copy_(y)
        out = RowValues.allocate(problem_of_rows)
        rows.values(
            problem_of_rows, *logits, out, weights, LinearNeedsGrad(True, True, True, True)
        )
        results.append([x.double() for x in (out.value, out.hard, out.statistics, *logits)])
    for truth, eager, got in zip(*results, strict=True):
        error = float((eager - truth).abs().max())
        rounding = float(truth.abs().max()) * torch.finfo(torch.float32).eps
        assert float((got - truth).abs().max()) <= 2 * error + 8 * rounding


def test_a_compiled_body_is_found_in_the_cache_of_graphs(tmp_path: Path) -> None:
    """A second process finds the code: it lowers nothing again."""
    layouts = ((torch.float32, (compiled.ROWS, compiled.KEYS), False),)
    key = compiled.Key(_twice, None, ("x",), layouts, torch.get_num_threads())
    x = torch.randn(5, 7)
    hits = []
    with torch._inductor.utils.fresh_cache(dir=str(tmp_path)):
        for _ in range(2):
            counters.clear()
            run = compiled.compile_body(key)
            torch.testing.assert_close(run([x])[0], 2 * x)
            hits.append(counters["inductor"]["fxgraph_cache_hit"])
    assert hits == [0, 1]


def test_a_stored_body_is_not_traced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key has our sources, what was asked, Inductor's settings and the CPU."""
    monkeypatch.setattr(_twice, "__module__", "torch_streamkl.of_a_test")
    layouts = ((torch.float32, (compiled.ROWS, compiled.KEYS), False),)
    key = compiled.Key(_twice, None, ("x",), layouts, torch.get_num_threads())
    traces = []
    original = compiled._compile
    monkeypatch.setattr(compiled, "_compile", lambda key: traces.append(key) or original(key))

    def run(seqlen: int) -> int:
        x = torch.randn(5, seqlen)
        torch.testing.assert_close(compiled.compile_body(key)([x])[0], 2 * x)
        return len(traces)

    with torch._inductor.utils.fresh_cache(dir=str(tmp_path)):
        assert [run(7), run(7), run(40)] == [1, 1, 1]
        (file,) = tmp_path.glob(f"*/{stored.FOLDER}/*.py")
        file.write_text("def call(")
        assert [run(7), run(7)] == [2, 2]  # written again
        monkeypatch.setattr(stored, "source_digest", lambda: "other sources")
        assert [run(7), run(7)] == [3, 3]


def test_what_the_key_of_a_stored_body_has(monkeypatch: pytest.MonkeyPatch) -> None:
    form, config = query_tiles._form(problem_of(), STUDENT), torch._inductor.config
    of = stored.path_of
    names = [of(query_tiles.rows_forward, form), of(query_tiles.rows_backward, form)]
    names.append(of(query_tiles.rows_forward, replace(form, has_temperature=True)))
    for changes in ({"cpp.threads": 3}, {"cpp.enable_unsafe_math_opt_flag": True}):
        with config.patch(changes):
            names.append(of(query_tiles.rows_forward, form))
    other_cpu = next(
        x for x in cpu_vec_isa.supported_vec_isa_list if x != cpu_vec_isa.pick_vec_isa()
    )
    for owner, name, value in (
        (torch, "get_default_dtype", torch.float64),
        (cpu_vec_isa, "pick_vec_isa", other_cpu),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, lambda value=value: value)
            names.append(of(query_tiles.rows_forward, form))
    assert None not in names and len(set(names)) == len(names)
    assert of(query_tiles.rows_forward, form) == names[0]
    assert of(_twice, form) is None  # not of our sources
    for off in ({"force_disable_caches": True}, {"fx_graph_cache": False},
                {"joint_custom_pre_pass": _PassWithoutKey()}):  # fmt: skip
        with config.patch(off):
            assert of(query_tiles.rows_forward, form) is None


class _PassWithoutKey(CustomGraphPass):
    def __call__(self, graph: Any) -> None: ...

    def uuid(self) -> None:
        return None


def _twice(_: None, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return (inputs["x"] * 2,)
