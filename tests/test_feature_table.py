"""The feature table in the docs is up to date, and every test that it names exists."""

import os
import subprocess
import sys

from tests.support.feature_table import FEATURES, FILES, PAGE, ROOT, ids_of, update
from tests.support.problems import CASES


def test_every_case_belongs_to_a_feature() -> None:
    assert set(CASES) == {case for cases in FEATURES.values() for case in cases}


def test_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    assert text == update(text), "run: python -m tests.support.feature_table"


def test_every_test_exists() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=",
        "--collect-only",
        "-q",
        *FILES.values(),
    ]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    collected = set(run.stdout.splitlines())
    named = {test for name in FILES for feature in FEATURES for test in ids_of(name, feature)}
    assert named <= collected, named - collected
