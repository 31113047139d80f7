"""Graphs that launch our kernels, without a GPU: interpreted, or only written as C++."""

from __future__ import annotations

import contextlib
import linecache
import re
from unittest import mock

import torch
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import async_compile, config
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bench.offline import TARGETS, looks_like
from torch_streamkl.fx_passes import inductor_kernels


class Driver:
    """Of a GPU that is not here: knows its target."""

    def __init__(self, target):
        self.target = TARGETS[target].gpu

    def get_current_target(self):
        return self.target

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return 0


class Interpreted:
    """What a graph's code launches in the place of a compiled kernel."""

    def __init__(self, source):
        text = (
            "import triton\nimport triton.language as tl\n" + source[source.index("@triton.jit") :]
        )
        self.name = re.search(r"def (\w+)\(", text)[1]
        filename = f"<{self.name} {hash(text)}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        scope = {"__name__": self.name}
        exec(compile(text, filename, "exec"), scope)
        self.kernel = scope[self.name]
        self.launched: list[str] = []

    def run(self, *arguments, stream=None):
        self.launched.append(self.name)
        *arguments, x, y, z = arguments
        self.kernel[(int(x), int(y), int(z))](*arguments)


@contextlib.contextmanager
def launched_by_graphs(monkeypatch, of_cpp=True):
    """Inside, graphs on a CPU launch kernels as on a GPU those of C++ do, or else of Python.

    Gives their names.
    """
    launched = []

    def compiled(_self, _name, source, device_str="cuda"):
        kernel = Interpreted(source)
        kernel.launched = launched
        return kernel

    with monkeypatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", Driver("sm_90"))
        patch.setattr(async_compile.AsyncCompile, "triton", compiled)
        patch.setattr(inductor_kernels, "is_needed", lambda: of_cpp)
        patch.setattr(inductor_kernels, "launches_kernels", lambda device: True)
        yield launched


def written_as_cpp(function, *tensors):
    """The C++ of a function of tensors (dtype, shape) on an H200; nothing is compiled."""
    properties = TARGETS["sm_90"].properties
    with (
        looks_like("sm_90"),
        mock.patch.object(triton.runtime.driver, "_active", Driver("sm_90")),
        mock.patch("torch._inductor.scheduler.has_triton", return_value=True),
        mock.patch.object(CudaInterface.Worker, "get_device_properties", return_value=properties),
        mock.patch.object(CudaInterface, "get_device_properties", return_value=properties),
        mock.patch.object(CudaInterface, "get_compute_capability", return_value=90),
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
    ):
        shapes = ShapeEnv()
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
        with mode:
            inputs = [torch.empty(shape, dtype=dtype, device="cuda") for dtype, shape in tensors]
            traced = make_fx(function)(*inputs)
        inductor_kernels.install()
        with config.patch({"triton.autotune_at_compile_time": False}), V.set_fake_mode(mode):
            graph = GraphLowering(
                traced, example_inputs=inputs, cpp_wrapper=True, shape_env=shapes
            )
            with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
                graph.run(*inputs)
                code, _ = graph.codegen()
    return str(code.value)
