"""Scales, temperatures, biases, sinks and weights that are trained, shared, detached, or not.

What a student and a teacher share can be one expression written twice, of which one records no
gradient: those are two values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.losses import kd
from tests.support.losses import rows_of_kl as rows_of
from tests.support.misleading.registry import (
    misleading,
    plain,
    register,
    student,
    without_gradient,
)

# how a side's scores use something learned, and what it is
SCORES: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "scale": ("ls", lambda q, k, x: q @ k.mT * x),
    "scale_exp": ("ls", lambda q, k, x: q @ k.mT * x.exp()),
    "scale_of_q": ("ls", lambda q, k, x: (q * x) @ k.mT),
    "temperature": ("tau", lambda q, k, x: q @ k.mT / x),
    "temperature_clamped": ("tau", lambda q, k, x: q @ k.mT / x.clamp(min=0.01)),
    "bias": ("b", lambda q, k, x: student(q, k) + x),
    "bias_doubled": ("b", lambda q, k, x: student(q, k) + x.mul(2.0)),
    "key_bias": ("kb", lambda q, k, x: student(q, k) + x),
    "sink": (
        "sink",
        lambda q, k, x: torch.cat(
            [student(q, k), x[None, :, None, None].expand(*q.shape[:-1], 1)], -1
        ),
    ),
}
LOGITS: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "scale": ("ls", lambda h, w, x: h @ w.T * x),
    "scale_exp": ("ls", lambda h, w, x: h @ w.T * x.exp()),
    "temperature": ("tau", lambda h, w, x: h @ w.T / x),
    "bias": ("c", lambda h, w, x: F.linear(h, w, x)),
    "bias_added": ("c", lambda h, w, x: h @ w.T + x),
    "bias_doubled": ("c", lambda h, w, x: F.linear(h, w, x.mul(2.0))),
}


def _register_sides() -> None:
    for operands, made in (("q k qt kt", SCORES), ("h w ht wt", LOGITS)):
        kind = "map" if operands[0] == "q" else "head"
        for name, (learned, scores) in made.items():
            for how in ("no_grad", "detach", "grad"):

                def shared(
                    a: Tensor,
                    b: Tensor,
                    at: Tensor,
                    bt: Tensor,
                    x: Tensor,
                    scores: Callable[..., Tensor] = scores,
                    how: str = how,
                ) -> Tensor:
                    t = without_gradient(how, scores, at, bt, x)
                    return kd(scores(a, b, x), t)

                def of_the_teacher(
                    a: Tensor,
                    b: Tensor,
                    at: Tensor,
                    bt: Tensor,
                    x: Tensor,
                    scores: Callable[..., Tensor] = scores,
                    how: str = how,
                ) -> Tensor:
                    t = without_gradient(how, scores, at, bt, x)
                    return kd(scores(a, b, torch.ones_like(x)), t)

                fault = "" if how == "grad" else "W1" if "_" in name else "W2"
                for of, fn in (("shared", shared), ("of_the_teacher", of_the_teacher)):
                    register(
                        f"{kind}_{name}_{of}_{how}",
                        fn,
                        f"{operands} {learned}",
                        place=("sides", f"{kind}_{name}", of, how),
                        **({"fault": fault} if fault else {}),
                    )


_register_sides()


@misleading("W1")
def weight_of_rows_normalised_without_gradient(q, k, qt, kt, rw):
    with torch.no_grad():
        total = rw.exp().sum()
    return (rows_of(student(q, k), student(qt, kt)) * rw.exp()).sum() / total


@misleading("W1")
def weight_of_rows_shared_with_one_without_gradient(q, k, qt, kt, rw):
    s, t = student(q, k), student(qt, kt)
    with torch.no_grad():
        first = (rows_of(s.detach(), t) * rw.exp()).sum()
    return (rows_of(s, t) * rw.exp()).sum() + first


@misleading("W1")
def weight_of_tokens_shared_with_one_without_gradient(h, w, ht, wt, tw):
    s, t = h @ w.T, ht @ wt.T
    with torch.no_grad():
        first = (rows_of(s.detach(), t) * tw.exp()).sum()
    return (rows_of(s, t) * tw.exp()).sum() + first


@misleading("W1", name="weight_in_elements_normalised_without_gradient_dynamic", dynamic=True)
@misleading("W1")
def weight_in_elements_normalised_without_gradient(q, k, qt, kt, rw):
    s, t = student(q, k).log_softmax(-1), student(qt, kt).softmax(-1)
    with torch.no_grad():
        total = rw.exp()[:, None].sum()
    return (F.kl_div(s, t, reduction="none") * rw.exp()[:, None]).sum() / total


@misleading("W1")
def weight_in_token_elements_normalised_without_gradient(h, w, ht, wt, tw):
    s, t = (h @ w.T).log_softmax(-1), (ht @ wt.T).softmax(-1)
    with torch.no_grad():
        total = tw.exp()[:, None].sum()
    return (F.kl_div(s, t, reduction="none") * tw.exp()[:, None]).sum() / total


@misleading("W1")
def weight_of_one_product_without_gradient(q, k, qt, kt, rw):
    ls, lt = student(q, k).log_softmax(-1), student(qt, kt).log_softmax(-1)
    pt = lt.exp()
    with torch.no_grad():
        entropy = pt * lt * rw.exp()[:, None]
    return (entropy - pt * ls * rw.exp()[:, None]).sum()


@misleading("W1")
def weight_of_one_sum_without_gradient(q, k, qt, kt, rw):
    ls, lt = student(q, k).log_softmax(-1), student(qt, kt).log_softmax(-1)
    pt = lt.exp()
    with torch.no_grad():
        entropy = (pt * lt).sum(-1) * rw.exp()
    return (entropy - (pt * ls).sum(-1) * rw.exp()).sum()


@misleading("W1")
def weight_of_the_teacher_without_gradient(q, k, qt, kt, rw):
    ls, lt = student(q, k).log_softmax(-1), student(qt, kt).log_softmax(-1)
    with torch.no_grad():
        p = lt.exp() * rw.exp()[:, None]
    return (p * lt).sum() - (lt.exp() * rw.exp()[:, None] * ls).sum()


@misleading("W1")
def divisor_in_elements_seen_without_gradient(q, k, qt, kt, rw):
    s, t = student(q, k).log_softmax(-1), student(qt, kt).softmax(-1)
    with torch.no_grad():
        seen = rw.exp()[:, None].mean()
    return (F.kl_div(s, t, reduction="none") / rw.exp()[:, None]).sum() + seen


@misleading("W1", dtype=torch.float32)
def operands_widened_on_both_sides(q, k):
    with torch.no_grad():
        t = q.double() @ k.double().mT
    return kd(q.double() @ k.double().mT * 0.3, t)


@misleading("W1", dtype=torch.float32)
def head_widened_on_both_sides(h, w):
    with torch.no_grad():
        t = h.double() @ w.double().T * 0.5
    return kd(h.double() @ w.double().T, t)


@misleading("W1", dtype=torch.float32)
def keys_widened_on_both_sides(q, k, qt):
    with torch.no_grad():
        t = qt.double() @ k.double().mT
    return kd(q.double() @ k.double().mT, t)


@misleading("W1")
def keys_doubled_on_both_sides(q, k, qt):
    with torch.no_grad():
        t = qt @ k.mul(2.0).mT
    return kd(q @ k.mul(2.0).mT, t)


@misleading("W1")
def teacher_is_the_student_without_gradient(q, k):
    with torch.no_grad():
        t = q.sin() @ k.cos().mT
    return kd(q.sin() @ k.cos().mT * 0.5, t)


@misleading("W1")
def head_normalised_on_both_sides(h, w, ht):
    with torch.no_grad():
        t = ht @ F.normalize(w, dim=-1)[:, :12].T
    return kd(h @ F.normalize(w, dim=-1).T, t)


@misleading("W2")
def scale_shared_with_a_teacher_inside_no_grad_softmax(q, k, qt, kt, ls):
    with torch.no_grad():
        p = (qt @ kt.mT * ls).softmax(-1)
    return F.kl_div((q @ k.mT * ls).log_softmax(-1), p, reduction="batchmean")


@misleading("W2")
def scale_of_a_detached_probability(q, k, qt, kt, ls):
    p = (qt @ kt.mT * ls).softmax(-1).detach()
    return F.kl_div((q @ k.mT * ls).log_softmax(-1), p, reduction="batchmean")


@misleading("W2")
def scale_of_heads_shared(q, k, qt, kt, hs):
    with torch.no_grad():
        t = qt @ kt.mT * hs[:, None, None]
    return kd(q @ k.mT * hs[:, None, None], t)


@misleading("W2")
def scale_of_a_student_that_is_not_trained(q, k, qt, kt, ls):
    s = (q @ k.mT * ls).detach()
    return kd(s, qt @ kt.mT * ls)


@misleading("W2")
def head_scale_of_a_detached_probability(z, t, ls):
    p = (t * ls).softmax(-1).detach()
    return F.kl_div((z * ls).log_softmax(-1), p, reduction="batchmean")


@misleading("W2")
def temperature_squared_of_a_teacher_in_no_grad(h, w, ht, wt, tau):
    with torch.no_grad():
        p = (ht @ wt.T / tau).softmax(-1)
    return F.kl_div((h @ w.T / tau).log_softmax(-1), p, reduction="batchmean") * tau**2


@misleading("W2")
def relative_bias_shared_by_table(q, k, qt, kt, table):
    i = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    bias = table[i.clamp(-4, 4) + 4].permute(2, 0, 1)
    with torch.no_grad():
        t = qt @ kt.mT + table[i.clamp(-4, 4) + 4].permute(2, 0, 1)
    return kd(q @ k.mT + bias, t)


@misleading("W2")
def bias_and_scale_of_a_teacher_in_no_grad(q, k, qt, kt, ls, b):
    with torch.no_grad():
        t = qt @ kt.mT * ls + b
    return kd(q @ k.mT * ls + b, t)


@misleading("W2", dynamic=True)
def scale_shared_dynamic(q, k, qt, kt, ls):
    with torch.no_grad():
        t = qt @ kt.mT * ls
    return kd(q @ k.mT * ls, t)


@misleading("W2", dynamic=True)
def head_scale_shared_dynamic(h, w, ht, wt, ls):
    t = (ht @ wt.T * ls).detach()
    return kd(h @ w.T * ls, t)


@plain("scale_shared_and_not_trained", fuses=1, trained="q k")
@misleading("W1", dynamic=True)
def scale_exp_shared_dynamic(q, k, qt, kt, ls):
    with torch.no_grad():
        t = qt @ kt.mT * ls.exp()
    return kd(q @ k.mT * ls.exp(), t)


# ------------------------------------------------------------------------------ right ones
@plain(fuses=1)
def scale_trained_on_both_sides(q, k, qt, kt, ls):
    return kd(q @ k.mT * ls, qt @ kt.mT * ls)


@plain(fuses=1)
def scale_of_the_student_only(q, k, qt, kt, ls):
    with torch.no_grad():
        t = qt @ kt.mT * 0.3
    return kd(q @ k.mT * ls, t)


@plain(fuses=1)
def scale_detached_on_both_sides(q, k, qt, kt, ls):
    scale = ls.detach().exp()
    return kd(q @ k.mT * scale, qt @ kt.mT * scale)


@plain()
def bias_of_the_student_only(s, t, b):
    return kd(s + b, t)


@plain(fuses=1)
def head_scale_of_the_student_only(h, w, ht, wt, ls):
    with torch.no_grad():
        t = ht @ wt.T
    return kd(h @ w.T * ls, t)


@plain(fuses=1, trained="h w c")
def head_bias_not_trained_in_the_teacher(h, w, ht, wt, c, ct):
    with torch.no_grad():
        t = F.linear(ht, wt, ct)
    return kd(F.linear(h, w, c), t)


@plain(fuses=1)
def temperature_without_gradient_on_both_sides(h, w, ht, wt, tau):
    with torch.no_grad():
        t = ht @ wt.T / tau
    return kd(h @ w.T / tau.detach(), t)


@plain(fuses=1)
def weights_of_rows_trained(s, t, rw):
    return (rows_of(s, t) * rw.exp()).mean()


@plain(fuses=1)
def weights_of_rows_detached(s, t, rw):
    return (rows_of(s, t) * rw.exp().detach()).mean()


@plain(fuses=1)
def weights_of_tokens_trained(z, t, tw):
    return (rows_of(z, t) * tw).sum() / tw.sum()


@plain("only_head_trained", trained="w", fuses=1)
@plain("trained_teacher_of_a_head", also="ht wt", fuses=1)
@plain(fuses=1)
def everything_trained(z, t):
    return kd(z, t)


@plain("nothing_trained", trained="", fuses=1)
@plain("only_keys_trained", trained="k", fuses=1)
@plain("teacher_s_queries_trained", trained="qt", fuses=1)
@plain(also="qt kt", fuses=1)
def trained_teacher_of_a_map(s, t):
    return kd(s, t)
