"""A random Llama pair and texts of random tokens: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, TOKENS, TEMPERATURE = 2048, 64, 2.0


def llama(width: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS,
        use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def student() -> nn.Module:
    return llama(32)


def teacher() -> nn.Module:
    return llama(64).requires_grad_(False).eval()


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def distillation_loss(outputs: Any, wanted: Any) -> Tensor:
    """The loss of the labels and the KL of softened probabilities, as everybody writes them."""
    got = F.log_softmax(outputs.logits / TEMPERATURE, -1)
    target = F.softmax(wanted.logits / TEMPERATURE, -1)
    return outputs.loss + TEMPERATURE**2 * F.kl_div(got, target, reduction="batchmean")


class Distilled(nn.Module):
    """A student with its teacher: the forward is the loss."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        outputs = self.student(**inputs, labels=labels)
        with torch.no_grad():
            wanted = self.teacher(**inputs)
        return {"loss": distillation_loss(outputs, wanted)}
