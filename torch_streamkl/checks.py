"""Input checks from metadata alone: they run on fake tensors, before any launch.

Each error states the rule and the value that broke it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from torch_streamkl import flop_counts
from torch_streamkl.compiler_marks import assume_constant_result

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Verdict:
    """What legal arguments come to, and what their user keeps for the next call with such."""

    __slots__ = ("kept", "options")

    def __init__(self, options: tuple[Any, ...]) -> None:
        self.options = options
        self.kept: dict[Any, Any] = {}


_verdicts: dict[Any, Verdict] = {}
MAX_VERDICTS = 4096


def remembered(
    tensors: tuple[Tensor | None, ...],
    settings: tuple[Any, ...],
    check: Callable[[Any, Any], tuple[Any, ...]],
) -> Verdict:
    """``check(tensors, settings)`` for plain tensors, run once for each metadata.

    The checks of a call cost more than its launch, and depend on metadata only.
    """
    metadata = [
        None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
        for x in tensors
    ]
    key = (settings, torch.is_grad_enabled(), *metadata)
    verdict = _verdicts.get(key)
    if verdict is None:
        verdict = Verdict(check(tensors, settings))
        if _has_tensor(settings):  # whose value may be another one, and which would be kept alive
            return verdict
        if len(_verdicts) >= MAX_VERDICTS:
            _verdicts.clear()
        _verdicts[key] = verdict
    return verdict


def _has_tensor(settings: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) or (type(x) is tuple and _has_tensor(x)) for x in settings)


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for a tensor's device. Meta tensors have none, and asking raises."""
    is_any: bool = torch._C._is_any_autocast_enabled()
    return is_any and not x.is_meta and torch.is_autocast_enabled(x.device.type)


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a call on these tensors is ordinary eager execution that nothing observes."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack():
        flop_counts.register()  # one of the modes may count
        return False
    if (
        torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or has_batched_gradients()
    ):
        return False
    # a loop: a generator costs more than the rest of the function
    for x in tensors:
        if x is None:
            continue
        if (type(x) is not Tensor and type(x) is not Parameter) or x.is_neg():
            return False  # what is_neg() has the other sign in memory: the dispatcher knows
    return True


_VMAP_MODE = torch._C._dispatch_key_parse("VmapMode")


def has_batched_gradients() -> bool:
    """Whether a backward runs for several gradients at once, as ``is_grads_batched=True`` asks.

    Those are tensors of an older vmap, which none of functorch's functions know.
    """
    if torch.compiler.is_compiling():  # compiled autograd cannot trace the question
        return False
    is_on: bool = torch._C._dispatch_tls_is_dispatch_key_included(_VMAP_MODE)
    return is_on


def refuse_transforms(operator: str) -> None:
    """An operator's derivatives are autograd's; those of torch.func would be silently wrong."""
    if _is_transformed():
        raise NotImplementedError(
            f"{operator} has no derivative under torch.func and no forward-mode derivative; use "
            "torch.autograd.grad or backward(), or impl='reference'"
        )


# a compiler enters the transforms that it traces, and guards on those around it
@assume_constant_result
def _is_transformed() -> bool:
    """Whether torch.func differentiates, also around its vmap, or there are dual numbers."""
    kinds = torch._C._functorch.TransformType
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return forward_ad._current_level >= 0 or any(
        interpreter.key() in (kinds.Grad, kinds.Jvp) for interpreter in stack
    )


