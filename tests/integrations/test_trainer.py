"""transformers' Trainer as people use it: the loss in the module, and in compute_loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.flows import (
    BATCH,
    Distilled,
    Recorder,
    Run,
    Texts,
    assert_all_fused,
    compare_runs,
    distillation_loss,
    library,
    student,
    teacher,
)
from tests.integrations.libraries import needs, optional

transformers = optional("transformers")
pytestmark = needs("transformers", "accelerate", "datasets")
Trainer: Any = transformers.Trainer if transformers else object


def arguments(folder: Path, **options: Any) -> Any:
    given = {
        "output_dir": str(folder), "per_device_train_batch_size": BATCH, "max_steps": 2,
        "report_to": [], "use_cpu": True, "logging_steps": 1, "save_strategy": "no",
        "disable_tqdm": True, "optim": "sgd", "learning_rate": 0.1, "seed": 0,
    }  # fmt: skip
    return transformers.TrainingArguments(**{**given, **options})


def trained(trainer: Any, module: nn.Module, **options: Any) -> Run:
    recorder = Recorder.of(module)
    trainer.train(**options)
    return recorder.run([x["loss"] for x in trainer.state.log_history if "loss" in x])


@pytest.mark.parametrize("options", [
    pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow),
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    pytest.param({"torch_compile_mode": "reduce-overhead"}, marks=pytest.mark.slow),
], ids=lambda options: "-".join(options))  # fmt: skip
def test_loss_in_the_module(tmp_path: Path, options: dict[str, Any]) -> None:
    def flow(compiles: bool) -> Run:
        pair = Distilled(student(), teacher())
        given = {k: v for k, v in options.items() if compiles or not k.startswith("torch_")}
        if given.pop("gradient_checkpointing", False):
            pair.student.gradient_checkpointing_enable(
                given.pop("gradient_checkpointing_kwargs", None)
            )
        chosen = arguments(tmp_path, torch_compile=compiles, **given)
        trainer = transformers.Trainer(pair, chosen, train_dataset=Texts())
        return trained(trainer, pair)

    assert_all_fused(compare_runs(flow))


class DistillationTrainer(Trainer):  # type: ignore[misc]
    """The trainer of many repositories: the student first, with labels, then the teacher."""

    teacher: nn.Module

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any
    ) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
            )
        loss = distillation_loss(outputs, wanted)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(("chosen", "beta"), [
    ("inductor", 0.5),
    *(pytest.param("streamkl", beta, marks=pytest.mark.slow) for beta in (0.0, 1.0)),
])  # fmt: skip
def test_generalized_knowledge_distillation(tmp_path: Path, chosen: str, beta: float) -> None:
    """TRL's GKDTrainer: only rows with a label count, `jsd[mask]`."""
    gkd = library("trl.experimental.gkd.gkd_trainer")

    def flow(compiles: bool) -> Run:
        model = student()
        trainer = DistillationTrainer(
            model, arguments(tmp_path, remove_unused_columns=False), train_dataset=Texts()
        )
        # the methods of TRL's trainer, without its tokenizer and its generation of texts
        trainer.teacher_model, trainer.beta = teacher(), beta
        trainer.generalized_jsd_loss = gkd.GKDTrainer.generalized_jsd_loss
        compute_loss = gkd.GKDTrainer.compute_loss.__get__(trainer)
        trainer.compute_loss = (
            torch.compile(compute_loss, backend=chosen) if compiles else compute_loss
        )
        return trained(trainer, model)

    assert_all_fused(compare_runs(flow))
