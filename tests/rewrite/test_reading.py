"""What is read of a program, evaluated in float64, has eager's value and gradients.

The oracle (support/read_programs.py) captures a program, reads it, and evaluates the expression of
its results. A few programs of each set are quick; the counts of the whole sets are slow.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.read_programs import SETS, Case, Outcome, examine, examine_compiled
from torch_streamkl.fx_passes.reading.positions import Positions
from torch_streamkl.fx_passes.reading.reader import Reading, read
from torch_streamkl.fx_passes.reading.registry import RULES
from torch_streamkl.program.graph import Node, Source
from torch_streamkl.program.reductions import fresh_axis, remade
from torch_streamkl.program.renaming import renamed
from torch_streamkl.program.walks import walk

aten = torch.ops.aten


# ------------------------------------------------------------------------ coverage

# overloads with a rule of the analysis, and none of the reader
ELSEWHERE = {
    operator.getitem: "Reader reads elements of several results",
}


def test_no_operation_that_was_read_has_lost_its_rule() -> None:
    names = (Path(__file__).parents[1] / "support" / "overloads.txt").read_text().splitlines()
    assert set(names) - set(map(str, RULES)) == set(map(str, ELSEWHERE))


# ------------------------------------------------------------------------ sets of programs

QUICK = {
    "corpus": [
        "minilmv2_bloomberg", "attn_js_window", "attn_double_softmax_T2",
        "trl_gkd_jsd_nomask/lm_head",
        "megatron_cached_topk_ghost", "linearard_ref", "nemo_automodel_indexed_chunked/lm_head",
        "tilelang_dsa_sparse", "dflash_softcap_linear_kl", "kdflow_jsd",
    ],
    "users": ["generalized_jsd"],
    "misleading": [
        "mask_int8_sum", "mask_bfloat16_indices", "chunks_the_first_in_no_grad",
        "hard_operands_of_one_projection", "mask_past_the_end", "tokens_in_chunks",
        "detached_weight_of_reverse_kl", "scores_widened", "shift_before_a_moderate_fill",
        "heads_grouped_in_two_orders", "labels_change_between_losses_that_are_not_trained",
        "table_renormalised_between", "mask_one_row_lowered_dynamic",
    ],
}  # fmt: skip
DYNAMIC = ["trl_gkd_jsd_nomask/lm_head", "attn_raw_scores_mean"]
# make_fx follows no function of torch.func, and none that another compiler has compiled
NOT_TRACED = {
    "mapped_over_batches", "hard_mapped", "hard_mapped_over_heads",
    "hard_inner_function_compiled", "hard_gradient_taken_inside",
    "torchtune_forward_branch", "torchtune_forward_branch/lm_head",  # `if tensor`
    "branch_on_values", "item_between", "metric_after_the_loss", "numpy_teacher",
}  # fmt: skip


@cache
def cases(which: str) -> dict[str, Case]:
    return {case.name: case for case in SETS[which]()}


def assert_right(found: Outcome) -> None:
    assert not found.value, found.value
    assert not found.gradient, found.gradient


@pytest.mark.parametrize(("which", "name"), [(w, n) for w in QUICK for n in QUICK[w]])
def test_equals_eager(which: str, name: str) -> None:
    case = cases(which)[name]
    assert_right(examine(case.fn, case.inputs, case.dynamic, case.wide))


@pytest.mark.parametrize("name", DYNAMIC)
def test_with_symbolic_sizes(name: str) -> None:
    case = cases("corpus")[name]
    found = examine(case.fn, case.inputs, dynamic=True)
    assert_right(found)
    assert found.reading is not None
    assert any(not isinstance(n, int) for x in walk_arrays(found.reading) for n in x.shape)


def walk_arrays(reading: Reading) -> list[Any]:
    return [x for x in reading.arrays.values() if not isinstance(x, tuple)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_of_the_rewrites_own_traces(dynamic: bool) -> None:
    """Dynamo's record says where gradient flows, and a branch of eager code is a graph break."""
    case = cases("corpus")["torchtune_forward_branch/lm_head"]
    (found,) = examine_compiled(case.fn, case.inputs, dynamic)
    assert_right(found)
    assert not found.captured


