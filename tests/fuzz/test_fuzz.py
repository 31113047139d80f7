"""Random programs compile to what eager computes, fused or not; wrong ones are found and shrunk.

`tests.fuzz` draws them. Here some run with fixed seeds; `python -m tests.fuzz --programs 5000`
runs more, and says which rules none of them met.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.fuzz import judge as fuzz_judge
from tests.fuzz.judge import judge
from tests.fuzz.run import Outcome, fuzz, program
from tests.fuzz.shrink import shrink
from tests.fuzz.tree import Node, Program, node_of
from tests.support.covering import every
from torch_streamkl.fx_passes.closed_forms import row_maxima
from torch_streamkl.fx_passes.reading.reader import RULES
from torch_streamkl.program.canonical import scaled

NUM_PROGRAMS, PART = 100, 10
EAGER: dict[str, Any] = {"inner": "eager"}


@pytest.mark.parametrize("first", every(10, range(0, NUM_PROGRAMS, PART)))
def test_random_programs(first: int) -> None:
    outcome = fuzz(range(first, first + PART), EAGER)
    assert not outcome.failures, "\n".join(map(str, outcome.failures))
    assert outcome.counts["fused"] > 0, outcome.summary()


@pytest.mark.parametrize("first", every(3, range(5000, 5009, 3)))
def test_random_programs_through_aot_autograd(first: int) -> None:
    outcome = fuzz(range(first, first + 3), {"inner": "aot_eager"})
    assert not outcome.failures, "\n".join(map(str, outcome.failures))


def test_a_seed_is_one_program() -> None:
    assert program(7).describe() == program(7).describe()


def test_a_wrong_rule_is_found_and_shrunk() -> None:
    neg = torch.ops.aten.neg.default

    def keeps_the_sign(call: Any) -> object:
        return call.array("self")

    outcome = Outcome()
    with mock.patch.dict(RULES, {neg: keeps_the_sign}):
        for first in range(74, 200, 2):  # few: every one that fails is shrunk
            outcome.add(fuzz(range(first, first + 2), EAGER))
            if outcome.failures:
                break
    (failure, *_) = outcome.failures
    assert "-" in failure.shrunk
    assert len(failure.shrunk.splitlines()) <= 8, failure.shrunk


def test_places_are_judged_up_to_rounding() -> None:
    """Of 16-bit logits several are nearly the largest; another place is wrong."""
    h, w, ht, wt = (Node("tensor", name) for name in ("h", "w", "ht", "wt"))
    s, t = node_of("scores", "({0} @ {1}.T)", h, w), node_of("scores", "({0} @ {1}.T)", ht, wt)
    code = "F.kl_div({0}.log_softmax(-1), {1}.softmax(-1), reduction='sum')"
    places = node_of("metric", "{0}.argmax(-1)", s)
    tree = node_of("results", "({0}, {1})", node_of("loss", code, s, t), places)
    shapes = {"h": (200, 5), "w": (99, 5), "ht": (200, 3), "wt": (99, 3)}
    drawn = Program(tree, shapes, frozenset("hw"), dtype=torch.bfloat16)
    assert not judge(drawn).difference
    with mock.patch.object(row_maxima, "_as_stored", lambda scores, narrow: scores):
        assert not judge(drawn).difference
        with mock.patch.object(fuzz_judge, "NUM_NUDGES_OF_PLACES", 0):
            assert judge(drawn).difference
    with mock.patch.object(row_maxima, "_as_stored", lambda scores, narrow: scaled(-1.0, scores)):
        assert judge(drawn).difference


def test_shrinking_keeps_what_fails() -> None:
    drawn = next(p for p in map(program, range(1000)) if _detaches(p))
    small = shrink(drawn, _detaches)
    assert len(small.source()) < len(drawn.source())
    assert len(small.source().splitlines()) <= 3, small.source()


def _detaches(drawn: Program) -> bool:
    return ".detach()" in drawn.source()


def test_shrunk_programs_run() -> None:
    """What shrinking leaves is Python that eager and the compiler run."""
    drawn = program(3)

    def runs(smaller: Program) -> bool:
        try:
            return not judge(smaller, **EAGER).difference
        except Exception:
            return False

    small = shrink(drawn, lambda p: "softmax" in p.source() and runs(p))
    assert len(small.source().splitlines()) <= 3, small.source()
