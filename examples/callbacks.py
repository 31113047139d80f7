"""What the examples with transformers' Trainer share: a callback that ticks the clock."""

from typing import Any

from transformers import TrainerCallback

from examples.common import Clock


class Ticks(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.tick()
