"""Writes the report as JSON and as HTML."""

from __future__ import annotations

import dataclasses
import html
import json
from typing import TYPE_CHECKING, Any

from torch_streamkl.fx_passes.reporting import text

if TYPE_CHECKING:
    from torch_streamkl.fx_passes.reporting.report import Report, Site

_COLORS = {"fused": "#1a7f37", "skipped": "#9a6700", "not fused": "#cf222e"}
_TOTALS = (
    "num_fused", "num_skipped", "num_unfused", "num_remaining", "bytes_saved", "remaining_bytes",
    "is_complete", "is_empty",
)  # fmt: skip
_UNUSED = {"node", "name"}  # names of graph nodes, which no user has seen


def to_dict(report: Report) -> dict[str, Any]:
    """Converts a report to lists, dictionaries, strings and numbers, by the attributes' names."""
    totals = {name: getattr(report, name) for name in _TOTALS}
    return {**totals, **_plain(dataclasses.asdict(report))}


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items() if k not in _UNUSED}
    return [_plain(v) for v in x] if isinstance(x, (list, tuple)) else x


def to_json(report: Report, **options: Any) -> str:
    """Converts a report to JSON."""
    return json.dumps(to_dict(report), **options)


def to_html(report: Report) -> str:
    """Returns a table of the losses, and the rest of the details folded away."""
    rows = "".join(_row(site, count) for site, count in text.alike(report.sites))
    table = (
        "<table><thead><tr><th>loss</th><th>verdict</th><th>what</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )
    head, *_ = text.headline(report).splitlines()
    return (
        f"<div class='streamkl'><b>{html.escape(head)}</b>{table if rows else ''}"
        f"<details><summary>details</summary><pre>{html.escape(text.details(report))}</pre>"
        "</details></div>"
    )


def _row(site: Site, count: int) -> str:
    verdict = text.verdict_of(site)
    times = f" {count}x" if count > 1 else ""
    cells = (
        f"<code title='{html.escape(site.code, quote=True)}'>"
        f"{html.escape(text.shown(site.location))}</code>",
        f"<span style='color:{_COLORS[verdict]}'>{verdict}{times}</span>",
        html.escape(text.in_short(site)),
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
