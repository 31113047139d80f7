"""Axes are identities with extents: split, permuted, averaged, shared and broadcast on both sides.

Every program is compared with float64, value and all gradients, whether it fuses or not.
tests/support/misleading/axes.py has more: heads in groups, statistics of other rows, divisors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import named_inputs
from tests.support.comparing import compare, refusals
from tests.support.losses import kd

B, N, M, D = 2, 5, 7, 4


def normal(*shape):
    return torch.randn(*shape, requires_grad=True)


def operands(
    student=(B, 2),
    teacher=(B, 2),
    student_keys=None,
):
    """Queries and keys of both sides, by the leading dimensions."""
    leading = (student, student_keys or student, teacher, teacher)
    return [normal(*x, n, D) for x, n in zip(leading, (N, M, N, M), strict=True)]


def kd_of(s, p):
    return F.kl_div(s.log_softmax(-1), p, reduction="batchmean")


of_scores = named_inputs.given(
    "sq sk tq tk", {"s": lambda sq, sk: (sq @ sk.mT,), "t": lambda tq, tk: (tq @ tk.mT,)}
)


def elements(s, t):
    return t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))


def in_parts(x):
    return x.unflatten(-1, (2, 2)).transpose(-1, -2).flatten(-2)


def attention_with_other_groups(sq, sk, tq, tk):
    p = (sq @ sk.repeat_interleave(2, dim=1).mT).softmax(-1)
    v = torch.sin(tk[:, :1]).expand(-1, 8, -1, -1)
    return kd_of(tq @ tk.mT, p), p @ v


def an_index_mask_that_enlarges(sq, sk, tq, tk):
    keep = torch.arange(M) >= torch.arange(N)[:, None]
    s, t = (torch.where(keep, x, -1e9) for x in (sq[:, :, :1] @ sk.mT, tq[:, :, :1] @ tk.mT))
    return kd(s, t)


def weights_that_enlarge(s, t):
    el = elements(s, t)
    return (torch.linspace(1, 2, 3)[:, None, None, None] * el + el).mean((0, -1))


def a_sum_that_the_batch_enlarges(s, t):
    p = t.softmax(-1)
    return ((p * t.log_softmax(-1)).sum(-1) - (p * s.log_softmax(-1)).sum(-1)).sum(0)


def groups_that_do_not_match(sq, sk, tq, tk):
    s, t = sq @ sk.mT, tq @ tk[:, :2].repeat_interleave(3, dim=1).mT
    return kd(s, t.unflatten(1, (3, 2)))


def masked_in_other_places(s, t):
    mask = (torch.arange(B * 2 * N * M).view(B, 2, N, M) % 5) == 3
    t = t.transpose(0, 1).masked_fill(mask, -1e9).transpose(0, 1)
    return kd(s.masked_fill(mask, -1e9), t)


def log_sum_exp_moved_by_broadcasting(s, t):
    log_q = s - s.logsumexp(-1)[..., None, None][:, :, 0]  # meets the next dimension
    return (t.softmax(-1) * (t.log_softmax(-1) - log_q)).sum(-1)


def sum_of_transposed_exponentials(s, t):
    e, moved = (s - s.amax(-1, True)).exp(), s.transpose(0, 1)
    total = (moved - moved.amax(-1, True)).exp().sum(-1, True)
    return (t.softmax(-1) * (t.log_softmax(-1) - (e / total).log())).sum(-1)


def one_query_and_one_key(sq, sk, tq, tk):
    return kd(sq[:, :, :1] @ sk.mT, tq[:, :, :1] @ tk.mT), kd(sq @ sk[:, :, :1].mT, tq @ tk.mT)


def heads_of_lm_heads(sq, sk, tq, tk):
    """The teacher's tokens in another order, and both in rows of one dimension."""
    s, t = sq.flatten(0, 1) @ sk.T, (tq @ tk.T).transpose(0, 1).flatten(0, 1)
    return kd(s, t) + kd(F.linear(sq, sk), F.linear(tq, tk).transpose(0, 1))


