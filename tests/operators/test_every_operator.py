"""What every operator promises to the rest of torch: one derivative, autocast, compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import functional, gradcheck
from torch.utils.checkpoint import checkpoint

from tests.support.naive_rows import naive
from torch_streamkl import (
    attention_kl,
    attention_topk_kl,
    linear_kl,
    linear_topk_kl,
    row_program,
)
from torch_streamkl.topk.log_probs import entry_log_probs
from torch_streamkl.topk.logits import entry_logits

Call = Callable[..., Tensor]  # of the tensors that learn
MAPS = [(2, 2, 5, 4), (2, 2, 7, 4), (2, 2, 5, 3), (2, 2, 7, 3)]
HEADS = [(7, 6), (11, 6), (7, 5), (11, 5)]
IDS = torch.tensor([3, 0, 8]) + torch.arange(7)[:, None] % 3
LOG_PROBS = torch.tensor([-1.0, -2.0, -1.5]).expand(7, 3)
CHOSEN = torch.tensor([3, 0, 6, -1]).expand(2, 5, 4)


def _entropy(e: Any) -> Any:
    logs = e.s.log_softmax("key")
    return -(logs.exp() * logs).sum("key")


def _entries(h: Tensor, w: Tensor, b: Tensor, **options: Any) -> Tensor:
    return linear_topk_kl(h, w, bias=b, ids=IDS, log_probs=LOG_PROBS, tail="bucket", **options)


def _keys(q: Tensor, k: Tensor, tq: Tensor, tk: Tensor, **options: Any) -> Tensor:
    heads = torch.ones(2, 2, 5, dtype=q.dtype)
    return attention_topk_kl(
        q, k[:, 0], tq.detach(), tk.detach(), ids=CHOSEN, student_head_weights=heads, **options
    )


def _program(h: Tensor, w: Tensor, **options: Any) -> Tensor:
    rows: Tensor = row_program(_entropy, dots={"s": (h, w)}, **options)
    return rows


CALLS: dict[str, tuple[Call, list[tuple[int, ...]], dict[str, Any]]] = {
    "attention_kl": (attention_kl, MAPS, {"divergence": "js", "student_clamp": 1e-4}),
    "attention_topk_kl": (_keys, MAPS, {"is_causal": True}),
    "linear_kl": (linear_kl, HEADS, {"labels": torch.arange(7), "temperature": 2.0}),
    "linear_topk_kl": (_entries, [*HEADS[:2], (11,)], {}),
    "row_program": (_program, HEADS[:2], {}),
    "entry_logits": (lambda h, w: entry_logits(h, w, IDS), HEADS[:2], {}),
    "entry_log_probs": (lambda h, w: entry_log_probs(h, w, IDS, 0.7)[0], HEADS[:2], {}),
    "sum of linear_kl": (linear_kl, HEADS, {"reduction": "mean"}),
    "sum of linear_topk_kl": (_entries, [*HEADS[:2], (11,)], {"reduction": "mean"}),
    "sum of row_program": (_program, HEADS[:2], {"reduction": "mean"}),
}
every = pytest.mark.parametrize("name", CALLS)
# all but what graphs call, which have no public name
public = pytest.mark.parametrize("name", [x for x in CALLS if not x.startswith("entry")])
of_sums = pytest.mark.parametrize("name", [x for x in CALLS if x.startswith("sum")])


def _call(name: str, **more: Any) -> Call:
    function, _, options = CALLS[name]
    return lambda *tensors: function(*tensors, **options, **more)


def _tensors(name: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in CALLS[name][1]]
    return [x.to(dtype).requires_grad_() for x in made]


def _learned(name: str, tensors: list[Tensor]) -> list[Tensor]:
    """The teacher of chosen keys has no gradient."""
    return tensors[:2] if name == "attention_topk_kl" else tensors


def _outcome(name: str, call: Call, tensors: list[Tensor]) -> list[Tensor]:
    value = call(*tensors)
    weights = torch.linspace(0.5, 1.5, value.numel()).to(value).view(value.shape)
    return [value.detach(), *torch.autograd.grad((value * weights).sum(), _learned(name, tensors))]


@every
def test_same_bits_on_every_run(name: str) -> None:
    tensors = _tensors(name, torch.float32)
    runs = [_outcome(name, _call(name), tensors) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@every
def test_gradients_are_those_of_differences(name: str) -> None:
    """Also where no gradient comes in."""
    tensors = _tensors(name)
    learned = _learned(name, tensors)
    rest = [x.detach() for x in tensors[len(learned) :]]
    assert gradcheck(lambda *x: _call(name)(*x, *rest), learned, fast_mode=True)


@of_sums
def test_backward_twice(name: str) -> None:
    """Stored gradients are multiplied in place only where nobody needs them again."""
    tensors = _tensors(name)
    loss = _call(name)(*tensors)
    first = torch.autograd.grad(3.0 * loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors, retain_graph=True)
    third = torch.autograd.grad(loss, tensors)
    torch.testing.assert_close(first, tuple(3 * x for x in second))
    torch.testing.assert_close(second, third)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# --------------------------------------------------------------------------- second derivatives


@pytest.mark.parametrize("more", [{}, {"impl": "reference"}], ids=["auto", "reference"])
@public
def test_a_checkpoint_computes_it_again(name: str, more: dict[str, str]) -> None:
    tensors, call = _tensors(name), _call(name, **more)

    def checkpointed(*given: Tensor) -> Tensor:
        value: Tensor = checkpoint(call, *given, use_reentrant=False)
        return value

    torch.testing.assert_close(
        _outcome(name, checkpointed, tensors), _outcome(name, call, tensors), rtol=0, atol=0
    )


def _penalty(total: Call, x: Tensor) -> Tensor:
    """Of a sum and of its square: what the backward multiplies by depends on the inputs, too."""
    x = x.requires_grad_()
    loss = total(x) ** 2 + total(x) + 0.5 * x.square().sum()
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad((g * g).sum(), x)[0]


def _penalty_of_inputs(total: Call, x: Tensor) -> None:
    x = x.requires_grad_()
    (g,) = torch.autograd.grad(total(x) + 0.5 * x.square().sum(), x, create_graph=True)
    (g * g).sum().backward(inputs=[x])


def _unused(total: Call, x: Tensor) -> object:
    x = x.requires_grad_()
    (g,) = torch.autograd.grad(total(x), x, create_graph=True)
    return torch.autograd.grad(g.square().sum(), x, allow_unused=True)


SECOND: dict[str, Callable[[Call, Tensor], Any]] = {
    "hvp": lambda total, x: functional.hvp(total, x, torch.ones_like(x)),
    "hessian": functional.hessian,
    "penalty": _penalty,
    "penalty of inputs": _penalty_of_inputs,
    "unused": _unused,
}


def _of_first(name: str, **more: Any) -> tuple[Call, Tensor]:
    """The sum as a function of the first tensor; the others learn, too."""
    first, *rest = _tensors(name)
    return lambda x: _call(name, **more)(x, *rest).sum(), first.detach()


@pytest.mark.parametrize("how", SECOND)
@every
def test_a_second_derivative_raises(name: str, how: str) -> None:
    """Autograd runs what leads to the inputs that it is asked for, and nothing else."""
    told = "impl='reference' for higher derivatives|can be differentiated once"
    with pytest.raises(NotImplementedError, match=told):
        SECOND[how](*_of_first(name))


@public
def test_the_reference_has_second_derivatives(name: str) -> None:
    assert _penalty(*_of_first(name, impl="reference")).isfinite().all()


@public
def test_the_reference_has_derivatives_by_what_comes_in(name: str) -> None:
    """torch's jvp differentiates a gradient by its incoming gradient, at 0."""
    total, x = _of_first(name, impl="reference")
    (gradient,) = torch.autograd.grad(total(x.requires_grad_()), x)
    torch.testing.assert_close(_jvp(total, x.detach()), gradient.sum())


