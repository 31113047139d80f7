"""The benchmark's promises: no speed-up when wrong, out of memory is a result, records survive."""

from __future__ import annotations

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

from bench import (
    at_size,
    attention,
    case,
    costs,
    heads,
    indexer,
    measure,
    plots,
    ranks,
    results,
    sharded,
    suites,
    table,
)
from bench.__main__ import main, parser
from bench.attention import AttentionCase, Heads
from bench.case import Case, Loss, Problem
from bench.heads import HeadCase
from bench.measure import Sample, Timing, Unavailable
from bench.providers import PROVIDERS, Provider, named, of_case
from bench.records import Record, Row
from bench.runner import Settings, run_case
from tests.support.covering import every

CPU = torch.device("cpu")
SETTINGS = Settings(CPU, seconds=0.01)
ATTENTION = AttentionCase("tiny", "none", Heads(4, 2, 16), Heads(4, 4, 8), 1, 48)
HEAD = HeadCase("tiny-head", "none", 24, 300, 16, 8)
EAGER, DIRECT = named("eager"), named("direct")


def provider(name: str, build: Callable[[Case], Loss], **more: Any) -> Provider:
    def of(case: Case, problem: Problem) -> Problem:
        return replace(problem, loss=build(case))

    return Provider(name, of, "#000000", **more)


def naive(case: Case) -> Loss:
    return case.problem(CPU).loss


def half(case: Case) -> Loss:
    return lambda *inputs: naive(case)(*inputs) * 0.5


def gradient_to_one_side(case: Case) -> Loss:
    def loss(first: Tensor, second: Tensor, *teacher: Tensor) -> Tensor:
        return naive(case)(first, second.detach(), *teacher) + 0.0 * second.sum()

    return loss


def not_a_number(case: Case) -> Loss:
    return lambda *inputs: naive(case)(*inputs) * float("nan")


def greedy(case: Case) -> Loss:
    return lambda *inputs: inputs[0].sum() + torch.empty(2**60, dtype=torch.uint8).sum()


def greedy_backward(case: Case) -> Loss:
    def loss(*inputs: Tensor) -> Tensor:
        value = naive(case)(*inputs)
        value.register_hook(lambda g: g + torch.empty(2**60, dtype=torch.uint8).sum())
        return value

    return loss


def missing(case: Case) -> Loss:
    raise Unavailable("not today")


def broken(case: Case) -> Loss:
    raise RuntimeError("broken on purpose")


def rows_of(case: Case, *providers: Provider, **more: Any) -> dict[str, Row]:
    return {r.provider: r for r in run_case(case, list(providers), replace(SETTINGS, **more))}


# ------------------------------------------------------------------------------------------- gate
@pytest.mark.parametrize(
    "case", [ATTENTION, replace(ATTENTION, mask="none", softcap=5.0)], ids=lambda c: c.label
)
def test_correct_providers_pass_the_gate(case: Case) -> None:
    rows = rows_of(case, EAGER, named("checkpoint"), DIRECT)
    assert {r.status for r in rows.values()} == {"ok"}, rows
    assert rows["eager"].ms() > 0
    assert rows["eager"].tflops() > 0


@pytest.mark.parametrize("loss", every(2, list(heads.LOSSES)))
def test_every_provider_of_a_head_computes_its_loss(loss: str) -> None:
    """Other libraries' too: their reductions and directions are those of the naive code."""
    head = replace(HEAD, loss=loss, shows_rows=True)
    names = ["eager", "direct", "trl", "nitrobrew", "liger_chunked", *head.own()]
    rows = rows_of(head, *of_case(head, names), seconds=0.0)
    assert {r.status for r in rows.values()} <= {"untimed", "unavailable"}, rows
    assert rows["eager"].status == "untimed"


SMALL_MATRIX = suites.matrix("cpu", quick=True)


@pytest.mark.parametrize("case", every(4, SMALL_MATRIX), ids=lambda c: c.label)
def test_every_mask_and_divergence_of_the_matrix_passes_the_gate(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "WINDOW", 20)
    monkeypatch.setattr(attention, "BLOCK", 16)
    case = replace(case, seqlen=64)
    row = rows_of(case, named("direct[impl=torch]"), seconds=0.0)["direct[impl=torch]"]
    assert row.status == "untimed", row
    assert row.more["implementation"] == "torch"


