"""Settings of a process: a program runs as it would without them, where they do not concern it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.compiling import compile_rewritten
from tests.support.interpreter import INTERPRETED, inside, outside, quiet
from torch_streamkl import attention_kl, linear_kl, row_program
from torch_streamkl.runtime.devices import matmul_precision

pytestmark = quiet
IMPL = "triton" if INTERPRETED else "auto"


def _maps(q: Tensor, k: Tensor, teacher_q: Tensor, teacher_k: Tensor) -> Tensor:
    mask = torch.ones(24, 24, dtype=torch.bool, device=q.device).tril()
    student = (q @ k.mT).masked_fill(~mask, -1e9).log_softmax(-1)
    teacher = (teacher_q @ teacher_k.mT).masked_fill(~mask, -1e9).softmax(-1)
    return F.kl_div(student, teacher, reduction="batchmean")


def _vocab(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    student = (x @ weight.T).log_softmax(-1)
    return F.kl_div(student, (teacher_x @ teacher_weight.T).softmax(-1), reduction="batchmean")


LOSSES = {_maps: (1, 2, 24, 16), _vocab: (24, 16)}


def _inputs(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, device="cpu") for _ in range(4)]
    return [x.requires_grad_(i < 2) for i, x in enumerate(made)]


def _compare_compiled(inner: str) -> None:
    for loss, shape in LOSSES.items():
        inputs = _inputs(*shape)
        step = compile_rewritten(loss, inner=inner, strict=True)
        for function in (step, loss):
            function(*inputs).backward()
        compiled, expected = step(*inputs), loss(*inputs)
        torch.testing.assert_close(compiled, expected)
        given = torch.autograd.grad(compiled, inputs[:2])
        torch.testing.assert_close(given, torch.autograd.grad(expected, inputs[:2]))


def _compare_operators() -> None:
    q, k, *teacher = _inputs(1, 2, 24, 16)
    rows = attention_kl(q, k, *teacher, is_causal=True, impl=IMPL)
    expected = attention_kl(q, k, *teacher, is_causal=True, impl="reference")
    torch.testing.assert_close(rows, expected, rtol=1e-3, atol=1e-3)
    torch.autograd.grad(rows.sum(), (q, k))
    x, w, y, v = _inputs(24, 16)
    linear_kl(x, w, y, v, reduction="mean", impl=IMPL).backward()

    def squares(e: Any) -> Any:
        return ((e.s - e.t) ** 2).sum("key")

    impl = IMPL if INTERPRETED else "torch"
    dots = {"s": (q, k), "t": (teacher[0], teacher[1])}
    values = row_program(squares, dots=dots, is_causal=True, impl=impl)
    torch.autograd.grad(values.sum(), (q, k))


@outside
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_another_default_device(inner: str) -> None:
    """Tensors of an operator are where its arguments are."""
    with torch.device("meta"):
        _compare_compiled(inner)
        _compare_operators()


@pytest.fixture
def _precision_again() -> Iterator[None]:
    backends = (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [x.fp32_precision for x in backends]
    for backend in backends:  # what is set is not inherited
        backend.fp32_precision = "none"
    yield
    for backend, precision in zip(backends, before, strict=True):
        backend.fp32_precision = precision
    torch.get_float32_matmul_precision()  # the settings agree again


@pytest.mark.usefixtures("_precision_again")
@pytest.mark.parametrize("owner", [torch.backends, torch.backends.cuda.matmul])
def test_precisions_of_backends(owner: Any) -> None:
    """What replaces torch.set_float32_matmul_precision(), whose getter raises after it."""
    assert matmul_precision() != "tf32"
    owner.fp32_precision = "tf32"
    assert matmul_precision() == "tf32"
    _compare_operators()
    if not INTERPRETED:
        _compare_compiled("aot_eager")


@inside
def test_the_older_setting() -> None:
    try:
        for name, precision in (("high", "tf32"), ("medium", "tf32"), ("highest", "ieee")):
            torch.set_float32_matmul_precision(name)
            assert matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


@outside
@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("on", [False, True])
def test_meta_tensors_know_no_autocast(on: bool, impl: str) -> None:
    q, vocab = torch.randn(1, 2, 24, 16, device="meta"), torch.randn(24, 16, device="meta")
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        rows = attention_kl(q, q, q, q, impl=impl)
        tokens = linear_kl(vocab, vocab, vocab, vocab, impl=impl)
        sums = row_program(lambda e: e.s.softmax("key").sum("key"), dots={"s": (q, q)}, impl=impl)
    assert [(x.device.type, x.shape) for x in (rows, tokens, sums)] == [
        ("meta", (1, 2, 24)),
        ("meta", (24,)),
        ("meta", (1, 2, 24)),
    ]
