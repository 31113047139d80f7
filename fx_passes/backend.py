"""backend="streamkl" and inductor_options(): two thin front ends of one rewrite."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from torch_streamkl.fx_passes import (
    ddp,
    inductor_kernels,
    inductor_once,
    inductor_sites,
    sites_alone,
)
from torch_streamkl.fx_passes.fx_utils.torch_names import (
    _disable_saved_tensors_hooks_during_tracing,
    later,
)
from torch_streamkl.fx_passes.gradients_in_forward import WITHOUT_SORT, topological_sort
from torch_streamkl.fx_passes.inductor_passes import (
    JointPass,
    PreGradPass,
    as_one_pass,
    chained,
    rewriting_pass,
    source_digest,
    without_ours,
)
from torch_streamkl.fx_passes.pipeline import rewrite
from torch_streamkl.fx_passes.reporting.leaving_tensors import leaving_tensors
from torch_streamkl.fx_passes.reporting.report import Report
from torch_streamkl.fx_passes.validation.options import MODES, CheckOptions

log = logging.getLogger("torch_streamkl")
PREFIX = "streamkl."
INNER_BACKENDS = ("inductor", "aot_eager", "eager")
BOUNDS = {
    "streamkl.verify_max_mib": None,
    "streamkl.verify_max_seconds": 1.0,
    "streamkl.min_mib": None,
}
OPTIONS: dict[str, tuple[object, ...]] = {  # the values of each option, its default first
    "streamkl.strict": (False, True),
    "streamkl.explain": (False, True),
    "streamkl.inner": INNER_BACKENDS,
    "streamkl.deterministic": (True, False),
    "streamkl.verify": MODES,
    "streamkl.row_programs": (True, False),
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


def _streamkl(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],  # tensors and symbolic sizes
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """torch.compile backend: rewrite Dynamo's graph, then compile it with Inductor.

    Options: ``streamkl.strict`` raises `UnfusedError` when a KL site stays unfused,
    ``streamkl.explain`` logs the report, ``streamkl.inner`` names what compiles the rewritten
    graph ("inductor", "aot_eager" or "eager"; with the last the report describes what Inductor
    would run), ``streamkl.deterministic`` is that argument of `attention_kl`. ``streamkl.verify``
    says when a fused site is run beside the code that it replaces: "auto" where that takes at most
    ``streamkl.verify_max_mib`` of memory (a quarter of what is free where None) and
    ``streamkl.verify_max_seconds``, "always" whatever it takes, and nothing is fused that cannot
    be checked, or "never". ``streamkl.min_mib`` leaves a site, or attention whose map is not
    compared any more, to Inductor where tensors of queries x keys take less than that many MiB: 0
    fuses all, None is what was measured on the device (0 for sites, 32 for such attention on a
    GPU, for row programs 1024 on a GPU and 4096 on a CPU). ``streamkl.row_programs``, on by
    default, also fuses sums that are no divergence, as row programs. Everything else goes to
    Inductor.
    """
    ours, theirs = split_options(options or {})
    inner = ours["streamkl.inner"]
    if not ddp.is_part_of_a_rewritten_graph():
        is_usual = mode in (None, "default") and not theirs and _is_inductor_as_it_is()
        may_run_alone = is_usual and inner != "aot_eager"  # "eager" is explain()
        rewrite_and_report(gm, ours, theirs.get("cpp_wrapper"), may_run_alone)
    if inner == "eager":
        return gm.forward
    if inner == "aot_eager":
        aot_eager = later("torch._dynamo.backends.debugging", "aot_eager")
        return aot_eager(gm, list(example_inputs))
    if sites_alone.ALONE in gm.meta:
        alone: fx.GraphModule = gm.meta[sites_alone.ALONE]
        return alone.forward
    compile_fx = later("torch._inductor.compile_fx", "compile_fx")
    of_mode = later("torch._inductor", "list_mode_options")(mode) if mode else {}
    patches = {**of_mode, **theirs}
    previous = patches.get("joint_custom_pre_pass", torch._inductor.config.joint_custom_pre_pass)
    patches["joint_custom_pre_pass"] = chained(JointPass(ours), previous)
    # enable() may have set a pass for all graphs: this one is rewritten already
    before = patches.get("pre_grad_custom_pass", torch._inductor.config.pre_grad_custom_pass)
    patches["pre_grad_custom_pass"] = as_one_pass(without_ours(before))
    if patches.get("cpp_wrapper"):
        # torch 2.11 sets what graphs of C++ need for the forward's only, given it as an option
        cpp_options = later("torch._inductor.compile_fx", "get_cpp_wrapper_config")
        patches |= {name: x for name, x in cpp_options().items() if name not in theirs}
    compiled: Any = compile_fx(gm, example_inputs, config_patches=patches)
    return compiled


def _options_of(compiler: Any) -> dict[str, Any] | None:
    """Our options of what torch.compile calls, None where that does not rewrite."""
    arguments: dict[str, Any] = {}
    while compiler is not _streamkl:
        compiler = getattr(compiler, "_torchdynamo_orig_backend", compiler)
        if compiler is None:
            return None
        inductor = getattr(torch, "_TorchCompileInductorWrapper", None)
        if inductor is not None and isinstance(compiler, inductor):
            configured = torch._inductor.config.pre_grad_custom_pass
            configured = compiler.config.get("pre_grad_custom_pass", configured)
            found = rewriting_pass(configured)
            return None if found is None else found.ours
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
    later("torch._inductor.cudagraph_trees", "reset_cudagraph_trees")()


_streamkl.__name__ = _streamkl.__qualname__ = "streamkl"
# torch._dynamo.reset() asks every backend that was used for this
_streamkl.reset = _free_cuda_graphs  # type: ignore[attr-defined]  # functions declare none


def inductor_options(
    *,
    strict: bool = False,
    explain: bool = False,
    deterministic: bool = True,
    verify: str = "auto",
    verify_max_mib: float | None = None,
    verify_max_seconds: float = 1.0,
    min_mib: float | None = None,
    row_programs: bool = True,
) -> dict[str, Any]:
    """Options for ``torch.compile(fn, options=...)`` that run the same rewrite inside Inductor.

    The arguments are the backend's options of the same names. Passes that are already configured
    in ``torch._inductor.config`` run before ours. A graph that Inductor finds in its cache is not
    analysed again: a report is logged when a graph is compiled, not when it is loaded.
    """
    rewrite_before_split()
    ours, _ = split_options(
        {
            "streamkl.strict": strict,
            "streamkl.explain": explain,
            "streamkl.deterministic": deterministic,
            "streamkl.verify": verify,
            "streamkl.verify_max_mib": verify_max_mib,
            "streamkl.verify_max_seconds": verify_max_seconds,
            "streamkl.min_mib": min_mib,
            "streamkl.row_programs": row_programs,
        }
    )
    config = torch._inductor.config
    return {
        "pre_grad_custom_pass": chained(
            PreGradPass(ours, rewrite_and_report), config.pre_grad_custom_pass
        ),
        "joint_custom_pre_pass": chained(JointPass(ours), config.joint_custom_pre_pass),
    }


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ours, checked and completed, and the rest."""
    ours = {name: values[0] for name, values in OPTIONS.items()} | BOUNDS
    theirs = {}
    for name, value in options.items():
        if not name.startswith(PREFIX):
            theirs[name] = value
            continue
        if name in BOUNDS:
            ours[name] = value
            continue
        if name not in OPTIONS:
            known = ", ".join(sorted(ours))
            raise ValueError(f"options of the streamkl backend are {known}, got {name}")
        if value not in OPTIONS[name]:
            values = " or ".join(repr(v) for v in OPTIONS[name])
            raise ValueError(f"{name} must be {values}, got {value!r}")
        ours[name] = value
    _check_options(ours)
    least: Any = ours["streamkl.min_mib"]
    is_number = isinstance(least, (int, float)) and not isinstance(least, bool)
    if least is not None and not (is_number and least >= 0):
        raise ValueError(f"streamkl.min_mib must be a number of at least 0 or None, got {least!r}")
    return ours, theirs


