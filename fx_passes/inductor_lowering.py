"""Lowers one operator call to the steps of its implementation.

The implementation is traced with fake tensors in place of Inductor's. Then every step becomes a
node: an allocation, an operation whose result is written to one, or a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import sympy
import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.kernel.mm import aten_mm
from torch._inductor.lowering import fallback_handler, lowerings, to_dtype
from torch._inductor.virtualized import V

from torch_streamkl.attention import ops
from torch_streamkl.attention import problem as attention_problem
from torch_streamkl.attention.heuristics import select_implementation
from torch_streamkl.attention.limits import hopper_limit
from torch_streamkl.bounds import LABELS, checked_ids
from torch_streamkl.fx_passes.inductor_launch import KernelLaunch
from torch_streamkl.kernels.entries import Entry, entry_of
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.linear import problem as linear_problem
from torch_streamkl.linear import rows as linear_rows
from torch_streamkl.linear.chunks import is_one_chunk
from torch_streamkl.registration import WITHOUT_AUTOGRAD
from torch_streamkl.runtime.trace import Allocation, Launch, Operation, Untraceable, trace

aten = torch.ops.aten
ATTENTION, LINEAR = attention_problem.SPEC.names, linear_problem.SPEC.names


def attention_implementation(given: dict[str, Any]) -> str:
    """Chooses the kernels that compute the problem of these arguments; raises if none do."""
    problem, impl = ops.problem_of(**{k: given[k] for k in ATTENTION})
    if not all(isinstance(n, int) for x in problem.queries_and_keys for n in x.shape[1::2]):
        raise Untraceable("the number of heads or their width varies")
    # a package has no Python that could launch kernels for Hopper; elsewhere sizes decide
    if impl == "auto" and (V.graph.aot_mode or hopper_limit(problem) is not None):
        impl = "triton"
    return select_implementation(problem, impl)


def linear_implementation(given: dict[str, Any]) -> str:
    """Chooses the implementation of LM heads for these arguments; raises if none can run."""
    problem, _, impl = linear_ops.problem_of(**{k: given[k] for k in LINEAR})
    if not all(isinstance(n, int) for head in problem.heads for n in head.hidden.shape):
        raise Untraceable("the number of tokens varies, and with it that of chunks")
    rows = linear_ops.row_functions(problem, impl)
    return "torch" if rows is linear_rows else "triton"


def short_implementation(given: dict[str, Any]) -> str:
    """Chooses the implementation of LM heads with all logits at once; raises if there are more."""
    problem, workspace, _ = linear_ops.problem_of(**{k: given[k] for k in LINEAR})
    found = linear_implementation(given)
    if not is_one_chunk(problem, workspace):
        raise Untraceable("several chunks of tokens")
    return found


def may_overwrite(box: Any) -> bool:
    """Whether the node that is lowered may write its result to its first argument.

    The argument is a buffer that the forward has saved, and nobody else reads. The result is one
    of the graph's: another operation would read and write it again.
    """
    buffer = box.data.data if isinstance(box.data, ir.StorageBox) else None
    node = V.graph.current_node
    return (
        isinstance(buffer, ir.DonatedBuffer)
        and buffer.get_layout().is_contiguous()
        and buffer.get_dtype() != torch.float64
        and len(node.all_input_nodes[0].users) == 1
        and all(user.op == "output" for user in node.users)
    )


class Lowering:
    """Lowers one call of an operator: holds fake tensors in place of Inductor's, and its steps.

    ``written`` names the arguments that the steps write to.
    """

    def __init__(self, given: dict[str, Any], written: Sequence[str] = ()) -> None:
        self.boxes: dict[int, Any] = {}  # of the inputs and allocations, by fake tensor
        self.given, self.written = given, written

    def traced(
        self,
        run: Callable[..., Sequence[Tensor]],
        implementation: Callable[[dict[str, Any]], str] | None = None,
    ) -> Callable[[], tuple[Any, ...]]:
        """Traces the implementation, and returns a function that creates the nodes and cannot
        fail.

        ``implementation`` chooses the one that the arguments leave open, and it has to be ours.
        """

        def refuse(guard: Any, _: Any) -> None:
            raise Untraceable("sizes that vary decide what it does")

        shape_env = V.graph.sizevars.shape_env
        with V.graph.fake_mode:
            self.fakes = given = {name: self._fake(x) for name, x in self.given.items()}
            tensors = [x for x in given.values() if isinstance(x, Tensor)]
            self.inputs = set(self.boxes) - {id(given[name]) for name in self.written}
            with mock.patch.object(shape_env, "_check_frozen", refuse):
                arguments = dict(given)
                if implementation is not None:
                    arguments["impl"] = found = implementation(given)
                    if found != "triton":
                        raise Untraceable(f"impl={given['impl']!r} runs as {found!r} here")
                self.trace, found_outputs = trace(lambda *_: run(*arguments.values()), tensors)
        outputs: Sequence[Any] = found_outputs
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

    def check_labels(self) -> None:
        """Inserts the check of the labels that the Python of an operator makes."""
        key, check = id(self.fakes["labels"]), fallback_handler(WITHOUT_AUTOGRAD[checked_ids])
        vocab_size = self.given["student_weight"].get_size()[0]
        rule = f"{LABELS}{self.given['ignore_index']}"
        self.boxes[key] = check(self.boxes[key], vocab_size, 0, rule)

    def _fake(self, x: Any) -> Any:
        """Returns the fake tensor, or the number, that stands for an argument."""
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
        """Returns Inductor's tensor of a fake one, maybe a view."""
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
        out, root = step.out, self.trace.root(step.out)
        if step.name == "mm" and _is_whole(out, root):  # without a copy
            self.boxes[id(root)] = self._matmul(step)
            return
        if root is out and id(out) not in self.boxes:
            self._allocate(out)  # with the strides that kernels get
        storage, layout = ir.as_storage_and_layout(self._box(out), freeze=True)
        # of a whole buffer Inductor would make another one
        view = ir.TensorBox(ir.ReinterpretView(data=storage, layout=layout))
        lowerings[aten.copy_.default](view, self._value(step))

    def _value(self, step: Operation) -> Any:
        """Computes an operation's value."""
        args = [self._box(x) if isinstance(x, Tensor) else x for x in step.args]
        size, dtype, device = _expressions(step.out.shape), step.out.dtype, step.out.device
        match step.name:
            case "zeros" | "zeros_like":
                return lowerings[aten.full.default](size, 0, dtype=dtype, device=device)
            case "new_ones":
                return lowerings[aten.full.default](size, 1, dtype=dtype, device=device)
            case "_to_copy" | "clone":
                return to_dtype(args[0], dtype)
            case "copy":
                return args[1]
            case "mm":
                return self._matmul(step)
            case "sum" | "sum.dim_IntList":
                return lowerings[aten.sum.dim_IntList](*(*args, None)[:3], dtype=dtype)
            case "scalar_tensor":
                return lowerings[aten.full.default](size, args[0], dtype=dtype, device=device)
        name, _, overload = step.name.partition(".")
        return lowerings[getattr(getattr(aten, name), overload or "default")](*args)

    def _matmul(self, step: Operation) -> Any:
        out = step.out
        layout = ir.FixedLayout(
            out.device, out.dtype, _expressions(out.shape), _expressions(out.stride())
        )
        # its lowering would choose the strides
        operands = [ir.ExternKernel.realize_input(self._box(x)) for x in step.args[:2]]
        return aten_mm.bind(operands, layout).output_node()

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


def _is_whole(x: Tensor, root: Tensor) -> bool:
    """Whether a tensor covers the memory that it belongs to, in the same order."""
    return x.shape == root.shape and x.stride() == root.stride()


def _expression(n: Any) -> Any:
    """Converts a number of the trace to Inductor's."""
    if isinstance(n, torch.SymInt):
        return n.node.expr
    return n


def _expressions(numbers: Sequence[Any]) -> list[Any]:
    return [sympy.sympify(_expression(n)) for n in numbers]
