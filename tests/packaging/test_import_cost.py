"""`import torch_streamkl` loads what the operators need and no more, and loses nothing by it."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor

from torch_streamkl import attention_kl, linear_kl, row_program

# In a process of its own, which takes seconds to import torch, and in this order: flop_counter is
# imported after us, and what compiles after what needs none of it.
PROGRAM = """
import sys
import torch
torch.ones(1, requires_grad=True).sum().backward()  # torch 2.15 imports nested tensors for it
before = set(sys.modules)
import torch_streamkl
q, k = torch.randn(2, 1, 2, 8, 4)
x, w = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4)
torch_streamkl.attention_kl(q, k, q, k, reduction="mean")
torch_streamkl.linear_kl(x, w, x.detach(), w, reduction="mean").backward()
print(*sorted(set(sys.modules) - before))
from torch.utils.flop_counter import FlopCounterMode
def flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()
print(flops(lambda: torch_streamkl.attention_kl(q, k, q, k)))
print(flops(lambda: torch_streamkl.linear_kl(x, w, x.detach(), w)))
program = lambda e: (e.s - e.t).square().sum("key")
print(flops(lambda: torch_streamkl.row_program(program, dots={"s": (q, k), "t": (k, q)})))

# a graph from a cache needs no module that compiles: they took more of a warm start than we do
from torch_streamkl.fx_passes import gradients_in_forward, inductor_calls, inductor_double_backward
assert inductor_calls.can_install() and inductor_double_backward.can_install()
assert gradients_in_forward.can_sort()
slow = "lowering", "pattern_matcher", "codegen.wrapper", "scheduler"
assert not [name for name in slow if f"torch._inductor.{name}" in sys.modules]

# an import changes nothing of torch
import torch._inductor.compile_fx
from torch._dynamo.backends.distributed import DDPOptimizer
before = DDPOptimizer.compile_fn, torch._inductor.compile_fx.compile_fx
import torch_streamkl.fx_passes.backend, torch_streamkl.fx_passes.explain
import torch_streamkl.fx_passes.verify, torch_streamkl.fx_passes.enable
assert (DDPOptimizer.compile_fn, torch._inductor.compile_fx.compile_fx) == before
with torch_streamkl.enable():
    pass
assert torch._inductor.compile_fx.compile_fx is before[1]
torch_streamkl.fx_passes.backend.streamkl
assert DDPOptimizer.compile_fn.__wrapped__ is before[0]
"""


def test_imports_load_no_compiler_and_change_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    modules, *counts = done.stdout.splitlines()
    foreign = [name for name in modules.split() if name.split(".")[0] != "torch_streamkl"]
    assert foreign == []  # no torch._dynamo, torch._inductor, triton, sympy
    assert len(modules.split()) < 105  # 101, in 0.3 s of CPU time
    attention, head = 2 * (2 * 8 * 8 * 4), 2 * (3 * 7 * 4)  # student and teacher, of each product
    assert counts == [str(2 * attention), str(2 * head), str(2 * attention)]


def test_a_row_program_is_one_graph_break() -> None:
    q, k = torch.randn(2, 1, 2, 8, 4)

    def loss(q: Tensor, k: Tensor) -> Tensor:
        rows = row_program(lambda e: e.s.square().sum("key"), dots={"s": (q + 1, k)})
        return rows.sum() * 2

    explained = torch._dynamo.explain(loss)(q, k)
    assert explained.graph_break_count == 1
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(loss, backend="eager")
    expected = 2 * ((q + 1) @ k.mT).square().sum()
    for _ in range(2):
        torch.testing.assert_close(compiled(q, k), expected)
    assert torch._dynamo.utils.counters["frames"]["total"] == 2  # what is before it, and after


def test_checks_of_a_call_are_constants_of_a_graph() -> None:
    torch._dynamo.reset()
    q, k = torch.randn(2, 1, 2, 8, 4)
    x, w = torch.randn(3, 4), torch.randn(7, 4)

    def loss(q: Tensor, k: Tensor) -> Tensor:
        heads = linear_kl(x, w, x + 1, w, divergence="js", beta=0.3).sum()
        return attention_kl(q, k, k, q, divergence="js", beta=0.3).sum() + heads

    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k), loss(q, k))
