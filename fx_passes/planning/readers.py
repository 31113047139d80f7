"""Finds code that makes numbers of NaN and infinity: what reads the value of a node.

It replaces NaN by 0, counts it, compares with it or ranks by it; or it computes a number from
infinity, as a quotient does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.mutation import written_memory
from torch_streamkl.fx_passes.fx_utils.nodes import (
    argument,
    example,
    following,
    is_call,
    name_of,
    nodes_in,
    storage_of,
    subgraphs_of,
)
from torch_streamkl.fx_passes.fx_utils.shape_reads import LIKE, WITH_SIZES

ASK = {"nan_to_num", "isnan", "isfinite", "isinf", "isneginf", "isposinf", "equal", "allclose"}
ASK |= {"nansum", "nanmean", "nanmedian", "nanquantile", "fmax", "fmin", "sign", "sgn", "copysign"}
ASK |= {"sort", "msort", "topk", "kthvalue", "unique", "mode", "is_nonzero"}
COMPARE = {"gt", "lt", "ge", "le", "eq", "ne", "greater", "less", "greater_equal", "less_equal"}
COMPARE |= {"not_equal", *(f"__{x}__" for x in ("gt", "lt", "ge", "le", "eq", "ne"))}
# numbers, where infinity is given
BOUNDED = {"clamp_max", "minimum", "min", "amin", "aminmax", "median", "quantile", "hardtanh"}
BOUNDED |= {"relu6", "hardsigmoid", "tanh", "sigmoid", "erf", "erfc", "atan", "arctan", "atan2"}
BOUNDED |= {"arctan2", "exp", "exp2", "expm1", "reciprocal", "rsqrt", "rpow", "__rpow__"}
BOUNDED |= {"softmax", "softmin", "softplus", "logsigmoid", "elu", "silu", "gelu"}
BOUNDED |= {"nextafter", "sinc", "logaddexp", "logsumexp", "__rtruediv__", "rtruediv"}
DIVISIONS = {"div", "divide", "true_divide", "truediv", "floordiv", "floor_divide", "fmod"}
DIVISIONS |= {"remainder", "mod", "__truediv__", "__floordiv__"}
# a result without the values of the arguments, and one with those of the first alone
NO_VALUES = {*LIKE, "rand_like", "randn_like", "randint_like", "new_tensor"}
OF_FIRST = {*WITH_SIZES, "type_as"}


@dataclass(frozen=True)
class Readers:
    """Lists operations, by name, that make numbers of NaN and infinity, and of infinity alone."""

    special: frozenset[str] = frozenset()
    infinite: frozenset[str] = frozenset()

    def __or__(self, other: Readers) -> Readers:
        return Readers(self.special | other.special, self.infinite | other.infinite)


NO_READERS = Readers()


def readers_behind(nodes: Sequence[fx.Node], outside: Readers = NO_READERS) -> Readers:
    """Returns the readers of the nodes' values, also of what these are written to."""
    if not nodes:
        return NO_READERS
    found, reached = NO_READERS, set(nodes)
    written: set[int | None] = set()
    first = next(n for n in nodes[0].graph.nodes if n in reached)
    for node in following(first.prev):
        if not written and reached.isdisjoint(node.all_input_nodes):
            continue
        sources = [a for a in _inputs(node) if a in reached or storage_of(a) in written]
        if not sources:
            continue
        if node.op == "output":
            return found | outside
        written |= written_memory(node)
        if is_call(node):
            found |= _of_operation(node, sources)
        if _has_values(example(node)):
            reached.add(node)
    return found


def _inputs(node: fx.Node) -> list[fx.Node]:
    """Arguments whose values a result depends on."""
    name = name_of(node)
    if name in NO_VALUES:
        return []
    return nodes_in(node.args[:1]) if name in OF_FIRST else node.all_input_nodes


def _of_operation(node: fx.Node, sources: Sequence[fx.Node]) -> Readers:
    name = name_of(node)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _of_subgraphs(node)
    value = example(node)
    is_discrete = isinstance(value, Tensor) and not (
        value.dtype.is_floating_point or value.dtype.is_complex
    )
    if is_discrete and name == "getitem":  # indices next to values
        name = name_of(sources[0])
    if is_discrete or name in ASK or name.removesuffix("_") in ASK | COMPARE:
        return Readers(special=frozenset({name}))
    if (
        name.removesuffix("_") in BOUNDED
        or _divides_by(node, sources)
        or _has_maximum(node)
        or _has_other_power(node)
    ):
        return Readers(infinite=frozenset({name}))
    return NO_READERS


def _of_subgraphs(node: fx.Node) -> Readers:
    """Readers in the graphs that an operator runs, of whatever is passed to them."""
    found = NO_READERS
    for body in subgraphs_of(node):
        found |= readers_behind([n for n in body.graph.nodes if n.op == "placeholder"])
    return found


def _divides_by(node: fx.Node, sources: Sequence[fx.Node]) -> bool:
    """A number over infinity is 0."""
    if name_of(node).removesuffix("_") not in DIVISIONS:
        return False
    return argument(node, 1, "other") in sources


def _has_maximum(node: fx.Node) -> bool:
    if name_of(node).removesuffix("_") not in ("clamp", "clip"):
        return False
    return argument(node, 2, "max") is not None


def _has_other_power(node: fx.Node) -> bool:
    """A power of which infinity has a finite one, unlike a square."""
    if name_of(node).removesuffix("_") not in ("pow", "__pow__", "__ipow__", "float_power"):
        return False
    exponent = argument(node, 1, "exponent")
    return not (isinstance(exponent, (int, float)) and exponent > 0)


def _has_values(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_values(x) for x in value)
    return isinstance(value, (Tensor, float, torch.SymFloat, torch.SymBool))
