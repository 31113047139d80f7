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


@pytest.mark.parametrize("checkpointing", ["none", "checkpointing", "inputs_require_grad"])
def test_lora_on_attention(checkpointing: str) -> None:
    """The LM head is frozen: the operator makes no gradient of it."""

    def flow(compiles: bool) -> Run:
        model = adapted("q_proj", "v_proj")
        if checkpointing != "none":
            options = {"use_reentrant": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if checkpointing == "inputs_require_grad":
            model.enable_input_require_grads()
        model.train()
        step = step_of(model, teacher())
        return train(torch.compile(step) if compiles else step, model)

    assert_all_fused(compare_runs(flow))
