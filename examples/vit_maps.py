"""Attention maps of a vision transformer and its teacher: `python -m examples.vit_maps`.

Needs transformers and tqdm.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import ViTConfig, ViTModel

from examples.clock import DEVICE, Clock
from examples.common import compare

PIXELS = 112  # of an image's side: 14 x 14 patches of 8


def vit(width: int) -> ViTModel:
    config = ViTConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=1, image_size=PIXELS,
        num_attention_heads=4, patch_size=8, attn_implementation="eager",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTModel(config, add_pooling_layer=False).to(DEVICE)


def train(compiles: bool, clock: Clock) -> None:
    student, teacher = vit(64), vit(128).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)

    def loss_of(images: Tensor) -> Tensor:
        maps = student(images, output_attentions=True).attentions
        with torch.no_grad():
            wanted = teacher(images, output_attentions=True).attentions
        pairs = zip(maps, wanted, strict=True)
        losses = [F.kl_div(m.log(), w, reduction="batchmean") for m, w in pairs]
        return torch.stack(losses).mean()

    loss_of(torch.randn(1, 3, PIXELS, PIXELS, device=DEVICE))  # transformers installs its hooks
    step = torch.compile(loss_of) if compiles else loss_of
    for _ in range(clock.num_steps):
        loss = step(torch.randn(4, 3, PIXELS, PIXELS, device=DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.tick(loss)


if __name__ == "__main__":
    compare(train)
