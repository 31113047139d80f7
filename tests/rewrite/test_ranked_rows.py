"""Rows' values that code ranks, such as the hardest tokens: what it reads at the places found."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.losses import rows_of_kl
from torch_streamkl.fx_passes.capture.settings import CAPTURE

BATCH, TOKENS, VOCAB = 16, 6, 12


def inputs():
    make = torch.Generator().manual_seed(0)
    shapes = ((BATCH, TOKENS, 5), (VOCAB, 5), (BATCH, TOKENS, 4), (VOCAB, 4))
    operands = [torch.randn(n, generator=make).requires_grad_(i < 2) for i, n in enumerate(shapes)]
    return [*operands, torch.randint(0, VOCAB, (BATCH, TOKENS), generator=make)]


def absolute(s, t):
    return (s.softmax(-1) - t.softmax(-1)).abs().sum(-1)


def hardest(rows):
    return rows.topk(2, -1).values.mean()


def hardest_and_where(rows):
    top, at = rows.topk(2, -1)
    return top.mean() + rows.mean(), at


def no_easier_than_the_second(rows):
    """The smallest of the largest is one of the rows' values, to the last bit."""
    hard = rows >= rows.topk(2, -1).values[:, -1:]
    return (rows * hard).sum() / hard.sum(), hard


def read_at_the_place(rows):
    at = rows.argmax(-1)
    return rows.gather(-1, at[:, None]).mean() + rows.mean(), at


def read_at_the_first_place(rows):
    return rows.flatten()[rows.argmin()]


def of_the_hardest_sequence(rows):
    at = rows.mean(-1).argmax()
    return rows[at].sum(), at


RANKED = [
    hardest,
    hardest_and_where,
    no_easier_than_the_second,
    read_at_the_place,
    read_at_the_first_place,
    of_the_hardest_sequence,
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("of", [rows_of_kl, absolute, lambda s, t: s.logsumexp(-1)])
@pytest.mark.parametrize("ranked", RANKED)
def test_rows_are_computed_once(ranked, of, dynamic):
    def program(x, w, xt, wt, labels):
        return ranked(of(F.linear(x, w), F.linear(xt, wt)))

    with torch._dynamo.config.patch(CAPTURE):
        outcome = compare(program, inputs(), verify="never", dynamic=dynamic).check()
    assert outcome.num_fused <= 1
    assert outcome.num_fused or of is not rows_of_kl


def test_values_of_rows_whose_number_data_decides():
    """The report does not ask for this number."""

    def program(x, w, xt, wt, labels):
        s, t = F.linear(x, w), F.linear(xt, wt)
        rows, entropies = s.logsumexp(-1), -(t.softmax(-1) * t.log_softmax(-1)).sum(-1)
        p, at = t.softmax(-1).topk(3, -1)
        of_entries = -(p / p.sum(-1, keepdim=True) * s.log_softmax(-1).gather(-1, at)).sum(-1)
        found = s.argmax(-1)
        value = rows[entropies > entropies.median()].mean() + of_entries.mean()
        return value + rows[found == labels].sum() + (rows * (found == t.argmax(-1))).mean(), at

    with torch._dynamo.config.patch(CAPTURE):
        outcome = compare(program, inputs(), verify="never")
    assert outcome.check().num_fused
