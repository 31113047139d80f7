"""Axes are identities with extents: split, permuted, averaged, shared and broadcast on both sides.

Every program is compared with float64, value and all gradients, whether it fuses or not. Programs
with a reason are not fused; the others have to fuse. tests/support/misleading/axes.py has more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torch_streamkl
from tests.support.comparing import compare, refusals
from tests.support.covering import every
from tests.support.losses import kd

B, N, M, D = 2, 5, 7, 4


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def operands(
    student: tuple[int, ...] = (B, 2),
    teacher: tuple[int, ...] = (B, 2),
    *,
    student_keys: tuple[int, ...] | None = None,
    teacher_keys: tuple[int, ...] | None = None,
) -> list[Tensor]:
    """Queries and keys of both sides, by the leading dimensions."""
    shapes = [(*student, N, D), (*(student_keys or student), M, D)]
    shapes += [(*teacher, N, D), (*(teacher_keys or teacher), M, D)]
    return [normal(*shape) for shape in shapes]


def kd_of(s: Tensor, p: Tensor) -> Tensor:
    return F.kl_div(s.log_softmax(-1), p, reduction="batchmean")


def repeated(k: Tensor, n: int) -> Tensor:
    return k.repeat_interleave(n, dim=1)


# ------------------------------------------------------------------------------ programs that fuse
def teacher_heads_transposed(sq, sk, tq, tk):
    return kd(sq @ sk.mT, (tq @ tk.mT).unflatten(1, (2, 3)).transpose(1, 2))


def mean_over_outer_heads_that_share_keys(sq, sk, tq, tk):
    p = (tq @ repeated(tk, 3).mT).softmax(-1)
    return kd_of(sq @ sk.mT, p.view(B, 2, 3, N, M).mean(1))


def sum_over_outer_heads(sq, sk, tq, tk):
    p = (tq @ tk.mT).softmax(-1).view(B, 2, 3, N, M).sum(1) / 2
    return -(p * (sq @ sk.mT).log_softmax(-1)).sum(-1).mean()


def kept_mean(sq, sk, tq, tk):
    return kd_of(sq @ sk.mT, (tq @ tk.mT).softmax(-1).mean(1, keepdim=True))


def different_groups(sq, sk, tq, tk):
    return kd(sq @ repeated(sk, 2).mT, tq @ repeated(tk, 4).mT)


def groups_and_one_key_head(sq, sk, tq, tk):
    return kd(sq @ repeated(sk, 2).mT, tq @ tk.mT)


def groups_beside_the_queries(sq, sk, tq, tk):
    s, t = (sq @ repeated(sk, 2).mT).transpose(1, 2), (tq @ tk.mT).transpose(1, 2)
    return kd(s, t)


def masked_groups(sq, sk, tq, tk):
    mask = (torch.arange(8 * N * M).view(1, 8, N, M) % 5) == 3
    return kd(
        (sq @ repeated(sk, 2).mT).masked_fill(mask, -1e9), (tq @ tk.mT).masked_fill(mask, -1e9)
    )


def teacher_batch_is_broadcast(sq, sk, tq, tk):
    s, t = sq @ sk.mT, tq @ tk.mT
    p = t.softmax(-1)
    return ((p * t.log_softmax(-1)).sum(-1) - (p * s.log_softmax(-1)).sum(-1)).sum(0)


def sums_over_a_broadcast_batch(sq, sk, tq, tk):
    s, t, u = sq @ sk.mT, tq @ tk.mT, (tq * 1.5) @ tk.mT
    p, q = t.softmax(-1), s.softmax(-1)
    both = p * (t.log_softmax(-1) - u.log_softmax(-1)) + q * (
        s.log_softmax(-1) - t.log_softmax(-1)
    )
    return both.sum((0, -1))


def ones_that_enlarge(sq, sk, tq, tk):
    s, t = sq @ sk.mT, tq @ tk.mT
    p = t.softmax(-1) * torch.ones(3, 1, 1, 1)
    return (p * (t.log_softmax(-1) - s.log_softmax(-1))).sum((0, -1))


def weights_that_enlarge(sq, sk, tq, tk):
    s, t = sq @ sk.mT, tq @ tk.mT
    w = torch.linspace(1, 2, 3)[:, None, None, None]
    el = t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))
    return (w * el + el).mean((0, -1))


def a_bias_that_enlarges(sq, sk, tq, tk):
    bias = torch.linspace(-1, 1, 3)[:, None, None, None]
    return kd(sq @ sk.mT + bias, tq @ tk.mT)


def a_scale_that_enlarges(sq, sk, tq, tk):
    return kd((sq @ sk.mT) * torch.linspace(1, 2, 3)[:, None, None, None], tq @ tk.mT)


def log_sum_exp_without_its_axis(sq, sk, tq, tk):
    s, t = sq @ sk.mT, tq @ tk.mT
    p = t.softmax(-1)
    return (p * t.log_softmax(-1)).sum(-1) - (p * s).sum(-1) + s.logsumexp(-1)


def divided_by_equal_sizes(sq, sk, tq, tk):
    s, t = sq @ sk.mT, tq @ tk.mT
    p = t.softmax(-1)
    cross = (p * s.log_softmax(-1)).sum((-1, -2)) / tq.size(2)
    return (p * t.log_softmax(-1)).sum((-1, -2)) / sq.size(2) - cross


def keys_in_blocks(sq, sk, tq, tk):
    return kd(sq @ sk.unflatten(2, (-1, 1)).flatten(2, 3).mT, tq @ tk.mT)


def head_dim_in_parts(sq, sk, tq, tk):
    q, k = (x.unflatten(-1, (2, 2)).transpose(-1, -2).flatten(-2) for x in (sq, sk))
    return kd(q @ k.mT, tq @ tk.mT)


def expanded_head_dim(sq, sk, tq, tk):
    q, k = (x[..., :1].expand(-1, -1, -1, 8) for x in (sq, sk))
    return kd(q @ k.mT, tq @ tk.mT)


def attention_with_other_groups(sq, sk, tq, tk):
    p = (sq @ repeated(sk, 2).mT).softmax(-1)
    v = torch.sin(tk[:, :1]).expand(-1, 8, -1, -1)
    return kd_of(tq @ tk.mT, p), p @ v


def an_index_mask_that_enlarges(sq, sk, tq, tk):
    keep = torch.arange(M) >= torch.arange(N)[:, None]
    s, t = (torch.where(keep, x, -1e9) for x in (sq[:, :, :1] @ sk.mT, tq[:, :, :1] @ tk.mT))
    return kd(s, t)


FUSES: list[tuple[Callable[..., Any], list[Tensor]]] = [
    (an_index_mask_that_enlarges, operands()),
    (teacher_heads_transposed, operands((B, 3, 2), (B, 6))),
    (mean_over_outer_heads_that_share_keys, operands((B, 3), (B, 6), teacher_keys=(B, 2))),
    (sum_over_outer_heads, operands((B, 3), (B, 6))),
    (kept_mean, operands((B, 2), (B, 4), teacher_keys=(B, 1))),
    (different_groups, operands((B, 8), (B, 8), student_keys=(B, 4), teacher_keys=(B, 2))),
    (groups_and_one_key_head, operands((B, 8), (B, 8), student_keys=(B, 4), teacher_keys=(B, 1))),
    (groups_beside_the_queries, operands((B, 4), (B, 4), student_keys=(B, 2))),
    (masked_groups, operands((B, 8), (B, 8), student_keys=(B, 4))),
    (teacher_batch_is_broadcast, operands((2, 2), (1, 2))),
    (sums_over_a_broadcast_batch, operands((2, 2), (1, 2))),
    (ones_that_enlarge, operands((1, 2), (1, 2))),
    (weights_that_enlarge, operands((1, 2), (1, 2))),
    (a_bias_that_enlarges, operands((1, 2), (3, 2))),
    (a_scale_that_enlarges, operands((1, 2), (3, 2))),
    (log_sum_exp_without_its_axis, operands()),
    (divided_by_equal_sizes, operands()),
    (keys_in_blocks, operands()),
    (head_dim_in_parts, operands()),
    (expanded_head_dim, operands()),
    (attention_with_other_groups, operands((B, 8), (B, 8), student_keys=(B, 4))),
]
# fixed numbers of heads are part of these programs, or what they do needs a known extent
STATIC = (
    "teacher_heads",
    "mean_over",
    "sum_over",
    "kept",
    "masked_groups",
    "expanded",
    "ones_",
    "weights_",
)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("program", "inputs"), every(2, FUSES), ids=lambda x: getattr(x, "__name__", "")
)
def test_fuses(program: Callable[..., Any], inputs: list[Tensor], dynamic: bool) -> None:
    sizes = [float(x.detach().norm(dim=-1).max()) for x in inputs[:4]]
    largest = max(sizes[0] * sizes[1], sizes[2] * sizes[3])  # a score is no larger
    # AOTAutograd sees the graphs whose sizes are numbers: with symbols it takes five times as long
    inner = "eager" if dynamic else "aot_eager"
    outcome = compare(program, inputs, inner=inner, dynamic=dynamic, largest_score=largest)
    outcome.check()
    if not dynamic or not program.__name__.startswith(STATIC):
        assert outcome.num_fused > 0, str(outcome.report)


# -------------------------------------------------------------------------- programs not fused
def groups_that_do_not_match(sq, sk, tq, tk):
    return kd(sq @ sk.mT, (tq @ repeated(tk, 3).mT).unflatten(1, (3, 2)))


def expectation_and_a_transposed_log_sum_exp(sq, sk, tq, tk):
    s, t = sq @ sk.mT, tq @ tk.mT
    p = t.softmax(-1)
    expected = (p * t.log_softmax(-1)).sum(-1) - (p * s).sum(-1)
    return expected + s.transpose(0, 1).logsumexp(-1)


def log_sum_exp_moved_by_broadcasting(sq, sk, tq, tk):
    s, t = sq @ sk.mT, tq @ tk.mT  # [2, 2, 2, 7]: one dimension fewer meets the next one
    log_q = s - s.logsumexp(-1)[..., None, None][:, :, 0]
    return (t.softmax(-1) * (t.log_softmax(-1) - log_q)).sum(-1)


def sum_of_transposed_exponentials(sq, sk, tq, tk):
    s, t = sq @ sk.mT, tq @ tk.mT
    e, moved = (s - s.amax(-1, True)).exp(), s.transpose(0, 1)
    total = (moved - moved.amax(-1, True)).exp().sum(-1, True)
    return (t.softmax(-1) * (t.log_softmax(-1) - (e / total).log())).sum(-1)


def row_maximum_of_transposed_scores(sq, sk, tq, tk):
    s, t = sq @ sk.mT, tq @ tk.mT
    e = (s - s.transpose(0, 1).amax(-1, True)).exp()
    return (t.softmax(-1) * (t.log_softmax(-1) - (e / e.sum(-1, True)).log())).sum(-1)


def one_label_is_broadcast_in_the_contraction(sq, sk, tq, tk):
    return kd(torch.einsum("bhnd,bhmd->bhnm", sq[..., :1], sk), tq @ tk.mT)


def a_mask_that_enlarges(sq, sk, tq, tk):
    mask = (torch.arange(3 * N * M).view(3, 1, N, M) % 5) == 3
    return kd((sq @ sk.mT).masked_fill(mask, -1e9), tq @ tk.mT)


def repeated_keys(sq, sk, tq, tk):
    p, q = ((x @ k.repeat_interleave(2, 2).mT).softmax(-1) for x, k in ((tq, tk), (sq, sk)))
    return (p * ((p + 0.01).log() - (q + 0.01).log())).sum(-1)


def rows_of_a_broadcast_teacher_by_a_mask(sq, sk, tq, tk):
    s, t = sq @ sk.mT, tq @ tk.mT
    el = t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))
    return el[torch.arange(2 * 2 * N).view(2, 2, N) % 3 > 0].sum(-1).mean()


def mask_in_other_places(sq, sk, tq, tk):
    mask = (torch.arange(B * 2 * N * M).view(B, 2, N, M) % 5) == 3
    t = (tq @ tk.mT).transpose(0, 1).masked_fill(mask, -1e9).transpose(0, 1)
    return kd((sq @ sk.mT).masked_fill(mask, -1e9), t)


LEFT_ALONE: list[tuple[Callable[..., Any], list[Tensor]]] = [
    (groups_that_do_not_match, operands((B, 3, 2), (B, 6), teacher_keys=(B, 2))),
    (sum_of_transposed_exponentials, operands()),
    (one_label_is_broadcast_in_the_contraction, operands()),
    (repeated_keys, operands()),
]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("program", "inputs"), LEFT_ALONE, ids=lambda x: getattr(x, "__name__", "")
)
def test_is_left_alone(program: Callable[..., Any], inputs: list[Tensor], dynamic: bool) -> None:
    outcome = compare(program, inputs, dynamic=dynamic).check()
    assert outcome.num_fused == 0, str(outcome.report)
    assert outcome.reasons and all(outcome.reasons), str(outcome.report)


# no divergence of the operators: row programs compute what is written
ROW_PROGRAMS: list[tuple[Callable[..., Any], list[Tensor]]] = [
    (a_mask_that_enlarges, operands((1, 2), (3, 2))),
    (mask_in_other_places, operands()),
]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("program", "inputs"), ROW_PROGRAMS, ids=lambda x: getattr(x, "__name__", "")
)
def test_is_a_row_program(
    program: Callable[..., Any], inputs: list[Tensor], dynamic: bool
) -> None:
    outcome = compare(program, inputs, dynamic=dynamic).check()
    assert outcome.kinds == {"row_program"}, str(outcome.report)
    assert all(refusals(program, inputs, dynamic=dynamic))


def no_heads(sq, sk, tq, tk):
    return kd(sq @ sk.mT, tq @ tk.mT)


def one_query_and_one_key(sq, sk, tq, tk):
    return kd(sq[:, :, :1] @ sk.mT, tq[:, :, :1] @ tk.mT), kd(sq @ sk[:, :, :1].mT, tq @ tk.mT)


def heads_of_lm_heads(hs, ws, ht, wt):
    """The teacher's tokens in another order, and both in rows of one dimension."""
    s, t = hs.flatten(0, 1) @ ws.T, (ht @ wt.T).transpose(0, 1).flatten(0, 1)
    return kd(s, t) + kd(F.linear(hs, ws), F.linear(ht, wt).transpose(0, 1))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("program", "inputs"),
    [
        (row_maximum_of_transposed_scores, [x.detach() for x in operands()]),
        (rows_of_a_broadcast_teacher_by_a_mask, operands((2, 2), (1, 2))),
        (log_sum_exp_moved_by_broadcasting, operands()),
        (expectation_and_a_transposed_log_sum_exp, operands()),
        (no_heads, operands((B, 0), (B, 0))),
        (one_query_and_one_key, operands((B, 1), (1, 1))),
        (heads_of_lm_heads, [normal(2, 3, D), normal(9, D), normal(3, 2, D), normal(9, D)]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_keeps_its_value(program: Callable[..., Any], inputs: list[Tensor], dynamic: bool) -> None:
    """A part of these may fuse: the sum of both parts may not."""
    compare(program, inputs, dynamic=dynamic).check()


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
    def num_heads(self) -> int:
        return math.prod(self.digits) * self.extra

    def inputs(self, num_queries: int, num_keys: int) -> list[Tensor]:
        q = normal(self.batch, self.num_heads, num_queries, D)
        return [q, normal(self.batch, self.key_heads, num_keys, D)]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
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


def rows_of(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    return (p * (log_p - log_q)).sum(-1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "batchmean": lambda p, s: kd_of(s, p),
    "rows": lambda p, s: rows_of(p, (p + 0.1).log(), s.log_softmax(-1)),
    "cross entropy": lambda p, s: -(p * s.log_softmax(-1)).mean((0, -1)),
    "reverse": lambda p, s: rows_of(s.softmax(-1), s.log_softmax(-1), (p + 0.1).log()).sum(1),
    "two sums": lambda p, s: (
        (p * (p + 0.1).log()).sum((0, -1)) - (p * s.log_softmax(-1)).sum((0, -1))
    ),
}
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "as they are": lambda x: x,
    "queries first": lambda x: x.transpose(1, -2),
    "batch last": lambda x: x.movedim(0, -2),
}


def random_program(data: st.DataObject) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Heads split, permuted, shared, averaged and broadcast at random on each side."""
    digits = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=2)))
    student = data.draw(heads(digits, averaged=False))
    teacher = data.draw(heads(digits, averaged=True))
    kept_mean = data.draw(st.booleans()) and teacher.extra == 1
    loss = LOSSES[data.draw(st.sampled_from(sorted(LOSSES)))]
    move = MOVES[data.draw(st.sampled_from(sorted(MOVES)))]
    num_queries, num_keys = data.draw(st.sampled_from([(5, 7), (5, 5), (2, 2), (1, 4)]))

    def program(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor) -> Tensor:
        s, t = student.scores(sq, sk)[:, 0], teacher.scores(tq, tk)
        p = t.softmax(-1).mean(1) if teacher.extra > 1 else t[:, 0].softmax(-1)
        return loss(move(p.mean(1, keepdim=True) if kept_mean else p), move(s))

    torch.manual_seed(0)
    inputs = [*student.inputs(num_queries, num_keys), *teacher.inputs(num_queries, num_keys)]
    return program, inputs


@pytest.mark.parametrize(
    ("dynamic", "num_programs"),
    [
        (False, 8),
        pytest.param(False, 16, marks=pytest.mark.slow),
        # with symbolic sizes a program takes five times as long to compile
        pytest.param(True, 4, marks=pytest.mark.slow),
    ],
)
def test_random_heads(dynamic: bool, num_programs: int) -> None:
    fused: list[bool] = []

    @settings(max_examples=num_programs, database=None)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        program, inputs = random_program(data)
        fused.append(compare(program, inputs, dynamic=dynamic).check().num_fused > 0)

    run()
    # what is compared is the fused program, not eager with eager
    assert dynamic or sum(fused) > len(fused) // 4, f"{sum(fused)} of {len(fused)}"


SELECTED = {
    "batch and row": lambda x, b, n: x[b, 1, n],
    "rows of one batch": lambda x, b, n: x[1, n % 3, b],
    "in two steps": lambda x, b, n: x[:, 1][b, n],
}


@pytest.mark.parametrize("name", SELECTED)
@pytest.mark.parametrize("shape", [(3,), (2, 1)])
def test_positions_around_one_that_is_known(name: str, shape: tuple[int, ...]) -> None:
    """Indexing moves dimensions to the front, after which the known one has another place."""
    b = torch.tensor([0, 1, 1])[: shape[0]].view(shape)
    n = torch.tensor([[4, 2, 2]] if len(shape) > 1 else [4, 2, 2])
    select = SELECTED[name]

    def loss(q: Tensor, k: Tensor, tq: Tensor, tk: Tensor, b: Tensor, n: Tensor) -> Tensor:
        s, t = select(q @ k.mT, b, n), select(tq @ tk.mT, b, n)
        return (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1)

    given = [torch.randn(2, 3, 5, 4, requires_grad=i < 2) for i in range(4)]
    options = {"streamkl.min_mib": 0, "streamkl.verify": "never"}
    outcome = compare(loss, [*given, b, n], options=options).check()
    assert outcome.num_fused == 1, outcome.report


def test_heads_that_share_keys_after_heads_that_do_not() -> None:
    """The number of key heads varies then, and a guard says that it divides the others."""

    def loss(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor) -> Tensor:
        s, t = (
            q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
            for q, k in ((sq, sk), (tq, tk))
        )
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")

    torch._dynamo.reset()
    compiled = torch.compile(
        loss, backend="streamkl", options={"streamkl.inner": "eager", "streamkl.min_mib": 0}
    )
    for heads in (8, 4, 2):
        shapes = [(2, h, 5, 4) for h in (8, heads, 8, heads)]
        inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
        with torch_streamkl.reports() as report:
            got = compiled(*inputs)
        assert report.num_fused == len(report.sites), str(report)
        want = loss(*inputs)
        torch.testing.assert_close(got, want)
        for a, b in zip(*(torch.autograd.grad(x, inputs) for x in (got, want)), strict=True):
            torch.testing.assert_close(a, b)
