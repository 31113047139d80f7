"""Programs around sums over keys that were once compiled to something else: they are eager's.

Next to each is how many of its sums are fused, where that is promised.
"""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.losses import kd, rows_of_kl
from tests.support.misleading.registry import student
from tests.support.misleading_programs import difference, run
from tests.support.table import Table
from torch_streamkl.fx_passes import backend

INFINITY = math.inf
LOWEST = torch.finfo(torch.float64).min
ROWS, KEYS, DIM = 5, 7, 4


def tensors(trained="qkw", size=1.0):
    """Two pairs of operands, weights of keys, and a mask with a row without keys, in float64."""
    make = torch.Generator().manual_seed(0)
    shapes = [*((2, 3, n, DIM) for n in (ROWS, KEYS, ROWS, KEYS)), (KEYS,)]
    found = [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]
    found[0] *= size
    for x, name in zip(found, "qkrsw", strict=True):
        x.requires_grad_(name in trained)
    keep = torch.rand(ROWS, KEYS, generator=make) > 0.4
    keep[1] = False
    return [*found, keep]


def compiled(program, inner="aot_eager"):
    return compile_rewritten(program, inner=inner, verify="never")


def judge(program, inputs, sites=None, inner="eager"):
    """The report of a program that is compiled to eager's, with so many of its sums fused."""
    eager = run(program, inputs)
    with backend.collected() as report:
        found = difference(eager, run(compiled(program, inner), inputs))
    assert not found, f"{found}\n{report}"
    assert not report.failures
    assert sites is None or report.num_fused == sites, str(report)
    return report


def scores(q, k, r, s):
    return student(q, k), student(r, s)


# z: the student's scores; t: the teacher's; w: weights of keys, and keep: a mask of them
# AOTAutograd sees those that write or return a result in another way than eager's
PROGRAMS = Table(
    "q k r s w keep", {"z t": scores}, sites=None, trained="qkw", size=1.0, inner="eager"
)
of_scores = PROGRAMS.of_inputs


# ------------------------------------------------------ integers, conditions
INTEGERS = {
    "scores as long": (lambda s, t: (s * 5).long(), 0),
    "a sum as long": (lambda s, t: s.sum(-1, keepdim=True, dtype=torch.int64), 0),
    "a count as a byte": (lambda s, t: (s > t).sum(-1, keepdim=True, dtype=torch.uint8), None),
    "a count in half": (lambda s, t: (s > t).sum(-1, keepdim=True).half(), None),
    "a count": (lambda s, t: (s > t).sum(-1, keepdim=True), 1),
    "a fraction in float32": (lambda s, t: (s > t) / 3, 0),
    "a quotient": (lambda s, t: s / (s > t).sum(-1, keepdim=True).clamp(min=1), 1),
}


@PROGRAMS.each(INTEGERS, step=2, trained="w")
def nothing_is_an_integer_but_counts(made, z, t, w):
    return (w * z.softmax(-1) * made(z, t)).sum(-1)


HASHES = {
    "a product of positions": lambda i: i[:, None] * i * 7919 * 104729 % 31 < 20,
    "a large multiple": lambda i: (i[:, None] * 3_000_000_007 - i) % 7 > 2,
    "a sum that float64 does not hold": lambda i: (
        ((i + 9007199254740993) - 9007199254740992) % 3 != i[:, None] % 3
    ),
    "compared with a large number": lambda i: i[:, None] * 16777259 + i >= 50331777 + 3,
}


@pytest.mark.parametrize("name", HASHES)
def test_integers_of_masks_are_exact(name):
    """As a dropout that is the same in student and teacher makes them."""

    def program(h, w):
        dropped = HASHES[name](torch.arange(23)) & ~torch.eye(23, dtype=torch.bool)
        z = (h @ w.T).masked_fill(dropped, -1e9)
        return (z.log_softmax(-1) * z.softmax(-1).sqrt()).sum(-1)

    inputs = [torch.randn(23, 3), torch.randn(23, 3)]
    with backend.collected() as report:
        torch.testing.assert_close(compiled(program, "eager")(*inputs), program(*inputs))
    assert report.num_fused == 1, str(report)


def test_counts_are_exact_where_float32_is_not():
    h, w = torch.randn(4099, 2), torch.randn(4099, 2)
    judge(lambda h, w: ((h @ w.T).softmax(-1) > -1.0).sum(), [h, w])


NEGATIONS = {
    "of scores": torch.logical_not,
    "of a condition": lambda s: torch.logical_not(s > 0),
    "of bits": lambda s: ~(s > 0),
    "of itself": lambda s: torch.logical_not(torch.logical_not(s)),
}


@PROGRAMS.each(NEGATIONS, sites=1)
def negations_of_numbers_that_are_not_0_and_1(negation, z, t, w):
    return (w * z.softmax(-1) * negation(z.relu())).sum(-1)


# ------------------------------------------------------ results that are written
def row_values(z, t, w):
    return (w * z.softmax(-1) * t).sum(-1)


