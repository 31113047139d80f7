"""Generates jit helpers: a functional's f, h and g of one key, as Triton source.

``helper(functional)`` is a ``@triton.jit`` function (P, S, logP, logS) -> (f, h, g), which a
kernel takes as a compile-time argument. Its source enters Triton's cache key as that of any other
function does.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import math
from typing import Any

import triton
import triton.language as tl

from torch_streamkl.divergences.functional import (
    Expr,
    Functional,
    is_lifted,
    is_weight,
    mixture_shares,
)

_ONE_INSTRUCTION = (
    'tl.inline_asm_elementwise("{0}.approx.ftz.f32 $0, $1;", "=f,f", [{1}], tl.float32, True, 1)'
)
# The logarithm of the smallest number is finite, and P and S below it are 0.
_FAST_LOG2 = _ONE_INSTRUCTION.format("lg2", f"tl.maximum({{0}}, {2.0**-126!r})")
# of a probability and a number that is far above the smallest (functional.is_lifted)
_FAST_CALLS = {
    "log": f"{_ONE_INSTRUCTION.format('lg2', '{0}')} * {math.log(2.0)!r}",
    "div": f"{{0}} * {_ONE_INSTRUCTION.format('rcp', '{1}')}",
}
_CALLS = {
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "abs": "tl.abs({0})",
    "sqrt": "tl.sqrt({0})",
    "neg": "-{0}",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "max": "tl.maximum({0}, {1})",
    "min": "tl.minimum({0}, {1})",
    "ge": "{0} >= {1}",
    "gt": "{0} > {1}",
    "where": "tl.where({0}, {1}, {2})",
    # both -inf: the maximum is returned, and every factor before it is 0
    "logaddexp": "tl.where({0} == {1}, {0} + 0.6931471805599453, "
    "tl.maximum({0}, {1}) + tl.log(1.0 + tl.exp(-tl.abs({0} - {1}))))",
}


def source(functional: Functional, of_half: bool = False) -> str:
    """Returns the source of the helper: one assignment per distinct subexpression.

    ``of_half``: of scores of half-precision inputs. There log(b P + c S) is one instruction, off
    by 2^-22 of itself, where the maximum of both and log(1 + x) are off by a rounding; and so are
    log(P + eps) and 1 / (P + eps).
    """
    lines: list[str] = []
    names: dict[Expr, str] = {}

    def name_of(e: Expr) -> str:
        if e.op == "const":
            return (
                f"float('{e.value}')"
                if e.value in (float("inf"), -float("inf"))
                else repr(e.value)
            )
        if not e.args:
            return e.op
        splits = mixture_shares(e) if of_half else None
        if splits is not None and e not in names:
            mixture = f"{splits[0]!r} * P + {splits[1]!r} * S"
            names[e] = f"x{len(names)}"
            lines.append(f"{names[e]} = {_FAST_LOG2.format(mixture)} * {math.log(2.0)!r}")
        if e not in names:
            args = [name_of(a) for a in e.args]
            if e.op == "mul":  # a key without probability contributes 0, whatever the other factor
                for weight, other in ((0, 1), (1, 0)):
                    if is_weight(e.args[weight]) and not _is_finite(e.args[other], of_half):
                        args[other] = f"tl.where({args[weight]} == 0.0, 0.0, {args[other]})"
            if e.op == "where" and e.args[0].op not in ("ge", "gt"):
                args[0] = f"{args[0]} != 0.0"
            is_fast = of_half and e.op in _FAST_CALLS and is_lifted(e.args[-1])
            call = (_FAST_CALLS if is_fast else _CALLS)[e.op]
            names[e] = f"x{len(names)}"
            lines.append(f"{names[e]} = {call.format(*args)}")
        return names[e]

    results = [
        name_of(e) for e in (functional.expr, functional.student_grad, functional.teacher_grad)
    ]
    returned = ", ".join(f"{r} + 0.0 * P" if r[0] not in "xPSl" else r for r in results)
    body = "\n    ".join([*lines, f"return {returned}"])
    return f"@triton.jit\ndef helper(P, S, logP, logS):\n    # {functional.text}\n    {body}\n"


def _is_finite(e: Expr, of_half: bool) -> bool:
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
    return is_weight(e) or (e.op == "const" and math.isfinite(e.value))


@functools.lru_cache(maxsize=256)
def helper(functional_text: str, of_half: bool = False) -> Any:
    """Returns the jit function of a functional, created once; ``of_half`` as in `source`."""
    text = source(Functional.of(functional_text), of_half)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    filename = f"<streamkl functional {digest}>"
    # Triton reads the source of a jit function through inspect, which asks linecache
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    scope = {"triton": triton, "tl": tl, "__name__": f"torch_streamkl.kernels.generated_{digest}"}
    exec(compile(text, filename, "exec"), scope)
    _texts[scope["helper"]] = functional_text
    return scope["helper"]


_texts: dict[Any, str] = {}


def text_of(function: Any) -> str | None:
    """Returns the functional of a function that `helper` has made."""
    return _texts.get(function)
