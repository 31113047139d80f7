"""attention_kl as an operator: schema, fake, autograd, autocast, vmap, FLOPs and so on."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from tests.support.compiling import compile_rewritten
from tests.support.problems import CASES, INPUTS, Spec, build
from tests.support.tolerances import check_call
from torch_streamkl import (
    attention_kl,
    attention_kl_varlen,
    checks,
    inductor_options,
    row_program,
)
from torch_streamkl.attention import arguments, heuristics, ops, torch_impl
from torch_streamkl.attention.ops import problem_of
from torch_streamkl.attention.problem import NeedsGrad
from torch_streamkl.caches import Bounded
from torch_streamkl.program.divergences import DIVERGENCES
from torch_streamkl.registration import WITHOUT_AUTOGRAD
from torch_streamkl.runtime import devices

SMALL = Spec(heads=2, seqlen_q=5, seqlen_k=7, student_dim=4, teacher_dim=4)


class SeenOperators(TorchDispatchMode):
    """Names of the operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def tensors_of(spec: Spec = SMALL, wanted: str = "") -> list[Tensor]:
    """q and k of both sides; ``needs_grad`` names the side with gradient, both by default."""
    tensors = build(spec).tensors
    return [tensors[n].detach().requires_grad_(n.startswith(wanted)) for n in INPUTS]


def operator_arguments(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of ops.attention_kl for a feature."""
    spec = CASES[name]
    if spec.packed is None:
        spec = replace(spec, seqlen_q=min(spec.seqlen_q, 6), seqlen_k=min(spec.seqlen_k, 9))
    return arguments_of(spec), {}


def arguments_of(spec: Spec) -> tuple[Any, ...]:
    """Positional arguments of ops.attention_kl for a spec."""
    call = build(spec)
    options = call.options
    public = {**call.tensors, **options}
    inputs = arguments.Inputs(*(public.get(n) for n in arguments.Inputs._fields))
    layout = arguments.PACKED if spec.packed is not None else spec.layout
    given = {**arguments.Settings._field_defaults, **public, "deterministic": False}
    given |= {"layout": layout, "impl": "torch"}
    given |= {"head_reduction": public.get("head_reduction")}
    settings = arguments.Settings(*(given[n] for n in arguments.Settings._fields))
    checked = list(arguments.checked_options(inputs, settings))
    if call.fill is not None:
        checked[6] = call.fill
    return (*arguments.operands(inputs, settings), *checked)


def test_schema_is_functional_and_explicit() -> None:
    for operator in (ops.attention_kl, ops.attention_kl_backward):
        assert not operator._schema.is_mutable
        assert torch.Tag.pt2_compliant_tag in operator.tags
    assert str(ops.attention_kl._schema).startswith(
        "torch_streamkl::attention_kl(Tensor student_q, Tensor student_k, Tensor teacher_q"
    )


# ---------------------------------------------------------------------------------- direct calls
@pytest.mark.parametrize(
    "name", ["forward_kl", "js", "sink", "varlen", "head_mean", "layout_bnhd"]
)
def test_direct_call_and_operator_give_the_same_bits(name: str) -> None:
    call = build(CASES[name])
    plain = call.value_and_gradients("torch")
    with SeenOperators() as seen:
        watched = call.value_and_gradients("torch")
    assert "torch_streamkl.attention_kl.default" in seen.names
    assert "torch_streamkl.attention_kl_backward.default" in seen.names
    for output, expected in plain.items():
        assert torch.equal(watched[output], expected)


def test_direct_call_needs_no_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "attention_kl", None)
    monkeypatch.setattr(ops, "attention_kl_backward", None)
    inputs = tensors_of()
    torch.autograd.grad(attention_kl(*inputs).sum(), inputs)


def test_direct_call_saves_its_inputs_for_autograd() -> None:
    """Hooks on saved tensors see those of a direct call, and so do autograd's own checks."""
    inputs = [x.detach().requires_grad_() for x in tensors_of()]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        attention_kl(*inputs)
    assert [x.data_ptr() for x in saved[2:]] == [x.data_ptr() for x in inputs]
    value = attention_kl(*inputs)
    with torch.no_grad():
        inputs[0].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()


def test_checks_are_remembered_for_one_metadata_only() -> None:
    inputs = tensors_of()
    checks._verdicts.clear()
    attention_kl(*inputs)
    attention_kl(*(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs))
    assert len(checks._verdicts) == 1
    attention_kl(*inputs, is_causal=True)
    attention_kl(*(x.double() for x in inputs))
    assert len(checks._verdicts) == 3
    bias = torch.zeros(5, 7)
    attention_kl(*inputs, student_bias=bias)
    with pytest.raises(NotImplementedError, match="student_bias gets no gradient"):
        attention_kl(*inputs, student_bias=bias.requires_grad_())


def test_the_operator_itself_refuses_gradients_that_it_has_not() -> None:
    x, lse = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, requires_grad=True)
    value = ops.attention_kl(x, x, x, x, teacher_lse=lse, head_mean=True)[0]
    with pytest.raises(NotImplementedError, match="teacher_lse gets no gradient"):
        value.sum().backward()


