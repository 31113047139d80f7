"""Formats the report as text: a headline, a line for each loss, what remains, and details."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from torch_streamkl.fx_passes.fx_utils.sizes import bytes_text

if TYPE_CHECKING:
    from torch_streamkl.fx_passes.reporting.report import (
        GraphBreak,
        Outside,
        Remaining,
        Report,
        Site,
    )

Item = TypeVar("Item")
NOTHING_REMAINS = "No score- or logit-sized tensor remains."
NOTHING_LARGE = (
    "The program has no score- or logit-sized tensor: no product is much larger than its operands."
)
LOSSES = ("loss", "losses")
DETACHED = ("detached value", "detached values")
NO_LOSS = "no distillation loss recognized"
NO_GRAPH = (
    "no graph was analysed: nothing was compiled meanwhile, or the graphs were compiled before "
    "(torch._dynamo.reset() forgets them)"
)
NOT_OURS = (
    '{} compiled without the rewrite. Either the backend is neither "streamkl" nor Inductor '
    "under enable() or inductor_options(); or pre_grad_custom_pass and joint_custom_pre_pass were "
    "replaced in torch._inductor.config or by options= (set yours before enable(), which runs "
    "them first)"
)
CACHED = (
    "{} found in a cache, compiled and reported before: TORCHINDUCTOR_AUTOGRAD_CACHE=0 analyses "
    "again"
)
NOT_KNOWN = "what {}remains is not known"
DETAILS = "report.details()"
_HINT = ". Hint: "
_MAX_REASONS = 3  # of tensors that no recognized loss reads


def short(report: Report) -> str:
    """Returns the headline, one line a loss, one line for what remains."""
    lines = [headline(report)]
    for index, (site, count) in enumerate(alike(report.sites), 1):
        verdict = verdict_of(site) + (f" {count}x" if count > 1 else "")
        lines.append(f"{index:>3}. {verdict:<10} {shown(site.location)}  {in_short(site)}")
    lines += _remaining_in_short(report)
    lines += _leaving_in_short(report.outside)
    if any(not site.fused and not site.skipped for site in report.sites) or report.elsewhere:
        said = "\n".join(lines)
        lines += [_break_text(b) for b in report.breaks if shown(b.location) not in said]
    lines += _not_analysed(report)
    return "\n".join(lines)


def details(report: Report) -> str:
    """Returns all that is known of every loss and of every tensor that remains."""
    lines = [headline(report)]
    for index, (site, count) in enumerate(alike(report.sites), 1):
        lines += [f"{index:>3}. {line}" if i == 0 else line for i, line in _table(site, count)]
    lines += _remaining_in_full(report)
    lines += _leaving(report.outside)
    lines += [_break_text(b) for b in report.breaks]
    lines += [f"note: {note}" for note, _ in alike(report.notes)]
    lines += _not_analysed(report)
    return "\n".join(lines)


def headline(report: Report) -> str:
    """Writes the report's first line."""
    if not report.sites:
        return f"streamkl: {_no_graph(report) if report.is_empty else NO_LOSS}"
    head = f"streamkl: {fused_text(report)}"
    if report.num_skipped:
        head += f", {report.num_skipped} skipped"
    if report.bytes_saved:
        kinds = {_unit(site) for site in report.sites if site.fused}
        of = " and ".join(sorted(kinds, reverse=True))
        head += f", {bytes_text(report.bytes_saved)} of {of} not materialized"
    return head


def fused_text(report: Report) -> str:
    """Says how many losses are fused, and apart from them how many detached values."""
    texts = []
    for is_loss, (one, several) in ((True, LOSSES), (False, DETACHED)):
        own = [site for site in report.sites if site.is_loss == is_loss]
        if own:
            what = one if len(own) == 1 else several
            texts.append(f"{sum(site.fused for site in own)} of {len(own)} {what}")
    return f"{' and '.join(texts) or 'no loss'} fused"


