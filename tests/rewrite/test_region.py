"""Which nodes of a graph are analysed: up to the operands of scores, with writes to them."""

import torch

from torch_streamkl.fx_passes.capture.region import find_region
from torch_streamkl.fx_passes.fx_utils.nodes import name_of


def region_of(program, *inputs):
    """The operations that are analysed, and what they read of the rest."""
    found = []

    def look(gm, _):
        region = find_region(gm.graph)
        assert region is not None
        found.append(([name_of(n) for n in region.nodes], [name_of(n) for n in region.leaves]))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(program, backend=look, fullgraph=True)(*inputs)
    return found[0]


def test_views_of_operands_are_inside_and_what_makes_them_is_not():
    def program(x, y):
        q, k = x.exp().unsqueeze(0), y.sin()
        s = q @ k.transpose(-1, -2).expand(1, 4, 5)
        return (s.log_softmax(-1) * k.view_as(y)[0, 0]).sum()

    nodes, leaves = region_of(program, torch.randn(3, 4), torch.randn(5, 4))
    assert {"unsqueeze", "transpose", "expand", "matmul", "log_softmax"} <= set(nodes)
    assert "exp" not in nodes and "exp" in leaves


def test_an_operand_of_two_tensors_is_no_view():
    """Indices are computed by the rest of the program."""

    def program(x, y, i):
        return (x.exp()[i.abs()] @ y.T).log_softmax(-1).sum()

    inputs = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([2, 0])
    nodes, leaves = region_of(program, *inputs)
    assert nodes.count("getattr") + nodes.count("t") + nodes.count("transpose") <= 1
    assert "getitem" not in nodes and "getitem" in leaves


def test_a_write_to_scores_is_inside():
    """No edge leads from it to what reads the scores."""

    def program(x, y, mask):
        s = x @ y.T
        s[:, :2].masked_fill_(mask, -1e4)
        other = x + 1
        other.mul_(2)
        return s.log_softmax(-1).sum() + other.sum()

    nodes, _ = region_of(program, torch.randn(3, 4), torch.randn(5, 4), torch.ones(3, 2).bool())
    assert "masked_fill_" in nodes and "mul_" not in nodes
