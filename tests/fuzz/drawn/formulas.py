"""What `attention_kl` and `linear_kl` say that they compute, in plain torch of any precision.

Written from the docstrings: nothing is shared with the package, reference.py included.

Three conventions of theirs matter where numbers are extreme. A probability that float32 cannot
hold is 0. A product with a probability of 0 is 0, whatever the other factor. A row whose value is
infinite has no gradient that a test could compare: callers give it the weight 0, as they do where
rounding decides what a row is (`Undecided`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

INF = math.inf
# Logarithms below which a probability is 0, and around which implementations may differ: the
# smallest normal and the smallest denormal number lie in between.
VANISHES = {torch.float32: (-106.0, -95.0, -85.0), torch.float64: (-750.0, -720.0, -700.0)}


class AmbiguousError(Exception):
    """Rounding decides what the result is."""


class Undecided:
    """Of the rows since `clear`: which of them rounding decides; and their largest log-sum-exp.

    ``gradient``: on which side of a clamp, or of P = S in TV, a probability is. ``value``: whether
    a key that the other side excludes has a probability of 0 or the row is infinite. A part of a
    row, as a shard of a vocabulary, knows a probability relative to its own keys only: the product
    of two factors may vanish where neither does.
    """

    gradient: list[Tensor]
    value: list[Tensor]
    # an exponent is off by the rounding of its score
    largest_lse = 0.0

    @classmethod
    def clear(cls) -> None:
        cls.gradient, cls.value, cls.largest_lse = [], [], 0.0


Undecided.clear()


class Rows:
    """Divergences of rows of scores: teacher's and student's log-probabilities over keys."""

    def __init__(self, options: dict[str, Any], compute: torch.dtype) -> None:
        self.options = options
        self.compute = compute  # the precision of the implementation that is judged

    def probability(self, log_p: Tensor) -> Tensor:
        vanishes = log_p < VANISHES[self.compute][1]
        return log_p.masked_fill(vanishes, 0.0).exp().masked_fill(vanishes, 0.0)

    def value(self, log_t: Tensor, log_s: Tensor, counted: Tensor) -> Tensor:
        """Of rows of log-probabilities, over the keys that count."""
        with torch.no_grad():
            Undecided.gradient.append(self._at_a_kink(log_t, log_s, counted))
            Undecided.value.append(self._may_vanish(log_t, log_s, counted))
        with torch.no_grad():
            total = self._sum(log_t, log_s, counted)
        lost = total.isinf()
        # in a row that is lost nothing may reach autograd
        log_t, log_s = (x.masked_fill(lost.unsqueeze(-1), -1.0) for x in (log_t, log_s))
        return torch.where(lost, total, self._sum(log_t, log_s, counted))

    def _may_vanish(self, log_t: Tensor, log_s: Tensor, counted: Tensor) -> Tensor:
        low, _, high = VANISHES[self.compute]
        undecided = torch.zeros_like(counted)
        for a, b in ((log_t, log_s), (log_s, log_t)):
            undecided |= (a > 2 * low) & (a < high) & (b == -INF)
        return (undecided & counted).any(-1)

    def _at_a_kink(self, log_t: Tensor, log_s: Tensor, counted: Tensor) -> Tensor:
        p, s = self.probability(log_t), self.probability(log_s)
        near = torch.zeros_like(counted)
        for x, side in ((p, "teacher"), (s, "student")):
            clamp = self.options.get(f"{side}_clamp", 0.0)
            if clamp > 0.0:
                lifted = x + self.options.get(f"{side}_eps", 0.0)
                near |= ((lifted - clamp).abs() < 1e-4 * clamp) & (x > 1e-6)
        if self.options.get("divergence") == "tv":
            rounding = 8 * torch.finfo(self.compute).eps * (16 + Undecided.largest_lse)
            larger = torch.maximum(p, s)
            near |= ((p - s).abs() < rounding * larger) & (larger > 1e-6)
        return (near & counted).any(-1)

    def _sum(self, log_t: Tensor, log_s: Tensor, counted: Tensor) -> Tensor:
        terms = self._terms(log_t.masked_fill(~counted, -1.0), log_s.masked_fill(~counted, -1.0))
        return terms.masked_fill(~counted, 0.0).sum(-1)

    def _terms(self, log_t: Tensor, log_s: Tensor) -> Tensor:
        o = self.options
        p, s = self.probability(log_t), self.probability(log_s)
        log_p = guarded(p, log_t, o.get("teacher_eps", 0.0), o.get("teacher_clamp", 0.0))
        log_q = guarded(s, log_s, o.get("student_eps", 0.0), o.get("student_clamp", 0.0))
        kind, beta = o.get("divergence", "forward_kl"), o.get("beta", 0.5)
        if kind == "js" and beta in (0.0, 1.0):
            kind = "forward_kl" if beta == 0.0 else "reverse_kl"
        if kind == "forward_kl":
            return times(p, log_p, log_q)
        if kind == "reverse_kl":
            return times(s, log_q, log_p)
        if kind == "jeffreys":
            return times(p, log_p, log_q) + times(s, log_q, log_p)
        if kind == "cross_entropy":
            return times(p, torch.zeros_like(log_q), log_q)
        if kind == "tv":
            return 0.5 * (p - s).abs()
        neither = (log_p == -INF) & (log_q == -INF)
        a, b = (x.masked_fill(neither, 0.0) for x in (log_p, log_q))
        log_m = torch.logaddexp(a + math.log(beta), b + math.log1p(-beta))
        log_m = log_m.masked_fill(neither, -INF)
        return beta * times(p, log_p, log_m) + (1 - beta) * times(s, log_q, log_m)


def guarded(p: Tensor, log_p: Tensor, eps: float, clamp: float) -> Tensor:
    """log(max(p + eps, clamp))"""
    if eps == 0.0 and clamp == 0.0:
        return log_p
    lifted = p + eps
    if clamp > 0.0:
        lifted = lifted.clamp(min=clamp)
    absent = lifted == 0.0
    return lifted.masked_fill(absent, 1.0).log().masked_fill(absent, -INF)


def times(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """weight (a - b), 0 where the weight is."""
    a, b = (x.masked_fill(weight == 0, 0.0) for x in (a, b))
    return weight * (a - b)


def log_softmax(scores: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Over the last dimension, -inf where a score is; and the log-sum-exp.

    The maximum is subtracted first, as torch does: what a large log-sum-exp is rounded by would be
    in every probability. A score of +inf makes its row NaN.
    """
    alone = scores if sink is None else torch.cat((scores, sink), dim=-1)
    nothing = (alone == -INF).all(-1, keepdim=True)
    alone = alone.masked_fill(nothing, 0.0)
    high = alone.detach().amax(-1, keepdim=True) if alone.shape[-1] else alone.new_zeros(())
    log_sum = (alone - high).exp().sum(-1, keepdim=True).log()
    lse = high + log_sum
    if scores.numel():
        Undecided.largest_lse = max(Undecided.largest_lse, float(lse.detach().abs().max()))
    absent = scores == -INF
    log_p = ((scores.masked_fill(absent, 0.0) - high) - log_sum).masked_fill(absent, -INF)
    return log_p.masked_fill(lse.isnan(), math.nan), lse


