"""Run a corpus case through the backend and say what came of it."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from dataclasses import dataclass

import torch
import torch._dynamo.config

from tests.corpus.naive_losses import ALL_CASES, AOT_EAGER_STRIDE_ISSUE
from tests.support.comparing import compare
from torch_streamkl.fx_passes.capture.settings import CAPTURE
from torch_streamkl.fx_passes.reporting.text import remaining_text

NAMES = [case["name"] for case in ALL_CASES]


@dataclass(frozen=True)
class Setting:
    """How a case is run."""

    dtype: torch.dtype = torch.float32
    dynamic: bool = False
    training: bool = True

    def __str__(self):
        shapes = "dynamic" if self.dynamic else "static"
        mode = "training" if self.training else "no_grad"
        return f"{str(self.dtype).removeprefix('torch.')}-{shapes}-{mode}"


SETTINGS = [
    Setting(*choice)
    for choice in itertools.product((torch.float32, torch.bfloat16), (False, True), (True, False))
]
TABLE_SETTING = SETTINGS[0]


def run_case(case, setting=TABLE_SETTING, captured=False):
    """Compiled against eager, both against float64; one graph where the case allows it.

    ``captured``: with Dynamo's settings as `torch_streamkl.enable` makes them.
    """
    inner = "aot_eager" if setting.training and not setting.dynamic else "eager"
    if case["name"] in AOT_EAGER_STRIDE_ISSUE:
        inner = "eager"
    settings = torch._dynamo.config.patch(CAPTURE) if captured else contextlib.nullcontext()
    with warnings.catch_warnings(), settings:
        warnings.simplefilter("ignore")
        return compare(
            case["fn"],
            case["make_inputs"](setting.dtype),
            inner=inner,
            dynamic=setting.dynamic,
            training=setting.training,
            # with every number a symbol Dynamo cannot trace F.dropout(training=p > 0), with or
            # without us: it breaks the graph there
            fullgraph=case["fullgraph"] and not setting.dynamic and not captured,
            min_mib=0.0,  # the cases are small
        )


@dataclass(frozen=True)
class Row:
    """A line of the table in docs/evidence/corpus.md."""

    case: str
    verdict: str
    reason: str
    loss_error: float
    gradient_error: float


def verdict_of(outcome):
    """What the report says: how many of the sites are fused."""
    total = len(outcome.report.sites)
    if total and outcome.num_fused == total:
        return "fused" if total == 1 else f"fused ({total} losses)"
    if outcome.num_fused:
        return f"{outcome.num_fused} of {total} losses fused"
    return "not fused" if total else "no loss"


def row_of(case, outcome):
    """The case's line: errors are relative to the largest value, in float32."""
    reason = "; ".join(sorted(set(outcome.reasons)))
    if not outcome.report.sites:
        reason = "no two distributions meet in the graph"
    remaining = outcome.report.num_remaining
    if outcome.num_fused and remaining:
        causes = sorted({x.cause for x in outcome.report.remaining if x.cause})
        text = remaining_text(remaining) + (f": {', '.join(causes)}" if causes else "")
        reason = "; ".join(filter(None, (reason, text)))
    errors = (outcome.relative("outputs"), outcome.relative("gradients"))
    return Row(case["name"], verdict_of(outcome), reason, *errors)
