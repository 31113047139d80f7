"""linear_kl against its definition in float64: every option, both strategies, any chunking."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torch_streamkl import LinearKL, linear_kl
from torch_streamkl.divergences import row_state
from torch_streamkl.linear import chunks as linear_chunks
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.linear import rows as linear_rows
from torch_streamkl.linear.problem import (
    Head,
    LinearProblem,
    NeedsGrad,
    RowValues,
    RowWeights,
    workspace_bytes,
)
from torch_streamkl.nitrobrew import forward_kl, reverse_kl
from torch_streamkl.program.divergences import named
from torch_streamkl.runtime.workspace import MAX_LOW_PRECISION_SUMS, even_ranges, even_step

DIVERGENCES = ("forward_kl", "reverse_kl", "cross_entropy", "jeffreys", "js", "tv")


def heads(num_tokens=10, widths=(8, 12), vocab=(37, 37), dtype=torch.float64, seed=0, size=1.0):
    """student_hidden, student_weight, teacher_hidden and teacher_weight, all with gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (num_tokens, widths[0]),
        (vocab[0], widths[0]),
        (num_tokens, widths[1]),
        (vocab[1], widths[1]),
    )
    scales = (1.0, size * widths[0] ** -0.5, 1.0, size * widths[1] ** -0.5)
    return [
        (torch.randn(s, generator=generator, dtype=torch.float64) * scale)
        .to(dtype)
        .requires_grad_()
        for s, scale in zip(shapes, scales, strict=True)
    ]


def outcome(inputs, **options):
    """The loss (rows weighted unequally) and its gradients."""
    differentiable = [
        x for x in (*inputs, *options.values()) if isinstance(x, Tensor) and x.requires_grad
    ]
    value = linear_kl(*inputs, **options)
    weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view(value.shape)
    loss = (value * weights).sum()
    grads = torch.autograd.grad(loss, differentiable, allow_unused=True)
    return [value.detach(), *(torch.zeros(()) if g is None else g for g in grads)]


def assert_is_definition(inputs, rtol=1e-10, atol=1e-11, **options):
    reference = {k: v for k, v in options.items() if k not in ("strategy", "max_workspace_mib")}
    truth = outcome(inputs, **(reference | {"impl": "reference"}))
    for ours, expected in zip(outcome(inputs, **options), truth, strict=True):
        torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol)


def limit_workspace(patch: pytest.MonkeyPatch, num_rows: int) -> None:
    """Room for the logits of so many tokens."""

    def small(problem: object, _: object) -> int:
        return num_rows * sum(linear_chunks.row_bytes(problem))

    patch.setattr(linear_chunks, "workspace_bytes", small)


@pytest.fixture(params=["one chunk", "many chunks"])
def workspace(request, monkeypatch):
    """Room for everything, or for the logits of three tokens."""
    if request.param == "many chunks":
        limit_workspace(monkeypatch, num_rows=3)


