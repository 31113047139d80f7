"""Naive divergence programs put together from independent choices, as people write them.

A `Program` is one choice per dimension: how scores are made, scaled and masked, how the divergence
is spelled and reduced, what gets gradient. The tests of forms vary one dimension at a time, the
fuzzer all. Attention programs take (sq, sk, tq, tk, pad); sizes of student and teacher differ
where they may.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, HEADS, QUERIES, STUDENT_DIM, TEACHER_DIM = 2, 4, 10, 8, 12
Score = Callable[[Tensor, Tensor], Tensor]


def _bmm(q, k):
    b, h, n, d = q.shape
    return torch.bmm(q.reshape(b * h, n, d), k.reshape(b * h, -1, d).transpose(1, 2)).view(
        b, h, n, -1
    )


def _baddbmm(q, k):
    b, h, n, d = q.shape
    keys = k.reshape(b * h, -1, d).transpose(1, 2)
    start = torch.empty(b * h, n, keys.shape[-1], dtype=q.dtype, device=q.device)
    return torch.baddbmm(start, q.reshape(b * h, n, d), keys, beta=0.0, alpha=1.0).view(
        b, h, n, -1
    )


def _grouped(q, k):
    """Every second key head, repeated as HF's repeat_kv does."""
    k = k[:, ::2]
    b, h, n, d = k.shape
    k = k[:, :, None].expand(b, h, 2, n, d).reshape(b, h * 2, n, d)
    return q @ k.transpose(-1, -2)


def _from_bshd(q, k):
    """Projections [batch, seq, heads * dim] split into heads."""
    b, h, _, d = q.shape
    flat = [x.transpose(1, 2).reshape(b, -1, h * d) for x in (q, k)]
    q, k = (x.view(b, -1, h, d).permute(0, 2, 1, 3) for x in flat)
    return torch.matmul(q, k.transpose(-1, -2))


PRODUCERS = {
    "matmul": lambda q, k: torch.matmul(q, k.transpose(-1, -2)),
    "at": lambda q, k: q @ k.transpose(2, 3),
    "mT": lambda q, k: q @ k.mT,
    "permute": lambda q, k: torch.matmul(q, k.permute(0, 1, 3, 2)),
    "einsum": lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k),
    "einsum_dots": lambda q, k: torch.einsum("...qd,...kd->...qk", q, k),
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "upcast": lambda q, k: q.float() @ k.float().transpose(-1, -2),
    "contiguous": lambda q, k: q @ k.transpose(-1, -2).contiguous(),
    "grouped": _grouped,
    "repeat_interleave": lambda q, k: (
        q @ k[:, :1].repeat_interleave(HEADS, dim=1).transpose(-1, -2)
    ),
    "broadcast_key": lambda q, k: q @ k[:, :1].transpose(-1, -2),
    "bshd": _from_bshd,
    "keys_first": lambda q, k: (k @ q.transpose(-1, -2)).transpose(-1, -2),
}

SCALES = {
    # on q before the product, on the scores after it
    "none": (lambda q: q, lambda s: s),
    "after_mul": (lambda q: q, lambda s: s * STUDENT_DIM**-0.5),
    "after_div": (lambda q: q, lambda s: s / math.sqrt(STUDENT_DIM)),
    "before": (lambda q: q * STUDENT_DIM**-0.5, lambda s: s),
    "split": (lambda q: q / STUDENT_DIM**0.25, lambda s: s / STUDENT_DIM**0.25),
    "tensor": (
        lambda q: q,
        lambda s: s / torch.sqrt(torch.tensor(float(STUDENT_DIM), dtype=s.dtype)),
    ),
    "temperature": (lambda q: q * STUDENT_DIM**-0.5, lambda s: s / 2.0),
    "softcap": (lambda q: q, lambda s: 3.0 * torch.tanh(s * 0.3 / 3.0)),
}


def _causal(s):
    return torch.ones(s.shape[-2], s.shape[-1], dtype=torch.bool, device=s.device).tril()


