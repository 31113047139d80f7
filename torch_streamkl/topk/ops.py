"""Registers the operators that `linear_topk_kl` calls.

- ``linear_topk``: per-row values, and the factors of their gradients; the backward recomputes the
  logits.
- ``linear_topk_sum``: a weighted sum of rows, and its gradients computed in the forward.

With a ``group_name`` that is not empty, the head is this rank's vocabulary shard.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from torch_streamkl.linear.ops import rows_limit
from torch_streamkl.linear.problem import Head, NeedsGrad
from torch_streamkl.loading import distributed
from torch_streamkl.program.divergences import Functional
from torch_streamkl.registration import (
    NAMESPACE,
    contiguous,
    define,
    fake_gradients,
    refuse_vmap,
    register,
    register_autograd,
    register_recomputing,
    without_none,
)
from torch_streamkl.runtime.devices import runs_kernels
from torch_streamkl.stored_gradients import scaled, scaled_gradients
from torch_streamkl.topk import chunks, values
from torch_streamkl.topk import rows as torch_rows
from torch_streamkl.topk.chunks import Exchange
from torch_streamkl.topk.problem import Places, RowResults, TopkProblem

_lib = Library(NAMESPACE, "FRAGMENT")
NUM_TENSORS = 5  # of TENSORS
GROUP_NAME = NUM_TENSORS + 8  # where it stands in a call
TENSORS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor log_probs"
OPTIONS = (
    "str functional, str tail, float temperature, float scale, float softcap, "
    "int max_workspace_mib, str impl, bool check_values, str group_name, int vocab_start"
)
GRADIENTS = "Tensor hidden_grad, Tensor weight_grad, Tensor bias_grad"

linear_topk = define(
    _lib,
    f"linear_topk({TENSORS}, {OPTIONS}) -> "
    "(Tensor value, Tensor log_s, Tensor entry_grad, Tensor factors, Tensor local_ids)",
)
linear_topk_backward = define(
    _lib,
    "linear_topk_backward(Tensor grad, Tensor entry_grad, Tensor factors, bool[] needs_grad, "
    f"{TENSORS}, {OPTIONS}) -> ({GRADIENTS})",
)
linear_topk_sum = define(
    _lib,
    f"linear_topk_sum(Tensor row_weight, bool[] needs_grad, {TENSORS}, {OPTIONS}) -> "
    f"(Tensor total, Tensor value, Tensor log_s, {GRADIENTS})",
)


def problem_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    log_probs: Tensor,
    *options: Any,
) -> TopkProblem:
    """Builds the problem of an operator's flat arguments, whose head is the whole vocabulary."""
    functional, tail, temperature, scale, softcap = options[:5]
    head = Head(hidden, weight, bias, scale, softcap)
    return TopkProblem(head, ids, log_probs, Functional.of(functional), tail, temperature)


def row_functions(problem: TopkProblem, impl: str) -> ModuleType:
    """Returns the module that reads whole rows of logits: Triton's or plain torch."""
    device = problem.head.hidden.device
    limit = rows_limit(device, problem.compute_dtype)
    if impl == "auto" and device.type != "cuda":  # also in the interpreter
        return torch_rows
    if not runs_kernels("linear_topk_kl", impl, device, limit):
        return torch_rows
    from torch_streamkl.topk.triton import rows as kernels

    module: ModuleType = kernels
    return module


