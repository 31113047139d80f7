"""Real and random losses are matched, and every match means what the program does.

What is matched is recomputed from its arguments alone: values and gradients of each sum over keys,
and the value of the whole program with the recomputed rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tests.support.misleading_programs
import tests.support.more_user_losses  # noqa: F401  # adds to USER_LOSSES
from tests.corpus.naive_losses import BY_NAME
from tests.fuzz.run import program
from tests.support.covering import only
from tests.support.match_programs import Matches, matches_of
from tests.support.misleading.registry import PROGRAMS
from tests.support.read_programs import Case, corpus, misleading, users
from tests.support.user_losses import USER_LOSSES
from torch_streamkl.fx_passes.closed_forms.form import ATTENTION, LINEAR

CLOSED = {  # by how many calls of attention_kl and linear_kl
    "linearard_ref": (1, 0),
    "linearard_train_relations": (3, 0),
    "minilmv2_bloomberg": (6, 0),
    "minilm_bert_additive_T": (1, 0),
    "minilm_unscaled_flat": (1, 0),
    "minilm_xdpx_rowmask": (2, 0),
    "attn_eps_log_batchmean": (1, 0),
    "attn_clamp_qmask": (1, 0),
    "bitdistill_relation_of_probs": (1, 0),
    "attn_raw_scores_mean": (1, 0),
    "attn_log_target_on_probs_bug": (1, 0),
    "attn_js_window": (1, 0),
    "recsys_user_item_kl": (0, 1),
    "kvpress_gqa_indexer_dense": (1, 0),
    "fla_linear_kl_ref": (0, 1),
    "nitrobrew_naive_forward": (0, 1),
    "nitrobrew_naive_reverse": (0, 1),
    "liger_lmhead_jsd_b0.0": (0, 1),
    "liger_lmhead_jsd_b1.0": (0, 1),
    "liger_lmhead_jsd_b0.5": (0, 1),
    "bitdistill_flat_eps_both": (1, 0),
    "dflash_softcap_linear_kl": (0, 1),
    "linear_bias_ce_kd_chunk": (0, 2),
    "vocab_pad_mismatch": (0, 1),
    "hidden_reverse_masked": (0, 1),
    "trl_gkd_fwd_nomask/lm_head": (0, 1),
    "trl_gkd_rev_nomask/lm_head": (0, 1),
    "trl_gkd_fwd_labels/lm_head": (0, 1),
    "trl_gkd_jsd_nomask/lm_head": (0, 1),
    "trl_gkd_fwd_mean/lm_head": (0, 1),
    "torchtune_chunked/lm_head": (0, 4),
    "deit_log_target_numel/lm_head": (0, 1),
    "modelopt_logits_mean/lm_head": (0, 1),
    "modelopt_megatron_fwd/lm_head": (0, 1),
    "modelopt_megatron_rev/lm_head": (0, 1),
    "nemo_automodel_guarded/lm_head": (0, 1),
    "nemo_automodel_indexed_chunked/lm_head": (0, 1),
    "nemo_peagle_kl/lm_head": (0, 1),
    "kdflow_kl/lm_head": (0, 1),
    "kdflow_rkl/lm_head": (0, 1),
    "kdflow_jsd/lm_head": (0, 1),
    "kdflow_adaptive/lm_head": (0, 2),
    "dskd_forward/lm_head": (0, 1),
    "mdistiller_kd/lm_head": (0, 1),
    "mdistiller_dkd/lm_head": (1, 0),
    "vocab_column_excluded": (0, 1),
    "cross_entropy_prob_target/lm_head": (0, 1),
    "r3f_symmetric/lm_head": (0, 1),
    "swapped_args_reverse/lm_head": (0, 1),
    "linearard_logit_kl/lm_head": (0, 1),
    "hass_kl_and_topk/lm_head": (0, 2),
}
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
def cases(which: Callable[[], Iterator[Case]]) -> dict[str, Case]:
    return {case.name: case for case in which()}


def calls_of(found: Matches) -> tuple[int, int]:
    """How many calls of either operator a program is matched with."""
    operators = [call.operator for form in found.closed for call in form.calls]
    return operators.count(ATTENTION), operators.count(LINEAR)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", only(QUICK, [x for x in BY_NAME if x not in NOT_TRACED]))
def test_corpus(name: str) -> None:
    found = matches_of(cases(corpus)[name])
    assert found.is_right, found.errors
    assert calls_of(found) == CLOSED.get(name, (0, 0))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", USER_LOSSES)
def test_users(name: str) -> None:
    try:
        found = matches_of(cases(users)[name])
    except (RuntimeError, torch._dynamo.exc.UserError):
        pytest.skip("make_fx does not trace it")
    assert found.is_right, found.errors


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_misleading(name: str) -> None:
    try:
        found = matches_of(cases(misleading)[name])
    except (RuntimeError, NotImplementedError):
        pytest.skip("make_fx does not trace it")
    assert found.is_right, found.errors


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", only(range(8), range(400)))
def test_random(seed: int) -> None:
    drawn = program(seed)
    if drawn.dtype != torch.float64:
        pytest.skip("in a narrow type nothing is exact")
    case: Any = Case(str(seed), drawn.function(), drawn.inputs(), drawn.dynamic, wide=False)
    found = matches_of(case)
    assert found.is_right, found.errors
