"""Checks arguments by their metadata, on fake tensors too, before any launch.

Each error states the rule and the value that broke it.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from torch_streamkl import compile_caches, flop_counts
from torch_streamkl.caches import Bounded
from torch_streamkl.compiler_marks import assume_constant_result, is_compiling

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# The kernels compute with float32: a number outside of its range would be 0 or infinity there.
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
# Names of other libraries for options of ours.
OPTION_ALIASES = {
    "attention_mask": "attn_mask",
    "causal": "is_causal",
    "chunk_size": "max_workspace_mib",
    "cu_seqlens": "cu_seqlens_q",
    "label": "labels",
    "logit_softcap": "student_softcap",
    "loss_type": "divergence",
    "mask": "attn_mask",
    "scale": "student_scale",
    "sinks": "student_sink",
    "sliding_window": "window",
    "sm_scale": "student_scale",
    "softcap": "student_softcap",
    "softmax_scale": "student_scale",
    "t": "temperature",
    "targets": "labels",
    "tau": "temperature",
    "weight": "row_weight",
    "window_size": "window",
}
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Validation:
    """Caches the validation result for one input signature."""

    __slots__ = ("bound", "options")

    def __init__(self, options: tuple[Any, ...]) -> None:
        self.options = options
        self.bound: Any = None  # the call, bound to this signature


_verdicts: Bounded[Validation] = Bounded(4096)


def validated(
    tensors: tuple[Tensor | None, ...],
    settings: tuple[Any, ...],
    check: Callable[[Any, Any], tuple[Any, ...]],
) -> Validation:
    """Runs ``check(tensors, settings)`` for plain tensors once for each metadata.

    The checks of a call cost more than its launch, and depend on metadata only. The types of
    settings are part of it, because True, 1 and 1.0 are equal.
    """
    try:
        metadata = [
            None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
            for x in tensors
        ]
        types = tuple(map(type, settings))
        key = (settings, types, torch.is_grad_enabled(), _autocast_dtype(tensors), *metadata)
        verdict = _verdicts.get(key)
    except (TypeError, RuntimeError):  # an unhashable setting, a tensor without strides: illegal
        return Validation(check(tensors, settings))
    if verdict is None:
        verdict = Validation(check(tensors, settings))
        if _has_tensor(settings):  # whose value may be another one, and which would be kept alive
            return verdict
        _verdicts[key] = verdict
    return verdict


def _has_tensor(settings: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) or (type(x) is tuple and _has_tensor(x)) for x in settings)


def is_autocast(x: Tensor) -> bool:
    """Returns whether autocast is on for a tensor's device.

    Meta tensors have none, and asking raises.
    """
    is_any: bool = torch._C._is_any_autocast_enabled()
    return is_any and not x.is_meta and torch.is_autocast_enabled(x.device.type)


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which a matmul would take a tensor: under autocast that of autocast."""
    is_cast = is_autocast(x) and x.dtype in FLOAT_DTYPES and x.dtype != torch.float64
    dtype: torch.dtype = torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype
    return dtype


def as_matmul_operand(x: Tensor) -> Tensor:
    """Casts a tensor as autocast casts a matmul's operand; float64 stays."""
    dtype = matmul_dtype(x)
    return x if x.dtype == dtype else x.to(dtype)