def divergence(z, t, w):
    return rows_of_kl(z, t)


WRITES = {
    "steps of a view": lambda x: x.view(-1)[::2].zero_(),
    "a view of a view": lambda x: x.flatten()[1:].view(-1).mul_(3.0),
    "all": lambda x: x.mul_(2.0),
}


@PROGRAMS.each(WRITES, sites=2, trained="qk", inner="aot_eager")
def a_result_that_is_written_through_views(write, z, t, w):
    values, divergences = row_values(z, t, w), divergence(z, t, w)
    write(values)
    write(divergences)
    return values, divergences, values.sum() + divergences.sum()


@PROGRAMS(sites=1, inner="aot_eager")
def a_copy_of_scores_that_is_written_is_gone(z, t, w):
    z.detach().clone()[0] = 0.0
    return row_values(z, t, w)


@PROGRAMS(sites=1, inner="aot_eager")
def a_sum_that_is_returned_behind_arithmetic(z, t, w):
    return 0.5 * row_values(z, t, w) + 1.0


RETURNED = {
    "itself": lambda x: x,
    "a view": lambda x: x.transpose(0, 1),
    "without a dimension": lambda x: x.unsqueeze(-1).squeeze(-1),
}


@pytest.mark.parametrize("made", [row_values, divergence])
@pytest.mark.parametrize("name", RETURNED)
def test_a_result_that_the_caller_writes_to(name, made):
    """The operator keeps its results for the backward; eager's sum does not."""
    step = of_scores(lambda z, t, w: RETURNED[name](made(z, t, w)))
    fused = compiled(step)
    eager = run(lambda *x: step(*x).mul_(2.0), tensors("qk"))
    assert not difference(eager, run(lambda *x: fused(*x).mul_(2.0), tensors("qk")))


def test_two_results_that_are_equal_are_two_tensors():
    step = of_scores(lambda z, t, w: (row_values(z, t, w), row_values(z, t, w)))
    judge(step, tensors("qk"), inner="aot_eager")
    first, second = compiled(step)(*tensors("qk"))
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


# ------------------------------------------------------ a row without keys
OF_LSE = {
    "exp": torch.exp,
    "softplus": F.softplus,
    "reciprocal": lambda x: 1 / x,
    "clamp": lambda x: x.clamp(min=-3.0),
    "comparison": lambda x: torch.where(x > -1e30, x, 3.0),
    "equality": lambda x: torch.where(x == -INFINITY, 5.0, x),
}


@PROGRAMS.each(OF_LSE, step=2, sites=1)
def the_log_sum_exp_of_a_row_without_keys(function, z, t, w, keep):
    """It is minus infinity, also where elements of unmasked scores meet it."""
    lse = z.masked_fill(~keep, -INFINITY).logsumexp(-1, keepdim=True)
    return (w * z.tanh() * t.softmax(-1) * function(lse)).sum(-1)


@PROGRAMS.each({x: OF_LSE[x] for x in ("exp", "comparison")}, sites=1)
def the_maximum_of_a_row_without_keys(function, z, t, w, keep):
    """It is minus infinity where a program returns it, and 0 where elements subtract it."""
    peak = z.masked_fill(~keep, -INFINITY).amax(-1, keepdim=True).detach()
    return (w * z.softmax(-1) * t.softmax(-1) * function(peak)).sum(-1)


COMPARED = {
    "less": (lambda p: p < 0.1, 0),
    "at least 0": (lambda p: p >= 0, 0),
    "equal": (lambda p: p == 0, 0),
    "no NaN": (lambda p: p == p, 0),
    "cast": (lambda p: p.bool(), 0),
    "what is left": (lambda p: 1 - p > 0.5, 0),
    "a sum above": (lambda p: p + 0.2 > 0.1, 0),
    "a multiple": (lambda p: p * 2 > 0.1, 1),
    "more": (lambda p: p > 0, 1),
    "the logarithm": (lambda p: p.log() > -50.0, 1),
}


@PROGRAMS.each(COMPARED, step=3, trained="rsw")
def comparisons_in_rows_without_keys(compared, z, t, w, keep):
    """Eager compares NaN there; a comparison that 0 passes as NaN does is a row program."""
    p = z.masked_fill(~keep, -INFINITY).softmax(-1)
    return (torch.where(compared(p), t.softmax(-1).square(), 0.0) * w).sum(-1)


A_ROW = torch.where(torch.arange(ROWS) == 2, -INFINITY, 0.0)[:, None]
HIDDEN_BY_A_NUMBER = {
    "a distance": (lambda z, q: (z + A_ROW).softmax(-1).sub(q).abs() > 0.05, 0),
    "a bound": (lambda z, q: z.minimum(A_ROW).softmax(-1) < 0.5, 0),
    "the largest": (lambda z, q: z + A_ROW == (z + A_ROW).amax(-1, keepdim=True), 0),
    "more": (lambda z, q: (z + A_ROW).softmax(-1) > 0.1, 1),
    "a factor": (lambda z, q: (z * A_ROW.exp()).softmax(-1).sub(q).abs() > 0.05, 1),
}


