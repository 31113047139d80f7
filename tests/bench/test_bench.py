"""The benchmark's promises: no speed-up when wrong, out of memory is a result, records survive."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

pytest.importorskip("transformers", reason="transformers is not installed")
from bench import __main__ as command
from bench import (
    attention,
    case,
    costs,
    first_step,
    heads,
    measure,
    plots,
    ranks,
    results,
    sharded,
    steps,
    suites,
    table,
)
from bench.attention import AttentionCase, Heads
from bench.case import Case, Loss, Problem
from bench.heads import HeadCase
from bench.measure import Timing, Unavailable
from bench.providers import PROVIDERS, Provider, named, of_case
from bench.records import Record, Row
from bench.runner import Settings, run_case
from bench.suites import SUITES
from tests.support.covering import every

CPU = torch.device("cpu")
ATTENTION = AttentionCase("tiny", "none", Heads(4, 2, 16), Heads(4, 4, 8), 1, 48)
MAPS = AttentionCase("maps", "", Heads(2, 2, 8), Heads(2, 2, 8), 1, 32, "none", "weighted")
HEAD = HeadCase("tiny-head", "none", 24, 300, 16, 8)
STEP = steps.ShortStep(
    "tiny", "of a test", 2, 8, hidden_size=24, num_layers=2, teacher_layers=4, teacher_width=24
)
PAIR = steps.LlamaStep("llama", "", 1, 32, steps.Llama("tiny", 32, 48, 1, 4, 2, 64))
EAGER, DIRECT = named("eager"), named("direct")
STREAMKL = "streamkl[streamkl.inner=eager]"  # strict: a KL that is not fused is an error
PEERS = ("trl", "nitrobrew", "liger_chunked")
BY_HAND = ("direct", "direct[reduction=none]", "program", "program[reduction=none]")


def rows_of(case: Case, *providers: Provider, seconds: float = 0.01) -> dict[str, Row]:
    settings = Settings(CPU, seconds, max_rounds=3)
    return {r.provider: r for r in run_case(case, list(providers), settings)}


# ------------------------------------------------------------------------------------------- gate
RIGHT: list[tuple[Case, tuple[str, ...]]] = [
    (replace(ATTENTION, mask="none", softcap=5.0), ("eager", "checkpoint", "direct")),
    *((replace(MAPS, mask=x), ("program",)) for x in ("none", "causal")),
    (replace(MAPS, mask="causal", divergence="js"), ("eager",)),
    *((x, ("program",)) for x in SUITES["programs"].quick if x.name == "indexer"),
    (SUITES["chosen"].quick[0], ("eager", "direct", "direct[impl=torch]")),
    *((replace(STEP, objective=x), ("eager", STREAMKL)) for x in ("relations", "maps")),
    *(
        (head, ("eager", *BY_HAND, "checkpoint", *PEERS))
        for head in (replace(HEAD, loss=loss) for loss in heads.LOSSES)
    ),
    *((replace(x, seqlen=64), ("direct[impl=torch]",)) for x in SUITES["matrix"].quick),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "names"), every(8, RIGHT), ids=lambda x: x.label if isinstance(x, Case) else ""
)
def test_right_providers_pass_the_gate(
    case: Case, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other libraries' too: their reductions and directions are those of the naive code."""
    monkeypatch.setattr(attention, "WINDOW", 20)
    rows = rows_of(case, *of_case(case, list(names)), seconds=0.0)
    assert {r.status for r in rows.values()} <= {"untimed", "unavailable"}, rows
    assert rows[names[0]].status == "untimed"


def provider(name: str, change: Callable[[Loss], Loss], **more: Any) -> Provider:
    """The naive code, changed."""
    return Provider(name, lambda case, problem: change(problem.loss), **more)


def times(factor: float) -> Callable[[Loss], Loss]:
    return lambda loss: lambda *inputs: loss(*inputs) * factor