def test_programs_pass_the_gate() -> None:
    maps = AttentionCase("maps", "", Heads(2, 2, 8), Heads(2, 2, 8), 1, 32, "none", "weighted")
    masked = replace(maps, mask="causal", divergence="js")
    assert rows_of(masked, EAGER, seconds=0.0)["eager"].status == "untimed"
    for of in (replace(maps, has_programs=True), indexer.programs("cpu", True)[0]):
        row = rows_of(of, *of_case(of, ["program"]), seconds=0.0)["program"]
        assert row.status == "untimed", row


def test_chosen_keys_pass_the_gate() -> None:
    (of,) = indexer.chosen_keys("cpu", True)
    for name in ("eager", "chosen", "torch"):
        row = rows_of(of, *of_case(of, [name]), seconds=0.0)[name]
        assert row.status == "untimed", row


def test_gate_rejects_wrong_providers_and_prints_no_ratio() -> None:
    wrong = [provider(f.__name__, f) for f in (half, gradient_to_one_side, not_a_number)]
    rows = list(rows_of(ATTENTION, EAGER, *wrong).values())
    assert [r.status for r in rows] == ["ok", "red", "red", "red"]
    lines = [x.strip("| ").split(" | ") for x in table.text(rows).splitlines() if x[:1] == "|"]
    assert lines[2][-1] == "1.00x"
    assert all(cells[-2:] == ["red", "red"] for cells in lines[3:])


def test_the_largest_error_is_not_a_number_where_one_is() -> None:
    one, nan = torch.ones(2), torch.full((2,), float("nan"))
    truth = case.Truth(1.0, [one, one], 1.0, 1.0)
    for given in ([one, nan], [nan, one]):
        assert truth.judge(1.0, given)["status"] == "red"


def test_gate_of_large_cases_checks_gradients_of_one_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "GATE_ELEMENTS", 100)
    monkeypatch.setattr(attention, "PIECE_ELEMENTS", 48 * 20)  # and several pieces
    rows = rows_of(ATTENTION, EAGER, provider("half", half))
    assert rows["eager"].status == "ok"
    assert rows["eager"].loss_error is None
    assert rows["half"].status == "red"


@pytest.mark.parametrize("of", [ATTENTION, HEAD], ids=lambda c: c.label)
def test_pieces_cover_every_row_once(of: Any) -> None:
    problem = of.problem(CPU)
    inputs = problem.sets[0]
    total = sum(loss(*piece) * share for loss, piece, share in of.pieces(inputs, 7))
    torch.testing.assert_close(total, problem.loss(*inputs))


# ----------------------------------------------------------------------------------------- results
@pytest.mark.parametrize("build", [greedy, greedy_backward])
def test_out_of_memory_is_a_result(build: Callable[[Case], Loss]) -> None:
    rows = rows_of(ATTENTION, provider("greedy", build), EAGER)
    assert rows["greedy"].status == "oom"
    assert "memory" in rows["greedy"].detail
    assert rows["eager"].status == "ok"


def test_unavailable_and_broken_providers_do_not_stop_the_others() -> None:
    rows = rows_of(HEAD, provider("missing", missing), provider("broken", broken), EAGER)
    assert [r.status for r in rows.values()] == ["unavailable", "error", "ok"]
    assert rows["broken"].detail == "RuntimeError: broken on purpose"
    assert "broken on purpose" in table.text(list(rows.values()))


def test_rows_are_kept_as_they_come() -> None:
    kept: list[list[str]] = []
    settings = replace(SETTINGS, seconds=0.0)
    run_case(
        HEAD, [EAGER, provider("broken", broken)], settings,
        keep=lambda rows: kept.append([row.status for row in rows]),
    )  # fmt: skip
    assert kept == [["ok", "ok"], ["ok", "error"]]
    assert rows_of(HEAD, EAGER, seconds=0.0)["eager"].status == "untimed"


def test_forwards_alone_are_timed_where_asked() -> None:
    row = rows_of(ATTENTION, EAGER, alone=True)["eager"]
    assert set(row.timing) == {*measure.MODES, measure.ALONE}
    assert all(t.median > 0 for t in row.timing.values())
    assert "forward alone" in table.text([row])
    assert "forward alone" not in table.text([rows_of(ATTENTION, EAGER)["eager"]])


