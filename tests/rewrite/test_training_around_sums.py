"""What a trainer does around a compiled loss: checkpoints, hooks, steps, batches of gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.compiling import compile_rewritten
from tests.support.losses import kd, rows_of_kl
from torch_streamkl import linear_kl, row_program
from torch_streamkl.fx_passes import backend

INNERS = ["eager", "aot_eager"]


def given(*needs):
    """Hidden states and a head of each side."""
    make = torch.Generator().manual_seed(0)
    shapes = ((7, 6), (11, 6), (7, 5), (11, 5))
    needs = (*needs, False, False, False)
    made = [torch.randn(s, generator=make, dtype=torch.float64) for s in shapes]
    return [x.requires_grad_(need) for x, need in zip(made, needs, strict=False)]


def divergence(h, w, th, tw):
    return kd(h @ w.T, th @ tw.T)


def entropy(h, w, th, tw):
    logs = (h @ w.T).log_softmax(-1)
    return -(logs.exp() * logs).sum(-1).mean()


def maps(h, w, th, tw):
    q, k, tq, tk = (x[None, None] for x in (h, w, th, tw))
    return kd(q @ k.mT, tq @ tk.mT)


def alike(run, loss, inner, dynamic=None):
    expected = run(loss)
    compiled = compile_rewritten(loss, inner=inner, dynamic=dynamic)
    with backend.collected() as report:
        torch.testing.assert_close(run(compiled), expected)
    assert report.num_fused
    assert loss is maps or "gradients in the forward" in report.details()


def within_a_checkpoint(f):
    """It counts what is saved, and the analysis and the check run the user's code."""
    tensors = given(True, True)
    total = checkpoint(f, *tensors, use_reentrant=False)
    return [total.detach(), *torch.autograd.grad(total, tensors[:2])]


def with_hooks_of_saved_tensors(f):
    """They see those of the program: not the fake ones of the analysis, which are no arrays."""
    tensors = given(True, True)
    pack, unpack = (lambda x: x.detach().numpy().copy()), torch.from_numpy
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        total = f(*tensors)
    return [total.detach(), *torch.autograd.grad(total, tensors[:2])]


def with_a_step_of_the_head_before_the_backward(f):
    """The head alone learns. Eager code has kept the hidden states, and not the head."""
    tensors = given(False, True)
    total, later = f(*tensors), f(*[x * 0.5 for x in tensors[:1]], *tensors[1:])
    (first,) = torch.autograd.grad(total, tensors[1])
    with torch.no_grad():
        tensors[1].sub_(first)
    return torch.autograd.grad(later, tensors[1])[0]


def with_batched_gradients(f):
    tensors = given(True, True)
    batch = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    return torch.autograd.grad(f(*tensors), tensors[:2], batch, is_grads_batched=True)


RUNS = [
    *((within_a_checkpoint, loss) for loss in (divergence, entropy, maps)),
    (with_hooks_of_saved_tensors, divergence),
    *((with_a_step_of_the_head_before_the_backward, loss) for loss in (divergence, entropy)),
    *((with_batched_gradients, loss) for loss in (divergence, entropy)),
]


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize(("run", "loss"), RUNS)
def test_alike(run, loss, inner):
    alike(run, loss, "eager" if run is with_hooks_of_saved_tensors else inner)


def both_directions(h, w, th, tw):
    """One row program: its operands are views of the hidden states and heads."""
    return kd(h @ w.T, th @ tw.T), kd(th @ tw.T, h @ w.T)


def rows(h, w, th, tw):
    return rows_of_kl(h @ w.T, th @ tw.T)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("loss", [both_directions, rows])
