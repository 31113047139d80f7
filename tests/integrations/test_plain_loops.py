"""Training loops without a trainer: AdamW, autocast, EMA teachers, frozen heads, CUDA graphs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integrations.flows import (
    EPS,
    Run,
    assert_all_fused,
    compare_runs,
    train,
)

VOCAB = 96


class Model(nn.Module):
    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(ids % VOCAB))))


def step_of(model: nn.Module, teacher: nn.Module) -> Any:
    def step(input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids)
        with torch.no_grad():
            wanted = teacher(input_ids)
        kl = F.kl_div(logits.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
        hard = F.cross_entropy(logits.flatten(0, 1), (labels % VOCAB).flatten())
        return kl + hard

    return step


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_fifty_steps_of_adamw(mode: str) -> None:
    """The curve of the loss is eager's at every step."""

    def flow(compiles: bool) -> Run:
        model, teacher = Model(16, 0), Model(32, 1).requires_grad_(False)
        step = step_of(model, teacher)
        compiled = torch.compile(step, mode=mode) if compiles else step
        return train(compiled, model, 50, lambda p: torch.optim.AdamW(p, lr=1e-3))

    # each of 50 steps may add what the first has
    assert_all_fused(compare_runs(flow, rtol=50 * 64 * EPS, changes_rtol=1e-2), 1)


def test_saving_and_resuming(tmp_path: Path) -> None:
    """25 steps, a file, and 25 more of new objects that begin from it: eager's curve."""

    def flow(compiles: bool) -> Run:
        path, runs = tmp_path / f"{compiles}.pt", []
        for resumes in (False, True):
            torch._dynamo.reset()
            model, teacher = Model(16, 5 if resumes else 0), Model(32, 1).requires_grad_(False)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if resumes:
                saved = torch.load(path)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            step = step_of(model, teacher)
            compiled = torch.compile(step) if compiles else step
            runs.append(train(compiled, model, 25, lambda _, chosen=optimizer: chosen))
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, path)
        first, second = runs
        changes = [a + b for a, b in zip(first.changes, second.changes, strict=True)]
        return Run(first.losses + second.losses, changes)

    report = compare_runs(flow, rtol=50 * 64 * EPS, changes_rtol=1e-2)
    assert_all_fused(report, 2)  # one a compilation


def in_autocast(step: Any) -> Any:
    def run(**inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value: Tensor = step(**inputs)
        return value

    return run


@pytest.mark.parametrize("how", ["autocast", "frozen head"])
def test_a_step(how: str) -> None:
    def flow(compiles: bool) -> Run:
        model, teacher = Model(16, 0), Model(32, 1).requires_grad_(False)
        model.head.requires_grad_(how == "autocast")
        step = step_of(model, teacher)
        step = in_autocast(step) if how == "autocast" else step
        return train(torch.compile(step) if compiles else step, model)

    bf16 = torch.finfo(torch.bfloat16).eps
    limits = {"rtol": bf16, "changes_rtol": 8 * bf16} if how == "autocast" else {}
    assert_all_fused(compare_runs(flow, **limits), 1)


@pytest.mark.parametrize("updated", ["in the step", "after it"])
def test_teacher_that_follows_the_student(updated: str) -> None:
    """An EMA of the student: after backward() all fuses; in the compiled step it is told so."""

    def flow(compiles: bool) -> Run:
        model = Model(16, 0)
        teacher = copy.deepcopy(model).requires_grad_(False)
        with torch.no_grad():
            for p in teacher.parameters():
                p.mul_(1.5)
        inner = step_of(model, teacher)

        def follow() -> None:
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)

        def step(**inputs: Tensor) -> Tensor:
            loss = inner(**inputs)
            if updated == "in the step":
                follow()
            return loss

        class Optimizer(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                super().step(closure)
                if updated == "after it":
                    follow()

        compiled = torch.compile(step) if compiles else step
        run = train(compiled, model, 50, lambda p: Optimizer(p, lr=1e-3))
        run.changes += [p.detach().clone() for p in teacher.parameters()]
        return run

    report = compare_runs(flow, rtol=50 * 64 * EPS, changes_rtol=1e-2)
    if updated == "after it":
        assert_all_fused(report, 1)
    else:
        assert report.num_fused == 0
        assert "after backward()" in str(report)
