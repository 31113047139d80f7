"""Runs the nodes of a region on real tensors, in their own dtypes or in float64."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.mutation import written_memory
from torch_streamkl.fx_passes.fx_utils.nodes import example, name_of, storage_of
from torch_streamkl.fx_passes.fx_utils.torch_names import tree_leaves, tree_map
from torch_streamkl.fx_passes.reporting.hints import FORCE_CHECK
from torch_streamkl.fx_passes.validation.gradient_terms import GradientTerms, random_signs
from torch_streamkl.fx_passes.validation.options import NotChecked
from torch_streamkl.rows.op import row_program, row_program_sum
from torch_streamkl.rows.program import Program
from torch_streamkl.topk.log_probs import entry_log_probs
from torch_streamkl.topk.logits import entry_logits

NARROW = (torch.float16, torch.bfloat16, torch.float32)
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
LOGARITHMS = {"log_softmax", "logsumexp", "cross_entropy", "logaddexp"}  # of exponentials
EXPONENTIALS = {"exp", "softmax"} | LOGARITHMS
LOWEST = -3e4  # exponentials of it are 0 in every dtype, and half has it
PROGRAM_TEXTS = {row_program: 1, row_program_sum: 2}  # where an operator's program stands
# what the user's own masks stand around: other operators have a mask of their own, which is -inf
IN_USERS_CODE = {*PROGRAM_TEXTS, entry_logits, entry_log_probs}
_FILL = 1e4  # beyond it lie the values of masks


@dataclass
class Result:
    """Holds the value that a region computes, and the gradients of its inputs."""

    value: Any
    gradients: dict[str, Tensor | None]
    written: dict[str, Tensor]  # leaves that were modified in place


def run(
    nodes: Sequence[fx.Node],
    output: str,
    leaves: Mapping[str, Any],
    deadline: float | None = None,
    *,
    wide: bool = False,
    noise: torch.Generator | None = None,
    finite: bool = False,
    terms: GradientTerms | None = None,
) -> Result:
    """Computes ``output`` and the gradients of ``leaves``; in float64 if ``wide``.

    What is computed from no floating leaf (masks, positions, tables) keeps its dtype in float64
    runs too, and so does a cast to a dtype narrower than all leaves: there a rounding is part of
    the program. With ``finite`` a finite number stands for -inf; with ``noise`` every intermediate
    result is moved by a rounding of its own dtype. With ``terms`` the gradients are as large as
    the terms that they are sums of.
    """
    env = {name: _fresh(value, wide) for name, value in leaves.items()}
    versions = {n: x._version for n, x in env.items() if isinstance(x, Tensor)}
    # operations get views, so that a leaf that is written to keeps its gradient
    given = {n: _entrance(x) for n, x in env.items()}
    dependent = _dependent(nodes, leaves) if wide else frozenset[str]()
    values: dict[str, Any] = dict(given)
    last_use = {a.name: n.name for n in nodes for a in n.all_input_nodes}
    kept = _kept_dtypes(leaves)
    with modes_restored():
        for node in nodes:
            made = _run_node(node, values, node.name in dependent, wide, kept, finite, terms)
            if (
                noise is not None
                and node.name in dependent
                and getattr(made, "dtype", None) not in kept
            ):
                given_to = [values.get(a.name) for a in node.all_input_nodes[:1]]
                made = _rounded_otherwise(made, node, noise, *given_to)
            values[node.name] = made
            for a in node.all_input_nodes:
                if last_use[a.name] == node.name and a.name != output and a.name not in leaves:
                    values.pop(a.name, None)
            if deadline is not None and time.perf_counter() > deadline:
                raise NotChecked(f"it took longer than the time limit allows. {FORCE_CHECK}")
    value = values[output]
    gradients = _gradients(value, env)
    written = {
        n: given[n].detach()
        for n, version in versions.items()
        if isinstance(given[n], Tensor) and env[n]._version != version
    }
    plain = value.detach() if isinstance(value, Tensor) else value
    return Result(plain, gradients, written)


def largest_entry(x: Any) -> float:
    """Returns the largest absolute entry, without what masks fill in."""
    if not isinstance(x, Tensor) or not x.numel() or x.dtype not in (*NARROW, torch.float64):
        return 0.0
    size = x.detach().abs()
    return float(torch.where(size < _FILL, size, 0.0).max())


def _kept_dtypes(leaves: Mapping[str, Any]) -> frozenset[torch.dtype]:
    """Dtypes that are coarser than all floating leaves: casts to them are meant to round."""
    eps = [
        torch.finfo(x.dtype).eps
        for x in leaves.values()
        if isinstance(x, Tensor) and x.dtype.is_floating_point
    ]
    return frozenset(d for d in NARROW if eps and torch.finfo(d).eps > max(eps))


def _rounded_otherwise(
    made: Any, node: fx.Node, generator: torch.Generator, exponent: Any = None
) -> Any:
    """Returns a new floating tensor with each entry moved by one rounding, up or down.

    What an exponential gives is moved by as much as roundings of its argument do: a streaming
    operator makes probabilities again as exp(score - normaliser), for two distributions.
    """
    value = example(node)
    if not isinstance(made, Tensor) or not isinstance(value, Tensor):
        return made
    memory = storage_of(node)
    if value.dtype not in (*NARROW, torch.float64) or any(
        storage_of(a) == memory for a in node.all_input_nodes
    ):
        return made
    result, sign = made.detach(), random_signs(made, generator)
    change = result * sign * torch.finfo(value.dtype).eps
    if name_of(node) in EXPONENTIALS:
        change += sign * change_of_exponent(name_of(node), result, exponent, value.dtype)
    return torch.where(made.detach().abs() < _FILL, made + change, made)


def change_of_exponent(name: str, made: Tensor, exponent: Any, dtype: torch.dtype) -> Any:
    """Returns by how much roundings of its argument change what an exponential gives.

    The argument is accumulated in at least float32.
    """
    wide = torch.promote_types(dtype, torch.float32)
    change = 4 * largest_entry(exponent) * torch.finfo(wide).eps
    return change if name in LOGARITHMS else change * made


def _fresh(value: Any, wide: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone(memory_format=torch.preserve_format)
    if copy.stride() != value.stride():
        copy = value.detach()
        if 0 not in value.stride():
            copy = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            ).copy_(copy)
    if wide and value.dtype in NARROW:
        copy = copy.double()
    return copy.requires_grad_(value.requires_grad)


def _entrance(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    with torch.enable_grad():
        return value.view_as(value)


def _run_node(
    node: fx.Node,
    values: Mapping[str, Any],
    dependent: bool,
    wide: bool,
    kept: frozenset[torch.dtype],
    finite: bool,
    terms: GradientTerms | None,
) -> Any:
    def widened(x: Any) -> Any:
        is_narrow = isinstance(x, torch.dtype) and x in NARROW and x not in kept
        return torch.float64 if is_narrow else x

    def look_up(n: fx.Node) -> Any:
        value = values[n.name]
        if dependent and isinstance(value, Tensor):
            value = value.to(widened(value.dtype))
        return value if terms is None else terms.use(node, value)

    given: Any = fx.map_arg((node.args, node.kwargs), look_up)
    args, kwargs = tree_map(_limited, given) if finite else given
    target: Any = node.target
    if finite and target in PROGRAM_TEXTS:  # it has the user's numbers in its text
        place = PROGRAM_TEXTS[target]
        text = Program.of(args[place]).with_lowest(LOWEST).text
        args = (*args[:place], text, *args[place + 1 :])
    if wide and name_of(node) in ("_enter_autocast", "_exit_autocast"):
        return None
    if dependent:
        args, kwargs = tree_map(widened, args), tree_map(widened, kwargs)
    with _default_of(node, (args, kwargs)) if dependent else contextlib.nullcontext():
        if node.op == "call_method":
            is_widened = dependent and target in _CASTS and _CASTS[target] not in kept
            method = "double" if is_widened else target
            made = getattr(args[0], method)(*args[1:], **kwargs)
        else:
            made = target(*args, **kwargs)
        return made if terms is None or not args else terms.softmax(node, args[0], made)


def _default_of(node: fx.Node, given: Any) -> contextlib.AbstractContextManager[None]:
    """Makes a result float64 that has torch's default dtype.

    That is one for all threads, and what another thread makes meanwhile would have it. So it is
    set for those results alone: of no floating tensor.
    """
    value = example(node)
    has_own = any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves(given))
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    has_default = is_floating and not has_own
    return default_dtype(torch.float64) if has_default else contextlib.nullcontext()


def _limited(x: Any) -> Any:
    return LOWEST if isinstance(x, float) and x == -math.inf else x


def _dependent(nodes: Sequence[fx.Node], leaves: Mapping[str, Any]) -> frozenset[str]:
    """Returns the nodes that depend on floating-point inputs, by data or through memory."""
    found = {n for n, x in leaves.items() if isinstance(x, Tensor) and x.dtype.is_floating_point}
    while True:
        size = len(found)
        memory = set[int | None]()
        for node in nodes:
            if any(a.name in found for a in node.all_input_nodes):
                found.add(node.name)
                memory |= written_memory(node)
        found |= {n.name for n in nodes if storage_of(n) in memory}
        if len(found) == size:
            return frozenset(found - leaves.keys())


def _gradients(value: Any, leaves: Mapping[str, Any]) -> dict[str, Tensor | None]:
    wanted = {n: x for n, x in leaves.items() if isinstance(x, Tensor) and x.requires_grad}
    if not isinstance(value, Tensor) or not value.requires_grad:
        return {}
    weight = weights(value)
    found = torch.autograd.grad(value, list(wanted.values()), weight, allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def weights(value: Tensor) -> Tensor:
    """Returns the gradient of the value: another for each entry, so that no errors cancel."""
    if value.dim() == 0:
        return torch.ones_like(value)
    generator = torch.Generator(value.device).manual_seed(7)
    made = torch.rand(value.shape, generator=generator, device=value.device, dtype=torch.float32)
    # few digits: the same in every dtype
    return ((made * 64).floor() / 64 + 0.5).to(value.dtype)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default dtype inside."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


@contextlib.contextmanager
def modes_restored() -> Iterator[None]:
    """Restores gradient mode and autocast, however the nodes left them."""
    devices = [d for d in ("cpu", "cuda") if d == "cpu" or torch.cuda.is_available()]
    before = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    cache, grad = torch.is_autocast_cache_enabled(), torch.is_grad_enabled()
    nesting = torch.autocast_increment_nesting()
    try:
        yield
    finally:
        while torch.autocast_decrement_nesting() >= nesting:
            pass
        torch.clear_autocast_cache()
        torch.set_grad_enabled(grad)
        torch.set_autocast_cache_enabled(cache)
        for device, enabled, dtype in before:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
