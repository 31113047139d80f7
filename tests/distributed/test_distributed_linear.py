"""`linear_kl` on a vocabulary that two processes share: values, gradients, collectives, errors.

The truth is the reference in float64 on whole tensors; the budget is that of one process.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.support.ranks import (
    Rank,
    close,
    counted_collectives,
    keeping_graphs,
    largest_tensor,
    on_ranks,
    on_two_ranks,
    same_error,
    slowly_on_ranks,
)
from torch_streamkl import linear_kl
from torch_streamkl.distributed import reshard_vocab, shard_rows

NUM_TOKENS, NUM_WORDS, WIDTH, TEACHER_WIDTH = 40, 101, 16, 24


@dataclass
class Problem:
    """Whole tensors of a call, the same on every rank."""

    me: Rank
    options: dict[str, Any] = field(default_factory=dict)
    vocab: tuple[int, int] = (NUM_WORDS, NUM_WORDS)
    bias: bool = False
    scale: float = 1.0
    # of biases in the reference, whose JS has no gradient where a vocabulary entry is -inf on both
    # sides
    lowest: float = -torch.inf

    def __post_init__(self) -> None:
        randn = self.me.randn
        self.tensors = {
            "student_hidden": randn(NUM_TOKENS, WIDTH, scale=self.scale),
            "student_weight": randn(self.vocab[0], WIDTH),
            "teacher_hidden": randn(NUM_TOKENS, TEACHER_WIDTH, scale=self.scale),
            "teacher_weight": randn(self.vocab[1], TEACHER_WIDTH),
        }
        if self.bias:
            self.tensors["student_bias"] = randn(self.vocab[0])
            self.tensors["teacher_bias"] = randn(self.vocab[1])
        rows = NUM_TOKENS if self.options.get("reduction", "none") == "none" else 1
        self.grad = torch.rand(rows).to(self.me.device)

    def whole(self, dtype: torch.dtype, impl: str) -> dict[str, Tensor]:
        """Value and gradients of one process with the whole vocabulary."""
        inputs = {k: x.to(dtype) for k, x in leaves(self.tensors).items()}
        for name, x in inputs.items():
            if name.endswith("bias") and impl == "reference":
                x.clamp_(min=self.lowest)
            x.requires_grad_()
        return self.results(linear_kl(**inputs, **self.options, impl=impl), inputs)

    def results(self, value: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        (value.reshape(-1) * self.grad).sum().backward()
        return {"value": value.detach(), **{k: x.grad for k, x in inputs.items()}}

    def shard(self, vocab: tuple[slice, slice]) -> dict[str, Tensor]:
        """This rank's part of the tensors."""
        cut = dict(zip(("student", "teacher"), vocab, strict=True))
        return {
            name: x if name.endswith("hidden") else x[cut[name.partition("_")[0]]]
            for name, x in self.tensors.items()
        }

    def check(
        self, vocab: tuple[slice, slice] | None = None, compiler: Any = None, **more: Any
    ) -> None:
        """What this rank finds with its vocabulary entries, against whole tensors in float64."""
        vocab = vocab or (self.me.vocab(self.vocab[0]), self.me.vocab(self.vocab[1]))
        truth = self.whole(torch.float64, "reference")
        # The largest error is held to the rule of CONTRIBUTING, twice that of naive code. That of
        # one process is another draw of the same roundings, and by chance less than half of it: of
        # 2,000 results with eps=1e-4 three (and naive code's once). What they are off on average
        # does not depend on chance, and is held to that of one process.
        single, naive = (self.whole(self.me.dtype, impl) for impl in ("auto", "reference"))
        inputs = {k: x.requires_grad_() for k, x in leaves(self.shard(vocab)).items()}

        def run(given: dict[str, Tensor]) -> Tensor:
            return linear_kl(**given, **self.options, **more, group=self.me.group)

        ours = self.results((compiler(run) if compiler else run)(inputs), inputs)
        cut = {"student": vocab[0], "teacher": vocab[1]}
        for name, got in ours.items():
            is_whole = name == "value" or name.endswith("hidden")
            part = slice(None) if is_whole else cut[name.partition("_")[0]]
            if got.numel():
                expected, same, plain = (
                    x if is_whole else x[part] for x in (truth[name], single[name], naive[name])
                )
                what = f"{name} {self.options}"
                worse = max((same, plain), key=lambda x: float((x - expected).abs().max()))
                close(got, expected, worse, what=what)
                _as_close(got, expected, (same, plain), what)


