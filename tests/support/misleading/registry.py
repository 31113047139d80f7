"""A table of programs that look like something else than they are, and how to add to it.

A program is a function whose parameter names say what it gets: `q` and `k` make the student's
scores, `qt` and `kt` the teacher's, `h` and `w` (`ht`, `wt`) the student's (teacher's) logits.
`s`, `t` are those scores (`raw`, `raw_t` without a scale) and `z`, `zt` those logits, of which
`log_s` and `p_s` are the (log-)probabilities; `frozen_s` are scores that are made in no_grad.
What is not named in `trained` needs no gradient. All is in float64, where what a compiled program
does differently is either rounding or a mistake, except for programs about narrower dtypes.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.made_inputs import of_inputs, with_probabilities

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 2, 40, 48, 8
TOKENS, VOCAB, STUDENT_WIDTH, TEACHER_WIDTH = 24, 64, 16, 12
INFINITY = float("inf")

FAULTS = {
    "W1": "equal expressions, one of which records no gradient, are one value",
    "W2": "a factor, bias or sink of a side that is not trained gets a gradient",
    "W3": "a slice that starts before the first entry is not clamped",
    "W4": "an index tensor with one entry keeps its coefficient when it is broadcast",
    "W5": "a constant added to scores is dropped where it matters",
    "W6": "indices are computed without the rounding and wrapping of their dtype",
    "W7": "sums over the same dimensions of different extents are one sum",
    "W8": "an operator of somebody else means what its name says",
    "W9": "nan_to_num is the identity",
    "W10": "a narrowing cast is the identity",
    "W11": "isinf and isnan are one question, whatever is kept",
    "X1": "heads that are regrouped in another order are paired as before",
    "X2": "a mean over all heads is paired with groups of heads",
    "X3": "key heads are placed in a group of another size",
    "X4": "values lose their gradient when only the map is detached",
    "X5": "a map is cast before its softmax instead of after it",
    "X6": "labels change, or record no gradient, between two losses",
    "X7": "gradient flow is asked for at the softmax only",
    "X8": "gradient that is switched off after the softmax flows",
    "X9": "a detached log-sum-exp, sum or mixture is not detached",
    "X10": "statistics of another layout of the scores are those of the scores",
    "X11": "a reinterpreted or unevenly repeated operand is a reshaped one",
    "X12": "padding of negative width crops nothing",
    "X13": "a negative start is an offset from the first entry",
    "X14": "a mask of more rows than the scores does not enlarge them",
    "X15": "divisors are counted, whatever they are",
    "X16": "a lookup that renormalises its table does not write",
}

SHAPES = {
    "q": (BATCH, HEADS, QUERIES, DIM),
    "k": (BATCH, HEADS, KEYS, DIM),
    "v": (BATCH, HEADS, KEYS, DIM),
    "qt": (BATCH, HEADS, QUERIES, DIM),
    "kt": (BATCH, HEADS, KEYS, DIM),
    "ls": (),  # the logarithm of a scale
    "tau": (),  # a temperature, positive
    "b": (QUERIES, KEYS),  # a bias of scores
    "sink": (HEADS,),
    "rw": (QUERIES,),  # weights of rows
    "h": (TOKENS, STUDENT_WIDTH),
    "w": (VOCAB, STUDENT_WIDTH),
    "ht": (TOKENS, TEACHER_WIDTH),
    "wt": (VOCAB, TEACHER_WIDTH),
    "c": (VOCAB,),  # a bias of logits
    "tw": (TOKENS,),  # weights of tokens
    "x": (QUERIES,),  # anything else of the size of the queries
    "kb": (KEYS,),  # a bias of keys
    "hs": (HEADS,),  # scales of heads
    "table": (9, HEADS),  # biases of relative positions
    "ct": (VOCAB,),
    "q_b1": (1, HEADS, QUERIES, DIM),
    "k_b1": (1, HEADS, KEYS, DIM),
    "qt_b1": (1, HEADS, QUERIES, DIM),
    "kt_b1": (1, HEADS, KEYS, DIM),
    "q_h1": (BATCH, 1, QUERIES, DIM),
    "k_h1": (BATCH, 1, KEYS, DIM),
    "qt_h1": (BATCH, 1, QUERIES, DIM),
    "kt_h1": (BATCH, 1, KEYS, DIM),
    "wt_wide": (VOCAB, 2 * TEACHER_WIDTH),
}
INTEGERS = {
    "y": lambda g: torch.randint(0, VOCAB, (TOKENS,), generator=g),  # labels
    "bits": lambda g: torch.randn(VOCAB, TEACHER_WIDTH, generator=g, dtype=torch.float64).view(
        torch.int64
    ),
    "keep": lambda g: torch.rand(BATCH, KEYS, generator=g) > 0.3,  # keys
    "rows": lambda g: torch.rand(BATCH, QUERIES, generator=g) > 0.3,
    "tokens": lambda g: torch.rand(TOKENS, generator=g) > 0.3,
    "ids": lambda g: torch.randint(0, VOCAB, (5,), generator=g),
}
TRAINED = "q k v ls tau b sink rw h w c tw kb hs table q_b1 k_b1 q_h1 k_h1"


@dataclass(frozen=True)
class Program:
    """A function, what it gets, and what must be true of it next to that it equals eager."""

    name: str
    fn: Callable[..., Any]
    arguments: tuple[str, ...]
    trained: frozenset[str]
    shapes: dict[str, tuple[int, ...]]
    fault: str = ""  # the key in FAULTS of the mistake that it provokes
    fuses: int | None = None  # at least so many sites fuse, None where that is no promise
    dtype: torch.dtype = torch.float64
    dtypes: dict[str, torch.dtype] | None = None  # of single arguments
    dynamic: bool = False
    place: tuple[str, ...] = ()  # in a table: its name and the value on each axis

    def inputs(self):
        return [self._input(name) for name in self.arguments]

    def _input(self, name):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if name in INTEGERS:
            return INTEGERS[name](generator)
        shape = self.shapes.get(name) or SHAPES[name]
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name in ("ls", "tau", "rw", "tw", "hs"):
            x = 0.5 + x.abs()
        dtype = (self.dtypes or {}).get(name, self.dtype)
        return x.to(dtype).requires_grad_(name in self.trained)


PROGRAMS = {}
Function = Callable[..., Any]


def student(q, k):
    return q @ k.mT * 0.3


def product(q, k):
    return q @ k.mT


def logits(h, w):
    return h @ w.T


def without_gradient(how, fn, *args):
    """What ``fn`` computes, in no_grad, detached, or as it is."""
    if how == "no_grad":
        with torch.no_grad():
            return fn(*args)
    return fn(*args).detach() if how == "detach" else fn(*args)


def frozen(fn, *args):
    return without_gradient("no_grad", fn, *args)


# what a program may ask for next to its operands: of which it is made, and how
SCORES = {
    "s": ("q k", student),
    "t": ("qt kt", student),
    "raw": ("q k", product),
    "raw_t": ("qt kt", product),
    "z": ("h w", logits),
    "zt": ("ht wt", logits),
}
MADE = {
    **with_probabilities(SCORES),
    **{f"frozen_{x}": (of, functools.partial(frozen, make)) for x, (of, make) in SCORES.items()},
}


def register(name, fn, arguments="", **options):
    """Add a program; ``trained`` replaces what is trained, ``also`` adds to it."""
    assert name not in PROGRAMS, name
    fn, operands = of_inputs(fn, MADE, arguments.split())
    trained = frozenset(options.pop("trained", TRAINED).split())
    trained |= frozenset(options.pop("also", "").split())
    options.setdefault("shapes", {})
    assert options.get("fault", "") in ("", *FAULTS)
    PROGRAMS[name] = Program(name, fn, tuple(operands), trained, **options)


def misleading(fault, rows=None, **options):
    """Programs that provoke a fault: those of ``rows``, or by a decorator the decorated one."""
    return plain(rows, fault=fault, **options)


def plain(rows=None, name="", **options):
    """Programs that differ from misleading ones in the thing that matters, or from all."""
    for row, fn in (rows or {}).items():
        register(row, fn, **options)

    def add(fn):
        register(name or fn.__name__, fn, **options)
        return fn

    return add
