"""streamkl.strict raises for losses of two distributions that are not fused, and nothing else."""

import pytest
import torch
import torch.nn.functional as F

import tests.support.more_user_losses  # noqa: F401  # adds to USER_LOSSES
from tests.report.test_report_says import sorted_in_a_checkpoint
from tests.support.compiling import compile_rewritten
from tests.support.user_losses import USER_LOSSES
from torch_streamkl.fx_passes import backend


def error_of(fn, inputs, **options):
    try:
        compile_rewritten(fn, strict=True, **options)(*inputs)
    except backend.UnfusedError as error:
        return str(error)
    return ""


def regularizers(h, w, g, v):
    return sum(F.gelu((a @ b.T).softmax(-1)).sum(-1).mean() for a, b in ((h, w), (g, v)))


def log_ratios_of_written_logits(h, w, g, v):
    s, t = h @ w.T, g @ v.T
    s[:, ::2] = -1e4
    t[:, ::2] = -1e4
    of_label = [x.log_softmax(-1).gather(-1, torch.ones(len(h), 1).long()) for x in (s, t)]
    return -F.logsigmoid(of_label[0] - of_label[1]).mean()


def entropy_by_hand(h, w, g, v):
    s = h @ w.T
    e = (s - s.amax(-1, keepdim=True)).exp()
    return F.gelu(e / e.sum(-1, keepdim=True) * s.log_softmax(-1)).sum(-1).mean()


def assigned_by_sinkhorn(h, w, g, v):
    with torch.no_grad():
        plan = torch.exp(g @ v.T / 5).t()
        plan = plan / plan.sum(1, keepdim=True)
        plan = plan / plan.sum(0, keepdim=True)
    return -(plan.t() * (h @ w.T).log_softmax(-1)).sum(-1).mean()


def without_logarithms(h, w, g, v):
    return ((g @ v.T).softmax(-1) - (h @ w.T).softmax(-1)).atan().square().sum()


def what_nothing_reads(h, w, g, v):
    logs, p = (h @ w.T).log_softmax(-1), (g @ v.T).softmax(-1)
    F.kl_div(logs, p, reduction="none")
    (p - logs.exp()).atan().square().sum()
    (p * logs).sort(-1).values.sum()
    return F.kl_div(logs, p, reduction="batchmean")


COMPARES = {
    regularizers: False,
    log_ratios_of_written_logits: False,
    entropy_by_hand: False,
    assigned_by_sinkhorn: True,
    sorted_in_a_checkpoint: True,
    without_logarithms: True,
    what_nothing_reads: False,
    USER_LOSSES["universal_logit_distillation"].fn: True,
    USER_LOSSES["reverse_kl"].fn: False,  # fused
    USER_LOSSES["cross_entropy_alone"].fn: False,
}


@pytest.mark.parametrize("loss", COMPARES, ids=lambda f: f.__name__)
def test_which_code_compares_two_distributions(loss):
    text = error_of(loss, USER_LOSSES["cosine"].inputs())
    assert bool(text) == COMPARES[loss], text
    assert not text or "two distributions are compared at" in text or "0 of 1 loss fused" in text


@pytest.mark.parametrize("name", ["attention_alone", "rollout"])
def test_attention_compares_nothing(name):
    assert not error_of(USER_LOSSES[name].fn, USER_LOSSES[name].inputs())


def test_strict_accepts_what_is_skipped():
    inputs = USER_LOSSES["reverse_kl"].inputs()
    for name in ("reverse_kl", "acceptance"):
        assert not error_of(USER_LOSSES[name].fn, inputs, min_mib=4096)


def test_strict_counts_a_failed_analysis(monkeypatch):
    def planted(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr("torch_streamkl.fx_passes.capture.retrace.trace_region", planted)
    assert "planted" in error_of(USER_LOSSES["reverse_kl"].fn, USER_LOSSES["cosine"].inputs())
