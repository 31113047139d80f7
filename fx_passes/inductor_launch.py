"""Represents a launch of one of our kernels in Inductor's intermediate representation.

Inductor has a node for kernels that users have written. This node does the same for an entry
(torch_streamkl/kernels/entries.py), with three differences. It is told which tensors the kernel
writes, and does not read that from the kernel's code. The source has imports; Inductor would copy
all functions that the kernel calls, but not their named tuples. And Triton's options are ours.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from unittest import mock

import triton
from torch._inductor import ir
from torch._inductor.virtualized import V

from torch_streamkl.kernels.entries import Entry
from torch_streamkl.runtime.launch import COMPILE_OPTIONS

log = logging.getLogger("torch_streamkl")
CONFIGURED = ("num_warps", "num_stages")  # what a triton.Config takes


class KernelLaunch(ir.UserDefinedTritonKernel):
    """Launches ``entry`` on a grid, with arguments ``values``, and writes to ``written``."""

    def __init__(
        self,
        entry: Entry,
        grid: Sequence[Any],
        values: dict[str, Any],
        written: Sequence[Any],
        options: dict[str, int],
    ) -> None:
        kwargs = {
            name: self.unwrap_storage_for_input(self.realize_input(x))
            if isinstance(x, ir.TensorBox)
            else x
            for name, x in values.items()
        }
        inputs = [x for x in kwargs.values() if isinstance(x, ir.IRNode)]
        others = tuple(x for x in kwargs.values() if not isinstance(x, ir.IRNode))
        self.device = inputs[0].get_device()
        layout = ir.NoneLayout(device=self.device)
        ir.ExternKernel.__init__(self, None, layout, inputs, others, kwargs)
        self.entry = entry
        self.grid = [tuple(grid)]
        self.launch_kwargs: tuple[str, ...] = ()  # of torch 2.14: options among the arguments
        self.config = triton.Config({}, **{k: options[k] for k in CONFIGURED if k in options})
        self.ordered_kwargs_for_cpp_kernel = entry.arg_names
        self.mutable_args = list(written)
        self.mutation_outputs = [ir.MutationOutput(layout, x, self) for x in written]
        V.graph.register_operation(self)

    def get_kernel_and_metadata(self) -> tuple[Any, Any, list[str], list[str]]:
        """Returns the kernel that Inductor writes into the graph's code and launches."""
        return self.entry, [self.config], [], []

    def can_fuse_epilogue(self) -> bool:
        return False

    def codegen(self, wrapper: Any) -> None:
        # Inductor reads these options from a kernel's triton_meta, but sets them for its own only
        define = wrapper.define_kernel
        key = "triton_meta={"

        def define_with_options(name: str, body: str, *rest: Any, **kwargs: Any) -> Any:
            if body.count(key) != 1:  # another Inductor: Triton's defaults, and it is said
                log.warning("a kernel of %s is compiled without %s", name, COMPILE_OPTIONS)
                return define(name, body, *rest, **kwargs)
            options = "".join(f"{k!r}: {v!r}, " for k, v in COMPILE_OPTIONS.items())
            return define(name, body.replace(key, key + options), *rest, **kwargs)

        with mock.patch.object(wrapper, "define_kernel", define_with_options):
            super().codegen(wrapper)
