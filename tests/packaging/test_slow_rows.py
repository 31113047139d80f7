"""The lists by which `make test` chooses and orders tests name tests that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import durations, slow

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("name", sorted(slow.NAMES))
def test_a_row_that_is_omitted_is_there(name: str) -> None:
    file, _, test = name.partition("::")
    assert f"def {test.split('[')[0]}(" in (TESTS / file).read_text()


def test_most_durations_are_of_tests_that_are_there() -> None:
    names = list(durations.read())
    there = [n for n in names if (TESTS.parent / n.partition("::")[0]).exists()]
    assert len(there) >= 0.8 * len(names) > 0, set(names) - set(there)
