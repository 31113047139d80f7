"""torch_streamkl.verify: a user's whole program in eager mode, compiled and in float64."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_streamkl
from tests.support.covering import every
from tests.support.losses import kd
from tests.support.plants import PROGRAMS, inputs_of, planted, scaled
from torch_streamkl.fx_passes.validation import records

OPTIONS: dict[str, Any] = {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0}
verify = functools.partial(torch_streamkl.verify, options=OPTIONS)


@pytest.fixture(autouse=True)
def _without_inductor() -> Iterator[None]:
    records.forget()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(16, 64), nn.Linear(16, 64)
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x) * self.log_scale.exp()
        return kd(self.student(x) * self.log_scale.exp(), wanted)

    def counted(self, x: Tensor) -> Tensor:
        self.seen.add_(1.0)
        return self(x)

    def with_a_step(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self(x)


TABLE = torch.randn(64, 16, requires_grad=True)


def over_a_global(h: Tensor, ht: Tensor) -> Tensor:
    return kd(h @ TABLE.T, ht @ TABLE.detach().T)


def names(result: torch_streamkl.Verification) -> set[str]:
    return {x.name for x in result.results}


@pytest.mark.parametrize("program", ["head", "tied"])
def test_right_programs_agree(program: str) -> None:
    result = verify(PROGRAMS[program], *inputs_of(program))
    assert result.ok, result
    assert result.report.num_fused == 1
    assert {"output 0", "gradient of argument 0"} <= names(result)
    assert re.search(r"all \d results agree \(\d+ values\), 1 loss fused", str(result))
    assert all(len(line) < 120 for line in str(result).splitlines())


@pytest.mark.expects_failed_checks
def test_a_wrong_program_is_shown() -> None:
    unchecked = {**OPTIONS, "streamkl.verify": "never"}
    with planted(scaled("student_scale", 1.1)):
        result = torch_streamkl.verify(PROGRAMS["tied"], *inputs_of("tied"), options=unchecked)
    assert not result.ok
    assert not result.not_judged
    wrong = {x.name for x in result.results if x.difference}
    assert wrong >= {"output 0", "gradient of argument 0"}
    assert "too far off" in str(result)


@pytest.mark.parametrize(
    "how", every(2, ["module", "method", "closure", "partial", "compiled", "argument"])
)
def test_parameters_are_found(how: str) -> None:
    module, x = Distilled(), torch.randn(24, 16, requires_grad=True)
    ways: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "module": (module, (x,)),
        "method": (module.forward, (x,)),
        "closure": (lambda y: module(y), (x,)),
        "partial": (functools.partial(module, x), ()),
        "compiled": (torch.compile(module, backend="eager"), (x,)),
        "argument": (lambda m, y: m(y), (module, x)),
    }
    fn, args = ways[how]
    result = verify(fn, *args)
    assert result.ok, result
    found = {name.rpartition(".")[2] for name in names(result) if "log_scale" in name}
    assert found, names(result)
    gradients = [n for n in names(result) if n.startswith("gradient of")]
    assert len(gradients) >= 4, gradients
    (teacher,) = (x for x in result.results if x.name.endswith("teacher.weight"))
    assert teacher.eager is None and teacher.compiled is None


def test_globals_are_found() -> None:
    h, ht = torch.randn(24, 16, requires_grad=True), torch.randn(24, 16)
    result = verify(over_a_global, h, ht)
    assert result.ok, result
    assert "gradient of TABLE" in names(result)
    assert TABLE.grad is None and TABLE.dtype == torch.float32


def test_what_is_modified_is_compared_and_put_back() -> None:
    module, x = Distilled(), torch.randn(24, 16)
    result = verify(module.counted, x)
    assert result.ok, result
    assert any(name.endswith("seen after") for name in names(result))
    assert module.seen == 0 and module.log_scale.dtype == torch.float32

    def doubled(y: Tensor) -> Tensor:
        y.mul_(2)
        return module(y)

    before = x.clone()
    result = verify(doubled, x)
    assert result.ok, result
    assert "argument 0 after" in names(result)
    assert torch.equal(x, before)


def test_gradients_and_random_state_are_left() -> None:
    module, x = Distilled(), torch.randn(24, 16)
    module(x).backward()
    grads = [p.grad for p in module.parameters()]
    copies = [None if g is None else g.clone() for g in grads]
    state = torch.get_rng_state()
    assert verify(module, x).ok
    for parameter, grad, copy in zip(module.parameters(), grads, copies, strict=True):
        assert parameter.grad is grad
        assert grad is None or torch.equal(grad, copy)
    assert torch.equal(torch.get_rng_state(), state)


def _with_dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5).sum()


def test_random_programs_are_not_judged() -> None:
    x, state = torch.randn(8), torch.get_rng_state()
    result = verify(_with_dropout, x)
    assert not result.ok
    assert result.not_judged == "it draws random numbers"
    assert str(result) == "streamkl: not judged: it draws random numbers"
    assert torch.equal(torch.get_rng_state(), state)


def test_side_effects_are_compared_named_and_put_back() -> None:
    module, x = Distilled(), torch.randn(24, 16)
    result = verify(module.with_a_step, x)
    assert result.ok, result
    assert result.side_effects == ["steps"]
    assert "side effects, compared and put back: steps" in str(result)
    assert module.steps == 0

    def step(y: Tensor) -> Tensor:
        loss = module(y)
        loss.backward()
        return loss.detach()

    result = verify(step, x)
    assert result.ok, result
    assert "module.student.weight.grad after" in names(result)
    assert all(p.grad is None for p in module.parameters())


def test_what_differs_between_two_runs_is_not_judged() -> None:
    start = time.perf_counter()

    def growing(x: Tensor) -> Tensor:
        return x.sum() + (time.perf_counter() - start)

    assert verify(growing, torch.randn(8)).not_judged == "two runs in eager mode differ"


def test_iterators_and_programs_that_give_nothing_are_not_judged() -> None:
    batches = iter([torch.ones(3), torch.ones(3)])
    result = verify(lambda: next(batches).sum())
    assert not result.ok
    assert result.not_judged == "it reads an iterator, which cannot be put back: batches"
    assert len(list(batches)) == 2
    result = verify(lambda x: None, torch.ones(3))
    assert not result.ok
    assert result.num_compared == 0

    def empty(x: Tensor) -> Tensor:
        return x[:0]

    result = verify(empty, torch.ones(3))
    assert not result.ok
    assert "nothing that can be compared" in result.not_judged


def test_nan_in_eager_is_said() -> None:
    """0 * -inf in kl_div, as in README's first loss: 16239 in place of NaN is no agreement."""
    result = verify(PROGRAMS["attention"], *inputs_of("attention"))
    assert not result.ok
    assert "agree" not in str(result)
    notes = {x.name: x.note for x in result.results if x.note}
    assert notes.keys() == {"output 0", "gradient of argument 6"}
    assert notes["output 0"] == (
        "eager is NaN here, the compiled program gives the defined value "
        "(docs/reference/numerics.md)"
    )
    assert not any(x.difference for x in result.results)


def test_what_raises_in_eager_raises() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        verify(lambda x: x @ x, torch.randn(3, 4))


def test_half_precision() -> None:
    result = verify(PROGRAMS["tied"], *inputs_of("tied", torch.bfloat16))
    assert result.ok, result
