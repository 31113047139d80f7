"""Decides which losses are too small to fuse: Inductor's own code is as fast.

A fused loss saves its [queries, keys] tensors. If they take a few MiB, the number of launches and
the CPU's work between them count more. The same holds for the attention that remains after its
probabilities are no longer compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch_streamkl.fx_passes.closed_forms.chosen import FEW_IDS
from torch_streamkl.fx_passes.closed_forms.form import LINEAR, ClosedForm, Product
from torch_streamkl.fx_passes.closed_forms.row_form import RowForm
from torch_streamkl.fx_passes.fx_utils.sizes import bytes_text, hint_of
from torch_streamkl.fx_passes.reading.sizes import torch_size
from torch_streamkl.program.graph import Axis, Size, num_positions
from torch_streamkl.rows.program import COLUMNS

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
# needs tens of MiB, and longer than Inductor's code: 1.6 to 5.5 times as long on a CPU
# (bench/results/row_programs_cpu.json). So it is taken where the tensors may not fit. On an H100
# a step waits for the host below 512 MiB to 1 GiB (bench/notes/row_programs.md).
LEAST_PROGRAM_MIB = {"cuda": 1024.0, "cpu": 4096.0}
# of the logits that a loss saves if other code reads its other logits. Their products are then
# computed twice: a KL with top-1 agreement took 9.9 ms on an H100, 7.2 with torch.compile
# (bench/notes/lm_heads.md). So it is taken where the tensors may not fit.
LEAST_TWICE_MIB = {"cuda": 1024.0, "cpu": 1024.0}


def _too_small(
    mib: float | None,
    thresholds: Mapping[str, float],
    texts: tuple[str, str],
    device: str,
    given: float | None,
) -> str:
    """A size, the threshold that it is below, and where the threshold comes from.

    ``given`` is the option `streamkl.min_mib`, in place of the device's threshold. Empty if the
    size is not below it, or not known. ``texts`` say what it is the size of, and in which code.
    """
    least, (what, kind) = thresholds.get(device, 0.0) if given is None else given, texts
    if mib is None or mib >= least:
        return ""
    name = {"cuda": "GPU", "cpu": "CPU"}.get(device, device)
    origin = f"{name} threshold for {kind}" if given is None else "streamkl.min_mib"
    return f"{bytes_text(mib * MIB)} of {what} < {bytes_text(least * MIB)} ({origin})"


def why_left(forms: Sequence[ClosedForm], device: str, given: float | None) -> str:
    """Explains why a loss is skipped; an empty text if it is fused, as with dynamic shapes."""
    is_head = all(call.operator == LINEAR for form in forms for call in form.calls)
    texts = "logits" if is_head else "scores", "losses"
    return _too_small(mib_of_scores(forms), LEAST_MIB, texts, device, given)


def mib_of_scores(forms: Iterable[ClosedForm]) -> float | None:
    """Returns the size of the scores of all distributions; None where it varies."""
    total = 0.0
    for form in forms:
        sides = {side for call in form.calls for side in call.sides}
        count = num_positions((*form.calls[0].axes.rows, form.calls[0].axes.key))
        if count is None:
            return None
        total += count * len(sides) * ELEMENT / MIB
    return total


def why_attention_is_skipped(axes: Iterable[Axis], device: str, given: float | None) -> str:
    """Explains why attention is skipped, of the axes of its probabilities; "" if it is fused."""
    count = num_positions(axes)
    mib = None if count is None else count * ELEMENT / MIB
    return _too_small(mib, LEAST_ATTENTION_MIB, ("scores", "attention"), device, given)


def why_program_is_left(products: Iterable[Product], device: str, given: float | None) -> str:
    """Explains why a row program is skipped; an empty text if it is fused.

    Sizes that vary count as they are when the graph is compiled; those that only data decides are
    taken for large.
    """
    mib = sum(map(mib_of, products))
    return _too_small(mib, LEAST_PROGRAM_MIB, ("products", "custom losses"), device, given)


def mib_of(product: Product) -> float:
    """Returns the size of what a product makes, as sizes are now; unknown ones are infinite."""
    count = _count(axes_of(product))
    return math.inf if count is None else count * ELEMENT / MIB


def why_twice_is_left(saved: float, readers: Iterable[str], device: str) -> str:
    """Explains why a loss is skipped whose logits ``readers`` read as well; "" if it is fused.

    ``saved`` are the MiB of those of its logits that nothing else reads.
    """
    texts = "others", "logits computed twice"
    small = _too_small(saved, LEAST_TWICE_MIB, texts, device, None)
    names = sorted(readers)
    verb = "reads" if len(names) == 1 else "read"
    also = f"{', '.join(names)} also {verb} its logits; computing them again saves"
    return f"{also} {small}" if small else ""


def why_ids_are_left(form: RowForm, device: str, given: float | None) -> str:
    """Explains why a program that compares every key with many ids of a row is skipped.

    On an H100 it takes longer than compiled code: 8.1 ms with 64 ids of 32,768, beside 2.6.
    """
    if given is not None:
        return ""
    counts = [math.prod(_hint(a.size) or 1 for a in c.dims[3]) for c in form.captures
              if c.kind == COLUMNS]  # fmt: skip
    if device == "cpu" or max(counts, default=0) <= FEW_IDS:
        return ""
    return f"{max(counts)} ids of a row > {FEW_IDS} (GPU limit for programs that read ids)"


def why_small(form: RowForm) -> str:
    """Explains why a program saves nothing; a softmax is always worth it.

    Products without one may be layers of a network, compared with others: projected hidden states,
    which are no larger than what they are computed from.
    """
    program = form.program
    if program is None or program.logsumexps or any(n.op == "exp" for n in program.nodes):
        return ""
    is_small = all(map(_is_small, form.products))
    return "products that are not larger than what they are computed from" if is_small else ""


def are_all_keys(form: RowForm) -> bool:
    """Returns whether entries at ids are as many as the scores, such as those of a sort."""
    sizes = [(num_positions(x.places), x.key.size) for x in form.every_entries]
    return any(isinstance(n, int) and isinstance(k, int) and n >= k for n, k in sizes)


def _is_small(product: Product) -> bool:
    made = _count(axes_of(product))
    operands = [_count(x.axes) for x in (product.rows, product.keys)]
    return made is None or any(n is None or made < 2 * n for n in operands)


def _count(axes: Iterable[Axis]) -> int | None:
    """The number of positions along axes, with sizes that vary as they are now."""
    sizes = [_hint(a.size) for a in axes]
    return None if None in sizes else math.prod(n for n in sizes if n is not None)


def axes_of(product: Product) -> frozenset[Axis]:
    """Returns the axes that a product has an element for."""
    return (product.rows.axes | product.keys.axes) - set(product.contracted)


def _hint(size: Size | None) -> int | None:
    """A size as it is now, without a guard."""
    return None if size is None else hint_of(torch_size(size))
