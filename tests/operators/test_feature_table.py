"""The feature table in the docs is up to date, and every test that it names exists."""

import importlib
import itertools

from _pytest.mark.structures import ParameterSet

from tests.support.feature_table import FEATURES, FILES, PAGE, ids_of, update
from tests.support.problems import CASES


def test_every_case_belongs_to_a_feature() -> None:
    assert set(CASES) == {case for cases in FEATURES.values() for case in cases}


def test_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    assert text == update(text), "run: python -m tests.support.feature_table"


def test_every_test_exists() -> None:
    """In the parameters that pytest collects: to collect them would take seconds."""
    found = set()
    for path in FILES.values():
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        marks = [m for m in module.test_feature.pytestmark if m.name == "parametrize"]
        assert marks[0].args[0] == "name"
        axes = [
            [x.values[0] if isinstance(x, ParameterSet) else x for x in m.args[1]] for m in marks
        ]
        found |= {f"{path}::test_feature[{'-'.join(row)}]" for row in itertools.product(*axes)}
    named = {test for name in FILES for feature in FEATURES for test in ids_of(name, feature)}
    assert named <= found, named - found
