"""Kernels whose integer arguments are all 1, which Triton makes Python's constants of.

What is a tensor for any other number is an int there, without a tensor's methods: a call with one
token, one vocabulary entry, one row. Triton's interpreter does not do that, and sizes of tests are
larger.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.offline import check_frontend
from bench.offline.cells import Cell, launches_of
from tests.support.covering import only

outside = pytest.mark.skipif(torch.cuda.is_available(), reason="launches are recorded without one")
# one of each kernel and variant; `make test-slow` has the others
QUICK = (
    ("attention", "masks"), ("few queries", "js"), ("attention", "padding"),
    ("head mean", "masks"), ("hopper", "packed"), ("LM head", "js"),
    ("row program of heads", "masks"), ("row program of LM heads", "plain"),
)  # fmt: skip
CELLS = [
    Cell(
        "sm_90", work, "bf16", 0 if work in ("LM head", "row program of LM heads") else 64, variant
    )
    for work, variant in [
        ("attention", "js"),
        ("attention", "masks"),
        ("attention", "padding"),
        ("few queries", "plain"),
        ("few queries", "js"),
        ("head mean", "masks"),
        ("hopper", "js"),
        ("hopper", "masks"),
        ("hopper", "packed"),
        ("LM head", "masks"),
        ("LM head", "js"),
        ("row program", "masks"),
        ("row program of heads", "masks"),
        ("row program of LM heads", "plain"),
        ("row program of LM heads", "masks"),
    ]
]


def ones(value: Any) -> Any:
    """The argument with every integer replaced, tuples' parts too."""
    if isinstance(value, tuple):
        parts = [ones(x) for x in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return 1 if isinstance(value, int) and not isinstance(value, bool) else value


@pytest.mark.parametrize(
    "cell",
    only([c for c in CELLS if (c.work, c.variant) in QUICK], CELLS),
    ids=lambda c: f"{c.work}-{c.variant}",
)
def test_a_kernel_takes_ones(cell: Cell) -> None:
    launches = launches_of(cell)
    assert launches
    for launch in launches:
        constexprs = {p.name for p in launch.kernel.params if p.is_constexpr}
        args = {k: x if k in constexprs else ones(x) for k, x in launch.args.items()}
        check_frontend(replace(launch, args=args), cell.target)
