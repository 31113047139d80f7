"""Tensor-valued options and reductions of calls that ranks share, against formulas in float64."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.ranks import Rank, on_ranks, on_two_ranks, run_check, same_error
from torch_streamkl import LinearKL, attention_kl, linear_kl, nitrobrew, row_program
from torch_streamkl.distributed import (
    attention_kl_context_parallel,
    reshard_vocab,
    shard_sequence,
    trace_fully_shard,
)

BATCH, HEADS, HEAD_DIM = 2, 6, 4
TOKENS, VOCAB, WIDTH = 6, 10, 4
NAMES = ("student_q", "student_k", "teacher_q", "teacher_k")


def _maps(rows: int) -> dict[str, Tensor]:
    return {name: torch.randn(BATCH, HEADS, rows, HEAD_DIM) for name in NAMES}


def _attention_rows(
    x: dict[str, Tensor], scales: tuple[Tensor, Tensor], sink: Tensor | None, causal: bool
) -> Tensor:
    """KL(P || S) of each row, by the definition; the sink is the student's."""
    d = {name: t.double() for name, t in x.items()}
    s = (d["student_q"] * scales[0]) @ d["student_k"].mT
    t = (d["teacher_q"] * scales[1]) @ d["teacher_k"].mT
    hidden = torch.ones(s.shape[-2:]).triu(1).bool() & causal
    log_p = t.masked_fill(hidden, -torch.inf).log_softmax(-1)
    s = s.masked_fill(hidden, -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink[None, :, None, None].expand(*s.shape[:-1], 1)], -1)
    log_s = s.log_softmax(-1)[..., : t.shape[-1]]
    return torch.where(hidden, 0.0, log_p.exp() * (log_p - log_s).masked_fill(hidden, 0)).sum(-1)


def _close(got: Tensor, expected: Tensor, what: str) -> None:
    whole = got.full_tensor() if isinstance(got, DTensor) else got
    torch.testing.assert_close(
        whole.double(), expected, rtol=2e-5, atol=2e-5, msg=lambda text: f"{what}: {text}"
    )


# ------------------------------------------------------------------------------ sequences
@on_ranks
def learned_scales_of_shared_sequences(me: Rank) -> None:
    """What ranks share gets the gradient of all of them, what is of their rows their own."""
    rows = 4 * me.size
    for shape in ((), (1,), (HEADS, 1, 1), (BATCH, 1, 1, 1), (rows, 1), (1, HEADS, rows, 1)):
        x, weight = _maps(rows), torch.rand(BATCH, HEADS, rows)
        given = [torch.rand(shape) + 0.5 for _ in range(2)]
        truth = [s.double().requires_grad_() for s in given]
        value = _attention_rows(x, (truth[0], truth[1]), None, causal=True)
        (value * weight).sum().backward()
        is_own = rows in shape
        for method in ("gather", "heads", "ring"):
            ours = [(shard_sequence(s, me.group, dim=-2) if is_own else s.clone()) for s in given]
            mine = attention_kl_context_parallel(
                **{name: shard_sequence(t, me.group) for name, t in x.items()},
                student_scale=ours[0].requires_grad_(), teacher_scale=ours[1].requires_grad_(),
                is_causal=True, mesh=me.group, method=method,
            )  # fmt: skip
            (mine * shard_sequence(weight, me.group)).sum().backward()
            _close(mine.detach(), shard_sequence(value.detach(), me.group), f"{method} {shape}")
            for got, wanted in zip(ours, truth, strict=True):
                assert wanted.grad is not None and got.grad is not None
                grad = shard_sequence(wanted.grad, me.group, dim=-2) if is_own else wanted.grad
                _close(got.grad, grad, f"gradient, {method} {shape}")


@on_ranks
def options_of_shared_sequences_that_do_not_fit(me: Rank) -> None:
    x = {name: t[:1] for name, t in _maps(4).items()}

    def call(**options: Any) -> Any:
        return lambda: attention_kl_context_parallel(**x, **options, mesh=me.group)

    mask = torch.ones(3, 1, 4, dtype=torch.bool)
    same_error(me, call(row_mask=mask), "row_mask must broadcast to (1, 6, 4)", "(3, 1, 4)")
    same_error(me, call(row_mask=torch.ones(4)), "row_mask must be boolean")
    same_error(me, call(max_seqlen=4), "max_seqlen", "needs cu_seqlens, got 4")
    for shape in ((3, 1, 1, 1), (5, 1), (1, 1, 1, 1, 1)):
        same_error(me, call(student_scale=torch.ones(shape)), "student_scale must broadcast")
    same_error(me, call(teacher_sink=torch.ones(5)), "teacher_sink must have shape (6,)")


