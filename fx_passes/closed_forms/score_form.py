"""Reads a score: a product, and what is done to it, in the form that the operators compute.

They compute ``where(mask, softcap * tanh(scale * factors * x.y + biases) + biases, fill)``, with
biases before or after the tanh. A sum of products is one as well, before a tanh. `read` takes a
score apart from the outside, and follows it from the product on. It raises at the step that leaves
this form.

NOTE [Fills]
A fill at or below `ABSORBING` is lost in no rounding: added to a score, it is the fill itself. If
all keys of a row have it, their probabilities are equal. A fill above it is written into the
scores as it is, which the operator does as well (`mask_value`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch_streamkl.fx_passes.closed_forms.form import (
    Bias,
    Factor,
    NoForm,
    Product,
    is_of_products,
    operands_of,
)
from torch_streamkl.fx_passes.closed_forms.joined_products import joined_products
from torch_streamkl.program.canonical import (
    FALSE,
    LARGEST_SHIFT,
    all_of,
    choose,
    linear,
    literals,
    negation,
    product,
    terms_of,
)
from torch_streamkl.program.graph import BOOL, CONTRACT, FLOAT, SUM, Axis, Node, intern
from torch_streamkl.program.reductions import remade
from torch_streamkl.program.shifts import LARGE, is_small
from torch_streamkl.program.walks import has_op, rebuilt_root, walk

OF_ANOTHER_PRODUCT = "a function of another matrix product is added to the scores"

# A finite fill this low takes part in no softmax of float32 scores that a model can produce,
# unless every key of the row has it: adding it to a score gives the fill itself.
ABSORBING = -1e30
# Next to any score that a model makes, one this low has no probability in float32.
IMPROBABLE = -1e4

NOT_NUMBERS = {"isinf": "infinite", "isnan": "NaN"}  # of conditions on scores

Condition = frozenset[Node]  # all of these hold


@dataclass(frozen=True)
class Layer:
    """Holds a mask as it was applied: if two overlap, the order decides the value of a key."""

    mask: Condition
    fill: float


@dataclass(frozen=True)
class ScoreForm:
    """Holds a score as the arguments of an operator.

    ``exact_fill`` says whether a row without any allowed key is constant: two masks may leave -inf
    at some of its keys and the lowest number at others.
    """

    product: Node  # a matmul's element
    scale: float = 1.0
    factors: tuple[Factor, ...] = ()
    softcap: float = 0.0  # 0: no tanh
    inner_biases: tuple[Bias, ...] = ()  # added before the tanh
    biases: tuple[Bias, ...] = ()
    terms: tuple[Product, ...] = ()  # further products, added before a tanh
    mask: Condition = frozenset()
    fill: float = 0.0
    exact_fill: bool = True
    layers: tuple[Layer, ...] = ()
    added: bool = False  # a tensor or mask was added: gradient flows through masked keys
    shift: float = 0.0  # after everything else; a softmax ignores it
    row_shift: bool = False  # a value per row is added as well

    @property
    def is_shifted(self) -> bool:
        return self.shift != 0.0 or self.row_shift


Step = Callable[[ScoreForm], ScoreForm]


def has_product(x: Node, key: Axis) -> bool:
    """Returns whether an expression is made of a product that varies with the key."""
    return any(key in y.axes and (y.op == CONTRACT or _is_of_product(y)) for y in walk([x]))


def _is_of_product(x: Node) -> bool:
    """Whether a sum is one of products of products, as of an adapter."""
    return x.kind == SUM and is_of_products(*x.args)


def read(score: Node, key: Axis) -> ScoreForm:
    """Returns a score as an operator's arguments; raises NoForm at a step without one."""
    steps: list[tuple[Step, Node]] = []
    x = _with_shift(score, key)
    while x.op != CONTRACT:
        own: list[Step] = []
        inside = _inside(x, key, own)
        steps += [(step, x) for step in own]
        x = inside
    form = ScoreForm(x)
    for step, at in reversed(steps):
        try:
            form = step(form)
        except NoForm as reason:
            raise NoForm(str(reason), at) from None
    if form.softcap < 0.0:  # an odd function: the sign moves inside
        form = replace(
            form,
            softcap=-form.softcap,
            scale=-form.scale,
            inner_biases=tuple(replace(b, weight=-b.weight) for b in form.inner_biases),
            terms=tuple(replace(t, weight=-t.weight) for t in form.terms),
        )
    return replace(form, fill=ABSORBING) if -math.inf < form.fill <= ABSORBING else form


# ------------------------------------------------------------------------ from the outside


