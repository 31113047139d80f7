"""Losses that are no divergence of the kernels become row programs, as exact as eager's."""

import functools

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.covering import every
from tests.support.losses import elements_of_kl, kd
from tests.support.named_inputs import given
from torch_streamkl.fx_passes.explain import explain
from torch_streamkl.rows import torch_impl

BATCH, HEADS, ROWS, KEYS, DIM = 2, 3, 7, 9, 4


def inputs(gradient="student", dtype=torch.float32):
    make = torch.Generator().manual_seed(0)
    shapes = [*((BATCH, HEADS, n, DIM) for n in (ROWS, KEYS, ROWS, KEYS)), (KEYS,)]
    found = [torch.randn(x, generator=make, dtype=torch.float64).to(dtype) for x in shapes]
    found[-1] = found[-1].abs() + 0.5
    trained = {"student": slice(2), "teacher": slice(2, 4), "all": slice(None)}[gradient]
    for x in found[trained]:
        x.requires_grad_()
    return [*found, torch.arange(KEYS) < torch.tensor([[KEYS], [KEYS // 2]])]


def scores(sq, sk, tq, tk):
    return sq @ sk.mT * 0.5, tq @ tk.mT * 0.5


of_scores = given("sq sk tq tk w pad", {"s t": scores})
FORMS, LARGEST, STAYS = [], [], []  # programs of all inputs


def listed(programs):
    """A decorator: the function is one of the programs."""

    def add(fn):
        programs.append(of_scores(fn))
        return programs[-1]

    return add


@listed(FORMS)
def weights_of_keys(s, t, w):
    return elements_of_kl(s, t).mul(w).sum(-1).mean()


@listed(FORMS)
def mse_of_maps(s, t, w):
    s, t = (x.softmax(-1) for x in (s, t))
    return F.mse_loss(s, t) + F.kl_div(s.log() * w, t, reduction="sum")


@listed(FORMS)
def cosine_of_maps(s, t, w):
    s, t = (x.softmax(-1) for x in (s, t))
    cosine = (F.normalize(s, dim=-1) * F.normalize(t, dim=-1)).sum(-1)
    return (1 - cosine).mean() - (w * t * s.log()).sum(-1).mean()


@listed(FORMS)
def indexer(s, t):
    keep = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])
    t = t.masked_fill(~keep, torch.finfo(t.dtype).min).softmax(-1).sum(1)
    t = t / t.sum(-1, keepdim=True)
    s = s.relu().sum(1).masked_fill(~keep, torch.finfo(s.dtype).min)
    return (t * ((t + 1e-6).log() - s.log_softmax(-1))).sum(-1).mean()


@listed(FORMS)
def linear_attention(s, t, sq, sk):
    keep = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])
    s = (sq.exp() @ sk.exp().mT).masked_fill(~keep, 0.0)
    s = s / (s.sum(-1, keepdim=True) + 1e-6)
    t = t.masked_fill(~keep, float("-inf")).softmax(-1)
    return -(t * s.clamp_min(1e-6).log()).sum(-1).mean()


@listed(FORMS)
def keys_by_their_score(s, t):
    p = torch.where(t <= -1e-3, torch.zeros_like(t), t.softmax(-1))
    return -(p * s.log_softmax(-1)).sum(-1).mean()


def mse_of_scores(sq, sk, tq, tk, w, pad):
    """TinyBERT's loss: scores that a mask has lowered count as 0."""
    bias = (1.0 - pad[:, None, None].to(sq.dtype)) * -10000.0
    s, t = (x + bias for x in scores(sq, sk, tq, tk))
    s, t = (torch.where(x <= -1e2, torch.zeros_like(x), x) for x in (s, t))
    return F.mse_loss(s, t)


@listed(FORMS)
def largest_subtracted(s, t, w):
    e = (t - t.amax(-1, keepdim=True).detach()).exp() * w
    p = e / e.sum(-1, keepdim=True).clamp_min(1e-6)
    return (p * (p.clamp_min(1e-6).log() - s.log_softmax(-1))).sum(-1).mean()


