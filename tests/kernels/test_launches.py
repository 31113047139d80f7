"""Kernels are launched on the device of their tensors, whatever device is the current one.

Without a GPU: the guard is replaced by one that tells, or torch's functions by ones that remember.
`tests/kernels/test_other_devices.py` runs all operators on two GPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.interpreter import inside, quiet
from torch_streamkl import attention_kl, attention_kl_varlen, linear_kl, row_program
from torch_streamkl.fx_passes.validation import records
from torch_streamkl.kernels.arguments import Window
from torch_streamkl.runtime import capture, devices, replay
from torch_streamkl.runtime import launch as runtime

pytestmark = quiet
FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


class Gpus:
    """Stands for torch's functions: the current device, and every change of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
        self.changes: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(capture, "_current_device", lambda: self.current)
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


def _normal(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@inside
@pytest.mark.parametrize("form", ["dense", "two_pass", "head_mean"])
def test_attention_kl(form: str, launched: list[Any]) -> None:
    heads = 2 if form == "head_mean" else 1
    x = _normal((1, 1, 5, 16), (1, 1, 9, 16), (1, heads, 5, 16), (1, heads, 9, 16))
    options: dict[str, Any] = {"divergence": "js" if form == "two_pass" else "forward_kl"}
    if form == "head_mean":
        options["head_reduction"] = "mean"
    attention_kl(*x, **options, impl="triton").sum().backward()
    assert len(launched) >= 2


@inside
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_kl(reduction: str, launched: list[Any]) -> None:
    x = _normal((3, 8), (40, 8), (3, 8), (40, 8))
    (linear_kl(*x, reduction=reduction, impl="triton").sum() * 2).backward()
    assert launched


@inside
def test_a_stored_gradient_is_scaled(launched: list[Any]) -> None:
    """What a GPU multiplies gradients of the forward by the gradient of the sum with."""
    from torch_streamkl.kernels.scale import scale_

    x = torch.ones(300)
    scale_(x, torch.tensor(3.0))
    assert torch.equal(x, torch.full((300,), 3.0)) and launched


@inside
@pytest.mark.parametrize("kind", ["attention", "heads"])
def test_row_program(kind: str, launched: list[Any]) -> None:
    if kind == "attention":
        tq, tk, sq, sk = _normal(*((1, 1, 5, 8), (1, 1, 9, 8)) * 2)
    else:
        tq, tk, sq, sk = _normal(*((5, 8), (40, 8)) * 2)

    def squares(e: Any) -> Any:
        difference = e.t.softmax("key") - e.s.softmax("key")
        return (difference * difference).sum("key")

    dots = {"t": (tq.detach(), tk.detach()), "s": (sq, sk)}
    reduction = "none" if kind == "attention" else "mean"
    row_program(squares, dots=dots, reduction=reduction, impl="triton").sum().backward()
    assert launched


@inside
@pytest.mark.parametrize("divergence", ["forward_kl", "js"])
def test_shards_of_a_vocabulary(divergence: str, launched: list[Any]) -> None:
    from tests.kernels.test_shard_kernels import problem, sharded
    from torch_streamkl.linear.triton import shards

    sharded(problem(divergence), shards, [0, 40, 150])
    assert len(launched) >= 2 + 1 + 2


MAPS = {
    "student_q": (1, 2, 5, 8), "student_k": (1, 2, 9, 8), "teacher_q": (1, 2, 5, 8),
    "teacher_k": (1, 2, 9, 8),
}  # fmt: skip
HEADS = {
    "student_hidden": (5, 8), "student_weight": (9, 8), "teacher_hidden": (5, 8),
    "teacher_weight": (9, 8),
}  # fmt: skip


def _offsets() -> Tensor:
    return torch.tensor([0, 5], dtype=torch.int32)


ATTENTION_OPTIONS: dict[str, Any] = {
    "attn_mask": torch.ones(5, 9, dtype=torch.bool), "student_bias": torch.zeros(5, 9),
    "teacher_bias": torch.zeros(5, 9), "student_alibi_slopes": torch.zeros(2),
    "teacher_alibi_slopes": torch.zeros(2), "student_sink": torch.zeros(2),
    "teacher_sink": torch.zeros(2), "key_lengths": torch.tensor([9]),
    "row_mask": torch.ones(1, 1, 5, dtype=torch.bool), "teacher_lse": torch.zeros(1, 2, 5),
}  # fmt: skip
LINEAR_OPTIONS: dict[str, Any] = {
    "student_bias": torch.zeros(9), "teacher_bias": torch.zeros(9),
    "labels": torch.zeros(5, dtype=torch.int64), "row_mask": torch.ones(5, dtype=torch.bool),
    "row_weight": torch.ones(5),
}  # fmt: skip
PACKED_OPTIONS: dict[str, Any] = {"cu_seqlens_q": _offsets(), "cu_seqlens_k": _offsets()}


def _call(operator: str, moved: str) -> Tensor:
    """An operator with all of its options, one of whose tensors is elsewhere."""

    def given(tensors: dict[str, Any]) -> dict[str, Any]:
        return {k: x.to("meta") if k == moved else x for k, x in tensors.items()}

    if operator == "linear_kl":
        heads = {name: torch.randn(shape) for name, shape in HEADS.items()}
        return linear_kl(**given(heads), **given(LINEAR_OPTIONS))
    if operator == "attention_kl_varlen":
        packed = {name: torch.randn(5, 2, 8) for name in MAPS}
        longest = {"max_seqlen_q": 5, "max_seqlen_k": 5}
        return attention_kl_varlen(**given(packed), **given(PACKED_OPTIONS), **longest)
    if operator == "attention_kl":
        maps = {name: torch.randn(shape) for name, shape in MAPS.items()}
        mean = {"head_reduction": "mean"} if moved == "teacher_lse" else {}
        options = {k: x for k, x in ATTENTION_OPTIONS.items() if k == moved}
        return attention_kl(**given(maps), **given(options), **mean)
    x = given({name: torch.randn(shape) for name, shape in MAPS.items()})
    dots = {"t": (x["teacher_q"], x["teacher_k"]), "s": (x["student_q"], x["student_k"])}
    return row_program(
        lambda e: (e.t * e.s).sum("key"),
        dots=dots,
        rows=given({"rows": torch.ones(1, 2, 5)}),
        keys=given({"keys": torch.ones(1, 2, 9)}),
        pairs=given({"pairs": torch.ones(1, 2, 5, 9)}),
        columns=given({"ids": torch.zeros(1, 2, 5, 3, dtype=torch.int64)}),
        **given({"key_lengths": torch.tensor([9])}),
        **given({"mask": torch.ones(1, 1, 5, 9, dtype=torch.bool)}),
    )


TENSORS = {
    "attention_kl": [*MAPS, *ATTENTION_OPTIONS],
    "attention_kl_varlen": [*MAPS, *PACKED_OPTIONS],
    "linear_kl": [*HEADS, *LINEAR_OPTIONS],
    "row_program": [*MAPS, "rows", "keys", "pairs", "ids", "key_lengths", "mask"],
}


@pytest.mark.parametrize(
    ("operator", "moved"), [(f, name) for f, names in TENSORS.items() for name in names]
)
def test_tensors_on_two_devices_are_refused(operator: str, moved: str) -> None:
    with pytest.raises(ValueError, match=r"all tensors must be on one device; .* on meta"):
        _call(operator, moved)
