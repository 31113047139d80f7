"""Lightning: a compiled training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.integrations.flows import (
    BATCH,
    Distilled,
    Recorder,
    Run,
    Texts,
    assert_all_fused,
    compare_runs,
    student,
    teacher,
)
from tests.integrations.libraries import needs, optional

lightning = optional("lightning")
pytestmark = needs("lightning", "transformers")
LightningModule: Any = lightning.LightningModule if lightning else object


class Module(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.pair = Distilled(student(), teacher())
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.pair(**batch)["loss"]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.pair.student.parameters(), lr=0.1)


def test_training_step(tmp_path: Path) -> None:
    def flow(compiles: bool) -> Run:
        module: Any = Module()
        recorder = Recorder.of(module)
        if compiles:
            module.training_step = torch.compile(module.training_step)
        trainer = lightning.Trainer(
            max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(Texts(), batch_size=BATCH))
        return recorder.run(module.losses)

    assert_all_fused(compare_runs(flow))
