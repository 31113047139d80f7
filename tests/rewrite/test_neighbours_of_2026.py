"""Programs next to losses of 2026: each is as exact as eager, also those that stay.

Values and gradients are held against eager code in float64. A program is named with what is to
remain of it: True says that operators compute all of it, None that nothing but its value is
promised.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.of_2026.registry import (
    CAUSAL,
    HEADS,
    IDS,
    KEEP,
    LABELS,
    LOG_P,
    SIZES,
    TOKENS,
    TOP,
    TRAINED,
    VOCAB,
)
from torch_streamkl.fx_passes.capture.settings import CAPTURE

pytestmark = pytest.mark.filterwarnings("ignore")
IGNORED = LABELS.masked_fill(~KEEP, -100)
HALF = TOKENS // 2
PROGRAMS = {}


def inputs(names):
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(SIZES[n], generator=generator) for n in names.split()]
    return [x.requires_grad_(n in TRAINED) for n, x in zip(names.split(), made, strict=True)]


def judged(program, given, is_whole=None):
    with torch._dynamo.config.patch(CAPTURE):
        outcome = compare(program, given, largest_score=50.0).check()
    report = outcome.report
    found = bool(report.num_fused and not report.num_remaining)
    assert is_whole is None or found == is_whole, report.details()
    return outcome


@pytest.mark.parametrize("name", PROGRAMS)
def test_is_as_exact_as_eager(name):
    program, is_whole = PROGRAMS[name]
    judged(program, inputs(" ".join(inspect.signature(program).parameters)), is_whole)


def entries(h, w, ids):
    return (h @ w.T).log_softmax(-1).gather(-1, ids)


def loss_of(kept):
    return -(LOG_P.exp() * kept).sum(-1).mean()


# ------------------------------------------------------------------ rows that are made in parts
def concatenated(part, ids=IDS, order=1):
    """``part(number, h, w, ids)`` of both halves, in this order."""

    def program(h, w):
        halves = enumerate(zip(h.chunk(2), ids.chunk(2), strict=True))
        return loss_of(torch.cat([part(i, a, w, own) for i, (a, own) in halves][::order]))

    return program


def written(h, w, *starts, size=HALF, fill=0.0):
    kept = h.new_full((TOKENS, TOP), fill)
    for i in starts:
        kept[i : i + size] = entries(h[i : i + size], w, IDS[i : i + size])
    return kept


def labels_into_a_buffer(h, w):
    rows = torch.zeros(TOKENS)
    for i in (0, HALF):
        logs = entries(h[i : i + HALF], w, LABELS[i : i + HALF, None])
        rows[i : i + HALF] = -logs.squeeze(-1)
    return (rows * KEEP).sum() / KEEP.sum()


def a_part_is_overwritten(h, w):
    kept = written(h, w, 0, size=8)
    kept[4:] = entries(h[4:] * 0.5, w, IDS[4:])
    return loss_of(kept)


def a_buffer_that_is_returned(h, w):
    kept = written(h, w, 0, HALF)
    return loss_of(kept), kept


def a_buffer_that_is_written_again(h, w):
    kept = written(h, w, 0, HALF)
    total = loss_of(kept.clone())
    kept[:4] = 0.5
    return total + kept.square().sum()


def a_view_of_a_buffer(h, w):
    kept = torch.zeros(2, TOKENS, TOP)
    first = kept[0]
    for i in (0, HALF):
        first[i : i + HALF] = entries(h[i : i + HALF], w, IDS[i : i + HALF])
    return loss_of(kept.sum(0))


def sums_in_a_buffer(h, w):
    rows = h.new_zeros(2, HALF)
    for i, part in enumerate(h.chunk(2)):
        rows[i] = (part @ w.T).logsumexp(-1).square()
    return rows.mean(), rows.detach()


def parts_of_the_hidden_size(h, w):
    (a, b), (x, y) = h.chunk(2, -1), w.chunk(2, -1)
    return loss_of((a @ x.T + b @ y.T).log_softmax(-1).gather(-1, IDS))


PROGRAMS |= {
    "labels into a buffer": (labels_into_a_buffer, True),
    "three parts into a buffer": (
        lambda h, w: loss_of(written(h, w, 0, 4, 8, size=4, fill=-1.0)), True,
    ),
    "the last part first": (lambda h, w: loss_of(written(h, w, HALF, 0)), True),
    "a part is overwritten": (a_part_is_overwritten, True),
    "a part is not written": (lambda h, w: loss_of(written(h, w, 0)), True),
    "parts in another order": (
        concatenated(lambda i, h, w, ids: entries(h, w, ids), order=-1), False,
    ),
    "parts by other ids": (
        concatenated(lambda i, h, w, ids: entries(h, w, ids), IDS.flip(0)), True,
    ),
    "one part without gradient": (
        concatenated(lambda i, h, w, ids: entries(h.detach() if i == 0 else h, w, ids)), None,
    ),
    "parts of two heads": (
        concatenated(lambda i, h, w, ids: entries(h, (1 + i) * w, ids)), True,
    ),
    "a buffer that is returned": (a_buffer_that_is_returned, False),
    "a buffer that is written again": (a_buffer_that_is_written_again, None),
    "a view of a buffer": (a_view_of_a_buffer, None),
    "sums in a buffer": (sums_in_a_buffer, True),
    "parts of the hidden size": (parts_of_the_hidden_size, True),
}  # fmt: skip


def into_a_row(rows, i, values):
    rows[i] = values


def by_a_mask(rows, i, values):
    kept = KEEP[:HALF]
    rows[i, kept] = values[kept]


def added(rows, i, values):
    rows[i] += values * 2


@pytest.mark.parametrize("write", [into_a_row, by_a_mask, added])
def test_divergences_in_a_buffer(write):
    def program(h, w, g, v):
        rows = h.new_zeros(2, HALF)
        for i, (a, b) in enumerate(zip(h.chunk(2), g.split(HALF), strict=True)):
            s, t = (a @ w.T).log_softmax(-1), (b @ v.T).softmax(-1)
            write(rows, i, F.kl_div(s, t, reduction="none").sum(-1))
        return (rows * KEEP.view(2, HALF)).sum() / KEEP.sum(), rows.detach()

    assert judged(program, inputs("h w g v"), True).num_fused == 2


# ------------------------------------------------------------------ tensors that lend their shape
def summed_into(make):
    def program(h, w):
        s = (h @ w.T).log_softmax(-1)
        total = make(s)
        for i in range(2):
            total += s.gather(-1, IDS[:, i : i + 1]).squeeze(-1)
        return total.mean()

    return program


def a_tensor_of_a_computed_number(h, w):
    s = (h @ w.T).log_softmax(-1)
    return loss_of(s.gather(-1, IDS)) + torch.full_like(s, float(TOP)).sum() * 1e-3


PROGRAMS |= {
    "full_like": (summed_into(lambda s: torch.full_like(s, 0.25)[:, 0]), True),
    # a method with a list in Dynamo's graph before torch 2.13
    "new_tensor": (
        summed_into(lambda s: s.new_tensor([0.5] * TOKENS)),
        torch.__version__ >= (2, 13),
    ),
    "a tensor of a computed number": (a_tensor_of_a_computed_number, True),
}


# ------------------------------------------------------------------ scores of labels
INFINITE = torch.where(KEEP, torch.inf, 1.0)[:, None]


def bounded(z):
    return z.clamp(-20.0, 20.0).sum()


def at_labels(z):
    return z.gather(-1, LABELS[:, None]).squeeze(-1)


def of_logits(make):
    return lambda h, w: make(h @ w.T)


def a_removed_label(z):
    rest = z.masked_fill(torch.arange(VOCAB) < 9, -torch.inf)
    return bounded(at_labels(rest) - rest.logsumexp(-1))


PROGRAMS |= {
    "at labels, with a temperature": (
        of_logits(lambda z: bounded(at_labels(z) / 2 - (z / 2).logsumexp(-1))), True,
    ),
    "and next to it": (
        # infinity is a number after clamp, which reads the first sum alone, and eager has the same
        of_logits(lambda z: bounded(at_labels(z) - z.logsumexp(-1)) + 0.1 * z.logsumexp(-1).sum()),
        True,
    ),
    "bounded next to it": (
        # and here it has another one
        of_logits(lambda z: (at_labels(z) - z.logsumexp(-1)).sum() + bounded(z.logsumexp(-1))),
        False,
    ),
    "a removed label": (of_logits(a_removed_label), False),
    "infinite scores": (
        of_logits(lambda z: bounded(at_labels(z * INFINITE) - z.logsumexp(-1))), True,
    ),
    "a quotient": (
        of_logits(lambda z: bounded(at_labels(z).exp() / z.logsumexp(-1).exp())), False,
    ),
    "bounded before": (
        of_logits(lambda z: bounded(at_labels(z).clamp(-1, 1) - z.logsumexp(-1))), False,
    ),
    "a cross-entropy alone": (of_logits(lambda z: F.cross_entropy(z, LABELS)), False),
}  # fmt: skip


def with_cross_entropy(**arguments):
    def program(h, w, labels):
        z = h @ w.T
        kd = loss_of(z.gather(-1, IDS) - z.logsumexp(-1, keepdim=True))
        given = {n: x.to(h.dtype) if n == "weight" else x for n, x in arguments.items()}
        return kd + 0.3 * (F.cross_entropy(z, labels, **given) * 2.0).mean()

    return program


@pytest.mark.parametrize(
    ("arguments", "labels", "is_whole"),
    [
        ({}, IGNORED, True),
        ({"reduction": "none"}, IGNORED, True),
        ({"ignore_index": 3}, LABELS, True),
        # these have other sums over rows
        ({"label_smoothing": 0.1}, IGNORED, False),
        ({"weight": torch.linspace(0.5, 2.0, VOCAB)}, IGNORED, False),
        ({"reduction": "sum"}, torch.full((TOKENS,), -100), None),
    ],
    ids=["mean", "none", "another ignored label", "smoothed", "weights", "all are ignored"],
)
def test_cross_entropy_next_to_entries(arguments, labels, is_whole):
    judged(with_cross_entropy(**arguments), [*inputs("h w"), labels], is_whole)


def test_labels_out_of_range_raise_as_in_eager():
    labels = LABELS.clone()
    labels[5] = VOCAB
    compiled = compile_rewritten(with_cross_entropy())
    compiled(*inputs("h w"), IGNORED)
    for step in (with_cross_entropy(), compiled):
        with pytest.raises(IndexError, match=f"Target {VOCAB} is out of bounds"):
            step(*inputs("h w"), labels)


# ------------------------------------------------------------------ entries that no sum reads
ORDER = torch.rand(TOKENS, VOCAB, generator=torch.Generator().manual_seed(5)).argsort(-1)
SHARED = torch.tensor([4, 0, 9])


def entries_of(read, ids=IDS):
    return lambda h, w: read((h @ w.T).log_softmax(-1).gather(-1, ids))


PROGRAMS |= {
    "entries that are returned": (entries_of(lambda e: e), True),
    "sums of the first entries": (entries_of(lambda e: e.cumsum(-1).square().mean()), True),
    "entries next to their sum": (
        entries_of(lambda e: (loss_of(e), e.cumsum(-1).detach(), e[IDS % 2 == 0].sum())), True,
    ),
    "probabilities of entries by a mask": (entries_of(lambda e: e.exp()[IDS > 9].mean()), True),
    "entries that a mask chooses, written in place": (
        entries_of(lambda e: e.masked_fill_(IDS > 9, 0.0)[IDS > 5].mean()), True,
    ),
    "a sum of logits at ids": (
        lambda h, w: ((z := h @ w.T).gather(-1, IDS).sum(-1) - z.logsumexp(-1)).square().mean(),
        True,
    ),
    "as many entries as the row has": (entries_of(lambda e: e.cumsum(-1).mean(), ORDER), False),
    "entries at ids that all rows share": (
        lambda h, w: (h @ w.T).log_softmax(-1)[:, SHARED].cumsum(-1).mean(), False,
    ),
}  # fmt: skip


# ------------------------------------------------------------------ probabilities by sigmoids
CLASS_WEIGHTS = torch.linspace(0.5, 2.0, VOCAB)


def sigmoids(**arguments):
    def program(h, w, g, v):
        # large ones, of which the sigmoids are 0 and 1
        s, t = 40.0 * (h @ w.T), 40.0 * (g @ v.T)
        return F.binary_cross_entropy_with_logits(s, t.sigmoid(), **arguments)

    return program


PROGRAMS |= {
    "sigmoids": (sigmoids(), True),
    "sigmoids, a value of each": (sigmoids(reduction="none"), False),
    "sigmoids of weights": (sigmoids(pos_weight=CLASS_WEIGHTS), True),
    "sigmoids of weights of classes": (sigmoids(weight=CLASS_WEIGHTS, reduction="sum"), True),
    "sigmoids of both weights": (sigmoids(weight=CLASS_WEIGHTS, pos_weight=CLASS_WEIGHTS), True),
}  # fmt: skip


# ------------------------------------------------------------------ columns of probabilities
def columns(read):
    return lambda h, w: read((h @ w.T).log_softmax(-1))


PROGRAMS |= {
    "a column": (columns(lambda s: s[:, 3].exp().mean()), True),
    "columns of sequences": (columns(lambda s: s.view(2, HALF, -1)[..., 3].sum(-1).mean()), True),
    "one column of two dimensions": (columns(lambda s: (s[:, 2:3] * s[:, 4:5]).mean()), True),
    "a copy of a column that is returned": (
        columns(lambda s: (s[:, 3].clone(), s[:, 3].sum())), True,
    ),
    # these show how far apart its elements lie
    "a column that is returned": (columns(lambda s: (s[:, 3], s[:, 3].sum())), False),
    "the strides of a column": (columns(lambda s: s[:, 3].sum() * s[:, 3].stride(0)), None),
    "a column that is written to": (
        lambda h, w: (z := h @ w.T)[:, 3].mul_(0.5).sum() + z.logsumexp(-1).sum(), None,
    ),
}  # fmt: skip


# ------------------------------------------------------------------ a column next to the keys
SINK = torch.linspace(-1, 1, HEADS).view(1, HEADS, 1, 1)


def with_column(x, sink, last=True, mask=None):
    """Log-probabilities of the keys, and of all."""
    x = x if mask is None else x.masked_fill(mask, -torch.inf)
    column = sink.expand(*x.shape[:3], -1)
    whole = torch.cat([x, column] if last else [column, x], -1).log_softmax(-1)
    n = column.shape[-1]
    return (whole[..., :-n] if last else whole[..., n:]), whole


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    ("column", "sink", "is_whole"),
    [
        ({}, SINK, True),
        ({"last": False}, SINK, True),
        ({"mask": CAUSAL.isinf()}, SINK, None),  # a difference of what one mask fills
        ({}, torch.cat([SINK, SINK + 0.5], -1), False),
    ],
    ids=["last", "first", "causal", "two"],
)
def test_a_column_next_to_the_keys(column, sink, is_whole, trained):
    def program(q, k, r, u, sink):
        (s, _), (t, _) = (with_column(x @ y.mT, sink, **column) for x, y in ((q, k), (r, u)))
        t = t.detach()
        terms = t.exp() * (t - s)
        terms = terms.masked_fill(column["mask"], 0.0) if "mask" in column else terms
        return terms.sum(-1).mean()

    judged(program, [*inputs("q k r u"), sink.clone().requires_grad_(trained)], is_whole)


def a_sink_whose_probability_is_read(q, k, r, u):
    (_, s), (_, t) = (with_column(x @ y.mT, SINK) for x, y in ((q, k), (r, u)))
    return (t.exp() * (t - s)).sum(-1).mean()


# ------------------------------------------------------------------ diagonals
def squared(f):
    return lambda x, y: F.mse_loss(f(x[0] @ x[1].T), f(y[0] @ y[1].T))


def contrastive(x, y):
    z = x[0] @ x[1].T / 0.1
    return -(z.diagonal() - z.logsumexp(-1)).mean(), (y[0] @ y[1].T).diagonal().mean()


def off_diagonal(z):
    return z - z.diagonal(dim1=-2, dim2=-1)[..., None]


def of_probabilities(z):
    return off_diagonal(z.softmax(-1)).abs()


PROGRAMS |= {
    "a diagonal less the log-sum-exp": (contrastive, None),
    "a diagonal of rows": (squared(off_diagonal), True),
    "a diagonal of a batch": (
        lambda x, y: F.mse_loss(*(off_diagonal(a @ a.flip(0).mT) for a in (x, y))), True,
    ),
    "diagonals of rows and columns": (
        squared(lambda z: z.diagonal()[:, None] + z.diagonal()[None] - z), None,
    ),
    "above the diagonal": (squared(lambda z: z.diagonal(1)[:, None] - z[:-1]), None),
    "the diagonal of a Gram matrix": (
        lambda x, y: F.mse_loss(*(off_diagonal(a[0] @ a[0].T) for a in (x, y))), None,
    ),
    "a diagonal of probabilities": (squared(of_probabilities), None),
    "a sink whose probability is read": (a_sink_whose_probability_is_read, None),
}  # fmt: skip


# ------------------------------------------------------------------ features, elements by masks
def test_features_of_a_softmax():
    def program(q, k, r, u, a, b):
        def features(x, w):
            return torch.cat([(x @ w).softmax(-1), (-(x @ w)).softmax(-1)], -1)

        t = (r @ u.mT).masked_fill(CAUSAL.isinf(), -1e9).softmax(-1)
        s = (features(q, a) @ features(k, b).mT).masked_fill(CAUSAL.isinf(), 0.0)
        s = s / (s.sum(-1, keepdim=True) + 1e-12)
        return F.cross_entropy(s.clamp(min=1e-12).log().flatten(0, 2), t.flatten(0, 2))

    weights = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(4))
    judged(program, [*inputs("q k r u"), *(x.clone().requires_grad_() for x in weights)], True)


def terms(h, w, g, v):
    s, t = (h @ w.T).log_softmax(-1), (g @ v.T).softmax(-1)
    return t * (t.log() - s)


def elements(mask):
    def program(h, w, g, v):
        found = terms(h, w, g, v)
        return found.masked_select(mask.expand_as(found)).sum() / KEEP.sum()

    return program


def how_many_elements_are_selected_is_read(h, w, g, v):
    chosen = terms(h, w, g, v).masked_select(KEEP[:, None].expand(TOKENS, VOCAB))
    return chosen.sum() / chosen.shape[0], chosen.mean()


PROGRAMS |= {
    "elements of rows": (elements(KEEP[:, None]), True),
    "elements of entries": (elements(torch.arange(VOCAB) % 2 == 0), False),
    "elements of both": (elements(torch.arange(TOKENS)[:, None] > torch.arange(VOCAB)), False),
    "how many elements are selected is read": (how_many_elements_are_selected_is_read, None),
}
