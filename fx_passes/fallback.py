"""Traces a frame again without data-dependent shapes if Inductor cannot compile them.

`enable()` lets Dynamo capture operators with data-dependent shapes. Otherwise Dynamo breaks the
graph at them. AOTAutograd or Inductor may refuse such shapes: a sort of selected rows, or, in
torch 2.13, one mask written twice. There is no hook for a compilation that failed. So `enable()`
wraps Inductor's entry point, and `disable()` removes the wrapper. A compilation that succeeds is
not touched.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.nodes import example
from torch_streamkl.fx_passes.fx_utils.sizes import is_unknown
from torch_streamkl.fx_passes.fx_utils.torch_names import optional

log = logging.getLogger("torch_streamkl")
SETTING = "capture_dynamic_output_shape_ops"
MODULE, ENTRY = "torch._inductor.compile_fx", "compile_fx"


def install(is_ours: Callable[[], bool]) -> bool:
    """Wraps Inductor's entry point; False if this torch has none, or cannot trace again.

    ``is_ours`` says whether this thread captures data-dependent shapes because of `enable()`.
    """
    restart = optional("torch._dynamo.exc", "TensorifyScalarRestartAnalysis")
    handler = optional("torch._dynamo.callback", "callback_handler")
    compile_fx = optional(MODULE, ENTRY)
    if restart is None or compile_fx is None or not hasattr(handler, "register_end_callback"):
        return False
    if isinstance(compile_fx, _CompileOrTraceAgain):
        return True
    wrapper = _CompileOrTraceAgain(compile_fx, restart, is_ours)
    setattr(optional("torch._inductor", ENTRY), ENTRY, wrapper)
    return True


def uninstall() -> None:
    """Removes the wrapper, unless somebody has wrapped it since."""
    module = optional("torch._inductor", ENTRY)
    wrapper = getattr(module, ENTRY, None)
    if isinstance(wrapper, _CompileOrTraceAgain):
        setattr(module, ENTRY, wrapper.compile_fx)


class _CompileOrTraceAgain:
    """Calls Inductor; after a failure with data-dependent shapes, makes Dynamo trace again."""

    def __init__(self, compile_fx: Any, restart: Any, is_ours: Callable[[], bool]) -> None:
        self.compile_fx = compile_fx
        self.restart = restart
        self.is_ours = is_ours
        functools.update_wrapper(self, compile_fx)

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.compile_fx(model, *args, **kwargs)
        except self.restart:
            raise
        except Exception as error:
            if not self._may_trace_again(model):
                raise
            log.warning(
                "a graph with shapes that depend on data does not compile; it is traced again "
                "with graph breaks there, as without torch_streamkl.enable(): %s: %s",
                type(error).__name__,
                str(error).strip().partition("\n")[0],
            )
            _without_data_dependent_shapes()
            raise self.restart(restart_reason="data-dependent shapes do not compile") from error

    def _may_trace_again(self, model: Any) -> bool:
        if not isinstance(model, fx.GraphModule) or not self.is_ours():
            return False
        context = optional("torch._guards", "CompileContext")
        is_of_dynamo = context is not None and context.current_compile_id() is not None
        return is_of_dynamo and any(map(_has_unknown_shape, model.graph.nodes))


def _has_unknown_shape(node: fx.Node) -> bool:
    value = example(node)
    return isinstance(value, Tensor) and any(map(is_unknown, value.shape))


def _without_data_dependent_shapes() -> None:
    """Switches the setting off until the frame that this thread compiles now is done."""
    handler = optional("torch._dynamo.callback", "callback_handler")
    setattr(torch._dynamo.config, SETTING, False)
    owner = threading.get_ident()  # newer releases keep settings for each thread

    def switch_on_again(*_: object) -> None:
        if threading.get_ident() == owner:
            # not removed from the list that is gone through now
            handler.end_callbacks = [x for x in handler.end_callbacks if x is not switch_on_again]
            setattr(torch._dynamo.config, SETTING, True)

    handler.register_end_callback(switch_on_again)
