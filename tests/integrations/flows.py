"""What the flows share: tiny random models, a batch, the naive loss, and how runs are compared."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_streamkl
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.reporting.report import Report

VOCABULARY, TOKENS, PROMPT, BATCH = 320, 24, 8, 4
TEMPERATURE = 2.0
EPS = torch.finfo(torch.float32).eps


def library(name: str) -> Any:
    """The module, or a skip that names what is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed: {error}")


def llama(width: int, seed: int, **options: Any) -> nn.Module:
    transformers = library("transformers")
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, **{**sizes, **options}
    )
    return transformers.LlamaForCausalLM(config)


def student(**options: Any) -> nn.Module:
    return llama(32, 0, **options)


def teacher() -> nn.Module:
    return llama(64, 1).requires_grad_(False).eval()


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens, whose prompts have no labels."""

    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, VOCABULARY, (TOKENS,), generator=generator)
        labels = ids.clone()
        labels[:PROMPT] = -100
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def batch(start: int = 0) -> dict[str, Tensor]:
    texts = Texts()
    rows = [texts[start + i] for i in range(BATCH)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def distillation_loss(outputs: Any, wanted: Any) -> Tensor:
    """Cross-entropy of the labels and the KL of softened logits, as people add them."""
    kl = F.kl_div(
        F.log_softmax(outputs.logits / TEMPERATURE, -1),
        F.softmax(wanted.logits / TEMPERATURE, -1),
        reduction="batchmean",
    )
    return outputs.loss + TEMPERATURE**2 * kl


class Distilled(nn.Module):
    """A student with its teacher, whose forward is the loss: the student first, with labels."""

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        outputs = self.student(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        with torch.no_grad():
            wanted = self.teacher(input_ids=input_ids, attention_mask=attention_mask)
        return {"loss": distillation_loss(outputs, wanted)}


@dataclass
class Run:
    """What training left: the losses, and by how much each trained parameter moved."""

    losses: list[float]
    changes: list[Tensor]


@dataclass
class Recorder:
    """Remembers parameters before training."""

    module: nn.Module
    before: list[Tensor]

    @staticmethod
    def of(module: nn.Module) -> Recorder:
        return Recorder(module, copy.deepcopy(_trained(module)))

    def run(self, losses: Sequence[float]) -> Run:
        after = _trained(self.module)
        return Run(list(losses), [b - a for a, b in zip(self.before, after, strict=True)])


def _trained(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters() if p.requires_grad]


def train(
    step: Callable[..., Tensor],
    module: nn.Module,
    num_steps: int = 2,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    accumulates: int = 1,
) -> Run:
    """A plain loop over batches; ``step`` gives the loss of one."""
    recorder = Recorder.of(module)
    trained = [p for p in module.parameters() if p.requires_grad]
    chosen = torch.optim.SGD(trained, lr=0.1) if optimizer is None else optimizer(trained)
    losses = []
    for i in range(num_steps):
        loss = step(**batch(BATCH * (i % 3)))
        loss.backward()
        if (i + 1) % accumulates == 0:
            chosen.step()
            chosen.zero_grad()
        losses.append(loss.item())
    return recorder.run(losses)


def compare_runs(
    flow: Callable[[bool], Run], rtol: float = 64 * EPS, changes_rtol: float = 1e-4
) -> Report:
    """Run ``flow`` uncompiled, then compiled with `enable`; the report of the second.

    Losses agree to ``rtol``, and so do the changes of all parameters together, which are sums of
    small differences of probabilities, to ``changes_rtol``.
    """
    eager = flow(False)
    torch._dynamo.reset()
    with backend.collected() as report, torch_streamkl.enable():
        compiled = flow(True)
    assert len(eager.losses) > 0
    assert compiled.losses == pytest.approx(eager.losses, rel=rtol), report
    moved = sum(float(x.double().square().sum()) for x in eager.changes) ** 0.5
    apart = sum(
        float((x - y).double().square().sum())
        for x, y in zip(eager.changes, compiled.changes, strict=True)
    )
    assert moved > 0
    assert apart**0.5 <= changes_rtol * moved, (apart**0.5 / moved, report)
    return report


def assert_all_fused(report: Report, num_sites: int | None = None) -> None:
    """Every site of every graph, and nothing score-sized is left."""
    assert not report.failures, report
    assert report.num_fused == len(report.sites) > 0, report
    assert not report.num_remaining, report
    assert not report.not_analysed, report
    if num_sites is not None:
        assert report.num_fused == num_sites, report
