"""Every argument of every function of several ranks, given otherwise on one rank.

All ranks have to raise the same error, soon: none computes what nobody asked for, none waits. The
arguments are those of the functions' signatures, so what is added to one is tried here, too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.ranks import Rank, on_ranks, on_two_ranks
from torch_streamkl import attention_kl, linear_kl
from torch_streamkl.distributed import attention_kl_context_parallel, reshard_vocab

TOKENS, VOCAB, WIDTH = 6, 12, 4
BATCH, HEADS, ROWS, HEAD_DIM = 1, 6, 12, 4
SECONDS = 10  # on a busy machine; a rank that waits does so for a minute
ODD = 1  # the rank that gives something else
# names the ranks that compare: a rank that gives others meets nobody
EXEMPT = {"group", "mesh"}
# legal values of options that are text, and of tensors that are left out
LEGAL = {
    "divergence": "js", "reduction": "sum", "impl": "torch", "strategy": "recompute",
    "layout": "bnhd", "method": "heads", "head_reduction": "mean", "load_balance": None,
}  # fmt: skip
OF_TOKENS = {
    "labels": torch.zeros(TOKENS, dtype=torch.int64),
    "row_mask": torch.ones(TOKENS, dtype=torch.bool),
    "row_weight": torch.ones(TOKENS),
}
OF_MAPS = {
    "row_mask": torch.ones(BATCH, HEADS, 1, dtype=torch.bool),
    "key_lengths": torch.tensor([5]),
    "cu_seqlens": torch.tensor([0, 4, 12], dtype=torch.int32),
    "attn_mask": torch.ones(1, 1, 1, ROWS, dtype=torch.bool),
    "student_bias": torch.ones(1, 1, 1, ROWS),
    "teacher_bias": torch.ones(1, 1, 1, ROWS),
    **{f"{side}_{name}": torch.ones(HEADS) for side in ("student", "teacher")
       for name in ("alibi_slopes", "sink")},
    "teacher_lse": torch.ones(BATCH, HEADS, ROWS),
    "student_scale": torch.tensor(0.5),
    "teacher_scale": torch.tensor(0.5),
}  # fmt: skip


class Form:
    """A function and legal arguments for it, the same on every rank."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        given: dict[str, Any],
        optional: dict[str, Tensor],
        own: tuple[str, ...] = (),
        options_of: Callable[..., Any] | None = None,
    ) -> None:
        self.function, self.given, self.optional, self.own = function, given, optional, own
        self.signature = dict(inspect.signature(function).parameters)
        if options_of is not None:
            self.signature = {**inspect.signature(options_of).parameters, **self.signature}
        self.signature.pop("options", None)

    def changes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What one rank may give in the place of ``given``, by what is changed."""
        for name, parameter in self.signature.items():
            if name in EXEMPT:
                continue
            value = self.given.get(name, parameter.default)
            for other in self._others(name, value):
                yield f"{name}={_shown(other)}", {**self.given, name: other}
            if isinstance(value, Tensor) or value != parameter.default:
                yield f"without {name}", {k: x for k, x in self.given.items() if k != name}
        yield "an argument that there is not", {**self.given, "temprature": 1.0}

    def _others(self, name: str, value: Any) -> list[Any]:
        if isinstance(value, Tensor):
            return [*_other_tensors(value, is_own=name in self.own), "text", 3]
        others: list[Any] = ["text", [1], object()]
        if name in self.optional:
            others.append(self.optional[name])
        if name in LEGAL and LEGAL[name] != value:
            others.append(LEGAL[name])
        if isinstance(value, bool):
            return [*others, not value]
        if isinstance(value, int | float):
            return [*others, value + 0.5, -1.0, float("nan"), torch.ones(())]
        return [*others, 3, (2, 0), (2, 1), True] if value is None else others


def _other_tensors(x: Tensor, is_own: bool) -> list[Any]:
    others: list[Any] = [None]
    if isinstance(x, DTensor):
        for placement in (Replicate(), Shard(0), Shard(1)):
            if x.placements != (placement,):
                moved = x.detach().redistribute(placements=[placement])
                others.append(moved.requires_grad_(x.requires_grad))
        others.append(x.full_tensor().detach().requires_grad_(x.requires_grad))
        others.append(x.detach().requires_grad_(not x.requires_grad))
        return others
    others += [x[None], x.detach().to(torch.float64 if x.is_floating_point() else torch.int16)]
    others.append(x[..., :-1] if is_own or x.ndim > 1 else x[:-1])
    if x.is_floating_point():
        others.append(x.detach().requires_grad_(not x.requires_grad))
    return others


def _shown(x: Any) -> str:
    if isinstance(x, DTensor):
        return f"DTensor {tuple(x.shape)} {x.placements} {x.requires_grad}"
    return f"{x.dtype} {tuple(x.shape)} {x.requires_grad}" if isinstance(x, Tensor) else repr(x)


def _heads(vocab: int) -> dict[str, Tensor]:
    shapes = {"hidden": (TOKENS, WIDTH), "weight": (vocab, WIDTH)}
    return {
        f"{side}_{name}": torch.randn(shapes[name]).requires_grad_(side == "student")
        for side in ("student", "teacher")
        for name in ("hidden", "weight")
    }


def _maps(rows: int) -> dict[str, Tensor]:
    return {
        f"{side}_{name}": torch.randn(BATCH, HEADS, rows, HEAD_DIM).requires_grad_()
        for side in ("student", "teacher")
        for name in ("q", "k")
    }


def _on_mesh(me: Rank, tensors: dict[str, Tensor], placements: dict[str, Any]) -> dict[str, Any]:
    return {
        name: distribute_tensor(x.detach(), me.mesh, [placements[name.partition("_")[2]]])
        .requires_grad_(x.requires_grad)
        for name, x in tensors.items()
    }  # fmt: skip


def _check(me: Rank, form: Form) -> None:
    """Every change on one rank is the same error on all, and then the ranks still meet."""
    wrong, slow = [], []
    calls: list[tuple[str, Callable[[], Any]]] = [
        (what, functools.partial(form.function, **(given if me.rank == ODD else form.given)))
        for what, given in form.changes()
    ]
    for mode in (torch.no_grad, functools.partial(torch.autocast, "cpu")):
        calls.append((f"in {mode}", functools.partial(_in_mode, mode, me, form)))
    for what, call in calls:
        start = time.monotonic()
        try:
            call()
            error = "nothing was raised"
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        slow.append((time.monotonic() - start, what))
        errors: list[Any] = [None] * me.size
        distributed.all_gather_object(errors, error)
        if len(set(errors)) > 1 or "nothing was raised" in errors:
            wrong.append(f"{what}: {errors}")
    assert not wrong, f"{len(wrong)} of {len(calls)}:\n" + "\n".join(wrong)
    seconds, what = max(slow)
    assert seconds < SECONDS, f"{what} took {seconds:.1f} s"
    print(f"{len(calls)} calls, the slowest took {seconds * 1e3:.0f} ms: {what}", flush=True)
    form.function(**form.given)


def _in_mode(mode: Any, me: Rank, form: Form) -> None:
    with mode() if me.rank == ODD else contextlib.nullcontext():
        form.function(**form.given)


@on_ranks
def linear_kl_of_a_group(me: Rank) -> None:
    own = ("student_weight", "teacher_weight")
    _check(me, Form(linear_kl, {**_heads(VOCAB), "group": me.group}, OF_TOKENS, own))


@on_ranks
def linear_kl_of_shared_words(me: Rank) -> None:
    given = _on_mesh(me, _heads(VOCAB), {"hidden": Replicate(), "weight": Shard(0)})
    _check(me, Form(linear_kl, {**given, "reduction": "mean"}, OF_TOKENS))


@on_ranks
def linear_kl_of_shared_tokens(me: Rank) -> None:
    given = _on_mesh(me, _heads(VOCAB), {"hidden": Shard(0), "weight": Replicate()})
    _check(me, Form(linear_kl, {**given, "reduction": "mean"}, OF_TOKENS))


@on_ranks
def attention_kl_of_dtensors(me: Rank) -> None:
    given = _on_mesh(me, _maps(ROWS), {"q": Shard(2), "k": Shard(2)})
    _check(me, Form(attention_kl, given, OF_MAPS))


@on_ranks
def context_parallel(me: Rank) -> None:
    """Arguments are compared before a method begins."""
    given = {**_maps(ROWS), "mesh": me.group, "method": "ring"}
    _check(me, Form(attention_kl_context_parallel, given, OF_MAPS, options_of=attention_kl))


@on_ranks
def resharded_words(me: Rank) -> None:
    ranges = [(r * VOCAB, (r + 1) * VOCAB) for r in range(me.size)]
    given = {"weight": torch.randn(VOCAB, WIDTH), "ranges": ranges, "group": me.group}
    _check(me, Form(reshard_vocab, given, {}, ("weight",)))


@on_ranks
def words_resharded_like_others(me: Rank) -> None:
    weights = (distribute_tensor(torch.randn(VOCAB, WIDTH), me.mesh, [Shard(0)]) for _ in "ab")
    _check(me, Form(reshard_vocab, dict(zip(("weight", "like"), weights, strict=True)), {}))


test_on_two_ranks = on_two_ranks(__name__)
