"""Programs put together at random keep eager's values and gradients, fused or not.

Every choice of `Program` is drawn independently: spelling, mask, scale, producer, reduction, what
gets gradient, dtype, shapes, and sometimes a change that makes the program a near miss. CI runs
500 programs, STREAMKL_FUZZ_PROGRAMS=5000 runs as many.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.comparing import compare
from tests.support.programs import (
    CALLS,
    GRADIENTS,
    MASKS,
    PRODUCERS,
    REDUCTIONS,
    SCALES,
    SPELLINGS,
    Program,
)

NUM_PROGRAMS = int(os.environ.get("STREAMKL_FUZZ_PROGRAMS", "500"))
OUTCOMES: Counter[str] = Counter()

Change = Callable[[Tensor, Tensor, Tensor], Tensor]


def _after_softmax(s: Tensor, t: Tensor, pad: Tensor) -> Tensor:
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none") * pad[:, None, None, :]


# changes of a program's last step that no operator, or only an exact one, computes
NEAR_MISSES: dict[str, Change] = {
    "": lambda s, t, pad: s,
    "softmax of other dimension": lambda s, t, pad: (
        t.softmax(-2) * (t.log_softmax(-2) - s.log_softmax(-2))
    ),
    "mixed dimensions": lambda s, t, pad: t.softmax(-1) * s.log_softmax(-2),
    "weights along keys": lambda s, t, pad: (
        t.softmax(-1)
        * (t.log_softmax(-1) - s.log_softmax(-1))
        * torch.linspace(0, 1, s.shape[-1], dtype=s.dtype)
    ),
    "mask after softmax": _after_softmax,
    "double softmax": lambda s, t, pad: (
        (p := t.softmax(-1)).softmax(-1) * (p.log_softmax(-1) - s.softmax(-1).log_softmax(-1))
    ),
    "one double softmax": lambda s, t, pad: t.softmax(-1) * s.softmax(-1).log_softmax(-1),
    "other mask": lambda s, t, pad: (
        t.softmax(-1) * s.masked_fill(~pad[:, None, None, :], -30.0).log_softmax(-1)
    ),
    "log of target": lambda s, t, pad: F.kl_div(
        s.softmax(-1), t.softmax(-1), reduction="none", log_target=True
    ),
    "scores twice": lambda s, t, pad: t.softmax(-1) * (s + s).log_softmax(-1),
    "transposed": lambda s, t, pad: t.softmax(-1) * s.mT.log_softmax(-1),
    "relu": lambda s, t, pad: t.softmax(-1) * s.relu().log_softmax(-1),
    "squared": lambda s, t, pad: (t.softmax(-1) * s.log_softmax(-1)).square(),
    "detached weight": lambda s, t, pad: (
        t.softmax(-1) * t.log_softmax(-1).detach() - t.softmax(-1).detach() * s.log_softmax(-1)
    ),
    "shifted rows": lambda s, t, pad: t[:, :, 1:].softmax(-1) * s[:, :, :-1].log_softmax(-1),
    "fewer keys": lambda s, t, pad: t[..., 2:].softmax(-1) * s[..., 2:].log_softmax(-1),
    "renormalised": lambda s, t, pad: (
        (p := t.softmax(-1).clamp(min=0.01)) / p.sum(-1, keepdim=True) * s.log_softmax(-1)
    ),
    "averaged teacher": lambda s, t, pad: (
        t.softmax(-1).mean(1, keepdim=True) * s.mean(1, keepdim=True).log_softmax(-1)
    ),
}
FULL_ROWS = {"sum", "mean", "row_mean", "batchmean", "rows"}  # reductions that take any shape


@dataclass(frozen=True)
class Fuzzed(Program):
    """A program with a near miss in place of its spelling."""

    near_miss: str = ""
    dtype: torch.dtype = field(default=torch.float32)

    def __call__(self, sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor, pad: Tensor) -> Any:
        if not self.near_miss:
            return super().__call__(sq, sk, tq, tk, pad)
        s = self.scores(sq, sk, pad, self.producer)
        t = self.scores(tq, tk, pad, self.producer)
        elements = NEAR_MISSES[self.near_miss](s, t, pad)
        reduction = self.reduction if self.reduction in FULL_ROWS else "row_mean"
        loss = REDUCTIONS[reduction](elements, pad)
        return (loss, s.softmax(-1).to(sk.dtype) @ sk) if self.uses_values else loss


@st.composite
def programs(draw: st.DrawFn) -> Fuzzed:
    def choose(options: Iterable[str]) -> str:
        return draw(st.sampled_from(sorted(options)))

    calls = draw(st.integers(0, 3)) == 0
    return Fuzzed(
        producer=choose(PRODUCERS),
        scale=choose(SCALES),
        mask=choose(MASKS),
        spelling=choose(SPELLINGS),
        reduction=choose(set(REDUCTIONS) - {"index_rows"}),
        call=choose(CALLS) if calls else "",
        gradient=choose(GRADIENTS),
        uses_values=draw(st.integers(0, 4)) == 0,
        near_miss=choose(NEAR_MISSES) if draw(st.integers(0, 3)) == 0 else "",
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])),
    )


SETTINGS = settings(
    max_examples=NUM_PROGRAMS,
    database=None,
    phases=[Phase.generate],  # a failing program is short enough as it is
    suppress_health_check=list(HealthCheck),
)


def largest_score(program: Fuzzed, inputs: list[Any]) -> float:
    """Size of the scores, which are tens where they are not scaled."""
    if program.scale != "none":
        return 0.0
    sq, sk, tq, tk = (x.detach().double() for x in inputs[:4])
    return max(float((sq @ sk.mT).abs().max()), float((tq @ tk.mT).abs().max()))


@SETTINGS
@given(programs(), st.integers(0, 3), st.booleans(), st.booleans())
def test_random_programs(program: Fuzzed, seed: int, training: bool, dynamic: bool) -> None:
    inputs = program.inputs(seed, program.dtype, num_queries=(10, 7, 10, 5)[seed])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = compare(
            program,
            inputs,
            training=training,
            dynamic=dynamic and seed == 0,
            largest_score=largest_score(program, inputs),
        )
    OUTCOMES["fused" if outcome.num_fused else "left alone"] += 1
    message = outcome.mismatch()
    assert not message, f"{program} seed={seed} training={training}\n{message}"
    assert all(outcome.reasons), outcome.report
