"""Finds the matched losses of a program: its outermost sums over keys, and what is around them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch_streamkl.fx_passes.closed_forms.heads import mentions_softmax
from torch_streamkl.fx_passes.closed_forms.masks import num_keys_of
from torch_streamkl.fx_passes.closed_forms.row_sites import is_entered
from torch_streamkl.fx_passes.closed_forms.score_form import IMPROBABLE
from torch_streamkl.program.canonical import product, scaled, terms_of
from torch_streamkl.program.fresh_axes import fresh_axis
from torch_streamkl.program.graph import BOOL, BOUND, CONTRACT, LOGSUMEXP, SUM, Axis, Node, index
from torch_streamkl.program.reductions import opened, reduced, remade, substitute
from torch_streamkl.program.walks import rebuilt_root, walk


def is_outside(x: Node) -> bool:
    """Returns whether the arguments of an expression may have sums over keys."""
    return x.op not in ("capture", CONTRACT, "log_softmax")


def sums_over_keys(roots: Iterable[Node]) -> set[Node]:
    """Returns the sums over the keys of a softmax.

    What a logarithm of probabilities is normalised along, as over heads, are no keys.
    """
    keys: dict[Node, frozenset[Axis]] = {}  # that softmaxes inside of an expression are over
    found = set[Node]()
    for x in walk(roots, is_entered):
        entered = x.args if is_entered(x) else ()
        keys[x] = frozenset[Axis]().union(*(keys[a] for a in entered))
        if x.op == "log_softmax" and not keys[x]:
            keys[x] = frozenset((x.value,))
        if x.op == "reduce":
            if x.kind == SUM and x.value.axis in keys[x]:
                found.add(x)
            keys[x] -= {x.value.axis}
    return found


def keys_first(root: Node) -> Node:
    """Returns a program whose sums over keys are inside of those over rows and heads."""
    wanted = sums_over_keys([root])
    if not any(x.args[0].kind == SUM for x in wanted):
        return root

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        return _swapped(remade(x, args)) if x in wanted else remade(x, args)

    return rebuilt_root(root, change, is_outside)


def _swapped(x: Node) -> Node:
    """A sum over keys of a sum over rows as a sum over rows of one over keys."""
    axes, body = list[Axis](), x
    while body.kind == SUM:
        axes.append(fresh_axis(body.value.axis.size))
        body = opened(body, axes[-1])
    if len(axes) < 2:
        return x
    key = axes.pop(0)
    if not mentions_softmax(body, key):
        return x
    body = reduced(SUM, key, body)
    for axis in reversed(axes):
        body = reduced(SUM, axis, body)
    return body


def shortened(root: Node) -> Node:
    """Returns a program whose log-sum-exps leave out keys that are filled with a low number.

    Of logits that are padded to a larger vocabulary, and then sliced, the normaliser is that of
    the logits before.
    """

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        x = remade(x, args)
        if x.kind != LOGSUMEXP:
            return x
        key = fresh_axis(x.value.axis.size)
        body = opened(x, key)
        if body.op != "where" or body.args[2].op != "const" or body.args[2].value > IMPROBABLE:
            return x
        count = num_keys_of(body.args[0], key)
        if count is None or count.op != "const" or count.value < 1.0:
            return x
        own = fresh_axis(int(count.value))
        return reduced(LOGSUMEXP, own, substitute(body.args[1], {key: index(own)}))

    is_there = (x.kind == LOGSUMEXP for x in walk([root]))
    return rebuilt_root(root, change, is_outside) if any(is_there) else root


def distributed(site: Node) -> Node | None:
    """Returns a sum over keys of a product of sums as sums of sums over keys, if it is one."""
    key, axes = fresh_axis(site.value.axis.size), list[Axis]()
    body = opened(site, key)
    constant, terms = terms_of(body)
    if constant or len(terms) != 1 or terms[0][1].op != "product":
        return None
    factors = list[Node]()
    for x in terms[0][1].args:
        while x.kind == SUM and key in x.axes:
            axes.append(fresh_axis(x.value.axis.size))
            x = opened(x, axes[-1])
        factors.append(x)
    if not axes:
        return None
    total = scaled(terms[0][0], reduced(SUM, key, product(*factors)))
    for axis in axes:
        total = reduced(SUM, axis, total)
    return total


def sites(root: Node) -> list[Node]:
    """Returns the outermost sums over keys."""
    wanted = sums_over_keys([root])
    order = walk([root], lambda x: is_outside(x) and x not in wanted)
    return [x for x in order if x in wanted]


def are_asked_about(root: Node, found: Collection[Node]) -> set[Node]:
    """Returns those of the outermost sums over keys, `sites`, that conditions alone read.

    The user's code has computed them: their values need no operator.
    """
    order = walk([root], lambda x: is_outside(x) and x not in found and x.dtype != BOOL)
    return set(found).difference(order)


def renamed_apart(site: Node) -> tuple[Node, dict[Axis, Axis]]:
    """Returns a site with new axes in place of those that sums around it have bound.

    Whatever is made of it may bind axes of the same depth.
    """
    names = {
        a: fresh_axis(a.size)
        for a in sorted(site.axes, key=lambda a: -a.level)
        if isinstance(a.name, tuple) and a.name[0] == BOUND
    }
    return substitute(site, {a: index(b) for a, b in names.items()}), names


def replaced(root: Node, changes: Mapping[Node, Node]) -> Node:
    """Returns a program with other expressions of rows in place of some."""

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        return changes[x] if x in changes else remade(x, args)

    return rebuilt_root(root, change, lambda x: is_outside(x) and x not in changes)