@PROGRAMS.each(HIDDEN_BY_A_NUMBER, trained="rsw")
def comparisons_in_rows_that_a_number_hides(compared, z, t, w, keep):
    """A row to which -inf is added has no keys either, though no mask says so."""
    q = t.softmax(-1)
    return (torch.where(compared(z, q), q.square(), 0.0) * w).sum(-1)


def of_heads(p):
    return p.sum(1) / p.sum(1).sum(-1, keepdim=True)


ALONE = torch.arange(3 * ROWS).view(3, ROWS, 1) != 2  # a row that one head has no keys in
OF_HEADS = {
    "a mean": ([lambda p: p.mean(1), True], 1),
    "normalised": ([of_heads, True], 1),
    "a mean of masks of their own": ([lambda p: p.mean(1), ALONE], 0),
    "normalised, of masks of their own": ([of_heads, ALONE], 0),
}


@PROGRAMS.each(OF_HEADS, trained="rsw")
def comparisons_of_heads_in_rows_without_keys(made, z, t, w, keep):
    """Where one head has no key alone, eager has NaN, and the others' sum is no 0."""
    averaged, own = made
    p = averaged(z.masked_fill(~(keep & own), -INFINITY).softmax(-1))
    return (torch.where(p > 0, t.softmax(-1).mean(1).square(), 0.0) * w).sum(-1)


# ------------------------------------------------------ probabilities that underflow
OF_LOGARITHMS = {
    "a bound below": (lambda x: x.clamp(min=-1000.0), 0),
    "a scaled bound": (lambda x: (10 * x).clamp(min=-100.0), 0),
    "a comparison": (lambda x: torch.where(x < -1000.0, 0.0, x), 0),
    "an infinity": (lambda x: torch.where(x == -INFINITY, 0.0, x), 0),
    "an inverse": (lambda x: 1 / (1 - x), 0),
    "a negative power": (lambda x: (1 - x) ** -2, 0),
    "a small power": (lambda x: (0.01 * x).exp(), 0),
    "a bound that cuts them": (lambda x: x.clamp(min=-100.0), 1),
    "a comparison that cuts them": (lambda x: torch.where(x < -20.0, 0.0, x), 1),
    "a ratio": (lambda x: (x - x.detach().clamp(min=-50.0)).exp(), 1),
}


@PROGRAMS.each(OF_LOGARITHMS, step=2, trained="w", size=600.0)
def readers_of_logarithms_that_underflow(function, z, t, w):
    return (w * t.softmax(-1) * function(z.softmax(-1).log())).sum(-1)


POWERS = {
    "small, by two": (lambda p: (p**0.3) ** 0.3, 0),
    "roots of roots": (lambda p: p.sqrt().sqrt().sqrt(), 0),
    "small and negative": (lambda p: p**-0.01, 0),
    "a root": (lambda p: p.sqrt(), 1),
}


@PROGRAMS.each(POWERS, trained="w", size=600.0)
def small_powers_of_what_underflows(power, z, t, w):
    """0 ** 0.01 is 0 in eager code; of the logarithm it is a number."""
    return (w * t.softmax(-1) * power(z.softmax(-1))).sum(-1)


def heads_that_are_multiplied(temperature, z, t, w):
    x = z.softmax(-1).log().sum(1) / temperature
    return (x.softmax(-1) * w).square().sum(-1) + t.softmax(-1).mean(1)[..., 0]


for size in (1.0, 40.0, 600.0):
    temperatures = {f"{size} {x}": x for x in (1.0, 2.0)}
    PROGRAMS.each(temperatures, 2, trained="w", size=size)(heads_that_are_multiplied)

# ------------------------------------------------------ masks of finite numbers
FILLS = [LOWEST, -1e4, -800.0, -100.0, 1e4, -INFINITY]
HOW = {
    "filled": lambda x, keep, low: x.masked_fill(~keep, low),
    "chosen": lambda x, keep, low: torch.where(keep, x, low),
    "added": lambda x, keep, low: x + torch.zeros_like(x).masked_fill(~keep, low),
}
LOGARITHMS = {
    "of a probability": lambda p, t: t * p.log(),
    "of a multiple": lambda p, t: t * (0.5 * p).log(),
    "of a quotient below": lambda p, t: t * (t / p).log(),
    "of a quotient above": lambda p, t: t * (p / t).log(),
    "in kl_div": lambda p, t: F.kl_div(p.log(), t, reduction="none"),
}


@pytest.mark.parametrize(("how", "low"), list(product(["filled", "chosen"], FILLS)))
@pytest.mark.parametrize("name", LOGARITHMS)
def test_logarithms_of_masked_probabilities(name, how, low):
    """They are -inf where the mask makes the probability 0, as in eager code."""

    @of_scores
    def step(z, t, w, keep):
        p = HOW[how](z, keep, low).softmax(-1)
        return (w.abs() * LOGARITHMS[name](p, t.softmax(-1))).sum(-1)

    judge(step, tensors("qk"), 1)


