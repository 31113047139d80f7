"""Writes powers with a constant exponent as Triton code."""

from __future__ import annotations

MAX_HALVES = 8  # the fourth power; longer products would gain nothing


def power(x: str, exponent: float) -> str:
    """Returns the code of ``x ** exponent``, in which negative numbers have whole powers only.

    Half and whole powers are products: a logarithm of float32 would cost them a digit.
    """
    num_halves = abs(2 * exponent)
    is_product = num_halves == int(num_halves) and 0 < num_halves <= MAX_HALVES
    is_whole = exponent == int(exponent)
    if is_product and is_whole:
        return _product([x] * int(num_halves // 2), exponent)
    magnitude = f"tl.exp({exponent!r} * tl.log(tl.abs({x})))"
    if is_product:
        factors = [f"tl.abs({x})"] * int(num_halves // 2)
        magnitude = _product([*factors, f"tl.sqrt(tl.abs({x}))"], exponent)
    if not is_whole:
        is_none = f"({x} < 0)"
        if abs(exponent) != 0.5:  # of which torch takes the square root
            is_none += f" & ({x} > float('-inf'))"
        return f"tl.where({is_none}, float('nan'), {magnitude})"
    return magnitude if exponent % 2 == 0 else f"tl.where({x} < 0, -1.0, 1.0) * {magnitude}"


def _product(factors: list[str], exponent: float) -> str:
    if exponent < 0:
        factors = [f"(1.0 / {factor})" for factor in factors]
    return f"({' * '.join(factors)})"