def _causal_by_index(s):
    n, m = s.shape[-2:]
    return torch.arange(m, device=s.device)[None, :] <= torch.arange(n, device=s.device)[:, None]


def _band(s, width=3):
    n = s.shape[-1]
    i, j = torch.arange(n, device=s.device)[:, None], torch.arange(n, device=s.device)[None, :]
    return (j <= i) & (i - j < width)


def _low(s):
    return torch.finfo(s.dtype).min


MASKS = {
    "none": lambda s, pad: s,
    "tril_min": lambda s, pad: s.masked_fill(~_causal(s), _low(s)),
    "tril_inf": lambda s, pad: s.masked_fill(~_causal(s), float("-inf")),
    "tril_eq_0": lambda s, pad: s.masked_fill(torch.tril(torch.ones(s.shape[-2:])) == 0, -1e9),
    "triu_bool": lambda s, pad: s.masked_fill(
        torch.ones_like(s, dtype=torch.bool).triu(1), _low(s)
    ),
    "arange_where": lambda s, pad: torch.where(_causal_by_index(s), s, _low(s)),
    "additive_causal": lambda s, pad: s + torch.full(s.shape[-2:], _low(s), dtype=s.dtype).triu(1),
    "additive_causal_inf": lambda s, pad: (
        s + torch.full(s.shape[-2:], float("-inf"), dtype=s.dtype).triu(1)
    ),
    "band": lambda s, pad: s.masked_fill(~_band(s), _low(s)),
    "pad_bool": lambda s, pad: s.masked_fill(~pad[:, None, None, :], _low(s)),
    "pad_where": lambda s, pad: torch.where(pad[:, None, None, :], s, float("-inf")),
    "pad_1e4": lambda s, pad: s + (1.0 - pad[:, None, None, :].to(s.dtype)) * -10000.0,
    "pad_min_additive": lambda s, pad: s + (~pad).to(s.dtype)[:, None, None, :] * _low(s),
    "causal_and_pad": lambda s, pad: s.masked_fill(~(_causal(s) & pad[:, None, None, :]), _low(s)),
    "causal_then_pad": lambda s, pad: s.masked_fill(~_causal(s), _low(s)).masked_fill(
        ~pad[:, None, None, :], _low(s)
    ),
    "in_place": lambda s, pad: s.masked_fill_(~_causal(s), _low(s)),
}

# log-probabilities, and probabilities, of scores
LOGS = {
    "log_softmax": lambda s: F.log_softmax(s, dim=-1),
    "log_softmax_fp32": lambda s: F.log_softmax(s, dim=-1, dtype=torch.float32),
    "softmax_log": lambda s: s.softmax(-1).log(),
    "minus_lse": lambda s: s - torch.logsumexp(s, dim=-1, keepdim=True),
    "module": lambda s: nn.LogSoftmax(dim=-1)(s),
}
PROBABILITIES = {
    "softmax": lambda s: F.softmax(s, dim=-1),
    "method": lambda s: s.softmax(dim=-1),
    "exp_log_softmax": lambda s: s.log_softmax(-1).exp(),
    "by_hand": lambda s: (e := torch.exp(s - s.amax(-1, keepdim=True))) / e.sum(-1, keepdim=True),
    "softmax_fp32": lambda s: torch.softmax(s, -1, dtype=torch.float32).to(s.dtype),
}


def _js(a, b, beta=0.5):
    la, lb = a.log_softmax(-1), b.log_softmax(-1)
    m = torch.logaddexp(la + math.log(beta), lb + math.log(1 - beta))
    return beta * (lb.exp() * (lb - m)) + (1 - beta) * (la.exp() * (la - m))


def _guarded(s, t, change):
    ps, pt = change(s.softmax(-1)), change(t.softmax(-1))
    return pt * (pt.log() - ps.log())


