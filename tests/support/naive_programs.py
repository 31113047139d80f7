"""Naive losses as programs, built by hand: what the rewrite's reader makes of them, in short.

Each is a function of `Tensors`, which hands out captured tensors and draws their values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from torch_streamkl.fx_passes.reading import arrays
from torch_streamkl.fx_passes.reading.arrays import Array, met
from torch_streamkl.fx_passes.reading.rules.reductions import over
from torch_streamkl.program import canonical as c
from torch_streamkl.program import functions
from torch_streamkl.program.fresh_axes import fresh_axis
from torch_streamkl.program.graph import (
    BOOL,
    FLOAT,
    INT,
    LOGSUMEXP,
    SUM,
    Source,
    capture,
    const,
)
from torch_streamkl.program.reductions import contraction

BATCH, HEADS, ROWS, KEYS, DIM, VOCAB = 2, 4, 5, 7, 3, 11


@dataclass
class Tensors:
    """Hands out captured tensors by name, with values in float64."""

    values: dict[Source, Tensor] = field(default_factory=dict)

    def make(self, name, *shape, grad=False, of=None):
        """Returns a tensor; of normal numbers where no values are given."""
        source = Source(name, grad_flows=grad)
        if source not in self.values:
            g = torch.Generator().manual_seed(len(self.values))
            drawn = torch.randn(shape, generator=g, dtype=torch.float64)
            self.values[source] = drawn if of is None else of
        kinds = {torch.bool: BOOL, torch.int64: INT}
        dtype = kinds.get(self.values[source].dtype, FLOAT)
        dims = new_dims(self.values[source].shape)
        return Array(capture(source, dtype, at=[arrays.position(d) for d in dims]), dims)


def new_dims(shape):
    """Returns a new axis for each dimension that has an index."""
    return tuple(() if size == 1 else (fresh_axis(size),) for size in shape)


def matmul(a, b):
    """Returns the product of captured tensors [..., m, d] and [..., d, n], batches broadcast."""
    a = replace(a, dims=(*a.dims[:-1], (), a.dims[-1]))
    b = replace(b, dims=(*b.dims[:-2], (), b.dims[-1], b.dims[-2]))
    (x, y), dims = met(a, b)
    return Array(contraction(x, y, dims[-1]), dims[:-1])


def swapped(x, i, j):
    dims = list(x.dims)
    dims[i], dims[j] = dims[j], dims[i]
    return Array(x.expr, tuple(dims))


def both(function, *given):
    exprs, dims = met(*given)
    return Array(function(*exprs), dims)


def scaled(x, by):
    return x.map(lambda e: c.scaled(by, e))


def plus(x, y, by=1.0):
    return both(lambda a, b: c.linear(0.0, [(1.0, a), (by, b)]), x, y)


def minus(x, y):
    return plus(x, y, -1.0)


def times(x, y):
    return both(c.product, x, y)


def over_by(x, y):
    return both(functions.quotient, x, y)


def log_softmax(x):
    return both(c.subtracted, x, over(LOGSUMEXP, x, [-1], keepdim=True))


def exp(x):
    return x.map(functions.exponential)


def log(x):
    return x.map(functions.logarithm)


def softmax(x):
    return exp(log_softmax(x))


def total(x, *dims):
    return over(SUM, x, dims or range(len(x.dims)))


def mean(x, *dims):
    every = dims or tuple(range(len(x.dims)))
    count = math.prod(n for d, n in enumerate(x.shape) if d in [e % len(x.dims) for e in every])
    return scaled(total(x, *every), 1.0 / count)


def tanh(x):
    return x.map(lambda e: functions.function("tanh", e))


def softcapped(x, cap):
    return scaled(tanh(scaled(x, 1.0 / cap)), cap)


def filled(x, keep, fill):
    return both(lambda m, e: c.choose(m, e, const(fill)), keep, x)


def added_mask(x, keep, fill):
    mask = keep.map(lambda m: c.choose(m, const(0.0), const(fill)))
    return plus(x, mask)


def band(x, left, right):
    """Returns the condition of a window on the last two dimensions, aligned at the end."""
    i, j = arrays.position(x.dims[-2]), arrays.position(x.dims[-1])
    shift = float(x.shape[-1] - x.shape[-2])  # type: ignore[operator]
    ends = []
    if right is not None:
        ends.append(c.nonnegative(c.linear(shift + right, [(1.0, i), (-1.0, j)])))
    if left is not None:
        ends.append(c.nonnegative(c.linear(left - shift, [(-1.0, i), (1.0, j)])))
    return Array(c.all_of(*ends), ((),) * (len(x.dims) - 2) + x.dims[-2:])


def repeated(x, d, count):
    """Returns ``repeat_interleave`` along a dimension."""
    axis = arrays.fresh_axis(count)
    dims = list(x.dims)
    dims[d] = (*dims[d], axis)
    return Array(x.expr, tuple(dims))


def padding(t):
    """Returns which keys a padded batch has, broadcast to its scores."""
    keep = torch.arange(KEYS)[None] < torch.tensor([[KEYS], [KEYS - 2]])
    x = t.make("keep", of=keep)
    return Array(x.expr, (x.dims[0], (), (), x.dims[1]))


def scores(t, side, kv_heads=HEADS, scale=DIM**-0.5):
    """Returns attention scores of a student, which is trained, or a teacher."""
    grad = side == "s"
    q = t.make(f"{side}q", BATCH, HEADS, ROWS, DIM, grad=grad)
    k = t.make(f"{side}k", BATCH, kv_heads, KEYS, DIM, grad=grad)
    if kv_heads != HEADS:
        k = repeated(k, 1, HEADS // kv_heads)
    return scaled(matmul(q, swapped(k, -1, -2)), scale)


def logits(t, side, vocab=VOCAB):
    """Returns logits of a language-model head."""
    grad = side == "s"
    hidden = t.make(f"{side}h", BATCH, ROWS, DIM, grad=grad)
    weight = t.make(f"{side}w", vocab, DIM, grad=grad)
    return matmul(hidden, swapped(weight, -1, -2))


def kl(s, t):
    """Returns the forward KL of two tensors of scores, by row."""
    log_t = log_softmax(t)
    return total(times(exp(log_t), minus(log_t, log_softmax(s))), -1)


def reverse_kl(s, t):
    return kl(t, s)


def js(s, t, beta=0.5):
    p, q = softmax(t), softmax(s)
    mixture = log(plus(scaled(p, beta), q, 1.0 - beta))
    left = times(p, minus(log(p), mixture))
    right = times(q, minus(log(q), mixture))
    return total(plus(scaled(left, beta), right, 1.0 - beta), -1)


def variation(s, t):
    gap = minus(softmax(t), softmax(s)).map(lambda e: functions.function("abs", e))
    return scaled(total(gap, -1), 0.5)


def clamped_kl(s, t, least=1e-3):
    q = softmax(s).map(lambda e: functions.function("clamp_min", e, const(least)))
    p = softmax(t)
    return total(times(p, minus(log(p), log(q))), -1)


def lifted_kl(s, t, eps=1e-3):
    def lift(e):
        return functions.logarithm(c.linear(eps, [(1.0, e)]))

    p, q = softmax(t), softmax(s)
    return total(times(p, minus(p.map(lift), q.map(lift))), -1)


def average(x):
    """Returns the mean of probabilities over heads, renormalised as people do."""
    p = mean(softmax(x), 1)
    return over_by(p, over(SUM, p, [-1], keepdim=True))


def alone(x):
    """Returns the axes of a tensor, in the order of its dimensions."""
    return [a for d in x.dims for a in d]