@pytest.mark.parametrize("written", [0, 1])
def test_a_step_between_forward_and_backward_raises(loss, inner, dynamic, written):
    """Inductor saves views as tensors of their own, which do not know of writes to the input."""
    compiled = compile_rewritten(loss, inner=inner, dynamic=dynamic, verify="never")
    for step in (loss, compiled):
        tensors = given(True, True)
        total = sum(x.sum() for x in step(*tensors))
        with torch.no_grad():
            tensors[written].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this torch ends the graph"
)
@pytest.mark.parametrize("loss", [divergence, maps])
@pytest.mark.parametrize("again", [False, True])
def test_the_step_asks_for_the_gradient_of_a_checkpoint(loss, again):
    """A gradient that has a gradient itself, such as a penalty's, is none of a fused loss."""

    def step(*tensors):
        h, *others = (x * 1 for x in tensors)
        total = checkpoint(loss, h, *others, use_reentrant=False)
        (gradient,) = torch.autograd.grad(total, h, retain_graph=True, create_graph=again)
        return total + gradient.square().sum()

    def run(f):
        total = f(*(tensors := given(True, True)))
        return [total.detach(), *torch.autograd.grad(total, tensors[:2])]

    expected = run(step)
    torch._dynamo.reset()
    options = {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0.0}
    compiled = torch.compile(step, backend="streamkl", options=options)
    with torch._dynamo.config.patch(trace_autograd_ops=True), backend.collected() as report:
        torch.testing.assert_close(run(compiled), expected)
    assert report.num_fused == (0 if again else 1)
    assert all(x.fused or "asks for gradients" in x.reason for x in report.sites)


OPERANDS = {
    "hidden states": lambda h, w: h @ w.T,
    "a view of them": lambda h, w: h.view(7, 2, 3).flatten(1) @ w.T,
    "twice them": lambda h, w: (h * 2.0) @ w.T,
    "a bias": lambda h, w: F.linear(h.detach(), w, h.sum(1)[:1] * torch.arange(11) / 9),
}


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", OPERANDS)
def test_an_operand_that_no_backward_reads_is_written_to(inner, dynamic, name):
    """An auxiliary loss with a frozen head, and the next layer adds to the states in place."""

    def run(f):
        leaf, *others = given(True)
        h = leaf * 1.0
        total = f(h, *others)
        h.add_(1.0)
        return torch.autograd.grad(total + h.sum(), leaf)[0]

    alike(run, lambda h, w, th, tw: kd(OPERANDS[name](h, w), th @ tw.T), inner, dynamic)


@pytest.mark.parametrize("which", [0, 1])
def test_a_shared_cross_entropy_gives_its_teacher_nothing(which):
    """Not zeros, for which the check of the site refused mutual learning and R-Drop."""
    labels = torch.arange(7)

    def loss(h, w, th, tw):
        scores = h @ w.T
        return kd(scores, th @ tw.T), F.cross_entropy(scores, labels)

    def run(f):
        tensors = given(True, True, True, True)
        total = f(*tensors)[which]
        return [total.detach(), *torch.autograd.grad(total, tensors, allow_unused=True)]

    expected = run(loss)
    with backend.collected() as report:
        found = run(compile_rewritten(loss))
    assert report.num_fused == 1, str(report)
    assert "cross-entropy at" not in report.details()
    assert (found[-1] is None) == (which == 1)
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y)


# ------------------------------------------------------------------------------------ direct calls
def element(e):
    logs = e.s.log_softmax("key")
    return -(logs.exp() * logs).sum("key")


DIRECT = [
    (divergence, lambda *x: linear_kl(*x, reduction="mean")),
    (entropy, lambda h, w, *_: row_program(element, dots={"s": (h, w)}, reduction="mean")),
]


@pytest.mark.parametrize(("naive", "direct"), DIRECT, ids=["linear_kl", "row_program"])
def test_a_direct_call_whose_head_takes_a_step(naive, direct):
    tensors = given(False, True)
    (expected,) = torch.autograd.grad(naive(*tensors), tensors[1])
    total = direct(*tensors)
    with torch.no_grad():
        tensors[1].zero_()
    torch.testing.assert_close(torch.autograd.grad(total, tensors[1])[0], expected)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize(("naive", "direct"), DIRECT, ids=["linear_kl", "row_program"])
def test_a_direct_call_under_compiled_autograd(naive, direct, inner):
    """It adds up what the sum and its refusal of second derivatives give an operand."""
    tensors = given(True, True)
    expected = torch.autograd.grad(naive(*tensors), tensors[:2])
    torch._dynamo.reset()
    total = direct(*tensors)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: total.backward(), backend=inner)()
    for x, y in zip(tensors, expected, strict=False):
        torch.testing.assert_close(x.grad, y)
