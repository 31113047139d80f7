"""Holds the rules by kind of operation: importing this package registers them."""

from torch_streamkl.fx_passes.reading.rules import (
    conditions,
    creation,
    losses,
    matmuls,
    pointwise,
    reductions,
    selections,
    sequences,
    views,
)

MODULES = (
    conditions, creation, losses, matmuls, pointwise, reductions, selections, sequences, views,
)  # fmt: skip
