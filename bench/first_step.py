"""Measures the first step of a process: cold, and with the caches that an earlier process filled.

    python -m bench.first_step --warm 3 --json first_steps.json

The first step begins with torch.compile() and its imports. Every measurement is a process of its
own, `python -m bench steps --seconds 0`. Caches of Inductor and Triton are in a folder of their
own for each case and provider; the first process finds it empty. Providers alternate.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.measure import Timing
from bench.records import Program, Record, Row


def seconds_of(arguments: list[str], caches: Path) -> float:
    """The first step of a new process."""
    caches.mkdir(exist_ok=True)
    folders = {f"{x}_CACHE_DIR": str(caches / x) for x in ("TORCHINDUCTOR", "TRITON")}
    command = [sys.executable, "-m", "bench", "steps", *arguments, "--seconds", "0"]
    command += ["--json", str(caches / "record.json")]
    subprocess.run(command, env={**os.environ, **folders}, check=True, stdout=subprocess.DEVNULL)
    (row,) = Record.load(caches / "record.json").rows
    if row.compile_s is None:
        raise RuntimeError(f"{row.case}, {row.provider}: {row.detail}")
    return row.compile_s


def main(argv: list[str] | None = None) -> int:
    program = Program("bench.first_step", __doc__)
    add = program.add_argument
    cases = ["bert-4-layers B=32 N=128", "llama-all-layers"]
    add("--cases", nargs="*", default=cases, help="of the suite `steps`")
    add("--providers", nargs="*", default=["inductor", "streamkl"])
    add("--warm", type=int, default=3, help="processes with filled caches")
    options, record = program.begin(argv)
    for case in options.cases:
        found: dict[tuple[str, str], list[float]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for caches in ("cold", *["warm"] * options.warm):
                for provider in options.providers:
                    given = ["--cases", case, "--providers", provider, "--device", options.device]
                    seconds = seconds_of(given, Path(folder, provider))
                    found.setdefault((caches, provider), []).append(seconds * 1e3)
                    print(f"{case}, {caches} caches, {provider}: {seconds:.2f} s", flush=True)
        record.rows += [
            Row(f"{case}, {caches} caches", provider, "first steps", samples=len(ms),
                timing={"step": Timing.of(ms)})
            for (caches, provider), ms in found.items()
        ]  # fmt: skip
        record.save(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
