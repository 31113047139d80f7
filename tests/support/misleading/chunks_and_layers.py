"""Losses in chunks, layers, branches and higher-order operators, and programs of other tests."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.support import hard_programs, programs
from tests.support.losses import kd
from tests.support.losses import rows_of_kl as rows_of
from tests.support.misleading.registry import plain, register, student


def chunked(pairs):
    return sum(rows_of(s, t).sum() for s, t in pairs)


def loss(q, k, qt, kt):
    return kd(student(q, k), student(qt, kt))


def of_tokens(h, w, ht, wt):
    return chunked((a @ w.T, b @ wt.T) for a, b in zip(h.chunk(3), ht.chunk(3), strict=True))


plain({
    "tokens_in_chunks": of_tokens,
    "tokens_in_split_chunks_of_unequal_size": lambda h, w, ht, wt: chunked(
        (a @ w.T, b @ wt.T) for a, b in zip(h.split(10), ht.split(10), strict=True)),
    "chunks_of_different_tokens": lambda h, w, ht, wt: of_tokens(h, w, ht.flip(0), wt),
    "chunks_with_their_own_scale": lambda h, w, ht, wt, tw: chunked(
        (a @ w.T * c.mean(), b @ wt.T)
        for a, b, c in zip(h.chunk(3), ht.chunk(3), tw.chunk(3), strict=True)),
    "chunks_of_logits": lambda z, zt: chunked(zip(z.chunk(3), zt.chunk(3), strict=True)),
    "layers_that_share_the_teacher": lambda s, q, k, t: (
        kd(s, t) + kd(student(q * 2, k), t) + kd(student(q, k.sin()), t)),
}, fuses=3)  # fmt: skip


@plain(fuses=3)
def chunks_the_first_in_no_grad(h, w, ht, wt):
    total = h.new_zeros(())
    for i, (a, b) in enumerate(zip(h.chunk(3), ht.chunk(3), strict=True)):
        with torch.set_grad_enabled(i > 0):
            part = rows_of(a @ w.T, b @ wt.T).sum()
        total = total + part
    return total


@plain(fuses=4)
def causal_chunks_of_queries(q, k, qt, kt):
    total = q.new_zeros(())
    for i in range(0, 40, 10):
        keep = torch.arange(i, i + 10)[:, None] >= torch.arange(48)
        s, t = (student(a[:, :, i : i + 10], b) for a, b in ((q, k), (qt, kt)))
        s, t = (x.masked_fill(~keep, -1e9) for x in (s, t))
        total = total + rows_of(s, t).sum()
    return total


# fmt: off
plain({
    "chunks_of_queries": lambda q, k, qt, kt: chunked(
        (student(a, k), student(b, kt)) for a, b in zip(q.chunk(4, 2), qt.chunk(4, 2), strict=True)
    ),
}, fuses=4)
plain({
    "layers_with_their_own_weights": lambda q, k, qt, kt, rw: sum(
        rw[i] * loss(*(x[:, i] for x in (q, k, qt, kt))) for i in range(2)),
    "a_map_loss_and_a_head_loss": lambda s, t, z, zt: kd(s, t) + kd(z, zt),
    "two_temperatures": lambda z, zt: kd(z, zt) + 4 * kd(z / 2, zt / 2),
    "a_map_and_its_detached_twin": lambda s, t: kd(s, t) + kd(t, s.detach()),
}, fuses=2)
# fmt: on


@plain(fuses=1)
def rows_selected_afterwards(h, w, ht, wt, tokens):  # it breaks the graph: not called by another
    return rows_of(h @ w.T, ht @ wt.T)[tokens].mean()


# fmt: off
plain({
    "both_directions": lambda s, t: kd(s, t) + kd(t, s),
    "checkpointed": lambda q, k, qt, kt: checkpoint(loss, q, k, qt, kt, use_reentrant=False),
    "tokens_selected_unlike": lambda h, w, ht, wt: kd(h[:10] @ w.T, ht[2:12] @ wt.T),
    "shifted_tokens": lambda z, zt: kd(z[:-1], zt[:-1]),
    "tokens_shifted_on_one_side": lambda z, zt: kd(z[1:], zt[:-1]),
    "gathered_rows": lambda s, t, rows: (rows_of(s, t) * rows[:, None]).sum() / rows.sum(),
    "by_log_sum_exp_and_expectation": lambda s, p_t: (
        s.logsumexp(-1) - (p_t * s).sum(-1)).mean(),
    "reverse_with_a_clamp": lambda p_s, p_t: (
        p_s * (p_s.clamp_min(1e-6).log() - p_t.clamp_min(1e-6).log())).sum(-1).mean(),
    "probabilities_as_both_arguments": lambda p_s, p_t: F.kl_div(p_s, p_t, reduction="sum"),
    "hard_and_soft_labels": lambda z, zt, y: (
        0.3 * F.cross_entropy(z, y) + 0.7 * (kd(z / 2, zt / 2) * 4)),
    "smoothed_hard_labels": lambda z, zt, y: (
        F.cross_entropy(z, y, label_smoothing=0.1) + kd(z, zt)),
    "softmax_of_queries": lambda s, t: F.kl_div(
        s.log_softmax(-2), t.softmax(-2), reduction="sum"),
    "dropout_that_is_off": lambda log_s, p_t: F.kl_div(
        log_s, F.dropout(p_t, 0.5, training=False), reduction="batchmean"),
}, fuses=1)
plain({
    "mapped_over_batches": lambda q, k, qt, kt: torch.vmap(loss)(q, k, qt, kt),
    "selected_tokens": lambda h, w, ht, wt, tokens: kd(h[tokens] @ w.T, ht[tokens] @ wt.T),
    "softmax_of_heads": lambda s, t: F.kl_div(s.log_softmax(1), t.softmax(1), reduction="sum"),
    "top_keys_of_the_teacher": lambda s, t: kd(
        s.gather(-1, (best := t.topk(5, dim=-1)).indices), best.values),
})
# fmt: on


@plain()
def autocast_around_both(q, k, qt, kt):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        s, t = student(q, k), student(qt, kt)
    return kd(s.double(), t.double())


# ------------------------------------------------------------ programs of other tests
for _name, _spelling in {**programs.SPELLINGS, **programs.CALLS}.items():

    def _rows(a, b, at, bt, spelling=_spelling, is_sum=_name in programs.CALLS):
        found = spelling(a @ b.mT * 0.3, at @ bt.mT * 0.3)
        return found if is_sum else found.sum(-1)

    narrow = {"dtype": torch.float32} if "fp32" in _name else {}
    for _kind, _arguments in (("map", "q k qt kt"), ("head", "h w ht wt")):
        _place = ("losses", _kind, _name)
        register(f"{_kind}_{_name}", _rows, _arguments, fuses=1, place=_place, **narrow)
for _name, _program in hard_programs.PROGRAMS.items():
    if _program.num_graphs == 1 and not _program.compile_options:
        register(
            f"hard_{_name}",
            _program.fn,
            "q k v teacher",
            trained="q k v",
            shapes=dict.fromkeys(("q", "k", "v", "teacher"), hard_programs.SHAPE),
            fuses=_program.num_fused or None,
        )
