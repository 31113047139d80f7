"""Programs, and wrong ones in the place of what torch.compile would make of them, for verify()."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class Output:
    loss: Tensor
    name: str = "kl"


class Pair(NamedTuple):
    loss: Tensor
    count: int


class Opaque:
    __slots__ = ()

    def __call__(self):
        """Not an object that is known by its attributes."""


def vector(dtype=torch.float32):
    return torch.tensor([1.0, 2.0, -3.0, 0.5], dtype=dtype).requires_grad_()


LARGE = torch.tensor([1e6, -2e6, 1.0, 3e6])


def off_in_one(x, share=1.05):
    """5 % off in the entry that is 1, next to entries of 1e6."""
    return torch.where(LARGE.abs() == 1.0, x * share, x)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return off_in_one(grads[0])


def _backward(factor):
    def step(x):
        loss = x.square().sum() * factor
        loss.backward()
        return loss.detach() / factor

    return step


def _written(factor):
    def step(x):
        with torch.no_grad():
            x.mul_(factor)
        return torch.zeros(())

    return step


# what: (right, wrong, what of the difference is said)
PLANTED = {
    "a value": (lambda x: x.sum(), lambda x: x.sum() * 1.001, "too far off"),
    "infinity for a number": (
        lambda x: x.exp(),
        lambda x: x.exp() / (x > 0),
        "NaN or infinite in",
    ),
    "NaN for a number": (lambda x: x.sum(), lambda x: x.sum() * torch.nan, "NaN or infinite in"),
    "a number for infinity": (
        lambda x: x.clamp_min(0).log(),
        lambda x: x.clamp_min(1e-30).log(),
        "in place of an inf",
    ),
    "infinity of the other sign": (
        lambda x: x / 0,
        lambda x: -x / 0,
        "in place of an infinite one",
    ),
    "NaN for infinity": (lambda x: x / 0, lambda x: x / 0 * 0, "NaN or infinity in place"),
    "one entry": (lambda x: x * LARGE, lambda x: off_in_one(x * LARGE), "too far off"),
    "one entry of a gradient": (
        lambda x: x * LARGE,
        lambda x: _WrongGradient.apply(x * LARGE),
        "gradient of argument 0",
    ),
    "a gradient": (
        lambda x: x.sum(),
        lambda x: (2 * x).sum() - x.detach().sum(),
        "gradient of argument 0",
    ),
    "no gradient": (lambda x: x.sum(), lambda x: x.detach().sum(), "requires no gradient"),
    "a gradient of nothing": (lambda x: x.detach(), lambda x: x * 1, "requires a gradient"),
    "a shape": (lambda x: x, lambda x: x[None], "(1, 4)"),
    "a dtype": (lambda x: x, lambda x: x.double(), "torch.float64"),
    "a field of a dataclass": (
        lambda x: Output(x.sum()),
        lambda x: Output(2 * x.sum()),
        "output.loss",
    ),
    "a text of a dataclass": (
        lambda x: Output(x.sum()),
        lambda x: Output(x.sum(), "js"),
        "'js' in place of 'kl'",
    ),
    "another class": (
        lambda x: Output(x.sum()),
        lambda x: SimpleNamespace(loss=x.sum(), name="kl"),
        "SimpleNamespace of .loss",
    ),
    "an attribute": (lambda x: SimpleNamespace(a=x), lambda x: SimpleNamespace(a=-x), "output.a"),
    "a tuple for a named one": (
        lambda x: Pair(x, 1),
        lambda x: (x, 1),
        "tuple of 2 in place of Pair",
    ),
    "a list for a dict": (lambda x: {0: x}, lambda x: [x], "list of 1 in place of dict"),
    "a list for a tuple": (lambda x: (x, x), lambda x: [x, x], "list of 2 in place of tuple"),
    "another key": (lambda x: {"a": x}, lambda x: {"b": x}, "['b'] in place of dict of ['a']"),
    "a nested entry": (
        lambda x: {"a": [x, (1, x)]},
        lambda x: {"a": [x, (1, -x)]},
        "output['a'][1][1]",
    ),
    "an entry more": (lambda x: (x,), lambda x: (x, x), "tuple of 2"),
    "a text": (
        lambda x: (x, "forward"),
        lambda x: (x, "reverse"),
        "'reverse' in place of 'forward'",
    ),
    "a count": (lambda x: (x, 3), lambda x: (x, 4), "4 in place of 3"),
    "a flag for a count": (lambda x: (x, 1), lambda x: (x, True), "bool in place of int"),
    "a number of Python": (
        lambda x: x.sum().item(),
        lambda x: x.sum().item() + 1e-3,
        "too far off",
    ),
    "nothing": (lambda x: x, lambda x: None, "has none"),
    "something": (lambda x: (None, x), lambda x: (x, x), "eager has none"),
    "indices": (lambda x: x.argsort(), lambda x: x.argsort(descending=True), "in place of"),
    "a mask": (lambda x: x > 0, lambda x: x >= -5, "in place of"),
    "complex numbers": (
        lambda x: torch.fft.fft(x),
        lambda x: torch.fft.fft(x).conj(),
        "too far off",
    ),
    "a numpy array": (
        lambda x: x.detach().numpy(),
        lambda x: x.detach().numpy() + 1,
        "too far off",
    ),
    "what it accumulates": (_backward(1.0), _backward(3.0), "argument 0.grad after"),
    "nothing accumulated": (
        _backward(1.0),
        lambda x: x.detach().square().sum(),
        "the compiled program has none",
    ),
    "what it writes": (_written(2.0), _written(2.01), "argument 0 after"),
    "nothing written": (_written(2.0), lambda x: torch.zeros(()), "the compiled program has none"),
    "a defined value": (
        lambda x: x.sum() * torch.nan_to_num(x[0] * torch.inf) * torch.nan,
        lambda x: x.sum(),
        "cannot be compared",
    ),
    "an error": (lambda x: x, lambda x: x @ x @ x @ x, "the compiled program raises"),
}
