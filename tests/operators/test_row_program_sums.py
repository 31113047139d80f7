"""Sums of an LM head's rows whose gradients are computed in the forward, next to naive float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_streamkl
from bench.offline import compile_launch, record_launches
from tests.support.interpreter import inside, outside, quiet
from tests.support.row_cases import CASES, EXAMPLES, Case, Sizes, cast, leaves
from torch_streamkl import row_program
from torch_streamkl.program.graph import ROW, apply, capture
from torch_streamkl.program.masks import Keys
from torch_streamkl.program.steps import Step, row_value
from torch_streamkl.rows import closed, op, torch_impl
from torch_streamkl.rows.losses import RowLoss
from torch_streamkl.rows.problem import RowProblem
from torch_streamkl.rows.program import Program
from torch_streamkl.rows.trace import Tracer

pytestmark = quiet
VOCAB = ("top_k_with_ghost", "cached_top_k", "z_loss", "dkd")
FACTOR = 1.7  # of the sum, which the backward multiplies by
SUM = op.row_program_sum._schema.name.split("::")[1]


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
    monkeypatch.setattr(row_blocks, "_workspace", lambda problem, _: 30 * problem.num_keys * 8)


def _with(name: str, **options: Any) -> Callable[..., Tensor]:
    """An example of docs/guide/row-programs.md with other arguments."""

    def call(function: Any, **given: Any) -> Any:
        return row_program(function, **given, **options)

    f: Any = EXAMPLES[name]
    scope = {**EXAMPLES, "row_program": call}
    return FunctionType(f.__code__, scope, name, f.__defaults__, f.__closure__)


def _step(loss: Callable[..., Tensor], case: Case) -> list[Tensor]:
    total = loss(**case.tensors)
    return [total.detach(), *torch.autograd.grad(total * FACTOR, leaves(case.tensors))]


def _errors_are_naive_codes(
    name: str, reduction: str, impl: str, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """At most twice what naive code in the same dtype errs by, and a few roundings."""
    torch.manual_seed(1)
    case = cast(CASES[name](Sizes(rows=13, keys=71, dim=9)), dtype)

    def naive(**tensors: Any) -> Tensor:
        rows = case.naive(**tensors)
        return rows.sum() if reduction == "sum" else rows.mean()

    truth = _step(naive, cast(case, torch.float64))
    same = _step(naive, cast(case, dtype))
    got = _step(_with(name, reduction=reduction, impl=impl), cast(case, dtype, device))
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
@pytest.mark.parametrize("name", VOCAB)
def test_by_blocks(name: str, reduction: str, small_chunks: None) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        _errors_are_naive_codes(name, reduction, "torch", dtype)


@inside
@pytest.mark.parametrize("name", VOCAB)
def test_by_kernels(name: str, small_workspace: None) -> None:
    _errors_are_naive_codes(name, "mean", "triton", torch.float32)


@outside
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", VOCAB)
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
@pytest.mark.parametrize("name", VOCAB)
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
    case = cast(CASES[name](Sizes(rows=13, keys=71, dim=9)), torch.float32)
    _with(name, reduction="mean", impl="triton")(**case.tensors)
    assert {sum(size[2] for size in sizes)} <= {13, 26}  # rows of the example's one or two calls


def test_what_a_kernel_computes_otherwise_is_torchs() -> None:
    from torch_streamkl.rows.triton import cotangents

    program = _program_of_labels()
    for op_of_loss, is_known in (("log", True), ("tanh", False), ("clamp_min", False)):
        x = row_value(program.outputs[0])
        args = [x, -1.0] if op_of_loss == "clamp_min" else [x]
        loss = RowLoss.of_node(apply(op_of_loss, *args) * x, is_literal=False)
        assert (cotangents._source(program, loss) is not None) == is_known, op_of_loss


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


def _program_of_labels() -> Program:
    tracer = Tracer((0,), (), Keys(), {})
    x = tracer.dot(0)
    total = tracer.reduce("sum", apply("exp", x - tracer.reduce("logsumexp", x)))
    return tracer.program([total])[0]


@outside
def test_many_maps_beside_few_logits() -> None:
    """Ids and values at them, 5 bytes next to 2, are not worth the short parts that they leave."""
    from torch_streamkl.rows.triton import blocks as row_blocks

    found = []
    for name in ("cached_top_k", "top_k_with_ghost"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(op, "_kernels", lambda problem, differentiated: (row_blocks, ""))
            patch.setattr(
                row_blocks,
                "loss_and_gradients",
                lambda p, *a: (
                    found.append(row_blocks._chunks(p, row_blocks.Gradients(p, a[2])))
                    or torch_impl.loss_and_gradients(p, *a)
                ),
            )
            case = cast(CASES[name](Sizes(rows=13, keys=71, dim=9)), torch.bfloat16)
            _with(name, reduction="mean", impl="triton")(**case.tensors)
    assert [x is None for x in found] == [True, False]


def _head(rows: int = 9, vocab: int = 21) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(n, 5, dtype=torch.float64) for n in (rows, vocab)]
    return made[0].requires_grad_(), made[1].requires_grad_()


def _operators(run: Callable[[], Any]) -> set[str]:
    """The names of ours that a call dispatches."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func.namespace == "torch_streamkl":
                found.add(func._schema.name.split("::")[1])
            return func(*args, **(kwargs or {}))

    with Watch():
        run()
    return found


