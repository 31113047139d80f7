"""Says whether a row of ids may have one twice: the ids of a top-k do not repeat."""

from __future__ import annotations

from typing import Any

from torch_streamkl.fx_passes.fx_utils.nodes import tensor_of
from torch_streamkl.fx_passes.fx_utils.sizes import provably_equal
from torch_streamkl.fx_passes.reading.positions import source_name
from torch_streamkl.fx_passes.reading.rules.selections import top_of
from torch_streamkl.fx_passes.reading.sizes import torch_size
from torch_streamkl.program.graph import Axis, Node

SINGLE_ENTRIES = "single entries of scores or probabilities are selected"
NOT_RANKED = (
    "gather reads entries of each row by ids that are no top-k of this graph: an id may be there "
    "twice"
)


def why_repeated(ids: Node, entries: Axis, keys: Axis) -> str:
    """Explains why a row of ids may have one twice: they are no top-k of keys along that axis."""
    found = top_of(source_name(ids))
    if found is None:
        return NOT_RANKED
    top, dim = found
    places = [d for d, at in enumerate(ids.args) if entries in at.axes]
    if places != [dim]:  # as of a sum over other rows, at the ids of one
        return SINGLE_ENTRIES
    if entries.size == 0:
        return "no entry of a row is gathered"  # their mean has no gradient, not NaN
    length: Any = tensor_of(top.args[0]).shape[dim]
    assert keys.size is not None
    whole = torch_size(keys.size)
    is_within = isinstance(length, int) and isinstance(whole, int) and length <= whole
    if not is_within and not provably_equal(length, whole):
        return "ids of more keys than there are"  # eager code raises
    return ""
