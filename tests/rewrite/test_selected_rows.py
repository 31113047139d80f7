"""Rows that are selected in any form, with LM heads: what fuses, and what stays and why."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.losses import elements_of_kl, kd, rows_of_kl
from tests.support.table import Table
from torch_streamkl.fx_passes.capture.settings import CAPTURE
from torch_streamkl.fx_passes.reporting import execution

BATCH, TOKENS, VOCAB = 2, 6, 12
NAMES = "x w xt wt keep none b p flat each labels"


def inputs():
    make = torch.Generator().manual_seed(0)
    shapes = ((BATCH, TOKENS, 5), (VOCAB, 5), (BATCH, TOKENS, 4), (VOCAB, 4))
    operands = [torch.randn(n, generator=make).requires_grad_(i < 2) for i, n in enumerate(shapes)]
    return [
        *operands,
        torch.rand(BATCH, TOKENS, generator=make) < 0.6,
        torch.zeros(BATCH, TOKENS, dtype=torch.bool),
        torch.tensor([0, 1, 1, 0, 1]),
        torch.tensor([3, 0, -1, 3, 4]),
        torch.tensor([11, 0, 4, 4, 7, -2]),
        torch.tensor([[1, 2, 2], [0, 5, 3]]),
        torch.tensor([3, 0, -100, 11, 2]),
    ]


def logits(x, w, xt, wt):
    return F.linear(x, w), F.linear(xt, wt)


def judge(program, sites=None, **options):
    with torch._dynamo.config.patch(CAPTURE):
        outcome = compare(program, inputs(), verify="never", **options)
    assert sites in (None, outcome.check().num_fused), outcome.report
    return outcome


def both(select):
    """The loss of what a function selects of either side's logits."""
    return lambda s, t, *others: kd(select(s, *others), select(t, *others))


# ------------------------------------------------------------------------------- what fuses
FUSED = Table(NAMES, {"s t": logits}, sites=1)


def entries(x, keep):
    """HF's DistilBERT distiller."""
    return torch.masked_select(x, keep.unsqueeze(-1).expand_as(x)).view(-1, x.size(-1))


def flattened(x):
    return x.view(-1, x.size(-1))


def of_flat_rows(s, t, keep, select):
    index = keep.view(-1).nonzero().squeeze(1)
    return kd(select(flattened(s), index), select(flattened(t), index))


def jsd(a, b):
    """torch.logsumexp of a stack breaks the graph where data decide how many rows there are."""
    mix = torch.logaddexp(a, b) - torch.tensor(2.0).log()
    first, second = (F.kl_div(mix, x, reduction="none", log_target=True) for x in (a, b))
    return 0.5 * (first + second).sum(-1).mean()


def selected_by_a_mask(form, s, t, keep):
    return form(s, t, keep)


BY_MASK = {
    "masked_select": both(entries),
    "mask not expanded": both(lambda x, keep: flattened_entries(x, keep[..., None])),
    "mask of all samples": both(lambda x, keep: flattened_entries(x, keep[0][:, None])),
    "masked_select and logits[mask]": lambda s, t, keep: kd(entries(s, keep), t[keep]),
    "masked_select of probabilities": lambda s, t, keep: F.kl_div(
        entries(s.log_softmax(-1), keep), entries(t.softmax(-1), keep), reduction="batchmean"
    ),
    "sum of a masked_select of a divergence": lambda s, t, keep: (
        torch.masked_select(elements_of_kl(s, t), keep[..., None]).sum() / keep.sum()
    ),
    "JSD of masked_select": lambda s, t, keep: jsd(
        entries(s, keep).log_softmax(-1), entries(t, keep).log_softmax(-1)
    ),
    "logits[mask over entries]": both(
        lambda x, keep: x[keep[..., None].expand_as(x)].view(-1, x.size(-1))
    ),
    "where": lambda s, t, keep: rows_of_kl(s[torch.where(keep)], t[torch.where(keep)]).mean(),
    "nonzero of flat rows": lambda s, t, keep: of_flat_rows(s, t, keep, torch.Tensor.__getitem__),
    "index_select": lambda s, t, keep: of_flat_rows(s, t, keep, lambda x, i: x.index_select(0, i)),
    "last token": both(lambda x, keep: x[torch.arange(BATCH), keep.sum(1) - 1]),
    "one after the other": both(lambda x, keep: x[keep][torch.tensor([1, 0, 0])]),
    "rows of a slice": both(lambda x, keep: x[:, :-1][keep[:, 1:]]),
    "a row's temperature": both(lambda x, keep: (x / (1 + keep.float()[..., None]))[keep]),
    "that the teacher is sure of": lambda s, t, keep: kd(
        *(x[t.softmax(-1).amax(-1) > 0.2] for x in (s, t))
    ),
}


