"""KL from hidden states on one GPU: `linear_kl` beside its peers, interleaved in one run.

    python -m bench.linear_h200 --out bench/results/linear_h200.json

T=8192 tokens, widths 3584 and 5120, 152,064 words, bfloat16, forward KL, gradients to the
student's hidden states and weight. A step is forward plus backward. The providers take turns, so
that all of them meet the same clocks: at this load the chip is limited by its power. Peaks are
above the inputs and include the gradients and cuBLAS's workspaces. Errors are against float64,
relative in norm; one that exceeds twice naive bfloat16's makes the run fail.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bench import machine
from torch_streamkl import linear_kl

GIB = 2**30
NUM_TOKENS, WIDTHS, NUM_WORDS = 8192, (3584, 5120), 152064
NUM_CHECKED_WORDS = 2048
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def make_inputs(num_tokens: int, num_words: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(scale)

    d_s, d_t = WIDTHS
    student = normal(num_tokens, d_s), normal(num_words, d_s, scale=d_s**-0.5)
    teacher = normal(num_tokens, d_t), normal(num_words, d_t, scale=d_t**-0.5)
    return (*(x.requires_grad_() for x in student), *teacher)


def naive(xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor) -> Tensor:
    student, teacher = F.linear(xs, ws).log_softmax(-1), F.linear(xt, wt).softmax(-1)
    return F.kl_div(student, teacher, reduction="batchmean")


def token_chunks(xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor) -> Tensor:
    """Eight chunks of tokens, each recomputed in the backward."""
    parts = zip(xs.chunk(8), xt.chunk(8), strict=True)
    losses = [checkpoint(naive, a, ws, b, wt, use_reentrant=False) for a, b in parts]
    return torch.stack(losses).mean()


def ours(**options: Any) -> Loss:
    return lambda *inputs: linear_kl(*inputs, reduction="mean", **options)


def providers(num_tokens: int) -> dict[str, Loss]:
    found: dict[str, Loss] = {
        "eager": naive,
        "torch.compile": torch.compile(naive),
        "token chunks + checkpoint": token_chunks,
        "linear_kl": ours(),
        "linear_kl, 200 MiB": ours(max_workspace_mib=200),
        "linear_kl, 110 MiB": ours(max_workspace_mib=110),
        "linear_kl, recompute": ours(strategy="recompute"),
        "torch.compile of linear_kl": torch.compile(ours(), fullgraph=True),
    }
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
        from liger_kernel.transformers import LigerFusedLinearJSD
    except ImportError:
        return found
    labels = torch.zeros(num_tokens, dtype=torch.int64, device="cuda")
    fused = LigerFusedLinearJSD(jsd_beta=0.0)
    chunked = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0)
    found["Liger fused JSD, beta 0"] = lambda xs, ws, xt, wt: fused(xs, ws, xt, wt, labels)
    found["Liger chunked JSD, beta 0"] = lambda xs, ws, xt, wt: chunked(xs, ws, xt, wt, labels)
    return found


def step(loss: Loss, inputs: tuple[Tensor, ...]) -> Tensor:
    for x in inputs:
        x.grad = None
    value = loss(*inputs)
    value.backward()
    return value.detach()


def step_ms(loss: Loss, inputs: tuple[Tensor, ...]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step(loss, inputs)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def peak_bytes(loss: Loss, inputs: tuple[Tensor, ...]) -> int:
    """Peak of a second step above the inputs, with other providers' workspaces freed before."""
    for x in inputs:
        x.grad = None
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    above = torch.cuda.memory_allocated()
    step(loss, inputs)
    torch.cuda.reset_peak_memory_stats()
    step(loss, inputs)
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - above)


def measure(
    table: dict[str, Loss], inputs: tuple[Tensor, ...], rounds: int
) -> dict[str, dict[str, float]]:
    """Median step and peak of every provider that fits; two steps a turn, the second is timed."""
    rows: dict[str, dict[str, float]] = {}
    for name, loss in table.items():
        try:
            step(loss, inputs)
            rows[name] = {"peak_gib": peak_bytes(loss, inputs) / GIB}
        except torch.OutOfMemoryError:
            rows[name] = {}
    times: dict[str, list[float]] = {name: [] for name, row in rows.items() if row}
    for _ in range(rounds):
        for name in random.sample(list(times), len(times)):
            step(table[name], inputs)
            times[name].append(step_ms(table[name], inputs))
    for name, values in times.items():
        rows[name] |= {"ms": median(values), "min_ms": min(values), "max_ms": max(values)}
    return rows


