"""Holds a match against the program that it came from: recomputed from its arguments alone.

`recompute` is the reference for the matcher: the value of what it matched has to be that of the
program. It uses nothing of the program but what an emitter reads, and what operators mean.
"""

import math

import torch

from tests.support.evaluate_program import evaluate
from tests.support.normal_form import canonical
from torch_streamkl.fx_passes.closed_forms.form import STUDENT, RowValue
from torch_streamkl.fx_passes.closed_forms.masks import conditions_of
from torch_streamkl.fx_passes.closed_forms.match import around
from torch_streamkl.fx_passes.closed_forms.scores import score_of
from torch_streamkl.program.canonical import all_of, choose, linear, log_softmax, product
from torch_streamkl.program.functions import exponential, logarithm, quotient
from torch_streamkl.program.graph import SUM, Source, const, size_of
from torch_streamkl.program.identities import LOG_P, LOG_S
from torch_streamkl.program.reductions import reduced, remade
from torch_streamkl.program.walks import rebuilt


def recompute(form):
    """Returns the expression that the operators compute with the arguments of a closed form."""
    return linear(0.0, [(1.0, product(call.weight, _rows(call))) for call in form.calls])


def _rows(call):
    """The operator's value of each row: at keys that are removed it adds nothing."""
    key = call.axes.key
    masks = conditions_of(call.masks, call.axes)
    fill = -math.inf if call.masks.fill is None else call.masks.fill
    logs = []
    for number, side in enumerate(call.sides):
        score = score_of(side, key)
        if call.stricter is not None and call.stricter.side == number:
            extra = conditions_of(call.stricter.masks, call.axes)
            score = choose(all_of(*extra), score, const(-math.inf))
        score = choose(all_of(*masks), score, const(fill))
        logs.append(_log_probabilities(score, side, key))
    elements = _formula(call.functional.expr, logs[0], logs[STUDENT])
    if call.masks.fill is None:
        elements = choose(all_of(*masks), elements, const(0.0))
    return reduced(SUM, key, elements)


def _log_probabilities(score, side, key):
    log = log_softmax(score, key)
    if not side.averaged:
        return log
    total, count = exponential(log), const(1.0)
    for axis in side.averaged:
        assert axis.size is not None
        total = reduced(SUM, axis, total)
        count = product(count, size_of(axis.size))
    return logarithm(quotient(total, count))


def _formula(expr, log_p, log_s):
    """A divergence of log-probabilities."""
    logs, whole = {LOG_P: log_p, LOG_S: log_s}, canonical(expr)
    return rebuilt([whole], lambda x, args: logs.get(x) or remade(x, args))[whole]


def difference(form, values, sizes=None):
    """Returns the largest error of the recomputed rows and gradients, relative to the largest."""
    (rows, grads), (again, grads_again) = (
        _run(x, form, values, sizes) for x in (form.site, recompute(form))
    )
    largest = max(
        (float(x.abs().nan_to_num(0, 0, 0).max()) for x in grads if x.numel()), default=0
    )
    errors = [_error(rows, again, float(rows.abs().nan_to_num(0, 0, 0).max()))]
    errors += [_error(x, y, largest) for x, y in zip(grads, grads_again, strict=True)]
    return max(errors)


def difference_around(matched, values, sizes=None):
    """Returns the largest error of a program whose matched rows are recomputed."""
    order = sorted(matched.root.axes, key=repr)
    rows = {}
    for number, form in enumerate(matched.closed.values()):
        own = [a for a in form.calls[0].axes.rows if a in form.site.axes]
        source = Source(RowValue(number), 0, form.site.flows)
        rows[source] = evaluate(recompute(form), values, sizes, own)
    expected = evaluate(matched.root, values, sizes, order)
    found = evaluate(around(matched), {**values, **rows}, sizes, order)
    return _error(expected, found, float(expected.abs().nan_to_num(0, 0, 0).max()))


def _run(x, form, values, sizes):
    """Values, and gradients of a weighted sum of them to each tensor that is trained."""
    leaves = {
        k: v.detach().clone().double().requires_grad_() if getattr(k, "grad_flows", False) else v
        for k, v in values.items()
    }
    trained = [v for v in leaves.values() if v.requires_grad]
    rows = evaluate(x, leaves, sizes, sorted(form.site.axes, key=repr))
    grads = [torch.zeros_like(v) for v in trained]
    if rows.requires_grad:
        weights = torch.linspace(0.5, 1.5, rows.numel(), dtype=rows.dtype).view(rows.shape)
        total = (rows * weights)[torch.isfinite(rows.detach())].sum()
        found = torch.autograd.grad(total, trained, allow_unused=True)
        grads = [
            torch.zeros_like(v) if g is None else g for v, g in zip(trained, found, strict=True)
        ]
    return rows.detach(), grads


def _error(x, y, largest):
    both = torch.isfinite(x)  # a row without keys has NaN where it is written naively
    gap = (x - y)[both].abs()
    return float(gap.max()) / max(largest, 1e-30) if gap.numel() else 0.0


def recomputed_alike(form, values, sizes=None):
    """Asserts that a match means what the program does."""
    assert difference(form, values, sizes) < 1e-9
