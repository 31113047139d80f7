"""Matches a sum over keys with the operators: its calls, or why there are none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch_streamkl.fx_passes.closed_forms.axes import axes_of, in_memory_order, ordered_rows
from torch_streamkl.fx_passes.closed_forms.divergence import (
    Pair,
    by_factor,
    pairs_of,
    within,
    without_twins,
)
from torch_streamkl.fx_passes.closed_forms.form import (
    ATTENTION,
    LINEAR,
    STUDENT,
    TEACHER,
    Call,
    ClosedForm,
    Masks,
    Matched,
    NoForm,
    NotClosed,
    RowValue,
    Side,
    Stricter,
    is_of_products,
)
from torch_streamkl.fx_passes.closed_forms.formulas import functional_of, value_at
from torch_streamkl.fx_passes.closed_forms.heads import Distribution, Variables
from torch_streamkl.fx_passes.closed_forms.limits import check_call, is_lm_head
from torch_streamkl.fx_passes.closed_forms.masks import masks_of, num_keys_of
from torch_streamkl.fx_passes.closed_forms.rows import (
    are_asked_about,
    distributed,
    keys_first,
    renamed_apart,
    replaced,
    shortened,
    sites,
)
from torch_streamkl.fx_passes.closed_forms.score_form import (
    ABSORBING,
    IMPROBABLE,
    NOT_NUMBERS,
    Condition,
    ScoreForm,
    read,
)
from torch_streamkl.fx_passes.closed_forms.scores import side_of
from torch_streamkl.fx_passes.closed_forms.sums import joined
from torch_streamkl.fx_passes.closed_forms.underflow import asks_for_zero
from torch_streamkl.fx_passes.closed_forms.worlds import Judgement, judged
from torch_streamkl.program.canonical import ADDED, negation, scaled
from torch_streamkl.program.divergences import Functional
from torch_streamkl.program.fresh_axes import fresh_axis
from torch_streamkl.program.graph import SUM, Axis, Node, Source, capture, index
from torch_streamkl.program.identities import LOG_P, LOG_S
from torch_streamkl.program.reductions import opened
from torch_streamkl.program.walks import walk


def match(site: Node, order: Sequence[Axis] = ()) -> ClosedForm | NotClosed:
    """Returns the calls that compute a sum over keys, or why there are none.

    ``order`` has the axes of the user's dimensions, if some of the site's are free.
    """
    try:
        return _closed(site, order)
    except NoForm as reason:
        return NotClosed(str(reason), reason.at)


def match_program(root: Node, order: Sequence[Axis] = ()) -> Matched:
    """Matches every sum over keys of a program, alone or together with others."""
    root = in_pairs(keys_first(shortened(root)), order)
    found = {site: match(site, order) for site in sites(root)}
    for site in are_asked_about(root, found):
        if isinstance(found[site], NotClosed):
            del found[site]
    changes: dict[Node, Node] = {}
    for group in joined(root, found) if found else ():
        if group.total in changes:  # another group of its terms has become one sum
            continue
        forms = {part: match(part, order) for part in sites(group.whole)}
        if not _is_better(forms, [found.get(part) for part in group.parts]):
            continue
        changes[group.total] = group.replacement
        for site in group.parts:
            found.pop(site, None)
        found |= forms
    return Matched(replaced(root, changes) if changes else root, found)


def in_pairs(root: Node, order: Sequence[Axis]) -> Node:
    """Returns a program with sums over pairs of distributions in place of products of sums.

    ``einsum("sbk,tbk->", log_p, p)`` over crops s and t is a divergence of each pair.
    """
    changes = {}
    for site in sites(root):
        pairs = distributed(site)
        if pairs is not None and isinstance(match(site, order), NotClosed):
            changes[site] = pairs
    return replaced(root, changes) if changes else root


def _is_better(
    forms: Mapping[Node, ClosedForm | NotClosed], parts: Sequence[ClosedForm | NotClosed | None]
) -> bool:
    """Whether sums as one are calls where some alone are none, or a single call of a form that one
    pass computes.
    """
    closed = [form for form in forms.values() if isinstance(form, ClosedForm)]
    if not closed or len(closed) < len(forms):
        return False
    if any(isinstance(part, NotClosed) for part in parts):
        return True
    calls = [call for form in closed for call in form.calls]
    count = sum(len(part.calls) for part in parts if isinstance(part, ClosedForm))
    if len(calls) != 1 or count < 2:
        return False
    functional = calls[0].functional
    return functional.bilinear is not None or functional.mixture is not None


def around(matched: Matched) -> Node:
    """Returns the program around the sums that are matched, a function of the rows' values.

    The value of a row is captured from a `RowValue`, at the axes of rows of its calls: weights of
    rows, masks of rows and reductions over them are what is left.
    """
    changes = {}
    for number, (site, form) in enumerate(matched.closed.items()):
        original = {mine: name for name, mine in form.names}
        rows = [a for a in form.calls[0].axes.rows if a in form.site.axes]
        at = [index(original.get(a, a)) for a in rows]
        changes[site] = capture(Source(RowValue(number), 0, site.flows), at=at)
    return replaced(matched.root, changes)


def _closed(site: Node, order: Sequence[Axis]) -> ClosedForm:
    if site.kind != SUM:
        raise NoForm("no sum over keys", site)
    site, names = renamed_apart(site)
    key = fresh_axis(site.value.axis.size)
    variables = Variables(key)
    expr = variables.of(opened(site, key))
    if not variables.parts:
        raise NoForm("no softmax over the keys that are summed", site)
    forms = variables.forms()
    judgement = judged(expr, forms, key)
    masks = frozenset[Node]().union(*(form.mask for form in forms))
    guarded = asks_for_zero(expr, judgement.expr, variables.parts, masks, key)
    calls = list[Call]()
    for factor, polynomial in by_factor(judgement.expr, key).items():
        polynomial, parts = without_twins(polynomial, variables.parts)
        for pair in pairs_of(polynomial, parts):
            rows = ordered_rows(site.axes, order)
            site_of = _Site(key, rows, judgement, factor, site.axes.isdisjoint(order))
            calls.append(_call(site_of, pair, parts))
    if not calls:
        raise NoForm("the sum over keys is a known constant", site)
    for call in calls:
        check_call(call)
    return ClosedForm(site, tuple(calls), tuple(names.items()), guarded)


@dataclass(frozen=True)
class _Site:
    """Holds what the calls of a sum over keys share."""

    key: Axis
    rows: list[Axis]
    judgement: Judgement
    factor: Node
    is_summed: bool  # over all rows, whose order nothing says


def _call(site: _Site, pair: Pair, parts: Sequence[Distribution]) -> Call:
    key, judgement = site.key, site.judgement
    distributions = [parts[pair.teacher], parts[pair.student]]
    forms = [read(part.score, key) for part in distributions]
    sides, conditions = zip(*_sides(distributions, forms, key), strict=True)
    _check_conditions(conditions[TEACHER] | conditions[STUDENT])
    rows = in_memory_order(site.rows, sides[STUDENT], key) if site.is_summed else site.rows
    axes = axes_of(sides, conditions, rows, key)
    stricter = None
    _check_improbable(pair, sides, forms)
    _check_added(pair, sides, distributions)
    if judgement.within in (pair.teacher, pair.student):
        of = TEACHER if judgement.within == pair.teacher else STUDENT
        extra = conditions[of] - conditions[1 - of]
        if extra:
            stricter = Stricter(of, masks_of(extra, axes))
            conditions = (conditions[of] & conditions[1 - of],) * 2
        if extra or not judgement.is_zero_outside:
            pair = within(pair, judgement.within)
    elif conditions[TEACHER] != conditions[STUDENT]:
        raise NoForm("teacher and student are masked differently")
    elif judgement.within is not None:
        keys = read(parts[judgement.within].score, key).mask
        if any(form.mask != keys for form in forms):
            raise NoForm("a term of the sum is masked as only a third distribution is")
    functional = functional_of(pair.expr)
    is_filled = bool(conditions[STUDENT]) and not stricter and not judgement.drops_rows
    fill = _fill(forms, functional) if is_filled else None
    masks = masks_of(conditions[STUDENT], axes, fill)
    is_head = stricter is None and is_lm_head(sides, axes, masks, _removes(forms))
    _check_masks(masks, functional)
    return Call(
        LINEAR if is_head else ATTENTION,
        functional,
        sides[TEACHER],
        sides[STUDENT],
        axes,
        masks,
        scaled(pair.coefficient, site.factor),
        stricter,
    )


def _check_conditions(conditions: Condition) -> None:
    for x in sorted(conditions, key=lambda x: x.digest):
        if is_of_products(x):
            if negation(x).op in NOT_NUMBERS:
                what = NOT_NUMBERS[negation(x).op]
                raise NoForm(f"{what} scores are replaced before the softmax", x)
            raise NoForm("a mask that is computed from scores", x)


def _sides(
    parts: Sequence[Distribution], forms: Sequence[ScoreForm], key: Axis
) -> Iterator[tuple[Side, Condition]]:
    """The sides, and the conditions of their masks.

    A condition ``key < n`` that only one side has, whose keys are removed, is its number of keys.
    """
    for part, form, other in zip(parts, forms, reversed(forms), strict=True):
        num_keys, conditions = None, form.mask
        for condition in form.mask - other.mask:
            bound = num_keys_of(condition, key)
            if bound is not None and form.fill <= IMPROBABLE and num_keys is None:
                num_keys, conditions = bound, conditions - {condition}
        yield side_of(form, key, part.averaged, num_keys), conditions


def _check_improbable(pair: Pair, sides: Sequence[Side], forms: Sequence[ScoreForm]) -> None:
    """Raises NoForm if the logarithm of a filled key's probability has a part in the divergence.

    The operator removes such keys. Their probability is 0 either way.
    """
    for variable, side, form in zip((LOG_P, LOG_S), sides, forms, strict=True):
        if side.num_keys is None or form.fill == -math.inf:
            continue
        if _with_log(pair, variable, -math.inf) != _with_log(pair, variable, form.fill):
            raise NoForm(f"scores are padded with {form.fill:g}, whose logarithm is in the sum")


def _check_added(pair: Pair, sides: Sequence[Side], parts: Sequence[Distribution]) -> None:
    """Raises NoForm if keys that only one side lacks have a gradient, which the operator has not.

    So it is where the divergence has the logarithm of their probability, and the mask was added.
    """
    for variable, side, part in zip((LOG_P, LOG_S), sides, parts, strict=True):
        is_added = any(x.op == "where" and x.value == ADDED for x in walk([part.score]))
        if side.num_keys is None or not is_added:
            continue
        if math.isinf(_with_log(pair, variable, -math.inf)):
            raise NoForm("a mask is added to the scores of one side alone, which have a gradient")


def _with_log(pair: Pair, variable: Node, log: float) -> float:
    """The divergence at a key with the logarithm of one probability, and a common other one."""
    return value_at(pair.expr, *(log if x is variable else -2.0 for x in (LOG_P, LOG_S)))


def _fill(forms: Sequence[ScoreForm], functional: Functional) -> float | None:
    """The operator's mask_value: None removes keys, exact unless a whole row can be masked."""
    teacher, student = forms
    if not (teacher.exact_fill and student.exact_fill) and teacher.layers != student.layers:
        raise NoForm("teacher and student have masks that overlap in different ways")
    fills = (teacher.fill, student.fill)
    if fills[0] != fills[1] and max(fills) > ABSORBING:
        raise NoForm(
            f"teacher and student are masked with different values, {fills[0]:g} and {fills[1]:g}"
        )
    fill = max(fills)
    if fill == -math.inf or (fill == ABSORBING and _vanishes(functional)):
        return None  # a row without keys is uniform on both sides
    if not (teacher.exact_fill and student.exact_fill):
        raise NoForm(
            "two additive masks overlap in a divergence that is not 0 for equal distributions"
        )
    return fill


def _removes(forms: Sequence[ScoreForm]) -> bool:
    return all(form.fill == -math.inf for form in forms if form.mask)


def _check_masks(masks: Masks, functional: Functional) -> None:
    if masks.rows and masks.fill is not None:
        raise NoForm(
            "whole rows are masked in a divergence that does not vanish for equal distributions"
        )
    if functional.absent != 0.0 and not masks.is_empty:
        raise NoForm("masked keys would contribute to the divergence")


def _vanishes(functional: Functional) -> bool:
    """Whether a divergence is 0 for equal distributions."""
    logs = map(math.log, (1.0, 0.5, 0.1, 1e-3))
    return all(abs(value_at(functional.expr, x, x)) <= 1e-12 for x in logs)
