"""Checks the arguments of linear_topk_kl() on metadata, before any launch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict, get_args

from torch import Tensor

from torch_streamkl import checks
from torch_streamkl.divergences.names import Reduction, divergence_text
from torch_streamkl.linear.arguments import LinearImpl, check_head
from torch_streamkl.topk.problem import Tail

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

TAILS, REDUCTIONS, IMPLEMENTATIONS = (get_args(x) for x in (Tail, Reduction, LinearImpl))
TAIL_ALIASES = {
    "ghost": "bucket",
    "ghost_token": "bucket",
    "normalize": "renormalize",
    "renorm": "renormalize",
    "topk": "none",
}


class MoreOptions(TypedDict, total=False):
    """Names the options of `linear_topk_kl` that few calls have."""

    beta: float
    logit_scale: float
    softcap: float | None
    check_values: bool
    return_log_probs: bool
    max_workspace_mib: int | None
    impl: LinearImpl
    group: ProcessGroup | DeviceMesh | None
    vocab_start: int | None


@dataclass(frozen=True)
class Options:
    """Holds the arguments of `linear_topk_kl` that are no tensors, with their defaults."""

    divergence: str = "forward_kl"
    tail: Tail = "none"
    temperature: float = 1.0
    reduction: Reduction = "none"
    beta: float = 0.5
    logit_scale: float = 1.0
    softcap: float | None = None
    check_values: bool = False
    return_log_probs: bool = False
    max_workspace_mib: int | None = None
    impl: LinearImpl = "auto"
    group: Any = None
    vocab_start: int | None = None

    def __post_init__(self) -> None:
        checks.one_of("tail", self.tail, TAILS, TAIL_ALIASES)
        checks.one_of("reduction", self.reduction, REDUCTIONS)
        checks.one_of("impl", self.impl, IMPLEMENTATIONS)
        checks.positive("temperature", self.temperature)
        checks.finite("logit_scale", self.logit_scale)
        if self.softcap is not None:
            checks.positive("softcap", self.softcap)
        for name in ("check_values", "return_log_probs"):
            checks.boolean(name, getattr(self, name))
        if self.max_workspace_mib is not None:
            checks.integer("max_workspace_mib", self.max_workspace_mib, 1)
        if self.vocab_start is not None:
            checks.integer("vocab_start", self.vocab_start, 0)
            if self.group is None:
                raise ValueError(
                    "vocab_start places a rank's vocabulary shard and needs a group, got "
                    f"{self.vocab_start}"
                )

    @property
    def for_operator(self) -> list[Any]:
        """Returns the operators' options, without the last two, which place a shard."""
        text = divergence_text(self.divergence, self.beta, 0.0, 0.0, 0.0, 0.0)
        return [
            text,
            self.tail,
            float(self.temperature),
            float(self.logit_scale),
            0.0 if self.softcap is None else float(self.softcap),
            self.max_workspace_mib or 0,
            self.impl,
            self.check_values,
        ]


OPTION_NAMES = tuple(field.name for field in fields(Options))


def check_tensors(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    log_probs: Tensor,
    is_shard: bool,
) -> None:
    """Checks types, dtypes, shapes and devices."""
    for name, x in (("hidden", hidden), ("weight", weight)):
        checks.tensor(name, x)
    checks.same("device", {"hidden": hidden.device, "weight": weight.device})
    check_head("", hidden, weight, bias, is_shard)
    tokens = tuple(hidden.shape[:-1])
    for name, x in (("ids", ids), ("log_probs", log_probs)):
        checks.tensor(name, x)
        if x.ndim != hidden.ndim or tuple(x.shape[:-1]) != tokens:
            raise ValueError(
                f"{name} must have the tokens of hidden {tokens} and a last dimension k, got "
                f"{tuple(x.shape)}"
            )
        checks.on_device(name, x, hidden.device)
    checks.indices("ids", ids)
    checks.floating("log_probs", log_probs)
    if ids.shape != log_probs.shape:
        raise ValueError(
            "ids and log_probs must have one shape [..., k], got "
            f"{tuple(ids.shape)} and {tuple(log_probs.shape)}"
        )
    if ids.shape[-1] == 0:
        raise ValueError(f"ids must have at least one entry a token, got {tuple(ids.shape)}")
    checks.no_gradient("log_probs", log_probs)