def _inside(x: Node, key: Axis, steps: list[Step]) -> Node:
    """What the outermost operation of a score is applied to; adds this operation to the steps."""
    if key not in x.axes:
        raise NoForm("the scores of a softmax are no product", x)
    match x.op:
        case "linear":
            return _inside_sum(x, key, steps)
        case "product":
            return _inside_product(x, key, steps)
        case "div":
            numerator, divisor = x.args
            if has_product(divisor, key):
                raise NoForm("scores are divided by scores", x)
            steps.append(partial(_multiplied, factor=Factor(divisor, divides=True)))
            return numerator
        case "where":
            return _inside_mask(x, key, steps)
        case "tanh":
            steps.append(_with_tanh)
            return x.args[0]
        case "reduce" if x.kind == SUM and has_product(x, key):
            return _product_of_computed(x, key)
        case "exp" if x.args[0].op == "log_softmax":
            raise NoForm("softmax of values that are probabilities already (double softmax)", x)
        case "round":
            raise NoForm(f"scores are rounded to {x.value}", x)
        case "capture":
            raise NoForm("scores that no product in the graph makes", x)
    if not has_product(x, key):
        raise NoForm("the scores of a softmax are no product", x)
    raise NoForm(f"{x.op} of scores", x)


def _product_of_computed(x: Node, key: Axis) -> Node:
    """A product of tensors that are computed in the graph, such as probabilities, as a product."""
    factors = x.args[0].args if x.args[0].op == "product" else ()
    keys = [f for f in factors if key in f.axes]
    rows = [f for f in factors if key not in f.axes]
    axes = [frozenset[Axis]().union(*(f.axes for f in part)) for part in (rows, keys)]
    if not rows or not keys or not axes[0] - axes[1]:
        raise NoForm("scores are summed after a function of each product", x)
    free = (axes[0] | axes[1]) - {x.value.axis}
    return intern(CONTRACT, (product(*rows), product(*keys)), (x.value.axis,), FLOAT, free)


def _inside_sum(x: Node, key: Axis, steps: list[Step]) -> Node:
    shift, terms = terms_of(x)
    cores = [(c, t) for c, t in terms if has_product(t, key)]
    if not cores:
        raise NoForm("the scores of a softmax are no product", x)
    others = [(c, t) for c, t in terms if (c, t) not in cores]
    shift, others = _joined_shift(shift, others, key)
    if shift:
        steps.append(partial(_shifted, number=shift))
    added: list[Step] = []
    for c, t in others:
        found = _added_mask(c, t)
        added.append(
            partial(_with_bias, bias=Bias(t, c), has_key=key in t.axes)
            if found is None
            else partial(_added, layer=found)
        )
    # a mask that is added is lost in no number: it comes last
    steps += sorted(added, key=lambda step: step.func is not _added)  # type: ignore[attr-defined]
    if len(cores) > 1:
        cores.sort(key=lambda core: _width(core[1]), reverse=True)
        for c, t in cores[1:]:
            product, factors = _plain(t, key)
            own = Product(*operands_of(product, key), product.value, c, factors)
            steps.append(partial(_with_term, term=own))
        _plain(cores[0][1], key)
    steps.append(partial(_scaled, number=cores[0][0]))
    return cores[0][1]


def _with_shift(score: Node, key: Axis) -> Node:
    """A score with the number that makes a large tensor a mask, which a softmax ignores.

    ``scores + (1 - mask) * -1e4`` is ``scores + 1e4 * mask`` to a softmax, but scores next to 1e4
    have no digits left: it is ``scores + (1e4 * mask - 1e4)``.
    """
    shift, terms = terms_of(score)
    added = [(c, t) for c, t in terms if key in t.axes and not has_product(t, key)]
    if score.op != "linear" or shift or not added:
        return score
    c, _ = max(added, key=lambda term: term[0])
    return linear(-c, terms) if c >= LARGE else score


def _joined_shift(
    shift: float, terms: list[tuple[float, Node]], key: Axis
) -> tuple[float, list[tuple[float, Node]]]:
    """A number that is added to all scores, as a part of the largest tensor that is added."""
    added = [(c, t) for c, t in terms if key in t.axes and _added_mask(c, t) is None]
    if not shift or not added:
        return shift, terms
    c, t = largest = max(added, key=lambda term: abs(term[0]))
    rest = [term for term in terms if term != largest]
    return 0.0, [*rest, (1.0, linear(shift, [(c, t)]))]


def _width(x: Node) -> float:
    """How many elements a product sums: the wider of two is the head, the narrower its adapter."""
    product = next((y for y in walk([x]) if y.op == CONTRACT), None)
    sizes = [a.size for a in product.value] if product is not None else []
    return math.prod(n if isinstance(n, int) else 1e6 for n in sizes if n is not None)


