"""Recorded launches call what Triton's launcher calls, with tensor maps of each call's tensors."""

from __future__ import annotations

from types import BuiltinFunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from torch_streamkl.runtime import capture, triton_launcher
from torch_streamkl.runtime.launch import launch

nvidia = pytest.importorskip("triton.backends.nvidia.driver")
SIGNATURE = {"x": "tensordesc<bf16[1, 1, 64, 64]>", "p": "*fp32", "n": "i32", "C": "constexpr",
             "y": "tensordesc<bf16[1, 1, 64, 64]>"}  # fmt: skip
META = {
    "swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64],
    "fp4_padded": False,
}  # fmt: skip


class Driver:
    """Stands for what Triton has compiled for its launches."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)


class PyCUtensorMap:
    """Stands for an encoded tensor map: equal where it was made of the same."""

    count = 0

    def __init__(self, *made_of: Any) -> None:
        PyCUtensorMap.count += 1
        self.made_of = made_of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PyCUtensorMap) and self.made_of == other.made_of


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    utils = SimpleNamespace(
        fill_tma_descriptor=PyCUtensorMap, fill_tma_descriptor_tiled=PyCUtensorMap, launch=found
    )
    if hasattr(nvidia, "make_launcher"):  # Triton 3.6: a C module for every signature
        monkeypatch.setattr(nvidia, "library_dirs", list)
        built = SimpleNamespace(launch=found)
        monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **_: built)
    monkeypatch.setattr(triton_launcher, "BuiltinFunctionType", (BuiltinFunctionType, Driver))
    monkeypatch.setattr(nvidia, "TMA_DTYPE_DEVICE_TO_HOST", {10: 10})
    active = SimpleNamespace(
        utils=utils, allocate_default_profile_scratch=lambda *_: None, get_current_device=lambda: 0
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(capture, "runs_directly", lambda: True)
    PyCUtensorMap.count = 0
    return found


def launcher_to(driver: Driver, signature: dict[str, str] = SIGNATURE, **more: Any) -> Any:
    """Triton's launcher as it makes itself, without what only a GPU gives."""
    found = object.__new__(nvidia.CudaLauncher)
    meta = [META for kind in signature.values() if kind.startswith("tensordesc")]
    vars(found).update(
        launch=nvidia.wrap_handle_tensordesc(driver, signature, meta),
        num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
        profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=True,
        gsan_enabled=False, arg_annotations=b"annotations", kernel_signature=b"signature",
    )  # fmt: skip
    vars(found).update(more)
    return found


class Kernel:
    """Stands for a compiled kernel."""

    function, packed_metadata = 17, (4, 1, 0)

    def __init__(self, launcher: Any) -> None:
        self.run = launcher
        metas = [META for kind in SIGNATURE.values() if kind.startswith("tensordesc")]
        self.metadata = SimpleNamespace(tensordesc_meta=metas)
        self.src = SimpleNamespace(
            fn=SimpleNamespace(arg_names=[*SIGNATURE]), signature=SIGNATURE, constants={"C": 7}
        )

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any, **_: Any) -> Kernel:
            given = (*grid, 0, self.function, self.packed_metadata, None, None, None)
            self.run(*given, *_addresses(arguments))
            return self

        return launch


def _addresses(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_addresses, x))
    return x.data_ptr() if isinstance(x, Tensor) else x


def _descriptor(x: Tensor) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, 64, 64])


def _program(kernel: Kernel, *, described: bool = True) -> tuple[Any, Any]:
    """What launches a kernel with three tensors, and the same recorded."""

    def function(x: Tensor, p: Tensor, y: Tensor) -> list[Tensor]:
        out = p.new_empty(p.shape)
        arguments = (_descriptor(x), out, 5, 7, _descriptor(y)) if described else (p, out, 5)
        launch(kernel, (3, 2, 1), arguments, (), {})
        return [out]

    _, program = capture.record(function, _tensors(0))
    assert program is not None
    return function, program


def _tensors(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    x, y = (torch.randn(1, 2, 64, 64).to(torch.bfloat16) for _ in range(2))
    return [x, torch.zeros(8), y]


def _leaves(x: Any) -> list[Any]:
    return [y for each in x for y in _leaves(each)] if isinstance(x, (tuple, list)) else [x]


def _without_outputs(call: tuple[Any, ...], out: int) -> list[Any]:
    """Every call allocates anew."""
    return ["out" if x == out and type(x) is int else x for x in _leaves(call)]


def _compare(driver: Driver, function: Any, program: Any, tensors: list[Tensor]) -> None:
    """The driver is called alike by both."""
    driver.calls.clear()
    (usual,), (out,) = function(*tensors), program(*tensors)
    expected, found = driver.calls
    assert _without_outputs(found, out.data_ptr()) == _without_outputs(expected, usual.data_ptr())
    assert out.data_ptr() in _leaves(found)


@pytest.mark.parametrize(
    ("described", "most_addresses"),
    [(True, triton_launcher.MAX_ADDRESSES), (True, 2), (False, triton_launcher.MAX_ADDRESSES)],
)
def test_the_driver_is_called_as_without_a_recording(
    driver: Driver, described: bool, most_addresses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With maps of many addresses, of which some are let go, too."""
    monkeypatch.setattr(triton_launcher, "MAX_ADDRESSES", most_addresses)
    signature = SIGNATURE if described else {"p": "*fp32", "out": "*fp32", "n": "i32"}
    kernel = Kernel(launcher_to(driver, signature))
    if not described:
        kernel.metadata.tensordesc_meta = []
    function, program = _program(kernel, described=described)
    every = [_tensors(i) for i in range(5)]
    for tensors in (*every, *every):
        _compare(driver, function, program, tensors)


def _stop(*_: Any) -> None:
    raise ZeroDivisionError


def test_maps_are_encoded_once_for_an_address(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the launcher is not called."""
    _, program = _program(Kernel(launcher_to(driver)))
    every = [_tensors(i) for i in range(3)]
    monkeypatch.setattr(nvidia.CudaLauncher, "__call__", _stop)
    for tensors in every:
        program(*tensors)
    before = PyCUtensorMap.count
    monkeypatch.setattr(nvidia, "make_tensordesc_arg", _stop)
    for tensors in (*every, *every):
        program(*tensors)
    assert PyCUtensorMap.count == before


@pytest.mark.parametrize("needed", ["global_scratch_size", "profile_scratch_size", "gsan_enabled"])
def test_what_a_launch_allocates_is_left_to_the_launcher(driver: Driver, needed: str) -> None:
    launcher, x = launcher_to(driver), _tensors(0)
    arguments = (_descriptor(x[0]), x[1], 5, 7, _descriptor(x[2]))
    assert triton_launcher.c_function(Kernel(launcher), arguments) is not None
    setattr(launcher, needed, 64)
    assert triton_launcher.c_function(Kernel(launcher), arguments) is None


def test_an_unknown_launcher_is_called_itself(driver: Driver) -> None:
    usual = launcher_to(driver)

    class Unknown:
        launch = usual.launch

        def __call__(self, *arguments: Any) -> None:
            usual(*arguments)

    function, program = _program(Kernel(Unknown()))
    _compare(driver, function, program, _tensors(1))
