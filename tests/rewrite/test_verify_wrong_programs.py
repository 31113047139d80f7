"""verify() finds wrong programs of every kind, passes right ones, and changes no state."""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_streamkl
from tests.support.wrong_programs import PLANTED, Opaque, Output, vector
from torch_streamkl import Verification
from torch_streamkl.fx_passes import verify as verifying
from torch_streamkl.fx_passes.verification.rounding import PerturbRounding

OPTIONS: dict[str, Any] = {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0}


def compared(right: Callable[..., Any], wrong: Callable[..., Any], *args: Any) -> Verification:
    """``right`` against ``wrong`` in the place of what torch.compile would make of it."""
    return verifying._verify(right, args, {}, compiler=lambda _: wrong)


@pytest.mark.parametrize("what", PLANTED)
def test_planted_wrong_programs_are_found(what: str) -> None:
    right, wrong, text = PLANTED[what]
    assert compared(right, right, vector()).ok or what in ("a defined value",)
    x = vector()
    result = compared(right, wrong, x)
    assert not result.ok, result
    assert not result.not_judged
    assert text in str(result), result
    assert "agree" not in str(result)
    assert torch.equal(x, vector()) and x.grad is None


MASK = torch.tensor([0.0, 0.0, -torch.inf, 0.0])


def _kl(x: Tensor) -> Tensor:
    """0 * -inf: NaN in eager code."""
    p = (2 * x + MASK).softmax(-1)
    return (p * (p.log() - (x + MASK).log_softmax(-1))).sum()


@pytest.mark.parametrize(("factor", "is_right"), [(1.0, True), (1.01, False)])
def test_defined_values_are_compared_where_eager_is_nan(factor: float, is_right: bool) -> None:
    def expected(x: Tensor) -> Tensor:
        kept = x[[0, 1, 3]]
        s = kept.log_softmax(-1)
        p = (2 * kept).softmax(-1)
        return F.kl_div(s, p, reduction="sum") * factor

    def divergence(x: Tensor) -> Tensor:
        student = (x + MASK).log_softmax(-1)
        return F.kl_div(student, (2 * x + MASK).softmax(-1), reduction="sum")

    x = vector().detach()
    assert divergence(x).isnan()
    result = compared(divergence, expected, x)
    assert not result.ok
    assert ("gives the defined value" in str(result)) is is_right
    assert bool(result.results[0].difference) is not is_right
    # where float64 with finite masks has no value either, nothing is claimed
    result = compared(_kl, expected, x)
    assert not result.ok and "cannot be compared" in str(result)


# ------------------------------------------------------------------------------ state of a program
class Counting(nn.Module):
    of_class = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.steps, self.rate = 0, 1.0
        self.cache: Tensor | None = None
        self.history: list[Any] = []
        self.by_name: dict[str, Any] = {"loss": torch.zeros(4)}
        self.kinds: set[str] = set()
        self.recent: collections.deque[float] = collections.deque([0.0], maxlen=1)
        self.array = np.zeros(3)
        self.generator = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().sum()


TOTAL = 0
GENERATOR = torch.Generator().manual_seed(0)


def _global(module: Counting, x: Tensor, step: int) -> None:
    global TOTAL
    TOTAL += step


def _steps(module: Counting, x: Tensor, step: int) -> None:
    module.steps += step


def _rate(module: Counting, x: Tensor, step: int) -> None:
    module.rate *= 1.0 - 0.1 * step


def _cache(module: Counting, x: Tensor, step: int) -> None:
    module.cache = module.layer.weight.detach() * step


def _history(module: Counting, x: Tensor, step: int) -> None:
    module.history.append(x.sum() * step)


def _by_name(module: Counting, x: Tensor, step: int) -> None:
    module.by_name["loss"] = x.detach() * step


def _kinds(module: Counting, x: Tensor, step: int) -> None:
    module.kinds.add(f"kind {step}")


