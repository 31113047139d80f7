"""Lists the options of Dynamo that keep a distillation step in one graph."""

from __future__ import annotations

import torch

# In older releases the rest of a frame that broke inside of `with` gets None for the context
# manager: DistributedDataParallel's forward raises TypeError.
HAS_NESTED_GRAPH_BREAKS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

CAPTURE = {
    "capture_dynamic_output_shape_ops": True,  # rows that are selected by a boolean mask
}
if HAS_NESTED_GRAPH_BREAKS:  # a break in a called function leaves its callers' graphs whole
    CAPTURE["nested_graph_breaks"] = True
