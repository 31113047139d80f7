"""Defines enable(): applies the rewrite to every Inductor compilation, for trainers.

Trainers call torch.compile themselves. So `enable` adds passes to ``torch._inductor.config``, and
settings to ``torch._dynamo.config``; `disable` restores both.
"""

from __future__ import annotations

import threading
import weakref
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
    """Rewrites every graph that Inductor compiles, with the options of `enable`."""

    def __init__(self, ours: RewriteOptions) -> None:
        super().__init__(ours, rewrite_and_report)


class _ProcessWide:
    """Replaces a ContextVar: one value for all threads, as older torch keeps its settings."""

    def __init__(self) -> None:
        self._value: dict[str, object] | None = None

    def get(self) -> dict[str, object] | None:
        return self._value

    def set(self, value: dict[str, object] | None) -> None:
        self._value = value


# Dynamo's settings before the first `enable`, kept as torch keeps its own: newer releases keep
# them for each thread. Not in our passes, which the user may replace.
_is_by_thread = hasattr(_config_module, "ContextVar")
_before: ContextVar[dict[str, object] | None] | _ProcessWide = (
    ContextVar("settings before enable", default=None) if _is_by_thread else _ProcessWide()
)
# whose settings are those of `enable`: Inductor's entry point, which it wraps, is one for all
_enabled: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Enabled:
    """Restores, as a context manager, the options that were set before `enable`.

    Returned by `enable`. ``with enable(): ...`` restores them at its end; otherwise ignore it.
    """

    def __init__(self, before: RewriteOptions | None) -> None:
        self._before = before

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        _set(self._before)


def enable(options: Given = None, /, **named: Unpack[OptionValues]) -> Enabled:
    """Rewrites every graph that Inductor compiles from now on, whoever calls torch.compile.

    Use it for code that calls ``torch.compile`` itself, such as a trainer:

    .. code-block:: python

        torch_streamkl.enable()
        trainer = transformers.Trainer(model, TrainingArguments(torch_compile=True, ...), ...)

    A step that you compile yourself then equals ``torch.compile(step, backend="streamkl")``. What
    changes:

    - ``torch._inductor.config``: our passes run after those that are configured. A pass that
      replaces them later, also by ``torch.compile(options=)``, disables the rewrite with a
      warning.
    - ``torch._dynamo.config``: ``capture_dynamic_output_shape_ops`` keeps rows that a boolean mask
      selects in the graph. From torch 2.13 on, ``nested_graph_breaks`` keeps the caller's graph
      whole if a called function has a graph break.

    Call it before the first step, in the thread that trains: compiled code does not change, and
    Dynamo's settings belong to a thread. A graph from Inductor's cache is not analysed or reported
    again. A second call replaces the options of the first.

    Args:
        options: `RewriteOptions`, or a dict with names such as ``"streamkl.min_mib"``.
        named: options by name, such as ``min_mib=0``.

    Returns:
        A context manager, which you may ignore. Leaving its ``with`` block restores the options
        from before the call, also if blocks are nested. ``backend="streamkl"`` and
        `inductor_options` keep their own options inside.

    Raises:
        ValueError: an option has a value that breaks its rule, or belongs to Inductor. Nothing is
            changed.
        TypeError: a keyword is no option. Nothing is changed.
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
    """Undoes `enable`, however often it was called.

    Settings that you changed after `enable` keep your values, and compiled code does not change.
    If `enable` was not called, this does nothing.
    """
    _set(None)


def _active() -> EnabledPass | None:
    found = rewriting_pass(torch._inductor.config.pre_grad_custom_pass)
    return found if isinstance(found, EnabledPass) else None


def _set(ours: RewriteOptions | None) -> None:
    """Applies the rewrite with these options from now on, or with None no longer.

    Each setting is restored by itself: one that the user has replaced since then stays.
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
        _enabled.add(_owner())
        fallback.install(_captures_by_enable)
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
    _enabled.discard(_owner())
    if not _enabled:
        fallback.uninstall()


def _owner() -> threading.Thread:
    """The thread that settings belong to."""
    return threading.current_thread() if _is_by_thread else threading.main_thread()


def _captures_by_enable() -> bool:
    """Whether this thread captures data-dependent shapes only because of `enable`."""
    before, now = _before.get() or {}, getattr(torch._dynamo.config, fallback.SETTING)
    return before.get(fallback.SETTING) is False and bool(now)