def _check_options(ours: dict[str, Any]) -> CheckOptions:
    return CheckOptions(
        mode=ours["streamkl.verify"],
        max_mib=ours["streamkl.verify_max_mib"],
        max_seconds=ours["streamkl.verify_max_seconds"],
        version=source_digest(),
    )


def _is_inductor_as_it_is() -> bool:
    """Whether nothing is configured that a graph would miss which Inductor does not get."""
    config = torch._inductor.config
    passes = (
        config.joint_custom_pre_pass, config.joint_custom_post_pass,
        config.post_grad_custom_pre_pass, config.post_grad_custom_post_pass,
        without_ours(config.pre_grad_custom_pass),
    )  # fmt: skip
    graphs = config.triton.cudagraphs or config.cpp_wrapper
    return not graphs and not _is_to_be_stored() and all(not x for x in passes)


def _is_to_be_stored() -> bool:
    """Whether what is compiled is written to a file, as of aot_compile(): Inductor's can be."""
    settings = (
        (torch._functorch.config, "bundled_autograd_cache"),
        (torch._dynamo.config, "caching_precompile"),
    )
    return any(getattr(config, name, False) for config, name in settings)


def rewrite_and_report(
    gm: fx.GraphModule,
    ours: dict[str, Any],
    cpp_wrapper: bool | None = None,
    may_run_alone: bool = False,
) -> Report:
    """``may_run_alone``: a graph with nothing to compile runs without Inductor, and is noted."""
    min_mib = ours["streamkl.min_mib"]
    # a checkpoint around the call counts what is saved, and its hooks may read it
    with _disable_saved_tensors_hooks_during_tracing():
        report = rewrite(
            gm,
            ours["streamkl.deterministic"],
            _check_options(ours),
            min_mib,
            is_compiled=ours["streamkl.inner"] != "aot_eager",  # "eager" is explain()
            row_programs=ours["streamkl.row_programs"],
        )
    alone = sites_alone.runs_alone(gm) if may_run_alone and report.num_fused else None
    if alone is not None:
        gm.meta[sites_alone.ALONE] = alone
        report.notes.append(sites_alone.NOTE)
    elif report.num_fused and ours["streamkl.inner"] == "inductor":
        if cpp_wrapper is None:
            cpp_wrapper = bool(torch._inductor.config.cpp_wrapper)
        if cpp_wrapper:
            launches = inductor_kernels.install()
            report.notes.append(inductor_kernels.NOTE[launches])
        elif not inductor_sites.install():
            report.notes.append(inductor_sites.WITHOUT_TABLE)
        if not inductor_once.install():
            report.notes.append(inductor_once.WITHOUT_LOWERINGS)
        if topological_sort() is None:
            report.notes.append(WITHOUT_SORT)
    if not report.remaining:  # else it says what the outputs are kept for
        report.outside += leaving_tensors(gm.graph)
    report.notes += ddp.notes()
    for observer in REPORTS:
        observer(report)
    if report.sites or report.failures or report.outside:
        log.log(logging.WARNING if ours["streamkl.explain"] else logging.INFO, "%s", report)
    if ours["streamkl.strict"] and (report.num_unfused or report.failures):
        raise UnfusedError(f"streamkl.strict: a KL site stays unfused\n{report}")
    return report


def rewrite_before_split() -> None:
    """Rewrite graphs of DistributedDataParallel, as whole graphs, from now on."""
    ddp.rewrite_before_split(_options_of, rewrite_and_report)


def __getattr__(name: str) -> Any:
    """``streamkl``: who asks for the backend is about to compile. An import changes nothing."""
    if name == "streamkl":
        rewrite_before_split()
        return _streamkl
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
