"""Reads matmuls: an element is a contraction of two captured tensors.

What multiplies an operand, and does not vary along what is summed over, multiplies the scores. An
operand that is more than that is captured, unless it is a map, made of products: those are summed
as an expression, so that no map has to exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import fx

from torch_streamkl.fx_passes.reading import arrays
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.fx_passes.reading.registry import Call, NoRule, number_of, rule
from torch_streamkl.fx_passes.reading.rules.reductions import over
from torch_streamkl.program.canonical import linear, product, terms_of
from torch_streamkl.program.functions import quotient
from torch_streamkl.program.graph import CONTRACT, SUM, Axis, Node, const, num_positions
from torch_streamkl.program.reductions import contraction, reduced
from torch_streamkl.program.walks import walk

aten = torch.ops.aten


def split_factors(x: Node, along: frozenset[Axis]) -> tuple[Node, Node, Node]:
    """Returns what multiplies, what divides, and what is left along these axes."""
    above, below = [const(1.0)], [const(1.0)]
    while True:
        constant, terms = terms_of(x)
        if constant or len(terms) != 1:
            break
        c, y = terms[0]
        if c != 1.0:
            above.append(const(c))
            x = y
        elif y.op == "product" and any(not f.axes & along for f in y.args):
            above += [f for f in y.args if not f.axes & along]
            x = product(*(f for f in y.args if f.axes & along))
        elif y.op == "div" and not y.args[1].axes & along:
            below.append(y.args[1])
            x = y.args[0]
        else:
            break
    return product(*above), product(*below), x


def contracted(
    call: Call,
    operands: Sequence[tuple[Array, object]],
    labels: Sequence[Sequence[str]],
    out: Sequence[str],
) -> Array:
    """Returns the sum over the labels that ``out`` lacks, of a product of two tensors."""
    order = [*out, *dict.fromkeys(n for own in labels for n in own if n not in out)]
    operands = [
        _read_or_captured(call, *x, own, out) for x, own in zip(operands, labels, strict=True)
    ]
    placed = [_placed(x, own, order) for (x, _), own in zip(operands, labels, strict=True)]
    exprs, dims = arrays.met(*placed)
    along = tuple(a for d in dims[len(out) :] for a in d)
    if not along:
        return call.made(product(*map(number_of, exprs)), dims[: len(out)])
    parts = [split_factors(number_of(x), frozenset(along)) for x in exprs]
    for i, (*factors, rest) in enumerate(parts):
        node = operands[i][1]
        if rest.op == "capture" and frozenset(along) & rest.axes:
            continue
        if not isinstance(node, fx.Node):
            return _summed(call, exprs, dims, len(out))
        if node in call.reader.reading.reads_products and _is_map(rest, factors, frozenset(along)):
            return _summed(call, exprs, dims, len(out))
        others = list(operands)
        others[i] = call.reader.captured(node), None
        return contracted(call, others, labels, out)
    above = product(*(p[0] for p in parts))
    below = product(*(p[1] for p in parts))
    score = contraction(parts[0][2], parts[1][2], along)
    return call.made(quotient(product(above, score), below), dims[: len(out)])


def _read_or_captured(
    call: Call, x: Array, node: object, labels: Sequence[str], out: Sequence[str]
) -> tuple[Array, object]:
    """An operand as it is read, unless it is captured in the end: then it is not renamed before.

    An expression of what a network computes is long.
    """
    along = frozenset(
        a for n, own in zip(labels, x.dims, strict=True) if n not in out for a in own
    )
    if not isinstance(node, fx.Node) or not along:
        return x, node
    *factors, rest = split_factors(number_of(x.expr), along)
    if rest.op == "capture" or not rest.axes & along:
        return x, node
    if node in call.reader.reading.reads_products and _is_map(rest, factors, along):
        return x, node
    return call.reader.captured(node), None


def _is_map(x: Node, factors: Sequence[Node], along: frozenset[Axis]) -> bool:
    """Whether an operand is made of products with an element for each that is summed over.

    What is summed over keys before, as the output of attention, is a tensor like any other. So are
    features, as a softmax of what a weight projects: they need be no larger than that. And so is
    what a layer normalizes by a value of its own, which is a factor of no product.
    """
    products = [y for y in walk([x]) if y.op == CONTRACT and y.axes & along]
    is_normalized = any(y.op == CONTRACT for y in walk(factors))
    is_sum = x.op in (CONTRACT, "linear", "product", "reduce") and not is_normalized
    return any(is_sum or not _is_projection(y, along) for y in products)


def _is_projection(product: Node, along: frozenset[Axis]) -> bool:
    """Whether a product is one with a weight, and about as small as the other operand."""
    return any(
        weight.axes <= along | frozenset(product.value)
        and not x.axes & along
        and _is_at_most_twice(product.axes, x.axes)
        for weight, x in (product.args, product.args[::-1])
    )


def _is_at_most_twice(axes: Iterable[Axis], others: Iterable[Axis]) -> bool:
    """Whether a tensor is known to have at most twice as many elements as another."""
    made, given = num_positions(axes), num_positions(others)
    return made is not None and given is not None and made <= 2 * given


def _summed(call: Call, exprs: Sequence[Node], dims: Sequence[arrays.Dim], rank: int) -> Array:
    total = product(*map(number_of, exprs))
    for axis in (a for d in dims[rank:] for a in d):
        total = reduced(SUM, axis, total)
    return call.made(total, dims[:rank])


def _placed(x: Array, labels: Sequence[str], order: Sequence[str]) -> Array:
    dims = [x.dims[labels.index(n)] if n in labels else () for n in order]
    return replace(x, dims=tuple(dims))


def _product(call: Call, a: str, b: str) -> Array:
    nodes = [call.get(a), call.get(b)]
    x, y = (call.array(name) for name in (a, b))
    rank = max(len(x.dims), len(y.dims), 2)
    batch = [f"b{i}" for i in range(rank - 2)]
    left = ["d"] if len(x.dims) == 1 else [*batch[rank - len(x.dims) :], "i", "d"]
    right = ["d"] if len(y.dims) == 1 else [*batch[rank - len(y.dims) :], "d", "j"]
    out = [*batch, *(n for n in ("i", "j") if n in (*left, *right))]
    return contracted(call, list(zip((x, y), nodes, strict=True)), (left, right), out)


@rule(aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def matmul(call: Call) -> Array:
    """Reads a matmul, or a product with a vector."""
    return _product(
        call, "self", next(n for n in ("other", "mat2", "vec", "tensor") if call.has(n))
    )


@rule(aten.baddbmm.default, aten.addmm.default)
def add_matmul(call: Call) -> Array:
    """Reads ``beta * self + alpha * a @ b``; with beta 0, self is not read."""
    names = ("batch1", "batch2") if call.has("batch1") else ("mat1", "mat2")
    total = _product(call, *names)
    alpha, beta = call.number("alpha", 1), call.number("beta", 1)
    total = total.map(lambda e: product(alpha, e))
    if beta.op == "const" and beta.value == 0.0:
        node = call.get("self")
        if call.reader.records(node):
            raise NoRule("a factor of 0 on an input whose gradient is zeros")
        return total
    bias = call.array("self")
    return call.pointwise(
        lambda e, x: linear(0.0, [(1.0, e), (1.0, product(beta, x))]), total, bias
    )


@rule(aten.linear.default)
def linear_(call: Call) -> Array:
    """Reads ``input @ weight.T + bias``."""
    x, w = call.arrays("input", "weight")
    batch = [f"b{i}" for i in range(len(x.dims) - 1)]
    columns = ["j"] if len(w.dims) == 2 else []
    operands = [(x, call.get("input")), (w, call.get("weight"))]
    total = contracted(call, operands, ([*batch, "d"], [*columns, "d"]), [*batch, *columns])
    if not call.has("bias"):
        return total
    return call.pointwise(
        lambda e, b: linear(0.0, [(1.0, e), (1.0, b)]), total, call.array("bias")
    )


@rule(aten.einsum.default)
def einsum(call: Call) -> Array:
    """Reads an einsum of one or two tensors."""
    nodes = list(call.get("tensors"))
    operands = [call.reader.array(x) for x in nodes]
    labels, out = _labels(call.get("equation"), [len(x.dims) for x in operands])
    if len(operands) == 1:
        (x,), (own,) = operands, labels
        summed = [d for d, n in enumerate(own) if n not in out]
        left = [n for n in own if n in out]
        total = over(SUM, x, summed)
        return call.made(total.expr, [total.dims[left.index(n)] for n in out])
    if len(operands) != 2:
        raise NoRule("einsum of more than two tensors")
    pairs = list(zip(operands, nodes, strict=True))
    return contracted(call, pairs, labels, out)


def _labels(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """The labels of each tensor and of the result, with one for each dimension of an ellipsis."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    given = inputs.split(",")
    widths = [r - len(g.replace("...", "")) for g, r in zip(given, ranks, strict=True)]
    most = max((w for g, w in zip(given, widths, strict=True) if "..." in g), default=0)

    def expanded(text: str, width: int) -> list[str]:
        before, dots, after = text.partition("...")
        every = [f"...{i}" for i in range(most - width, most)] if dots else []
        return [*before, *every, *after]

    labels = [expanded(g, w) for g, w in zip(given, widths, strict=True)]
    if any(len(set(own)) < len(own) for own in labels):
        raise NoRule("einsum of a diagonal")
    if not arrow:
        every = [n for own in labels for n in own]
        once = sorted(n for n in set(every) if every.count(n) == 1 and not n.startswith("."))
        return labels, [*expanded("...", most), *once]
    return labels, expanded(out, most)