@PROGRAMS.each({str(low): low for low in (LOWEST, -1e4, -INFINITY)}, trained="qk")
def one_side_that_is_masked(low, z, t, keep):
    """Of a divergence that an operator has: infinite in eager code, and so it is not its."""
    p = z.masked_fill(~keep, low).softmax(-1)
    return F.kl_div(p.log(), t.softmax(-1), reduction="none").sum(-1)


@PROGRAMS.each(
    {f"{how} {low}": [how, low] for how in HOW for low in (LOWEST, -1e9, -1e4)},
    step=2,
    sites=0,
    trained="qk",
)
def log_sum_exps_of_masked_scores_stay(fill, z, t, w, keep):
    """In a row without keys eager's is the fill: the count of keys is lost in it."""
    how, low = fill
    x = HOW[how](z, keep, low)
    return ((x - x.logsumexp(-1, keepdim=True)).exp() * w * t.softmax(-1).square()).sum(-1)


@PROGRAMS(trained="qk")
def a_mask_that_is_added_as_a_tensor(z, t, w, keep):
    x = z + (1.0 - keep.double()) * -1e9
    return x.logsumexp(-1) * (w * t.softmax(-1).square()).sum(-1)


@PROGRAMS.each({"-1e4": -1e4, "-1e9": -1e9}, sites=0, trained="qk")
def rows_that_only_the_teacher_masks_are_uniform(fill, z, t):
    """A finite fill of a whole row leaves a uniform teacher, whose cross-entropy is not 0."""
    t = t.masked_fill(~(torch.arange(ROWS)[:, None] % 3 > 0), fill)
    p = (t - t.logsumexp(-1, keepdim=True)).exp()
    return (p * (z - z.logsumexp(-1, keepdim=True))).nansum(-1)


@PROGRAMS(sites=0, trained="")
def infinities_of_keys_that_added_masks_hide_are_filled(z, t):
    """Two masks of -1e4 that differ: the teacher has keys whose student is 0 in eager code."""
    place = (torch.arange(ROWS)[:, None] + torch.arange(KEYS)) % 5
    p, q = (HOW["added"](x, place != i, -1e4).softmax(-1) for x, i in ((t, 0), (z, 2)))
    x = p * (p / q).log()
    return x.masked_fill(x.isinf() | x.isnan(), 0.0).sum(-1)


@PROGRAMS.each({"-1e4": -1e4, "-inf": -INFINITY}, trained="qk")
def readers_of_masked_log_probabilities_stay(low, z, w, keep):
    return ((z.masked_fill(~keep, low).log_softmax(-1) * w).sum(-1) * 0.01).exp()


def test_a_logarithm_that_other_code_takes_of_the_same_probabilities():
    """The log-softmax of a filled score is finite, whatever a loss next to it computes."""

    def step(h, w, ht, wt, keep):
        s, t = (h @ w.mT).masked_fill(~keep, -1e4), ht @ wt.mT
        own = rows_of_kl(s, s)
        return (t.softmax(-1) * s.log_softmax(-1)).sum(-1), own

    shapes = ((6, 4), (11, 4), (6, 3), (11, 3))
    given = [torch.randn(x).requires_grad_() for x in shapes]
    given.append(torch.arange(11) % 3 > 0)
    outcome = compare(step, given, verify="never").check()
    assert outcome.num_fused and outcome.compiled.outputs[0].isfinite().all()


MULTIPLIED = {
    "of 1 and 0": lambda x, m: x * m - 1e9 * (1 - m),
    "with a temperature": lambda x, m: (x * m - 1e9 * (1 - m)) / 2,
    "of the other sign": lambda x, m: x * m + (m - 1) * 1e9,
}


@pytest.mark.parametrize("name", MULTIPLIED)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_scores_times_a_mask_keep_their_digits(name, dtype):
    """In the normal form, 1e9 * mask is apart from its -1e9: scores next to it have no digits."""
    score = MULTIPLIED[name]

    def step(q, k, r, s, keep):
        logs, p = (score(a @ b.mT, keep.float()) for a, b in ((q, k), (r, s)))
        return F.kl_div(logs.log_softmax(-1), p.softmax(-1), reduction="sum")

    inputs = [x.detach().float().requires_grad_(i < 2) for i, x in enumerate(tensors()[:4])]
    keep = tensors()[-1].index_fill(-1, torch.tensor(0), True)
    outcome = compare(step, [*inputs, keep.to(dtype)], verify="never").check()
    assert outcome.num_fused == 1, outcome.report


# ------------------------------------------------------ slopes that are infinite at 0
NORMS = {
    "of order 2": lambda x: x.norm(dim=-1, keepdim=True),
    "of order 1": lambda x: x.norm(p=1, dim=-1, keepdim=True),
    "normalised": lambda x: F.normalize(x, dim=-1),
}


