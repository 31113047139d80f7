"""Faults planted into a rewritten graph: what a wrong rule could have made of it.

They are planted after the rewrite, so that they do not depend on how it works: an operand is
detached, a mask dropped, a scale changed, sides swapped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx

from torch_streamkl.attention import ops
from torch_streamkl.fx_passes import pipeline
from torch_streamkl.fx_passes.fx_utils.nodes import name_of
from torch_streamkl.linear import ops as linear_ops

CALLS = (ops.attention_kl, linear_ops.linear_kl, linear_ops.linear_kl_sum)
Edit = Callable[[fx.Graph], None]


@contextmanager
def planted(edit):
    """Every rewrite meanwhile is followed by ``edit``; whether one was is noted in the list."""
    original, edited = pipeline.rewrite_once, []

    def rewrite_once(given, graph, refused):
        report, late = original(given, graph, refused)
        if report.num_fused:
            with suppress(StopIteration):  # what it changes was refused before
                edit(graph)
                edited.append(True)
        return report, late

    pipeline.rewrite_once = rewrite_once
    try:
        yield edited
    finally:
        pipeline.rewrite_once = original


def first_call(graph):
    return next(n for n in graph.nodes if n.target in CALLS)


def first(graph, name):
    return next(n for n in graph.nodes if name_of(n) == name)


def insert(graph, before, fn, *args):
    """A call of ``fn`` with a recorded value, as the rewrite makes them."""
    with graph.inserting_before(before):
        node = graph.call_function(fn, args)
    examples = fx.map_arg(args, lambda n: n.meta["example_value"])
    fake = next(x.fake_mode for x in examples if isinstance(x, torch._subclasses.FakeTensor))
    with fake, torch.enable_grad():
        node.meta["example_value"] = fn(*examples)
    return node


def of_call(change):
    """An edit of the operator's call."""
    return lambda graph: change(graph, first_call(graph))


def with_keywords(node, **options):
    given = {**node.kwargs, **options}
    node.kwargs = {name: x for name, x in given.items() if x is not None}


def with_option(**options):
    """Other constants in the operator's call; None leaves one out."""
    return of_call(lambda graph, call: with_keywords(call, **options))


def scaled(name, factor):
    return of_call(
        lambda graph, call: with_keywords(
            call, **{name: float(call.kwargs.get(name, 1.0)) * factor}
        )
    )


def changed_operand(graph, node, operand, fn):
    given, update = node.kwargs, node.update_kwarg
    if isinstance(operand, int):
        given, update = node.args, node.update_arg
    update(operand, insert(graph, node, fn, given[operand]))


def through(operand, fn):
    """``fn`` applied to an operand of the call."""
    return of_call(lambda graph, call: changed_operand(graph, call, operand, fn))


def swapped(one, other):
    """Two operands exchanged, by their names in the schema."""

    def change(graph, call):
        names = [argument.name for argument in call.target._schema.arguments]
        given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        given[one], given[other] = given[other], given[one]
        call.args, call.kwargs = (), given

    return of_call(change)


def both(*edits):
    def edit(graph):
        for each in edits:
            each(graph)

    return edit


def detached_factor(graph):
    """The learned scale that is multiplied into an operand."""
    product = first_call(graph).args[0]
    assert isinstance(product, fx.Node) and name_of(product) == "mul"
    factor = product.args[1]
    assert isinstance(factor, fx.Node)
    product.update_arg(1, insert(graph, product, torch.detach, factor))


def without_detach(graph):
    """Operands of the teacher as they are before they are detached."""
    call = first_call(graph)
    for place in (2, 3):
        node = call.args[place]
        chain = []
        while isinstance(node, fx.Node) and node.op.startswith("call"):
            chain.append(node)
            node = node.args[0]
        cuts = [n for n in chain if name_of(n) == "detach"]
        assert cuts
        for cut in cuts:
            cut.replace_all_uses_with(cut.args[0])


def without(name, keep=0):
    """An operation left out: its users read its input."""

    def edit(graph):
        node = first(graph, name)
        node.replace_all_uses_with(node.args[keep])

    return edit


def after_value(fn):
    """``fn`` applied to the operator's value."""

    def edit(graph):
        value = next(n for n in first_call(graph).users if n.args[1] == 0)
        users = list(value.users)
        changed = insert(graph, value.next, fn, value)
        for user in users:
            user.replace_input_with(value, changed)

    return edit


MAP = "scaled_dot_product_attention"


def of_attention(**options):
    return lambda graph: with_keywords(first(graph, MAP), **options)


def attention_through(place, fn):
    return lambda graph: changed_operand(graph, first(graph, MAP), place, fn)


def _rounded(x):
    return x.half().to(x.dtype)


def _negated(x):
    return -x


def _slightly_more(x):
    return x * 1.001


def _shifted(x):
    return x.roll(1, -1)


def _other_heads(x):
    return x.flip(1)


def _other_rows(x):
    return x.flip(-2)


def _narrower(x):
    return x[..., :4]


def _half_the_gradient(x):
    return (x + x.detach()) / 2