def _recent(module: Counting, x: Tensor, step: int) -> None:
    module.recent.append(float(step))


def _array(module: Counting, x: Tensor, step: int) -> None:
    module.array += step


def _seen(module: Counting, x: Tensor, step: int) -> None:
    module.seen.add_(step)


def _replaced(module: Counting, x: Tensor, step: int) -> None:
    module.layer.weight = nn.Parameter(module.layer.weight.detach() * step)


def _class(module: Counting, x: Tensor, step: int) -> None:
    Counting.of_class += step


def _generator(module: Counting, x: Tensor, step: int) -> None:
    module.recent[0] += sum(module.generator.random() for _ in range(step))


def _of_torch(module: Counting, x: Tensor, step: int) -> None:
    module.by_name["noise"] = torch.rand(step, generator=GENERATOR)


def _attribute(module: Counting, x: Tensor, step: int) -> None:
    _attribute.calls = getattr(_attribute, "calls", 0) + step  # type: ignore[attr-defined]


EFFECTS = [_global, _steps, _rate, _cache, _history, _by_name, _kinds, _recent, _array, _seen,
           _replaced, _class, _generator, _of_torch, _attribute]  # fmt: skip


def _snapshot(module: Counting) -> Any:
    plain = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    kept = {k: v.copy() if hasattr(v, "copy") else v for k, v in plain.items()}
    state = {k: (v, v.dtype, v.clone()) for k, v in module.state_dict(keep_vars=True).items()}
    own = GENERATOR.get_state().tolist(), module.generator.getstate(), Counting.of_class
    return kept, state, TOTAL, dict(vars(_attribute)), own


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda f: f.__name__.strip("_"))
def test_state_is_compared_and_put_back(effect: Callable[[Counting, Tensor, int], None]) -> None:
    module, x = Counting(), torch.randn(2, 4)
    local = 0

    def right(y: Tensor, step: int = 1) -> Tensor:
        nonlocal local
        local += step
        effect(module, y, step)
        return module(y)

    before = _snapshot(module)
    good = compared(right, right, x)
    bad = compared(right, functools.partial(right, step=2), x)
    after = _snapshot(module)
    assert good.ok, good
    assert good.side_effects
    assert not bad.ok, bad
    wrong = [r.name for r in bad.results if r.difference]
    assert "local after" in wrong and len(wrong) >= 2, bad
    assert local == 0
    assert before[2:] == after[2:]
    for name, value in before[0].items():
        same = np.array_equal if isinstance(value, np.ndarray) else lambda a, b: a == b
        assert value is after[0][name] or same(value, after[0][name]), name
    for name, (tensor, dtype, numbers) in before[1].items():
        assert after[1][name][0] is tensor and tensor.dtype == dtype
        assert torch.equal(tensor, numbers)


def test_lists_and_dicts_of_arguments() -> None:
    def grown(items: list[Tensor], table: dict[str, Any]) -> Tensor:
        items.append(items[0] * 2)
        table["mean"] = items[0].mean()
        return items[0].sum()

    def wrong(items: list[Tensor], table: dict[str, Any]) -> Tensor:
        items.append(items[0] * 3)
        return items[0].sum()

    items, table = [torch.ones(3)], {"n": 1}
    assert compared(grown, grown, items, table).ok
    result = compared(grown, wrong, items, table)
    found = {r.name for r in result.results if r.difference}
    assert found >= {"argument[0][0][1] after", "argument[0][1]['mean'] after"}, result
    assert len(items) == 1 and table == {"n": 1}


def _training_step(rate: float) -> Iterator[Any]:
    torch.manual_seed(0)
    module = Counting()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(2, 4)).backward()
    optimizer.step()

    def step(x: Tensor, factor: float = 1.0) -> Tensor:
        optimizer.zero_grad()
        loss = module(x) * factor
        loss.backward()
        optimizer.step()
        return loss.detach() / factor

    yield from (module, optimizer, step)


