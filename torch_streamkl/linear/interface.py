"""Defines linear_kl() and LinearKL: the divergence of two LM heads, without materialized logits.

The function checks its arguments and chooses one of two operators of `ops.py`: values per token,
whose backward recomputes the logits, or a weighted sum, whose gradients come from the forward.
"""

from __future__ import annotations

import functools
import inspect
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
    check_heads,
    check_labels,
    checked_options,
)
from torch_streamkl.linear.reductions import TokenReduction, needed_gradients, per_token
from torch_streamkl.loading import distributed
from torch_streamkl.registration import without_autocast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_P = ParamSpec("_P")


def _on_several_ranks(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Sends calls with a group or DTensors to `torch_streamkl.distributed`."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and hasattr(x, "device_mesh"):
                dtensors = distributed("dtensors")
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
    r"""Computes the divergence of teacher and student LM heads, one value per token.

    The ``[tokens, vocab_size]`` logits are computed chunk by chunk, and never as a whole. With P
    the teacher's probabilities of a token and S the student's, the default is

    .. math:: KL(P \| S) = \sum_j P_j (\log P_j - \log S_j)

    It equals this naive code:

    .. code-block:: python

        s = F.linear(student_hidden, student_weight, student_bias)
        t = F.linear(teacher_hidden, teacher_weight, teacher_bias)
        log_s, p = (s / temperature).log_softmax(-1), (t / temperature).softmax(-1)
        F.kl_div(log_s, p, reduction="none").sum(-1)

    Args:
        student_hidden, teacher_hidden: ``[..., hidden_size]``, with at least one leading
            dimension. The leading dimensions are the tokens: they are the same for both sides, and
            their sizes may be 0. The hidden sizes may differ. float16, bfloat16, float32, or
            float64 in plain torch. Under autocast, operands are cast as those of a matmul are.
        student_weight, teacher_weight: ``[vocab_size, hidden_size]``, with contiguous rows or
            columns, in the dtype of the side's hidden states (under autocast, any). Entry j of
            both vocabularies is the same token. If one vocabulary is larger, its further entries
            have probability 0 on the other side. To compare common entries only, slice the larger
            weight.
        student_bias, teacher_bias: ``[vocab_size]``, added to the logits.
        divergence: ``"forward_kl"`` is KL(P||S), ``"reverse_kl"`` KL(S||P), ``"cross_entropy"``
            -sum P log S, ``"jeffreys"`` KL(P||S) + KL(S||P), and ``"tv"`` 0.5 sum \|P - S\|.
            ``"js"`` is beta KL(P||M) + (1 - beta) KL(S||M) with M = beta P + (1 - beta) S.
        beta: the teacher's weight in ``"js"``, from 0 to 1. As in GKD, 0 gives the forward KL and
            1 the reverse KL.
        temperature: divides the logits of both sides. Multiply by T^2 yourself, as in Hinton's
            loss.
        student_logit_scale, teacher_logit_scale: the factor of the logits, bias included, before
            the softcap.
        student_softcap, teacher_softcap: c in ``c * tanh(logit / c)``, applied before the
            temperature. None applies no softcap.
        student_eps, teacher_eps, student_clamp, teacher_clamp: change logarithms only: log P
            becomes log(max(P + eps, clamp)). A factor P outside of the logarithm does not change.
            ``"js"`` computes log M from max(P + eps, clamp) of each side, too.
        labels: int32 or int64 ``[...]``, one per token. Adds ``hard_weight`` times the
            cross-entropy of the student's logits (scaled and capped, at temperature 1), from the
            same logits.
        hard_weight: the factor of that cross-entropy.
        ignore_index: a token with this label counts neither in the cross-entropy nor in the
            divergence.
        row_mask: boolean, broadcasts to the tokens. A False token does not count: it has value 0
            and no gradient.
        row_weight: broadcasts to the tokens: the factor of each token's value. A token of weight 0
            has value 0, even if its divergence is infinite. The gradient of a weight is the value
            that its token has without it.
        reduction: ``"none"``; ``"sum"``; ``"mean"``, the sum divided by the number of tokens that
            count, and not by their weights (0 if none counts); or ``"batchmean"``, the sum divided
            by the first dimension. If there is no token at all, a sum is 0 with gradients 0, and a
            mean is NaN.
        strategy: when gradients are computed. ``"forward"`` computes them in the forward, in the
            inputs' dtype, and needs a reduction. If only the student is trained, it takes four
            matmuls. ``"recompute"`` computes the logits again in the backward, and takes six.
            ``"auto"`` is ``"forward"`` if there is a reduction, a gradient is needed, and no input
            is float16 (gradients in float16 may need a loss scale).
        max_workspace_mib: bounds the memory for logits, in MiB beyond inputs and gradients. None
            is 512 on a GPU; on a CPU it is 40, or a third of the weights if that is more. With
            ``strategy="forward"``, gradients of 16 bits and more than about 35,000 tokens, None is
            what 34 chunks of tokens need. It must hold the logits of one token.
        impl: ``"auto"``, ``"triton"``, ``"torch"`` (plain torch), or ``"reference"`` (the naive
            code, with unbounded memory). If a choice other than ``"auto"`` cannot run, the call
            raises.
        group: a process group, or a device mesh of one dimension, whose ranks share the
            vocabulary. Weights and biases are then this rank's vocabulary shard, which may be
            empty. Hidden states, labels, masks and row weights are the same on every rank, and so
            is the result. In the forward, ranks exchange row states of 24 bytes a token (32 with
            labels). If the divergence is not linear in log-probabilities, they also exchange 12
            bytes a token. In the backward, they exchange the gradient of the hidden states.
            DTensors need no group: see the guide on several GPUs.
        student_vocab_start, teacher_vocab_start: the index of the first entry of this rank's
            shard. By default, the ranks hold consecutive shards in their order. A rank needs the
            same entries of both sides: `torch_streamkl.distributed.reshard_vocab` moves a weight.

    Returns:
        One value per token ``[...]``, or a scalar with a reduction. float32 (float64 for float64
        inputs), in nats.

    Raises:
        ValueError, TypeError, NotImplementedError: before any launch. The message has the
            argument, the rule and the value that breaks it.
        IndexError: a label is outside of the vocabulary (on a GPU, a device-side assertion).

    Numerics:
        - Logits are rounded to the inputs' dtype, as those of a matmul are. All else is float32.
        - A vocabulary entry that the student excludes and the teacher allows makes the token +inf,
          unless the teacher's probability underflows to 0.
        - Logarithms are computed from logits. So the logarithm of a student probability that
          underflows to 0 is finite.
        - Weight gradients are summed over a bounded number of chunks, in a fixed order: they have
          the same bits in every run (NOTE [Sums over chunks] in runtime/workspace.py). A second
          derivative raises.

    Source: the row state is that of StreamKL (arXiv 2606.20005); gradients are computed in
    the forward as Liger's fused linear losses do.
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
    counted, factor = per_token(row_mask, row_weight, tokens, device)
    if labels is not None:
        check_labels(labels, tokens, device, ignore_index)
        labels = labels.reshape(-1)
        of_labels = labels != ignore_index
        counted = of_labels if counted is None else counted & of_labels
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
    how = (TokenReduction(reduction, tokens, counted, factor), hard_weight, places)
    if impl != "reference":
        checks.refuse_transforms("linear_kl")
        flop_counts.register()
    needs_grad = needed_gradients(tensors[:6])
    if impl != "reference" and _computes_in_forward(strategy, reduction, tensors, needs_grad):
        return _sum_in_forward(tensors, of_operator, needs_grad, *how)
    return _per_token(tensors, of_operator, *how)


def refusing(error: Exception) -> Callable[..., Tensor]:
    """Returns a `linear_kl` that raises ``error`` on every rank, so that no rank waits."""

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
    return distributed("linear").shard_arguments_of(options.group, *firsts, options.impl)


class LinearKL(nn.Module):
    """Computes `linear_kl` as a module.

    The constructor takes the options, and each call takes the tensors.

    .. code-block:: python

        loss = LinearKL(divergence="js", temperature=2.0)
        value = loss(student_hidden, student_weight, teacher_hidden, teacher_weight, labels=labels)

    This equals `linear_kl` with the same arguments.

    Args:
        options: arguments of `linear_kl` that are not tensors. The constructor checks them. The
            default of ``reduction`` is ``"mean"``.

    Raises:
        ValueError, TypeError: an option does not exist, is a tensor, or breaks its rule.
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
        student_hidden: Tensor | None = None,
        student_weight: Tensor | None = None,
        teacher_hidden: Tensor | None = None,
        teacher_weight: Tensor | None = None,
        **tensors: Any,
    ) -> Tensor:
        """Computes the loss of these tensors. Pass others, such as ``labels``, by keyword."""
        # `linear_kl` says what is missing, on all ranks of its group
        operands = {
            "student_hidden": student_hidden,
            "student_weight": student_weight,
            "teacher_hidden": teacher_hidden,
            "teacher_weight": teacher_weight,
        }
        operands = {name: x for name, x in operands.items() if x is not None}
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
        return call(**operands, **tensors, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


_TENSORS = tuple(x for x in inspect.signature(linear_kl).parameters if x not in Options._fields)


def _computes_in_forward(
    strategy: str, reduction: str, tensors: list[Any], needs_grad: list[bool]
) -> bool:
    if strategy == "recompute" or tensors[0].shape[0] == 0:  # no token has no weight in a mean
        return False
    if strategy == "forward":
        return True
    return (
        reduction != "none"
        and any(needs_grad)
        and torch.float16 not in (tensors[0].dtype, tensors[2].dtype)
    )


def _sum_in_forward(
    tensors: list[Any],
    options: dict[str, Any],
    needs_grad: list[bool],
    rows: TokenReduction,
    hard_weight: float,
    places: Any,
) -> Tensor:
    factor = rows.weights(tensors[0], tensors[2])
    hard_factor = None
    if tensors[6] is not None:
        # at 0 the cross-entropy is not there: it may be infinite
        hard_factor = factor * hard_weight if hard_weight else torch.zeros_like(factor)
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
    rows: TokenReduction,
    hard_weight: float,
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
    return rows.reduced(value)