def flattened_entries(x, mask):
    return x.masked_select(mask).view(-1, x.size(-1))


FUSED.each(BY_MASK, step=2)(selected_by_a_mask)


def selected_by_positions(form, s, t, b, p, each):
    return form(s, t, b, p, each)


def expanded(index, x):
    return index.unsqueeze(-1).expand(-1, -1, x.size(-1))


BY_POSITION = {
    "of each sample": both(lambda x, b, p, each: x[b, p]),
    "of every sample": both(lambda x, b, p, each: x[:, p]),
    "transposed for the teacher": lambda s, t, b, p, each: rows_of_kl(
        s[:, each[:, :2]], t[:, each[:, :2].T]
    ).mean(),
    "int32": both(lambda x, b, p, each: x[:, p.int()]),
    "of one sample": both(lambda x, b, p, each: x[1, p]),
    "other ones for the teacher": lambda s, t, b, p, each: kd(s[b, p], t[b, p - 1]),
    "before and after the softmax": lambda s, t, b, p, each: F.kl_div(
        s.log_softmax(-1)[b, p], t[b, p].softmax(-1), reduction="batchmean"
    ),
    "gather": both(lambda x, b, p, each: x.gather(1, expanded(each, x))),
    "gather, repeated": both(
        lambda x, b, p, each: x.gather(1, each[..., None].repeat(1, 1, VOCAB))
    ),
    "gather, of fewer samples": both(
        lambda x, b, p, each: x.gather(1, each[:1, :, None].expand(1, 3, VOCAB))
    ),
    "take_along_dim": both(lambda x, b, p, each: torch.take_along_dim(x, each[..., None], 1)),
    "put back": lambda s, t, b, p, each: (
        torch.zeros(BATCH, TOKENS, dtype=s.dtype)
        .index_put((b, p), rows_of_kl(s[b, p], t[b, p]))
        .sum()
    ),
    "and vocabulary entries": lambda s, t, b, p, each: rows_of_kl(s[b, :, p], t[b, :, p]).sum(),
    "transposed": both(lambda x, b, p, each: x.transpose(0, 1)[p, b]),
    "a list": both(lambda x, b, p, each: x[:, [3, 4]]),
    "a list of lists": both(lambda x, b, p, each: x[:, [[5, 0], [-1, 2]]]),
    "a list of samples": both(lambda x, b, p, each: x[[1, 0, 1]]),
    "lists of samples and positions": both(lambda x, b, p, each: x[[1, 0, 1], [0, -2, 3]]),
    "a list of vocabulary entries": both(lambda x, b, p, each: x[..., [7, -1, 7, 2]]),
}
FUSED.each(BY_POSITION, step=2)(selected_by_positions)


@FUSED()
def with_hard_labels(s, t, b, p, labels):
    s, t = s[b, p], t[b, p]
    return kd(s / 2, t / 2) * 4 + F.cross_entropy(s, labels)


@FUSED(sites=BATCH)
def a_loss_of_each_sample(s, t, keep):
    found = [keep[i].nonzero().squeeze(-1) for i in range(BATCH)]
    return torch.stack([kd(s[i, at], t[i, at]) for i, at in enumerate(found)]).mean()