def _autocast_dtype(tensors: tuple[Tensor | None, ...]) -> torch.dtype | None:
    """Returns the dtype to which autocast casts operands on the first tensor's device, or None."""
    if not torch._C._is_any_autocast_enabled():
        return None
    first = tensors[0]
    assert first is not None
    return torch.get_autocast_dtype(first.device.type) if is_autocast(first) else None


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Returns whether a call on these tensors is ordinary eager execution that nothing
    observes.
    """
    if is_compiling():
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
    """Returns whether a backward runs for several gradients at once (``is_grads_batched=True``).

    Such gradients are tensors of an older vmap, which functorch's functions do not know.
    """
    if is_compiling():  # compiled autograd cannot trace the question
        return False
    is_on: bool = torch._C._dispatch_tls_is_dispatch_key_included(_VMAP_MODE)
    return is_on


def refuse_transforms(operator: str) -> None:
    """Refuses torch.func transforms, whose derivatives of an operator would be silently wrong."""
    if is_compiling():
        compile_caches.add_to_keys()
    if _is_transformed():
        raise NotImplementedError(
            f"{operator} has no derivative under torch.func and no forward-mode derivative; use "
            "torch.autograd.grad or backward(), or impl='reference'"
        )


def refuse_all_transforms(operator: str) -> None:
    """Refuses every torch.func transform: none can follow the exchange between ranks."""
    if is_compiling():
        compile_caches.add_to_keys()
    if _is_transformed() or torch._C._functorch.get_interpreter_stack():
        raise NotImplementedError(
            f"{operator} takes no part in torch.func (vmap, grad, jvp); use torch.autograd.grad "
            "or backward(), and a dimension of batch in the place of vmap"
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
    """Checks q [batch, heads, seqlen_q, head_dim] and k [batch, kv_heads, seqlen_k, head_dim]."""
    named = {
        "student_q": student_q,
        "student_k": student_k,
        "teacher_q": teacher_q,
        "teacher_k": teacher_k,
    }
    for name, x in named.items():
        check_tensor(name, x, ndim=4)
    same("dtype", {name: matmul_dtype(x) for name, x in named.items()})
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
        for what, size in (("head", x.shape[1]), ("element in each head", x.shape[3])):
            if size == 0:
                raise ValueError(
                    f"{name} must have at least one {what}, got [batch, num_heads, seqlen, "
                    f"head_dim] {tuple(x.shape)}"
                )


def check_tensor(name: str, x: object, ndim: int) -> None:
    """Checks a tensor's number of dimensions, dtype and last stride."""
    x = tensor(name, x)
    if x.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {tuple(x.shape)}")
    floating(name, x)
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"the last dimension of {name} must be contiguous, got strides {x.stride()}"
        )


ONE_DEVICE = "all tensors must be on one device"


def same(what: str, values: dict[str, object]) -> None:
    """Checks that all values are equal."""
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


def tensor(name: str, x: object) -> Tensor:
    """Returns the argument, which has to be a tensor with strides."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.is_nested:
        raise NotImplementedError(
            f"{name} must be a dense tensor, got a nested one; attention_kl_varlen takes the "
            "values of packed sequences with their offsets, linear_kl any tokens"
        )
    if x.layout != torch.strided:
        raise NotImplementedError(f"{name} must be a dense tensor, got layout {x.layout}")
    return x


def check_broadcast(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Checks that a tensor broadcasts to ``shape``, and gives it as many dimensions."""
    tensor(name, x)
    on_device(name, x, device)
    if x.ndim > len(shape):
        raise ValueError(
            f"{name} must broadcast to {tuple(shape)}, got {x.ndim} dimensions: {tuple(x.shape)}"
        )
    view = x[(None,) * (len(shape) - x.ndim)]
    if any(have not in (1, want) for have, want in zip(view.shape, shape, strict=True)):
        raise ValueError(f"{name} must broadcast to {tuple(shape)}, got {tuple(x.shape)}")
    return view


def row_mask(x: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Checks a boolean mask of rows, and gives it as many dimensions as ``shape``."""
    view = check_broadcast("row_mask", x, shape, device)
    if x.dtype != torch.bool:
        raise TypeError(f"row_mask must be boolean, got {x.dtype}")
    return view


def log_sum_exps(x: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Checks log-sum-exps of a teacher that are known."""
    tensor("teacher_lse", x)
    if tuple(x.shape) != shape:
        raise ValueError(f"teacher_lse must have shape {shape}, got {tuple(x.shape)}")
    on_device("teacher_lse", x, device)
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"teacher_lse must be float32 or float64, got {x.dtype}")
    no_gradient("teacher_lse", x)


def offsets(device: torch.device, **named: Tensor | None) -> None:
    """Checks the offsets of packed sequences, of one length if there are several."""
    first, x = next(iter(named.items()))
    size = x.shape[0] if isinstance(x, Tensor) and x.ndim == 1 else 2
    for name, each in named.items():
        check_vector(name, each, size, device, (torch.int32,))  # type: ignore[arg-type]
    if size < 2:
        raise ValueError(f"{first} must have num_sequences + 1 >= 2 entries, got {size}")


def floating(name: str, x: Tensor) -> None:
    """Checks for a dtype that operands may have."""
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")


def indices(name: str, x: Tensor) -> None:
    """Checks for a dtype that ids and labels may have."""
    if x.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, got {x.dtype}")


def additive(name: str, x: Tensor) -> None:
    """Checks a tensor that is added to scores: floating point, and constant."""
    if x.dtype not in FLOAT_DTYPES:
        rule = "boolean or floating point" if name == "attn_mask" else "floating point"
        hint = "; attn_mask takes a boolean mask" if x.dtype == torch.bool else ""
        raise TypeError(f"{name} must be {rule}, got {x.dtype}{hint}")
    no_gradient(name, x)


def on_device(name: str, x: Tensor, device: torch.device) -> None:
    """Checks that a tensor is on the device of the operands."""
    if x.device != device:
        raise ValueError(f"{ONE_DEVICE}; {name} is on {x.device}, the operands on {device}")


