"""Brings a chain of operations on scores into the form that the operators compute.

The operators compute ``where(mask, softcap * tanh(scale * factors * x.y + biases) + biases,
fill)``, with biases before or after the tanh, and a number added to all of it, which a softmax
ignores. For LM heads ``x.y`` may be a sum of products, before the tanh. `read` follows a chain
step by step, and raises at the step that leaves this form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch_streamkl.fx_passes.domain.layout import axes_of
from torch_streamkl.fx_passes.domain.masks import Mask
from torch_streamkl.fx_passes.domain.scores import (
    ABSORBING,
    LARGEST_SHIFT,
    Bias,
    Factor,
    Masking,
    Pad,
    Product,
    Scale,
    ScoreKey,
    ScoreStep,
    Shift,
    Tanh,
)
from torch_streamkl.fx_passes.domain.signs import is_positive
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported


@dataclass(frozen=True)
class Layer:
    """Holds a mask as it was applied: if two overlap, the order decides the value of a key."""

    mask: Mask
    fill: float


@dataclass(frozen=True)
class ScoreForm:
    """Holds a chain of operations on scores as the arguments of an operator.

    ``exact_fill`` says whether a row without any allowed key is constant: two masks may leave -inf
    at some of its keys and the lowest number at others.
    """

    scale: float = 1.0
    factors: tuple[Factor, ...] = ()
    softcap: float = 0.0  # 0: no tanh
    inner_biases: tuple[Bias, ...] = ()  # added before the tanh
    biases: tuple[Bias, ...] = ()
    products: tuple[Product, ...] = ()  # added before the tanh
    mask: Mask = frozenset()
    fill: float = 0.0  # before the shift
    exact_fill: bool = True
    layers: tuple[Layer, ...] = ()
    added: bool = False  # a tensor or mask was added: gradient flows through masked keys
    padded: int | None = None
    shift: float = 0.0  # after everything else
    row_shift: bool = False  # a value per row, or a scalar tensor, is added after it as well

    @property
    def is_shifted(self) -> bool:
        return self.shift != 0.0 or self.row_shift


def read(key: ScoreKey) -> ScoreForm:
    """Returns the chain as an operator's arguments; raises Unsupported at a step without one."""
    form = ScoreForm()
    for step in key.steps:
        form = _after(form, step)
    if form.softcap < 0.0:  # an odd function: the sign moves inside
        form = replace(
            form,
            softcap=-form.softcap,
            scale=-form.scale,
            inner_biases=tuple(replace(b, weight=-b.weight) for b in form.inner_biases),
            products=tuple(replace(p, weight=-p.weight) for p in form.products),
        )
    if -math.inf < form.fill <= ABSORBING:
        return replace(form, fill=ABSORBING)
    return form


def _after(form: ScoreForm, step: ScoreStep) -> ScoreForm:
    match step:
        case Scale():
            return _scaled(form, step.number)
        case Factor():
            return _multiplied(form, step)
        case Shift():
            if not abs(step.number) <= LARGEST_SHIFT:
                raise Unsupported(
                    f"{step.number:g} is added to all scores, which are lost next to it"
                )
            return replace(form, shift=form.shift + step.number)
        case Tanh():
            return _with_tanh(form)
        case Bias():
            return _with_bias(form, step)
        case Product():
            return _with_product(form, step)
        case Masking():
            return _added(form, step) if step.added else _filled(form, step.mask, step.fill)
        case Pad():
            return _padded(form, step)


def _scaled(form: ScoreForm, number: float) -> ScoreForm:
    if number == 0.0:
        raise Unsupported("scores multiplied by 0")
    if not math.isfinite(number):
        raise Unsupported(f"scores multiplied by {number}")
    if number < 0.0 and (form.padded is not None or (form.mask and form.fill <= ABSORBING)):
        raise Unsupported("masked scores multiplied by a negative number")
    inner = form.softcap != 0.0
    return replace(
        form,
        scale=form.scale if inner else form.scale * number,
        softcap=form.softcap * number,
        products=form.products
        if inner
        else tuple(replace(p, weight=p.weight * number) for p in form.products),
        biases=tuple(replace(b, weight=b.weight * number) for b in form.biases),
        fill=form.fill * number,
        shift=form.shift * number,
    )


