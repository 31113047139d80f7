"""The lowering of one call of an operator by what its implementation does.

Fake tensors stand for Inductor's while the implementation is traced; then every step becomes a
node: an allocation, an operation whose result is written to one, a launch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import sympy
import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import lowerings, to_dtype
from torch._inductor.virtualized import V

from torch_streamkl import ops
from torch_streamkl.fx_passes.inductor_launch import KernelLaunch
from torch_streamkl.kernels.entries import Entry, entry_of
from torch_streamkl.kernels.traced import Allocation, Launch, Operation, Untraceable, trace
from torch_streamkl.launch import select_implementation

aten = torch.ops.aten
PROBLEM = tuple(inspect.signature(ops.problem_of).parameters)


class Lowering:
    """One call of an operator: fake tensors that stand for Inductor's, and its steps in IR."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.boxes: dict[int, Any] = {}  # of the inputs and allocations, by fake tensor
        self.given = given

    def traced(self, run: Callable[..., Sequence[Tensor]]) -> Callable[[], tuple[Any, ...]]:
        """A function that makes the nodes: nothing may stop it, so all is tried before."""

        def refuse(guard: Any, _: Any) -> None:
            raise Untraceable("sizes that vary decide what it does")

        shape_env = V.graph.sizevars.shape_env
        with V.graph.fake_mode:
            given = {name: self._fake(x) for name, x in self.given.items()}
            given["impl"] = self._implementation(given)
            tensors = [x for x in given.values() if isinstance(x, Tensor)]
            self.inputs = set(self.boxes)
            with mock.patch.object(shape_env, "_check_frozen", refuse):
                self.trace, outputs = trace(lambda *_: run(*given.values()), tensors)
        steps = self.trace.steps
        entries = {id(x): entry_of(x) for x in steps if isinstance(x, Launch)}

        def build() -> tuple[Any, ...]:
            for step in steps:
                if isinstance(step, Launch):
                    self._launch(step, *entries[id(step)])
                else:
                    self._do(step)
            return tuple(self._box(x) for x in outputs)

        return build

    def _implementation(self, given: dict[str, Any]) -> str:
        """ "triton"; raises where other kernels compute the problem, or no kernel does."""
        impl: str = given["impl"]
        problem, _ = ops.problem_of(**{k: v for k, v in given.items() if k in PROBLEM})
        if not all(isinstance(n, int) for x in problem.queries_and_keys for n in x.shape[1::2]):
            raise Untraceable("the number of heads or their width varies")
        # a package has no Python that could launch kernels for Hopper
        automatic = "triton" if V.graph.aot_mode else "auto"
        found = select_implementation(problem, automatic if impl == "auto" else impl)
        if found != "triton":
            raise NotImplementedError(f"impl={impl!r} runs as {found!r} here")
        return found

    def _fake(self, x: Any) -> Any:
        """What stands for an argument."""
        if isinstance(x, sympy.Expr):
            return V.graph.sizevars.shape_env.create_symintnode(x, hint=None)
        if not isinstance(x, ir.TensorBox):
            return x
        node = ir.ExternKernel.realize_input(x)
        if ir.is_storage_and_layout(node):
            ir.as_storage_and_layout(node, freeze=True)  # its strides become arguments
        fake = ir.ir_node_to_tensor(node)
        is_box = isinstance(node, (ir.StorageBox, ir.BaseView))
        self.boxes[id(fake)] = ir.TensorBox(node) if is_box else ir.TensorBox.create(node)
        return fake

    def _box(self, x: Tensor) -> Any:
        """The tensor of Inductor that a fake one stands for, maybe a view."""
        root = self.trace.root(x)
        box = self.boxes[id(root)]
        if x is root:
            return box
        storage, layout = ir.as_storage_and_layout(box, freeze=True)
        offset = layout.offset + _expression(x.storage_offset() - root.storage_offset())
        viewed = ir.FixedLayout(
            layout.device, layout.dtype, _expressions(x.shape), _expressions(x.stride()), offset
        )
        return ir.TensorBox(ir.ReinterpretView(data=storage, layout=viewed))

    def _allocate(self, out: Tensor) -> None:
        size, stride = _expressions(out.shape), _expressions(out.stride())
        self.boxes[id(out)] = lowerings[aten.empty_strided.default](
            size, stride, dtype=out.dtype, device=out.device
        )

    def _do(self, step: Allocation | Operation) -> None:
        if isinstance(step, Allocation):
            self._allocate(step.out)
            return
        if id(step.out) not in self.boxes and self.trace.root(step.out) is step.out:
            self._allocate(step.out)  # with the strides that kernels get
        out = self._box(step.out)
        storage, layout = ir.as_storage_and_layout(out, freeze=True)
        # of a whole buffer Inductor would make another one
        view = ir.TensorBox(ir.ReinterpretView(data=storage, layout=layout))
        lowerings[aten.copy_.default](view, self._value(step))

    def _value(self, step: Operation) -> Any:
        """What an operation computes."""
        args = [self._box(x) if isinstance(x, Tensor) else x for x in step.args]
        dtype = step.out.dtype
        if step.name == "zero_":
            size = _expressions(step.out.shape)
            return lowerings[aten.full.default](size, 0, dtype=dtype, device=step.out.device)
        if step.name in ("_to_copy", "clone"):
            return to_dtype(args[0], dtype)
        if step.name.startswith("mul."):
            return lowerings[aten.mul.Tensor](*args[:2])
        return lowerings[aten.sum.dim_IntList](*args[:3], dtype=dtype)

    def _launch(self, step: Launch, entry: Entry, values: dict[str, Any]) -> None:
        written: dict[str, Any] = {}
        for x in values.values():
            if isinstance(x, Tensor) and id(self.trace.root(x)) not in self.inputs:
                box = self._box(x)
                written[box.get_name()] = box
        arguments = {
            name: self._box(x) if isinstance(x, Tensor) else _expression(x)
            for name, x in values.items()
        }
        grid = _expressions(step.grid)
        KernelLaunch(entry, grid, arguments, list(written.values()), step.options)


def _expression(n: Any) -> Any:
    """A number of the trace as Inductor has it."""
    if isinstance(n, torch.SymInt):
        return n.node.expr
    return n


def _expressions(numbers: Sequence[Any]) -> list[Any]:
    return [sympy.sympify(_expression(n)) for n in numbers]