def test_a_full_cache_lets_everything_go() -> None:
    cache: Bounded[int] = Bounded(2)
    for i in range(5):
        cache[i] = i * i
    assert dict(cache) == {4: 16}
    cache[5] = 25
    assert dict(cache) == {4: 16, 5: 25}


def test_learned_scale_is_not_kept_alive() -> None:
    inputs = tensors_of()
    checks._verdicts.clear()
    scale = torch.tensor(0.2, requires_grad=True)
    attention_kl(*inputs, student_scale=scale).sum().backward()
    assert scale.grad is not None
    assert scale.grad.abs() > 0
    assert not checks._verdicts


# -------------------------------------------------------------------------------- rest of torch
def test_operator_ignores_autocast_inside() -> None:
    inputs = [x.detach() for x in tensors_of()]
    with torch.autocast("cpu", torch.bfloat16):
        inside = ops.attention_kl(*inputs)[0]
    assert torch.equal(inside, ops.attention_kl(*inputs)[0])


@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (1, 2, 0, 1), (0, 0, None, None)])
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    inputs = []
    for dim in in_dims:
        x = torch.randn(3, 2, 2, 5, 4)
        inputs.append(x[0] if dim is None else x.movedim(0, dim).contiguous())
    function = partial(attention_kl, is_causal=True, key_lengths=torch.tensor([5, 3]))
    mapped = torch.vmap(function, in_dims=in_dims)(*inputs)
    for index in range(3):
        one = [
            x if d is None else x.select(d, index) for x, d in zip(inputs, in_dims, strict=True)
        ]
        torch.testing.assert_close(mapped[index], function(*one))


@pytest.mark.parametrize("name", ["attn_mask", "key_lengths", "student_bias"])
def test_vmap_over_an_option_alone(name: str) -> None:
    x = torch.randn(2, 2, 3, 4)
    values = {
        "attn_mask": torch.rand(4, 3, 3) > 0.3,
        "key_lengths": torch.tensor([[1, 2], [3, 0], [2, 2], [3, 3]]),
        "student_bias": torch.randn(4, 1, 1, 3, 3),
    }[name]
    mapped = torch.vmap(lambda y: attention_kl(x, x, x * 2, x, **{name: y}))(values)
    want = torch.stack([attention_kl(x, x, x * 2, x, **{name: y}) for y in values])
    torch.testing.assert_close(mapped, want)


def test_vmap_refuses_what_has_no_batch() -> None:
    inputs = [x.detach() for x in tensors_of()]
    with pytest.raises(
        NotImplementedError, match="vmap over student_sink is not supported; map over"
    ):
        torch.vmap(lambda sink: attention_kl(*inputs, student_sink=sink))(torch.zeros(3, 2))


def test_flops() -> None:
    spec = Spec(heads=4, student_kv_heads=2, student_dim=8, teacher_dim=16)
    inputs = tensors_of(spec, wanted="student")
    rows, keys = 4 * 19, 37
    student, teacher = 2 * rows * keys * 8, 2 * rows * keys * 16
    with FlopCounterMode(display=False) as counter:
        value = attention_kl(*inputs)
    assert counter.get_total_flops() == student + teacher
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(value.sum(), inputs[:2])
    assert counter.get_total_flops() == 3 * student + teacher


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    inputs = tensors_of()
    expected = torch.autograd.grad(attention_kl(*inputs).sum(), inputs)
    value = checkpoint(attention_kl, *inputs, use_reentrant=use_reentrant)
    value.sum().backward()
    for x, gradient in zip(inputs, expected, strict=True):
        assert x.grad is not None
        assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_selective_checkpointing(policy: CheckpointPolicy) -> None:
    inputs = tensors_of()
    expected = torch.autograd.grad(attention_kl(*inputs).sum(), inputs)

    def choose(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if operator is ops.attention_kl else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, choose)
    counted = mock.Mock(wraps=attention_kl)
    value = checkpoint(counted, *inputs, use_reentrant=False, context_fn=context)
    with SeenOperators() as seen:
        gradients = torch.autograd.grad(value.sum(), inputs)
    recomputed = seen.names.count("torch_streamkl.attention_kl.default")
    assert recomputed == (policy is CheckpointPolicy.MUST_RECOMPUTE)
    assert counted.call_count == 2
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