@on_ranks
def shared_sequences_without_rows(me: Rank) -> None:
    for shape in ((BATCH, HEADS, 0, HEAD_DIM), (0, HEADS, 4, HEAD_DIM)):
        for method in ("gather", "heads", "ring"):
            x = {name: torch.randn(shape).requires_grad_() for name in NAMES}
            scale = torch.tensor(0.5, requires_grad=True)
            value = attention_kl_context_parallel(
                **x, student_scale=scale, reduction="sum", mesh=me.group, method=method
            )
            value.backward()
            assert value == 0 and scale.grad == 0, method


# ------------------------------------------------------------------------------ maps on a mesh
@on_ranks
def learned_options_beside_maps_on_a_mesh(me: Rank) -> None:
    rows, scale = 4 * me.size, torch.tensor(0.7, dtype=torch.float64)
    for shape in ((), (HEADS, 1, 1), (rows, 1)):
        x = _maps(rows)
        given = torch.rand(shape) + 0.5, torch.randn(HEADS)
        mask = torch.rand(BATCH, 1, rows) < 0.7
        truth = [t.double().requires_grad_() for t in given]
        value = _attention_rows(x, (truth[0], scale), truth[1], causal=False)
        value = torch.where(mask, value, 0.0).sum()
        value.backward()
        for dim in (0, 1, 2):
            # of the one head that the mask has, the first rank has it; and plain tensors
            for is_plain in (False, True):
                placed: list[Any] = [t.clone() for t in (*given, mask)]
                if not is_plain:
                    places = (Replicate(), Replicate(), Shard(1))
                    placed = [
                        distribute_tensor(t, me.mesh, [p])
                        for t, p in zip(placed, places, strict=True)
                    ]
                ours = attention_kl(
                    **{n: distribute_tensor(t, me.mesh, [Shard(dim)]) for n, t in x.items()},
                    student_scale=placed[0].requires_grad_(), teacher_scale=0.7,
                    student_sink=placed[1].requires_grad_(), row_mask=placed[2], reduction="sum",
                )  # fmt: skip
                ours.backward()
                what = f"{shape} Shard({dim}) plain {is_plain}"
                _close(ours.detach(), value.detach(), what)
                for got, wanted in zip(placed, truth, strict=False):
                    _close(got.grad, wanted.grad, f"gradient, {what}")


# ------------------------------------------------------------------------------ LM heads
def _heads(*tokens: int) -> dict[str, Tensor]:
    return {
        f"{side}_{name}": torch.randn(*shape, WIDTH)
        for side in ("student", "teacher")
        for name, shape in (("hidden", tokens), ("weight", (VOCAB,)))
    }


def _linear_rows(x: dict[str, Tensor]) -> Tensor:
    log_s, log_p = (
        (x[f"{side}_hidden"].double() @ x[f"{side}_weight"].double().mT).log_softmax(-1)
        for side in ("student", "teacher")
    )
    return (log_p.exp() * (log_p - log_s)).sum(-1)


def _placed(me: Rank, x: dict[str, Tensor], hidden: Any, weight: Any) -> dict[str, DTensor]:
    places = {"hidden": hidden, "weight": weight}
    return {
        name: distribute_tensor(t, me.mesh, [places[name.partition("_")[2]]]).requires_grad_()
        for name, t in x.items()
    }


FORMS = [
    (Shard(0), Replicate()), (Shard(1), Replicate()), (Replicate(), Shard(0)),
    (Shard(0), Shard(0)),
]  # fmt: skip


@on_ranks
def weights_and_masks_of_tokens_on_a_mesh(me: Rank) -> None:
    """Those that broadcast, sharded along sizes of 1 and others: values and gradients."""
    x = _heads(TOKENS, 2)
    for shape, place in (
        ((TOKENS, 1), Shard(1)), ((1, 2), Shard(0)), ((1,), Shard(0)), ((TOKENS, 2), Shard(0)),
        ((2,), Replicate()), ((), Replicate()),
    ):  # fmt: skip
        weight, mask = torch.rand(shape), torch.rand(shape) < 0.6
        truth, counted = weight.double().requires_grad_(), mask.expand(TOKENS, 2)
        value = (_linear_rows(x) * truth).mean()
        value.backward()
        for (hidden, vocab), is_plain in itertools.product(FORMS, (False, True)):
            what = f"{shape} {place} {hidden} {vocab} plain {is_plain}"
            given: list[Any] = [weight.clone(), mask]
            if not is_plain:
                given = [distribute_tensor(t, me.mesh, [place]) for t in given]
            ours = linear_kl(
                **_placed(me, x, hidden, vocab), row_weight=given[0].requires_grad_(),
                reduction="mean", strategy="recompute",
            )  # fmt: skip
            ours.full_tensor().backward()
            _close(ours.detach(), value.detach(), what)
            _close(given[0].grad, truth.grad, f"gradient, {what}")
            if not is_plain and len(shape) == 2:
                placed = _placed(me, x, hidden, vocab)
                ours = linear_kl(**placed, row_mask=given[1], reduction="mean")
                expected = _linear_rows(x)[counted].sum() / counted.sum()
                _close(ours.detach(), expected, f"mask, {what}")


