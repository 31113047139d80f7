"""Naive divergences on DTensors of LM heads, rewritten on two processes.

The truth is the same code in float64 on whole tensors of one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
    Rank,
    close,
    keeping_graphs,
    largest_tensor,
    names_of,
    on_ranks,
    run_check,
    slowly_on_ranks,
)
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.dtensors import agreement
from torch_streamkl.fx_passes.reporting.report import Report
from torch_streamkl.fx_passes.validation import check, refusal

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
    compiled: dict[str, Any] = field(default_factory=dict)
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
        default = {"x": [Replicate()] * mesh.ndim, "w": [Shard(0)]}
        return {
            name: distribute_tensor(
                x.to(dtype or x.dtype), mesh, self.placements.get(name, default[name[0]])
            )
            for name, x in self.tensors(me).items()
        }

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
        torch._dynamo.reset()
        options = {"streamkl.inner": "eager", **self.options}
        with backend.collected() as report:
            compiled = torch.compile(
                self.program, backend="streamkl", fullgraph=True, options=options, **self.compiled
            )
            ours = self.results(compiled, self.placed(me))
        naive = self.results(self.program, self.placed(me))
        double = {name: x.double() for name, x in self.tensors(me).items()}
        truth, single = (self.results(self.program, x) for x in (double, self.tensors(me)))
        all_close(ours, truth, single)
        got, expected = ours["value"], naive["value"]
        assert isinstance(got, DTensor) == isinstance(expected, DTensor)
        if isinstance(got, DTensor):
            assert got.placements == expected.placements
        return report

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
def on_dtensors(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    return kl(x_s @ w_s.T, x_t @ w_t.T)


def summed_on_dtensors(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    """Ranks that have tokens of their own have terms of the sum (Partial)."""
    return whole(kl(x_s @ w_s.T, x_t @ w_t.T, "sum") * 0.5)


def on_whole_logits(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    return kl(whole(x_s @ w_s.T) / 2, whole(x_t @ w_t.T) / 2)


def on_local_copies(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    student = local(F.linear(x_s, w_s))
    with torch.no_grad():
        teacher = local(F.linear(x_t, w_t))
    return kl(student, teacher, "none").sum(-1).mean()


def two_losses(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    student, teacher = whole(x_s @ w_s.T), whole(x_t @ w_t.T).detach()
    return kl(student, teacher) + 0.5 * kl(student / 4, teacher / 4)


def jensen_shannon(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    p, q = whole(x_s @ w_s.T).softmax(-1), whole(x_t @ w_t.T).softmax(-1)
    middle = (p + q) / 2
    first = (p * (p.log() - middle.log())).sum(-1)
    return 0.5 * (first + (q * (q.log() - middle.log())).sum(-1)).mean()


def rows_as_dtensor(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    return kl(x_s @ w_s.T, x_t @ w_t.T, "none").sum(-1)


def logits_used_elsewhere(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    student = whole(x_s @ w_s.T)
    labels = torch.arange(student.shape[0], device=student.device) % NUM_WORDS
    return kl(student, whole(x_t @ w_t.T)) + F.cross_entropy(student, labels)


def mean_of_tokens(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    """Ranks have means of their own tokens (Partial of an average)."""
    return whole(kl(x_s @ w_s.T, x_t @ w_t.T, "none").sum(-1).mean() ** 2)


def moved_without_gradient(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    teacher = x_t @ w_t.T
    with torch.no_grad():
        teacher = everywhere(teacher)
    return whole(kl(everywhere(x_s @ w_s.T), teacher)) + whole(w_t.sum() + x_t.sum())


def hidden_states_moved_without_gradient(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    with torch.no_grad():
        hidden = everywhere(x_t)
    return whole(kl(x_s @ w_s.T, hidden @ w_t.T)) + whole(x_t.sum())


def softcapped(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    student, teacher = (torch.tanh(x @ w.T / 5) * 5 for x, w in ((x_s, w_s), (x_t, w_t)))
    return kl(student, teacher, "sum") * 0.25


def checkpointed(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
    return checkpoint(on_whole_logits, x_s, w_s, x_t, w_t, use_reentrant=False)


@on_ranks
def forms(me: Rank) -> None:
    for program in (on_dtensors, on_whole_logits, on_local_copies):
        report = Case(program, options=AS_IT_IS).fuses(me)
        site = report.sites[0]
        assert "vocabulary sharded over 2 ranks" in site.runs, site.runs
        assert site.check.startswith("same value and gradients"), site.check
    Case(two_losses, options=AS_IT_IS).fuses(me, num_sites=2)
    Case(on_dtensors, wanted=("x_s", "w_s", "x_t", "w_t")).fuses(me)
    Case(on_dtensors, wanted=("x_s",)).fuses(me)


@on_ranks
def other_divergences(me: Rank) -> None:
    Case(jensen_shannon).fuses(me, num_sites=1)
    Case(softcapped).fuses(me)
    Case(checkpointed).fuses(me)


@on_ranks
def logits_that_stay(me: Rank) -> None:
    report = Case(logits_used_elsewhere).report(me)
    assert report.num_fused == 1 and report.remaining
    assert any("nothing says that ranks have the same" in note for note in report.notes)


COPIED, SHARED = [Replicate()], [Shard(0)]
PLACEMENTS = [  # of hidden states, vocabulary entries of the student and of the teacher
    (SHARED, SHARED, COPIED), (SHARED, COPIED, SHARED), (COPIED, COPIED, SHARED),
    (COPIED, SHARED, COPIED), (SHARED, SHARED, SHARED), (COPIED, SHARED, SHARED),
]  # fmt: skip
OF_ROWS = {"x_s": SHARED, "x_t": SHARED, "w_s": COPIED, "w_t": COPIED}


@on_ranks
def placements(me: Rank) -> None:
    """Any two placements meet here or in the forms above; `all_placements` has the rest."""
    for hidden, student, teacher in PLACEMENTS[:4]:
        case = {"x_s": hidden, "x_t": hidden, "w_s": student, "w_t": teacher}
        Case(on_whole_logits, case).fuses(me)
    for program in (summed_on_dtensors, rows_as_dtensor, mean_of_tokens):  # data parallel
        Case(program, OF_ROWS, shape=(7,)).fuses(me)  # ranks have other numbers of tokens
    Case(rows_as_dtensor, OF_ROWS).fuses(me)
    Case(on_whole_logits, vocab_size=3).fuses(me)


@slowly_on_ranks
def all_placements(me: Rank) -> None:
    for hidden, student, teacher in PLACEMENTS[4:]:
        case = {"x_s": hidden, "x_t": hidden, "w_s": student, "w_t": teacher}
        Case(on_whole_logits, case).fuses(me)
    for program in (summed_on_dtensors, mean_of_tokens):
        Case(program, OF_ROWS).fuses(me)


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
    every = ("x_s", "w_s", "x_t", "w_t")
    # torch 2.11 cannot multiply what was gathered from uneven shards in a compiled graph
    Case(flattened, shared, shape=(3, 5 if UNEVEN else 4), wanted=every).fuses(me)
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
    """Every program on every mesh; `more_on_two_mesh_dimensions` has the other placements."""
    for mesh, programs in (
        ((1, me.size), {summed_on_dtensors: Shard(0), on_whole_logits: Replicate()}),
        ((me.size, 1), {summed_on_dtensors: Replicate(), on_whole_logits: Shard(0)}),
    ):
        for program, other in {**programs, rows_as_dtensor: Replicate()}.items():
            _on_two_mesh_dimensions(me, program, mesh, other)


@slowly_on_ranks
def more_on_two_mesh_dimensions(me: Rank) -> None:
    for mesh, programs in (
        ((1, me.size), {summed_on_dtensors: Replicate(), on_whole_logits: Shard(0)}),
        ((me.size, 1), {summed_on_dtensors: Shard(0), on_whole_logits: Replicate()}),
    ):
        for program, other in programs.items():
            _on_two_mesh_dimensions(me, program, mesh, other)


def _on_two_mesh_dimensions(me: Rank, program: Program, mesh: Any, other: Any) -> None:
    hidden, vocab = [Shard(0), Replicate()], [Replicate(), Shard(0)]
    case = {"x_s": [Shard(0), other], "x_t": hidden, "w_s": vocab, "w_t": vocab}
    Case(program, case, mesh=mesh, options=AS_IT_IS).fuses(me)


@on_ranks
def sizes_that_vary(me: Rank) -> None:
    Case(on_whole_logits, compiled={"dynamic": True}, options=AS_IT_IS).fuses(me)
    Case(on_whole_logits, shape=(3, 4), compiled={"dynamic": True}).fuses(me)


@on_ranks
def moves_without_gradients(me: Rank) -> None:
    every = ("x_s", "w_s", "x_t", "w_t")
    for hidden in ([Shard(0)], [Replicate()]):
        for program in (moved_without_gradient, hidden_states_moved_without_gradient):
            Case(program, {"x_s": hidden, "x_t": hidden}, wanted=every).fuses(me)


@on_ranks
def weights_of_a_rank(me: Rank) -> None:
    """What a rank does with whole rows is its own: every rank may weigh them otherwise."""

    def weighted(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        rows = kl(whole(x_s @ w_s.T), whole(x_t @ w_t.T), "none").sum(-1)
        weight = torch.arange(rows.shape[0], dtype=rows.dtype, device=rows.device) + me.rank
        return (rows * weight).sum()

    case = Case(weighted)
    torch._dynamo.reset()
    with backend.collected() as report:
        compiled = torch.compile(weighted, backend="streamkl", options=AS_IT_IS)
        ours = case.results(compiled, case.placed(me))
    assert report.num_fused == 1
    double = case.placed(me, torch.float64)
    all_close(ours, case.results(weighted, double), case.results(weighted, case.placed(me)))


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
        {"output_layouts": Replicate(), "use_local_output": False},
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

        def results(
            run: Program, dtype: torch.dtype | None = None, case: Case = case
        ) -> dict[str, Any]:
            placed = case.placed(me, dtype)
            return case.results(
                run, {k: whole(x) if k[0] == "x" else x for k, x in placed.items()}
            )

        torch._dynamo.reset()
        with backend.collected() as report:
            compiled = torch.compile(program, backend="streamkl", options=AS_IT_IS)
            ours = results(compiled)
        assert report.num_fused == 1, str(report)
        all_close(ours, results(program, torch.float64), results(program))


# --------------------------------------------------------------------------- what is communicated
@on_ranks
def no_logits_are_gathered(me: Rank) -> None:
    ours = backend.split_options({})[0]
    for program in (on_dtensors, on_whole_logits, on_local_copies):
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

    def fewer_words(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        return kl(whole(x_s @ w_s.T)[..., :20], whole(x_t @ w_t.T)[..., :20])

    def chosen_rows(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        student, teacher = whole(x_s @ w_s.T), whole(x_t @ w_t.T)
        keep = torch.arange(student.shape[0], device=student.device) % 3 != 0
        return kl(student[keep], teacher[keep])

    def plain_scale(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        return kl(whole(x_s @ w_s.T) * whole(x_t).square().mean(), whole(x_t @ w_t.T))

    def in_place(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        return kl(whole(x_s @ w_s.T), whole(x_t @ w_t.T).div_(2))

    Case(plain_teacher).stays(me, "is a plain tensor next to DTensors")
    Case(fewer_words).stays(me, "would gather it")
    Case(chosen_rows).stays(me, "whose number only the data decides")
    Case(plain_scale).fuses(me)  # computed from the DTensors that it was gathered from
    Case(in_place).stays(me, "modified in place")
    by_width = [Shard(1)]
    Case(on_whole_logits, {"w_s": by_width, "w_t": by_width}).stays(me, "student_weight may be")


@on_ranks
def gradients_that_ranks_add_up(me: Rank) -> None:
    """With grad_placements of Partial the gradient is summed over ranks: left as it is."""

    def program(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        student = (x_s @ w_s.T).redistribute(placements=[Replicate()])
        return kl(student.to_local(grad_placements=[Partial()]), whole(x_t @ w_t.T))

    case = Case(program)
    with backend.collected() as report:
        ours = case.results(
            torch.compile(program, backend="streamkl", options=AS_IT_IS), case.placed(me)
        )
    assert not report.num_fused
    for name, x in case.results(program, case.placed(me)).items():
        torch.testing.assert_close(whole(ours[name]), whole(x))


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
    with backend.collected() as report:
        compiled = torch.compile(program, backend="streamkl", options=AS_IT_IS)
        ours = case.results(compiled, own)
    assert not report.num_fused
    assert "ranks add up what each computes of its own vocabulary entries" in str(report), str(
        report
    )
    assert "linear_kl(..., group=tp_group)" in str(report), str(report)
    for name, x in case.results(program, own).items():
        torch.testing.assert_close(ours[name], x)


# ------------------------------------------------------------------------------------- agreement
@on_ranks
def a_check_that_fails_on_one_rank(me: Rank) -> None:
    """No rank rewrites what another one refuses; the reason names it on all of them."""

    def program(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        return whole(kl(x_s @ w_s.T, x_t @ w_t.T, "sum")) * 0.125

    original = refusal.check

    def failing(*args: Any) -> list[check.CheckResult]:
        verdicts = original(*args)
        if me.rank != me.size - 1:
            return verdicts
        return [check.CheckResult(v.node, v.sites, "the value is off") for v in verdicts]

    refusal.check = failing
    try:
        Case(program).stays(me, "rank 1: the check failed: the value is off")
    finally:
        refusal.check = original


@on_ranks
def a_check_that_one_rank_cannot_run(me: Rank) -> None:
    """With verify="always" nothing is fused that a rank could not check, on any rank."""

    def program(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        return kl(whole(x_s @ w_s.T) / 3, whole(x_t @ w_t.T) / 3)

    original = check._check_region

    def failing(*args: Any) -> str:
        if me.rank == 0:
            raise torch.OutOfMemoryError
        return original(*args)

    check._check_region = failing
    try:
        always = {"streamkl.verify": "always"}
        Case(program, options=always).stays(me, "rank 0: streamkl.verify is")
    finally:
        check._check_region = original


@on_ranks
def ranks_that_compile_other_losses(me: Rank) -> None:
    def program(x_s: Any, w_s: Any, x_t: Any, w_t: Any) -> Any:
        return kl(whole(x_s @ w_s.T) / (2 + me.rank), whole(x_t @ w_t.T))

    with backend.collected() as report:
        case = Case(program)
        case.results(torch.compile(program, backend="streamkl", options=AS_IT_IS), case.placed(me))
    assert not report.num_fused
    assert "rank 1 compiles another graph than rank 0" in str(report), str(report)


@on_ranks
def an_analysis_that_fails_on_one_rank(me: Rank) -> None:
    from torch_streamkl.fx_passes.dtensors import rewriting

    original = rewriting.whole_graph

    def failing(graph: Any) -> Any:
        if me.rank == 1:
            raise IndexError("of a test")
        return original(graph)

    rewriting.whole_graph = failing
    try:
        with backend.collected() as report:
            case = Case(on_dtensors, vocab_size=31)
            compiled = torch.compile(on_dtensors, backend="streamkl", options=AS_IT_IS)
            case.results(compiled, case.placed(me))
    finally:
        rewriting.whole_graph = original
    assert not report.num_fused
    if me.rank == 0:
        assert "rank 1: IndexError: of a test" in str(report), str(report)


@on_ranks
def a_rank_that_does_not_compile(me: Rank) -> None:
    """The last check: the others raise, and do not wait for ever."""
    if me.rank != 0:
        return
    graph = torch.fx.Graph()
    alone = agreement.Agreement(graph)
    alone.ranks = tuple(range(me.size))
    alone.store = torch.distributed.PrefixStore("alone", agreement.default_store())
    import datetime

    alone.store.set_timeout(datetime.timedelta(seconds=1))
    with pytest.raises(agreement.RanksDisagreeError, match="rank 1 did not say within 1 s"):
        alone.refusals([], {})


@pytest.mark.parametrize("name", names_of(__name__))
def test_on_two_ranks(name: str) -> None:
    run_check(__name__, name)
