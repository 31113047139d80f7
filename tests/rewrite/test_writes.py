"""Which arguments an operation writes to, where neither its name nor its schema says it all."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.losses import rows_of_kl
from torch_streamkl.fx_passes.fx_utils.mutation import written_by

A, B, C, D = "abcd"
WRITES = [
    (F.embedding, (A, B, None, 0.1), {}, {B}),
    (F.embedding, (A, B), {"max_norm": 0.1}, {B}),
    (F.embedding, (A, B), {}, set()),
    (F.embedding_bag, (A, B), {"max_norm": 1.0}, {B}),
    (F.embedding_bag, (A, B), {}, set()),
    (F.batch_norm, (A, B, C), {"training": True}, {B, C}),
    (torch.batch_norm, (A, None, None, B, C, True, 0.1, 1e-5, False), {}, {B, C}),
    (F.instance_norm, (A, B, C), {}, {B, C}),
    (torch.ops.aten.native_batch_norm.default, (A, D, D, B, C, True, 0.1, 1e-5), {}, {B, C}),
    (torch.ops.aten.embedding_renorm_.default, (A, B, 0.1, 2.0), {}, {A}),
    (torch.add, (A, B), {"out": C}, {C}),
    (torch.add, (A, B), {}, set()),
    (operator.iadd, (A, B), {}, {A}),
    (operator.and_, (A, B), {}, set()),
    ("set_", (A, B), {}, {A}),
    ("resize_", (A, 3), {}, {A}),
    ("fill_", (A, 3.0), {}, {A}),
    ("clone", (A,), {}, set()),
    ("__iadd__", (A, B), {}, {A}),
    ("__add__", (A, B), {}, set()),
    ("view", (A, 3), {}, set()),
    (setattr, (A, "data", B), {}, {A}),
    (F.relu, (A, True), {}, {A}),
    (torch._foreach_lerp_, ([A, B], [C, D], 0.1), {}, {A, B}),
    (torch._foreach_add_, ([A], [B]), {"alpha": 0.1}, {A}),
    (torch._foreach_addcdiv_, ([A], [B], [C], 0.1), {}, {A}),
    (torch._foreach_copy_, ([A, B], [C, D]), {}, {A, B}),
    (torch._foreach_mul, ([A, B], [C, D]), {}, set()),
    ("sort", (A, -1), {}, set()),  # that of lists is in place
    (torch.sort, (A,), {}, set()),
    (torch.sort, (A,), {"out": (B, C)}, {B, C}),
    (torch.max, (A, B), {}, set()),
    ("min", (A, B), {}, set()),
    (torch.max, (A, 0), {"out": (B, C)}, {B, C}),
]


@pytest.mark.parametrize(
    "case", WRITES, ids=lambda c: f"{getattr(c[0], '__name__', c[0])}{c[1:3]}"
)
def test_written_by(case):
    target, args, kwargs, written = case
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in (A, B, C, D)}
    args, kwargs = fx.node.map_aggregate(
        (args, kwargs), lambda x: nodes.get(x, x) if isinstance(x, str) else x
    )
    make = graph.call_method if isinstance(target, str) else graph.call_function
    found = [n.name for n in written_by(make(target, args, kwargs))]
    assert len(found) == len(written) and set(found) == written


@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_whose_data_is_set_before_the_loss(dynamic):
    def loss(h, w, ht, wt):
        wt = wt * 1.0
        t = ht @ wt.mT
        wt.data = wt.data * 0.5
        return rows_of_kl(h @ w.mT, t) + rows_of_kl(h @ w.mT, ht @ wt.mT), wt

    shapes = ((24, 16), (64, 16), (24, 16), (64, 16))
    given = [torch.randn(s, requires_grad=i < 2) for i, s in enumerate(shapes)]
    compare(loss, given, dynamic=dynamic).check()


def _maps(x):
    return x.view(24, 2, 8).transpose(0, 1)


@pytest.mark.parametrize("way", ["bias", "mask"])
def test_an_input_is_written_between_equal_expressions(way):
    """The write is no part of the region: the input is one of its leaves."""

    def loss(h, ht, b):
        def scores(x):
            s = _maps(x) @ _maps(x).mT
            return s + b.exp() if way == "bias" else s.masked_fill(b > 0, -1e4)

        s = scores(h)
        b.neg_()
        return rows_of_kl(s, scores(ht))

    h, ht = (torch.randn(24, 16) for _ in range(2))
    b = torch.linspace(-1, 1, 24)
    compare(loss, [h.requires_grad_(), ht, b], verify="never").check()


def _written_again(mask, q, k, qt, kt):
    p = (qt @ kt.mT).masked_fill(~mask, -torch.inf).softmax(-1)
    q = (q @ k.mT).masked_fill(~mask, -torch.inf).softmax(-1)
    mask.logical_not_()  # before the sum that is replaced
    return (p * ((p + 1e-9).log() - (q + 1e-9).log())).sum(-1).mean() + mask.sum()


def _lower(like):
    mask = torch.ones_like(like, dtype=torch.bool)
    mask.tril_()
    return mask


def _by_index(like):
    mask = torch.ones_like(like, dtype=torch.bool)
    mask.index_fill_(1, torch.tensor([2, 4]), False)
    return mask


@pytest.mark.parametrize(("make", "is_read"), [(_lower, False), (_by_index, True)])
def test_a_mask_written_before_and_after_it_is_read(make, is_read):
    """The analysis alone sees it: large losses are not checked. No operator reads a known mask."""

    def loss(*x):
        return _written_again(make(x[0] @ x[1].mT), *x)

    inputs = [torch.randn(n, 4, requires_grad=i < 2) for i, n in enumerate((6, 9, 6, 9))]
    outcome = compare(loss, inputs, verify="never").check()
    assert outcome.num_fused == (not is_read), outcome.report
    reasons = ["mask is modified in place after"] if is_read else []
    assert [reason[:31] for reason in outcome.reasons] == reasons, outcome.report


def _in_no_grad(s):
    with torch.no_grad():
        s[:, 0] = 5.0


def _through_a_slice(s):
    with torch.no_grad():
        s[1:3].masked_fill_(torch.tensor([True, False, False, True, False]), -2.0)


def _through_a_detached_view(s):
    s[:, 1].detach().mul_(0.5)


def _through_data(s):
    s.data[:, 1] = 2.0


@pytest.mark.parametrize("target", ["scores", "buffer", "bias"])
@pytest.mark.parametrize(
    "write", [_in_no_grad, _through_a_slice, _through_a_detached_view, _through_data]
)
def test_a_part_is_written_without_a_record(write, target):
    """Autograd has the gradient of the program without the write: that of each score is q - p."""

    def loss(q, k, b, p):
        s, b = q @ k.mT, b * 2.0
        if target == "buffer":
            s = torch.zeros_like(s).copy_(s)
        write(b if target == "bias" else s)
        return F.kl_div((s + b).log_softmax(-1), p.softmax(-1), reduction="sum")

    shapes = ((4, 3), (5, 3), (4, 5), (4, 5))
    q, k, b, teacher = (torch.randn(*n, dtype=torch.float64) for n in shapes)
    s, added = q @ k.mT, b * 2.0
    write(added if target == "bias" else s)
    expected = (s + added).softmax(-1) - teacher.softmax(-1)
    inputs = [x.requires_grad_() for x in (q, k, b)]

    def with_products(*x):  # a teacher that is made of a product
        return loss(*x, teacher @ torch.eye(5, dtype=torch.float64))

    value = compile_rewritten(with_products, verify="never")(*inputs)
    found = torch.autograd.grad(value, inputs)
    for x, y in zip(found, (expected @ k, expected.mT @ q, 2.0 * expected), strict=True):
        torch.testing.assert_close(x, y.detach())


@pytest.mark.parametrize("written", ["labels", "bias"])
def test_what_sums_of_one_product_read_is_written_between_them(written):
    """One program has one place: it would read all before the write."""

    def loss(h, w, ht, wt, bias, labels):
        s, t = h @ w.mT, ht @ wt.mT
        mean, entropy = (s.softmax(-1) * t).sum(-1), (s.softmax(-1) * s.log_softmax(-1)).sum(-1)
        with torch.no_grad():
            if written == "labels":
                labels.clamp_(max=2)
                other = F.cross_entropy(t, labels, reduction="none")
            else:
                bias.mul_(2)
                other = (t + bias).logsumexp(-1)
        return mean, entropy, other

    shapes = ((6, 4), (11, 4), (6, 3), (11, 3))
    given = [torch.randn(s).requires_grad_() for s in shapes]
    given += [torch.linspace(-1, 1, 11), torch.full((6,), 10)]
    assert compare(loss, given, verify="never").check().num_fused


def _of_gates(z, gate):
    return (z.softmax(-1) * torch.tanh(z - gate)).sum(-1)


def a_projection_that_is_written(h, w, p):
    gate = h @ p
    gate.mul_(2)
    return _of_gates(h @ w.mT, gate)


def a_projection_that_is_written_through_a_view(h, w, p):
    gate = h @ p
    gate[:, 0].add_(1)
    return _of_gates(h @ w.mT, gate)


def a_projection_before_and_after_a_write(h, w, p):
    own, x = p.detach().clone(), h.detach()
    before = x @ own
    own.mul_(3)
    return _of_gates(h @ w.mT, before + x @ own)


def weights_of_heads_that_are_scaled(h, w, p):
    weight = h @ p
    weight *= 0.5
    scores = (h @ w.mT).relu() * weight
    return F.kl_div(scores.log_softmax(-1), (h.detach() @ w.detach().mT).softmax(-1))


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("fn", [
    a_projection_that_is_written, a_projection_that_is_written_through_a_view,
    a_projection_before_and_after_a_write, weights_of_heads_that_are_scaled,
])  # fmt: skip
def test_a_projection_holds_what_was_written_to_it(fn):
    """A row program reads the tensor of a projection: it is not what the product was."""
    given = [torch.randn(s).requires_grad_() for s in ((6, 4), (11, 4), (4, 1))]
    compare(fn, given, verify="never").check()


def numbers_that_are_scaled(rows, logs):
    weights = rows.cumsum(-1)
    weights.mul_(2)
    return (weights * logs.exp() * logs).sum()


def numbers_that_are_scaled_through_a_view(rows, logs):
    weights = rows.cumsum(-1)
    weights.view(-1).mul_(2)
    return (weights * logs.exp() * logs).sum()


def numbers_to_which_a_product_is_added(rows, logs):
    bounds = rows.cumsum(-1).addcmul_(logs.exp(), logs)
    return (logs.exp() * logs).where(bounds > -0.1, 0.0).sum()


def a_copy_to_which_a_product_is_added(rows, logs):
    bounds = rows.clone().addcmul_(logs.exp(), logs)
    return (logs.exp() * logs).where(bounds > -0.1, 0.0).sum()


def numbers_of_the_shape_of_a_product(rows, logs):
    bounds = torch.full_like(logs, 0.05) * 1.0
    bounds.addcmul_(logs.exp(), logs)
    return (logs.exp() * logs).where(bounds > -0.1, 0.0).sum()


@pytest.mark.parametrize("fn", [
    numbers_that_are_scaled, numbers_that_are_scaled_through_a_view,
    numbers_to_which_a_product_is_added, a_copy_to_which_a_product_is_added,
    numbers_of_the_shape_of_a_product,
])  # fmt: skip
def test_a_captured_tensor_holds_what_was_written_to_it(fn):
    """Its old numbers are nowhere: the operator would read the new ones, and write again."""
    given = [torch.randn(s).requires_grad_() for s in ((6, 4), (11, 4))]

    def loss(h, w, rows):
        return fn(rows, (h @ w.mT).log_softmax(-1))

    rows = torch.randn(6, 11)
    compare(loss, [*given, rows], verify="never").check()


def a_part_through_a_transposed_view(x):
    z = torch.full_like(x, 2.0)
    z.mT[:, :4] = x[:, :4]
    return z


def one_column_through_a_transposed_view(x):
    z = torch.full_like(x, 2.0)
    z.mT[:, 4:5] = x[:, 4:5]
    return z


def a_part_of_a_transposed_tensor(x):
    z = torch.empty_like(x)
    z[:3] = x[:3]
    z[3:] = x.mT[3:]
    return z.clamp(min=-1.0)


@pytest.mark.parametrize("fn", [
    a_part_through_a_transposed_view, one_column_through_a_transposed_view,
    a_part_of_a_transposed_tensor,
])  # fmt: skip
def test_a_part_of_a_square_is_written_across_it(fn):
    """The part runs along the axis that the tensor has in its other dimension."""
    given = [torch.randn(s).requires_grad_() for s in ((6, 4), (6, 4))]

    def loss(h, w, rows):
        return F.kl_div((h @ w.mT).log_softmax(-1), fn(rows).softmax(-1), reduction="sum")

    rows = torch.randn(6, 6)
    compare(loss, [*given, rows], verify="never").check()
