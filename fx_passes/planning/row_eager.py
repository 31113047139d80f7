"""Refuses row programs of which the expressions do not show what eager code computes.

Expressions are of real numbers. The graph has the types in which eager code rounds, comparisons of
NaN that became a constant, and log-sum-exps in which a fill is lost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.closed_forms.row_checks import (
    is_filled,
    precision_of,
    smallest_of,
)
from torch_streamkl.fx_passes.closed_forms.row_sites import has_products, products_in
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import ancestors, named_arguments, tensors_read
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.fx_passes.reading.positions import source_name
from torch_streamkl.fx_passes.reading.reader import Reading, is_number
from torch_streamkl.fx_passes.reading.types import is_narrower
from torch_streamkl.program.canonical import terms_of
from torch_streamkl.program.graph import Node
from torch_streamkl.program.walks import walk

aten = torch.ops.aten
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
CASTS = {
    aten.to.device, aten.to.dtype, aten.to.other, aten._to_copy.default, aten.type_as.default,
}  # fmt: skip
OF_LABELS = "cross_entropy of labels"
WITH_LABELS = {
    aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default,
    aten.nll_loss2d.default,
}  # fmt: skip
POWERS = {aten.pow.Tensor_Scalar, aten.sqrt.default, aten.rsqrt.default}
# numbers whose float64 has no digits left for a logarithm of counts, as tests compare them
ROUNDED = 1e3


def check_eager(
    roots: Sequence[fx.Node],
    captured: Collection[Node],
    operands: Collection[torch.dtype],
    reading: Reading,
) -> None:
    """Raises Unsupported if eager code computes something else than expressions show.

    ``captured`` are what a program reads beside its products, ``operands`` the products' types.
    """
    behind = set(roots).union(*(ancestors(r) for r in roots)) & reading.reads_products
    if any(map(has_labels, behind if all(map(has_labels, roots)) else behind - set(roots))):
        raise Unsupported(OF_LABELS)
    for node in sorted(behind, key=lambda n: n.name):
        _check_type(node, operands)
        _check_comparison(node, reading)
        _check_log_sum_exp(node, reading)
        _check_power(node, operands, reading)
    for x in walk(captured):
        name = source_name(x)
        if isinstance(name, fx.Node) and name in reading.reads_products:
            if name in reading.reasons and name not in reading.places:  # which are of rows
                raise Unsupported(reading.reasons[name])


def has_labels(node: fx.Node) -> bool:
    """Returns whether a node is a cross-entropy with labels, not with probabilities.

    `linear_kl` computes it next to a divergence of the same logits, a row program next to other
    sums of them. Alone it stays.
    """
    target = node.args[1] if node.target in WITH_LABELS else None
    return isinstance(target, fx.Node) and not target.meta["val"].is_floating_point()


def _check_type(node: fx.Node, operands: Collection[torch.dtype]) -> None:
    made = node.meta.get("val")
    if not isinstance(made, Tensor) or not operands:
        return
    if made.dtype.is_complex:
        raise Unsupported("scores are cast to a complex type")
    if made.dtype == torch.float64 and torch.float64 not in operands:
        raise Unsupported("scores become float64 after their matmul")
    dtypes = [x.dtype for x in tensors_read(node)]
    if not made.dtype.is_floating_point or any(d.is_floating_point for d in dtypes):
        return
    # what is computed of integers alone has torch's default type, whatever the scores have
    is_cast = node.target in CASTS and dtypes[:1] == [torch.bool]
    if not is_cast and any(d.is_floating_point and is_narrower(made.dtype, d) for d in operands):
        raise Unsupported("what is made of conditions on scores has a narrower type than they")


def _check_comparison(node: fx.Node, reading: Reading) -> None:
    """NaN compares otherwise than every number does."""
    x = reading.expression(node)
    if reading.observers.get(node) not in COMPARISONS or x is None:
        return
    inputs = map(reading.expression, node.all_input_nodes)
    if is_number(x) and any(a is not None and has_products(a) for a in inputs):
        raise Unsupported("a comparison reads NaN, which eager has in a row without keys")


def _check_log_sum_exp(node: fx.Node, reading: Reading) -> None:
    """In a row without keys eager code's sum is the fill, in which their count is lost.

    A sum over no axis of the products, as of two stacked distributions, is one of a known count.
    """
    if node.target != aten.logsumexp.default:
        return
    (scores,) = node.all_input_nodes
    x = reading.arrays.get(scores)
    if not isinstance(x, Array) or not is_filled(x.expr, ROUNDED):
        return
    given = named_arguments(node)["dim"]
    dims = [given] if isinstance(given, int) else given or range(len(x.dims))
    summed = {a for d in dims for a in x.dims[d]}
    if any(summed & product.axes for product in products_in([x.expr])):
        raise Unsupported("the log-sum-exp of scores that a large number may stand in place of")


def _check_power(node: fx.Node, operands: Collection[torch.dtype], reading: Reading) -> None:
    """A power of a probability has none of its underflow: eager has 0 ** 0.01, a program 0.4."""
    x = reading.expression(node)
    if node.target not in POWERS or x is None or x.op != "exp":
        return
    _, terms = terms_of(x.args[0])
    scales = [abs(c) for c, t in terms if t.op == "log_softmax"]
    least = min(scales, default=0.0) * smallest_of(operands)
    if 0.0 > least > math.log(precision_of(operands)):
        raise Unsupported("a small power of a probability that may underflow")
