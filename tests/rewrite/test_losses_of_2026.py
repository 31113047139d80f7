"""Losses of 2026 in their natural spellings are read as they are, and matched as promised.

The promises stand in support/of_2026.
"""

import pytest
import torch

from tests.support.comparing import compare
from tests.support.covering import only
from tests.support.match_programs import matches_of
from tests.support.of_2026 import LOSSES
from tests.support.of_2026.registry import ATTENTION, EAGER, LINEAR, ROW
from tests.support.read_programs import Case, examine
from tests.support.row_forms import made_of
from torch_streamkl.fx_passes.capture.settings import CAPTURE
from torch_streamkl.fx_passes.closed_forms.form import NotClosed
from torch_streamkl.fx_passes.closed_forms.row_form import RowForm

QUICK = {
    "cross_entropy_at_ids", "pairs_of_crops", "rolled_logits", "filled_in_place",
    "patches_by_a_mask", "guided_negatives", "megatron_indexer", "gram",
}  # fmt: skip
QUICK_COMPILED = {
    "chunks_into_a_buffer", "chunks_concatenated", "a_loop_over_entries", "elements_by_a_mask",
    "low_variance_kl", "axolotl_with_labels", "sinks_as_logits", "margins", "sdpo_js",
}  # fmt: skip
QUICK_ROWS = {
    "repeated_ids", "padded_ids", "tail_bucket", "verl_clamped", "nemo_renormalised",
    "pairs_of_rows_and_ids", "megatron_indexer",
}  # fmt: skip

# of these the sums alone are programs: what they are computed from, or what is computed of them,
# has no form
OF_SUMS = {
    "axolotl_masked", "axolotl_with_labels", "gram", "gram_of_both", "relational_angles",
    "reverse_kl_as_advantage",
}  # fmt: skip
# of these one value per row has no rule: the pipeline computes it as the user's code does
OF_VALUES = {"entropic_tokens"}
# a closed form is found, and the row program that computes the same is chosen
CHOSEN = {"norm_of_maps": ATTENTION}
OF_ROWS = [n for n, loss in LOSSES.items() if loss.by == (ROW,) and n not in OF_SUMS]


def test_there_are_forty_that_are_no_findings():
    assert sum(not loss.is_of_findings for loss in LOSSES.values()) >= 40
    whole = sum(loss.is_whole for loss in LOSSES.values())
    assert whole >= 0.85 * len(LOSSES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", only(QUICK, LOSSES))
def test_are_read(name):
    loss = LOSSES[name]
    outcome = examine(loss.fn, loss.inputs())
    assert outcome.is_right, (outcome.value, outcome.gradient)
    assert not outcome.nan
    assert not loss.is_whole or name in OF_VALUES or not outcome.captured


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", only(QUICK, LOSSES))
def test_are_matched(name):
    loss = LOSSES[name]
    found = matches_of(Case(name, loss.fn, loss.inputs()))
    assert found.is_right, found.errors
    operators = {call.operator for form in found.closed for call in form.calls}
    assert operators - {CHOSEN.get(name)} == set(loss.by) & {ATTENTION, LINEAR}
    left = [x.reason for x in found.found if isinstance(x, NotClosed)]
    assert not left or {ROW, EAGER} & set(loss.by), left


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", only(QUICK_ROWS, OF_ROWS))
def test_are_row_programs(name):
    loss = LOSSES[name]
    made = made_of(Case(name, loss.fn, loss.inputs()))
    assert not made.wrong
    assert any(isinstance(form, RowForm) for form in made.forms), made.forms


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", only(QUICK_COMPILED, LOSSES))
def test_compiled_results_are_eagers(name):
    """None is wrong, and none is silent: what stays has a reason; whole losses leave nothing."""
    loss = LOSSES[name]
    with torch._dynamo.config.patch(CAPTURE):
        outcome = compare(loss.fn, loss.inputs(), largest_score=50.0).check()
    report = outcome.report
    if loss.is_whole:
        assert report.num_fused, report.details()
        assert not report.num_remaining, report.details()
        assert not outcome.reasons, report.details()
    elif report.num_remaining or not report.num_fused:
        causes = [x.cause for x in report.remaining if x.cause]
        assert outcome.reasons or report.unrecognized or causes, report.details()
