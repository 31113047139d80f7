"""Rows that are selected in any form, with LM heads: what fuses, and what stays and why."""

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
from torch_streamkl.fx_passes.capture.settings import CAPTURE

BATCH, TOKENS, VOCAB = 2, 7, 50


def inputs(seed: int = 0) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    return {
        "x": draw(BATCH, TOKENS, 12).requires_grad_(),
        "w": draw(VOCAB, 12).requires_grad_(),
        "xt": draw(BATCH, TOKENS, 20),
        "wt": draw(VOCAB, 20),
        "keep": torch.rand(BATCH, TOKENS, generator=make) < 0.6,
        "b": torch.tensor([0, 1, 1, 0, 1]),
        "p": torch.tensor([3, 0, -1, 3, 5]),
        "flat": torch.tensor([13, 0, 4, 4, 7, -2]),
        "each": torch.tensor([[1, 2, 2], [0, 6, 3]]),
    }


def run(program: Callable[..., Tensor], dynamic: bool | None = None) -> Outcome:
    torch._dynamo.reset()
    given = inputs()
    names = list(inspect.signature(program).parameters)

    def step(x: Tensor, w: Tensor, xt: Tensor, wt: Tensor, *rest: Tensor) -> Tensor:
        return program(F.linear(x, w), F.linear(xt, wt), *rest)

    leaves = [given[n] for n in ("x", "w", "xt", "wt", *names[2:])]
    options = {"streamkl.verify": "never"}
    with torch._dynamo.config.patch(CAPTURE):
        return compare(step, leaves, dynamic=dynamic, options=options)


def jsd(a: Tensor, b: Tensor) -> Tensor:
    """torch.logsumexp of a stack breaks the graph where data decide how many rows there are."""
    mix = torch.logaddexp(a, b) - torch.tensor(2.0).log()
    first, second = (F.kl_div(mix, x, reduction="none", log_target=True) for x in (a, b))
    return 0.5 * (first + second).sum(-1).mean()


def entries(x: Tensor, keep: Tensor) -> Tensor:
    """HF's DistilBERT distiller."""
    return torch.masked_select(x, keep.unsqueeze(-1).expand_as(x)).view(-1, x.size(-1))


def flattened(x: Tensor) -> Tensor:
    return x.view(-1, x.size(-1))


def expanded(index: Tensor, x: Tensor) -> Tensor:
    return index.unsqueeze(-1).expand(-1, -1, x.size(-1))