def _plain(x: Node, key: Axis) -> tuple[Node, tuple[Factor, ...]]:
    """A term of a sum of products: the product and its factors."""
    if x.op == CONTRACT:
        return x, ()
    if x.kind == SUM:
        return _product_of_computed(x, key), ()
    if x.op == "div" and not has_product(x.args[1], key):
        product, factors = _plain(x.args[0], key)
        return product, (*factors, Factor(x.args[1], divides=True))
    if x.op == "product":
        cores = [y for y in x.args if has_product(y, key)]
        if len(cores) == 1:
            product, factors = _plain(cores[0], key)
            return product, (*factors, *(Factor(y) for y in x.args if y is not cores[0]))
    if has_op(x, "log_softmax"):
        raise NoForm("log-probabilities of several distributions are added to scores", x)
    raise NoForm(OF_ANOTHER_PRODUCT, x)


def _added_mask(c: float, x: Node) -> Layer | None:
    """``where(condition, 0, fill)`` with a fill that removes a key."""
    if x.op != "where" or any(y.op != "const" for y in x.args[1:]):
        return None
    condition, a, b = x.args
    for holds, inside, outside in ((condition, a, b), (negation(condition), b, a)):
        if inside.value == 0.0 and c * outside.value <= ABSORBING:
            return Layer(literals(holds), c * outside.value)
    return None


def _inside_product(x: Node, key: Axis, steps: list[Step]) -> Node:
    cores = [y for y in x.args if has_product(y, key)]
    if len(cores) != 1:
        raise NoForm("scores are multiplied by scores", x)
    for y in x.args:
        if y is not cores[0]:
            steps.append(partial(_multiplied, factor=Factor(y)))
    return cores[0]


def _inside_mask(x: Node, key: Axis, steps: list[Step]) -> Node:
    condition, a, b = x.args
    known = _without_comparisons(condition, key)
    if known is not condition:
        settled = choose(known, a, b)
        if not has_product(settled, key):
            raise NoForm("a mask that is computed from scores", x)
        return settled
    for holds, inside, fill in ((condition, a, b), (negation(condition), b, a)):
        if fill.op == "const":
            steps.append(partial(_filled, layer=Layer(literals(holds), fill.value)))
            return inside
    if has_product(a, key) and has_product(b, key):
        joined = joined_products(condition, a, b)
        if joined is None:
            raise NoForm("a part of the scores is computed in another way", x)
        return joined
    raise NoForm("a tensor is filled into scores", x)


def _without_comparisons(condition: Node, key: Axis) -> Node:
    """A condition that scores are infinite or NaN, as one of masks: products are finite."""

    def change(y: Node, args: tuple[Node, ...]) -> Node:
        if y.op not in NOT_NUMBERS or not has_product(y, key):
            return remade(y, args)
        form = read(y.args[0], key)
        if y.op == "isnan":
            return FALSE
        if form.inner_biases or form.biases or form.factors:  # which may be infinite
            raise NoForm("infinite scores are replaced before the softmax", y)
        return negation(all_of(*form.mask)) if math.isinf(form.fill) and form.mask else FALSE

    if not has_op(condition, *NOT_NUMBERS):
        return condition
    return rebuilt_root(condition, change, lambda y: y.dtype == BOOL and y.op not in NOT_NUMBERS)


# ------------------------------------------------------------------------ from the product on


def _shifted(form: ScoreForm, number: float) -> ScoreForm:
    if not abs(number) <= LARGEST_SHIFT:
        raise NoForm(f"{number:g} is added to all scores, which are lost next to it")
    return replace(form, shift=form.shift + number)


def _scaled(form: ScoreForm, number: float) -> ScoreForm:
    if number == 0.0:
        raise NoForm("scores multiplied by 0")
    if not math.isfinite(number):
        raise NoForm(f"scores multiplied by {number}")
    if number < 0.0 and form.mask and form.fill <= ABSORBING:
        raise NoForm(f"masked scores have the value {form.fill * number:g}")
    inner = form.softcap != 0.0
    return replace(
        form,
        scale=form.scale if inner else form.scale * number,
        softcap=form.softcap * number,
        terms=form.terms
        if inner
        else tuple(replace(t, weight=t.weight * number) for t in form.terms),
        biases=tuple(replace(b, weight=b.weight * number) for b in form.biases),
        fill=form.fill * number if form.mask else 0.0,
        layers=tuple(replace(x, fill=x.fill * number) for x in form.layers),
        shift=form.shift * number,
    )


