"""Naive losses read into the expression graph: however they are written, one form of each.

This is what the rewrite's reader does by its rules, in a few lines: views substitute positions,
a matmul is a contraction, a mask is a `where`. The value of each is held against torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.support.evaluate_program import evaluate
from torch_streamkl.fx_passes.reading import arrays
from torch_streamkl.fx_passes.reading.arrays import Array, matmul, met, reshaped
from torch_streamkl.fx_passes.reading.rules.reductions import over
from torch_streamkl.fx_passes.reading.sizes import SymbolicSizes
from torch_streamkl.program import canonical as c
from torch_streamkl.program import functions
from torch_streamkl.program.divergence_forms import Bilinear, bilinear
from torch_streamkl.program.graph import (
    BOOL,
    FLOAT,
    INT,
    LOGSUMEXP,
    MAX,
    SUM,
    Node,
    Source,
    capture,
    const,
)
from torch_streamkl.program.identities import LOG_P, LOG_S, P, S
from torch_streamkl.program.masks import structure_of
from torch_streamkl.program.reductions import detached, opened, remade
from torch_streamkl.program.walks import rebuilt, walk

BATCH, HEADS, KV_HEADS, ROWS, KEYS, DIM = 2, 4, 2, 5, 7, 3
SHAPES = {
    "q": (BATCH, ROWS, HEADS * DIM),
    "k": (BATCH, KEYS, KV_HEADS * DIM),
    "tq": (BATCH, HEADS, ROWS, DIM),
    "tk": (BATCH, HEADS, KEYS, DIM),
    "keep": (BATCH, KEYS),
}


def tensor(name: str) -> Array:
    dims = arrays.new_dims(SHAPES[name])
    at = [arrays.position(d) for d in dims]
    is_mask = name == "keep"
    source = Source(name, grad_flows=name in ("q", "k"))
    return Array(capture(source, BOOL if is_mask else FLOAT, at=at), dims)


def values() -> dict[Source, Tensor]:
    g = torch.Generator().manual_seed(3)
    found = {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in SHAPES.items()}
    found["keep"] = torch.arange(KEYS)[None] < torch.tensor([[KEYS], [KEYS - 2]])
    return {Source(n, grad_flows=n in ("q", "k")): x for n, x in found.items()}


def transposed(x: Array, i: int, j: int) -> Array:
    dims = list(x.dims)
    dims[i], dims[j] = dims[j], dims[i]
    return Array(x.expr, tuple(dims))


def both(function: Callable[..., Node], *given: Array) -> Array:
    exprs, dims = met(*given)
    return Array(function(*exprs), dims)


def scaled(x: Array, by: float) -> Array:
    return x.map(lambda e: c.scaled(by, e))


def lse(x: Array) -> Array:
    return over(LOGSUMEXP, x, [-1], keepdim=True)


def log_softmax(x: Array) -> Array:
    return both(c.subtracted, x, lse(x))


def exp(x: Array) -> Array:
    return x.map(functions.exponential)


def log(x: Array) -> Array:
    return x.map(functions.logarithm)


def total(x: Array, *dims: int) -> Array:
    return over(SUM, x, dims or range(len(x.dims)))


def softmax_by_hand(x: Array) -> Array:
    shifted = exp(both(c.subtracted, x, over(MAX, x, [-1], keepdim=True)))
    return both(functions.quotient, shifted, total_kept(shifted))


def total_kept(x: Array) -> Array:
    return over(SUM, x, [-1], keepdim=True)


def student(scale_first: bool = False, repeat: bool = True) -> Array:
    """Scores of GQA: heads are part of a projection, key heads are repeated or grouped."""
    q = transposed(reshaped(tensor("q"), (BATCH, ROWS, HEADS, DIM)), 1, 2)
    k = transposed(reshaped(tensor("k"), (BATCH, KEYS, KV_HEADS, DIM)), 1, 2)
    q = scaled(q, DIM**-0.5) if scale_first else q
    group = HEADS // KV_HEADS
    if repeat:  # repeat_interleave: the key head is read at h // group
        axis = arrays.fresh_axis(group)
        dims = (*k.dims[:1], (*k.dims[1], axis), *k.dims[2:])
        scores = matmul(q, transposed(Array(k.expr, dims), -1, -2))
    else:
        grouped = reshaped(q, (BATCH, KV_HEADS, group, ROWS, DIM))
        k = Array(k.expr, (*k.dims[:2], (), *k.dims[2:]))
        scores = reshaped(matmul(grouped, transposed(k, -1, -2)), (BATCH, HEADS, ROWS, KEYS))
    return scores if scale_first else scaled(scores, DIM**-0.5)


def teacher() -> Array:
    return scaled(matmul(tensor("tq"), transposed(tensor("tk"), -1, -2)), 0.5)


def causal(x: Array, additive: bool) -> Array:
    """Keys up to row + KEYS - ROWS, as a mask that is added or filled in."""
    i, j = arrays.position(x.dims[-2]), arrays.position(x.dims[-1])
    is_later = c.nonnegative(c.linear(-1.0 - (KEYS - ROWS), [(1.0, j), (-1.0, i)]))
    if additive:
        mask = c.choose(is_later, const(-math.inf), const(0.0))
        return x.map(lambda e: c.linear(0.0, [(1.0, e), (1.0, mask)]))
    return x.map(lambda e: c.choose(is_later, const(-math.inf), e))


def padded_keys(x: Array) -> Array:
    keep = tensor("keep")
    keep = Array(keep.expr, (keep.dims[0], (), (), keep.dims[1]))
    return both(lambda m, e: c.choose(m, e, const(-math.inf)), keep, x)


def kl(p: Array, log_s: Array) -> Array:
    """The sum over keys of P (log P - log S), by row."""
    difference = both(c.subtracted, log(p), log_s)
    return total(both(c.product, p, difference), -1)


def _naive_scores() -> tuple[Tensor, Tensor, Tensor]:
    x = {s.name: t for s, t in values().items()}
    q = x["q"].view(BATCH, ROWS, HEADS, DIM).transpose(1, 2)
    k = x["k"].view(BATCH, KEYS, KV_HEADS, DIM).transpose(1, 2)
    k = k.repeat_interleave(HEADS // KV_HEADS, 1)
    return q @ k.mT * DIM**-0.5, x["tq"] @ x["tk"].mT * 0.5, x["keep"]


def _plain() -> tuple[list[Array], Tensor]:
    found = []
    for scale_first in (True, False):
        for repeat in (True, False):
            s = student(scale_first, repeat)
            found += [kl(exp(log_softmax(teacher())), log_softmax(s))]
    found.append(kl(softmax_by_hand(teacher()), log(softmax_by_hand(student()))))
    s, t, _ = _naive_scores()
    return found, F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)


def _causal() -> tuple[list[Array], Tensor]:
    pairs = [(causal(student(), x), causal(teacher(), y)) for x in (0, 1) for y in (0, 1)]
    found = [kl(softmax_by_hand(causal(teacher(), False)), log_softmax(causal(student(), True)))]
    found += [kl(exp(log_softmax(t)), log_softmax(s)) for s, t in pairs]
    s, t, _ = _naive_scores()
    hidden = torch.ones(ROWS, KEYS, dtype=torch.bool).triu(KEYS - ROWS + 1)
    log_s, log_t = (x.masked_fill(hidden, -math.inf).log_softmax(-1) for x in (s, t))
    return found, (log_t.exp() * (log_t - log_s)).nansum(-1)


def _padded() -> tuple[list[Array], Tensor]:
    s, t = padded_keys(causal(student(), False)), padded_keys(causal(teacher(), False))
    other = causal(padded_keys(student()), True)
    found = [kl(exp(log_softmax(t)), log_softmax(x)) for x in (s, other)]
    s, t, keep = _naive_scores()
    hidden = torch.ones(ROWS, KEYS, dtype=torch.bool).triu(KEYS - ROWS + 1)
    hidden = hidden | ~keep[:, None, None]
    log_s, log_t = (x.masked_fill(hidden, -math.inf).log_softmax(-1) for x in (s, t))
    return found, (log_t.exp() * (log_t - log_s)).nansum(-1)


LOSSES = {"plain": _plain, "causal": _causal, "padded": _padded}


def site_of(x: Array) -> Node:
    """The outermost sum over keys, without the numbers and masks of rows around it."""
    found = [n for n in reversed(walk([x.expr])) if n.op == "reduce" and n.value.kind == SUM]
    return found[0]


@pytest.mark.parametrize("name", LOSSES)
def test_one_form_however_it_is_written(name: str) -> None:
    found, expected = LOSSES[name]()
    first = found[0]
    order = [a for d in first.dims for a in d]
    got = evaluate(first.expr, values(), order=order).reshape(expected.shape)
    torch.testing.assert_close(got, expected)
    # with one name for each dimension, the forms are one node
    forms = {arrays.renamed(x, _names(x, first)).expr for x in found}
    # the gradient of a mask that is added to trained scores flows at all keys: another form
    assert len(forms) == (1 if name == "plain" else 2)


def _names(x: Array, like: Array) -> dict[arrays.Axis, arrays.Axis]:
    x_axes, axes = ([a for d in y.dims for a in d] for y in (x, like))
    assert [a.size for a in x_axes] == [a.size for a in axes]
    return dict(zip(x_axes, axes, strict=True))


@pytest.mark.parametrize("name", LOSSES)
def test_a_divergence_is_recognised_by_its_atoms(name: str) -> None:
    """On the mask, where a score is none of its fills: log-softmaxes become logP and logS."""
    body_of = site_of(LOSSES[name]()[0][0])
    key = arrays.fresh_axis(KEYS)
    body = opened(body_of, key)
    atoms = [n for n in walk([body]) if n.op == "log_softmax"]
    trained = [any(x.value.grad_flows for x in walk([a]) if x.op == "capture" and x.dtype == FLOAT)
               for a in atoms]  # fmt: skip
    assert sorted(trained) == [False, True]
    logs = {
        a: LOG_S if is_student else LOG_P for a, is_student in zip(atoms, trained, strict=True)
    }

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        if x in logs:
            return logs[x]
        return {LOG_P: P, LOG_S: S}[args[0]] if x.op == "exp" else remade(x, args)

    form = rebuilt([body], change, lambda x: x not in logs)[body]
    if form.op == "where":
        form = form.args[1]
    terms = {t.args: k for k, t in zip(form.value[1], form.args, strict=True)} if (
        form.op == "linear") else None  # fmt: skip
    assert terms is None
    assert set(form.args) == {P, c.subtracted(LOG_P, LOG_S)}
    assert bilinear(P * (LOG_P - LOG_S)) == Bilinear(tt=1.0, ts=-1.0)


def test_masks_are_structure_again() -> None:
    site = site_of(LOSSES["padded"]()[0][0])
    key = arrays.fresh_axis(KEYS)
    atom = next(n for n in walk([opened(site, key)]) if n.op == "log_softmax")
    conditions, score = set[Node](), atom.args[0]
    while score.op == "where":
        conditions |= c.literals(score.args[0])
        score = score.args[1]
    row = next(a for a in score.axes if a.size == ROWS)
    mask = structure_of(conditions, row, key)
    assert mask.right == KEYS - ROWS and mask.left is None and len(mask.others) == 1


def test_averaged_heads() -> None:
    """The mean over heads of probabilities is renormalised by what is 1."""
    p = exp(log_softmax(teacher()))
    mean = scaled(total(p, 1), 1.0 / HEADS)
    again = both(functions.quotient, mean, total_kept(mean))
    assert again.expr is mean.expr
    scores = scaled(total(teacher(), 1), 1.0 / HEADS)  # averaged before: one product of two axes
    (product,) = [n for n in walk([scores.expr]) if n.op == "contract"]
    assert len(product.value) == 2


def test_symbolic_sizes_are_interned() -> None:
    """Views split and merge axes of symbolic sizes, and meet where the sizes are one."""
    sizes = SymbolicSizes()
    n = ShapeEnv().create_unbacked_symint()
    assert sizes.of(n * 12) is sizes.of(12 * n) and sizes.of(n) is not sizes.of(n + 1)
    assert sizes.quotient(sizes.of(n * 12), sizes.of(n)) == 12
    assert sizes.quotient(sizes.of(n), 2) is None
    whole = sizes.of(n * 6)
    dims = arrays.new_dims((whole, 4))
    x = Array(capture("x", at=[arrays.position(d) for d in dims]), dims, sizes)
    parts = arrays.reshaped(x, (sizes.of(n), 3, 2, 4))
    merged = arrays.reshaped(parts, (sizes.of(n * 3), 8))
    bias_dims = arrays.new_dims((sizes.of(n * 3), 1))
    bias = Array(capture("b", at=[arrays.position(d) for d in bias_dims]), bias_dims, sizes)
    value = both(lambda a, b: c.linear(0.0, [(1.0, a), (1.0, b)]), merged, bias)
    given = {"x": torch.randn(30, 4), "b": torch.randn(15, 1)}
    extents = {sizes.of(n): 5, whole: 30, sizes.of(n * 3): 15}
    found = evaluate(value.expr, given, extents, [a for d in value.dims for a in d])
    torch.testing.assert_close(
        found.reshape(15, 8), given["x"].double().reshape(15, 8) + given["b"]
    )
    with pytest.raises(arrays.NoView):
        arrays.reshaped(merged, (sizes.of(n), 24 + 1))


def test_detached_tensors_are_others() -> None:
    s = student()
    assert detached(s.expr) is not s.expr and detached(s.expr).axes == s.expr.axes
    t = teacher()
    assert detached(t.expr) is t.expr


def test_stacked_terms_are_added() -> None:
    p, log_s = exp(log_softmax(teacher())), log_softmax(student())
    rows = kl(p, log_s)
    axis = arrays.fresh_axis(2)
    first = c.nonnegative(c.linear(0.0, [(-1.0, c.index(axis))]))
    stacked = Array(c.choose(first, rows.expr, c.scaled(2.0, rows.expr)), (*rows.dims, (axis,)))
    assert over(SUM, stacked, [-1]).expr is c.scaled(3.0, rows.expr)
    assert const(0, INT).dtype == INT