@outside
def test_rows_that_do_not_count(small_chunks: None) -> None:
    """Labels to ignore and rows of weight 0, divided by the number that counts."""
    head = _head()
    labels = torch.randint(21, (9,))
    labels[::3] = -100
    weight = torch.rand(9, dtype=torch.float64)
    weight[4] = 0.0
    count = (labels != -100).sum()

    def policy(e: Any) -> Any:
        s = e.s.log_softmax("key")
        log_p = torch.where(e.key_index == e.label, s, 0.0).sum("key")
        ratio = (log_p - e.old).exp()
        clipped = torch.minimum(ratio * e.w, ratio.clamp(0.8, 1.2) * e.w)
        each = -clipped + 0.1 * (s.exp() * s).sum("key")
        return torch.where(e.label != -100, each, 0.0)

    old = -torch.rand(9, dtype=torch.float64) - 2.0
    given = {"label": labels, "w": weight, "old": old}
    total = row_program(policy, dots={"s": head}, rows=given, reduction="sum") / count
    logs = (head[0] @ head[1].T).log_softmax(-1)
    ratio = (logs.gather(-1, labels.clamp_min(0)[:, None])[:, 0] - old).exp()
    each = -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight)
    each = each + 0.1 * (logs.exp() * logs).sum(-1)
    naive = torch.where(labels != -100, each, 0.0).sum() / count
    torch.testing.assert_close(total, naive)
    once = total.grad_fn.next_functions[0][0]
    assert "row_program_sum" in once.next_functions[0][0].name()
    ours, theirs = (torch.autograd.grad(x, head) for x in (total, naive))
    torch.testing.assert_close(ours, theirs)
    assert not ours[0][::3].any()


@outside
def test_no_row_counts() -> None:
    head = _head()
    mask = torch.zeros(9, dtype=torch.bool)
    total = row_program(
        lambda e: torch.where(e.m, e.s.logsumexp("key"), 0.0),
        dots={"s": head},
        rows={"m": mask},
        reduction="sum",
    )
    gradients = torch.autograd.grad(total / mask.sum().clamp(min=1), head)
    assert total == 0.0 and not any(g.any() for g in gradients)


@outside
def test_an_infinite_row_is_what_it_is_without_a_reduction() -> None:
    """0 times a logarithm of 0 is 0, as in every product of a row program."""
    head = _head()
    first = (torch.arange(9) != 2).double()

    def values(e: Any) -> Any:
        return (e.s.logsumexp("key") * e.f).log() * e.f

    rows = row_program(values, dots={"s": head}, rows={"f": first})
    total = row_program(values, dots={"s": head}, rows={"f": first}, reduction="sum")
    torch.testing.assert_close(total, rows.sum())
    assert total.isfinite()
    ours, theirs = (torch.autograd.grad(x, head) for x in (total, rows.sum()))
    torch.testing.assert_close(ours, theirs)


