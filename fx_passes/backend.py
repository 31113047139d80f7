"""backend="streamkl" and inductor_options(): two thin front ends of one rewrite."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch_streamkl.fx_passes.report import Report
from torch_streamkl.fx_passes.rewrite import rewrite

import torch_streamkl
from torch_streamkl.version import __version__

log = logging.getLogger("torch_streamkl")
PREFIX = "streamkl."
OPTIONS = {"streamkl.strict": False, "streamkl.explain": False, "streamkl.inner": "inductor"}
INNER_BACKENDS = ("inductor", "aot_eager", "eager")
REPORTS: list[Callable[[Report], None]] = []  # who wants to see reports: explain() adds itself


class UnfusedError(RuntimeError):
    """Raised with ``streamkl.strict`` when a KL site of the graph stays as it is."""


def streamkl(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """torch.compile backend: rewrite Dynamo's graph, then compile it with Inductor.

    Options: ``streamkl.strict`` raises `UnfusedError` when a KL site stays unfused,
    ``streamkl.explain`` logs the report, ``streamkl.inner`` names what compiles the rewritten
    graph ("inductor", "aot_eager" or "eager"). Everything else goes to Inductor.
    """
    ours, theirs = split_options(options or {})
    _rewrite_and_report(gm, ours)
    inner = ours["streamkl.inner"]
    if inner == "eager":
        return gm.forward
    if inner == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(gm, example_inputs)
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode else {}), **theirs}
    carrier = CacheKey(ours)
    previous = patches.get("joint_custom_pre_pass", torch._inductor.config.joint_custom_pre_pass)
    patches["joint_custom_pre_pass"] = carrier if previous is None else Chained(carrier, previous)
    return compile_fx(gm, example_inputs, config_patches=patches)


def inductor_options(**options: Any) -> dict[str, Any]:
    """Options for ``torch.compile(fn, options=...)`` that run the same rewrite inside plain
    Inductor.

    Keyword arguments are the backend's options without their prefix (``strict=True``). A pass that
    is already configured in ``torch._inductor.config`` runs before the rewrite.
    """
    ours, _ = split_options({PREFIX + name: value for name, value in options.items()})
    previous = torch._inductor.config.pre_grad_custom_pass
    carrier = CacheKey(ours)
    joint = torch._inductor.config.joint_custom_pre_pass
    return {
        "pre_grad_custom_pass": PreGradPass(ours, previous),
        "joint_custom_pre_pass": carrier if joint is None else Chained(carrier, joint),
    }


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ours, checked and completed, and the rest."""
    ours = {k: v for k, v in options.items() if k.startswith(PREFIX)}
    unknown = sorted(set(ours) - set(OPTIONS))
    if unknown:
        raise ValueError(
            f"options of the streamkl backend are {', '.join(sorted(OPTIONS))}, got {', '.join(unknown)}"
        )
    inner = ours.get("streamkl.inner", "inductor")
    if inner not in INNER_BACKENDS:
        raise ValueError(
            f"streamkl.inner must be one of {', '.join(INNER_BACKENDS)}, got {inner!r}"
        )
    return {**OPTIONS, **ours}, {k: v for k, v in options.items() if not k.startswith(PREFIX)}


def _rewrite_and_report(gm: fx.GraphModule, ours: dict[str, Any]) -> Report:
    report = rewrite(gm)
    for observer in REPORTS:
        observer(report)
    if ours["streamkl.explain"] and report.sites:
        log.warning("%s", report)
    else:
        log.info("%s", report)
    if ours["streamkl.strict"] and report.num_fused < len(report.sites):
        raise UnfusedError(f"streamkl.strict: a KL site stays unfused\n{report}")
    return report


@functools.cache
def source_digest() -> str:
    """Digest of every source file of the package: a change of ours must never meet a cached graph.

    A custom operator's backward is part of compiled graphs only by name, so without this a cached
    graph would silently keep computing yesterday's gradient.
    """
    digest = hashlib.sha256(__version__.encode())
    package = Path(torch_streamkl.__file__).parent
    passes = Path(__file__).parent
    for root in (package, passes):
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


class CacheKey(torch._inductor.custom_graph_pass.CustomGraphPass):
    """A pass that does nothing and whose uuid is part of the FX and AOTAutograd cache keys."""

    def __init__(self, ours: dict[str, Any]) -> None:
        self._uuid = f"torch_streamkl {source_digest()} {sorted(ours.items())}"

    def __call__(self, graph: fx.Graph) -> None:
        pass

    def uuid(self) -> str:
        return self._uuid


class Chained(torch._inductor.custom_graph_pass.CustomGraphPass):
    """Our key and a pass that the user had configured."""

    def __init__(self, key: CacheKey, user_pass: Any) -> None:
        self.key = key
        self.user_pass = user_pass

    def __call__(self, graph: fx.Graph) -> None:
        self.user_pass(graph)

    def uuid(self) -> Any:
        theirs = self.user_pass.uuid() if hasattr(self.user_pass, "uuid") else None
        return None if theirs is None else (self.key.uuid(), theirs)


class PreGradPass(torch._inductor.custom_graph_pass.CustomGraphPass):
    """The rewrite as Inductor's pre-grad pass; runs a pass that was configured before first."""

    def __init__(self, ours: dict[str, Any], previous: Any) -> None:
        self.ours = ours
        self.previous = previous
        self.key = CacheKey(ours)

    def __call__(self, graph: fx.Graph) -> None:
        if self.previous is not None:
            self.previous(graph)
        gm = graph.owning_module
        _rewrite_and_report(gm, self.ours)

    def uuid(self) -> Any:
        theirs = getattr(self.previous, "uuid", lambda: "")() if self.previous is not None else ""
        return None if theirs is None else (self.key.uuid(), theirs)
