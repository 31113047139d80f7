"""Captures what a call does on the CPU as a Python function that replays it.

Grouping arguments, finding plans, torch's dispatcher and Triton's own checks take several times as
long as a short kernel, and depend on metadata only. So `record` runs an implementation once under
a recorder that sees its allocations, its few torch operations and its launches (all go through
`runtime.launch`). It writes them as the source of a Python function of the tensors, in which
addresses are variables and all else is constant.

If an operation is not in the lists below, or a tensor comes from elsewhere, the problem is
not capturable: every call runs the implementation.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.jit import JITCallable, KernelInterface

from torch_streamkl.runtime.descriptors import Address, is_descriptor, with_base
from torch_streamkl.runtime.devices import matmul_precision
from torch_streamkl.runtime.events import Events
from torch_streamkl.runtime.launch import observed_by, on_device, ready_device
from torch_streamkl.runtime.triton_launcher import TensorMaps, c_function

Program = Callable[
    ..., Any
]  # of the tensors; None where it does not apply: call what was recorded
# whose effect depends on their arguments' metadata and contents only, and never waits for a GPU
_OPERATIONS = {"sum", "mul", "zero_", "zeros", "new_zeros", "zeros_like", "clone", "_to_copy"}
_OPERATIONS |= {"_unsafe_view"}  # of a clone: torch.reshape
# of row programs, between launches
_OPERATIONS |= {"__and__", "__or__", "add", "add_", "addmm_", "bitwise_and", "bitwise_or"}
_OPERATIONS |= {"clamp_max", "contiguous", "neg"}
_OPERATIONS |= {"div", "eq", "exp", "full", "gather", "ge", "log", "lt", "masked_fill", "mm"}
_OPERATIONS |= {"scalar_tensor", "scatter_", "scatter_add_", "sub", "sum_to_size", "to", "where"}
_ON_CPU = {"scalar_tensor"}  # numbers of `where`, also of a GPU's


class NotCapturable(Exception):
    """Raised at a step that cannot be written down."""


class CacheEpoch:
    """Counts how often launches were chosen anew: captures of earlier epochs are not replayed."""

    number = 0


def record(
    function: Callable[..., Sequence[Tensor | None]], tensors: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor | None], Program | None]:
    """Runs ``function(*tensors)`` and captures the same for other tensors of the same metadata.

    The program is None where the function cannot be recorded. It returns None, without having
    launched anything, where it does not apply: addresses that are not multiples of 16 bytes,
    other settings of torch, a profiler that watches Triton's launches. Like `runtime.launch`, it
    makes the tensors' device the current one.
    """
    tensors = _distinct(tensors)
    recorder = Recorder(tensors)
    with on_device(recorder.device), observed_by(recorder), recorder:
        outputs = function(*tensors)
    try:
        return outputs, recorder.program(outputs)
    except NotCapturable:
        return outputs, None
    finally:
        recorder.forget()


def _distinct(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Makes each argument of a call a distinct object: in another call they may differ.

    A loss may compare a model with itself, or get one gradient for two results.
    """
    count = Counter(id(x) for x in tensors if x is not None)
    return [x if x is None or count[id(x)] == 1 else x.detach() for x in tensors]


