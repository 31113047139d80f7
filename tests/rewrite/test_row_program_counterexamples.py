"""What a reader found in the recogniser of row programs: each program stands for its class."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.covering import every
from tests.support.misleading.registry import student
from tests.support.misleading_programs import difference, run
from torch_streamkl.fx_passes import backend

INFINITY = math.inf
ROWS, KEYS, DIM = 5, 7, 4
OPTIONS = {"streamkl.verify": "never", "streamkl.inner": "aot_eager", "streamkl.min_mib": 0.0}


def tensors(trained: str = "qkw", size: float = 1.0) -> list[Tensor]:
    """Two pairs of operands, weights of keys, and a mask with a row without keys, in float64."""
    make = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    shapes = [(2, 3, n, DIM) for n in (ROWS, KEYS, ROWS, KEYS)]
    found = [*(normal(*shape) for shape in shapes), normal(KEYS)]
    found[0] *= size
    for x, name in zip(found, "qkrsw", strict=True):
        x.requires_grad_(name in trained)
    keep = torch.rand(ROWS, KEYS, generator=make) > 0.4
    keep[1] = False
    return [*found, keep]


def judge(program: Callable[..., Any], inputs: list[Tensor], sites: int | None = None) -> None:
    """The compiled program is eager's, and so many of its sums are fused."""
    torch._dynamo.reset()
    eager = run(program, inputs)
    with backend.collected() as report:
        compiled = torch.compile(program, backend="streamkl", options=OPTIONS)
        found = difference(eager, run(compiled, inputs))
    assert not found, f"{found}\n{report}"
    assert not report.failures
    assert sites is None or report.num_fused == sites, str(report)


# ------------------------------------------------------ integers
INTEGERS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int | None]] = {
    "scores as long": (lambda s, t: (s * 5).long(), 0),
    "scores as int, and back": (lambda s, t: (s * 5).int().to(s.dtype), 0),
    "a sum as long": (lambda s, t: s.sum(-1, keepdim=True, dtype=torch.int64), 0),
    "a count as a byte": (lambda s, t: (s > t).sum(-1, keepdim=True, dtype=torch.uint8), None),
    "a count in half": (lambda s, t: (s > t).sum(-1, keepdim=True).half(), None),
    "a count": (lambda s, t: (s > t).sum(-1, keepdim=True), 1),
    "a quotient in float32": (lambda s, t: 1 / (s > t).sum(-1, keepdim=True).clamp(min=1), None),
    "a fraction in float32": (lambda s, t: (s > t) / 3, 0),
    "a quotient": (lambda s, t: s / (s > t).sum(-1, keepdim=True).clamp(min=1), 1),
}


@pytest.mark.parametrize("name", every(2, INTEGERS))
def test_nothing_is_an_integer_but_counts(name: str) -> None:
    made, sites = INTEGERS[name]

    def step(q, k, r, s, w, keep):
        x = student(q, k)
        return (w * x.softmax(-1) * made(x, student(r, s))).sum(-1)

    judge(step, tensors("w"), sites)


def test_counts_are_exact_where_float32_is_not() -> None:
    def step(h, w):
        s = (h @ w.T).softmax(-1)
        return (s > -1.0).sum()

    h, w = torch.randn(4099, 2), torch.randn(4099, 2)
    judge(step, [h, w])


# ------------------------------------------------------ numbers of something else than 0 and 1
NEGATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "of scores": torch.logical_not,
    "of a condition": lambda s: torch.logical_not(s > 0),
    "of bits": lambda s: ~(s > 0),
    "of itself": lambda s: torch.logical_not(torch.logical_not(s)),
}


@pytest.mark.parametrize("name", NEGATIONS)
def test_negations(name: str) -> None:
    def step(q, k, r, s, w, keep):
        x = student(q, k)
        return (w * x.softmax(-1) * NEGATIONS[name](x.relu())).sum(-1)

    judge(step, tensors(), 1)


# ------------------------------------------------------ results
def rows(q: Tensor, k: Tensor, r: Tensor, s: Tensor, w: Tensor) -> Tensor:
    return (w * student(q, k).softmax(-1) * student(r, s)).sum(-1)


