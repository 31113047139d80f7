"""Maps that make values and losses of labels, next to a divergence of the same scores."""

import torch
import torch.nn.functional as F

from tests.support.losses import kd
from tests.support.misleading.registry import frozen, misleading, plain, register


def kd_of(log_s, p):
    return F.kl_div(log_s, p, reduction="batchmean")


def causal(x):
    return x.masked_fill(~torch.ones(x.shape[2:], dtype=torch.bool).tril(), -1e9)


# --------------------------------------------------------------------- maps that make values
# fmt: off
misleading("X4", {
    "detached_map_times_values": lambda s, t, v: (kd(s, t), s.softmax(-1).detach() @ v),
    "map_without_gradient_times_values": lambda s, t, v: (kd(s, t), frozen(s.softmax, -1) @ v),
    "map_of_the_teacher_times_values": lambda log_s, qt, kt, v: (
        kd_of(log_s, p := frozen(lambda: (qt @ kt.mT * 0.3).softmax(-1))), p @ v),
    "detached_scores_times_values": lambda s, t, v: (kd(s, t), s.detach().softmax(-1) @ v),
    "detached_map_of_the_teacher_times_values": lambda log_s, p_t, v: (
        kd_of(log_s, p_t.detach()), p_t.detach() @ v),
    "detached_masked_map_times_values": lambda s, t, v: (
        kd(x := causal(s), causal(t)), x.softmax(-1).detach() @ v),
})
plain({
    "map_times_values": lambda s, t, v: (kd(s, t), s.softmax(-1) @ v),
    "map_times_detached_values": lambda s, t, v: (kd(s, t), s.softmax(-1) @ v.detach()),
    "values_without_gradient": lambda s, t, v: (kd(s, t), frozen(lambda: s.softmax(-1) @ v)),
}, fuses=1)
# fmt: on


def wide_map(s, t, v):
    return kd(s, t), s.softmax(-1).to(v.dtype) @ v


def large_wide_map(raw, raw_t, v):
    return wide_map(raw * 300, raw_t * 300, v)


for _low in (torch.float16, torch.bfloat16):
    for _fn in (wide_map, large_wide_map):
        register(
            f"{_fn.__name__}_of_{str(_low).removeprefix('torch.')}_values",
            _fn,
            fault="X5",
            dtype=torch.float32,
            dtypes={"v": _low},
            place=("wide maps", str(_low), _fn.__name__),
        )


# ---------------------------------------------------------------------------------- labels
def gathered(z, y):
    return -z.log_softmax(-1).gather(-1, y[:, None]).mean()


ce = F.cross_entropy
misleading("X6", {
    "loss_times_a_label_loss_without_gradient": lambda z, zt, y: frozen(ce, z, y) * kd(z, zt),
    "loss_times_a_later_label_loss_without_gradient": lambda z, zt, y: (
        kd(z, zt) * frozen(ce, z, y)),
    "loss_times_a_later_label_loss_of_detached_logits": lambda z, zt, y: (
        kd(z, zt) * ce(z.detach(), y)),
    "label_loss_without_gradient_added": lambda z, zt, y, h: (
        frozen(ce, z, y) * h.sum() + kd(z, zt)),
    "label_loss_of_detached_logits": lambda z, zt, y, h: (
        kd(z, zt) + ce(z.detach(), y) * h.sum()),
    "label_loss_detached": lambda z, zt, y: kd(z, zt) * ce(z, y).detach(),
    "gathered_label_loss_without_gradient": lambda z, zt, y: (
        frozen(gathered, z, y) * kd(z, zt)),
    "loss_times_a_label_loss": lambda z, zt, y: kd(z, zt) * ce(z, y),
})  # fmt: skip


def labels_change(z, zt, y, tokens):
    loss = kd(z, zt)
    y[tokens] = -100
    return loss + ce(z, y)


def labels_are_filled(z, zt, y, tokens):
    loss = kd(z, zt)
    y.masked_fill_(tokens, -100)
    return loss + ce(z, y)


# fmt: off
misleading("X6", {
    "labels_change_between_losses_that_are_not_trained": labels_change,
    "labels_are_filled_between_losses_that_are_not_trained": lambda z, zt, y, tokens: (
        labels_are_filled(z, zt, y.clone(), tokens)),
}, trained="")
misleading("X6", {
    "labels_change_between_the_losses": lambda z, zt, y, tokens: (
        labels_change(z, zt, y.clone(), tokens)),
    "labels_change_in_place_between_the_losses": labels_are_filled,
})
plain({
    "label_loss_added": lambda z, zt, y: 0.5 * kd(z, zt) + 0.5 * ce(z, y),
    "label_loss_with_ignored_labels": lambda z, zt, y, tokens: (
        kd(z, zt) + ce(z, torch.where(tokens, y, -100))),
}, fuses=1)
# fmt: on
plain({"label_loss_in_no_grad_reported": lambda z, zt, y: (kd(z, zt), frozen(ce, z, y))})
