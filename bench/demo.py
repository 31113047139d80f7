"""`make demo`: distil real transformers with naive attention losses, eager and compiled.

An encoder pair (BERT, padded batch) and a causal decoder pair (Llama, grouped heads), built from a
configuration with random weights, read real text as bytes. Both train a few steps twice, in eager
mode and compiled. What comes out: the report of every loss, the largest difference of loss and
gradients, time and peak memory of a step, and a picture.

On a CPU the rest of the step runs as in eager mode (`streamkl.inner`): Inductor would write some
30 C++ files for each pair, and compiling them takes minutes. `--inner inductor` does that.
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm

import torch_streamkl
from bench import plots
from bench.case import Problem, total_error
from bench.measure import peak_mib, usual_dtype
from bench.steps import StepCase, build, frozen
from torch_streamkl.fx_passes.backend import collected

PAD = 0
NAMES = ("eager", "streamkl")


def attention_kl(teacher_maps: list[Tensor], student_maps: list[Tensor]) -> Tensor:
    """The naive loss, as users of output_attentions write it: masked probabilities are 0."""
    loss = torch.zeros((), device=student_maps[0].device)
    for teacher, student in zip(teacher_maps, student_maps, strict=True):
        p, q = teacher.float().clamp_min(1e-12), student.float().clamp_min(1e-12)
        loss = loss + (p * (p.log() - q.log())).sum(-1).mean()
    return loss


def bert_loss(teacher: nn.Module, student: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Attention maps of the mapped layers, and the last hidden states, of an encoder pair."""
    with torch.no_grad():
        t = teacher(input_ids=ids, attention_mask=mask, output_attentions=True)
    s = student(input_ids=ids, attention_mask=mask, output_attentions=True)
    hidden = (s.last_hidden_state - t.last_hidden_state).float().square().mean()
    return hidden + attention_kl(t.attentions[1::2], s.attentions)


