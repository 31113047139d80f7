"""What the examples with transformers' Trainer share: a callback that ticks the clock."""

from typing import Any

from transformers import TrainerCallback, TrainingArguments

from examples.common import Clock


class Ticks(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.tick()


def use_one_gpu(arguments: TrainingArguments) -> None:
    """Keep Trainer from wrapping the model in nn.DataParallel where there are several GPUs.

    It does so in a process that torchrun did not start, and runs the model in threads that no
    compiled graph holds. `torchrun --nproc-per-node=...` uses all GPUs, and fuses.
    """
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
