"""Defines our Inductor passes, and the keys under which their compiled graphs are cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_streamkl.compile_caches import source_digest
from torch_streamkl.fx_passes import (
    ddp,
    inductor_calls,
    inductor_double_backward,
    inductor_kernels,
)
from torch_streamkl.fx_passes.fx_utils.torch_names import CustomGraphPass
from torch_streamkl.fx_passes.gradients_in_forward import compute_in_forward
from torch_streamkl.fx_passes.options import RewriteOptions
from torch_streamkl.fx_passes.views_of_inputs import save_inputs_for_views
from torch_streamkl.registration import NAMESPACE, WITHOUT_AUTOGRAD

Rewrite = Callable[[fx.GraphModule, RewriteOptions], object]  # a graph and our options


def cache_key(ours: RewriteOptions) -> str:
    """Returns our part of the compile caches' key: the digest of our sources, and the options."""
    return f"torch_streamkl {source_digest()} {ours}"


class JointPass(CustomGraphPass):
    """Makes graphs without autograd call our operators directly, and moves some gradients.

    Its uuid is in the cache keys of FX and AOTAutograd. If another pre-grad pass has replaced the
    rewrite, it calls ``on_replaced`` with that pass. None: the graph was rewritten before.
    """

    def __init__(self, ours: RewriteOptions, on_replaced: Callable[[Any], None] | None) -> None:
        self.ours = ours
        self.on_replaced = on_replaced

    def __call__(self, graph: fx.Graph) -> None:
        configured = torch._inductor.config.pre_grad_custom_pass
        if self.on_replaced is not None and rewriting_pass(configured) is None:
            self.on_replaced(configured)
        if not _has_our_operators(graph):
            return  # a graph of somebody else: nothing is installed for it
        inductor_calls.install()
        inductor_kernels.install()
        inductor_double_backward.install()
        compute_in_forward(graph)
        save_inputs_for_views(graph)
        for node in graph.nodes:
            if node.op == "call_function":
                node.target = WITHOUT_AUTOGRAD.get(node.target, node.target)

    def uuid(self) -> str:
        return cache_key(self.ours)


def _has_our_operators(graph: fx.Graph) -> bool:
    return any(getattr(node.target, "namespace", None) == NAMESPACE for node in graph.nodes)


class PreGradPass(CustomGraphPass):
    """Rewrites graphs as Inductor's pre-grad pass."""

    def __init__(self, ours: RewriteOptions, rewrite: Rewrite) -> None:
        self.ours = ours
        self.rewrite = rewrite

    def __call__(self, graph: fx.Graph) -> None:
        assert graph.owning_module is not None
        if not ddp.is_part_of_a_rewritten_graph():
            self.rewrite(graph.owning_module, self.ours)

    def uuid(self) -> str:
        return cache_key(self.ours)


class Chained(CustomGraphPass):
    """Runs the user's configured pass, then ours; not cached if one of them has no uuid."""

    def __init__(self, users: Any, *ours: CustomGraphPass) -> None:
        self.users = users
        self.passes = (*_as_list(users), *ours)

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> Any:
        keys = tuple(each.uuid() if hasattr(each, "uuid") else None for each in self.passes)
        return None if None in keys else keys


def chained(ours: CustomGraphPass, configured: Any) -> CustomGraphPass:
    """Chains the user's configured pass (none, one, or a list) and ours, once."""
    users = without_ours(configured)
    return ours if users is None else Chained(users, ours)


def without_ours(configured: Any) -> Any:
    """Returns the user's configuration, without the pass that `chained` may have added."""
    if isinstance(configured, Chained):
        return configured.users
    if isinstance(configured, (list, tuple)):  # put around ours by the user
        left = [x for each in configured for x in _as_list(without_ours(each))]
        return left if left != list(configured) else configured  # torch 2.13 takes lists
    return None if isinstance(configured, (JointPass, PreGradPass)) else configured


def as_one_pass(configured: Any) -> Any:
    """Wraps a list of passes as one pass, for an Inductor that takes no lists."""
    takes_lists = hasattr(torch._inductor.custom_graph_pass, "get_custom_graph_passes")
    is_list = isinstance(configured, (list, tuple))
    return Chained(configured) if is_list and not takes_lists else configured


def rewriting_pass(configured: Any) -> PreGradPass | None:
    """Finds the rewrite among configured pre-grad passes."""
    for each in _as_list(configured):
        for x in each.passes if isinstance(each, Chained) else (each,):
            if isinstance(x, PreGradPass):
                return x
    return None


def _as_list(configured: Any) -> list[Any]:
    if configured is None:
        return []
    return list(configured) if isinstance(configured, (list, tuple)) else [configured]
