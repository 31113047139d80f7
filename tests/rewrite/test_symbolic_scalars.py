"""Python numbers that change each step, such as annealed weights: fused for every value.

Dynamo makes such a number symbolic when it changes for the first time: one recompilation.
"""

import pytest
import torch
import torch._dynamo.testing
from torch._dynamo.utils import counters

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.covering import every
from tests.support.losses import kd
from torch_streamkl.fx_passes.backend import collected, streamkl


def of_a_mixture(s, t, a, mix):
    p, m = t.softmax(-1), mix(t.softmax(-1), s.softmax(-1), a)
    return (p * (p.log() - m.log())).sum(-1).mean()


def skew(s, t, a):
    return of_a_mixture(s, t, a, lambda p, q, a: a * p + (1 - a) * q)


def lerp(s, t, a):
    return of_a_mixture(s, t, a, torch.lerp)


def generalised_js(s, t, a):
    p, q = t.softmax(-1), s.softmax(-1)
    m = a * p + (1 - a) * q
    return (a * p * (p.log() - m.log()) + (1 - a) * q * (q.log() - m.log())).sum(-1).mean()


def two_weighted(s, t, a):
    p, q = t.log_softmax(-1), s.log_softmax(-1)
    return (a * p.exp() * (p - q) + (1 - a) * q.exp() * (q - p)).sum(-1).mean()


def temperature(s, t, a):
    return kd(s / a, t / a) * a**2


def loss_weight(s, t, a):
    return a * kd(s, t)


def softcap(s, t, a):
    return kd(a * torch.tanh(s / a), t)


def guard(s, t, a):
    p, q = t.softmax(-1) + a, s.softmax(-1) + a
    return (p * (p.log() - q.log())).sum(-1).mean()


VALUES = {"float": (0.3, 0.4, 0.55, 0.7), "int": (2, 3, 5, 4)}
LOSSES = [
    *((f, "float") for f in (skew, generalised_js, two_weighted, lerp, guard)),
    *((f, number) for f in (temperature, loss_weight, softcap) for number in VALUES),
]


def step_of(loss, dtype=torch.float32, shapes=((5, 4), (9, 4)) * 2):
    """A step of a number, and the operands that learn."""
    x = [torch.randn(s, dtype=dtype, requires_grad=i < 2) for i, s in enumerate(shapes)]

    def step(a):
        q, k, qt, kt = x
        return loss(q @ k.mT, qt @ kt.mT, a)

    return step, x[:2]


@pytest.mark.parametrize("shapes", [((1, 2, 6, 4),) * 4, ((5, 4), (9, 4)) * 2])
@pytest.mark.parametrize(("loss", "number"), LOSSES)
def test_one_recompilation_and_fused_for_every_value(loss, number, shapes):
    step, trained = step_of(loss, torch.float64, shapes)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    options = {"streamkl.inner": "eager", "streamkl.min_mib": 0}

    def backend(gm, inputs):
        return counter(gm, inputs) and streamkl(gm, inputs, options=options)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    with collected() as report:
        for a in VALUES[number]:
            got, want = compiled(a), step(a)
            torch.testing.assert_close(got, want)
            got, want = (torch.autograd.grad(x, trained) for x in (got, want))
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2
    assert report.num_fused == len(report.sites) >= counter.frame_count, report


OPTIONS = {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0}


@pytest.mark.parametrize("loss", [skew, softcap, guard])
def test_aot_autograd_does_not_specialize(loss):
    """It makes tensors of symbolic floats, or else constants: a compilation for each value."""
    step, _ = step_of(loss)
    counts = []
    for given in ({"backend": "aot_eager"}, {"backend": "streamkl", "options": OPTIONS}):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(step, **given)
        with collected() as report:
            for a in VALUES["float"]:
                torch.testing.assert_close(compiled(a), step(a))
        counts.append(counters["stats"]["unique_graphs"])
    assert counts == [2, 2]
    assert report.num_fused == len(report.sites) == 2, report


@pytest.mark.parametrize("loss", every(3, [skew, softcap, guard]))
def test_a_number_as_a_tensor(loss):
    step, _ = step_of(loss, shapes=((1, 2, 6, 4),) * 4)
    compiled = compile_rewritten(step, inner="aot_eager", dynamic=True)
    with collected() as report:
        for a in (torch.tensor(0.3), torch.tensor(0.6), 0.4):
            torch.testing.assert_close(compiled(a), step(a))
    assert report.num_fused == len(report.sites), report


def test_a_size_that_varies_multiplies_elements():
    """A row program reads it as a number that is captured."""

    def loss(q, k, qt, kt):
        p, t = (q @ k.mT).softmax(-1), qt @ kt.mT
        return (p * t.shape[-1] * t.sigmoid()).square().sum(-1).mean()

    inputs = [torch.randn(2, 2, n, 4, requires_grad=i < 2) for i, n in enumerate((6, 9, 6, 9))]
    outcome = compare(loss, inputs, inner="aot_eager", dynamic=True).check()
    assert outcome.kinds == {"row_program"}, outcome.report
