"""Training steps of a student and its teacher at growing context: `python -m bench.end_to_end`.

Both are transformers models with random weights. A step is both models' forward, the loss and the
student's backward, without an optimiser. The loss is naive code on `output_attentions` (and on the
logits), as people write it. The providers whose names end with -graphs are compiled as by
mode="reduce-overhead": the step is replayed as CUDA graphs. They need a GPU. -any-order is the
option streamkl.deterministic=False.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import cuda_graphs, machine, table
from bench.measure import MIB, OutOfMemory, guarded, host_seconds, peak_mib, release
from bench.memory_limit import limit_memory
from bench.records import Run, command_line

LossFunction = Callable[[Tensor], Tensor]
OBJECTIVES = ("attention", "attention+logits")
BURST_S = 0.1  # of steps that follow each other without a wait, as in a training loop


@dataclass(frozen=True)
class Pair:
    """Two Llama models that differ in depth; student layer i learns from teacher layer 2 i + 1."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int
    contexts: tuple[int, ...]
    teacher_layers: int = 4
    student_layers: int = 2


PAIRS = {
    "cuda": Pair(
        "llama-pair", 2048, 5632, 32, 8, 32000, (2048, 4096, 8192, 16384, 32768, 65536, 131072)
    ),
    "cpu": Pair("small-llama-pair", 256, 704, 8, 4, 8192, (512, 1024, 2048, 4096)),
}


def build(pair: Pair, layers: int, seed: int, device: torch.device, dtype: torch.dtype) -> Any:
    """A model with random weights."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=pair.vocabulary,
        hidden_size=pair.hidden_size,
        intermediate_size=pair.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=pair.num_heads,
        num_key_value_heads=pair.num_kv_heads,
        max_position_embeddings=max(pair.contexts),
    )
    model = transformers.LlamaForCausalLM._from_config(
        config, attn_implementation="eager", dtype=dtype
    )
    model.to(device)
    # Transformers installs the hooks that collect attention maps at the first such call, and that
    # must happen outside of a compiled graph.
    model(torch.zeros(1, 8, dtype=torch.long, device=device), output_attentions=True)
    return model


def make_loss(teacher: Any, student: Any, objective: str) -> LossFunction:
    """The naive distillation loss of a batch of token ids."""
    with_logits = objective == "attention+logits"
    # without logits the LM heads are left out: the bodies are called
    teacher = teacher if with_logits else teacher.model
    student = student if with_logits else student.model

    def loss_of(ids: Tensor) -> Tensor:
        with torch.no_grad():
            t = teacher(input_ids=ids, output_attentions=True, use_cache=False)
        s = student(input_ids=ids, output_attentions=True, use_cache=False)
        if with_logits:
            log_s = F.log_softmax(s.logits.float(), dim=-1)
            target = F.softmax(t.logits.float(), dim=-1)
            loss = F.kl_div(log_s, target, reduction="none").sum(-1).mean()
        else:  # something for the rest of the network to learn
            loss = s.last_hidden_state.float().square().mean() * 1e-3
        for i, student_map in enumerate(s.attentions):
            p, q = t.attentions[2 * i + 1].float(), student_map.float()
            log_ratio = p.clamp_min(1e-12).log() - q.clamp_min(1e-12).log()
            loss = loss + (p * log_ratio).sum(-1).mean()
        return loss

    return loss_of


def with_streamkl(loss_of: LossFunction, **options: Any) -> LossFunction:
    """Compiled with our backend; a KL that stays as it is would be an error, not a slow result."""
    options = {"streamkl.strict": True, **options}
    return torch.compile(loss_of, dynamic=False, backend="streamkl", options=options)


def streamkl_graphs(loss_of: LossFunction) -> LossFunction:
    return cuda_graphs.marked(with_streamkl(loss_of, **cuda_graphs.options()))


def streamkl_any_order(loss_of: LossFunction) -> LossFunction:
    return with_streamkl(loss_of, **{"streamkl.deterministic": False})


PROVIDERS: dict[str, Callable[[LossFunction], LossFunction]] = {
    "eager": lambda loss_of: loss_of,
    "inductor": lambda loss_of: torch.compile(loss_of, dynamic=False),
    "streamkl": with_streamkl,
    "streamkl-any-order": streamkl_any_order,
    "inductor-graphs": cuda_graphs.inductor,
    "streamkl-graphs": streamkl_graphs,
}
GRAPH_PROVIDERS = ("inductor-graphs", "streamkl-graphs")
GPU_PROVIDERS = (*GRAPH_PROVIDERS, "streamkl-any-order")


def default_providers(device: torch.device) -> list[str]:
    """All that differ on the device."""
    return [p for p in PROVIDERS if device.type == "cuda" or p not in GPU_PROVIDERS]


def step_times(step: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Samples of a step's seconds, each of steps that take BURST_S together, or of one."""

    steps = math.ceil(BURST_S / max(host_seconds(step, device), 1e-6))
    times: list[float] = []
    while len(times) < 2 or (sum(times) * steps < seconds and len(times) < 30):
        times.append(host_seconds(step, device, steps))
    return times


