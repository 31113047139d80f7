"""`import torch_streamkl` loads what the operators need and no more, and loses nothing by it."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor

from torch_streamkl import attention_kl, linear_kl, row_program

# In a process of its own, and in this order: flop_counter is imported after us.
PROGRAM = """
import sys
import torch
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
"""


def test_import_and_eager_calls_load_no_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    modules, *counts = done.stdout.splitlines()
    foreign = [name for name in modules.split() if name.split(".")[0] != "torch_streamkl"]
    assert foreign == []  # no torch._dynamo, torch._inductor, triton, sympy
    assert len(modules.split()) < 100  # 97, in 0.3 s of CPU time
    attention, head = 2 * (2 * 8 * 8 * 4), 2 * (3 * 7 * 4)  # student and teacher, of each product
    assert counts == [str(2 * attention), str(2 * head), str(2 * attention)]


WARM = """
import sys
from torch_streamkl.fx_passes import gradients_in_forward, inductor_calls, inductor_double_backward
assert inductor_calls.can_install() and inductor_double_backward.can_install()
assert gradients_in_forward.can_sort()
slow = "lowering", "pattern_matcher", "codegen.wrapper", "scheduler"
print([name for name in slow if f"torch._inductor.{name}" in sys.modules])
"""


def test_a_graph_from_a_cache_needs_no_module_that_compiles() -> None:
    """Importing them took more of a warm start than the rewrite."""
    done = subprocess.run(
        [sys.executable, "-c", WARM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "[]"


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
