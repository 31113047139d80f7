"""Maps summed over blocks of keys become row programs; what only looks like it stays as it is."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.named_inputs import given
from torch_streamkl.fx_passes.explain import explain
from torch_streamkl.rows import torch_impl

BATCH, HEADS, ROWS, KEYS, DIM, SIZE = 2, 4, 7, 24, 4, 6
BLOCKS = KEYS // SIZE
OF_BLOCKS = BATCH, HEADS, ROWS, BLOCKS, SIZE


def inputs(gradient="all", dtype=torch.float32, spread=1.0):
    """Queries and keys of both sides, not contiguous, scores of blocks and weights of keys."""
    make = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=make, dtype=torch.float64)

    pairs = [normal(BATCH, n, HEADS, DIM) * spread for n in (ROWS, KEYS, ROWS, KEYS)]
    found = [*(x.transpose(1, 2) for x in pairs), normal(BATCH, ROWS, BLOCKS)]
    found = [x.to(dtype) for x in (*found, normal(KEYS).abs() + 0.5)]
    for x in found[{"student": slice(2), "scores": slice(4, 5), "all": slice(None)}[gradient]]:
        x.requires_grad_()
    return found


def probabilities(q, k):
    return (q @ k.mT * 0.5).softmax(-1)


of_maps = given("sq sk tq tk b w", {"p": lambda sq, sk: (probabilities(sq, sk),)})
FORMS, STAYS = [], []


def listed(programs):
    """A decorator: the function is one of the programs."""

    def add(fn):
        programs.append(of_maps(fn))
        return programs[-1]

    return add


def masked(q, k, low=-torch.inf):
    s = q @ k.mT * 0.5
    keep = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])
    return s.masked_fill(~keep, low).softmax(-1)


@listed(FORMS)
def mse_of_blocks(sq, sk, tq, tk):
    p, r = (probabilities(q, k).view(OF_BLOCKS).sum(-1) for q, k in ((sq, sk), (tq, tk)))
    return F.mse_loss(p, r)


@listed(FORMS)
def scores_of_blocks(tq, tk, b):
    """The indexer that chooses blocks of keys."""
    p = masked(tq, tk).sum(1).reshape(BATCH, ROWS, BLOCKS, SIZE).sum(-1)
    p = p / p.sum(-1, keepdim=True).clamp_min(1e-6)
    return (p * ((p + 1e-6).log() - b.log_softmax(-1))).sum(-1).mean()


@listed(FORMS)
def groups_of_heads(tq, tk, b):
    p = masked(tq, tk, -1e4).view(BATCH, 2, HEADS // 2, ROWS, KEYS).sum(2)
    return (p.unflatten(-1, (BLOCKS, SIZE)).sum(-1) * b.exp()[:, None]).sum()


@listed(FORMS)
def means_of_blocks(p, b):
    p = p.unflatten(3, (-1, SIZE)).mean(-1, keepdim=True)
    return (p.squeeze(-1) * b[:, None]).square().sum(-1)


@listed(FORMS)
def heads_and_keys_at_once(p, b):
    p = p.view(OF_BLOCKS)
    return (p.sum((1, 4)) * b).sum(-1).mean() + (p.mean((1, -1)) ** 2).sum()


@listed(FORMS)
def heads_last(p, b):
    """Blocks and heads in another order than the operator's."""
    p = p.view(OF_BLOCKS).permute(3, 0, 2, 4, 1)
    return p.sum(3).square().mean((-1, -2)) * b.detach().mean()


@listed(FORMS)
def weighted_before(p, tq, tk, w):
    """A second level below the blocks."""
    p = p * w
    p = p / (p.sum(-1, keepdim=True) + 1e-6)
    q = probabilities(tq, tk)
    return ((p - q) ** 2).view(OF_BLOCKS).sum(-1).sqrt().mean()


