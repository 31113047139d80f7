"""The losses as people write them, from the public arguments: the second opinion on reference.py.

Nothing here is shared with the package. Scores come from a matmul in the inputs' dtype, softmaxes
run in float32 at least, as in a model.
"""

import math

import torch


def naive(call):
    """What `attention_kl` returns for a call, the textbook way."""
    tensors = dict(call.tensors)
    if call.spec.packed is not None:
        rows = _packed(tensors, call)
        return _reduced(rows, call, num_sequences=len(call.spec.packed))
    if call.options["layout"] == "bnhd":
        for name in ("student_q", "student_k", "teacher_q", "teacher_k"):
            tensors[name] = tensors[name].transpose(1, 2)
    return _reduced(_rows(tensors, call.options, call.fill), call, tensors["student_q"].shape[0])


def teacher_log_sum_exp(call):
    """The log-sum-exps that a caller of ``teacher_lse`` would have kept."""
    q, k = call.tensors["teacher_q"], call.tensors["teacher_k"]
    scores, _ = _scores("teacher", q, k, call.tensors, call.options, call.fill)
    return torch.logsumexp(scores, -1)


def _reduced(rows, call, num_sequences):
    row_mask = call.options.get("row_mask")
    if row_mask is not None:
        rows = rows.masked_fill(~row_mask, 0.0)
    match call.options["reduction"]:
        case "mean":
            return rows.mean()
        case "sum":
            return rows.sum()
        case "batchmean":
            return rows.sum() / num_sequences
    return rows


def _packed(tensors, call):
    pieces = []
    row = key = 0
    for num_rows, num_keys in call.spec.packed or ():
        sequence = {}
        for name, x in tensors.items():
            if name.endswith("_q"):
                x = x[row : row + num_rows].transpose(0, 1)[None]
            elif name.endswith("_k"):
                x = x[key : key + num_keys].transpose(0, 1)[None]
            sequence[name] = x
        pieces.append(_rows(sequence, call.options, None)[0])
        row, key = row + num_rows, key + num_keys
    return torch.cat(pieces, dim=1)


def _scores(
    side,
    q,
    k,
    tensors,
    options,
    fill,
):
    """Scores with -inf (or the fill) where masked, and which keys count."""
    batch, heads, n, d = q.shape
    m = k.shape[2]
    if k.shape[1] != heads:
        k = k.repeat_interleave(heads // k.shape[1], dim=1)
    scale = options[f"{side}_scale"]
    scale = 1 / math.sqrt(d) if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q, k.transpose(2, 3)).to(wide) * scale
    cap = options[f"{side}_softcap"]
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    for bias in (options.get(f"{side}_bias"), options.get("attn_mask")):
        if bias is not None and bias.dtype != torch.bool:
            scores = scores + bias.to(wide)
    # the last query stands on the last key
    position = torch.arange(m - n, m, device=q.device).view(n, 1)
    key = torch.arange(m, device=q.device).view(1, m)
    slopes = options.get(f"{side}_alibi_slopes")
    if slopes is not None:
        scores = scores - slopes.to(wide).view(-1, 1, 1) * (position - key).abs()
    scores = scores / options["temperature"]

    banned = torch.zeros(batch, 1, n, m, dtype=torch.bool, device=q.device)
    if options["is_causal"]:
        banned = banned | (key > position)
    if options["window"] is not None:
        left, right = options["window"]
        if left is not None:
            banned = banned | (position - key > left)
        if right is not None:
            banned = banned | (key - position > right)
    if options.get("key_lengths") is not None:
        banned = banned | (key >= options["key_lengths"].view(-1, 1, 1, 1))
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        banned = banned | ~mask
    if banned.shape[1] not in (1, heads):
        banned = banned.repeat_interleave(heads // banned.shape[1], dim=1)
    return scores.masked_fill(banned, -math.inf if fill is None else fill), banned


def _log_softmax(side, scores, tensors):
    sink = tensors.get(f"{side}_sink")
    dead = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(dead, 0.0)  # such a row is dropped by the caller
    if sink is None:
        return scores.log_softmax(-1)
    column = sink.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1).log_softmax(-1)[..., :-1]


def _rows(tensors, options, fill):
    log_probs = {}
    dead = None
    for side in ("student", "teacher"):
        q, k = tensors[f"{side}_q"], tensors[f"{side}_k"]
        scores, _ = _scores(side, q, k, tensors, options, fill)
        log_probs[side] = _log_softmax(side, scores, tensors)
        if side == "student":
            dead = (scores == -math.inf).all(-1)
    log_s, log_t = log_probs["student"], log_probs["teacher"]
    if options.get("head_reduction") == "mean":
        mean = log_t.exp().unflatten(1, (log_s.shape[1], -1)).mean(2)
        log_t = _log(mean)
    value = _divergence(log_t, log_s, options)
    return value.masked_fill(dead, 0.0)


def _divergence(log_t, log_s, options):
    p, s = log_t.exp(), log_s.exp()
    log_p = _guarded(p, log_t, options["teacher_eps"], options["teacher_clamp"])
    log_q = _guarded(s, log_s, options["student_eps"], options["student_clamp"])
    match options["divergence"]:
        case "forward_kl":
            terms = _weighted(p, log_p - log_q)
        case "reverse_kl":
            terms = _weighted(s, log_q - log_p)
        case "cross_entropy":
            terms = _weighted(p, -log_q)
        case "jeffreys":
            terms = _weighted(p, log_p - log_q) + _weighted(s, log_q - log_p)
        case "tv":
            terms = 0.5 * (p - s).abs()
        case "js":
            beta = options["beta"]
            if beta in (0.0, 1.0):
                side = "forward_kl" if beta == 0.0 else "reverse_kl"
                return _divergence(log_t, log_s, {**options, "divergence": side})
            log_m = _log_mixture(log_p + math.log(beta), log_q + math.log(1 - beta))
            terms = beta * _weighted(p, log_p - log_m) + (1 - beta) * _weighted(s, log_q - log_m)
    return terms.sum(-1)


def _guarded(p, log_p, eps, clamp):
    if not eps and not clamp:
        return log_p
    p = p + eps
    return (p.clamp(min=clamp) if clamp else p).log()


def _weighted(weight, x):
    """weight * x, with 0 * anything = 0 in value and gradient."""
    return weight * x.masked_fill(weight == 0, 0.0)


def _log_mixture(a, b):
    """log(e^a + e^b), which the sum of two probabilities that underflow has no logarithm for."""
    absent = (a == -math.inf) & (b == -math.inf)
    both = torch.stack([a, b]).masked_fill(absent, 0.0)
    return both.logsumexp(0).masked_fill(absent, -math.inf)


def _log(p):
    """log p, and -inf without gradient where p is 0."""
    absent = p == 0
    return p.masked_fill(absent, 1.0).log().masked_fill(absent, -math.inf)
