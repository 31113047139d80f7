"""Naive divergences on DTensors of LM heads, rewritten on two processes.

The truth is the same code in float64 on whole tensors of one process.
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import (
    TIMEOUT,
    Rank,
    close,
    keeping_graphs,
    largest_tensor,
    on_ranks,
    on_two_ranks,
)
from torch_streamkl.fx_passes import backend, pipeline
from torch_streamkl.fx_passes.dtensors import agreement, rewriting
from torch_streamkl.fx_passes.reporting.report import Report
from torch_streamkl.fx_passes.validation import check

NUM_TOKENS, NUM_WORDS, WIDTH = 12, 23, 8  # vocabulary entries that two ranks do not share evenly
Program = Callable[..., Any]
AS_IT_IS = {"streamkl.inner": "aot_eager"}
UNEVEN = TorchVersion(torch.__version__) >= "2.13"


def kl(student: Any, teacher: Any, reduction: str = "batchmean") -> Any:
    return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction=reduction)


def whole(x: Any) -> Any:
    """Of a DTensor; the same code runs on whole tensors for the truth."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def local(x: Any) -> Any:
    """What every rank has, through a redistribution."""
    if not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()


def everywhere(x: Any) -> Any:
    """Of a DTensor, one that every rank has."""
    if not isinstance(x, DTensor):
        return x.clone()
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


def all_close(ours: dict[str, Any], truth: dict[str, Any], single: dict[str, Any]) -> None:
    """Each result is as close to float64 as the naive program is in our dtype."""
    for name in ours:
        results = (whole(of[name]).detach() for of in (ours, truth, single))
        close(*results, what=name)


