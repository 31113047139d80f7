"""linear_kl against its definition in float64: every option, both strategies, any chunking."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tests.support.allocations import Allocations
from torch_streamkl import LinearKL, linear_kl
from torch_streamkl.linear import chunks as linear_chunks
from torch_streamkl.linear import ops as linear_ops
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
    patch.setattr(linear_chunks, "workspace_for_sums", lambda _, workspace, *__: workspace)


strategies = pytest.mark.parametrize("strategy", ["forward", "recompute"])


@pytest.fixture(params=["one chunk", "many chunks"])
def workspace(request, monkeypatch):
    """Room for everything, or for the logits of three tokens."""
    if request.param == "many chunks":
        limit_workspace(monkeypatch, num_rows=3)


def _every_option():
    labels = torch.randint(0, 37, (10,), generator=torch.Generator().manual_seed(3))
    labels[[2, 7]] = -1
    return {
        "student_bias": torch.randn(37, dtype=torch.float64).requires_grad_(),
        "teacher_bias": torch.randn(37, dtype=torch.float64).requires_grad_(),
        "temperature": 2.5,
        "student_logit_scale": 0.7,
        "teacher_logit_scale": 1.3,
        "student_softcap": 5.0,
        "teacher_softcap": 7.0,
        "student_eps": 1e-6,
        "teacher_clamp": 1e-5,
        "divergence": "jeffreys",
        "labels": labels,
        "ignore_index": -1,
        "hard_weight": 0.3,
        "row_mask": torch.arange(10) != 4,
        "row_weight": torch.rand(10, dtype=torch.float64).requires_grad_(),
        "reduction": "batchmean",
    }


CASES = {
    **{name: ((37, 37), {"divergence": name}) for name in DIVERGENCES},
    "every option": ((37, 37), _every_option()),
    "more student entries": ((50, 37), {}),
    "more student entries, cross_entropy": ((50, 37), {"divergence": "cross_entropy"}),
    "fewer student entries": ((37, 50), {"divergence": "reverse_kl"}),
}


@strategies
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, strategy, workspace):
    """With a teacher that learns and a frozen one, which takes a shorter way; and of rows."""
    vocab, options = CASES[name]
    for frozen in (False, True):
        inputs = heads(vocab=vocab)
        for x in inputs[2:]:
            x.requires_grad_(not frozen)
        how = {"reduction": "mean"} | options | {"strategy": strategy}
        assert_is_definition(inputs, **how)
        assert_is_definition(inputs, **how | {"strategy": "auto", "reduction": "none"})


def test_entries_that_the_student_lacks_are_impossible():
    inputs = heads(vocab=(37, 50))
    assert linear_kl(*inputs).isposinf().all()
    assert not linear_kl(*inputs, reduction="sum").isnan()


def test_leading_dimensions_are_tokens():
    """Shifted hidden states, and transposed weights."""
    hidden, weight, t_hidden, t_weight = (x.detach() for x in heads(12))
    shifted, t_shifted = hidden.view(2, 6, -1)[:, :-1], t_hidden.view(2, 6, -1)[:, 1:]
    columns = weight.t().contiguous().t()
    value = linear_kl(shifted, columns, t_shifted, t_weight)
    flat = linear_kl(shifted.reshape(10, -1), weight, t_shifted.reshape(10, -1), t_weight)
    torch.testing.assert_close(value, flat.view(2, 5))
    batch = linear_kl(shifted, columns, t_shifted, t_weight, reduction="batchmean")
    torch.testing.assert_close(batch, flat.sum() / 2)


def naive(xs, ws, xt, wt):
    student, teacher = F.linear(xs, ws).float(), F.linear(xt, wt).float()
    return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")


def relative_errors(loss, inputs, truth):
    grads = torch.autograd.grad(loss, inputs)
    got = [loss.detach(), *grads]
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, truth, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@strategies
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
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_extreme_logits_are_finite(divergence, size):
    """Probabilities underflow on both sides; the naive formula with P log P would be NaN."""
    inputs = heads(dtype=torch.float32, size=size)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    scale = sum(float((x @ w.t()).detach().abs().max()) for x, w in (exact[:2], exact[2:]))
    truth = outcome(exact, divergence=divergence, impl="reference")
    for ours, expected in zip(outcome(inputs, divergence=divergence), truth, strict=True):
        assert ours.isfinite().all()
        # logits are rounded once: an error of eps * size moves a probability by that much
        atol = 16 * torch.finfo(torch.float32).eps * scale * float(1 + expected.abs().max())
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("divergence", ["forward_kl", "js", "tv"])
@strategies
def test_rows_that_are_nearly_one_hot(divergence, strategy):
    """One row's logits are 30 times larger: rounding of its log-sum-exp is no gradient."""
    inputs = heads(16, (32, 24), (200, 200), torch.float32)
    with torch.no_grad():
        for hidden in inputs[::2]:
            hidden[3] *= 30.0
    options = {"divergence": divergence, "reduction": "sum"}
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = outcome(exact, **options, impl="reference")[1:]
    naive_grads = outcome(inputs, **options, impl="reference")[1:]
    partners = (inputs[1], inputs[0], inputs[3], inputs[2])
    found = outcome(inputs, **options, strategy=strategy)[1:]
    for got, same, want, other in zip(found, naive_grads, truth, partners, strict=True):
        rounding = torch.finfo(torch.float32).eps * float(other.detach().abs().max()) / 2
        assert (got - want).abs().max() <= 2 * (same - want).abs().max() + rounding


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("divergence", ["forward_kl", "cross_entropy", "jeffreys", "js", "tv"])
def test_entries_whose_probability_underflows(divergence, impl):
    """Entries that the student lacks, at -200: as if they were at -inf, where float32 has 0."""
    inputs = heads(5, (8, 12), (10, 30), torch.float32)
    results = []
    for level in (-200.0, -math.inf):
        bias = torch.zeros(30)
        bias[10:] = level
        results.append(outcome(inputs, teacher_bias=bias, divergence=divergence, impl=impl))
    for got, want in zip(*results, strict=True):
        assert want.isfinite().all()
        torch.testing.assert_close(got, want)


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