def _no_graph(report: Report) -> str:
    counts = ((report.num_cached, CACHED), (report.num_not_ours, NOT_OURS))
    said = [text.format(_graphs_were(count)) for count, text in counts if count]
    return f"no graph was analysed: {'; '.join(said)}" if said else NO_GRAPH


def _graphs_were(count: int) -> str:
    return "1 graph was" if count == 1 else f"{count} graphs were"


def verdict_of(site: Site) -> str:
    """Names the outcome of a loss: fused, skipped or not fused."""
    return "fused" if site.fused else "skipped" if site.skipped else "not fused"


def _unit(site: Site) -> str:
    """Names the unit of code that would have to be compiled."""
    if site.kind in ("linear_kl", "entry_log_probs", "entry_logits"):
        return "logits"
    return "products" if site.kind == "row_program" else "scores"


def in_short(site: Site) -> str:
    """Describes a loss in one line."""
    if site.fused:
        also = f" + {site.also}" if site.also else ""
        checked = site.check
        if checked and not checked.startswith(CHECK_SKIPPED):
            checked = "check passed"
        warning = f"warning: {site.warning}" if site.warning else ""
        return "; ".join(filter(None, (f"{_form(site)}{also}", checked, warning)))
    what = f"{_form(site)}: {site.skipped}" if site.skipped else _reason(site)
    return f"{what}. {site.hint}" if site.hint.startswith("Force") else with_hint(what, site.hint)


def _form(site: Site) -> str:
    return f"{site.kind}: {site.form}" if site.form else ""


def _reason(site: Site) -> str:
    reason = shown_in(site.reason)
    return reason + (f" ({shown(site.unsupported_at)})" if site.unsupported_at else "")


def with_hint(sentence: str, hint: str) -> str:
    """Returns a sentence with its hint behind it, if there is one."""
    return f"{sentence}{_HINT}{hint}" if hint else sentence


def without_hint(text: str) -> tuple[str, str]:
    """Returns a sentence and its hint, which is empty if there is none."""
    sentence, _, hint = text.partition(_HINT)
    return sentence, hint


CHECK_SKIPPED = "check skipped"


def _table(site: Site, count: int) -> Iterator[tuple[int, str]]:
    """Formats the lines of a loss that occurs ``count`` times, such as in every layer."""
    verdict = verdict_of(site) + (f" {count}x" if count > 1 else "")
    rows = [("code", site.code), ("form", _form(site)), ("roles", site.roles)]
    rows.append(("also", site.also))
    if site.fused:
        rows += [("runs", site.runs), ("check", site.check.removeprefix("check "))]
        rows.append(("saved", _saved(site, count)))
    elif site.skipped:
        rows.append(("skipped", site.skipped))
    else:
        rows.append(("reason", _reason(site)))
        rows.append(("at", site.unsupported_code))
    rows += [("hint", site.hint), ("warning", site.warning)]
    yield 0, f"{verdict:<14}{shown(site.location)}"
    yield from enumerate((f"     {name:<9} {text}" for name, text in rows if text), 1)


def _saved(site: Site, count: int) -> str:
    saved = bytes_text(site.bytes_saved) + (" each" if count > 1 else "")
    if site.num_sharing == 1:
        return saved
    return f"{saved}, with an equal share of what {site.num_sharing} results read together"


def _all_remaining(report: Report) -> list[Remaining]:
    return [*report.remaining, *report.elsewhere]


def _remaining_in_short(report: Report) -> Iterator[str]:
    found = _all_remaining(report)
    if not found:
        yield from _nothing_remains(report)
        return
    largest = max(found, key=lambda x: x.num_bytes)
    what = f"largest: {_tensor(largest)}" if len(found) > 1 else _tensor(largest)
    count, size = remaining_text(len(found)), bytes_text(report.remaining_bytes)
    yield f"{count}, {size} ({DETAILS}); {what}"
    yield from _reasons(report, _MAX_REASONS)


