"""Small divergences, which Inductor's own code may compute as fast: they can be left to it.

What a site saves is its tensors of queries x keys. Where those take a few MiB, what counts is the
number of launches and the host's work between them.
"""

from __future__ import annotations

import math

from torch_streamkl.fx_passes.planning.candidates import Candidate

MIB = 2**20
ELEMENT = 4  # bytes: scores are float32 before a softmax
# of a site, in MiB, from which it is fused, by device: all are, until a device is measured
LEAST_MIB = {"cuda": 0.0, "cpu": 0.0}


def least_mib(device: str, given: float | None) -> float:
    """What the option `streamkl.min_mib` says for a device."""
    return LEAST_MIB.get(device, 0.0) if given is None else given


def why_left(candidate: Candidate, least: float) -> str:
    """Why a site is left to Inductor, or nothing; sizes that vary are fused."""
    elements = candidate.plan.rows.elements
    sizes = elements.shape
    if not all(isinstance(n, int) for n in sizes):
        return ""
    mib = math.prod(sizes) * len(elements.parts) * ELEMENT / MIB
    if mib >= least:
        return ""
    return f"{sizes[elements.key_dim]} keys, {mib:.2g} MiB"