# one value per key, from the scores of student and teacher
SPELLINGS = {
    "kl_div": lambda s, t: F.kl_div(F.log_softmax(s, -1), F.softmax(t, -1), reduction="none"),
    "kl_div_log_target": lambda s, t: F.kl_div(
        F.log_softmax(s, -1), F.log_softmax(t, -1), reduction="none", log_target=True
    ),
    "KLDivLoss": lambda s, t: nn.KLDivLoss(reduction="none")(s.log_softmax(-1), t.softmax(-1)),
    "log_ratio": lambda s, t: t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1)),
    "exp_of_log": lambda s, t: (lt := t.log_softmax(-1)).exp() * (lt - s.log_softmax(-1)),
    "softmax_log": lambda s, t: (p := t.softmax(-1)) * (p.log() - s.softmax(-1).log()),
    "minus_lse": lambda s, t: (lt := LOGS["minus_lse"](t)).exp() * (lt - LOGS["minus_lse"](s)),
    "by_hand": lambda s, t: PROBABILITIES["by_hand"](t) * (t.log_softmax(-1) - s.log_softmax(-1)),
    "two_products": lambda s, t: (
        t.softmax(-1) * t.log_softmax(-1) - t.softmax(-1) * s.log_softmax(-1)
    ),
    "xlogy": lambda s, t: torch.xlogy(p := t.softmax(-1), p) - p * s.log_softmax(-1),
    "division": lambda s, t: (p := t.softmax(-1)) * torch.log(p / s.softmax(-1)),
    "clamp_student": lambda s, t: F.kl_div(
        s.softmax(-1).clamp(min=1e-4).log(), t.softmax(-1), reduction="none"
    ),
    "clamp_both": lambda s, t: _guarded(s, t, lambda p: p.clamp_min(1e-4)),
    "eps_student": lambda s, t: F.kl_div(
        torch.log(s.softmax(-1) + 1e-4), t.softmax(-1), reduction="none"
    ),
    "eps_both": lambda s, t: _guarded(s, t, lambda p: p + 1e-4),
    "where_positive": lambda s, t: torch.where(
        (p := t.softmax(-1)) > 0, p * (t.log_softmax(-1) - s.log_softmax(-1)), torch.zeros_like(p)
    ),
    "isinf_fill": lambda s, t: (
        t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))
    ).masked_fill(s.isinf(), 0),
    "cross_entropy": lambda s, t: -(t.softmax(-1) * s.log_softmax(-1)),
    "fp32_then_back": lambda s, t: F.kl_div(
        F.log_softmax(s.float(), -1), F.softmax(t.float(), -1), reduction="none"
    ).to(s.dtype),
    "reverse": lambda s, t: s.softmax(-1) * (s.log_softmax(-1) - t.log_softmax(-1)),
    "swapped": lambda s, t: F.kl_div(F.log_softmax(t, -1), F.softmax(s, -1), reduction="none"),
    "symmetric": lambda s, t: (
        (s.softmax(-1) - t.softmax(-1)) * (s.log_softmax(-1) - t.log_softmax(-1))
    ),
    "js": _js,
    "js_mixture": lambda s, t: (
        0.5 * (p := t.softmax(-1)) * (p.log() - (m := (0.5 * (p + s.softmax(-1))).log()))
        + 0.5 * (q := s.softmax(-1)) * (q.log() - m)
    ),
    "skewed": lambda s, t: (
        (p := t.softmax(-1)) * (p.log() - (0.9 * s.softmax(-1) + 0.1 * p).log())
    ),
    "total_variation": lambda s, t: 0.5 * (t.softmax(-1) - s.softmax(-1)).abs(),
}

