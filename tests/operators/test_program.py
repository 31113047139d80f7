"""The expression graph: its normal form means what is written, and views are substitutions.

Each identity is evaluated in float64 on finite scores, on scores with -inf and NaN, and with a row
that has no key. The normal form may have a number where what is written is NaN, nothing else.
"""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.support.evaluate_program import evaluate
from tests.support.naive_programs import new_dims
from tests.support.normal_form import canonical as normal
from torch_streamkl.fx_passes.reading import arrays
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.fx_passes.reading.sizes import Sizes
from torch_streamkl.program import canonical
from torch_streamkl.program.graph import (
    ANY,
    BOOL,
    FLOAT,
    INT,
    LOGSUMEXP,
    MAX,
    SUM,
    Axis,
    Extent,
    Node,
    Source,
    apply,
    capture,
    const,
    index,
    literally,
    reduce,
    size_of,
)
from torch_streamkl.program.reductions import detached, rounded, substitute
from torch_streamkl.program.walks import walk

NUM_ROWS, NUM_KEYS = 5, 7
ROW, KEY = Axis("row", NUM_ROWS), Axis("key", NUM_KEYS)
X, Y = (capture(name, FLOAT, frozenset((ROW, KEY))) for name in "xy")
M = capture("m", BOOL, frozenset((ROW, KEY)))
R = capture("r", FLOAT, frozenset((ROW,)))
K = capture("k", BOOL, frozenset((KEY,)))
CAUSAL = apply("le", index(KEY), index(ROW))


def lse(x: Node) -> Node:
    return reduce(LOGSUMEXP, KEY, x)


def total(x: Node) -> Node:
    return reduce(SUM, KEY, x)


def exp(x: Node) -> Node:
    return apply("exp", x)


def log(x: Node) -> Node:
    return apply("log", x)


def where(c: Node, a: Node | float, b: Node | float) -> Node:
    return apply("where", c, a, b)


def softmax(x: Node) -> Node:
    return exp(x - lse(x))


PEAK = reduce(MAX, KEY, X)
MASKED = where(M, X, -math.inf)
# what is written, and another way to write it
SAME: dict[str, tuple[Node, Node]] = {
    "order of a sum": (X + Y + R, R + (Y + X)),
    "scale and temperature": ((X * 0.5) / 4.0 + 1.0 - 1.0, X * 0.125),
    "a difference of nothing": (X - X + Y, Y),
    "a product's order": (X * (Y * R), (R * X) * Y),
    "a number of a product": ((X * 2.0) * (Y * 3.0), (X * Y) * 6.0),
    "a softmax by hand": (exp(X) / total(exp(X)), softmax(X)),
    "a softmax shifted by hand": (
        exp(X - PEAK) / total(exp(X - PEAK)),
        softmax(X),
    ),
    "a log-softmax of scaled scores": (X * 0.5 - lse(X * 0.5), log(softmax(X * 0.5))),
    "a log-softmax in pieces": ((Y + X) - (R + lse(X)), Y + ((X - lse(X)) - R)),
    "the logarithm of a softmax by hand": (log(exp(X) / total(exp(X))), X - lse(X)),
    "the shift of a log-sum-exp": (lse(X + PEAK), lse(X) + PEAK),
    "a sum of exponentials": (log(total(exp(X))), lse(X)),
    "a softmax sums to one": (total(softmax(X)), total(softmax(Y))),
    "a log-softmax has no normaliser": (lse(X - lse(X)), lse(Y - lse(Y))),
    "a factor of the row": (total(X * R), R * total(X)),
    "a divisor of the row": (total(X / R), total(X) / R),
    "a mixture": (
        log(softmax(X) * 0.25 + softmax(Y) * 0.75),
        apply("logaddexp", (Y - lse(Y)) + math.log(0.75), (X - lse(X)) + math.log(0.25)),
    ),
    "a mask that is multiplied": (X * M, where(M, X, 0.0)),
    "masks after each other": (
        where(M, where(K, X, -math.inf), -math.inf),
        where(apply("and", K, M), X, -math.inf),
    ),
    "a mask that is added": (X + where(M, 0.0, -math.inf), MASKED),
    "added masks": (
        (X + where(M, 0.0, -math.inf)) + where(K, 0.0, -math.inf),
        where(apply("and", M, K), X, -math.inf),
    ),
    "a row's shift below a mask": (where(M, X + R, -math.inf), MASKED + R),
    "the log-sum-exp of a masked shift": (
        lse(where(M, X - PEAK, -math.inf)),
        lse(MASKED) - PEAK,
    ),
    "the softmax of a masked shift": (softmax(where(M, X - PEAK, -math.inf)), softmax(MASKED)),
    "a fill on the left": (where(apply("not", CAUSAL), -math.inf, X), where(CAUSAL, X, -math.inf)),
    "what a mask hides": (where(M, where(M, X, Y), R), where(M, X, R)),
    "a comparison of positions": (
        where(apply("gt", index(KEY), index(ROW)), 0.0, X),
        where(apply("ge", index(ROW), index(KEY)), X, 0.0),
    ),
    "exp of a filled number": (
        exp(where(M, apply("clamp_max", X, 9.0), -math.inf)),
        where(M, exp(apply("clamp_max", X, 9.0)), 0.0),
    ),
    "a probability that is clamped": (
        log(apply("clamp_min", softmax(X), 1e-6)),
        apply("clamp_min", X - lse(X), math.log(1e-6)),
    ),
    "log of a quotient": (log(softmax(X) / softmax(Y)), (X - lse(X)) - (Y - lse(Y))),
    "the square": (apply("pow", X - Y, 2.0), (X - Y) * (X - Y)),
    "conditions of a row": (
        total(where(apply("and", M, apply("gt", R, 0.0)), X, 0.0)),
        where(apply("gt", R, 0.0), total(where(M, X, 0.0)), 0.0),
    ),
    "a divergence": (
        total(softmax(MASKED) * (log(softmax(MASKED)) - log(softmax(Y)))),
        total((MASKED - lse(MASKED) - Y + lse(Y)) * softmax(MASKED)),
    ),
}