FUSES, ROW_PROGRAM, LEFT, VALUE = "fuses", "row_program", "left", "value"
ONE, SAME = operands((1, 2), (1, 2)), operands()
# the program, its operands, and what becomes of it: of `VALUE` a part may fuse
PROGRAMS = {
    "an index mask that enlarges": (an_index_mask_that_enlarges, SAME, FUSES),
    "ones that enlarge": (
        lambda s, t: (torch.ones(3, 1, 1, 1) * elements(s, t)).sum((0, -1)), ONE, FUSES,
    ),
    "weights that enlarge": (weights_that_enlarge, ONE, FUSES),
    "a scale that enlarges": (
        lambda s, t: kd(s * torch.linspace(1, 2, 3)[:, None, None, None], t),
        operands((1, 2), (3, 2)), FUSES,
    ),
    "a bias that enlarges": (
        lambda s, t: kd(s + torch.linspace(-1, 1, 3)[:, None, None, None], t),
        operands((1, 2), (3, 2)), FUSES,
    ),
    "a teacher for all": (a_sum_that_the_batch_enlarges, operands((2, 2), (1, 2)), FUSES),
    "head_dim in parts": (
        lambda sq, sk, t: kd(in_parts(sq) @ in_parts(sk).mT, t), SAME, FUSES,
    ),
    "expanded head_dim": (
        lambda sq, sk, t: kd(
            sq[..., :1].expand(-1, -1, -1, 8) @ sk[..., :1].expand(-1, -1, -1, 8).mT, t
        ), SAME, FUSES,
    ),
    "attention with other groups": (
        attention_with_other_groups, operands((B, 8), (B, 8), (B, 4)), FUSES,
    ),
    "a mask that enlarges": (
        lambda s, t: kd(
            s.masked_fill(torch.arange(3 * N * M).view(3, 1, N, M) % 5 == 3, -1e9), t
        ), operands((1, 2), (3, 2)), ROW_PROGRAM,
    ),
    "a mask in other places": (masked_in_other_places, SAME, ROW_PROGRAM),
    "groups that do not match": (groups_that_do_not_match, operands((B, 3, 2), (B, 6)), LEFT),
    "one label is broadcast in the contraction": (
        lambda sq, sk, t: kd(torch.einsum("bhnd,bhmd->bhnm", sq[..., :1], sk), t), SAME, LEFT,
    ),
    "transposed exponentials": (sum_of_transposed_exponentials, SAME, LEFT),
    "repeated keys": (
        lambda sq, sk, tq, tk: elements(
            sq @ sk.repeat_interleave(2, 2).mT, tq @ tk.repeat_interleave(2, 2).mT
        ).sum(-1), SAME, LEFT,
    ),
    "rows of a broadcast teacher by a mask": (
        lambda s, t: elements(s, t)[torch.arange(4 * N).view(2, 2, N) % 3 > 0].sum(-1).mean(),
        operands((2, 2), (1, 2)), VALUE,
    ),
    "a log-sum-exp that broadcasting moves": (log_sum_exp_moved_by_broadcasting, SAME, VALUE),
    "no heads": (kd, operands((B, 0), (B, 0)), VALUE),
    "one query and one key": (one_query_and_one_key, operands((B, 1), (1, 1)), VALUE),
    "LM heads": (
        heads_of_lm_heads, [normal(2, 3, D), normal(9, D), normal(3, 2, D), normal(9, D)], VALUE,
    ),
}  # fmt: skip
# what these do needs a known extent
STATIC = ("expanded head_dim", "ones that enlarge", "weights that enlarge")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, dynamic):
    fn, inputs, becomes = PROGRAMS[name]
    program = of_scores(fn)
    sizes = [float(x.detach().norm(dim=-1).max()) if x.numel() else 0.0 for x in inputs]
    largest = max(sizes[0] * sizes[1], sizes[2] * sizes[3])  # a score is no larger
    # AOTAutograd sees the graphs whose sizes are numbers: with symbols it takes five times as long
    inner = "eager" if dynamic else "aot_eager"
    outcome = compare(program, inputs, inner=inner, dynamic=dynamic, largest_score=largest)
    outcome.check()
    if becomes == FUSES:
        assert outcome.num_fused > 0 or (dynamic and name in STATIC), str(outcome.report)
    elif becomes == ROW_PROGRAM:
        assert outcome.kinds == {ROW_PROGRAM}, str(outcome.report)
        assert all(refusals(program, inputs, dynamic=dynamic))
    elif becomes == LEFT:
        assert outcome.num_fused == 0, str(outcome.report)
        assert outcome.reasons and all(outcome.reasons), str(outcome.report)


