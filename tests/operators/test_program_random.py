"""Random expressions: identities and the normal form mean what was written, in float64.

Of each expression there are three: literally as it was drawn, with the identities of `apply`, and
in normal form. They are equal wherever the literal one is a number, but where numbers are so large
that a rounding decides.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from tests.support.evaluate_program import evaluate
from tests.support.normal_form import canonical
from torch_streamkl.program.derive import adjoints
from torch_streamkl.program.graph import (
    BOOL,
    FLOAT,
    LOGSUMEXP,
    MAX,
    ONE,
    SUM,
    Axis,
    Node,
    apply,
    capture,
    const,
    index,
    literally,
    reduce,
)
from torch_streamkl.program.operations import Build
from torch_streamkl.program.walks import rebuilt, walk, with_args

ROW, KEY = Axis("row", 3), Axis("key", 5)
LEAVES = [capture(name, FLOAT, frozenset((ROW, KEY))) for name in "xy"]
LEAVES += [capture("r", FLOAT, frozenset((ROW,))), const(0.5), const(-2.0), const(1.0)]
MASKS = [capture("m", BOOL, frozenset((ROW, KEY))), capture("k", BOOL, frozenset((KEY,)))]
MASKS += [literally("le", index(KEY), index(ROW))]
UNARY = ("neg", "exp", "log", "abs", "tanh", "sigmoid", "relu", "sqrt", "softplus")
BINARY = ("add", "sub", "mul", "div", "minimum", "maximum", "clamp_min", "logaddexp")


def drawn(rng: random.Random, size: int) -> Node:
    """An expression of so many operations, made without identities."""
    pool = list(LEAVES)
    for _ in range(size):
        kind = rng.random()
        x, y = (rng.choice(pool[-4:] if rng.random() < 0.6 else pool) for _ in range(2))
        if kind < 0.25:
            new = literally(rng.choice(UNARY), x)
        elif kind < 0.65:
            new = literally(rng.choice(BINARY), x, y)
        elif kind < 0.8:
            fill = rng.choice([const(-math.inf), const(0.0), y])
            mask = rng.choice(MASKS)
            mask = literally("not", mask) if rng.random() < 0.3 else mask
            new = literally("where", mask, *((x, fill) if rng.random() < 0.7 else (fill, x)))
        elif kind < 0.9:
            value = reduce(LOGSUMEXP, KEY, x)
            new = literally("sub", x, value)
            new = literally("exp", new) if rng.random() < 0.5 else new
        else:
            new = reduce(rng.choice([SUM, LOGSUMEXP, MAX]), KEY, x)
        pool.append(new)
    return pool[-1]


def tensors(kind: str) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(3, 5, generator=g, dtype=torch.float64) for _ in range(2))
    m = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1], [1, 1, 0, 1, 1]], dtype=torch.bool)
    if kind == "infinite":
        x[0, 1], y[2, 3] = -math.inf, -math.inf
    if kind == "empty":
        m[1], x[2] = False, -math.inf
    r = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64)
    return {"x": x, "y": y, "m": m, "r": r, "k": torch.tensor([True, True, False, True, True])}


def simplified(root: Node) -> Node:
    return rebuilt([root], with_args)[root]


def check(written: Node, other: Node, kind: str) -> None:
    given = tensors(kind)
    order = [ROW, KEY]
    steps = [x for x in walk([written]) if x.dtype == FLOAT]
    values = [evaluate(x, given, order=order) for x in steps]
    expected, found = values[-1], evaluate(other, given, order=order)
    sizes = torch.stack([v.abs().nan_to_num(0.0, posinf=0.0) for v in values]).amax(0)
    # infinities meet on the way, or digits are lost: nobody may rely on such a value
    known = ~torch.stack([v.isnan() for v in values]).any(0) & (sizes < 1e6)
    known &= ~torch.stack([v == math.inf for v in values]).any(0)
    close = (found - expected).abs() <= 1e-7 * (1.0 + sizes**2)
    same = close | (found == expected)
    assert same[known].all(), (written, other, found, expected)


@pytest.mark.parametrize("seed", range(20))
def test_values(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        written = drawn(rng, rng.randint(2, 9))
        for kind in ("finite", "infinite", "empty"):
            check(written, simplified(written), kind)
            check(written, canonical(written), kind)


@pytest.mark.parametrize("seed", range(5))
def test_gradients(seed: int) -> None:
    """Of finite scores, by the table's rules and by autograd."""
    rng = random.Random(100 + seed)
    for _ in range(8):
        written = drawn(rng, rng.randint(2, 6))
        if any(x.op == "reduce" for x in walk([written])) or written.op == "const":
            continue
        given = tensors("finite")
        wanted = ["x", "y"]
        for name in wanted:
            given[name].requires_grad_()
        value = evaluate(written, given, order=[ROW, KEY])
        if not value.requires_grad or not value.isfinite().all():
            continue
        inputs = [given[n] for n in wanted]
        expected = torch.autograd.grad(value.sum(), inputs, allow_unused=True)
        for build in (apply, literally):
            _check_gradients(written, build, given, expected)


def _check_gradients(
    written: Node, build: Build, given: dict[str, Tensor], expected: tuple[Tensor | None, ...]
) -> None:
    found = adjoints([(written, ONE)], build)
    plain = {n: t.detach() for n, t in given.items()}
    for leaf, wanted in zip(LEAVES, expected, strict=False):
        got = torch.zeros(3, 5, dtype=torch.float64)
        if leaf in found:
            got = evaluate(found[leaf], plain, order=[ROW, KEY])
        want = torch.zeros(3, 5, dtype=torch.float64) if wanted is None else wanted
        known = want.isfinite() & got.isfinite() & (want.abs() < 1e6)
        torch.testing.assert_close(got[known], want[known], rtol=1e-7, atol=1e-9)
