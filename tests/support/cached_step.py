"""Processes of test_compile_cache.py: compile one step, print its gradient and its cache use.

Each line of input is for a new process, forked from one that has imported torch and nothing of
ours: front ends with the options to switch on, such as ``backend,strict``.
"""

import json
import os
import sys

import torch
import torch._inductor.compile_fx
import torch._inductor.config
from torch._dynamo.utils import counters

EVENTS = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")


def loss(q, k, teacher):
    """Rows, so that no reduction is left which a C++ compiler would have to see."""
    wanted = (teacher @ teacher.mT).softmax(-1)
    got = (q @ k.mT).log_softmax(-1)
    return torch.nn.functional.kl_div(got, wanted, reduction="none").sum(-1)


def direct(q, k, teacher):
    """The same by the operator, compiled without the rewrite."""
    import torch_streamkl

    rows = torch_streamkl.attention_kl(
        q, k, teacher, teacher, student_scale=1.0, teacher_scale=1.0, reduction="none"
    )
    return rows


def run(front_end, options):
    import torch_streamkl  # as its files are now

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
    elif front_end == "direct":
        step = torch.compile(direct)
    else:
        step = loss
    rows = step(q, k, teacher)
    (gradient,) = torch.autograd.grad(rows, q, torch.ones_like(rows))
    return {
        "gradient": gradient.flatten().tolist(),
        **{e: counters["aot_autograd"][e] for e in EVENTS},
    }


def answer(requests):
    results = []
    for request in requests:
        front_end, *options = request.split(",")
        results.append(run(front_end, dict.fromkeys(options, True)))
    print(json.dumps(results), flush=True)


def import_the_compiler():
    """A first compilation imports most of Inductor, which takes seconds in every process.

    Without gradients, after which CUDA builds of torch 2.15 let no fork compute any.
    """
    torch.compile(lambda x: x @ x)(torch.ones(2, 2))


if __name__ == "__main__":
    import_the_compiler()
    assert not any(name.startswith("torch_streamkl") for name in sys.modules)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            answer(line.split())
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit("a process failed")
