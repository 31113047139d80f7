"""Losses that become row programs, beside torch.compile: `python -m bench.row_programs`.

A step is the loss and the gradients of the student's two operands, of 8 heads of 64 or of an LM
head. Providers take turns in rounds. A provider passes the gate when its gradients are at most
twice as far from float64 as those of eager code, plus one rounding; a red one has no times. The
record says from which size on a program is worth its operator: `LEAST_PROGRAM_MIB` of
`fx_passes/planning/small.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import machine
from bench.measure import OutOfMemory, Timed, Timing, guarded, interleaved, peak_mib, step
from bench.records import command_line

Loss = Callable[..., Tensor]
HEADS, HEAD_DIM = 8, 64
HIDDEN = 512
WORDS_PER_TOKEN = 16  # a head of 16 N words for N tokens
OPTIONS = {"streamkl.min_mib": 0.0}
GATE_ELEMENTS = 2**27  # of scores in float64: 1 GiB each


def _maps(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor) -> tuple[Tensor, Tensor]:
    scale = sq.shape[-1] ** -0.5
    return sq @ sk.mT * scale, tq @ tk.mT * scale


def key_weights(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor, extra: Tensor) -> Tensor:
    """Weights of keys behind the softmax, renormalised."""
    p, r = (x.softmax(-1) * extra for x in _maps(sq, sk, tq, tk))
    p, r = (x / (x.sum(-1, keepdim=True) + 1e-6) for x in (p, r))
    return (r * ((r + 1e-6).log() - (p + 1e-6).log())).sum(-1).mean()


def mse_of_maps(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor, extra: Tensor) -> Tensor:
    s, t = (x.softmax(-1) for x in _maps(sq, sk, tq, tk))
    return F.mse_loss(s, t) * s.shape[-1]


def entropy(h: Tensor, w: Tensor, _h: Tensor, _w: Tensor, _: Tensor) -> Tensor:
    """An entropy bonus and the squared log-sum-exp of an LM head."""
    s = h @ w.T
    logs = s.log_softmax(-1)
    return (logs.exp() * logs).sum(-1).mean() + 1e-4 * s.logsumexp(-1).square().mean()


def selected_words(h: Tensor, w: Tensor, _h: Tensor, _w: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of given words and the entropy, as of a policy."""
    logs = (h @ w.T).log_softmax(-1)
    chosen = logs.gather(-1, labels[:, None]).squeeze(-1)
    return -chosen.mean() + 0.01 * (logs.exp() * logs).sum(-1).mean()


FORMS: dict[str, tuple[str, Loss]] = {
    "key weights, renormalised": ("maps", key_weights),
    "MSE of maps": ("maps", mse_of_maps),
    "entropy and z-loss": ("head", entropy),
    "selected words and entropy": ("head", selected_words),
}


def make_inputs(kind: str, size: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Two operands of the student, two of the teacher, and what the form reads besides."""
    torch.manual_seed(0)
    if kind == "maps":
        shape = (1, HEADS, size, HEAD_DIM)
        operands = [torch.randn(shape, device=device, dtype=dtype) for _ in range(4)]
        extra = torch.rand(size, device=device, dtype=dtype) + 0.5
    else:
        words = WORDS_PER_TOKEN * size
        h = torch.randn(size, HIDDEN, device=device, dtype=dtype)
        w = torch.randn(words, HIDDEN, device=device, dtype=dtype) * HIDDEN**-0.5
        operands = [h, w, h, w]
        extra = torch.randint(words, (size,), device=device)
    operands = [x.detach().requires_grad_(i < 2) for i, x in enumerate(operands)]
    return [*operands, extra]


def scores_mib(kind: str, size: int) -> float:
    """The products of a program as they would be in float32: what `streamkl.min_mib` is of."""
    count = 2 * HEADS * size * size if kind == "maps" else WORDS_PER_TOKEN * size * size
    return count * 4 / 2**20


def providers(loss: Loss) -> dict[str, Loss]:
    torch._dynamo.reset()
    return {
        "inductor": torch.compile(loss, dynamic=False),
        "streamkl": torch.compile(loss, backend="streamkl", dynamic=False, options=OPTIONS),
    }


def _error(gradients: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    pairs = zip(gradients, exact, strict=True)
    return max(float((g.double() - e).norm() / e.norm()) for g, e in pairs)


def measure(name: str, size: int, device: torch.device, dtype: torch.dtype, seconds: float) -> Any:
    """One form at one size: a row for each provider."""
    kind, loss = FORMS[name]
    inputs: Any = make_inputs(kind, size, device, dtype)
    result: dict[str, Any] = {"form": name, "size": size, "scores_mib": scores_mib(kind, size)}
    entries = providers(loss)
    budget = exact = None
    if scores_mib(kind, size) * 2**18 <= GATE_ELEMENTS:
        wide = [
            x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
            for x in inputs
        ]
        exact = step(loss, wide)[1]  # type: ignore[arg-type]
        budget = 2 * _error(step(loss, inputs)[1], exact) + torch.finfo(dtype).eps
    rows: dict[str, Any] = {}
    timed = {}
    for provider, entry in entries.items():
        try:
            gradients: Any = guarded(lambda entry=entry: step(entry, inputs)[1], device)
        except OutOfMemory:
            rows[provider] = {"status": "oom"}
            continue
        row: dict[str, Any] = {"status": "ok"}
        if exact is not None and budget is not None:
            row |= {"gradient_error": _error(gradients, exact), "gradient_budget": budget}
            if not row["gradient_error"] <= budget:
                row["status"] = "red"
        del gradients
        row["peak_mib"] = peak_mib(lambda entry=entry: step(entry, inputs), device)
        rows[provider] = row
        if row["status"] == "ok":
            timed[provider] = Timed(entry, [inputs])
    for provider, samples in interleaved(timed, seconds).items():
        if isinstance(samples, OutOfMemory):
            rows[provider]["status"] = "oom"
            continue
        for mode in ("forward", "step"):
            timing = Timing.of([s.ms(mode) for s in samples])
            rows[provider] |= {f"{mode}_ms": timing.median_ms}
        rows[provider] |= {"low_ms": timing.low_ms, "high_ms": timing.high_ms}
        rows[provider] |= {"rounds": len(samples)}
    return result | {"providers": rows}


def line(row: dict[str, Any]) -> str:
    cells = []
    for provider, x in row["providers"].items():
        known = f"{x['step_ms']:.1f} ms, {x['peak_mib']:.0f} MiB" if "step_ms" in x else ""
        cells.append(f"{provider} {known or x['status']}")
    head = f"{row['form']:<28} {row['size']:>6} {row['scores_mib']:>7.0f} MiB"
    return f"{head}  {'; '.join(cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[256, 1024, 2048])
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each provider")
    parser.add_argument("--note", default="")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, given.dtype) if given.dtype else default
    rows = []
    for name in given.forms:
        for size in given.sizes:
            rows.append(measure(name, size, device, dtype, given.seconds))
            print(line(rows[-1]), flush=True)
            if given.json:
                record = {
                    "command": command_line("bench.row_programs", sys.argv[1:]),
                    "machine": machine.describe(device),
                    "dtype": str(dtype).removeprefix("torch."),
                    "note": given.note,
                    "rows": rows,
                }
                given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