def llama_loss(teacher: nn.Module, student: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Attention maps of the mapped layers, and next-byte prediction, of a causal decoder pair."""
    with torch.no_grad():
        t = teacher.model(input_ids=ids, output_attentions=True, use_cache=False)
    s = student(input_ids=ids, labels=ids, output_attentions=True, use_cache=False)
    return s.loss + attention_kl(t.attentions[1::2], s.attentions)


SIZES = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
    "max_position_embeddings": 8192,
}  # fmt: skip
LAYERS = {"cuda": (4, 2), "cpu": (2, 1)}  # of teacher and student; every second one is mapped
INNER = {"cuda": "inductor", "cpu": "aot_eager"}


@dataclass(frozen=True)
class Pair(StepCase):
    """An encoder pair whose batch is padded, or a causal decoder pair with grouped heads."""

    pads: bool = False  # sequences of different length

    def models(self, device: torch.device) -> tuple[nn.Module, nn.Module]:
        dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        kind, more = "LlamaForCausalLM", {"num_key_value_heads": 2}
        if self.pads:
            kind, more = "BertModel", dict.fromkeys(dropouts, 0.0)
        teacher, student = (
            build(kind, i, device, usual_dtype(device), num_hidden_layers=n, **SIZES, **more)
            for i, n in enumerate(LAYERS[device.type])
        )
        return student, frozen(teacher)

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return batches(1, self, device)[0]

    def loss_of(self, student: nn.Module, teacher: nn.Module) -> Callable[..., Tensor]:
        naive = bert_loss if self.pads else llama_loss
        return lambda ids, mask: naive(teacher, student, ids, mask)

    def optimizer(self, student: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(student.parameters(), lr=3e-4)


@functools.cache
def text() -> bytes:
    """Python's language reference, which every Python ships."""
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def batches(num: int, pair: Pair, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """The text as bytes, cut into (input_ids, attention_mask)."""
    batch, seqlen = pair.batch_size, pair.seqlen
    need = num * batch * seqlen
    some = text() * math.ceil(need / len(text()))
    ids = torch.tensor(list(some[:need]), device=device).view(num, batch, seqlen)
    lengths = torch.full((batch,), seqlen, device=device)
    if pair.pads:
        lengths = seqlen - torch.arange(batch, device=device) * (seqlen // (2 * batch))
    mask = (torch.arange(seqlen, device=device) < lengths[:, None]).long()
    result = [(x.masked_fill(mask == 0, PAD), mask.clone()) for x in ids]
    for x in (x for one in result for x in one):
        torch._dynamo.mark_dynamic(x, 1)  # one compilation for all lengths
    return result


@dataclass
class Run:
    """What one way of executing the training step gave."""

    problem: Problem
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    first_gradients: list[Tensor] = field(default_factory=list)
    peak: list[tuple[int, float]] = field(default_factory=list)  # seqlen, MiB

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.problem.sets = [batch]
        start = time.perf_counter()
        loss, gradients = self.problem.step()
        self.losses.append(loss.item())
        self.step_ms.append((time.perf_counter() - start) * 1e3)
        self.first_gradients = self.first_gradients or [g.cpu() for g in gradients]


def distil(pair: Pair, args: argparse.Namespace) -> tuple[dict[str, Run], torch_streamkl.Report]:
    """Train one pair in eager mode and compiled, from the same weights on the same batches.

    The two are interleaved, so that what else the machine does slows both.
    """
    device = torch.device(args.device)
    first, *data = batches(args.steps, pair, device)
    runs = {name: Run(pair.problem(device)) for name in NAMES}
    options = {"streamkl.inner": args.inner, "streamkl.verify_max_seconds": 20.0}
    ours = runs["streamkl"].problem
    ours.loss = torch.compile(ours.loss, backend="streamkl", options=options)
    runs["eager"].step(first)
    print(f"{pair.name}: compiling... ", end="", flush=True)
    with collected() as report:  # once for all lengths
        runs["streamkl"].step(first)
    print(f"{runs['streamkl'].step_ms[0] / 1e3:.0f} s", flush=True)
    for batch in tqdm(data, desc=f"{pair.name}: steps", ncols=90):
        for run in runs.values():
            run.step(batch)
    for name, run in runs.items():
        for seqlen in tqdm(args.memory_seqlens, desc=f"{pair.name}: memory, {name}", ncols=90):
            run.problem.model.zero_grad(set_to_none=True)
            batch = replace(pair, seqlen=seqlen).batch(device)
            without = replace(run.problem, sets=[batch], finish=lambda: None)
            run.peak.append((seqlen, peak_mib(without.step, device)))
    return runs, report


def show(name: str, runs: dict[str, Run], report: torch_streamkl.Report) -> None:
    eager, ours = runs.values()
    loss = max(abs(a - b) / abs(a) for a, b in zip(eager.losses, ours.losses, strict=True))
    gradients = total_error(ours.first_gradients, eager.first_gradients)
    print(f"\n=== {name} ===\n{report}\n")
    print(f"largest relative difference of the loss over all steps  {loss:.1e}")
    print(f"relative difference of all gradients, first step        {gradients:.1e}")
    print(f"seconds of the first step, which compiles               {ours.step_ms[0] / 1e3:.0f}")
    largest = max(eager.peak)[0]
    print(f"{'':10}{'ms per step':>14}{'peak memory, N=' + str(largest):>24}")
    for name, run in runs.items():
        times = sorted(run.step_ms[1:])
        print(f"{name:10}{times[len(times) // 2]:>14.1f}{max(run.peak)[1]:>20.1f} MiB")


def draw(outcomes: dict[str, dict[str, Run]], path: Path, batch: int) -> None:
    """Loss curves over each other, and peak memory against sequence length."""
    with plots.figure(path, len(outcomes), 2, (10, 3.6 * len(outcomes))) as drawn:
        for i, (pair, runs) in enumerate(outcomes.items()):
            losses, memory = drawn[2 * i : 2 * i + 2]
            for name, run in runs.items():
                wide = {"lw": 5, "alpha": 0.5} if name == "eager" else {"lw": 1.5}
                losses.plot(run.losses, color=plots.LINES[name][0], label=name, **wide)
            losses.set(title=f"{pair}: loss", xlabel="training step", ylabel="loss")
            losses.legend(frameon=False)
            peaks = {name: sorted(run.peak) for name, run in runs.items()}
            plots.draw(memory, peaks, "sequence length", "MiB")
            memory.set_title(f"peak memory of a step, {batch} sequences")
    print(f"\npicture: {path}")


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--steps", type=int, default=15, help="training steps of each way")
    add("--batch", type=int, default=2)
    add("--seqlen", type=int, default=2048 if cuda else 384)
    add("--device", default="cuda" if cuda else "cpu")
    add("--inner", choices=("inductor", "aot_eager"), default=INNER["cuda" if cuda else "cpu"],
        help="what compiles the rest of the step (default: inductor on cuda, aot_eager on cpu)",
    )  # fmt: skip
    add("--out", type=Path, default=Path("build/demo.png"), help="the picture")
    args = parser.parse_args()
    args.memory_seqlens = [1024, 2048, 4096, 8192] if args.device == "cuda" else [384, 640, 1024]
    transformers.logging.set_verbosity_error()
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch")
    start = time.perf_counter()
    pairs = (
        Pair("BERT, padded batch", "", args.batch, args.seqlen, pads=True),
        Pair("Llama, causal, grouped heads", "", args.batch, args.seqlen),
    )
    outcomes = {pair.name: distil(pair, args) for pair in pairs}
    for name, outcome in outcomes.items():
        show(name, *outcome)
    draw({name: runs for name, (runs, _) in outcomes.items()}, args.out, args.batch)
    print(f"done in {time.perf_counter() - start:.0f} s on {args.device}")
    for _, report in outcomes.values():
        if not report.sites or report.num_remaining or not all(x.fused for x in report.sites):
            raise SystemExit(
                "a loss is not fused or a score- or logit-sized tensor remains: "
                "see the reports above"
            )


if __name__ == "__main__":
    main()
