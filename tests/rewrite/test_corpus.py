"""Every loss of the corpus keeps its value and gradients, and the table in the docs is current.

STREAMKL_FULL_CORPUS=1 runs each case in every setting; otherwise each runs in the table's, and
every second one in one of the others; a part of both is marked slow.
"""

import os

import pytest
import torch

from tests.corpus import table
from tests.corpus.naive_losses import BY_NAME
from tests.corpus.outcomes import NAMES, SETTINGS, TABLE_SETTING, row_of, run_case
from torch_streamkl.fx_passes.fx_utils.errors import SIZES_OF_DATA

IS_OLD_TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 13)
IS_FULL = bool(os.environ.get("STREAMKL_FULL_CORPUS"))
OTHERS = [s for s in SETTINGS if s != TABLE_SETTING]
WITH_QUANTILE = {"edsd_certain_tokens"}  # of which Dynamo asks for data before torch 2.13
# from torch 2.14 on, Dynamo leaves out what does nothing
WITHOUT_DROPOUT = {"bitdistill_relation_of_probs": "6 score- or logit-sized tensors remain"}
LONGEST = "minilmv2_bloomberg_tolist"  # a sixth of the time of all settings


def _chosen():
    """Quick: the first of each setting, of each family and of each direction."""
    seen = set()
    for i, name in enumerate(NAMES):
        case = BY_NAME[name]
        for setting in OTHERS if IS_FULL else [OTHERS[i % len(OTHERS)]] if i % 2 else []:
            kinds = {setting, case["family"], case["direction"]}
            is_quick = name != LONGEST and not kinds <= seen
            seen |= kinds if is_quick else set()
            yield pytest.param(name, setting, marks=[] if is_quick else [pytest.mark.slow])


CHOSEN = list(_chosen())


def _names():
    """Quick: the first of each direction, of each verdict in a family, and of each reason."""
    seen = set()
    for name, (verdict, reason) in table.committed().items():
        case = BY_NAME[name]
        kinds = {(case["family"], verdict), (verdict, reason), case["direction"]}
        is_quick = name != LONGEST and not kinds <= seen
        seen |= kinds if is_quick else set()
        yield pytest.param(name, marks=[] if is_quick or IS_FULL else [pytest.mark.slow])


@pytest.fixture(scope="module")
def committed():
    return table.committed()


@pytest.mark.parametrize("name", list(_names()))
def test_is_exact_and_the_table_is_current(name, committed):
    if IS_OLD_TORCH and name in WITH_QUANTILE:
        pytest.skip("this torch cannot trace quantile")
    outcome = run_case(BY_NAME[name]).check()
    row = row_of(BY_NAME[name], outcome)
    if IS_OLD_TORCH and row.reason == SIZES_OF_DATA:
        pytest.skip("this torch cannot trace sizes that are read from tensors so far")
    verdict, reason = committed[name]
    if torch.__version__ >= (2, 14):
        reason = WITHOUT_DROPOUT.get(name, reason)
    assert (verdict, reason) == (row.verdict, table.escaped(row.reason))


@pytest.mark.skipif(IS_OLD_TORCH, reason="without nested graph breaks")
@pytest.mark.parametrize("name", sorted(table.committed(captured=True)))
def test_with_the_settings_of_enable(name):
    row = row_of(BY_NAME[name], run_case(BY_NAME[name], captured=True).check())
    expected = table.committed(captured=True)[name]
    assert expected == (row.verdict, table.escaped(row.reason))


@pytest.mark.parametrize(("name", "setting"), CHOSEN, ids=str)
def test_is_exact_in_other_settings(name, setting):
    run_case(BY_NAME[name], setting).check()


def test_every_site_that_stays_has_a_reason(committed):
    assert set(committed) == set(NAMES)
    assert all(reason for verdict, reason in committed.values() if not verdict.startswith("fused"))