def test_attention_is_timed_with_its_backend_and_its_own_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[Any] = []
    scaled = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Tensor, **more: Any) -> Tensor:
        chosen.append(torch.nn.attention._cur_sdpa_kernel_backends())
        return scaled(*args, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    row = rows_of(ATTENTION, named("attention"), EAGER)["attention"]
    assert row.status == "ok"
    assert row.gradient_error is None
    assert chosen and all(x == [SDPBackend.FLASH_ATTENTION] for x in chosen)
    matmul = 2.0 * 4 * 48**2 * 16 / 2 * 1e-9
    assert row.gflop == {"forward": 2 * matmul, "backward": 5 * matmul}

    def fails(*_: Tensor, **__: bool) -> Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fails)
    assert rows_of(ATTENTION, named("attention"))["attention"].status == "unavailable"


# -------------------------------------------------------------------------------------------- time
def problem_of(loss: Loss) -> Problem:
    return replace(ATTENTION.problem(CPU), loss=loss)


def test_warm_up_is_in_the_burst_and_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    clock = [0.0]

    def loss(*inputs: Tensor) -> Tensor:
        clock[0] += 0.001 if events else 1.0  # seconds: the first step is slow
        events.append("step")
        return inputs[0].sum() + inputs[1].sum()

    monkeypatch.setattr(measure, "_now", lambda device: clock[0])
    monkeypatch.setattr(measure, "synchronize", lambda device: events.append("wait"))
    taken = measure.burst(problem_of(loss), 0, repeats=3, warm_up=1)
    assert events == ["step"] * 4 + ["wait"]
    assert taken.forward == pytest.approx(1.0)


def test_rounds_repeat_short_steps_behind_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a first call compiles is in no sample; rounds have an order of their own."""
    bursts: list[tuple[str, int, int]] = []

    def burst(problem: Problem, _: int, repeats: int, warm_up: int, __: bool) -> Sample:
        name = problem.more["name"]
        bursts.append((name, repeats, warm_up))
        is_first = sum(x[0] == name for x in bursts) == 1
        return Sample(1e4 if is_first else 2.0 if name == "short" else 50.0, 3.0)

    monkeypatch.setattr(measure, "burst", burst)
    problems = {n: problem_of(torch.add) for n in ("short", "long")}
    for name, problem in problems.items():
        problem.more = {"name": name}
    samples = measure.interleaved(problems, 0.0)
    assert bursts[:4] == [("short", 1, 0)] * 2 + [("long", 1, 0)] * 2
    rounds = [bursts[i : i + 2] for i in (4, 6, 8)]
    assert all(sorted(r) == [("long", 1, 0), ("short", 10, 2)] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    assert all(isinstance(x, list) and len(x) == 3 for x in samples.values())
    assert max(x.step for taken in samples.values() for x in taken) < 1e3  # type: ignore[union-attr]


@pytest.mark.parametrize("most", [1, 2])
def test_rounds_are_as_many_as_asked_for_at_most(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A step of 15 s runs once for one round, and four times for two."""
    bursts: list[int] = []

    def burst(problem: Problem, number: int, *_: Any) -> Sample:
        bursts.append(number)
        return Sample(5e3, 1e4)

    monkeypatch.setattr(measure, "burst", burst)
    samples = measure.interleaved({"long": problem_of(torch.add)}, 100.0, max_rounds=most)
    assert samples == {"long": [Sample(5e3, 1e4)] * most}
    assert len(bursts) == {1: 1, 2: 4}[most]


# ------------------------------------------------------------------------------------------ memory
def test_peak_sees_a_known_allocation() -> None:
    def call() -> Tensor:
        first = torch.ones(3 * 2**18)  # 3 MiB
        both = torch.cat((first, first))  # and 6
        del first
        return both + 1  # 12 MiB

    assert 11.99 < measure.peak_mib(call, CPU) < 12.01


def test_naive_peak_holds_the_scores_and_ours_does_not() -> None:
    rows = rows_of(replace(ATTENTION, seqlen=512), EAGER, DIRECT)
    scores_mib = 4 * 512 * 512 * 4 / 2**20
    assert rows["eager"].peak_mib > 2 * scores_mib
    assert rows["direct"].peak_mib < rows["eager"].peak_mib


class Graph:
    """Stands for a CUDA graph."""

    def replay(self) -> None:
        pass


