"""Says what becomes of each loss: ``python -m tests.support.of_2026.table [pipeline] [names]``.

Without ``pipeline``: what is read, and what sums over keys are matched with. With it: what the
rewrite fuses, whether results equal eager code, and the reasons of the report.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter

import torch

from tests.support.comparing import compare
from tests.support.match_programs import matches_of, text_of
from tests.support.of_2026 import LOSSES
from tests.support.of_2026.registry import Loss
from tests.support.read_programs import Case, examine
from torch_streamkl.fx_passes.capture.settings import CAPTURE

OPTIONS = {"streamkl.min_mib": 0}


def fused(loss: Loss) -> str:
    """Returns what the rewrite makes of a loss."""
    with torch._dynamo.config.patch(CAPTURE):
        outcome = compare(loss.fn, loss.inputs(), options=OPTIONS, largest_score=50.0)
    report = outcome.report
    kinds = Counter(site.kind for site in report.sites if site.fused)
    state = "WRONG" if outcome.mismatch() else "ok"
    why = outcome.reasons or [str(x) for x in report.unrecognized]
    is_silent = not why and (report.num_remaining or not kinds)
    marks = " SILENT" if is_silent else ""
    remain = f"{report.num_remaining} remain"
    return f"{state}{marks} {dict(kinds)}, {remain}, {[x[:120] for x in why[:2]]}"


def matched(loss: Loss) -> str:
    """Returns what is read and matched of a loss."""
    outcome = examine(loss.fn, loss.inputs())
    assert outcome.reading is not None
    reasons = list(dict.fromkeys(outcome.reading.reasons.values()))
    found = matches_of(Case(loss.name, loss.fn, loss.inputs()))
    state = "ok" if outcome.is_right and found.is_right else "WRONG"
    forms = " | ".join(text_of(x)[:100] for x in found.found)
    return f"{state} {'' if outcome.captured else 'whole '}{reasons} {forms}"


def main(*given: str) -> None:
    how = fused if given[:1] == ("pipeline",) else matched
    names = [x for x in given if x != "pipeline"]
    for name, loss in LOSSES.items():
        if names and name not in names:
            continue
        try:
            text = how(loss)
        except Exception as error:
            text = f"CRASH {type(error).__name__}: {str(error)[:150]}"
        print(f"{name:26s} {'+'.join(loss.by):24s} {text}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(*sys.argv[1:])
