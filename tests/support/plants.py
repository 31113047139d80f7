"""Faults planted into a rewritten graph: what a wrong rule could have made of it.

They are planted after the rewrite, so that they do not depend on how it works: an operand is
detached, a mask dropped, a scale changed, sides swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from torch_streamkl.attention import ops
from torch_streamkl.fx_passes import pipeline
from torch_streamkl.fx_passes.fx_utils.nodes import name_of
from torch_streamkl.linear import ops as linear_ops

CALLS = (ops.attention_kl, linear_ops.linear_kl, linear_ops.linear_kl_sum)
Edit = Callable[[fx.Graph], None]


@contextmanager
def planted(edit: Edit) -> Iterator[list[bool]]:
    """Every rewrite meanwhile is followed by ``edit``; whether one was is noted in the list."""
    original, edited = pipeline.rewrite_checked, []

    def rewrite_checked(gm: Any, attempt: Any, options: Any) -> Any:
        def faulty(source: Any, refused: Any) -> Any:
            graph, report = attempt(source, refused)
            if report.num_fused:
                with suppress(StopIteration):  # what it changes was refused before
                    edit(graph)
                    edited.append(True)
            return graph, report

        return original(gm, faulty, options)

    pipeline.rewrite_checked = rewrite_checked
    try:
        yield edited
    finally:
        pipeline.rewrite_checked = original


def first_call(graph: fx.Graph) -> fx.Node:
    return next(n for n in graph.nodes if n.target in CALLS)


def first(graph: fx.Graph, name: str) -> fx.Node:
    return next(n for n in graph.nodes if name_of(n) == name)


def insert(graph: fx.Graph, before: fx.Node, fn: Callable[..., Any], *args: Any) -> fx.Node:
    """A call of ``fn`` with a recorded value, as the rewrite makes them."""
    with graph.inserting_before(before):
        node = graph.call_function(fn, args)
    examples: Any = fx.map_arg(args, lambda n: n.meta["example_value"])
    fake = next(x.fake_mode for x in examples if isinstance(x, torch._subclasses.FakeTensor))
    with fake, torch.enable_grad():
        node.meta["example_value"] = fn(*examples)
    return node


def with_option(**options: Any) -> Edit:
    """Other constants in the operator's call; None leaves one out."""

    def edit(graph: fx.Graph) -> None:
        call = first_call(graph)
        kwargs = {**call.kwargs, **options}
        call.kwargs = {name: x for name, x in kwargs.items() if x is not None}

    return edit


def scaled(name: str, factor: float) -> Edit:
    def edit(graph: fx.Graph) -> None:
        call = first_call(graph)
        call.kwargs = {**call.kwargs, name: float(call.kwargs.get(name, 1.0)) * factor}

    return edit


def through(operand: int | str, fn: Callable[[Tensor], Tensor]) -> Edit:
    """``fn`` applied to an operand of the call."""

    def edit(graph: fx.Graph) -> None:
        call = first_call(graph)
        if isinstance(operand, int):
            source = call.args[operand]
            assert isinstance(source, fx.Node)
            call.update_arg(operand, insert(graph, call, fn, source))
        else:
            source = call.kwargs[operand]
            assert isinstance(source, fx.Node)
            call.update_kwarg(operand, insert(graph, call, fn, source))

    return edit


def swapped(one: str, other: str) -> Edit:
    """Two operands exchanged, by their names in the schema."""

    def edit(graph: fx.Graph) -> None:
        call = first_call(graph)
        names = [argument.name for argument in call.target._schema.arguments]
        given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        given[one], given[other] = given[other], given[one]
        call.args, call.kwargs = (), given

    return edit


def both(*edits: Edit) -> Edit:
    def edit(graph: fx.Graph) -> None:
        for each in edits:
            each(graph)

    return edit


