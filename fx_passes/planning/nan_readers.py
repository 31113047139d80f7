"""Finds code after a loss that could observe NaN or infinity that only eager produces.

Eager code gives NaN if a masked key has the probability 0 and the logarithm -inf, and infinity if
a probability is 0 by underflow. An operator gives the limit. Code that replaces NaN by 0, counts
it, compares with it or ranks by it must see what eager has, and so must code that computes a
number from infinity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.domain.absent_keys import (
    at_absent_key,
    drops_absent_keys,
    is_of_probabilities,
    may_be_infinite,
)
from torch_streamkl.fx_passes.domain.score_form import read
from torch_streamkl.fx_passes.domain.scores import ScoreKey
from torch_streamkl.fx_passes.domain.values import Elements
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.mutation import written_by
from torch_streamkl.fx_passes.fx_utils.nodes import (
    ancestors,
    example,
    name_of,
    nodes_in,
    storage_of,
    subgraphs_of,
)

aten = torch.ops.aten
HIDES = 64.0  # what stands in place of a score, or is added to it, to hide its key is larger
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
NO_VALUES = {f"{x}_like" for x in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")}
NO_VALUES |= {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}
OF_FIRST = {"expand_as", "view_as", "reshape_as", "type_as"}
LOGARITHMS = {aten.log.default, aten.log2.default, aten.log10.default, aten.log1p.default}


@dataclass(frozen=True)
class Readers:
    """Lists operations, by name, that make numbers of NaN and infinity, and of infinity alone."""

    special: frozenset[str] = frozenset()
    infinite: frozenset[str] = frozenset()

    def __or__(self, other: Readers) -> Readers:
        return Readers(self.special | other.special, self.infinite | other.infinite)


NO_READERS = Readers()


def check_nan_readers(
    node: fx.Node,
    inner: fx.Node,
    elements: Elements,
    values: Mapping[fx.Node, object],
    outside: Readers = NO_READERS,
) -> None:
    """Raises Unsupported if code after ``node`` would see another number than in eager code."""
    found = readers_behind([node], outside)
    if found.special and any(may_be_infinite(part.scores) for part in elements.parts):
        name = min(found.special)
        why = "NaN where a key is masked (0 times the logarithm of 0) or a row has no key"
    elif (found.special or found.infinite) and any(
        _may_be_log_of_zero(n, values) for n in ancestors(inner)
    ):
        name = min(found.special or found.infinite)
        why = "infinity where a probability underflows (the logarithm of 0)"
    else:
        return
    raise Unsupported(f"{name} reads the divergence, and eager has {why}")


def check_masked_logarithms(
    inner: fx.Node, elements: Elements, values: Mapping[fx.Node, object]
) -> None:
    """Raises Unsupported if the logarithm of a probability that a finite mask makes 0 counts."""
    if drops_absent_keys(elements) or all(
        form.mask or form.biases for form in (read(part.scores) for part in elements.parts)
    ):
        return
    for node in ancestors(inner):
        argument = node.args[0] if node.target in LOGARITHMS else None
        x = values.get(argument) if isinstance(argument, fx.Node) else None
        if not isinstance(x, Elements):
            continue
        e = x.single()
        if (
            any(_may_hide_keys(part.scores) for part in x.parts)
            and e is not None
            and is_of_probabilities(e)
            and at_absent_key(e) == 0.0
        ):
            raise Unsupported(
                "the logarithm of probabilities that a mask of one side alone makes 0, which is "
                "infinite in eager code"
            )


def _may_hide_keys(key: ScoreKey) -> bool:
    """Whether a finite number stands in place of scores, or a tensor like a mask is added."""
    form = read(key)
    return (bool(form.mask) and HIDES <= abs(form.fill) < math.inf) or any(
        not bias.tensor.grad and sum(map(bool, bias.tensor.layout)) > 1 for bias in form.biases
    )


def _may_be_log_of_zero(node: fx.Node, values: Mapping[fx.Node, object]) -> bool:
    if node.target not in LOGARITHMS:
        return False
    argument = node.args[0]
    x = values.get(argument) if isinstance(argument, fx.Node) else None
    if not isinstance(x, Elements):
        return False
    e = x.single()
    lowest = 0.0 if node.target is not aten.log1p.default else -1.0
    return e is None or not is_of_probabilities(e) or not at_absent_key(e) > lowest


def readers_of_body(owner: fx.GraphModule, name: str, outside: Readers) -> Readers:
    """Returns the readers, in the graph that calls a body, of what the body returns."""
    subgraphs = [n for n in owner.graph.nodes if n.op == "get_attr" and n.target == name]
    return readers_behind([user for body in subgraphs for user in body.users], outside)


def readers_behind(nodes: Sequence[fx.Node], outside: Readers = NO_READERS) -> Readers:
    """Returns the readers of the nodes' values, also of what these are written to."""
    if not nodes:
        return NO_READERS
    graph, found = nodes[0].graph, NO_READERS
    reached = set(nodes)
    written: set[int | None] = set()
    for node in graph.nodes:
        sources = [a for a in _inputs(node) if a in reached or storage_of(a) in written]
        if not sources:
            continue
        if node.op == "output":
            return found | outside
        written |= {storage_of(x) for x in written_by(node)} - {None}
        if node.op in ("call_function", "call_method"):
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
    divisor = node.args[1] if len(node.args) > 1 else node.kwargs.get("other")
    return divisor in sources


def _has_maximum(node: fx.Node) -> bool:
    if name_of(node).removesuffix("_") not in ("clamp", "clip"):
        return False
    maximum = node.args[2] if len(node.args) > 2 else node.kwargs.get("max")
    return maximum is not None


def _has_other_power(node: fx.Node) -> bool:
    """A power of which infinity has a finite one, unlike a square."""
    if name_of(node).removesuffix("_") not in ("pow", "__pow__", "__ipow__", "float_power"):
        return False
    exponent = node.args[1] if len(node.args) > 1 else node.kwargs.get("exponent")
    return not (isinstance(exponent, (int, float)) and exponent > 0)


def _has_values(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_values(x) for x in value)
    return isinstance(value, (Tensor, float, torch.SymFloat, torch.SymBool))
