"""A whole distillation, eager and compiled with the plugin: do the curves stay together?

    python -m bench.long_run --out docs/evidence/long_run.png \\
        --json bench/results/long_run.json  # one GPU

A Llama-like teacher learns Python's language reference byte by byte; then a student of half its
depth is distilled on attention maps and logits, as naive code: bfloat16, AdamW, a cosine schedule,
no dropout. Eager runs with two seeds; what lies between them is the band that the plugin has to
stay in. The plugin runs with the first seed, is stopped in the middle, and goes on from its
checkpoint in a model that was built anew: the second half of the run that was not stopped says
what that should give.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from bench import plots
from bench.demo import COLORS, text
from bench.providers import with_streamkl
from bench.records import Program, save
from bench.steps import LlamaStep, Pair

HELD_OUT = 0.1  # of the text, its end
SMOOTHED = 25  # steps of a mean that is compared
BAND_FACTOR = 1.0  # of the distance between two seeds that the plugin's may have from eager's


@dataclass(frozen=True)
class Settings:
    """What is trained, and how."""

    device: str
    steps: int = 1000
    teacher_steps: int = 300
    batch: int = 8
    seqlen: int = 512
    hidden_size: int = 256
    student_layers: int = 2  # the teacher has twice as many
    learning_rate: float = 1e-3
    inner: str = "inductor"  # what compiles the rewritten graph

    @property
    def pair(self) -> Pair:
        size, layers = self.hidden_size, self.student_layers
        heads = (size // 32, size // 128 or 1)
        return Pair("bytes", size, 2 * size, *heads, 256, (self.seqlen,), 2 * layers, layers)

    def model(self, layers: int, seed: int) -> Any:
        return self.pair.model(torch.device(self.device), layers, seed)


@dataclass
class Curve:
    """The losses of one way."""

    name: str
    seed: int
    losses: list[float] = field(default_factory=list)
    held_out: float = math.nan  # after the last step
    seconds: float = 0.0


# ----------------------------------------------------------------------------------------- data
def batch_of(settings: Settings, seed: int, step: int) -> Tensor:
    """The step's sequences: a function of seed and step, so that a resumed run has the same."""
    part = text()[: int(len(text()) * (1 - HELD_OUT))]
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(part) - settings.seqlen, (settings.batch,), generator=generator)
    rows = [list(part[i : i + settings.seqlen]) for i in starts.tolist()]
    return torch.tensor(rows, device=settings.device)


def held_out_batch(settings: Settings) -> Tensor:
    """The beginning of the text that no step sees."""
    start = int(len(text()) * (1 - HELD_OUT))
    need = settings.batch * settings.seqlen
    part = list(text()[start : start + need])
    return torch.tensor(part, device=settings.device).view(settings.batch, settings.seqlen)