# --------------------------------------------------------------- random heads on both sides
@dataclass(frozen=True)
class Heads:
    """How one side makes its scores [batch, *digits, N, M] from heads in an order of its own.

    ``order`` lists the digits as the side's heads are counted, with a further digit of size
    ``extra``, which is averaged over, at place ``extra_at``.
    """

    digits: tuple[int, ...]
    order: tuple[int, ...]
    key_heads: int
    sharing: str
    batch: int
    extra: int = 1
    extra_at: int = 0

    @property
    def num_heads(self):
        return math.prod(self.digits) * self.extra

    def inputs(self, num_queries, num_keys):
        q = normal(self.batch, self.num_heads, num_queries, D)
        return [q, normal(self.batch, self.key_heads, num_keys, D)]

    def scores(self, q, k):
        """[batch, extra, *digits, N, M]."""
        group = self.num_heads // self.key_heads
        if self.sharing == "interleaved":
            k = k.repeat_interleave(group, dim=1)
        elif self.sharing == "expanded":
            k = k[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)
        elif self.sharing == "tiled":
            k = k[:, None].expand(-1, group, -1, -1, -1).flatten(1, 2)
        sizes = [self.digits[i] for i in self.order]
        sizes.insert(self.extra_at, self.extra)
        s = (q @ k.mT).unflatten(1, sizes)
        at = {digit: d + (d >= self.extra_at) for d, digit in enumerate(self.order)}
        dims = [self.extra_at, *(at[i] for i in range(len(self.digits)))]
        return s.permute(0, *(1 + d for d in dims), -2, -1)


@st.composite
def heads(draw: st.DrawFn, digits: tuple[int, ...], *, averaged: bool) -> Heads:
    extra = draw(st.sampled_from([1, 2, 3])) if averaged else 1
    total = math.prod(digits) * extra
    return Heads(
        digits,
        tuple(draw(st.permutations(range(len(digits))))),
        draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0])),
        draw(st.sampled_from(["interleaved", "expanded", "tiled"])),
        draw(st.sampled_from([1, 2])),
        extra,
        draw(st.integers(0, len(digits))) if extra > 1 else 0,
    )


def rows_of(p, log_p, log_q):
    return (p * (log_p - log_q)).sum(-1)


LOSSES = {
    "batchmean": lambda p, s: kd_of(s, p),
    "rows": lambda p, s: rows_of(p, (p + 0.1).log(), s.log_softmax(-1)),
    "reverse": lambda p, s: rows_of(s.softmax(-1), s.log_softmax(-1), (p + 0.1).log()).sum(1),
    "two sums": lambda p, s: (
        (p * (p + 0.1).log()).sum((0, -1)) - (p * s.log_softmax(-1)).sum((0, -1))
    ),
}
MOVES = {
    "as they are": lambda x: x,
    "queries first": lambda x: x.transpose(1, -2),
    "batch last": lambda x: x.movedim(0, -2),
}


