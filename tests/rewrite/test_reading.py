"""What is read of a program, evaluated in float64, has eager's value and gradients.

The oracle (support/read_programs.py) captures a program, reads it, and evaluates the expression of
its results. A few programs of each set are quick; the counts of the whole sets are slow.
"""

import operator
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.read_programs import SETS, capture, examine, examine_compiled
from torch_streamkl.fx_passes.closed_forms.match import match_program
from torch_streamkl.fx_passes.reading.positions import Positions
from torch_streamkl.fx_passes.reading.reader import read
from torch_streamkl.fx_passes.reading.registry import RULES
from torch_streamkl.program.fresh_axes import fresh_axis
from torch_streamkl.program.reductions import remade
from torch_streamkl.program.renaming import renamed
from torch_streamkl.program.walks import walk

aten = torch.ops.aten


# ------------------------------------------------------------------------ coverage

# overloads with a rule of the analysis, and none of the reader
ELSEWHERE = {
    operator.getitem: "Reader reads elements of several results",
}


def test_no_operation_that_was_read_has_lost_its_rule():
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
    "center_in_place",  # every call is of another center
    # nor a view under no_grad, which has no operation that autograd would not record
    "rows_viewed_without_gradient", "token_rows_viewed_without_gradient",
    "squares_of_rows_viewed_without_gradient",
}  # fmt: skip


@cache
def cases(which):
    return {case.name: case for case in SETS[which]()}


def assert_right(found):
    assert not found.value, found.value
    assert not found.gradient, found.gradient


@pytest.mark.parametrize(("which", "name"), [(w, n) for w in QUICK for n in QUICK[w]])
def test_equals_eager(which, name):
    case = cases(which)[name]
    assert_right(examine(case.fn, case.inputs, case.dynamic, case.wide))


@pytest.mark.parametrize("name", DYNAMIC)
def test_with_symbolic_sizes(name):
    case = cases("corpus")[name]
    found = examine(case.fn, case.inputs, dynamic=True)
    assert_right(found)
    assert any(not isinstance(n, int) for x in walk_arrays(found.reading) for n in x.shape)


