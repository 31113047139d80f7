"""The CPU implementation: values, gradients and memory against the naive code in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.feature_tests import (  # noqa: F401  # tests of this file
    test_any_call,
    test_dtype,
    test_feature,
    test_gradients_of_the_student_alone,
)
from tests.support.problems import CASES, INPUTS, build
from torch_streamkl.attention import ops, torch_impl, torch_scores
from torch_streamkl.attention.problem import NeedsGrad
from torch_streamkl.divergences.names import functional_text


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of queries and keys."""
    monkeypatch.setattr(torch_scores, "STREAMING_BLOCK_ELEMENTS", 96)
    monkeypatch.setattr(torch_scores, "STREAMING_MAX_KEYS", 16)


@pytest.mark.parametrize(
    ("fill", "clamped", "num_passes"),
    [
        (-1e4, "P*(logP-max(logS,-20.0))", 1),
        (torch.finfo(torch.float32).min, "P*(logP-max(logS,-20.0))", 1),
        (-30.0, "P*(logP-max(logS,-20.0))", 2),
        (-1e4, "max(P,1e-9)*(max(logP,-20.0)-max(logS,-21.0))", 2),  # masked keys add something
    ],
)
def test_padded_rows_take_a_second_pass_where_padding_counts(
    fill: float, clamped: str, num_passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NOTE [Masked keys far below] in divergences/row_state.py."""
    calls = [1]
    original = torch_impl._second_pass
    monkeypatch.setattr(
        torch_impl, "_second_pass", lambda *args: calls.append(2) or original(*args)
    )
    torch.manual_seed(0)
    tensors = torch.randn(4, 2, 1, 40, 8).unbind(0)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    mask[1, ..., 30:] = False
    ops.attention_kl(
        *tensors, mask=mask, mask_value=fill, functional=clamped,
        student_scale=0.1, teacher_scale=0.1, impl="torch",
    )  # fmt: skip
    assert max(calls) == num_passes


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that an operation made, views of what was given aside."""

    def __init__(self, *given: torch.Tensor | None) -> None:
        super().__init__()
        self.given = {x.untyped_storage().data_ptr() for x in given if x is not None}
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for x in results if isinstance(results, tuple | list) else (results,):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage.data_ptr() not in self.given:
                    self.size = max(self.size, storage.nbytes())
        return results


@pytest.mark.parametrize("name", ["causal", "js", "clamp_reached", "mask_bool", "head_mean"])
def test_memory_is_a_few_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_scores, "STREAMING_BLOCK_ELEMENTS", 2**12)
    monkeypatch.setattr(torch_scores, "STREAMING_MAX_KEYS", 64)
    call = build(replace(CASES[name], seqlen_q=300, seqlen_k=400))
    tensors = [call.tensors[n].detach() for n in INPUTS]
    mask = call.options.get("attn_mask")
    options = {"head_mean": call.spec.head_mean, "mask": mask}
    text = functional_text(call.spec.divergence, 0.5, 0.0, 0.0, call.spec.student_clamp, 0.0)
    problem, _ = ops.problem_of(*tensors, functional=text, **options)
    with LargestTensor(*tensors, mask) as largest:
        value, stats = torch_impl.forward(problem)
        torch_impl.backward(problem, stats, value, NeedsGrad(True, True, True, True))
    gradients = max(x.untyped_storage().nbytes() for x in tensors)
    block = 4 * 2**12
    assert largest.size <= max(block, gradients)