# -------------------------------------------------------------------------------------- training
def trained_teacher(settings: Settings) -> nn.Module:
    """Next bytes for some steps: a teacher whose maps mean something."""
    teacher = settings.model(2 * settings.student_layers, seed=0)
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=settings.learning_rate)
    for step in tqdm(range(settings.teacher_steps), desc="teacher", ncols=90):
        ids = batch_of(settings, 7, step)
        teacher(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return teacher.eval().requires_grad_(False)


class Training:
    """A student, its optimizer and its schedule, which a checkpoint holds whole."""

    def __init__(self, settings: Settings, seed: int, teacher: nn.Module) -> None:
        self.settings, self.seed, self.done = settings, seed, 0
        self.student = settings.model(settings.student_layers, seed=100 + seed)
        # naive code, on attention maps and logits
        case = LlamaStep("long run", pair=settings.pair, objective="attention+logits")
        self.loss_of = case.loss_of(self.student, teacher)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=settings.learning_rate)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, settings.steps)
        self.parts = (self.student, self.optimizer, self.schedule)

    def compiled(self) -> Callable[[Tensor], Tensor]:
        torch._dynamo.reset()
        return with_streamkl(self.loss_of, **{"streamkl.inner": self.settings.inner})

    def run(self, step: Callable[[Tensor], Tensor], until: int, curve: Curve) -> None:
        """Train until a step; the losses are read at the end, so that nothing waits for them."""
        start = time.perf_counter()
        losses = []
        for _ in tqdm(range(self.done, until), desc=f"{curve.name}, seed {self.seed}", ncols=90):
            loss = step(batch_of(self.settings, self.seed, self.done))
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
            self.done += 1
        curve.losses += torch.stack(losses).float().tolist()
        curve.seconds += time.perf_counter() - start

    def checkpoint(self) -> dict[str, Any]:
        return copy.deepcopy({"done": self.done, "parts": [x.state_dict() for x in self.parts]})

    def restore(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        for x, saved in zip(self.parts, state["parts"], strict=True):
            x.load_state_dict(saved)

    @torch.no_grad()
    def held_out(self) -> float:
        return float(self.loss_of(held_out_batch(self.settings)))


def curves(settings: Settings) -> list[Curve]:
    """Eager with two seeds, the plugin, and the plugin from its checkpoint in the middle."""
    teacher = trained_teacher(settings)
    found = []
    for name, seed in (("eager", 0), ("eager", 1), ("streamkl", 0)):
        curve, training = Curve(name, seed), Training(settings, seed, teacher)
        step = training.loss_of if name == "eager" else training.compiled()
        training.run(step, settings.steps // 2, curve)
        middle = training.checkpoint()
        training.run(step, settings.steps, curve)
        curve.held_out = training.held_out()
        found.append(curve)
    # other weights, which are replaced
    resumed, training = Curve("resumed", 0), Training(settings, 50, teacher)
    training.seed = 0
    training.restore(middle)
    training.run(training.compiled(), settings.steps, resumed)
    resumed.held_out = training.held_out()
    return [*found, resumed]


# --------------------------------------------------------------------------------------- results
def smoothed(losses: list[float]) -> Tensor:
    """Means of windows of steps."""
    window = min(SMOOTHED, len(losses))
    return torch.tensor(losses, dtype=torch.float64).unfold(0, window, 1).mean(-1)


def verdict(found: list[Curve]) -> dict[str, float | bool]:
    """How far the plugin is from eager, next to how far two seeds are from each other."""
    eager, other, plugin, resumed = found
    base = smoothed(eager.losses)
    band = float((smoothed(other.losses) - base).abs().max())
    distance = float((smoothed(plugin.losses) - base).abs().max())
    half = plugin.losses[-len(resumed.losses) :]
    off = max(abs(a - b) / abs(b) for a, b in zip(resumed.losses, half, strict=True))
    return {
        "band_of_two_seeds": band,
        "distance_of_plugin": distance,
        "is_within_band": distance <= BAND_FACTOR * band,
        "largest_relative_difference_of_a_step": max(
            abs(a - b) / abs(a) for a, b in zip(eager.losses, plugin.losses, strict=True)
        ),
        "resumed_off_by": off,
        "held_out_eager": eager.held_out,
        "held_out_other_seed": other.held_out,
        "held_out_plugin": plugin.held_out,
        "held_out_resumed": resumed.held_out,
        "learned": bool(base[-1] < base[0] / 2),
    } | {f"seconds_{c.name}_{c.seed}": c.seconds for c in found}


def draw(found: list[Curve], path: Path) -> None:
    """Loss curves over each other, and their distances from eager's."""
    eager, other, plugin, resumed = (smoothed(c.losses) for c in found)
    steps = range(len(eager))
    late = range(len(eager) - len(resumed), len(eager))
    whole = {  # steps, losses, style
        "eager": (steps, eager, {"color": "#888888", "lw": 6, "alpha": 0.5}),
        "eager, another seed": (steps, other, {"color": "#888888", "lw": 1, "ls": ":"}),
        "streamkl": (steps, plugin, {"color": COLORS["streamkl"], "lw": 1.5}),
        "streamkl, resumed": (late, resumed, {"color": "#2e4057", "lw": 1.5, "ls": "--"}),
    }
    apart = {
        "of two eager seeds": (steps, (other - eager).abs(), {"color": COLORS["eager"]}),
        "of streamkl from eager": (steps, (plugin - eager).abs(), {"color": COLORS["streamkl"]}),
    }
    titles = (f"distillation loss, mean of {SMOOTHED} steps", "distance of the loss curves")
    with plots.figure(path, 1, 2, (11, 3.8)) as drawn:
        for axes, title, lines in zip(drawn, titles, (whole, apart), strict=True):
            for label, (x, y, style) in lines.items():
                axes.plot(x, y, label=label, **style)
            axes.set(title=title, xlabel="training step", yscale="log")
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)
        plots.plain_numbers(drawn[0].yaxis)


def main(arguments: list[str] | None = None) -> int:
    parser = Program("bench.long_run", __doc__)
    for name in ("steps", "teacher_steps", "batch", "seqlen", "hidden_size"):
        default = getattr(Settings, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--inner", default="inductor", help="what compiles the rewritten graph")
    parser.add_argument("--out", type=Path, default=Path("build/long_run.png"), help="the picture")
    given, record = parser.begin(arguments)
    settings = Settings(**{f.name: getattr(given, f.name, f.default) for f in fields(Settings)})
    found = curves(settings)
    draw(found, given.out)
    result = verdict(found)
    if given.json is not None:
        head = {"command": record.command, "machine": record.machine, "note": record.note}
        more = {"settings": asdict(settings), "verdict": result}
        save(head | more | {"curves": [asdict(c) for c in found]}, given.json)
    print(json.dumps(result, indent=1))
    return 0 if result["is_within_band"] else 1


if __name__ == "__main__":
    sys.exit(main())
