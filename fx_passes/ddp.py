"""Rewrites a graph before DistributedDataParallel splits it, not part by part.

Under DistributedDataParallel, Dynamo splits every graph at the buckets of gradients, and a backend
gets the parts. Attention probabilities that one part computes and another compares are then inputs
of a graph. There is no hook before the split. So its function is wrapped, for our backend alone,
when our backend is first used. If this torch splits graphs by another function, the report says
so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from torch_streamkl.fx_passes.fx_utils.nodes import example, is_call
from torch_streamkl.fx_passes.fx_utils.torch_names import optional
from torch_streamkl.fx_passes.options import RewriteOptions
from torch_streamkl.fx_passes.reporting.report import Report

log = logging.getLogger("torch_streamkl")
NOTE = (
    "with this torch Dynamo splits the graphs of DistributedDataParallel before they are "
    "rewritten: a loss between two parts is not fused; torch._dynamo.config.optimize_ddp = False "
    "keeps graphs whole"
)
_OURS = "_rewrites_for_streamkl"  # on the function that was wrapped
_is_part = ContextVar("is_part", default=False)


def is_part_of_a_rewritten_graph() -> bool:
    """Returns whether the current graph is a part of one that was rewritten as a whole."""
    return _is_part.get()


def rewrite_before_split(
    options_of: Callable[[Any], RewriteOptions | None],
    rewrite: Callable[[fx.GraphModule, RewriteOptions], Report],
) -> None:
    """Makes DistributedDataParallel rewrite a graph for our backend before it is split.

    ``options_of`` gives the options of a compiler that is our backend, None for any other one.
    """
    optimizer = optional("torch._dynamo.backends.distributed", "DDPOptimizer")
    split: Any = getattr(optimizer, "compile_fn", None)
    if split is None or hasattr(split, _OURS):
        return

    @functools.wraps(split)
    def compile_fn(self: Any, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        options = _without_errors(options_of, getattr(self, "backend_compile_fn", None))
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

    setattr(compile_fn, _OURS, True)
    optimizer.compile_fn = compile_fn


def notes() -> list[str]:
    """Returns what the report of a graph says about DistributedDataParallel."""
    owner = optional("torch.nn.parallel", "DistributedDataParallel")
    active = getattr(owner, "_get_active_ddp_module", lambda: None)()
    if active is None or _is_part.get():
        return []
    optimizer = optional("torch._dynamo.backends.distributed", "DDPOptimizer")
    is_split = getattr(torch._dynamo.config, "optimize_ddp", True) in (True, "ddp_optimizer")
    is_wrapped = hasattr(getattr(optimizer, "compile_fn", None), _OURS)
    return [NOTE] if is_split and not is_wrapped else []


def _without_errors(
    options_of: Callable[[Any], RewriteOptions | None], compiler: Any
) -> RewriteOptions | None:
    """Returns our options of a compiler, or None with a warning if they cannot be read."""
    try:
        return options_of(compiler)
    except (AttributeError, TypeError):
        log.warning("%s", NOTE, exc_info=True)
        return None


def _keep_numbers_with_their_users(graph: fx.Graph) -> None:
    """Copies numbers into the parts that use them, because a part cannot return a number that is
    no size.

    With dynamic shapes those of modules are read from inputs of the graph, which every part has.
    """
    for node in reversed(graph.nodes):
        if not is_call(node) or not isinstance(example(node), (float, torch.SymFloat)):
            continue
        for user in [user for user in node.users if user.op != "output"]:
            with graph.inserting_before(user):
                user.replace_input_with(node, graph.node_copy(node))
            if not node.users:
                graph.erase_node(node)