def _as_close(got: Tensor, expected: Tensor, of_one: tuple[Tensor, Tensor], what: str) -> None:
    """At most twice as far off as one process on average (root mean square), and a rounding.

    By chance one of its two ways may be much closer than the other one.
    """
    finite = expected.isfinite()
    if not finite.any():
        return
    error, *singles, size = (
        float(x[finite].double().square().mean().sqrt())
        for x in (*(y.double() - expected for y in (got, *of_one)), expected)
    )
    single = max(singles)
    limit = 2 * single + torch.finfo(got.dtype).eps * (1 + size)
    assert error <= limit, f"{what}: off by {error:.2e} on average, one process by {single:.2e}"


def leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in tensors.items()}


DIVERGENCES: list[dict[str, Any]] = [
    {},
    {"divergence": "reverse_kl"},
    {"divergence": "cross_entropy"},
    {"divergence": "jeffreys"},
    {"divergence": "js", "beta": 0.3},
    {"divergence": "tv"},
    {"student_eps": 1e-4, "teacher_eps": 1e-4},
    {"student_clamp": 1e-3},
]


def labels_of(me: Rank) -> Tensor:
    labels = torch.randint(0, NUM_WORDS, (NUM_TOKENS,))
    labels[2], labels[3], labels[4] = -100, NUM_WORDS - 1, 0
    return labels.to(me.device)


@on_ranks
def every_option_at_once(me: Rank) -> None:
    for strategy, divergence in itertools.product(("forward", "recompute"), ("forward_kl", "js")):
        options = {
            "divergence": divergence, "temperature": 2.0, "student_logit_scale": 0.7,
            "student_softcap": 5.0, "teacher_softcap": 7.0, "labels": labels_of(me),
            "hard_weight": 0.3, "row_weight": torch.rand(NUM_TOKENS).to(me.device),
            "row_mask": (torch.arange(NUM_TOKENS) != 5).to(me.device), "reduction": "mean",
            "strategy": strategy,
        }  # fmt: skip
        Problem(me, options, bias=True).check((me.vocab(NUM_WORDS, uneven=True),) * 2)


@on_ranks
def words_that_are_excluded(me: Rank) -> None:
    for divergence in ("reverse_kl", "forward_kl"):
        problem = Problem(me, {"divergence": divergence}, bias=True)
        problem.tensors["student_bias"][::3] = -torch.inf
        truth = problem.whole(torch.float64, "reference")["value"]
        parts = problem.shard((me.vocab(NUM_WORDS),) * 2)
        value = linear_kl(**parts, **problem.options, group=me.group)
        close(value, truth, problem.whole(me.dtype, "auto")["value"])
        assert truth.isfinite().all() == (divergence == "reverse_kl")


@on_ranks
def shards_without_words(me: Rank) -> None:
    everything, nothing = slice(0, NUM_WORDS), slice(NUM_WORDS, NUM_WORDS)
    vocab = everything if me.rank == 0 else nothing
    options = {"labels": labels_of(me), "reduction": "mean"}
    for more in ({}, {"divergence": "js"}, {"strategy": "recompute"}):
        Problem(me, {**options, **more}, bias=True).check((vocab, vocab))
    # a rank that has vocabulary entries of the teacher only
    cut = slice(0, 60) if me.rank == 0 else slice(60, 60)
    teacher = slice(0, 60) if me.rank == 0 else slice(60 if me.rank == 1 else 104, 104)
    for reduction in ("none", "sum"):
        problem = Problem(me, {"reduction": reduction}, vocab=(60, 104))
        problem.check((cut, teacher), student_vocab_start=cut.start,
                      teacher_vocab_start=teacher.start)  # fmt: skip