@dataclass
class Case:
    """A program of hidden states and weights of student and teacher, and their placements."""

    program: Program
    placements: dict[str, list[Any]] = field(default_factory=dict)
    wanted: tuple[str, ...] = ("x_s", "w_s")
    shape: tuple[int, ...] = (NUM_TOKENS,)
    vocab_size: int = NUM_WORDS
    mesh: tuple[int, ...] | None = None
    dynamo: dict[str, Any] = field(default_factory=dict)  # options of torch.compile
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self, me: Rank) -> dict[str, Tensor]:
        torch.manual_seed(1)
        hidden, vocab = (*self.shape, WIDTH), (self.vocab_size, WIDTH)
        shapes = {"x_s": hidden, "w_s": vocab, "x_t": hidden, "w_t": vocab}
        return {name: me.randn(*shape) for name, shape in shapes.items()}

    def placed(self, me: Rank, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """DTensors of the inputs, whose numbers are the same in another dtype."""
        # one mesh for all checks: compiled graphs mix up meshes that are equal
        mesh = me.mesh if self.mesh is None else mesh_of(me, self.mesh)
        return {
            name: distribute_tensor(
                x.to(dtype or x.dtype), mesh, self.placements.get(name) or self.usual(name, mesh)
            )
            for name, x in self.tensors(me).items()
        }

    def usual(self, name: str, mesh: Any) -> Any:
        return [Shard(0)] if name[0] == "w" else [Replicate()] * mesh.ndim

    def results(self, program: Program, tensors: dict[str, Tensor]) -> dict[str, Any]:
        inputs = {k: x.detach().requires_grad_(k in self.wanted) for k, x in tensors.items()}
        value = program(**inputs)
        whole(value).sum().backward()
        gradients = {name: inputs[name].grad for name in self.wanted}
        return {"value": value, **gradients}

    def report(self, me: Rank) -> Report:
        """Compiled on every rank; value and gradients are checked.

        The rewritten graph runs as it is, unless options say otherwise: AOTAutograd, which takes
        a third of the time, sees `forms`, `two_mesh_dimensions` and those of attention.
        """
        ours, report = self.compiled(me, self.options)
        naive = self.results(self.program, self.placed(me))
        double = {name: x.double() for name, x in self.tensors(me).items()}
        truth, single = (self.results(self.program, x) for x in (double, self.tensors(me)))
        all_close(ours, truth, single)
        got, expected = ours["value"], naive["value"]
        assert isinstance(got, DTensor) == isinstance(expected, DTensor)
        if isinstance(got, DTensor):
            assert got.placements == expected.placements
        return report

    def compiled(
        self, me: Rank, options: dict[str, Any], placed: dict[str, Tensor] | None = None
    ) -> tuple[dict[str, Any], Report]:
        torch._dynamo.reset()
        options = {"streamkl.inner": "eager", **options}
        with backend.collected() as report:
            run = torch.compile(
                self.program, backend="streamkl", fullgraph=True, options=options, **self.dynamo
            )
            return self.results(run, self.placed(me) if placed is None else placed), report

    def fuses_on_dtensors(self, me: Rank, placed: Any = None) -> None:
        """The program does what it does on ranks: the truth is its own on DTensors in float64."""
        placed = placed or (lambda dtype: self.placed(me, dtype))
        ours, report = self.compiled(me, AS_IT_IS, placed(None))
        assert report.num_fused == 1 and not report.failures, str(report)
        double, single = placed(torch.float64), placed(None)
        all_close(ours, self.results(self.program, double), self.results(self.program, single))

    def is_left(self, me: Rank, *texts: str, placed: dict[str, Tensor] | None = None) -> None:
        """Nothing is fused, the report says why, and results are those of eager code."""
        ours, report = self.compiled(me, AS_IT_IS, placed)
        assert not report.num_fused
        assert all(text in str(report) for text in texts), str(report)
        given = self.placed(me) if placed is None else placed
        for name, x in self.results(self.program, given).items():
            torch.testing.assert_close(whole(ours[name]), whole(x))

    def fuses(self, me: Rank, num_sites: int = 1) -> Report:
        report = self.report(me)
        assert report.num_fused == num_sites and not report.num_unfused, str(report)
        assert not report.failures, report.failures
        return report

    def stays(self, me: Rank, reason: str) -> None:
        report = self.report(me)
        assert not report.num_fused and not report.failures, str(report)
        assert any(reason in site.reason for site in report.sites), str(report)


_meshes: dict[Any, Any] = {}


def mesh_of(me: Rank, shape: tuple[int, ...]) -> Any:
    if (shape, me.group) not in _meshes:
        _meshes[shape, me.group] = init_device_mesh(me.device.type, shape)
    return _meshes[shape, me.group]


# ---------------------------------------------------------------------------- the forms of a loss
def of_logits(loss: Callable[[Any, Any], Any]) -> Program:
    """The program of a loss of both sides' logits."""

    def program(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        return loss(x_s @ w_s.T, x_t @ w_t.T)

    return program


def jensen_shannon(s: Any, t: Any) -> Any:
    p, q = whole(s).softmax(-1), whole(t).softmax(-1)
    middle = (p + q) / 2
    first = (p * (p.log() - middle.log())).sum(-1)
    return 0.5 * (first + (q * (q.log() - middle.log())).sum(-1)).mean()


def logits_used_elsewhere(s: Any, t: Any) -> Any:
    student = whole(s)
    labels = torch.arange(student.shape[0], device=student.device) % NUM_WORDS
    return kl(student, whole(t)) + F.cross_entropy(student, labels)


on_dtensors = of_logits(kl)
on_whole_logits = of_logits(lambda s, t: kl(whole(s) / 2, whole(t) / 2))
# ranks that have tokens of their own have terms of the sum, or means of their own (Partial)
summed_on_dtensors = of_logits(lambda s, t: whole(kl(s, t, "sum") * 0.5))
mean_of_tokens = of_logits(lambda s, t: whole(kl(s, t, "none").sum(-1).mean() ** 2))
rows_as_dtensor = of_logits(lambda s, t: kl(s, t, "none").sum(-1))
two_losses = of_logits(
    lambda s, t: kl(whole(s), whole(t).detach()) + 0.5 * kl(whole(s) / 4, whole(t).detach() / 4)
)
softcapped = of_logits(lambda s, t: kl(torch.tanh(s / 5) * 5, torch.tanh(t / 5) * 5, "sum") * 0.25)


def on_local_copies(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    student = local(F.linear(x_s, w_s))
    with torch.no_grad():
        teacher = local(F.linear(x_t, w_t))
    return kl(student, teacher, "none").sum(-1).mean()


def moved_without_gradient(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    teacher = x_t @ w_t.T
    with torch.no_grad():
        teacher = everywhere(teacher)
    return whole(kl(everywhere(x_s @ w_s.T), teacher)) + whole(w_t.sum() + x_t.sum())


def hidden_states_moved_without_gradient(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    with torch.no_grad():
        hidden = everywhere(x_t)
    return whole(kl(x_s @ w_s.T, hidden @ w_t.T)) + whole(x_t.sum())


def checkpointed(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    return checkpoint(on_whole_logits, x_s, w_s, x_t, w_t, use_reentrant=False)


EVERY = ("x_s", "w_s", "x_t", "w_t")


@on_ranks
def forms(me: Rank) -> None:
    for program, wanted in (
        (on_dtensors, ("x_s",)), (on_whole_logits, EVERY), (on_local_copies, EVERY[:2]),
    ):  # fmt: skip
        report = Case(program, wanted=wanted, options=AS_IT_IS).fuses(me)
        site = report.sites[0]
        assert "vocabulary sharded over 2 ranks" in site.runs, site.runs
        assert site.check.startswith("same value and gradients"), site.check
    Case(two_losses, options=AS_IT_IS).fuses(me, num_sites=2)


@on_ranks
def other_divergences(me: Rank) -> None:
    Case(of_logits(jensen_shannon)).fuses(me)
    Case(softcapped).fuses(me)
    Case(checkpointed).fuses(me)


@on_ranks
def logits_that_stay(me: Rank) -> None:
    report = Case(of_logits(logits_used_elsewhere)).report(me)
    assert report.num_fused == 1 and report.remaining
    assert any("nothing says that ranks have the same" in note for note in report.notes)


COPIED, SHARED = [Replicate()], [Shard(0)]
PLACEMENTS = [  # of hidden states, vocabulary entries of the student and of the teacher
    (SHARED, SHARED, COPIED), (SHARED, COPIED, SHARED), (COPIED, COPIED, SHARED),
    (COPIED, SHARED, COPIED),
]  # fmt: skip
OF_ROWS = {"x_s": SHARED, "x_t": SHARED, "w_s": COPIED, "w_t": COPIED}


@on_ranks
def placements(me: Rank) -> None:
    """Any two placements meet here or in the forms above."""
    for hidden, student, teacher in PLACEMENTS:
        case = {"x_s": hidden, "x_t": hidden, "w_s": student, "w_t": teacher}
        Case(on_whole_logits, case).fuses(me)
    for program in (summed_on_dtensors, rows_as_dtensor, mean_of_tokens):  # data parallel
        Case(program, OF_ROWS, shape=(7,)).fuses(me)  # ranks have other numbers of tokens


@on_ranks
def tokens_that_are_gathered(me: Rank) -> None:
    """Sequence parallel: tokens are shared along the second dimension, and flattened or cut."""

    def flattened(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        student, teacher = everywhere(x_s) @ w_s.T, everywhere(x_t) @ w_t.T
        return whole(kl(student.flatten(0, 1), teacher.flatten(0, 1)))

    def shifted(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        pairs = ((everywhere(x) @ w.T)[:, :-1] for x, w in ((x_s, w_s), (x_t, w_t)))
        return whole(kl(*(x.reshape(-1, NUM_WORDS) for x in pairs)))

    shared = {"x_s": [Shard(1)], "x_t": [Shard(1)]}
    # torch 2.11 cannot multiply what was gathered from uneven shards in a compiled graph
    Case(flattened, shared, shape=(3, 5 if UNEVEN else 4), wanted=EVERY).fuses(me)
    Case(shifted, shared, shape=(2, 4)).fuses(me)


@on_ranks
def terms_of_hidden_states(me: Rank) -> None:
    """Behind a RowwiseParallel layer ranks have terms (Partial) that the program adds up."""

    def added(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        terms = DTensor.from_local(x.to_local() / 2, x.device_mesh, [Partial()], run_check=False)
        return terms.redistribute(placements=[Replicate()])

    def program(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        return whole(kl(added(x_s) @ w_s.T, added(x_t) @ w_t.T))

    Case(program, wanted=("w_s",)).fuses(me)


@on_ranks
def two_mesh_dimensions(me: Rank) -> None:
    hidden, vocab = [Shard(0), Replicate()], [Replicate(), Shard(0)]
    for mesh, program, other in (
        ((1, me.size), summed_on_dtensors, Shard(0)),
        ((1, me.size), on_whole_logits, Replicate()),
        ((me.size, 1), rows_as_dtensor, Replicate()),
        ((me.size, 1), on_whole_logits, Shard(0)),
    ):
        case = {"x_s": [Shard(0), other], "x_t": hidden, "w_s": vocab, "w_t": vocab}
        Case(program, case, mesh=mesh, options=AS_IT_IS).fuses(me)


@on_ranks
def sizes_that_vary(me: Rank) -> None:
    Case(on_whole_logits, shape=(3, 4), dynamo={"dynamic": True}, options=AS_IT_IS).fuses(me)


@on_ranks
def sizes_of_which_a_rank_has_one_token(me: Rank) -> None:
    """The compiler makes another graph for this rank; the others compile with it."""
    torch._dynamo.reset()
    options = {"streamkl.inner": "eager"}
    run = torch.compile(summed_on_dtensors, backend="streamkl", fullgraph=True, options=options)
    with backend.collected() as report:
        for tokens in (12, 10, 8, 3, 2, 3, 9):
            case = Case(summed_on_dtensors, OF_ROWS, shape=(tokens,))
            double, single = ({n: x.to(d) for n, x in case.tensors(me).items()}
                              for d in (torch.float64, me.dtype))  # fmt: skip
            of_one = (case.results(summed_on_dtensors, x) for x in (double, single))
            all_close(case.results(run, case.placed(me)), *of_one)
    assert report.num_fused > 2, str(report)


@on_ranks
def moves_without_gradients(me: Rank) -> None:
    shared = {"x_s": SHARED, "x_t": SHARED}
    for program in (moved_without_gradient, hidden_states_moved_without_gradient):
        Case(program, shared, wanted=EVERY).fuses(me)


@on_ranks
def weights_of_a_rank(me: Rank) -> None:
    """What a rank does with whole rows is its own: every rank may weigh them otherwise."""

    def weighted(s: Any, t: Any) -> Any:
        rows = kl(whole(s), whole(t), "none").sum(-1)
        weight = torch.arange(rows.shape[0], dtype=rows.dtype, device=rows.device) + me.rank
        return (rows * weight).sum()

    Case(of_logits(weighted)).fuses_on_dtensors(me)


class Head(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocab_size)

    def forward(self, x: Tensor) -> Any:
        return self.lm_head(self.body(x))


@on_ranks
def parallelized_modules(me: Rank) -> None:
    for layout in (
        {"output_layouts": Shard(-1), "use_local_output": False},
        {"output_layouts": Replicate()},
    ):
        torch._dynamo.reset()
        torch.manual_seed(3)
        models = [Head(NUM_WORDS).to(me.device, me.dtype) for _ in range(2)]
        singles = copy.deepcopy(models)
        doubles = [model.double() for model in copy.deepcopy(models)]
        for model in models:
            parallelize_module(model, me.mesh, {"lm_head": ColwiseParallel(**layout)})

        def loss(student: nn.Module, teacher: nn.Module, x: Tensor) -> Any:
            with torch.no_grad():
                target = teacher(x)
            return whole(kl(student(x), target))

        x = me.randn(2, 6, WIDTH)
        loss(*doubles, x.double()).backward()
        loss(*singles, x).backward()
        with backend.collected() as report:
            compiled = torch.compile(loss, backend="streamkl", options=AS_IT_IS, fullgraph=True)
            compiled(*models, x).backward()
        assert report.num_fused == 1 and not report.num_unfused, str(report)
        all_close(*(
            {name: x.grad for name, x in model.named_parameters()}
            for model in (models[0], doubles[0], singles[0])
        ))  # fmt: skip


@on_ranks
def linear_layers_of_own_words(me: Rank) -> None:
    """What transformers' tp_plan runs under no_grad: a linear layer of a rank's vocabulary shard.

    The hidden states are whatever a rank has, and their gradient is this rank's share.
    """

    def logits(x: Any, w: Any) -> Any:
        made = F.linear(x, w.to_local())
        return DTensor.from_local(made, w.device_mesh, [Shard(-1)], run_check=False)

    def teacher_alone(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        with torch.no_grad():
            teacher = local(logits(x_t, w_t))
        return kl(whole(logits(x_s, w_s)), teacher)

    def used_elsewhere(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        student = whole(logits(x_s * (1 + me.rank), w_s))
        return kl(student, whole(logits(x_t, w_t))) + student.square().mean()

    for program in (teacher_alone, used_elsewhere):
        case = Case(program, vocab_size=24)

        def placed(dtype: torch.dtype | None, case: Case = case) -> dict[str, Tensor]:
            found = case.placed(me, dtype)
            return {k: whole(x) if k[0] == "x" else x for k, x in found.items()}

        case.fuses_on_dtensors(me, placed)


@on_ranks
def gradients_of_own_words_that_ranks_add_up(me: Rank) -> None:
    """Data parallel by hand: tokens are a rank's, and its part of the head has a summed gradient,
    which logits of the whole head would not give.
    """

    def logits(x: Any, w: Any) -> Any:
        if not isinstance(w, DTensor):
            return x @ w.T
        own = w.to_local(grad_placements=[Partial(), Shard(0)])
        places = [Replicate(), Shard(-1)]
        return DTensor.from_local(F.linear(x, own), w.device_mesh, places, run_check=False)

    def program(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        return kl(whole(logits(x_s, w_s)), whole(logits(x_t, w_t)))

    vocab = [Replicate(), Shard(0)]
    case = Case(program, {"w_s": vocab, "w_t": vocab}, mesh=(me.size, 1))
    placed = case.placed(me)
    case.is_left(me, placed={k: whole(x) * (1 + me.rank) if k[0] == "x" else x
                             for k, x in placed.items()})  # fmt: skip


# --------------------------------------------------------------------------- what is communicated
@on_ranks
def no_logits_are_gathered(me: Rank) -> None:
    ours = backend.split_options({})[0]
    for program in (on_whole_logits, on_local_copies):
        torch._dynamo.reset()
        graphs: list[torch.fx.GraphModule] = []
        keep = keeping_graphs(graphs)

        def rewritten(gm: Any, inputs: Any, keep: Any = keep) -> Any:
            backend.rewrite_and_report(gm, ours)
            return keep(gm, inputs)

        case = Case(program)
        case.results(torch.compile(program, backend=rewritten, fullgraph=True), case.placed(me))
        targets = [str(n.target) for graph in graphs for n in graph.graph.nodes]
        assert not any("all_gather" in t or "all_to_all" in t for t in targets), targets
        assert sum("all_reduce" in t for t in targets) == 1, targets  # hidden states' gradient
        assert sum("linear_kl_sharded" in t for t in targets) == 1, targets
        assert largest_tensor(graphs) < NUM_TOKENS * NUM_WORDS


# ------------------------------------------------------------------------------- what stays, why
@on_ranks
def what_does_not_fit(me: Rank) -> None:
    def plain_teacher(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        return kl(whole(x_s @ w_s.T), whole(x_t) @ whole(w_t).T)

    def chosen_rows(s: Any, t: Any) -> Any:
        keep = torch.arange(s.shape[0], device=s.device) % 3 != 0
        return kl(whole(s)[keep], whole(t)[keep])

    def plain_scale(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        return kl(whole(x_s @ w_s.T) * whole(x_t).square().mean(), whole(x_t @ w_t.T))

    Case(plain_teacher).stays(me, "is a plain tensor next to DTensors")
    for loss, reason in (
        (lambda s, t: kl(whole(s)[..., :20], whole(t)[..., :20]), "would gather it"),
        (chosen_rows, "whose number only the data decides"),
        (lambda s, t: kl(whole(s), whole(t).div_(2)), "modified in place"),
    ):
        Case(of_logits(loss)).stays(me, reason)
    Case(plain_scale).fuses(me)  # computed from the DTensors that it was gathered from
    by_width = [Shard(1)]
    Case(on_whole_logits, {"w_s": by_width, "w_t": by_width}).stays(me, "student_weight may be")


@on_ranks
def gradients_that_ranks_add_up(me: Rank) -> None:
    """With grad_placements of Partial the gradient is summed over ranks: left as it is."""

    def loss(s: Any, t: Any) -> Any:
        student = s.redistribute(placements=[Replicate()])
        return kl(student.to_local(grad_placements=[Partial()]), whole(t))

    Case(of_logits(loss)).is_left(me)


@on_ranks
def softmaxes_that_ranks_add_up(me: Rank) -> None:
    """Each rank has vocabulary entries of its own as plain tensors, as in NeMo's losses: the
    report says so.
    """

    def whole_sum(x: Tensor) -> Tensor:
        return functional_collectives.all_reduce(x, "sum", me.group)

    def program(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        parts = [(x @ w.T - 2).exp() for x, w in ((x_s, w_s), (x_t, w_t))]
        q, p = (x / whole_sum(x.sum(-1, keepdim=True)) for x in parts)
        return whole_sum((p * (p.log() - q.log())).sum(-1)).sum()

    case = Case(program)
    own = {k: x[me.vocab(NUM_WORDS)] if k[0] == "w" else x for k, x in case.tensors(me).items()}
    said = "ranks add up what each computes of its own vocabulary entries"
    case.is_left(me, said, "linear_kl(..., group=tp_group)", placed=own)


# ------------------------------------------------------------------------------------- agreement
def failing(owner: Any, name: str, fails: Callable[..., Any]) -> Any:
    """Replaces a function by one that is given it first."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args: fails(original, *args))


@on_ranks
def checks_of_one_rank(me: Rank) -> None:
    """No rank rewrites what another one refuses or cannot check; the reason names it on all."""
    is_last = me.rank == me.size - 1

    def off(original: Any, *args: Any) -> list[check.CheckResult]:
        return [
            check.CheckResult(v.node, v.sites, "the value is off") if is_last else v
            for v in original(*args)
        ]

    def without_memory(original: Any, *args: Any) -> str:
        if me.rank == 0:
            raise torch.OutOfMemoryError
        text: str = original(*args)
        return text

    with failing(pipeline, "check", off):
        Case(summed_on_dtensors).stays(me, "rank 1: the check failed: the value is off")
    with failing(check, "_check_region", without_memory):
        always = Case(on_whole_logits, options={"streamkl.verify": "always"})
        always.stays(me, "rank 0: streamkl.verify is")


@on_ranks
def an_analysis_that_fails_on_one_rank(me: Rank) -> None:
    """At its begin, and where it puts back what it has rewritten."""

    def fails(original: Any, *args: Any) -> Any:
        if me.rank == 1:
            raise IndexError("of a test")
        return original(*args)

    said = ("rank 1: IndexError: of a test",) if me.rank == 0 else ()
    for owner, name in ((rewriting, "whole_graph"), (rewriting.Restore, "run")):
        with failing(owner, name, fails):
            Case(on_dtensors, vocab_size=31).is_left(me, *said)


@on_ranks
def a_rank_that_does_not_compile(me: Rank) -> None:
    """The others raise, and do not wait for ever."""
    if me.rank != 0:
        return
    graph = torch.fx.Graph()
    alone = agreement.Agreement(graph)
    alone.ranks = tuple(range(me.size))
    alone.store = torch.distributed.PrefixStore("alone", agreement.default_store())
    alone.store.set_timeout(datetime.timedelta(seconds=1))
    try:
        with pytest.raises(agreement.RanksDisagreeError, match="rank 1 did not say within 1 s"):
            alone.refusals([], {})
    finally:
        alone.store.set_timeout(TIMEOUT)  # it is also that of the store of later checks


test_on_two_ranks = on_two_ranks(__name__)
