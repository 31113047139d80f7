"""Every public operator with every argument of a wrong type says which argument, rule and value.

Another public function is a line in ``PUBLIC``: see tests/support/wrong_types.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.wrong_types import Public, problems
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
from torch_streamkl.attention_topk import arguments as of_chosen_keys
from torch_streamkl.linear.arguments import Options
from torch_streamkl.topk.arguments import MoreOptions

X, HEADS = torch.zeros(2, 4, 6, 8), (torch.zeros(4, 3), torch.zeros(11, 3))
QUERIES_AND_KEYS = ("student_q", "student_k", "teacher_q", "teacher_k")
OF_LINEAR = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight")
OFFSETS = torch.tensor([0, 2, 6], dtype=torch.int32)
PACKED: dict[str, Any] = {
    **dict.fromkeys(QUERIES_AND_KEYS, torch.zeros(6, 4, 8)),
    "cu_seqlens_q": OFFSETS,
    "cu_seqlens_k": OFFSETS,
    "max_seqlen_q": 4,
    "max_seqlen_k": 4,
}
NITROBREW = dict(zip(("xs", "ws", "xt", "wt"), HEADS * 2, strict=True))
TOPK: dict[str, Any] = {
    "hidden": HEADS[0],
    "weight": HEADS[1],
    "ids": torch.zeros(4, 1, dtype=torch.int64),
    "log_probs": -torch.ones(4, 1),
}
CHOSEN: dict[str, Any] = {
    **dict(zip(QUERIES_AND_KEYS, (X[:, :1], X[:, 0], X, X), strict=True)),
    "ids": torch.zeros(2, 6, 3, dtype=torch.int64),
}


def _named(function: Any, more: Any) -> dict[str, Any]:
    """What a function and its further options are annotated with."""
    own = function.__annotations__.items()
    return {k: x for k, x in own if k not in ("options", "return")} | more.__annotations__


def _linear_kl_module(**options: Any) -> None:
    LinearKL(**options)


PUBLIC = [
    Public("attention_kl", attention_kl, dict.fromkeys(QUERIES_AND_KEYS, X)),
    Public("attention_kl_varlen", attention_kl_varlen, PACKED),
    Public("linear_kl", linear_kl, dict(zip(OF_LINEAR, HEADS * 2, strict=True))),
    Public("LinearKL", _linear_kl_module, {}, annotations=Options.__annotations__),
    Public(
        "linear_topk_kl",
        linear_topk_kl,
        TOPK,
        annotations=_named(linear_topk_kl, MoreOptions),
    ),
    Public(
        "attention_topk_kl",
        attention_topk_kl,
        CHOSEN,
        annotations=_named(attention_topk_kl, of_chosen_keys.MoreOptions),
    ),
    Public("nitrobrew.forward_kl", nitrobrew.forward_kl, NITROBREW),
    Public("nitrobrew.reverse_kl", nitrobrew.reverse_kl, NITROBREW),
]

PROGRAM: dict[str, Any] = {"function": lambda e: (e.s * e.s).sum("key"), "dots": {"s": (X, X)}}
GROUPS = {"rows": X[0, 0, :, 0], "keys": X[0, 0, :, 0], "pairs": X[0, 0, :, :6]}


def _captured(group: str) -> Any:
    return lambda w: row_program(**PROGRAM, **{group: {"w": w}})


# tensors of a row program are named in dictionaries
PUBLIC += [
    Public(
        "row_program", row_program, PROGRAM,
        {name: rf"\b(a|{name})\b" for name in ("dots", "columns", *GROUPS)},
        {k: x for k, x in row_program.__annotations__.items() if k not in ("function", "return")},
    ),
    Public(
        "row_program of a dot",
        lambda q, k: row_program(PROGRAM["function"], dots={"s": (q, k)}),
        {"q": X, "k": X}, dict.fromkeys("qk", r"\bs\b"), dict.fromkeys("qk", "Tensor"),
    ),
    *(
        Public(f"row_program of {group}", _captured(group), {"w": x}, {}, {"w": "Tensor"})
        for group, x in GROUPS.items()
    ),
]  # fmt: skip


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.name)
def test_wrong_types_are_refused(public: Public) -> None:
    found = problems(public)
    assert not found, "\n".join(found)


def test_what_was_legal_does_not_make_equal_values_legal() -> None:
    """True, 1 and 1.0 are equal, and what is known of one call is not asked again."""
    attention_kl(X, X, X, X, temperature=1.0, window=(1, 2), is_causal=True)
    for wrong in ({"temperature": True}, {"window": (1.0, 2)}, {"is_causal": 1}):
        with pytest.raises(TypeError, match="must be"):
            attention_kl(X, X, X, X, **{**{"window": (1, 2), "is_causal": True}, **wrong})
