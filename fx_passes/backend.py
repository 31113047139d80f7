"""Defines the backend "streamkl" and inductor_options(), two thin front ends of one rewrite.

The backend rewrites Dynamo's graph and passes it to Inductor. `inductor_options` puts the same
rewrite into a pass of Inductor. Both end in `rewrite_and_report`.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import fx

from torch_streamkl import flop_counts
from torch_streamkl.compile_caches import source_digest
from torch_streamkl.fx_passes import (
    ddp,
    inductor_calls,
    inductor_double_backward,
    inductor_kernels,
    run_without_inductor,
)
from torch_streamkl.fx_passes.fx_utils.torch_names import (
    ShortenTraceback,
    _disable_saved_tensors_hooks_during_tracing,
    counters,
    later,
    optional,
)
from torch_streamkl.fx_passes.gradients_in_forward import WITHOUT_SORT, can_sort
from torch_streamkl.fx_passes.inductor_passes import (
    JointPass,
    PreGradPass,
    as_one_pass,
    chained,
    rewriting_pass,
    without_ours,
)
from torch_streamkl.fx_passes.options import (
    Given,
    OptionValues,
    RewriteOptions,
    split_options,
    with_keywords,
    without_inner,
)
from torch_streamkl.fx_passes.pipeline import rewrite
from torch_streamkl.fx_passes.reporting import artifact, graph_breaks
from torch_streamkl.fx_passes.reporting.graph_outputs import graph_outputs
from torch_streamkl.fx_passes.reporting.report import Report
from torch_streamkl.fx_passes.reporting.scan import Scan
from torch_streamkl.fx_passes.reporting.wording import reword

log = logging.getLogger("torch_streamkl")
REPORTS: list[Callable[[Report], None]] = []  # who wants to see reports


flop_counts.register(load=True)  # compiled graphs call operators without Python of ours


class PassesThroughDynamo(ShortenTraceback):
    """Raises through Dynamo unchanged, not as a BackendCompilerFailed: the base of our errors."""

    def __init__(self, text: str) -> None:
        # the traceback is the user's, then that of who raises it
        super().__init__(text, first_useful_frame=sys._getframe(1))


class UnfusedError(PassesThroughDynamo):
    """Raised with the option ``strict`` if a loss of the graph is not fused.

    It is raised while the graph is compiled, and its message has the report. A loss is code that
    compares two score- or logit-sized distributions, even if the rewrite does not recognize it,
    such as a comparison of sorted probabilities. A loss that is skipped for its size does not
    raise, nor does code with one distribution: attention, cross-entropy with labels, an entropy.
    """


class OptionError(PassesThroughDynamo, ValueError):
    """Raised during a compilation if an option does not exist, or breaks its rule."""


@contextmanager
def reports() -> Iterator[Report]:
    """Collects the reports of all graphs that are compiled inside of the ``with`` block into one.

    It does not matter who compiles: ``backend="streamkl"``, `inductor_options`, or a trainer after
    `enable`, in any thread:

    .. code-block:: python

        with torch_streamkl.reports() as report:
            step(batch)
        print(report)

    Returns:
        A context manager, which gives a `Report` that grows with each graph. A graph from
        Inductor's cache is not analysed, and adds nothing.
    """
    with _collected() as report:
        yield report


@contextmanager
def reports_of_this_thread() -> Iterator[Report]:
    """Collects the reports of the graphs that this thread compiles inside."""
    owner = threading.get_ident()
    with _collected(lambda: threading.get_ident() == owner) as report:
        yield report


@contextmanager
def _collected(is_meant: Callable[[], bool] = lambda: True) -> Iterator[Report]:
    report = Report()

    def observer(found: Report) -> None:
        if is_meant():
            report.extend(found)

    REPORTS.append(observer)
    before = _graphs_and_hits()
    try:
        yield report
    finally:
        REPORTS.remove(observer)
        # a pass of the user in the place of both of ours calls nothing of ours, nor does a cache
        compiled, hits = (max(a - b, 0) for a, b in zip(_graphs_and_hits(), before, strict=True))
        if not report.num_graphs:
            report.num_cached = min(hits, compiled)
            report.num_not_ours = compiled - report.num_cached


def _graphs_and_hits() -> tuple[int, int]:
    """Counts the graphs that Dynamo compiled, and those that AOTAutograd's cache had."""
    return counters["stats"]["unique_graphs"], counters["aot_autograd"]["autograd_cache_hit"]


collected = reports  # its name inside of the package


