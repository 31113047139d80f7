"""Compile what a launch would run, for a GPU that is not here.

`record_launches` notes kernels and arguments instead of running them; `compile_launch` builds one
for a target and reads registers, spills and shared memory from the binary.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

KIB = 1024


@dataclass(frozen=True)
class Target:
    """A GPU as Triton's compiler and as torch describe it."""

    gpu: GPUTarget
    properties: SimpleNamespace  # what torch.cuda.get_device_properties returns

    @property
    def shared_bytes(self) -> int:
        """The most that a block of threads may have."""
        known = vars(self.properties)
        return int(known.get("shared_memory_per_block_optin", known["shared_memory_per_block"]))

    @property
    def multiprocessors(self) -> int:
        return int(self.properties.multi_processor_count)

    @property
    def is_hip(self) -> bool:
        return self.gpu.backend == "hip"


def _target(arch: int | str, major: int, minor: int, shared_kib: int, count: int) -> Target:
    """Of AMD where the architecture has a name: torch has no shared_memory_per_block_optin."""
    backend, warp_size = ("hip", 64) if isinstance(arch, str) else ("cuda", 32)
    properties = SimpleNamespace(
        name=arch if backend == "hip" else f"sm_{arch}",
        major=major,
        minor=minor,
        multi_processor_count=count,
        warp_size=warp_size,
        shared_memory_per_block=(shared_kib if backend == "hip" else 48) * KIB,
    )
    if backend == "cuda":
        properties.shared_memory_per_block_optin = shared_kib * KIB
    return Target(GPUTarget(backend, arch, warp_size), properties)


TARGETS = {
    "sm_75": _target(75, 7, 5, 64, 40),  # T4
    "sm_80": _target(80, 8, 0, 163, 108),  # A100
    "sm_86": _target(86, 8, 6, 99, 72),  # A10
    "sm_89": _target(89, 8, 9, 99, 128),  # L40S, RTX 4090
    "sm_90": _target(90, 9, 0, 227, 132),  # H100, H200
    "sm_100": _target(100, 10, 0, 227, 148),  # B200
    "sm_103": _target(103, 10, 3, 227, 148),  # B300
    "sm_120": _target(120, 12, 0, 99, 170),  # RTX 5090
    "gfx90a": _target("gfx90a", 9, 0, 64, 110),  # MI250, one of its two
    "gfx942": _target("gfx942", 9, 4, 64, 304),  # MI300X
    "gfx950": _target("gfx950", 9, 5, 160, 256),  # MI355X
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")
_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.bool: "i1", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32",
    torch.int64: "i64",
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
    said: str  # what ptxas says; empty where the binary was in Triton's cache


@contextlib.contextmanager
def looks_like(target: str) -> Iterator[None]:
    """Inside, torch tells of one GPU, the target."""
    from torch_streamkl.runtime import devices, launch_table

    properties = TARGETS[target].properties
    version = "7.0" if TARGETS[target].is_hip else None
    table = launch_table.new_table(target)  # whose launches nobody has tuned
    with (
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch("torch.version.hip", version),
        launch_table.replaced(table),  # clears plans, which keep the tiles of another target
    ):
        devices.limits_of.cache_clear()
        try:
            yield
        finally:
            devices.limits_of.cache_clear()


@contextlib.contextmanager
def record_launches(target: str) -> Iterator[list[Launch]]:
    """Inside, launches are recorded and tensors fake, on a device that looks like the target."""
    from torch_streamkl.attention.hopper import descriptors

    launches: list[Launch] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
        assert "enable_fp_fusion" in options, "left to Triton's default, which changes"
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        launches.append(Launch(self, tuple(grid), dict(bound.arguments), options))

    with (
        looks_like(target),
        mock.patch.object(descriptors, "TensorDescriptor", Descriptor),
        mock.patch.object(JITFunction, "run", run),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield launches


def compile_launch(launch: Launch, target: str) -> Resources:
    """Compile one recorded launch for a target."""
    said = io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        triton.knobs.nvidia.dump_ptxas_log = True
        kernel = triton.compile(
            _source(launch), target=TARGETS[target].gpu, options=dict(launch.options)
        )
    registers, spills = _resources(kernel.asm, target)
    return Resources(registers, spills, kernel.metadata.shared, kernel.asm, said.getvalue())


def check_frontend(launch: Launch, target: str) -> None:
    """Make Triton's first intermediate form of one recorded launch, or raise as Triton does."""
    source, gpu = _source(launch), TARGETS[target].gpu
    backend = triton.compiler.make_backend(gpu)
    options = backend.parse_options({**launch.options, **source.parse_options()})
    context = triton._C.libtriton.ir.context()
    triton._C.libtriton.ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    source.make_ir(gpu, options, functions, modules, context)


def signature_of(launch: Launch) -> tuple[Any, ...]:
    """What the kernel is compiled for: launches that are equal in it may share a binary."""
    source = _source(launch)
    about = source.signature, source.constants, source.attrs, launch.options
    return (launch.kernel, *map(str, about))


def _source(launch: Launch) -> ASTSource:
    """What Triton compiles; a 1 among the arguments is a constant, as when it launches."""
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
    return source_of(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


def _resources(asm: dict[str, Any], target: str) -> tuple[int, int]:
    if target.startswith("gfx"):
        text = asm["amdgcn"]

        def field(key: str) -> int:
            return int(re.search(rf"\.{key}:\s*(\d+)", text)[1])

        return field("vgpr_count"), 4 * field("vgpr_spill_count")
    text = _dumped(asm["cubin"], "cuobjdump", "--dump-resource-usage")
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


def loops_of(cubin: bytes) -> list[list[str]]:
    """Instructions of every loop, those of inner loops included."""
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
        if start <= stop:
            loops.append(code[start:stop])
    return loops


def stack_in_main_loops(cubin: bytes) -> list[str]:
    """Instructions that use the stack in the loops of a Hopper kernel over tiles without masks."""
    loops = [
        body
        for body in loops_of(cubin)
        if any("HGMMA" in x for x in body) and not any("FSEL" in x for x in body)
    ]
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