@on_ranks
def words_in_another_order(me: Rank) -> None:
    rank = me.size - 1 - me.rank
    vocab = Rank(rank, me.size, me.device, me.dtype).vocab(NUM_WORDS)
    options = {"labels": labels_of(me), "reduction": "sum"}
    first = {"student_vocab_start": vocab.start, "teacher_vocab_start": vocab.start}
    Problem(me, options).check((vocab, vocab), **first)


@on_ranks
def labels_that_are_no_word(me: Rank) -> None:
    problem = Problem(me, {"labels": labels_of(me)})
    problem.options["labels"][7] = NUM_WORDS
    parts = problem.shard((me.vocab(NUM_WORDS),) * 2)
    if me.device.type != "cpu":  # an assertion on the device, which ends the process
        return
    for label in (NUM_WORDS, -1):
        problem.options["labels"][7] = label
        for reduction in ("none", "mean"):
            with pytest.raises(IndexError, match=rf"\[0, {NUM_WORDS}\) .* got {label}"):
                linear_kl(**parts, **problem.options, reduction=reduction, group=me.group)


@on_ranks
def numbers_of_collectives(me: Rank) -> None:
    vocab = (me.vocab(NUM_WORDS),) * 2
    for options, forward in (
        ({}, {"all_gather": 1}),
        ({"reduction": "mean"}, {"all_gather": 1}),
        ({"divergence": "js"}, {"all_gather": 1, "all_reduce": 1}),
        ({"divergence": "tv", "reduction": "mean"}, {"all_gather": 1, "all_reduce": 1}),
    ):
        problem = Problem(me, options)
        parts = leaves(problem.shard(vocab))
        for name in ("student_hidden", "student_weight"):
            parts[name].requires_grad_()
        with counted_collectives() as counts:
            value = linear_kl(**parts, **options, group=me.group)
            assert counts == forward, (options, counts)
            value.sum().backward()
        backward = counts.copy()
        backward.subtract(forward)
        assert +backward == {"all_reduce": 1}, (options, counts)


@on_ranks
def chunks_of_tokens(me: Rank) -> None:
    """Ranks with shards of other sizes cut the same chunks, and hold no logits of all tokens."""
    buffers: list[tuple[int, ...]] = []
    original, agree = shard_rows.logits_buffer, shard_rows.Shard.chunks
    rows = 5

    def validated(*args: Any) -> Tensor:
        buffer = original(*args)
        buffers.append(tuple(buffer.shape))
        return buffer

    def small(shard: Any, bytes_per_token: int) -> Any:
        # room for as many tokens of one buffer of each side
        object.__setattr__(shard, "workspace", rows * sum(shard.row_bytes))
        return agree(shard, bytes_per_token)

    shard_rows.logits_buffer, shard_rows.Shard.chunks = validated, small
    try:
        for options, num_gathers in (
            ({"reduction": "mean"}, None),
            ({"reduction": "mean", "divergence": "js"}, None),
            ({"divergence": "js"}, None),
            ({}, 1),
        ):
            vocab = (me.vocab(NUM_WORDS, uneven=True),) * 2
            Problem(me, options).check(vocab)
            with counted_collectives() as counts:
                problem = Problem(me, options)
                linear_kl(**problem.shard(vocab), **options, group=me.group)
            assert counts["all_gather"] == num_gathers or num_gathers is None
        assert max(shape[0] for shape in buffers) <= rows
    finally:
        shard_rows.logits_buffer, shard_rows.Shard.chunks = original, agree


@on_ranks
def the_same_bits(me: Rank) -> None:
    options = {"reduction": "mean", "labels": labels_of(me)}
    first, second = (
        _sharded(me, Problem(me, options), (me.vocab(NUM_WORDS, uneven=True),) * 2)
        for _ in range(2)
        if torch.manual_seed(3)
    )
    for name, x in first.items():
        assert torch.equal(x, second[name]), name
    values: list[Any] = [None] * me.size
    distributed.all_gather_object(values, first["value"].cpu())
    assert all(torch.equal(value, values[0]) for value in values)


