"""linear_kl(): the divergence between two language models' heads, without the logits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from torch import Tensor, nn

from torch_streamkl import checks
from torch_streamkl.divergences.names import divergence_text
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.linear import reference as linear_reference
from torch_streamkl.once import differentiable_once
from torch_streamkl.registration import without_autocast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from torch_streamkl.distributed.linear import Places

REDUCTIONS = ("none", "mean", "sum", "batchmean")
STRATEGIES = ("auto", "forward", "recompute")
_LABEL_DTYPES = (torch.int64, torch.int32)
_P = ParamSpec("_P")


def _on_several_ranks(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Calls with a group or with DTensors go through `torch_streamkl.distributed`."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and hasattr(x, "device_mesh"):
                from torch_streamkl.distributed.linear_dtensor import linear_kl_dtensor

                return linear_kl_dtensor(call, *args, **kwargs)
        if kwargs.get("group") is None:
            return function(*args, **kwargs)
        from torch_streamkl.distributed.linear import linear_kl_together

        return linear_kl_together(function, *args, **kwargs)

    return call


@_on_several_ranks
def linear_kl(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    divergence: str = "forward_kl",
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
    reduction: str = "none",
    strategy: str = "auto",
    max_workspace_mib: int | None = None,
    impl: str = "auto",
    group: ProcessGroup | DeviceMesh | None = None,
    student_first_word: int | None = None,
    teacher_first_word: int | None = None,
) -> Tensor:
    r"""Divergence between the word distributions of teacher and student, without the logits.

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
            tokens; the widths may differ. float16, bfloat16, float32 or (on the CPU) float64.
        student_weight, teacher_weight: ``[num_words, width]`` in the dtype of the side's hidden
            states, with contiguous rows or columns. The vocabularies may differ in size: word j
            is the same word on both sides, and a word that one side lacks has probability 0 there
            (its logit is -inf, not 0). Slice the larger weight to compare over the common words
            instead.
        student_bias, teacher_bias: ``[num_words]``.
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
            clamp)).
        labels: integer ``[...]``. Adds ``hard_weight`` times the cross-entropy of the student's
            logits (scaled and capped, at temperature 1) and the label, from the same logits. A
            token whose label is ``ignore_index`` does not count at all.
        row_mask: boolean, broadcasts to the tokens; False tokens do not count: value 0, no
            gradient.
        row_weight: broadcasts to the tokens; factor of each token's value. Gets gradient.
        reduction: ``"none"``; ``"sum"``; ``"mean"``, the sum over the number of tokens that count
            (not over the sum of their weights); ``"batchmean"``, the sum over the size of the
            first dimension.
        strategy: ``"forward"`` computes the gradients in the forward, by chunks of tokens (four
            matmuls for the student's), for a reduced result whose gradients have the inputs'
            dtype; ``"recompute"`` computes the logits again in the backward (six). ``"auto"``
            takes the first where the result is reduced, a gradient is needed and no input is
            float16 (whose gradients may need a loss scale that only the backward knows).
        max_workspace_mib: limit of the memory for logits beyond inputs and gradients; default 512
            MiB on a GPU, on the CPU 40 MiB or an eighth of the weights. At least the logits of one
            token.
        impl: ``"auto"``, ``"triton"``, ``"streaming"`` (plain torch) or ``"reference"`` (naive,
            unbounded memory).
        group: ranks that share the vocabulary, as a process group or a device mesh of one
            dimension. Hidden states (and labels, masks, row weights) are the same on every rank;
            weights and biases are this rank's words, any number of them, also none. Every rank
            gets the whole result. Ranks exchange 24 bytes a token in the forward (32 with labels,
            36 more for what is not linear in log-probabilities) and the gradient of the hidden
            states in the backward; the weights' gradients stay where the weights are. DTensors
            need no group: `torch_streamkl.distributed` says which placements.
        student_first_word, teacher_first_word: index of the first of this rank's words; by
            default the ranks hold consecutive words, in their order. A rank needs the same words
            of both sides: `torch_streamkl.distributed.reshard_words` moves a weight.

    Returns:
        float32 (float64 for float64 inputs) in nats: one value per token, or a scalar.

    Raises:
        ValueError, TypeError, NotImplementedError: before any launch, with the rule and the value.

    Numerics: logits are rounded to the inputs' dtype, as matmuls of that dtype do, everything
    after is float32. A word that the student excludes and the teacher does not makes a token +inf.
    A label that is no vocabulary entry is an error (on a GPU an assertion). Weight gradients are
    summed over a bounded number of chunks (NOTE [Sums over chunks] in linear/problem.py), in a
    fixed order: the same bits on every run.
    """
    places: Places | None = None
    if group is not None:
        from torch_streamkl.distributed.linear import places_of

        places = places_of(group, student_first_word, teacher_first_word, impl)
    elif not (student_first_word is None and teacher_first_word is None):
        raise ValueError(
            "student_first_word and teacher_first_word say which words of a vocabulary a rank "
            f"has and need a group, got {student_first_word} and {teacher_first_word}"
        )
    named: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {
        "student": (student_hidden, student_weight, student_bias),
        "teacher": (teacher_hidden, teacher_weight, teacher_bias),
    }
    for side, (hidden, weight, bias) in named.items():
        _check_head(side, hidden, weight, bias, is_shard=places is not None)
    checks.same(
        "leading dimensions",
        {
            "student_hidden": tuple(student_hidden.shape[:-1]),
            "teacher_hidden": tuple(teacher_hidden.shape[:-1]),
        },
    )
    checks.same(
        "device",
        {
            f"{side}_{name}": x.device
            for side, (hidden, weight, _) in named.items()
            for name, x in (("hidden", hidden), ("weight", weight))
        },
    )
    tokens, device = tuple(student_hidden.shape[:-1]), student_hidden.device
    checks.positive("temperature", temperature)
    options: dict[str, Any] = {
        "functional": divergence_text(
            divergence, beta, student_eps, teacher_eps, student_clamp, teacher_clamp
        ),
        "temperature": float(temperature),
        "ignore_index": ignore_index,
        "max_workspace_mib": 0 if max_workspace_mib is None else max_workspace_mib,
        "impl": impl,
    }
    checks.one_of("reduction", reduction, REDUCTIONS)
    checks.one_of("strategy", strategy, STRATEGIES)
    checks.one_of("impl", impl, linear_ops.IMPLEMENTATIONS)
    if max_workspace_mib is not None:
        checks.positive("max_workspace_mib", max_workspace_mib)
    for side, scale, softcap in (
        ("student", student_logit_scale, student_softcap),
        ("teacher", teacher_logit_scale, teacher_softcap),
    ):
        checks.number(f"{side}_logit_scale", scale)
        if not -math.inf < scale < math.inf:
            raise ValueError(f"{side}_logit_scale must be finite, got {scale}")
        options[f"{side}_scale"] = float(scale)
        if softcap is not None:
            checks.positive(f"{side}_softcap", softcap)
            options[f"{side}_softcap"] = float(softcap)
    counted = None if row_mask is None else _broadcast("row_mask", row_mask, tokens, device)
    if counted is not None and counted.dtype != torch.bool:
        raise TypeError(f"row_mask must be boolean, got {counted.dtype}")
    if labels is not None:
        _check_labels(labels, tokens, device)
        labels = labels.reshape(-1)
        of_labels = labels != ignore_index
        counted = of_labels if counted is None else counted & of_labels
    factor = None if row_weight is None else _broadcast("row_weight", row_weight, tokens, device)
    tensors: list[Any] = [
        _as_matmul_operand(x)
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
    if impl != "reference" and _computes_in_forward(strategy, reduction, tensors):
        return _sum_in_forward(tensors, options, *how)
    return _per_token(tensors, options, *how)


class LinearKL(nn.Module):
    """`linear_kl` as a module: options are given once, tensors with every call.

    ``LinearKL(**options)(student_hidden, student_weight, teacher_hidden, teacher_weight,
    **tensors)`` is ``linear_kl(student_hidden, ..., **tensors, **options)``, with
    ``reduction="mean"`` by default. The tensors are those of `linear_kl`: biases, labels,
    row_mask, row_weight.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = {"reduction": "mean", **options}

    def forward(
        self,
        student_hidden: Tensor,
        student_weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        **tensors: Any,
    ) -> Tensor:
        return linear_kl(
            student_hidden,
            student_weight,
            teacher_hidden,
            teacher_weight,
            **tensors,
            **self.options,
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


def _computes_in_forward(strategy: str, reduction: str, tensors: list[Any]) -> bool:
    differentiated = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in tensors[:6]
    )
    if strategy == "recompute":
        return False
    if strategy == "forward":
        if reduction == "none":
            raise ValueError(
                "strategy='forward' needs a reduced result: the gradient of each token is not "
                "known in the forward, got reduction='none'"
            )
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
    places: Places | None,
) -> Tensor:
    hidden = tensors[0]
    factor = hidden.new_ones(hidden.shape[0], dtype=_value_dtype(tensors))
    if counted is not None:
        factor = counted.to(factor.dtype)
    if weight is not None:
        factor = factor * weight.to(factor.dtype)
    factor = factor / _denominator(counted, reduction, tokens)
    hard_factor = None if tensors[6] is None else factor * hard_weight
    wanted = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in tensors[:6]]
    arguments = (*tensors, factor, hard_factor, wanted)
    total: Tensor
    if places is not None:
        from torch_streamkl.distributed import linear

        total = linear.total(arguments, options, places)
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
    places: Places | None,
) -> Tensor:
    if places is not None:
        from torch_streamkl.distributed import linear

        value, hard = linear.rows(tensors, options, places)
    elif options["impl"] == "reference":
        problem = linear_ops.problem_of(*tensors, **options)[0]
        # operands are cast
        value, hard = without_autocast(linear_reference.linear_kl_rows, problem)
    else:
        value, hard, _ = linear_ops.linear_kl(*tensors, **options)
    if tensors[6] is not None:
        value = value + hard_weight * hard
    if counted is not None:
        value = torch.where(counted, value, 0.0)
    if weight is not None:
        value = torch.where(weight == 0, 0.0, value * weight.to(value.dtype))
    if reduction == "none":
        return value.view(tokens)
    return value.sum() / _denominator(counted, reduction, tokens)


