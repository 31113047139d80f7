"""Logits at a cached teacher's ids that no softmax reads: products with these weight rows."""

import math

import pytest
import torch
import torch.nn.functional as F

import torch_streamkl
from tests.support.comparing import compare, is_exact_in_float64
from tests.support.compiling import compile_rewritten
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.validation import check
from torch_streamkl.fx_passes.validation.check import FAILED, PASSED
from torch_streamkl.topk import sparse

BATCH, TOKENS, WIDTH, VOCAB, IDS = 2, 37, 16, 203, 5


def squares(s, ids, values):
    return F.mse_loss(s.gather(-1, ids), values)


def squares_of_rows(s, ids, values):
    return ((s.gather(-1, ids).float() - values) ** 2).sum(-1).mean()


def huber(s, ids, values):
    return F.smooth_l1_loss(torch.take_along_dim(s / 0.7, ids, -1), values)


def margin(s, ids, values):
    chosen = s.gather(-1, ids)
    return F.relu(1.0 - (chosen[..., 0] - chosen[..., 1])).mean()


def of_some_tokens(s, ids, values):
    kept = values[..., 0] > 0
    rows = (s.gather(-1, ids) - values).square().mean(-1)
    return (rows * kept).sum() / kept.sum()


def returned(s, ids, values):
    return s.gather(-1, ids)


def of_a_cosine(s, ids, values):
    return 1.0 - F.cosine_similarity(s.gather(-1, ids), values, dim=-1).mean()


def beside_a_divergence(s, ids, values):
    t = torch.linspace(-1, 1, VOCAB, dtype=s.dtype).roll(5)
    t = t.log_softmax(-1).expand(s.shape)
    kl = F.kl_div(s.log_softmax(-1), t, log_target=True, reduction="sum")
    return kl + F.mse_loss(s.gather(-1, ids), values)


ALONE = [squares, squares_of_rows, huber, margin, of_some_tokens, returned, of_a_cosine]


def _inputs(kind="plain", dtype=torch.float32):
    torch.manual_seed(0)
    step = 3 if kind == "strided" else 1
    spread = 30.0 if kind == "extreme" else 1.0
    h, w = torch.randn(BATCH, TOKENS, WIDTH * step), torch.randn(VOCAB, WIDTH * step)
    h, w = ((x * spread).to(dtype)[..., ::step].detach().requires_grad_() for x in (h, w))
    values = torch.randn(BATCH, TOKENS, IDS).to(dtype)
    ids = torch.rand(BATCH, TOKENS, VOCAB).argsort(-1)[..., :IDS]
    if kind == "repeated":
        ids[..., 3] = ids[..., 2]
    return [h, w, ids.contiguous(), values]


def _step(loss):
    return lambda h, w, ids, values: loss(h @ w.T, ids, values)


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("kind", ["plain", "extreme", "strided", "repeated"])
@pytest.mark.parametrize("loss", [*ALONE, beside_a_divergence], ids=lambda f: f.__name__)
def test_they_keep_no_logits(loss, kind, is_dynamic):
    if loss is of_a_cosine and kind == "extreme":
        pytest.skip("a quotient of large numbers")
    is_alone = loss is not beside_a_divergence  # whose teacher is a tensor
    outcome = compare(_step(loss), _inputs(kind), dynamic=is_dynamic)
    outcome.check_fused(remaining=0 if is_alone else None)
    assert not is_alone or outcome.kinds == {"entry_logits"}


@pytest.mark.parametrize("loss", ALONE, ids=lambda f: f.__name__)
def test_they_are_exact_in_float64(loss):
    is_exact_in_float64(_step(loss), _inputs(dtype=torch.float64))


@pytest.mark.parametrize("loss", [squares, returned])
def test_bfloat16(loss):
    compare(_step(loss), _inputs(dtype=torch.bfloat16)).check_fused(1)


def hidden_entries(s, ids, values):
    """Eager code multiplies a share of 0 with -inf."""
    hidden = torch.arange(VOCAB) % 7 == 0
    chosen = s.masked_fill(hidden, -math.inf).gather(-1, ids)
    shares = values.masked_fill(hidden[ids], -math.inf).softmax(-1)
    return F.kl_div(chosen.log_softmax(-1), shares, reduction="sum")


def hidden_entries_without_a_gradient(s, ids, values):
    with torch.no_grad():
        return hidden_entries(s, ids, values)


@pytest.mark.parametrize("loss", [hidden_entries, hidden_entries_without_a_gradient])
def test_a_check_hides_entries_as_the_code_does(loss):
    """By a number, as a row program's: the code would give NaN."""
    report = torch_streamkl.explain(_step(loss), *_inputs())
    (site,) = report.sites
    assert site.fused and site.check == PASSED, report
    assert site.runs == "in plain torch"


@pytest.mark.expects_failed_checks
def test_a_check_of_hidden_entries_finds_mistakes(monkeypatch):
    logits_of = sparse.logits_of
    shift = 0.1 * torch.arange(IDS)
    monkeypatch.setattr(sparse, "logits_of", lambda *given: logits_of(*given) + shift)
    monkeypatch.setattr(check, "passed_before", lambda *given: False)  # by another process
    report = torch_streamkl.explain(_step(hidden_entries), *_inputs())
    assert not report.num_fused and FAILED in report.sites[0].reason, report


def many_ids(s, ids, values):
    ids = torch.arange(VOCAB // 2).expand(*s.shape[:2], -1)
    return s.gather(-1, ids).square().mean()


def read_as_a_whole(s, ids, values):
    return squares(s, ids, values) + s.square().mean()


def of_the_largest(s, ids, values):
    """A router: its product is read as a whole."""
    top = s.topk(2, -1).indices
    return (s.gather(-1, top).tanh() * values[..., :2]).sum()


def of_tokens(s, ids, values):
    return s.gather(1, ids[:, :1, :1].clamp(max=TOKENS - 1).expand(-1, 1, VOCAB)).mean()


@pytest.mark.parametrize("loss", [many_ids, read_as_a_whole, of_the_largest, of_tokens])
def test_others_are_left_alone(loss):
    outcome = compare(_step(loss), _inputs()).check()
    assert outcome.num_fused == 0, str(outcome.report)


def test_ids_out_of_range_raise_as_in_eager_code():
    h, w, ids, values = _inputs()
    ids[0, 0, 0] = VOCAB
    step = compile_rewritten(_step(squares), inner="inductor")
    with backend.collected() as report, pytest.raises((RuntimeError, IndexError)):
        step(h, w, ids, values)
    assert report.num_fused == 1


def place_of_the_largest(s, ids, values):
    return beside_a_divergence(s, ids, values), s.gather(-1, ids).argmax(-1)


def the_largest_and_its_place(s, ids, values):
    largest, place = s.detach().gather(-1, ids).max(-1)
    return beside_a_divergence(s, ids, values), largest, place == 0


def place_alone(s, ids, values):
    return s.gather(-1, ids).square().mean(), s.gather(-1, ids).argmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "loss",
    [place_of_the_largest, the_largest_and_its_place, place_alone],
    ids=lambda f: f.__name__,
)
def test_the_largest_entry_is_found_by_the_users_code(loss, dtype):
    """No program has the place of the largest of some ids, and its analysis does not fail."""
    compare(_step(loss), _inputs("repeated", dtype)).check_fused(remaining=None)
