"""attention_kl as an operator: schema, fake, autograd, autocast, vmap, FLOPs and so on."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

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

from tests.support.covering import every
from tests.support.problems import CASES, INPUTS, Spec, build
from tests.support.tolerances import check_call
from torch_streamkl import attention_kl, checks, inductor_options
from torch_streamkl.attention import arguments, ops
from torch_streamkl.caches import Bounded
from torch_streamkl.registration import WITHOUT_AUTOGRAD

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


# ----------------------------------------------------------------------------------------- opcheck
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", every(4, CASES))
def test_opcheck(name: str) -> None:
    args, kwargs = operator_arguments(name)
    torch.library.opcheck(ops.attention_kl, args, kwargs)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("wanted", [(True, True, True, True), (True, False, False, True)])
def test_opcheck_of_the_backward(wanted: tuple[bool, ...]) -> None:
    args, _ = operator_arguments("causal")
    args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
    value, student_stats, teacher_stats = ops.attention_kl(*args)
    given = (torch.ones_like(value), student_stats, teacher_stats, list(wanted), *args)
    torch.library.opcheck(ops.attention_kl_backward, given)


def test_schema_is_functional_and_explicit() -> None:
    for operator in (ops.attention_kl, ops.attention_kl_backward):
        assert not operator._schema.is_mutable
        assert torch.Tag.pt2_compliant_tag in operator.tags
    assert str(ops.attention_kl._schema).startswith(
        "torch_streamkl::attention_kl(Tensor student_q, Tensor student_k, Tensor teacher_q"
    )


def test_fake_with_symbolic_sizes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(x.detach(), static_shapes=False) for x in tensors_of()]
    with mode:
        value, student_stats, teacher_stats = ops.attention_kl(*fakes)
    q = fakes[0]
    assert tuple(value.shape) == (q.shape[0], q.shape[1], q.shape[2])
    assert value.dtype == torch.float32
    assert tuple(student_stats.shape) == tuple(teacher_stats.shape) == (2, *value.shape)
    assert isinstance(value.shape[2], torch.SymInt)


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
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_gradient_to_one_side_only(side: str) -> None:
    inputs = tensors_of(wanted=side)
    value = attention_kl(*inputs, divergence="jeffreys")
    value.sum().backward()
    full = tensors_of()
    expected = torch.autograd.grad(attention_kl(*full, divergence="jeffreys").sum(), full)
    for x, gradient in zip(inputs, expected, strict=True):
        if x.requires_grad:
            torch.testing.assert_close(x.grad, gradient)
        else:
            assert x.grad is None


def test_autocast_casts_what_a_matmul_would() -> None:
    inputs = tensors_of()
    with torch.autocast("cpu", torch.bfloat16):
        got = attention_kl(*inputs)
        product = inputs[0] @ inputs[1].transpose(-1, -2)
    assert product.dtype == torch.bfloat16
    assert got.dtype == torch.float32
    assert torch.equal(got, attention_kl(*(x.to(torch.bfloat16) for x in inputs)))
    got.sum().backward()
    assert inputs[0].grad is not None
    assert inputs[0].grad.dtype == torch.float32


def test_operator_ignores_autocast_inside() -> None:
    inputs = [x.detach() for x in tensors_of()]
    with torch.autocast("cpu", torch.bfloat16):
        inside = ops.attention_kl(*inputs)[0]
    assert torch.equal(inside, ops.attention_kl(*inputs)[0])


@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (1, 2, 0, 1), (0, 0, None, None)])
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    torch.manual_seed(0)
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


def test_vmap_refuses_what_has_no_batch() -> None:
    inputs = [x.detach() for x in tensors_of()]
    with pytest.raises(
        NotImplementedError, match="vmap over student_sink is not supported; map over"
    ):
        torch.vmap(lambda sink: attention_kl(*inputs, student_sink=sink))(torch.zeros(3, 2))


@pytest.mark.parametrize("transform", ["grad", "jvp", "dual", "vmap of grad"])
def test_torch_func_derivatives_are_a_clear_error(transform: str) -> None:
    inputs = [x.detach() for x in tensors_of()]
    q = inputs[0]

    def loss(q: Tensor) -> Tensor:
        return attention_kl(q, *inputs[1:]).sum()

    def dual() -> None:
        with torch.autograd.forward_ad.dual_level():
            loss(torch.autograd.forward_ad.make_dual(q, q))

    calls = {
        "grad": lambda: torch.func.grad(loss)(q),
        "jvp": lambda: torch.func.jvp(loss, (q,), (q,)),
        "dual": dual,
        "vmap of grad": lambda: torch.vmap(torch.func.grad(loss))(torch.stack([q, q])),
    }
    with pytest.raises(NotImplementedError, match=r"use torch\.autograd\.grad or backward"):
        calls[transform]()


@pytest.mark.parametrize("watched", [False, True])
def test_double_backward_is_a_clear_error(watched: bool) -> None:
    inputs = tensors_of()
    with SeenOperators() if watched else nullcontext():
        (gradient, *_) = torch.autograd.grad(
            attention_kl(*inputs).sum(), inputs, create_graph=True
        )
        with pytest.raises(NotImplementedError, match="impl='reference' for higher derivatives"):
            gradient.sum().backward()


def test_double_backward_of_the_reference() -> None:
    inputs = tensors_of()
    value = attention_kl(*inputs, impl="reference").sum()
    (gradient, *_) = torch.autograd.grad(value, inputs, create_graph=True)
    gradient.square().sum().backward()
    assert inputs[1].grad is not None


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
    calls: list[str] = []
    value = checkpoint(
        _counting(calls, attention_kl), *inputs, use_reentrant=False, context_fn=context
    )
    with SeenOperators() as seen:
        gradients = torch.autograd.grad(value.sum(), inputs)
    recomputed = seen.names.count("torch_streamkl.attention_kl.default")
    assert recomputed == (policy is CheckpointPolicy.MUST_RECOMPUTE)
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def _counting(calls: list[str], function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def counted(*args: Tensor) -> Tensor:
        calls.append("call")
        return function(*args)

    return counted


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
    torch._dynamo.reset()
    inputs = tensors_of()

    def loss(*tensors: Tensor) -> Tensor:
        student, teacher = (q @ k.transpose(-1, -2) for q, k in (tensors[:2], tensors[2:]))
        student, teacher = student.float().log_softmax(-1), teacher.float().softmax(-1)
        rows = F.kl_div(student, teacher, reduction="none").sum(-1)
        return (rows if is_linear else rows.log1p()).mean()

    if options is None:
        compiled = torch.compile(loss, backend="streamkl", options={"streamkl.strict": True})
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
    counts = []
    for operators in (WITHOUT_AUTOGRAD.keys(), WITHOUT_AUTOGRAD.values()):
        forward_op, backward_op, *_ = operators
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            forward_op(*inputs)
            backward_op(*backward)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_compiled_call() -> None:
    torch._dynamo.reset()
    inputs = tensors_of()
    function = partial(attention_kl, is_causal=True, divergence="js", student_clamp=1e-4)
    expected = torch.autograd.grad(function(*inputs).sum(), inputs)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(*inputs).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", ["forward_kl", "js", "gqa", "varlen"])
def test_same_bits_on_every_run(name: str) -> None:
    call = build(CASES[name])
    first, second = (call.value_and_gradients("torch") for _ in range(2))
    assert all(torch.equal(first[output], second[output]) for output in first)


def test_inputs_are_neither_changed_nor_copied() -> None:
    call = build(CASES["strides_padded"])
    before = {name: (x._version, x.detach().clone()) for name, x in call.tensors.items()}
    check_call(call, "torch")
    for name, (version, content) in before.items():
        assert call.tensors[name]._version == version
        assert torch.equal(call.tensors[name], content)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("sum", lambda rows: rows.sum()), ("mean", lambda rows: rows.mean()),
     ("batchmean", lambda rows: rows.sum() / rows.shape[0])],
)  # fmt: skip
def test_reductions(reduction: str, expected: Callable[[Tensor], Tensor]) -> None:
    inputs = tensors_of(replace(SMALL, batch=3))
    rows = attention_kl(*inputs)
    assert rows.shape == (3, 2, 5)
    torch.testing.assert_close(attention_kl(*inputs, reduction=reduction), expected(rows))


def test_values_are_float32_nats() -> None:
    q = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, 4, 1, dtype=torch.bfloat16)
    value = attention_kl(q, k, q, k, divergence="cross_entropy")
    assert value.dtype == torch.float32
    assert math.isclose(value.item(), math.log(4), rel_tol=1e-6)
