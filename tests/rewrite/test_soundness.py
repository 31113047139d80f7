"""Programs written to mislead the rewrite compute what eager computes, by the rules alone.

The checks that run when a rewrite is compiled are off here: what they would catch is a mistake of
the rules. A program that ought to fuse must also do that.
"""

from collections import Counter
from itertools import groupby

import pytest

from tests.support.covering import every, only, quick_rows
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
QUICK_WITH_INDUCTOR = ("mean_of_four_heads_against_two",)


def _names():
    """Programs of a table are rows of a product, of which every value is in a quick one.

    Of the others that provoke a fault the first two of it are quick, and every eighth of those
    that follow: they spell it in other ways. Of masks all that do so with numbers as
    sizes, and one for every fault with symbols. Of those that provoke none every fourth row of a
    table and every eighth of the others; those of hard_programs.py are in test_safety.py.
    """
    for table, group in groupby(PROGRAMS.values(), lambda p: p.place[:1]):
        programs = list(group)
        quick = set(range(len(programs)))
        if table == ("masks",):
            quick = {i for i in quick if not programs[i].dynamic} | _firsts(programs)
        elif table:
            quick = quick_rows([p.place[1:] for p in programs], most=1)
        else:
            quick = _of_each_fault(programs)
        neighbours = [i for i in sorted(quick) if not programs[i].fault]
        hard = {i for i in neighbours if programs[i].name.startswith("hard_")}
        left = [i for i in neighbours if i not in hard]
        quick -= {*neighbours} - {*left[:: 4 if table else 8]}
        for i, p in enumerate(programs):
            yield pytest.param(p.name, marks=[] if i in quick else [pytest.mark.slow])


def _of_each_fault(programs):
    """The first two of each, and every eighth of the others; those of none are chosen later."""
    seen = Counter()
    found = set()
    for i, p in enumerate(programs):
        number = seen[p.fault]
        seen[p.fault] += 1
        if not p.fault or number < 2 or number % 8 == 0:
            found.add(i)
    return found


def _firsts(programs):
    """One program of every fault, and one of none, with symbolic sizes."""
    found = {}
    for i, p in enumerate(programs):
        if p.dynamic:
            found.setdefault(p.fault, i)
    return set(found.values())


def check(name, inner):
    program = PROGRAMS[name]
    verdict = judge(program, inner=inner)
    assert not verdict.difference, f"{FAULTS.get(program.fault, name)}: {verdict.difference}"
    if program.fuses is not None:
        assert verdict.num_fused >= program.fuses, verdict.reasons


@pytest.mark.parametrize("name", list(_names()))
def test_equals_eager(name):
    check(name, "eager")


# which takes its time with symbolic sizes, and has seen those programs with numbers
@pytest.mark.parametrize(
    "name", every(24, [p.name for p in PROGRAMS.values() if p.fault and not p.dynamic])
)
def test_equals_eager_through_aot_autograd(name):
    check(name, "aot_eager")


@pytest.mark.parametrize("name", only(QUICK_WITH_INDUCTOR, WITH_INDUCTOR))
def test_equals_eager_with_inductor(name):
    verdict = judge(PROGRAMS[name], inner="inductor", front_end=WITH_INDUCTOR[name])
    assert not verdict.difference, verdict.difference


def test_every_fault_has_programs():
    assert {p.fault for p in PROGRAMS.values()} - {""} == set(FAULTS)