@outside
@pytest.mark.parametrize("which", [(True, False), (False, True)])
def test_gradients_of_one_operand(which: tuple[bool, bool], small_chunks: None) -> None:
    student = tuple(
        x.detach().requires_grad_(need) for x, need in zip(_head(), which, strict=True)
    )
    pairs = {"t": tuple(x.detach().flip(0) for x in student), "s": student}

    def kl(e: Any) -> Any:
        p, s = (e.t / 2).log_softmax("key"), e.s.log_softmax("key")
        return (p.exp() * (p - s) ** 2).sum("key").sqrt()

    leaf = pairs["s"][which.index(True)]
    total = row_program(kl, dots=pairs, reduction="mean")
    rows = row_program(kl, dots=pairs)
    torch.testing.assert_close(total, rows.mean())
    got, expected = (torch.autograd.grad(x, leaf)[0] for x in (total, rows.mean()))
    torch.testing.assert_close(got, expected)


def _z_loss(e: Any) -> Any:
    return e.s.logsumexp("key") ** 2


@outside
def test_backward_twice() -> None:
    head = _head()
    total = row_program(_z_loss, dots={"s": head}, reduction="mean")
    first = [g.clone() for g in torch.autograd.grad(total, head, retain_graph=True)]
    second = torch.autograd.grad(3 * total, head)
    torch.testing.assert_close(second, tuple(3 * g for g in first))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, head)


@outside
def test_double_backward_is_refused() -> None:
    head = _head()
    total = row_program(_z_loss, dots={"s": head}, reduction="mean") ** 2
    (gradient, *_) = torch.autograd.grad(total, head, create_graph=True)
    with pytest.raises(NotImplementedError, match="impl='reference' for higher derivatives"):
        gradient.sum().backward()


@outside
def test_which_operator_runs() -> None:
    head = _head()

    def call(function: Any = _z_loss, reduction: str = "mean", **options: Any) -> set[str]:
        given = {"dots": {"s": head}, **options}
        return _operators(lambda: row_program(function, reduction=reduction, **given))

    assert call() == {"row_program_sum", "once"}
    assert call(reduction="none") == {"row_program"}
    with torch.no_grad():
        assert call() == {"row_program"}
    assert call(dots={"s": tuple(x.detach() for x in head)}) == {"row_program"}
    half = tuple(x.detach().half().requires_grad_() for x in head)
    assert call(dots={"s": half}) == {"row_program"}  # it waits for the loss scale
    weight = torch.rand(9, dtype=torch.float64).requires_grad_()
    weighted = {"rows": {"w": weight}}
    # the weight's own gradient is a value of the rows
    assert call(lambda e: e.w * e.s.logsumexp("key"), **weighted) == {"row_program"}
    sums = call(lambda e: (e.w * e.s).logsumexp("key"), **weighted)
    assert sums == {"row_program_sum", "once"}
    maps = tuple(torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(2))
    assert call(dots={"s": maps}) == {"row_program"}


@outside
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions_without_gradients_in_the_forward(reduction: str) -> None:
    weight = torch.rand(9, dtype=torch.float64).requires_grad_()
    head = _head()
    inputs = [*head, weight]
    total = row_program(
        lambda e: e.w * e.s.logsumexp("key"),
        dots={"s": head},
        rows={"w": weight},
        reduction=reduction,
    )
    rows = weight * (head[0] @ head[1].T).logsumexp(-1)
    naive = rows.sum() if reduction == "sum" else rows.mean()
    torch.testing.assert_close(total, naive)
    ours, theirs = (torch.autograd.grad(x, inputs) for x in (total, naive))
    torch.testing.assert_close(ours, theirs)


