"""Derivatives that are not backward(): what an adversary asked the operators and programs for."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tests.support.compiling import compile_rewritten
from tests.support.losses import rows_of_kl as _kl
from torch_streamkl import attention_kl, linear_kl, row_program
from torch_streamkl.fx_passes import backend

NO_DERIVATIVE = "no forward-mode derivative"


def _given(*shapes):
    make = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=make, dtype=torch.float64) for s in shapes]


HEADS = _given((6, 4), (12, 4), (6, 5), (12, 5))
MAPS = _given((1, 2, 5, 4), (1, 2, 7, 4), (1, 2, 5, 4), (1, 2, 7, 4))


def _element_kl(e):
    p, s = e.t.log_softmax("key"), e.s.log_softmax("key")
    return (p.exp() * (p - s)).sum("key")


def _program(h, reduction="none"):
    dots = {"t": (HEADS[2], HEADS[3]), "s": (h, HEADS[1])}
    return row_program(_element_kl, dots=dots, reduction=reduction)


def naive_words(h):
    return _kl(h @ HEADS[1].T, HEADS[2] @ HEADS[3].T)


def naive_maps(q):
    return _kl(q @ MAPS[1].mT, MAPS[2] @ MAPS[3].mT)


def naive_entropy(h):
    logs = (h @ HEADS[1].T).log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


DIRECT = {
    "attention_kl": lambda q: attention_kl(q, *MAPS[1:]),
    "linear_kl": lambda h: linear_kl(h, *HEADS[1:]),
    "sum of linear_kl": lambda h: linear_kl(h, *HEADS[1:], reduction="mean"),
    "row_program": _program,
    "sum of row_program": lambda h: _program(h, "mean"),
}


def dual(function, x):
    with forward_ad.dual_level():
        value = function(forward_ad.make_dual(x, torch.ones_like(x)))
        tangent = forward_ad.unpack_dual(value).tangent
        return tangent


def jvp(function, x):
    tangent = torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]
    return tangent


ASKED = {
    "jvp": jvp,
    "dual": dual,
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda y: torch.vmap(f)(y).sum())(x[None]),
}


@pytest.mark.parametrize("how", ASKED)
@pytest.mark.parametrize("name", DIRECT)
def test_what_operators_have_no_derivative_for_is_refused(name, how):
    function, x = DIRECT[name], (MAPS if name == "attention_kl" else HEADS)[0]
    with pytest.raises(NotImplementedError, match=NO_DERIVATIVE):
        ASKED[how](function, x)


@pytest.mark.parametrize("how", ["jvp", "dual"])
@pytest.mark.parametrize("name", ["attention_kl", "linear_kl"])
def test_that_calls_in_compiled_code_have_no_derivative(name, how):
    function, x = DIRECT[name], (MAPS if name == "attention_kl" else HEADS)[0]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    inside = torch.compile(lambda y: ASKED[how](function, y), backend="eager")
    for ask in (lambda: ASKED[how](compiled, x), lambda: inside(x)):
        with pytest.raises(NotImplementedError, match=NO_DERIVATIVE):
            ask()


def test_the_reference_has_a_forward_mode():
    found = jvp(lambda h: linear_kl(h, *HEADS[1:], impl="reference"), HEADS[0])
    torch.testing.assert_close(found, jvp(naive_words, HEADS[0]))


@pytest.mark.parametrize("naive", [naive_words, naive_maps, naive_entropy])
def test_programs_in_forward_mode(naive):
    x = MAPS[0] if naive is naive_maps else HEADS[0]
    expected = dual(naive, x)

    def compiled(f):
        return compile_rewritten(f, inner="aot_eager")

    with backend.collected() as report:
        torch.testing.assert_close(dual(compiled(naive), x), expected)
        torch.testing.assert_close(compiled(lambda y: dual(naive, y))(x), expected)
    assert not report.num_fused
    assert all("forward mode" in site.reason for site in report.sites)
    # Dynamo does not compile again for a level that is entered later
    step = compiled(naive)
    step(x)
    with pytest.raises(NotImplementedError, match=NO_DERIVATIVE):
        dual(step, x)


@pytest.mark.parametrize("how", ["vmap", "jvp"])
def test_checkpoints_under_a_transform_are_left_as_they_are(how):
    """Tensors of their bodies are torch's wrappers, which have no memory of their own."""

    def loss(h):
        rows = checkpoint(naive_words, h[None] if how == "vmap" else h, use_reentrant=False)
        return rows.sum()

    def step(h):
        return torch.vmap(loss)(h).sum() if how == "vmap" else jvp(loss, h)

    def compiled_by(backend, **kwargs):  # eager mode has no checkpoints under transforms
        torch._dynamo.reset()
        return torch.compile(step, backend=backend, **kwargs)(HEADS[0])

    options = {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0.0}
    expected = compiled_by("aot_eager")
    with backend.collected() as report:
        torch.testing.assert_close(compiled_by("streamkl", options=options), expected)
    assert not report.failures
    assert [x.reason for x in report.sites if "torch." in x.reason]


@pytest.mark.parametrize("name", DIRECT)
def test_several_gradients_at_once(name):
    x = (MAPS if name == "attention_kl" else HEADS)[0].clone().requires_grad_()
    value = DIRECT[name](x)
    (given,) = _given((3, *value.shape))
    if name == "row_program":
        with pytest.raises(NotImplementedError, match="one gradient at a time"):
            torch.autograd.grad(value, x, given, is_grads_batched=True)
        return
    (found,) = torch.autograd.grad(value, x, given, is_grads_batched=True)
    expected = [torch.autograd.grad(DIRECT[name](x), x, g)[0] for g in given]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("name", ["row_program", "sum of row_program"])
def test_vmap_of_a_row_program_is_a_clear_error(name):
    h = torch.stack([HEADS[0], HEADS[0]]).requires_grad_()
    with pytest.raises(NotImplementedError, match="vmap over row_program is not supported"):
        torch.vmap(DIRECT[name])(h)
