"""Puts a report into torch's structured trace, where `tlparse` shows it with the graph."""

from __future__ import annotations

import contextlib

import torch

from torch_streamkl.fx_passes.reporting.report import Report

NAME = "streamkl_report"


def store(report: Report) -> None:
    """Stores an artifact for `tlparse`, if this torch offers one (TORCH_TRACE is set)."""
    trace = getattr(getattr(torch, "_logging", None), "trace_structured", None)
    if trace is None:
        return
    with contextlib.suppress(Exception):  # nothing of a report may end a compilation
        trace(
            "artifact",
            metadata_fn=lambda: {"name": NAME, "encoding": "json"},
            payload_fn=lambda: report.to_json(indent=1),
        )
