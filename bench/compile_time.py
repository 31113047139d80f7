"""What the rewrite adds to compilation: `python -m bench.compile_time --json FILE`.

A transformers pair of 12 layers each with a KL in every layer is compiled in a process of its own
with cold caches, once by plain Inductor and once by the backend. The share is the time in
rewrite() over the time that plain Inductor needs for the same program, tracing by Dynamo left out
of both; what the checks of the rewrite take of it is given by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import machine

NUM_LAYERS = 12
WIDTH, NUM_HEADS, VOCABULARY, SEQLEN = 64, 4, 256, 32


def build(family: str, seed: int) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "max_position_embeddings": 4 * SEQLEN,
    }
    if family == "bert":
        config, model = transformers.BertConfig(**sizes), transformers.BertModel
    else:
        config = transformers.LlamaConfig(num_key_value_heads=2, **sizes)
        model = transformers.LlamaModel
    built = model._from_config(config, attn_implementation="eager").eval()
    # the first call with output_attentions installs hooks, which would break the graph
    built(input_ids=torch.zeros(1, 4, dtype=torch.long), output_attentions=True)
    return built


def make_step(family: str) -> Callable[[Tensor], Tensor]:
    teacher, student = build(family, 0).requires_grad_(False), build(family, 1)

    def step(ids: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(input_ids=ids, output_attentions=True)
        got = student(input_ids=ids, output_attentions=True)
        loss = F.mse_loss(got.last_hidden_state, wanted.last_hidden_state)
        for p, q in zip(wanted.attentions, got.attentions, strict=True):
            rows = p * (p.clamp_min(1e-12).log() - q.clamp_min(1e-12).log())
            loss = loss + rows.sum(-1).mean()
        return loss

    return step


def compile_once(family: str, dynamic: bool, backend: str) -> dict[str, Any]:
    """Seconds of the parts of one cold compilation, forward and backward."""
    from torch_streamkl.fx_passes import backend as front_end
    from torch_streamkl.fx_passes.validation import refusal

    seconds: dict[str, float] = {"rewrite": 0.0, "check": 0.0, "backend": 0.0}
    sites: list[int] = []

    def timed(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = fn(*args, **kwargs)
            seconds[name] += time.perf_counter() - start
            return result

        return run

    front_end.rewrite = timed("rewrite", front_end.rewrite)
    refusal.check = timed("check", refusal.check)
    front_end.REPORTS.append(lambda report: sites.append(report.num_fused))
    inner = torch._dynamo.lookup_backend(backend)
    step = torch.compile(
        make_step(family), backend=timed("backend", inner), dynamic=dynamic or None
    )
    ids = torch.zeros(2, SEQLEN, dtype=torch.long)
    if dynamic:
        torch._dynamo.mark_dynamic(ids, 1)
    start = time.perf_counter()
    step(ids).backward()
    return {**seconds, "first_step": time.perf_counter() - start, "fused": sum(sites)}


def in_new_process(family: str, dynamic: bool, backend: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        variables = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        }
        command = [sys.executable, "-m", "bench.compile_time", "--once", family, backend]
        command += ["--dynamic"] if dynamic else []
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--families", nargs="*", default=["bert", "llama"])
    parser.add_argument("--once", nargs=2, metavar=("FAMILY", "BACKEND"), help=argparse.SUPPRESS)
    parser.add_argument("--dynamic", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        print(json.dumps(compile_once(given.once[0], given.dynamic, given.once[1])))
        return
    records = []
    for family in given.families:
        for dynamic in (False, True):
            plain = in_new_process(family, dynamic, "inductor")
            ours = in_new_process(family, dynamic, "streamkl")
            share = ours["rewrite"] / plain["backend"]
            share_of_checks = ours["check"] / plain["backend"]
            records.append(
                {"family": family, "dynamic": dynamic, "inductor": plain, "streamkl": ours}
                | {"share_of_inductor": share, "share_of_checks": share_of_checks}
            )
            kind = "dynamic" if dynamic else "static"
            print(
                f"{family:<6} {kind:<8} rewrite {ours['rewrite']:.2f} s, {ours['fused']} sites; "
                f"plain Inductor {plain['backend']:.1f} s; share {share:.1%}, "
                f"checks alone {share_of_checks:.1%}",
                flush=True,
            )
            if given.json:
                record = {
                    "machine": machine.describe(torch.device("cpu"), machine.current_commit()),
                    "records": records,
                }
                given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
