"""Every mutation can still be applied, and the table names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutations import BEGIN, DOCUMENT, END, ROOT, line
from tests.support.mutations import FAULTS, Fault

ROWS = DOCUMENT.read_text().split(BEGIN)[1].split(END)[0].splitlines()[2:]


def test_there_are_enough() -> None:
    assert len(ROWS) == len(FAULTS) >= 40


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{Path(f.path).name}: {f.new[:30]}")
def test_a_fault_is_one_line_that_a_test_catches(fault: Fault) -> None:
    assert (ROOT / fault.path).read_text().count(fault.old) == 1
    (row,) = [x for x in ROWS if x.startswith(line(fault, "").removesuffix("`` |"))]
    file, test = row.split("| `")[-1].removesuffix("` |").split("::")
    assert re.search(rf"\b{test.split('[')[0]}\b", (ROOT / "tests" / file).read_text())
