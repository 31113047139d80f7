"""Decides which casts of scores, and of values after the softmax, keep their meaning.

A cast to a wider type is the identity. A cast to a narrower type rounds, and is unsupported:
float8 always, and any other type but that of the scores' matmul or of its operands. A cast back to
that type, as in ``softmax(scores, dtype=torch.float32).to(q.dtype)``, rounds no more than the
program's own scores or inputs were rounded. A fused operator, which keeps float32, is as exact.
After a cast to an integer type nothing is followed.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.context import Analysis
from torch_streamkl.fx_passes.domain.scores import ScoreKey, Scores
from torch_streamkl.fx_passes.domain.values import (
    Elements,
    Entries,
    ExpSum,
    LogSumExp,
    RowMax,
    Rows,
    Shifted,
)
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported

Cast = Scores | Elements | Entries | Rows | LogSumExp | RowMax | Shifted | ExpSum


def is_narrower(to: torch.dtype, than: torch.dtype) -> bool:
    """Returns whether a cast between floating types rounds."""
    if to == than:
        return False
    if to.itemsize == 1 or than.itemsize == 1:  # float8 promotes with nothing
        return to.itemsize == 1
    return torch.promote_types(to, than) != to


def after_rounding(analysis: Analysis, node: fx.Node, value: object) -> object:
    """Returns the value of a node; raises Unsupported if the node rounds its inputs.

    A cast of rows to a narrower type is the user's own code: None.
    """
    made = node.meta.get("val")
    if not isinstance(made, Tensor) or not isinstance(value, Cast):
        return value
    if made.is_complex():
        raise Unsupported("probabilities or scores are cast to a complex type")
    if not made.dtype.is_floating_point:
        return value  # a condition
    for source in node.all_input_nodes:
        x, recorded = analysis.value(source), source.meta.get("val")
        if not isinstance(x, Cast) or not isinstance(recorded, Tensor):
            continue
        if not recorded.dtype.is_floating_point or not is_narrower(made.dtype, recorded.dtype):
            continue
        if isinstance(x, Rows):
            return None
        if not all(_goes_back(key, made.dtype) for key in _keys_of(x)):
            raise Unsupported(
                f"probabilities or scores are rounded to {str(made.dtype).removeprefix('torch.')}"
            )
    return value


def _goes_back(key: ScoreKey, dtype: torch.dtype) -> bool:
    if dtype.itemsize == 1:
        return False
    operands = (x.node.meta["val"].dtype for x in (key.lhs, key.rhs))
    return dtype == key.dtype or all(x == dtype for x in operands)


def _keys_of(
    x: Scores | Elements | Entries | LogSumExp | RowMax | Shifted | ExpSum,
) -> list[ScoreKey]:
    match x:
        case Scores():
            return [x.key]
        case Elements():
            return [part.scores for part in x.parts]
        case Entries():
            return _keys_of(x.rows)
        case Shifted():
            return [x.scores.key]
    return [x.scores]
