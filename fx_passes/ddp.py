"""DistributedDataParallel: a graph is rewritten before Dynamo splits it, not part by part.

Under DistributedDataParallel Dynamo splits every graph where buckets of gradients are reduced, and
a backend gets the parts: attention maps that one makes and another compares, as its inputs. There
is no hook in front of the split, so its function is wrapped, for our backend alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from torch_streamkl.fx_passes.fx_utils.nodes import example
from torch_streamkl.fx_passes.options import RewriteOptions
from torch_streamkl.fx_passes.reporting.report import Report

_is_part = ContextVar("is_part", default=False)


def is_part_of_a_rewritten_graph() -> bool:
    """Whether the graph that is compiled now is a part of one that was rewritten as a whole."""
    return _is_part.get()


def rewrite_before_split(
    options_of: Callable[[Any], RewriteOptions | None],
    rewrite: Callable[[fx.GraphModule, RewriteOptions], Report],
) -> None:
    """From now on a graph that is split for our backend is rewritten first.

    ``options_of`` gives the options of a compiler that is our backend, None for any other one.
    """
    try:
        from torch._dynamo.backends.distributed import DDPOptimizer

        split = DDPOptimizer.compile_fn
    except (ImportError, AttributeError):  # another torch: the report says what is in parts
        return

    @functools.wraps(split)
    def compile_fn(self: Any, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        options = options_of(self.backend_compile_fn)
        if options is None:
            return split(self, gm, *args, **kwargs)
        if rewrite(gm, options).num_fused:
            _keep_numbers_with_their_users(gm.graph)
            gm.recompile()
        token = _is_part.set(True)
        try:
            return split(self, gm, *args, **kwargs)
        finally:
            _is_part.reset(token)

    DDPOptimizer.compile_fn = compile_fn  # type: ignore[method-assign]  # there is no hook


def _keep_numbers_with_their_users(graph: fx.Graph) -> None:
    """A part cannot return a number that is no size, such as the scale of scores made elsewhere.

    With dynamic shapes those of modules are read from inputs of the graph, which every part has.
    """
    for node in reversed(graph.nodes):
        is_call = node.op in ("call_function", "call_method")
        if not is_call or not isinstance(example(node), (float, torch.SymFloat)):
            continue
        for user in [user for user in node.users if user.op != "output"]:
            with graph.inserting_before(user):
                user.replace_input_with(node, graph.node_copy(node))
            if not node.users:
                graph.erase_node(node)
