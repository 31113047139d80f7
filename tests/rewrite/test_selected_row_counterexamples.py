"""What a reader found around selected rows: each program stands for its class."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import Outcome, compare
from tests.support.covering import every
from tests.support.losses import kd
from tests.support.losses import rows_of_kl as rows
from torch_streamkl.attention.problem import AttentionProblem
from torch_streamkl.fx_passes.capture.settings import CAPTURE
from torch_streamkl.fx_passes.reporting import execution

WITHOUT_CHECK = {"streamkl.verify": "never"}
VOCAB = 12
Program = Callable[..., Tensor]


def inputs() -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    return {
        "x": draw(2, 6, 5).requires_grad_(),
        "w": draw(VOCAB, 5).requires_grad_(),
        "xt": draw(2, 6, 4),
        "wt": draw(VOCAB, 4),
        "keep": torch.tensor([[True, False, True, True, False, True]] * 2),
        "none": torch.zeros(2, 6, dtype=torch.bool),
        "b": torch.tensor([0, 1, 1, 0, 1]),
        "p": torch.tensor([3, 0, 5, 3, 4]),
        "each": torch.tensor([[1, 2, 2], [0, 5, 3]]),
        "labels": torch.tensor([3, 0, 7, 11, 2]),
    }


def judge(program: Program, sites: int | None, dynamic: bool | None = None) -> Outcome:
    """The program of two LM heads' logits, and of more inputs by their names."""
    given = inputs()
    names = list(inspect.signature(program).parameters)[2:]

    def step(x: Tensor, w: Tensor, xt: Tensor, wt: Tensor, *rest: Tensor) -> Tensor:
        return program(F.linear(x, w), F.linear(xt, wt), *rest)

    leaves = [given[n] for n in ("x", "w", "xt", "wt", *names)]
    with torch._dynamo.config.patch(CAPTURE):
        outcome = compare(
            step, leaves, inner="aot_eager", dynamic=dynamic, options=WITHOUT_CHECK
        ).check()
    assert sites is None or outcome.num_fused == sites, str(outcome.report)
    return outcome


# ------------------------------------------------- the same positions, of rows in other groups
def groups(x: Tensor, first: int, second: int) -> Tensor:
    return x.view(first, second, VOCAB)


