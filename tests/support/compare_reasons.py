"""Compares the reasons of both analyses for losses that are not fused, over sets of programs.

``python -m tests.support.compare_reasons reasons|users|misleading|corpus|near|chains|selected
[names]`` prints what differs. It goes when the rewrite has one analysis.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.support import shadow
from torch_streamkl.fx_passes import backend, pipeline
from torch_streamkl.fx_passes.capture.settings import CAPTURE
from torch_streamkl.fx_passes.closed_forms.form import NotClosed
from torch_streamkl.fx_passes.closed_forms.match import match_program
from torch_streamkl.fx_passes.reading.reader import read_trace
from torch_streamkl.fx_passes.reporting.described import describe, roles_of, warning_of
from torch_streamkl.fx_passes.reporting.divergence_sites import divergence_sites
from torch_streamkl.fx_passes.reporting.refusals import Refusals
from torch_streamkl.fx_passes.reporting.refusals import near as near_nodes
from torch_streamkl.fx_passes.reporting.remaining import large_tensors_left
from torch_streamkl.fx_passes.reporting.score_families import score_sized_nodes
from torch_streamkl.fx_passes.reporting.unfused import unfused_sites

_REFUSALS: dict[int, tuple[Any, Refusals]] = {}


def refusals_of(trace: Any) -> Refusals:
    """The reading of a trace, once."""
    if id(trace) not in _REFUSALS:
        _REFUSALS.clear()
        _REFUSALS[id(trace)] = trace, Refusals(trace, read_trace(trace))
    return _REFUSALS[id(trace)][1]


@contextlib.contextmanager
def watched() -> Iterator[list[Any]]:
    """Explains every loss of the programs that are compiled meanwhile by both analyses."""
    found: list[Any] = []

    def beside(name: str, ours: Any) -> Any:
        original = getattr(pipeline, name)

        def both(*args: Any) -> Any:
            old = original(*args)
            try:
                found.append((name, *ours(old, *args)))
            except Exception:
                found.append((name, "", traceback.format_exc()))
            return old

        return mock.patch.object(pipeline, name, both)

    with (
        beside("unfused_sites", _unfused),
        beside(
            "divergence_sites",
            lambda old, trace, _: (
                [str(old)],
                [str(divergence_sites(trace, refusals_of(trace).reading))],
            ),
        ),
        beside("_fuse", _described),
        beside("score_sized_nodes", _sizes),
        beside(
            "large_tensors_left",
            lambda old, graph, sizes, recognised, outer: (
                [str(x) for x in old],
                [
                    str(x)
                    for x in large_tensors_left(graph, sizes, refusals_of(recognised.trace), outer)
                ],
            ),
        ),
    ):
        yield found


def _unfused(
    old: Any, nodes: Any, trace: Any, recognised: Any, plans: Any, of_programs: Any
) -> tuple[Any, Any]:
    refusals = refusals_of(trace)
    new = said(unfused_sites(nodes, refusals, of_programs))
    if new and all(is_matched(n, refusals) for n in nodes):
        new = ["MATCHED", *new]
    return said(old), new


def _described(old: Any, candidate: Any, build: Any, trace: Any, *rest: Any) -> tuple[Any, Any]:
    refusals = refusals_of(trace)
    array = refusals.reading.array(candidate.inner)
    order = [a for d in array.dims for a in d]
    forms = match_program(array.expr, order).found.values()
    if any(isinstance(x, NotClosed) for x in forms):
        return [old.form], [str(x) for x in forms]
    calls = [c for x in forms for c in x.calls]
    new = [*describe(calls), roles_of(calls, refusals), warning_of(calls)]
    if not old.fused:
        new[2:] = ["", ""]
    return [old.kind, old.form, old.roles, old.warning], new


def _sizes(old: Any, trace: Any, recognised: Any, path: Any, operands: Any) -> tuple[Any, Any]:
    new = score_sized_nodes(trace, refusals_of(trace).levels, path, operands)
    return [str(sorted(map(str, old)))], [str(sorted(map(str, new)))]


def is_matched(site: Any, refusals: Refusals) -> bool:
    """Whether the first sum over keys that a site leads to has a closed form."""
    for node in near_nodes(site, "users"):
        array = refusals.reading.arrays.get(node)
        if array is not None and not isinstance(array, tuple):
            found = match_program(array.expr, [a for d in array.dims for a in d]).found
            if found:
                return not any(isinstance(x, NotClosed) for x in found.values())
    return False


def reasons() -> Iterator[shadow.Program]:
    import inspect

    from tests.support.reason_examples import EXAMPLES, SETTINGS, Setting
    from tests.support.user_losses import USER_LOSSES

    users = {loss.fn: loss for loss in USER_LOSSES.values()}
    for reason, fn in EXAMPLES.items():
        setting = SETTINGS.get(reason, Setting())
        is_of_heads = next(iter(inspect.signature(fn).parameters)) == "h"
        usual = USER_LOSSES["cosine" if is_of_heads else "gram"]
        inputs = (setting.inputs or users.get(fn, usual).inputs)()
        yield shadow.Program(f"{fn.__name__} ({reason})", fn, inputs)


def near() -> Iterator[shadow.Program]:
    from tests.rewrite import test_near_misses as cases
    from tests.support.programs import Program

    for fn, reason in (*cases.LEFT_ALONE, *cases.ROW_PROGRAMS):
        yield shadow.Program(f"{fn.__name__} ({reason})", fn, Program().inputs())


def chains() -> Iterator[shadow.Program]:
    from tests.rewrite import test_score_chain as cases

    for cases_of, make in ((cases.ON_MAPS, cases.of_maps), (cases.ON_HEADS, cases.of_heads)):
        for case in cases_of:
            if case.reason:
                fn, inputs = make(case.chains, case.loss, 1)
                name = f"{case.student} {case.teacher or ''} {case.loss} ({case.reason})"
                yield shadow.Program(name, fn, inputs)


SETS = {
    **shadow.SETS, "reasons": reasons, "near": near, "chains": chains,
}  # fmt: skip


def compared(program: shadow.Program, row_programs: bool) -> list[Any]:
    torch._dynamo.reset()
    options = {"streamkl.min_mib": 0, "streamkl.inner": "eager", "streamkl.verify": "never",
               "streamkl.row_programs": row_programs}  # fmt: skip
    with torch._dynamo.config.patch(CAPTURE), watched() as found, backend.collected():
        fn = torch.compile(
            program.fn, backend="streamkl", dynamic=program.dynamic or None, options=options
        )
        with contextlib.suppress(Exception):
            fn(*program.inputs)
    return found


def said(sites: Any) -> list[str]:
    return [f"{x.reason} | {x.unsupported_code}" for x in sites]


def main(which: str, *names: str) -> None:
    different, total = Counter[str](), Counter[str]()
    for program in SETS[which]():
        if names and not any(n in program.name for n in names):
            continue
        for row_programs in (True,) if which in ("corpus", "misleading") else (True, False):
            for what, old, new in compared(program, row_programs):
                total[what] += bool(old)
                if old != new:
                    different[what] += 1
                    print(f"== {program.name} {what} row_programs={row_programs}")
                    print("   old", "\n       ".join(old))
                    print(
                        "   new",
                        "\n       ".join(new) if isinstance(new, list) else new,
                        flush=True,
                    )
    print(dict(different), "of", dict(total), "differ")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(*sys.argv[1:])
