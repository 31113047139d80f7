"""Defines linear_kl(): the divergence between two LM heads, without materialized logits."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from torch import Tensor, nn

from torch_streamkl import checks, flop_counts
from torch_streamkl.divergences.names import Divergence, Reduction
from torch_streamkl.double_backward import differentiable_once
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.linear import reference as linear_reference
from torch_streamkl.linear.arguments import (
    LinearImpl,
    Options,
    Strategy,
    broadcast,
    check_heads,
    check_labels,
    checked_options,
)
from torch_streamkl.loading import distributed
from torch_streamkl.registration import without_autocast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_P = ParamSpec("_P")


def _on_several_ranks(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Calls with a group or with DTensors go through `torch_streamkl.distributed`."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and hasattr(x, "device_mesh"):
                dtensors = distributed("linear_dtensor")
                value: Tensor = dtensors.linear_kl_dtensor(call, *args, **kwargs)
                return value
        if kwargs.get("group") is None:
            return function(*args, **kwargs)
        value = distributed("linear").linear_kl_together(function, *args, **kwargs)
        return value

    return call


@_on_several_ranks
@checks.named_options
def linear_kl(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    divergence: Divergence = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    student_eps: float = 0.0,
    teacher_eps: float = 0.0,
    student_clamp: float = 0.0,
    teacher_clamp: float = 0.0,
    labels: Tensor | None = None,
    hard_weight: float = 1.0,
    ignore_index: int = -100,
    row_mask: Tensor | None = None,
    row_weight: Tensor | None = None,
    reduction: Reduction = "none",
    strategy: Strategy = "auto",
    max_workspace_mib: int | None = None,
    impl: LinearImpl = "auto",
    group: ProcessGroup | DeviceMesh | None = None,
    student_vocab_start: int | None = None,
    teacher_vocab_start: int | None = None,
) -> Tensor:
    r"""Computes the divergence between teacher and student LM heads, without materializing the
    logits.

    Per token, with P the teacher's probabilities and S the student's,

    .. math:: KL(P \| S) = \sum_j P_j (\log P_j - \log S_j)

    which equals the naive code

    .. code-block:: python

        s = F.linear(student_hidden, student_weight, student_bias)
        t = F.linear(teacher_hidden, teacher_weight, teacher_bias)
        log_s, p_t = (s / temperature).log_softmax(-1), (t / temperature).softmax(-1)
        F.kl_div(log_s, p_t, reduction="none").sum(-1)

    Args:
        student_hidden, teacher_hidden: ``[..., width]`` with the same leading dimensions, the
            tokens, which may be none; the widths may differ. float16, bfloat16, float32 or (on the
            CPU) float64. Under autocast all but float64 are cast to its dtype, as a matmul's
            operands are.
        student_weight, teacher_weight: ``[vocab_size, width]`` in the dtype of the side's hidden
            states (under autocast it may be another that is cast), with contiguous rows or
            columns. The vocabularies may differ in size: vocabulary entry j
            is the same vocabulary entry on both sides, and a vocabulary entry that one side lacks
            has probability 0 there (its logit is -inf, not 0). Slice the larger weight to compare
            over the common vocabulary entries instead.
        student_bias, teacher_bias: ``[vocab_size]``.
        divergence: ``"forward_kl"`` KL(P||S); ``"reverse_kl"`` KL(S||P); ``"cross_entropy"`` -sum
            P log S; ``"jeffreys"`` KL(P||S) + KL(S||P); ``"js"`` beta KL(P||M) + (1 - beta)
            KL(S||M) with M = beta P + (1 - beta) S (beta 0 and 1 are forward and reverse KL);
            ``"tv"`` 0.5 sum |P - S|.
        temperature: divides the scores of both sides. The T^2 of Hinton's loss is the caller's
            factor.
        student_logit_scale, teacher_logit_scale: factor of the logits (bias included), before the
            softcap.
        student_softcap, teacher_softcap: c in ``c * tanh(logit / c)``, before the temperature.
        student_eps, teacher_eps, student_clamp, teacher_clamp: log P becomes log(max(P + eps,
            clamp)); the weight before the log stays P. ``"js"`` makes M of the guarded
            probabilities, too, as in `attention_kl`.
        labels: integer ``[...]``. Adds ``hard_weight`` times the cross-entropy of the student's
            logits (scaled and capped, at temperature 1) and the label, from the same logits. A
            token whose label is ``ignore_index`` does not count at all.
        row_mask: boolean, broadcasts to the tokens; False tokens do not count: value 0, no
            gradient.
        row_weight: broadcasts to the tokens; factor of each token's value. A token of weight 0 is
            0 even where its divergence is infinite. The weight's gradient is the token's
            divergence (with labels, cross-entropy included), also at 0.
        reduction: ``"none"``; ``"sum"``; ``"mean"``, the sum over the number of tokens that count
            (not over the sum of their weights), 0 where there are tokens and none counts;
            ``"batchmean"``, the sum over the size of the first dimension. Without any token the
            sum is 0 with gradients 0, and a mean NaN, as torch's mean of nothing.
        strategy: ``"forward"`` computes the gradients in the forward, by chunks of tokens (four
            matmuls for the student's), for a reduced result whose gradients have the inputs'
            dtype; ``"recompute"`` computes the logits again in the backward (six). ``"auto"``
            takes the first where the result is reduced, a gradient is needed and no input is
            float16 (whose gradients may need a loss scale that only the backward knows).
        max_workspace_mib: limit of the memory for logits beyond inputs and gradients; default 512
            MiB on a GPU, on the CPU 40 MiB or an eighth of the weights. At least the logits of one
            token.
        impl: ``"auto"``, ``"triton"``, ``"torch"`` (plain torch) or ``"reference"`` (naive,
            unbounded memory).
        group: ranks that share the vocabulary, as a process group or a device mesh of one
            dimension. Hidden states (and labels, masks, row weights) are the same on every rank;
            weights and biases are this rank's vocabulary shard, any number of them, also none.
            Every rank gets the whole result. Ranks exchange 24 bytes a token in the forward (32
            with labels, 36 more for what is not linear in log-probabilities) and the gradient of
            the hidden states in the backward; the weights' gradients stay where the weights are.
            DTensors need no group: `torch_streamkl.distributed` says which placements.
        student_vocab_start, teacher_vocab_start: index of the first of this rank's vocabulary
            shard; by default the ranks hold consecutive vocabulary entries, in their order. A rank
            needs the same vocabulary entries of both sides:
            `torch_streamkl.distributed.reshard_vocab` moves a weight.

    Returns:
        float32 (float64 for float64 inputs) in nats: one value per token, or a scalar.

    Raises:
        ValueError, TypeError, NotImplementedError: before any launch, with the argument, the rule
            and the value.
        IndexError: a label is no vocabulary entry (on a GPU an assertion of the device).

    Numerics: logits are rounded to the inputs' dtype, as matmuls of that dtype do, everything
    after is float32. A vocabulary entry that the student excludes and the teacher does not makes a
    token +inf; one whose probability underflows to 0 adds nothing. Weight gradients are summed
    over a bounded number of chunks (NOTE [Sums over chunks] in runtime/workspace.py), in a fixed
    order: the same bits on every run.
    """
    options = Options(
        divergence, beta, temperature, student_logit_scale, teacher_logit_scale, student_softcap,
        teacher_softcap, student_eps, teacher_eps, student_clamp, teacher_clamp, hard_weight,
        ignore_index, reduction, strategy, max_workspace_mib, impl, group, student_vocab_start,
        teacher_vocab_start,
    )  # fmt: skip
    of_operator = checked_options(options)
    places = _places(options)
    named: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {
        "student": (student_hidden, student_weight, student_bias),
        "teacher": (teacher_hidden, teacher_weight, teacher_bias),
    }
    check_heads(named, is_shard=places is not None)
    tokens, device = tuple(student_hidden.shape[:-1]), student_hidden.device
    counted = None if row_mask is None else broadcast("row_mask", row_mask, tokens, device)
    if counted is not None and counted.dtype != torch.bool:
        raise TypeError(f"row_mask must be boolean, got {counted.dtype}")
    if labels is not None:
        check_labels(labels, tokens, device)
        labels = labels.reshape(-1)
        of_labels = labels != ignore_index
        counted = of_labels if counted is None else counted & of_labels
    factor = None if row_weight is None else broadcast("row_weight", row_weight, tokens, device)
    if factor is not None and factor.is_complex():
        raise TypeError(f"row_weight must be real, got {factor.dtype}")
    tensors: list[Any] = [
        checks.as_matmul_operand(x)
        for x in (
            student_hidden.flatten(0, -2),
            student_weight,
            teacher_hidden.flatten(0, -2),
            teacher_weight,
        )
    ]
    tensors += [student_bias, teacher_bias, labels]
    how = (counted, factor, hard_weight, reduction, tokens, places)
    if impl != "reference":
        checks.refuse_transforms("linear_kl")
        flop_counts.register()
    if impl != "reference" and _computes_in_forward(strategy, reduction, tensors):
        return _sum_in_forward(tensors, of_operator, *how)
    return _per_token(tensors, of_operator, *how)


def refusing(error: Exception) -> Callable[..., Tensor]:
    """A `linear_kl` that raises an error, on every rank: the others would wait for this one."""

    @functools.wraps(linear_kl)
    def refuse(*_args: Any, **_kwargs: Any) -> Tensor:
        raise error

    refuse.refusal = error  # type: ignore[attr-defined]
    return _on_several_ranks(refuse)


def _places(options: Options) -> Any:
    """Returns the vocabulary shard that this rank has, if ranks share the vocabulary."""
    if options.group is None:
        return None
    firsts = (options.student_vocab_start, options.teacher_vocab_start)
    return distributed("linear").places_of(options.group, *firsts, options.impl)


class LinearKL(nn.Module):
    """Computes `linear_kl` as a module: options are given once, tensors with every call.

    ``LinearKL(**options)(student_hidden, student_weight, teacher_hidden, teacher_weight,
    **tensors)`` is ``linear_kl(student_hidden, ..., **tensors, **options)``, with
    ``reduction="mean"`` by default. The tensors are those of `linear_kl`: biases, labels,
    row_mask, row_weight. Options are checked when the module is made.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = {"reduction": "mean", **options}
        for name in options:
            if name in _TENSORS:
                raise TypeError(f"LinearKL() takes no tensors: pass {name} to each call")
            if name not in Options._fields:
                checks.refuse_option("LinearKL", name, Options._fields)
        checked = Options(**self.options)
        checked_options(checked)
        _places(checked)

    def forward(
        self,
        student_hidden: Tensor,
        student_weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        **tensors: Any,
    ) -> Tensor:
        call: Callable[..., Tensor] = linear_kl
        try:
            for name in tensors:
                if name in Options._fields:
                    raise TypeError(f"{name} is an option of the module: pass it to LinearKL()")
                if name not in _TENSORS:
                    checks.refuse_option("LinearKL.forward", name, _TENSORS)
        except TypeError as error:
            call = refusing(error)
            tensors = {name: x for name, x in tensors.items() if name in _TENSORS}
        return call(
            student_hidden,
            student_weight,
            teacher_hidden,
            teacher_weight,
            **tensors,
            **self.options,
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


_TENSORS = tuple(x for x in inspect.signature(linear_kl).parameters if x not in Options._fields)


def _computes_in_forward(strategy: str, reduction: str, tensors: list[Any]) -> bool:
    differentiated = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in tensors[:6]
    )
    if strategy == "recompute" or tensors[0].shape[0] == 0:  # no token has no weight in a mean
        return False
    if strategy == "forward":
        return True
    return (
        reduction != "none"
        and differentiated
        and torch.float16 not in (tensors[0].dtype, tensors[2].dtype)
    )


def _sum_in_forward(
    tensors: list[Any],
    options: dict[str, Any],
    counted: Tensor | None,
    weight: Tensor | None,
    hard_weight: float,
    reduction: str,
    tokens: tuple[int, ...],
    places: Any,
) -> Tensor:
    hidden = tensors[0]
    factor = hidden.new_ones(hidden.shape[0], dtype=_value_dtype(tensors))
    if counted is not None:
        factor = counted.to(factor.dtype)
    if weight is not None:
        factor = weight.to(factor.dtype) if counted is None else torch.where(counted, weight, 0.0)
        factor = factor.to(_value_dtype(tensors))
    factor = factor / _denominator(counted, reduction, tokens)
    hard_factor = None
    if tensors[6] is not None:
        # at 0 the cross-entropy is not there: it may be infinite
        hard_factor = factor * hard_weight if hard_weight else torch.zeros_like(factor)
    needs_grad = [
        x is not None and x.requires_grad and torch.is_grad_enabled() for x in tensors[:6]
    ]
    arguments = (*tensors, factor, hard_factor, needs_grad)
    total: Tensor
    if places is not None:
        total = distributed("linear").total(arguments, options, places)
    else:
        total = linear_ops.linear_kl_sum(*arguments, **options)[0]
    return differentiable_once(total, (*arguments, *options.values()))


def _per_token(
    tensors: list[Any],
    options: dict[str, Any],
    counted: Tensor | None,
    weight: Tensor | None,
    hard_weight: float,
    reduction: str,
    tokens: tuple[int, ...],
    places: Any,
) -> Tensor:
    if places is not None:
        value, hard = distributed("linear").rows(tensors, options, places)
    elif options["impl"] == "reference":
        problem = linear_ops.problem_of(*tensors, **options)[0]
        # operands are cast
        value, hard = without_autocast(linear_reference.linear_kl_rows, problem)
    else:
        value, hard, _ = linear_ops.linear_kl(*tensors, **options)
    if tensors[6] is not None and hard_weight:
        value = value + hard_weight * hard
    if counted is not None:
        value = torch.where(counted, value, 0.0)
    if weight is not None:
        value = _weighted(value, weight.to(value.dtype))
    if reduction == "none":
        return value.view(tokens)
    return value.sum() / _denominator(counted, reduction, tokens)


def _weighted(value: Tensor, weight: Tensor) -> Tensor:
    """``value * weight``, where a row that is not finite and has the weight 0 counts 0."""
    lost = (weight == 0) & ~value.isfinite()
    product = value.masked_fill(lost, 0.0) * weight
    if weight.requires_grad:
        # the gradient to that weight is the row's value, as everywhere: sqrt(w) is 0 at 0 and
        # has an infinite derivative
        root = torch.where(lost, weight, 1.0).sqrt()
        product = product + torch.where(lost, root, 0.0)
    return product


def _denominator(counted: Tensor | None, reduction: str, tokens: tuple[int, ...]) -> Tensor | int:
    match reduction:
        case "mean":
            num_tokens = math.prod(tokens)
            return num_tokens if counted is None else counted.sum().clamp(min=min(1, num_tokens))
        case "batchmean":
            return tokens[0]
    return 1


def _value_dtype(tensors: list[Any]) -> torch.dtype:
    return (
        torch.float64 if torch.float64 in (tensors[0].dtype, tensors[2].dtype) else torch.float32
    )