# programs; those of which nothing is captured that is made of products;
# those in which eager code has NaN where the program has a number
COUNTS = {
    ("corpus", False): (97, 91, 0),
    ("corpus", True): (97, 90, 0),
    ("users", False): (77, 66, 1),
    ("misleading", False): (797, 764, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "dynamic"),
    [("corpus", False), ("corpus", True), ("users", False), ("misleading", False)],
)
@pytest.mark.filterwarnings("ignore")
def test_of_whole_sets(which: str, dynamic: bool) -> None:
    wrong, whole, nan, count = {}, 0, 0, 0
    for case in cases(which).values():
        if case.name in NOT_TRACED:
            continue
        found = examine(case.fn, case.inputs, dynamic or case.dynamic, case.wide)
        if not found.is_right:
            wrong[case.name] = f"{found.value} {found.gradient}"
        count, whole, nan = count + 1, whole + (not found.captured), nan + bool(found.nan)
    assert not wrong
    assert (count, whole, nan) == COUNTS[which, dynamic]


# ------------------------------------------------------------------------ single operations


def draw(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def columns_filled(x: Tensor, y: Tensor) -> Tensor:
    s = x @ y.mT
    s[:, 2] = -1e4
    s[:, -2:] = 0.5
    return s.softmax(-1).square()


def base_read_after_its_view_was_written(x: Tensor, y: Tensor) -> Tensor:
    s = x.clone()
    row, flat = s[1], s.view(-1)
    row.mul_(3.0)
    flat.add_(1.0)
    s[0].zero_()
    return s * flat.view(4, 6) + row


def views_of_written_parts(x: Tensor, y: Tensor) -> Tensor:
    s = x * 2
    first, second = s[:, :3], s.narrow(1, 3, 3)
    t = s.transpose(0, 1)
    t[1:3].copy_(y[1:3, :4].mT.mT[:2, :4])
    return first.exp() * second + t.mT[:, 3:]


def masked_in_place(x: Tensor, y: Tensor) -> Tensor:
    s, keep = x @ y.mT, torch.ones(4, 6, dtype=torch.bool).tril()
    keep[:, 0] = False
    s.masked_fill_(~keep, -30.0)
    s[y[:4, :6] > 1.0] = 2.0
    return s.log_softmax(-1)


def input_written_under_no_grad(x: Tensor, y: Tensor) -> Tensor:
    s = (x.detach() @ y.mT).softmax(-1)
    with torch.no_grad():
        y.mul_(0.5)
    return s * (x.detach() @ y.mT) + x


def assembled_in_place(x: Tensor, y: Tensor) -> Tensor:
    s = torch.zeros(4, 6, dtype=torch.float64)
    s[:, 1:3] = x[:, :2] * 2
    s[0] = y[0]
    return s.softmax(-1) * s.cumsum(-1)


def entries_by_index(x: Tensor, y: Tensor) -> Tensor:
    ids, rows = torch.tensor([[0, 2], [1, 1], [5, 3], [2, 2]]), torch.tensor([3, -1, 0])
    picked = x.log_softmax(-1).gather(1, ids)
    return picked.sum() + x[rows][:, [0, -2]].square().sum() + x[rows, rows].sum() + y[ids].mean()


def rows_of_masks(x: Tensor, y: Tensor) -> Tensor:
    m = x[:, 0] > 0
    p, q = x[m].log_softmax(-1), y[:4][x[:, 0] > 0].softmax(-1)
    return (q * (q.log() - p)).sum(-1).mean() + x[x[:, 1] < 0].sum()


def padded_and_joined(x: Tensor, y: Tensor) -> Tensor:
    p = F.pad(x, (1, 2), value=-2.0)
    j = torch.cat([x, y[:4, :6] * 2], -1).view(4, 2, 6).permute(1, 0, 2)
    return p.softmax(-1).sum(0)[:6] * torch.stack([x, x * 3]).logsumexp(0) * j[1] * j.flip(-1)[0]


def repeated(x: Tensor, y: Tensor) -> Tensor:
    a = x.repeat_interleave(3, dim=0).view(4, 3, 6).mean(1)
    return a + x.repeat(2, 1)[2:6] + x.unsqueeze(1).expand(4, 5, 6).reshape(20, 6)[3:7]


def norms(x: Tensor, y: Tensor) -> Tensor:
    n = F.normalize(x, dim=-1) + x / x.norm(p=1, dim=-1, keepdim=True)
    near_zero = F.cosine_similarity(1e-10 * x, y[:4, :6], dim=-1)  # its norm counts as 1e-8
    n = n * F.cosine_similarity(x, y[:4, :6], dim=-1)[:, None] + x.std(-1, keepdim=True)
    return n * x.amin(0) + near_zero[:, None] + x.mean((0, 1))


def functions(x: Tensor, y: Tensor) -> Tensor:
    a = x.abs() + 0.1
    b = a.log2() + a.rsqrt() + a**1.5 + a.reciprocal() + F.logsigmoid(x) + F.softplus(x)
    return (
        b
        + torch.xlogy(a, a)
        + torch.lerp(x, a, 0.3)
        + x.clamp(-0.5, 0.7)
        + torch.rsub(x, a, alpha=2)
    )


def of_labels(x: Tensor, y: Tensor) -> Tensor:
    labels, w = torch.tensor([1, -100, 5, 0]), a_weight()
    smooth = F.cross_entropy(x, labels, weight=w, label_smoothing=0.2)
    soft = F.cross_entropy(x, y[:4, :6].softmax(-1), label_smoothing=0.1, weight=w)
    none = F.cross_entropy(x, labels, reduction="none") * 2
    return smooth + soft + none.sum() + F.nll_loss(x.log_softmax(-1), labels.clamp(min=0))


def a_weight() -> Tensor:
    return torch.arange(1, 7, dtype=torch.float64) / 3


def other_losses(x: Tensor, y: Tensor) -> Tensor:
    t = y[:4, :6]
    found = F.mse_loss(x, t) + F.l1_loss(x, t) + F.smooth_l1_loss(x, t, beta=0.4)
    return found + F.huber_loss(x, t, delta=0.7) + F.kl_div(x, t.log_softmax(-1), log_target=True)


def with_tensor_scales(x: Tensor, y: Tensor) -> Tensor:
    scale = y[0, 0].exp()
    s, t = (x * scale) @ (y / 2).mT, (x / y[1, 1]) @ y.mT + (x / y[0].exp()) @ y.mT
    return (s.log_softmax(-1) * t.softmax(-1)).sum()


def values_of_maps(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.mT).softmax(-1) @ y


def einsums(x: Tensor, y: Tensor) -> Tensor:
    a = torch.einsum("id,jd->ij", x, y) + torch.einsum("...d,d->...", x, y[0])[:, None]
    b = torch.baddbmm(a[None], x[None], y.mT[None], beta=0.5, alpha=2.0)[0]
    return torch.addmm(b, x, y.mT, beta=2.0) + F.linear(x, y, y[:, 0])


def without_gradient(x: Tensor, y: Tensor) -> Tensor:
    p = (x @ y.mT).softmax(-1)
    with torch.no_grad():
        q = p * 2
    lse = x.logsumexp(-1, keepdim=True).detach()
    return (x - lse).exp() * (p.detach() + q)[:, :6] * y.detach()[:4] + p.log()[:, :6]


def conditions(x: Tensor, y: Tensor) -> Tensor:
    t = y[:4, :6]
    return torch.where((x > 0) != (t > 0), x, t) * torch.where((x > 1) == (t > 1), 2.0, 3.0)


def ids_of_another_dimension(x: Tensor, y: Tensor) -> Tensor:
    """Of a column they differ; in a row one may be twice, and the last is what stays."""
    top = (x @ y.mT).topk(2, dim=0)
    return torch.zeros(2, 6, dtype=torch.float64).scatter(1, top.indices, top.values).exp()


def topk_of_scores(x: Tensor, y: Tensor) -> Tensor:
    top = (x @ y.mT).topk(3, dim=-1)
    whole = torch.full((4, 6), -9.0, dtype=torch.float64).scatter(1, top.indices, top.values)
    return whole.softmax(-1) * torch.zeros(4, 6).scatter_(1, top.indices, 1.0)


PROGRAMS = [
    columns_filled, base_read_after_its_view_was_written, views_of_written_parts,
    masked_in_place, assembled_in_place, input_written_under_no_grad, entries_by_index,
    rows_of_masks, padded_and_joined, repeated, norms, functions, of_labels, other_losses,
    with_tensor_scales, values_of_maps, einsums, without_gradient, topk_of_scores,
    conditions, ids_of_another_dimension,
]  # fmt: skip
# what is no input, in the result
CAPTURES = {"input_written_under_no_grad", "assembled_in_place", "ids_of_another_dimension"}


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_operations(fn: Callable[..., Tensor]) -> None:
    is_frozen = fn is input_written_under_no_grad
    inputs = [draw(4, 6).requires_grad_(), draw(6, 6, seed=1).requires_grad_(not is_frozen)]
    found = examine(fn, inputs)
    assert_right(found)
    assert found.reading is not None
    reasons = dict(found.reading.reasons)
    assert bool(reasons) == (fn.__name__ in CAPTURES), reasons


def scores_written_under_no_grad(x: Tensor, y: Tensor) -> Tensor:
    s = x @ y.mT
    with torch.no_grad():
        s.mul_(2.0)
    return s.softmax(-1).square()


def test_a_write_that_autograd_does_not_see_is_captured() -> None:
    inputs = [draw(4, 6).requires_grad_(), draw(6, 6, seed=1).requires_grad_()]
    for found in (
        examine(scores_written_under_no_grad, inputs),
        *examine_compiled(scores_written_under_no_grad, inputs),
    ):
        assert_right(found)
        assert found.reading is not None
        assert any("modified in place under no_grad" in r for r in found.reading.reasons.values())


@pytest.mark.parametrize("fn", [columns_filled, assembled_in_place, without_gradient])
def test_operations_as_the_rewrite_traces_them(fn: Callable[..., Tensor]) -> None:
    """With what Dynamo recorded of gradients: a setitem has no value, and no_grad no node."""
    inputs = [draw(4, 6).requires_grad_(), draw(6, 6, seed=1).requires_grad_()]
    (found,) = examine_compiled(fn, inputs)
    assert_right(found)


# ------------------------------------------------------------------------ what a reading says


def of(fn: Callable[..., Tensor], *inputs: Tensor) -> tuple[Reading, fx.Graph]:
    found = examine(fn, inputs, wide=False)
    assert_right(found)
    assert found.reading is not None
    return found.reading, next(iter(found.reading.arrays)).graph


def node_named(graph: fx.Graph, name: str) -> fx.Node:
    return next(n for n in graph.nodes if n.name == name)


def sources(x: Node) -> list[Source]:
    return [y.value for y in walk([x]) if y.op == "capture"]


def test_an_operation_without_a_rule_is_captured_with_a_reason() -> None:
    q, k = draw(4, 6), draw(5, 6)
    reading, graph = of(lambda q, k: (q @ k.mT).sort(-1)[0].softmax(-1), q, k)
    made = node_named(graph, "getitem")
    assert "sort has no rule" in reading.reasons[made]
    assert made in reading.reads_products
    (source,) = sources(reading.array(node_named(graph, "softmax")).expr)
    assert source.name is made


def test_equal_tensors_are_one_source() -> None:
    reading, graph = of(
        lambda x: x.cumsum(-1).sin() + x.cumsum(-1).cos() + (x * 2).cumsum(-1), draw(4, 6)
    )
    assert len(set(sources(reading.array(node_named(graph, "add_1")).expr))) == 2


def test_rows_of_a_mask_that_was_written_are_not_those_of_an_equal_one() -> None:
    def written_between(x: Tensor) -> Tensor:
        m = x[:, 0] > 0
        before = x.detach()[m].sum()
        m.logical_not_()
        return before + x[x[:, 0] > 0].exp().sum()

    reading, _ = of(written_between, draw(4, 6).requires_grad_())
    expr = next(reversed(walk_arrays(reading))).expr
    masks = {s.name.mask for s in sources(expr) if isinstance(s.name, Positions)}
    assert len(masks) == 2


def test_gradient_flow_is_that_of_leaves() -> None:
    q, k = draw(4, 6).requires_grad_(), draw(5, 6)
    reading, graph = of(lambda q, k: (q @ k.mT).softmax(-1).detach() + (q @ k.mT), q, k)
    assert not reading.array(node_named(graph, "detach")).expr.flows
    flows = {s.grad_flows for s in sources(reading.array(node_named(graph, "add")).expr)}
    assert flows == {True, False}


def test_what_reads_nan_is_noted() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.where(x.isnan(), 0.0, x).clamp(min=0.1) + x * 0 + torch.zeros_like(x)

    reading, graph = of(fn, draw(4, 6))
    noted = {n.name: what for n, what in reading.observers.items()}
    assert noted == {"isnan": "isnan", "clamp": "clamp", "mul": "folded"}
    assert any(x.op == "isnan" for x in walk([reading.array(node_named(graph, "clamp")).expr]))


def test_a_cast_of_scores_to_a_narrower_type_is_a_node() -> None:
    def loss(q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT).bfloat16().float().softmax(-1)

    reading, graph = of(loss, draw(4, 6).float(), draw(5, 6).float())
    expr = reading.array(node_named(graph, "softmax")).expr
    assert [x.value for x in walk([expr]) if x.op == "round"] == ["bfloat16"]


def test_renamed_axes_keep_the_form() -> None:
    case = cases("corpus")["trl_gkd_jsd_nomask/lm_head"]
    found = examine(case.fn, case.inputs)
    assert found.reading is not None
    for x in walk_arrays(found.reading):
        names = {a: fresh_axis(a.size) for own in x.dims for a in own}
        other = renamed(x.expr, names)
        assert renamed(other, {b: a for a, b in names.items()}) is x.expr
        assert remade(other, other.args) is other
        assert not names.keys() & other.axes


# ------------------------------------------------------------------------ size


def chain_of(count: int, *operations: Any) -> fx.Graph:
    """A graph in which every operation reads the one before, made without tracing."""
    graph, mode = fx.Graph(), FakeTensorMode()
    with mode:
        value = torch.empty(4, 6)
    x = graph.placeholder("x")
    y = graph.placeholder("y")
    x.meta["val"] = y.meta["val"] = value
    for i in range(count):
        operation = operations[i % len(operations)]
        x = graph.call_function(operation, (x, y) if operation == aten.add.Tensor else (x,))
        x.meta["val"] = value
    graph.output((x,))
    return graph


@pytest.mark.parametrize("count", [2000, pytest.param(20000, marks=pytest.mark.slow)])
def test_long_graphs_are_read_in_linear_time(count: int) -> None:
    operations = (aten.sin.default, aten.add.Tensor, aten.abs.default)
    start = time.process_time()
    reading = read(chain_of(count, *operations))
    assert time.process_time() - start < 0.005 * count  # 0.2 ms each, a machine's noise aside
    assert len(reading.arrays) == count + 2
    assert set(reading.reasons.values()) == {"an expression that is too large to be analysed"}


def test_reductions_that_read_each_other_are_rebuilt_once() -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(24):  # both reductions read both of the step before
            x = (x - x.mean(-1, keepdim=True)) / x.exp().sum(-1, keepdim=True)
        return x[1:] * y[:3, :6]

    inputs = [draw(4, 6).requires_grad_(), draw(6, 6)]
    start = time.process_time()
    found = examine(loss, inputs)
    assert_right(found)
    assert time.process_time() - start < 20
