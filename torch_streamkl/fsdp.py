"""Defines trace_fully_shard(): FSDP2 on every layer as one graph.

Dynamo does not trace the hooks of ``fully_shard``: the graph breaks at every layer. So attention
probabilities and logits of different layers never meet in one graph. Redistributions of DTensors
are ordinary traced code (SimpleFSDP, arXiv 2411.00284): here a parameter becomes a property that
gathers it, and the backward reduce-scatters its gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# settings that would have no effect on the traced model
_REFUSED = (
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_gradient_divide_factor",
    "set_reduce_scatter_divide_factor",
    "set_all_reduce_hook",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_reshard_after_forward",
    "unshard",
)
# by attribute of a group of parameters: what makes its gradients something else than means
_SETTINGS = {
    "reduce_grads": ("set_requires_gradient_sync", True),
    "all_reduce_grads": ("set_requires_all_reduce", True),
    "gradient_divide_factor": ("set_gradient_divide_factor", None),
    "_all_reduce_hook": ("set_all_reduce_hook", None),
}


@dataclass(frozen=True)
class Unsharding:
    """Holds how a module's parameters are gathered: their dtypes, and whether they are kept."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    reshards: bool  # gathered again in the backward, instead of kept


def trace_fully_shard(model: nn.Module) -> nn.Module:
    """Replaces the hooks of ``fully_shard`` by redistributions that ``torch.compile`` can trace.

    .. code-block:: python

        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        step = torch.compile(trace_fully_shard(model), backend="streamkl", fullgraph=True)

    A step computes what ``model`` with ``fully_shard`` computes, in one graph instead of one per
    layer. Parameters, gradients, optimizer state and checkpoints stay the sharded DTensors of
    ``fully_shard``. Mixed precision, ``reshard_after_forward``, HSDP (a mesh of two dimensions)
    and tied parameters are kept. Every backward reduces its gradients, and they may be
    accumulated.

    Args:
        model: a module that ``fully_shard`` was applied to, or that contains such modules. It is
            changed in place: an attribute such as ``model.lm_head.weight`` is then the gathered
            parameter. Take sharded parameters from ``model.parameters()``.

    Returns:
        ``model``.

    Raises:
        ValueError, TypeError: ``model`` is no module, or none of its modules is fully sharded.
        NotImplementedError: parameters that are also sharded otherwise (tensor parallelism) or
            offloaded to the CPU, and gradients that are not means over all ranks
            (``set_gradient_divide_factor``, ``set_requires_gradient_sync(False)`` and the like).

    Source: SimpleFSDP (arXiv 2411.00284).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    sharded = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not sharded:
        raise ValueError(
            "trace_fully_shard needs modules that fully_shard was applied to, got a "
            f"{type(model).__name__} without any"
        )
    plans = {module: plan for root in sharded for module, plan in _plans(root, root is model)}
    for module in plans:
        for name, parameter in module.named_parameters(recurse=False):
            _check(name, parameter, type(module).__name__)
    for module in sharded:
        _replace_hooks(module)
        plans.setdefault(module, Unsharding(None, None, False))  # it has no parameters of its own
    for module, plan in plans.items():
        names = tuple(name for name, p in module._parameters.items() if isinstance(p, DTensor))
        module.__class__ = _traced_class(type(module), names, plan)  # type: ignore[arg-type]
    return model


def _plans(root: Any, is_outermost: bool) -> Iterator[tuple[nn.Module, Unsharding]]:
    """Yields the modules whose parameters a module manages, and how these are gathered."""
    state = root._get_fsdp_state()
    root.reshard()
    policy: MixedPrecisionPolicy = state._mp_policy
    for group in _groups(state):
        if type(group.offload_policy).__name__ == "CPUOffloadPolicy":
            raise NotImplementedError("trace_fully_shard does not take CPUOffloadPolicy")
        for attribute, (setter, default) in _SETTINGS.items():
            value = getattr(group, attribute, default)
            if value != default:
                raise NotImplementedError(
                    "trace_fully_shard makes every gradient the mean over all ranks, got "
                    f"{setter}({value}) before it"
                )
        # fully_shard keeps the outermost module's parameters unless it was told not to
        is_kept = is_outermost and getattr(state, "_auto_reshard_after_forward", True)
        plan = Unsharding(
            policy.param_dtype,
            policy.reduce_dtype,
            bool(group._reshard_after_forward) and not is_kept,
        )
        for parameter in group.fsdp_params:
            info = parameter._module_info
            for module in (info.module, *info.shared_modules):
                yield module, plan


def _groups(state: Any) -> list[Any]:
    """Returns a module's groups of parameters; torch 2.11 has at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _check(name: str, parameter: Tensor, owner: str) -> None:
    if not isinstance(parameter, DTensor):
        return
    shards = [p for p in parameter.placements if not isinstance(p, Replicate)]
    if len(shards) != 1 or type(shards[0]) is not Shard:
        raise NotImplementedError(
            "trace_fully_shard takes parameters that fully_shard alone has sharded, got "
            f"{owner}.{name} with placements {parameter.placements}"
        )


