"""`python -m bench`: see `--help`."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path

import torch

from bench import ceilings, machine, table
from bench.cases import select, suite
from bench.memory_limit import limit_memory
from bench.providers import PROVIDERS, choose
from bench.records import Run
from bench.runner import Settings, run_case

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
        "--memory-limit-gib", type=float, help="as if the device had only this much"
    )
    result.add_argument(
        "--json", type=Path, metavar="FILE", help="where to write the records, after every case"
    )
    result.add_argument(
        "--commit", default="", help="what to record as the commit, outside of a clone"
    )
    result.add_argument("--list", action="store_true", help="list the cases and stop")
    return result


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    device = torch.device(options.device)
    dtype = DTYPES[options.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    cases = select(suite(device.type, options.quick), options.cases)
    if options.list:
        print("\n".join(f"{c.label:<40} {c.shape()}  [{c.source}]" for c in cases))
        return 0
    providers = choose(options.providers, options.provider, options.quick)
    limit_memory(device, options.memory_limit_gib)
    path = options.json or machine.ROOT / "out" / f"bench-{datetime.now():%Y%m%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    run = Run(
        command=" ".join(["python -m bench", *(sys.argv[1:] if argv is None else argv)]),
        machine=machine.describe(device, options.commit),
        dtype=str(dtype).removeprefix("torch."),
        ceilings={
            "matmul_tflops": ceilings.matmul_tflops(device, dtype),
            "copy_gbytes": ceilings.copy_gbytes(device),
        },
    )
    print(", ".join(f"{k} {v}" for k, v in run.machine.items()))
    print(", ".join(f"{k} {table.number(v)}" for k, v in run.ceilings.items()), flush=True)
    settings = Settings(device, dtype, options.seconds or (0.5 if options.quick else 2.0))
    with Progress(len(cases) * (len(providers) + 2)) as progress:
        settings = Settings(device, dtype, settings.seconds, progress.show)
        try:
            for case in cases:
                records = run_case(case, providers, settings)
                run.records += records
                run.save(path)
                progress.write(table.text(records, run.ceilings["matmul_tflops"]))
            run.is_complete = True
        except KeyboardInterrupt:
            progress.write("interrupted; what was measured is kept")
    run.save(path)
    print(f"records: {path}")
    return 0 if run.is_complete else 130


class Progress:
    """A bar on standard error: tqdm's where it is installed, otherwise a line for each step."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __enter__(self) -> Progress:
        try:
            from tqdm import tqdm

            self.bar = tqdm(
                total=self.steps, unit="step", file=sys.stderr, dynamic_ncols=True, leave=False
            )
        except ImportError:
            self.bar = None
            self.done = 0
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def show(self, what: str) -> None:
        if self.bar is not None:
            self.bar.set_description(what)
            self.bar.update()
        else:
            self.done += 1
            print(f"[{self.done}/{self.steps}] {what}", file=sys.stderr, flush=True)

    def write(self, text: str) -> None:
        if self.bar is not None:
            self.bar.clear()
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
