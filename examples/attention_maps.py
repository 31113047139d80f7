"""A plain loop over two attention maps: `python -m examples.attention_maps`.

Needs tqdm.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.clock import DEVICE, Clock
from examples.common import compare

HEADS, WIDTH, TOKENS = 4, 64, 512


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k))
        return q @ k.mT * (WIDTH // HEADS) ** -0.5


def train(compiles: bool, clock: Clock) -> None:
    student, teacher = Scores().to(DEVICE), Scores().to(DEVICE).requires_grad_(False)

    def loss_of(x: Tensor) -> Tensor:
        got, wanted = student(x).log_softmax(-1), teacher(x).softmax(-1)
        return F.kl_div(got, wanted, reduction="batchmean")

    step = torch.compile(loss_of) if compiles else loss_of
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for _ in range(clock.num_steps):
        loss = step(torch.randn(2, TOKENS, WIDTH, device=DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.tick(loss)


if __name__ == "__main__":
    compare(train)
