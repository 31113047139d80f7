"""`python -m bench`: see `--help`."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path

import torch
from tqdm import tqdm

from bench import ceilings, compare, machine, table
from bench.cases import Case, select, suite
from bench.memory_limit import limit_memory
from bench.providers import PROVIDERS, Provider, choose
from bench.records import Run, command_line
from bench.runner import Settings, out_of_memory_before, run_case

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {p.name:<15}{p.note}" for p in PROVIDERS)
    result = argparse.ArgumentParser(
        prog="python -m bench",
        description="Distillation losses side by side: time, memory and error of a training step.",
        epilog=f"providers:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "--quick", action="store_true", help="two cases, within two minutes on two cores"
    )
    result.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    result.add_argument(
        "--dtype", choices=DTYPES, help="default: bfloat16 on cuda, float32 on the cpu"
    )
    result.add_argument(
        "--cases",
        nargs="*",
        default=[],
        metavar="PATTERN",
        help="part of a case's label, or a shell pattern",
    )
    result.add_argument("--providers", nargs="*", default=[], metavar="NAME")
    result.add_argument(
        "--provider",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="a provider from outside",
    )
    result.add_argument(
        "--seconds", type=float, help="of timing for each provider and case (default 2, quick 0.5)"
    )
    result.add_argument(
        "--alone", action="store_true", help="time forwards without gradients, too"
    )
    result.add_argument(
        "--memory-limit-gib", type=float, help="as if the device had only this much"
    )
    result.add_argument(
        "--json", type=Path, metavar="FILE", help="where to write the records, after every case"
    )
    result.add_argument(
        "--commit", default="", help="what to record as the commit, outside of a clone"
    )
    result.add_argument("--base", metavar="REF", help="compare with another commit, in turns")
    result.add_argument("--exact-case", metavar="LABEL", help=argparse.SUPPRESS)
    result.add_argument("--list", action="store_true", help="list the cases and stop")
    return result


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(argv)
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
    path.parent.mkdir(parents=True, exist_ok=True)
    dtype = DTYPES[options.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    run = Run(
        command=command_line("bench", argv),
        machine=machine.describe(device, options.commit),
        dtype=str(dtype).removeprefix("torch."),
        ceilings={
            "matmul_tflops": ceilings.matmul_tflops(device, dtype),
            "copy_gbytes": ceilings.copy_gbytes(device),
        },
    )
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