def _jvp(total: Call, x: Tensor) -> Tensor:
    value: Tensor = functional.jvp(total, x, torch.ones_like(x))[1]
    return value


def _norm_of_a_scaled_gradient(total: Call, x: Tensor) -> Tensor:
    """GradNorm: the derivative by the factor of the sum."""
    x, factor = x.requires_grad_(), torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(factor * total(x), x, create_graph=True)
    return torch.autograd.grad(g.norm(), factor)[0]


@pytest.mark.parametrize("how", [_jvp, _norm_of_a_scaled_gradient], ids=lambda f: f.__name__)
@of_sums
def test_a_first_derivative_is_given(name: str, how: Callable[[Call, Tensor], Tensor]) -> None:
    formula, first = _of_first(name, impl="reference")
    if "row_program" in name:
        _, weight = _tensors(name)
        formula = lambda h: naive(_entropy, {"s": (h, weight)})["value"].mean()  # noqa: E731
    torch.testing.assert_close(how(*_of_first(name)), how(formula, first))


@pytest.mark.parametrize("transform", ["grad", "jvp", "dual", "vmap of grad"])
@public
def test_transforms_of_torch_func_are_a_clear_error(name: str, transform: str) -> None:
    total, x = _of_first(name)

    def dual() -> None:
        with torch.autograd.forward_ad.dual_level():
            total(torch.autograd.forward_ad.make_dual(x, x))

    calls = {
        "grad": lambda: torch.func.grad(total)(x),
        "jvp": lambda: torch.func.jvp(total, (x,), (x,)),
        "dual": dual,
        "vmap of grad": lambda: torch.vmap(torch.func.grad(total))(torch.stack([x, x])),
    }
    with pytest.raises(NotImplementedError, match=r"use torch\.autograd\.grad or backward"):
        calls[transform]()


# ---------------------------------------------------------------------- autocast, compiled graphs


@public
def test_autocast_casts_what_a_matmul_would(name: str) -> None:
    tensors = _tensors(name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        value = _call(name)(*tensors)
    is_bias = [x.dim() == 1 for x in tensors]
    rounded = [x if b else x.detach().bfloat16() for x, b in zip(tensors, is_bias, strict=True)]
    assert torch.equal(value, _call(name)(*rounded))
    with torch.autocast("cpu", torch.bfloat16):
        exact = _call(name, impl="reference")(*tensors)
    torch.testing.assert_close(exact.to(value.dtype), value, rtol=2e-2, atol=2e-2)
    assert value.dtype == torch.float32
    grads = torch.autograd.grad(value.sum(), _learned(name, tensors))
    assert all(g.dtype == torch.float32 for g in grads)
    double = _tensors(name, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert _call(name)(*double).dtype == torch.float64


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", [x for x in CALLS if "row_program" not in x])
def test_compiles_without_graph_breaks(name: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    tensors = _tensors(name)
    compiled = torch.compile(_call(name), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch.testing.assert_close(
        _outcome(name, compiled, tensors), _outcome(name, _call(name), tensors)
    )