def random_program(data):
    """Heads split, permuted, shared, averaged and broadcast at random on each side."""
    digits = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=2)))
    student = data.draw(heads(digits, averaged=False))
    teacher = data.draw(heads(digits, averaged=True))
    kept_mean = data.draw(st.booleans()) and teacher.extra == 1
    loss = LOSSES[data.draw(st.sampled_from(sorted(LOSSES)))]
    move = MOVES[data.draw(st.sampled_from(sorted(MOVES)))]
    num_queries, num_keys = data.draw(st.sampled_from([(5, 7), (5, 5), (2, 2), (1, 4)]))

    def program(sq, sk, tq, tk):
        s, t = student.scores(sq, sk)[:, 0], teacher.scores(tq, tk)
        p = t.softmax(-1).mean(1) if teacher.extra > 1 else t[:, 0].softmax(-1)
        return loss(move(p.mean(1, keepdim=True) if kept_mean else p), move(s))

    torch.manual_seed(0)
    inputs = [*student.inputs(num_queries, num_keys), *teacher.inputs(num_queries, num_keys)]
    return program, [x.double() for x in inputs]


@pytest.mark.parametrize(
    ("dynamic", "num_programs"),
    [
        (False, 8),
        pytest.param(False, 16, marks=pytest.mark.slow),
        # with symbolic sizes a program takes five times as long to compile
        pytest.param(True, 4, marks=pytest.mark.slow),
    ],
)
def test_random_heads(dynamic, num_programs):
    fused = []

    @settings(max_examples=num_programs, database=None)
    @given(data=st.data())
    def run(data):
        # in float64, where a wrong axis is no rounding: in float32 one of hundreds is by chance
        # twice as far off as eager code
        outcome = compare(*random_program(data), dynamic=dynamic)
        missing = [[g is None for g in x.gradients] for x in (outcome.eager, outcome.compiled)]
        assert missing[0] == missing[1]
        assert max(outcome.errors) <= 1e-11, outcome.mismatch()
        fused.append(outcome.num_fused > 0)

    run()
    # what is compared is the fused program, not eager with eager
    assert dynamic or sum(fused) > len(fused) // 4, f"{sum(fused)} of {len(fused)}"


SELECTED = {
    "batch and row": lambda x, b, n: x[b, 1, n],
    "rows of one batch": lambda x, b, n: x[1, n % 3, b],
    "in two steps": lambda x, b, n: x[:, 1][b, n],
}


@pytest.mark.parametrize("name", SELECTED)
@pytest.mark.parametrize("places", [([0, 1, 1], [4, 2, 2]), ([[0], [1]], [[4, 2, 2]])])
def test_positions_around_one_that_is_known(name, places):
    """Indexing moves dimensions to the front, after which the known one has another place."""

    def loss(sq, sk, tq, tk, b, n):
        s, t = (SELECTED[name](q @ k.mT, b, n) for q, k in ((sq, sk), (tq, tk)))
        return elements(s, t).sum(-1)

    given = [torch.randn(2, 3, 5, 4, requires_grad=i < 2) for i in range(4)]
    outcome = compare(loss, [*given, *map(torch.tensor, places)], verify="never").check()
    assert outcome.num_fused == 1, outcome.report


def test_heads_that_share_keys_after_heads_that_do_not():
    """The number of key heads varies then, and a guard says that it divides the others."""

    def loss(sq, sk, tq, tk):
        keys = sk.repeat_interleave(sq.shape[1] // sk.shape[1], 1)
        return kd(sq @ keys.mT, tq @ tk.repeat_interleave(tq.shape[1] // tk.shape[1], 1).mT)

    torch._dynamo.reset()
    for heads in (8, 4, 2):
        inputs = [torch.randn(2, h, 5, 4, requires_grad=True) for h in (8, heads, 8, heads)]
        report = compare(loss, inputs, reset=False).check().report
        assert report.num_fused == len(report.sites), str(report)
