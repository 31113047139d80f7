"""Generates jit helpers: a functional's f, h and g of one key, as Triton source.

``helper(functional)`` is a ``@triton.jit`` function (P, S, logP, logS) -> (f, h, g), which a
kernel takes as a compile-time argument. Its source enters Triton's cache key as that of any other
function does.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import triton
import triton.language as tl

from torch_streamkl.kernels.generated import function_of
from torch_streamkl.program.divergence_forms import is_lifted, mixture_shares
from torch_streamkl.program.divergences import Functional
from torch_streamkl.program.graph import Node
from torch_streamkl.program.operations import OPERATIONS
from torch_streamkl.program.walks import walk

_ONE_INSTRUCTION = (
    'tl.inline_asm_elementwise("{0}.approx.ftz.f32 $0, $1;", "=f,f", [{1}], tl.float32, True, 1)'
)
# The logarithm of the smallest number is finite, and P and S below it are 0.
_FAST_LOG2 = _ONE_INSTRUCTION.format("lg2", f"tl.maximum({{0}}, {2.0**-126!r})")
# of a probability and a number that is far above the smallest (divergence_forms.is_lifted)
_FAST_CALLS = {
    "log": f"{_ONE_INSTRUCTION.format('lg2', '{0}')} * {math.log(2.0)!r}",
    "div": f"{{0}} * {_ONE_INSTRUCTION.format('rcp', '{1}')}",
}
# where kernels compute a divergence, no probability of a key that counts is NaN
_PROPAGATE = ", propagate_nan=tl.PropagateNan.ALL"


def source(functional: Functional, of_half: bool = False) -> str:
    """Returns the source of the helper: one assignment per distinct subexpression.

    ``of_half``: of scores of half-precision inputs. There log(b P + c S) is one instruction, off
    by 2^-22 of itself, where the maximum of both and log(1 + x) are off by a rounding; and so are
    log(P + eps) and 1 / (P + eps).
    """
    lines: list[str] = []
    names: dict[Node, str] = {}
    roots = (functional.expr, functional.student_grad, functional.teacher_grad)
    for e in walk(roots, lambda e: not (of_half and mixture_shares(e))):
        splits = mixture_shares(e) if of_half else None
        if e.op == "const":
            is_infinite = e.value in (math.inf, -math.inf)
            names[e] = f"float('{e.value}')" if is_infinite else repr(e.value)
            continue
        if not e.args:
            names[e] = e.op
            continue
        if splits is not None:
            call = _FAST_LOG2.format(f"{splits[0]!r} * P + {splits[1]!r} * S")
            call += f" * {math.log(2.0)!r}"
        else:
            call = _call(e, [names[a] for a in e.args], of_half)
        names[e] = f"x{len(lines)}"
        lines.append(f"{names[e]} = {call}")
    results = [names[e] for e in roots]
    returned = ", ".join(f"{r} + 0.0 * P" if r[0] not in "xPSl" else r for r in results)
    body = "\n    ".join([*lines, f"return {returned}"])
    return f"@triton.jit\ndef helper(P, S, logP, logS):\n    # {functional.text}\n    {body}\n"


def _call(e: Node, args: list[str], of_half: bool) -> str:
    if of_half and e.op in _FAST_CALLS and is_lifted(e.args[-1]):
        return _FAST_CALLS[e.op].format(*args)
    if e.is_guarded:  # a key without probability contributes 0, whatever the other factor
        are_finite = [_is_finite(a, of_half) for a in e.args]
        args = [
            x if is_finite else f"tl.where({other} == 0.0, 0.0, {x})"
            for x, other, is_finite in zip(args, args[::-1], are_finite, strict=True)
        ]
    return OPERATIONS[e.op].triton.replace(_PROPAGATE, "").format(*args)


def _is_finite(e: Node, of_half: bool) -> bool:
    """Whether an expression cannot be infinite.

    Where helpers are ``of_half`` logarithms of probabilities are finite: the kernels that take
    those (attention/hopper/) have scores without infinite masks and biases, and leave absent keys
    out themselves.
    """
    if of_half and (e.op in ("logP", "logS") or mixture_shares(e) is not None):
        return True
    if of_half and e.op in ("log", "div") and is_lifted(e.args[-1]):
        return True
    if e.op in ("add", "sub", "mul", "neg", "abs"):
        return all(_is_finite(a, of_half) for a in e.args)
    return e.is_finite


@functools.lru_cache(maxsize=256)
def helper(functional_text: str, of_half: bool = False) -> Any:
    """Returns the jit function of a functional, created once; ``of_half`` as in `source`."""
    text = source(Functional.of(functional_text), of_half)
    found = function_of(text, "helper", "functional", {"triton": triton, "tl": tl})
    _texts[found] = functional_text
    return found


_texts: dict[Any, str] = {}


def text_of(function: Any) -> str | None:
    """Returns the expression that `helper` compiled a function from."""
    return _texts.get(function)
