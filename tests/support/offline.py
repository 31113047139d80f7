"""Compile what a launch would run, for a GPU that is not here.

`record_launches` notes kernels and arguments instead of running them; `compile_launch` builds one
for a target and reads registers, spills and shared memory from the binary.
"""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")
CAPABILITY = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "gfx942": (9, 4)}
SHARED_LIMIT_KIB = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}
MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}
_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.bool: "i1",
    torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


@dataclass(frozen=True)
class Descriptor:
    """What stands for a Gluon TensorDescriptor, which wants an address."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any


@dataclass(frozen=True)
class Launch:
    kernel: JITFunction
    grid: tuple[int, ...]
    args: dict[str, Any]  # by parameter name
    options: dict[str, int]


@dataclass(frozen=True)
class Resources:
    registers: int
    spill_bytes: int
    shared_bytes: int
    asm: dict[str, Any]


@contextlib.contextmanager
def record_launches(target: str) -> Iterator[list[Launch]]:
    """Inside, launches are recorded and tensors fake, on a device that looks like the target."""
    from torch_streamkl import launch
    from torch_streamkl.kernels import hopper_attention, plans

    launches: list[Launch] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
        assert options["enable_fp_fusion"], "left to Triton's default, which changes"
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        launches.append(Launch(self, tuple(grid), dict(bound.arguments), options))

    patches = {
        "multiprocessors": MULTIPROCESSORS[target],
        "shared_memory_kib": SHARED_LIMIT_KIB[target],
        "compute_capability": CAPABILITY[target],
        "device_name": target,  # whose launches nobody has tuned
    }
    saved = {name: getattr(launch, name) for name in patches}
    original, descriptor = JITFunction.run, hopper_attention.TensorDescriptor
    plans.clear_plans()  # they keep the tiles chosen for another target
    try:
        hopper_attention.TensorDescriptor = Descriptor
        JITFunction.run = run
        for name, value in patches.items():
            setattr(launch, name, lambda _device, value=value: value)
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield launches
    finally:
        JITFunction.run = original
        hopper_attention.TensorDescriptor = descriptor
        plans.clear_plans()
        for name, value in saved.items():
            setattr(launch, name, value)


def compile_launch(launch: Launch, target: str) -> Resources:
    """Compile one recorded launch for a target."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    constexprs = {p.name for p in launch.kernel.params if p.is_constexpr}

    def describe(value: Any, path: tuple[int, ...], is_special: bool = True) -> Any:
        if isinstance(value, Descriptor):
            dtype = _TYPES[value.base.dtype]
            return f"tensordesc<{dtype}{value.block_shape},{value.layout!r}>"
        if isinstance(value, tuple):
            parts = [describe(v, (*path, i)) for i, v in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, torch.Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return "*" + _TYPES[value.dtype]
        if value is None or (isinstance(value, int) and value == 1 and is_special):
            constants[path] = value
            return "constexpr"
        if isinstance(value, int):
            if value % 16 == 0 and is_special:
                attributes[path] = [["tt.divisibility", 16]]
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        return "fp32"

    for index, name in enumerate(launch.kernel.arg_names):
        if name in constexprs:
            signature[name] = "constexpr"
            constants[(index,)] = launch.args[name]
        else:
            is_special = not launch.kernel.params[index].do_not_specialize
            signature[name] = describe(launch.args[name], (index,), is_special)
    source_of = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = source_of(
        fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes
    )
    kernel = triton.compile(source, target=TARGETS[target], options=dict(launch.options))
    registers, spills = _resources(kernel.asm, target)
    return Resources(registers, spills, kernel.metadata.shared, kernel.asm)


def _resources(asm: dict[str, Any], target: str) -> tuple[int, int]:
    if target.startswith("gfx"):
        text = asm["amdgcn"]

        def field(key: str) -> int:
            return int(re.search(rf"\.{key}:\s*(\d+)", text)[1])

        return field("vgpr_count"), 4 * field("vgpr_spill_count")
    text = _dumped(asm["cubin"], "cuobjdump", "--dump-resource-usage")
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


def stack_in_main_loops(cubin: bytes) -> list[str]:
    """Instructions that use the stack in the loops of a Hopper kernel over tiles without masks."""
    text = _dumped(cubin, "nvdisasm", "-c")
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        if instruction := re.match(r"\s+/\*[0-9a-f]{4,5}\*/\s+(.*?)\s*;", line):
            code.append(instruction[1])
    loops: list[list[str]] = []
    for stop, instruction in enumerate(code):
        branch = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", instruction)
        start = labels.get(branch[1], stop + 1) if branch else stop + 1
        body = code[start:stop]
        if any("HGMMA" in x for x in body) and not any("FSEL" in x for x in body):
            loops.append(body)
    assert loops, "no loop with matmuls and without masks"
    return [x for body in loops for x in body if re.search(r"\b(STL|LDL)\b", x)]


def _dumped(cubin: bytes, tool: str, option: str) -> str:
    """What a tool prints of a binary."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(cubin)
        command = [str(_tool(tool)), option, str(binary)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def _tool(name: str) -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def ptxas_messages(ptx: str) -> str:
    """What ptxas says of a kernel for sm_90a, warnings of serialised wgmma (C75xx) included."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        for name in ("ptxas", "ptxas-blackwell"):  # the one that knows the version of this PTX
            command = [str(_tool(name)), "-v", "-arch=sm_90a", str(source), "-o", str(binary)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode == 0:
                return run.stderr
    raise RuntimeError(run.stderr)
