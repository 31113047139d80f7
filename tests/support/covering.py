"""Which rows of a product `make test` takes; the others are marked slow.

Most mistakes need one value of one axis, or two of two. Of a test with three axes or more the rows
in which any two values meet are quick, of one with two axes those in which every value occurs, and
whatever catches a mutation.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[2] / "docs" / "evidence" / "mutations.md"


def quick_rows(
    rows,
    kept=(),
    costly=(),
    most=2,
):
    """Rows that have every combination of ``most`` values that any has, and those of ``kept``.

    Each is the one with most combinations that are new: of several the first, or where only values
    count the one with rarer values. A value that is ``costly`` (axis, value) counts four times.
    """
    strength = max(1, min(most, len(rows[0]) - 1))
    left = {i: set(combinations(enumerate(row), strength)) for i, row in enumerate(rows)}
    uses = Counter()
    chosen = set(kept)

    def choose(row):
        chosen.add(row)
        uses.update(enumerate(rows[row]))
        new = left.pop(row)
        for other in list(left):
            left[other] -= new
            if not left[other]:
                del left[other]

    for row in kept:
        if row in left:
            choose(row)

    def worth(row):
        if strength > 1:
            return len(left[row]), 0
        common = sum(uses[x] * (4 if x in costly else 1) for x in enumerate(rows[row]))
        return len(left[row]), -common

    while left:
        choose(max(left, key=worth))
    return chosen


def _catching():
    """Tests that the table of mutations names."""
    return set(re.findall(r"`([^`\n]+::[^`\n]+)` \|$", FAULTS.read_text(), re.MULTILINE))


def mark_slow(items):
    """Tests of products; those for a GPU run where there is one, all of them."""
    products = defaultdict(list)
    for item in items:
        marked = item.get_closest_marker("slow") or item.get_closest_marker("gpu")
        if hasattr(item, "callspec") and not marked:
            products[item.nodeid.split("[")[0]].append(item)
    catching = _catching()
    for cases in products.values():
        axes, rows = _rows(cases)
        if len(axes) < 2:
            continue
        symbolic = [(i, (id(True),)) for i, axis in enumerate(axes) if axis == ["dynamic"]]
        kept = [i for i, x in enumerate(cases) if x.nodeid.removeprefix("tests/") in catching]
        quick = quick_rows(rows, kept, symbolic)
        for i, case in enumerate(cases):
            if i not in quick:
                case.add_marker(pytest.mark.slow)


def reason_not_to_run(item):
    """Why a test cannot run on this machine: the reason of a `skipif` that is true, or None.

    A library that is not installed is no such reason: somebody could install it.
    """
    for mark in item.iter_markers("skipif"):
        reason = mark.kwargs.get("reason", "")
        if any(mark.args) and "is not installed" not in reason:
            return str(reason)
    return None


def _rows(cases):
    """Axes and values on them; arguments of one decorator are one axis, as is a fixture's."""
    marks = [mark.args[0] for mark in cases[0].iter_markers("parametrize")]
    axes = [x.replace(" ", "").split(",") if isinstance(x, str) else list(x) for x in marks]
    named = {name for axis in axes for name in axis}
    axes += [[name] for name in cases[0].callspec.params if name not in named]
    columns = [[tuple(id(c.callspec.params[n]) for n in axis) for c in cases] for axis in axes]
    used = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    return [axes[i] for i in used], list(zip(*(columns[i] for i in used), strict=True))


def every(step, values, first=0):
    """Parameters (tuples are rows) of which every ``step``-th is quick: others are like it."""
    return [
        pytest.param(
            *(x if isinstance(x, tuple) else (x,)),
            marks=[] if i % step == first else [pytest.mark.slow],
        )
        for i, x in enumerate(values)
    ]


def only(quick, values):
    """Parameters of which those in ``quick`` are; the others are alike, or take much longer."""
    return [pytest.param(x, marks=[] if x in quick else [pytest.mark.slow]) for x in values]