@on_ranks
def means_beside_weights_of_16_bits(me: Rank) -> None:
    """Tokens are counted exactly, whatever the dtype of their weights holds."""
    num_tokens = 1027  # no bfloat16
    for dtype, weight_dtype, limit in (
        (torch.float32, torch.bfloat16, 1e-6),
        (torch.float32, torch.float16, 1e-6),
        (torch.float64, None, 1e-14),
        (torch.float64, torch.bfloat16, 1e-14),
    ):
        x = {name: t.to(dtype) for name, t in _heads(num_tokens).items()}
        weight = None if weight_dtype is None else torch.ones(num_tokens, dtype=weight_dtype)
        rows = _linear_rows(x)
        for reduction in ("mean", "batchmean"):
            placed = _placed(me, x, Shard(0), Replicate())
            ours = linear_kl(**placed, row_weight=weight, reduction=reduction).full_tensor()
            assert abs(ours.item() / rows.mean().item() - 1) < limit, (dtype, weight_dtype)


@on_ranks
def calls_without_tokens(me: Rank) -> None:
    """On all ranks, and on all but the first: no rank waits, sums are 0 with gradient 0."""
    labels = torch.zeros(0, dtype=torch.int64)
    for hidden, vocab in (*FORMS[::2], FORMS[3], (None, None)):
        for given in (None, labels):
            for reduction in ("none", "sum", "mean", "batchmean"):
                x = _heads(0)
                if vocab is None:
                    placed: Any = {name: t.requires_grad_() for name, t in x.items()}
                    value = linear_kl(**placed, labels=given, reduction=reduction, group=me.group)
                else:
                    placed = _placed(me, x, hidden, vocab)
                    value = linear_kl(**placed, labels=given, reduction=reduction).full_tensor()
                value.sum().backward()
                assert all(not t.grad.any() for t in placed.values())
                if reduction == "none":
                    assert value.shape == (0,)
                else:
                    assert value.isnan() if "mean" in reduction else value == 0
    x = _heads(3, 0)  # a batch without tokens: torch divides 0 by 3
    for hidden, vocab in FORMS:
        value = linear_kl(**_placed(me, x, hidden, vocab), reduction="batchmean")
        assert value.full_tensor() == 0
    assert linear_kl(**x, reduction="batchmean", group=me.group) == 0
    x = _heads(1)
    placed = _placed(me, x, Shard(0), Replicate())
    value = linear_kl(**placed, reduction="sum")
    value.full_tensor().backward()
    _close(value.detach(), _linear_rows(x).sum(), "one token")
    assert all(t.grad.full_tensor().any() for t in placed.values())


@on_ranks
def means_of_tokens_that_count(me: Rank) -> None:
    """Labels and a mask together, of which a rank may count none, and all of them none."""
    x = _heads(TOKENS, 2)
    logits = x["student_hidden"].double() @ x["student_weight"].double().mT
    labels = torch.randint(0, VOCAB, (TOKENS, 2))
    labels[: TOKENS // 2] = -100  # the first rank's tokens, where ranks share them
    mask = torch.rand(TOKENS, 2) < 0.7
    rows = _linear_rows(x) + F.cross_entropy(
        logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none"
    ).view(TOKENS, 2)
    for number, (hidden, vocab) in itertools.product((0, 1), FORMS):
        counted = mask & (labels != -100) & bool(number)
        total = torch.where(counted, rows, 0).sum()
        for reduction, expected in (
            ("mean", total / counted.sum().clamp(min=1)), ("batchmean", total / TOKENS),
        ):  # fmt: skip
            for options in (
                {"labels": torch.where(counted, labels, -100), "row_mask": mask},
                {"labels": labels, "row_mask": mask & bool(number)},
            ):
                placed: dict[str, Any] = _placed(me, x, hidden, vocab)
                placed["row_weight"] = torch.ones(TOKENS, 1, requires_grad=True)
                ours = linear_kl(**placed, **options, reduction=reduction)
                ours.backward()
                _close(ours.detach(), expected, f"{reduction} {hidden} {vocab} {number}")
                for name, t in placed.items():
                    grad = t.grad.full_tensor() if isinstance(t, DTensor) else t.grad
                    assert grad.isfinite().all() and grad.any() == bool(number), name


@on_ranks
def tokens_that_two_mesh_dimensions_share(me: Rank) -> None:
    """Gradients of weights are summed over both."""
    x = _heads(4, 6)
    for shape in ((1, me.size), (me.size, 1)):
        mesh = init_device_mesh(me.device.type, shape)
        for tokens in ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)]):
            truth = {name: t.double().requires_grad_() for name, t in x.items()}
            expected = _linear_rows(truth).mean()
            expected.backward()
            ours = {
                name: distribute_tensor(
                    t.clone(), mesh, tokens if "hidden" in name else [Replicate()] * 2
                ).requires_grad_()
                for name, t in x.items()
            }
            value = linear_kl(**ours, reduction="mean")
            value.backward()
            _close(value.detach(), expected.detach(), f"{shape} {tokens}")
            for name, t in truth.items():
                _close(ours[name].grad, t.grad, f"gradient of {name}, {shape} {tokens}")