# ------------------------------------------------------------------------------- attention_kl
def attention_rows(
    tensors: dict[str, Tensor],
    options: dict[str, Any],
    compute: torch.dtype,
    naive: bool = False,
) -> Tensor:
    """[batch, num_heads, seqlen_q] of tensors in one precision, in the layout of ``options``."""
    is_rounded_again = naive and compute == torch.float64
    options = {**options, "is_rounded_again": is_rounded_again, "is_naive": naive}
    named = dict(tensors)
    layout = options.get("layout", "bhnd")
    for side in ("student", "teacher"):
        scale = named.get(f"{side}_scale")
        if scale is not None:  # q * scale in q's dtype takes the place of q
            q = named[f"{side}_q"] * scale
            rounded = q.detach().to(options["dtype"]).to(q.dtype)
            q = q + (rounded - q.detach())
            named[f"{side}_q"] = GradientRounded.apply(q, options["dtype"]) if naive else q
    if options.get("cu_seqlens_q") is not None:
        return _packed(named, options, compute)
    if layout == "bnhd":
        for name in ("student_q", "student_k", "teacher_q", "teacher_k"):
            named[name] = named[name].transpose(1, 2)
    return _dense(named, options, compute)


def _packed(named: dict[str, Tensor], options: dict[str, Any], compute: torch.dtype) -> Tensor:
    ends_q, ends_k = (options[f"cu_seqlens_{x}"].tolist() for x in "qk")
    pieces = []
    for i in range(len(ends_q) - 1):
        ranges = {"q": slice(ends_q[i], ends_q[i + 1]), "k": slice(ends_k[i], ends_k[i + 1])}
        one = {
            name: x[ranges[name[-1]]].transpose(0, 1)[None] if name[-2:] in ("_q", "_k") else x
            for name, x in named.items()
        }
        pieces.append(_dense(one, options, compute))
    return torch.cat(pieces, dim=2)