@torch.no_grad()
def truth(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient of the hidden states and of the first words' weights, in float64."""
    xs, ws, xt, wt = (x.detach() for x in inputs)
    ws64, wt64 = ws.double(), wt.double()
    n, loss, d_hidden, d_weight = xs.shape[0], 0.0, [], 0.0
    for a, b in zip(xs.split(512), xt.split(512), strict=True):
        log_s = (a.double() @ ws64.t()).log_softmax(-1)
        log_t = (b.double() @ wt64.t()).log_softmax(-1)
        loss = loss + (log_t.exp() * (log_t - log_s)).sum() / n
        d = (log_s.exp_() - log_t.exp_()) / n
        d_hidden.append(d @ ws64)
        d_weight = d_weight + d[:, :NUM_CHECKED_WORDS].t() @ a.double()
    return loss, torch.cat(d_hidden), d_weight


def errors(loss: Loss, inputs: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> dict[str, float]:
    value = step(loss, inputs)
    xs, ws = inputs[:2]
    assert xs.grad is not None and ws.grad is not None
    got = (value, xs.grad, ws.grad[:NUM_CHECKED_WORDS])
    names = ("loss_error", "hidden_grad_error", "weight_grad_error")
    relative = (float((g.double() - e).norm() / e.norm()) for g, e in zip(got, exact, strict=True))
    return dict(zip(names, relative, strict=True))


def report(title: str, rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}\n{'':28}{'ms':>9}{'min':>8}{'GiB':>8}   errors: loss, dX, dW", flush=True)
    for name, row in rows.items():
        if "ms" not in row:
            print(f"{name:28}out of memory")
            continue
        found = "  ".join(f"{v:.2e}" for k, v in row.items() if k.endswith("error"))
        print(f"{name:28}{row['ms']:9.2f}{row['min_ms']:8.2f}{row['peak_gib']:8.3f}   {found}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="of the code, where it is not a clone")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    cases: dict[str, Any] = {}
    inputs = make_inputs(NUM_TOKENS, NUM_WORDS)
    table = providers(NUM_TOKENS)
    rows = measure(table, inputs, options.rounds)
    exact = truth(inputs)
    for name in ("eager", "linear_kl", "linear_kl, 200 MiB", "linear_kl, 110 MiB"):
        rows[name] |= errors(table[name], inputs, exact)
    del exact
    cases["T=8192, V=152064"] = rows
    report("T=8192, V=152064", rows)
    few = {name: table[name] for name in ("eager", "linear_kl", "linear_kl, recompute")}
    small = tuple(x[:256].detach().requires_grad_(x.requires_grad) for x in inputs[::2])
    cases["T=256, V=152064"] = measure(few, (small[0], inputs[1], small[1], inputs[3]), 15)
    report("T=256, V=152064", cases["T=256, V=152064"])
    del small, inputs
    torch.cuda.empty_cache()
    for num_tokens, num_words in ((8192, 262144), (65536, 152064), (65536, 262144)):
        title = f"T={num_tokens}, V={num_words}"
        inputs = make_inputs(num_tokens, num_words)
        cases[title] = measure({"linear_kl": ours()}, inputs, 1)
        gradients = sum(x.numel() * x.element_size() for x in inputs[:2]) / GIB
        row = cases[title]["linear_kl"]
        row["workspace_gib"] = row["peak_gib"] - gradients
        report(f"{title}; above the gradients {row['workspace_gib']:.3f} GiB", cases[title])
        del inputs
        torch.cuda.empty_cache()
    if options.out:
        header = machine.describe(torch.device("cuda"), options.commit)
        record = {"machine": header, "command": "python -m bench.linear_h200", "cases": cases}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    naive_row = rows["eager"]
    worst = max(
        row[k] / naive_row[k]
        for row in rows.values()
        for k in ("hidden_grad_error", "weight_grad_error")
        if k in row
    )
    print(f"\nworst gradient error: {worst:.2f} of naive bfloat16's")
    return int(worst > 2.0)


if __name__ == "__main__":
    sys.exit(main())