def gradient_to_one_side(loss: Loss) -> Loss:
    return lambda x, y, *teacher: loss(x, y.detach(), *teacher) + 0.0 * y.sum()


WRONG = [provider("half", times(0.5)), provider("one side", gradient_to_one_side),
         provider("not a number", times(float("nan")))]  # fmt: skip


@pytest.mark.parametrize("of", [ATTENTION, STEP], ids=lambda c: c.label)
def test_wrong_providers_are_red_and_no_ratio_is_printed(of: Case) -> None:
    rows = list(rows_of(of, EAGER, *(WRONG if of is ATTENTION else WRONG[::2])).values())
    assert [r.status for r in rows] == ["ok"] + ["red"] * (len(rows) - 1)
    assert rows[0].samples == 3 and rows[0].ms() > 0  # type: ignore[operator]
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
    rows = rows_of(ATTENTION, EAGER, WRONG[0])
    assert [r.status for r in rows.values()] == ["ok", "red"]
    assert rows["eager"].loss_error is None


@pytest.mark.slow
def test_a_pair_of_decoders_is_compared_with_the_first_provider() -> None:
    eager, ours = rows_of(PAIR, EAGER, named(STREAMKL)).values()
    assert (eager.status, ours.status) == ("ok", "ok"), ours
    assert max(ours.loss_error, ours.gradient_error) < 1e-4  # type: ignore[type-var]


def test_padding_and_pieces() -> None:
    batch = steps.Batch.of(16, 32, CPU, 1)
    lengths = batch.mask.sum(1)
    assert (lengths.max() == 32) & (lengths.min() >= 16)
    assert lengths.unique().numel() > 4
    for of in (ATTENTION, HEAD):  # every row once
        problem = of.problem(CPU)
        pieces = of.pieces(problem.sets[0], 7)
        total = sum(loss(*piece) * share for loss, piece, share in pieces)
        torch.testing.assert_close(total, problem.loss(*problem.sets[0]))


# ----------------------------------------------------------------------------------------- results
def _too_much(*_: Tensor) -> Tensor:
    return torch.empty(2**60, dtype=torch.uint8).sum()


def greedy_backward(loss: Loss) -> Loss:
    def called(*inputs: Tensor) -> Tensor:
        value = loss(*inputs)
        value.register_hook(_too_much)
        return value

    return called


def fails(error: Exception) -> Callable[[Loss], Loss]:
    def change(loss: Loss) -> Loss:
        raise error

    return change


def test_whatever_happens_is_a_result_that_is_kept_as_it_comes() -> None:
    providers = [
        provider("greedy", lambda _: _too_much), provider("greedy backward", greedy_backward),
        provider("missing", fails(Unavailable("not today"))),
        provider("broken", fails(RuntimeError("broken on purpose"))), EAGER,
    ]  # fmt: skip
    kept: list[list[str]] = []

    def keep(rows: list[Row]) -> None:
        kept.append([row.status for row in rows])

    rows = run_case(HEAD, providers, Settings(CPU, 0.01), keep=keep)
    expected = ["oom", "oom", "unavailable", "error", "ok"]
    assert [r.status for r in rows] == expected == kept[-1]
    assert kept[1] == ["oom", "oom", "ok", "ok", "ok"]
    assert "memory" in rows[0].detail
    assert rows[3].detail == "RuntimeError: broken on purpose"
    assert "broken on purpose" in table.text(rows)


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
    assert (row.status, row.gradient_error) == ("ok", None)
    assert chosen and all(x == [SDPBackend.FLASH_ATTENTION] for x in chosen)
    matmul = 2.0 * 4 * 48**2 * 16 / 2 * 1e-9
    assert row.gflop == {"forward": 2 * matmul, "backward": 5 * matmul}
    assert row.tflops() == pytest.approx(7 * matmul / row.ms())  # type: ignore[operator]
    broken = fails(RuntimeError("no such kernel"))
    scaled_dot_product = "scaled_dot_product_attention"
    monkeypatch.setattr(torch.nn.functional, scaled_dot_product, lambda *_, **__: broken(scaled))
    assert rows_of(ATTENTION, named("attention"))["attention"].status == "unavailable"