def detached_factor(graph: fx.Graph) -> None:
    """The learned scale that is multiplied into an operand."""
    product = first_call(graph).args[0]
    assert isinstance(product, fx.Node) and name_of(product) == "mul"
    factor = product.args[1]
    assert isinstance(factor, fx.Node)
    product.update_arg(1, insert(graph, product, torch.detach, factor))


def without_detach(graph: fx.Graph) -> None:
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


def without(name: str, keep: int = 0) -> Edit:
    """An operation left out: its users read its input."""

    def edit(graph: fx.Graph) -> None:
        node = first(graph, name)
        node.replace_all_uses_with(node.args[keep])

    return edit


def after_value(fn: Callable[[Tensor], Tensor]) -> Edit:
    """``fn`` applied to the operator's value."""

    def edit(graph: fx.Graph) -> None:
        value = next(n for n in first_call(graph).users if n.args[1] == 0)
        users = list(value.users)
        changed = insert(graph, value.next, fn, value)
        for user in users:
            user.replace_input_with(value, changed)

    return edit


def of_attention(**options: Any) -> Edit:
    def edit(graph: fx.Graph) -> None:
        node = first(graph, "scaled_dot_product_attention")
        node.kwargs = {name: x for name, x in {**node.kwargs, **options}.items() if x is not None}

    return edit


def attention_through(place: int, fn: Callable[[Tensor], Tensor]) -> Edit:
    def edit(graph: fx.Graph) -> None:
        node = first(graph, "scaled_dot_product_attention")
        source = node.args[place]
        assert isinstance(source, fx.Node)
        node.update_arg(place, insert(graph, node, fn, source))

    return edit


def _rounded(x: Tensor) -> Tensor:
    return x.half().to(x.dtype)


def _negated(x: Tensor) -> Tensor:
    return -x


def _slightly_more(x: Tensor) -> Tensor:
    return x * 1.001


def _shifted(x: Tensor) -> Tensor:
    return x.roll(1, -1)


def _other_heads(x: Tensor) -> Tensor:
    return x.flip(1)


def _other_rows(x: Tensor) -> Tensor:
    return x.flip(-2)


def _narrower(x: Tensor) -> Tensor:
    return x[..., :4]


def _half_the_gradient(x: Tensor) -> Tensor:
    return (x + x.detach()) / 2


def _zero_gradient(x: Tensor) -> Tensor:
    return x.detach() + 0 * x


@dataclass(frozen=True)
class Plant:
    name: str
    program: str  # of `PROGRAMS`
    edit: Edit