@pytest.mark.parametrize("name", NORMS)
def test_the_gradient_of_a_norm_of_zeros(name):
    """It is 0 in eager code, unlike that of a square root: of two sides that are equal."""

    @of_scores
    def step(z, t, w):
        p = z.softmax(-1)
        return (w * p * NORMS[name](p - t.softmax(-1))).sum(-1)

    q, k, _, _, *rest = tensors()
    judge(step, [q, k, q.detach().clone(), k.detach().clone(), *rest], 1)


FACTORS = {
    "a difference": lambda p: p - p.detach(),
    "a probability": lambda p: p,
    "a square": lambda p: (p - p.detach()).square(),
    "renormalised": lambda p: p / (p.sum(-1, keepdim=True) + 1.0),
}


@PROGRAMS.each(FACTORS)
def xlogy_where_both_arguments_are_zero(factor, z, t, w):
    """Its gradient to the factor is 0 in eager code, not the logarithm."""
    return (torch.xlogy(factor(z.softmax(-1)), t.relu()) * w).sum(-1)


@PROGRAMS.each(
    {f"{dim} {scale}": [dim, scale] for dim in (1, 2, 3) for scale in (0.0, 1e-12, 1.0)},
    step=3,
    trained="qkrs",
)
def cosines_with_norms_below_the_bound(case, z, t, w):
    """The gradient flows as if they were not bounded."""
    dim, scale = case
    return F.cosine_similarity(z.softmax(-1) * w, t.softmax(-1) * scale, dim=dim)


# ------------------------------------------------------ parts, order, multiples, sizes
@PROGRAMS(trained="w")
def a_part_of_a_dimension_of_one_that_is_empty(q, k, w, keep):
    """Nothing is left to sum: 0, whatever a row without keys has."""
    x = (q[:, :1] @ k[:, :1].mT).masked_fill(~keep, -INFINITY)
    return (x.log_softmax(-1) * w)[:, 1:].sum((0, 1, -1))


@PROGRAMS(trained="q")
def an_operand_that_is_made_behind_the_first_sum(q, k, r, s, w):
    first = F.kl_div(q @ k.mT, (r * 1.0).softmax(-1) @ s.mT, reduction="batchmean")
    t = torch.bmm(r.flatten(0, 1), s.flatten(0, 1).mT).unflatten(0, r.shape[:2])
    p = t.softmax(-1)
    return first + (torch.xlogy(p, p) * w - p * (q @ k.mT)).sum(-1)


@PROGRAMS(sites=2)
def ids_that_are_made_behind_the_first_sum(z, keep):
    """Label smoothing: the mean over the keys comes before the labels are given a dimension."""
    labels, log_p = keep.sum(-1).expand(2, 3, ROWS), z.log_softmax(-1)
    smooth = 0.1 * log_p.mean(-1)
    return smooth + log_p.gather(-1, labels[..., None])[..., 0]


@PROGRAMS(sites=1, trained="qk")
def multiples_of_a_probability_are_one(z, t, keep):
    """0.9 P + 0.1 P is 0 where P is, and so is its product with its logarithm."""
    p = t.masked_fill(~keep, -1e4).softmax(-1)
    return F.kl_div(z.log_softmax(-1), 0.9 * p + 0.1 * p.detach(), reduction="none").sum(-1)


@PROGRAMS.each({"finite": 0.5, "infinite": 2.0})
def a_scale_of_the_lowest_number(scale, z, t, keep):
    """It may overflow: of a target, 0 times the logarithm of 0 is 0."""
    x = t.masked_fill(~keep, LOWEST) * scale
    return F.kl_div(z, x.softmax(-1), reduction="none").sum(-1)


@PROGRAMS.each({"together": True, "apart": False}, trained="qk")
def a_log_softmax_next_to_the_logarithm_of_a_softmax(is_one, z, t, keep):
    """Its numbers stay where the probability is 0, of which x log x is 0."""
    x = t.masked_fill(~keep, -1e4)
    first = F.kl_div(z, x.softmax(-1), reduction="none")
    second = (t - z) * x.log_softmax(-1)
    return (first + second).sum(-1) if is_one else first.sum() - 0.5 * second.sum(-1)


@PROGRAMS.each({"with numbers": True, "alone": False})
def infinity_of_the_logarithm_of_a_softmax(has_numbers, z, t, keep):
    """The loss is infinite where the softmax is 0, and what stands next to it is not."""
    x = t.masked_fill(~keep, -1e4)
    first, second = torch.xlogy(z.softmax(-1), x.softmax(-1)), t * x.log_softmax(-1)
    return first.sum(-1), second.sum(-1) if has_numbers else second.sum(-1) * 0


@PROGRAMS.each({"bare": False, "masked": True})
def products_of_no_width(masked, q, k, t, w, keep):
    x = student(q[..., :0], k[..., :0])
    x = x.masked_fill(~keep, -1.0) if masked else x
    return (w * x.softmax(-1) * t).sum(-1)


@PROGRAMS.each(
    {x: getattr(torch.Tensor, x) for x in ("mean", "sum", "logsumexp")}, sites=1, trained="qk"
)
def a_dimension_of_a_number(reduce, z, t):
    """It stops what is read of the number, and no divergence next to it."""
    loss = F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="sum")
    return loss + reduce(z.sum(), 0)


