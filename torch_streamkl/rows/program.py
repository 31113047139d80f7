"""Represents a row program as data: reductions over keys, pass by pass, and outputs.

NOTE [The algebra]
Elements e_ij are functions of dot products, captured tensors and per-row values. A reduction gives
a per-row value: R_c = sum_j e_c,ij, or the log-sum-exp over j. Elements of later reductions may
use earlier ones, so a reduction has a level: 1, or one more than the highest level that it uses.
The forward pass reads the keys once for each level. Next to the sums it accumulates the Jacobians

    K_cb = sum_j de_c/dR_b,    for a log-sum-exp  sum_j exp(e_c - R_c) de_c/dR_b

With g the gradients to the outputs, the per-row values have r_c = g_c + sum_{c' > c} r_c' K_c'c.
One pass over the keys, however many levels there are, then gives the gradient of everything else:

    sum_c r_c (de_c/dx for a sum, exp(e_c - R_c) de_c/dx for a log-sum-exp)

NOTE [Two parts of a log-sum-exp]
If a mask has replaced every score of a row by the lowest number, R_c is that number: the logarithm
of the count of keys is lost in it, and exp(e - R_c) is 1 instead of the softmax's 1 / count. A
log-sum-exp is therefore kept as its largest element and the logarithm of the sum of the others
relative to it, and e - R_c is (e - peak) - log_sum.

NOTE [Sums over blocks of keys]
A "block_sum" is R_c,in = sum_{j // size = n} e_c,ij: a value of a row and of a block of ``size``
keys, the last of which may be shorter. It is an output, and no element uses it. Its derivative is
that of a sum, with a gradient of rows and blocks instead of one of rows: the seed of element j is
g_c,i(j // size), and r_b gets sum_n g_c,in K_cb,in, where K_cb is summed over blocks, too.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from torch_streamkl.program.graph import BLOCK_SUM, LOGSUMEXP, Axis, Node, reduce
from torch_streamkl.program.graph import KEY as KEYS
from torch_streamkl.program.graph import ROW as ROWS
from torch_streamkl.program.masks import ALL_KEYS, Keys
from torch_streamkl.program.steps import Reduced, Schedule, Step, head_axes, nodes_of, steps_of

ROW, KEY, PAIR, COLUMNS, VALUES = "row", "key", "pair", "columns", "values"


@dataclass(frozen=True)
class Capture:
    """Describes a captured tensor that elements read.

    "row" and "key" tensors are [batch, heads or 1, rows] and [batch, heads or 1, keys], "pair"
    tensors [batch, heads or 1, rows, keys], each batch possibly 1 and pairs of any broadcast.
    "columns" are ids of keys, [batch, heads or 1, rows, k], as elements whether a key is one of
    them; "values" belong to such ids, and are 0 at other keys.
    """

    kind: str
    dtype: str
    head: int
    ids: int = -1  # of values: the capture with the ids

    @property
    def axes(self) -> frozenset[Axis]:
        """Returns the axes of its elements."""
        along = {ROW: {ROWS}, KEY: {KEYS}}.get(self.kind, {ROWS, KEYS})
        return head_axes(self.head) | along


@dataclass(frozen=True)
class Program:
    """Holds everything but sizes and tensors. Programs that compute the same have equal texts."""

    dot_heads: tuple[int, ...]
    captures: tuple[Capture, ...]
    nodes: tuple[Step, ...]
    reductions: tuple[Reduced, ...]
    outputs: tuple[int, ...]
    keys: Keys = ALL_KEYS

    def __hash__(self) -> int:
        return self._hash  # every launch looks for its kernel by the program

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.text)

    @functools.cached_property
    def text(self) -> str:
        """Returns the program as an argument of an operator."""
        captures, keys = [*map(astuple, self.captures)], astuple(self.keys)
        reductions = [r if r.size else r[:-1] for r in self.reductions]
        parts = [self.dot_heads, captures, self.nodes, reductions, self.outputs, keys]
        return json.dumps(parts, separators=(",", ":"))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(text: str) -> Program:
        """Returns the program of a text."""
        heads, captures, nodes, reductions, outputs, keys = json.loads(text)
        return Program(
            tuple(heads),
            tuple(Capture(*c) for c in captures),
            steps_of(nodes),
            tuple(Reduced(*r) for r in reductions),
            tuple(outputs),
            Keys(*keys),
        )

    def with_lowest(self, lowest: float) -> Program:
        """Returns the program with a number in place of -inf."""
        nodes = (
            n._replace(value=lowest) if n.op == "const" and n.value == -math.inf else n
            for n in self.nodes
        )
        return replace(self, nodes=tuple(nodes))

    @functools.cached_property
    def digest(self) -> str:
        """Returns the digest that identifies a canonical program."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """Returns the level of each reduction, from 1."""
        below: list[int] = []  # of each node, the highest level that it uses
        levels: list[int] = []
        for node in self.nodes:
            if node.op == "reduction":
                number = int(node.value)
                while len(levels) <= number:
                    levels.append(below[self.reductions[len(levels)].node] + 1)
                below.append(levels[number])
            else:
                below.append(max((below[a] for a in node.args), default=0))
        while len(levels) < len(self.reductions):
            levels.append(below[self.reductions[len(levels)].node] + 1)
        return tuple(levels)

    @functools.cached_property
    def exprs(self) -> tuple[Node, ...]:
        """Returns the expressions that the steps compute."""
        return tuple(nodes_of(self.nodes, self.reductions, [c.axes for c in self.captures]))

    @functools.cached_property
    def reduced(self) -> tuple[Node, ...]:
        """Returns the reductions as expressions."""
        return tuple(reduce(r.kind, KEYS, self.exprs[r.node], r.size) for r in self.reductions)

    def schedule(self) -> Schedule:
        """Returns a schedule that begins with the program's own steps."""
        schedule = Schedule()
        schedule.begin_with(self.nodes, self.exprs)
        for x in self.reduced:
            schedule.reduction(x)
        return schedule

    @functools.cached_property
    def logsumexps(self) -> tuple[int, ...]:
        """Returns the indices of the reductions that are log-sum-exps."""
        return tuple(c for c, r in enumerate(self.reductions) if r.kind == LOGSUMEXP)

    @property
    def has_blocks(self) -> bool:
        """Returns whether something is summed over blocks of keys."""
        return any(r.kind == BLOCK_SUM for r in self.reductions)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names each tensor of the operator, in order."""
        names = [f"{side}{i}" for i in range(len(self.dot_heads)) for side in ("rows", "columns")]
        names += [f"capture{i}" for i in range(len(self.captures))]
        return (*names, *["lengths"] * self.keys.has_lengths, *["mask"] * self.keys.has_mask)


def program_of(
    dot_heads: tuple[int, ...], captures: tuple[Capture, ...], outputs: Sequence[Node], keys: Keys
) -> tuple[Program, tuple[int, ...]]:
    """Returns the program of reductions, and the number of each in it.

    The program is one, whatever order it was written in. Arguments of commutative operations are
    sorted by what they compute, and reductions stand in the order in which the outputs first need
    them. So reductions of ``x * y`` and ``y * x`` are one, which the program has once.
    """
    schedule = Schedule(is_sorted=True)
    numbers = tuple(schedule.reduction(x) for x in outputs)
    steps, reductions = tuple(schedule.steps), tuple(schedule.reductions)
    different = tuple(dict.fromkeys(numbers))
    return Program(dot_heads, captures, steps, reductions, different, keys), numbers
