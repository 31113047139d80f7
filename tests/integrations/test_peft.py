"""PEFT adapters: LoRA on the attention of a student, and on its LM head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_streamkl
from tests.integrations.flows import (
    Run,
    assert_all_fused,
    compare_runs,
    distillation_loss,
    student,
    teacher,
    train,
)
from tests.integrations.libraries import needs, optional
from torch_streamkl.fx_passes import backend

peft = optional("peft")
pytestmark = needs("peft", "transformers")


def adapted(*modules: str, **options: Any) -> nn.Module:
    model = student()
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(modules), init_lora_weights=False, **options
    )
    return peft.get_peft_model(model, config)


def step_of(model: nn.Module, needs_grad_of: nn.Module) -> Any:
    def step(input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        outputs = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        with torch.no_grad():
            wanted = needs_grad_of(input_ids=input_ids, attention_mask=attention_mask)
        return distillation_loss(outputs, wanted)

    return step


def checkpoint(model: nn.Module) -> None:
    """For a model with adapters this calls enable_input_require_grads(), too."""
    model.config.use_cache = False  # else a warning of transformers breaks the graph
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()


@pytest.mark.slow
def test_inputs_that_require_gradients() -> None:
    """A limit of Dynamo, which the report names with what to do instead."""

    def flow(compiles: bool) -> Run:
        model = adapted("q_proj", "v_proj")
        checkpoint(model)
        step = step_of(model, teacher())
        return train(torch.compile(step) if compiles else step, model)

    report = compare_runs(flow)
    assert report.num_fused == 0
    assert any("disable_input_require_grads" in site.hint for site in report.sites), report


@pytest.mark.parametrize(("mode", "modules"), [
    pytest.param("plain", ("lm_head",), marks=pytest.mark.slow),
    ("autocast", ("q_proj", "v_proj", "lm_head")),
    pytest.param("checkpointed", ("q_proj", "v_proj", "lm_head"), marks=pytest.mark.slow),
])  # fmt: skip
def test_lora_on_the_lm_head(mode: str, modules: tuple[str, ...]) -> None:
    """One head over concatenated features: A and B are trained, and W is not copied."""

    def flow(compiles: bool) -> Run:
        model = adapted(*modules)
        if mode == "checkpointed":
            checkpoint(model)
            # only reentrant checkpoints need them, and Dynamo cannot trace requires_grad_()
            model.disable_input_require_grads()
        step: Any = step_of(model, teacher())
        if mode == "autocast":
            step = torch.autocast("cpu", torch.bfloat16)(step)
        chosen = torch.compile(step) if compiles else step
        return train(chosen, model)

    eps = torch.finfo(torch.bfloat16 if mode == "autocast" else torch.float32).eps
    report = compare_runs(flow, rtol=64 * eps, changes_rtol=max(1e-4, 8 * eps))
    assert_all_fused(report)
    assert all("a sum of two products" in site.form for site in report.sites), report


@pytest.mark.slow
def test_an_adapter_of_another_type() -> None:
    """PEFT keeps adapters in float32 next to a model in bfloat16: the operator would round."""

    def flow() -> Run:
        torch._dynamo.reset()
        model = adapted("lm_head")
        for name, parameter in model.named_parameters():
            if "lora" not in name:
                parameter.data = parameter.data.bfloat16()
        return train(torch.compile(step_of(model, teacher().bfloat16())), model)

    without = flow()
    with backend.collected() as report, torch_streamkl.enable():
        assert flow().losses == without.losses
    assert report.num_fused == 0
    assert all("autocast_adapter_dtype=False" in site.hint for site in report.sites), report


@pytest.mark.slow
def test_a_magnitude_per_word() -> None:
    """DoRA of the LM head is no form of the operators, and PEFT's layers break the graph."""

    def flow(compiles: bool) -> Run:
        model = adapted("lm_head", use_dora=True)
        step = step_of(model, teacher())
        return train(torch.compile(step) if compiles else step, model)

    report = compare_runs(flow)
    assert report.num_fused == 0
    assert report.sites and all("use_dora=False" in site.hint for site in report.sites), report
