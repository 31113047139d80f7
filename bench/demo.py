"""`make demo`: distil real transformers with naive attention losses, eager and compiled.

An encoder pair (BERT, padded batch) and a causal decoder pair (Llama, grouped heads), built from a
configuration with random weights, read real text as bytes. Both train a few steps twice, in eager
mode and compiled. What comes out: the report of every KL site, the largest difference of loss and
gradients, time and peak memory of a step, and a picture.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm

import torch_streamkl
from bench.memory import peak_bytes

COLORS = {"eager": "#888888", "streamkl": "#d1495b"}
PAD = 0


def attention_kl(teacher_maps: list[Tensor], student_maps: list[Tensor]) -> Tensor:
    """The naive loss, as users of output_attentions write it: masked probabilities are 0."""
    loss = torch.zeros((), device=student_maps[0].device)
    for teacher, student in zip(teacher_maps, student_maps, strict=True):
        p, q = teacher.float().clamp_min(1e-12), student.float().clamp_min(1e-12)
        loss = loss + (p * (p.log() - q.log())).sum(-1).mean()
    return loss


@dataclass
class Pair:
    """A teacher, a student, and the training loss of a batch."""

    name: str
    teacher: nn.Module
    student: nn.Module
    loss: Callable[[nn.Module, nn.Module, Tensor, Tensor], Tensor]
    pads: bool  # sequences of different length


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


def bert_pair(device: str, dtype: torch.dtype) -> Pair:
    def model(num_layers: int) -> nn.Module:
        config = transformers.BertConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=num_layers,
            num_attention_heads=8,
            max_position_embeddings=8192,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        built = transformers.BertModel._from_config(config, attn_implementation="eager")
        return built.to(device=device, dtype=dtype)

    torch.manual_seed(0)
    teacher = model(4).eval().requires_grad_(False)
    return Pair("BERT, padded batch", teacher, model(2), bert_loss, pads=True)


def llama_pair(device: str, dtype: torch.dtype) -> Pair:
    def model(num_layers: int) -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=num_layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=8192,
        )
        built = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
        return built.to(device=device, dtype=dtype)

    torch.manual_seed(1)
    teacher = model(4).eval().requires_grad_(False)
    return Pair("Llama, causal, grouped heads", teacher, model(2), llama_loss, pads=False)


def batches(
    num: int, batch: int, seqlen: int, device: str, *, pads: bool
) -> list[tuple[Tensor, Tensor]]:
    """Python's own language reference as bytes, cut into (input_ids, attention_mask)."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    need = num * batch * seqlen
    text = text * math.ceil(need / len(text))
    ids = torch.tensor(list(text[:need]), device=device).view(num, batch, seqlen)
    lengths = torch.full((batch,), seqlen, device=device)
    if pads:
        lengths = seqlen - torch.arange(batch, device=device) * (seqlen // (2 * batch))
    mask = (torch.arange(seqlen, device=device) < lengths[:, None]).long()
    result = [(x.masked_fill(mask == 0, PAD), mask.clone()) for x in ids]
    for x in (x for pair in result for x in pair):
        torch._dynamo.mark_dynamic(x, 1)  # one compilation for all lengths
    return result


@dataclass
class Run:
    """What one way of executing the training step gave."""

    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    first_gradients: dict[str, Tensor] = field(default_factory=dict)
    peak: dict[int, int] = field(default_factory=dict)  # seqlen -> bytes


@dataclass
class Outcome:
    """A pair in both ways, and the report of its compilation."""

    pair: str
    runs: dict[str, Run]
    report: torch_streamkl.Report
    batch: int

    @property
    def loss_difference(self) -> float:
        eager, ours = (self.runs[x].losses for x in ("eager", "streamkl"))
        return max(abs(a - b) / abs(a) for a, b in zip(eager, ours, strict=True))

    @property
    def gradient_difference(self) -> float:
        """Norm of the difference of all gradients at the first step over their norm."""
        eager, ours = (self.runs[x].first_gradients for x in ("eager", "streamkl"))
        difference = sum((eager[k] - ours[k]).double().square().sum().item() for k in eager)
        return math.sqrt(
            difference / sum(x.double().square().sum().item() for x in eager.values())
        )


def train(
    pair: Pair, step: Callable[..., Tensor], data: list[tuple[Tensor, Tensor]], bar: tqdm
) -> Run:
    """Train the student with AdamW, one batch a step; the first, which compiles, is untimed."""
    run = Run()
    optimizer = torch.optim.AdamW(pair.student.parameters(), lr=3e-4)
    for index, (ids, mask) in enumerate(data):
        start = time.perf_counter()
        loss = step(pair.teacher, pair.student, ids, mask)
        loss.backward()
        run.losses.append(loss.item())
        if index == 0:
            run.first_gradients = {
                k: p.grad.detach().cpu()
                for k, p in pair.student.named_parameters()
                if p.grad is not None
            }
        else:
            run.step_ms.append((time.perf_counter() - start) * 1e3)
        optimizer.step()
        optimizer.zero_grad()
        bar.update()
    return run


def step_memory(pair: Pair, step: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> int:
    """Peak bytes of one forward and backward after training, above weights and the batch."""

    def call() -> None:
        step(pair.teacher, pair.student, *batch).backward()
        pair.student.zero_grad(set_to_none=True)

    return peak_bytes(call, batch[0].device)


def distil(make: Callable[..., Pair], args: argparse.Namespace) -> Outcome:
    """Train one pair in eager mode and compiled, from the same weights on the same batches."""
    pair = make(args.device, args.dtype)
    data = batches(args.steps, args.batch, args.seqlen, args.device, pads=pair.pads)
    # transformers installs its recording hooks in the first call that asks for attention maps,
    # under a lock that torch.compile cannot trace.
    with torch.no_grad():
        pair.loss(pair.teacher, pair.student, *data[0])
    report = torch_streamkl.explain(pair.loss, pair.teacher, pair.student, *data[0])
    runs = {}
    for name in COLORS:
        mine = Pair(pair.name, pair.teacher, copy.deepcopy(pair.student), pair.loss, pair.pads)
        torch._dynamo.reset()
        step = mine.loss
        if name == "streamkl":
            step = torch.compile(mine.loss, backend="streamkl")
        with tqdm(total=len(data), desc=f"{pair.name}: {name}", ncols=90) as bar:
            runs[name] = train(mine, step, data, bar)
        sizes = tqdm(args.memory_seqlens, desc=f"{pair.name}: memory, {name}", ncols=90)
        for seqlen in sizes:
            (batch,) = batches(1, args.batch, seqlen, args.device, pads=pair.pads)
            runs[name].peak[seqlen] = step_memory(mine, step, batch)
    return Outcome(pair.name, runs, report, args.batch)


def show(outcome: Outcome) -> None:
    print(f"\n=== {outcome.pair} ===\n{outcome.report}\n")
    print(f"largest relative difference of the loss over all steps  {outcome.loss_difference:.1e}")
    print(
        "relative difference of all gradients, first step        "
        f"{outcome.gradient_difference:.1e}"
    )
    largest = max(next(iter(outcome.runs.values())).peak)
    print(f"{'':10}{'ms per step':>14}{'peak memory, N=' + str(largest):>24}")
    for name, run in outcome.runs.items():
        median = sorted(run.step_ms)[len(run.step_ms) // 2]
        print(f"{name:10}{median:>14.1f}{run.peak[largest] / 2**20:>20.1f} MiB")


def draw(outcomes: list[Outcome], path: Path) -> None:
    """Loss curves over each other, and peak memory against sequence length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(outcomes), 2, figsize=(10, 3.6 * len(outcomes)), squeeze=False)
    for (losses, memory), outcome in zip(axes, outcomes, strict=True):
        for name, run in outcome.runs.items():
            wide = {"lw": 5, "alpha": 0.5} if name == "eager" else {"lw": 1.5}
            losses.plot(run.losses, color=COLORS[name], label=name, **wide)
            sizes = sorted(run.peak)
            memory.plot(
                sizes, [run.peak[n] / 2**20 for n in sizes], "o-", color=COLORS[name], label=name
            )
        losses.set(title=f"{outcome.pair}: loss", xlabel="step", ylabel="loss")
        memory.set(
            title=f"peak memory of a step, {outcome.batch} sequences",
            xlabel="sequence length",
            ylabel="MiB",
            xscale="log",
            yscale="log",
        )
        memory.set_xticks(sizes, [str(n) for n in sizes])
        memory.minorticks_off()
        for axis in (losses, memory):
            axis.grid(alpha=0.3, which="both")
            axis.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"\npicture: {path}")


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=20, help="training steps a run")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seqlen", type=int, default=2048 if cuda else 384)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--out", type=Path, default=Path("build/demo.png"), help="the picture")
    args = parser.parse_args()
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    # Inductor's threads start at 512 tokens on a CPU: below, it would compile a second time
    args.memory_seqlens = [1024, 2048, 4096, 8192] if args.device == "cuda" else [384, 640, 1024]
    transformers.logging.set_verbosity_error()
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch")
    start = time.perf_counter()
    outcomes = [distil(make, args) for make in (bert_pair, llama_pair)]
    for outcome in outcomes:
        show(outcome)
    draw(outcomes, args.out)
    print(f"done in {time.perf_counter() - start:.0f} s on {args.device}")
    unfused = [
        x for x in outcomes if not all(s.fused for s in x.report.sites) or not x.report.sites
    ]
    left = [x for x in outcomes if x.report.remaining_quadratic]
    if unfused or left:
        raise SystemExit(
            "a KL site stayed unfused or a quadratic tensor remains: see the reports above"
        )


if __name__ == "__main__":
    main()