@pytest.mark.parametrize("selected", ["rows", "vocabulary"])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_rows_or_vocabulary_entries_of_which_none_is_selected(selected, count):
    def step(h, w, keep):
        x = h[keep] @ w.T if selected == "rows" else h @ w[keep].T
        p = x.softmax(-1)
        return (p * p * x.tanh()).sum(-1).sum()

    h, w = (torch.randn(9, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        judge(step, [h, w, torch.arange(9) < count])


def test_maps_that_are_averaged_over_no_sequence():
    def loss(q, k, qt, kt):
        s, t = ((a @ b.mT).softmax(-1).mean(0) for a, b in ((q, k), (qt, kt)))
        return (t * (t.log() - s.log())).sum(-1)

    inputs = [torch.randn(0, 2, 4, width, requires_grad=True) for width in (3, 3, 5, 5)]
    outcome = compare(loss, inputs).check()
    (value,) = outcome.compiled.outputs
    assert value.shape == (2, 4) and value.isnan().all()  # a mean of nothing
    assert [x.shape for x in outcome.compiled.gradients] == [x.shape for x in inputs]


@PROGRAMS.each({"one row": 1, "two rows": 2}, trained="qk")
def scatter_at_ids_of_some_rows(rows, q, k, w, keep):
    """The ids of scatter are not broadcast: those of one row are of the first row alone."""
    top = (keep[:rows] + w.detach()).softmax(-1).topk(3, -1)
    target = torch.zeros(ROWS, KEYS, dtype=w.dtype).scatter(-1, top.indices, top.values)
    x = student(q[0, 0], k[0, 0])
    values = (x.softmax(-1) * (target + 1.0)).sum(-1) - (target * x.log_softmax(-1)).sum(-1)
    return values, values.sum()


# ------------------------------------------------------ gradients that are none, or zeros
@PROGRAMS.each({str(beta): beta for beta in (0, 0.0, -1.0)}, step=2)
def a_bias_that_is_added_no_times(beta, q, k, t, w):
    """Eager's gradient of the bias is zeros, not None."""
    x, t = torch.baddbmm(w, q[0], k[0].mT, beta=beta, alpha=0.5), t[0].softmax(-1)
    squares = (x.softmax(-1) - t).square().sum(-1)
    return squares, F.kl_div(x.log_softmax(-1), t, reduction="sum")


@PROGRAMS(trained="w")
def a_captured_scale_behind_a_detached_softmax(q, k, w, keep):
    scale = w.abs().sum() + 0.1
    return (student(q, k) / scale).softmax(-1).detach().mul(keep).sum(-1)


@PROGRAMS()
def a_contraction_over_one_head_is_no_product_of_operands(q, k, t, w):
    x = torch.einsum("bhnm,h->bnm", student(q[:, :1], k[:, :1]), w[:1])
    return (x.softmax(-1) * t.mean(1) * w).sum(-1)


@PROGRAMS(sites=1, trained="qrs")
def a_teacher_that_learns_from_nothing(q, k, r, s, keep):
    """The divergence is detached: cross-entropy next to it must not give its teacher zeros."""
    z = q[0, 0] @ k[0, 0].T
    kl = kd(z, r[0, 0] @ s[0, 0].T)
    return kl.detach() * F.cross_entropy(z, keep.sum(-1))


# ------------------------------------------------------ operations that return their input
SAME = {
    "type_as": lambda x: x.type_as(x),
    "dropout of a model in eval": lambda x: F.dropout(x, training=False),
}


@pytest.mark.parametrize("name", SAME)
def test_an_operand_that_is_an_input_by_another_name(name):
    """Its second name stands after the sum: the program reads the first."""

    def step(h, w, ht, wt):
        loss = F.kl_div((w @ h.T).T, (wt @ ht.T).T, reduction="sum", log_target=True)
        return loss, torch.mm(ht, SAME[name](wt).t()).softmax(-1)

    sizes = ((6, 5), (8, 5), (6, 3), (8, 3))
    judge(step, [torch.randn(size, dtype=torch.float64).requires_grad_() for size in sizes], 1)


@PROGRAMS(trained="k")
def a_dropout_in_eval_that_returns_its_input_under_no_grad(q, k, t):
    """It keeps the gradient of its input there, which the scores do not have."""
    with torch.no_grad():
        log_p = (F.dropout(k, 0.5, training=False) @ q.mT).mT.log_softmax(-1)
    return F.kl_div(log_p, t.softmax(-1), reduction="mean")


# ------------------------------------------------------ ids of rows
PARTS = {
    "of the first part": lambda x: x[:3][torch.tensor([-1, 0, 2, -2])],
    "of a later part": lambda x: x[1:4][torch.tensor([-1, 0, 2, -2])],
    "of a chunk": lambda x: x.chunk(2)[0][torch.tensor([-1, 0, 1, -3])],
    "of all rows": lambda x: x[torch.tensor([-1, 0, 2, -2])],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_ids_from_the_end_of_a_part(name, dynamic):
    def program(h, w):
        z = PARTS[name](h @ w.T)
        return (z.log_softmax(-1) * z.softmax(-1).sqrt()).sum(-1)

    inputs = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 7)]
    if dynamic:
        torch._dynamo.mark_dynamic(inputs[0], 0)
    judge(program, inputs, 1)


def _chosen_by_all_rows(z, keep, labels):
    return z.masked_fill(~keep, LOWEST).softmax(-1).index_select(-1, labels[:3]).sum(-1)


def _labels_of_a_mask_that_is_added(z, keep, labels):
    return (z + ~keep * -1e9).log_softmax(-1).gather(-1, labels[:, None])[:, 0]


@pytest.mark.parametrize("entries", [_chosen_by_all_rows, _labels_of_a_mask_that_is_added])
def test_entries_of_rows_without_keys(entries):
    """Their probabilities are uniform. The log-sum-exp has no digits left for their number."""

    def program(h, w, t, v):
        keep = torch.arange(5)[:, None] > torch.arange(7)
        z = h @ w.T
        kl = rows_of_kl(z, t @ v.T)
        return kl + entries(z, keep, torch.tensor([0, 6, 2, 0, 3]))

    inputs = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 7, 5, 7)]
    judge(program, inputs, 1)