def check_attention_inputs(
    student_q: Tensor, student_k: Tensor, teacher_q: Tensor, teacher_k: Tensor, head_mean: bool
) -> None:
    """q [batch, heads, seqlen_q, head_dim] and k [batch, kv_heads, seqlen_k, head_dim] fit."""
    named = {
        "student_q": student_q,
        "student_k": student_k,
        "teacher_q": teacher_q,
        "teacher_k": teacher_k,
    }
    for name, x in named.items():
        check_tensor(name, x, ndim=4)
    same("dtype", {name: x.dtype for name, x in named.items()})
    same("device", {name: x.device for name, x in named.items()})
    same("batch size", {name: x.shape[0] for name, x in named.items()})
    same("seqlen_q", {"student_q": student_q.shape[2], "teacher_q": teacher_q.shape[2]})
    same("seqlen_k", {"student_k": student_k.shape[2], "teacher_k": teacher_k.shape[2]})
    for side, q, k in (("student", student_q, student_k), ("teacher", teacher_q, teacher_k)):
        same("head_dim", {f"{side}_q": q.shape[3], f"{side}_k": k.shape[3]})
        if q.shape[1] % max(k.shape[1], 1):
            raise ValueError(
                f"the number of heads of {side}_q must be a multiple of that of {side}_k, "
                f"got {q.shape[1]} and {k.shape[1]}"
            )
    if head_mean:
        if teacher_q.shape[1] % max(student_q.shape[1], 1):
            raise ValueError(
                "with head_reduction='mean' the number of teacher heads must be a multiple of the "
                f"student's, got {teacher_q.shape[1]} and {student_q.shape[1]}"
            )
    else:
        same("number of heads", {"student_q": student_q.shape[1], "teacher_q": teacher_q.shape[1]})
    for name, x in named.items():
        for dim, size in enumerate(x.shape):
            if size == 0:
                raise ValueError(
                    f"{name} must have no empty dimension, "
                    f"got size 0 at dimension {dim} of {tuple(x.shape)}"
                )


def check_tensor(name: str, x: object, ndim: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {tuple(x.shape)}")
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"the last dimension of {name} must be contiguous, got strides {x.stride()}"
        )


ONE_DEVICE = "all tensors must be on one device"


def same(what: str, values: dict[str, object]) -> None:
    """All values are equal."""
    first, *rest = values.values()
    if any(value != first for value in rest):
        if what == "device":
            name = next(iter(values))
            other, device = next(item for item in values.items() if item[1] != first)
            raise ValueError(f"{ONE_DEVICE}; {name} is on {first}, {other} on {device}")
        names, got = _listed(values), _listed([str(v) for v in values.values()])
        raise ValueError(f"{names} must share {what}, got {got}")


def _listed(items: Sequence[str] | dict[str, object]) -> str:
    items = list(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def check_broadcast(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The tensor with as many dimensions as ``shape``, each of size 1 or that of ``shape``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    on_device(name, x, device)
    if x.ndim > len(shape):
        raise ValueError(
            f"{name} must broadcast to {tuple(shape)}, got {x.ndim} dimensions: {tuple(x.shape)}"
        )
    view = x[(None,) * (len(shape) - x.ndim)]
    if any(have not in (1, want) for have, want in zip(view.shape, shape, strict=True)):
        raise ValueError(f"{name} must broadcast to {tuple(shape)}, got {tuple(x.shape)}")
    return view


def additive(name: str, x: Tensor) -> None:
    """A tensor that is added to scores: floating point, and constant."""
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be boolean or floating point, got {x.dtype}")
    no_gradient(name, x)


def on_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{ONE_DEVICE}; {name} is on {x.device}, the operands on {device}")


def check_vector(
    name: str, x: Tensor, size: int, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    """A one-dimensional tensor of a given size and one of the dtypes."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    on_device(name, x, device)
    if tuple(x.shape) != (size,):
        raise ValueError(f"{name} must have shape ({size},), got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must have dtype {' or '.join(map(str, dtypes))}, got {x.dtype}")


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def number(name: str, value: object) -> None:
    """A tensor's value would be the first one that it had, and it would get no gradient."""
    if isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a number, got a tensor; .item() reads it, without a gradient: what "
            "is learned can multiply queries or hidden states"
        )


def positive(name: str, value: float) -> None:
    number(name, value)
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")


def in_unit_interval(name: str, value: float) -> None:
    number(name, value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}")


def no_gradient(name: str, x: Tensor | None) -> None:
    """The operator has no gradient to this tensor: refuse rather than drop it."""
    if x is not None and x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name} gets no gradient from this operator; "
            f"pass {name}.detach() or keep plain torch code"
        )