def test_a_training_step_with_its_optimizer() -> None:
    module, optimizer, step = _training_step(0.1)
    x = torch.randn(2, 4)
    state = {k: v.clone() for k, v in module.state_dict().items()}
    moments = [{k: (v, v.clone()) for k, v in s.items()} for s in optimizer.state.values()]
    result = compared(step, step, x)
    assert result.ok, result
    changed = {r.name for r in result.results}
    assert any("weight after" in name for name in changed)
    assert any("weight.grad after" in name for name in changed)
    assert any("exp_avg" in name for name in changed), changed
    # Adam's step is that of any multiple of a loss: the moments and the gradients tell
    assert not compared(step, functools.partial(step, factor=2.0), x).ok
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name])
    for entry, kept in zip(optimizer.state.values(), moments, strict=True):
        assert all(entry[k] is v and torch.equal(v, copy) for k, (v, copy) in kept.items())


def test_random_numbers_of_every_library() -> None:
    draws: list[Callable[[], float]] = [
        lambda: torch.rand(()).item(),
        random.random,
        np.random.rand,
    ]
    for draw in draws:
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
        result = compared(lambda x, draw=draw: x * draw(), lambda x: x, torch.ones(2))
        assert result.not_judged == "it draws random numbers"
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert np.array_equal(np.random.get_state()[1], states[2])


def test_what_cannot_be_compared_is_listed() -> None:
    thing = Opaque()
    result = compared(lambda x: (x, thing), lambda x: (x, thing), torch.ones(2))
    assert not result.ok
    assert result.not_compared == ["output 1 is a Opaque"]
    x = torch.ones(2, requires_grad=True)

    def freed(y: Tensor) -> Tensor:
        loss = y.square().sum()
        loss.backward()
        return loss

    assert "backward() through them itself" in compared(freed, freed, x).not_compared[0]


# ---------------------------------------------------------------------------------- right programs
def _softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def _by_logarithms(x: Tensor) -> Tensor:
    return (x - x.logsumexp(-1, keepdim=True)).exp()


def _product(x: Tensor) -> Tensor:
    return x @ x.mT


def _in_parts(x: Tensor) -> Tensor:
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return (b @ b.mT + a @ a.mT).to(x.dtype)


def _divergence(x: Tensor) -> Tensor:
    return F.kl_div(x.log_softmax(-1), x.flip(-1).softmax(-1), reduction="sum")


def _by_parts(x: Tensor) -> Tensor:
    y = x.flip(-1)
    p = y.softmax(-1)
    return (p * (y - x)).sum() - (y.logsumexp(-1) - x.logsumexp(-1)).sum()


