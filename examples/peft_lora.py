"""LoRA on a student's attention and on its LM head: `python -m examples.peft_lora`.

Needs transformers, peft and tqdm.
"""

import torch
from peft import LoraConfig, get_peft_model

from examples.clock import DEVICE, Clock
from examples.common import compare
from examples.models import Distilled, Texts, student


def train(compiles: bool, clock: Clock) -> None:
    modules = ["q_proj", "v_proj", "lm_head"]
    adapted = get_peft_model(student(), LoraConfig(r=4, target_modules=modules))
    pair = Distilled(adapted).to(DEVICE)
    step = torch.compile(pair) if compiles else pair
    optimizer = torch.optim.AdamW([p for p in pair.parameters() if p.requires_grad], lr=1e-3)
    loader = torch.utils.data.DataLoader(Texts(), batch_size=4)
    for _, inputs in zip(range(clock.num_steps), loader, strict=False):
        loss = step(**{name: x.to(DEVICE) for name, x in inputs.items()})["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.tick(loss)


if __name__ == "__main__":
    compare(train)
