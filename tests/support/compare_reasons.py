"""Compares the reasons of both analyses for losses that are not fused, over sets of programs.

``python -m tests.support.compare_reasons reasons|users|misleading|corpus|near|chains|selected
[names]`` prints what differs. It goes when the rewrite has one analysis.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import warnings
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
from torch_streamkl.fx_passes.reporting.divergence_sites import divergence_sites
from torch_streamkl.fx_passes.reporting.refusals import Refusals
from torch_streamkl.fx_passes.reporting.refusals import near as near_nodes
from torch_streamkl.fx_passes.reporting.unfused import unfused_sites

FOUND: list[tuple[Any, Any]] = []


@contextlib.contextmanager
def watched() -> Iterator[list[Any]]:
    """Explains every loss that is not fused meanwhile by both analyses."""
    original, found = pipeline.unfused_sites, []

    def both(nodes: Any, trace: Any, recognised: Any, plans: Any, of_programs: Any) -> Any:
        old = original(nodes, trace, recognised, plans, of_programs)
        try:
            refusals = Refusals(trace, read_trace(trace))
            new = unfused_sites(nodes, refusals, of_programs)
            if new and all(is_matched(n, refusals) for n in nodes):
                new = ["MATCHED", *said(new)]
            met = divergence_sites(trace, refusals.reading)
            missing = [n for n in nodes if n not in met]
            if missing:
                found.append((missing, met))
        except Exception:
            new = traceback.format_exc()
        found.append((old, new))
        return old

    with mock.patch.object(pipeline, "unfused_sites", both):
        yield found


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

    for case in cases.CASES:
        if case.reason:
            fn, inputs = cases.program_of(case)
            yield shadow.Program(f"{case.student} {case.teacher} ({case.reason})", fn, inputs)


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
    if isinstance(sites, str):
        return [sites]
    if sites and not hasattr(sites[0], "reason"):
        return list(map(str, sites))
    return [f"{x.reason} | {x.unsupported_code}" for x in sites]


def main(which: str, *names: str) -> None:
    different = total = 0
    for program in SETS[which]():
        if names and not any(n in program.name for n in names):
            continue
        for row_programs in (True, False):
            for old, new in compared(program, row_programs):
                total += bool(old)
                if said(old) != said(new) or names:
                    different += 1
                    print(f"== {program.name} row_programs={row_programs}")
                    for x in said(old):
                        print("   old", x)
                    for x in said(new):
                        print("   new", x, flush=True)
    print(f"{different} of {total} differ")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(*sys.argv[1:])