def _streamkl(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],  # tensors and symbolic sizes
    *,
    mode: str | None = None,
    options: Given = None,
    reported_as: str | None = None,
) -> Callable[..., Any]:
    """Rewrites Dynamo's graph, then compiles it: this is ``backend="streamkl"``.

    ``options`` are those of `RewriteOptions` with the prefix ``streamkl.``, or such an object;
    everything else in them goes to Inductor. torch.compile passes them to a backend when it
    compiles its first graph, so a wrong option raises there. ``reported_as``: the ``inner`` of
    which the report says how losses run, as explain() compiles nothing.
    """
    ours, theirs = _checked(options)
    inner = ours.inner
    is_compiled = (reported_as or inner) == "inductor"
    if not ddp.is_part_of_a_rewritten_graph():
        is_usual = mode in (None, "default") and not theirs and _is_plain_inductor()
        may_run_without_inductor = is_usual and is_compiled
        cpp_wrapper = theirs.get("cpp_wrapper")
        rewrite_and_report(gm, ours, cpp_wrapper, may_run_without_inductor, is_compiled)
    if inner == "eager":
        return gm.forward
    if inner == "aot_eager":
        aot_eager = later("torch._dynamo.backends.debugging", "aot_eager")
        return aot_eager(gm, list(example_inputs))
    if run_without_inductor.ALONE in gm.meta:
        alone: fx.GraphModule = gm.meta[run_without_inductor.ALONE]
        return alone.forward
    compile_fx = later("torch._inductor.compile_fx", "compile_fx")
    of_mode = later("torch._inductor", "list_mode_options")(mode) if mode else {}
    patches = {**of_mode, **theirs}
    previous = patches.get("joint_custom_pre_pass", torch._inductor.config.joint_custom_pre_pass)
    patches["joint_custom_pre_pass"] = chained(JointPass(ours, None), previous)
    # enable() may have set a pass for all graphs: this one is rewritten already
    before = patches.get("pre_grad_custom_pass", torch._inductor.config.pre_grad_custom_pass)
    patches["pre_grad_custom_pass"] = as_one_pass(without_ours(before))
    if patches.get("cpp_wrapper"):
        # torch 2.11 sets what graphs of C++ need for the forward's only, given it as an option
        cpp_options = later("torch._inductor.compile_fx", "get_cpp_wrapper_config")
        patches |= {name: x for name, x in cpp_options().items() if name not in theirs}
    compiled: Any = compile_fx(gm, example_inputs, config_patches=patches)
    return compiled


def _options_of(compiler: Any) -> RewriteOptions | None:
    """Finds our options in a compiler that torch.compile calls; None if it does not rewrite."""
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
    return _checked(arguments.get("options"))[0]


def _checked(options: Given) -> tuple[RewriteOptions, dict[str, Any]]:
    """Splits options into ours and Inductor's. Errors pass through Dynamo unchanged."""
    try:
        return split_options(options)
    except (TypeError, ValueError) as error:
        text = str(error)
    raise OptionError(text)


def _forget() -> None:
    graph_breaks.forget()
    if not torch.cuda.is_available():
        return
    later("torch._inductor.cudagraph_trees", "reset_cudagraph_trees")()


_streamkl.__name__ = _streamkl.__qualname__ = "streamkl"
# torch._dynamo.reset() asks every backend that was used for this
_streamkl.reset = _forget  # type: ignore[attr-defined]  # functions declare none


def inductor_options(options: Given = None, /, **named: Unpack[OptionValues]) -> dict[str, Any]:
    """Returns options for ``torch.compile(options=...)`` that run the rewrite inside of Inductor.

    .. code-block:: python

        options = torch_streamkl.inductor_options({"max_autotune": True}, min_mib=0)
        step = torch.compile(step, options=options)

    This rewrites as ``torch.compile(step, backend="streamkl")`` does. Passes that are configured
    in ``torch._inductor.config`` run before ours. A graph from Inductor's cache is not analysed or
    reported again.

    Args:
        options: `RewriteOptions`, or a dict. Names with the prefix ``streamkl.`` are ours; all
            others are Inductor's, and are returned, too.
        named: our options by name, such as ``min_mib=0``.

    Returns:
        A new dict of Inductor options, with our passes in ``pre_grad_custom_pass`` and
        ``joint_custom_pre_pass``.

    Raises:
        ValueError: an option has a value that breaks its rule, or a name in the dict does not
            exist.
        TypeError: a keyword is no option.
    """
    rewrite_before_split()
    ours, theirs = with_keywords(options, named, "inductor_options")
    ours = without_inner(ours, "inductor_options")
    passes = {
        "pre_grad_custom_pass": PreGradPass(ours, rewrite_and_report),
        "joint_custom_pre_pass": JointPass(ours, without_rewrite),
    }
    for name, ours_of_it in passes.items():
        configured = theirs.get(name, getattr(torch._inductor.config, name))
        theirs[name] = chained(ours_of_it, configured)
    return theirs


def without_rewrite(configured: Any) -> None:
    """Warns and reports that a pass of the user replaced the rewrite, so that nothing is fused."""
    name = getattr(configured, "__qualname__", None) or type(configured).__qualname__
    text = (
        f"pre_grad_custom_pass is {name} now, which replaced the rewrite: nothing of this graph "
        "is fused. Set it before enable() or inductor_options(), which run it before the rewrite; "
        'or use torch.compile(backend="streamkl")'
    )
    log.warning("%s", text)
    _tell(Report(notes=[text], not_scanned=["the rewrite did not run"]))


