"""Provides Nitrobrew's two functions, with its names and its order of arguments, by `linear_kl`.

.. code-block:: python

    from torch_streamkl.nitrobrew import forward_kl, reverse_kl

Use `linear_kl` for biases, softcaps, labels, row weights, and gradients to the teacher.
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
from torch_streamkl.runtime.workspace import MIB

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
    """Computes KL(teacher || student) of two LM heads, as Nitrobrew's function of this name does.

    With P and S the softmaxes of the teacher's and the student's logits, a token's value is sum P
    (log P - log S). It equals

    .. code-block:: python

        linear_kl(
            xs, ws, xt.detach(), wt.detach(),
            divergence="forward_kl", temperature=temperature, reduction=reduction,
        )

    Args:
        xs, xt: ``[..., hidden_size]``, hidden states of the student and the teacher, such as
            ``[batch, tokens, hidden_size]``. The hidden sizes may differ.
        ws, wt: ``[vocab_size, hidden_size]``, their LM heads.
        temperature: divides the logits of both sides. Multiply by T^2 yourself.
        reduction: ``"mean"`` over tokens, ``"sum"``, ``"batchmean"`` (the sum
            divided by the first dimension) or ``"none"``.
        chunk_V: bounds the memory for logits to ``tokens * chunk_V`` elements a side, or to one
            token's logits if these are larger. Here ``tokens`` is their number in all sequences.

    Returns:
        A scalar, or one value per token ``[...]`` with ``reduction="none"``. float32, in nats.
        Gradients go to xs and ws; the teacher is a constant.

    Raises:
        ValueError, TypeError, NotImplementedError: as `linear_kl` does, with the names used here.

    Source: Nitrobrew, https://blog.tilderesearch.com/blog/nitrobrew.
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
    """Computes KL(student || teacher) of two LM heads, as Nitrobrew's function of this name does.

    A token's value is sum S (log S - log P). Arguments, result, errors and source are those of
    `forward_kl`.
    """
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
            raise ValueError(f"{name} must be [..., tokens, hidden_size] or [vocab_size, "
                             f"hidden_size], got shape {tuple(x.shape)}")  # fmt: skip


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