@pytest.mark.parametrize(("fill", "num_fused"), [(-1e9, 0), (-INFINITY, 1)])
def test_entries_of_rows_that_a_mask_may_hide(fill, num_fused):
    """The hint of the one, to mask with infinity, is the other."""

    def program(h, w):
        mask = torch.where(torch.ones(5, 7, dtype=torch.bool).tril(), 0.0, fill)
        logs = (h @ w.T + mask).log_softmax(-1)
        return logs.gather(-1, torch.zeros(5, 1, dtype=torch.long)).square().sum(-1)

    inputs = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 7)]
    judge(program, inputs, num_fused)


# ------------------------------------------------------ numbers that a type does not hold
ADDED = {
    "(1 - keep) * lowest": lambda s, keep, low: s + (1 - keep.float()) * low,
    "where": lambda s, keep, low: s + torch.where(keep, 0.0, low),
    "a tensor of the lowest": lambda s, keep, low: s + torch.full((5, 7), low).triu(3),
}


@pytest.mark.parametrize("scale", [2.0, 1.3, -2.0])
@pytest.mark.parametrize("name", ADDED)
def test_multiples_of_the_lowest_number(name, scale):
    """They are infinite, as a temperature below 1 makes them."""

    def program(h, w):
        keep = torch.ones(5, 7, dtype=torch.bool).tril(2)
        s = ADDED[name](h @ w.T, keep, torch.finfo(torch.float32).min) * scale
        return (s.softmax(-1) ** 2).sum(-1)

    inputs = [torch.randn(5, 3), torch.randn(7, 3)]
    with backend.collected() as report:
        found = compiled(program, "eager")(*inputs)
    torch.testing.assert_close(found, program(*inputs), equal_nan=True)
    assert not report.failures, str(report)


# ------------------------------------------------------ masks of one of three distributions
THIRDS = {
    "a temperature": lambda s, t: s.softmax(-1) * ((s / 2).log_softmax(-1) - t),
    "one without": lambda s, t: (s / 2).softmax(-1) * (s.log_softmax(-1) - t),
    "an entropy": lambda s, t: s.softmax(-1) * (s.log_softmax(-1) - t),
}


@pytest.mark.parametrize("fill", [-1e9, -INFINITY])
@pytest.mark.parametrize("name", THIRDS)
def test_the_keys_of_a_third_distribution(name, fill):
    """A sum over the keys of the teacher alone, of which some terms do not have the teacher."""

    def program(h, w, t, v):
        keep = torch.ones(5, 7, dtype=torch.bool).tril(2)
        log_t = (t @ v.T).masked_fill(~keep, fill).log_softmax(-1)
        return THIRDS[name](h @ w.T, log_t).masked_fill(~keep, 0.0).sum(-1)

    judge(program, [torch.randn(n, 3, dtype=torch.float64) for n in (5, 7, 5, 7)])


# ------------------------------------------------------ what reads a sum
READERS = {
    "a ratio": lambda x: (x - x.detach()).exp(),
    "a clipped ratio": lambda x: x.exp().clamp(0.8, 1.2),
    "a fraction": lambda x: x + (x > -2.0).double().mean(),
    "asked": lambda x: x.nan_to_num(3.0),
}


@pytest.mark.parametrize("bad", [None, math.nan, INFINITY])
@pytest.mark.parametrize("name", READERS)
def test_readers_of_log_probabilities(name, bad):
    """Of a policy: NaN where eager's are, in the same rows."""

    @of_scores
    def step(z):
        logs = z.log_softmax(-1)
        chosen = logs.gather(-1, torch.ones(*logs.shape[:-1], 1, dtype=torch.long)).squeeze(-1)
        return READERS[name](chosen) + (logs.exp() * logs).sum(-1)

    given = tensors("qk")
    if bad is not None:
        with torch.no_grad():
            given[0][0, 1, 2] = bad
    judge(step, given, 2)