def test_an_operator_with_graphs_is_judged_by_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    graph = Graph()

    def build(case: Case, right_from: int) -> Loss:
        def loss(*inputs: Tensor) -> Tensor:
            calls.append("call")
            for _ in range(2):
                graph.replay()
            return naive(case)(*inputs) * (1.0 if len(calls) >= right_from else 1.5)

        return loss

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    segments = [{"segment_pool_id": (0, 0), "total_size": 2**30}]
    segments += [{"segment_pool_id": (0, 1), "total_size": 3 * 2**20}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    for right_from, status in ((4, "ok"), (5, "red")):
        calls.clear()
        graphs = provider("x", partial(build, right_from=right_from), graphs=True)
        row = rows_of(ATTENTION, graphs)["x"]
        assert row.status == status, row
        assert (row.more["graph_replays"], row.more["graph_pool_mib"]) == (2, 3.0)
        assert row.peak_mib > 3.0
    row = rows_of(ATTENTION, replace(EAGER, name="y", graphs=True))["y"]
    assert row.status == "error"
    assert "must replay at least 2 CUDA graphs" in row.detail


@pytest.mark.parametrize("name", ["inductor-graphs", "streamkl-graphs"])
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
    problem = named(name).build(ATTENTION, problem_of(lambda x: x.square().sum()))
    assert [problem.loss(torch.ones(3)).item() for _ in range(2)] == [3.0, 3.0]
    assert [p["triton.cudagraphs"] for p in patches] == [True]
    assert len(marks) == 2
    assert rows_of(ATTENTION, named(name))[name].detail == "does not run on cpu"


# ------------------------------------------------------------------------------------ command line
@pytest.fixture
def two_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = suites.Suite("two", lambda *_: [ATTENTION, HEAD])
    monkeypatch.setitem(suites.SUITES, "usual", suite)
    monkeypatch.setattr("bench.__main__.limit_memory", lambda device, gib: None)


def test_json_round_trip_and_command_line(tmp_path: Path, two_cases: None) -> None:
    path = tmp_path / "run.json"
    outside = f"{__name__}:half"
    arguments = ["--device", "cpu", "--cases", "tiny B", "--providers", "eager", outside]
    assert main([*arguments, "--seconds", "0.01", "--json", str(path)]) == 0
    record = Record.load(path)
    assert [(r.provider, r.status) for r in record.rows] == [("eager", "ok"), (outside, "red")]
    assert record.is_complete
    assert record.machine["torch"] == torch.__version__
    assert record.command.endswith(f"eager {outside} --seconds 0.01")
    record.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_interrupted_run_keeps_what_it_has(
    tmp_path: Path, two_cases: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(case: Case) -> Loss:
        if case.family == "heads":
            raise KeyboardInterrupt
        return naive(case)

    monkeypatch.setattr("bench.__main__.of_case", lambda *_: [provider("stop", stop)])
    path = tmp_path / "run.json"
    assert main(["--device", "cpu", "--seconds", "0.01", "--json", str(path)]) == 130
    record = Record.load(path)
    assert [r.case for r in record.rows] == [ATTENTION.label]
    assert not record.is_complete


def test_what_did_not_fit_is_not_tried_with_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_cases: None
) -> None:
    larger = [replace(ATTENTION, seqlen=n) for n in (48, 64)]
    monkeypatch.setitem(suites.SUITES, "usual", suites.Suite("", lambda *_: larger))
    path, outside = tmp_path / "run.json", f"{__name__}:greedy"
    main(["--device", "cpu", "--providers", outside, "--seconds", "0.01", "--json", str(path)])
    first, second = Record.load(path).rows
    assert first.status == second.status == "oom"
    assert "smaller size" in second.detail


def test_wrong_names_are_errors_that_list_the_right_ones() -> None:
    with pytest.raises(ValueError, match=r"providers are eager, .*, got egaer"):
        of_case(HEAD, ["egaer"])
    with pytest.raises(ValueError, match="module:function, got 'nonsense:'"):
        of_case(HEAD, ["nonsense:"])
    with pytest.raises(ValueError, match="no case matches nothing"):
        suites.select([ATTENTION], ["nothing"])
    assert suites.select([HEAD, replace(HEAD, loss="js")], [HEAD.label]) == [HEAD]


@pytest.mark.parametrize("name", suites.SUITES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_suites_have_no_case_twice(name: str, device: str) -> None:
    for quick in (False, True):
        labels = [c.label for c in suites.SUITES[name].build(device, quick)]
        assert len(set(labels)) == len(labels)


def test_the_matrix_covers_what_it_promises() -> None:
    cells: Any = suites.matrix("cuda", quick=False)
    plain = {
        (c.student.head_dim, c.mask, c.seqlen)
        for c in cells
        if c.student == c.teacher and not c.queries
    }
    for dim in (32, 64, 96, 128, 192, 256):
        assert {(dim, m, n) for m in ("none", "causal") for n in (512, 2048, 8192, 32768)} <= plain
    masked = {(c.student.head_dim, c.mask, c.dtype) for c in cells if c.seqlen == 8192}
    masks = [m for m in attention.MASKS if m != "blocks"]
    for dim in (64, 128):
        assert {(dim, m, t) for m in masks for t in attention.DTYPES} <= masked
    assert {c.queries for c in cells if c.queries} == {1, 16, 64}
    assert {c.divergence for c in cells} == set(attention.DIVERGENCES)
    assert any(c.seqlen == 131072 for c in cells)


def test_the_help_describes_every_option_suite_and_provider() -> None:
    shown = parser()
    assert not [action.option_strings for action in shown._actions if not action.help]
    lines = shown.format_help().splitlines()
    notes = {p.name: p.note for p in PROVIDERS} | {k: s.note for k, s in suites.SUITES.items()}
    for name, note in notes.items():
        assert [x for x in lines if re.match(f"  {name} {{2,}}{re.escape(note)}", x)], name


# --------------------------------------------------------------------------------------- documents
def made_up() -> Record:
    """Two providers on three sizes; one runs out of memory."""
    record = Record("python -m bench", {"device": "none"})
    for size in (256, 512, 1024):
        for speed, name in ((1.0, "eager"), (3.0, "direct")):
            row = Row(f"tiny {size}", name, "heads", ("tiny", size))
            if name == "eager" and size == 1024:
                row.status = "oom"
            else:
                row.timing = {"step": Timing(size / speed, 1.0, 1.0)}
                row.peak_mib = size * 1.0
            record.rows.append(row)
    return record


def test_a_picture_is_drawn_of_what_is_right(tmp_path: Path) -> None:
    record = made_up()
    assert plots.curves(record, "tiny", "step")["eager"] == [(256, 256), (512, 512), (1024, None)]
    record.rows[0].status = "red"
    assert plots.curves(record, "tiny", "peak")["eager"] == [(512, 512), (1024, None)]
    record.machine["commit"] = "none"
    plots.draw_curves(record, "tiny", "vocabulary", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_document_has_every_record() -> None:
    text = results.render({"some": made_up(), "hopper_some": made_up()})
    assert text.count("| some |") == 1 + 3
    assert text.count("| hopper_some |") == 1  # of bench/notes
    assert text.count("out of memory") == 1
    assert "| some | tiny 256 | 256 256 |  |  | 85.3 256 |" in text


def test_the_committed_document_is_what_the_committed_records_give() -> None:
    text = results.TARGET.read_text()
    assert text == results.render(results.load())
    assert len(text.splitlines()) <= 300


# ------------------------------------------------------------------------------------ several GPUs
def test_a_row_of_several_gpus_is_the_worst_of_its_ranks() -> None:
    def row(ms: float, mib: float, loss: float, gradient: float) -> Row:
        timing = {"step": Timing(ms, ms, ms)}
        return Row("x", "y", timing=timing, peak_mib=mib, loss_error=loss, gradient_error=gradient)

    worst = ranks.worst_of([row(2.0, 1.0, 0.0, 0.1), row(1.0, 2.0, 0.2, 0.0)])
    assert (worst.ms(), worst.peak_mib, worst.loss_error, worst.gradient_error) == (2, 2, 0.2, 0.1)
    given, expected = [torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 1.0])]
    assert case.total_error(given, expected) == pytest.approx(0.5**0.5)


def test_scaling_beside_the_model_of_costs() -> None:
    """65.0 ms of one GPU, 56 MiB at 240 GB/s and one wait: 32.5 + 0.24 + 0.04 on two.

    Kernels that are slower by a tenth take 3.25 more.
    """
    rows = [
        Row("x", name, timing={"step": Timing(ms, ms, ms)})
        for name, ms in (("one GPU", 65.0), ("ours", 33.4), ("others", 60.8), ("chunks", 36.0))
    ]
    received = costs.all_reduce(56.0, 2)
    assert received == 56.0
    known = {"ours": costs.Cost(received + 1, received, waits=1), "others": costs.Cost(received)}
    known["chunks"] = costs.Cost(received, received, 1, slower=1.1)
    costs.add_scaling(rows, known, 2)
    one, ours, others, chunks = rows
    model = (32.5 + 3.25 + 56 * 2**20 / 240e6 + 0.04) / 65.0
    assert chunks.more["model_of_one_gpu"] == pytest.approx(model)
    assert one.more == {}
    assert ours.more == {
        "received_mib": 57.0,
        "of_one_gpu": 33.4 / 65.0,
        "model_of_one_gpu": pytest.approx((32.5 + 56 * 2**20 / 240e6 + 0.04) / 65.0),
    }
    assert others.more == {"received_mib": 56.0, "of_one_gpu": 60.8 / 65.0}


def test_cases_that_ranks_share_have_sizes_by_the_number_of_ranks() -> None:
    assert ranks.sizes_of("vocabulary", None, "cuda", 8) == (8192, 32768)
    assert ranks.sizes_of("sequence", None, "cuda", 4) == (131072, 524288)
    assert ranks.sizes_of("sequence", None, "cuda", 2) == (65536,)
    assert ranks.sizes_of("sequence", None, "cpu", 8) == (0,)
    assert ranks.sizes_of("sequence", [64], "cuda", 8) == (64,)
    assert [sharded.mesh_shape(n) for n in (1, 2, 4, 8)] == [(1, 1), (1, 2), (2, 2), (2, 4)]
    with pytest.raises(ValueError, match=r"must be one of vocabulary, .*, got nothing"):
        main(["shared", "--device", "cpu", "--cases", "nothing"])


def test_cases_that_ranks_share_are_listed_without_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "start", lambda *_: pytest.fail("a rank was started"))
    for given in (["shared", "--list", "--processes", "4"], ["shared", "--list"]):
        assert main(given) == 0
        listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
        assert list(dict.fromkeys(listed)) == list(ranks.CASES)
    chosen = ["--list", "--processes", "4", "--cases", "sequence", "--sizes", "64", "128"]
    assert main(["shared", *chosen]) == 0
    assert [x.split() for x in capsys.readouterr().out.splitlines()] == [
        ["sequence", "64"], ["sequence", "128"],
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("processes", [4, 8])
def test_every_case_of_more_ranks_runs(tmp_path: Path, processes: int) -> None:
    path = tmp_path / "shared.json"
    arguments = ["shared", "--device", "cpu", "--processes", str(processes), "--json", str(path)]
    assert main([*arguments, "--limit-s", "400", "--seconds", "0.01", "--rounds", "3"]) == 0
    record = Record.load(path)
    assert record.is_complete
    assert {row.case.split()[0] for row in record.rows} == {
        "vocabulary", "sequence", "mesh", "fsdp", "layers", "ddp",
    }  # fmt: skip
    for row in record.rows:
        assert row.status == "ok", (row.case, row.provider, row.detail)
        assert row.gradient_error <= row.gradient_budget < 1e-4
        assert row.ms() and row.peak_mib


@pytest.mark.slow
def test_a_run_at_size(tmp_path: Path) -> None:
    """Both ways see the same tokens and learn the same."""
    path = tmp_path / "at_size.json"
    given = ["--device", "cpu", "--steps", "3", "--seqlen", "16", "--json", str(path)]
    assert at_size.main([*given, "--ways", "eager", "linear_topk_kl"]) == 0
    eager, ours = Record.load(path).rows
    assert eager.samples == ours.samples == 3
    assert eager.more["first_loss"] != eager.more["last_loss"]
    assert ours.loss_error < 1e-4
    assert ours.more["tokens_per_s"] == pytest.approx(2 * 2 * 16 / ours.ms() * 1e3)


def test_rows_of_cases_that_ranks_share(tmp_path: Path) -> None:
    path = tmp_path / "sharded.json"
    arguments = ["shared", "--device", "cpu", "--cases", "vocabulary", "--json", str(path)]
    assert main([*arguments, "--limit-s", "120", "--seconds", "0.01"]) == 0
    rows = Record.load(path).rows
    names = ["one GPU", "streamkl", "five all-reduces", "DTensor"]
    assert [row.provider for row in rows] == names
    for row in rows:
        assert row.status == "ok"
        assert max(row.loss_error, row.gradient_error) < 1e-5
    assert [row.provider for row in rows if "model_of_one_gpu" in row.more] == ["streamkl"]
