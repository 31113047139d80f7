"""Registers the operators that `linear_kl` calls for a vocabulary that ranks share.

- ``linear_kl_sharded`` returns value and cross-entropy per token, whole, on every rank. Its
  backward is that of ``linear_kl`` on this rank's vocabulary shard, with the statistics of whole
  rows.
- ``linear_kl_sharded_sum`` returns weighted sums, and their gradients computed in the forward.

The collectives of the forward are inside, because a chunk's gather overlaps the matmuls of the
chunk before. Gradients of hidden states are this rank's share. The caller adds them up, by a
collective that a compiler sees and schedules.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library

from torch_streamkl.bounds import check_labels
from torch_streamkl.distributed import collectives, shard_rows
from torch_streamkl.distributed.agreement import agree
from torch_streamkl.distributed.shard_rows import Shard
from torch_streamkl.distributed.vocab_ranges import BY_RANK, Shards
from torch_streamkl.linear import rows as linear_rows
from torch_streamkl.linear.ops import (
    GRADIENTS,
    INPUTS,
    NUM_TENSORS,
    OPTIONS,
    TENSORS,
    flops_of,
    gradient_fakes,
    linear_kl_backward,
    needs_grad_of,
    problem_of,
    row_functions,
    setup_sum_context,
    sum_arguments,
    sum_autograd,
    sum_results,
    weights_of,
    without_ignored,
)
from torch_streamkl.linear.problem import (
    LinearProblem,
    NeedsGrad,
    RowValues,
    workspace_bytes,
)
from torch_streamkl.registration import (
    NAMESPACE,
    define,
    only_needed,
    register,
    register_autograd,
)

_lib = Library(NAMESPACE, "FRAGMENT")
IGNORED = -(2**62)  # of labels that count from this rank's first vocabulary entry

# NOTE [Shard arguments]
# Which process group, and the vocabulary entries at which this rank's shards begin (-1: ranks hold
# consecutive vocabulary entries, in their order). Keyword-only: everything before them is as
# `linear_kl` has it.
_SHARD_ARGUMENTS = "*, str group_name, int student_vocab_start=-1, int teacher_vocab_start=-1"

linear_kl_sharded = define(
    _lib,
    f"linear_kl_sharded({TENSORS}, {OPTIONS}, {_SHARD_ARGUMENTS}) -> "
    "(Tensor value, Tensor hard, Tensor statistics, Tensor local_labels)",
)
linear_kl_sharded_sum = define(
    _lib,
    f"linear_kl_sharded_sum({TENSORS}, Tensor? row_weight=None, Tensor? hard_row_weight=None, "
    f"bool[] needs_grad=[], {OPTIONS}, {_SHARD_ARGUMENTS}) -> "
    f"(Tensor total, Tensor value, Tensor hard, {GRADIENTS})",
)


class _Place(NamedTuple):
    """Holds what NOTE [Shard arguments] describes."""

    group_name: str
    student_vocab_start: int = BY_RANK
    teacher_vocab_start: int = BY_RANK

    @staticmethod
    def taken_from(kwargs: dict[str, Any]) -> _Place:
        """Removes these arguments from those by keyword."""
        return _Place(**{name: kwargs.pop(name) for name in _Place._fields if name in kwargs})


def _shard(problem: LinearProblem, needs_grad: list[bool], place: _Place) -> Shard:
    """Returns this rank's part of a call that all ranks make; if one rank's fails, all raise."""
    student, teacher = problem.heads
    rows = row_functions(problem, problem.impl)
    facts = agree(
        place.group_name,
        student.hidden.device,
        "linear_kl",
        {
            "number of tokens": problem.num_tokens,
            "hidden_size of student_hidden": student.hidden.shape[1],
            "hidden_size of teacher_hidden": teacher.hidden.shape[1],
            "element size of student_hidden": student.hidden.element_size(),
            "element size of teacher_hidden": teacher.hidden.element_size(),
            "presence of labels (0 or 1)": int(problem.labels is not None),
            **_options_of(problem, rows.__name__, needs_grad),
        },
        {
            "student_vocab": student.vocab_size,
            "teacher_vocab": teacher.vocab_size,
            "student_vocab_start": place.student_vocab_start,
            "teacher_vocab_start": place.teacher_vocab_start,
            "workspace": workspace_bytes(problem, problem.max_workspace_mib),
        },
    )
    shards = Shards.of(facts)
    largest = (
        max(fact["student_vocab"] for fact in facts),
        max(fact["teacher_vocab"] for fact in facts),
    )
    vocab_start = shards.vocab_start(collectives.resolve(place.group_name).rank())
    return Shard(
        problem=replace(problem, vocab_start=vocab_start),
        group_name=place.group_name,
        num_ranks=len(facts),
        student_vocab_size=shards.student_vocab_size,
        row_bytes=shard_rows.row_bytes(problem, largest),
        workspace=min(fact["workspace"] for fact in facts),
        rows=_shard_functions(rows),
    )


def _shard_functions(rows: ModuleType) -> ModuleType:
    """Returns the module for row states that belongs to a module for rows."""
    if rows is linear_rows:
        return shard_rows
    from torch_streamkl.linear.triton import shards as shard_kernels

    module: ModuleType = shard_kernels
    return module


def _options_of(problem: LinearProblem, rows: str, needs_grad: list[bool]) -> dict[str, str]:
    """Returns the options that ranks have to give alike, and that no number describes."""
    options: dict[str, Any] = {
        "divergence": problem.functional.text,
        "temperature": problem.temperature,
        "ignore_index": problem.ignore_index,
        "max_workspace_mib": problem.max_workspace_mib or None,
        "implementation": "torch" if rows == linear_rows.__name__ else "triton",
        "needed gradients": needs_grad,
    }
    for name, head in zip(("student", "teacher"), problem.heads, strict=True):
        options[f"dtype of {name}_hidden"] = head.hidden.dtype
        options[f"{name}_logit_scale"] = head.scale
        options[f"{name}_softcap"] = head.softcap or None
        options[f"presence of {name}_bias"] = head.bias is not None
    return {name: str(value) for name, value in options.items()}


def _forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    place = _Place.taken_from(kwargs)
    problem = problem_of(*args, **kwargs)[0]
    shard = _shard(problem, [], place)
    check_labels(problem.labels, shard.student_vocab_size, problem.ignore_index)
    out = shard_rows.forward(shard)
    return out.value, out.hard, out.statistics, _local_labels(shard.problem)


def _local_labels(problem: LinearProblem) -> Tensor:
    """Returns labels relative to this rank's first entry, for the backward of `linear_kl`."""
    if problem.labels is None:
        return problem.student.hidden.new_empty(0, dtype=torch.int64)
    local = problem.labels.long() - problem.vocab_start
    return torch.where(problem.is_labelled(), local, IGNORED)


