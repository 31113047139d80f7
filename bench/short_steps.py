"""Training steps, short ones, where the host's share counts: `python -m bench.short_steps`.

Students and teachers of BERT's size (models.py), with AdamW, under bfloat16 autocast on a GPU and
in float32 on a CPU; how they are timed and judged says steps.py. Behind the steps the heads alone
follow, as `python -m bench` measures them. A run can be cut into pieces: ``--steps tinybert
--seqlens 128 --providers inductor streamkl --seconds 0`` is one pair, rows are saved as they come,
and what one run has compiled the next finds in Inductor's caches.

``--steps llama-attention --seqlens 8192 131072 --batch 1 --repeats 0 --rounds 5 --seconds 0`` is a
pair of decoders at growing context, without an optimiser: providers follow each other, each up to
the context that does not fit.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from bench import cases, ceilings, machine
from bench.__main__ import measure_all
from bench.measure import usual_dtype
from bench.memory import limit_memory
from bench.models import steps_on
from bench.providers import choose
from bench.records import Program, Run
from bench.runner import Settings
from bench.steps import PROVIDERS, Schedule, default_providers, run_all

HEADS_PROVIDERS = ["inductor", "direct", "streamkl", "inductor-graphs", "streamkl-graphs"]


def heads(device: torch.device) -> list[cases.Case]:
    """The heads alone, at the same lengths."""
    bert = replace(cases.BERT_BASE, batch=32 if device.type == "cuda" else 1)
    llama = [replace(cases.LLAMA_8B, seqlen=n) for n in (1024, 2048)]
    return [*(replace(bert, seqlen=n) for n in (128, 512)), *llama]


def main(argv: list[str] | None = None) -> int:
    parser = Program("bench.short_steps", __doc__)
    known = steps_on("cpu")
    short = [name for name, step in known.items() if step.is_side_by_side]
    parser.add_argument("--steps", nargs="*", choices=tuple(known), default=short)
    parser.add_argument("--seqlens", nargs="*", type=int, default=[128, 512])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--providers", nargs="*", choices=tuple(PROVIDERS))
    add = parser.add_argument
    add("--rounds", type=int, default=15, help="0 compiles and judges: later runs find it cached")
    add("--repeats", type=int, default=10, help="steps of a sample; 0: as many as take 0.1 s")
    parser.add_argument("--profile", action="store_true", help="print what host and GPU do")
    parser.add_argument("--seconds", type=float, default=0.3, help="for a provider of the heads")
    parser.add_argument("--heads", nargs="*", default=[], help="as --cases of `python -m bench`")
    parser.set_defaults(json=machine.ROOT / "out" / "short-steps.json")
    parser.add_argument("--memory-limit-gib", type=float)
    options, head = parser.begin(argv)
    device = torch.device(options.device)
    if options.memory_limit_gib:
        limit_memory(device, options.memory_limit_gib)
    dtype = usual_dtype(device)
    run = Run(**head, dtype=str(dtype).removeprefix("torch."), ceilings={})
    chosen = options.providers or default_providers(device)
    schedule = Schedule(device, options.rounds, options.repeats, profiles=options.profile)
    steps = [steps_on(device.type)[name] for name in options.steps]
    run_all(steps, options.seqlens, options.batch, chosen, schedule, run, options.json)
    if options.seconds:
        run.ceilings = ceilings.both(device, dtype)
        names = options.providers or HEADS_PROVIDERS
        providers = [p for p in choose(names, []) if device.type in p.devices]
        settings = Settings(device, dtype, options.seconds)
        chosen_heads = cases.select(heads(device), options.heads)
        measure_all(chosen_heads, providers, settings, run, options.json)
    run.is_complete = True
    run.save(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
