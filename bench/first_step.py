"""Measures the first step of a process: cold, and with the caches that an earlier process filled.

    python -m bench.first_step --cases bert llama gkd --warm 3 --json first_steps.json
    python -m bench.first_step --cases bert --profile build/profiles   # cProfile of warm steps
    python -m bench.first_step --device cpu --all-layers   # narrow models, as many layers

The first step begins with torch.compile() and its imports. Every measurement is a process of its
own. Caches of Inductor and Triton are in a folder of their own for each case and provider; the
first process finds it empty. Providers alternate. CPU seconds are those of the step and of the
compilers that it starts in turn (TORCHINDUCTOR_COMPILE_THREADS=1), and say more on a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import steps
from bench.case import Case, Loss

PROVIDERS = ("inductor", "streamkl")


@dataclass(frozen=True)
class AllLayers(steps.LlamaStep):
    """A pair of decoders of which every layer is matched."""

    def loss_of(self, student: Any, teacher: Any) -> Loss:
        def loss(ids: Tensor) -> Tensor:
            with torch.no_grad():
                t = teacher.model(input_ids=ids, output_attentions=True, use_cache=False)
            s = student.model(input_ids=ids, output_attentions=True, use_cache=False)
            rest = s.last_hidden_state.float().square().mean() * 1e-3
            return rest + steps.kl_of_maps(t.attentions, s.attentions)

        return loss


@dataclass(frozen=True)
class GeneralizedKD(steps.LlamaStep):
    """JSD of two models' logits, as TRL's GKDTrainer computes it with beta=0.5."""

    def loss_of(self, student: Any, teacher: Any) -> Loss:
        def loss(ids: Tensor) -> Tensor:
            with torch.no_grad():
                t = teacher(input_ids=ids, use_cache=False).logits
            s = student(input_ids=ids, use_cache=False).logits
            log_s, log_t = F.log_softmax(s, -1), F.log_softmax(t, -1)
            halves = torch.stack([log_s, log_t]) - math.log(2.0)
            log_m = torch.logsumexp(halves, dim=0)
            to_t = F.kl_div(log_m, log_t, reduction="none", log_target=True)
            to_s = F.kl_div(log_m, log_s, reduction="none", log_target=True)
            return (0.5 * to_t + 0.5 * to_s).sum() / ids.numel()

        return loss


def _case(name: str, device: str, all_layers: bool) -> Case:
    pair = replace(steps.PAIRS[device], contexts=(512,), teacher_layers=4, student_layers=4)
    bert = steps.ShortStep("bert", "", batch_size=32, seqlen=128)
    if device == "cpu":
        pair = steps.Pair("", 64, 128, 4, 2, 4096, (64,), 4, 4)
        bert = replace(bert, batch_size=2, seqlen=32, hidden_size=48, teacher_width=48)
        if not all_layers:  # nothing but this program is tried
            pair = replace(pair, teacher_layers=1, student_layers=1)
            bert = replace(bert, num_layers=1, teacher_layers=2)
    tokens = pair.contexts[0]
    cases = {
        "bert": bert,
        "llama": AllLayers("llama", "", 1, tokens, pair),
        "gkd": GeneralizedKD("gkd", "", 4, tokens, pair),
    }
    return cases[name]


@contextlib.contextmanager
def _profiled(path: str | None) -> Iterator[None]:
    if path is None:
        yield
        return
    profile = cProfile.Profile()
    with profile:
        yield
    profile.dump_stats(path)


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _one(case: Case, provider: str, device: str, profile: str | None) -> dict[str, Any]:
    """Runs the first step of this process, and says what torch's caches had."""
    problem = case.problem(torch.device(device))

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def step(compute: Callable[..., Any]) -> float:
        with problem.around():
            loss = compute(*problem.sets[0])
        loss.backward()
        value = float(loss.detach())
        synchronize()
        return value

    synchronize()
    start, cpu = time.perf_counter(), _cpu_seconds()
    # what a compiler imports is imported now or in the first call
    with _profiled(profile):
        if provider == "streamkl":
            options = {} if device == "cuda" else {"streamkl.min_mib": 0}
            compiled = torch.compile(problem.loss, backend="streamkl", options=options)
        else:
            compiled = torch.compile(problem.loss)
        made = time.perf_counter()
        value = step(compiled)
    first, cpu = time.perf_counter(), _cpu_seconds() - cpu
    step(compiled)
    second = time.perf_counter() - first
    counters = torch._dynamo.utils.counters
    seen = {
        f"{group}.{name}": count
        for group in ("inductor", "aot_autograd")
        for name, count in counters[group].items()
        if "cache" in name
    }
    times = {"first_s": first - start, "call_s": first - made, "second_s": second, "cpu_s": cpu}
    return {**times, "loss": value, **seen}


def _run(
    case: str, provider: str, how: list[str], folder: Path, profile: Path | None
) -> dict[str, Any]:
    own = folder / f"{case}-{provider}"
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"),
        "TRITON_CACHE_DIR": str(own / "triton"),
    }
    command = [sys.executable, "-m", "bench.first_step", "--one", case, provider, *how]
    if profile is not None:
        profile.mkdir(parents=True, exist_ok=True)
        command += ["--profile", str(profile / f"{case}-{provider}.prof")]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {"process_s": time.perf_counter() - start, **found}


def main(argv: list[str] | None = None) -> int:
    from bench.measure import Timing
    from bench.records import Program, Row

    program = Program("bench.first_step", __doc__)
    program.add_argument("--cases", nargs="*", default=["bert", "llama", "gkd"])
    program.add_argument("--providers", nargs="*", default=list(PROVIDERS), choices=PROVIDERS)
    program.add_argument("--warm", type=int, default=3, help="processes with filled caches")
    program.add_argument("--cold", type=int, default=1, help="processes with empty caches")
    program.add_argument("--profile", type=Path, help="a folder; of one more warm process each")
    program.add_argument("--caches", type=Path, help="empty, or filled and --cold 0")
    program.add_argument("--all-layers", action="store_true", help="on a CPU, too")
    program.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options, record = program.begin(argv)
    device = str(options.device)
    if options.one:
        name, provider = options.one
        case = _case(name, device, options.all_layers)
        print(json.dumps(_one(case, provider, device, options.profile and str(options.profile))))
        return 0
    how = ["--device", device, *["--all-layers"] * options.all_layers]
    for case in options.cases:
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        folder = options.caches
        for _ in range(options.cold):
            folder = options.caches or Path(tempfile.mkdtemp())
            for provider in options.providers:
                one = _run(case, provider, how, folder, None)
                found.setdefault((provider, "cold"), []).append(one)
        for _ in range(options.warm):
            for provider in options.providers:
                one = _run(case, provider, how, folder, None)
                found.setdefault((provider, "warm"), []).append(one)
        if options.profile:
            for provider in options.providers:
                _run(case, provider, how, folder, options.profile)
        for (provider, caches), results in found.items():
            names = {"step": "first", "call": "call", "process": "process", "cpu": "cpu"}
            times = {
                mode: Timing.of([x[f"{name}_s"] * 1e3 for x in results])
                for mode, name in names.items()
            }
            more = {k: v for k, v in results[-1].items() if not k.endswith("_s")}
            record.rows.append(
                Row(f"{case}, {caches} caches", provider, "first steps", timing=times,
                    samples=len(results), more=more)
            )  # fmt: skip
            seconds = {name: round(t.median / 1e3, 2) for name, t in times.items()}
            print(case, provider, caches, seconds, more, flush=True)
        record.save(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