@pytest.mark.parametrize("strategy", ["forward", "recompute"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_values_and_gradients(divergence, strategy, workspace):
    assert_is_definition(heads(), divergence=divergence, reduction="mean", strategy=strategy)
    assert_is_definition(heads(seed=1), divergence=divergence)


@pytest.mark.parametrize("strategy", ["forward", "recompute"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradients_of_the_student_alone(divergence, strategy, workspace):
    """A frozen teacher takes a shorter way through the backward."""
    inputs = heads()
    for x in inputs[2:]:
        x.requires_grad_(False)
    assert_is_definition(inputs, divergence=divergence, reduction="mean", strategy=strategy)


@pytest.mark.parametrize("strategy", ["forward", "recompute"])
def test_every_option_at_once(strategy, workspace):
    labels = torch.randint(0, 37, (11,), generator=torch.Generator().manual_seed(3))
    labels[[2, 7]] = -1
    assert_is_definition(
        heads(11, size=4.0),
        student_bias=torch.randn(37, dtype=torch.float64).requires_grad_(),
        teacher_bias=torch.randn(37, dtype=torch.float64).requires_grad_(),
        temperature=2.5,
        student_logit_scale=0.7,
        teacher_logit_scale=1.3,
        student_softcap=5.0,
        teacher_softcap=7.0,
        student_eps=1e-6,
        teacher_clamp=1e-5,
        divergence="jeffreys",
        labels=labels,
        ignore_index=-1,
        hard_weight=0.3,
        row_mask=torch.arange(11) != 4,
        row_weight=torch.rand(11, dtype=torch.float64).requires_grad_(),
        reduction="batchmean",
        strategy=strategy,
    )


@settings(max_examples=40)
@given(
    num_tokens=st.sampled_from([1, 2, 7, 33]),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    vocab=st.tuples(st.sampled_from([1, 5, 64, 129]), st.sampled_from([1, 5, 64, 129])),
    divergence=st.sampled_from(["js", "tv"]),  # finite where the vocabularies differ
    needed=st.lists(st.booleans(), min_size=4, max_size=4),
    temperature=st.sampled_from([1.0, 3.0]),
    has_labels=st.booleans(),
    strategy=st.sampled_from(["auto", "recompute"]),
    rows=st.sampled_from([1, 4, 100]),
)
def test_shapes(
    num_tokens, widths, vocab, divergence, needed, temperature, has_labels, strategy, rows
):
    inputs = heads(num_tokens, widths, vocab)
    for x, need in zip(inputs, needed, strict=True):
        x.requires_grad_(need or not any(needed))
    options = {"divergence": divergence, "temperature": temperature, "strategy": strategy}
    if has_labels:
        options["labels"] = torch.arange(num_tokens) % vocab[0]
    with pytest.MonkeyPatch.context() as patch:
        limit_workspace(patch, rows)
        assert_is_definition(inputs, reduction="sum", **options)


def test_leading_dimensions_are_tokens():
    flat = heads(12)
    shaped = [x.detach().view(3, 4, -1) if i % 2 == 0 else x for i, x in enumerate(flat)]
    torch.testing.assert_close(linear_kl(*shaped), linear_kl(*flat).view(3, 4))
    batch = linear_kl(*shaped, reduction="batchmean")
    torch.testing.assert_close(batch, linear_kl(*flat).sum() / 3)


def test_shifted_hidden_states_and_transposed_weights():
    hidden, weight, t_hidden, t_weight = heads(12)
    shifted = hidden.detach().view(2, 6, -1)[:, :-1].requires_grad_()
    columns = weight.detach().t().contiguous().t().requires_grad_()
    inputs = [shifted, columns, t_hidden.detach().view(2, 6, -1)[:, 1:], t_weight[: len(t_weight)]]
    for strategy in ("forward", "recompute"):
        assert_is_definition(inputs, reduction="mean", strategy=strategy)


def test_extra_words_are_impossible():
    student_has_more = heads(vocab=(50, 37))
    assert_is_definition(student_has_more, reduction="mean")
    assert_is_definition(student_has_more, divergence="cross_entropy")
    student_has_fewer = heads(vocab=(37, 50))
    assert linear_kl(*student_has_fewer).isposinf().all()
    assert_is_definition(student_has_fewer, divergence="reverse_kl", reduction="mean")
    assert not linear_kl(*student_has_fewer, reduction="sum").isnan()


def naive(xs, ws, xt, wt):
    student, teacher = F.linear(xs, ws).float(), F.linear(xt, wt).float()
    return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")


def relative_errors(loss, inputs, truth):
    grads = torch.autograd.grad(loss, inputs)
    got = [loss.detach(), *grads]
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, truth, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["forward", "recompute"])
@pytest.mark.parametrize("num_chunks", [1, 4, 16, MAX_LOW_PRECISION_SUMS, 68])
def test_error_is_that_of_naive_code(dtype, strategy, num_chunks, monkeypatch):
    """Twice the naive code's error in the same dtype, at every number of chunks."""
    num_tokens = 136
    inputs = heads(num_tokens, (24, 40), (301, 301), dtype, size=2.0)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    loss = linear_kl(*exact, reduction="mean", impl="reference")
    truth = [loss.detach(), *torch.autograd.grad(loss, exact)]
    allowed = relative_errors(naive(*inputs), inputs, truth)
    rows = num_tokens // num_chunks
    limit_workspace(monkeypatch, rows)
    monkeypatch.setattr(linear_chunks, "TOKEN_MULTIPLE", {"cpu": 1})
    monkeypatch.setattr(linear_chunks, "VOCAB_MULTIPLE", 1)
    ours = relative_errors(linear_kl(*inputs, reduction="mean", strategy=strategy), inputs, truth)
    value_eps = torch.finfo(torch.float32).eps * 8
    for error, budget, eps in zip(
        ours, allowed, (value_eps, *(torch.finfo(dtype).eps,) * 4), strict=True
    ):
        assert error <= 2 * budget + eps / 2


@pytest.mark.parametrize("size", [1e3, 1e4])
def test_extreme_logits_are_finite(size):
    """Probabilities underflow on both sides; the naive formula with P log P would be NaN."""
    inputs = heads(dtype=torch.float32, size=size)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    s, t = ((x @ w.t()).detach().abs().max() for x, w in (exact[:2], exact[2:]))
    scale = float(s + t)
    for divergence in DIVERGENCES:
        truth = outcome(exact, divergence=divergence, impl="reference")
        for ours, expected in zip(outcome(inputs, divergence=divergence), truth, strict=True):
            assert ours.isfinite().all()
            # logits are rounded once: an error of eps * size moves a probability by that much
            atol = 16 * torch.finfo(torch.float32).eps * scale * float(1 + expected.abs().max())
            torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=atol)


def test_inputs_keep_their_dtype():
    """float32 stays float32 unless autocast is on: an error of bfloat16 would be 1e-3."""
    inputs = heads(dtype=torch.float32)
    truth = linear_kl(*(x.double() for x in inputs), impl="reference")
    torch.testing.assert_close(linear_kl(*inputs).double(), truth, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        low = linear_kl(*inputs)
    assert (low - truth).abs().max() > 1e-4


def test_float16_gradients_wait_for_the_loss_scale():
    """A gradient of 1e-8 is below float16; with a loss scale of 65536 it is not lost."""
    inputs = heads(64, (8, 8), (600, 600), torch.float16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    scaled = linear_kl(*inputs, reduction="mean") * 65536.0 / 64
    truth = linear_kl(*exact, reduction="mean", impl="reference") * 65536.0 / 64
    ours, expected = (
        torch.autograd.grad(x, y[1])[0] for x, y in ((scaled, inputs), (truth, exact))
    )
    torch.testing.assert_close(
        ours.double(), expected, rtol=0.05, atol=float(expected.abs().max()) / 200
    )


def check_infinite_rows(divergence, impl, dtype):
    """Gradients are those of naive code, and 0 where a row's incoming gradient is."""
    lacks_teacher = divergence == "reverse_kl"
    inputs = heads(4, vocab=(10, 6) if lacks_teacher else (6, 10))
    mine = [x.detach().to(dtype).requires_grad_() for x in inputs]
    z = [h @ w.mT for h, w in (inputs[:2], inputs[2:])]
    log_s, log_t = (F.pad(x, (0, 10 - x.shape[1]), value=-math.inf).log_softmax(-1) for x in z)
    p, s = log_t.exp(), log_s.exp()
    forward, reverse = (
        (a * torch.where(a == 0, 0.0, b - c)).sum(-1)
        for a, b, c in ((p, log_t, log_s), (s, log_s, log_t))
    )
    naive = {"forward_kl": forward, "reverse_kl": reverse, "jeffreys": forward + reverse}
    expected = naive[divergence]
    value = linear_kl(*mine, divergence=divergence, impl=impl)
    assert (value == math.inf).all() and (expected == math.inf).all()
    weight = torch.arange(4.0)
    found = torch.autograd.grad(value, mine, weight.to(value.dtype))
    # h of the side that lacks entries by itself: naive code's where changes no finite derivative
    lacking, other = (2, 0) if lacks_teacher else (0, 2)
    d = {"forward_kl": s - p, "reverse_kl": p - s}.get(divergence)
    if d is None:
        d = s - p + s * (torch.where(s == 0, 0.0, log_s - log_t) - reverse[:, None])
    d = (weight.double()[:, None] * d)[:, :6].detach()
    hidden, weights = (inputs[lacking + i].detach() for i in (0, 1))
    for got, exact in ((found[lacking], d @ weights), (found[lacking + 1], d.mT @ hidden)):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)
    assert (found[other][0] == 0).all() and not found[other][1:].isfinite().any()
    assert not found[other + 1].isfinite().any()


@pytest.mark.parametrize("strategy", ["forward", "recompute"])
def test_ignored_rows_add_nothing_even_where_infinite(strategy):
    inputs = heads(6, vocab=(37, 37))
    with torch.no_grad():
        inputs[0][2] = 1e200  # the row overflows: its own value is not finite
    mask = torch.arange(6) != 2
    loss = linear_kl(*inputs, row_mask=mask, reduction="mean", strategy=strategy)
    grads = torch.autograd.grad(loss, inputs)
    kept = [x.detach()[mask] if i % 2 == 0 else x.detach() for i, x in enumerate(inputs)]
    torch.testing.assert_close(loss.detach(), linear_kl(*kept, reduction="mean"))
    assert all(g.isfinite().all() for g in grads[2:])
    assert (grads[0][2] == 0).all()


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jeffreys"])
def test_rows_that_one_side_s_vocabulary_makes_infinite(divergence, impl):
    check_infinite_rows(divergence, impl, torch.float64)


def test_all_rows_ignored_is_zero():
    inputs = heads(4)
    loss = linear_kl(*inputs, labels=torch.full((4,), -100), reduction="mean")
    assert loss.item() == 0.0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, inputs))


def test_label_that_is_no_entry_is_an_error():
    inputs = heads(4)
    value = linear_kl(*inputs, labels=torch.tensor([0, 36, 5, -100]))
    assert value.isfinite().all() and value[3] == 0
    with pytest.raises(IndexError, match=r"in \[0, 37\) or ignore_index=-100, got 37"):
        linear_kl(*inputs, labels=torch.tensor([0, 37, 5, -100]))


def test_opcheck():
    inputs = heads(6, dtype=torch.float32)
    labels = torch.arange(6)
    opcheck(linear_ops.linear_kl, (*inputs, None, None, labels))
    opcheck(linear_ops.linear_kl, tuple(inputs), {"temperature": 2.0, "max_workspace_mib": 1})
    opcheck(linear_ops.linear_kl_sum, (*inputs, None, None, labels, None, None, [True] * 4))
    frozen = (*inputs[:2], *(x.detach() for x in inputs[2:]))
    opcheck(linear_ops.linear_kl_sum, (*frozen, None, None, None, torch.rand(6), None, [True] * 2))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_compiles_without_graph_breaks(reduction, dynamic):
    inputs, labels = heads(dtype=torch.float32), torch.arange(10)

    def loss(*xs):
        return linear_kl(*xs, labels=labels, temperature=2.0, reduction=reduction).sum()

    expected = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    got = torch.autograd.grad(compiled(*inputs), inputs)
    torch.testing.assert_close(got, expected)


def test_gradients_are_the_same_bits_on_every_run(workspace):
    inputs = heads(64, dtype=torch.float32)
    runs = [outcome(inputs, reduction="mean") for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_backward_twice():
    """Stored gradients are multiplied in place only where nobody needs them again."""
    inputs = heads()
    loss = linear_kl(*inputs, reduction="mean")
    first = torch.autograd.grad(3.0 * loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs, retain_graph=True)
    third = torch.autograd.grad(loss, inputs)
    for a, b, c in zip(first, second, third, strict=True):
        torch.testing.assert_close(a, 3 * b)
        torch.testing.assert_close(b, c)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_is_refused():
    inputs = heads()
    for reduction in ("none", "mean"):
        loss = linear_kl(*inputs, reduction=reduction).sum()
        (grad,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
        with pytest.raises((NotImplementedError, RuntimeError)):
            torch.autograd.grad(grad.sum(), inputs[1])
        # of a square, what the backward multiplies by depends on the inputs, too
        (grad,) = torch.autograd.grad(loss**2, inputs[0], create_graph=True)
        with pytest.raises(NotImplementedError, match="impl='reference'"):
            torch.autograd.grad(grad.sum(), inputs[1])


def test_unwanted_gradient_is_an_error():
    inputs = heads()
    total = linear_ops.linear_kl_sum(*inputs, needs_grad=[True])[0]
    with pytest.raises(RuntimeError, match="needs_grad"):
        total.backward()


def test_vmap_over_hidden_states():
    _, ws, _, wt = heads()
    x, y = torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(3, 4, 12, dtype=torch.float64)
    mapped = torch.vmap(lambda a, b: linear_kl(a, ws, b, wt))(x, y)
    torch.testing.assert_close(mapped, linear_kl(x, ws, y, wt))
    with pytest.raises(NotImplementedError, match="student_weight"):
        torch.vmap(lambda w: linear_kl(x, w, y, wt))(torch.stack([ws, ws]))


def test_module_and_drop_in():
    inputs = heads()
    loss = LinearKL(temperature=2.0)(*inputs)
    torch.testing.assert_close(loss, linear_kl(*inputs, temperature=2.0, reduction="mean"))
    xs, ws, xt, wt = inputs
    xs, xt = xs.view(2, 5, -1), xt.view(2, 5, -1)
    torch.testing.assert_close(forward_kl(xs, xt, ws, wt, 2.0), loss)
    (grad,) = torch.autograd.grad(reverse_kl(xs, xt, ws, wt, chunk_V=16), ws)
    expected = linear_kl(xs, ws, xt, wt, divergence="reverse_kl", reduction="mean")
    torch.testing.assert_close(grad, torch.autograd.grad(expected, ws)[0])
    with pytest.raises(RuntimeError, match=r"not have been used|unused|require grad"):
        torch.autograd.grad(forward_kl(xs, xt, ws, wt), wt)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("loop", ["forward", "backward", "forward_with_gradients"])
def test_no_tensor_has_tokens_times_words(loop):
    num_tokens, vocab_size, dtype = 256, 4096, torch.float32
    x, w = torch.randn(num_tokens, 4, dtype=dtype), torch.randn(vocab_size, 4, dtype=dtype)
    problem = LinearProblem(Head(x, w), Head(x, w), named("forward_kl"))
    weights, needs_grad = RowWeights(torch.ones(num_tokens), None), NeedsGrad(True, True)
    with Largest() as largest:
        if loop == "forward":
            linear_chunks.forward(problem, 1)
        elif loop == "backward":
            values = RowValues.allocate(problem)
            values.statistics.zero_()
            linear_chunks.backward(problem, values, weights, needs_grad, 1)
        else:
            linear_chunks.forward_with_gradients(problem, weights, needs_grad, 1)
    assert largest.elements <= 2**20 // 4


def test_a_workspace_that_would_cost_precision_is_refused(monkeypatch):
    """More chunks than the error budget of 16 bits allows, and vocabulary entries cannot be cut
    any finer.
    """
    monkeypatch.setattr(linear_chunks, "workspace_bytes", lambda *_: 2**12)
    monkeypatch.setattr(linear_chunks, "TOKEN_MULTIPLE", {"cpu": 1})
    inputs = heads(400, vocab=(256, 256), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="max_workspace_mib must be at least 1 for 400 tokens"):
        linear_kl(*inputs, reduction="mean")


def test_a_workspace_without_room_for_a_token_is_refused():
    x, w = torch.randn(2, 2), torch.zeros(300_000, 2)
    with pytest.raises(ValueError, match="max_workspace_mib must hold the logits of a token"):
        linear_kl(x, w, x, w, max_workspace_mib=1)


@given(st.integers(1, 400), st.integers(1, 100), st.sampled_from([1, 16, 128]))
def test_ranges_cover_everything_within_the_limit(size, limit, multiple):
    step = even_step(size, limit, multiple)
    parts = list(even_ranges(size, step, multiple))
    assert step <= limit
    assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])]
    assert parts[-1].stop == size
    assert all(0 < p.stop - p.start <= step for p in parts)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "cross_entropy", "jeffreys"])