def allowed_keys(n: int, m: int, options: dict[str, Any], batch: int) -> Tensor:
    """[batch, 1 or num_heads, n, m]"""
    position = torch.arange(n).view(n, 1) + (m - n)
    key = torch.arange(m).view(1, m)
    allowed = torch.ones(batch, 1, n, m, dtype=torch.bool)
    if options.get("is_causal"):
        allowed = allowed & (key <= position)
    left, right = options.get("window") or (None, None)
    if left is not None:
        allowed = allowed & (key >= position - left)
    if right is not None:
        allowed = allowed & (key <= position + right)
    if options.get("key_lengths") is not None:
        allowed = allowed & (key < options["key_lengths"].view(batch, 1, 1, 1))
    mask = options.get("attn_mask")
    return allowed & mask if mask is not None and mask.dtype == torch.bool else allowed


def _dense(named: dict[str, Tensor], options: dict[str, Any], compute: torch.dtype) -> Tensor:
    q = named["student_q"]
    batch, heads, n, _ = q.shape
    allowed = allowed_keys(n, named["student_k"].shape[2], options, batch)
    rows = Rows(options, compute)
    log_s, _ = _log_p("student", named, options, allowed)
    log_t, _ = _log_p("teacher", named, options, allowed)
    if options.get("head_reduction") == "mean":
        grouped = log_t.unflatten(1, (heads, -1))
        absent = (grouped == -INF).all(2)
        mean = grouped.masked_fill(absent.unsqueeze(2), 0.0).logsumexp(2)
        log_t = (mean - math.log(grouped.shape[2])).masked_fill(absent, -INF)
    return rows.value(log_t, log_s, allowed.expand(log_s.shape))


def _log_p(side: str, named: dict[str, Tensor], options: dict[str, Any], allowed: Tensor) -> Any:
    """Log-probabilities, and log-sum-exps [..., 1]."""
    scores, sink = _scores(side, named, options, allowed), named.get(f"{side}_sink")
    if sink is not None:
        sink = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    log_p, lse = log_softmax(scores, sink)
    known = options.get(f"{side}_lse") if options.get("is_naive") else None
    if known is not None:  # it is rounded, and with it all probabilities of its row
        rounding = (scores - known.to(scores.dtype).unsqueeze(-1) - log_p).detach()
        log_p = log_p + rounding.nan_to_num(0.0, 0.0, 0.0)
    return log_p, lse


