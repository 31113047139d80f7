"""Finds operators that read tensors which are written after them: teachers updated in the step.

`linear_kl` reads hidden states and weights again in its backward. `linear_kl_sum` does not,
because it computes its gradients in the forward. Which of the two a divergence becomes is known at
the end. So it is fused first, and if it stays `linear_kl`, the graph is rewritten again without
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from torch_streamkl.fx_passes.capture.aliases import LateWrite
from torch_streamkl.fx_passes.fx_utils.nodes import needs_gradient
from torch_streamkl.fx_passes.reporting.execution import SITE
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.rows import op as row_op


def read_after_writes(graph: fx.Graph, late: Mapping[str, Sequence[LateWrite]]) -> dict[str, str]:
    """Finds, for each loss, an operator that reads a tensor after a write: the loss cannot be
    fused.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    found: dict[str, str] = {}
    for node in graph.nodes:
        for write in late.get(node.meta.get(SITE, ""), ()):
            is_later = position[write.write] > position[node]
            if not is_later or _reads_again(node):
                found[node.meta[SITE]] = write.reason
    return found


def _reads_again(node: fx.Node) -> bool:
    """Whether an operator has a backward that reads its inputs."""
    if node.target in (linear_ops.linear_kl_sum, row_op.row_program_sum):
        return False
    return any(map(needs_gradient, node.all_input_nodes))