@listed(FORMS)
def of_the_first_query(s, t):
    """What a class token attends to, the mean of all heads."""
    s, t = (x.softmax(-1)[:, :, 0].mean(1) for x in (s, t))
    s, t = (F.normalize(x.clamp(1e-5, 0.996), p=1, dim=-1) for x in (s, t))
    return F.kl_div(s.log(), t, reduction="batchmean")


@listed(FORMS)
def of_some_rows_and_heads(sq, sk, tq, tk, w):
    keep = torch.ones(ROWS, sk.shape[-2], dtype=torch.bool).tril(1)
    s, t = (x.masked_fill(~keep, -1e4).softmax(-1) for x in scores(sq, sk, tq, tk))
    s, t = (x[:, 1:, 2:-1].narrow(1, 0, 2) for x in (s, t))
    return (w * (s - t) ** 2).sum(-1) / 3 - (t * (s + 1e-3).log() * w).sum(-1)


@listed(FORMS)
def of_a_row_of_flattened_products(sq, sk, tq, tk, w):
    def product(q, k):
        return torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, q.shape[:2])

    s, t = (product(q, k).softmax(-1)[:, :, -1] for q, k in ((sq, sk), (tq, tk)))
    return (w * (s - t).abs()).sum(-1).mean()


@listed(FORMS)
def of_some_keys_of_one_sample(s, t):
    s, t = (x[1][..., -6:].relu() for x in (s, t))
    return (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1)[:, ::2]


@listed(FORMS)
def part_of_flattened_heads(s, t):
    s, t = (x.softmax(-1).flatten(0, 1)[1:4] for x in (s, t))
    return (t**2 * s.log()).sum(-1).mean()


DIVERGENCES = ("mse_of_maps", "part_of_flattened_heads")


def streamed(program, given, **options):
    """Compare, and require that all of it is fused and nothing score-sized is left.

    Functions of the probabilities of both sides alone are divergences, all others row programs.
    """
    outcome = compare(program, given, **options).check_fused()
    is_divergence = getattr(program, "__name__", "") in DIVERGENCES
    assert ("attention_kl" if is_divergence else "row_program") in outcome.kinds, outcome.report
    return outcome


