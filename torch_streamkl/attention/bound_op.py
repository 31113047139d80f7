"""Binds `attention_kl` to one set of options and tensor metadata, for repeated calls.

In the calls of a compiled graph, and in repeated eager calls, only addresses change. A `BoundOp`
computes what the operators do without the dispatcher. In its second call it captures the launches
of its kernels (runtime/capture.py), and replays them from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.attention import ops
from torch_streamkl.attention.heuristics import select_implementation
from torch_streamkl.caches import Bounded
from torch_streamkl.registration import WITHOUT_AUTOGRAD
from torch_streamkl.runtime.replay import Replay, Tensors


class ReplayByBias:
    """Replays launches that differ by whether both sides have the same bias."""

    def __init__(self, function: Callable[..., Tensors], num_before: int) -> None:
        """Takes ``num_before``: how many tensors precede those of the operator."""
        self._calls = (Replay(function), Replay(function))
        self._biases = tuple(num_before + i for i in ops.BIASES)

    def __call__(self, *tensors: Tensor | None) -> Tensors:
        student, teacher = (tensors[i] for i in self._biases)
        assert student is not None and teacher is not None
        return self._calls[student.data_ptr() == teacher.data_ptr()](*tensors)


class BoundOp:
    """Computes values and gradients of attention_kl; `Replay` says what is kept between calls."""

    def __init__(self, options: tuple[Any, ...], is_compiled: bool = False) -> None:
        """Takes ``is_compiled``: whether the call belongs to a graph that Inductor compiles."""
        self.options = options
        self.is_compiled = is_compiled
        self._forward: Callable[..., Tensors] | None = None
        self._backward: dict[tuple[bool, ...], Callable[..., Tensors]] = {}

    def forward(self, *tensors: Tensor | None) -> Tensors:
        """Returns values and both statistics; ``tensors`` are the operator's, in its order."""
        call = self._forward
        if call is None:
            call = self._forward = self._repeated(self._run_forward, tensors, 0)
        return call(*tensors)

    def backward(
        self,
        needs_grad: tuple[bool, ...],
        grad: Tensor,
        student_stats: Tensor,
        teacher_stats: Tensor,
        *tensors: Tensor | None,
    ) -> Tensors:
        """Returns gradients to the first four tensors, None where they are not needed."""
        grad = grad.contiguous()  # a sum's is expanded, and launches are recorded of one layout
        call = self._backward.get(needs_grad)
        if call is None:

            def gradients(*arguments: Tensor | None) -> Tensors:
                given: tuple[Any, ...] = (*arguments[:3], list(needs_grad), *arguments[3:])
                compute = ops.compiled_gradients if self.is_compiled else ops.needs_grads
                return compute(*given, *self.options)

            call = self._backward[needs_grad] = self._repeated(gradients, tensors, 3)
        return call(grad, student_stats, teacher_stats, *tensors)

    def _run_forward(self, *tensors: Tensor | None) -> Tensors:
        run = ops.run_compiled_forward if self.is_compiled else ops.run_forward
        return run(*tensors, *self.options)

    def _repeated(
        self,
        function: Callable[..., Tensors],
        tensors: tuple[Tensor | None, ...],
        num_before: int,
    ) -> Callable[..., Tensors]:
        given: tuple[Any, ...] = (*tensors, *self.options)
        problem, impl = ops.problem_of(*given)
        has_launches = select_implementation(problem, impl) != "torch"
        if not has_launches:
            return function
        if any(tensors[i] is None for i in ops.BIASES):
            return Replay(function)
        return ReplayByBias(function, num_before)


class _CompiledCall:
    """Replaces an operator call of a compiled graph: the graph's wrapper calls this object.

    Sizes are the same in every call unless one ``varies``. If something watches operators (a
    profiler, a dispatch mode), the operator is called.
    """

    def __init__(self, options: tuple[Any, ...], num_tensors: int, varies: bool) -> None:
        self.options = options
        self.absent = (None,) * (ops.NUM_TENSORS - num_tensors)
        self._site = None if varies else BoundOp(options, is_compiled=True)
        self._sites: Bounded[BoundOp] = Bounded()  # by sizes that vary

    def site(self, tensors: tuple[Tensor | None, ...]) -> BoundOp:
        """Returns the bound op for tensors of these sizes."""
        if self._site is not None:
            return self._site
        key = tuple([None if x is None else (x.shape, x.stride()) for x in tensors])
        found = self._sites.get(key)
        if found is None:
            found = self._sites[key] = BoundOp(self.options, is_compiled=True)
        return found

    @staticmethod
    def is_seen() -> bool:
        return torch._C._autograd._profiler_enabled() or bool(torch._C._len_torch_dispatch_stack())


class CompiledForward(_CompiledCall):
    """Calls `attention_kl` with given options and the first ``num_tensors`` of its tensors."""

    def __call__(self, *tensors: Tensor | None) -> Tensors:
        if self.is_seen():
            call = WITHOUT_AUTOGRAD[ops.attention_kl]
            seen: Tensors = call(*tensors, *self.absent, *self.options)
            return seen
        return self.site(tensors).forward(*tensors, *self.absent)


class CompiledBackward(_CompiledCall):
    """Calls `attention_kl_backward` with grad, both statistics, then as `CompiledForward` does."""

    def __init__(
        self,
        options: tuple[Any, ...],
        num_tensors: int,
        varies: bool,
        needs_grad: tuple[bool, ...],
    ) -> None:
        super().__init__(options, num_tensors, varies)
        self.needs_grad = needs_grad

    def __call__(
        self, grad: Tensor, student_stats: Tensor, teacher_stats: Tensor, *tensors: Tensor | None
    ) -> Tensors:
        if self.is_seen():
            call = WITHOUT_AUTOGRAD[ops.attention_kl_backward]
            seen: Tensors = call(
                grad, student_stats, teacher_stats, list(self.needs_grad),
                *tensors, *self.absent, *self.options,
            )  # fmt: skip
            return seen
        site = self.site((grad, student_stats, teacher_stats, *tensors))
        first = (grad, student_stats, teacher_stats)
        return site.backward(self.needs_grad, *first, *tensors, *self.absent)
