"""Defines linear_topk_kl(): the divergence of an LM head from a teacher's top-k entries."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, Unpack

import torch
from torch import Tensor

from torch_streamkl import checks, flop_counts
from torch_streamkl.divergences.names import Divergence, Reduction
from torch_streamkl.double_backward import differentiable_once
from torch_streamkl.linear.reductions import TokenReduction, needed_gradients, per_token
from torch_streamkl.loading import distributed
from torch_streamkl.registration import without_autocast
from torch_streamkl.topk import ops, reference
from torch_streamkl.topk.arguments import OPTION_NAMES, MoreOptions, Options, check_tensors
from torch_streamkl.topk.problem import Tail

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _on_several_ranks(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Sends calls with a group to `torch_streamkl.distributed`."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if kwargs.get("group") is None:
            return function(*args, **kwargs)
        value: _R = distributed("topk").together(function, *args, **kwargs)
        return value

    return call


@_on_several_ranks
def linear_topk_kl(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    log_probs: Tensor,
    *,
    bias: Tensor | None = None,
    tail: Tail = "none",
    divergence: Divergence = "forward_kl",
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    row_weight: Tensor | None = None,
    reduction: Reduction = "none",
    **options: Unpack[MoreOptions],
) -> Any:
    r"""Computes the divergence of an LM head from a teacher's k entries of each token.

    A server or a cache gives the teacher's entries: vocabulary ids, and their log-probabilities.
    The student's ``[tokens, vocab_size]`` logits are never there as a whole. With the teacher's
    probabilities P_i of the entries and the student's S_i, the default is

    .. math:: \sum_{i=1}^{k} P_i (\log P_i - \log S_i)

    It equals this naive code:

    .. code-block:: python

        log_s = F.linear(hidden, weight, bias).log_softmax(-1).gather(-1, ids)
        if tail == "bucket":
            log_s, log_probs = (
                torch.cat([x, torch.log(-torch.expm1(x.logsumexp(-1, keepdim=True)))], -1)
                for x in (log_s, log_probs)
            )
        if tail == "renormalize":
            log_s, log_probs = log_s.log_softmax(-1), log_probs.log_softmax(-1)
        (log_probs.exp() * (log_probs - log_s)).sum(-1)

    Args:
        hidden: the student's hidden states ``[..., hidden_size]``. The leading dimensions, at
            least one, are the tokens. float16, bfloat16, float32, or float64 in plain torch.
            Under autocast, operands are cast as those of a matmul are.
        weight: ``[vocab_size, hidden_size]``, with contiguous rows or columns.
        ids: int64 or int32 ``[..., k]``, vocabulary ids in any order. A negative id is padding.
        log_probs: ``[..., k]``, the teacher's log-probabilities in nats, at the temperature of the
            loss. An entry of -inf is padding, whatever its id. They get no gradient.
        bias: ``[vocab_size]``, added to the logits.
        tail: ``"none"`` compares the entries alone. ``"bucket"`` adds one entry for the
            probability of all other ids (a ghost token). ``"renormalize"`` divides both sides by
            their probability of the entries. ``log_probs`` may then be logits.
        divergence: as in `linear_kl`, over the entries: ``"forward_kl"``, ``"reverse_kl"``,
            ``"cross_entropy"``, ``"jeffreys"``, ``"tv"`` or ``"js"``.
        temperature: divides the student's logits. Multiply by T^2 yourself.
        row_mask: boolean, broadcasts to the tokens. A False token does not count: it has value 0
            and no gradient.
        row_weight: broadcasts to the tokens: the factor of each token's value.
        reduction: ``"none"``, ``"sum"``, ``"mean"`` over the tokens that count, or
            ``"batchmean"``, as in `linear_kl`. With a reduction, gradients are computed in the
            forward, unless operands are float16.
        beta: the teacher's weight in ``"js"``, from 0 to 1.
        logit_scale, softcap: make ``softcap * tanh(logit_scale * logit / softcap)`` of a logit,
            bias included, before the temperature. By default there are none.
        check_values: True checks the values of ids and log-probabilities on a GPU, too, which
            waits for it. On a CPU they are always checked. On a GPU, ids in range are asserted
            without waiting.
        return_log_probs: True also returns the student's log-probabilities of the entries
            ``[..., k]``, for metrics: -inf for padding, and without gradients.
        max_workspace_mib: bounds the memory for logits, as in `linear_kl`. None is 640 on a GPU.
        impl: ``"auto"``, ``"triton"``, ``"torch"`` or ``"reference"``, as in `linear_kl`.
        group: a process group, or a device mesh of one dimension, whose ranks share the
            vocabulary. Weight and bias are then this rank's vocabulary shard. All else is the same
            on every rank, and so is the result. Ids are those of the whole vocabulary. Ranks
            exchange 2 + k numbers a token, and in the backward the gradient of the hidden states.
        vocab_start: the index of the first entry of this rank's shard. By default, the ranks hold
            consecutive shards in their order.

    Returns:
        Values in nats, float32 (float64 for float64 inputs): one per token ``[...]``, or a scalar
        with a reduction. With ``return_log_probs``, a pair of them and the log-probabilities.

    Raises:
        ValueError, TypeError, NotImplementedError: before any launch. The message has the
            argument, the rule and the value that breaks it.
        IndexError: an id is not in the vocabulary (on a GPU, a device-side assertion).
        ValueError: the probabilities of a token sum to more than 1, or ``tail="bucket"`` has an id
            twice in a token (on a GPU, with ``check_values=True``).

    Numerics:
        - Logits are rounded to the inputs' dtype, as those of a matmul are. All else is float32.
        - The probability of the student's tail is a sum over the other ids, not a difference from
          1. That of the teacher's tail is at least 1e-7, as in TRL. A token has no tail if its ids
          name the whole vocabulary, or all of it that no bias of -inf hides.
        - An id that stands twice counts twice, as in the naive code, unless there is a bucket.
        - ``"renormalize"`` reads the weight rows of the entries alone, and costs no product with
          the whole vocabulary.
        - Weight gradients are summed in a fixed order. A second derivative raises.

    Source: the conventions of verl, NeMo-RL and TRL, which have the naive code on whole logits.
    """
    for name in options:
        if name not in OPTION_NAMES:
            checks.refuse_option("linear_topk_kl", name, (*OPTION_NAMES, *_TENSORS))
    given = Options(divergence, tail, temperature, reduction, **options)
    for x in (hidden, weight, ids, log_probs, bias, row_mask, row_weight):
        if hasattr(x, "device_mesh"):
            raise NotImplementedError(
                "linear_topk_kl takes plain tensors, got a DTensor; pass x.to_local() of a weight "
                "that is sharded over the vocabulary, x.full_tensor() of any other, and group="
            )
    check_tensors(hidden, weight, bias, ids, log_probs, given.group is not None)
    tokens, device = tuple(hidden.shape[:-1]), hidden.device
    counted, factor = per_token(row_mask, row_weight, tokens, device)
    ids, log_probs = (x.reshape(math.prod(tokens), x.shape[-1]) for x in (ids, log_probs))
    if counted is not None:  # a token that does not count has no entries
        ids = torch.where(counted[:, None], ids, -1)
    rows = hidden.reshape(math.prod(tokens), hidden.shape[-1])
    tensors = [checks.as_matmul_operand(x) for x in (rows, weight)]
    reduction_of = TokenReduction(reduction, tokens, counted, factor)
    value, log_s = _computed([*tensors, bias, ids, log_probs], given, reduction_of)
    return (value, log_s.view(*tokens, log_s.shape[-1])) if given.return_log_probs else value


_TENSORS = ("hidden", "weight", "ids", "log_probs", "bias", "row_mask", "row_weight")


def _computed(tensors: list[Any], options: Options, rows: TokenReduction) -> tuple[Tensor, Tensor]:
    """Returns the reduced value, and the student's log-probabilities."""
    if options.impl == "reference":
        if options.group is not None:
            raise NotImplementedError(
                "impl='reference' needs all logits on one rank, and a group shares them; "
                "impl='torch' takes a group"
            )
        problem = ops.problem_of(*tensors, *options.for_operator)
        value, log_s = without_autocast(reference.topk_rows, problem)
        return rows.reduced(value), log_s
    checks.refuse_transforms("linear_topk_kl")
    flop_counts.register()
    place: tuple[str, int] = ("", 0)
    if options.group is not None:
        tensors, place = distributed("topk").shared(tensors, options)
    arguments = (*tensors, *options.for_operator, *place)
    needs_grad = needed_gradients(tensors[:3])
    is_in_forward = options.reduction != "none" and any(needs_grad) and tensors[0].shape[0] > 0
    if not is_in_forward or tensors[0].dtype == torch.float16:
        value, log_s, *_ = ops.linear_topk(*arguments)
        return rows.reduced(value), log_s
    weight = rows.weights(tensors[0])
    total, _, log_s, *_ = ops.linear_topk_sum(weight, needs_grad, *arguments)
    return differentiable_once(total, (weight, *tensors)), log_s