@pytest.mark.parametrize("gradient", ["all", "student", "teacher"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, gradient):
    streamed(form, inputs(gradient))


@pytest.mark.parametrize("mode", ["bfloat16", "float16", "dynamic", "no gradient", "aot_eager"])
@pytest.mark.parametrize("form", FORMS)
def test_modes(form, mode):
    if mode in ("bfloat16", "float16"):
        compare(form, inputs("all", getattr(torch, mode))).check()
    elif mode == "dynamic":
        assert not compare(form, inputs("all"), dynamic=True).check().report.failures
    else:
        options = {"training": False} if mode == "no gradient" else {"inner": mode}
        streamed(form, inputs("all"), **options)


@pytest.mark.parametrize(("dtype", "sites"), [(torch.float32, 1), (torch.bfloat16, 0)])
def test_scores_of_a_narrow_type_are_not_compared(dtype, sites):
    """Eager code compares what was rounded: others may be equal there, or the larger ones."""
    program = of_scores(lambda s, t: (s.softmax(-1) * (s > t)).square().sum(-1).mean())
    outcome = compare(program, inputs("all", dtype)).check()
    assert outcome.num_fused == sites, str(outcome.report)
    assert all("of a narrow type are compared" in r for r in outcome.reasons), outcome.reasons


@pytest.mark.parametrize("low", [-1e4, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("how", ["filled", "added"])
def test_rows_in_which_every_key_is_masked(how, low):
    """Eager's softmax is uniform there, or that of the scores, and so are its gradients."""

    @of_scores
    def program(s, t, w):
        masked = torch.zeros(ROWS, KEYS, dtype=torch.bool)
        masked[2], masked[3, :4] = True, True
        s, t = (
            x.masked_fill(masked, low) if how == "filled" else x + masked * low for x in (s, t)
        )
        return -(w * t.softmax(-1) * s.softmax(-1).square()).sum(-1)

    compare(program, inputs("all")).check()


def test_losses_that_share_scores_are_one_program(monkeypatch):
    @of_scores
    def program(s, t, w):
        p, r = s.softmax(-1), t.softmax(-1)
        return (w * (p - r) ** 2).sum(-1).mean() - 0.1 * (w * r * s.log_softmax(-1)).sum(-1).mean()

    assert streamed(program, inputs("all")).num_fused == 2
    calls = []
    forward = torch_impl.forward
    monkeypatch.setattr(torch_impl, "forward", lambda *args: calls.append(args) or forward(*args))
    compile_rewritten(program, verify="never")(*inputs("all"))
    assert len(calls) == 1


def test_a_sum_that_is_written_and_a_part_of_it_are_one_program():
    @of_scores
    def program(s, t, w):
        rows = (w * t.softmax(-1) * s.log_softmax(-1)).sum(-1)
        rows[:, 0] = 1.0
        return rows.mean() - rows[:, :, 0].sum() + rows[1:].square().sum()

    assert streamed(program, inputs("all"), inner="aot_eager").num_fused == 1


@pytest.mark.parametrize("gradient", ["student", "all"])
def test_squared_errors_of_scores(gradient):
    given = [
        x.repeat(1, 1, 8, 1).detach().requires_grad_(x.requires_grad) if x.dim() == 4 else x
        for x in inputs(gradient)
    ]
    given[4], given[5] = given[4].repeat(8), given[5].repeat(1, 8)
    streamed(mse_of_scores, given)


def test_squared_errors_of_projected_states_stay():
    given = [torch.randn(s) for s in ((6, 8), (8, 8), (6, 12), (8, 12))]
    given = [x.requires_grad_() for x in given]
    outcome = compare(lambda h, w, ht, wt: F.mse_loss(F.linear(h, w), F.linear(ht, wt)), given)
    assert not outcome.check().report.sites, str(outcome.report)


# ------------------------------------------------------------ masks that are ids
@pytest.mark.parametrize("how", ["added", "filled"])
def test_a_divergence_whose_mask_is_made_of_ids_needs_none(how):
    """Decoupled distillation: its mask of labels would be as large as the scores."""

    @of_scores
    def program(s, t):
        label = (torch.arange(ROWS) % 3).expand(BATCH, HEADS, ROWS).unsqueeze(-1)
        hit = torch.zeros_like(s).scatter_(-1, label, 1.0).bool()
        s, t = (
            x - 1000.0 * hit if how == "added" else x.masked_fill(hit, -torch.inf) for x in (s, t)
        )
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="sum")

    streamed(program, inputs("student"))
    streamed(program, inputs("all"))
    alone = compare(program, inputs(), row_programs=False).check()
    assert alone.kinds == {"attention_kl"}


# ------------------------------------------------------------ keys that a top-k names
@listed(LARGEST)
def of_the_teacher_s_largest(s, t):
    top = t.softmax(-1).topk(3)
    return -(top.values * s.log_softmax(-1).gather(-1, top.indices)).sum(-1).mean()


@listed(LARGEST)
def renormalised_among_the_largest(s, t, pad):
    values, ids = t.masked_fill(~pad[:, None, None], -1e9).topk(4, dim=-1)
    return kd(s.gather(-1, ids), values)


@listed(LARGEST)
def largest_and_the_rest(s, t):
    """The mass of the other keys as one more of them."""
    s, t = (x.log_softmax(-1) for x in (s, t))
    ids = t.detach().topk(3, -1)[1]
    s, t = s.gather(-1, ids), t.gather(-1, ids)
    rest = 1 - t.exp().sum(-1), 1 - s.exp().sum(-1)
    return (t.exp() * (t - s)).sum(-1) + rest[0] * (rest[0].log() - rest[1].log())


@listed(LARGEST)
def of_heads_summed_before(s, t, w):
    index = s.relu().sum(1) - w
    ids = index.topk(3, dim=-1).indices
    hit = torch.zeros_like(index, dtype=torch.bool).scatter(-1, ids, True)
    p = t.masked_fill(~hit[:, None], float("-inf")).softmax(-1).sum(1).gather(-1, ids)
    p = p / p.sum(-1, keepdim=True)
    logs = index.gather(-1, ids).log_softmax(-1)
    return F.kl_div(logs.clip(-100, 0), p.log().clip(-100, 0), log_target=True, reduction="sum")


@pytest.mark.parametrize(
    "options", [{"training": True}, {"dynamic": True}, {"gradient": "student"}, {"half": True}]
)
@pytest.mark.parametrize("form", LARGEST)
def test_keys_that_a_top_k_names(form, options):
    """What the top-k is of is made for it; all else is a program."""
    options = dict(options)
    dtype = torch.bfloat16 if options.pop("half", False) else torch.float32
    given = inputs(options.pop("gradient", "all"), dtype)
    outcome = compare(form, given, **options).check()
    if dtype == torch.float32 and "dynamic" not in options:
        assert outcome.kinds == {"row_program"}
        assert outcome.num_fused == len(outcome.report.sites), str(outcome.report)


def test_ids_that_are_written_after_their_top_k():
    @of_scores
    def program(s, t):
        values, ids = t.topk(3, dim=-1)
        first = s.log_softmax(-1).gather(-1, ids)
        ids[..., 1] = ids[..., 0]
        return (values.exp() * (first - s.log_softmax(-1).gather(-1, ids))).sum(-1).mean()

    outcome = compare(program, inputs(), training=False).check()
    assert outcome.num_fused == 0, str(outcome.report)


# ------------------------------------------------------------ not fused
@listed(STAYS)
def both_axes_are_normalised(s, t, w):
    p = s.exp()
    p = p / p.sum(-1, keepdim=True)
    p = p / p.sum(-2, keepdim=True)
    return (t.softmax(-1) * p.log() * w).sum(-1).mean()


@listed(STAYS)
def nan_is_asked_for(s, t, w, pad):
    s = s.masked_fill(~pad[:, None, None], float("-inf"))
    rows = (w * t.softmax(-1) * s.softmax(-1)).sum(-1)
    return rows.nan_to_num(3.0).mean() + torch.isnan(rows).sum()


@listed(STAYS)
def a_cumulative_sum(s, t, w):
    return (t.softmax(-1) - s.softmax(-1)).cumsum(-1).square().sum(-1).mean() + (
        w * t.softmax(-1) * s.log_softmax(-1).cumsum(-1)
    ).sum()


@listed(STAYS)
def some_keys_behind_the_softmax(s, t):
    """What is left does not sum to 1."""
    s, t = (x.softmax(-1)[..., 1:] for x in (s, t))
    return (t**2 * s.log()).sum(-1).mean()


@listed(STAYS)
def the_other_side_is_an_input_that_is_trained(t, sq, sk):
    torch._dynamo.graph_break()
    return F.kl_div((sq @ sk.mT).log_softmax(-1), t.softmax(-1), reduction="sum")


@pytest.mark.parametrize("program", every(2, STAYS))
def test_is_left_alone(program):
    outcome = compare(program, inputs("all")).check()
    assert outcome.num_fused == 0, str(outcome.report)
    if program.__name__ == "the_other_side_is_an_input_that_is_trained":
        assert all("not made" in r for r in outcome.reasons), outcome.reasons


def test_the_report_says_that_there_is_no_kernel():
    report = explain(FORMS[0], *inputs()).details()
    assert "row_program: a sum over keys of 2 products" in report
    assert "in plain torch, by blocks of rows and keys: bounded memory, no kernels" in report


def test_the_cache_of_compiled_graphs_tells_programs_apart():
    """The program is an argument of the call, so two programs are two graphs."""

    def program(power, s, t, w):
        return (w * t.softmax(-1) ** power * s.log_softmax(-1)).sum(-1).mean()

    for power in (1.5, 2.5):
        streamed(of_scores(functools.partial(program, power)), inputs("all"), inner="inductor")
