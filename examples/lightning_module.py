"""A Lightning module whose training step is the loss: `python -m examples.lightning_module`.

Needs transformers, lightning and tqdm.
"""

import logging
from typing import Any

import lightning
import torch

from examples.clock import Clock
from examples.common import compare
from examples.models import Distilled, Texts, student


class Module(lightning.LightningModule):
    def __init__(self, compiles: bool, clock: Clock) -> None:
        super().__init__()
        pair = Distilled(student())
        self.pair = torch.compile(pair) if compiles else pair
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.pair(**batch)["loss"]

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.clock.tick(outputs["loss"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # what it found, tips


def train(compiles: bool, clock: Clock) -> None:
    trainer = lightning.Trainer(
        max_steps=clock.num_steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, devices=1,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Texts(), batch_size=4)
    trainer.fit(Module(compiles, clock), loader)


if __name__ == "__main__":
    compare(train)
