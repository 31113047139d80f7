"""Operators of somebody else, operands that are reinterpreted or repeated, writes that hide."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.losses import kd
from tests.support.losses import rows_of_kl as rows_of
from tests.support.misleading.registry import (
    TEACHER_WIDTH,
    VOCAB,
    frozen,
    misleading,
    plain,
    student,
)


def of_somebody_else(fn):
    """An operator with a well-known name."""
    operator = torch.library.custom_op(f"misleading::{fn.__name__}", fn, mutates_args=())
    operator.register_fake(fn)
    return operator


@of_somebody_else
def linear(input: Tensor, weight: Tensor) -> Tensor:
    """Of a quantised weight."""
    step = weight.abs().amax(-1, keepdim=True) / 7
    return input @ ((weight / step).round() * step).T


@of_somebody_else
def softmax(self: Tensor, dim: int) -> Tensor:
    """With a one in the denominator."""
    largest = self.amax(dim, keepdim=True)
    e = (self - largest).exp()
    return e / (e.sum(dim, keepdim=True) + (-largest).exp())


@of_somebody_else
def log_softmax(self: Tensor, dim: int) -> Tensor:
    return self.log_softmax(dim) - 0.125


@of_somebody_else
def matmul(self: Tensor, other: Tensor) -> Tensor:
    return self.round() @ other.round()


@of_somebody_else
def mul(self: Tensor, other: float) -> Tensor:
    return self * other * other


@of_somebody_else
def dropout(self: Tensor, p: float, train: bool) -> Tensor:
    return self + p


theirs = torch.ops.misleading


def kd_of(log_s, p):
    return F.kl_div(log_s, p, reduction="batchmean")


# fmt: off
misleading("W8", {
    "quantised_head_of_somebody_else": lambda z, ht, wt: kd(z, theirs.linear(ht, wt)),
    "softmax_of_somebody_else": lambda log_s, t: kd_of(log_s, theirs.softmax(t, -1)),
    "log_softmax_of_somebody_else": lambda log_s, t: F.kl_div(
        log_s, theirs.log_softmax(t, -1), reduction="batchmean", log_target=True),
    "product_of_somebody_else": lambda s, qt, kt: kd(s, theirs.matmul(qt, kt.mT)),
    "scale_of_somebody_else": lambda s, raw_t: kd(s, theirs.mul(raw_t, 0.3)),
    "dropout_of_somebody_else_on_probabilities": lambda log_s, p_t: kd_of(
        log_s, theirs.dropout(p_t, 0.01, False)),
    "dropout_of_somebody_else_on_scores": lambda s, t, x: kd(
        s, theirs.dropout(t, 1.0, False).masked_fill(x[:, None] > 0, 0.0)),
})
misleading("W8", {
    "softmax_of_somebody_else_dynamic": lambda log_s, t: kd_of(log_s, theirs.softmax(t, -1)),
}, dynamic=True)
plain({
    "head_of_somebody_else_for_the_hidden_states": lambda z, ht, wt: kd(
        z, theirs.linear(ht, wt[:TEACHER_WIDTH]) @ wt.T),
})
# fmt: on


# ---------------------------------------------------------------- operands that are not views
def with_fewer_bits(x):
    return x.view(torch.int64).bitwise_and(-(1 << 50)).view(torch.float64)


def turned(x):
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * 1j).flatten(-2)


def unevenly(x, counts):
    return x.repeat_interleave(torch.tensor(counts), dim=1, output_size=4)


def reshaped(x):
    return x.reshape(x.shape[0], x.shape[2], 2, -1).transpose(1, 2)


# fmt: off
misleading("X11", {
    "head_stored_as_integers": lambda z, ht, bits: kd(z, ht @ bits.view(torch.float64).T),
    "head_stored_as_other_integers": lambda z, ht, wt: kd(
        z, ht @ (wt.view(torch.int64) ^ (1 << 49)).view(torch.float64).T),
    "keys_with_fewer_bits": lambda s, qt, kt: kd(s, student(qt, with_fewer_bits(kt))),
    "queries_of_complex_numbers": lambda s, qt, kt: kd(s, student(turned(qt), kt)),
    "keys_rolled": lambda s, qt, kt: kd(s, student(qt, kt.roll(1, 2))),
    "keys_of_overlapping_windows": lambda q, k, qt, kt: kd(
        student(q, k[:, :, :40]), student(qt, kt.unfold(2, 9, 1)[..., 0])),
    "head_as_strided": lambda z, ht, wt: kd(
        z, ht @ wt.as_strided((VOCAB, TEACHER_WIDTH), (1, VOCAB)).T),
    "heads_reshaped_without_a_transpose": lambda s, qt, kt: kd(
        s, student(reshaped(qt), reshaped(kt))),
})
misleading("X11", {
    "key_heads_repeated_unevenly": lambda q, k, qt, kt: kd(
        student(q, unevenly(k, [3, 1])), student(qt, kt.repeat_interleave(2, 1))),
    "teacher_s_key_heads_repeated_unevenly": lambda q, k, qt, kt: kd(
        student(q, k.repeat_interleave(2, 1)), student(qt, unevenly(kt, [1, 3]))),
}, shapes={"q": (2, 4, 40, 8), "qt": (2, 4, 40, 8)})
plain({
    "head_of_a_slice": lambda z, ht, wt_wide: kd(z, ht @ wt_wide[:, :TEACHER_WIDTH].T),
    "head_that_is_tied": lambda h, table, zt: kd(
        h[:, :2] @ F.pad(table, (0, 0, 0, 55)).T, zt),
}, fuses=1)
# fmt: on


@plain(dtype=torch.float32, fuses=1)
def head_that_is_dequantised(z, ht, wt):
    step = wt.abs().amax(-1, keepdim=True) / 127
    stored = (wt / step).round().to(torch.int8)
    return kd(z, ht @ (stored.to(torch.float32) * step).T)


# ----------------------------------------------------------------------------- writes
def averaged(x):
    with torch.no_grad():
        x.lerp_(x.sin(), 0.5)


def looked_up(wt, ids):
    return F.embedding(ids, wt, max_norm=0.1)


# between the product and the divergence
misleading("X16", {
    "table_renormalised_between": lambda z, zt, wt, ids: looked_up(wt, ids).sum() + kd(z, zt),
    "table_renormalised_in_no_grad": lambda z, zt, wt, ids: (
        frozen(looked_up, wt, ids).mean() + kd(z, zt)),
    "bags_renormalise_between": lambda z, zt, wt, ids: (
        F.embedding_bag(ids[None], wt, max_norm=0.1).sum() + kd(z, zt)),
    "renormalised_in_place_between": lambda z, zt, wt, ids: (
        torch.embedding_renorm_(wt, ids, 0.1, 2.0).sum() * 0 + kd(z, zt)),
    "average_updated_between": lambda z, zt, wt: (averaged(wt), kd(z, zt))[1],
    "keys_copied_into_between": lambda s, t, kt: (kt.copy_(kt.flip(2)), kd(s, t))[1],
})  # fmt: skip


@misleading("X16")
def keys_written_between(s, t, kt):
    kt[:, :, 0] = 0.0
    return kd(s, t)


@misleading("X16")
def statistics_updated_between(z, ht, wt, ct):
    t = F.linear(ht, wt, ct)
    F.batch_norm(ht.new_ones(3, VOCAB), ct, ct.new_ones(VOCAB), training=True, momentum=0.5)
    return kd(z, t)


@misleading("X16", trained="")
def weights_of_rows_written_between(s, t, x):
    x = x.clone()
    rows = rows_of(s, t) * x
    x.zero_()
    return rows.sum()


@misleading("X16")
def out_argument_between(z, ht, wt):
    wt = wt.clone()
    t = ht @ wt.T
    torch.mul(wt, 0.5, out=wt)
    return kd(z, t)


# fmt: off
plain({
    "table_looked_up_between": lambda z, zt, wt, ids: kd(z, zt) + F.embedding(ids, wt).sum(),
}, fuses=1)
plain({
    "average_updated_before": lambda z, ht, wt: (averaged(wt), kd(z, ht @ wt.T))[1],
    "average_updated_after": lambda z, zt, wt: (kd(z, zt), averaged(wt))[0],
})
# fmt: on