def test_shards_of_the_vocabulary_merge(divergence):
    xs, ws, xt, wt = (x.detach() for x in heads(vocab=(40, 40)))
    labels = torch.arange(10) * 4
    functional = named(divergence)
    whole = LinearProblem(Head(xs, ws), Head(xt, wt), functional, temperature=2.0, labels=labels)
    shards = [whole.of_vocab(slice(0, 13)), whole.of_vocab(slice(13, 40))]
    (a, hard_a), (b, hard_b) = (
        linear_rows.partial_state(
            shard, *(x.hidden @ x.weight.T for x in shard.heads), functional.bilinear
        )
        for shard in shards
    )
    sums = row_state.finish(row_state.merge(a, b, functional.bilinear), functional.bilinear)
    expected = linear_chunks.forward(whole, 0)
    torch.testing.assert_close(sums.value, expected.value)
    lses = (sums.student_lse, sums.teacher_lse, sums.student_delta, sums.teacher_delta)
    hard_lse = torch.logaddexp(hard_a, hard_b)
    statistics = torch.stack([*lses, hard_lse, *expected.statistics[5:]])
    torch.testing.assert_close(statistics, expected.statistics)
    rows = RowValues(sums.value, expected.hard, statistics)
    weights = RowWeights(torch.rand(10, dtype=torch.float64), torch.rand(10, dtype=torch.float64))
    needs_grad = NeedsGrad(True, True, True, True)
    parts = [linear_chunks.backward(shard, rows, weights, needs_grad, 0) for shard in shards]
    truth = linear_chunks.backward(whole, expected, weights, needs_grad, 0)
    for i in (0, 2):  # hidden states' gradients add up, weights' are the shards'
        torch.testing.assert_close(parts[0][i] + parts[1][i], truth[i])
        torch.testing.assert_close(torch.cat([parts[0][i + 1], parts[1][i + 1]]), truth[i + 1])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"divergence": "kl"}, ValueError, "divergence must be one of"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive and finite"),
        ({"reduction": "avg"}, ValueError, "reduction must be one of"),
        ({"strategy": "both"}, ValueError, "strategy must be one of"),
        ({"strategy": "forward"}, ValueError, "needs a reduced result"),
        ({"impl": "triton"}, NotImplementedError, "needs a GPU"),
        ({"max_workspace_mib": 0}, ValueError, "max_workspace_mib must be at least 1"),
        ({"student_logit_scale": math.inf}, ValueError, "student_logit_scale must be finite"),
        ({"student_softcap": -1.0}, ValueError, "student_softcap must be positive"),
        ({"labels": torch.zeros(9, dtype=torch.int64)}, ValueError, "labels must have the shape"),
        ({"labels": torch.zeros(10)}, TypeError, "labels must be int64 or int32"),
        ({"row_mask": torch.ones(10)}, TypeError, "row_mask must be boolean"),
        ({"row_weight": torch.ones(3)}, ValueError, "row_weight must broadcast"),
        ({"student_bias": torch.ones(3)}, ValueError, "student_bias must have shape"),
    ],
)
def test_errors_state_the_rule(change, error, message):
    with pytest.raises(error, match=message):
        linear_kl(*heads(dtype=torch.float32), **change)