# ------------------------------------------------------------------------------ refusals
@on_ranks
def what_one_rank_alone_refuses(me: Rank) -> None:
    """Functions around `linear_kl` check arguments of their own: no rank waits for that one."""
    for group, hidden, vocab in ((me.group, None, None), (None, Shard(0), Replicate())):
        x = _heads(TOKENS) if hidden is None else _placed(me, _heads(TOKENS), hidden, vocab)
        module = LinearKL(group=group)
        for wrong in ({"label": x}, {"temperature": 2.0}):
            given = {**x, **wrong} if me.rank else x
            same_error(me, functools.partial(module, **given), *wrong)
    order = ("student_hidden", "teacher_hidden", "student_weight", "teacher_weight")
    heads = [x[name] for name in order]
    last = heads[3] if me.rank == 0 else heads[3][:, 0]
    name = "temprature" if me.rank else "temperature"  # on one rank only
    for function, given, options, texts in (
        (nitrobrew.forward_kl, heads, {"chunk_V": 2048 if me.rank == 0 else 0},
         ("chunk_V must be at least",)),
        (nitrobrew.reverse_kl, [*heads[:3], last], {}, ("wt must be",)),
        (nitrobrew.forward_kl, heads, {name: 2.0}, ("no argument 'temprature'", "temperature")),
        (nitrobrew.reverse_kl, heads[: 4 - me.rank], {}, ("missing a required argument: 'wt'",)),
    ):  # fmt: skip
        same_error(me, functools.partial(function, *given, **options), *texts)


@on_ranks
def arguments_that_do_not_fit(me: Rank) -> None:
    x = _maps(4)
    placed = {name: distribute_tensor(t, me.mesh, [Shard(0)]) for name, t in x.items()}
    same_error(me, lambda: attention_kl(**placed, impl="reference"), "impl='reference'", "DTensor")
    dots = {"t": (x["student_q"], x["student_k"])}

    def program(**given: Any) -> Any:
        return functools.partial(row_program, lambda e: e.t.sum("key"), **given)

    def moved(ranges: Any) -> Any:
        return functools.partial(reshard_vocab, torch.ones(4, 2), ranges, group=me.group)

    def cut(x: Any, **options: Any) -> Any:
        return functools.partial(shard_sequence, x, me.mesh, **options)

    lengths = DTensor.from_local(torch.ones(2), me.mesh, [Replicate()])
    for call, *texts in (
        (program(dots={"t": (placed["student_q"], placed["student_k"])}), "DTensor"),
        (program(dots=dots, rows={"t2": placed["student_q"][..., 0]}), "DTensor"),
        (program(dots=dots, key_lengths=lengths), "DTensor"),
        *((moved(x), "ranges") for x in (["ab", "cd"], [1, 2], [(0, 1, 2)] * 2, 5,
                                         [(0, 3.5), (3.5, 8)], [(False, 8)])),
        (cut([1, 2]), "x must be a tensor", "list"),
        *((cut(torch.ones(2, 2, 8), dim=x), "dim must be", repr(x)) for x in (3, -4, "a")),
        (lambda: trace_fully_shard(None), "model must be a module", "NoneType"),
    ):  # fmt: skip
        same_error(me, call, *texts)

    def loss(q: Tensor) -> Tensor:
        others = [x[name] for name in NAMES[1:]]
        return attention_kl_context_parallel(q, *others, mesh=me.mesh, reduction="sum")

    q = x["student_q"]
    same_error(me, lambda: torch.vmap(loss)(q[None]), "torch.func")
    same_error(me, lambda: torch.func.grad(loss)(q), "torch.func")


ON_THREE = ["learned_scales_of_shared_sequences", "weights_and_masks_of_tokens_on_a_mesh"]


test_on_two_ranks = on_two_ranks(__name__)


@pytest.mark.parametrize("name", ON_THREE)
def test_on_three_ranks(name: str) -> None:
    run_check(__name__, name, 3)
