"""Trainers as people use them: transformers' and TRL's, Accelerate's prepare(), Lightning."""

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

accelerate, lightning = optional("accelerate"), optional("lightning")
transformers = optional("transformers")
of_trainer = needs("transformers", "accelerate", "datasets")
Trainer: Any = transformers.Trainer if transformers else object
LightningModule: Any = lightning.LightningModule if lightning else object


# ------------------------------------------------------------------------ transformers
def arguments(folder: Path, **options: Any) -> Any:
    given = {
        "output_dir": str(folder), "per_device_train_batch_size": BATCH, "max_steps": 2,
        "report_to": [], "use_cpu": True, "logging_steps": 1, "save_strategy": "no",
        "disable_tqdm": True, "optim": "sgd", "learning_rate": 0.1, "seed": 0,
    }  # fmt: skip
    return transformers.TrainingArguments(**{**given, **options})


def trained(trainer: Any, module: nn.Module) -> Run:
    recorder = Recorder.of(module)
    trainer.train()
    return recorder.run([x["loss"] for x in trainer.state.log_history if "loss" in x])


@of_trainer
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


@of_trainer
@pytest.mark.parametrize(("loss", "chosen", "beta"), [
    ("TRL", "inductor", 0.5),
    *(pytest.param("TRL", "streamkl", beta, marks=pytest.mark.slow) for beta in (0.0, 1.0)),
    pytest.param("own", "inductor", None, marks=pytest.mark.slow),
])  # fmt: skip
def test_loss_in_compute_loss(tmp_path: Path, loss: str, chosen: str, beta: Any) -> None:
    """One's own, and that of TRL's GKDTrainer: only rows with a label count, `jsd[mask]`."""
    is_own = loss == "own"
    gkd = None if is_own else library("trl.experimental.gkd.gkd_trainer").GKDTrainer

    def flow(compiles: bool) -> Run:
        model = student()
        options = arguments(tmp_path, remove_unused_columns=is_own)
        trainer = DistillationTrainer(model, options, train_dataset=Texts())
        trainer.teacher = trainer.teacher_model = teacher()
        compute_loss = trainer.compute_loss
        if gkd is not None:
            # the methods of TRL's trainer, without its tokenizer and its generation of texts
            trainer.beta, trainer.generalized_jsd_loss = beta, gkd.generalized_jsd_loss
            compute_loss = gkd.compute_loss.__get__(trainer)
        trainer.compute_loss = (
            torch.compile(compute_loss, backend=chosen) if compiles else compute_loss
        )
        return trained(trainer, model)

    assert_all_fused(compare_runs(flow))


# ------------------------------------------------------------------------ Accelerate
@pytest.fixture
def one_state() -> Any:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@needs("accelerate", "transformers")
@pytest.mark.usefixtures("one_state")
def test_a_module_that_accelerate_prepares() -> None:
    """By its plugin, with accumulated gradients."""

    def flow(compiles: bool) -> Run:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        plugin = accelerate.utils.TorchDynamoPlugin(backend="inductor") if compiles else None
        accelerator = accelerate.Accelerator(
            cpu=True, dynamo_plugin=plugin, gradient_accumulation_steps=2
        )
        pair = Distilled(student(), teacher())
        recorder = Recorder.of(pair)
        optimizer = torch.optim.SGD(pair.student.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(Texts(), batch_size=BATCH)
        module, optimizer, loader = accelerator.prepare(pair, optimizer, loader)
        losses = []
        for inputs in loader:
            with accelerator.accumulate(module):
                loss = module(**inputs)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return recorder.run(losses)

    assert_all_fused(compare_runs(flow))


@needs("accelerate")
def test_the_name_of_the_backend_is_no_choice_of_accelerate() -> None:
    """Accelerate has the names in an enum: the docs give `enable()` instead."""
    with pytest.raises(ValueError, match="STREAMKL"):
        accelerate.utils.TorchDynamoPlugin(backend="streamkl")


# ------------------------------------------------------------------------ Lightning
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


@needs("lightning", "transformers")
def test_a_training_step_of_lightning(tmp_path: Path) -> None:
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
