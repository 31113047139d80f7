"""Programs written to mislead the rewrite compute what eager computes, by the rules alone.

The checks that run when a rewrite is compiled are off here: what they would catch is a mistake of
the rules. A program that ought to fuse must also do that.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest

from tests.support.covering import every, quick_rows
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


def _names() -> Iterator[Any]:
    """Programs of a table are rows of a product: tests/support/covering.py.

    Of the others all that provoke a fault are quick, and every second of their neighbours; those
    of hard_programs.py are in test_safety.py.
    """
    neighbours = 0
    for table, group in groupby(PROGRAMS.values(), lambda p: p.place[:1]):
        programs = list(group)
        quick = set(range(len(programs)))
        if table:
            quick = quick_rows([p.place[1:] for p in programs])
        for i, p in enumerate(programs):
            if not table and not p.fault:
                neighbours += 1
                if p.name.startswith("hard_") or neighbours % 2:
                    quick.discard(i)
        for i, p in enumerate(programs):
            yield pytest.param(p.name, marks=[] if i in quick else [pytest.mark.slow])


@pytest.mark.parametrize("name", list(_names()))
def test_equals_eager(name: str) -> None:
    program = PROGRAMS[name]
    # AOTAutograd takes its time with symbolic sizes, and has seen the program with numbers
    through_aot = program.fault and not program.dynamic
    verdict = judge(program, inner="aot_eager" if through_aot else "eager")
    assert not verdict.difference, f"{FAULTS.get(program.fault, name)}: {verdict.difference}"
    if program.fuses is not None:
        assert verdict.num_fused >= program.fuses, verdict.reasons


@pytest.mark.parametrize("name", every(3, WITH_INDUCTOR))
def test_equals_eager_with_inductor(name: str) -> None:
    verdict = judge(PROGRAMS[name], inner="inductor", front_end=WITH_INDUCTOR[name])
    assert not verdict.difference, verdict.difference


def test_every_fault_has_programs() -> None:
    assert {p.fault for p in PROGRAMS.values()} - {""} == set(FAULTS)