@outside
def test_a_divergence_runs_as_linear_kl_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_impl, "loss_and_gradients", None)
    student = tuple(x.detach().float().requires_grad_() for x in _head())
    teacher = tuple(x.detach().flip(0) * 0.7 for x in student)
    weight = torch.rand(9)

    def kl(e: Any) -> Any:
        p, s = (e.t * 0.5).log_softmax("key"), (e.s * 0.5).log_softmax("key")
        return (p.exp() * (p - s)).sum("key") * e.w

    total = row_program(
        kl, dots={"t": teacher, "s": student}, rows={"w": weight}, reduction="mean"
    )
    same = torch_streamkl.linear_kl(*student, *teacher, temperature=2.0, reduction="none")
    torch.testing.assert_close(total, (same * weight).mean())
    ours, theirs = (torch.autograd.grad(x, student) for x in (total, (same * weight).mean()))
    torch.testing.assert_close(ours, theirs)


@outside
def test_a_divergence_that_is_not_summed_as_it_is() -> None:
    """The square root of a KL: what the row weighs is known after its value alone."""
    student, teacher = _head(), tuple(x.detach().flip(0) for x in _head())

    def root(e: Any) -> Any:
        p, s = e.t.log_softmax("key"), e.s.log_softmax("key")
        return (p.exp() * (p - s)).sum("key").sqrt()

    given = {"t": teacher, "s": student}
    total = row_program(root, dots=given, reduction="mean")
    logs = [(h @ w.T).log_softmax(-1) for h, w in (teacher, student)]
    naive = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).sqrt().mean()
    torch.testing.assert_close(total, naive)
    ours, theirs = (torch.autograd.grad(x, student) for x in (total, naive))
    torch.testing.assert_close(ours, theirs)


@outside
def test_errors() -> None:
    head = _head()
    with pytest.raises(ValueError, match="one per-row value, got a dict of a, b"):
        row_program(
            lambda e: {"a": e.s.sum("key"), "b": e.s.logsumexp("key")},
            dots={"s": head},
            reduction="sum",
        )
    with pytest.raises(ValueError, match="reduction must be one of"):
        row_program(_z_loss, dots={"s": head}, reduction="batchmean")


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
    from torch_streamkl.rows.losses import RowLoss

    first = RowLoss((Step("reduction", value=0),), False)
    total = op.row_program_sum([q, k], [], seen[0], first.text, [True, False], "auto")[0]
    with pytest.raises(RuntimeError, match="needs_grad="):
        total.backward()


@outside
@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_and_words(rows: int) -> None:
    head = _head(rows, 1)
    total = row_program(_z_loss, dots={"s": head}, reduction="mean")
    naive = ((head[0] @ head[1].T).logsumexp(-1) ** 2).mean()
    torch.testing.assert_close(total, naive)
    ours, theirs = (torch.autograd.grad(x, head) for x in (total, naive))
    torch.testing.assert_close(ours, theirs)


@outside
def test_extreme_logits() -> None:
    h, w = _head()
    head = tuple((x.detach() * 40).requires_grad_() for x in (h, w))

    def values(e: Any) -> Any:
        s = e.s.log_softmax("key")
        return (s.exp() * s).sum("key") + e.s.logsumexp("key") * 1e-4

    total = row_program(values, dots={"s": head}, reduction="mean")
    logits = head[0] @ head[1].T
    logs = logits.log_softmax(-1)
    naive = ((logs.exp() * logs).sum(-1) + logits.logsumexp(-1) * 1e-4).mean()
    torch.testing.assert_close(total, naive)
    assert math.isfinite(float(total.detach()))
    ours, theirs = (torch.autograd.grad(x, head) for x in (total, naive))
    torch.testing.assert_close(ours, theirs)


@outside
def test_the_name_of_the_form() -> None:
    """What `explain` and the operator ask is one question."""
    student, teacher = _head(), tuple(x.detach() for x in _head())
    seen: list[Any] = []
    original = op.chosen_of_sum

    def spy(*args: Any) -> str:
        seen.append(original(*args))
        return str(seen[-1])

    def kl(e: Any) -> Any:
        p, s = e.t.log_softmax("key"), e.s.log_softmax("key")
        return (p.exp() * (p - s)).sum("key")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "chosen_of_sum", spy)
        for function in (kl, lambda e: kl(e).sqrt()):
            row_program(function, dots={"t": teacher, "s": student}, reduction="mean")
    assert seen == [op.CLOSED, "torch"] and closed.form_of is not None
