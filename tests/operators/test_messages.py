"""Malformed calls, two hundred of them: what each is told, verbatim, in messages.txt.

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
from torch import Tensor

from torch_streamkl import attention_kl, attention_kl_varlen, linear_kl, nitrobrew, row_program
from torch_streamkl.attention import ops, reference
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.rows import op as row_op

SNAPSHOT = Path(__file__).parent / "messages.txt"
LEAST = 200
Call = tuple[str, Callable[..., Any], dict[str, Any]]

ATTENTION = ("student_q", "student_k", "teacher_q", "teacher_k")
LINEAR = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight")
NAN, INF = math.nan, math.inf
TENSORS: dict[str, Any] = {
    "a list": [1.0],
    "None": None,
    "a scalar": torch.tensor(1.0),
    "too many dimensions": torch.zeros(1, 1, 1, 1, 1),
    "integers": torch.zeros(2, 4, 6, 8, dtype=torch.int32),
    "complex numbers": torch.zeros(2, 4, 6, 8, dtype=torch.complex64),
    "another dtype": torch.zeros(2, 4, 6, 8, dtype=torch.float64),
    "another device": torch.zeros(2, 4, 6, 8, device="meta"),
    "another batch": torch.zeros(3, 4, 6, 8),
    "other heads": torch.zeros(2, 3, 6, 8),
    "another length": torch.zeros(2, 4, 5, 8),
    "another head_dim": torch.zeros(2, 4, 6, 7),
    "nothing": torch.zeros(2, 4, 0, 8),
    "columns": torch.zeros(2, 4, 8, 6).transpose(2, 3),
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "divergence": ("kl", "", "FORWARD_KL"),
    "beta": (-0.1, 1.5, NAN),
    "temperature": (0.0, -1.0, NAN),
    "student_eps": (-1e-3, 1.5, NAN),
    "teacher_eps": (-1e-3, 1.5),
    "student_clamp": (-1e-3, 2.0),
    "teacher_clamp": (-1e-3, 2.0, NAN),
    "student_softcap": (0.0, -3.0, NAN),
    "teacher_softcap": (0.0, -3.0),
    "reduction": ("max", "batch_mean", None),
    "impl": ("cuda", "", None),
}
OF_ATTENTION: dict[str, tuple[Any, ...]] = {
    **OPTIONS,
    "layout": ("sbhd", "", None),
    "student_scale": (NAN, INF),
    "teacher_scale": (NAN, -INF),
    "window": ((-1, None), (None, -2)),
    "deterministic": ("no", 2),
    "head_reduction": ("sum", "max"),
    "attn_mask": (
        torch.ones(5, 5, dtype=torch.bool), torch.ones(3, 1, 1, 6), torch.ones(6, 6).long(),
        torch.ones(1, 1, 1, 1, 1), torch.zeros(6, 6, requires_grad=True),
        torch.zeros(6, 6, device="meta"), "causal",
    ),
    "student_bias": (torch.zeros(5, 6), torch.zeros(6, 6).int(), [0.0]),
    "teacher_bias": (torch.zeros(5, 6), torch.zeros(6, 6, requires_grad=True)),
    "student_alibi_slopes": (torch.ones(3), torch.ones(4, 1), torch.ones(4).long(), [1.0]),
    "teacher_alibi_slopes": (torch.ones(3), torch.ones(4, requires_grad=True)),
    "student_sink": (torch.ones(3), torch.ones(4).long()),
    "teacher_sink": (torch.ones(4, 1), torch.ones(4, device="meta")),
    "key_lengths": (torch.ones(3, dtype=torch.int32), torch.ones(2), [6, 6]),
    "row_mask": (torch.ones(6), torch.ones(5, dtype=torch.bool), torch.ones(2, 4, 6, 1) > 0),
    "teacher_lse": (torch.zeros(2, 4, 6), torch.zeros(4, 6)),
}  # fmt: skip
OF_LINEAR: dict[str, tuple[Any, ...]] = {
    **OPTIONS,
    "student_logit_scale": (NAN, INF),
    "teacher_logit_scale": (NAN,),
    "student_bias": (torch.zeros(5), torch.zeros(11, 1), torch.zeros(11).int(), [0.0]),
    "teacher_bias": (torch.zeros(5), torch.zeros(11, device="meta")),
    "labels": (torch.zeros(3).long(), torch.zeros(4), torch.zeros(4, 1).long(), [0]),
    "row_mask": (torch.ones(4), torch.ones(5, dtype=torch.bool)),
    "row_weight": (torch.ones(3), torch.ones(4, 2), [1.0]),
    "strategy": ("fast", None),
    "max_workspace_mib": (-1, 0),
}


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        grad = ", with gradient" if x.requires_grad else ""
        device = "" if x.device.type == "cpu" else f" on {x.device}"
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{device}{grad}"
    return repr(x)


def calls() -> Iterator[Call]:
    """What to call it, the function and its arguments."""
    x = torch.zeros(2, 4, 6, 8)
    attention = dict.fromkeys(ATTENTION, x)
    for name in ATTENTION:
        for what, value in TENSORS.items():
            yield f"attention_kl({name}: {what})", attention_kl, attention | {name: value}
    for name, values in OF_ATTENTION.items():
        for value in values:
            text = f"attention_kl({name}={_described(value)})"
            yield text, attention_kl, attention | {name: value}
    heads = (torch.zeros(4, 3), torch.zeros(11, 3), torch.zeros(4, 5), torch.zeros(11, 5))
    linear = dict(zip(LINEAR, heads, strict=True))
    wrong: dict[str, Any] = {
        "a list": [1.0], "integers": torch.zeros(4, 3).int(), "a vector": torch.zeros(3),
        "another dtype": torch.zeros(4, 3).double(), "another hidden_size": torch.zeros(4, 7),
        "another device": torch.zeros(4, 3, device="meta"), "other tokens": torch.zeros(6, 3),
        "nothing": torch.zeros(0, 3),
    }  # fmt: skip
    for name in LINEAR:
        for what, value in wrong.items():
            if name.endswith("weight") and what == "other tokens":
                continue  # vocabulary entries: the vocabularies may differ in size
            yield f"linear_kl({name}: {what})", linear_kl, linear | {name: value}
    for name, values in OF_LINEAR.items():
        for value in values:
            yield f"linear_kl({name}={_described(value)})", linear_kl, linear | {name: value}
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    packed = dict.fromkeys(ATTENTION, torch.zeros(6, 4, 8))
    packed |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    packed |= {"max_seqlen_q": 4, "max_seqlen_k": 4}
    for name, values in {
        "student_q": (x, torch.zeros(5, 4, 8)),
        "cu_seqlens_q": (offsets.long(), offsets[:2], offsets[:1], offsets[None], [0, 6]),
        "cu_seqlens_k": (offsets.float(), offsets[:2]),
        "max_seqlen_q": (0, -1),
        "max_seqlen_k": (0, -4),
        "row_mask": (torch.ones(5, dtype=torch.bool),),
    }.items():
        for value in values:
            text = f"attention_kl_varlen({name}={_described(value)})"
            yield text, attention_kl_varlen, packed | {name: value}
    for name, function in (
        ("forward_kl", nitrobrew.forward_kl),
        ("reverse_kl", nitrobrew.reverse_kl),
    ):
        for chunk in (0, -5):
            yield (
                f"nitrobrew.{name}(chunk_V={chunk})",
                lambda f=function, n=chunk: f(*heads, chunk_V=n),
                {},
            )
    yield from calls_of_programs()


def calls_of_programs() -> Iterator[Call]:
    """Of `row_program`: tensors, options, and functions that are no row program."""
    x = torch.zeros(2, 4, 6, 8)
    good: dict[str, Any] = {"function": _square, "dots": {"s": (x, x)}}
    head = {"function": _square, "dots": {"s": (torch.zeros(4, 3), torch.zeros(11, 3))}}
    ids = torch.zeros(2, 1, 6, 3).long()
    for name, values in {
        "dots": (
            {}, {"s": x}, {"s": (x, [1.0])}, {"s": (x.int(), x)}, {"s": (x, x.double())},
            {"s": (x, x[:, :3])}, {"s": (x, x[..., :7])}, {"s": (x[0], x[0])},
            {"s": (x, x[:, :, :0])}, {"s": (x, x.to("meta"))}, {"a b": (x, x)},
            {"s": (x, x), "t": (x[:, :, :5], x)},
        ),
        "rows": ({"w": [1.0]}, {"w": torch.zeros(5)}, {"w": torch.zeros(2, 3, 6)},
                 {"s": torch.zeros(6)}, {"w": torch.zeros(6).to("meta")}),
        "keys": ({"w": 1.0}, {"w": torch.zeros(5)}, {"w": torch.zeros(1, 1, 1, 6)}),
        "pairs": ({"w": None}, {"w": torch.zeros(6, 5)}, {"w": torch.zeros(2, 3, 6, 6)}),
        "columns": ({"c": [0]}, {"c": ids.float()}, {"c": (ids, ids)}, {"c": ids[:, :, :5]},
                    {"c": (ids, torch.zeros(2, 1, 6, 4))}),
        "window": ((-1, None), (None, -2), (1.5, None)),
        "key_lengths": (torch.ones(3).int(), torch.ones(2), torch.ones(2).int().to("meta")),
        "mask": (torch.ones(6, 6), torch.ones(5, 6) > 0, torch.ones(2, 4, 6, 6) > 0),
        "impl": ("cuda", "eager"),
    }.items():  # fmt: skip
        for value in values:
            text = f"row_program({name}={_inside(value)})"
            yield text, row_program, good | {name: value}
    for name, value in {
        "rows": {"w": torch.zeros(5)}, "keys": {"w": torch.zeros(4)},
        "pairs": {"w": torch.zeros(4, 10)}, "columns": {"c": torch.zeros(5, 2).long()},
        "key_lengths": torch.ones(4).int(),
    }.items():  # fmt: skip
        yield (
            f"row_program of vocabulary entries({name}={_inside(value)})",
            row_program,
            head | {name: value},
        )
    functions: dict[str, Callable[[Any], Any]] = {
        "an element for each key": lambda e: e.s,
        "a number": lambda e: 1.0,
        "nothing": lambda e: None,
        "a sum over rows": lambda e: e.s.sum("row"),
        "a dimension": lambda e: e.s.sum(-1),
        "a matmul": lambda e: (e.s @ e.s).sum("key"),
        "an unknown name": lambda e: e.t.sum("key"),
        "a branch": lambda e: e.s.sum("key") if e.s > 0 else 0.0,
        "a sort": lambda e: e.s.sort("key"),
        "a large power": lambda e: (e.s**1e9).sum("key"),
        "another tensor": lambda e: (e.s * torch.ones(6)).sum("key"),
    }
    for what, function in functions.items():
        yield f"row_program(function: {what})", row_program, good | {"function": function}


def _square(e: Any) -> Any:
    return (e.s * e.s).sum("key")


def _inside(x: Any) -> str:
    if isinstance(x, dict):
        return "{" + ", ".join(f"{k}: {_inside(v)}" for k, v in x.items()) + "}"
    if isinstance(x, tuple):
        return "(" + ", ".join(map(_inside, x)) + ")"
    return _described(x)


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
    monkeypatch.setattr(linear_ops, "row_functions", refuse)
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
    assert kinds == {"ValueError", "TypeError", "NotImplementedError", "AttributeError"}
    assert text == SNAPSHOT.read_text()