def _tensors(kind: str) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    x, y = (torch.randn(NUM_ROWS, NUM_KEYS, generator=g, dtype=torch.float64) for _ in range(2))
    m = torch.rand(NUM_ROWS, NUM_KEYS, generator=g) < 0.6
    m[:, 0] = True
    if kind == "infinite":
        x[1, 2], x[2, 3], y[1, 2] = -math.inf, math.nan, -math.inf
    if kind == "empty":
        x[3], m[1] = -math.inf, False
    r = torch.randn(NUM_ROWS, generator=g, dtype=torch.float64)
    return {"x": x, "y": y, "m": m, "r": r, "k": torch.arange(NUM_KEYS) != 2}


@pytest.mark.parametrize("kind", ["finite", "infinite", "empty"])
@pytest.mark.parametrize("name", SAME)
def test_normal_form_means_what_is_written(name: str, kind: str) -> None:
    tensors = _tensors(kind)
    for written in SAME[name]:
        expected = evaluate(written, tensors, order=[ROW, KEY])
        found = evaluate(normal(written), tensors, order=[ROW, KEY])
        known = ~expected.isnan()
        assert known.any() and (kind != "finite" or known.all())
        torch.testing.assert_close(found[known], expected[known])


@pytest.mark.parametrize("name", SAME)
def test_ways_to_write_one_thing_have_one_form(name: str) -> None:
    a, b = map(normal, SAME[name])
    assert a is b
    assert normal(a) is a


def test_expressions_that_differ_have_different_forms() -> None:
    for a, b in [
        (softmax(X), softmax(Y)),
        (lse(X), lse(X * 2.0)),
        (where(M, X, 0.0), where(K, X, 0.0)),
        (where(M, X, -1e4), X),
        (softmax(X + R), softmax(X)),  # R may be so large that scores are lost next to it
        (softmax(X + 1e9), softmax(X)),
        (rounded(X, "bfloat16"), X),
        (total(X * Y), total(X) * total(Y)),
        (where(M, softmax(X), 0.0), softmax(MASKED)),
    ]:
        assert normal(a) is not normal(b)


def test_masked_probabilities_sum_to_one_in_rows_with_a_key() -> None:
    form = normal(total(softmax(MASKED)))
    assert form.op == "where" and form.args[0].kind == ANY
    causal = where(CAUSAL, X, -math.inf)
    assert normal(total(softmax(causal))) is const(1.0)  # every row has its first key
    finite = where(M, X, -1e9)  # a row that it masks whole is uniform
    assert normal(total(softmax(finite))) is const(1.0)
    assert normal(total(softmax(where(K, MASKED, -1e9)))).args[0].kind == ANY


@pytest.mark.parametrize("op", ["exp", "expm1", "sinh", "cosh"])
def test_an_exponential_keeps_the_condition_of_its_branch(op: str) -> None:
    """Where the condition does not hold, it would overflow: NOTE [Both branches are computed]."""
    safe = apply(op, where(M, X, 0.0))
    assert normal(where(M, safe, Y)).args[1] is normal(safe)
    assert normal(where(apply("not", M), Y, safe)).args[1] is normal(safe)
    bounded = apply("tanh", X)
    assert normal(where(M, apply(op, where(M, bounded, 0.0)), Y)).args[1] is normal(
        apply(op, bounded)
    )
    assert normal(exp(MASKED)) is not normal(where(M, exp(X), 0.0))


def test_nodes_exist_once() -> None:
    assert X + Y is X + Y and X + Y is not Y + X
    for e in (softmax(X), normal(softmax(X))):
        assert copy.deepcopy(e) is e
    assert pickle.loads(pickle.dumps(X * 2.0 + R)) is X * 2.0 + R
    assert len({x.digest for x in walk([softmax(X), softmax(Y), MASKED])}) == len(
        walk([softmax(X), softmax(Y), MASKED])
    )


