"""backend="streamkl" and inductor_options(): two thin front ends of one rewrite."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

import torch_streamkl
from torch_streamkl.fx_passes import ddp
from torch_streamkl.fx_passes.pipeline import rewrite
from torch_streamkl.fx_passes.reporting.report import Report
from torch_streamkl.registration import WITHOUT_AUTOGRAD
from torch_streamkl.version import __version__

log = logging.getLogger("torch_streamkl")
PREFIX = "streamkl."
INNER_BACKENDS = ("inductor", "aot_eager", "eager")
OPTIONS: dict[str, tuple[object, ...]] = {  # the values of each option, its default first
    "streamkl.strict": (False, True),
    "streamkl.explain": (False, True),
    "streamkl.inner": INNER_BACKENDS,
    "streamkl.deterministic": (True, False),
}
REPORTS: list[Callable[[Report], None]] = []  # who wants to see reports


class UnfusedError(RuntimeError):
    """Raised with ``streamkl.strict`` when a KL site of the graph stays as it is."""


@contextmanager
def collected() -> Iterator[Report]:
    """What is reported meanwhile, in one report."""
    report = Report()
    observer = report.extend
    REPORTS.append(observer)
    try:
        yield report
    finally:
        REPORTS.remove(observer)


def streamkl(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],  # tensors and symbolic sizes
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """torch.compile backend: rewrite Dynamo's graph, then compile it with Inductor.

    Options: ``streamkl.strict`` raises `UnfusedError` when a KL site stays unfused,
    ``streamkl.explain`` logs the report, ``streamkl.inner`` names what compiles the rewritten
    graph ("inductor", "aot_eager" or "eager"), ``streamkl.deterministic`` is that argument of
    `attention_kl`. Everything else goes to Inductor.
    """
    ours, theirs = split_options(options or {})
    if not ddp.is_part_of_a_rewritten_graph():
        _rewrite_and_report(gm, ours)
    inner = ours["streamkl.inner"]
    if inner == "eager":
        return gm.forward
    if inner == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(gm, list(example_inputs))
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode else {}), **theirs}
    previous = patches.get("joint_custom_pre_pass", torch._inductor.config.joint_custom_pre_pass)
    patches["joint_custom_pre_pass"] = chained(JointPass(ours), previous)
    compiled: Any = compile_fx(gm, example_inputs, config_patches=patches)
    return compiled


def _options_of(compiler: Any) -> dict[str, Any] | None:
    """Our options of what torch.compile calls, None where that is another backend."""
    arguments: dict[str, Any] = {}
    while compiler is not streamkl:
        if compiler is None:
            return None
        if isinstance(compiler, functools.partial):  # of explain()
            arguments = {**compiler.keywords, **arguments}
            compiler = compiler.func
        else:  # of torch.compile()
            arguments = {**getattr(compiler, "kwargs", {}), **arguments}
            compiler = getattr(compiler, "compiler_fn", None)
    return split_options(arguments.get("options") or {})[0]


def _free_cuda_graphs() -> None:
    if not torch.cuda.is_available():
        return
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


# torch._dynamo.reset() asks every backend that was used for this
streamkl.reset = _free_cuda_graphs  # type: ignore[attr-defined]  # functions declare none


def inductor_options(
    *, strict: bool = False, explain: bool = False, deterministic: bool = True
) -> dict[str, Any]:
    """Options for ``torch.compile(fn, options=...)`` that run the same rewrite inside Inductor.

    The arguments are the backend's options of the same names. Passes that are already configured
    in ``torch._inductor.config`` run before ours. A graph that Inductor finds in its cache is not
    analysed again: a report is logged when a graph is compiled, not when it is loaded.
    """
    ours, _ = split_options(
        {
            "streamkl.strict": strict,
            "streamkl.explain": explain,
            "streamkl.deterministic": deterministic,
        }
    )
    config = torch._inductor.config
    return {
        "pre_grad_custom_pass": chained(PreGradPass(ours), config.pre_grad_custom_pass),
        "joint_custom_pre_pass": chained(JointPass(ours), config.joint_custom_pre_pass),
    }


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ours, checked and completed, and the rest."""
    ours = {name: values[0] for name, values in OPTIONS.items()}
    theirs = {}
    for name, value in options.items():
        if not name.startswith(PREFIX):
            theirs[name] = value
            continue
        if name not in OPTIONS:
            known = ", ".join(sorted(OPTIONS))
            raise ValueError(f"options of the streamkl backend are {known}, got {name}")
        if value not in OPTIONS[name]:
            values = " or ".join(repr(v) for v in OPTIONS[name])
            raise ValueError(f"{name} must be {values}, got {value!r}")
        ours[name] = value
    return ours, theirs


def _rewrite_and_report(gm: fx.GraphModule, ours: dict[str, Any]) -> Report:
    report = rewrite(gm, deterministic=ours["streamkl.deterministic"])
    for observer in REPORTS:
        observer(report)
    if report.sites or report.failures:
        log.log(logging.WARNING if ours["streamkl.explain"] else logging.INFO, "%s", report)
    if ours["streamkl.strict"] and (report.num_fused < len(report.sites) or report.failures):
        raise UnfusedError(f"streamkl.strict: a KL site stays unfused\n{report}")
    return report


ddp.rewrite_before_split(_options_of, _rewrite_and_report)


@functools.cache
def source_digest() -> str:
    """Digest of every file of the package: a change of ours must never meet a cached graph.

    A custom operator's backward is part of compiled graphs only by name, so without this a cached
    graph would silently keep computing yesterday's gradient.
    """
    roots = (Path(torch_streamkl.__file__).parent, Path(__file__).parent)
    return " ".join([__version__, *(digest_of(root) for root in roots)])


def digest_of(root: Path) -> str:
    """Digest of names and contents of all files below a directory, compiled bytecode excepted."""
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.is_file() and p.suffix != ".pyc"):
        digest.update(f"{path.relative_to(root)}:{path.stat().st_size}:".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_key(ours: dict[str, Any]) -> str:
    """What a compiled graph depends on beside the graph: our sources and our options."""
    return f"torch_streamkl {source_digest()} {sorted(ours.items())}"


class JointPass(CustomGraphPass):
    """Calls our operators without autograd; its uuid is in the FX and AOTAutograd cache keys."""

    def __init__(self, ours: dict[str, Any]) -> None:
        self.ours = ours

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function":
                node.target = WITHOUT_AUTOGRAD.get(node.target, node.target)

    def uuid(self) -> str:
        return cache_key(self.ours)


class PreGradPass(CustomGraphPass):
    """The rewrite as Inductor's pre-grad pass."""

    def __init__(self, ours: dict[str, Any]) -> None:
        self.ours = ours

    def __call__(self, graph: fx.Graph) -> None:
        assert graph.owning_module is not None
        _rewrite_and_report(graph.owning_module, self.ours)

    def uuid(self) -> str:
        return cache_key(self.ours)


class Chained(CustomGraphPass):
    """Passes that run one after the other; not cached when one of them has no uuid."""

    def __init__(self, passes: Sequence[Any]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> Any:
        keys = tuple(each.uuid() if hasattr(each, "uuid") else None for each in self.passes)
        return None if None in keys else keys


def chained(ours: CustomGraphPass, users: Any) -> CustomGraphPass:
    """What the user configured (nothing, a pass, or a list of passes), then ours."""
    if users is None:
        return ours
    return Chained([*(users if isinstance(users, (list, tuple)) else [users]), ours])