def _scores(
    side: str, named: dict[str, Tensor], options: dict[str, Any], allowed: Tensor
) -> Tensor:
    q, k = named[f"{side}_q"], named[f"{side}_k"]
    heads, head_dim, n, m = q.shape[1], q.shape[3], q.shape[2], k.shape[2]
    keys = k.repeat_interleave(heads // k.shape[1], dim=1).mT
    scale = 1.0
    if f"{side}_scale" not in named:
        scale = options.get(f"{side}_scale")
        scale = head_dim**-0.5 if scale is None else scale
    scores = q @ keys * scale
    sizes = q.detach().abs() @ keys.detach().abs() * abs(scale)  # of what they are sums of
    softcap = options.get(f"{side}_softcap")
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = options.get("attn_mask")
    added = [
        bias.to(q.dtype)
        for bias in (options.get(f"{side}_bias"), mask)
        if bias is not None and bias.dtype != torch.bool
    ]
    slopes = options.get(f"{side}_alibi_slopes")
    if slopes is not None:
        distance = (torch.arange(n).view(n, 1) + (m - n) - torch.arange(m)).abs()
        added.append(-slopes.to(q.dtype).view(-1, 1, 1) * distance)
    for x in added:
        scores, sizes = scores + x, sizes + x.abs()
    temperature = options.get("temperature", 1.0)
    scores = _rounded_again(scores / temperature, sizes / temperature, head_dim, options)
    if allowed.shape[1] not in (1, heads):
        allowed = allowed.repeat_interleave(heads // allowed.shape[1], dim=1)
    return scores.masked_fill(~allowed, -INF)


OTHER_ROUNDINGS = 6  # of a score: scale, softcap (2), bias, temperature, unit of the logarithm


def _rounded_again(
    scores: Tensor, sizes: Tensor, num_products: int, options: dict[str, Any]
) -> Tensor:
    """Scores as naive code of another order of operations may round them.

    In float64 naive code is the formula itself, and is off by nothing: what an implementation may
    be off by is then that of the formula with scores that are off by what they may be. A score is
    a sum of products: each of them and each sum is off by half a unit of the sum of ``sizes``.
    """
    if not options.get("is_rounded_again"):
        return scores
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, scores.shape, generator=generator).to(scores.dtype) * 2 - 1
    unit = torch.finfo(scores.dtype).eps / 2 * (num_products + OTHER_ROUNDINGS)
    return scores + signs * unit * sizes.nan_to_num(0.0, 0.0, 0.0)


def teacher_lse(named: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """[batch, num_teacher_heads, seqlen_q] of tensors [batch, heads, rows, head_dim]."""
    q, k = named["teacher_q"], named["teacher_k"]
    allowed = allowed_keys(q.shape[2], k.shape[2], options, q.shape[0])
    lse: Tensor = _log_p("teacher", named, options, allowed)[1]
    return lse.squeeze(-1)


# ---------------------------------------------------------------------------------- linear_kl
def linear_rows(
    tensors: dict[str, Tensor],
    options: dict[str, Any],
    compute: torch.dtype,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Divergence and cross-entropy of every token; logits are rounded to ``logits_dtype``."""
    logs, capped = [], []
    for side in ("student", "teacher"):
        hidden, weight = tensors[f"{side}_hidden"], tensors[f"{side}_weight"]
        hidden = hidden.reshape(-1, hidden.shape[-1])
        if logits_dtype is None:
            z = hidden @ weight.T
            sizes = hidden.detach().abs() @ weight.detach().abs().T
        else:  # in the dtype of the inputs, as a model does
            z = (hidden.to(logits_dtype) @ weight.to(logits_dtype).T).to(hidden.dtype)
        bias = tensors.get(f"{side}_bias", z.new_zeros(()))
        z = z + bias
        if logits_dtype is not None:
            z = GradientRounded.apply(z, logits_dtype)
        else:
            z = _rounded_again(z, sizes + bias.detach().abs(), hidden.shape[1], options)
        y = z * options.get(f"{side}_logit_scale", 1.0)
        softcap = options.get(f"{side}_softcap")
        if softcap is not None:
            y = softcap * torch.tanh(y / softcap)
        capped.append(y)
        logs.append(log_softmax(y / options.get("temperature", 1.0))[0])
    size = max(x.shape[1] for x in logs)
    log_s, log_t = (
        torch.cat((x, x.new_full((x.shape[0], size - x.shape[1]), -INF)), dim=1) for x in logs
    )
    value = Rows(options, compute).value(log_t, log_s, torch.ones_like(log_s, dtype=torch.bool))
    labels = options.get("labels")
    if labels is None:
        return value, None
    if bool((log_s == -INF).all(-1).any()):  # no vocabulary entry for a label: NaN in torch
        raise AmbiguousError
    labels = labels.reshape(-1).long()
    counts = labels != options.get("ignore_index", -100)
    chosen = log_softmax(capped[0])[0].gather(1, labels.where(counts, 0)[:, None]).squeeze(1)
    return value, (-chosen).masked_fill(~counts, 0.0)


class GradientRounded(torch.autograd.Function):
    """The same number; its gradient is rounded as a tensor of a dtype would round it.

    With ``is_worst`` by half a unit, up or down: what others round is not the same number.
    """

    is_worst = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if GradientRounded.is_worst:
            generator = torch.Generator().manual_seed(0)
            up = torch.randint(0, 2, grad.shape, generator=generator).to(grad.dtype) * 2 - 1
            return grad * (1 + up * torch.finfo(ctx.dtype).eps / 2), None
        return grad.to(ctx.dtype).to(grad.dtype), None


class _Weighted(torch.autograd.Function):
    """A row times its weight: 0 where that is, with the row's value as the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        return torch.where(weight == 0, 0.0, value * weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        value, weight = ctx.saved_tensors
        return grad * weight, grad * value


def linear(
    tensors: dict[str, Tensor],
    options: dict[str, Any],
    compute: torch.dtype,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """`linear_kl`, reductions included."""
    shape = tensors["student_hidden"].shape[:-1]
    value, hard = linear_rows(tensors, options, compute, logits_dtype)
    counts = torch.ones_like(value, dtype=torch.bool)
    if options.get("row_mask") is not None:
        counts = options["row_mask"].expand(shape).reshape(-1)
    if hard is not None:
        counts = counts & (options["labels"].reshape(-1) != options.get("ignore_index", -100))
        if options.get("hard_weight", 1.0):
            value = value + options.get("hard_weight", 1.0) * hard
    # a token that does not count is 0 whatever its divergence is
    value = torch.where(counts, value, 0.0)
    if "row_weight" in tensors:
        weight = tensors["row_weight"].expand(shape).reshape(-1)
        value = _Weighted.apply(value, weight)
    reduction = options.get("reduction", "none")
    if reduction == "none":
        return value.view(shape)
    total = value.sum()
    if reduction == "sum":
        return total
    if reduction == "batchmean":
        return total / shape[0]
    if value.numel() == 0:
        return total / 0
    return total / max(int(counts.sum()), 1)