def measure_context(
    loss_of: LossFunction,
    student: nn.Module,
    ids: Tensor,
    seconds: float,
    uses_graphs: bool = False,
) -> dict[str, Any]:
    """One row: milliseconds, tokens per second and peak memory above the weights."""
    device = ids.device

    def step() -> Tensor:
        student.zero_grad(set_to_none=True)
        loss = loss_of(ids)
        loss.backward()
        return loss.detach()

    start = time.perf_counter()
    first = step().item()
    compile_s = time.perf_counter() - start
    replays = cuda_graphs.record(step) if uses_graphs else 0
    student.zero_grad(set_to_none=True)
    peak = peak_mib(step, device)
    graphs: dict[str, Any] = {}
    if uses_graphs:
        pool = cuda_graphs.pools_bytes() / MIB
        graphs = {"graph_replays": replays, "graph_pool_mib": pool}
        peak += pool
    times = step_times(step, device, seconds)
    step_s = median(times)
    return {
        "step_ms": step_s * 1e3,
        "tokens_per_s": ids.numel() / step_s,
        "peak_mib": peak,
        "loss": first,
        "compile_s": compile_s,
        "samples": len(times),
        **graphs,
    }


def run_pair(
    pair: Pair,
    objective: str,
    providers: list[str],
    contexts: list[int],
    settings: tuple[torch.device, torch.dtype, float],
    on_row: Callable[[dict[str, Any]], None],
) -> None:
    """Every provider at growing context until it is out of memory (or breaks)."""
    device, dtype, seconds = settings
    teacher = build(pair, pair.teacher_layers, 0, device, dtype).eval().requires_grad_(False)
    student = build(pair, pair.student_layers, 1, device, dtype)
    loss_of = make_loss(teacher, student, objective)
    for provider in providers:
        for context in contexts:
            forget_program(student, device)
            generator = torch.Generator(device).manual_seed(context)
            ids = torch.randint(pair.vocabulary, (1, context), device=device, generator=generator)
            row: dict[str, Any] = {
                "pair": pair.name,
                "objective": objective,
                "provider": provider,
                "context": context,
                "status": "ok",
            }
            row |= outcome(provider, loss_of, student, ids, seconds)
            on_row(row)
            if row["status"] != "ok":
                break
    forget_program(student, device)  # the next models need its memory


def forget_program(student: nn.Module, device: torch.device) -> None:
    """Frees what the last program and its step have left."""
    student.zero_grad(set_to_none=True)  # gradients may lie in the memory of graphs
    torch._dynamo.reset()
    release(device)


def outcome(
    provider: str, loss_of: LossFunction, student: nn.Module, ids: Tensor, seconds: float
) -> dict[str, Any]:
    """What a row says about a provider: its measurement, or the status and why."""
    device, uses_graphs = ids.device, provider in GRAPH_PROVIDERS
    if uses_graphs and device.type != "cuda":
        return {"status": "unavailable", "detail": f"CUDA graphs do not run on {device.type}"}
    call = PROVIDERS[provider](loss_of)
    try:
        measured = guarded(
            lambda: measure_context(call, student, ids, seconds, uses_graphs), device
        )
    except OutOfMemory as error:
        return {"status": "oom", "detail": str(error)}
    except Exception as error:  # a provider that breaks is a result
        return {"status": "error", "detail": f"{type(error).__name__}: {error}"[:300]}
    assert isinstance(measured, dict)
    return measured


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.end_to_end", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--objectives", nargs="*", default=list(OBJECTIVES), choices=OBJECTIVES)
    parser.add_argument(
        "--providers",
        nargs="*",
        choices=tuple(PROVIDERS),
        help="default: all, on the CPU those without CUDA graphs",
    )
    parser.add_argument("--contexts", nargs="*", type=int)
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing for each row")
    parser.add_argument("--memory-limit-gib", type=float)
    parser.add_argument("--json", type=Path, default=machine.ROOT / "out" / "end-to-end.json")
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    limit_memory(device, options.memory_limit_gib)
    run = Run(
        command=command_line("bench.end_to_end", sys.argv[1:] if argv is None else argv),
        machine=machine.describe(device, options.commit),
        dtype=str(dtype).removeprefix("torch."),
        ceilings={},
    )
    options.json.parent.mkdir(parents=True, exist_ok=True)

    def on_row(row: dict[str, Any]) -> None:
        run.end_to_end.append(row)
        run.save(options.json)
        print(table.end_to_end_line(row), flush=True)

    pair = PAIRS[device.type]
    providers = options.providers or default_providers(device)
    settings = (device, dtype, options.seconds)
    for objective in options.objectives:
        contexts = options.contexts or list(pair.contexts)
        run_pair(pair, objective, providers, contexts, settings, on_row)
    run.is_complete = True
    run.save(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