def test_errors_of_shapes_and_dtypes():
    xs, ws, xt, wt = heads(dtype=torch.float32)
    with pytest.raises(ValueError, match="must share hidden_size, got 8 and 12"):
        linear_kl(xs, wt, xt, wt)
    with pytest.raises(ValueError, match="must share leading dimensions"):
        linear_kl(xs[:4], ws, xt, wt)
    with pytest.raises(ValueError, match="must share dtype"):
        linear_kl(xs, ws.double(), xt, wt)
    with pytest.raises(ValueError, match="contiguous rows or columns"):
        linear_kl(xs[:, ::2], ws[:, ::2], xt, wt)
    with pytest.raises(ValueError, match="no empty vocabulary"):
        linear_kl(xs, ws[:0], xt, wt)
    with pytest.raises(TypeError, match="must be a tensor, got None"):
        linear_kl(None, ws, xt, wt)


# MiB of a student's and a teacher's weights, and what was asked for
@pytest.mark.parametrize(
    ("weights", "asked", "expected"), [(90, 0, 40), (600, 0, 200), (600, 64, 64)]
)
def test_workspace_on_a_cpu(weights: int, asked: int, expected: int) -> None:
    head = Head(torch.empty(4, 512), torch.empty(1, 512).expand(weights * 2**20 // 4096, -1))
    problem = LinearProblem(head, head, named("forward_kl"))
    assert workspace_bytes(problem, asked) == expected * 2**20


@pytest.mark.parametrize("name", ["beta", "temperature", "teacher_softcap", "student_logit_scale"])
def test_numbers_that_are_tensors(name):
    tensors = torch.randn(4, 5, 8)
    with pytest.raises(TypeError, match=f"{name} must be a number, got a tensor"):
        linear_kl(*tensors, **{name: torch.tensor(0.5, requires_grad=True)})