GROUPS: dict[str, Program] = {
    "hard labels": lambda s, t, b, p, labels: (
        kd(groups(s, 4, 3)[b, p % 3], groups(t, 4, 3)[b, p % 3])
        + F.cross_entropy(groups(s, 2, 6)[b, p % 3], labels)
    ),
    "the student next to itself": lambda s, t, b, p: rows(
        groups(s, 4, 3)[b, p % 3], groups(s, 2, 6)[b, p % 3]
    ).mean(),
    "the teacher's in other groups": lambda s, t, b, p: kd(
        groups(s, 4, 3)[b, p % 3], groups(t, 2, 6)[b, p % 3]
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", GROUPS)
def test_positions_in_rows_of_other_groups(name: str, dynamic: bool) -> None:
    judge(GROUPS[name], None if dynamic else 1, dynamic)


# ------------------------------------------------ what positions were copied from is written
def written_by_add(index: Tensor) -> None:
    index.add_(1).remainder_(6)


def written_by_copy(index: Tensor) -> None:
    index.copy_((index + 1) % 6)


def written_by_a_view(index: Tensor) -> None:
    index[:, 0] = 0


@pytest.mark.parametrize("is_input", [False, True])
@pytest.mark.parametrize("write", [written_by_add, written_by_copy, written_by_a_view])
def test_positions_that_were_repeated_before_a_write(
    write: Callable[[Tensor], None], is_input: bool
) -> None:
    def gathered(x: Tensor, each: Tensor) -> Tensor:
        return x.gather(1, each.unsqueeze(-1).repeat(1, 1, VOCAB))

    def program(s: Tensor, t: Tensor, each: Tensor) -> Tensor:
        each = each if is_input else each.clone()
        student = gathered(s, each)
        write(each)
        return kd(student, gathered(t, each))

    judge(program, 0 if is_input else None)  # a copy is read where it was made


# ------------------------------------------------------------ casts of what masked_select gives
CASTS: dict[str, tuple[Program, int]] = {
    "rounded": (lambda e: e.half().float().view(-1, VOCAB), 0),
    "rounded, then rows": (lambda e: e.bfloat16().view(-1, VOCAB).float(), 0),
    "whole numbers": (lambda e: e.long().view(-1, VOCAB).float(), 0),
    "truths": (lambda e: e.bool().float().view(-1, VOCAB), 0),
    "as another tensor": (lambda e: e.type_as(e.half()).view(-1, VOCAB).float(), 0),
    "wider": (lambda e: e.double().view(-1, VOCAB).float(), 1),
    "copied": (lambda e: e.clone().contiguous().view(-1, VOCAB), 1),
}


@pytest.mark.parametrize("name", every(2, CASTS))
def test_casts_of_selected_entries(name: str) -> None:
    cast, sites = CASTS[name]
    judge(
        lambda s, t, keep: kd(
            s.masked_select(keep[..., None]).view(-1, VOCAB),
            cast(t.masked_select(keep[..., None])),
        ),
        sites,
    )


# ------------------------------------------------------------------ writes that return nothing
def doubled(x: Tensor) -> Tensor:
    x = x * 1.0
    torch._foreach_mul_([x], 2.0)
    return x


FOREACH: dict[str, Program] = {
    "logits": lambda s, t: kd(doubled(s), t),
    "both": lambda s, t: kd(doubled(s), doubled(t)),
    "probabilities": lambda s, t: F.kl_div(
        s.log_softmax(-1), doubled(t.softmax(-1)), reduction="sum"
    ),
    "selected logits": lambda s, t, keep: kd(s[keep], doubled(t[keep])),
}


@pytest.mark.parametrize("name", every(2, FOREACH))
def test_lists_of_tensors_that_are_written(name: str) -> None:
    judge(FOREACH[name], 0)


# ------------------------------------------------------------------------------------------ no row
NO_ROW: dict[str, Program] = {
    "batchmean": lambda s, t, none: kd(s[none], t[none]),
    "mean": lambda s, t, none: rows(s[none], t[none]).mean(),
    "by their number": lambda s, t, none: rows(s[none], t[none]).sum() / none.sum(),
    "masked_select": lambda s, t, none: kd(
        *(x.masked_select(none[..., None]).view(-1, VOCAB) for x in (s, t))
    ),
    "positions": lambda s, t, none: kd(s[torch.where(none)], t[torch.where(none)]),
    "asked for NaN": lambda s, t, none: rows(s[none], t[none]).mean().nan_to_num(7.0),
    "sum": lambda s, t, none: rows(s[none], t[none]).sum(),
}


@pytest.mark.parametrize("name", every(2, NO_ROW))
def test_mean_of_no_row(name: str) -> None:
    """Its value is eager's NaN, and the head has a gradient of 0 as in eager: a step goes on."""
    outcome = judge(NO_ROW[name], 1)
    for eager, compiled in zip(outcome.eager.tensors(), outcome.compiled.tensors(), strict=True):
        assert eager is not None
        assert compiled is not None
        assert torch.equal(eager.isnan(), compiled.isnan())


# ----------------------------------------------------------------- strides of positions in memory
TRANSPOSED: dict[str, Program] = {
    "one dimension": lambda s, t, each: rows(s[:, each.T], t[:, each.T]),
    "two dimensions": lambda s, t, each: rows(s[each.T % 2, each.T], t[each.T % 2, each.T]),
    "of one side": lambda s, t, each: rows(s[:, each].transpose(1, 2), t[:, each.T]),
    "that lie between others": lambda s, t, p: rows(
        *(x[torch.arange(2), p.expand(2, -1).T] for x in (s, t))
    ),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_positions_that_are_transposed(name: str) -> None:
    """What torch says of the strides of ``x[:, i.T]`` is not what it makes: a view of it fails."""
    judge(TRANSPOSED[name], 1)


# ------------------------------------------------------------------- sizes that only data decides
def some_words(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    """Masked vocabulary entries: the operator for attention has them, which chooses its kernels by
    size.
    """
    others = torch.arange(VOCAB) % 3 == 0
    return rows(s[keep].masked_fill(others, -1e9), t[keep].masked_fill(others, -1e9)).sum()


@pytest.mark.parametrize("dynamic", every(2, [False, True]))
def test_kernels_that_are_chosen_by_size(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    judge(some_words, 1, dynamic)
    chosen: list[object] = []

    def by_size(problem: AttentionProblem, impl: str) -> str:
        chosen.append(impl)
        return "triton" if problem.seqlen_q > 2**20 else "torch"

    monkeypatch.setattr(execution, "select_implementation", by_size)
    runs = judge(some_words, 1, dynamic).report.sites[0].runs
    assert chosen
    assert runs == execution.BY_SIZE or not dynamic
