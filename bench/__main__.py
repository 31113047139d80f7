"""`python -m bench`: see `--help`."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path

import torch
from tqdm import tqdm

from bench import compare, machine, table
from bench.cases import Case, select, suite
from bench.ceilings import both
from bench.measure import usual_dtype
from bench.memory import limit_memory
from bench.providers import PROVIDERS, Provider, choose
from bench.records import Program, Run
from bench.runner import Settings, out_of_memory_before, run_case

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parser() -> Program:
    width = max(len(p.name) for p in PROVIDERS)
    names = "\n".join(f"  {p.name:<{width}}  {p.note}" for p in PROVIDERS)
    result = Program(
        "bench", "Distillation losses side by side: time, memory and error of a training step."
    )
    result.epilog = f"providers:\n{names}"
    add = result.add_argument
    add("--quick", action="store_true", help="two cases, within two minutes on two cores")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on cuda, float32 on the cpu")
    add(
        "--cases", nargs="*", default=[], metavar="PATTERN",
        help="part of a case's label, or a shell pattern",
    )  # fmt: skip
    add(
        "--providers", nargs="*", default=[], metavar="NAME",
        help="of the list below; default: all that are installed",
    )  # fmt: skip
    add(
        "--provider", action="append", default=[], metavar="MODULE:FUNCTION",
        help="a provider from outside",
    )  # fmt: skip
    add("--seconds", type=float, help="for each provider and case (default 2, quick 0.5)")
    add("--alone", action="store_true", help="time forwards without gradients, too")
    add("--memory-limit-gib", type=float, help="as if the device had only this much")
    add("--base", metavar="REF", help="compare with another commit, interleaved")
    add("--exact-case", metavar="LABEL", help=argparse.SUPPRESS)
    add("--list", action="store_true", help="list the cases and stop")
    return result


def main(argv: list[str] | None = None) -> int:
    options, head = parser().begin(argv)
    device = torch.device(options.device)
    cases = suite(device.type, options.quick)
    if options.exact_case:
        cases = [c for c in cases if c.label == options.exact_case]
    cases = select(cases, options.cases)
    if options.list:
        print("\n".join(f"{c.label:<40} {c.shape()}  [{c.source}]" for c in cases))
        return 0
    names = options.providers or (list(compare.DEFAULT_PROVIDERS) if options.base else [])
    providers = choose(names, options.provider, options.quick)
    limit_memory(device, options.memory_limit_gib)
    path = options.json or machine.ROOT / "out" / f"bench-{datetime.now():%Y%m%d-%H%M%S}.json"
    dtype = DTYPES[options.dtype] if options.dtype else usual_dtype(device)
    run = Run(**head, dtype=str(dtype).removeprefix("torch."), ceilings=both(device, dtype))
    print(", ".join(f"{k} {v}" for k, v in run.machine.items()))
    print(", ".join(f"{k} {table.number(v)}" for k, v in run.ceilings.items()), flush=True)
    try:
        if options.base:
            arguments = compare.child_arguments(options, [p.name for p in providers])
            compare.compare(options.base, [c.label for c in cases], arguments, run, path)
        else:
            seconds = options.seconds or (0.5 if options.quick else 2.0)
            settings = Settings(device, dtype, seconds, options.alone)
            measure_all(cases, providers, settings, run, path)
        run.is_complete = True
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept")
    run.save(path)
    print(f"records: {path}")
    return 0 if run.is_complete else 130


def measure_all(
    cases: list[Case], providers: list[Provider], settings: Settings, run: Run, path: Path
) -> None:
    """Case by case, sizes growing; what did not fit is not tried with more. Saved after each."""
    with tqdm(total=len(cases) * (len(providers) + 2), leave=False) as progress:

        def show(what: str) -> None:
            progress.set_description(what)
            progress.update()

        too_large: set[tuple[str, str]] = set()  # sweeps and providers
        for case in cases:
            fitting = [p for p in providers if (case.sweep[0], p.name) not in too_large]
            records = run_case(case, fitting, settings, show)
            records += [out_of_memory_before(case, p) for p in providers if p not in fitting]
            too_large |= {(case.sweep[0], r.provider) for r in records if r.status == "oom"}
            run.records += records
            run.save(path)
            tqdm.write(table.text(records, run.ceilings["matmul_tflops"]))


if __name__ == "__main__":
    sys.exit(main())
