"""Random calls of `linear_kl`, and its rows over a vocabulary in several shards."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.fuzz.drawn import formulas
from tests.fuzz.drawn.attention import INF, Source
from tests.fuzz.drawn.judge import Drawn
from tests.support.subgraphs import _as_written
from torch_streamkl import linear_kl
from torch_streamkl.cpu import compiled
from torch_streamkl.distributed import shard_rows
from torch_streamkl.linear import chunks, interface, token_tiles
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.linear import rows as linear_rows
from torch_streamkl.linear.problem import NeedsGrad, RowValues, RowWeights

INPUTS = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight", "student_bias",
          "teacher_bias")  # fmt: skip


def draw(seed: int, device: str = "cpu", structures: int | None = None) -> Drawn:
    """The call of a seed, the same on every run."""
    s = Source(seed, structures)
    fixed = s.fixed
    dtypes = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
    dtype = fixed.one_of(*(x for x in dtypes if device == "cpu" or x != torch.float64))
    largest = 30 if device in ("cpu", "interpreter") else 5000
    shape = s.one_of((s.whole(1, 9),), (s.whole(1, 3), s.whole(1, 4)), (s.whole(1, 12),))
    if s.chance(0.05):
        shape = s.one_of((0,), (2, 0), (0, 3))
    sizes = {"student": fixed.whole(1, largest)}
    sizes["teacher"] = sizes["student"] if fixed.chance(0.5) else fixed.whole(1, largest)
    tensors: dict[str, Tensor] = {}
    size = s.one_of(0.3, 1.0, 1.0, 4.0, 20.0)
    for side, vocab_size in sizes.items():
        width = s.one_of(1, 3, 8, 16)
        hidden = s.normal(*shape, width) * size
        if hidden.numel() and s.chance(0.2):
            hidden.view(-1, width)[s.whole(0, hidden.numel() // width - 1)] *= 30.0
        tensors[f"{side}_hidden"] = hidden.to(dtype)
        weight = s.normal(vocab_size, width)
        if s.chance(0.2):
            weight = weight.T.contiguous().T
        tensors[f"{side}_weight"] = weight.to(dtype)
        if fixed.chance(0.5):
            bias = s.extreme(s.normal(vocab_size)) if s.chance(0.5) else s.normal(vocab_size)
            shortest = min(sizes.values())
            if vocab_size > shortest and s.chance(
                0.7
            ):  # vocabulary entries that the other side lacks
                bias[shortest:] = s.one_of(-INF, -200.0, -1e5)
            tensors[f"{side}_bias"] = bias
    options: dict[str, Any] = s.divergence() | {"reduction": "none"}
    for side in sizes:
        if s.chance(0.2):
            options[f"{side}_logit_scale"] = s.one_of(0.3, 2.0, -0.5)
        if fixed.chance(0.2):
            options[f"{side}_softcap"] = s.one_of(2.0, 30.0)
    if fixed.chance(0.4):
        labels = [s.whole(0, sizes["student"] - 1) for _ in range(math.prod(shape))]
        ignored = fixed.one_of(-100, -1, 0)
        labels = [ignored if s.chance(0.3) else x for x in labels]
        kind = fixed.one_of(torch.int64, torch.int32)
        options["labels"] = torch.tensor(labels, dtype=kind).view(shape)
        options["hard_weight"] = s.one_of(0.0, 1.0, 0.3, -0.5)
        options["ignore_index"] = ignored
    if s.chance(0.3):
        options["row_mask"] = s.flags(*s.broadcast(shape))
    if s.chance(0.4):
        weight = s.normal(*s.broadcast(shape)).to(s.one_of(torch.float32, torch.float64))
        for value in (0.0, 1.0):
            weight = weight.masked_fill(s.flags(*weight.shape, p=0.3), value)
        tensors["row_weight"] = weight
    if fixed.chance(0.6):
        options["reduction"] = fixed.one_of("mean", "sum", "batchmean")
    strategies = ("auto", "recompute") if options["reduction"] == "none" else (
        "auto", "recompute", "forward")  # fmt: skip
    options["strategy"] = fixed.one_of(*strategies)
    trained = tuple(name for name in tensors if s.chance(0.8))
    blocks = {"elements": s.one_of(16, 64, 2**17), "tokens": s.one_of(1, 2, 5, 1000)}
    return Drawn("linear", seed, dtype, tensors, options, trained, blocks)


def formula(call: Drawn, given: dict[str, Tensor], naive: bool) -> Tensor:
    """The right value of a call."""
    logits_dtype = call.dtype if naive and call.dtype.itemsize == 2 else None
    options = {**call.options, "is_rounded_again": naive and call.compute == torch.float64}
    return formulas.linear(given, options, call.compute, logits_dtype)


def run(call: Drawn, given: dict[str, Tensor], impl: str) -> Tensor:
    """What an implementation makes of a call.

    "compiled" is the CPU's in compiled graphs, "shards" rows over parts of the vocabulary.
    """
    device = given["student_hidden"].device
    options = {
        name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.options.items()
    }
    if impl == "compiled":  # see `running`
        return linear_kl(**given, **options)
    if impl == "shards":
        operator = mock.patch.object(interface.linear_ops, "linear_kl", _sharded(call))
        options["strategy"] = "recompute"
        with operator:
            return linear_kl(**given, **options)
    return linear_kl(**given, **options, impl=impl)


@contextlib.contextmanager
def running(impl: str) -> Iterator[None]:
    """Inside, the operators run the implementation, forward and backward."""
    if impl != "compiled":
        yield
        return
    rows = mock.patch.object(linear_ops, "rows_of", return_value=token_tiles)
    with rows, mock.patch.object(compiled, "find", _as_written):
        yield


def _sharded(call: Drawn) -> Any:
    """The operator ``linear_kl`` over two or three parts of the vocabulary, one after another."""
    size = max(call.tensors[f"{side}_weight"].shape[0] for side in ("student", "teacher"))
    source = Source(call.seed)
    cuts = sorted({0, size, *(source.whole(0, size) for _ in range(2))})

    def operator(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor, None]:
        inputs = tensors[:6]
        value, hard = _Sharded.apply(cuts, tensors[6], options, *inputs)
        return value, hard, None

    return operator


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cuts: list[int], labels: Any, options: Any, *inputs: Any) -> Any:
        problem = linear_ops.problem_of(*inputs, labels, **options)[0]
        shards = [problem.of_vocab(slice(a, b)) for a, b in itertools.pairwise(cuts)]
        num_fields = shard_rows.num_fields(problem)
        parts = inputs[0].new_empty(
            (len(shards) + 1, num_fields, problem.num_tokens), dtype=problem.compute_dtype
        )
        for shard, part in zip(shards, parts, strict=False):
            shard_rows.state(shard, *_logits(shard), part)
        shard_rows.empty_state(parts[-1])  # of a rank that has no vocabulary entries
        out = RowValues.allocate(problem)
        shard_rows.merged(problem, parts, problem.student.vocab_size, out)
        if problem.functional.bilinear is None:
            totals = parts.new_empty((len(shards), 3, problem.num_tokens))
            for shard, total in zip(shards, totals, strict=True):
                shard_rows.sums(shard, *_logits(shard), out, total)
            found = totals.sum(0)
            for field, total in zip((out.value, *out.statistics[2:4]), found, strict=True):
                field.copy_(total)
        ctx.shards, ctx.out, ctx.inputs, ctx.problem = shards, out, inputs, problem
        return out.value, out.hard

    @staticmethod
    def backward(ctx: Any, grad: Tensor, hard_grad: Tensor) -> Any:
        needs = ctx.needs_input_grad[3:]
        wanted = NeedsGrad(*needs)
        sums: list[Any] = [
            torch.zeros_like(x, dtype=torch.float64) if x is not None else None for x in ctx.inputs
        ]
        has_labels = ctx.problem.labels is not None
        weights = RowWeights(grad.contiguous(), hard_grad.contiguous() if has_labels else None)
        for shard in ctx.shards:
            student, teacher = _logits(shard)
            shard_rows.gradient(shard, student, teacher, ctx.out, weights, wanted)
            first = shard.vocab_start
            vocab = [slice(first, first + len(head.weight)) for head in shard.heads]
            for side, d in enumerate((student.double(), teacher.double())):
                hidden, weight = ctx.inputs[2 * side : 2 * side + 2]
                if (wanted.student, wanted.teacher)[side] and d.shape[1]:
                    sums[2 * side] += d @ weight[vocab[side]].double()
                    sums[2 * side + 1][vocab[side]] += d.T @ hidden.double()
                    if ctx.inputs[4 + side] is not None:
                        sums[4 + side][vocab[side]] += d.sum(0)
        grads = [
            x.to(like.dtype) if need else None
            for x, like, need in zip(sums, ctx.inputs, needs, strict=True)
        ]
        return None, None, None, *grads


def _logits(shard: Any) -> tuple[Tensor, Tensor]:
    student, teacher = (head.hidden @ head.weight.t() for head in shard.heads)
    return student, teacher


@contextlib.contextmanager
def small_blocks(call: Drawn) -> Iterator[None]:
    """Plain torch cuts the call's blocks and chunks as large problems are cut."""
    with contextlib.ExitStack() as stack:
        for module in (linear_rows, token_tiles):
            patch = mock.patch.object(module, "BLOCK_ELEMENTS", call.blocks["elements"])
            stack.enter_context(patch)

        def room(problem: Any, _: int) -> int:
            return int(call.blocks["tokens"] * sum(chunks.row_bytes(problem)))

        stack.enter_context(mock.patch.object(chunks, "workspace_bytes", room))
        stack.enter_context(mock.patch.object(chunks, "token_multiple", return_value=1))
        yield