def _remaining_in_full(report: Report) -> Iterator[str]:
    found = _all_remaining(report)
    if not found:
        yield from _nothing_remains(report)
        return
    yield f"{remaining_text(len(found))}, {bytes_text(report.remaining_bytes)}:"
    for title, tensors in (
        ("read by losses", report.remaining),
        ("not read by a recognized loss", report.elsewhere),
    ):
        if tensors:
            yield f"  {title}:"
        for x, count in alike([replace(x, name="") for x in tensors]):
            yield f"     {f'{count} of ' if count > 1 else ''}{_tensor(x)}"
    yield from _reasons(report, len(report.unrecognized))


def _reasons(report: Report, most: int) -> Iterator[str]:
    """Says why tensors belong to no loss: what one hint is for, and then this hint.

    Hints that are said of losses are not repeated. What has no hint comes last.
    """
    said = [site.hint for site in report.sites]
    groups: dict[str, list[str]] = {}
    for text, _ in alike(report.unrecognized):
        sentence, hint = without_hint(text)
        is_said = any(x.startswith(hint) for x in said)
        groups.setdefault("" if is_said else hint, []).append(sentence)
    for hint, sentences in sorted(groups.items(), key=lambda group: not group[0]):
        yield from (f"     {text}" for text in sentences[:most])
        if hint and most > 0:
            yield f"       Hint: {hint}"
        most = max(0, most - len(sentences))


def _nothing_remains(report: Report) -> Iterator[str]:
    if report.is_complete and not report.outside:
        yield NOTHING_REMAINS if report.num_fused or report.num_large else NOTHING_LARGE


def _tensor(x: Remaining) -> str:
    shape = " x ".join(str(s) for s in x.shape)
    size = f" ({bytes_text(x.num_bytes)})" if x.num_bytes else ""
    why = "; ".join(filter(None, (x.reason, x.cause)))
    return f"[{shape}]{size} {shown(x.location)}: {why}"


def _break_text(b: GraphBreak) -> str:
    return f"graph break at {shown(b.location)}: {b.code or b.reason}"


def _leaving_in_short(outside: Sequence[Outside]) -> Iterator[str]:
    """A loss on these is not fused, and nobody else would say so."""
    if outside:
        num_bytes = sum(x.num_bytes for x in outside)
        what = " and ".join(dict.fromkeys(x.what for x in outside))
        yield (
            f"The compiled function returns {what} ({bytes_text(num_bytes)}): a distillation "
            "loss outside of it is not fused. Hint: compile what computes the loss, such as "
            "compute_loss"
        )


def _leaving(outside: Sequence[Outside]) -> Iterator[str]:
    yield from _leaving_in_short(outside)
    for x, count in alike(outside):
        shape = " x ".join(str(s) for s in x.shape)
        times = f"{count} of " if count > 1 else ""
        yield f"     {times}{x.what} [{shape}], {bytes_text(x.num_bytes)} {shown(x.location)}"


def _not_analysed(report: Report) -> Iterator[str]:
    not_known = NOT_KNOWN.format("else " if _all_remaining(report) else "")
    if report.not_analysed:
        yield f"{_graphs_were(report.not_analysed)} not analysed: {not_known}."
    yield from (f"{not_known}: {text}" for text in report.not_scanned)
    yield from (f"analysis failed, graph left as it is: {text}" for text in report.failures)


def alike(items: Sequence[Item]) -> list[tuple[Item, int]]:
    """Returns equal items once, in order of appearance, with their number."""
    return list(Counter(items).items())


def shown(location: str) -> str:
    """Returns a location relative to the working directory when it is below it."""
    return location.removeprefix(os.getcwd() + os.sep)


def shown_in(text: str) -> str:
    """Returns a text with its locations relative to the working directory."""
    return text.replace(os.getcwd() + os.sep, "")


def remaining_text(count: int) -> str:
    """Says how many large tensors remain, as a sentence without its end."""
    one = count == 1
    return f"{count} score- or logit-sized tensor{'' if one else 's'} remain{'s' if one else ''}"
