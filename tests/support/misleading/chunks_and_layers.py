"""Losses in chunks, layers, branches and higher-order operators, and programs of other tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support import hard_programs
from tests.support.losses import kd
from tests.support.losses import rows_of_kl as rows_of
from tests.support.misleading.registry import plain, register, student


@plain(fuses=3)
def tokens_in_chunks(h, w, ht, wt):
    total = h.new_zeros(())
    for a, b in zip(h.chunk(3), ht.chunk(3), strict=True):
        total = total + F.kl_div(
            (a @ w.T).log_softmax(-1), (b @ wt.T).softmax(-1), reduction="sum"
        )
    return total / h.shape[0]


@plain(fuses=3)
def tokens_in_split_chunks_of_unequal_size(h, w, ht, wt):
    parts = zip(h.split(10), ht.split(10), strict=True)
    return sum(rows_of(a @ w.T, b @ wt.T).sum() for a, b in parts)


@plain(fuses=3)
def chunks_of_different_tokens(h, w, ht, wt):
    parts = zip(h.chunk(3), ht.flip(0).chunk(3), strict=True)
    return sum(rows_of(a @ w.T, b @ wt.T).sum() for a, b in parts)


@plain(fuses=3)
def chunks_the_first_in_no_grad(h, w, ht, wt):
    total = h.new_zeros(())
    for i, (a, b) in enumerate(zip(h.chunk(3), ht.chunk(3), strict=True)):
        with torch.set_grad_enabled(i > 0):
            part = rows_of(a @ w.T, b @ wt.T).sum()
        total = total + part
    return total


@plain(fuses=3)
def chunks_with_their_own_scale(h, w, ht, wt, tw):
    parts = zip(h.chunk(3), ht.chunk(3), tw.chunk(3), strict=True)
    return sum(rows_of(a @ w.T * c.mean(), b @ wt.T).sum() for a, b, c in parts)


@plain(fuses=3)
def chunks_of_logits(h, w, ht, wt):
    s, t = h @ w.T, ht @ wt.T
    return sum(rows_of(a, b).sum() for a, b in zip(s.chunk(3), t.chunk(3), strict=True))


@plain(fuses=4)
def chunks_of_queries(q, k, qt, kt):
    parts = zip(q.chunk(4, 2), qt.chunk(4, 2), strict=True)
    return sum(rows_of(student(a, k), student(b, kt)).sum() for a, b in parts)


@plain(fuses=4)
def causal_chunks_of_queries(q, k, qt, kt):
    total = q.new_zeros(())
    for i in range(0, 40, 10):
        keep = torch.arange(i, i + 10)[:, None] >= torch.arange(48)
        s, t = (student(a[:, :, i : i + 10], b) for a, b in ((q, k), (qt, kt)))
        s, t = (x.masked_fill(~keep, -1e9) for x in (s, t))
        total = total + rows_of(s, t).sum()
    return total


@plain(fuses=2)
def layers_with_their_own_weights(q, k, qt, kt, rw):
    total = q.new_zeros(())
    for i in range(2):
        total = total + rw[i] * kd(student(q[:, i], k[:, i]), student(qt[:, i], kt[:, i]))
    return total


@plain(fuses=3)
def layers_that_share_the_teacher(q, k, qt, kt):
    t = student(qt, kt)
    return kd(student(q, k), t) + kd(student(q * 2, k), t) + kd(student(q, k.sin()), t)


@plain(fuses=1)
def both_directions(s, t):
    return kd(s, t) + kd(t, s)


@plain(fuses=2)
def a_map_loss_and_a_head_loss(s, t, h, w, ht, wt):
    return kd(s, t) + kd(h @ w.T, ht @ wt.T)


@plain(fuses=2)
def two_temperatures(h, w, ht, wt):
    s, t = h @ w.T, ht @ wt.T
    return kd(s, t) + 4 * kd(s / 2, t / 2)


@plain(fuses=2)
def a_map_and_its_detached_twin(s, t):
    return kd(s, t) + kd(t, s.detach())


@plain(fuses=1)
def checkpointed(q, k, qt, kt):
    def body(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        return kd(student(q, k), student(qt, kt))

    return checkpoint(body, q, k, qt, kt, use_reentrant=False)


@plain()
def mapped_over_batches(q, k, qt, kt):
    return torch.vmap(lambda *x: kd(student(x[0], x[1]), student(x[2], x[3])))(q, k, qt, kt)


@plain()
def selected_tokens(h, w, ht, wt, tokens):
    return kd(h[tokens] @ w.T, ht[tokens] @ wt.T)


@plain(fuses=1)
def rows_selected_afterwards(h, w, ht, wt, tokens):  # it breaks the graph: not called by another
    return rows_of(h @ w.T, ht @ wt.T)[tokens].mean()


@plain(fuses=1)
def tokens_selected_unlike(h, w, ht, wt, tokens):
    return kd(h[:10] @ w.T, ht[2:12] @ wt.T)


@plain(fuses=1)
def shifted_tokens(z, t):
    return kd(z[:-1], t[:-1])


@plain(fuses=1)
def tokens_shifted_on_one_side(z, t):
    return kd(z[1:], t[:-1])


@plain(fuses=1)
def gathered_rows(s, t, rows):
    x = rows_of(s, t)
    return (x * rows[:, None]).sum() / rows.sum()


@plain()
def autocast_around_both(q, k, qt, kt):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        s, t = student(q, k), student(qt, kt)
    return kd(s.double(), t.double())


for _name, _program in hard_programs.PROGRAMS.items():
    if _program.num_graphs == 1 and not _program.compile_options:
        register(
            f"hard_{_name}",
            _program.fn,
            "q k v t",
            trained="q k v",
            shapes=dict.fromkeys("qkvt", hard_programs.SHAPE),
            fuses=_program.num_fused or None,
        )
