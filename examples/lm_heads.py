"""KL of softened vocabularies and cross-entropy of labels: `python -m examples.lm_heads`.

On a CPU the compiled step takes about as long as the uncompiled one at this size, and less
memory. On a GPU it gains both.

Needs tqdm.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.clock import DEVICE, Clock
from examples.common import compare

VOCAB, TOKENS, TEMPERATURE = 8192, 128, 2.0


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(ids))))


def train(compiles: bool, clock: Clock) -> None:
    student, teacher = Model(64).to(DEVICE), Model(128).to(DEVICE).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)

    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        logits = student(ids)
        hard = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        with torch.no_grad():
            wanted = teacher(ids)
        soft = F.kl_div(
            (logits / TEMPERATURE).log_softmax(-1),
            (wanted / TEMPERATURE).softmax(-1),
            reduction="batchmean",
        )
        return hard + TEMPERATURE**2 * soft / TOKENS

    step = torch.compile(loss_of) if compiles else loss_of
    for _ in range(clock.num_steps):
        ids = torch.randint(VOCAB, (4, TOKENS), device=DEVICE)
        labels = ids.roll(-1, 1).masked_fill(torch.arange(TOKENS, device=DEVICE) < 32, -100)
        loss = step(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.tick(loss)


if __name__ == "__main__":
    compare(train)