def _forward_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    _Place.taken_from(kwargs)
    out = RowValues.allocate(problem_of(*args, **kwargs)[0])
    return (
        out.value,
        out.hard,
        out.statistics,
        out.hard.new_empty(out.hard.shape, dtype=torch.int64),
    )


def _sum(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    place = _Place.taken_from(kwargs)
    (problem, _, _), row_weight, hard_row_weight, needs_grad = sum_arguments(*args, **kwargs)
    weights = weights_of(problem, row_weight, hard_row_weight)
    shard = _shard(problem, needs_grad, place)
    check_labels(problem.labels, shard.student_vocab_size, problem.ignore_index)
    labelled = without_ignored(problem, weights)
    rows, grads = shard_rows.forward_with_gradients(shard, labelled, NeedsGrad(*needs_grad))
    return sum_results(problem, rows, weights, grads[: len(INPUTS)])  # of no adapters


def _sum_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    _Place.taken_from(kwargs)
    (problem, _, _), _, _, needs_grad = sum_arguments(*args, **kwargs)
    rows = RowValues.allocate(problem)
    grads = gradient_fakes(problem, needs_grad)[: len(INPUTS)]
    return rows.value.new_empty(()), rows.value, rows.hard, *grads


register(_lib, "linear_kl_sharded", _forward, _forward_fake, flops_of)
register(_lib, "linear_kl_sharded_sum", _sum, _sum_fake, flops_of)


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: tuple[Tensor, ...]
) -> None:
    statistics, local_labels = output[2:]
    ctx.mark_non_differentiable(statistics, local_labels)
    ctx.has_labels = len(inputs) > 6 and inputs[6] is not None
    ctx.save_for_backward(statistics, local_labels, *inputs[:6])
    ctx.options = inputs[NUM_TENSORS:]
    ctx.num_inputs = len(inputs)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad: Tensor | None, hard_grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    # the dispatcher drops trailing arguments that have their default value
    needs = (*ctx.needs_input_grad, *(False,) * NUM_TENSORS)[: len(INPUTS)]
    needs_grad = needs_grad_of(list(needs), grad)
    statistics, local_labels, *tensors = ctx.saved_tensors
    tensors += [None] * (6 - len(tensors))
    if not ctx.has_labels:
        hard_grad = None
    if not any(needs_grad) or (grad is None and hard_grad is None):
        return (None,) * ctx.num_inputs
    options = dict(zip(_OPTION_NAMES, ctx.options, strict=False))
    grads = linear_kl_backward(
        grad,
        hard_grad,
        statistics,
        needs_grad,
        *tensors,
        local_labels if ctx.has_labels else None,
        **{**options, "ignore_index": IGNORED},
    )
    given = only_needed(grads, needs_grad)
    return tuple((given + [None] * ctx.num_inputs)[: ctx.num_inputs])


def _setup_sum_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: tuple[Tensor, ...]
) -> None:
    setup_sum_context(ctx, inputs, output)


_OPTION_NAMES = [a.name for a in linear_kl_sharded._schema.arguments[NUM_TENSORS:-3]]
register_autograd(_lib, "linear_kl_sharded", _autograd, _setup_context)
register_autograd(_lib, "linear_kl_sharded_sum", sum_autograd, _setup_sum_context)
