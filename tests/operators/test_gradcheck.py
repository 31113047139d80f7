"""Gradients against finite differences, in float64, of every implementation that has float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from tests.support.covering import every
from tests.support.problems import CASES, build
from tests.support.subgraphs import bodies_as_written  # noqa: F401  # a fixture
from torch_streamkl import linear_kl
from torch_streamkl.attention import ops, query_tiles, torch_impl, torch_scores
from torch_streamkl.linear import chunks as linear_chunks
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.linear import token_tiles

PACKED = ((2, 4), (3, 1))


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("name", every(3, CASES))
def test_attention(name: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_scores, "STREAMING_BLOCK_ELEMENTS", 8)  # several blocks of each kind
    monkeypatch.setattr(torch_scores, "STREAMING_MAX_KEYS", 3)
    spec = CASES[name]
    spec = replace(spec, dtype=torch.float64, student_dim=3, teacher_dim=2)
    spec = replace(spec, seqlen_q=min(3, spec.seqlen_q), seqlen_k=5)
    if spec.packed is not None:
        spec = replace(spec, packed=PACKED)
    call = build(spec).to(torch.float64)
    wanted = list(call.tensors)
    if spec.known_lse:  # what is known does not move with the teacher
        wanted = [n for n in wanted if n.startswith("student")]

    def function(*tensors: Tensor) -> Tensor:
        call.tensors.update(zip(wanted, tensors, strict=True))
        return call.run(impl)

    assert gradcheck(function, tuple(call.tensors[n] for n in wanted))


# those with a limit of query tiles, and one of many heads that takes as long as all others
NOT_OF_PANELS = ("teacher_lse", "gqa_few_queries")
OF_PANELS = [n for n in CASES if "mean" not in n and n not in NOT_OF_PANELS]


@pytest.mark.usefixtures("bodies_as_written")
@pytest.mark.parametrize("name", every(5, OF_PANELS))
def test_panels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiled graphs run on a CPU, without compiling it."""
    monkeypatch.setattr(query_tiles, "QUERY_TILE_ELEMENTS", 20)
    monkeypatch.setattr(query_tiles, "LEAST_QUERIES", 1)
    monkeypatch.setattr(ops, "_module", lambda _: query_tiles)
    for function in ("forward", "backward", "forward_with_gradients"):
        monkeypatch.setattr(torch_impl, function, None)  # what query tiles hand on
    test_attention(name, "torch", monkeypatch)


LINEAR: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "reverse_kl": {"divergence": "reverse_kl"},
    "js": {"divergence": "js", "beta": 0.3},
    "tv": {"divergence": "tv"},
    "guards": {"student_eps": 1e-3, "teacher_clamp": 1e-2},
    "temperature and softcap": {"temperature": 2.0, "student_softcap": 3.0},
    "labels": {"labels": torch.tensor([0, -100, 4]), "hard_weight": 0.5},
}


@pytest.mark.parametrize("strategy", ["forward", "recompute"])
@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str, impl: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def two_rows(problem: Any, _: object) -> int:
        return 2 * sum(linear_chunks.row_bytes(problem))

    monkeypatch.setattr(linear_chunks, "workspace_bytes", two_rows)
    shapes = ((3, 2), (5, 2), (3, 4), (5, 4), (5,), (5,), (3,))  # biases, weights of rows
    tensors = tuple(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)

    def function(*x: Tensor) -> Tensor:
        biases = {"student_bias": x[4], "teacher_bias": x[5]}
        how = {"impl": impl, "strategy": strategy, "reduction": "sum"}
        return linear_kl(*x[:4], **biases, row_weight=x[6], **LINEAR[name], **how)

    assert gradcheck(function, tensors)


@pytest.mark.usefixtures("bodies_as_written")
@pytest.mark.parametrize("strategy", ["forward", "recompute"])
@pytest.mark.parametrize("name", every(2, LINEAR))
def test_linear_panels(name: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_tiles, "BLOCK_ELEMENTS", 5)
    monkeypatch.setattr(linear_ops, "rows_of", lambda *_: token_tiles)
    test_linear(name, "torch", strategy, monkeypatch)
