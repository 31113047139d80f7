"""Finds the C function that Triton's launcher calls, for launches that capture.py replays.

The launcher is a Python function. In every launch it looks at all arguments, and lets the driver
encode a tensor map for each tensor descriptor, which together takes longer than a short kernel
runs. Both depend on addresses and metadata only. So a replayed launch calls the C function itself,
and `TensorMaps` keeps the encoded maps of a descriptor by address.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

import triton

from torch_streamkl.runtime.descriptors import Address, is_descriptor, with_base

log = logging.getLogger("torch_streamkl")
MAX_ADDRESSES = 256  # of one descriptor; a map is 128 bytes, and does not own the memory
# How CudaLauncher.__call__ calls its C function: Triton 3.6 and 3.9. In the second the C function
# is the same for all kernels, and takes a kernel's arguments as one tuple.
_CALLS = (
    "self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, "
    "self.launch_pdl, global_scratch, profile_scratch, *args)",
    "self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, "
    "self.launch_pdl, kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook, "
    "global_scratch, profile_scratch, self.arg_annotations, self.kernel_signature, kernel_args)",
)


class TensorMaps(dict[int, Any]):
    """Encodes the tensor map of a descriptor's shape, strides and block, once for an address."""

    def __init__(self, encode: Callable[[int], Any]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, address: int) -> Any:
        if len(self) >= MAX_ADDRESSES:
            self.clear()
        found = self[address] = self._encode(address)
        return found


@dataclass(frozen=True)
class CFunction:
    """Holds a compiled kernel's C function and its arguments but the grid, stream and kernel's."""

    function: Callable[..., None]
    options: tuple[Any, ...]  # after the kernel
    takes_tuple: bool  # of the kernel's arguments
    descriptors: tuple[tuple[TensorMaps, tuple[int, ...]] | None, ...]  # of each argument


def c_function(compiled: Any, arguments: tuple[Any, ...]) -> CFunction | None:
    """Returns the C function that launches a kernel; None if only its launcher can call it.

    In place of a descriptor it takes the tensor map, and the numbers that are returned beside.
    """
    try:
        return _c_function(compiled, arguments)
    except Exception as error:  # of parts of Triton that may move: its launcher is always right
        log.debug("launches are replayed by Triton's launcher: %r", error)
        return None


def _c_function(compiled: Any, arguments: tuple[Any, ...]) -> CFunction | None:
    launcher = compiled.run
    form = _form_of(launcher.__class__)
    # what a launch allocates, and checks of memory accesses, are the launcher's own matter
    sizes = [getattr(launcher, f"{name}_scratch_size", 1) for name in ("global", "profile")]
    if form is None or any(sizes) or getattr(launcher, "gsan_enabled", False):
        return None
    function = _function_of(compiled, form)
    metas = list(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    if function is None or len(metas) != sum(map(is_descriptor, arguments)) or None in metas:
        return None
    left = iter(metas)
    descriptors = tuple(
        _described(x, next(left), form) if is_descriptor(x) else None for x in arguments
    )
    flags = launcher.launch_cooperative_grid, launcher.launch_pdl
    metadata, none = (compiled.packed_metadata, None, None, None), (None, None)
    if form == 0:
        return CFunction(function, (*flags, *none, *metadata), False, descriptors)
    signature = launcher.arg_annotations, launcher.kernel_signature
    return CFunction(function, (*flags, *metadata, *none, *signature), True, descriptors)


@functools.cache
def _form_of(launcher: type) -> int | None:
    """Returns the number of the known call that a launcher makes."""
    try:
        source = " ".join(inspect.getsource(launcher.__call__).split())
    except (OSError, TypeError, AttributeError):
        return None
    return next((i for i, call in enumerate(_CALLS) if call in source), None)


def _function_of(compiled: Any, form: int) -> Any:
    """Returns the C function that the launcher of a kernel calls."""
    launch = compiled.run.launch
    if isinstance(launch, BuiltinFunctionType):  # no descriptors
        return launch
    if form == 1:
        return triton.runtime.driver.active.utils.launch
    # It has a C module of its own for every signature, which its launcher has just built. The
    # launcher keeps it where only its own function finds it; Triton finds it by its source.
    from triton.backends.nvidia import driver

    source, metadata = compiled.src, compiled.metadata
    names = source.fn.arg_names
    constants = {
        (names.index(key),) if isinstance(key, str) else key: value
        for key, value in getattr(source, "constants", {}).items()
    }
    text = driver.make_launcher(constants, dict(source.signature), metadata.tensordesc_meta)
    module = driver.compile_module_from_src(
        src=text,
        name="__triton_launcher",
        library_dirs=driver.library_dirs(),
        include_dirs=driver.include_dirs,
        libraries=driver.libraries,
    )
    return module.launch


def _described(descriptor: Any, meta: Any, form: int) -> tuple[TensorMaps, tuple[int, ...]]:
    """Returns tensor maps of a descriptor by address, and the numbers that follow a map."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    template, more = with_base(descriptor, None), (None,) * form

    def encode(address: int) -> Any:
        return make_tensordesc_arg(with_base(template, Address(address)), meta, *more)[0]

    return TensorMaps(encode), (*descriptor.shape, *descriptor.strides)