def _multiplied(form: ScoreForm, factor: Factor) -> ScoreForm:
    """Multiplies by a tensor: a scalar, or one value per row."""
    low, _ = factor.value.range
    if form.softcap:
        raise NoForm("scores are multiplied by a tensor after a softcap")
    if form.biases and factor.value.axes:
        raise NoForm("scores are multiplied by a tensor that is no scalar after a bias was added")
    if form.mask and form.fill > ABSORBING:
        raise NoForm("scores are multiplied by a tensor after a finite mask value was filled in")
    if form.mask and form.fill != -math.inf and low < 0.0:
        raise NoForm("masked scores are multiplied by a tensor that may be negative")
    return replace(
        form,
        factors=(*form.factors, factor),
        biases=tuple(replace(b, factors=(*b.factors, factor)) for b in form.biases),
        terms=tuple(replace(t, factors=(*t.factors, factor)) for t in form.terms),
        shift=0.0,
        row_shift=form.is_shifted,
    )


def _with_tanh(form: ScoreForm) -> ScoreForm:
    if form.softcap:
        raise NoForm("tanh of scores that were capped before")
    if form.is_shifted:
        raise NoForm("tanh of scores that a number was added to before")
    return replace(
        form,
        softcap=1.0,
        inner_biases=form.biases,
        biases=(),
        fill=math.tanh(form.fill) if form.mask else 0.0,
        exact_fill=True,  # -1, whatever they were
        layers=tuple(Layer(x.mask, math.tanh(x.fill)) for x in form.layers),
    )


def _with_bias(form: ScoreForm, bias: Bias, has_key: bool) -> ScoreForm:
    if not has_key:  # a softmax ignores it; what comes later may not
        if not is_small(bias.weight, bias.value):
            raise NoForm("a value per row is added to scores, which may be lost next to it")
        return replace(form, row_shift=True)
    if form.mask and form.fill > ABSORBING:
        raise NoForm("a tensor is added to scores after a finite mask value was filled in")
    # the tensor may be a mask: keys of a row without any allowed key may go to -inf
    exact = form.exact_fill and (not form.mask or form.fill == -math.inf)
    return replace(form, biases=(*form.biases, bias), exact_fill=exact, added=True)


def _with_term(form: ScoreForm, term: Product) -> ScoreForm:
    if form.softcap or form.mask:
        raise NoForm("a product is added to scores after a tanh or a mask")
    return replace(form, terms=(*form.terms, term))


def _filled(form: ScoreForm, layer: Layer) -> ScoreForm:
    """The fill where the mask does not hold."""
    mask, fill = layer.mask, layer.fill
    if math.isnan(fill) or fill >= -ABSORBING:
        raise NoForm(f"masked scores have the value {fill:g}")
    if fill > ABSORBING:
        if form.row_shift:
            raise NoForm("a finite mask value is filled in after a value per row was added")
        fill -= form.shift  # the shift is after the mask in this form
    layer = Layer(mask, fill)
    if form.mask <= mask:  # what was masked before is filled anew
        added = form.added and bool(form.biases)
        return replace(form, mask=mask, fill=fill, exact_fill=True, layers=(layer,), added=added)
    if fill == form.fill:
        return replace(form, mask=form.mask | mask, layers=(*form.layers, layer))
    return _overlapping(form, layer)


def _added(form: ScoreForm, layer: Layer) -> ScoreForm:
    """The fill is added where the mask does not hold."""
    form, mask, fill = replace(form, added=True), layer.mask, layer.fill
    layers = (*form.layers, layer)
    if form.mask == mask or (form.mask and fill == form.fill == -math.inf):
        return replace(form, mask=form.mask | mask, fill=form.fill + fill, layers=layers)
    if form.mask and (form.fill <= ABSORBING or not form.mask <= mask):
        return _overlapping(form, layer)
    # a finite value is lost in the sum; a tensor that was added may be a mask itself
    exact = fill == -math.inf or not form.biases
    return replace(form, mask=mask, fill=fill, exact_fill=exact, layers=(layer,))


def _overlapping(form: ScoreForm, layer: Layer) -> ScoreForm:
    """Combines two masks: in a row without any allowed key, it matters which one removed a key."""
    if form.fill > ABSORBING or layer.fill > ABSORBING:
        raise NoForm(f"two masks with different values, {form.fill:g} and {layer.fill:g}")
    return replace(
        form,
        mask=form.mask | layer.mask,
        fill=max(form.fill, layer.fill),
        exact_fill=False,
        layers=(*form.layers, layer),
    )
