"""Calls that repeat issue recorded launches: the same bits as without, on other tensors."""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.device_cases import STEPS, same, unrecorded, watched_replays
from tests.support.gpus import on_a_gpu
from tests.support.interpreter import INTERPRETED, inside, quiet
from torch_streamkl import attention_kl, checks, row_program
from torch_streamkl.attention import bound_op, ops
from torch_streamkl.runtime import launch as runtime

pytestmark = quiet
OPTIONS = ("(P*(logP-logS))", 0.25, 0.25, 0.0, 0.0, 1.0, None, None, None, 0, 0, False, "triton")
# operators whose sequences of launches differ; a GPU runs them all, which takes minutes elsewhere
INTERPRETED_STEPS = (
    "attention-triton-varlen_causal", "attention-triton-split_keys", "attention-triton-bias",
    "rows-indexer", "rows-heads_mean", "rows-heads_rows",
)  # fmt: skip


def check_repeated_steps(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on different tensors, with and without recording, are bit-equal."""
    from torch_streamkl.rows.triton import blocks, gradients

    # blocks of rows or chunks of tokens, and shares of the key head's gradient
    monkeypatch.setattr(blocks, "_workspace", lambda problem, _: 20 * problem.num_keys * 4)
    monkeypatch.setattr(gradients, "MEMBERS", 1)
    case, replays = STEPS[name], watched_replays(monkeypatch)
    for seed, expected in enumerate(unrecorded(case, device, 3, monkeypatch)):
        same(case.step(seed, device), expected, case)
    assert all(replays)
    assert case.is_recorded in (None, bool(replays))


@inside
@pytest.mark.parametrize("name", INTERPRETED_STEPS)
def test_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_repeated_steps(name, "cpu", monkeypatch)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", STEPS)
def test_same_bits_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_repeated_steps(name, "cuda", monkeypatch)


def _tensors(device: str, *shape: int, seed: int = 0, **options: Any) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(shape, generator=generator, device=device, **options) for _ in range(4)]


def _recorded_site(device: str) -> tuple[bound_op.BoundOp, list[Tensor | None]]:
    site = bound_op.BoundOp(OPTIONS)
    tensors: list[Tensor | None] = [*_tensors(device, 2, 2, 24, 16), *[None] * 11]
    for _ in range(3):
        site.forward(*tensors)
    return site, tensors


@inside
def test_gradients_of_another_layout() -> None:
    """A loss may weight rows in one step and sum them in the next."""
    inputs = [x.transpose(1, 2).requires_grad_() for x in _tensors("cpu", 1, 17, 2, 16)]

    def gradients(impl: str, is_sum: bool, is_packed: bool) -> list[Tensor]:
        hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.contiguous, lambda x: x)
        with hooks if is_packed else contextlib.nullcontext():
            rows = attention_kl(*inputs, reduction="none", impl=impl)
        loss = rows.sum() if is_sum else rows @ torch.arange(17.0)
        return list(torch.autograd.grad(loss.sum(), inputs))

    checks._verdicts.clear()
    for step in [(False, False)] * 3 + [(True, False), (False, True), (True, True)]:
        torch.testing.assert_close(gradients("triton", *step), gradients("torch", *step))


@inside
def test_tensors_that_were_one_when_they_were_recorded() -> None:
    """A model against itself, then against another."""
    checks._verdicts.clear()
    q, k, *teacher = _tensors("cpu", 1, 2, 17, 16)
    for _ in range(3):
        assert attention_kl(q, k, q, k, impl="triton").abs().max() < 1e-5
    given = (q, k, *teacher)
    expected = attention_kl(*given, impl="torch")
    torch.testing.assert_close(attention_kl(*given, impl="triton"), expected)


@inside
def test_one_gradient_for_two_results() -> None:
    """The sum of two results has one gradient for both, and a weight in front makes it two."""
    inputs = [x.requires_grad_() for x in _tensors("cpu", 1, 2, 16, 16)]

    def of_rows(e: Any) -> Any:
        p = e.s.softmax("key")
        return {"squares": (p * p).sum("key"), "products": (p * e.t).sum("key")}

    def gradients(impl: str, weight: float | None) -> list[Tensor]:
        dots = {"s": (inputs[0], inputs[1]), "t": (inputs[2], inputs[3])}
        rows = row_program(of_rows, dots=dots, impl=impl)
        other = rows["products"] if weight is None else weight * rows["products"]
        loss = (rows["squares"] + other) @ torch.arange(16.0)
        return list(torch.autograd.grad(loss.sum(), inputs))

    for weight in (None, None, None, 0.5, 0.25):
        expected = gradients("torch", weight)
        torch.testing.assert_close(gradients("triton", weight), expected, rtol=1e-4, atol=1e-4)


def test_a_flag_is_no_tensor() -> None:
    """As in scaled_dot_product_attention: a tensor may be written to, a launch is of a value."""
    tensors = _tensors("cpu", 1, 2, 9, 16)
    with pytest.raises(TypeError, match=r"is_causal must be True or False, got a tensor"):
        attention_kl(*tensors, is_causal=torch.tensor(False))


class FakeKernel:
    """Stands for a Triton kernel: keeps what the launches of its compiled kernel are given."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any, **options: Any) -> FakeKernel:
            last = len(arguments) if not options else None
            self.launches.append((*grid, *arguments[:last]))
            return self

        return launch

    def run(self, *arguments: Any) -> None:
        grid, how, rest = arguments[:3], arguments[3:9], arguments[9:]
        assert how == (0, "function", "metadata", None, None, None)
        self.launches.append((*grid, *rest))


def _by_address(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.data_ptr()
    return tuple(map(_by_address, x)) if isinstance(x, tuple) else x


@inside
@pytest.mark.parametrize("mask", [False, True])
def test_arguments_of_compiled_kernels(mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program passes is what a launch by the usual way is given, addresses for tensors."""
    from torch_streamkl.attention import plans
    from torch_streamkl.attention.triton import backward, forward
    from torch_streamkl.runtime import capture

    kernels = {
        "forward_kernel": (forward, FakeKernel()),
        "dq_kernel": (backward, FakeKernel()),
        "dk_kernel": (backward, FakeKernel()),
    }
    for name, (module, kernel) in kernels.items():
        monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(capture, "runs_directly", lambda: True)
    plans.clear_plans()
    site = bound_op.BoundOp(OPTIONS)
    keys = torch.ones(2, 1, 24, 24, dtype=torch.bool) if mask else None
    tensors = [*_tensors("cpu", 2, 2, 24, 16), keys, *[None] * 10]
    grad = torch.ones(2, 2, 24)
    for _ in range(5):
        # results are kept: those of every call have other addresses
        value, *stats = (x for x in site.forward(*tensors) if x is not None)
        grads = site.backward((True, True, False, False), grad, *stats, *tensors)
        assert grads[2:] == (None, None)
        outputs = {
            "forward_kernel": (value, *stats),
            "dq_kernel": grads[:1],
            "dk_kernel": grads[1:2],
        }
        for name, results in outputs.items():
            last = _flat(_by_address(kernels[name][1].launches[-1]))
            assert all(_by_address(x) in last for x in results)
    plans.clear_plans()
    for _, kernel in kernels.values():
        usual, *others = kernel.launches
        assert len(others) == 4
        for other in others:
            assert _shape_of(_by_address(other)) == _shape_of(_by_address(usual))


def _flat(x: Any) -> list[Any]:
    return [y for part in x for y in _flat(part)] if isinstance(x, tuple) else [x]


def _shape_of(x: Any) -> Any:
    """A launch's arguments without what differs from call to call: addresses."""
    if isinstance(x, tuple):
        return tuple(map(_shape_of, x))
    return "address" if isinstance(x, int) and x > 2**24 else x  # also of a heap below 4 GiB


@inside
def test_an_address_that_is_not_aligned_takes_the_usual_path() -> None:
    site, tensors = _recorded_site("cpu")
    assert isinstance(site._forward, bound_op.Replay)
    assert site._forward._program(*tensors) is not None
    storage = torch.zeros(2 * 2 * 24 * 16 + 1)
    moved = storage[1:].view(2, 2, 24, 16).copy_(tensors[0])
    assert moved.data_ptr() % 16
    given = [moved, *tensors[1:]]
    assert site._forward._program(*given) is None
    for x, y in zip(site.forward(*given), site.forward(*tensors), strict=True):
        assert torch.equal(x, y)


@inside
def test_launches_that_are_chosen_anew_are_not_the_recorded_ones() -> None:
    from torch_streamkl.attention import plans

    site, tensors = _recorded_site("cpu")
    assert isinstance(site._forward, bound_op.Replay)
    assert site._forward._program(*tensors) is not None
    plans.clear_plans()
    assert site._forward._program(*tensors) is None
    precision = torch.get_float32_matmul_precision()
    site, tensors = _recorded_site("cpu")
    try:
        torch.set_float32_matmul_precision("high")
        assert site._forward._program(*tensors) is None
    finally:
        torch.set_float32_matmul_precision(precision)


@inside
def test_what_cannot_be_written_down_is_not_recorded() -> None:
    from torch_streamkl.runtime import capture

    site, tensors = _recorded_site("cpu")
    elsewhere = torch.ones(2, 2, 24)

    def another_operation(*given: Tensor | None) -> list[Tensor]:
        return [site._run_forward(*given)[0].sinh()]

    def read_on_the_host(*given: Tensor | None) -> list[Tensor]:
        value = site._run_forward(*given)[0]
        return [value * value.sum().item()]

    def tensor_from_elsewhere(*given: Tensor | None) -> list[Tensor]:
        return [site._run_forward(*given)[0] * elsewhere]

    for function in (another_operation, read_on_the_host, tensor_from_elsewhere):
        outputs, program = capture.record(function, tensors)
        assert torch.equal(outputs[0], function(*tensors)[0])
        assert program is None


@inside
def test_a_program_that_does_not_run_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Tensor | None) -> list[Tensor]:
        raise TypeError("function takes exactly 80 arguments")

    site, tensors = _recorded_site("cpu")
    call = site._forward
    assert isinstance(call, bound_op.Replay)
    call._program = functools.partial(call._first, fails)
    for _ in range(2):
        for x, y in zip(call(*tensors), site._run_forward(*tensors), strict=True):
            assert torch.equal(x, y)
    assert call._program is None
    assert [r.getMessage() for r in caplog.records] == [
        "recorded launches do not run here, and calls take longer: "
        "function takes exactly 80 arguments"
    ]


@inside
def test_a_program_keeps_no_tensor_alive() -> None:
    site, tensors = _recorded_site("cpu")
    kept = [weakref.ref(x) for x in tensors[:4] if x is not None]
    del tensors
    gc.collect()
    assert site._forward is not None
    assert [ref() for ref in kept] == [None] * 4


@pytest.mark.skipif(INTERPRETED, reason="of plain torch")
def test_plain_torch_is_not_recorded() -> None:
    site = bound_op.BoundOp((*OPTIONS[:-1], "torch"))
    tensors = [*_tensors("cpu", 2, 2, 24, 16), *[None] * 11]
    for _ in range(3):
        results = site.forward(*tensors)
    assert not isinstance(site._forward, bound_op.Replay)
    expected = ops.run_forward(*tensors, *site.options)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


def test_one_bias_for_both_sides_is_recorded_apart() -> None:
    """Kernels that read it once are not those of two biases, whose metadata are the same."""
    bias, other = torch.zeros(2, 3, 3)
    tensors: list[Any] = [torch.zeros(1)] * 3 + [None] * ops.NUM_TENSORS
    call = bound_op.ReplayByBias(lambda *given: given[-1:], 3)
    for teacher in (bias, other, other):
        for index, x in zip(ops.BIASES, (bias, teacher), strict=True):
            tensors[3 + index] = x
        call(*tensors)
    assert [each._calls for each in call._calls] == [2, 1]


@inside
def test_a_recording_keeps_memory_no_longer_than_its_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does the program: blocks that are interleaved in a workspace do so in both."""
    from torch_streamkl.runtime import capture

    site, tensors = _recorded_site("cpu")
    sums: list[weakref.ref[Tensor]] = []

    def blocks(*given: Tensor | None) -> list[Tensor]:
        total = torch.zeros(2, 2, 24)
        for _ in range(3):
            value = site._run_forward(*given)[0]
            part = value + value
            assert not any(x() is not None for x in sums)
            sums.append(weakref.ref(part))
            total += part
            del value, part
        return [total]

    expected = blocks(*tensors)[0]
    sums.clear()
    sources: list[str] = []
    build = builtins.compile
    monkeypatch.setattr(
        capture, "compile", lambda text, *rest: sources.append(text) or build(text, *rest), False
    )
    outputs, program = capture.record(blocks, tensors)
    assert program is not None
    assert torch.equal(outputs[0], expected)
    assert torch.equal(program(*tensors)[0], expected)
    lines = [line.strip() for line in sources[0].splitlines()]
    alive = most = 0
    for line in lines:
        alive += line.startswith("n") - (len(line.split(",")) if line.startswith("del") else 0)
        most = max(most, alive)
    assert most <= 6, lines  # the total, a value with both statistics, and a sum


def test_a_copy_is_no_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """`to` may be either: addresses after it are its result's, not some way into its argument."""
    from torch_streamkl.runtime import capture

    monkeypatch.setattr(capture, "runs_directly", lambda: True)
    kernel = FakeKernel()

    def converted(x: Tensor) -> list[Tensor]:
        with torch._C._AutoDispatchBelowAutograd():  # as inside of an operator
            copies = [x.to(dtype) for dtype in (torch.float32, torch.float64)]
            outputs = [copy[1:] for copy in copies]
        runtime.launch(kernel, (1, 1, 1), tuple(outputs), (), {})
        return outputs

    outputs, program = capture.record(converted, [torch.zeros(4, 32)])
    assert program is not None
    x = torch.ones(4, 32)
    again = program(x)
    assert again[0].data_ptr() == x[1:].data_ptr()
    for launch, results in zip(kernel.launches, (outputs, again), strict=True):
        assert _by_address(launch[3:]) == _by_address(tuple(results))


def test_numbers_that_are_negated_in_memory_are_not_plain() -> None:
    """A kernel would read their other sign."""
    x = torch.randn(1, 1, 4, 1, dtype=torch.complex64)
    assert checks.is_plain((x.imag, None)) and not checks.is_plain((x.imag, x.conj().imag))
