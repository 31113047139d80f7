"""Real and random losses are matched, and every match means what the program does.

What is matched is recomputed from its arguments alone: values and gradients of each sum over keys,
and the value of the whole program with the recomputed rows.
"""

import functools

import pytest
import torch

import tests.support.misleading_programs
import tests.support.more_user_losses  # noqa: F401  # adds to USER_LOSSES
from tests.corpus.naive_losses import BY_NAME
from tests.fuzz.run import program
from tests.support.covering import only
from tests.support.match_programs import matches_of
from tests.support.misleading.registry import PROGRAMS
from tests.support.read_programs import Case, corpus, misleading, users
from tests.support.user_losses import USER_LOSSES
from torch_streamkl.fx_passes.closed_forms.form import ATTENTION, LINEAR

# by how many calls of attention_kl and linear_kl
CALLS = {
    (1, 0): [
        "linearard_ref", "minilm_bert_additive_T", "minilm_unscaled_flat",
        "attn_eps_log_batchmean", "attn_clamp_qmask", "bitdistill_relation_of_probs",
        "attn_raw_scores_mean", "attn_log_target_on_probs_bug", "attn_js_window",
        "kvpress_gqa_indexer_dense", "bitdistill_flat_eps_both", "mdistiller_dkd/lm_head",
    ],
    (3, 0): [
        "linearard_train_relations",
    ],
    (6, 0): [
        "minilmv2_bloomberg",
    ],
    (2, 0): [
        "minilm_xdpx_rowmask",
    ],
    (0, 1): [
        "recsys_user_item_kl", "fla_linear_kl_ref", "nitrobrew_naive_forward",
        "nitrobrew_naive_reverse", "liger_lmhead_jsd_b0.0", "liger_lmhead_jsd_b1.0",
        "liger_lmhead_jsd_b0.5", "dflash_softcap_linear_kl", "vocab_pad_mismatch",
        "hidden_reverse_masked", "trl_gkd_fwd_nomask/lm_head",
        "trl_gkd_rev_nomask/lm_head", "trl_gkd_fwd_labels/lm_head",
        "trl_gkd_jsd_nomask/lm_head", "trl_gkd_fwd_mean/lm_head",
        "deit_log_target_numel/lm_head", "modelopt_logits_mean/lm_head",
        "modelopt_megatron_fwd/lm_head", "modelopt_megatron_rev/lm_head",
        "nemo_automodel_guarded/lm_head", "nemo_automodel_indexed_chunked/lm_head",
        "nemo_peagle_kl/lm_head", "kdflow_kl/lm_head", "kdflow_rkl/lm_head",
        "kdflow_jsd/lm_head", "dskd_forward/lm_head", "mdistiller_kd/lm_head",
        "vocab_column_excluded", "cross_entropy_prob_target/lm_head",
        "r3f_symmetric/lm_head", "swapped_args_reverse/lm_head",
        "linearard_logit_kl/lm_head", "edsd_certain_tokens",
    ],
    (0, 2): [
        "linear_bias_ce_kd_chunk", "kdflow_adaptive/lm_head", "hass_kl_and_topk/lm_head",
        "specforge_lk_lambda", "dspark_l1_and_confidence", "distillm2_contrastive",
    ],
    (0, 4): [
        "torchtune_chunked/lm_head",
    ],
}  # fmt: skip
CLOSED = {name: calls for calls, names in CALLS.items() for name in names}
NOT_TRACED = {"torchtune_forward_branch", "torchtune_forward_branch/lm_head"}  # `if tensor`
QUICK = {
    "attn_double_softmax_T2",
    "attn_eps_log_batchmean",
    "fla_linear_kl_ref",
    "kvpress_gqa_indexer_dense",
    "linearard_ref",
    "minilm_bert_additive_T",
    "textbrewer_att_ce_nomask",
    "torchtune_chunked/lm_head",
    "trl_gkd_jsd_nomask/lm_head",
    "vocab_pad_mismatch",
}


@functools.cache
def cases(which):
    return {case.name: case for case in which()}


def calls_of(found):
    """How many calls of either operator a program is matched with."""
    operators = [call.operator for form in found.closed for call in form.calls]
    return operators.count(ATTENTION), operators.count(LINEAR)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", only(QUICK, [x for x in BY_NAME if x not in NOT_TRACED]))
def test_corpus(name):
    found = matches_of(cases(corpus)[name])
    assert found.is_right, found.errors
    assert calls_of(found) == CLOSED.get(name, (0, 0))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", USER_LOSSES)
def test_users(name):
    try:
        found = matches_of(cases(users)[name])
    except (RuntimeError, torch._dynamo.exc.UserError):
        pytest.skip("make_fx does not trace it")
    assert found.is_right, found.errors


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_misleading(name):
    try:
        found = matches_of(cases(misleading)[name])
    except (RuntimeError, NotImplementedError):
        pytest.skip("make_fx does not trace it")
    assert found.is_right, found.errors


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", only(range(8), range(400)))
def test_random(seed):
    drawn = program(seed)
    if drawn.dtype != torch.float64:
        pytest.skip("in a narrow type nothing is exact")
    case = Case(str(seed), drawn.function(), drawn.inputs(), drawn.dynamic, wide=False)
    found = matches_of(case)
    assert found.is_right, found.errors
