"""The commonest distillation steps in the field, with model, padding and optimiser.

A teacher of BERT-base's shape, and students as in TinyBERT and MiniLM; the losses are naive code,
as people write it. Weights are random and no dropout is drawn, so that a step can be repeated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 30522
NUM_LABELS = 2


@dataclass(frozen=True)
class Batch:
    """Token ids with padding on the right, and a label for each sequence."""

    ids: Tensor
    mask: Tensor
    labels: Tensor

    @staticmethod
    def of(batch: int, seqlen: int, device: torch.device, seed: int) -> Batch:
        """Random ids; lengths are between half of seqlen and seqlen."""
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(seqlen // 2, seqlen + 1, (batch, 1), generator=generator)
        lengths[0] = seqlen
        ids = torch.randint(VOCABULARY, (batch, seqlen), generator=generator)
        mask = (torch.arange(seqlen) < lengths).long()
        labels = torch.randint(NUM_LABELS, (batch,), generator=generator)
        return Batch(ids.to(device), mask.to(device), labels.to(device))


@dataclass(frozen=True)
class ShortStep:
    """A student, its teacher and what it learns from it."""

    name: str
    source: str
    objective: str  # "maps": attention maps of every layer; "relations": of the last one's q, k, v
    hidden_size: int = 768
    num_layers: int = 4
    num_heads: int = 12
    teacher_layers: int = 12
    teacher_width: int = 768

    def models(self, device: torch.device) -> tuple[nn.Module, nn.Module]:
        """Student and teacher, float32."""
        student = _bert(self.hidden_size, self.num_layers, self.num_heads, 1, self._attention)
        teacher = _bert(self.teacher_width, self.teacher_layers, 12, 0, self._attention)
        teacher.eval().requires_grad_(False)
        for model in (student, teacher):
            model.to(device)
            # Transformers installs the hooks that collect attention maps and hidden states at
            # the first such call, and that must happen outside of a compiled graph
            some = Batch.of(1, 8, device, 0)
            model(some.ids, some.mask, **self._outputs)
        return student, teacher

    def loss(self, student: nn.Module, teacher: nn.Module) -> Callable[[Batch], Tensor]:
        """The naive loss of a batch, that of the labels added."""
        divergence = maps_kl if self.objective == "maps" else relations_kl
        options = self._outputs

        def loss_of(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                t = teacher(ids, mask, **options)
            s = student(ids, mask, **options)
            task = F.cross_entropy(s.logits.float(), labels)
            return task + divergence(student, s, teacher, t, mask)

        return loss_of  # type: ignore[return-value]  # called with the fields of a Batch

    @property
    def _attention(self) -> str:
        return "eager" if self.objective == "maps" else "sdpa"

    @property
    def _outputs(self) -> dict[str, bool]:
        wanted = "output_attentions" if self.objective == "maps" else "output_hidden_states"
        return {wanted: True}


def _bert(width: int, layers: int, heads: int, seed: int, attention: str) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=NUM_LABELS,
    )
    return transformers.BertForSequenceClassification._from_config(
        config, attn_implementation=attention
    )


def maps_kl(student: Any, s: Any, teacher: Any, t: Any, mask: Tensor) -> Tensor:
    """KL of each student layer's maps to those of the teacher's layer at the same depth."""
    every = len(t.attentions) // len(s.attentions)
    rows = mask[:, None, :].to(torch.float32)
    count = rows.sum() * s.attentions[0].shape[1]
    total = torch.zeros((), device=mask.device)
    for i, student_map in enumerate(s.attentions):
        p, q = t.attentions[every * (i + 1) - 1].float(), student_map.float()
        kl = (p * (p.clamp_min(1e-12).log() - q.clamp_min(1e-12).log())).sum(-1)
        total = total + (kl * rows).sum() / count
    return total


def relations_kl(student: Any, s: Any, teacher: Any, t: Any, mask: Tensor) -> Tensor:
    """KL of the last layer's query, key and value relations, each with as many heads."""
    keys = mask[:, None, None, :].bool()
    rows = mask[:, None, :].to(torch.float32)
    count = rows.sum() * student.config.num_attention_heads
    total = torch.zeros((), device=mask.device)
    for x, y in zip(_projections(student, s), _projections(teacher, t), strict=True):
        log_q = _scores(x, keys).log_softmax(-1)
        p = _scores(y, keys).softmax(-1)
        kl = F.kl_div(log_q, p, reduction="none").sum(-1)
        total = total + (kl * rows).sum() / count
    return total


def _projections(model: Any, outputs: Any) -> list[Tensor]:
    layer = model.bert.encoder.layer[-1].attention.self
    hidden = outputs.hidden_states[-2]
    shape = (*hidden.shape[:2], model.config.num_attention_heads, -1)
    return [
        project(hidden).view(shape).transpose(1, 2)
        for project in (layer.query, layer.key, layer.value)
    ]


def _scores(x: Tensor, keys: Tensor) -> Tensor:
    scores = (x @ x.transpose(-1, -2)).float() * x.shape[-1] ** -0.5
    return scores.masked_fill(~keys, torch.finfo(scores.dtype).min)


def in_float64(model: nn.Module) -> nn.Module:
    """A copy that computes exactly what the model should."""
    return copy.deepcopy(model).double()


STEPS = {
    step.name: step
    for step in (
        ShortStep("bert-4-layers", "google-bert/bert-base-uncased, every third layer", "maps"),
        ShortStep(
            "tinybert",
            "huawei-noah/TinyBERT_General_4L_312D from google-bert/bert-base-uncased",
            "maps",
            hidden_size=312,
        ),
        ShortStep(
            "minilm",
            "nreimers/MiniLM-L6-H384-uncased from google-bert/bert-base-uncased",
            "relations",
            hidden_size=384,
            num_layers=6,
        ),
    )
}
