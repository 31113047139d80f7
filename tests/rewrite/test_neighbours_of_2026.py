"""Programs next to losses of 2026: each is as exact as eager, also those that stay.

Values and gradients are held against eager code in float64. A program is named with what is to
remain of it: ``whole`` says that operators compute all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import Outcome, compare, run
from tests.support.of_2026.registry import (
    CAUSAL,
    HEADS,
    IDS,
    KEEP,
    LABELS,
    LOG_P,
    ROWS,
    SIZES,
    TOKENS,
    TOP,
    TRAINED,
    VOCAB,
)
from torch_streamkl.fx_passes.capture.settings import CAPTURE

pytestmark = pytest.mark.filterwarnings("ignore")
Program = Callable[..., Any]
IGNORED = LABELS.masked_fill(~KEEP, -100)
HALF = TOKENS // 2


def inputs(names: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(SIZES[n], generator=generator) for n in names.split()]
    return [x.requires_grad_(n in TRAINED) for n, x in zip(names.split(), made, strict=True)]


def judged(program: Program, given: list[Any]) -> Outcome:
    with torch._dynamo.config.patch(CAPTURE):
        options = {"streamkl.min_mib": 0}
        return compare(program, given, options=options, largest_score=50.0).check()


def judge(program: Program, names: str, is_whole: bool | None) -> None:
    """``is_whole``: None where nothing is promised but the value."""
    report = judged(program, inputs(names)).report
    found = bool(report.num_fused and not report.num_remaining)
    assert is_whole is None or found == is_whole, report.details()


def entries(h: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return (h @ w.T).log_softmax(-1).gather(-1, ids)


def loss_of(kept: Tensor, log_p: Tensor = LOG_P) -> Tensor:
    return -(log_p.exp() * kept).sum(-1).mean()


# ------------------------------------------------------------------ rows that are made in parts
def parts_of_two_sizes(h, w):
    parts = [entries(a, w, i) for a, i in zip(h.split([5, 7]), IDS.split([5, 7]), strict=True)]
    return loss_of(torch.cat(parts))


def labels_into_a_buffer(h, w):
    rows = torch.zeros(TOKENS)
    for i in (0, HALF):
        logs = entries(h[i : i + HALF], w, LABELS[i : i + HALF, None])
        rows[i : i + HALF] = -logs.squeeze(-1)
    return (rows * KEEP).sum() / KEEP.sum()


def three_parts_into_a_buffer(h, w):
    kept = h.new_full((TOKENS, TOP), -1.0)
    for i in range(0, TOKENS, 4):
        kept[i : i + 4] = entries(h[i : i + 4], w, IDS[i : i + 4])
    return loss_of(kept)


def last_part_first(h, w):
    kept = torch.zeros(TOKENS, TOP)
    for i in (HALF, 0):
        kept[i : i + HALF] = entries(h[i : i + HALF], w, IDS[i : i + HALF])
    return loss_of(kept)


def parts_in_another_order(h, w):
    a, b = (entries(x, w, i) for x, i in zip(h.chunk(2), IDS.chunk(2), strict=True))
    return loss_of(torch.cat([b, a]))


def parts_by_other_ids(h, w):
    parts = [entries(a, w, i) for a, i in zip(h.chunk(2), IDS.flip(0).chunk(2), strict=True)]
    return loss_of(torch.cat(parts))


def one_part_without_gradient(h, w):
    a, b = (entries(x, w, i) for x, i in zip(h.chunk(2), IDS.chunk(2), strict=True))
    return loss_of(torch.cat([a.detach(), b]))


def parts_of_two_heads(h, w):
    a, b = (entries(x, m, i) for x, m, i in zip(h.chunk(2), (w, 2 * w), IDS.chunk(2), strict=True))
    return loss_of(torch.cat([a, b]))


def a_part_is_overwritten(h, w):
    kept = torch.zeros(TOKENS, TOP)
    kept[:8] = entries(h[:8], w, IDS[:8])
    kept[4:] = entries(h[4:] * 0.5, w, IDS[4:])
    return loss_of(kept)


def a_part_is_not_written(h, w):
    kept = torch.zeros(TOKENS, TOP)
    kept[:HALF] = entries(h[:HALF], w, IDS[:HALF])
    return loss_of(kept)


def a_buffer_that_is_returned(h, w):
    kept = torch.zeros(TOKENS, TOP)
    for i in (0, HALF):
        kept[i : i + HALF] = entries(h[i : i + HALF], w, IDS[i : i + HALF])
    return loss_of(kept), kept


def a_buffer_that_is_written_again(h, w):
    kept = torch.zeros(TOKENS, TOP)
    for i in (0, HALF):
        kept[i : i + HALF] = entries(h[i : i + HALF], w, IDS[i : i + HALF])
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
    s = (a @ x.T + b @ y.T).log_softmax(-1).gather(-1, IDS)
    return loss_of(s)


IN_PARTS = {
    parts_of_two_sizes: True,
    labels_into_a_buffer: True,
    three_parts_into_a_buffer: True,
    last_part_first: True,
    parts_in_another_order: False,
    parts_by_other_ids: True,
    one_part_without_gradient: True,
    parts_of_two_heads: False,
    a_part_is_overwritten: False,
    a_part_is_not_written: True,
    a_buffer_that_is_returned: False,
    a_buffer_that_is_written_again: None,
    a_view_of_a_buffer: None,
    sums_in_a_buffer: True,
    parts_of_the_hidden_size: True,
}


@pytest.mark.parametrize("program", IN_PARTS, ids=lambda x: x.__name__)
def test_rows_in_parts(program: Program) -> None:
    judge(program, "h w", IN_PARTS[program])


def kl_of_parts(write: Callable[[Tensor, int, Tensor], None]) -> Program:
    def program(h, w, g, v):
        rows = h.new_zeros(2, HALF)
        for i, (a, b) in enumerate(zip(h.chunk(2), g.split(HALF), strict=True)):
            s, t = (a @ w.T).log_softmax(-1), (b @ v.T).softmax(-1)
            write(rows, i, F.kl_div(s, t, reduction="none").sum(-1))
        return (rows * KEEP.view(2, HALF)).sum() / KEEP.sum(), rows.detach()

    return program


def into_a_row(rows: Tensor, i: int, values: Tensor) -> None:
    rows[i] = values


def by_a_mask(rows: Tensor, i: int, values: Tensor) -> None:
    kept = KEEP[:HALF]
    rows[i, kept] = values[kept]


def added(rows: Tensor, i: int, values: Tensor) -> None:
    rows[i] += values * 2


@pytest.mark.parametrize("write", [into_a_row, by_a_mask, added])
def test_divergences_in_a_buffer(write: Callable[[Tensor, int, Tensor], None]) -> None:
    report = judged(kl_of_parts(write), inputs("h w g v")).report
    assert report.num_fused == 2 and not report.num_remaining, report.details()


# ------------------------------------------------------------------ tensors that lend their shape
def summed_into(make: Callable[[Tensor], Tensor]) -> Program:
    def program(h: Tensor, w: Tensor) -> Tensor:
        s = (h @ w.T).log_softmax(-1)
        total = make(s)
        for i in range(2):
            total += s.gather(-1, IDS[:, i : i + 1]).squeeze(-1)
        return total.mean()

    return program


MADE = {
    "new_zeros": lambda s: s.new_zeros(TOKENS),
    "new_full": lambda s: s.new_full((s.shape[0],), 0.5),
    "full_like": lambda s: torch.full_like(s, 0.25)[:, 0],
    "new_ones": lambda s: s.new_ones(TOKENS, dtype=s.dtype),
    "new_tensor": lambda s: s.new_tensor([0.5] * TOKENS),
}


@pytest.mark.parametrize("name", MADE)
def test_tensors_that_lend_their_shape(name: str) -> None:
    judge(summed_into(MADE[name]), "h w", True)


def test_a_tensor_of_a_computed_number_reads_it() -> None:
    def program(h: Tensor, w: Tensor) -> Tensor:
        s = (h @ w.T).log_softmax(-1)
        return loss_of(s.gather(-1, IDS)) + torch.full_like(s, float(TOP)).sum() * 1e-3

    judge(program, "h w", True)


# ------------------------------------------------------------------ scores of labels
INFINITE = torch.where(KEEP, torch.inf, 1.0)[:, None]


def bounded(z: Tensor) -> Tensor:
    return z.clamp(-20.0, 20.0).sum()


def at_labels(z: Tensor) -> Tensor:
    return z.gather(-1, LABELS[:, None]).squeeze(-1)


OF_LABELS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "less the log-sum-exp": (lambda z: bounded(at_labels(z) - z.logsumexp(-1)), True),
    "with a temperature": (lambda z: bounded(at_labels(z) / 2 - (z / 2).logsumexp(-1)), True),
    "kept dimensions": (
        lambda z: bounded(z.gather(-1, LABELS[:, None]) - z.logsumexp(-1, keepdim=True)),
        True,
    ),
    "and next to it": (
        lambda z: bounded(at_labels(z) - z.logsumexp(-1)) + 0.1 * z.logsumexp(-1).sum(),
        False,  # infinity is a number after clamp, and eager has another one
    ),
    "a removed label": (
        lambda z: bounded(
            at_labels(r := z.masked_fill(torch.arange(VOCAB) < 9, -torch.inf)) - r.logsumexp(-1)
        ),
        False,
    ),
    "infinite scores": (
        lambda z: bounded(at_labels(z * INFINITE) - z.logsumexp(-1)),
        True,
    ),
    "a quotient": (lambda z: bounded(at_labels(z).exp() / z.logsumexp(-1).exp()), False),
    "bounded before": (lambda z: bounded(at_labels(z).clamp(-1, 1) - z.logsumexp(-1)), False),
}


@pytest.mark.parametrize("name", OF_LABELS)
def test_scores_of_labels(name: str) -> None:
    made, is_whole = OF_LABELS[name]
    judge(lambda h, w: made(h @ w.T), "h w", is_whole)


def with_cross_entropy(**arguments: Any) -> Program:
    def program(h: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        z = h @ w.T
        kd = loss_of(z.gather(-1, IDS) - z.logsumexp(-1, keepdim=True))
        given = {n: x.to(h.dtype) if n == "weight" else x for n, x in arguments.items()}
        hard = F.cross_entropy(z, labels, **given)
        return kd + 0.3 * (hard * 2.0).mean()

    return program


WEIGHTS = torch.linspace(0.5, 2.0, VOCAB)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "another ignored label": {"ignore_index": 3},
    "smoothed": {"label_smoothing": 0.1},
    "weights of classes": {"weight": WEIGHTS},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_cross_entropy_next_to_entries(name: str) -> None:
    arguments = dict(ARGUMENTS[name])
    labels = LABELS if "ignore_index" in arguments else IGNORED
    report = judged(with_cross_entropy(**arguments), [*inputs("h w"), labels]).report
    is_whole = name not in ("smoothed", "weights of classes")  # which have other sums over rows
    assert bool(report.num_fused and not report.num_remaining) == is_whole, report.details()


def test_a_cross_entropy_alone_stays() -> None:
    judge(lambda h, w: F.cross_entropy(h @ w.T, LABELS), "h w", False)


def test_labels_that_are_all_ignored() -> None:
    given = [*inputs("h w"), torch.full((TOKENS,), -100)]
    eager = run(with_cross_entropy(), given)
    assert eager.outputs[0].isnan()
    judged(with_cross_entropy(reduction="sum"), given)


def test_labels_out_of_range_raise_as_in_eager() -> None:
    labels = LABELS.clone()
    labels[5] = VOCAB
    torch._dynamo.reset()
    compiled = torch.compile(
        with_cross_entropy(),
        backend="streamkl",
        options={"streamkl.min_mib": 0, "streamkl.inner": "eager"},
    )
    compiled(*inputs("h w"), IGNORED)
    for step in (with_cross_entropy(), compiled):
        with pytest.raises(IndexError, match=f"Target {VOCAB} is out of bounds"):
            step(*inputs("h w"), labels)


# ------------------------------------------------------------------ a column next to the keys
SINK = torch.linspace(-1, 1, HEADS).view(1, HEADS, 1, 1)


def beside(*columns: int, last: bool = True, mask: Tensor | None = None) -> Program:
    def program(q, k, r, u, sink):
        def logs(x: Tensor) -> Tensor:
            x = x if mask is None else x.masked_fill(mask.isinf(), -torch.inf)
            column = sink.expand(x.shape[0], HEADS, ROWS, -1)
            whole = torch.cat([x, column] if last else [column, x], -1).log_softmax(-1)
            n = column.shape[-1]
            return whole[..., :-n] if last else whole[..., n:]

        s, t = logs(q @ k.mT), logs(r @ u.mT).detach()
        terms = t.exp() * (t - s)
        terms = terms if mask is None else terms.masked_fill(mask.isinf(), 0.0)
        return terms.sum(-1).mean()

    return program


COLUMNS = {
    "last": (beside(), SINK, True),
    "first": (beside(last=False), SINK, True),
    "causal": (beside(mask=CAUSAL), SINK, None),  # a difference of what one mask fills
    "two": (beside(), torch.cat([SINK, SINK + 0.5], -1), False),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_next_to_the_keys(name: str, trained: bool) -> None:
    program, sink, is_whole = COLUMNS[name]
    sink = sink.clone().requires_grad_(trained)
    report = judged(program, [*inputs("q k r u"), sink]).report
    found = bool(report.num_fused and not report.num_remaining)
    assert is_whole is None or found == is_whole, report.details()


def test_a_sink_whose_probability_is_read() -> None:
    def program(q, k, r, u):
        s, t = (
            torch.cat([x, SINK.expand(*x.shape[:3], 1)], -1).log_softmax(-1)
            for x in (q @ k.mT, r @ u.mT)
        )
        return (t.exp() * (t - s)).sum(-1).mean()

    judged(program, inputs("q k r u"))


# ------------------------------------------------------------------ diagonals
def squared(f: Callable[[Tensor], Tensor]) -> Program:
    return lambda x, y: F.mse_loss(f(x[0] @ x[1].T), f(y[0] @ y[1].T))


def contrastive(x, y):
    z = x[0] @ x[1].T / 0.1
    return -(z.diagonal() - z.logsumexp(-1)).mean(), (y[0] @ y[1].T).diagonal().mean()


DIAGONALS = {
    "less the log-sum-exp": (contrastive, None),
    "of rows": (squared(lambda z: z.diagonal()[:, None] - z), True),
    "of a batch": (
        lambda x, y: F.mse_loss(
            *((z := a @ a.flip(0).mT).diagonal(dim1=1, dim2=2)[..., None] - z for a in (x, y))
        ),
        True,
    ),
    "of columns": (squared(lambda z: z.diagonal()[None] - z), None),
    "of both": (squared(lambda z: z.diagonal()[:, None] + z.diagonal()[None] - z), None),
    "above": (squared(lambda z: z.diagonal(1)[:, None] - z[:-1]), None),
    "of a Gram matrix": (
        lambda x, y: F.mse_loss(*((z := a[0] @ a[0].T) - z.diagonal()[:, None] for a in (x, y))),
        None,
    ),
    "of the transpose": (squared(lambda z: z.T.diagonal()[:, None] - z.T), None),
    "and nothing else": (squared(lambda z: z.diagonal() * 2.0), None),
    "of probabilities": (
        squared(lambda z: (z.softmax(-1) - z.softmax(-1).diagonal()[:, None]).abs()),
        None,
    ),
}


@pytest.mark.parametrize("name", DIAGONALS)
def test_diagonals(name: str) -> None:
    program, is_whole = DIAGONALS[name]
    judge(program, "x y", is_whole)


# ------------------------------------------------------------------ features, elements by masks
def test_features_of_a_softmax() -> None:
    def program(q, k, r, u, a, b):
        def features(x: Tensor, w: Tensor) -> Tensor:
            return torch.cat([(x @ w).softmax(-1), (-(x @ w)).softmax(-1)], -1)

        t = (r @ u.mT).masked_fill(CAUSAL.isinf(), -1e9).softmax(-1)
        s = (features(q, a) @ features(k, b).mT).masked_fill(CAUSAL.isinf(), 0.0)
        s = s / (s.sum(-1, keepdim=True) + 1e-12)
        return F.cross_entropy(
            s.clamp(min=1e-12).log().flatten(0, 2), t.flatten(0, 2), reduction="mean"
        )

    weights = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(4))
    given = [*inputs("q k r u"), *(x.clone().requires_grad_() for x in weights)]
    report = judged(program, given).report
    assert report.num_fused and not report.num_remaining, report.details()


def elements(mask: Tensor) -> Program:
    def program(h, w, g, v):
        s, t = (h @ w.T).log_softmax(-1), (g @ v.T).softmax(-1)
        terms = t * (t.log() - s)
        return terms.masked_select(mask.expand_as(terms)).sum() / KEEP.sum()

    return program


ELEMENTS = {
    "of rows": (elements(KEEP[:, None]), True),
    "of entries": (elements(torch.arange(VOCAB) % 2 == 0), False),
    "of both": (elements(torch.arange(TOKENS)[:, None] > torch.arange(VOCAB)), False),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_by_a_mask(name: str) -> None:
    program, is_whole = ELEMENTS[name]
    judge(program, "h w g v", is_whole)


def test_how_many_elements_are_selected_is_read() -> None:
    def program(h, w, g, v):
        s, t = (h @ w.T).log_softmax(-1), (g @ v.T).softmax(-1)
        chosen = (t * (t.log() - s)).masked_select(KEEP[:, None].expand(TOKENS, VOCAB))
        return chosen.sum() / chosen.shape[0], chosen.mean()

    judged(program, inputs("h w g v"))
