"""Decides which losses are too small to fuse: Inductor's own code is as fast.

A fused loss saves its [queries, keys] tensors. If they take a few MiB, the number of launches and
the CPU's work between them count more. The same holds for the attention that remains after its
probabilities are no longer compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch_streamkl.fx_passes.domain.values import Elements
from torch_streamkl.fx_passes.fx_utils.sizes import Size, bytes_text, expression
from torch_streamkl.fx_passes.planning.candidates import Candidate
from torch_streamkl.fx_passes.planning.row_plan import RowPlan

MIB = 2**20
ELEMENT = 4  # bytes: scores are float32 before a softmax
# of a site, in MiB of both sides, from which it is fused, by device. A compiled step on a CPU took
# 1.3 to 2.0 of Inductor's time below 1 MiB, 1.02 to 1.12 to 4 MiB, 0.90 to 0.97 from 6 MiB on, and
# LM heads the same within a tenth (bench/notes/cpu_blocks.md).
LEAST_MIB = {"cuda": 0.0, "cpu": 4.0}
# of a map, from which attention that is left over becomes the fused one. On an H100, a BERT step
# of 32 x 128 tokens (24 MiB a map) waits for the host, which a call of the fused attention takes
# longer than three launches: 20.3 ms with it, 19.1 without. At 32 x 512 (384 MiB) it is needed.
LEAST_ATTENTION_MIB = {"cuda": 32.0, "cpu": 0.0}


# of a row program, in MiB of all of its products together in float32. By blocks of plain torch it
# needs tens of MiB, and longer than Inductor's code: 1.6 to 5.6 times as long on a CPU
# (bench/results/row_programs_cpu.json). So it is taken where the tensors may not fit.
LEAST_PROGRAM_MIB = {"cuda": 1024.0, "cpu": 4096.0}


def least_mib(device: str, given: float | None) -> float:
    """Returns the threshold of the option `streamkl.min_mib` for a device."""
    return LEAST_MIB.get(device, 0.0) if given is None else given


def least_attention_mib(device: str, given: float | None) -> float:
    """Returns the threshold for attention whose probabilities are not compared any more."""
    return LEAST_ATTENTION_MIB.get(device, 0.0) if given is None else given


def why_program_is_left(plan: RowPlan, device: str, given: float | None) -> str:
    """Explains why a row program is skipped; an empty text if it is fused.

    Sizes that vary count as they are when the graph is compiled; those that only data decides are
    taken for large.
    """
    least = LEAST_PROGRAM_MIB.get(device, 0.0) if given is None else given
    axes = plan.elements.axes
    mib = 0.0
    for dot in plan.dots:
        sizes = [_hint(axes.size(a)) for a in axes.atoms(a for dim in dot.axes for a in dim)]
        if None in sizes:
            return ""
        mib += math.prod(n for n in sizes if n is not None) * ELEMENT / MIB
    if mib >= least:
        return ""
    return too_small(mib, "products", least, device, given, "custom losses")


def _hint(size: Size) -> int | None:
    """A size as it is now, without a guard."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return None if hint is None else int(hint)


def why_left(candidate: Candidate, device: str, given: float | None) -> str:
    """Explains why a loss is skipped; an empty text if it is fused, as with dynamic shapes."""
    mib, least = _mib_of(candidate.plan.rows.elements), least_mib(device, given)
    if mib is None or mib >= least:
        return ""
    is_head = all(call.is_head for call in candidate.plan.calls)
    return too_small(mib, "logits" if is_head else "scores", least, device, given, "losses")


def why_attention_is_skipped(elements: Elements, device: str, given: float | None) -> str:
    """Explains why such attention is skipped; an empty text if it is fused."""
    mib, least = _mib_of(elements), least_attention_mib(device, given)
    if mib is None or mib >= least:
        return ""
    return too_small(mib, "scores", least, device, given, "attention")


def _mib_of(elements: Elements) -> float | None:
    sizes = elements.shape
    if not all(isinstance(n, int) for n in sizes):
        return None
    return math.prod(sizes) * len(elements.parts) * ELEMENT / MIB


def too_small(
    mib: float, what: str, least: float, device: str, given: float | None, kind: str
) -> str:
    """Returns a size, the threshold that it is below, and where the threshold comes from."""
    name = {"cuda": "GPU", "cpu": "CPU"}.get(device, device)
    origin = f"{name} threshold for {kind}" if given is None else "streamkl.min_mib"
    return f"{bytes_text(mib * MIB)} of {what} < {bytes_text(least * MIB)} ({origin})"


def why_small(plan: RowPlan) -> str:
    """Explains why a program saves nothing; a softmax is always worth it.

    Products without one may be layers of a network, compared with others: projected hidden states,
    which are no larger than what they are computed from.
    """
    axes = plan.elements.axes
    if plan.program.logsumexps or any(n.op == "exp" for n in plan.program.nodes):
        return ""
    for dot in plan.dots:
        made = _num_elements(axes.size(a) for dim in dot.axes for a in axes.atoms(dim))
        operands = [
            _num_elements(piece.size for dim in ref.layout for piece in dim)
            for ref in (dot.lhs, dot.rhs)
        ]
        if made is None or any(n is None or made < 2 * n for n in operands):
            return "products that are not larger than what they are computed from"
    return ""


def _num_elements(sizes: Iterable[Size]) -> int | None:
    known = [expression(n) for n in sizes]
    return math.prod(known) if all(isinstance(n, int) for n in known) else None