def divergence(q: Tensor, k: Tensor, r: Tensor, s: Tensor, w: Tensor) -> Tensor:
    log_p, p = student(q, k).log_softmax(-1), student(r, s).softmax(-1)
    return F.kl_div(log_p, p, reduction="none").sum(-1)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "steps of a view": lambda x: x.view(-1)[::2].zero_(),
    "an entry of a transpose": lambda x: x.transpose(0, 1)[0].fill_(2.0),
    "a view of a view": lambda x: x.flatten()[1:].view(-1).mul_(3.0),
    "all": lambda x: x.mul_(2.0),
}


@pytest.mark.parametrize("made", [rows, divergence])
@pytest.mark.parametrize("name", WRITES)
def test_a_result_that_is_written_through_views(name: str, made: Any) -> None:
    def step(q, k, r, s, w, keep):
        x = made(q, k, r, s, w)
        WRITES[name](x)
        return x, x.sum()

    judge(step, tensors("qk"), 1)


def test_a_copy_of_scores_that_is_written_is_gone() -> None:
    def step(q, k, r, s, w, keep):
        x = student(q, k).detach().clone()
        x[0] = 0.0
        return rows(q, k, r, s, w)

    judge(step, tensors(), 1)


RETURNED: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "a view": lambda x: x.transpose(0, 1),
    "without a dimension": lambda x: x.unsqueeze(-1).squeeze(-1),
}


@pytest.mark.parametrize("made", [rows, divergence])
@pytest.mark.parametrize("name", RETURNED)
def test_a_result_that_the_caller_writes_to(name: str, made: Any) -> None:
    """The operator keeps its results for the backward; eager's sum does not."""

    def step(q, k, r, s, w, keep):
        return RETURNED[name](made(q, k, r, s, w))

    def then_written(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *inputs: compiled(*inputs).mul_(2.0)

    torch._dynamo.reset()
    inputs = tensors("qk")
    compiled = torch.compile(step, backend="streamkl", options=OPTIONS)
    assert not difference(run(then_written(step), inputs), run(then_written(compiled), inputs))


def test_two_results_that_are_equal_are_two_tensors() -> None:
    def step(q, k, r, s, w, keep):
        return rows(q, k, r, s, w), rows(q, k, r, s, w)

    inputs = tensors("qk")
    judge(step, inputs)
    torch._dynamo.reset()
    first, second = torch.compile(step, backend="streamkl", options=OPTIONS)(*inputs)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


# ------------------------------------------------------ a row without keys
OF_LSE: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "reciprocal": lambda x: 1 / x,
    "clamp": lambda x: x.clamp(min=-3.0),
    "comparison": lambda x: torch.where(x > -1e30, x, 3.0),
    "equality": lambda x: torch.where(x == -INFINITY, 5.0, x),
    "maximum": lambda x: torch.maximum(x, torch.zeros(())),
}


@pytest.mark.parametrize("name", every(2, OF_LSE))
def test_the_log_sum_exp_of_a_row_without_keys(name: str) -> None:
    """It is minus infinity, also where elements of unmasked scores meet it."""

    def step(q, k, r, s, w, keep):
        x = student(q, k)
        lse = x.masked_fill(~keep, -INFINITY).logsumexp(-1, keepdim=True)
        return (w * x.tanh() * student(r, s).softmax(-1) * OF_LSE[name](lse)).sum(-1)

    judge(step, tensors(), 1)


COMPARED: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "less": (lambda p: p < 0.1, 0),
    "at most": (lambda p: p <= 0.5, 0),
    "at least 0": (lambda p: p >= 0, 0),
    "equal": (lambda p: p == 0, 0),
    "different": (lambda p: p != 0, 0),
    "NaN": (lambda p: p != p, 0),
    "no NaN": (lambda p: p == p, 0),
    "cast": (lambda p: p.bool(), 0),
    "negated": (lambda p: torch.logical_not(p), 0),
    "a product": (lambda p: p * 2 > 0.1, 0),
    "more": (lambda p: p > 0, 1),
    "not more": (lambda p: ~(p > 0.1), 1),
    "the logarithm": (lambda p: p.log() > -50.0, 1),
}


@pytest.mark.parametrize("name", every(3, COMPARED))
def test_comparisons_in_rows_without_keys(name: str) -> None:
    """Eager compares NaN there; a comparison that 0 passes as NaN does is a row program."""
    compare, sites = COMPARED[name]

    def step(q, k, r, s, w, keep):
        p = student(q, k).masked_fill(~keep, -INFINITY).softmax(-1)
        return (torch.where(compare(p), student(r, s).softmax(-1).square(), 0.0) * w).sum(-1)

    judge(step, tensors("rsw"), sites)


