"""A compiled graph calls a site in the place of an operator."""

import pytest
import torch
from torch._inductor.codegen import custom_extern_kernel_codegen as table
from torch._inductor.utils import run_and_get_code
from torch.utils.flop_counter import FlopCounterMode

from tests.support.losses import kd
from torch_streamkl import attention_kl
from torch_streamkl.attention import query_tiles
from torch_streamkl.fx_passes import backend, inductor_calls

OPERATORS = ("torch.ops.torch_streamkl._attention_kl.default(", "_attention_kl_backward.default(")
SITES = ("CompiledForward(", "CompiledBackward(")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """The same blocks in compiled graphs and direct calls: results are the same bits."""
    torch._dynamo.reset()
    monkeypatch.setattr(query_tiles, "limit", lambda _: "are tested in test_query_tiles.py")


def rows(q, k, teacher_q, teacher_k, **options):
    # nothing else: Inductor compiles no kernel of its own
    return attention_kl(q, k, teacher_q, teacher_k, reduction="none", **options)


def tensors(seqlen=12):
    generator = torch.Generator().manual_seed(seqlen)
    found = [torch.randn(2, 3, seqlen, 8, generator=generator) for _ in range(4)]
    return [x.requires_grad_(i < 2) for i, x in enumerate(found)]


def step(function, inputs):
    value = function(*inputs)
    return [value.detach(), *torch.autograd.grad(value, inputs[:2], torch.ones_like(value))]


def compiled(dynamic=False):
    # a graph from the cache would have no code to look at
    options = {"fx_graph_cache": False}
    return torch.compile(rows, backend="streamkl", dynamic=dynamic, options=options)


def check_code(function, present, absent, eager=rows):
    inputs = tensors()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        found, codes = run_and_get_code(step, function, inputs)
    code = "\n".join(codes)
    calls = "\n".join(line for line in code.splitlines() if " = " in line)
    assert all(x in calls for x in present)
    assert not any(x in calls for x in absent)
    # a compiled graph's blocks on a CPU add up in another order
    torch.testing.assert_close(found, step(eager, inputs))


def test_fixed_sizes_are_sites():
    check_code(compiled(), (*SITES, "4, False)", "4, False, ("), OPERATORS)


def test_sizes_that_vary():
    function = compiled(dynamic=True)
    check_code(function, (*SITES, "4, True)", "4, True, ("), OPERATORS)
    with torch.compiler.set_stance("fail_on_recompile"):
        for seqlen in (12, 16, 12, 9, 12):
            inputs = tensors(seqlen)
            torch.testing.assert_close(step(function, inputs), step(rows, inputs))


def test_options_that_vary_are_operator_calls():
    def windowed(*inputs):
        return rows(*inputs, window=(inputs[0].shape[2] // 2, None))

    options = {"fx_graph_cache": False}
    function = torch.compile(windowed, backend="streamkl", dynamic=True, options=options)
    check_code(function, OPERATORS, SITES, windowed)


def test_operator_calls_without_the_table(monkeypatch):
    assert inductor_calls.install()
    for name in list(table.CUSTOM_EXTERN_KERNEL_CODEGEN):
        if "streamkl" in name:
            monkeypatch.delitem(table.CUSTOM_EXTERN_KERNEL_CODEGEN, name)
    check_code(compiled(), OPERATORS, SITES)


def test_an_inductor_without_the_table(monkeypatch):
    monkeypatch.delattr(table, "CUSTOM_EXTERN_KERNEL_CODEGEN")
    assert not inductor_calls.install.__wrapped__()


def test_the_report_says_that_the_table_is_missing(monkeypatch):
    def loss(q, k, teacher_q, teacher_k):
        return kd(q @ k.mT, teacher_q @ teacher_k.mT)

    for has_table in (True, False):
        torch._dynamo.reset()
        monkeypatch.setattr(inductor_calls, "can_install", lambda found=has_table: found)
        reports = []

        def rewritten(gm, _, found=reports):
            found.append(backend.rewrite_and_report(gm, backend.split_options({})[0]))
            return gm.forward

        torch.compile(loss, backend=rewritten)(*tensors())
        assert [report.num_fused for report in reports] == [1]
        assert (inductor_calls.WITHOUT_TABLE in reports[0].notes) != has_table


def test_autocast_does_not_reach_into_a_site():
    function, inputs = compiled(), tensors()
    expected = step(rows, inputs)
    step(function, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        cast = [x.detach().bfloat16().requires_grad_(x.requires_grad) for x in inputs]
        found, eager = step(compiled(), cast), step(rows, cast)
    torch.testing.assert_close(found, eager)
    torch.testing.assert_close(step(function, inputs), expected)


def test_who_watches_operators_sees_them():
    function, inputs = compiled(), tensors()
    step(function, inputs)
    with torch.profiler.profile() as profile:
        step(function, inputs)
    names = {event.key for event in profile.key_averages()}
    assert {"torch_streamkl::_attention_kl", "torch_streamkl::_attention_kl_backward"} <= names
    with FlopCounterMode(display=False) as counted:
        step(function, inputs)
    pair = 2 * 2 * 3 * 12 * 12 * 8  # of one product of queries and keys
    assert counted.get_total_flops() == 2 * pair + 4 * pair