PLANTS = [
    Plant("teacher_scale_off_by_a_percent", "attention", scaled("teacher_scale", 1.01)),
    Plant("student_scale_forgotten", "attention", with_option(student_scale=0.5)),
    Plant("causal_mask_dropped", "attention", with_option(window_right=None)),
    Plant("causal_mask_off_by_one", "attention", with_option(window_right=1)),
    Plant("window_invented", "attention", with_option(window_left=12)),
    Plant("other_divergence", "attention", with_option(divergence="reverse_kl")),
    Plant("cross_entropy_for_divergence", "attention", with_option(divergence="cross_entropy")),
    Plant("temperature_invented", "attention", with_option(temperature=1.1)),
    Plant("softcap_invented", "attention", with_option(student_softcap=5.0)),
    Plant(
        "sides_swapped",
        "attention",
        both(swapped("student_q", "teacher_q"), swapped("student_k", "teacher_k")),
    ),
    Plant("teacher_keys_for_student_keys", "attention", swapped("student_k", "teacher_k")),
    Plant("student_queries_detached", "attention", through(0, torch.detach)),
    Plant("learned_scale_detached", "attention", detached_factor),
    Plant("half_the_gradient_of_keys", "attention", through(1, _half_the_gradient)),
    Plant("no_gradient_of_keys", "attention", through(1, _zero_gradient)),
    Plant("wrong_heads", "attention", through(3, _other_heads)),
    Plant("wrong_queries", "attention", through(2, _other_rows)),
    Plant("negated_scores", "attention", through(2, _negated)),
    Plant("rounded_operand", "attention", through(0, _rounded)),
    Plant("value_off_by_a_thousandth", "attention", after_value(_slightly_more)),
    Plant("value_detached", "attention", after_value(torch.detach)),
    Plant("raises", "attention", through(3, _narrower)),
    Plant("teacher_gets_a_gradient", "attention", without_detach),
    Plant("map_without_mask", "attention", of_attention(is_causal=None)),
    Plant("map_with_other_scale", "attention", of_attention(scale=0.9)),
    Plant("values_detached", "attention", attention_through(2, torch.detach)),
    Plant("map_rounded", "attention", attention_through(0, _rounded)),
    Plant("mask_inverted", "masked", through("mask", torch.logical_not)),
    Plant("mask_dropped", "masked", with_option(mask=None)),
    Plant("mask_shifted", "masked", through("mask", _shifted)),
    Plant("temperature_forgotten", "head", with_option(temperature=None)),
    Plant("bias_dropped", "head", with_option(student_bias=None)),
    Plant("bias_detached", "head", through("student_bias", torch.detach)),
    Plant("bias_negated", "head", through("student_bias", _negated)),
    Plant("ignored_label_counts", "head", with_option(ignore_index=-1)),
    Plant("labels_shifted", "head", through("labels", _shifted)),
    Plant("weight_detached", "head", through(1, torch.detach)),
    Plant("hidden_rounded", "head", through(0, _rounded)),
    Plant("teacher_head_for_student_head", "tied", swapped("student_weight", "teacher_weight")),
    Plant("teacher_of_logits_gets_a_gradient", "head", without_detach),
]


def attention(
    q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, v: Tensor, scale: Tensor, w: Tensor
) -> Any:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    with torch.no_grad():
        p = (qt @ kt.mT * 0.3).masked_fill(~mask, -torch.inf).softmax(-1)
    s = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    rows = F.kl_div(s.log_softmax(-1), p, reduction="none").sum(-1)
    return (rows * w[:, None]).sum(), s.softmax(-1) @ v


def masked(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, mask: Tensor) -> Tensor:
    p = (qt @ kt.mT * 0.3).masked_fill(~mask, -torch.inf).softmax(-1)
    s = (q @ k.mT * 0.3).masked_fill(~mask, -torch.inf)
    return F.kl_div(s.log_softmax(-1), p, reduction="batchmean")


def head(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor, labels: Tensor, bias: Tensor) -> Tensor:
    logits = F.linear(h, w, bias)
    p = ((ht @ wt.T).detach() / 2.0).softmax(-1)
    rows = F.kl_div((logits / 2.0).log_softmax(-1), p, reduction="none").sum(-1)
    keep = labels != -100
    return (rows * keep).sum() / keep.sum() * 4.0 + F.cross_entropy(logits, labels)


def tied(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor) -> Tensor:
    """Heads of the same shape: swapped ones still run."""
    return F.kl_div((h @ w.T).log_softmax(-1), (ht @ wt.T).softmax(-1), reduction="batchmean")


def inputs_of(program: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    def trained(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    def given(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype)

    shape = (2, 4, 24, 8)
    if program == "attention":
        return (
            *(trained(*shape) for _ in range(5)),
            torch.tensor(0.3, dtype=dtype, requires_grad=True),
            trained(4),
        )
    if program == "masked":
        keep = torch.rand(2, 1, 24, 24) > 0.3
        keep[..., 0] = True
        return (trained(*shape), trained(*shape), given(*shape), given(*shape), keep)
    sizes = (24, 16), (64, 16), (24, 12), (64, 12)
    if program == "tied":
        sizes = (24, 16), (64, 16), (24, 16), (64, 16)
    operands = [trained(*size) for size in sizes]
    if program == "tied":
        return tuple(operands)
    return (*operands, torch.randint(0, 64, (24,)), trained(64))


PROGRAMS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "masked": masked,
    "head": head,
    "tied": tied,
}