class Recorder(Events):
    """Writes the lines of a program while its function runs."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.constants: dict[str, Any] = {}
        self.lines: list[str] = []
        self.why_unsupported: str | None = None
        self._names: dict[int, str] = {}  # of tensors that are variables, by id
        self._views: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = {}
        self._pointers: dict[int, tuple[str, str]] = {}  # and the variable of whose memory it is
        self._count = 0  # of variables
        self._seen: dict[int, weakref.ref[Tensor]] = {}
        self._read: set[str] = set()  # variables of tensors that the next line needs
        self._last: dict[str, int] = {}  # the line that reads a variable last
        self._beside: set[str] = set()  # variables that a side stream may still read
        self._indent = ""  # of what is inside of a side stream
        self._makes: dict[int, str] = {}  # of a line that does nothing else, the variable it makes
        self._by_pointer: bool | None = None
        self.parameters = [f"t{i}" for i in range(len(tensors))]
        self._inputs = [(f"t{i}", x) for i, x in enumerate(tensors) if x is not None]
        for name, x in self._inputs:
            self._names[id(x)] = name
            self._pointers[id(x)] = f"a{name}", name
            if x.data_ptr() % 16:
                self.why_unsupported = "a tensor that is not aligned to 16 bytes"
        self.device = self._inputs[0][1].device

    def forget(self) -> None:
        """Releases all tensors."""
        for held in (self._views, self._seen, self._inputs):
            held.clear()

    def _see(self, x: Tensor) -> None:
        """Keeps an object alive while its id is a name, because a later object may get the same
        id.
        """
        if id(x) in self._seen:
            return

        def gone(_: Any, i: int = id(x)) -> None:
            for known in (self._seen, self._names, self._views, self._pointers):
                known.pop(i, None)

        self._seen[id(x)] = weakref.ref(x, gone)

    # ------------------------------------------------------------------------- what happens
    def classify(self, call: tuple[Any, ...], out: Any) -> None:
        self._read = set()
        with self._keeping_reasons():
            super().classify(call, out)

    @contextmanager
    def _keeping_reasons(self) -> Iterator[None]:
        try:
            yield
        except NotCapturable as error:
            self.why_unsupported = self.why_unsupported or str(error)

    def viewed(self, part: Tensor, position: int | None, call: tuple[Any, ...]) -> None:
        if part is not call[1][0]:
            self._see(part)
            self._views.setdefault(id(part), (*call, position))

    def computed(self, name: str, call: tuple[Any, ...], out: Any) -> None:
        if name not in _OPERATIONS:
            raise NotCapturable(f"the operation {name}")
        is_here = isinstance(out, Tensor) and out.device == self.device
        if not is_here and name not in _ON_CPU:
            raise NotCapturable(f"{name} of another device")
        text = self._call(*call)
        if id(out) in self._names:
            self._line(text)
        else:
            self._makes[len(self.lines)] = name = self._named(out)
            self._line(f"{name} = {text}")

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        arguments = [self._value(x) for x in args]
        arguments += [f"{key}={self._value(x)}" for key, x in kwargs.items()]
        return f"{self._constant(func)}({', '.join(arguments)})"

    def allocated(self, out: Tensor) -> None:
        size, strides, dtype = tuple(out.shape), tuple(out.stride()), self._constant(out.dtype)
        if out.device != self.device:
            raise NotCapturable("an allocation on another device")
        empty = self._constant(_empty_strided(self.device), "empty")
        self._line(f"{self._named(out)} = {empty}({size}, {strides}, {dtype})")

    def _line(self, text: str) -> None:
        for name in self._read:
            self._last[name] = len(self.lines)
        if self._indent:
            self._beside |= self._read
        self.lines.append(self._indent + text)

    def side_stream(self, what: str, stream: torch.cuda.Stream) -> None:
        """Writes a side stream's step down, and keeps the memory that it reads until the join."""
        self._read = set()
        side, device = self._constant(stream), self.device.index
        here = f"{self._constant(torch.cuda.current_stream)}({device})"
        now = f"stream = {self._stream()}"
        match what:
            case "fork":
                self._line(f"{side}.wait_stream({here})")
            case "enter":
                self._line(f"with {self._constant(torch.cuda.stream)}({side}):")
                self._indent = "    "
                self._line(now)
            case "exit":
                self._indent = ""
                self._line(now)
            case _:
                self._read, self._beside = self._beside, set()
                self._line(f"{here}.wait_stream({side})")

    def run(
        self,
        start: Callable[[], Any],
        kernel: Any,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        options: dict[str, int],
    ) -> Any:
        """Launches a kernel, and writes the launch down."""
        with _disable_current_modes():  # the interpreter's torch operations are none of these
            compiled = start()
        self._launch(kernel, compiled, grid, (*arguments, *constants), options)
        return compiled

    def _launch(
        self,
        kernel: Any,
        compiled: Any,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        options: dict[str, int],
    ) -> None:
        by_pointer = compiled is not None  # else the interpreter ran the kernel
        self._read = set()
        with self._keeping_reasons():
            if by_pointer and not runs_directly():
                raise NotCapturable("an unknown way to launch compiled kernels")
            if self._by_pointer not in (None, by_pointer):
                raise NotCapturable("some kernels are compiled, others interpreted")
            self._by_pointer = by_pointer
            if by_pointer:
                self._compiled(compiled, grid, arguments)
            else:
                values = ", ".join(map(self._value, arguments))
                start = self._constant(kernel[grid])
                self._line(f"{start}({values}, **{self._constant(options)})")

    def _compiled(
        self, kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...]
    ) -> None:
        """Writes down the call of the C function, or of Triton's launcher if that is unknown."""
        given = f"{', '.join(map(repr, grid))}, stream, {self._plain(kernel.function)}"
        found = c_function(kernel, arguments)
        if found is None:
            values = ", ".join(map(self._address_of, arguments))
            metadata = self._constant(kernel.packed_metadata)
            start = self._constant(kernel.run)
            self._line(f"{start}({given}, {metadata}, None, None, None, {values})")
            return
        each = zip(arguments, found.descriptors, strict=True)
        values = ", ".join([self._c_argument(x, described) for x, described in each])
        values = f"({values},)" if found.takes_tuple else values
        options = ", ".join(
            repr(x) if x is None or type(x) in (int, bool) else self._constant(x)
            for x in found.options
        )
        self._line(f"{self._constant(found.function)}({given}, {options}, {values})")

    def _c_argument(self, x: Any, described: tuple[TensorMaps, tuple[int, ...]] | None) -> str:
        if described is None:
            return self._address_of(x)
        maps, numbers = described
        encoded = f"{self._constant(maps)}[{self._pointer(x.base)}]"
        return ", ".join([encoded, *map(repr, numbers)])

    # ------------------------------------------------------------------------------- values
    def _named(self, x: Tensor) -> str:
        self._see(x)
        name = self._names[id(x)] = f"n{self._count}"
        self._count += 1
        self._read.add(name)
        return name

    def _constant(self, value: Any, name: str | None = None) -> str:
        name = name or f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def _tensor(self, x: Tensor) -> str:
        """Returns the variable of a tensor; a view is made when it is first needed."""
        name = self._names.get(id(x))
        if name is not None:
            self._read.add(name)
            return name
        if id(x) not in self._views:
            raise NotCapturable("a tensor from elsewhere")
        *call, position = self._views[id(x)]
        text = self._call(*call)
        part = "" if position is None else f"[{position}]"
        name = self._named(x)
        self._line(f"{name} = {text}{part}")
        return name

    def _pointer(self, x: Tensor) -> str:
        """Returns the variable of a tensor's address."""
        found = self._pointers.get(id(x))
        if found is not None:
            self._read.add(found[1])
            return found[0]
        base = x
        while id(base) not in self._names:
            if id(base) not in self._views:
                raise NotCapturable("a tensor from elsewhere")
            base = self._views[id(base)][1][0]  # the first argument of a view
        self._see(x)
        if base is x:
            source = f"{self._tensor(x)}.data_ptr()"
        else:
            source, offset = self._pointer(base), x.data_ptr() - base.data_ptr()
            if not offset:
                self._pointers[id(x)] = source, self._names[id(base)]
                return source
            source = f"{source} + {offset}"
        name = f"p{self._count}"
        self._count += 1
        self._pointers[id(x)] = name, self._names[id(base)]
        self._line(f"{name} = {source}")
        return name

    def _value(self, x: Any) -> str:
        """Writes an argument of an operation."""
        if isinstance(x, Tensor):
            return self._tensor(x)
        if isinstance(x, (tuple, list)) and _has_tensor(x):
            items = ", ".join(self._value(each) for each in x)
            kind = self._constant(type(x)) if hasattr(x, "_fields") else ""
            return f"{kind}({items},)" if not kind else f"{kind}({items})"
        return self._plain(x)

    def _address_of(self, x: Any) -> str:
        """Returns an argument of a compiled kernel, with tensors as addresses."""
        if isinstance(x, Tensor):
            return self._pointer(x)
        if isinstance(x, (tuple, list)) and not _is_constant(x):
            return f"({''.join(f'{self._address_of(each)}, ' for each in x)})"
        if is_descriptor(x):  # a program keeps no tensor alive
            of, base = self._constant(with_base, "with_base"), self._constant(Address, "Address")
            return f"{of}({self._constant(with_base(x, None))}, {base}({self._pointer(x.base)}))"
        return self._plain(x)

    def _plain(self, x: Any) -> str:
        if x is None or type(x) in (int, bool):
            return repr(x)
        if not _is_constant(x):
            raise NotCapturable(f"an argument of type {type(x).__name__}")
        return self._constant(x)

    # -------------------------------------------------------------------------- the program
    def program(self, outputs: Sequence[Tensor | None]) -> Program:
        """Compiles the recorded lines to a function."""
        if self.why_unsupported is not None:
            raise NotCapturable(self.why_unsupported)
        if self._by_pointer is None:
            raise NotCapturable("no launch")
        results = ", ".join("None" if x is None else self._tensor(x) for x in outputs)
        returned = {self._names[id(x)] for x in outputs if x is not None}
        addresses = [f"a{name}" for name, _ in self._inputs]
        guards = [
            f"({' | '.join(addresses)}) & 15",
            f"{self._constant(CacheEpoch)}.number != {CacheEpoch.number}",
        ]
        for setting in (matmul_precision, _is_deterministic):
            guards.append(f"{self._constant(setting)}() != {setting()!r}")
        lines = self._with_releases(returned)
        if self._by_pointer:
            guards.append(f"{self._constant(is_watched)}()")
            lines.insert(0, f"stream = {self._stream()}")
        first = [
            *self._device_guard(),
            *(f"a{name} = {name}.data_ptr()" for name, _ in self._inputs),
        ]
        body = [
            *first,
            f"if {' or '.join(guards)}:",
            "    return None",
            *lines,
            f"return ({results},)",
        ]
        source = "\n    ".join([f"def program({', '.join(self.parameters)}):", *body])
        scope = dict(self.constants)
        exec(compile(source, "<recorded launches>", "exec"), scope)
        program: Program = scope["program"]
        return program

    def _stream(self) -> str:
        """Writes the current stream of the tensors' device, as the driver takes it."""
        if self.device.type != "cuda":
            return "0"
        return f"{self._constant(torch._C._cuda_getCurrentRawStream)}({self.device.index})"

    def _device_guard(self) -> list[str]:
        """Writes a guard: if another device is current, the program runs again on its tensors'."""
        if self.device.type != "cuda":
            return []
        current, guard = self._constant(ready_device), self._constant(on_device)
        device = self._constant(self.device)
        return [
            f"if {current}() != {self.device.index}:",
            f"    with {guard}({device}):",
            f"        return program({', '.join(self.parameters)})",
        ]

    def _with_releases(self, returned: set[str]) -> list[str]:
        """Adds lines that release each tensor after the last line that reads its memory.

        Without those whose results nothing reads.
        """
        ends: dict[int, list[str]] = {}
        for name, index in self._last.items():
            if name not in returned and name not in self.parameters:
                ends.setdefault(index, []).append(name)
        lines = []
        for index, line in enumerate(self.lines):
            gone = ends.get(index, [])
            if self._makes.get(index) in gone:
                gone.remove(self._makes[index])
            else:
                lines.append(line)
            if gone:
                indent = line[: len(line) - len(line.lstrip())]
                lines.append(f"{indent}del {', '.join(gone)}")
        return lines


