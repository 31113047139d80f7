"""The benchmark's promises: no speed-up when wrong, out of memory is a result, records survive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from tqdm import tqdm

from bench import (
    accuracy,
    attention_cells,
    attention_matrix,
    cases,
    compare,
    measure,
    models,
    other_records,
    plots,
    results,
    several_gpus,
    short_steps,
    steps,
    table,
)
from bench.__main__ import main, parser
from bench.cases import AttentionCase, Case, Heads, LinearCase
from bench.measure import Unavailable
from bench.providers import PROVIDERS, Provider, choose
from bench.records import Record, Run
from bench.runner import Settings, run_case

CPU = torch.device("cpu")
SETTINGS = Settings(CPU, torch.float32, seconds=0.01)
ATTENTION = AttentionCase("tiny", "none", 1, 48, Heads(4, 2, 16), Heads(4, 4, 8))
HEAD = LinearCase("tiny-head", "none", 24, 300, 16, 8)
EAGER = next(p for p in PROVIDERS if p.name == "eager")
DIRECT = next(p for p in PROVIDERS if p.name == "direct")


def provider(name: str, build: Callable[[Case], Callable[..., Tensor]]) -> Provider:
    return Provider(name, build, "#000000")


def half(case: Case) -> Callable[..., Tensor]:
    naive = case.naive()
    return lambda *inputs: naive(*inputs) * 0.5


def gradient_to_one_side(case: Case) -> Callable[..., Tensor]:
    naive = case.naive()

    def loss(first: Tensor, second: Tensor, *teacher: Tensor) -> Tensor:
        value = naive(first, second.detach(), *teacher)
        return value + 0.0 * second.sum()

    return loss


def not_a_number(case: Case) -> Callable[..., Tensor]:
    naive = case.naive()
    return lambda *inputs: naive(*inputs) * float("nan")


def greedy(case: Case) -> Callable[..., Tensor]:
    return lambda *inputs: inputs[0].sum() + torch.empty(2**60, dtype=torch.uint8).sum()


def greedy_backward(case: Case) -> Callable[..., Tensor]:
    naive = case.naive()

    def loss(*inputs: Tensor) -> Tensor:
        value = naive(*inputs)
        value.register_hook(lambda g: g + torch.empty(2**60, dtype=torch.uint8).sum())
        return value

    return loss


def missing(case: Case) -> Callable[..., Tensor]:
    raise Unavailable("not today")


def broken(case: Case) -> Callable[..., Tensor]:
    raise RuntimeError("broken on purpose")


def records_of(case: Case, *providers: Provider) -> dict[str, Record]:
    return {r.provider: r for r in run_case(case, list(providers), SETTINGS)}


@pytest.mark.parametrize(
    "case",
    [ATTENTION, HEAD, replace(ATTENTION, is_causal=False, softcap=5.0)],
    ids=lambda c: c.label,
)
def test_correct_providers_pass_the_gate(case: Case) -> None:
    checkpoint = next(p for p in PROVIDERS if p.name == "checkpoint")
    records = records_of(case, EAGER, checkpoint, DIRECT)
    for name, record in records.items():
        assert record.status in ("ok", "unavailable"), (name, record.detail)
    assert records["eager"].status == records["checkpoint"].status == "ok"
    assert records["eager"].timing["step"].median_ms > 0


def test_forwards_alone_have_their_own_table() -> None:
    settings = replace(SETTINGS, alone=True)
    records = run_case(ATTENTION, [EAGER, provider("half", half)], settings)
    assert set(records[0].timing) == {*measure.MODES, measure.ALONE}
    assert all(t.median_ms > 0 for t in records[0].timing.values())
    row, *others = table.alone_rows(records, matmul_tflops=1.0)
    assert not others, "a result that is wrong is compared with nothing"
    assert row[0] == "eager" and row[-2:] == ("1.00x", "")
    both = [replace(records[0], version=version) for version in compare.VERSIONS]
    assert [r[0] for r in table.alone_rows(both, 1.0)] == ["eager (base)", "eager (head)"]
    options = parser().parse_args(["--alone", "--base", "HEAD"])
    assert "--alone" in compare.child_arguments(options, ["eager"])
    assert "forward alone ms" in table.text(records, 1.0)
    assert "forward alone ms" not in table.text(run_case(ATTENTION, [EAGER], SETTINGS), 1.0)


def test_gate_rejects_wrong_providers_and_prints_no_ratio() -> None:
    wrong = [provider(f.__name__, f) for f in (half, gradient_to_one_side, not_a_number)]
    records = list(run_case(ATTENTION, [EAGER, *wrong], SETTINGS))
    assert [r.status for r in records] == ["ok", "red", "red", "red"]
    rows = table.rows(records, matmul_tflops=1.0)
    assert rows[0][-2:] == ("1.00x", "")
    assert all(row[-2:] == ("red", "red") for row in rows[1:])


def test_the_largest_error_is_not_a_number_where_one_is() -> None:
    one, nan = torch.ones(2), torch.full((2,), float("nan"))
    for given in ([one, nan], [nan, one]):
        error = accuracy.worst_error(given, [one, one])
        assert not accuracy.Verdict(0.0, error, 1.0, 1.0).is_green


def test_gate_of_large_cases_checks_gradients_of_one_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cases, "GATE_ELEMENTS", 100)
    monkeypatch.setattr(cases, "PIECE_ELEMENTS", 48 * 20)  # and several pieces
    records = records_of(ATTENTION, EAGER, provider("half", half))
    assert records["eager"].status == "ok"
    assert records["eager"].verdict is not None
    assert records["eager"].verdict.loss_error is None
    assert records["half"].status == "red"


@pytest.mark.parametrize("build", [greedy, greedy_backward])
def test_out_of_memory_is_a_result(build: Callable[[Case], Callable[..., Tensor]]) -> None:
    records = records_of(ATTENTION, provider("greedy", build), EAGER)
    assert records["greedy"].status == "oom"
    assert "memory" in records["greedy"].detail
    assert records["eager"].status == "ok"


def test_unavailable_and_broken_providers_do_not_stop_the_others() -> None:
    records = records_of(HEAD, provider("missing", missing), provider("broken", broken), EAGER)
    assert [r.status for r in records.values()] == ["unavailable", "error", "ok"]
    assert records["broken"].detail == "RuntimeError: broken on purpose"
    assert table.text(list(records.values()), 1.0).count("broken on purpose") == 2


def test_warm_up_is_in_the_burst_and_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    clock = [0.0]

    def loss(*inputs: Tensor) -> Tensor:
        clock[0] += 0.001 if events else 1.0  # seconds: the first step is slow
        events.append("step")
        return inputs[0].sum() + inputs[1].sum()

    monkeypatch.setattr(measure, "_now", lambda device: clock[0])
    monkeypatch.setattr(measure, "synchronize", lambda device: events.append("wait"))
    inputs = ATTENTION.make_inputs(CPU, torch.float32, 0)
    taken = measure.sample(loss, inputs, repeats=3, warm_up=1)
    assert events == ["step"] * 4 + ["wait"]
    assert taken.forward_ms == pytest.approx(1.0)


def test_rounds_repeat_short_steps_behind_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bursts: list[tuple[int, int]] = []

    def sample(loss_fn: object, _: object, repeats: int, warm_up: int, __: bool) -> object:
        bursts.append((repeats, warm_up))
        return measure.Sample(2.0 if loss_fn is torch.add else 50.0, 3.0)

    monkeypatch.setattr(measure, "sample", sample)
    inputs = [ATTENTION.make_inputs(CPU, torch.float32, 0)]
    entries = {"short": torch.add, "long": torch.mul}
    measure.interleaved({n: measure.Timed(fn, inputs) for n, fn in entries.items()}, 0.0)
    rounds = [sorted(bursts[i : i + 2]) for i in (4, 6, 8)]
    assert bursts[:4] == [(1, 0)] * 4 and rounds == [[(1, 0), (10, 2)]] * 3


def test_what_a_first_call_compiles_is_in_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it make samples of one step, as if all steps were that long."""
    repeats: list[int] = []

    def sample(*arguments: Any) -> measure.Sample:
        repeats.append(arguments[2])
        return measure.Sample(1.0 if len(repeats) > 1 else 100 * measure.SHORT_MS, 1.0)

    monkeypatch.setattr(measure, "sample", sample)
    timed = measure.Timed(torch.add, [ATTENTION.make_inputs(CPU, torch.float32, 0)])
    samples = measure.interleaved({"compiles": timed}, 0.0)["compiles"]
    assert repeats[:2] == [1, 1] and min(repeats[2:]) > 1
    assert isinstance(samples, list) and max(s.step_ms for s in samples) < measure.SHORT_MS