def _sharded(me: Rank, problem: Problem, vocab: tuple[slice, slice]) -> dict[str, Tensor]:
    inputs = {k: x.requires_grad_() for k, x in leaves(problem.shard(vocab)).items()}
    return problem.results(linear_kl(**inputs, **problem.options, group=me.group), inputs)


@on_ranks
def compiled(me: Rank) -> None:
    """One graph of forward and of backward, in which no tensor has all logits of a shard."""
    most = NUM_TOKENS * (NUM_WORDS // me.size)
    for options in ({"reduction": "mean", "labels": labels_of(me)}, {"divergence": "js"}):
        graphs: list[torch.fx.GraphModule] = []
        torch._dynamo.reset()
        Problem(me, options).check(compiler=_compiler(keeping_graphs(graphs)))
        assert len(graphs) == 2 and largest_tensor(graphs) < most
    graphs = []
    torch._dynamo.reset()
    _check_form(me, "equal", Shard(0), {}, _compiler(keeping_graphs(graphs)))
    assert graphs and largest_tensor(graphs) < most


def _compiler(backend: Any) -> Any:
    return functools.partial(torch.compile, backend=backend, fullgraph=True)


# ------------------------------------------------------------------------------------ DTensors
def _distributed(
    problem: Problem, mesh: Any, hidden: list[Any], weight: list[Any]
) -> dict[str, DTensor]:
    return {
        name: distribute_tensor(
            x.clone(), mesh, hidden if name.endswith("hidden") else weight
        ).requires_grad_()
        for name, x in problem.tensors.items()
    }


def _check_dtensors(problem: Problem, inputs: dict[str, DTensor], value: DTensor) -> None:
    weight = problem.grad.to(problem.me.device)
    whole = value.full_tensor()
    (whole.reshape(-1) * weight).sum().backward()
    truth = problem.whole(torch.float64, "reference")
    single = problem.whole(problem.me.dtype, "auto")
    close(whole.detach(), truth["value"], single["value"])
    for name, x in inputs.items():
        assert x.grad.placements == x.placements, (name, x.grad.placements)
        close(x.grad.full_tensor(), truth[name], single[name])


@on_ranks
def dtensors_gather_hidden_states_only(me: Rank) -> None:
    problem = Problem(me, {"reduction": "mean"})
    for hidden, expected in ((Replicate(), 0), (Shard(0), 1)):
        inputs = _distributed(problem, me.mesh, [hidden], [Shard(0)])
        for name in ("teacher_hidden", "teacher_weight"):
            inputs[name] = inputs[name].detach()
        with CommDebugMode() as comm:
            linear_kl(**inputs, **problem.options).backward()
        counts = {str(name).partition(".")[2]: n for name, n in comm.get_comm_counts().items()}
        gathers = counts.get("all_gather_into_tensor", 0)
        assert gathers == 2 * expected, counts  # hidden states of both sides
        assert counts.get("reduce_scatter_tensor", 0) == expected, counts


@on_ranks
def dtensors_with_tokens_of_their_own(me: Rank) -> None:
    """Data parallel: gradients of weights are summed, and ranks without a token take part."""
    for tokens, options in itertools.product(
        (NUM_TOKENS, 1),
        ({}, {"reduction": "mean", "strategy": "recompute"}, {"reduction": "batchmean"}),
    ):
        problem = Problem(me, {**options, "labels": labels_of(me)[:tokens]}, bias=True)
        for name in ("student_hidden", "teacher_hidden"):
            problem.tensors[name] = problem.tensors[name][:tokens]
        problem.grad = problem.grad[:tokens]
        inputs = _distributed(problem, me.mesh, [Shard(0)], [Replicate()])
        _check_dtensors(problem, inputs, linear_kl(**inputs, **problem.options))


@on_ranks
def dtensors_on_two_dimensions(me: Rank) -> None:
    for shape in ((1, me.size), (me.size, 1)):
        mesh = init_device_mesh(me.device.type, shape, mesh_dim_names=("dp", "tp"))
        for hidden in ([Shard(0), Replicate()], [Shard(0), Shard(0)]):
            problem = Problem(me, {"reduction": "mean", "labels": labels_of(me)})
            inputs = _distributed(problem, mesh, hidden, [Replicate(), Shard(0)])
            _check_dtensors(problem, inputs, linear_kl(**inputs, **problem.options))


@on_ranks
def resharded_teacher(me: Rank) -> None:
    problem = Problem(me, {}, vocab=(100, 104))
    student = _distributed(problem, me.mesh, [Replicate()], [Shard(0)])
    teacher = student["teacher_weight"].detach()
    with counted_collectives() as counts:
        moved = reshard_vocab(teacher, like=student["student_weight"])
    assert counts == {"all_to_all": 1}
    cut = me.vocab(100)
    stop = 104 if me.rank == me.size - 1 else cut.stop
    assert torch.equal(moved, problem.tensors["teacher_weight"][cut.start : stop])
    inputs = {**student, "teacher_hidden": student["teacher_hidden"].detach()}
    del inputs["teacher_weight"]
    value = linear_kl(**inputs, teacher_weight=moved)
    truth = problem.whole(torch.float64, "reference")
    single = problem.whole(me.dtype, "auto")
    close(value.full_tensor().detach(), truth["value"], single["value"])
    (value.full_tensor() * problem.grad).sum().backward()
    close(student["student_weight"].grad.full_tensor(), truth["student_weight"],
          single["student_weight"])  # fmt: skip
    # ranges, on plain shards
    ranges = [(0, 7), (7, 104)] + [(104, 104)] * (me.size - 2)
    own = problem.tensors["teacher_weight"][me.vocab(104)]
    got = reshard_vocab(own, ranges, group=me.group)
    assert torch.equal(got, problem.tensors["teacher_weight"][slice(*ranges[me.rank])])


# -------------------------------------------------------------------------------------- matrix
# shards of a size, and what else differs; those cut by hand are no DTensors
KINDS = ("equal", "uneven", "other", "peaked", "excluded", "labels")
CUT_BY_HAND, OF_MEANS = ("uneven", "other"), ("uneven", "labels")
FORMS = ("plain", Replicate(), Shard(0))  # shards and a group, or the hidden states of DTensors


def _of_kind(
    me: Rank, kind: str, options: dict[str, Any], swapped: bool = False
) -> tuple[Problem, tuple[slice, slice] | None]:
    """A problem and this rank's vocabulary shard, None as DTensor cuts them."""
    if kind == "other":  # vocabularies that differ
        cut = me.vocab(100)
        larger = slice(cut.start, 104 if me.rank == me.size - 1 else cut.stop)
        if swapped:
            return Problem(me, options, vocab=(104, 100)), (larger, cut)
        return Problem(me, options, vocab=(100, 104)), (cut, larger)
    if kind == "labels":
        options["labels"] = labels_of(me)
    problem = Problem(me, options, bias=kind == "excluded", scale=30.0 if kind == "peaked" else 1)
    if kind == "excluded":  # the same entries on both sides, most of the last rank's among them
        problem.lowest = -1e4
        for side in ("student", "teacher"):
            problem.tensors[f"{side}_bias"][::5] = -torch.inf
            problem.tensors[f"{side}_bias"][NUM_WORDS // 2 + 3 :] = -torch.inf
    return problem, (me.vocab(NUM_WORDS, uneven=True),) * 2 if kind == "uneven" else None


def _check_form(
    me: Rank, kind: str, form: Any, options: dict[str, Any], compiler: Any = None, number: int = 0
) -> None:
    """One cell: value and gradients against float64."""
    problem, vocab = _of_kind(me, kind, dict(options), number % 2 == 1)
    if form == "plain":
        problem.check(vocab, compiler)
        return
    inputs = _distributed(problem, me.mesh, [form], [Shard(0)])

    def function(x: dict[str, DTensor]) -> DTensor:
        return linear_kl(**x, **problem.options)

    value = (compiler(function) if compiler else function)(inputs)
    assert "reduction" in options or value.placements == (form,)
    _check_dtensors(problem, inputs, value)


@on_ranks
def every_divergence_of_every_kind(me: Rank) -> None:
    """Any two of kind, form and divergence meet."""
    for i, kind in enumerate(KINDS):
        for j, options in enumerate(DIVERGENCES):
            form = "plain" if kind in CUT_BY_HAND else FORMS[(i + j) % len(FORMS)]
            options = {**options, "reduction": "mean"} if kind in OF_MEANS else options
            _check_form(me, kind, form, options, number=j)


@slowly_on_ranks
def every_kind_by_inductor(me: Rank) -> None:
    for kind, options in (
        ("uneven", {}),
        ("other", {"divergence": "jeffreys", "reduction": "mean"}),
        ("peaked", {"divergence": "reverse_kl"}),
        ("excluded", {"divergence": "js"}),
        ("labels", {"student_eps": 1e-4, "teacher_eps": 1e-4, "reduction": "mean"}),
        ("equal", {"divergence": "tv"}),
    ):
        for form in FORMS if kind not in CUT_BY_HAND else FORMS[:1]:
            torch._dynamo.reset()
            _check_form(me, kind, form, options, _compiler("inductor"))


# -------------------------------------------------------------------------------------- errors
@on_ranks
def ranks_that_disagree(me: Rank) -> None:
    """Of the last rank alone; test_ranks_that_disagree.py gives each argument otherwise."""
    parts = Problem(me).shard((me.vocab(NUM_WORDS),) * 2)
    is_last, last = me.rank == me.size - 1, f"rank {me.size - 1}"
    fewer = {name: parts[name][:-1] for name in ("student_hidden", "teacher_hidden")}
    changes: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        (fewer, ("number of tokens", "40 (rank 0)", f"39 ({last})")),
        ({"temperature": 2.0}, ("same temperature", "1.0 (rank 0)", f"2.0 ({last})")),
        ({"reduction": "sum"}, ("same reduction", "none (rank 0)", f"sum ({last})")),
        ({"divergence": "js"}, ("divergence", "(rank 0)")),
        ({"labels": labels_of(me)}, ("labels", "0 (rank 0)", f"1 ({last})")),
        ({"temperature": -1.0}, ("temperature must be positive", "got -1.0", last)),
        ({"student_weight": parts["student_weight"][:, 1:]}, ("hidden_size", last)),
        ({"student_vocab_start": 3}, ("student_vocab_start", "None (rank 0)", f"3 ({last})")),
        ({name: x.double() for name, x in parts.items()}, ("element size of student_hidden",)),
    ]
    for change, vocab in changes:
        given = {**parts, **change} if is_last else parts
        same_error(me, functools.partial(linear_kl, **given, group=me.group), *vocab)
    if me.size == 2:
        cut = parts["student_weight"] if is_last else parts["student_weight"][:-1]
        call = functools.partial(linear_kl, **{**parts, "student_weight": cut}, group=me.group)
        vocab = (
            "same vocabulary entries",
            "reshard_vocab",
            "[0, 50) (rank 0)",
            "[0, 51) (rank 0)",
        )
        same_error(me, call, *vocab)
    whole = Problem(me).tensors
    apart = {  # the first rank has all entries of one side, the last those of the other
        "student_weight": whole["student_weight"][: NUM_WORDS * (me.rank == 0)],
        "teacher_weight": whole["teacher_weight"][: NUM_WORDS * is_last],
    }
    call = functools.partial(linear_kl, **{**parts, **apart}, group=me.group)
    same_error(me, call, "same vocabulary entries", f"[0, {NUM_WORDS}) (rank 0)", f"({last})")
    Problem(me).check()  # after all that the ranks still meet


@on_ranks
def ranks_that_disagree_about_dtensors(me: Rank) -> None:
    """Ranks raise what another one refuses, that has other tokens or other vocabulary entries."""
    is_last = me.rank == me.size - 1
    labels, temperature = labels_of(me)[: NUM_TOKENS - is_last], -1.0 if is_last else 1.0
    square = init_device_mesh(me.device.type, (me.size, 1), mesh_dim_names=("data", "vocab"))
    for mesh, hidden, weight in (
        (me.mesh, [Shard(0)], [Replicate()]),
        (me.mesh, [Replicate()], [Shard(0)]),
        (square, [Shard(0), Replicate()], [Replicate(), Shard(0)]),
    ):
        call = functools.partial(linear_kl, **_distributed(Problem(me), mesh, hidden, weight))
        rank = f"rank {me.size - 1}: "
        wrong = functools.partial(call, labels=labels)
        same_error(me, wrong, f"{rank}labels must broadcast", "(39,)")
        wrong = functools.partial(call, temperature=temperature)
        same_error(me, wrong, f"{rank}temperature must be positive")


@on_ranks
def bad_calls(me: Rank) -> None:
    problem, group, mesh = Problem(me), me.group, me.mesh
    parts = problem.shard((me.vocab(NUM_WORDS),) * 2)
    square = init_device_mesh(me.device.type, (1, me.size), mesh_dim_names=("data", "vocab"))
    first = 0 if me.rank == 0 else 60  # vocabulary entries 51 to 59 are nobody's
    starts = {"student_vocab_start": first, "teacher_vocab_start": first}
    for given, vocab in (
        ({"group": group, "impl": "reference"}, ("impl='reference'",)),
        ({"group": 3}, ("process group", "int")),
        ({"student_vocab_start": 0}, ("need a group",)),
        ({"group": square}, ("one dimension", f"shape (1, {me.size})")),
        ({"group": group, **starts},
         ("must make up a whole vocabulary", "[0, 51) (rank 0)", "[60, 110) (rank 1)")),
    ):  # fmt: skip
        same_error(me, functools.partial(linear_kl, **parts, **given), *vocab)
    dtensors = _distributed(problem, mesh, [Replicate()], [Shard(0)])
    hidden, weight, teacher = (
        dtensors[name] for name in ("student_hidden", "student_weight", "teacher_weight")
    )
    partial = DTensor.from_local(hidden.to_local(), mesh, [Partial()])
    elsewhere = distribute_tensor(
        problem.tensors["teacher_weight"], square, [Replicate(), Shard(0)]
    )
    changes: list[tuple[str, Any, str]] = [
        ("student_hidden", problem.tensors["student_hidden"], "Shard"),
        ("student_hidden", hidden.redistribute(placements=[Shard(1)]), "Shard(dim=1)"),
        ("student_hidden", partial, "Partial"),
        ("student_weight", weight.redistribute(placements=[Shard(1)]), "Shard(dim=1)"),
        ("teacher_weight", teacher.redistribute(placements=[Replicate()]), "Replicate"),
        ("teacher_weight", elsewhere, "same device mesh"),
        ("group", group, "group is for plain tensors"),
    ]
    for name, x, text in changes:
        same_error(me, functools.partial(linear_kl, **{**dtensors, name: x}), name, text)
    own, mine = parts["student_weight"], (0, 3 + me.rank)
    for ranges, texts in (
        ([(0, 3)], (f"vocabulary entries of {me.size} ranks", "[(0, 3)]")),
        ([(0, 3), (4, NUM_WORDS)], ("consecutive", "(4, 101)")),
        ([(0, 3), (3, 99)], ("last of 101 vocabulary entries", "(3, 99)")),
        ([mine, (mine[1], NUM_WORDS)], ("(rank 0)", "(rank 1)")),
    ):
        same_error(me, functools.partial(reshard_vocab, own, ranges, group=group), *texts)
    same_error(me, lambda: reshard_vocab(weight), "either ranges or like")
    same_error(me, lambda: reshard_vocab(own), "needs a group")


@on_ranks
def a_killed_rank(me: Rank) -> None:
    """The last check: nobody waits for a rank that is gone."""
    problem = Problem(me)
    parts = problem.shard((me.vocab(NUM_WORDS),) * 2)
    if me.device.type == "cuda":
        return  # NCCL ends the process itself, which the other checks' results would not survive
    if me.rank == me.size - 1:
        raise SystemExit
    with pytest.raises(RuntimeError):
        linear_kl(**parts, group=me.group)


test_on_two_ranks = on_two_ranks(__name__)