@listed(FORMS)
def of_two_sizes(p):
    wide = p.view(OF_BLOCKS).sum(-1)
    narrow = p.view(BATCH, HEADS, ROWS, 2 * BLOCKS, SIZE // 2).sum(-1)
    return (wide**3).sum() + (narrow**2).sum()


@listed(FORMS)
def pooled_without_a_gradient(tq, tk, b):
    with torch.no_grad():
        p = probabilities(tq, tk).view(OF_BLOCKS).sum(-1)
    return (p.mean(1) * b).sum()


@listed(FORMS)
def written_to(p):
    p = p.view(OF_BLOCKS).sum(-1)
    p[..., 0] = 0.0
    return p.square().sum(), p


@listed(FORMS)
def keys_first(sq, sk):
    p = (sk @ sq.mT * 0.5).softmax(-2)
    return p.view(BATCH, HEADS, BLOCKS, SIZE, ROWS).sum(-2).square().sum()


@listed(FORMS)
def a_tensor_of_blocks_meets_the_map(p, b):
    """It is a factor of each block's sum."""
    p = p.view(OF_BLOCKS)
    return (p * b[:, None, :, :, None]).sum(-1).square().sum()


def pooled(program, given, **options):
    """Compare, and require that no map of rows and keys is left."""
    outcome = compare(program, given, **options).check_fused(remaining=None)
    assert outcome.kinds == {"row_program"}
    assert f"{ROWS} x {KEYS}]" not in outcome.report.details(), str(outcome.report)


@pytest.mark.parametrize("gradient", ["all", "student", "scores"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, gradient):
    pooled(form, inputs(gradient))


MODES = ["bfloat16", "float16", "dynamic", "large scores", "no gradient", "aot_eager"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_modes(form, mode):
    if mode in ("bfloat16", "float16"):
        compare(form, inputs("all", getattr(torch, mode))).check()
    elif mode == "dynamic":
        assert not compare(form, inputs(), dynamic=True).check().report.failures
    elif mode == "large scores":
        pooled(form, inputs("all", spread=4.0), largest_score=100.0)
    else:
        options = {"training": False} if mode == "no gradient" else {"inner": mode}
        pooled(form, inputs(), **options)


def test_sums_of_one_map_are_one_program(monkeypatch):
    calls = []
    forward = torch_impl.forward
    monkeypatch.setattr(torch_impl, "forward", lambda *args: calls.append(args) or forward(*args))
    compile_rewritten(of_two_sizes, verify="never")(*inputs())
    assert len(calls) == 1


def test_the_report_says_what_runs():
    report = explain(mse_of_blocks, *inputs()).details()
    assert f"row_program: a sum over blocks of {SIZE} keys of the product" in report
    assert "in plain torch, by blocks of rows and keys: bounded memory, no kernels" in report


# ------------------------------------------------------------ not fused
@listed(STAYS)
def axes_that_mix(p):
    return p.reshape(BATCH, HEADS, BLOCKS, ROWS, SIZE).sum(-1).square().sum()


@listed(STAYS)
def every_fourth_key(p):
    return p.view(BATCH, HEADS, ROWS, SIZE, BLOCKS).sum(-2).square().sum()


@listed(STAYS)
def sizes_that_do_not_divide(p):
    p = F.pad(p, (0, 1))
    return p.view(BATCH, HEADS, ROWS, 5, 5).sum(-1).square().sum()


@listed(STAYS)
def a_dropout_between(p, b):
    p = F.dropout(p, 0.0 if b is None else 1.0)
    return p.view(OF_BLOCKS).sum(-1).square().sum()


@listed(STAYS)
def the_split_map_is_read(p):
    p = p.view(OF_BLOCKS)
    return p.sum(-1).square().sum(), p


@listed(STAYS)
def the_split_map_is_written(p):
    p = p.clone().view(OF_BLOCKS)
    p[..., 0] = 0.0
    return p.sum(-1).square().sum()


@listed(STAYS)
def some_blocks_before_the_sum(p):
    p = p.view(OF_BLOCKS)[..., 1:, :]
    return p.sum(-1).square().sum()


@listed(STAYS)
def some_keys_of_each_block(p):
    p = p.view(OF_BLOCKS)[..., 1:]
    return p.sum(-1).square().sum()


@listed(STAYS)
def largest_of_blocks(p):
    p = p.view(OF_BLOCKS)
    return (p.amax(-1) + p.detach().sum(-1)).square().sum()


@listed(STAYS)
def softmax_inside_of_blocks(p):
    p = p.view(OF_BLOCKS)
    return (p.softmax(-1) * p).sum(-1).square().sum()


@listed(STAYS)
def blocks_come_back_to_keys(p):
    """A gradient flows into the sums from elements that are summed again."""
    share = p.view(OF_BLOCKS).sum(-1)
    share = share.repeat_interleave(SIZE, -1)
    return (p * (p / (share + 1e-3)).log1p()).sum(-1).mean()


@listed(STAYS)
def blocks_meet_their_keys(p):
    p = p.view(OF_BLOCKS)
    return ((p / (p.sum(-1, keepdim=True) + 1e-3)) ** 2).sum(-1).sum()


@listed(STAYS)
def nan_is_asked_for(sq, sk):
    p = masked(sq, sk).view(OF_BLOCKS).sum(-1)
    return p.nan_to_num(3.0).square().sum()


@pytest.mark.parametrize("program", STAYS)
def test_is_left_alone(program):
    outcome = compare(program, inputs()).check()
    assert outcome.num_fused == 0, str(outcome.report)