def walk_arrays(reading):
    return [x for x in reading.arrays.values() if not isinstance(x, tuple)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_of_the_rewrites_own_traces(dynamic):
    """Dynamo's record says where gradient flows, and a branch of eager code is a graph break."""
    case = cases("corpus")["torchtune_forward_branch/lm_head"]
    (found,) = examine_compiled(case.fn, case.inputs, dynamic)
    assert_right(found)
    assert not found.captured


# programs; those of which nothing is captured that is made of products;
# those in which eager code has NaN where the program has a number
COUNTS = {
    ("corpus", False): (105, 98, 0),
    ("corpus", True): (105, 97, 0),
    ("users", False): (96, 84, 1),
    ("misleading", False): (802, 769, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "dynamic"),
    [("corpus", False), ("corpus", True), ("users", False), ("misleading", False)],
)
@pytest.mark.filterwarnings("ignore")
def test_of_whole_sets(which, dynamic):
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


def draw(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def two_matrices(is_frozen=False):
    return [draw(4, 6).requires_grad_(), draw(6, 6, seed=1).requires_grad_(not is_frozen)]


def columns_filled(x, y):
    s = x @ y.mT
    s[:, 2] = -1e4
    s[:, -2:] = 0.5
    return s.softmax(-1).square()


def base_read_after_its_view_was_written(x, y):
    s = x.clone()
    row, flat = s[1], s.view(-1)
    row.mul_(3.0)
    flat.add_(1.0)
    s[0].zero_()
    return s * flat.view(4, 6) + row


def views_of_written_parts(x, y):
    s = x * 2
    first, second = s[:, :3], s.narrow(1, 3, 3)
    t = s.transpose(0, 1)
    t[1:3].copy_(y[1:3, :4].mT.mT[:2, :4])
    return first.exp() * second + t.mT[:, 3:]


def masked_in_place(x, y):
    s, keep = x @ y.mT, torch.ones(4, 6, dtype=torch.bool).tril()
    keep[:, 0] = False
    s.masked_fill_(~keep, -30.0)
    s[y[:4, :6] > 1.0] = 2.0
    return s.log_softmax(-1)


def input_written_under_no_grad(x, y):
    s = (x.detach() @ y.mT).softmax(-1)
    with torch.no_grad():
        y.mul_(0.5)
    return s * (x.detach() @ y.mT) + x


def assembled_in_place(x, y):
    s = torch.zeros(4, 6, dtype=torch.float64)
    s[:, 1:3] = x[:, :2] * 2
    s[0] = y[0]
    return s.softmax(-1) * s.cumsum(-1)


def entries_by_index(x, y):
    ids, rows = torch.tensor([[0, 2], [1, 1], [5, 3], [2, 2]]), torch.tensor([3, -1, 0])
    picked = x.log_softmax(-1).gather(1, ids)
    return picked.sum() + x[rows][:, [0, -2]].square().sum() + x[rows, rows].sum() + y[ids].mean()


def rows_of_masks(x, y):
    m = x[:, 0] > 0
    p, q = x[m].log_softmax(-1), y[:4][x[:, 0] > 0].softmax(-1)
    return (q * (q.log() - p)).sum(-1).mean() + x[x[:, 1] < 0].sum()


def padded_and_joined(x, y):
    p = F.pad(x, (1, 2), value=-2.0)
    j = torch.cat([x, y[:4, :6] * 2], -1).view(4, 2, 6).permute(1, 0, 2)
    return p.softmax(-1).sum(0)[:6] * torch.stack([x, x * 3]).logsumexp(0) * j[1] * j.flip(-1)[0]


def columns_joined(x, y):
    a = torch.cat([y[:4, 2:3], y[:4, 5:6]], -1)[:, :1]
    a = a + torch.stack([x[:, 4], x[:, -4], x[:, 0]], -1)
    once = torch.stack([x[1], x[1]], 0) + torch.cat([x[:1], x[2:3]]) + torch.stack([x[0], x[3]])
    other = torch.stack([x[:, 0], y[:4, 1]], 1) + torch.cat([x[:, ::2], x[:, 1::2]], 1)[:, :2]
    return a.softmax(-1).sum() + once.logsumexp(0)[:4, None] * other


def repeated(x, y):
    a = x.repeat_interleave(3, dim=0).view(4, 3, 6).mean(1)
    return a + x.repeat(2, 1)[2:6] + x.unsqueeze(1).expand(4, 5, 6).reshape(20, 6)[3:7]


def norms(x, y):
    n = F.normalize(x, dim=-1) + x / x.norm(p=1, dim=-1, keepdim=True)
    near_zero = F.cosine_similarity(1e-10 * x, y[:4, :6], dim=-1)  # its norm counts as 1e-8
    n = n * F.cosine_similarity(x, y[:4, :6], dim=-1)[:, None] + x.std(-1, keepdim=True)
    return n * x.amin(0) + near_zero[:, None] + x.mean((0, 1))


def functions(x, y):
    a = x.abs() + 0.1
    b = a.log2() + a.rsqrt() + a**1.5 + a.reciprocal() + F.logsigmoid(x) + F.softplus(x)
    return (
        b
        + torch.xlogy(a, a)
        + torch.lerp(x, a, 0.3)
        + x.clamp(-0.5, 0.7)
        + torch.rsub(x, a, alpha=2)
    )


def of_labels(x, y):
    labels, w = torch.tensor([1, -100, 5, 0]), a_weight()
    smooth = F.cross_entropy(x, labels, weight=w, label_smoothing=0.2)
    soft = F.cross_entropy(x, y[:4, :6].softmax(-1), label_smoothing=0.1, weight=w)
    none = F.cross_entropy(x, labels, reduction="none") * 2
    return smooth + soft + none.sum() + F.nll_loss(x.log_softmax(-1), labels.clamp(min=0))


def a_weight():
    return torch.arange(1, 7, dtype=torch.float64) / 3


def other_losses(x, y):
    t = y[:4, :6]
    found = F.mse_loss(x, t) + F.l1_loss(x, t) + F.smooth_l1_loss(x, t, beta=0.4)
    found = found + F.binary_cross_entropy_with_logits(x, t.sigmoid(), reduction="sum")
    weights = {"weight": a_weight(), "pos_weight": a_weight().flip(0)}
    found = found + F.binary_cross_entropy_with_logits(x, t.sigmoid(), **weights)
    return found + F.huber_loss(x, t, delta=0.7) + F.kl_div(x, t.log_softmax(-1), log_target=True)


def with_tensor_scales(x, y):
    scale = y[0, 0].exp()
    s, t = (x * scale) @ (y / 2).mT, (x / y[1, 1]) @ y.mT + (x / y[0].exp()) @ y.mT
    return (s.log_softmax(-1) * t.softmax(-1)).sum()


def values_of_maps(x, y):
    return (x @ y.mT).softmax(-1) @ y


def einsums(x, y):
    a = torch.einsum("id,jd->ij", x, y) + torch.einsum("...d,d->...", x, y[0])[:, None]
    b = torch.baddbmm(a[None], x[None], y.mT[None], beta=0.5, alpha=2.0)[0]
    return torch.addmm(b, x, y.mT, beta=2.0) + F.linear(x, y, y[:, 0])


def without_gradient(x, y):
    p = (x @ y.mT).softmax(-1)
    with torch.no_grad():
        q = p * 2
    lse = x.logsumexp(-1, keepdim=True).detach()
    return (x - lse).exp() * (p.detach() + q)[:, :6] * y.detach()[:4] + p.log()[:, :6]


def conditions(x, y):
    t = y[:4, :6]
    return torch.where((x > 0) != (t > 0), x, t) * torch.where((x > 1) == (t > 1), 2.0, 3.0)


def ids_of_another_dimension(x, y):
    """Of a column they differ; in a row one may be twice, and the last is what stays."""
    top = (x @ y.mT).topk(2, dim=0)
    return torch.zeros(2, 6, dtype=torch.float64).scatter(1, top.indices, top.values).exp()


def topk_of_scores(x, y):
    top = (x @ y.mT).topk(3, dim=-1)
    whole = torch.full((4, 6), -9.0, dtype=torch.float64).scatter(1, top.indices, top.values)
    return whole.softmax(-1) * torch.zeros(4, 6).scatter_(1, top.indices, 1.0)


PROGRAMS = [
    columns_filled, base_read_after_its_view_was_written, views_of_written_parts,
    masked_in_place, assembled_in_place, input_written_under_no_grad, entries_by_index,
    rows_of_masks, padded_and_joined, columns_joined, repeated, norms, functions, of_labels,
    other_losses, with_tensor_scales, values_of_maps, einsums, without_gradient, topk_of_scores,
    conditions, ids_of_another_dimension,
]  # fmt: skip
# what is no input, in the result
CAPTURES = {"input_written_under_no_grad", "assembled_in_place", "ids_of_another_dimension"}


@pytest.mark.parametrize("fn", PROGRAMS)
def test_operations(fn):
    inputs = two_matrices(is_frozen=fn is input_written_under_no_grad)
    found = examine(fn, inputs)
    assert_right(found)
    reasons = dict(found.reading.reasons)
    assert bool(reasons) == (fn.__name__ in CAPTURES), reasons


# as losses of 2026 have them, of a batch of maps
def rolled(x, y):
    s = x @ y.mT
    return [s.roll(-1, 1).softmax(-1).square(), torch.roll(s, (2, -3), (1, 2))]


def moved(x, y):
    s = x @ y.mT
    return [s.movedim(0, -1) * torch.arange(2), s.movedim((0, 1), (2, 0))[..., 0].exp()]


def diagonals(x, y):
    s = x @ y.mT
    # a wide matrix: of a tall one, torch 2.11 has a gradient beside the diagonal, at (5, 0)
    return [
        s.diagonal(dim1=-2, dim2=-1), s.diagonal(1, 1, 2) ** 2,
        s[:, :, :4].diagonal(0, 1, 2).exp(), torch.trace(s[0]), torch.trace(s[1, :4]),
        s.masked_fill(torch.eye(6, dtype=torch.bool), 0.0) + torch.eye(6),
    ]  # fmt: skip


def written_diagonals(x, y):
    s = x @ y.mT
    return [
        torch.diagonal_scatter(s, torch.arange(12.0).view(2, 6), dim1=1, dim2=2),
        torch.diagonal_scatter(s[..., :4], (y @ x.mT)[:, :4, 1], dim1=1, dim2=2),
        s[0].clone().fill_diagonal_(-1e9).softmax(-1),
    ]  # fmt: skip


def written_parts(x, y):
    s, t = x @ y.mT, y @ y.mT
    at_rows, at_keys = s.clone(), s.clone()
    at_rows[:, torch.arange(6) % 2 == 0] = 0.5
    at_keys[..., torch.arange(6) % 3 == 0] = -2.0
    return [
        torch.slice_scatter(s, t[:, :2], 1, 2, 4), torch.select_scatter(s, t[:, 2], 1, -1),
        at_rows.exp(), at_keys.softmax(-1),
    ]  # fmt: skip


def pairs(x, y):
    s = (x @ y.mT)[0]
    rows = torch.arange(6)
    return [
        s[rows.repeat_interleave(2), torch.arange(12) % 5].square(),
        s.log_softmax(-1)[rows, rows], F.cross_entropy(s, rows),  # of in-batch negatives
        s.softmax(-1).gather(1, rows[:, None]),
    ]  # fmt: skip


def functions_of_two_maps(x, y):
    s, t = x @ y.mT, y @ y.mT
    return [
        torch.min(s, t) + torch.max(s, x @ x.mT), torch.addcmul(s, t, t, value=0.5),
        torch.addcdiv(s, t, 1 + s.square()), F.elu(s) + F.elu(t, 0.3), F.leaky_relu(s),
    ]  # fmt: skip


def norms_of_maps(x, y):
    s = x @ y.mT
    return [
        torch.linalg.matrix_norm(s), torch.linalg.norm(s), torch.linalg.norm(s, dim=(1, 2)),
        torch.linalg.norm(s, ord=1, dim=-1), torch.linalg.norm(s, dim=-1), s.norm(),
    ]  # fmt: skip


OF_MAPS = [
    rolled, moved, diagonals, written_diagonals, written_parts, pairs, functions_of_two_maps,
    norms_of_maps,
]  # fmt: skip


@pytest.mark.parametrize("fn", OF_MAPS)
def test_operations_on_maps(fn):
    x, y = draw(2, 6, 4), draw(2, 6, 4, seed=1)
    found = examine(fn, [x.requires_grad_(), y])
    assert_right(found)
    assert not found.captured and not found.nan


def scores_written_under_no_grad(x, y):
    s = x @ y.mT
    with torch.no_grad():
        s.mul_(2.0)
    return s.softmax(-1).square()


def test_a_write_that_autograd_does_not_see_is_captured():
    inputs = two_matrices()
    for found in (
        examine(scores_written_under_no_grad, inputs),
        *examine_compiled(scores_written_under_no_grad, inputs),
    ):
        assert_right(found)
        assert any("modified in place under no_grad" in r for r in found.reading.reasons.values())


@pytest.mark.parametrize("fn", [columns_filled, assembled_in_place, without_gradient])
def test_operations_as_the_rewrite_traces_them(fn):
    """With what Dynamo recorded of gradients: a setitem has no value, and no_grad no node."""
    inputs = two_matrices()
    (found,) = examine_compiled(fn, inputs)
    assert_right(found)


# ------------------------------------------------------------------------ what a reading says


def of(fn, *inputs):
    found = examine(fn, inputs, wide=False)
    assert_right(found)
    return found.reading, next(iter(found.reading.arrays)).graph


def node_named(graph, name):
    return next(n for n in graph.nodes if n.name == name)


def sources(x):
    return [y.value for y in walk([x]) if y.op == "capture"]


def test_an_operation_without_a_rule_is_captured_with_a_reason():
    q, k = draw(4, 6), draw(5, 6)
    reading, graph = of(lambda q, k: (q @ k.mT).sort(-1)[0].softmax(-1), q, k)
    made = node_named(graph, "getitem")
    assert "sort has no rule" in reading.reasons[made]
    assert made in reading.reads_products
    (source,) = sources(reading.array(node_named(graph, "softmax")).expr)
    assert source.name is made


def test_equal_tensors_are_one_source():
    reading, graph = of(
        lambda x: x.cumsum(-1).sin() + x.cumsum(-1).cos() + (x * 2).cumsum(-1), draw(4, 6)
    )
    assert len(set(sources(reading.array(node_named(graph, "add_1")).expr))) == 2


def test_rows_of_a_mask_that_was_written_are_not_those_of_an_equal_one():
    def written_between(x):
        m = x[:, 0] > 0
        before = x.detach()[m].sum()
        m.logical_not_()
        return before + x[x[:, 0] > 0].exp().sum()

    reading, _ = of(written_between, draw(4, 6).requires_grad_())
    expr = next(reversed(walk_arrays(reading))).expr
    masks = {s.name.mask for s in sources(expr) if isinstance(s.name, Positions)}
    assert len(masks) == 2


def test_gradient_flow_is_that_of_leaves():
    q, k = draw(4, 6).requires_grad_(), draw(5, 6)
    reading, graph = of(lambda q, k: (q @ k.mT).softmax(-1).detach() + (q @ k.mT), q, k)
    assert not reading.array(node_named(graph, "detach")).expr.flows
    flows = {s.grad_flows for s in sources(reading.array(node_named(graph, "add")).expr)}
    assert flows == {True, False}


def test_what_reads_nan_is_noted():
    def fn(x):
        return torch.where(x.isnan(), 0.0, x).clamp(min=0.1) + x * 0 + torch.zeros_like(x)

    reading, graph = of(fn, draw(4, 6))
    noted = {n.name: what for n, what in reading.observers.items()}
    assert noted == {"isnan": "isnan", "clamp": "clamp", "mul": "folded"}
    assert any(x.op == "isnan" for x in walk([reading.array(node_named(graph, "clamp")).expr]))


def test_a_cast_of_scores_to_a_narrower_type_is_a_node():
    def loss(q, k):
        return (q @ k.mT).bfloat16().float().softmax(-1)

    reading, graph = of(loss, draw(4, 6).float(), draw(5, 6).float())
    expr = reading.array(node_named(graph, "softmax")).expr
    assert [x.value for x in walk([expr]) if x.op == "round"] == ["bfloat16"]


def test_renamed_axes_keep_the_form():
    case = cases("corpus")["trl_gkd_jsd_nomask/lm_head"]
    found = examine(case.fn, case.inputs)
    for x in walk_arrays(found.reading):
        names = {a: fresh_axis(a.size) for own in x.dims for a in own}
        other = renamed(x.expr, names)
        assert renamed(other, {b: a for a, b in names.items()}) is x.expr
        assert remade(other, other.args) is other
        assert not names.keys() & other.axes


# ------------------------------------------------------------------------ size


@pytest.mark.parametrize("count", [2000, pytest.param(20000, marks=pytest.mark.slow)])
def test_long_graphs_are_read_in_linear_time(count):
    """Every operation reads the one before, in a graph that is made without tracing."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for i in range(count):
        operation = (aten.sin.default, aten.add.Tensor, aten.abs.default)[i % 3]
        x = graph.call_function(operation, (x, y) if operation == aten.add.Tensor else (x,))
    with FakeTensorMode():
        value = torch.empty(4, 6)
    for node in graph.nodes:
        node.meta["val"] = value
    graph.output((x,))
    start = time.process_time()
    reading = read(graph)
    assert time.process_time() - start < 0.005 * count  # 0.2 ms each, a machine's noise aside
    assert len(reading.arrays) == count + 2
    assert set(reading.reasons.values()) == {"an expression that is too large to be analysed"}


def test_reductions_that_read_each_other_are_rebuilt_once():
    def loss(x, y):
        for _ in range(24):  # both reductions read both of the step before
            x = (x - x.mean(-1, keepdim=True)) / x.exp().sum(-1, keepdim=True)
        return x[1:] * y[:3, :6]

    inputs = [draw(4, 6).requires_grad_(), draw(6, 6)]
    start = time.process_time()
    found = examine(loss, inputs)
    assert_right(found)
    assert time.process_time() - start < 20


def bisection(steps):
    """A sparsemax by bisection next to a divergence: each step sums what the last one gave."""

    def loss(q, k, qt, kt):
        s, t = q @ k.mT, (qt @ kt.mT).softmax(-1)
        high = s.amax(-1, keepdim=True)
        low = high - 1
        for _ in range(steps):
            middle = (low + high) / 2
            is_above = torch.relu(s - middle).sum(-1, keepdim=True) > 1
            low, high = torch.where(is_above, middle, low), torch.where(is_above, high, middle)
        kl = (t * (t.log() - s.log_softmax(-1))).sum()
        return kl + (torch.relu(s - low) * s).sum()

    return loss


def many(nodes):
    """Losses of pairs, and what a network computes between them."""

    def loss(q, k, qt, kt):
        total, x = q.new_zeros(()), qt
        for _ in range(nodes // 50):
            for _ in range(20):
                x = torch.tanh(x * 1.01)
            s, t = q @ k.mT, x @ kt.mT
            total = total + (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum()
        return total

    return loss


def seconds(loss):
    """Of this process, for reading and matching; and how many closed forms there are."""
    gm = capture(loss, [draw(5, 4, seed=i).requires_grad_() for i in range(4)])
    start = time.process_time()
    reading = read(gm, lambda node: True)
    (results,) = next(n for n in gm.graph.nodes if n.op == "output").args
    found = [match_program(reading.array(x).expr).closed for x in results]
    return time.process_time() - start, sum(map(len, found))


@pytest.mark.parametrize(
    ("program", "sizes", "closed"), [(bisection, (2, 12, 50), 1), (many, (50, 200, 800), 16)]
)
def test_reading_and_matching_take_linear_time(program, sizes, closed):
    _, (few, _), (large, count) = (seconds(program(n)) for n in sizes)
    assert count == closed
    assert large < 12 * few + 0.5
