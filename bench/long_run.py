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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from bench import plots
from bench.demo import text
from bench.providers import with_streamkl
from bench.records import Program, save
from bench.steps import Llama, LlamaStep, frozen

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

    def model(self, layers: int, seed: int) -> Any:
        size = self.hidden_size
        llama = Llama("bytes", size, 2 * size, layers, size // 32, size // 128 or 1, 256)
        return llama.model(torch.device(self.device), seed, self.seqlen)


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
    shape = settings.batch, settings.seqlen
    part = list(text()[start : start + math.prod(shape)])
    return torch.tensor(part, device=settings.device).view(shape)


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
    return frozen(teacher)


class Training:
    """A student, its optimizer and its schedule, which a checkpoint holds whole."""

    def __init__(self, settings: Settings, curve: Curve, seed: int, teacher: nn.Module) -> None:
        self.settings, self.curve, self.done = settings, curve, 0
        self.student = settings.model(settings.student_layers, seed=100 + seed)
        # naive code, on attention maps and logits
        case = LlamaStep("long run", objective="attention+logits")
        self.loss_of: Callable[[Tensor], Tensor] = case.loss_of(self.student, teacher)
        self.step = self.loss_of
        if curve.name != "eager":
            torch._dynamo.reset()
            self.step = with_streamkl(self.loss_of, **{"streamkl.inner": settings.inner})
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=settings.learning_rate)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, settings.steps)
        self.parts = (self.student, self.optimizer, self.schedule)

    def run(self, until: int) -> None:
        """Train until a step; the losses are read at the end, so that nothing waits for them."""
        start, curve = time.perf_counter(), self.curve
        losses = []
        for step in tqdm(range(self.done, until), desc=f"{curve.name}, {curve.seed}", ncols=90):
            loss = self.step(batch_of(self.settings, curve.seed, step))
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        self.done = until
        curve.losses += torch.stack(losses).float().tolist()
        curve.seconds += time.perf_counter() - start
        with torch.no_grad():
            curve.held_out = float(self.loss_of(held_out_batch(self.settings)))

    def checkpoint(self) -> dict[str, Any]:
        return copy.deepcopy({"done": self.done, "parts": [x.state_dict() for x in self.parts]})

    def restore(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        for x, saved in zip(self.parts, state["parts"], strict=True):
            x.load_state_dict(saved)


def curves(settings: Settings) -> list[Curve]:
    """Eager with two seeds, the plugin, and the plugin from its checkpoint in the middle."""
    teacher = trained_teacher(settings)
    found = [Curve("eager", 0), Curve("eager", 1), Curve("streamkl", 0), Curve("resumed", 0)]
    for curve in found:
        is_new = curve.name != "resumed"
        # other weights, which are replaced, where it resumes
        training = Training(settings, curve, curve.seed if is_new else 50, teacher)
        if is_new:
            training.run(settings.steps // 2)
            middle = training.checkpoint()
        else:
            training.restore(middle)
        training.run(settings.steps)
    return found


# --------------------------------------------------------------------------------------- results
def smoothed(losses: list[float]) -> Tensor:
    """Means of windows of steps."""
    window = min(SMOOTHED, len(losses))
    return torch.tensor(losses, dtype=torch.float64).unfold(0, window, 1).mean(-1)


def verdict(found: list[Curve]) -> dict[str, float | bool]:
    """How far the plugin is from eager, next to how far two seeds are from each other."""
    eager, other, plugin, resumed = found
    base = smoothed(eager.losses)
    band, distance = (float((smoothed(x.losses) - base).abs().max()) for x in (other, plugin))

    def largest_difference(losses: list[float], of: list[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(losses, of, strict=True))

    return {
        "band_of_two_seeds": band,
        "distance_of_plugin": distance,
        "is_within_band": distance <= BAND_FACTOR * band,
        "largest_relative_difference_of_a_step": largest_difference(plugin.losses, eager.losses),
        "resumed_off_by": largest_difference(
            resumed.losses, plugin.losses[-len(resumed.losses) :]
        ),
        "learned": bool(base[-1] < base[0] / 2),
    } | {f"held_out_{c.name}_{c.seed}": c.held_out for c in found}


def draw(found: list[Curve], path: Path) -> None:
    """Loss curves over each other, and their distances from eager's."""
    eager, other, plugin, resumed = (smoothed(c.losses) for c in found)
    grey, red = (plots.LINES[name][0] for name in ("eager", "streamkl"))
    steps = range(len(eager))
    late = range(len(eager) - len(resumed), len(eager))
    whole = {  # steps, losses, style
        "eager": (steps, eager, {"color": grey, "lw": 6, "alpha": 0.5}),
        "eager, another seed": (steps, other, {"color": grey, "lw": 1, "ls": ":"}),
        "streamkl": (steps, plugin, {"color": red, "lw": 1.5}),
        "streamkl, resumed": (late, resumed, {"color": "#2e4057", "lw": 1.5, "ls": "--"}),
    }
    apart = {
        "of two eager seeds": (steps, (other - eager).abs(), {"color": grey}),
        "of streamkl from eager": (steps, (plugin - eager).abs(), {"color": red}),
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
    parser.add_argument("--out", type=Path, default=Path("build/long_run.png"), help="the picture")
    given, record = parser.begin(arguments)
    settings = Settings(given.device)
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
