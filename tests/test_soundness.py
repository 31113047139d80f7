"""Programs written to mislead the rewrite compute what eager computes, by the rules alone.

The checks that run when a rewrite is compiled are off here: what they would catch is a mistake of
the rules. A program that ought to fuse must also do that.
"""

from __future__ import annotations

import pytest

from tests.support.misleading.registry import FAULTS, PROGRAMS
from tests.support.misleading_programs import judge

# compiled by Inductor as well, with one of the two front ends each: one for every stage
WITH_INDUCTOR = {
    "scale_exp_shared_dynamic": "inductor_options",
    "head_scale_shared_dynamic": "backend",
    "mask_one_row_lowered": "backend",
    "shift_before_a_moderate_fill": "inductor_options",
    "mean_of_four_heads_against_two": "backend",
    "detached_map_times_values": "inductor_options",
    "labels_change_between_losses_that_are_not_trained": "backend",
    "table_renormalised_between": "inductor_options",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name: str) -> None:
    program = PROGRAMS[name]
    # AOTAutograd takes its time with symbolic sizes, and has seen the program with numbers
    through_aot = program.fault and not program.dynamic
    verdict = judge(program, inner="aot_eager" if through_aot else "eager")
    assert not verdict.difference, f"{FAULTS.get(program.fault, name)}: {verdict.difference}"
    if program.fuses is not None:
        assert verdict.num_fused >= program.fuses, verdict.reasons


@pytest.mark.parametrize(("name", "front_end"), WITH_INDUCTOR.items())
def test_equals_eager_with_inductor(name: str, front_end: str) -> None:
    verdict = judge(PROGRAMS[name], inner="inductor", front_end=front_end)
    assert not verdict.difference, verdict.difference


def test_every_fault_has_programs() -> None:
    assert {p.fault for p in PROGRAMS.values()} - {""} == set(FAULTS)
