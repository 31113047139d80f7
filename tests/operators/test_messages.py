"""Malformed calls of all public functions: what each is told, verbatim, in messages.txt.

STREAMKL_ACCEPT_MESSAGES=1 pytest tests/operators/test_messages.py  # after a meant change
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_streamkl import (
    LinearKL,
    attention_kl,
    attention_kl_varlen,
    attention_topk_kl,
    linear_kl,
    linear_topk_kl,
    nitrobrew,
    row_program,
)
from torch_streamkl.attention import ops, reference
from torch_streamkl.linear import rows as linear_rows
from torch_streamkl.rows import op as row_op

SNAPSHOT = Path(__file__).parent / "messages.txt"
LEAST = 380
Call = tuple[str, Callable[..., Any], dict[str, Any]]
Changes = dict[str, tuple[Any, ...]]  # values of one argument, each in a call of its own

NAN, INF = math.nan, math.inf
ones, zeros = torch.ones, torch.zeros
OPTIONS: Changes = {
    "divergence": ("kl", "", "FORWARD_KL", "JSD", "reverse-kl", "forwrad_kl"),
    "beta": (-0.1, 1.5, NAN),
    "temperature": (0.0, -1.0, NAN),
    "student_eps": (-1e-3, 1.5, NAN),
    "teacher_eps": (-1e-3, 1.5),
    "student_clamp": (-1e-3, 2.0),
    "teacher_clamp": (-1e-3, 2.0, NAN),
    "student_softcap": (0.0, -3.0, NAN),
    "teacher_softcap": (0.0, -3.0),
    "reduction": ("max", "batch_mean", None),
    "impl": ("cuda", "", None, "triton"),
    "temprature": (1.0,),
}

# ------------------------------------------------------------------------------- attention_kl

X = zeros(2, 4, 6, 8)
OF_ATTENTION = dict.fromkeys(("student_q", "student_k", "teacher_q", "teacher_k"), X)
OPERANDS = (
    [1.0], None, torch.tensor(1.0), zeros(1, 1, 1, 1, 1), X.int(), X.to(torch.complex64),
    X.double(), X.to("meta"), zeros(3, 4, 6, 8), X[:, :3], X[:, :, :5], X[..., :7].contiguous(),
    X[:, :, :0], zeros(2, 4, 8, 6).mT,
)  # fmt: skip
ATTENTION: Changes = {
    **dict.fromkeys(OF_ATTENTION, OPERANDS),
    **OPTIONS,
    "layout": ("sbhd", "", None),
    "student_scale": (NAN, INF),
    "teacher_scale": (NAN, -INF),
    "window": ((-1, None), (None, -2)),
    "deterministic": ("no", 2),
    "head_reduction": ("sum", "max"),
    "attn_mask": (
        ones(5, 5) > 0, ones(2, 6, 6) > 0, ones(3, 1, 1, 6), ones(6, 6).long(),
        ones(1, 1, 1, 1, 1), zeros(6, 6, requires_grad=True), zeros(6, 6).to("meta"), "causal",
    ),
    "student_bias": (zeros(5, 6), zeros(6, 6).int(), [0.0]),
    "teacher_bias": (zeros(5, 6), zeros(6, 6, requires_grad=True)),
    "student_alibi_slopes": (ones(3), ones(4, 1), ones(4).long(), [1.0]),
    "teacher_alibi_slopes": (ones(3), ones(4, requires_grad=True)),
    "student_sink": (ones(3), ones(4).long()),
    "teacher_sink": (ones(4, 1), ones(4).to("meta")),
    "key_lengths": (
        ones(3).int(), ones(2), [6, 6], torch.tensor([6, 7]), torch.tensor([-1, 6]),
    ),
    "row_mask": (ones(6), ones(5) > 0, ones(2, 4, 6, 1) > 0),
    "teacher_lse": (zeros(2, 4, 6), zeros(4, 6)),
    "causal": (True,),
}  # fmt: skip
TOGETHER: list[dict[str, Any]] = [
    {"divergence": "js", "beta": 1.5},
    {"divergence": "tv", "beta": 0.3},
    {"divergence": "tv", "student_eps": 1e-3},
    {"teacher_q": zeros(2, 8, 6, 8)},
    {"attn_mask": zeros(6, 6), "student_bias": zeros(6, 6)},
    {"head_reduction": "mean", "teacher_q": zeros(2, 6, 6, 8), "teacher_k": zeros(2, 6, 6, 8)},
    {"head_reduction": "mean", "teacher_q": zeros(2, 8, 6, 8), "attn_mask": zeros(4, 6, 6)},
    {"head_reduction": "mean", "teacher_lse": zeros(4, 6)},
    {"head_reduction": "mean", "teacher_lse": zeros(2, 4, 6).half()},
    {"head_reduction": "mean", "teacher_lse": zeros(2, 4, 6, requires_grad=True)},
    {"key_lengths": torch.tensor([6, 7]), "impl": "reference"},
    dict.fromkeys(OF_ATTENTION, zeros(2, 0, 6, 8)),
]
OFFSETS = torch.tensor([0, 2, 6], dtype=torch.int32)
OF_PACKED = {
    **dict.fromkeys(OF_ATTENTION, zeros(6, 4, 8)),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), OFFSETS),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), 4),
}
PACKED: Changes = {
    "student_q": (X, zeros(5, 4, 8)),
    "cu_seqlens_q": (
        OFFSETS.long(),
        OFFSETS[:2],
        OFFSETS[:1],
        OFFSETS[None],
        [0, 6],
        OFFSETS + 1,
        OFFSETS.flip(0),
    ),
    "cu_seqlens_k": (OFFSETS.float(), OFFSETS[:2], OFFSETS * 2),
    "max_seqlen_q": (0, -1, 3),
    "max_seqlen_k": (0, -4, 1),
    "row_mask": (ones(5) > 0,),
    "softmax_scale": (1.0,),
}
PACKED_TOGETHER = [
    dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), OFFSETS[:1]),
    {"head_reduction": "mean", "teacher_lse": zeros(6, 4)},
    dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.arange(12).int()),
    dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), OFFSETS * 0),
    {"cu_seqlens_k": OFFSETS // 2, "impl": "reference"},
]
OF_PACKED_CHOSEN = {
    **dict.fromkeys(("student_q", "student_k"), zeros(6, 1, 8)),
    **dict.fromkeys(("teacher_q", "teacher_k"), zeros(6, 4, 8)),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), OFFSETS),
    "ids": zeros(6, 3).long(),
}
PACKED_CHOSEN: Changes = {"cu_seqlens_q": (OFFSETS + 1,), "cu_seqlens_k": (OFFSETS // 2,)}
KEYS = zeros(2, 9, 5)
OF_CHOSEN = {
    "student_q": zeros(2, 3, 7, 5), "student_k": KEYS, "student_head_weights": zeros(2, 3, 7),
    "teacher_q": zeros(2, 4, 7, 6), "teacher_k": zeros(2, 2, 9, 6),
    "ids": zeros(2, 7, 5).long(),
}  # fmt: skip
CHOSEN: Changes = {
    "ids": (
        zeros(2, 7, 5).long() + 9, zeros(2, 7, 5), zeros(2, 6, 5).long(), zeros(2, 7, 0).long(),
    ),
    "student_k": (zeros(2, 3, 9, 5), zeros(3, 7, 5)),
    "student_q": (zeros(3, 7, 5),),
    "student_head_weights": (None, zeros(2, 7, 3)),
    "teacher_q": (zeros(2, 4, 7, 6, requires_grad=True),),
    "teacher_k": (zeros(2, 3, 9, 6),),
    "teacher_lse": (zeros(2, 4, 6), zeros(2, 4, 7, requires_grad=True)),
    "row_mask": (ones(2, 7),),
    "cu_seqlens_q": (torch.tensor([0, 7]),),
    "layout": ("sbhd",),
    "reduction": ("avg",),
    "is_causal": (1,),
    "student_scale": (INF,),
    "tempreature": (1.0,),
    "impl": ("triton",),
}  # fmt: skip

# ---------------------------------------------------------------------------------- linear_kl

HEADS = (zeros(4, 3), zeros(11, 3), zeros(4, 5), zeros(11, 5))
LINEAR_NAMES = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight")
OF_LINEAR = dict(zip(LINEAR_NAMES, HEADS, strict=True))
FEATURES = (
    [1.0], zeros(4, 3).int(), zeros(3), zeros(4, 3).double(), zeros(4, 7), zeros(4, 3).to("meta"),
    zeros(0, 3), None,
)  # fmt: skip
LINEAR: Changes = {
    **dict.fromkeys(LINEAR_NAMES, FEATURES),
    **dict.fromkeys(LINEAR_NAMES[::2], (*FEATURES, zeros(6, 3))),
    **OPTIONS,
    "student_logit_scale": (NAN, INF),
    "teacher_logit_scale": (NAN,),
    "student_bias": (zeros(5), zeros(11, 1), zeros(11).int(), [0.0]),
    "teacher_bias": (zeros(5), zeros(11).to("meta")),
    "labels": (zeros(3).long(), zeros(4), zeros(4, 1).long(), [0]),
    "row_mask": (ones(4), ones(5) > 0),
    "row_weight": (ones(3), ones(4, 2), [1.0]),
    "strategy": ("fast", None, "forward"),
    "max_workspace_mib": (-1, 0),
}
LINEAR_TOGETHER = [
    {"student_hidden": zeros(4, 6)[:, ::2], "student_weight": zeros(11, 6)[:, ::2]},
    {"student_weight": zeros(300_000, 3), "max_workspace_mib": 1},
    {"labels": zeros(4).int(), "ignore_index": 2**40},
]
IDS, LOGS = torch.arange(5).expand(7, 5), torch.full((7, 5), -2.0)
OF_ENTRIES = {"hidden": zeros(7, 9), "weight": zeros(53, 9), "bias": zeros(53), "ids": IDS,
              "log_probs": LOGS}  # fmt: skip
ENTRIES: Changes = {
    "ids": (IDS + 49, IDS[:6], IDS[0], IDS[:, :4], IDS.float(), IDS.short()),
    "log_probs": (LOGS + 1.0, LOGS * NAN, IDS, LOGS.clone().requires_grad_()),
    "tail": ("ghost",),
    "divergence": ("kl",),
    "vocab_start": (3,),
    "temperature": (0.0,),
    "beta": (0.3,),
    "temprature": (1.0,),
    "row_mask": (ones(7),),
    "max_workspace_mib": (0,),
}
ENTRIES_TOGETHER = [
    {"ids": IDS // 2, "tail": "bucket"},
    {"ids": IDS[:, :0], "log_probs": LOGS[:, :0]},
]

# ------------------------------------------------------------------------------- row programs


def _square(e: Any) -> Any:
    return (e.s * e.s).sum("key")


OF_PROGRAM = {"function": _square, "dots": {"s": (X, X)}}
CHOICES = zeros(2, 1, 6, 3).long()
PROGRAM: Changes = {
    "dots": (
        {}, {"s": X}, {"s": (X, [1.0])}, {"s": (X.int(), X)}, {"s": (X, X.double())},
        {"s": (X, X[:, :3])}, {"s": (X, X[..., :7])}, {"s": (X[0], X[0])},
        {"s": (X, X[:, :, :0])}, {"s": (X, X.to("meta"))}, {"a b": (X, X)},
        {1: (X, X)}, {"_a": (X, X)}, {"s": (X, X, X)},
        {"s": (X, X), "t": (X[:, :, :5], X)}, {"s": (X, X), "t": (X, X[:, :, :4])},
        {"s": (X, X), "t": (X[0, 0], X[0, 0])},
    ),
    "rows": ({"w": [1.0]}, {"w": zeros(5)}, {"w": zeros(2, 3, 6)}, {"s": zeros(6)},
             {"w": zeros(6).to("meta")}),
    "keys": ({"w": 1.0}, {"w": zeros(5)}, {"w": zeros(1, 1, 1, 6)}, {"w": [1.0]}),
    "pairs": ({"w": None}, {"w": zeros(6, 5)}, {"w": zeros(2, 3, 6, 6)}),
    "columns": ({"c": [0]}, {"c": CHOICES.float()}, {"c": (CHOICES, CHOICES)},
                {"c": CHOICES[:, :, :5]}, {"c": (CHOICES, zeros(2, 1, 6, 4))}),
    "window": ((-1, None), (None, -2), (1.5, None)),
    "key_lengths": (
        ones(3).int(), ones(2), ones(2).int().to("meta"), torch.tensor([6, 7]),
        torch.tensor([-2, 0]).int(),
    ),
    "mask": (ones(6, 6), ones(5, 6) > 0, ones(2, 4, 6, 6) > 0),
    "impl": ("cuda", "eager", "triton"),
    "reduction": ("batchmean",),
}  # fmt: skip
OF_HEAD = {"function": _square, "dots": {"s": HEADS[:2]}}
HEAD: Changes = {
    "rows": ({"w": zeros(5)},),
    "keys": ({"w": zeros(4)},),
    "pairs": ({"w": zeros(4, 10)},),
    "columns": ({"c": zeros(5, 2).long()},),
    "key_lengths": (ones(4).int(),),
    "is_causal": (True,),
    "window": ((1, 0),),
    "mask": (ones(11) > 0,),
}
OF_FUNCTION = {
    "dots": {"s": (X, X), "t": (X, X)},
    "keys": {"n": torch.arange(6)},
}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "an element for each key": lambda e: e.s,
    "a number": lambda e: 1.0,
    "a number by name": lambda e: {"a": 3},
    "nothing": lambda e: None,
    "no value": lambda e: {},
    "a sum over rows": lambda e: e.s.sum("row"),
    "a dimension": lambda e: e.s.sum(-1),
    "a softmax of a dimension": lambda e: e.t.softmax(-1),
    "a log-softmax over heads": lambda e: e.t.log_softmax("head"),
    "a mean over keys": lambda e: e.t.mean("key"),
    "a matmul": lambda e: (e.s @ e.s).sum("key"),
    "an unknown name": lambda e: e.x.sum("key"),
    "a branch": lambda e: e.s.sum("key") if e.s > 0 else 0.0,
    "both": lambda e: (e.t and e.s).sum("key"),
    "a sort": lambda e: e.s.sort("key"),
    "a maximum": lambda e: e.t.max("key"),
    "a running sum": lambda e: torch.cumsum(e.t, -1),
    "an exponent that varies": lambda e: e.t**e.s,
    "a large power": lambda e: e.s**1e9,
    "another tensor": lambda e: e.s * ones(6),
    "bits of floats": lambda e: e.t & e.s,
    "bits of integers": lambda e: e.key_index & 1,
    "a float as a condition": lambda e: torch.where(e.t, 1.0, 0.0),
    "an argument": lambda e: e.t.exp(base=2),
    "out": lambda e: torch.exp(e.t, out=ones(1)),
    "dtype": lambda e: F.softmax(e.t, "key", dtype=torch.float64),
    "in place": lambda e: F.relu(e.t, inplace=True),
    "a rounding": lambda e: torch.div(e.t, 2, rounding_mode="up"),
    "a beta of 0": lambda e: F.softplus(e.t, beta=0),
    "no bound": lambda e: e.t.clamp(),
    "too many": lambda e: e.t.minimum(e.s, e.s),
    "too few": lambda e: e.t.add(),
    "two axes": lambda e: e.t.sum("key", dim="head"),
    "a string": lambda e: e.t * "2",
    "a complex number": lambda e: e.t * 2j,
    "NaN": lambda e: e.t + NAN,
    "a negative base": lambda e: (-2.0) ** e.t,
    "a huge integer": lambda e: e.t + (1 << 60),
    "alpha": lambda e: e.t.add(e.s, alpha="2"),
    "minus a condition": lambda e: 1 - (e.t > 0),
    "a negative power of integers": lambda e: e.key_index**-1,
    "a power to integers": lambda e: 3**e.n,  # torch: 3 ** -1 is 0
    "a power to a condition": lambda e: True ** (e.n > 0),
    "an infinite integer": lambda e: e.n.masked_fill(e.t > 0, -INF),
    "half an integer": lambda e: e.n.masked_fill(e.t > 0, 0.5),
    "an item": lambda e: e.t[0],
    "a loop": lambda e: sum(x for x in e.t),
    "an element of a sum over blocks": lambda e: e.s - e.s.sum("key", block=2),
    "a sum of a sum over blocks": lambda e: e.s.sum("key", block=2).sum("key"),
    "heads of a sum over blocks": lambda e: e.s.sum("key", block=2).sum("head"),
    "a logarithm of a sum over blocks": lambda e: e.s.sum("key", block=2).log(),
    "blocks of heads": lambda e: e.s.sum("head", block=2),
    "a log-sum-exp over blocks": lambda e: e.s.logsumexp("key", block=2),
    "blocks of no keys": lambda e: e.s.sum("key", block=0),
    "blocks of half a key": lambda e: e.s.sum("key", block=1.5),
}
RETURNED = ("a number", "no value", "by name", "for each key", "nothing")  # as they are
REDUCED: list[dict[str, Any]] = [
    {"function": lambda e: {"a": e.s.sum("key"), "b": e.s.logsumexp("key")}, "reduction": "sum"},
    {"function": lambda e: e.s.sum("key", block=2), "reduction": "sum"},
]
FEWER_HEADS = {"s": (X, X), "t": (X[:, :2], X[:, :2])}

# --------------------------------------------------------------------------- modules and others


def _module(**options: Any) -> Any:
    """What a module says when it is made, or when it is called with heads and options."""
    made = {k: options.pop(k) for k in ("of", "options") if k in options}
    module = LinearKL(**made.get("options", {}))
    return module(*HEADS, **options)


MODULES: list[dict[str, Any]] = [
    {"options": {"temperature": 0}},
    {"options": {"temprature": 2.0}},
    {"options": {"loss_type": "js"}},
    {"options": {"divergence": "kl"}},
    {"options": {"labels": zeros(4).long()}},
    {"options": {"temperature": 2.0}, "temperature": 3.0},
    {"lables": None},
]
OF_NITROBREW = dict(zip(("xs", "ws", "xt", "wt"), (*HEADS[:2], *HEADS[2:]), strict=True))


def calls() -> Iterator[Call]:
    """What to call it, the function and its arguments."""
    yield from _each("attention_kl", attention_kl, OF_ATTENTION, ATTENTION, TOGETHER)
    yield from _each("linear_kl", linear_kl, OF_LINEAR, LINEAR, LINEAR_TOGETHER)
    yield from _each("LinearKL", _module, {}, {}, MODULES)
    yield from _each(
        "attention_kl_varlen", attention_kl_varlen, OF_PACKED, PACKED, PACKED_TOGETHER
    )
    for f in (nitrobrew.forward_kl, nitrobrew.reverse_kl):
        chunks: Changes = {"chunk_V": (0, -5), "chunk_v": (2,)}
        yield from _each(f"nitrobrew.{f.__name__}", f, OF_NITROBREW, chunks)
    yield from _each("attention_topk_kl", attention_topk_kl, OF_CHOSEN, CHOSEN)
    yield from _each(
        "attention_topk_kl of packed sequences", attention_topk_kl, OF_PACKED_CHOSEN, PACKED_CHOSEN
    )
    yield from _each("linear_topk_kl", linear_topk_kl, OF_ENTRIES, ENTRIES, ENTRIES_TOGETHER)
    yield from _each("row_program", row_program, OF_PROGRAM, PROGRAM)
    yield from _each("row_program of vocabulary entries", row_program, OF_HEAD, HEAD)
    for what, function in FUNCTIONS.items():
        is_whole = what.endswith(RETURNED) or "blocks" in what or "over" in what
        summed = function if is_whole else lambda e, f=function: f(e).sum("key")
        yield f"row_program(function: {what})", row_program, OF_FUNCTION | {"function": summed}
    for given, what in zip(REDUCED, ("two sums", "sums over blocks"), strict=True):
        yield f"row_program(reduction of {what})", row_program, OF_PROGRAM | given
    both = {"function": lambda e: (e.s * e.t).sum("key"), "dots": FEWER_HEADS}
    yield "row_program(other heads)", row_program, both


def _each(
    name: str,
    function: Callable[..., Any],
    legal: dict[str, Any],
    changes: Changes,
    together: list[dict[str, Any]] | None = None,
) -> Iterator[Call]:
    single = [{argument: x} for argument, values in changes.items() for x in values]
    for change in (*single, *(together or [])):
        text = ", ".join(f"{k}={_described(x)}" for k, x in change.items())
        yield f"{name}({text})", function, legal | change


def _described(x: Any) -> str:
    if isinstance(x, dict):
        return "{" + ", ".join(f"{k}: {_described(v)}" for k, v in x.items()) + "}"
    if isinstance(x, tuple):
        return "(" + ", ".join(map(_described, x)) + ")"
    if not isinstance(x, Tensor):
        return repr(x)
    grad = ", with gradient" if x.requires_grad else ""
    device = "" if x.device.type == "cpu" else f" on {x.device}"
    strides = "" if x.is_contiguous() else f" of strides {x.stride()}"
    first = f" of {x.flatten()[0].item()}" if x.numel() and not device else ""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{first}{strides}{device}{grad}"


def told(call: Call) -> str:
    """The error of a call, or that there was none."""
    _, function, arguments = call
    try:
        function(**arguments)
    except AssertionError as error:
        return f"accepted: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return "accepted"


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an implementation was reached")

    monkeypatch.setattr(ops.torch_impl, "forward", refuse)
    monkeypatch.setattr(reference, "attention_kl_rows", refuse)
    monkeypatch.setattr(linear_rows, "values", refuse)
    monkeypatch.setattr(row_op.torch_impl, "forward", refuse)


def test_malformed_calls() -> None:
    every = list(calls())
    names = [name for name, _, _ in every]
    assert len(set(names)) == len(names) >= LEAST
    text = "".join(f"{call[0]}\n    {told(call)}\n" for call in every)
    if os.environ.get("STREAMKL_ACCEPT_MESSAGES") == "1":
        SNAPSHOT.write_text(text)
    assert "    accepted" not in text
    kinds = {line.strip().split(":")[0] for line in text.splitlines() if line.startswith("    ")}
    errors = {"ValueError", "HeadsError", "TypeError", "IndexError", "AttributeError"}
    assert kinds == errors | {"NotImplementedError"}
    assert text == SNAPSHOT.read_text()
    # a verdict that is remembered is not a way around
    assert text == "".join(f"{call[0]}\n    {told(call)}\n" for call in every)


@pytest.mark.parametrize(
    ("dtype", "dim", "message"),
    [
        (torch.float64, 8, "takes float16, bfloat16 and float32, got torch.float64"),
        (torch.float32, 272, "takes head_dim up to 256, got 272"),
    ],
)
def test_limits_of_kernels(
    dtype: torch.dtype, dim: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.randn(1, 1, 2, dim, dtype=dtype)
    with pytest.raises(NotImplementedError, match=f"{message}; impl='torch' computes it"):
        attention_kl(x, x, x, x, impl="triton")
