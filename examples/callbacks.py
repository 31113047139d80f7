"""What the examples of transformers' Trainer share: every step ticks the clock with its loss."""

from typing import Any

from transformers import PrinterCallback, Trainer, TrainerCallback, logging

from examples.clock import Clock

logging.set_verbosity_error()


class TimedTrainer(Trainer):
    """transformers' Trainer with a clock, and without the summary that it prints at the end."""

    last_loss: Any

    def __init__(self, clock: Clock, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, callbacks=[Ticks(self, clock)])
        self.remove_callback(PrinterCallback)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.last_loss = super().training_step(*args, **kwargs)
        return self.last_loss


class Ticks(TrainerCallback):
    def __init__(self, trainer: TimedTrainer, clock: Clock) -> None:
        self.trainer, self.clock = trainer, clock

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.clock.tick(self.trainer.last_loss)
