"""Sums of an LM head's rows whose gradients are computed in the forward, next to naive float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_streamkl
from bench.offline import compile_launch, record_launches
from tests.support.gpus import on_a_gpu
from tests.support.interpreter import inside, outside, quiet
from tests.support.naive_rows import check
from tests.support.row_cases import CASES, Case, Sizes, cast, example, leaves
from torch_streamkl import row_program
from torch_streamkl.program.graph import ROW, apply, capture
from torch_streamkl.program.masks import Keys
from torch_streamkl.program.steps import Step, row_value
from torch_streamkl.rows import op, torch_impl
from torch_streamkl.rows.losses import RowLoss
from torch_streamkl.rows.problem import RowProblem
from torch_streamkl.rows.program import Program
from torch_streamkl.rows.trace import Tracer

pytestmark = quiet
VOCAB = ("top_k_with_ghost", "cached_top_k", "z_loss", "dkd")
of_examples = pytest.mark.parametrize("name", VOCAB)
FACTOR = 1.7  # of the sum, which the backward multiplies by
SMALL = Sizes(rows=13, keys=71, dim=9)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of tokens, parts of them and blocks of vocabulary entries."""
    monkeypatch.setattr(torch_impl, "_tokens_of_chunk", lambda problem: 11)
    monkeypatch.setattr(torch_impl, "BLOCK_ELEMENTS", 96)
    monkeypatch.setattr(torch_impl, "MAX_KEYS", 24)


@pytest.fixture
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_streamkl.rows.triton import blocks as row_blocks

    monkeypatch.setattr(row_blocks, "MOST_OF_PARTS", 99)  # all in chunks
    monkeypatch.setattr(row_blocks, "PART_BYTES", 0)  # and these in parts
    monkeypatch.setattr(row_blocks, "_workspace", lambda problem, _: 30 * problem.num_keys * 8)


def _step(loss: Callable[..., Tensor], case: Case) -> list[Tensor]:
    total = loss(**case.tensors)
    return [total.detach(), *torch.autograd.grad(total * FACTOR, leaves(case.tensors))]


