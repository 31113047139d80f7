"""Maps that make values and losses of labels, next to a divergence of the same scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support.losses import kd
from tests.support.misleading.registry import misleading, plain, register, student


# --------------------------------------------------------------------- maps that make values
@misleading("X4")
def detached_map_times_values(q, k, v, qt, kt):
    s, t = student(q, k), student(qt, kt)
    return kd(s, t), s.softmax(-1).detach() @ v


@misleading("X4")
def map_without_gradient_times_values(q, k, v, qt, kt):
    s, t = student(q, k), student(qt, kt)
    with torch.no_grad():
        p = s.softmax(-1)
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean"), p @ v


@misleading("X4")
def map_of_the_teacher_times_values(q, k, v, qt, kt):
    with torch.no_grad():
        p = student(qt, kt).softmax(-1)
    return F.kl_div(student(q, k).log_softmax(-1), p, reduction="batchmean"), p @ v


@misleading("X4")
def detached_scores_times_values(q, k, v, qt, kt):
    s, t = student(q, k), student(qt, kt)
    return kd(s, t), s.detach().softmax(-1) @ v


@misleading("X4")
def detached_map_of_the_teacher_times_values(q, k, v, qt, kt):
    p = student(qt, kt).softmax(-1).detach()
    return F.kl_div(student(q, k).log_softmax(-1), p, reduction="batchmean"), p @ v


@misleading("X4")
def detached_masked_map_times_values(q, k, v, qt, kt):
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    s, t = (x.masked_fill(~keep, -1e9) for x in (student(q, k), student(qt, kt)))
    return kd(s, t), s.softmax(-1).detach() @ v


@plain(fuses=1)
def map_times_values(q, k, v, qt, kt):
    s, t = student(q, k), student(qt, kt)
    return kd(s, t), s.softmax(-1) @ v


@plain(fuses=1)
def map_times_detached_values(q, k, v, qt, kt):
    s, t = student(q, k), student(qt, kt)
    return kd(s, t), s.softmax(-1) @ v.detach()


@plain(fuses=1)
def values_without_gradient(q, k, v, qt, kt):
    s, t = student(q, k), student(qt, kt)
    with torch.no_grad():
        values = s.softmax(-1) @ v
    return kd(s, t), values


for _low in (torch.float16, torch.bfloat16):

    def _wide_map(q, k, v, qt, kt):
        s, t = student(q, k), student(qt, kt)
        return kd(s, t), s.softmax(-1).to(v.dtype) @ v

    def _large_wide_map(q, k, v, qt, kt):
        s, t = (q * 300) @ k.mT, (qt * 300) @ kt.mT
        return kd(s, t), s.softmax(-1).to(v.dtype) @ v

    for _name, _fn in (("wide_map", _wide_map), ("large_wide_map", _large_wide_map)):
        register(
            f"{_name}_of_{str(_low).removeprefix('torch.')}_values",
            _fn,
            "q k v qt kt",
            fault="X5",
            dtype=torch.float32,
            dtypes={"v": _low},
            place=("wide maps", str(_low), _name),
        )


# ---------------------------------------------------------------------------------- labels
@misleading("X6")
def loss_times_a_label_loss_without_gradient(h, w, ht, wt, y):
    z = h @ w.T
    with torch.no_grad():
        ce = F.cross_entropy(z, y)
    return kd(z, ht @ wt.T) * ce


@misleading("X6")
def loss_times_a_later_label_loss_without_gradient(h, w, ht, wt, y):
    z = h @ w.T
    loss = kd(z, ht @ wt.T)
    with torch.no_grad():
        ce = F.cross_entropy(z, y)
    return loss * ce


@misleading("X6")
def loss_times_a_later_label_loss_of_detached_logits(h, w, ht, wt, y):
    z = h @ w.T
    loss = kd(z, ht @ wt.T)
    return loss * F.cross_entropy(z.detach(), y)


@misleading("X6", trained="")
def labels_change_between_losses_that_are_not_trained(h, w, ht, wt, y, tokens):
    z = h @ w.T
    loss = kd(z, ht @ wt.T)
    y[tokens] = -100
    return loss + F.cross_entropy(z, y)


@misleading("X6", trained="")
def labels_are_filled_between_losses_that_are_not_trained(h, w, ht, wt, y, tokens):
    y = y.clone()
    z = h @ w.T
    loss = kd(z, ht @ wt.T)
    y.masked_fill_(tokens, -100)
    return loss + F.cross_entropy(z, y)


@misleading("X6")
def label_loss_without_gradient_added(h, w, ht, wt, y):
    z = h @ w.T
    with torch.no_grad():
        ce = F.cross_entropy(z, y)
    return kd(z, ht @ wt.T) + ce * h.sum()


@misleading("X6")
def label_loss_of_detached_logits(h, w, ht, wt, y):
    z = h @ w.T
    return kd(z, ht @ wt.T) + F.cross_entropy(z.detach(), y) * h.sum()


@misleading("X6")
def label_loss_detached(h, w, ht, wt, y):
    z = h @ w.T
    return kd(z, ht @ wt.T) * F.cross_entropy(z, y).detach()


@misleading("X6")
def labels_change_between_the_losses(h, w, ht, wt, y, tokens):
    y = y.clone()
    z = h @ w.T
    loss = kd(z, ht @ wt.T)
    y[tokens] = -100
    return loss + F.cross_entropy(z, y)


@misleading("X6")
def labels_change_in_place_between_the_losses(h, w, ht, wt, y, tokens):
    z = h @ w.T
    loss = kd(z, ht @ wt.T)
    y.masked_fill_(tokens, -100)
    return loss + F.cross_entropy(z, y)


@misleading("X6")
def gathered_label_loss_without_gradient(h, w, ht, wt, y):
    z = h @ w.T
    with torch.no_grad():
        nll = -z.log_softmax(-1).gather(-1, y[:, None]).mean()
    return kd(z, ht @ wt.T) * nll


@misleading("X6")
def loss_times_a_label_loss(h, w, ht, wt, y):
    z = h @ w.T
    return kd(z, ht @ wt.T) * F.cross_entropy(z, y)


@plain(fuses=1)
def label_loss_added(h, w, ht, wt, y):
    z = h @ w.T
    return 0.5 * kd(z, ht @ wt.T) + 0.5 * F.cross_entropy(z, y)


@plain(fuses=1)
def label_loss_with_ignored_labels(h, w, ht, wt, y, tokens):
    z = h @ w.T
    y = torch.where(tokens, y, -100)
    return kd(z, ht @ wt.T) + F.cross_entropy(z, y)


@plain()
def label_loss_in_no_grad_reported(h, w, ht, wt, y):
    z = h @ w.T
    with torch.no_grad():
        ce = F.cross_entropy(z, y)
    return kd(z, ht @ wt.T), ce
