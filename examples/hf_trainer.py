"""transformers' Trainer with the loss in compute_loss: `python -m examples.hf_trainer`.

Needs transformers, accelerate and tqdm.
"""

import tempfile
from typing import Any

import torch
from transformers import TrainingArguments

from examples.callbacks import TimedTrainer
from examples.clock import DEVICE, Clock
from examples.common import compare
from examples.models import Texts, distillation_loss, student, teacher
from examples.one_gpu import use_one_gpu


class DistillationTrainer(TimedTrainer):
    teacher: Any

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
            )
        loss = distillation_loss(outputs, wanted)
        return (loss, outputs) if return_outputs else loss


def train(compiles: bool, clock: Clock) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=clock.num_steps, per_device_train_batch_size=4, report_to=[],
            save_strategy="no", disable_tqdm=True, use_cpu=DEVICE == "cpu",
        )  # fmt: skip
        use_one_gpu(arguments)
        trainer = DistillationTrainer(clock, student(), arguments, train_dataset=Texts())
        trainer.teacher = teacher().to(DEVICE)
        if compiles:  # torch_compile=True compiles the model alone, and the KL is outside of it
            trainer.compute_loss = torch.compile(trainer.compute_loss)
        trainer.train()


if __name__ == "__main__":
    compare(train)