def test_attention_takes_its_turn_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rates are those of samples between the providers', with its backend chosen."""
    turns: list[str] = []

    def sample(loss_fn: Callable[..., Tensor], inputs: cases.Inputs, *_: object) -> measure.Sample:
        is_attention = inputs[2].requires_grad  # nobody else's third input has a gradient
        backends = torch.nn.attention._cur_sdpa_kernel_backends()
        assert (backends == [SDPBackend.FLASH_ATTENTION]) == is_attention
        turns.append("attention" if is_attention else loss_fn.__name__)
        loss_fn(*inputs)
        return measure.Sample(20.0, 40.0)

    def build(case: Case, name: str) -> Callable[..., Tensor]:
        naive = case.naive()

        def loss(*inputs: Tensor) -> Tensor:
            return naive(*inputs)

        loss.__name__ = name
        return loss

    monkeypatch.setattr(measure, "sample", sample)
    providers = [provider(n, partial(build, name=n)) for n in ("first", "second")]
    records = records_of(ATTENTION, *providers)
    rounds = [turns[-9:][i : i + 3] for i in (0, 3, 6)]
    assert all(sorted(r) == ["attention", "first", "second"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1  # nobody always follows the same provider
    assert list(records) == ["first", "second"]
    gflop = 2.0 * 4 * 48**2 * 8 / 2 * 1e-9
    for record in records.values():
        assert record.attention_tflops["forward"] == pytest.approx(2 * gflop / 20.0)
        assert record.attention_tflops["backward"] == pytest.approx(5 * gflop / 40.0)
        assert record.attention_tflops["step"] > 0


@pytest.mark.parametrize("error", [RuntimeError("no such kernel"), torch.OutOfMemoryError("full")])
def test_a_case_may_have_no_attention(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(*_: Tensor, **__: bool) -> Tensor:
        raise error

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    record = records_of(ATTENTION, EAGER)["eager"]
    assert record.status == "ok" and record.samples > 0
    assert record.attention_tflops == {}


def test_peak_sees_a_known_allocation() -> None:
    def call() -> Tensor:
        first = torch.ones(3 * 2**18)  # 3 MiB
        both = torch.cat((first, first))  # and 6
        del first
        return both + 1  # 12 MiB

    assert 11.99 < measure.peak_mib(call, CPU) < 12.01


def test_naive_peak_holds_the_scores_and_ours_does_not() -> None:
    case = replace(ATTENTION, seqlen=512)
    records = records_of(case, EAGER, DIRECT)
    scores_mib = 4 * 512 * 512 * 4 / 2**20
    assert records["eager"].peak_mib > 2 * scores_mib
    assert records["direct"].peak_mib < records["eager"].peak_mib


def test_json_round_trip_and_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.__main__.suite", lambda device, quick: [ATTENTION, HEAD])
    monkeypatch.setattr("bench.__main__.limit_memory", lambda device, gib: None)
    monkeypatch.setattr("bench.ceilings.matmul_tflops", lambda device, dtype: 1.0)
    monkeypatch.setattr("bench.ceilings.copy_gbytes", lambda device: 1.0)
    path = tmp_path / "run.json"
    arguments = [
        "--device",
        "cpu",
        "--cases",
        "tiny B",
        "--providers",
        "eager",
        "--provider",
        "tests.bench.test_bench:half",
    ]
    assert main([*arguments, "--seconds", "0.01", "--json", str(path)]) == 0
    run = Run.load(path)
    assert [(r.provider, r.status) for r in run.records] == [
        ("eager", "ok"),
        ("tests.bench.test_bench:half", "red"),
    ]
    assert run.is_complete
    assert run.machine["torch"] == torch.__version__
    run.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_interrupted_run_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(case: Case) -> Callable[..., Tensor]:
        if case.family == "linear":
            raise KeyboardInterrupt
        return case.naive()

    monkeypatch.setattr("bench.__main__.suite", lambda device, quick: [ATTENTION, HEAD])
    monkeypatch.setattr("bench.__main__.limit_memory", lambda device, gib: None)
    monkeypatch.setattr("bench.__main__.choose", lambda *_: [provider("stop", stop)])
    monkeypatch.setattr("bench.ceilings.matmul_tflops", lambda device, dtype: 1.0)
    monkeypatch.setattr("bench.ceilings.copy_gbytes", lambda device: 1.0)
    path = tmp_path / "run.json"
    assert main(["--device", "cpu", "--seconds", "0.01", "--json", str(path)]) == 130
    run = Run.load(path)
    assert [r.case for r in run.records] == [ATTENTION.label]
    assert not run.is_complete


def test_wrong_names_are_errors_that_list_the_right_ones() -> None:
    with pytest.raises(ValueError, match=r"providers are eager, .*, got egaer"):
        choose(["egaer"], [])
    with pytest.raises(ValueError, match="module:function, got 'nonsense'"):
        choose([], ["nonsense"])
    with pytest.raises(ValueError, match="no case matches nothing"):
        cases.select([ATTENTION], ["nothing"])


@pytest.mark.parametrize("case", [ATTENTION, HEAD], ids=lambda c: c.label)
def test_pieces_cover_every_row_once(case: Case) -> None:
    inputs = case.make_inputs(CPU, torch.float64, 0)
    naive = case.naive()
    total = sum(naive(*piece) * share for piece, share in case.pieces(inputs, 7))
    torch.testing.assert_close(total, naive(*inputs))


def test_every_suite_names_its_sources() -> None:
    for device in ("cpu", "cuda"):
        labels = [c.label for c in cases.suite(device)]
        assert len(set(labels)) == len(labels)
        assert all(c.source for c in cases.suite(device))


def made_up_run() -> Run:
    """Two providers on three sizes of both families; one runs out of memory."""
    run = Run(
        "python -m bench",
        {"device": "none"},
        "float32",
        {"matmul_tflops": 2.0, "copy_gbytes": 9.0},
    )
    for family, name in (("attention", "tiny"), ("linear", "tiny-head")):
        for size in (256, 512, 1024):
            for speed, provider_name in ((1.0, "eager"), (3.0, "direct")):
                record = Record(
                    family, f"{name} {size}", (name, size), "shape", "source", provider_name
                )
                if provider_name == "eager" and size == 1024:
                    record.status = "oom"
                else:
                    timing = measure.Timing(size / speed, size / speed, size / speed)
                    record.timing = dict.fromkeys(("forward", "backward", "step"), timing)
                    record.tflops = dict.fromkeys(record.timing, speed)
                    record.least_gflop = dict.fromkeys(record.timing, size * 1.0)
                    record.least_mib = dict.fromkeys(record.timing, 10.0)
                    record.peak_mib = size / speed
                run.records.append(record)
    common = {"pair": "tiny", "objective": "attention", "provider": "eager"}
    row = {"step_ms": 1.0, "tokens_per_s": 64e3, "peak_mib": 3.0, "loss": 0.5}
    run.end_to_end = [
        {**common, "context": 64, "status": "ok", **row},
        {**common, "context": 128, "status": "ok", **row},
        {**common, "context": 256, "status": "oom", "detail": "too much"},
    ]
    graphs = {**common, "provider": "streamkl-graphs"}
    recorded = {**row, "graph_replays": 2, "graph_pool_mib": 2.0}
    run.end_to_end += [
        {**graphs, "context": 64, "status": "ok", **recorded},
        {**graphs, "context": 128, "status": "ok", **recorded},
        {**graphs, "context": 256, "status": "unavailable", "detail": "no graphs here"},
    ]
    return run


def test_every_picture_is_drawn(tmp_path: Path) -> None:
    paths = plots.draw_all(made_up_run(), tmp_path, "some")
    assert [p.name for p in paths] == [
        "some-attention.png",
        "some-linear.png",
        "some-roofline.png",
        "some-end-to-end-attention.png",
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


def test_a_provider_that_is_not_weighed_is_not_drawn_as_out_of_memory() -> None:
    run = made_up_run()
    for record in run.records:
        record.peak_mib = None
    curves = plots._curves([r for r in run.records if r.family == "attention"])
    assert [len(memory) for _, memory in curves.values()] == [1, 0]  # one did not fit
    assert [len(time) for time, _ in curves.values()] == [3, 3]


def test_document_has_every_record_and_no_ratio_without_both_sides() -> None:
    text = results.render({"some": made_up_run()}, {"some": ["some-attention.png"]})
    assert text.count("| direct |") == 1 + 6  # in the list of providers, then in each case
    assert text.count("out of memory") == 2 + 1
    assert text.count("3.00x") == 4
    assert "(results/some-attention.png)" in text
    assert "| streamkl-graphs | 256 | unavailable: no graphs here |" in text
    assert results.GRAPH_PEAKS in text


def test_committed_document_is_what_the_committed_records_give() -> None:
    runs = results.load(results.FOLDER)
    names = results.picture_names(results.FOLDER, list(runs))
    matrix = results.load_matrix(results.FOLDER)
    others = other_records.load(results.FOLDER)
    assert results.TARGET.read_text() == results.render(runs, names, matrix, others)


TINY_CELL = attention_matrix.Cell(16, 16, "none", "fp32", 2, 4, 4, 64, 64)
TINY_CELLS = [
    *(replace(TINY_CELL, mask=mask, batch=1) for mask in attention_matrix.MASKS),
    *(replace(TINY_CELL, mask=name, batch=1) for name in attention_cells.DIVERGENCES),
    *(replace(TINY_CELL, dtype=dtype, mask="causal") for dtype in ("bf16", "fp16")),
    replace(TINY_CELL, teacher_dim=24, kv_heads=2, mask="causal"),
    replace(TINY_CELL, seqlen_q=1, seqlen_k=128),
]


def test_attention_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mask and dtype passes its gate; the document shows what the file holds."""
    monkeypatch.setattr("bench.attention_cells.WINDOW", 20)
    monkeypatch.setattr("bench.ceilings.copy_gbytes", lambda _: 10.0)
    path = tmp_path / "new" / results.MATRIX
    arguments = ["--json", str(path), "--impl", "torch", "--rounds", "1"]
    assert attention_matrix.main(arguments, TINY_CELLS) == 0
    matrix = results.load_matrix(path.parent)
    assert matrix is not None
    assert matrix.is_complete
    assert [row.cell for row in matrix.rows] == TINY_CELLS
    assert all(row.status == "ok" for row in matrix.rows), matrix.rows
    text = results.render({}, {}, matrix)
    assert text.count("| torch |") == len(TINY_CELLS) - 1
    assert "| 1 | 128 | 4 (4) x 16 |" in text


def test_attention_matrix_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.ceilings.copy_gbytes", lambda _: 10.0)
    path = tmp_path / results.MATRIX
    cells = [TINY_CELL, replace(TINY_CELL, mask="causal", teacher_kv_heads=2)]
    arguments = ["--json", str(path), "--impl", "torch", "--rounds", "1", "--only", "causal"]
    arguments += ["--versus", "reference", "attention"]
    assert attention_matrix.main(arguments, cells) == 0
    (row,) = attention_matrix.Matrix.load(path).rows
    assert row.status == "ok", row.detail
    assert set(row.versus) == {"reference", "attention"}
    assert "2 x 4 (4 from 2) x 64 | torch" in capsys.readouterr().out


def test_attention_matrix_names_what_does_not_compile() -> None:
    wrong = replace(TINY_CELL, kv_heads=3)
    with tqdm(total=2) as progress:
        failed = attention_matrix.compile_first([TINY_CELL, wrong], 1, "torch", CPU, progress)
    assert list(failed) == [wrong]
    assert "must be a multiple" in failed[wrong]


def test_attention_matrix_says_why_a_row_is_slow() -> None:
    fast = attention_matrix.Row(TINY_CELL, forward_ms=1.0, backward_ms=2.0)
    slow = replace(fast, cell=replace(TINY_CELL, mask="alibi", reason="slopes"), forward_ms=1.7)
    unknown = replace(slow, cell=replace(TINY_CELL, dtype="bf16"))
    broken = replace(fast, status="red", detail="dQ is off")
    rows = [fast, slow, unknown, broken]
    matrix = attention_matrix.Matrix("", {"device": "none"}, 10.0, rows)
    last = [attention_matrix.row_cells(row, matrix) for row in rows]
    assert [cells[-1] for cells in last] == ["", "slopes", "**no reason known**", ""]
    assert last[3][5] == "red: dQ is off"
    assert last[1][7] == "59%"


@pytest.mark.parametrize("part", [0, 1])
def test_attention_matrix_rejects_wrong_results(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_of = attention_matrix.call_of

    def wrong(*args: object) -> Callable[..., Tensor]:
        call = call_of(*args)

        def value(*inputs: Tensor) -> Tensor:
            q, k, *teacher = inputs
            if part == 1:  # the values stay right
                k = k + 0.5 * (k.detach() - k)
            return call(q, k, *teacher) * (1.0 + 0.01 * (part == 0))

        return value

    monkeypatch.setattr(attention_matrix, "call_of", wrong)
    row = attention_matrix.run_cell(TINY_CELL, CPU, "torch", rounds=0, rows=3)
    assert row.status == "red"
    assert ("value of row" if part == 0 else "sum(k dK)") in row.detail


def test_attention_matrix_covers_what_it_promises() -> None:
    cells = attention_matrix.matrix()
    plain = {(c.student_dim, c.mask, c.seqlen_q) for c in cells if c.teacher_dim == c.student_dim}
    for dim in (32, 64, 96, 128, 192, 256):
        assert {(dim, m, n) for m in ("none", "causal") for n in (512, 2048, 8192, 32768)} <= plain
    masked = {(c.student_dim, c.mask, c.dtype) for c in cells if c.seqlen_q == 8192}
    for dim in (64, 128):
        dtypes = attention_matrix.DTYPES
        assert {(dim, m, t) for m in attention_matrix.MASKS for t in dtypes} <= masked
    assert {c.seqlen_q for c in cells if c.has_few_rows} == {1, 16, 64}
    assert any(c.seqlen_q == 131072 for c in cells)
    assert any(c.kv_heads < c.heads for c in cells if not c.has_few_rows)


def test_comparison_takes_the_faster_visit_of_each_version() -> None:
    first, second = made_up_run(), made_up_run()
    for record in second.records:
        record.timing = {
            m: measure.Timing(t.median_ms / 2, 0.0, 0.0) for m, t in record.timing.items()
        }
    base, head = compare.best("base", [first]), compare.best("head", [first, second])
    wanted = [r for r in base + head if r.case == "tiny 256"]
    assert "direct: step 85.3 -> 42.7 ms (2.00x)" in compare.text(wanted)


def test_base_must_be_a_commit() -> None:
    with (
        pytest.raises(ValueError, match="--base must name a commit, got 'nonsense'"),
        compare.library_at("nonsense"),
    ):
        pass


@pytest.mark.slow  # test_short_steps.py has one
def test_end_to_end_loss_is_the_same_in_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    quickly = partial(steps.with_streamkl, **{"streamkl.inner": "aot_eager"})
    monkeypatch.setitem(steps.PROVIDERS, "streamkl", quickly)
    pair = models.Pair("tiny", 32, 48, 4, 2, 64, (32,), teacher_layers=2, student_layers=1)
    monkeypatch.setitem(models.PAIRS, "cpu", pair)
    path = tmp_path / "run.json"
    arguments = ["--device", "cpu", "--steps", "llama-attention+logits", "--seconds", "0"]
    arguments += ["--batch", "1", "--repeats", "0", "--rounds", "2"]
    names = ["eager", "streamkl", "streamkl-graphs"]
    arguments += ["--providers", *names, "--json", str(path)]
    assert short_steps.main([*arguments, "--seqlens", "32", "48"]) == 0
    run = Run.load(path)
    assert run.is_complete
    eager, fused, graphs, *longer = run.end_to_end
    assert (eager["status"], fused["status"]) == ("ok", "ok"), fused
    assert graphs["status"] == "unavailable"
    assert "unavailable: CUDA graphs do not run on cpu" in table.end_to_end_line(graphs)
    assert fused["loss"] == pytest.approx(eager["loss"], rel=1e-5)
    assert eager["peak_mib"] > 0
    assert [r["provider"] for r in longer] == names[:2], "it goes as far as it fits"
    assert "of inductor's time" not in capsys.readouterr().out


@pytest.mark.parametrize("name", steps.GRAPH_PROVIDERS)
def test_graph_providers_are_compiled_with_what_torch_accepts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import compile_fx

    marks: list[int] = []
    patches: list[dict[str, Any]] = []

    def compiled(gm: torch.fx.GraphModule, _: object, *, config_patches: Any, **__: Any) -> Any:
        patches.append(config_patches)
        return gm.forward

    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    monkeypatch.setattr(compile_fx, "compile_fx", compiled)
    torch._dynamo.reset()
    call = steps.PROVIDERS[name](lambda x: x.square().sum())
    assert [call(torch.ones(3)).item() for _ in range(2)] == [3.0, 3.0]
    assert [p["triton.cudagraphs"] for p in patches] == [True]
    assert len(marks) == 2


def test_graph_providers_are_left_out_on_the_cpu_only() -> None:
    assert steps.default_providers(CPU) == ["inductor", "streamkl"]
    on_gpu = steps.default_providers(torch.device("cuda"))
    assert on_gpu == [p for p in steps.PROVIDERS if p not in steps.ON_REQUEST]


class GraphStep(models.TrainingStep):
    """A step without a model of transformers, whose call of `on_call` may replay graphs."""

    is_side_by_side = False

    def __init__(self, on_call: Callable[[], None]) -> None:
        self.on_call = on_call

    def names(self, batch_size: int) -> dict[str, str]:
        return {"pair": "tiny", "objective": "none"}

    def models(self, device: torch.device) -> tuple[torch.nn.Module, torch.nn.Module]:
        return torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def loss(self, student: torch.nn.Module, teacher: torch.nn.Module) -> Callable[..., Tensor]:
        def loss_of(x: Tensor) -> Tensor:
            self.on_call()
            return student(x).sum()

        return loss_of

    def batch(self, size: int, seqlen: int, device: torch.device) -> tuple[Tensor]:
        return (torch.ones(size, 2),)


def rows_of_graphs(
    on_call: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> dict[str, dict[str, Any]]:
    monkeypatch.setattr("bench.cuda_graphs.check", lambda device: None)
    monkeypatch.setitem(steps.PROVIDERS, "streamkl-graphs", lambda loss_of: loss_of)
    schedule = steps.Schedule(CPU, 2, 1)
    names = ["eager", "streamkl-graphs"]
    rows = steps.run_step(GraphStep(on_call), 1, 1, names, schedule)
    return {row["provider"]: row for row in rows}


def test_a_program_that_replays_no_graph_is_not_measured_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = rows_of_graphs(lambda: None, monkeypatch)["streamkl-graphs"]
    assert row["status"] == "error" and "step_ms" not in row
    assert "at least 2 CUDA graphs" in row["detail"] and "got 0" in row["detail"]


def test_a_row_of_graphs_has_their_replays_and_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Graph:
        def replay(self) -> None:
            pass

    calls: list[str] = []
    graph = Graph()

    def on_call() -> None:
        calls.append("step")
        for _ in range(3):
            graph.replay()

    def snapshot() -> list[dict[str, Any]]:
        calls.append("memory")
        segments = (((0, 0), 2**30), ((0, 1), 2**20), ((3, 0), 2**21))
        return [{"segment_pool_id": pool, "total_size": size} for pool, size in segments]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    rows = rows_of_graphs(on_call, monkeypatch)
    row = rows["streamkl-graphs"]
    assert row["status"] == "ok", row
    assert (row["graph_replays"], row["graph_pool_mib"]) == (3, 3.0)
    assert calls.count("memory") == 1
    assert calls.index("memory") >= 4  # after the steps that record
    assert 3.0 < row["peak_mib"] < 3.1
    assert rows["eager"]["peak_mib"] < 0.1


def test_an_operator_with_graphs_is_judged_by_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    graph = Graph()

    def build(case: Case, right_from: int) -> Callable[..., Tensor]:
        naive = case.naive()

        def loss(*inputs: Tensor) -> Tensor:
            calls.append("call")
            for _ in range(2):
                graph.replay()
            return naive(*inputs) * (1.0 if calls.count("call") >= right_from else 1.5)

        return loss

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for right_from, status in ((4, "ok"), (5, "red")):
        calls.clear()
        graphs = Provider("x-graphs", partial(build, right_from=right_from), "#000", graphs=True)
        record = records_of(ATTENTION, graphs)["x-graphs"]
        assert record.status == status, record.detail
        assert record.peak_mib is None
    without = replace(EAGER, name="y-graphs", graphs=True)
    record = records_of(ATTENTION, without)["y-graphs"]
    assert record.status == "error"
    assert "must replay at least 2 CUDA graphs" in record.detail


def test_a_row_of_several_gpus_is_the_worst_of_its_ranks() -> None:
    def row(*values: float) -> dict[str, Any]:
        names = ("step_ms", "peak_gib", "loss_difference", "gradient_difference")
        common = {"objective": "attention", "context": 64, "provider": "eager"}
        return {**common, **dict(zip(names, values, strict=True))}

    worst = several_gpus.worst_of([row(2.0, 1.0, 0.0, 0.1), row(1.0, 2.0, 0.2, 0.0)])
    figures = ("step ms", "peak GiB", "loss off", "gradients off")
    columns = {"KL of": "{objective}", "tokens a rank": "{context}", "provider": "{provider}"}
    columns |= {k: v for k, v in several_gpus.COLUMNS.items() if k.startswith(figures)}
    record = {"command": "x", "machine": {"device": "none"}, "columns": columns, "rows": [worst]}
    text = other_records.render({"h200-several-gpus": record})
    assert "| attention | 64 | eager | 2.0 | 2.00 | 2.0e-01 | 1.0e-01 |" in text
    given, expected = [torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 1.0])]
    assert accuracy.total_error(given, expected) == pytest.approx(0.5**0.5)


def test_rows_of_cases_that_ranks_share(tmp_path: Path) -> None:
    path = tmp_path / "sharded.json"
    arguments = ["--device", "cpu", "--cases", "vocabulary", "--json", str(path)]
    assert several_gpus.main([*arguments, "--limit-s", "120"]) == 0
    record = json.loads(path.read_text())
    assert [row["provider"] for row in record["rows"]] == [
        "one GPU", "streamkl", "five all-reduces", "DTensor",
    ]  # fmt: skip
    for row in record["rows"]:
        assert max(row["loss_difference"], row["gradient_difference"]) < 1e-5
    text = other_records.render({"h200-sharded": record})
    assert "| vocabulary | 64 tokens, 32 student width" in text


def test_the_help_describes_every_option_and_provider() -> None:
    shown = parser()
    assert not [action.option_strings for action in shown._actions if not action.help]
    lines = shown.format_help().splitlines()
    for provider in PROVIDERS:
        assert [
            x for x in lines if re.match(f"  {provider.name} {{2,}}{re.escape(provider.note)}", x)
        ]
