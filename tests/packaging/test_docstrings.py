"""The naive code in the docstrings of the operators has the operators' values."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_streamkl import (
    attention_kl,
    attention_kl_varlen,
    attention_topk_kl,
    linear_kl,
    linear_topk_kl,
    nitrobrew,
    row_program,
)

NAMES = {
    "torch": torch, "F": F, "attention_kl": attention_kl, "row_program": row_program,
    "linear_kl": linear_kl,
}  # fmt: skip


def result(function: Callable[..., Any], number: int, given: dict[str, Any]) -> Tensor:
    """What the last line of a block of a docstring gives; definitions stay in ``given``."""
    blocks = re.findall(
        r".. code-block:: python\n((?:\n| {4}.*\n)+)", inspect.getdoc(function) or ""
    )
    tree = ast.parse(textwrap.dedent(blocks[number]))
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    exec(compile(tree, "docstring", "exec"), given)
    value: Tensor = eval(compile(ast.Expression(last.value), "docstring", "eval"), given)
    return value


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def maps(rows: tuple[int, ...], keys: tuple[int, ...]) -> dict[str, Any]:
    return {f"{side}_{x}": randn(*(rows if x == "q" else keys), 8)
            for side in ("student", "teacher") for x in "qk"}  # fmt: skip


def _attention() -> tuple[dict[str, Any], dict[str, Any]]:
    mask = torch.ones(6, 7, dtype=torch.bool).tril()
    given = {**maps((2, 4, 6), (2, 4, 7)), "student_scale": 0.3, "teacher_scale": 0.2}
    return {**given, "mask": mask}, {**given, "attn_mask": mask}


def _packed() -> tuple[dict[str, Any], dict[str, Any]]:
    offsets = {"cu_seqlens_q": torch.tensor([0, 2, 6]), "cu_seqlens_k": torch.tensor([0, 3, 7])}
    given = {**maps((6, 4), (7, 4)), **{k: x.int() for k, x in offsets.items()}}
    return given, {**given, "max_seqlen_q": 4, "max_seqlen_k": 4}


def _heads() -> dict[str, Any]:
    sides = (("student", 8), ("teacher", 6))
    given = {f"{side}_hidden": randn(5, width) for side, width in sides}
    given |= {f"{side}_weight": randn(11, width) for side, width in sides}
    return given | {f"{side}_bias": randn(11) for side, _ in sides}


def _linear() -> tuple[dict[str, Any], dict[str, Any]]:
    given = {**_heads(), "temperature": 2.0}
    return given, given


def _entries(tail: str) -> Callable[[], tuple[dict[str, Any], dict[str, Any]]]:
    def made() -> tuple[dict[str, Any], dict[str, Any]]:
        log_probs, ids = randn(5, 11).log_softmax(-1).topk(3)
        given = {"hidden": randn(5, 8), "weight": randn(11, 8), "bias": randn(11)}
        given |= {"ids": ids, "log_probs": log_probs, "tail": tail}
        return given, given

    return made


def _chosen_keys() -> tuple[dict[str, Any], dict[str, Any]]:
    ids = torch.rand(2, 6, 7).argsort(-1)[..., :3]
    given = {
        "student_q": randn(2, 3, 6, 8), "student_k": randn(2, 7, 8), "ids": ids,
        "teacher_q": randn(2, 4, 6, 8), "teacher_k": randn(2, 4, 7, 8),
        "student_head_weights": randn(2, 3, 6), "student_scale": 0.7, "teacher_scale": 0.4,
    }  # fmt: skip
    return given, given


def _nitrobrew() -> tuple[dict[str, Any], dict[str, Any]]:
    given = {"xs": randn(2, 5, 8), "xt": randn(2, 5, 6), "ws": randn(11, 8), "wt": randn(11, 6)}
    given |= {"temperature": 2.0, "reduction": "batchmean"}
    return given, given


CASES = {
    "attention_kl": (attention_kl, _attention),
    "attention_kl_varlen": (attention_kl_varlen, _packed),
    "linear_kl": (linear_kl, _linear),
    "linear_topk_kl": (linear_topk_kl, _entries("none")),
    "linear_topk_kl, bucket": (linear_topk_kl, _entries("bucket")),
    "linear_topk_kl, renormalize": (linear_topk_kl, _entries("renormalize")),
    "attention_topk_kl": (attention_topk_kl, _chosen_keys),
    "nitrobrew": (nitrobrew.forward_kl, _nitrobrew),
}


@pytest.mark.parametrize("name", CASES)
def test_naive_code_has_the_values_of_the_operator(name: str) -> None:
    function, made = CASES[name]
    of_code, of_call = made()
    naive = result(function, 0, {**NAMES, **of_code})
    torch.testing.assert_close(function(**of_call), naive, rtol=1e-9, atol=1e-9)


def test_naive_code_has_the_values_of_the_row_program() -> None:
    given = {**NAMES, **maps((2, 4, 6), (2, 4, 7)), "scale": 0.3}
    program, naive = (result(row_program, number, given) for number in (0, 1))
    torch.testing.assert_close(program, naive, rtol=1e-9, atol=1e-9)
