"""Accelerate: prepare() compiles the module by the plugin; a name of a backend is Inductor's."""

from __future__ import annotations

from typing import Any

import pytest
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

accelerate = optional("accelerate")
pytestmark = needs("accelerate", "transformers")


@pytest.fixture(autouse=True)
def _one_state() -> Any:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_prepared_module() -> None:
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


def test_the_name_of_the_backend_is_no_choice_there() -> None:
    """Accelerate has the names in an enum: the docs give `enable()` instead."""
    with pytest.raises(ValueError, match="STREAMKL"):
        accelerate.utils.TorchDynamoPlugin(backend="streamkl")