_is_deterministic = torch._C._get_deterministic_algorithms


def _empty_strided(device: torch.device) -> Callable[..., Tensor]:
    """Calls torch.empty_strided without argument parsing, as compiled graphs do."""
    guards: Any = torch._C._dynamo.guards
    found: Callable[..., Tensor]
    found = guards._empty_strided_cuda if device.type == "cuda" else guards._empty_strided_cpu
    return found


def _has_tensor(x: Any) -> bool:
    if isinstance(x, (tuple, list)):
        return any(_has_tensor(each) for each in x)
    return isinstance(x, Tensor)


def _is_constant(x: Any) -> bool:
    """Whether a value is the same in every call, and keeps no tensor alive."""
    if isinstance(x, (tuple, list)):
        return all(_is_constant(each) for each in x)
    if isinstance(x, dict):
        return all(_is_constant(each) for each in x.values())
    plain = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    return x is None or isinstance(x, (*plain, JITCallable, KernelInterface))


def is_watched() -> bool:
    """Returns whether a tool such as Triton's profiler observes launches."""
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


@functools.cache
def runs_directly() -> bool:
    """Returns whether this Triton launches compiled kernels by the call that captures replay."""
    from triton.compiler.compiler import CompiledKernel

    source = " ".join(inspect.getsource(CompiledKernel.__getitem__).split())
    return (
        "self.run(grid[0], grid[1], grid[2], stream, self.function, self.packed_metadata, "
        "launch_metadata, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *args)"
    ) in source
