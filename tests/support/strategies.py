"""Hypothesis strategies for specs: shapes, strides, masks, dtypes, divergences, together."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.support.problems import Spec

SIZES = st.sampled_from([1, 2, 3, 7, 16, 17, 31, 33, 63, 65])
GUARDS = st.sampled_from([0.0, 0.0, 0.0, 1e-6, 3e-2])
FLAGS = st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans())
BOUNDS = st.one_of(st.none(), st.integers(0, 40))
DIVERGENCES = ("forward_kl", "reverse_kl", "cross_entropy", "jeffreys", "js", "tv")


@st.composite
def specs(
    draw: st.DrawFn,
    *,
    dtypes: tuple[torch.dtype, ...],
    sizes: st.SearchStrategy[int] = SIZES,
    max_heads: int = 4,
    max_batch: int = 3,
    head_mean: bool = True,
) -> Spec:
    """A spec whose call is legal."""
    heads = draw(st.integers(1, max_heads))
    divergence = draw(st.sampled_from(DIVERGENCES))
    guards = {}
    if divergence != "tv":
        guards = {
            f"{side}_{g}": draw(GUARDS)
            for side in ("student", "teacher")
            for g in ("eps", "clamp")
        }
    teacher_heads = 0
    if head_mean and draw(st.integers(0, 3)) == 0:
        teacher_heads = heads * draw(st.integers(1, 2))
    fields = dict(
        guards,
        heads=heads,
        teacher_heads=teacher_heads,
        student_kv_heads=draw(_divisor(heads)),
        teacher_kv_heads=draw(_divisor(teacher_heads or heads)),
        student_dim=draw(st.sampled_from([1, 8, 16, 20])),
        teacher_dim=draw(st.sampled_from([3, 16, 32])),
        dtype=draw(st.sampled_from(dtypes)),
        strides=draw(st.sampled_from(["contiguous", "transposed", "padded"])),
        divergence=divergence,
        beta=draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])) if divergence == "js" else 0.5,
        temperature=draw(st.sampled_from([1.0, 0.5, 4.0])),
        student_scale=draw(st.sampled_from([None, 0.25, "tensor"])),
        teacher_scale=draw(st.sampled_from([None, -0.5])),
        student_softcap=draw(st.sampled_from([None, None, 3.0])),
        teacher_softcap=draw(st.sampled_from([None, None, 1.0])),
        is_causal=draw(st.booleans()),
        window=draw(st.one_of(st.none(), st.tuples(BOUNDS, BOUNDS))),
        row_mask=draw(st.booleans()),
        student_alibi=draw(st.booleans()),
        teacher_alibi=draw(st.booleans()),
        student_sink=draw(st.booleans()),
        teacher_sink=draw(st.booleans()),
        score_size=draw(st.sampled_from([0.1, 1.0, 5.0])),
        seed=draw(st.integers(0, 2**16)),
    )
    if draw(st.integers(0, 4)) == 0:
        lengths = st.tuples(sizes, sizes)
        return Spec(**fields, packed=tuple(draw(st.lists(lengths, min_size=1, max_size=3))))
    mask = draw(st.sampled_from([None, "bool", "additive", "filled"]))
    if mask == "filled":  # only the operator itself has it, with few of the options
        plain = ("student_alibi", "teacher_alibi", "student_softcap", "teacher_softcap", "window")
        fields.update(
            dict.fromkeys(plain), student_scale=None, teacher_scale=None, temperature=1.0
        )
        fields.update(student_alibi=False, teacher_alibi=False, row_mask=False)
    mask_shape = draw(FLAGS)
    if mask == "additive" and teacher_heads:
        mask_shape = (mask_shape[0], False, *mask_shape[2:])
    biased = mask not in ("additive", "filled")
    return Spec(
        **fields,
        batch=draw(st.integers(1, max_batch)),
        seqlen_q=draw(sizes),
        seqlen_k=draw(sizes),
        layout=draw(st.sampled_from(["bhnd", "bnhd"])) if mask != "filled" else "bhnd",
        mask=mask,
        mask_shape=mask_shape,
        mask_density=draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])),
        padding=draw(st.sampled_from([None, "left", "right", "both"])),
        key_lengths=draw(st.booleans()) if mask != "filled" else False,
        student_bias=draw(st.one_of(st.none(), FLAGS)) if biased else None,
        teacher_bias=draw(st.one_of(st.none(), FLAGS)) if biased else None,
    )


def _divisor(n):
    return st.sampled_from([d for d in range(1, n + 1) if n % d == 0])
