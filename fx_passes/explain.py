"""Defines explain(): traces a program, and reports every loss, without compiling."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.fx_utils.torch_names import tree_leaves
from torch_streamkl.fx_passes.options import Given, RewriteOptions, split_options
from torch_streamkl.fx_passes.reporting import graph_breaks
from torch_streamkl.fx_passes.reporting.report import Report, Site

_FRAME = "explained"  # how the names in the frame of explain() begin
_LIMITS = {"recompile_limit": 2**30, "accumulated_recompile_limit": 2**30}


def explain(fn: Callable[..., Any], *args: Any, options: Given = None, **kwargs: Any) -> Report:
    """Traces and runs ``fn(*args, **kwargs)`` once, and reports what the rewrite does with each
    loss.

    Dynamo traces the function as for torch.compile, and the rewritten graph runs without Inductor.
    ``fn`` is not changed, and no cache is read or written:

    .. code-block:: python

        print(torch_streamkl.explain(step, batch))

    Args:
        fn: a function, bound method or module, compiled by torch.compile or not.
        args, kwargs: its arguments.
        options: as in ``torch.compile(backend="streamkl", options=)``. ``strict`` and ``explain``
            change nothing here. To pass an argument named ``options`` to fn, use
            `functools.partial`.

    Returns:
        A `Report`. Printed, it is short; ``report.details()`` has everything.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: some tensors are on the meta device, and others are not; or an option breaks
            its rule.
        Exception: whatever ``fn`` raises.
    """
    check_program("explain", fn, options)
    ours, _ = split_options(options)
    program = uncompiled(fn)
    _check_devices(program, (args, kwargs))
    settings = torch._dynamo.config.patch(_LIMITS)
    with backend.reports_of_this_thread() as report, settings, graph_breaks.of_one_program():
        try:
            torch.compile(in_a_new_frame(program), backend=_new_backend(ours))(*args, **kwargs)
        except Exception as error:
            error.add_note("explain() traces and runs the function: this was raised meanwhile")
            raise
    report.sites[:] = [_with_names_of(program, site) for site in report.sites]
    return report


def _with_names_of(program: Callable[..., Any], site: Site) -> Site:
    """Names what Dynamo saw through the frame of explain() as the function itself does."""
    inner = program
    text, reason = site.roles, site.reason
    if _FRAME not in text + reason:
        return site
    while isinstance(inner, functools.partial):
        inner = inner.func
    names = [
        x.name
        for x in _parameters_of(program).values()
        if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)
    ]
    cells = getattr(getattr(inner, "__code__", None), "co_freevars", ())

    def argument(found: re.Match[str]) -> str:
        index = int(found[1])
        return names[index] if index < len(names) else f"argument {index}"

    for pattern, name in (
        (rf"{_FRAME}_args\[(\d+)\]", argument),
        (rf"\b{_FRAME}_args_(\d+)_?\b", argument),  # of a checkpointed function
        (rf"{_FRAME}_kwargs\['(\w+)'\]", r"\1"),
        (rf"{_FRAME}_fn(?:\.func)*\.args\[(\d+)\]", r"argument \1"),
        (
            rf"{_FRAME}_fn(?:\.func)*\.__closure__\[(\d+)\]\.cell_contents",
            lambda found: cells[int(found[1])] if int(found[1]) < len(cells) else found[0],
        ),
        (rf"{_FRAME}_fn(?:\.func)*\b", "self"),
    ):
        text, reason = re.sub(pattern, name, text), re.sub(pattern, name, reason)
    return replace(site, roles=text, reason=reason)


def _parameters_of(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    fn = fn.forward if isinstance(fn, nn.Module) else fn
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):  # of C
        return {}


def check_program(caller: str, fn: Any, options: Given) -> None:
    """Raises if ``fn`` is not callable, or if its own ``options`` argument was taken as ours."""
    if not callable(fn):
        hint = ", a result: pass the function and its arguments, not what it returned"
        raise TypeError(
            f"{caller}() must be given a function and its arguments, {caller}(fn, *args), got "
            f"{type(fn).__name__}{hint if isinstance(fn, (Tensor, int, float, tuple)) else ''}"
        )
    if options is None or isinstance(options, RewriteOptions):
        return
    try:
        split_options(options)
    except (TypeError, ValueError) as error:
        if "options" in _parameters_of(fn):
            error.add_note(
                f"the argument options of the function itself: {caller}(functools.partial(fn, "
                "options=...), *args)"
            )
        raise


def uncompiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function or module under torch.compile, or ``fn`` if it is not compiled."""
    inner = getattr(fn, "_orig_mod", None)  # of a module that was compiled
    if isinstance(inner, nn.Module):
        return inner
    return getattr(fn, "_torchdynamo_orig_callable", fn)


def in_a_new_frame(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function in new code, so that Dynamo finds nothing that it compiled before."""

    explained_fn = fn  # these names are found again in those of Dynamo

    def program(*explained_args: Any, **explained_kwargs: Any) -> Any:
        return explained_fn(*explained_args, **explained_kwargs)

    code = program.__code__.replace()
    return types.FunctionType(code, program.__globals__, "explained", None, program.__closure__)


def _check_devices(program: Callable[..., Any], given: Any) -> None:
    owner = getattr(program, "__self__", program)
    tensors = {f"argument {i}": x for i, x in enumerate(tree_leaves(given))}
    if isinstance(owner, nn.Module):
        tensors |= dict(owner.named_parameters()) | dict(owner.named_buffers())
    on_meta = {name: x.is_meta for name, x in tensors.items() if isinstance(x, Tensor)}
    if any(on_meta.values()) and not all(on_meta.values()):
        one = next(name for name, x in on_meta.items() if x)
        other = next(name for name, x in on_meta.items() if not x)
        raise ValueError(
            "explain() runs the program: its tensors must all have values, or all be on the meta "
            f"device, got {one} on meta and {other} on {tensors[other].device}"
        )


def _new_backend(ours: RewriteOptions) -> Callable[..., Callable[..., Any]]:
    """Returns a new backend: Dynamo recognises compiled code by the identity of its backend."""
    inner = "eager" if ours.inner == "inductor" else ours.inner
    options = replace(ours, inner=inner, strict=False, explain=False)
    return functools.partial(backend.streamkl, options=options, reported_as=ours.inner)