def _multiplied(form: ScoreForm, factor: Factor) -> ScoreForm:
    """Multiplies by a tensor: a scalar, or one value per row."""
    if form.softcap:
        raise Unsupported("scores are multiplied by a tensor after a softcap")
    if form.biases and factor.tensor.layout:
        raise Unsupported(
            "scores are multiplied by a tensor that is no scalar after a bias was added"
        )
    if form.mask and form.fill > ABSORBING:
        raise Unsupported(
            "scores are multiplied by a tensor after a finite mask value was filled in"
        )
    if form.mask and form.fill != -math.inf and not is_positive(factor.tensor.node):
        raise Unsupported("masked scores are multiplied by a tensor that may be negative")
    return replace(
        form,
        factors=(*form.factors, factor),
        biases=tuple(replace(b, factors=(*b.factors, factor)) for b in form.biases),
        products=tuple(replace(p, factors=(*p.factors, factor)) for p in form.products),
        shift=0.0,
        row_shift=form.is_shifted,
    )


def _with_tanh(form: ScoreForm) -> ScoreForm:
    if form.softcap:
        raise Unsupported("tanh of scores that were capped before")
    if form.is_shifted:
        raise Unsupported("tanh of scores that a number was added to before")
    if form.padded is not None:
        raise Unsupported("tanh of scores that were padded before")
    return replace(
        form,
        softcap=1.0,
        inner_biases=form.biases,
        biases=(),
        fill=math.tanh(form.fill),
        exact_fill=True,  # -1, whatever they were
        layers=tuple(Layer(x.mask, math.tanh(x.fill)) for x in form.layers),
    )


def _with_bias(form: ScoreForm, bias: Bias) -> ScoreForm:
    if form.padded is not None:
        raise Unsupported("a tensor is added to scores after they were padded")
    if form.mask and form.fill > ABSORBING:
        raise Unsupported("a tensor is added to scores after a finite mask value was filled in")
    # the tensor may be a mask: keys of a row without any allowed key may go to -inf
    exact = form.exact_fill and (not form.mask or form.fill == -math.inf)
    return replace(form, biases=(*form.biases, bias), exact_fill=exact, added=True)


def _with_product(form: ScoreForm, step: Product) -> ScoreForm:
    if form.softcap or form.mask or form.padded is not None:
        raise Unsupported("a product is added to scores after a tanh, a mask or padding")
    return replace(form, products=(*form.products, step))


def _filled(form: ScoreForm, mask: Mask, fill: float) -> ScoreForm:
    """``fill`` where the mask does not hold."""
    if math.isnan(fill) or fill >= -ABSORBING:
        raise Unsupported(f"masked scores have the value {fill:g}")
    if form.padded is not None and fill != -math.inf:
        raise Unsupported("scores are masked with a finite value after they were padded")
    if fill > ABSORBING:
        if form.row_shift:
            raise Unsupported("a finite mask value is filled in after a value per row was added")
        fill -= form.shift  # the shift is after the mask in this form
    layer = Layer(mask, fill)
    if form.mask <= mask:  # what was masked before is filled anew
        added = form.added and bool(form.biases)
        return replace(form, mask=mask, fill=fill, exact_fill=True, layers=(layer,), added=added)
    if fill == form.fill:
        layers = (*form.layers, layer)
        return replace(form, mask=form.mask | mask, layers=layers)
    return _overlapping(form, layer)


def _added(form: ScoreForm, step: Masking) -> ScoreForm:
    """``fill`` is added where the mask does not hold."""
    mask, fill = step.mask, step.fill
    if not fill <= ABSORBING:
        raise Unsupported(
            f"an additive mask value of {fill:g} does not remove a key; it is kept as a bias"
        )
    form = replace(form, added=True)
    layer = Layer(mask, fill)
    layers = (*form.layers, layer)
    if form.mask == mask or (form.mask and fill == form.fill == -math.inf):
        total = form.fill + fill
        return replace(form, mask=form.mask | mask, fill=total, layers=layers)
    if form.mask and (form.fill <= ABSORBING or not form.mask <= mask):
        return _overlapping(form, layer)
    # a finite value is lost in the sum; a tensor that was added may be a mask itself
    exact = fill == -math.inf or not form.biases
    return replace(form, mask=mask, fill=fill, exact_fill=exact, layers=(layer,))


def _overlapping(form: ScoreForm, layer: Layer) -> ScoreForm:
    """Combines two masks: in a row without any allowed key, it matters which one removed a key."""
    if form.fill > ABSORBING or layer.fill > ABSORBING:
        raise Unsupported(f"two masks with different values, {form.fill:g} and {layer.fill:g}")
    return replace(
        form,
        mask=form.mask | layer.mask,
        fill=max(form.fill, layer.fill),
        exact_fill=False,
        layers=(*form.layers, layer),
    )


def _padded(form: ScoreForm, step: Pad) -> ScoreForm:
    if form.padded is not None:
        raise Unsupported("scores are padded twice")
    if form.mask or any(step.axis in axes_of(x.tensor.layout) for x in form.factors):
        raise Unsupported("scores are padded after they were masked or multiplied by a tensor")
    return replace(form, padded=step.axis)
