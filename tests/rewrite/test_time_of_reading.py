"""Reading and matching take time in proportion to the program."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from tests.support.read_programs import capture
from torch_streamkl.fx_passes.closed_forms.match import match_program
from torch_streamkl.fx_passes.reading.reader import read


def inputs() -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    every = [torch.randn(5, 4, generator=make, dtype=torch.float64) for _ in range(4)]
    return [x.requires_grad_() for x in every]


def bisection(steps: int) -> Callable[..., Tensor]:
    """A sparsemax by bisection next to a divergence: each step sums what the last one gave."""

    def loss(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        s, t = q @ k.mT, (qt @ kt.mT).softmax(-1)
        high = s.amax(-1, keepdim=True)
        low = high - 1
        for _ in range(steps):
            middle = (low + high) / 2
            is_above = torch.relu(s - middle).sum(-1, keepdim=True) > 1
            low, high = torch.where(is_above, middle, low), torch.where(is_above, high, middle)
        kl = (t * (t.log() - s.log_softmax(-1))).sum()
        return kl + (torch.relu(s - low) * s).sum()

    return loss


def many(nodes: int) -> Callable[..., Tensor]:
    """Losses of pairs, and what a network computes between them."""

    def loss(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        total, x = q.new_zeros(()), qt
        for _ in range(nodes // 50):
            for _ in range(20):
                x = torch.tanh(x * 1.01)
            s, t = q @ k.mT, x @ kt.mT
            total = total + (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum()
        return total

    return loss


def seconds(loss: Callable[..., Tensor]) -> tuple[float, int]:
    """Of this process, for reading and matching; and how many closed forms there are."""
    gm = capture(loss, inputs())
    start = time.process_time()
    reading = read(gm, lambda node: True)
    (results,) = next(n for n in gm.graph.nodes if n.op == "output").args
    found = [match_program(reading.array(x).expr).closed for x in results]
    return time.process_time() - start, sum(map(len, found))


def test_bisections_of_many_steps() -> None:
    seconds(bisection(2))
    (few, _), (many_, closed) = seconds(bisection(12)), seconds(bisection(50))
    assert closed == 1
    assert many_ < 12 * few + 0.5


def test_graphs_of_many_nodes() -> None:
    seconds(many(50))
    (few, _), (large, closed) = seconds(many(200)), seconds(many(800))
    assert closed == 16
    assert large < 12 * few + 0.5


def chain(nodes: int) -> fx.Graph:
    """What a network computes after a product, an operation after the other."""
    graph, value = fx.Graph(), torch.randn(4, 4)
    made = [graph.placeholder(name) for name in ("x", "y")]
    aten = torch.ops.aten
    made.append(graph.call_function(aten.mm.default, tuple(made)))
    while len(made) < nodes:
        made.append(graph.call_function(aten.mul.Tensor, (made[-1], 1.01)))
        made.append(graph.call_function(aten.tanh.default, (made[-1],)))
        made.append(graph.call_function(aten.add.Tensor, (made[-1], made[-3])))
        made.append(graph.call_function(aten.t.default, (made[-1],)))
    graph.output(made[-1])
    for node in made:
        node.meta["val"] = value
    return graph


@pytest.mark.slow
def test_graphs_of_20000_nodes() -> None:
    read(chain(100))
    times = []
    for nodes in (1_000, 20_000):
        graph = chain(nodes)
        start = time.process_time()
        assert len(read(graph).arrays) >= nodes
        times.append(time.process_time() - start)
    assert times[1] < 60 * times[0] + 0.5
