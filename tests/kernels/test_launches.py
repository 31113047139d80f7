"""Kernels are launched on the device of their tensors, whatever device is the current one.

Without a GPU: the guard is replaced by one that tells, or torch's functions by ones that remember.
`tests/kernels/test_other_devices.py` runs all operators on two GPUs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels import device_cases
from tests.support.interpreter import inside, quiet
from torch_streamkl import attention_kl, attention_kl_varlen, linear_kl, row_program
from torch_streamkl.fx_passes.validation import records
from torch_streamkl.kernels.arguments import Window
from torch_streamkl.runtime import capture, devices, precompile, replay
from torch_streamkl.runtime import launch as runtime
from torch_streamkl.runtime.precompile import compiled_beside

pytestmark = quiet
FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


class Gpus:
    """Stands for torch's functions: the current device, and every change of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
        self.changes: list[int] = []
        self.contexts: list[int] = []  # devices whose context a thread took
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(runtime, "_get_device", lambda: self.current)
        monkeypatch.setattr(runtime, "_THREAD", runtime._Thread())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: self.contexts.append(self.current))
        stream_of = lambda index: 100 + index  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream_of, raising=False)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        self.changes.append(device.index)
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


class Kernel:
    """A jit function, and what it compiles: remembers the current device of its launches."""

    packed_metadata, function = ("packed",), 7

    def __init__(self, gpus: Gpus) -> None:
        self.gpus = gpus
        self.seen: list[Any] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def start(*arguments: Any, **options: Any) -> Kernel:
            self.seen.append(self.gpus.current)
            return self

        return start

    def run(self, *arguments: Any) -> None:
        self.seen.append((self.gpus.current, arguments[3]))


def test_a_guard_only_where_another_device_is_current(gpus: Gpus) -> None:
    for device in (torch.device("cpu"), torch.device("meta"), FIRST, torch.device("cuda")):
        with runtime.on_device(device):
            assert gpus.current == 0
    assert not gpus.changes
    with runtime.on_device(SECOND):
        assert gpus.current == 1
        with runtime.on_device(FIRST):
            assert gpus.current == 0
    assert gpus.changes == [1, 0] and gpus.current == 0


def test_a_thread_takes_its_context_once(gpus: Gpus) -> None:
    """Tensors of cached memory need none, and tensor maps are encoded before a launch."""

    def work() -> None:
        assert runtime.ready_device() == -1
        for _ in range(2):
            with runtime.on_device(FIRST):
                assert runtime.ready_device() == 0

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert gpus.contexts == [0, 0]


@pytest.mark.parametrize("is_known", [False, True])
def test_launches_on_the_device_of_the_tensors(gpus: Gpus, is_known: bool) -> None:
    """Of tensors by themselves, in tuples, and of what a descriptor describes."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(4, device="cuda:1")
        given = [(x, 3), (5, None, (7, Window(None, x))), (SimpleNamespace(base=x), 2)]
    kernel = Kernel(gpus)
    for arguments in given:
        compiled = kernel if is_known else None
        assert runtime.launch(kernel, (1, 1, 1), arguments, (), {}, compiled) is kernel
    assert kernel.seen == [1, 1, 1] and gpus.current == 0
    with pytest.raises(TypeError, match="must be launched with a tensor"):
        runtime.launch(kernel, (1, 1, 1), (5, (None,)), (), {})


class AsyncCompileMode:
    """Stands for Triton's: compiles at its end what was warmed up inside."""

    active: list[str] | None = None

    def __init__(self, threads: Executor, ignore_errors: bool) -> None:
        assert ignore_errors

    def __enter__(self) -> None:
        if AsyncCompileMode.active is not None:
            raise RuntimeError("Another AsyncCompileMode is already active")
        AsyncCompileMode.active = []

    def __exit__(self, *error: object) -> None:
        AsyncCompileMode.active = None


class Compiled(Kernel):
    def warmup(self, *arguments: Any, grid: Any, **options: Any) -> None:
        assert AsyncCompileMode.active is not None and options["enable_fp_fusion"]
        AsyncCompileMode.active.append(f"{grid} on {self.gpus.current}")


