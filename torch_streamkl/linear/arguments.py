"""Checks a call of linear_kl(), and converts its options into the operators'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torch_streamkl import checks
from torch_streamkl.divergences.names import Divergence, Reduction, text_of
from torch_streamkl.linear import ops as linear_ops

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


Strategy = Literal["auto", "forward", "recompute"]
LinearImpl = Literal["auto", "triton", "torch", "reference"]
REDUCTIONS = get_args(Reduction)
STRATEGIES = get_args(Strategy)


class Options(NamedTuple):
    """Holds the arguments of `linear_kl` that are no tensors, with their defaults."""

    divergence: Divergence = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0
    student_logit_scale: float = 1.0
    teacher_logit_scale: float = 1.0
    student_softcap: float | None = None
    teacher_softcap: float | None = None
    student_eps: float = 0.0
    teacher_eps: float = 0.0
    student_clamp: float = 0.0
    teacher_clamp: float = 0.0
    hard_weight: float = 1.0
    ignore_index: int = -100
    reduction: Reduction = "none"
    strategy: Strategy = "auto"
    max_workspace_mib: int | None = None
    impl: LinearImpl = "auto"
    group: ProcessGroup | DeviceMesh | None = None
    student_vocab_start: int | None = None
    teacher_vocab_start: int | None = None


def checked_options(options: Options) -> dict[str, Any]:
    """Checks options, and returns those that the operators take."""
    checks.one_of("reduction", options.reduction, REDUCTIONS)
    checks.one_of("strategy", options.strategy, STRATEGIES)
    checks.one_of("impl", options.impl, linear_ops.IMPLEMENTATIONS)
    if options.strategy == "forward" and options.reduction == "none":
        raise ValueError(
            "strategy='forward' needs a reduced result: the gradient of each token is not "
            "known in the forward, got reduction='none'"
        )
    checks.positive("temperature", options.temperature)
    checks.finite("hard_weight", options.hard_weight)
    checks.integer("ignore_index", options.ignore_index)
    if options.max_workspace_mib is not None:
        checks.integer("max_workspace_mib", options.max_workspace_mib, 1)
    firsts = (options.student_vocab_start, options.teacher_vocab_start)
    for side, first in zip(("student", "teacher"), firsts, strict=True):
        if first is not None:
            checks.integer(f"{side}_vocab_start", first, 0)
    if options.group is None and not (firsts[0] is None and firsts[1] is None):
        raise ValueError(
            "student_vocab_start and teacher_vocab_start place a rank's vocabulary shard and "
            f"need a group, got {firsts[0]} and {firsts[1]}"
        )
    for_operator: dict[str, Any] = {
        "functional": text_of(options),
        "temperature": float(options.temperature),
        "ignore_index": options.ignore_index,
        "max_workspace_mib": options.max_workspace_mib or 0,
        "impl": options.impl,
    }
    for side, scale, softcap in (
        ("student", options.student_logit_scale, options.student_softcap),
        ("teacher", options.teacher_logit_scale, options.teacher_softcap),
    ):
        checks.finite(f"{side}_logit_scale", scale)
        for_operator[f"{side}_scale"] = float(scale)
        if softcap is not None:
            checks.positive(f"{side}_softcap", softcap)
            for_operator[f"{side}_softcap"] = float(softcap)
    return for_operator


def check_heads(named: dict[str, tuple[Tensor, Tensor, Tensor | None]], is_shard: bool) -> None:
    """Checks hidden states, weight and bias of each side, and the sides against each other."""
    for side, (hidden, weight, _) in named.items():
        for name, x in (("hidden", hidden), ("weight", weight)):
            checks.tensor(f"{side}_{name}", x)
    checks.same(
        "device",
        {
            f"{side}_{name}": x.device
            for side, (hidden, weight, _) in named.items()
            for name, x in (("hidden", hidden), ("weight", weight))
        },
    )
    for side, (hidden, weight, bias) in named.items():
        check_head(f"{side}_", hidden, weight, bias, is_shard)
    leading: dict[str, object] = {
        f"{side}_hidden": tuple(x[0].shape[:-1]) for side, x in named.items()
    }
    checks.same("leading dimensions", leading)


def check_head(
    prefix: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, is_shard: bool
) -> None:
    """Checks hidden states, weight and bias, named with a prefix, against each other."""
    if hidden.ndim < 2:
        raise ValueError(
            f"{prefix}hidden must have dimensions [..., tokens, hidden_size], got shape "
            f"{tuple(hidden.shape)}"
        )
    if weight.ndim != 2:
        raise ValueError(
            f"{prefix}weight must have dimensions [vocab_size, hidden_size], got shape "
            f"{tuple(weight.shape)}"
        )
    for name, x in ((f"{prefix}hidden", hidden), (f"{prefix}weight", weight)):
        checks.floating(name, x)
    checks.same(
        "dtype",
        {
            f"{prefix}hidden": checks.matmul_dtype(hidden),
            f"{prefix}weight": checks.matmul_dtype(weight),
        },
    )
    sizes: dict[str, object] = {
        f"{prefix}hidden": hidden.shape[-1],
        f"{prefix}weight": weight.shape[1],
    }
    checks.same("hidden_size", sizes)
    for size, what in ((weight.shape[1], "hidden_size"), (weight.shape[0], "vocabulary")):
        if size == 0 and not (is_shard and what == "vocabulary"):
            raise ValueError(
                f"{prefix}weight must have no empty {what}, got shape {tuple(weight.shape)}"
            )
    if weight.stride(0) != 1 and weight.stride(1) != 1:
        raise ValueError(
            f"{prefix}weight must have contiguous rows or columns, got strides {weight.stride()}"
        )
    if bias is not None:
        checks.check_vector(
            f"{prefix}bias", bias, weight.shape[0], hidden.device, checks.FLOAT_DTYPES
        )


def check_labels(
    labels: Tensor, tokens: tuple[int, ...], device: torch.device, ignore_index: int
) -> None:
    """Checks that labels are integers, one per token, which may be the ignored one."""
    checks.tensor("labels", labels)
    checks.indices("labels", labels)
    if tuple(labels.shape) != tokens:
        raise ValueError(
            f"labels must have the shape of the tokens {tokens}, got {tuple(labels.shape)}"
        )
    checks.on_device("labels", labels, device)
    limits = torch.iinfo(labels.dtype)
    if not limits.min <= ignore_index <= limits.max:  # torch compares its lowest bits
        raise ValueError(
            f"ignore_index must fit the dtype of labels {labels.dtype}, got {ignore_index}"
        )