class Loss(torch.nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        return attention_kl(*inputs, is_causal=True, reduction="mean")


def test_export_round_trip(tmp_path: Any) -> None:
    inputs = tuple(x.detach() for x in tensors_of())
    rows, keys = torch.export.Dim("rows", min=2), torch.export.Dim("keys", min=2)
    shapes = (({2: rows}, {2: keys}, {2: rows}, {2: keys}),)
    program = torch.export.export(Loss(), inputs, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "loss.pt2")
    loaded = torch.export.load(tmp_path / "loss.pt2").module()
    targets = {str(node.target) for node in program.graph.nodes}
    assert "torch_streamkl.attention_kl.default" in targets
    longer = tuple(torch.randn(1, 2, n, 4) for n in (9, 11, 9, 11))
    for call in (inputs, longer):
        torch.testing.assert_close(loaded(*call), Loss()(*call))


@pytest.mark.parametrize(
    ("options", "is_linear", "autocast"),
    [
        (inductor_options, True, False),
        (None, False, True),
        *(
            pytest.param(options, is_linear, autocast, marks=pytest.mark.slow)
            for options, is_linear, autocast in (
                (inductor_options, True, True), (inductor_options, False, False),
                (inductor_options, False, True), (None, True, True), (None, True, False),
                (None, False, False),
            )
        ),
    ],
)  # fmt: skip
def test_compiled_graphs_call_operators_without_autograd(
    options: Any, autocast: bool, is_linear: bool
) -> None:
    inputs = tensors_of()

    def loss(*tensors: Tensor) -> Tensor:
        student, teacher = (q @ k.transpose(-1, -2) for q, k in (tensors[:2], tensors[2:]))
        student, teacher = student.float().log_softmax(-1), teacher.float().softmax(-1)
        rows = F.kl_div(student, teacher, reduction="none").sum(-1)
        return (rows if is_linear else rows.log1p()).mean()

    if options is None:
        compiled = compile_rewritten(loss, inner="inductor", strict=True)
    else:
        compiled = torch.compile(loss, options=options(strict=True))
    with torch.autocast("cpu", enabled=autocast):
        expected = torch.autograd.grad(loss(*inputs), inputs)
        torch.autograd.grad(compiled(*inputs), inputs)  # compiles
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            got = torch.autograd.grad(compiled(*inputs), inputs)
    names = {event.key for event in profiled.key_averages() if "attention_kl" in event.key}
    called = {"_attention_kl", "_attention_kl_backward"}
    if is_linear:  # the loss fixes the weights of rows
        called = {"_attention_kl_with_gradients"}
    assert names == {f"torch_streamkl::{name}" for name in called}
    tolerance = {"rtol": 0.02, "atol": 1e-3} if autocast else {}
    torch.testing.assert_close(got, expected, **tolerance)


def test_flops_of_a_compiled_graph() -> None:
    inputs = tensors_of()
    outputs = ops.attention_kl(*inputs)
    backward = (torch.ones_like(outputs[0]), *outputs[1:], [True] * 4, *inputs)
    counts, of_eager = [], (ops.attention_kl, ops.attention_kl_backward)
    for forward_op, backward_op in (of_eager, [WITHOUT_AUTOGRAD[x] for x in of_eager]):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            forward_op(*inputs)
            backward_op(*backward)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_inputs_are_neither_changed_nor_copied() -> None:
    call = build(CASES["strides_padded"])
    before = {name: (x._version, x.detach().clone()) for name, x in call.tensors.items()}
    check_call(call, "torch")
    for name, (version, content) in before.items():
        assert call.tensors[name]._version == version
        assert torch.equal(call.tensors[name], content)


def test_teacher_groups_that_are_no_multiple_of_the_ratio() -> None:
    """24 teacher heads on 8 key heads, averaged for 12: blocks of heads hold whole key heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 12, 128, 4), (1, 4, 512, 4), (1, 24, 128, 4), (1, 8, 512, 4))
    q, k, tq, tk = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )
    log_s = (q @ k.repeat_interleave(3, 1).mT / 2).log_softmax(-1)
    p = (tq @ tk.repeat_interleave(3, 1).mT / 2).softmax(-1).unflatten(1, (12, 2)).mean(2)
    want = (p * (p.log() - log_s)).sum(-1)
    got = attention_kl(q, k, tq, tk, head_reduction="mean", impl="torch")
    torch.testing.assert_close(got, want)
    tensors = (q, k, tq, tk)
    for a, b in zip(
        torch.autograd.grad(got.sum(), tensors),
        torch.autograd.grad(want.sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(0, 2, 3, 5), (2, 2, 0, 5), (2, 2, 3, 0)])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
def test_nothing_at_all(shape: tuple[int, ...], reduction: str) -> None:
    """No batch, query or key: rows of 0, a sum of 0 with gradients 0, and torch's mean."""
    batch, heads, n, m = shape
    q = torch.randn(batch, heads, n, 4, requires_grad=True)
    k = torch.randn(batch, heads, m, 4, requires_grad=True)
    value = attention_kl(q, k, q, k, reduction=reduction)
    rows = torch.zeros(batch, heads, n)
    means = {"mean": rows.mean(), "batchmean": rows.sum() / torch.tensor(float(batch))}
    want = {"none": rows, "sum": rows.sum(), **means}[reduction]
    torch._dynamo.reset()
    compiled = torch.compile(attention_kl, backend="aot_eager", fullgraph=True)
    for found in (value, compiled(q, k, q, k, reduction=reduction)):
        torch.testing.assert_close(found, want, equal_nan=True)
        grads = torch.autograd.grad(found.sum(), (q, k))
        assert all(not g.any() for g in grads) or found.isnan().all()


def test_operands_under_autocast() -> None:
    """As a matmul's: cast to autocast's type whatever they are, and refused without it."""
    x = torch.randn(1, 2, 3, 4)
    mixed = (x, x.bfloat16(), x.half(), x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            attention_kl(*mixed), attention_kl(x, x, x, x), atol=1e-2, rtol=1
        )
        with pytest.raises(ValueError, match="must share dtype, got"):
            attention_kl(x.double(), x, x, x)
    with pytest.raises(ValueError, match="must share dtype"):
        attention_kl(*mixed)


def test_slower_choice_on_a_device_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(1, 1, 2, 8, device="meta")
    problem, _ = ops.problem_of(x, x, x, x)
    devices.warn_once.cache_clear()
    with caplog.at_level("WARNING", logger="torch_streamkl"):
        assert heuristics.select_implementation(problem, "auto") == "torch"
    assert "which is slower: the kernel needs a GPU" in caplog.text


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_lengths_are_checked_in_compiled_graphs(backend: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(2, 1, 5, 4)
    call = torch.compile(lambda lengths: attention_kl(x, x, x, -x, key_lengths=lengths),
                         backend=backend, fullgraph=True)  # fmt: skip
    lengths = torch.tensor([5, 0])
    torch.testing.assert_close(call(lengths), attention_kl(x, x, x, -x, key_lengths=lengths))
    with pytest.raises(ValueError, match=r"key_lengths must be in \[0, 5\].*, got 6"):
        call(lengths + 1)


@pytest.mark.parametrize("has_gradient", [False, True])
def test_meta_tensors_of_packed_sequences(has_gradient: bool) -> None:
    """Their offsets have no values."""
    q, k = (torch.randn(n, 2, 8, device="meta", requires_grad=has_gradient) for n in (5, 7))
    offsets = torch.zeros(3, dtype=torch.int32, device="meta")
    value = attention_kl_varlen(
        q, k, q.detach(), k.detach(), cu_seqlens_q=offsets, cu_seqlens_k=offsets,
        max_seqlen_q=5, max_seqlen_k=7, is_causal=True,
    )  # fmt: skip
    assert (value.device.type, value.shape) == ("meta", (2, 5))
    if has_gradient:
        grads = torch.autograd.grad(value.sum(), (q, k))
        assert [x.shape for x in grads] == [q.shape, k.shape]


def test_numbers_of_numpy() -> None:
    """Bounds of a window become part of a row program's text."""
    x, window = torch.randn(1, 2, 5, 4), (np.int64(2), np.int32(0))
    dots = {"s": (x, x)}

    def last(e: Any) -> Any:
        return e.s.sum("key")

    for call in (partial(attention_kl, x, x, x, 2 * x), partial(row_program, last, dots=dots)):
        assert torch.equal(call(window=window), call(window=(2, 0)))


@pytest.mark.parametrize("shape", [(1, 0, 4, 5), (0, 2, 4, 5), (1, 2, 0, 5), (1, 2, 4, 0)])
def test_empty_problems_of_compiled_losses(shape: tuple[int, ...]) -> None:
    """The rewrite may make heads of rows that data selects: there may be none."""
    batch, heads, n, m = shape
    tensors = [torch.randn(batch, heads, length, 8) for length in (n, m, n, m)]
    problem = problem_of(*tensors, functional=DIVERGENCES["forward_kl"])[0]
    assert problem.student.group == 1
    value, stats = torch_impl.forward(problem)
    assert value.shape == (batch, heads, n) and not value.any()
    needs = NeedsGrad(True, True, True, True)
    found = torch_impl.backward(problem, stats, torch.ones_like(value), needs)
    for gradient, x in zip(found[:4], tensors, strict=True):
        assert gradient is not None and gradient.shape == x.shape and not gradient.any()
