"""PEFT adapters: LoRA on the attention of a student, and on its LM head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.flows import (
    Run,
    assert_all_fused,
    compare_runs,
    distillation_loss,
    student,
    teacher,
    train,
)

peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")


def adapted(*modules: str, **options: Any) -> nn.Module:
    model = student()
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(modules), init_lora_weights=False, **options
    )
    return peft.get_peft_model(model, config)


def step_of(model: nn.Module, wanted_by: nn.Module) -> Any:
    def step(input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        outputs = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        with torch.no_grad():
            wanted = wanted_by(input_ids=input_ids, attention_mask=attention_mask)
        return distillation_loss(outputs, wanted)

    return step


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_on_attention(checkpointing: bool) -> None:
    """The LM head is frozen: the operator makes no gradient of it."""

    def flow(compiles: bool) -> Run:
        model = adapted("q_proj", "v_proj")
        if checkpointing:
            checkpoint(model)
            # only reentrant checkpoints need them, and Dynamo cannot trace requires_grad_()
            model.disable_input_require_grads()
        step = step_of(model, teacher())
        return train(torch.compile(step) if compiles else step, model)

    assert_all_fused(compare_runs(flow))


def checkpoint(model: nn.Module) -> None:
    """For a model with adapters this calls enable_input_require_grads(), too."""
    model.config.use_cache = False  # else a warning of transformers breaks the graph
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()


def test_inputs_that_require_gradients() -> None:
    """A limit of Dynamo, which the report names with what to do instead."""

    def flow(compiles: bool) -> Run:
        model = adapted("q_proj", "v_proj")
        checkpoint(model)
        step = step_of(model, teacher())
        return train(torch.compile(step) if compiles else step, model)

    report = compare_runs(flow)
    assert report.num_fused == 0
    assert any("disable_input_require_grads" in site.remedy for site in report.sites), report


def test_lora_on_the_lm_head() -> None:
    """Not fused: the result is eager's, and no advice would stop the adapter's training."""

    def flow(compiles: bool) -> Run:
        model = adapted("lm_head")
        step = step_of(model, teacher())
        return train(torch.compile(step) if compiles else step, model)

    report = compare_runs(flow)
    assert report.num_fused == 0
    assert report.remaining
    assert all(site.reason for site in report.sites), report
    assert not any(
        site.remedy.startswith("detach") and "adapter" not in site.remedy for site in report.sites
    ), report