def check_vector(
    name: str, x: Tensor, size: int, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Checks for a one-dimensional tensor of a given size and one of the dtypes."""
    tensor(name, x)
    on_device(name, x, device)
    if tuple(x.shape) != (size,):
        raise ValueError(f"{name} must have shape ({size},), got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must have dtype {' or '.join(map(str, dtypes))}, got {x.dtype}")


def one_of(
    name: str,
    value: object,
    allowed: Sequence[object],
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Checks that a value is one of a few; ``aliases`` are other names that users may try."""
    # a tensor or an array has no single truth value when it is compared
    if (value is None or isinstance(value, str)) and value in allowed:
        return
    listed = ", ".join(map(repr, allowed))
    hint = did_you_mean(value, [x for x in allowed if isinstance(x, str)], aliases)
    raise ValueError(f"{name} must be one of {listed}, got {_shown(value)}{hint}")


def did_you_mean(
    value: object, allowed: Iterable[str], aliases: Mapping[str, str] | None = None
) -> str:
    """Suggests the allowed name that was probably meant, as the end of an error's sentence.

    It is the name of an alias, or one that differs in case, ends alike, or is spelled nearly so.
    """
    import difflib

    if not isinstance(value, str) or not value:
        return ""
    names = {name.lower(): name for name in allowed}
    given = value.lower().strip().replace("-", "_").replace(" ", "_")
    found = names.get(given) or names.get((aliases or {}).get(given, ""))
    for name in difflib.get_close_matches(given, names, n=1, cutoff=0.6):
        found = found or names[name]
    for name in names:
        found = found or (names[name] if name.endswith(f"_{given}") else None)
    return f"; did you mean {found!r}?" if found else ""


def named_options(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function: an unknown keyword raises an error that suggests a near one."""
    names = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in names:
                refuse_option(function.__name__, name, names)
        return function(*args, **kwargs)

    return call


def refuse_option(function: str, name: str, allowed: Iterable[str]) -> NoReturn:
    """Raises for an unknown option, and suggests a near one."""
    allowed = sorted(allowed)
    hint = did_you_mean(name, allowed, OPTION_ALIASES) or f"; it has {', '.join(allowed)}"
    raise TypeError(f"{function}() has no argument {name!r}{hint}")


def _shown(value: object) -> str:
    """Formats a value for an error's sentence."""
    if isinstance(value, Tensor):
        # a nested tensor may have no shape to show
        return "a nested tensor" if value.is_nested else f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def number(name: str, value: object) -> None:
    """Refuses a tensor in place of a number: its first value would be kept, without a gradient."""
    if isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a number, got a tensor; .item() reads it, without a gradient: what "
            "is learned can multiply queries or hidden states"
        )
    if isinstance(value, bool) or not isinstance(
        value, (int, float, torch.SymInt, torch.SymFloat, numbers.Real)
    ):
        raise TypeError(f"{name} must be a number, got {_shown(value)}")


def finite(name: str, value: Any) -> None:
    """Checks that a number is finite in float32."""
    number(name, value)
    if not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{name} must be finite in float32, got {_shown(value)}")


def positive(name: str, value: Any) -> None:
    """Checks that a number is positive and finite in float32."""
    number(name, value)
    if not value > 0 or not SMALLEST <= value <= LARGEST:
        raise ValueError(f"{name} must be positive and finite in float32, got {_shown(value)}")


def in_unit_interval(name: str, value: Any) -> None:
    """Checks that a number lies between 0 and 1."""
    number(name, value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie between 0 and 1, got {_shown(value)}")


def integer(name: str, value: Any, least: int | None = None) -> None:
    """Checks that a value is a whole number, of at least ``least``."""
    # a bool is an int of Python; numpy's integers are numbers.Integral
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt, numbers.Integral)):
        raise TypeError(f"{name} must be an integer, got {_shown(value)}")
    size: Any = value  # may be symbolic: int() would fix it
    if not -(2**63) <= size < 2**63:
        raise ValueError(f"{name} must fit 64 bits, got {_shown(value)}")
    if least is not None and size < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def boolean(name: str, value: object) -> None:
    """Checks that a value is True or False."""
    if not isinstance(value, (bool, torch.SymBool)):
        raise TypeError(f"{name} must be True or False, got {_shown(value)}")


def no_gradient(name: str, x: Tensor | None) -> None:
    """Raises if a tensor that the operator has no gradient for needs one."""
    if x is not None and x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name} gets no gradient from this operator; "
            f"pass {name}.detach() or keep plain torch code"
        )