def test_kernels_compile_beside_other_code(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on the device of its tensors, in a backward, too; nothing is launched."""
    monkeypatch.setattr("triton.AsyncCompileMode", AsyncCompileMode, raising=False)
    monkeypatch.setattr(precompile, "is_interpreted", lambda: False)
    kernel = Compiled(gpus)
    with FakeTensorMode():
        x = torch.empty(4, device=SECOND)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            runtime.launch(kernel, (1, 1, 1), (x,), (), {})
            return 2 * y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            runtime.launch(kernel, (2, 1, 1), (x,), (), {})
            return 2 * grad

    def compute() -> None:
        Doubled.apply(torch.ones(3, requires_grad=True)).sum().backward()
        raise RuntimeError("on results that are not initialized")

    with compiled_beside(compute, {FIRST}) as is_compiling:
        assert is_compiling and AsyncCompileMode.active == ["(1, 1, 1) on 1", "(2, 1, 1) on 1"]
        with compiled_beside(compute, {FIRST}) as is_compiling:
            assert not is_compiling  # the outer one's threads are the caller's
            assert len(AsyncCompileMode.active) == 2
    assert not kernel.seen and runtime.active_observer() is None
    with compiled_beside(compute, {torch.device("cpu")}) as is_compiling:
        assert not is_compiling and AsyncCompileMode.active is None


def test_whoever_observed_before_does_again() -> None:
    outer, inner = SimpleNamespace(), SimpleNamespace()
    with runtime.observed_by(outer):  # type: ignore[arg-type]
        with runtime.observed_by(inner):  # type: ignore[arg-type]
            assert runtime.active_observer() is inner
        assert runtime.active_observer() is outer
    assert runtime.active_observer() is None


def test_recorded_launches_go_to_the_device_of_their_tensors(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And to its current stream, not to that of the current device."""
    monkeypatch.setattr(capture, "runs_directly", lambda: True)
    kernel, make = Kernel(gpus), capture.Recorder.program

    def program(self: Any, outputs: Any) -> Any:
        self.device = SECOND  # what ran was on a CPU
        return make(self, outputs)

    def function(x: Tensor) -> list[Tensor]:
        out = torch.empty(4)
        runtime.launch(kernel, (1, 1, 1), (x, out), (), {})
        return [out]

    monkeypatch.setattr(capture.Recorder, "program", program)
    _, replay = capture.record(function, [torch.zeros(4)])
    assert replay is not None
    kernel.seen.clear()
    for current in (0, 1, 2):
        gpus.current = current
        assert replay(torch.ones(4)) is not None
        assert gpus.current == current
    assert kernel.seen == [(1, 101)] * 3
    assert gpus.changes == [1, 1]  # where it was not the current one


def test_captures_are_asked_of_the_device_of_the_tensors(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpus.current == 1)
    assert runtime.is_capturing(SECOND) and not runtime.is_capturing(FIRST)
    with FakeTensorMode():
        x = torch.empty(4, device="cuda:1")
    calls: list[Any] = []
    repeat = replay.Replay(lambda *given: calls.append(given) or [])  # type: ignore[func-returns-value]
    for _ in range(3):
        repeat(x)  # would be recorded the second time
    assert len(calls) == 3 and repeat._program is None


def test_limits_are_those_of_the_device_that_is_current_then(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without an index is another one when another one is current."""

    def properties(device: torch.device) -> Any:
        sizes = {"shared_memory_per_block_optin": 1, "multi_processor_count": 1, "warp_size": 32}
        return SimpleNamespace(name=f"GPU {device.index}", major=9, minor=0, **sizes)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    devices.limits_of.cache_clear()
    try:
        for gpus.current in (0, 1, 0):
            found = devices.gpu_of(torch.device("cuda")).name
            assert found == f"GPU {gpus.current}"
        assert devices.gpu_of(SECOND).name == "GPU 1"
        # a rewrite whose check passed on one kind of GPU is checked again on another
        assert records._device(FIRST) != records._device(SECOND)
    finally:
        devices.limits_of.cache_clear()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device | None]]:
    """For each kernel that runs in the interpreter the device whose guard it runs in."""
    from triton.runtime.interpreter import GridExecutor

    devices: list[torch.device] = []
    found: list[torch.device | None] = []
    run = GridExecutor.__call__

    @contextlib.contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        devices.append(device)
        yield
        devices.pop()

    def seen(self: Any, *arguments: Any, **options: Any) -> Any:
        found.append(devices[-1] if devices else None)
        return run(self, *arguments, **options)

    monkeypatch.setattr(runtime, "on_device", guard)
    monkeypatch.setattr(GridExecutor, "__call__", seen)
    monkeypatch.setattr(replay, "RECORDS", False)
    yield found
    assert found and set(found) == {torch.device("cpu")}


@inside
@pytest.mark.parametrize(
    "name",
    ["attention-triton-forward_kl", "attention-triton-js", "attention-triton-head_mean",
     "linear-mean", "linear-rows", "rows-tiles", "rows-heads_mean", "shards-forward_kl",
     "shards-js"],
)  # fmt: skip
def test_operators(name: str, launched: list[Any]) -> None:
    device_cases.STEPS[name].step(0, "cpu")
    assert len(launched) >= (1 if name.startswith("linear") else 2)


@inside
def test_a_stored_gradient_is_scaled(launched: list[Any]) -> None:
    """What a GPU multiplies gradients of the forward by the gradient of the sum with."""
    from torch_streamkl.kernels.scale import scale_

    x = torch.ones(300)
    scale_(x, torch.tensor(3.0))
    assert torch.equal(x, torch.full((300,), 3.0)) and launched


# arguments of an operator, one after the other on another device
MAPS = dict.fromkeys(("student_q", "student_k", "teacher_q", "teacher_k"), (1, 2, 5, 8))
HEADS = dict.fromkeys(
    ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight"), (5, 8)
)
BOOL, INT, LONG = torch.bool, torch.int32, torch.int64
OPTIONS: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype | None]]] = {
    "attention_kl": {
        "attn_mask": ((5, 5), BOOL), "student_bias": ((5, 5), None),
        "teacher_bias": ((5, 5), None),
        "student_alibi_slopes": ((2,), None), "teacher_alibi_slopes": ((2,), None),
        "student_sink": ((2,), None), "teacher_sink": ((2,), None), "key_lengths": ((1,), INT),
        "row_mask": ((1, 1, 5), BOOL), "teacher_lse": ((1, 2, 5), None),
    },
    "attention_kl_varlen": {"cu_seqlens_q": ((2,), INT), "cu_seqlens_k": ((2,), INT)},
    "linear_kl": {
        "student_bias": ((5,), None), "teacher_bias": ((5,), None), "labels": ((5,), LONG),
        "row_mask": ((5,), BOOL), "row_weight": ((5,), None),
    },
    "row_program": {
        "rows": ((1, 2, 5), None), "keys": ((1, 2, 5), None), "pairs": ((1, 2, 5, 5), None),
        "columns": ((1, 2, 5, 3), LONG), "key_lengths": ((1,), INT), "mask": ((1, 1, 5, 5), BOOL),
    },
}  # fmt: skip


def _call(operator: str, moved: str) -> Tensor:
    """An operator with its tensors, one of which is elsewhere, where it is an option alone."""
    shapes = HEADS if operator == "linear_kl" else MAPS
    x = {name: torch.randn(shape) for name, shape in shapes.items()}
    options = {
        name: torch.zeros(shape, dtype=dtype)
        for name, (shape, dtype) in OPTIONS[operator].items()
        if operator != "attention_kl" or name == moved
    }
    for given in (x, options):
        given.update({k: t.to("meta") for k, t in given.items() if k == moved})
    if operator == "attention_kl_varlen":
        packed = {name: t[0].transpose(0, 1) for name, t in x.items()}
        return attention_kl_varlen(**packed, **options, max_seqlen_q=5, max_seqlen_k=5)
    if operator != "row_program":
        mean = {"head_reduction": "mean"} if moved == "teacher_lse" else {}
        return {"attention_kl": attention_kl, "linear_kl": linear_kl}[operator](
            **x, **options, **mean
        )
    kinds = {k: {k: options.pop(k)} for k in ("rows", "keys", "pairs", "columns")}
    dots = {"t": (x["teacher_q"], x["teacher_k"]), "s": (x["student_q"], x["student_k"])}
    return row_program(lambda e: (e.t * e.s).sum("key"), dots=dots, **kinds, **options)


@pytest.mark.parametrize(
    ("operator", "moved"),
    [(f, x) for f in OPTIONS for x in (*(HEADS if f == "linear_kl" else MAPS), *OPTIONS[f])],
)
def test_tensors_on_two_devices_are_refused(operator: str, moved: str) -> None:
    with pytest.raises(ValueError, match=r"all tensors must be on one device; .* on meta"):
        _call(operator, moved)