def of_flat_rows(
    s: Tensor, t: Tensor, keep: Tensor, select: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    index = keep.view(-1).nonzero().squeeze(1)
    return kd(select(flattened(s), index), select(flattened(t), index))


def elementwise(s: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none")


def hard_and_soft(s: Tensor, t: Tensor, b: Tensor, p: Tensor) -> Tensor:
    s, t = s[b, p], t[b, p]
    return kd(s / 2, t / 2) * 4 + F.cross_entropy(s, torch.tensor([1, 2, -100, 4, 5]))


def one_loss_a_sample(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    found = [keep[i].nonzero().squeeze(-1) for i in range(BATCH)]
    return torch.stack([kd(s[i, at], t[i, at]) for i, at in enumerate(found)]).mean()


FUSED: dict[str, Callable[..., Tensor]] = {
    "masked_select": lambda s, t, keep: kd(entries(s, keep), entries(t, keep)),
    "masked_select, mask not expanded": lambda s, t, keep: kd(
        *(x.masked_select(keep[..., None]).view(-1, x.size(-1)) for x in (s, t))
    ),
    "masked_select of some tokens of all samples": lambda s, t, keep: kd(
        *(x.masked_select(keep[0][:, None]).view(-1, x.size(-1)) for x in (s, t))
    ),
    "masked_select and logits[mask]": lambda s, t, keep: kd(entries(s, keep), t[keep]),
    "masked_select of probabilities": lambda s, t, keep: F.kl_div(
        entries(s.log_softmax(-1), keep), entries(t.softmax(-1), keep), reduction="batchmean"
    ),
    "masked_select of a divergence": lambda s, t, keep: (
        entries(elementwise(s, t), keep).sum(-1).mean()
    ),
    "sum of a masked_select of a divergence": lambda s, t, keep: (
        torch.masked_select(elementwise(s, t), keep[..., None]).sum() / keep.sum()
    ),
    "JSD of masked_select": lambda s, t, keep: jsd(
        entries(s, keep).log_softmax(-1), entries(t, keep).log_softmax(-1)
    ),
    "logits[mask over entries]": lambda s, t, keep: kd(
        *(x[keep[..., None].expand_as(x)].view(-1, x.size(-1)) for x in (s, t))
    ),
    "where": lambda s, t, keep: rows(s[torch.where(keep)], t[torch.where(keep)]).mean(),
    "nonzero": lambda s, t, keep: kd(*(s_or_t[keep.nonzero(as_tuple=True)] for s_or_t in (s, t))),
    "nonzero of flat rows": lambda s, t, keep: of_flat_rows(s, t, keep, Tensor.__getitem__),
    "index_select": lambda s, t, keep: of_flat_rows(s, t, keep, lambda x, i: x.index_select(0, i)),
    "last token": lambda s, t, keep: kd(
        *(x[torch.arange(BATCH), keep.sum(1) - 1] for x in (s, t))
    ),
    "samples": lambda s, t, b: kd(s[b], t[b]),
    "positions": lambda s, t, b, p: kd(s[b, p], t[b, p]),
    "positions of every sample": lambda s, t, p: kd(s[:, p], t[:, p]),
    "positions, a matrix": lambda s, t, each: rows(s[:, each], t[:, each]).mean(),
    "transposed positions for the teacher": lambda s, t, each: rows(
        s[:, each[:, :2]], t[:, each[:, :2].T]
    ).mean(),
    "positions that broadcast": lambda s, t, each: kd(
        *(x[torch.arange(BATCH)[:, None], each] for x in (s, t))
    ),
    "positions of flat rows": lambda s, t, flat: kd(flattened(s)[flat], flattened(t)[flat]),
    "int32 positions": lambda s, t, p: kd(s[:, p.int()], t[:, p.int()]),
    "one sample, positions": lambda s, t, p: kd(s[1, p], t[1, p]),
    "other positions for the teacher": lambda s, t, b, p: kd(s[b, p], t[b, p - 1]),
    "before and after the softmax": lambda s, t, b, p: F.kl_div(
        s.log_softmax(-1)[b, p], t[b, p].softmax(-1), reduction="batchmean"
    ),
    "gather": lambda s, t, each: kd(
        s.gather(1, expanded(each, s)), t.gather(1, expanded(each, t))
    ),
    "gather, repeated": lambda s, t, each: kd(
        *(x.gather(1, each[..., None].repeat(1, 1, VOCAB)) for x in (s, t))
    ),
    "take_along_dim": lambda s, t, each: kd(
        *(torch.take_along_dim(x, each[..., None], 1) for x in (s, t))
    ),
    "one after the other": lambda s, t, keep, flat: kd(
        *(x[keep][torch.tensor([1, 0, 0])] for x in (s, t))
    ),
    "rows of a slice": lambda s, t, keep: kd(s[:, :-1][keep[:, 1:]], t[:, :-1][keep[:, 1:]]),
    "rows that the teacher is sure of": lambda s, t: kd(
        *(x[t.softmax(-1).amax(-1) > 0.2] for x in (s, t))
    ),
    "with hard labels": hard_and_soft,
    "put back": lambda s, t, b, p: (
        torch.zeros(BATCH, TOKENS, dtype=s.dtype).index_put((b, p), rows(s[b, p], t[b, p])).sum()
    ),
    "a loss a sample": one_loss_a_sample,
    "positions and vocabulary entries": (lambda s, t, b, p: rows(s[b, :, p], t[b, :, p]).sum()),
    "fewer samples than the logits have": (
        lambda s, t, each: kd(
            *(x.gather(1, each[:1, :, None].expand(1, 3, VOCAB)) for x in (s, t))
        )
    ),
    "transposed, then positions": (
        lambda s, t, b, p: kd(s.transpose(0, 1)[p, b], t.transpose(0, 1)[p, b])
    ),
    "a row's temperature, then a mask": (
        lambda s, t, keep: kd(*((x / (1 + keep.float()[..., None]))[keep] for x in (s, t)))
    ),
}
STAYS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "other masks": (
        lambda s, t, keep: rows(s[keep][:2], t[~keep][:2]).sum(),
        # the last with torch 2.11
        "unknown size|equal|sizes are read from tensors|kl_div is applied to",
    ),
    "entries of some vocabulary entries": (
        lambda s, t: kd(
            *(x.masked_select(torch.arange(VOCAB) % 2 == 0).view(-1, VOCAB // 2) for x in (s, t))
        ),
        "single entries|reshape that mixes|broadcast|is applied to",
    ),
    "entries in rows of two": (
        lambda s, t: kd(
            *(
                x.masked_select((torch.arange(TOKENS) < 4)[:, None]).view(-1, 2 * VOCAB)
                for x in (s, t)
            )
        ),
        "single entries|reshape that mixes|broadcast|is applied to",
    ),
    "entries of transposed logits": (
        lambda s, t, keep: kd(
            *(x.mT.masked_select(keep[:, None]).view(-1, VOCAB) for x in (s, t))
        ),
        "single entries|reshape that mixes|broadcast|is applied to",
    ),
    "gathered vocabulary entries": (
        lambda s, t, each: F.kl_div(
            s.log_softmax(-1).gather(-1, each[:, None, :2].expand(-1, TOKENS, 2)),
            t.softmax(-1).gather(-1, each[:, None, :2].expand(-1, TOKENS, 2)),
            reduction="sum",
        ),
        "gather",
    ),
    "some vocabulary entries after the softmax": (
        lambda s, t, flat: F.kl_div(
            s.log_softmax(-1)[..., flat], t.softmax(-1)[..., flat], reduction="sum"
        ),
        "keys are selected after the softmax",
    ),
    "a softmax over selected rows": (
        lambda s, t, p: F.kl_div(
            s.log_softmax(1)[:, p], t[:, p].softmax(1), reduction="batchmean"
        ),
        "keys are selected after the softmax",
    ),
}


@pytest.mark.parametrize("name", every(2, FUSED))
def test_fused(name: str) -> None:
    outcome = run(FUSED[name]).check()
    sites = len(outcome.report.sites)
    assert outcome.num_graphs == 1
    assert outcome.num_fused == sites == (BATCH if "a sample" in name else 1), outcome.report


@pytest.mark.parametrize("name", every(8, FUSED))
def test_sizes_that_are_symbols(name: str) -> None:
    """Whatever fuses of them."""
    run(FUSED[name], dynamic=True).check()


@pytest.mark.parametrize(
    "name", ["masked_select", "positions", "positions of flat rows", "gather", "where"]
)
def test_fused_with_symbols(name: str) -> None:
    outcome = run(FUSED[name], dynamic=True).check()
    assert outcome.num_fused == 1, outcome.report


@pytest.mark.parametrize("name", every(2, STAYS))
def test_stays(name: str) -> None:
    program, reason = STAYS[name]
    outcome = run(program).check()
    assert outcome.num_fused == 0, outcome.report
    assert any(part in text for text in outcome.reasons for part in reason.split("|")), (
        outcome.report
    )


def test_a_word_of_each_row() -> None:
    """As a sum over the whole vocabulary in which the others are 0."""

    def program(s: Tensor, t: Tensor, each: Tensor) -> Tensor:
        ids = each[:, :1, None].expand(-1, TOKENS, 1)
        logs, wanted = s.log_softmax(-1).gather(-1, ids), t.softmax(-1).gather(-1, ids)
        return F.kl_div(logs, wanted, reduction="sum")

    outcome = run(program).check()
    assert outcome.kinds == {"row_program"}, outcome.report


# ----------------------------------------------------------------------------------------- writes
def mask_written_first(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    keep.logical_not_()
    return kd(s[keep], t[keep])


def part_of_mask_written_first(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    keep[:, 0] = True
    return kd(s[keep], t[keep])


def negated_mask_written_between(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    first = s.detach()[~keep]
    keep.logical_not_()
    return rows(first[:1], t[~keep][:1]).sum() + s.sum()


def mask_of_entries_written_between(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    mask = keep[..., None].expand_as(s)
    first = s.detach().masked_select(mask).view(-1, VOCAB)
    keep.fill_(True)
    return rows(first[:2], t.masked_select(mask).view(-1, VOCAB)[:2]).sum() + s.sum()


def positions_written_between(s: Tensor, t: Tensor, b: Tensor, p: Tensor) -> Tensor:
    at = p % TOKENS
    target = t[b, at]
    at.add_(1).remainder_(TOKENS)
    return kd(s[b, at], target)


def positions_written_first(s: Tensor, t: Tensor, b: Tensor, p: Tensor) -> Tensor:
    p.add_(1).remainder_(TOKENS)
    return kd(s[b, p], t[b, p])


def mask_made_in_place(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    mask = keep.clone()
    mask &= t[..., 0] > 0
    return kd(s[mask], t[mask])


WRITES = {
    mask_written_first: 0,
    part_of_mask_written_first: 0,
    negated_mask_written_between: 0,
    mask_of_entries_written_between: 0,
    positions_written_between: 1,
    positions_written_first: 0,
    mask_made_in_place: 1,
}


@pytest.mark.parametrize("program", every(2, WRITES), ids=lambda f: f.__name__)
def test_what_selects_rows_is_written(program: Callable[..., Tensor]) -> None:
    outcome = run(program).check()
    assert outcome.num_fused == WRITES[program], outcome.report


# ----------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    "program",
    [
        lambda s, t, b, p: kd(s[b, p + 6], t[b, p + 6]),
        lambda s, t, b, p: kd(s.index_select(1, p), t.index_select(1, p)),
        lambda s, t, each: kd(
            *(x.gather(1, (each - 1)[..., None].expand(-1, -1, VOCAB)) for x in (s, t))
        ),
    ],
    ids=["positions out of range", "negative, index_select", "negative, gather"],
)
def test_positions_that_eager_refuses(program: Callable[..., Tensor]) -> None:
    """The user's own operation is applied to hidden states: it refuses the same."""
    given = inputs()
    names = list(inspect.signature(program).parameters)[2:]

    def step(x: Tensor, w: Tensor, xt: Tensor, wt: Tensor, *rest: Tensor) -> Tensor:
        return program(F.linear(x, w), F.linear(xt, wt), *rest)

    leaves = [given[n] for n in ("x", "w", "xt", "wt", *names)]
    compiled = torch.compile(
        step, backend="streamkl", options={"streamkl.inner": "eager", "streamkl.verify": "never"}
    )
    for call in (step, compiled):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            call(*leaves)


def test_no_row() -> None:
    given = inputs()
    given["keep"] = torch.zeros(BATCH, TOKENS, dtype=torch.bool)

    def step(x: Tensor, w: Tensor, xt: Tensor, wt: Tensor, keep: Tensor) -> Tensor:
        s, t = F.linear(x, w), F.linear(xt, wt)
        return rows(entries(s, keep), entries(t, keep)).sum()

    leaves = [given[n] for n in ("x", "w", "xt", "wt", "keep")]
    with torch._dynamo.config.patch(CAPTURE):
        outcome = compare(step, leaves, options={"streamkl.verify": "never"}).check()
    assert outcome.num_fused == 1, outcome.report