DEVIATIONS = {
    "standardized": lambda s: s / (s.std(-1, keepdim=True) + 1e-6),
    "unbiased": lambda s: s * s.std(-1, keepdim=True),
    "of a population": lambda s: s * s.std(-1, unbiased=False, keepdim=True),
}


@pytest.mark.parametrize("name", DEVIATIONS)
def test_the_deviation_of_equal_scores(name):
    """As of a head that is initialized to zeros: the gradient of torch's deviation is 0 there."""

    @of_scores
    def step(z, t):
        return -(t.softmax(-1) * DEVIATIONS[name](z).log_softmax(-1)).sum(-1)

    given = tensors("qk")
    with torch.no_grad():
        given[1].zero_()
    judge(step, given, 1)


@PROGRAMS.parametrized()
def test_equals_eager(row):
    judge(row.program, tensors(row.trained, row.size), row.sites, row.inner)


@PROGRAMS.parametrized()
def test_equals_eager_through_aot_autograd(row):
    judge(row.program, tensors(row.trained, row.size), row.sites, "aot_eager")


def of_a_bias():
    """Inputs of attention: of a student, a teacher, and a trained bias."""
    make = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 3, n, DIM, generator=make) for n in (ROWS, KEYS, ROWS, KEYS)]
    inputs.append(torch.randn(1, 3, ROWS, KEYS, generator=make))
    for i in (0, 1, 4):
        inputs[i].requires_grad_()
    return inputs


MASKS = {"long": torch.long, "uint8": torch.uint8, "bool": torch.bool, "float": torch.float32}


HIDDEN = {
    "of what is not hidden": lambda mask, dtype, lowest: (1.0 - mask.to(dtype)) * lowest,
    "less the lowest": lambda mask, dtype, lowest: mask * -lowest + lowest,
}


@pytest.mark.parametrize("how", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("lowest", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", MASKS)
def test_a_bias_keeps_its_digits_next_to_a_mask(dtype, lowest, how):
    """T5: the trained bias of positions is added to ``(1 - mask) * lowest``, not to its parts."""

    def program(q, k, r, t, bias, mask):
        hidden = how(mask[:, None, None, :], q.dtype, lowest)
        s, t = q @ k.mT + (bias + hidden), r @ t.mT + hidden
        return F.mse_loss(s.softmax(-1), t.softmax(-1))

    inputs = of_a_bias()
    mask = torch.ones(2, KEYS, dtype=MASKS[dtype])
    mask[1, 4:] = 0
    outcome = compare(program, [*inputs, mask], verify="never", min_mib=0).check()
    assert outcome.num_fused == 1, str(outcome.report)


LOWEST = torch.finfo(torch.float32).min
COMPOSED = {  # a mask of 0 and a large number, and a trained bias
    "halved": lambda hidden, bias: (hidden + bias) / 2,
    "negated": lambda hidden, bias: -(-hidden - bias),
    "of a bias taken away again": lambda hidden, bias: 2 * (bias + hidden) - bias,
    "added twice": lambda hidden, bias: (hidden + hidden) + bias,
    "with another one": lambda hidden, bias: (hidden + hidden) + (hidden.flip(0) + bias),
}


@pytest.mark.parametrize("lowest", [-1e4, -1e9, LOWEST])
@pytest.mark.parametrize("name", COMPOSED)
def test_sums_of_masks_and_biases_are_masks_and_biases(name, lowest):
    def program(q, k, r, t, bias, mask):
        hidden = (1.0 - mask[:, None, None, :]) * lowest
        s, t = q @ k.mT + COMPOSED[name](hidden, bias), r @ t.mT + hidden
        return F.mse_loss(s.softmax(-1), t.softmax(-1))

    inputs = of_a_bias()
    inputs.append(torch.ones(2, KEYS))
    inputs[-1][1, 4:] = 0
    outcome = compare(program, inputs, verify="never", min_mib=0).check()
    is_twice_the_lowest = name == "of a bias taken away again" and lowest == LOWEST
    assert outcome.num_fused == (not is_twice_the_lowest), str(outcome.report)


def test_a_mask_that_is_taken_away_again_leaves_a_bias():
    """Eager code has no digits of it left: whether it is fused or not, values are not mixed."""

    def program(q, k, r, t, bias, mask):
        hidden = (1.0 - mask[:, None, None, :]) * -1e9
        s, t = q @ k.mT + ((hidden + bias) - hidden), r @ t.mT + hidden
        return F.mse_loss(s.softmax(-1), t.softmax(-1))

    inputs = of_a_bias()
    inputs.append(torch.ones(2, KEYS))
    inputs[-1][1, 4:] = 0
    compare(program, inputs, verify="never", min_mib=0).check()