@strategies
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


def test_weights_of_zero_learn():
    """The gradient of a weight is its row's loss wherever gradients are computed, also at 0."""
    inputs = heads(5, (8, 12), (40, 40), torch.float32)
    rows = linear_kl(*inputs).detach()
    frozen = [x.detach() for x in inputs]
    for call, options in (
        (inputs, {"strategy": "forward"}),
        (inputs, {"strategy": "recompute"}),
        (inputs, {"impl": "reference"}),
        (frozen, {}),
        ([x.half() for x in frozen], {}),
    ):
        weight = torch.tensor([0.0, 1.0, 0.0, 0.5, 0.0], requires_grad=True)
        total = linear_kl(*call, row_weight=weight, reduction="sum", **options)
        (grad,) = torch.autograd.grad(total, weight)
        torch.testing.assert_close(grad, rows, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_no_tokens(reduction, impl):
    """An empty result, a sum of 0 with gradients 0, and torch's mean of nothing."""
    inputs = heads(0, (8, 12), (40, 40), torch.float32)
    labels = torch.zeros(0, dtype=torch.int64)
    for options in ({}, {"labels": labels}, {"row_mask": labels > 0}):
        value = linear_kl(*inputs, reduction=reduction, impl=impl, **options)
        if reduction == "none":
            assert value.shape == (0,)
            continue
        assert value.isnan() if "mean" in reduction else value == 0.0
        total = linear_kl(*inputs, reduction="sum", impl=impl, **options)
        assert all(not g.any() for g in torch.autograd.grad(total, inputs))


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


@pytest.mark.parametrize("loop", ["forward", "backward", "forward_with_gradients"])
def test_no_tensor_has_tokens_times_entries(loop):
    num_tokens, vocab_size = 256, 4096
    x, w = torch.randn(num_tokens, 4), torch.randn(vocab_size, 4)
    problem = LinearProblem(Head(x, w), Head(x, w), named("forward_kl"))
    weights, needs_grad = RowWeights(torch.ones(num_tokens), None), NeedsGrad(True, True)
    with Allocations(2**20 // 4 + 1) as large:
        if loop == "forward":
            linear_chunks.forward(problem, 1)
        elif loop == "backward":
            values = RowValues.allocate(problem)
            values.statistics.zero_()
            linear_chunks.backward(problem, values, weights, needs_grad, 1)
        else:
            linear_chunks.forward_with_gradients(problem, weights, needs_grad, 1)
    assert not large.shapes


def test_a_workspace_that_would_cost_precision_is_refused(monkeypatch):
    """More chunks than the error budget of 16 bits allows, and vocabulary entries cannot be cut
    any finer.
    """
    monkeypatch.setattr(linear_chunks, "workspace_bytes", lambda *_: 2**12)
    monkeypatch.setattr(linear_chunks, "workspace_for_sums", lambda *_: 2**12)
    monkeypatch.setattr(linear_chunks, "TOKEN_MULTIPLE", {"cpu": 1})
    inputs = heads(400, vocab=(256, 256), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="max_workspace_mib must be at least 1 for 400 tokens"):
        linear_kl(*inputs, reduction="mean")


@given(st.integers(1, 400), st.integers(1, 100), st.sampled_from([1, 16, 128]))
def test_ranges_cover_everything_within_the_limit(size, limit, multiple):
    step = even_step(size, limit, multiple)
    parts = list(even_ranges(size, step, multiple))
    assert step <= limit
    assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])]
    assert parts[-1].stop == size
    assert all(0 < p.stop - p.start <= step for p in parts)


