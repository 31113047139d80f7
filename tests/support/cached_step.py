"""A process of test_compile_cache.py: compile one step, print its gradient and its cache use.

Each argument is a front end with the options to switch on, such as ``backend,strict``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.utils import counters

import torch_streamkl

EVENTS = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")


def loss(q: Tensor, k: Tensor, teacher: Tensor) -> Tensor:
    wanted = (teacher @ teacher.mT).softmax(-1)
    got = (q @ k.mT).log_softmax(-1)
    return torch.nn.functional.kl_div(got, wanted, reduction="batchmean")


def run(front_end: str, options: dict[str, Any]) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    generator = torch.Generator().manual_seed(0)
    q, k, teacher = (torch.randn(1, 2, 8, 4, generator=generator) for _ in range(3))
    q.requires_grad_()
    # a check would refuse the formula that the test changes; the tensors are small
    options = {"verify": "never", "min_mib": 0.0, **options}
    if front_end == "backend":
        given = {f"streamkl.{name}": value for name, value in options.items()}
        step = torch.compile(loss, backend="streamkl", options=given)
    elif front_end == "inductor_options":
        step = torch.compile(loss, options=torch_streamkl.inductor_options(**options))
    else:
        step = loss
    (gradient,) = torch.autograd.grad(step(q, k, teacher), q)
    return {
        "gradient": gradient.flatten().tolist(),
        **{e: counters["aot_autograd"][e] for e in EVENTS},
    }


if __name__ == "__main__":
    results = []
    for request in sys.argv[1:]:
        front_end, *options = request.split(",")
        results.append(run(front_end, dict.fromkeys(options, True)))
    print(json.dumps(results))
