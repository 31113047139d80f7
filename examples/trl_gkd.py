"""TRL's generalized knowledge distillation, JSD of selected rows: `python -m examples.trl_gkd`.

Needs transformers, accelerate, trl and tqdm.
"""

import tempfile
from typing import Any

import torch
from transformers import TrainingArguments
from trl.experimental.gkd.gkd_trainer import GKDTrainer

from examples.callbacks import TimedTrainer
from examples.clock import DEVICE, Clock
from examples.common import compare
from examples.models import TOKENS, Texts, student, teacher
from examples.one_gpu import use_one_gpu


class Prompted(Texts):
    """The first tokens of a text are its prompt: they have no label."""

    def __getitem__(self, index: int) -> Any:
        text = super().__getitem__(index)
        prompt = text["input_ids"][: TOKENS // 4]
        labels = text["labels"].index_fill(0, torch.arange(TOKENS // 4), -100)
        return {**text, "labels": labels, "prompts": prompt}


class Distillation(TimedTrainer):
    """The loss of GKDTrainer without its tokenizer and without generated texts."""

    beta, generalized_jsd_loss = 0.5, staticmethod(GKDTrainer.generalized_jsd_loss)
    teacher_model: Any

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return GKDTrainer.compute_loss(self, *args, **kwargs)  # type: ignore[arg-type]


def train(compiles: bool, clock: Clock) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=clock.num_steps, per_device_train_batch_size=4, report_to=[],
            save_strategy="no", disable_tqdm=True, use_cpu=DEVICE == "cpu",
            remove_unused_columns=False,
        )  # fmt: skip
        use_one_gpu(arguments)
        trainer = Distillation(clock, student(), arguments, train_dataset=Prompted())
        trainer.teacher_model = teacher().to(DEVICE)
        if compiles:  # the rows with a label are selected by a mask, which needs enable()
            trainer.compute_loss = torch.compile(trainer.compute_loss)
        trainer.train()


if __name__ == "__main__":
    compare(train)