def _replace_hooks(module: Any) -> None:
    """Removes the hooks that Dynamo cannot trace, and keeps the casts of inputs and outputs."""
    state = module._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for group in _groups(state):
        for parameter in group.fsdp_params:
            # after loading, it would look for the sharded tensor where a whole one is read
            parameter._post_load_hook_handle.remove()
    policy: MixedPrecisionPolicy = state._mp_policy
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        cast = functools.partial(_cast, policy.param_dtype)
        module.register_forward_pre_hook(
            lambda _, args, kwargs: pytree.tree_map(cast, (args, kwargs)),
            prepend=True,
            with_kwargs=True,
        )
    if policy.output_dtype is not None:
        cast_output = functools.partial(_cast, policy.output_dtype)
        module.register_forward_hook(lambda _, args, output: pytree.tree_map(cast_output, output))


def _cast(dtype: torch.dtype, x: Any) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


@functools.cache
def _traced_class(cls: type, names: tuple[str, ...], plan: Unsharding) -> type:
    """Returns a class whose parameters are whole when read; equal layers share one."""
    members: dict[str, Any] = {name: property(_reader(name, plan)) for name in names}
    if issubclass(cls, FSDPModule):
        members |= {name: _refusing(name) for name in _REFUSED}
        members |= {"__new__": _new_of_original, "_apply": _apply_as_without_hooks}
    return type(cls.__name__, (cls,), members)


def _new_of_original(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Makes slices of a container unsharded containers, as FSDPModule does."""
    original = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
    return original(*args, **kwargs)


def _apply_as_without_hooks(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces FSDPModule's `_apply`, which would look for the sharded tensor."""
    return super(FSDPModule, self)._apply(*args, **kwargs)


def _refusing(name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        given = [*args, *kwargs.values()]
        if name.startswith("set_requires") and given and given[0] is True:
            return  # as it is
        raise NotImplementedError(
            f"{name} has no effect after trace_fully_shard: the compiled step gathers parameters "
            "and reduces gradients itself"
        )

    return refuse


def _reader(name: str, plan: Unsharding) -> Any:
    def read(self: nn.Module) -> Any:
        parameter: Any = self._parameters[name]
        if not isinstance(parameter, DTensor):  # not sharded, or moved by hand
            return parameter
        if plan.reshards and torch.is_grad_enabled() and parameter.requires_grad:
            return checkpoint(
                _whole, parameter, plan, use_reentrant=False, context_fn=_gathered_again
            )
        return _whole(parameter, plan)

    return read


def _whole(parameter: DTensor, plan: Unsharding) -> Tensor:
    mesh_dims = range(parameter.device_mesh.ndim)
    whole = parameter.redistribute(
        placements=[Replicate() for _ in mesh_dims],
        forward_dtype=plan.param_dtype,
        backward_dtype=plan.reduce_dtype or plan.param_dtype,
    )
    return whole.to_local(grad_placements=[Partial("avg") for _ in mesh_dims])


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    recomputed = (
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.wait_tensor.default,
        torch.ops.aten._to_copy.default,
        torch.ops.aten.cat.default,
        torch.ops.aten.split.Tensor,
        torch.ops.aten.slice.Tensor,
    )
    return (
        CheckpointPolicy.MUST_RECOMPUTE if op in recomputed else CheckpointPolicy.PREFER_RECOMPUTE
    )


def _gathered_again() -> Any:
    return create_selective_checkpoint_contexts(_policy)
