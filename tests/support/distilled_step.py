"""A distillation step as one module: every layer's attention maps, compared at the end."""

import torch
from torch import nn

WIDTH, HEADS = 16, 2


class Layer(nn.Module):
    """Attention written by hand that returns its map, as models with output_attentions do."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.scaling = (WIDTH // HEADS) ** -0.5

    def forward(self, x):
        q, k, v = (
            project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        probabilities = (q @ k.transpose(-1, -2) * self.scaling).softmax(-1)
        return x + (probabilities @ v).transpose(1, 2).flatten(2), probabilities


class Model(nn.Module):
    def __init__(self, log_normalizer):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(log_normalizer))

    def forward(self, x):
        maps = []
        for layer in self.layers:
            x, probabilities = layer(x)
            maps.append(probabilities)
        return x, maps


class Step(nn.Module):
    """The loss of a batch: the KL of each layer's map, and something for the last layer."""

    def __init__(self, log_normalizer=2):
        super().__init__()
        self.student, self.teacher = Model(log_normalizer), Model(log_normalizer)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        last, student = self.student(x)
        with torch.no_grad():
            teacher = self.teacher(x)[1]
        loss = last.square().mean()
        for q, p in zip(student, teacher, strict=True):
            loss = loss + (p * (p.clamp_min(1e-9).log() - q.clamp_min(1e-9).log())).sum(-1).mean()
        return loss


def gradients(module):
    """Of all trained parameters, whole where they are sharded."""
    given = [p.grad for p in module.parameters() if p.requires_grad]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in given]
