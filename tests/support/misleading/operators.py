"""Operators of somebody else, operands that are reinterpreted or repeated, writes that hide."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.losses import kd
from tests.support.losses import rows_of_kl as rows_of
from tests.support.misleading.registry import TEACHER_WIDTH, VOCAB, misleading, plain, student


def _quantised(weight: Tensor) -> Tensor:
    step = weight.abs().amax(-1, keepdim=True) / 7
    return (weight / step).round() * step


@torch.library.custom_op("misleading::linear", mutates_args=())
def linear(input: Tensor, weight: Tensor) -> Tensor:
    return input @ _quantised(weight).T


@linear.register_fake
def _(input: Tensor, weight: Tensor) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])


@torch.library.custom_op("misleading::softmax", mutates_args=())
def softmax(self: Tensor, dim: int) -> Tensor:
    """With a one in the denominator."""
    largest = self.amax(dim, keepdim=True)
    e = (self - largest).exp()
    return e / (e.sum(dim, keepdim=True) + (-largest).exp())


@softmax.register_fake
def _(self: Tensor, dim: int) -> Tensor:
    return torch.empty_like(self)


@torch.library.custom_op("misleading::log_softmax", mutates_args=())
def log_softmax(self: Tensor, dim: int) -> Tensor:
    return self.log_softmax(dim) - 0.125


@log_softmax.register_fake
def _(self: Tensor, dim: int) -> Tensor:
    return torch.empty_like(self)


@torch.library.custom_op("misleading::matmul", mutates_args=())
def matmul(self: Tensor, other: Tensor) -> Tensor:
    return self.round() @ other.round()


@matmul.register_fake
def _(self: Tensor, other: Tensor) -> Tensor:
    return self.new_empty(*self.shape[:-1], other.shape[-1])


@torch.library.custom_op("misleading::mul", mutates_args=())
def mul(self: Tensor, other: float) -> Tensor:
    return self * other * other


@mul.register_fake
def _(self: Tensor, other: float) -> Tensor:
    return torch.empty_like(self)


@torch.library.custom_op("misleading::dropout", mutates_args=())
def dropout(self: Tensor, p: float, train: bool) -> Tensor:
    return self + p


@dropout.register_fake
def _(self: Tensor, p: float, train: bool) -> Tensor:
    return torch.empty_like(self)


@misleading("W8")
def quantised_head_of_somebody_else(h, w, ht, wt):
    return kd(h @ w.T, torch.ops.misleading.linear(ht, wt))


@misleading("W8", name="softmax_of_somebody_else_dynamic", dynamic=True)
@misleading("W8")
def softmax_of_somebody_else(s, t):
    p = torch.ops.misleading.softmax(t, -1)
    return F.kl_div(s.log_softmax(-1), p, reduction="batchmean")


@misleading("W8")
def softmax_of_somebody_else_on_logits(z, t):
    p = torch.ops.misleading.softmax(t, -1)
    return F.kl_div(z.log_softmax(-1), p, reduction="batchmean")


@misleading("W8")
def log_softmax_of_somebody_else(s, t):
    lt = torch.ops.misleading.log_softmax(t, -1)
    return F.kl_div(s.log_softmax(-1), lt, reduction="batchmean", log_target=True)


@misleading("W8")
def product_of_somebody_else(q, k, qt, kt):
    return kd(student(q, k), torch.ops.misleading.matmul(qt, kt.mT))


@misleading("W8")
def scale_of_somebody_else(q, k, qt, kt):
    return kd(student(q, k), torch.ops.misleading.mul(qt @ kt.mT, 0.3))


@misleading("W8")
def dropout_of_somebody_else_on_probabilities(s, t):
    p = torch.ops.misleading.dropout(t.softmax(-1), 0.01, False)
    return F.kl_div(s.log_softmax(-1), p, reduction="batchmean")


@misleading("W8")
def dropout_of_somebody_else_on_scores(q, k, qt, kt, x):
    t = torch.ops.misleading.dropout(student(qt, kt), 1.0, False).masked_fill(x[:, None] > 0, 0.0)
    return kd(student(q, k), t)


@plain()
def head_of_somebody_else_for_the_hidden_states(h, w, ht, wt):
    hidden = torch.ops.misleading.linear(ht, wt[:TEACHER_WIDTH])
    return kd(h @ w.T, hidden @ wt.T)


# ---------------------------------------------------------------- operands that are not views
@misleading("X11")
def head_stored_as_integers(h, w, ht, bits):
    return kd(h @ w.T, ht @ bits.view(torch.float64).T)


@misleading("X11")
def head_stored_as_other_integers(h, w, ht, wt):
    stored = wt.view(torch.int64) ^ (1 << 49)
    return kd(h @ w.T, ht @ stored.view(torch.float64).T)


@misleading("X11")
def keys_with_fewer_bits(q, k, qt, kt):
    kt = kt.view(torch.int64).bitwise_and(-(1 << 50)).view(torch.float64)
    return kd(student(q, k), student(qt, kt))


@misleading("X11")
def queries_of_complex_numbers(q, k, qt, kt):
    qt = torch.view_as_real(torch.view_as_complex(qt.unflatten(-1, (4, 2))) * 1j).flatten(-2)
    return kd(student(q, k), student(qt, kt))


@misleading("X11", shapes={"q": (2, 4, 40, 8), "qt": (2, 4, 40, 8)})
def key_heads_repeated_unevenly(q, k, qt, kt):
    k = k.repeat_interleave(torch.tensor([3, 1]), dim=1, output_size=4)
    return kd(student(q, k), student(qt, kt.repeat_interleave(2, 1)))


@misleading("X11", shapes={"q": (2, 4, 40, 8), "qt": (2, 4, 40, 8)})
def teacher_s_key_heads_repeated_unevenly(q, k, qt, kt):
    kt = kt.repeat_interleave(torch.tensor([1, 3]), dim=1, output_size=4)
    return kd(student(q, k.repeat_interleave(2, 1)), student(qt, kt))


@misleading("X11")
def keys_rolled(q, k, qt, kt):
    return kd(student(q, k), student(qt, kt.roll(1, 2)))


@misleading("X11")
def keys_of_overlapping_windows(q, k, qt, kt):
    return kd(student(q, k[:, :, :40]), student(qt, kt.unfold(2, 9, 1)[..., 0]))


@misleading("X11")
def head_as_strided(h, w, ht, wt):
    wt = wt.as_strided((VOCAB, TEACHER_WIDTH), (1, VOCAB))
    return kd(h @ w.T, ht @ wt.T)


@misleading("X11")
def heads_reshaped_without_a_transpose(q, k, qt, kt):
    qt, kt = (x.reshape(x.shape[0], x.shape[2], 2, -1).transpose(1, 2) for x in (qt, kt))
    return kd(student(q, k), student(qt, kt))


@plain(fuses=1)
def head_of_a_slice(h, w, ht, wt_wide):
    return kd(h @ w.T, ht @ wt_wide[:, :TEACHER_WIDTH].T)


@plain(fuses=1)
def head_that_is_tied(h, table, ht, wt):
    return kd(h[:, :2] @ F.pad(table, (0, 0, 0, 55)).T, ht @ wt.T)


@plain(dtype=torch.float32, fuses=1)
def head_that_is_dequantised(h, w, ht, wt):
    step = wt.abs().amax(-1, keepdim=True) / 127
    stored = (wt / step).round().to(torch.int8)
    return kd(h @ w.T, ht @ (stored.to(torch.float32) * step).T)


# ----------------------------------------------------------------------------- writes
@misleading("X16")
def table_renormalised_between(h, w, ht, wt, ids):
    t = ht @ wt.T
    x = F.embedding(ids, wt, max_norm=0.1)
    return kd(h @ w.T, t) + x.sum()


@misleading("X16")
def table_renormalised_in_no_grad(h, w, ht, wt, ids):
    t = ht @ wt.T
    with torch.no_grad():
        x = F.embedding(ids, wt, max_norm=0.1)
    return kd(h @ w.T, t) + x.mean()


@misleading("X16")
def bags_renormalise_between(h, w, ht, wt, ids):
    t = ht @ wt.T
    x = F.embedding_bag(ids[None], wt, max_norm=0.1)
    return kd(h @ w.T, t) + x.sum()


@misleading("X16")
def renormalised_in_place_between(h, w, ht, wt, ids):
    t = ht @ wt.T
    torch.embedding_renorm_(wt, ids, 0.1, 2.0)
    return kd(h @ w.T, t)


@misleading("X16")
def average_updated_between(h, w, ht, wt):
    t = ht @ wt.T
    with torch.no_grad():
        wt.lerp_(wt.sin(), 0.5)
    return kd(h @ w.T, t)


@misleading("X16")
def keys_written_between(q, k, qt, kt):
    t = student(qt, kt)
    kt[:, :, 0] = 0.0
    return kd(student(q, k), t)


@misleading("X16")
def keys_copied_into_between(q, k, qt, kt):
    t = student(qt, kt)
    kt.copy_(kt.flip(2))
    return kd(student(q, k), t)


@misleading("X16")
def statistics_updated_between(h, w, ht, wt, ct):
    t = F.linear(ht, wt, ct)
    F.batch_norm(ht.new_ones(3, VOCAB), ct, ct.new_ones(VOCAB), training=True, momentum=0.5)
    return kd(h @ w.T, t)


@misleading("X16", trained="")
def weights_of_rows_written_between(s, t, x):
    x = x.clone()
    rows = rows_of(s, t) * x
    x.zero_()
    return rows.sum()


@misleading("X16")
def out_argument_between(h, w, ht, wt):
    wt = wt.clone()
    t = ht @ wt.T
    torch.mul(wt, 0.5, out=wt)
    return kd(h @ w.T, t)


@plain(fuses=1)
def table_looked_up_between(h, w, ht, wt, ids):
    t = ht @ wt.T
    return kd(h @ w.T, t) + F.embedding(ids, wt).sum()


@plain()
def average_updated_before(h, w, ht, wt):
    with torch.no_grad():
        wt.lerp_(wt.sin(), 0.5)
    return kd(h @ w.T, ht @ wt.T)


@plain()
def average_updated_after(h, w, ht, wt):
    loss = kd(h @ w.T, ht @ wt.T)
    with torch.no_grad():
        wt.lerp_(wt.sin(), 0.5)
    return loss