REDUCTIONS = {
    "sum": lambda x, pad: x.sum(),
    "mean": lambda x, pad: x.mean(),
    "rows": lambda x, pad: x.sum(-1),
    "row_mean": lambda x, pad: x.sum(dim=-1).mean(),
    "keepdim": lambda x, pad: x.sum(-1, keepdim=True).squeeze(-1).mean(),
    "mean_of_keys": lambda x, pad: x.mean(-1).sum(),
    "batchmean": lambda x, pad: x.sum() / x.size(0),
    "step_by_step": lambda x, pad: x.sum(-1).sum(-1).mean(1).mean(0),
    "last_two": lambda x, pad: x.sum(dim=(-2, -1)).mean(),
    "masked_mean": lambda x, pad: (
        (x.sum(-1) * (m := pad[:, None].to(x.dtype))).sum() / (m.sum() * x.shape[1])
    ),
    "masked_before": lambda x, pad: (x * (m := pad[:, None, :, None].to(x.dtype))).sum() / m.sum(),
    "where_rows": lambda x, pad: torch.where(pad[:, None], x.sum(-1), 0.0).sum() / pad.sum(),
    "index_rows": lambda x, pad: x.sum(-1).transpose(1, 2)[pad].mean(),
    "weighted": lambda x, pad: (
        (x.sum(-1) * torch.linspace(0, 1, x.shape[-2], dtype=x.dtype)).sum(-1).mean()
    ),
}
# what F.kl_div reduces itself
CALLS = {
    f"{name}_{reduction}": (
        lambda s, t, reduction=reduction, log=log: F.kl_div(
            s.log_softmax(-1),
            t.log_softmax(-1) if log else t.softmax(-1),
            reduction=reduction,
            log_target=log,
        )
    )
    for name, log in (("kl_div", False), ("log_target", True))
    for reduction in ("sum", "mean", "batchmean")
}
CALLS["KLDivLoss_batchmean"] = lambda s, t: nn.KLDivLoss(reduction="batchmean")(
    s.log_softmax(-1), t.softmax(-1)
)
CALLS["KLDivLoss_flat"] = lambda s, t: nn.KLDivLoss(reduction="batchmean")(
    s.log_softmax(-1).view(-1, s.shape[-1]), t.softmax(-1).reshape(-1, t.shape[-1])
)
CALLS["CrossEntropyLoss"] = lambda s, t: nn.CrossEntropyLoss()(
    s.reshape(-1, s.shape[-1]), t.softmax(-1).reshape(-1, t.shape[-1])
)

GRADIENTS = ("student", "both", "no_grad_teacher", "detached_teacher", "student_q")


@dataclass(frozen=True)
class Program:
    """One choice per dimension; calling it computes the loss from inputs made by ``inputs``."""

    producer: str = "matmul"
    scale: str = "after_mul"
    mask: str = "none"
    spelling: str = "kl_div"
    reduction: str = "row_mean"
    call: str = ""  # a reducing call in place of spelling and reduction
    gradient: str = "student"
    uses_values: bool = False  # the student's probabilities also make the attention output
    teacher_producer: str = ""

    def inputs(self, seed=0, dtype=torch.float32, num_queries=QUERIES):
        make = torch.Generator().manual_seed(seed)

        def normal(dim, grad):
            x = torch.randn(BATCH, HEADS, num_queries, dim, generator=make, dtype=torch.float64)
            return x.to(dtype).requires_grad_(grad)

        teacher = self.gradient != "student" and self.gradient != "student_q"
        lengths = torch.tensor([num_queries, max(1, num_queries // 2)])
        pad = torch.arange(num_queries)[None, :] < lengths[:, None]
        return [
            normal(STUDENT_DIM, True),
            normal(STUDENT_DIM, self.gradient != "student_q"),
            normal(TEACHER_DIM, teacher),
            normal(TEACHER_DIM, teacher),
            pad,
        ]

    def scores(self, q, k, pad, producer):
        before, after = SCALES[self.scale]
        return MASKS[self.mask](after(PRODUCERS[producer](before(q), k)), pad)

    def __call__(self, sq, sk, tq, tk, pad):
        s = self.scores(sq, sk, pad, self.producer)
        producer = self.teacher_producer or self.producer
        if self.gradient == "no_grad_teacher":
            with torch.no_grad():
                t = self.scores(tq, tk, pad, producer)
        else:
            t = self.scores(tq, tk, pad, producer)
        t = t.detach() if self.gradient == "detached_teacher" else t
        if self.call:
            loss = CALLS[self.call](s, t)
        else:
            loss = REDUCTIONS[self.reduction](SPELLINGS[self.spelling](s, t), pad)
        if self.uses_values:
            return loss, s.softmax(-1).to(sk.dtype) @ sk
        return loss