# MiB of a student's and a teacher's weights, and what was asked for
@pytest.mark.parametrize(
    ("weights", "asked", "expected"), [(90, 0, 40), (600, 0, 200), (600, 64, 64)]
)
def test_workspace_on_a_cpu(weights: int, asked: int, expected: int) -> None:
    head = Head(torch.empty(4, 512), torch.empty(1, 512).expand(weights * 2**20 // 4096, -1))
    problem = LinearProblem(head, head, named("forward_kl"))
    assert workspace_bytes(problem, asked) == expected * 2**20


# widths of a student and a teacher in bfloat16, and the MiB asked for: tokens of a chunk, and of
# the teacher's logits at once
@pytest.mark.parametrize(
    ("widths", "num_tokens", "asked", "expected"),
    [
        ((1024, 4096), 100, 0, (100, 100)),
        ((1024, 4096), 8192, 0, (1024, 512)),  # chunks of 832 take 1.2 of the time
        ((3584, 5120), 8192, 0, (1024, 512)),
        ((3584, 5120), 8192, 768, (2048, 512)),
        ((3584, 5120), 32768, 0, (1024, 512)),
        ((3584, 5120), 65536, 0, (2048, 512)),  # else the backward would make all logits again
        ((3584, 5120), 65536, 512, (1024, 512)),
        ((3584, 5120), 131072, 0, (4096, 1024)),
    ],
)
def test_chunks_on_a_gpu(
    widths: tuple[int, int], num_tokens: int, asked: int, expected: tuple[int, int]
) -> None:
    with FakeTensorMode():
        heads = [
            Head(
                *(
                    torch.empty(n, width, dtype=torch.bfloat16, device="cuda")
                    for n in (num_tokens, 151936)
                )
            )
            for width in widths
        ]
        problem = LinearProblem(*heads, named("forward_kl"))
        needs_grad = NeedsGrad(student_hidden=True, student_weight=True)
        chunks = linear_chunks.gradient_chunks(problem, needs_grad, asked)
    assert (chunks.tokens, chunks.teacher_tokens) == expected
