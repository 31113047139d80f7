"""Kernels for shards of a vocabulary without a GPU: in Triton's interpreter against the kernel of
whole rows, and compiled for GPUs that are not here.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.interpreter import inside, quiet
from torch_streamkl.distributed import shard_rows
from torch_streamkl.linear import chunks as linear_chunks
from torch_streamkl.linear import rows as linear_rows
from torch_streamkl.linear.ops import problem_of
from torch_streamkl.linear.problem import LinearProblem, NeedsGrad, RowValues, RowWeights
from torch_streamkl.program.divergences import named

pytestmark = quiet

NUM_TOKENS, NUM_WORDS = 5, 150


def problem(
    divergence: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any
) -> LinearProblem:
    xs, ws = torch.randn(NUM_TOKENS, 16) * 3, torch.randn(NUM_WORDS, 16)
    # vocabulary entries that the teacher lacks make the reverse KL infinite
    lacking = 0 if divergence == "jeffreys" else 3
    xt, wt = torch.randn(NUM_TOKENS, 8) * 3, torch.randn(NUM_WORDS - lacking, 8)
    if options.pop("bias", False):
        options["student_bias"], options["teacher_bias"] = (torch.randn(len(w)) for w in (ws, wt))
    tensors = [x.to(device, dtype) for x in (xs, ws, xt, wt)]
    options = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in options.items()}
    return problem_of(*tensors, functional=named(divergence).text, **options)[0]


def logits(part: LinearProblem) -> tuple[Tensor, Tensor]:
    student, teacher = (head.hidden @ head.weight.t() for head in part.heads)
    return student, teacher


def sharded(whole: LinearProblem, module: Any, cuts: list[int]) -> tuple[RowValues, list[Any]]:
    """Merged statistics, and the gradients of the logits of each shard."""
    shards = [whole.of_vocab(slice(a, b)) for a, b in itertools.pairwise(cuts)]
    new = functools.partial(whole.student.hidden.new_empty, dtype=torch.float32)
    parts = new((len(shards) + 1, shard_rows.num_fields(whole), NUM_TOKENS))
    for shard, part in zip(shards, parts, strict=False):
        module.state(shard, *logits(shard), part)
    module.empty_state(parts[-1])  # of a rank without vocabulary entries
    out = RowValues.allocate(whole)
    module.merged(whole, parts, NUM_WORDS, out)
    if whole.functional.bilinear is None:
        totals = new((len(shards), 3, NUM_TOKENS))
        for shard, total in zip(shards, totals, strict=True):
            module.sums(shard, *logits(shard), out, total)
        for field, total in zip((out.value, *out.statistics[2:4]), totals.sum(0), strict=True):
            field.copy_(total)
    wanted = NeedsGrad(student_weight=True, teacher_weight=True)
    ours, hard = (torch.rand(NUM_TOKENS).to(parts.device) for _ in range(2))
    weights = RowWeights(ours, None if whole.labels is None else hard)
    gradients = []
    for shard in shards:
        torch.manual_seed(0)
        s, t = logits(shard)
        module.gradient(shard, s, t, out, weights, wanted)
        gradients.append((s, t))
    return out, gradients


@inside
@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("divergence", ["forward_kl", "jeffreys", "js", "tv"])
def test_interpreted(divergence: str, labels: bool) -> None:
    from torch_streamkl.linear.triton import shards as shard_kernels

    options: dict[str, Any] = {"bias": labels}
    if labels:
        options |= {"labels": torch.tensor([3, -100, 149, 0, 60]), "temperature": 2.0,
                    "student_softcap": 5.0, "student_scale": 0.7}  # fmt: skip
    whole = problem(divergence, **options)
    cuts = [0, 40, 40 + 64, NUM_WORDS]
    torch.manual_seed(1)
    out, gradients = sharded(whole, shard_kernels, cuts)
    torch.manual_seed(1)
    expected, expected_gradients = sharded(whole, shard_rows, cuts)
    log2e = 1.4426950408889634
    torch.testing.assert_close(out.value, expected.value)
    torch.testing.assert_close(out.hard, expected.hard)
    torch.testing.assert_close(out.statistics[:2], expected.statistics[:2] * log2e)
    torch.testing.assert_close(out.statistics[2:4], expected.statistics[2:4])
    for got, want in zip(gradients, expected_gradients, strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    rows = linear_chunks.forward(whole, 0, linear_rows)
    torch.testing.assert_close(out.value, rows.value, atol=2e-5, rtol=1e-5)