def test_types_are_promoted_as_tensors_are() -> None:
    i = index(KEY)
    assert (i + 1.0).dtype == FLOAT and apply("add", i, const(1, INT)).dtype == INT
    assert apply("add", M, K).op == "or" and (M * X).args[0].op == "float"
    assert apply("lt", i, const(3, INT)).dtype == BOOL and apply("div", i, i).dtype == FLOAT


def test_what_is_written_literally_is_left_alone() -> None:
    assert literally("log", literally("exp", X)).op == "log"
    assert literally("add", X, 0.0).op == "add"


def test_ranges() -> None:
    assert softmax(X).range == (0.0, math.inf)
    assert normal(softmax(X)).range == (0.0, 1.0)
    assert apply("sigmoid", X).range == (0.0, 1.0)
    assert apply("clamp_max", apply("abs", X), 3.0).range == (0.0, 3.0)
    assert where(M, 1.0, -2.0).range == (-2.0, 1.0)
    assert apply("sub", 1.0, apply("tanh", X)).range == (0.0, 2.0)
    assert (-(exp(X) + 1.0)).range == (-math.inf, -1.0)
    i = index(Axis("i", 8))
    assert canonical.linear(3.0, [(-2.0, i)]).range == (-11.0, 3.0)


def test_symbolic_sizes_prove_what_intervals_do_not() -> None:
    n = Extent("n", low=2)
    i = index(Axis("i", n))
    last = canonical.linear(-1.0, [(1.0, size_of(n)), (-1.0, i)])
    assert canonical.nonnegative(last) is canonical.TRUE
    shorter = canonical.linear(-2.0, [(1.0, size_of(n)), (-1.0, i)])
    assert canonical.nonnegative(shorter).op == "nonnegative"
    other = index(Axis("i", Extent("n", low=2)))
    assert other is not i


def test_deep_expressions_need_no_recursion() -> None:
    x = X
    for _ in range(3_000):
        x = apply("tanh", x + R)
    assert len(walk([normal(x)])) > 3_000
    detached(normal(x))


def test_detach_is_a_property_of_captured_tensors() -> None:
    trained = capture(Source("w", grad_flows=True), FLOAT, at=[index(KEY)])
    known = capture(Source("w"), FLOAT, at=[index(KEY)])
    assert trained is not known
    e = exp(trained * 2.0) - lse(trained)
    assert normal(apply("detach", e)) is normal(exp(known * 2.0) - lse(known))
    later = capture(Source("w", version=1), FLOAT, at=[index(KEY)])
    assert later is not known


def test_selected_keys_keep_the_normaliser_of_all() -> None:
    r, j, s = Axis("r", NUM_ROWS), Axis("j", NUM_KEYS), Axis("s", 2)
    x = capture("x", FLOAT, at=[index(r), index(j)])
    ids = capture("ids", INT, at=[index(r), index(s)])
    atom = canonical.log_softmax(x, j)
    tensors = _tensors("finite") | {"ids": torch.randint(0, NUM_KEYS, (NUM_ROWS, 2))}
    found = evaluate(substitute(atom, {j: ids}), tensors, order=[r, s])
    expected = tensors["x"].log_softmax(-1).gather(1, tensors["ids"])
    torch.testing.assert_close(found, expected)


def test_symbolic_sizes_are_interned() -> None:
    """Views split and merge axes of symbolic sizes, and meet where the sizes are one."""
    sizes = Sizes()
    n = ShapeEnv().create_unbacked_symint()
    assert sizes.of(n * 12) is sizes.of(12 * n) and sizes.of(n) is not sizes.of(n + 1)
    assert sizes.quotient(sizes.of(n * 12), sizes.of(n)) == 12
    assert sizes.quotient(sizes.of(n), 2) is None
    whole = sizes.of(n * 6)
    dims = new_dims((whole, 4))
    x = Array(capture("x", at=[arrays.position(d) for d in dims]), dims, sizes)
    parts = arrays.reshaped(x, (sizes.of(n), 3, 2, 4))
    merged = arrays.reshaped(parts, (sizes.of(n * 3), 8))
    bias_dims = new_dims((sizes.of(n * 3), 1))
    bias = Array(capture("b", at=[arrays.position(d) for d in bias_dims]), bias_dims, sizes)
    exprs, dims = arrays.met(merged, bias)
    value = canonical.linear(0.0, [(1.0, e) for e in exprs])
    given = {"x": torch.randn(30, 4), "b": torch.randn(15, 1)}
    extents = {sizes.of(n): 5, whole: 30, sizes.of(n * 3): 15}
    found = evaluate(value, given, extents, [a for d in dims for a in d])
    torch.testing.assert_close(
        found.reshape(15, 8), given["x"].double().reshape(15, 8) + given["b"]
    )
    with pytest.raises(arrays.NoView):
        arrays.reshaped(merged, (sizes.of(n), 24 + 1))