OTHERWISE = {
    "softmax": (_softmax, _by_logarithms),
    "product": (_product, _in_parts),
    "divergence": (_divergence, _by_parts),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", OTHERWISE)
def test_right_programs_that_round_otherwise_agree(what: str, dtype: torch.dtype) -> None:
    """In float64, too, where the reference is eager code, whose error is 0."""
    right, other = OTHERWISE[what]
    for seed in range(20 if dtype == torch.float64 else 5):
        torch.manual_seed(seed)
        x = (4 * torch.randn(16, 40)).to(dtype).requires_grad_()
        result = compared(right, other, x)
        assert result.ok, (seed, result)
        # and the same program, off by little more than the dtype can show
        share = 1 + (100 if dtype == torch.bfloat16 else 4000) * torch.finfo(dtype).eps
        assert not compared(right, lambda y, share=share: other(y) * share, x).ok, seed


def _naive_divergence(x: Tensor, y: Tensor) -> Tensor:
    log_p = y.log_softmax(-1)
    return (log_p.exp() * (log_p - x.log_softmax(-1))).sum(-1).mean()


@pytest.mark.parametrize("seed", range(6))
def test_a_loss_of_bfloat16_that_is_off_by_five_percent(seed: int) -> None:
    torch.manual_seed(seed)
    x, y = ((2 * torch.randn(16, 100)).bfloat16().requires_grad_() for _ in range(2))

    def otherwise(x: Tensor, y: Tensor) -> Tensor:
        return _naive_divergence(x.float(), y.float()).bfloat16()

    def wrong(x: Tensor, y: Tensor) -> Tensor:  # in its value alone
        loss = otherwise(x, y)
        return loss + 0.05 * loss.detach()

    assert compared(_naive_divergence, otherwise, x, y).ok
    result = compared(_naive_divergence, wrong, x, y)
    assert [r.name for r in result.results if r.difference] == ["output 0"], result


def test_an_optimizer_that_computes_with_tensors_agrees() -> None:
    """A compiled AdamW has 1 - beta ** step in float32, where eager code has it in float64."""
    torch.manual_seed(3)
    module = torch.nn.Linear(16, 40)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    x, y = torch.randn(12, 16), torch.randn(12, 40)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = _naive_divergence(module(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    result = verifying.verify(step, x, options={"streamkl.inner": "eager"})
    assert result.ok, result
    assert not compared(step, _with_another_rate(step, optimizer, 1.001), x).ok


def _with_another_rate(step: Any, optimizer: Any, factor: float) -> Any:
    def wrong(x: Tensor) -> Tensor:
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate * factor
        try:
            return step(x)
        finally:
            optimizer.param_groups[0]["lr"] = rate

    return wrong


def test_what_is_compiled_inside_runs_as_it_is_written() -> None:
    """A compiled module inside of a step is no measure for itself."""

    def wrong_backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *args: tuple(2 * x for x in gm(*args))

    inner = torch.compile(_softmax, backend=wrong_backend)
    x = torch.randn(3, 4)
    assert torch.equal(inner(x), 2 * _softmax(x))
    result = compared(lambda y: inner(y).sum(), lambda y: inner(y).sum(), x)
    assert not result.ok, result
    torch._dynamo.reset()


def test_operations_that_no_mode_may_see_have_moved_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(PerturbRounding, "__torch_dispatch__", refuse)
    torch.manual_seed(0)
    x = (4 * torch.randn(16, 40, dtype=torch.float64)).requires_grad_()
    assert compared(_softmax, _by_logarithms, x).ok
    assert not compared(_softmax, lambda y: _by_logarithms(y) * (1 + 1e-12), x).ok


def test_tensors_that_share_memory_do_so_in_every_run() -> None:
    flat = torch.arange(6.0)
    view = flat[2:4]

    def written(x: Tensor, y: Tensor) -> Tensor:
        y.add_(1.0)
        return x.sum()

    assert compared(written, written, flat, view).ok
    result = compared(written, lambda x, y: x.sum() + 0 * y.add_(1.0).sum(), flat, view)
    assert not result.ok  # x is read too early
    assert torch.equal(flat, torch.arange(6.0))

    def same(x: Tensor, y: Tensor) -> Tensor:
        assert x is y
        return x.sum()

    assert compared(same, same, flat, flat).ok


def test_compiled_programs_of_every_kind() -> None:
    """By Dynamo, not by a plant: dataclasses, a counter, a list, backward() in the program."""
    module, x = Counting(), torch.randn(2, 4, requires_grad=True)

    def step(y: Tensor) -> Output:
        module.steps += 1
        module.history.append(y.detach() * 2)
        loss = module(y)
        loss.backward()
        return Output(loss.detach())

    result = torch_streamkl.verify(step, x, options=OPTIONS)
    assert result.ok, result
    found = {r.name for r in result.results}
    assert {"output.loss", "output.name", "argument 0.grad after"} <= found
    assert {"module.steps after", "module.history.0 after"} <= found
    assert module.steps == 0 and not module.history and x.grad is None
