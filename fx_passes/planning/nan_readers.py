"""Finds code after a loss that could observe NaN or infinity that only eager produces.

Eager code gives NaN if a masked key has the probability 0 and the logarithm -inf, and infinity if
a probability is 0 by underflow. An operator gives the limit. Code that replaces NaN by 0, counts
it, compares with it or ranks by it must see what eager has, and so must code that computes a
number from infinity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import fx

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
from torch_streamkl.fx_passes.fx_utils.nodes import ancestors
from torch_streamkl.fx_passes.planning.readers import NO_READERS as NO_READERS
from torch_streamkl.fx_passes.planning.readers import Readers as Readers
from torch_streamkl.fx_passes.planning.readers import readers_behind as readers_behind
from torch_streamkl.fx_passes.planning.readers import readers_of_body as readers_of_body

aten = torch.ops.aten
HIDES = 64.0  # what stands in place of a score, or is added to it, to hide its key is larger
LOGARITHMS = {aten.log.default, aten.log2.default, aten.log10.default, aten.log1p.default}


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