def _tell(report: Report) -> None:
    """Tells who wants to see reports."""
    for observer in tuple(REPORTS):  # of which another thread may remove one meanwhile
        observer(report)


def _is_plain_inductor() -> bool:
    """Whether Inductor has no configuration that a graph would miss if it bypassed Inductor."""
    config = torch._inductor.config
    passes = (
        config.joint_custom_pre_pass, config.joint_custom_post_pass,
        config.post_grad_custom_pre_pass, config.post_grad_custom_post_pass,
        without_ours(config.pre_grad_custom_pass),
    )  # fmt: skip
    graphs = config.triton.cudagraphs or config.cpp_wrapper
    return not graphs and not _is_stored_in_a_cache() and all(not x for x in passes)


def _is_stored_in_a_cache() -> bool:
    """Whether compiled code is written to a file, as by aot_compile(): only Inductor's can be."""
    settings = (
        (torch._functorch.config, "bundled_autograd_cache"),
        (torch._dynamo.config, "caching_precompile"),
    )
    return any(getattr(config, name, False) for config, name in settings)


def rewrite_and_report(
    gm: fx.GraphModule,
    ours: RewriteOptions,
    cpp_wrapper: bool | None = None,
    may_run_without_inductor: bool = False,
    is_compiled: bool = True,
) -> Report:
    """Rewrites a graph, and reports to the log, to tlparse and to `reports`.

    ``may_run_without_inductor``: if nothing is left to compile, the graph bypasses Inductor.
    ``is_compiled``: the report says how losses run in graphs that Inductor compiles.
    """
    if ours.inner == "inductor":
        _assemble_as_inductor_does()
    scan = Scan(gm)
    # a checkpoint around the call counts what is saved, and its hooks may read it
    with _disable_saved_tensors_hooks_during_tracing():
        report = rewrite(gm, ours, source_digest(), is_compiled=is_compiled)
    reword(report, gm.graph)
    alone = (
        run_without_inductor.runs_without_inductor(gm)
        if may_run_without_inductor and report.num_fused
        else None
    )
    if alone is not None:
        gm.meta[run_without_inductor.ALONE] = alone
        report.notes.append(run_without_inductor.NOTE)
    elif report.num_fused and ours.inner == "inductor":
        if cpp_wrapper is None:
            cpp_wrapper = bool(torch._inductor.config.cpp_wrapper)
        if cpp_wrapper:
            launches = inductor_kernels.install()
            report.notes.append(inductor_kernels.NOTE[launches])
        elif not inductor_calls.can_install():
            report.notes.append(inductor_calls.WITHOUT_TABLE)
        if not inductor_double_backward.can_install():
            report.notes.append(inductor_double_backward.WITHOUT_LOWERINGS)
        if not can_sort():
            report.notes.append(WITHOUT_SORT)
    if not report.remaining:  # else it says what the outputs are kept for
        report.outside += graph_outputs(gm.graph)
    scan.add_to(report, gm)
    report.notes += ddp.notes()
    report.num_graphs = 1
    _tell(report)
    if report.sites or report.failures or report.outside or report.elsewhere:
        log.log(logging.WARNING if ours.explain else logging.INFO, "%s", report)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", report.details())
        artifact.store(report)
    if ours.strict and (report.num_unfused or report.failures or report.unfused_comparisons):
        raise UnfusedError(f"streamkl.strict: {_not_fused(report)}\n{report}")
    return report


def _assemble_as_inductor_does() -> None:
    """Lets kernels that a check runs be those of the compiled graph, in Triton's cache, too.

    Inductor replaces Triton's ptxas by its own when it loads its first kernel, and Triton's cache
    has a kernel once for each. In a process that finds the check's verdict on disk, our kernels
    come after Inductor's: three of them took 3.4 s to compile again.
    """
    replace_ptxas = optional("torch._inductor.runtime.compile_tasks", "_set_triton_ptxas_path")
    if replace_ptxas is not None:
        replace_ptxas()


def _not_fused(report: Report) -> str:
    if report.num_unfused or report.failures:
        return "a loss is not fused"
    return f"two distributions are compared at {report.unfused_comparisons[0]}, and not fused"


def rewrite_before_split() -> None:
    """Rewrites DistributedDataParallel's graphs as a whole, before Dynamo splits them."""
    ddp.rewrite_before_split(_options_of, rewrite_and_report)


def __getattr__(name: str) -> Any:
    """Returns the backend as ``streamkl``. Only who asks for it is about to compile: imports
    change nothing.
    """
    if name == "streamkl":
        rewrite_before_split()
        return _streamkl
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