def _zero_gradient(x):
    return x.detach() + 0 * x


@dataclass(frozen=True)
class Plant:
    name: str
    program: str  # of `PROGRAMS`
    edit: Edit


EDITS = {
    "attention": {
        "teacher_scale_off_by_a_percent": scaled("teacher_scale", 1.01),
        "student_scale_forgotten": with_option(student_scale=0.5),
        "causal_mask_dropped": with_option(window_right=None),
        "causal_mask_off_by_one": with_option(window_right=1),
        "window_invented": with_option(window_left=12),
        "other_divergence": with_option(divergence="reverse_kl"),
        "cross_entropy_for_divergence": with_option(divergence="cross_entropy"),
        "temperature_invented": with_option(temperature=1.1),
        "softcap_invented": with_option(student_softcap=5.0),
        "sides_swapped": both(
            swapped("student_q", "teacher_q"), swapped("student_k", "teacher_k")
        ),
        "teacher_keys_for_student_keys": swapped("student_k", "teacher_k"),
        "student_queries_detached": through(0, torch.detach),
        "learned_scale_detached": detached_factor,
        "half_the_gradient_of_keys": through(1, _half_the_gradient),
        "no_gradient_of_keys": through(1, _zero_gradient),
        "wrong_heads": through(3, _other_heads),
        "wrong_queries": through(2, _other_rows),
        "negated_scores": through(2, _negated),
        "rounded_operand": through(0, _rounded),
        "value_off_by_a_thousandth": after_value(_slightly_more),
        "value_detached": after_value(torch.detach),
        "raises": through(3, _narrower),
        "teacher_gets_a_gradient": without_detach,
        "map_without_mask": of_attention(is_causal=None),
        "map_with_other_scale": of_attention(scale=0.9),
        "values_detached": attention_through(2, torch.detach),
        "map_rounded": attention_through(0, _rounded),
    },
    "masked": {
        "mask_inverted": through("mask", torch.logical_not),
        "mask_dropped": with_option(mask=None),
        "mask_shifted": through("mask", _shifted),
    },
    "head": {
        "temperature_forgotten": with_option(temperature=None),
        "bias_dropped": with_option(student_bias=None),
        "bias_detached": through("student_bias", torch.detach),
        "bias_negated": through("student_bias", _negated),
        "ignored_label_counts": with_option(ignore_index=-1),
        "labels_shifted": through("labels", _shifted),
        "weight_detached": through(1, torch.detach),
        "hidden_rounded": through(0, _rounded),
        "teacher_of_logits_gets_a_gradient": without_detach,
    },
    "tied": {
        "teacher_head_for_student_head": swapped("student_weight", "teacher_weight"),
    },
}
PLANTS = [Plant(name, of, edit) for of, edits in EDITS.items() for name, edit in edits.items()]


def attention(q, k, qt, kt, v, scale, w):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    with torch.no_grad():
        p = (qt @ kt.mT * 0.3).masked_fill(~mask, -torch.inf).softmax(-1)
    s = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    rows = F.kl_div(s.log_softmax(-1), p, reduction="none").sum(-1)
    return (rows * w[:, None]).sum(), s.softmax(-1) @ v


def masked(q, k, qt, kt, mask):
    p = (qt @ kt.mT * 0.3).masked_fill(~mask, -torch.inf).softmax(-1)
    s = (q @ k.mT * 0.3).masked_fill(~mask, -torch.inf)
    return F.kl_div(s.log_softmax(-1), p, reduction="batchmean")


def head(h, w, ht, wt, labels, bias):
    logits = F.linear(h, w, bias)
    p = ((ht @ wt.T).detach() / 2.0).softmax(-1)
    rows = F.kl_div((logits / 2.0).log_softmax(-1), p, reduction="none").sum(-1)
    keep = labels != -100
    return (rows * keep).sum() / keep.sum() * 4.0 + F.cross_entropy(logits, labels)


def tied(h, w, ht, wt):
    """Heads of the same shape: swapped ones still run."""
    return F.kl_div((h @ w.T).log_softmax(-1), (ht @ wt.T).softmax(-1), reduction="batchmean")


def inputs_of(program, dtype=torch.float32):
    def draw(*shapes, trained=True):
        return [torch.randn(x, dtype=dtype, requires_grad=trained) for x in shapes]

    shape = (2, 4, 24, 8)
    if program == "attention":
        made, scale = draw(*[shape] * 5), torch.tensor(0.3, dtype=dtype, requires_grad=True)
        return (*made, scale, *draw((4,)))
    if program == "masked":
        keep = torch.rand(2, 1, 24, 24) > 0.3
        keep[..., 0] = True
        return (*draw(shape, shape), *draw(shape, shape, trained=False), keep)
    width = 16 if program == "tied" else 12
    operands = draw((24, 16), (64, 16), (24, width), (64, width))
    if program == "tied":
        return tuple(operands)
    return (*operands, torch.randint(0, 64, (24,)), *draw((64,)))


PROGRAMS = {
    "attention": attention,
    "masked": masked,
    "head": head,
    "tied": tied,
}
