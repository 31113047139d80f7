"""Defines enable(): rewrites in every Inductor compilation, as trainers call torch.compile."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Unpack

import torch
import torch._dynamo.config
import torch._inductor.config
from torch.utils import _config_module

from torch_streamkl.fx_passes import fallback
from torch_streamkl.fx_passes.backend import (
    rewrite_and_report,
    rewrite_before_split,
    without_rewrite,
)
from torch_streamkl.fx_passes.capture.settings import CAPTURE
from torch_streamkl.fx_passes.inductor_passes import (
    JointPass,
    PreGradPass,
    chained,
    rewriting_pass,
    without_ours,
)
from torch_streamkl.fx_passes.options import (
    Given,
    OptionValues,
    RewriteOptions,
    with_keywords,
    without_inner,
)


class EnabledPass(PreGradPass):
    """The rewrite for all graphs."""

    def __init__(self, ours: RewriteOptions) -> None:
        super().__init__(ours, rewrite_and_report)


class _OfProcess:
    """The same for all threads."""

    def __init__(self) -> None:
        self._value: dict[str, object] | None = None

    def get(self) -> dict[str, object] | None:
        return self._value

    def set(self, value: dict[str, object] | None) -> None:
        self._value = value


# Dynamo's settings before the first `enable`, kept as torch keeps its own: newer releases keep
# them for each thread. Not in our passes, which the user may replace.
_before: ContextVar[dict[str, object] | None] | _OfProcess = (
    ContextVar("settings before enable", default=None)
    if hasattr(_config_module, "ContextVar")
    else _OfProcess()
)


class Enabled:
    """The result of `enable`: ``with enable():`` restores at its end what was before it."""

    def __init__(self, before: RewriteOptions | None) -> None:
        self._before = before

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        _set(self._before)


def enable(options: Given = None, /, **named: Unpack[OptionValues]) -> Enabled:
    """Rewrite every graph that Inductor compiles from now on, whoever calls torch.compile.

    This is for code that calls ``torch.compile`` itself, such as a trainer with
    ``torch_compile=True``::

        torch_streamkl.enable()
        trainer = transformers.Trainer(model, TrainingArguments(torch_compile=True, ...), ...)

    It adds our passes after those that are configured in ``torch._inductor.config``, and sets in
    ``torch._dynamo.config`` ``capture_dynamic_output_shape_ops`` (rows that are selected by a
    boolean mask stay in the graph) and, from torch 2.13 on, ``nested_graph_breaks`` (a graph break
    in a called function leaves the graph of its caller whole). What was compiled before stays as
    it is: call `enable` before the first step. Settings of torch.compile belong to the thread that
    makes them: call it in the thread that trains. A graph that Inductor finds in its cache is not
    analysed again, and reported only when it was compiled. A pass that replaces ours later, or
    comes with ``torch.compile(options=)``, steps the rewrite off: a warning says so.

    A second call replaces the options of the first. As a context manager it puts back at its end
    what was before the call, also inside of another one. Inside, ``backend="streamkl"`` and
    ``inductor_options()`` work as outside, with their own options.

    Args:
        options: `RewriteOptions`, or a dict with names such as ``streamkl.min_mib``.
        named: options by name, such as ``min_mib=0``.

    Returns:
        A context manager, which may be ignored.

    Raises:
        ValueError: an option has a value that it cannot have. Nothing is changed then.
        TypeError: an option does not exist.
    """
    ours, theirs = with_keywords(options, named, "enable")
    ours = without_inner(ours, "enable")
    for name in theirs:
        raise ValueError(
            f"enable() takes options of the rewrite, and {name!r} is one of Inductor: set "
            f"torch._inductor.config.{name} for all graphs"
        )
    active = _active()
    rewrite_before_split()
    _set(ours)
    return Enabled(active.ours if active is not None else None)


def disable() -> None:
    """Undo `enable`, however often it was called; without it nothing happens.

    A setting that was changed since then is left as it is, and so is what was compiled.
    """
    _set(None)


def _active() -> EnabledPass | None:
    found = rewriting_pass(torch._inductor.config.pre_grad_custom_pass)
    return found if isinstance(found, EnabledPass) else None


def _set(ours: RewriteOptions | None) -> None:
    """Rewrite with these options from now on, or no longer.

    Each setting is put back by itself: one that the user replaced since then stays.
    """
    inductor, dynamo = torch._inductor.config, torch._dynamo.config
    before = _before.get() or {}
    if ours is not None:
        kept = {}
        for name, value in CAPTURE.items():
            now = getattr(dynamo, name)
            kept[name] = before[name] if name in before and now == value else now
            setattr(dynamo, name, value)
        _before.set(kept)
        fallback.install(_captures_because_of_us)
        inductor.pre_grad_custom_pass = chained(EnabledPass(ours), inductor.pre_grad_custom_pass)
        inductor.joint_custom_pre_pass = chained(
            JointPass(ours, without_rewrite), inductor.joint_custom_pre_pass
        )
        return
    for name in ("pre_grad_custom_pass", "joint_custom_pre_pass"):
        configured = getattr(inductor, name)
        if (users := without_ours(configured)) is not configured:
            setattr(inductor, name, users)
    for name, user_value in before.items():
        if getattr(dynamo, name) == CAPTURE[name]:
            setattr(dynamo, name, user_value)
    _before.set(None)
    fallback.uninstall()


def _captures_because_of_us() -> bool:
    """Whether this thread captures data-dependent shapes, and would not without `enable`."""
    before, now = _before.get() or {}, getattr(torch._dynamo.config, fallback.SETTING)
    return before.get(fallback.SETTING) is False and bool(now)