# ------------------------------------------------------ probabilities that underflow
OF_LOGARITHMS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "a bound below": (lambda x: x.clamp(min=-1000.0), 0),
    "a maximum": (lambda x: torch.maximum(x, torch.full((), -3000.0)), 0),
    "a scaled bound": (lambda x: (10 * x).clamp(min=-100.0), 0),
    "a comparison": (lambda x: torch.where(x < -1000.0, 0.0, x), 0),
    "an infinity": (lambda x: torch.where(x == -INFINITY, 0.0, x), 0),
    "an inverse": (lambda x: 1 / (1 - x), 0),
    "a negative power": (lambda x: (1 - x) ** -2, 0),
    "a small power": (lambda x: (0.01 * x).exp(), 0),
    "a bound that cuts them": (lambda x: x.clamp(min=-100.0), 1),
    "a comparison that cuts them": (lambda x: torch.where(x < -20.0, 0.0, x), 1),
    "a ratio": (lambda x: (x - x.detach().clamp(min=-50.0)).exp(), 1),
}


@pytest.mark.parametrize("name", every(2, OF_LOGARITHMS))
def test_readers_of_logarithms_that_underflow(name: str) -> None:
    function, sites = OF_LOGARITHMS[name]

    def step(q, k, r, s, w, keep):
        log_p = student(q, k).softmax(-1).log()
        return (w * student(r, s).softmax(-1) * function(log_p)).sum(-1)

    torch._dynamo.reset()
    inputs = tensors("w", size=600.0)
    with backend.collected() as report:
        compiled = torch.compile(step, backend="streamkl", options=OPTIONS)
        assert not difference(run(step, inputs), run(compiled, inputs)), str(report)
    assert report.num_fused == sites, str(report)


# ------------------------------------------------------ sums that only arithmetic follows
def test_a_sum_that_is_returned_behind_arithmetic() -> None:
    def step(q, k, r, s, w, keep):
        return 0.5 * rows(q, k, r, s, w) + 1.0

    judge(step, tensors(), 1)


# ------------------------------------------------------ sizes
@pytest.mark.parametrize("masked", [False, True])
def test_products_of_no_width(masked: bool) -> None:
    def step(q, k, r, s, w, keep):
        x = student(q[..., :0], k[..., :0])
        x = x.masked_fill(~keep, -1.0) if masked else x
        return (w * x.softmax(-1) * student(r, s)).sum(-1)

    judge(step, tensors())


# ------------------------------------------------------ gradients of zeros
@pytest.mark.parametrize("beta", [0, 0.0, -1.0])
def test_a_bias_that_is_added_no_times(beta: float) -> None:
    """Eager's gradient of the bias is zeros, not None."""

    def step(q, k, r, s, w, keep):
        x = torch.baddbmm(w, q[0], k[0].mT, beta=beta, alpha=0.5)
        return (x.softmax(-1) - student(r[0], s[0]).softmax(-1)).square().sum(-1)

    judge(step, tensors())

    def distil(q, k, r, s, w, keep):
        x = torch.baddbmm(w, q[0], k[0].mT, beta=beta, alpha=0.5)
        return F.kl_div(x.log_softmax(-1), student(r[0], s[0]).softmax(-1), reduction="sum")

    judge(distil, tensors())


@pytest.mark.parametrize("name", ["exp", "sigmoid", "comparison"])
def test_the_maximum_of_a_row_without_keys(name: str) -> None:
    def step(q, k, r, s, w, keep):
        x = student(q, k)
        peak = x.masked_fill(~keep, -INFINITY).amax(-1, keepdim=True).detach()
        return (w * x.softmax(-1) * student(r, s).softmax(-1) * OF_LSE[name](peak)).sum(-1)

    judge(step, tensors(), 0)


@pytest.mark.parametrize("rows", [1, 2])
def test_scatter_at_ids_of_some_rows(rows: int) -> None:
    """The ids of scatter are not broadcast: those of one row are of the first row alone."""

    def step(q, k, r, s, w, keep):
        top = (keep[:rows] + w.detach()).softmax(-1).topk(3, -1)
        target = torch.zeros(ROWS, KEYS, dtype=w.dtype).scatter(-1, top.indices, top.values)
        x = student(q[0, 0], k[0, 0])
        return (x.softmax(-1) * (target + 1.0)).sum(-1) - (target * x.log_softmax(-1)).sum(-1)

    judge(step, tensors("qk"))
    judge(lambda *x: step(*x).sum(), tensors("qk"))