def _errors_are_naive_codes(
    name: str, reduction: str, impl: str, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """At most twice what naive code in the same dtype errs by, and a few roundings."""
    torch.manual_seed(1)
    case = cast(CASES[name](SMALL), dtype)

    def naive(**tensors: Any) -> Tensor:
        total: Tensor = getattr(case.naive(**tensors), reduction)()
        return total

    truth = _step(naive, cast(case, torch.float64))
    same = _step(naive, cast(case, dtype))
    got = _step(example(name, impl, reduction=reduction), cast(case, dtype, device))
    for i, (a, b, exact) in enumerate(zip(got, same, truth, strict=True)):
        size = float(exact.abs().max())
        rounding = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * 16 * size
        if i:  # as often as what is multiplied is rounded, to the inputs' dtype
            assert a.dtype == dtype
            rounding += 2 * torch.finfo(dtype).eps * size
        error = float((a.cpu().double() - exact).abs().max())
        assert error <= 2 * float((b.double() - exact).abs().max()) + rounding, (name, i)


@outside
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@of_examples
def test_by_blocks(name: str, reduction: str, small_chunks: None) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        _errors_are_naive_codes(name, reduction, "torch", dtype)


@inside
@of_examples
def test_by_kernels(name: str, small_workspace: None) -> None:
    _errors_are_naive_codes(name, "mean", "triton", torch.float32)


@outside
@on_a_gpu
@of_examples
def test_on_a_gpu(name: str, small_workspace: None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _errors_are_naive_codes(name, "mean", "triton", dtype, "cuda")


@inside
def test_kernels_where_a_weight_would_be_rounded_too_often(
    small_workspace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_streamkl.rows.triton import blocks as row_blocks

    monkeypatch.setattr(row_blocks, "_chunks", lambda problem, out: None)
    _errors_are_naive_codes("top_k_with_ghost", "mean", "triton", torch.float32)


@inside
@of_examples
def test_gradients_to_values_of_rows_by_one_kernel(
    name: str, small_workspace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are torch's, which computes what a kernel would compute in another way."""
    from torch_streamkl.rows.triton import blocks as row_blocks
    from torch_streamkl.rows.triton import cotangents

    sizes = []

    def both(problem: Any, result: Any, loss: Any, *given: Any) -> dict[int, Tensor]:
        found = kernel(problem, result, loss, *given)
        assert cotangents._source(problem.program, loss) is not None
        with monkeypatch.context() as patch:
            patch.setattr(cotangents, "_source", lambda *_: None)
            expected = kernel(problem, result, loss, *given)
        assert list(found) == sorted(expected)
        for c, x in expected.items():
            torch.testing.assert_close(found[c], x)
        sizes.append(found[0].shape)
        return found

    kernel = row_blocks.cotangents_of
    monkeypatch.setattr(row_blocks, "cotangents_of", both)
    case = cast(CASES[name](SMALL), torch.float32)
    example(name, "triton", reduction="mean")(**case.tensors)
    assert {sum(size[2] for size in sizes)} <= {13, 26}  # rows of the example's one or two calls


def _program_of_labels() -> Program:
    tracer = Tracer((0,), (), Keys(), {})
    x = tracer.dot(0)
    total = tracer.reduce("sum", apply("exp", x - tracer.reduce("logsumexp", x)))
    return tracer.program([total])[0]


def test_what_a_kernel_computes_otherwise_is_torchs() -> None:
    from torch_streamkl.rows.triton import cotangents

    program = _program_of_labels()
    x = row_value(program.outputs[0])
    for name, args, is_known in (("log", (), 1), ("tanh", (), 0), ("clamp_min", (-1.0,), 0)):
        loss = RowLoss.of_node(apply(name, x, *args) * x, is_literal=False)
        assert (cotangents._source(program, loss) is not None) == bool(is_known), name


@outside
@pytest.mark.parametrize("target", ["sm_75", "sm_90", "gfx942"])
def test_compiles(target: str) -> None:
    """Gradients to values of a block of rows, which a tensor of 16 bits weighs."""
    from torch_streamkl.rows.triton import cotangents

    program = _program_of_labels()
    x = row_value(program.outputs[0])
    scaled = capture(0, "float", frozenset((ROW,))) * apply("log", x)
    loss = RowLoss.of_node(scaled, is_literal=True)
    with record_launches(target) as launches:
        heads = [torch.empty(1, 1, n, 8, device="cuda") for n in (300, 70)]
        problem = RowProblem.of(program.text, heads)
        result = torch_impl.allocate(problem, True)
        weight = torch.empty(1, 1, 300, dtype=torch.bfloat16, device="cuda")
        at = slice(0, 1), slice(128, 300), slice(0, 70)
        found = cotangents.cotangents_of(problem, result.of_rows(*at[:2]), loss, [weight], at)
        assert [x.shape for x in found.values()] == [(1, 1, 172)] * 2
    (launch,) = launches
    assert launch.grid == (2, 1, 1)
    assert compile_launch(launch, target).spill_bytes == 0


@outside
def test_many_maps_beside_few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids and values at them, 5 bytes next to 2, are not worth the short parts that they leave."""
    from torch_streamkl.rows.triton import blocks as row_blocks

    found = []

    def chunks(problem: RowProblem, *given: Any) -> Any:
        found.append(row_blocks._chunks(problem, row_blocks.Gradients(problem, given[2])))
        return torch_impl.loss_and_gradients(problem, *given)

    monkeypatch.setattr(op, "_kernels", lambda problem, differentiated: (row_blocks, ""))
    monkeypatch.setattr(row_blocks, "loss_and_gradients", chunks)
    for name in ("cached_top_k", "top_k_with_ghost"):
        case = cast(CASES[name](SMALL), torch.bfloat16)
        example(name, "triton", reduction="mean")(**case.tensors)
    assert [x is None for x in found] == [True, False]


# ----------------------------------------------------------------------- sums of drawn numbers


def _head(rows: int = 9, vocab: int = 21, size: float = 1.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(n, 5, dtype=torch.float64) * size for n in (rows, vocab)]
    return made[0].requires_grad_(), made[1].requires_grad_()


def _pairs(trained: tuple[bool, bool] = (True, True)) -> dict[str, tuple[Tensor, Tensor]]:
    h, w = (x.detach() for x in _head())
    return {"t": (h.flip(0), w.flip(0)),
            "s": (h.requires_grad_(trained[0]), w.requires_grad_(trained[1]))}  # fmt: skip


def _rows() -> dict[str, Tensor]:
    """Labels to ignore and rows of weight 0; ``learned`` has a gradient."""
    labels = torch.randint(21, (9,))
    labels[::3] = -100
    weight = torch.rand(9, dtype=torch.float64)
    weight[4] = 0.0
    old = -torch.rand(9, dtype=torch.float64) - 2.0
    return {"label": labels, "w": weight, "old": old, "nothing": labels > 99,
            "learned": weight.clone().requires_grad_()}  # fmt: skip


def _policy(e: Any) -> Any:
    s = e.s.log_softmax("key")
    log_p = torch.where(e.key_index == e.label, s, 0.0).sum("key")
    ratio = (log_p - e.old).exp()
    clipped = torch.minimum(ratio * e.w, ratio.clamp(0.8, 1.2) * e.w)
    each = -clipped + 0.1 * (s.exp() * s).sum("key")
    return torch.where(e.label != -100, each, 0.0)


def _kl(e: Any) -> Any:
    p, s = e.t.log_softmax("key"), e.s.log_softmax("key")
    return (p.exp() * (p - s)).sum("key")


def _entropy(e: Any) -> Any:
    s = e.s.log_softmax("key")
    return (s.exp() * s).sum("key") + e.s.logsumexp("key") * 1e-4


def _z_loss(e: Any) -> Any:
    return e.s.logsumexp("key") ** 2


SUMS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "rows that do not count": (_policy, {"s": _head()}),
    "no row counts": (
        lambda e: torch.where(e.nothing, e.s.logsumexp("key"), 0.0), {"s": _head()}
    ),
    "a weight that learns": (lambda e: e.learned * e.s.logsumexp("key"), {"s": _head()}),
    "a weight inside": (lambda e: (e.learned * e.s).logsumexp("key"), {"s": _head()}),
    "a divergence": (lambda e: _kl(e) * e.w, _pairs()),
    "a root": (lambda e: _kl(e).sqrt(), _pairs()),  # the weight of a row is known after its value
    "hidden states alone": (lambda e: _kl(e).sqrt(), _pairs((True, False))),
    "weights alone": (lambda e: _kl(e).sqrt(), _pairs((False, True))),
    "extreme logits": (_entropy, {"s": _head(size=40.0)}),
}  # fmt: skip


@outside
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str, reduction: str, small_chunks: None) -> None:
    function, dots = SUMS[name]
    found = check(function, dots, impl="auto", reduction=reduction, rows=_rows())
    assert found["value"].isfinite()


@outside
@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_and_one_entry(rows: int) -> None:
    check(_z_loss, {"s": _head(rows, 1)}, impl="auto", reduction="mean")


@outside
def test_an_infinite_row_is_what_it_is_without_a_reduction() -> None:
    """0 times a logarithm of 0 is 0, as in every product of a row program."""
    head = _head()
    given = {"dots": {"s": head}, "rows": {"f": (torch.arange(9) != 2).double()}}

    def values(e: Any) -> Any:
        return (e.s.logsumexp("key") * e.f).log() * e.f

    total, rows = row_program(values, **given, reduction="sum"), row_program(values, **given).sum()
    assert total.isfinite()
    torch.testing.assert_close(total, rows)
    torch.testing.assert_close(*(torch.autograd.grad(x, head) for x in (total, rows)))


@outside
def test_which_operator_runs() -> None:
    head = _head()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func.namespace == "torch_streamkl":
                seen.add(func._schema.name.split("::")[1])
            return func(*args, **(kwargs or {}))

    def call(function: Any = _z_loss, reduction: str = "mean", **options: Any) -> set[str]:
        seen.clear()
        with Watch():
            row_program(function, reduction=reduction, **{"dots": {"s": head}, **options})
        return set(seen)

    seen: set[str] = set()
    fused, of_rows = {"row_program_sum", "once"}, {"row_program"}
    assert call() == fused
    assert call(_policy, rows=_rows()) == fused
    assert call(reduction="none") == of_rows
    with torch.no_grad():
        assert call() == of_rows
    assert call(dots={"s": tuple(x.detach() for x in head)}) == of_rows
    half = tuple(x.detach().half().requires_grad_() for x in head)
    assert call(dots={"s": half}) == of_rows  # it waits for the loss scale
    # the weight's own gradient is a value of the rows
    assert call(SUMS["a weight that learns"][0], rows=_rows()) == of_rows
    assert call(SUMS["a weight inside"][0], rows=_rows()) == fused
    maps = tuple(torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(2))
    assert call(dots={"s": maps}) == of_rows


@outside
def test_a_divergence_runs_as_linear_kl_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `explain` and the operator ask is one question."""
    seen: list[str] = []
    original = op.chosen_of_sum
    monkeypatch.setattr(op, "chosen_of_sum", lambda *x: seen.append(original(*x)) or seen[-1])
    dots = _pairs()
    row_program(lambda e: _kl(e).sqrt(), dots=dots, reduction="mean")
    monkeypatch.setattr(torch_impl, "loss_and_gradients", None)
    total = row_program(_kl, dots=dots, reduction="mean")
    assert seen == ["torch", op.CLOSED]
    same = torch_streamkl.linear_kl(*dots["s"], *dots["t"], reduction="none").mean()
    torch.testing.assert_close(total, same)
    torch.testing.assert_close(*(torch.autograd.grad(x, dots["s"]) for x in (total, same)))


@outside
def test_an_input_that_needs_a_gradient_that_was_not_wanted() -> None:
    q, k = (x[None, None] for x in _head())
    seen: list[Any] = []
    original = RowProblem.of

    def spy(text: str, tensors: Any) -> RowProblem:
        seen.append(text)
        return original(text, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowProblem, "of", spy)
        row_program(_z_loss, dots={"s": _head()}, reduction="mean")
    first = RowLoss((Step("reduction", value=0),), False)
    total = op.row_program_sum([q, k], [], seen[0], first.text, [True, False], "auto")[0]
    with pytest.raises(RuntimeError, match="needs_grad="):
        total.backward()
