"""Replaces Nitrobrew's two functions by calls of `linear_kl`.

``from torch_streamkl.nitrobrew import forward_kl, reverse_kl``. Everything else that `linear_kl`
can do (biases, softcaps, labels, row weights, gradients to the teacher) is there, not here.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import ParamSpec

from torch import Tensor

from torch_streamkl import checks
from torch_streamkl.divergences.names import Divergence, Reduction
from torch_streamkl.linear.interface import linear_kl, refusing
from torch_streamkl.linear.problem import MIB

__all__ = ["forward_kl", "reverse_kl"]

_P = ParamSpec("_P")


def _with_its_arguments(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Refuses a missing or misspelt argument on every rank that shares its tensors."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        try:
            for name in kwargs:
                if name not in signature.parameters:
                    checks.refuse_option(function.__name__, name, signature.parameters)
            signature.bind(*args, **kwargs)
        except TypeError as error:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            return refusing(error)(*tensors)
        return function(*args, **kwargs)

    return call


@_with_its_arguments
def forward_kl(
    xs: Tensor,
    xt: Tensor,
    ws: Tensor,
    wt: Tensor,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    chunk_V: int = 2048,
) -> Tensor:
    """Computes KL(teacher || student) of LM heads, as Nitrobrew's function of this name.

    Args:
        xs, xt: ``[batch, tokens, width]`` hidden states of the student and the teacher.
        ws, wt: ``[vocab_size, width]`` their LM heads. Gradients go to xs and ws; the teacher is
            constant.
        temperature: divides both logits; the T^2 factor is the caller's.
        reduction: ``"mean"`` over tokens, ``"sum"``, ``"batchmean"`` or ``"none"``.
        chunk_V: bounds the memory for logits by ``batch * tokens * chunk_V`` values of each side
            (at least the logits of one token).
    """
    return _kl("forward_kl", xs, xt, ws, wt, temperature, reduction, chunk_V)


@_with_its_arguments
def reverse_kl(
    xs: Tensor,
    xt: Tensor,
    ws: Tensor,
    wt: Tensor,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    chunk_V: int = 2048,
) -> Tensor:
    """Computes KL(student || teacher) of LM heads, as Nitrobrew's function of this name."""
    return _kl("reverse_kl", xs, xt, ws, wt, temperature, reduction, chunk_V)


# arguments of linear_kl by the names that they have here
_NAMES = {
    "student_hidden": "xs",
    "teacher_hidden": "xt",
    "student_weight": "ws",
    "teacher_weight": "wt",
}


def _check(xs: Tensor, xt: Tensor, ws: Tensor, wt: Tensor, chunk_V: int) -> None:
    checks.integer("chunk_V", chunk_V, 1)
    for name, x, ndim in (("xs", xs, None), ("xt", xt, None), ("ws", ws, 2), ("wt", wt, 2)):
        checks.tensor(name, x)
        if x.ndim < 2 or x.ndim > (ndim or x.ndim):
            raise ValueError(f"{name} must be [..., tokens, width] or [vocab_size, width], got "
                             f"shape {tuple(x.shape)}")  # fmt: skip


def _kl(
    divergence: Divergence,
    xs: Tensor,
    xt: Tensor,
    ws: Tensor,
    wt: Tensor,
    temperature: float,
    reduction: Reduction,
    chunk_V: int,
) -> Tensor:
    try:
        _check(xs, xt, ws, wt, chunk_V)
    except (ValueError, TypeError, NotImplementedError) as error:
        return refusing(error)(xs, ws, xt, wt)
    elements = max(math.prod(xs.shape[:-1]) * chunk_V, ws.shape[0] + 64)
    bytes_of_both = elements * (xs.element_size() + xt.element_size())
    try:
        return linear_kl(
            xs,
            ws,
            xt.detach(),
            wt.detach(),
            divergence=divergence,
            temperature=temperature,
            reduction=reduction,
            max_workspace_mib=min(-(-bytes_of_both // MIB), 2**40),
        )
    except (ValueError, TypeError, NotImplementedError) as error:
        text = str(error)
        for name, here in _NAMES.items():
            text = text.replace(name, here)
        raise type(error)(text) from None
