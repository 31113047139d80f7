"""Of equal calls torch runs one: traces, recorded values and memory are as if it ran them all."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from torch_streamkl.fx_passes.capture import retrace
from torch_streamkl.fx_passes.capture.region import find_region
from torch_streamkl.fx_passes.fx_utils.nodes import MEMORY, example, is_view, name_of, storage_of
from torch_streamkl.fx_passes.fx_utils.torch_names import FakeTensor
from torch_streamkl.fx_passes.pipeline import rewrite


def captured(program, inputs, dynamic):
    found = []

    def look(gm, _):
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(program, backend=look, fullgraph=True, dynamic=dynamic)(*inputs)
    return found[0]


def text_of(trace):
    for node in trace.graph.nodes:
        value = node.meta.get("val")
        about = ()
        if isinstance(value, Tensor):
            about = str(value.shape), str(value.stride()), value.dtype
        yield node.format_node(), *about, trace.origin.get(node), trace.outer.get(node)


def traced(gm, monkeypatch):
    """Traces with copies and without; and how many calls were traced with them, and in all."""
    region = find_region(gm.graph)
    assert region is not None
    count = 0
    trace = retrace._Recorder._traced

    def counted(self, *given):
        nonlocal count
        count += 1
        return trace(self, *given)

    monkeypatch.setattr(retrace._Recorder, "_traced", counted)
    made, (once, count) = retrace.trace_region(gm, region), (count, 0)
    monkeypatch.setattr(retrace, "may_share", lambda nodes, written: False)
    expected = retrace.trace_region(gm, region)
    return [*text_of(made), once], [*text_of(expected), count]


def layers(x, y, mask, number):
    """Views, casts that return their input, several results, and a total that is written to."""
    total = x.new_zeros(())
    for _ in range(number):
        q, k = x.view(2, 5, 2, 4).transpose(1, 2), y.view(2, 5, 2, 4).transpose(1, 2).float()
        s, t = (q @ k.mT).float(), (k.contiguous() @ k.mT).float()
        p, r = (t.masked_fill(mask, -1e9) / 2).softmax(-1), s.softmax(-1)
        first, second = (p * (p.clamp_min(1e-9).log() - r.clamp_min(1e-9).log())).chunk(2, 1)
        total += first.sum(-1).mean() + second.sum(-1).mean()
        x = (p @ q).transpose(1, 2).reshape(x.shape).tanh()
    return total


def scores(x, y, mask, number):
    """A mask is written into scores, through a view: every layer has memory of its own."""
    total = x.new_zeros(())
    for _ in range(number):
        s, t = x @ y.mT, x.tanh() @ y.mT
        s[:, :2].masked_fill_(mask[:2], -1e9)
        total = total + F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="sum")
        x = x.tanh()
    return total


def inputs():
    make = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 5, 8, generator=make).requires_grad_() for _ in range(2))
    return [x, y, torch.eye(5, dtype=torch.bool)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", [layers, scores])
def test_the_trace_is_that_of_all_calls(program, dynamic, monkeypatch):
    gm = captured(lambda *given: program(*given, 4), inputs(), dynamic)
    (*made, once), (*expected, every) = traced(gm, monkeypatch)
    assert made == expected
    if program is layers:  # the first layer's input has no history of views
        assert once < every * 0.7
    else:
        assert once == every


def test_more_layers_are_no_more_calls(monkeypatch):
    counts = []
    for number in (3, 9):
        with monkeypatch.context() as patch:
            gm = captured(lambda *given, n=number: layers(*given, n), inputs(), False)
            counts.append(traced(gm, patch)[0][-1])
    assert counts[1] - counts[0] <= 6 * 6  # totals alone, which are written to


@pytest.mark.parametrize("dynamic", [False, True])
def test_inserted_nodes_have_values_and_memory_of_their_own(dynamic):
    """As torch says: views share the memory of what they view, other results share none."""
    gm = captured(lambda *given: layers(*given, 4).clone(), inputs(), dynamic)
    of_user = {node.name for node in gm.graph.nodes}
    assert rewrite(gm).num_fused
    memories = set()
    num_copies = 0
    for node in gm.graph.nodes:
        recorded = example(node)
        if not isinstance(recorded, FakeTensor) or node.name in of_user:
            memories.add(storage_of(node))
            continue
        given = fx.map_arg((node.args, node.kwargs), example)
        with recorded.fake_mode, torch.enable_grad():
            args, kwargs = given
            target = node.target
            if isinstance(target, str):
                target, args = getattr(args[0], target), args[1:]
            result = target(*args, **kwargs)
        for about in (Tensor.size, Tensor.stride, Tensor.storage_offset):
            assert str(about(result)) == str(about(recorded))
        assert (result.dtype, result.requires_grad) == (recorded.dtype, recorded.requires_grad)
        num_copies += MEMORY in node.meta
        memory = result.untyped_storage()._cdata
        viewed = {
            storage_of(a)
            for a in node.all_input_nodes
            if isinstance(x := example(a), Tensor) and x.untyped_storage()._cdata == memory
        }
        is_item = name_of(node) == "getitem" and not isinstance(given[0][0], Tensor)
        assert is_view(node) == bool(viewed)
        if viewed:
            assert storage_of(node) in viewed
        else:
            assert storage_of(node) not in memories or is_item
        memories.add(storage_of(node))
    assert num_copies > 20