@FUSED.parametrized()
def test_fused(row):
    assert judge(row.program, row.sites).num_graphs == 1


SYMBOLIC = {"masked_select", "where", "of each sample", "gather"}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            r, id=r.name, marks=[] if r.name.split("-")[-1] in SYMBOLIC else pytest.mark.slow
        )
        for r in FUSED.rows
    ],
)
def test_sizes_that_are_symbols(row):
    is_fused = row.name.split("-")[-1] in SYMBOLIC
    judge(row.program, 1 if is_fused else None, dynamic=True)


# ------------------------------------------------------------------------------- what stays
STAYS = Table(NAMES, {"s t": logits}, reason="")
SINGLE = "single entries|reshape that mixes|broadcast|is applied to"


@STAYS(reason="unknown size|equal|sizes are read from tensors|kl_div is applied to")
def other_masks(s, t, keep):  # the last reason with torch 2.11
    return rows_of_kl(s[keep][:2], t[~keep][:2]).sum()


SINGLE_ENTRIES = {
    "of some vocabulary entries": lambda x, keep: x.masked_select(
        torch.arange(VOCAB) % 2 == 0
    ).view(-1, VOCAB // 2),
    "in rows of two": lambda x, keep: x.masked_select((torch.arange(TOKENS) < 4)[:, None]).view(
        -1, 2 * VOCAB
    ),
    "of transposed logits": lambda x, keep: x.mT.masked_select(keep[:, None]).view(-1, VOCAB),
}


@STAYS.each(SINGLE_ENTRIES, step=2, reason=SINGLE)
def entries_that_are_no_rows(select, s, t, keep):
    return both(select)(s, t, keep)


@FUSED()
def gathered_vocabulary_entries(s, t, each):
    ids = each[:, None, :2].expand(-1, TOKENS, 2)
    logs, p = s.log_softmax(-1).gather(-1, ids), t.softmax(-1).gather(-1, ids)
    return F.kl_div(logs, p, reduction="sum")


@STAYS(reason="keys are selected after the softmax")
def some_vocabulary_entries_after_the_softmax(s, t, flat):
    return F.kl_div(s.log_softmax(-1)[..., flat], t.softmax(-1)[..., flat], reduction="sum")


@STAYS(reason="keys are selected after the softmax")
def a_softmax_over_selected_rows(s, t, p):
    return F.kl_div(s.log_softmax(1)[:, p], t[:, p].softmax(1), reduction="batchmean")


@STAYS.parametrized()
def test_stays(row):
    outcome = judge(row.program, 0)
    parts = row.reason.split("|")
    assert any(part in text for text in outcome.reasons for part in parts), outcome.report


def test_a_vocabulary_entry_of_each_row():
    """As a sum over the whole vocabulary in which the others are 0."""

    @STAYS.of_inputs
    def program(s, t, each):
        ids = each[:, :1, None].expand(-1, TOKENS, 1)
        logs, wanted = s.log_softmax(-1).gather(-1, ids), t.softmax(-1).gather(-1, ids)
        return F.kl_div(logs, wanted, reduction="sum")

    outcome = judge(program)
    assert outcome.kinds == {"row_program"}, outcome.report


# ---------------------------------------------------- what was once compiled to something else
FOUND = Table(NAMES, {"s t": logits}, sites=None, dynamic=None)


@FOUND(sites=0)
def mask_written_first(s, t, keep):
    keep.logical_not_()
    return kd(s[keep], t[keep])


@FOUND(is_quick=False, sites=0)
def part_of_mask_written_first(s, t, keep):
    keep[:, 0] = True
    return kd(s[keep], t[keep])


@FOUND(sites=0)
def negated_mask_written_between(s, t, keep):
    first = s.detach()[~keep]
    keep.logical_not_()
    return rows_of_kl(first[:1], t[~keep][:1]).sum() + s.sum()


@FOUND(is_quick=False, sites=0)
def mask_of_entries_written_between(s, t, keep):
    mask = keep[..., None].expand_as(s)
    first = flattened_entries(s.detach(), mask)
    keep.fill_(True)
    return rows_of_kl(first[:2], flattened_entries(t, mask)[:2]).sum() + s.sum()


@FOUND(sites=1)
def positions_written_between(s, t, b, p):
    at = p % TOKENS
    target = t[b, at]
    at.add_(1).remainder_(TOKENS)
    return kd(s[b, at], target)


@FOUND(is_quick=False, sites=0)
def positions_written_first(s, t, b, p):
    p.add_(1).remainder_(TOKENS)
    return kd(s[b, p], t[b, p])


@FOUND(sites=1)
def mask_made_in_place(s, t, keep):
    mask = keep.clone()
    mask &= t[..., 0] > 0
    return kd(s[mask], t[mask])


@FOUND(sites=1)
def a_list_of_lists_that_torch_may_take_for_a_tuple(s, t):
    return rows_of_kl(s, t)[[[0, 1, 1], [0, 3, -1]]].sum()


WRITES = {
    "by add": lambda index: index.add_(1).remainder_(TOKENS),
    "by copy": lambda index: index.copy_((index + 1) % TOKENS),
    "by a view": lambda index: index[:, 0].zero_(),
}


def positions_that_were_repeated_before_a_write(write, s, t, each):
    student = s.gather(1, each.unsqueeze(-1).repeat(1, 1, VOCAB))
    write(each)
    return kd(student, t.gather(1, each.unsqueeze(-1).repeat(1, 1, VOCAB)))


@FOUND.each(WRITES, step=2)
def copied_positions_that_were_repeated_before_a_write(write, s, t, each):
    return positions_that_were_repeated_before_a_write(write, s, t, each.clone())


FOUND.each(WRITES, step=2, sites=0)(positions_that_were_repeated_before_a_write)


def groups(x, first, second):
    return x.view(first, second, VOCAB)


def grouped_labels(s, t, b, p, labels):
    soft = kd(groups(s, 4, 3)[b, p % 3], groups(t, 4, 3)[b, p % 3])
    return soft + F.cross_entropy(groups(s, 2, 6)[b, p % 3], labels)


def grouped_student_next_to_itself(s, t, b, p):
    return rows_of_kl(groups(s, 4, 3)[b, p % 3], groups(s, 2, 6)[b, p % 3]).mean()


def teacher_in_other_groups(s, t, b, p):
    return kd(groups(s, 4, 3)[b, p % 3], groups(t, 2, 6)[b, p % 3])


for same_positions in (grouped_labels, grouped_student_next_to_itself, teacher_in_other_groups):
    FOUND(sites=1)(same_positions)
    FOUND.add(f"{same_positions.__name__}-dynamic", same_positions, False, dynamic=True)

CASTS = {
    "rounded": (lambda e: e.half().float().view(-1, VOCAB), 0),
    "rounded, then rows": (lambda e: e.bfloat16().view(-1, VOCAB).float(), 0),
    "whole numbers": (lambda e: e.long().view(-1, VOCAB).float(), 0),
    "truths": (lambda e: e.bool().float().view(-1, VOCAB), 0),
    "as another tensor": (lambda e: e.type_as(e.half()).view(-1, VOCAB).float(), 0),
    "wider": (lambda e: e.double().view(-1, VOCAB).float(), 1),
    "copied": (lambda e: e.clone().contiguous().view(-1, VOCAB), 1),
}


@FOUND.each(CASTS, step=2)
def casts_of_selected_entries(cast, s, t, keep):
    return kd(flattened_entries(s, keep[..., None]), cast(t.masked_select(keep[..., None])))


def doubled(x):
    x = x * 1.0
    torch._foreach_mul_([x], 2.0)
    return x


FOREACH = {
    "logits": lambda s, t, keep: kd(doubled(s), t),
    "probabilities": lambda s, t, keep: F.kl_div(
        s.log_softmax(-1), doubled(t.softmax(-1)), reduction="sum"
    ),
    "selected logits": lambda s, t, keep: kd(s[keep], doubled(t[keep])),
}


@FOUND.each(FOREACH, step=2, sites=0)
def lists_of_tensors_that_are_written(loss, s, t, keep):
    return loss(s, t, keep)


TRANSPOSED = {
    "one dimension": lambda s, t, each, p: rows_of_kl(s[:, each.T], t[:, each.T]),
    "two dimensions": lambda s, t, each, p: rows_of_kl(
        s[each.T % 2, each.T], t[each.T % 2, each.T]
    ),
    "of one side": lambda s, t, each, p: rows_of_kl(s[:, each].transpose(1, 2), t[:, each.T]),
    "that lie between others": lambda s, t, each, p: rows_of_kl(
        *(x[torch.arange(2), p.expand(2, -1).T] for x in (s, t))
    ),
}


@FOUND.each(TRANSPOSED, sites=1)
def positions_that_are_transposed(loss, s, t, each, p):
    """What torch says of the strides of ``x[:, i.T]`` is not what it makes: a view of it fails."""
    return loss(s, t, each, p)


NO_ROW = {
    "batchmean": lambda s, t, none: kd(s[none], t[none]),
    "by their number": lambda s, t, none: rows_of_kl(s[none], t[none]).sum() / none.sum(),
    "masked_select": lambda s, t, none: kd(*(entries(x, none) for x in (s, t))),
    "positions": lambda s, t, none: kd(s[torch.where(none)], t[torch.where(none)]),
    "asked for NaN": lambda s, t, none: rows_of_kl(s[none], t[none]).mean().nan_to_num(7.0),
    "sum": lambda s, t, none: rows_of_kl(s[none], t[none]).sum(),
}


@FOUND.each(NO_ROW, step=2, sites=1)
def mean_of_no_row(loss, s, t, none):
    """Its value is eager's NaN, and the head has a gradient of 0 as in eager: a step goes on."""
    return loss(s, t, none)


@FOUND.parametrized()
def test_equals_eager(row):
    outcome = judge(row.program, row.sites, inner="aot_eager", dynamic=row.dynamic)
    for eager, found in zip(outcome.eager.tensors(), outcome.compiled.tensors(), strict=True):
        assert eager is found or torch.equal(eager.isnan(), found.isnan())


OUT_OF_RANGE = {
    "positions": both(lambda x, p, each: x[:, p + TOKENS]),
    "negative, index_select": both(lambda x, p, each: x.index_select(1, p)),
    "negative, gather": both(lambda x, p, each: x.gather(1, expanded(each - 1, x))),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_positions_that_eager_refuses(name):
    """The user's own operation is applied to hidden states: it refuses the same."""
    step = FOUND.of_inputs(lambda s, t, p, each: OUT_OF_RANGE[name](s, t, p, each))
    for call in (step, compile_rewritten(step, verify="never")):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            call(*inputs())


@pytest.mark.parametrize("dynamic", [False, True])
def test_kernels_that_are_chosen_by_size(dynamic, monkeypatch):
    """Masked vocabulary entries: the operator for attention has them, which chooses by size."""

    @FOUND.of_inputs
    def program(s, t, keep):
        others = torch.arange(VOCAB) % 3 == 0
        return rows_of_kl(*(x[keep].masked_fill(others, -1e9) for x in (s, t))).sum()

    chosen = []

    def by_size(problem, impl):
        chosen.append(impl)
        return "triton" if problem.seqlen_q > 2**20 else "torch"

    monkeypatch.setattr(execution, "select_implementation", by_size)
    runs = judge(program, 1, inner="aot_eager", dynamic=dynamic).report.sites[0].runs
    assert chosen
    assert runs == execution.BY_SIZE or not dynamic