# -------------------------------------------------------------------------------- time and memory
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
    assert taken["forward"] == pytest.approx(1.0)


@pytest.mark.parametrize("most", [1, 2, 50])
def test_rounds_repeat_short_steps_after_a_warm_up(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a first call compiles is in no sample; rounds have an order of their own."""
    bursts: list[tuple[str, int, int]] = []
    problems = {n: problem_of(torch.add) for n in ("short", "long")}

    def burst(problem: Problem, _: int, repeats: int, warm_up: int) -> measure.Sample:
        name = "short" if problem is problems["short"] else "long"
        bursts.append((name, repeats, warm_up))
        is_first = sum(x[0] == name for x in bursts) == 1
        return {"step": 1e4 if is_first else 5.0 if name == "short" else 53.0}

    monkeypatch.setattr(measure, "burst", burst)
    samples, failures = measure.interleaved(problems, 0.0, most)
    assert not failures
    assert {len(x) for x in samples.values()} == {min(most, 3)}
    first = 1 if most == 1 else 2  # one round: each problem's first step counts
    assert bursts[: 2 * first] == [("short", 1, 0)] * first + [("long", 1, 0)] * first
    rounds = [bursts[i : i + 2] for i in range(2 * first, len(bursts), 2)]
    assert all(sorted(r) == [("long", 1, 0), ("short", 10, 2)] for r in rounds)
    if most == 50:
        assert len({tuple(r) for r in rounds}) > 1
        assert max(x["step"] for taken in samples.values() for x in taken) < 1e3


def test_peak_sees_a_known_allocation_and_naive_scores() -> None:
    def call() -> Tensor:
        first = torch.ones(3 * 2**18)  # 3 MiB
        both = torch.cat((first, first))  # and 6
        del first
        return both + 1  # 12 MiB

    assert 11.99 < measure.peak_mib(call, CPU) < 12.01
    rows = rows_of(replace(ATTENTION, seqlen=512), EAGER, DIRECT, seconds=0.0)
    scores_mib = 4 * 512 * 512 * 4 / 2**20
    eager, ours = (rows[name].peak_mib or 0.0 for name in ("eager", "direct"))
    assert eager > 2 * scores_mib
    assert ours < eager


class Graph:
    """Stands for a CUDA graph."""

    def replay(self) -> None:
        pass


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """MiB of the graphs that there are, by name: they lie in one pool until all are dropped."""
    mib: dict[str, int] = {}

    def snapshot() -> list[dict[str, Any]]:
        own = {"segment_pool_id": (0, 1), "total_size": sum(mib.values()) * 2**20}
        return [{"segment_pool_id": (0, 0), "total_size": 2**30}, own]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(torch._dynamo, "reset", mib.clear)
    return mib


def with_graphs(name: str, mib: int, pool: dict[str, int], right_from: int = 0) -> Provider:
    calls = [0]
    graph = Graph()

    def change(loss: Loss) -> Loss:
        def called(*inputs: Any) -> Any:
            calls[0] += 1
            pool[name] = mib
            for _ in range(2):
                graph.replay()
            return loss(*inputs) * (1.0 if calls[0] >= right_from else 1.5)

        return called

    return provider(name, change, graphs=True)


@pytest.mark.parametrize(("right_from", "status"), [(4, "ok"), (5, "red")])
def test_an_operator_with_graphs_is_judged_by_a_replay(
    right_from: int, status: str, pool: dict[str, int]
) -> None:
    row = rows_of(ATTENTION, with_graphs("x", 3, pool, right_from))["x"]
    assert row.status == status, row
    assert (row.more["graph_replays"], row.more["graph_pool_mib"]) == (2, 3.0)
    assert row.peak_mib is not None and row.peak_mib > 3.0
    row = rows_of(ATTENTION, replace(EAGER, name="y", graphs=True))["y"]
    assert row.status == "error"
    assert "must replay at least 2 CUDA graphs" in row.detail


def test_graphs_are_weighed_alone(pool: dict[str, int]) -> None:
    """Two providers whose graphs lie in one pool: each has the memory of its own."""
    providers = [with_graphs(name, mib, pool) for name, mib in (("a", 3), ("b", 5))]
    eager, *rows = rows_of(STEP, EAGER, *providers).values()
    assert [row.status for row in (eager, *rows)] == ["ok"] * 3, rows
    assert [row.more["graph_pool_mib"] for row in rows] == [3.0, 5.0]
    assert [row.peak_mib for row in rows] == [pytest.approx(eager.peak_mib + x) for x in (3, 5)]


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
    loss: Any = named(name).build(ATTENTION, problem_of(lambda x: x.square().sum()))
    assert [loss(torch.ones(3)).item() for _ in range(2)] == [3.0, 3.0]
    assert [p["triton.cudagraphs"] for p in patches] == [True]
    assert len(marks) == 2
    assert rows_of(ATTENTION, named(name))[name].detail == "does not run on cpu"


# ------------------------------------------------------------------------------------ command line
def run(path: Path, monkeypatch: Any, cases: list[Case], *providers: Provider) -> tuple[int, Any]:
    """Runs the command with these cases and providers; its status and its record."""
    monkeypatch.setitem(suites.SUITES, "usual", suites.Suite("some", cpu=cases))
    monkeypatch.setattr(command, "limit_memory", lambda: None)
    monkeypatch.setattr(command, "of_case", lambda *_: list(providers))
    arguments = ["--device", "cpu", "--providers", "any", "--seconds", "0.01", "--json", str(path)]
    return command.main(arguments), Record.load(path)


def test_json_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, record = run(tmp_path / "run.json", monkeypatch, [ATTENTION], EAGER, WRONG[0])
    assert status == 0
    assert [(r.provider, r.status) for r in record.rows] == [("eager", "ok"), ("half", "red")]
    assert record.is_complete
    assert record.machine["torch"] == torch.__version__
    assert record.command == "python -m bench --device cpu --providers any --seconds 0.01"
    record.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "run.json").read_text()


def test_interrupted_run_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(case: Case, problem: Problem) -> Loss:
        if case is HEAD:
            raise KeyboardInterrupt
        return problem.loss

    cases: list[Case] = [ATTENTION, HEAD]
    status, record = run(tmp_path / "run.json", monkeypatch, cases, Provider("stop", build))
    assert (status, record.is_complete) == (130, False)
    assert [r.case for r in record.rows] == [ATTENTION.label]


def test_first_steps_are_those_of_processes_with_caches_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([9.0, 8.0, 3.0, 2.0])
    caches: list[Path] = []

    def measured(_: list[str], folder: Path) -> float:
        caches.append(folder)
        return next(seconds)

    monkeypatch.setattr(first_step, "seconds_of", measured)
    arguments = ["--cases", "x", "--warm", "1", "--device", "cpu", "--json"]
    assert first_step.main([*arguments, str(tmp_path / "x.json")]) == 0
    found = {(r.case, r.provider): r.ms() for r in Record.load(tmp_path / "x.json").rows}
    assert found["x, cold caches", "streamkl"] == 8000
    assert found["x, warm caches", "inductor"] == 3000
    assert caches[:2] == caches[2:] and caches[0] != caches[1]


def test_wrong_names_are_errors_that_list_the_right_ones() -> None:
    with pytest.raises(ValueError, match=r"providers are eager, .*, got egaer"):
        of_case(HEAD, ["egaer"])
    with pytest.raises(ValueError, match="no case matches nothing"):
        suites.select([ATTENTION], ["nothing"])
    assert suites.select([HEAD, replace(HEAD, loss="js")], [HEAD.label]) == [HEAD]
    with pytest.raises(ValueError, match=r"must be one of vocabulary, .*, got nothing"):
        command.main(["shared", "--device", "cpu", "--cases", "nothing"])


def test_suites_have_no_case_twice_and_the_matrix_covers_what_it_promises() -> None:
    for suite in suites.SUITES.values():
        for device, quick in (("cpu", False), ("cpu", True), ("cuda", False), ("cuda", True)):
            labels = [c.label for c in suite.build(device, quick)]
            assert len(set(labels)) == len(labels)
    cells: Any = SUITES["matrix"].cuda
    alike = [c for c in cells if c.student == c.teacher and not c.queries]
    plain = {(c.student.head_dim, c.mask, c.seqlen) for c in alike}
    for dim in (32, 64, 96, 128, 192, 256):
        assert {(dim, m, n) for m in ("none", "causal") for n in (512, 2048, 8192, 32768)} <= plain
    masked = {(c.student.head_dim, c.mask, c.dtype) for c in cells if c.seqlen == 8192}
    for dim in (64, 128):
        assert {(dim, m, t) for m in attention.MASKS for t in attention.DTYPES} <= masked
    assert {c.queries for c in cells if c.queries} == {1, 16, 64}
    assert {c.divergence for c in cells} == set(attention.DIVERGENCES)


def test_the_help_describes_every_option_suite_and_provider() -> None:
    shown = command.parser()
    assert not [action.option_strings for action in shown._actions if not action.help]
    lines = shown.format_help().splitlines()
    notes = {p.name: p.note for p in PROVIDERS} | {k: s.note for k, s in suites.SUITES.items()}
    for name, note in notes.items():
        assert [x for x in lines if re.match(f"  {name} {{2,}}{re.escape(note)}", x)], name


# --------------------------------------------------------------------------------------- documents
def made_up() -> Record:
    """Two providers on three sizes; one runs out of memory."""
    record = Record("python -m bench", {"device": "none", "commit": "none"})
    for size in (256, 512, 1024):
        for speed, name in ((1.0, "eager"), (3.0, "direct")):
            row = Row(f"tiny {size}", name, "heads", ("tiny", size), status="oom")
            if (name, size) != ("eager", 1024):
                timing = {"step": Timing(size / speed, 1.0, 1.0)}
                row = replace(row, status="ok", timing=timing, peak_mib=size * 1.0)
            record.rows.append(row)
    return record


def test_a_picture_is_drawn_of_what_is_right(tmp_path: Path) -> None:
    record = made_up()
    assert plots.curves(record, "tiny", "step")["eager"] == [(256, 256), (512, 512), (1024, None)]
    record.rows[0].status = "red"
    assert plots.curves(record, "tiny", "peak")["eager"] == [(512, 512), (1024, None)]
    plots.draw_curves(record, "tiny", "vocabulary", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_document_has_every_record() -> None:
    text = results.render({"some": made_up(), "hopper_some": made_up()})
    assert text.count("| some |") == 1 + 3
    assert text.count("| hopper_some |") == 1  # of bench/notes
    assert text.count("out of memory") == 1
    assert "| some | tiny 256 | 256 256 |  |  | 85.3 256 |" in text
    committed = results.TARGET.read_text()
    assert committed == results.render(results.load())
    assert len(committed.splitlines()) <= 300


# ------------------------------------------------------------------------------------ several GPUs
def timed(provider: str, ms: float, **more: Any) -> Row:
    return Row("x", provider, timing={"step": Timing(ms, ms, ms)}, **more)


def test_a_row_of_several_gpus_is_the_worst_of_its_ranks() -> None:
    slow = timed("y", 2.0, peak_mib=1.0, loss_error=0.0, gradient_error=0.1)
    large = timed("y", 1.0, peak_mib=2.0, loss_error=0.2, gradient_error=0.0)
    worst = ranks.worst_of([slow, large])
    assert (worst.ms(), worst.peak_mib, worst.loss_error, worst.gradient_error) == (2, 2, 0.2, 0.1)
    given, expected = [torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 1.0])]
    assert case.total_error(given, expected) == pytest.approx(0.5**0.5)


def test_scaling_next_to_the_model_of_costs() -> None:
    """65.0 ms of one GPU, 56 MiB at 240 GB/s and one wait: 32.5 + 0.24 + 0.04 on two.

    Kernels that are slower by a tenth take 3.25 more.
    """
    measured = {"one GPU": 65.0, "ours": 33.4, "others": 60.8, "chunks": 36.0}
    rows = [timed(name, ms) for name, ms in measured.items()]
    received = costs.all_reduce(56.0, 2)
    assert received == 56.0
    known = {"ours": costs.Cost(received + 1, received, waits=1), "others": costs.Cost(received)}
    known["chunks"] = costs.Cost(received, received, 1, slower=1.1)
    costs.add_scaling(rows, known, 2)
    one, ours, others, chunks = (row.more for row in rows)
    model = 32.5 + 56 * 2**20 / 240e6 + 0.04
    assert chunks["model_of_one_gpu"] == pytest.approx((model + 3.25) / 65.0)
    assert one == {}
    of_one = {"of_one_gpu": 33.4 / 65.0, "model_of_one_gpu": pytest.approx(model / 65.0)}
    assert ours == {"received_mib": 57.0, **of_one}
    assert others == {"received_mib": 56.0, "of_one_gpu": 60.8 / 65.0}


def test_cases_that_ranks_share_are_listed_without_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "start", lambda *_: pytest.fail("a rank was started"))

    def listed(*arguments: str) -> list[list[str]]:
        assert command.main(["shared", "--list", "--device", "cpu", *arguments]) == 0
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    assert list(dict.fromkeys(name for name, *_ in listed())) == list(ranks.CASES)
    assert listed("--cases", "ddp", "--sizes", "64", "128") == [["ddp", "64"], ["ddp", "128"]]
    assert ranks.sizes_of("sequence", None, "cuda", 4) == (131072, 524288)
    assert ranks.sizes_of("sequence", None, "cuda", 2) == (65536,)
    assert [sharded.mesh_shape(n) for n in (1, 2, 4, 8)] == [(1, 1), (1, 2), (2, 2), (2, 4)]


@pytest.mark.parametrize(
    ("processes", "cases"),
    [(2, ["vocabulary"]), *(pytest.param(n, [], marks=pytest.mark.slow) for n in (4, 8))],
)
def test_rows_of_cases_that_ranks_share(tmp_path: Path, processes: int, cases: list[str]) -> None:
    path = tmp_path / "shared.json"
    arguments = ["shared", "--device", "cpu", "--processes", str(processes), "--json", str(path)]
    arguments += ["--limit-s", "400", "--seconds", "0.01", "--rounds", "3", "--cases", *cases]
    assert command.main(arguments) == 0
    record = Record.load(path)
    assert record.is_complete
    every_case = {"vocabulary", "sequence", "mesh", "fsdp", "layers", "ddp"}
    assert {row.case.split()[0] for row in record.rows} == (set(cases) or every_case)
    for row in record.rows:
        assert row.status == "ok", (row.case, row.provider, row.detail)
        assert row.gradient_error <= row.gradient_budget < 1e-4  # type: ignore[operator]
        assert row.ms() and row.peak_mib
    rows = [row for row in record.rows if row.case == "vocabulary"]
    assert [x.provider for x in rows] == ["one GPU", "streamkl", "five all-reduces", "DTensor"]
    assert [x.provider for x in rows if "model_of_one_gpu" in x.more] == ["streamkl"]
