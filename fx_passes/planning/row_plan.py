"""Represents a row program that is to be inserted, and the user's values that it computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from torch_streamkl.fx_passes.closed_forms.row_form import RowForm
from torch_streamkl.fx_passes.closed_forms.row_sites import products_in
from torch_streamkl.fx_passes.fx_utils.mutation import RECORDS, autograd_modes
from torch_streamkl.fx_passes.planning.row_eager import has_labels
from torch_streamkl.fx_passes.reading.arrays import Dim
from torch_streamkl.fx_passes.reading.positions import source_name
from torch_streamkl.program.graph import Node
from torch_streamkl.rows.program import Program


@dataclass(frozen=True)
class RowOutput:
    """Describes a value of the user's graph that a program computes."""

    inner: fx.Node
    node: fx.Node
    around: Node  # an expression of the rows' values
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class ProgramPlan:
    """Holds a row program, and the values of the user's graph that it computes."""

    form: RowForm
    outputs: tuple[RowOutput, ...]
    matmuls: tuple[fx.Node | None, ...]  # of the trace, one for each product
    first: fx.Node  # of its values in the user's graph
    place: fx.Node  # of the user's, before which the program must be inserted
    dtypes: frozenset[torch.dtype] = frozenset()

    @property
    def unlabelled(self) -> set[fx.Node]:
        """Returns its values without cross-entropies with labels: `linear_kl` has those, too."""
        return {o.inner for o in self.outputs if not has_labels(o.inner)}

    @property
    def of_rows(self) -> list[Node]:
        """Returns the products that the program reads as tensors, as they have no keys."""
        return products_in(self.form.read_of_rows)

    @property
    def operands(self) -> list[fx.Node]:
        """Returns the tensors of the trace that the products are made of."""
        every = (source_name(x) for p in self.form.products for x in (p.rows, p.keys))
        return [x for x in every if isinstance(x, fx.Node)]

    def program_of(self, output: RowOutput) -> Program | None:
        """Returns the part of the program that computes one result; None if entries do."""
        return self.form.program_of_root(self.outputs.index(output))


def recorded(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Returns where a call with gradients stands that computes a node's value.

    It is the node, or the beginning of the ``torch.no_grad`` that a metric is in.
    """
    found, last = {}, None
    for node, mode in autograd_modes(graph.nodes).items():
        last = node if last is None or mode == RECORDS else last
        found[node] = last
    return found