def _denominator(counted: Tensor | None, reduction: str, tokens: tuple[int, ...]) -> Tensor | int:
    match reduction:
        case "mean":
            return math.prod(tokens) if counted is None else counted.sum().clamp(min=1)
        case "batchmean":
            return tokens[0]
    return 1


def _as_matmul_operand(x: Tensor) -> Tensor:
    """What autocast would make of it."""
    if checks.is_autocast(x) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _value_dtype(tensors: list[Any]) -> torch.dtype:
    return (
        torch.float64 if torch.float64 in (tensors[0].dtype, tensors[2].dtype) else torch.float32
    )


def _check_head(
    side: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, is_shard: bool
) -> None:
    if not isinstance(hidden, Tensor):
        raise TypeError(f"{side}_hidden must be a tensor, got {type(hidden).__name__}")
    if hidden.ndim < 2:
        raise ValueError(
            f"{side}_hidden must have dimensions [..., tokens, width], got shape "
            f"{tuple(hidden.shape)}"
        )
    if not isinstance(weight, Tensor):
        raise TypeError(f"{side}_weight must be a tensor, got {type(weight).__name__}")
    if weight.ndim != 2:
        raise ValueError(
            f"{side}_weight must have dimensions [num_words, width], got shape "
            f"{tuple(weight.shape)}"
        )
    for name, x in ((f"{side}_hidden", hidden), (f"{side}_weight", weight)):
        if x.dtype not in checks.FLOAT_DTYPES:
            raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
        if 0 in (x.shape[1:] if is_shard and x is weight else x.shape):
            raise ValueError(f"{name} must have no empty dimension, got shape {tuple(x.shape)}")
    if not checks.is_autocast(hidden):
        checks.same("dtype", {f"{side}_hidden": hidden.dtype, f"{side}_weight": weight.dtype})
    checks.same("width", {f"{side}_hidden": hidden.shape[-1], f"{side}_weight": weight.shape[1]})
    if weight.stride(0) != 1 and weight.stride(1) != 1:
        raise ValueError(
            f"{side}_weight must have contiguous rows or columns, got strides {weight.stride()}"
        )
    if bias is not None:
        checks.check_vector(
            f"{side}_bias", bias, weight.shape[0], hidden.device, checks.FLOAT_DTYPES
        )


def _check_labels(labels: Tensor, tokens: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, got {type(labels).__name__}")
    if labels.dtype not in _LABEL_DTYPES:
        raise TypeError(f"labels must be int64 or int32, got {labels.dtype}")
    if tuple(labels.shape) != tokens:
        raise ValueError(
            f"labels must have the shape of the tokens {tokens}, got {tuple(labels.shape)}"
        )
    checks.on_device("labels", labels, device)


def _broadcast(name: str, x: Tensor, tokens: tuple[int, ...], device: torch.device) -> Tensor:
    """One element per token."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    return checks.check_broadcast(name, x, tokens, device).expand(tokens).reshape(-1)
