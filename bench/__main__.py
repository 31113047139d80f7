"""`python -m bench SUITE`: see `--help`."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path

import torch
from tqdm import tqdm

from bench import ranks, suites, table
from bench.case import Case
from bench.measure import ROOT, limit_memory
from bench.providers import PROVIDERS, of_case
from bench.records import Program, Record, Row
from bench.runner import Settings, run_case


def parser() -> Program:
    result = Program(
        "bench", "Distillation losses side by side: time, memory and error of a training step."
    )
    notes = {
        "suites": {name: suite.note for name, suite in suites.SUITES.items()},
        "providers": {p.name: p.note for p in PROVIDERS},
    }
    width = max(len(name) for known in notes.values() for name in known)
    result.epilog = "\n".join(
        f"{kind}:\n" + "\n".join(f"  {name:<{width}}  {note}" for name, note in known.items())
        for kind, known in notes.items()
    )
    add = result.add_argument
    add("suite", nargs="?", default="usual", choices=suites.SUITES, help="of the list below")
    add("--quick", action="store_true", help="small cases, within two minutes on two cores")
    add("--cases", nargs="*", default=[], metavar="PATTERN",
        help="part of a case's label, or a shell pattern")  # fmt: skip
    add("--providers", nargs="*", default=[], metavar="NAME", help="of the list below")
    add("--sizes", nargs="*", type=int, help="tokens of the suite's cases, where it has a choice")
    add("--seconds", type=float, help="for each provider and case (default 2, quick 0.5)")
    add("--rounds", type=int, default=50, help="at most")
    add("--limit-s", type=float, default=float("inf"), help="no case starts after so many seconds")
    add("--threads", type=int, help="of the cpu")
    add("--processes", type=int, default=2, help="ranks that share the problems of `shared`")
    add("--list", action="store_true", help="list the cases and stop")
    return result


def main(argv: list[str] | None = None) -> int:
    options, record = parser().begin(argv)
    device = torch.device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
        record.machine["threads"] = str(options.threads)
    record.title = suites.SUITES[options.suite].note
    path = options.json or ROOT / "out" / f"bench-{datetime.now():%Y%m%d-%H%M%S}.json"
    if options.suite == "shared":
        return ranks.main(options, record, path)
    cases = suites.cases(options, device)
    if options.list:
        print("\n".join(f"{c.label:<40} {c.shape()}  [{c.source}]" for c in cases))
        return 0
    if device.type == "cpu":
        limit_memory()
    print(", ".join(f"{k} {v}" for k, v in record.machine.items()), flush=True)
    try:
        measure_all(cases, options, record, path)
        record.is_complete = True
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept")
    record.save(path)
    print(f"records: {path}")
    return 0 if record.is_complete else 130


def settings_of(options: argparse.Namespace, device: torch.device) -> Settings:
    seconds = (0.5 if options.quick else 2.0) if options.seconds is None else options.seconds
    return Settings(device, seconds, options.rounds)


def measure_all(
    cases: list[Case], options: argparse.Namespace, record: Record, path: Path
) -> None:
    """Measures case by case, and saves after each provider."""
    settings = settings_of(options, torch.device(options.device))
    started = datetime.now()
    with tqdm(total=len(cases), leave=False) as progress:
        for case in cases:
            if (datetime.now() - started).total_seconds() > options.limit_s:
                record.note += f"Stopped before {case.label}."
                return
            providers = of_case(case, options.providers, suites.SUITES[options.suite].providers)
            before = list(record.rows)

            def keep(rows: list[Row], before: list[Row] = before) -> None:
                record.rows = before + rows
                record.save(path)

            rows = run_case(case, providers, settings, progress.set_description, keep)
            rows = [r for r in rows if options.providers or r.status != "unavailable"]
            keep(rows)
            progress.update()
            tqdm.write(table.text(rows))


if __name__ == "__main__":
    sys.exit(main())
