"""Says which fused loss saves which of the large tensors that a rewrite removes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from torch_streamkl.fx_passes.fx_utils.nodes import ancestors, num_bytes


@dataclass
class Saving:
    """Counts the bytes that one loss no longer materializes.

    Of a tensor that several losses are computed from, each has an equal share. ``num_sharing``
    is the number of losses with which it has such tensors in common, itself included.
    """

    num_bytes: int = 0
    num_sharing: int = 1


def savings_of(removed: Mapping[fx.Node, fx.Node], losses: Sequence[fx.Node]) -> list[Saving]:
    """Returns the savings of each loss.

    ``removed`` maps the user's large tensors to the nodes of the trace, which has the losses.
    """
    found = [Saving() for _ in losses]
    if not losses:  # what was removed are writes whose results nobody reads
        return found
    made_of = [{loss, *ancestors(loss)} for loss in losses]
    sharing: list[set[int]] = [{i} for i in range(len(losses))]
    for node, inner in removed.items():
        owners = [i for i, nodes in enumerate(made_of) if inner in nodes] or [*range(len(losses))]
        share, rest = divmod(num_bytes(node), len(owners))
        for i in owners:
            found[i].num_bytes += share + (rest if i == owners[0] else 0)
            sharing[i].update(owners)
    for saving, others in zip(found, sharing, strict=True):
        saving.num_sharing = len(others)
    return found