def _call(
    tensors: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[TopkProblem, ModuleType, Exchange]:
    """Returns a call's problem on this rank, its row functions, and how ranks exchange rows."""
    problem = problem_of(*tensors, *options)
    workspace, impl, check_values, group_name, vocab_start = options[5:]
    rows = row_functions(problem, impl)
    if group_name:
        placed: tuple[TopkProblem, Exchange, int] = distributed("topk").shard(
            problem, workspace, rows.__name__, group_name, vocab_start
        )
        problem, exchange, vocab_size = placed
    else:
        exchange = Exchange.of_one(problem, workspace)
        vocab_size = problem.head.vocab_size
    values.check(problem, vocab_size, check_values)
    return problem, rows, exchange


def _forward(*args: Any) -> tuple[Tensor, ...]:
    problem, rows, exchange = _call(args[:NUM_TENSORS], args[NUM_TENSORS:])
    out = chunks.forward(problem, rows, exchange)
    local_ids = problem.ids.new_empty(0)
    if args[GROUP_NAME]:  # the backward exchanges nothing
        places = Places.of(problem)
        local_ids = torch.where(places.inside, places.index, -1)
    return out.value, out.log_s, out.entry_grad, out.factors, local_ids


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    problem = problem_of(*args)
    out = RowResults.allocate(problem)
    local_ids = problem.ids.new_empty(0)
    if args[GROUP_NAME]:
        local_ids = problem.ids.new_empty(problem.ids.shape, dtype=torch.int64)
    return out.value, out.log_s, out.entry_grad, out.factors, local_ids


def _backward(
    grad: Tensor, entry_grad: Tensor, factors: Tensor, needs_grad: list[bool], *args: Any
) -> tuple[Tensor, ...]:
    problem, options = problem_of(*args), args[NUM_TENSORS:]
    rows, workspace = row_functions(problem, options[6]), options[5]
    saved = RowResults(grad, entry_grad, entry_grad, factors)
    exchange = Exchange.of_one(problem, workspace)
    needs = _needs(needs_grad)
    return _flat(problem, chunks.backward(problem, saved, grad, needs, rows, exchange))


def _flat(problem: TopkProblem, grads: Any) -> tuple[Tensor, ...]:
    return without_none(grads, problem.head.hidden)


def _needs(needs_grad: list[bool]) -> NeedsGrad:
    hidden, weight, bias = needs_grad
    return NeedsGrad(student_hidden=hidden, student_weight=weight, student_bias=bias)


def _gradient_fakes(problem: TopkProblem, needs_grad: list[bool]) -> tuple[Tensor, ...]:
    head = problem.head
    make = contiguous if problem.is_sparse else torch.empty_like  # torch's sums of bags
    return fake_gradients((head.hidden, head.weight, head.bias), needs_grad, head.hidden, make)


def _backward_fake(
    grad: Tensor, entry_grad: Tensor, factors: Tensor, needs_grad: list[bool], *args: Any
) -> tuple[Tensor, ...]:
    return _gradient_fakes(problem_of(*args), needs_grad)


def _sum(row_weight: Tensor, needs_grad: list[bool], *args: Any) -> tuple[Tensor, ...]:
    problem, rows, exchange = _call(args[:NUM_TENSORS], args[NUM_TENSORS:])
    weight = row_weight.to(problem.compute_dtype)
    out, grads = chunks.forward_with_gradients(problem, weight, _needs(needs_grad), rows, exchange)
    total = torch.where(weight == 0, 0.0, out.value * weight).sum()
    return total, out.value, out.log_s, *_flat(problem, grads)


def _sum_fake(row_weight: Tensor, needs_grad: list[bool], *args: Any) -> tuple[Tensor, ...]:
    problem = problem_of(*args)
    out = RowResults.allocate(problem)
    grads = _gradient_fakes(problem, needs_grad)
    return out.value.new_empty(()), out.value, out.log_s, *grads


def _flops(given: dict[str, Any]) -> int:
    """Counts the logits, and one matmul for each gradient to hidden states and weight."""
    num_tokens, hidden_size = given["hidden"]
    is_sparse = given["tail"] == "renormalize"
    entries = given["ids"][1] if is_sparse else given["weight"][0]
    return int(2 * num_tokens * hidden_size * entries) * (1 + sum(given.get("needs_grad", ())[:2]))


for _name, _implementation, _fake in (
    ("linear_topk", _forward, _forward_fake),
    ("linear_topk_backward", _backward, _backward_fake),
    ("linear_topk_sum", _sum, _sum_fake),
):
    register(_lib, _name, _implementation, _fake, _flops)


def _kept(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> list[Any]:
    """Returns the tensors of the backward: with a group, ids are those of this rank's shard."""
    tensors = list(inputs[:NUM_TENSORS])
    if inputs[GROUP_NAME]:
        tensors[3] = output[4]
    return tensors


register_recomputing(_lib, "linear_topk", NUM_TENSORS, slice(2, 4), _kept)


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _total, value, log_s, *grads = output
    ctx.mark_non_differentiable(value, log_s, *grads)
    ctx.num_inputs, ctx.given = len(inputs), list(inputs[1])
    ctx.weight_dtype = inputs[0].dtype
    ctx.save_for_backward(value, *grads)
    ctx.set_materialize_grads(False)


def _sum_autograd(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    found: list[Any] = [None] * ctx.num_inputs
    if grad is None:
        return tuple(found)
    value, *stored = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if any(need and not given for need, given in zip(needs[2:5], ctx.given, strict=True)):
        raise RuntimeError(
            f"linear_topk_sum was called with needs_grad={ctx.given}, but hidden, weight or "
            "bias requires a gradient that it does not name"
        )
    found[2:5] = scaled_gradients(stored, grad, needs[2:5])
    if needs[0]:
        found[0] = scaled(value, grad, False).to(ctx.weight_dtype)
    return tuple(found)


register_autograd(_lib, "linear_topk_sum", _sum_autograd, _setup_sum)
refuse_vmap(
    _lib,
    "linear_topk",
    "linear_topk_sum",
    message=(
        "vmap over linear_topk_kl is not supported; its tokens may have any leading dimensions"
    ),
)
