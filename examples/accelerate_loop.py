"""Accelerate with its dynamo plugin: `python -m examples.accelerate_loop`.

Needs transformers, accelerate and tqdm.
"""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin

from examples.clock import DEVICE, Clock
from examples.common import compare
from examples.models import Distilled, Texts, student


def train(compiles: bool, clock: Clock) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # two runs in one process
    plugin = TorchDynamoPlugin(backend="inductor") if compiles else None
    accelerator = Accelerator(cpu=DEVICE == "cpu", dynamo_plugin=plugin)
    pair = Distilled(student())
    optimizer = torch.optim.AdamW(pair.student.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Texts(), batch_size=4)
    module, optimizer, loader = accelerator.prepare(pair, optimizer, loader)
    for _, inputs in zip(range(clock.num_steps), loader, strict=False):
        loss = module(**inputs)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick(loss)


if __name__ == "__main__":
    compare(train)
