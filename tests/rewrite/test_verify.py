"""torch_streamkl.verify: a user's whole program in eager mode, compiled and in float64.

It finds wrong programs of every kind, passes right ones, and changes no state.
"""

import collections
import functools
import random
import re
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_streamkl
from tests.support.covering import every
from tests.support.losses import kd
from tests.support.plants import PROGRAMS, inputs_of, planted, scaled
from tests.support.wrong_programs import PLANTED, Opaque, Output, vector
from torch_streamkl.fx_passes import verify as verifying
from torch_streamkl.fx_passes.validation import records
from torch_streamkl.fx_passes.verification.rounding import PerturbRounding

OPTIONS = {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0}
verify = functools.partial(torch_streamkl.verify, options=OPTIONS)


@pytest.fixture(autouse=True)
def _without_inductor():
    records.forget()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def compared(right, wrong, *args):
    """``right`` against ``wrong`` in the place of what torch.compile would make of it."""
    return verifying._verify(right, args, {}, compiler=lambda _: wrong)


def names(result, differ=False):
    return {x.name for x in result.results if x.difference or not differ}


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(16, 64), nn.Linear(16, 64)
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))
        self.steps = 0

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x) * self.log_scale.exp()
        return kd(self.student(x) * self.log_scale.exp(), wanted)


TABLE = torch.randn(64, 16, requires_grad=True)


# ---------------------------------------------------------------------------- compiled programs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("program", ["head", "tied"])
def test_right_programs_agree(program, dtype):
    result = verify(PROGRAMS[program], *inputs_of(program, dtype))
    assert result.ok, result
    assert result.report.num_fused == 1
    assert {"output 0", "gradient of argument 0"} <= names(result)
    assert re.search(r"all \d results agree \(\d+ values\), 1 of 1 loss fused", str(result))
    assert all(len(line) < 120 for line in str(result).splitlines())


@pytest.mark.expects_failed_checks
def test_a_wrong_program_is_shown():
    unchecked = {**OPTIONS, "streamkl.verify": "never"}
    with planted(scaled("student_scale", 1.1)):
        result = torch_streamkl.verify(PROGRAMS["tied"], *inputs_of("tied"), options=unchecked)
    assert not result.ok and not result.not_judged
    assert names(result, differ=True) >= {"output 0", "gradient of argument 0"}
    assert "too far off" in str(result)


def test_nan_in_eager_is_said():
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
    assert not names(result, differ=True)


WAYS = {
    "module": lambda module, x: (module, (x,)),
    "method": lambda module, x: (module.forward, (x,)),
    "closure": lambda module, x: (lambda y: module(y), (x,)),
    "partial": lambda module, x: (functools.partial(module, x), ()),
    "compiled": lambda module, x: (torch.compile(module, backend="eager"), (x,)),
    "argument": lambda module, x: (lambda m, y: m(y), (module, x)),
}


@pytest.mark.parametrize("how", every(2, WAYS))
def test_parameters_are_found(how):
    fn, args = WAYS[how](Distilled(), torch.randn(24, 16, requires_grad=True))
    result = verify(fn, *args)
    assert result.ok, result
    found = names(result)
    assert any("log_scale" in name for name in found), found
    assert sum(name.startswith("gradient of") for name in found) >= 4, found
    (teacher,) = (x for x in result.results if x.name.endswith("teacher.weight"))
    assert teacher.eager is None and teacher.compiled is None


def test_globals_are_found():
    h, ht = torch.randn(24, 16, requires_grad=True), torch.randn(24, 16)
    result = verify(lambda h, ht: kd(h @ TABLE.T, ht @ TABLE.detach().T), h, ht)
    assert result.ok, result
    assert "gradient of TABLE" in names(result)
    assert TABLE.grad is None and TABLE.dtype == torch.float32


# by name: a step that changes something, and what is said to be compared
CHANGES = {
    "a buffer": (lambda module, y: module.seen.add_(1.0), "seen after"),
    "an argument": (lambda module, y: y.mul_(2), "argument 0 after"),
    "an attribute": (lambda module, y: setattr(module, "steps", module.steps + 1), "steps"),
    "gradients": (lambda module, y: module(y).backward(), "module.student.weight.grad after"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_compiled_program_changes_is_compared_and_put_back(name):
    change, text = CHANGES[name]
    module, x = Distilled(), torch.randn(24, 16)

    def step(y):
        change(module, y)
        return module(y).detach()

    before = x.clone()
    result = verify(step, x)
    assert result.ok, result
    assert any(found.endswith(text) for found in [*names(result), *result.side_effects]), result
    if name == "an attribute":
        assert f"side effects, compared and put back: {result.side_effects[0]}" in str(result)
    assert torch.equal(x, before) and module.seen == 0 and module.steps == 0
    assert all(p.grad is None and p.dtype == torch.float32 for p in module.parameters())


def test_gradients_and_random_state_are_left():
    module, x = Distilled(), torch.randn(24, 16)
    module(x).backward()
    grads = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in module.parameters()]
    state = torch.get_rng_state()
    assert verify(module, x).ok
    for parameter, grad, copy in grads:
        assert parameter.grad is grad
        assert grad is None or torch.equal(grad, copy)
    assert torch.equal(torch.get_rng_state(), state)


def test_compiled_programs_of_every_kind():
    """By Dynamo, not by a plant: dataclasses, a counter, a list, backward() in the program."""
    module, x = Counting(), torch.randn(2, 4, requires_grad=True)

    def step(y):
        module.steps += 1
        module.history.append(y.detach() * 2)
        loss = module(y)
        loss.backward()
        return Output(loss.detach())

    result = verify(step, x)
    assert result.ok, result
    expected = {"output.loss", "output.name", "argument 0.grad after"}
    expected |= {"module.steps after", "module.history.0 after"}
    assert expected <= names(result)
    assert module.steps == 0 and not module.history and x.grad is None


# ---------------------------------------------------------------------------- what is not judged
BATCHES = iter([torch.ones(3), torch.ones(3)])
NOT_JUDGED = {
    "dropout": (lambda x: F.dropout(x, 0.5).sum(), "it draws random numbers"),
    "torch": (lambda x: x * torch.rand(()).item(), "it draws random numbers"),
    "random": (lambda x: x * random.random(), "it draws random numbers"),
    "numpy": (lambda x: x * np.random.rand(), "it draws random numbers"),
    "the time": (
        lambda x: x.sum() + time.perf_counter() % 1,
        "two runs in eager mode differ",
    ),
    "an iterator": (
        lambda x: next(BATCHES).sum(),
        "it reads an iterator, which cannot be put back: BATCHES",
    ),
    "an empty tensor": (lambda x: x[:0], "nothing that can be compared"),
    "nothing": (lambda x: None, ""),
}


@pytest.mark.parametrize("name", NOT_JUDGED)
def test_not_judged(name):
    program, text = NOT_JUDGED[name]
    x, numbers = torch.randn(8), np.random.get_state()[1].copy()
    states = torch.get_rng_state(), random.getstate()
    result = verify(program, x)
    assert not result.ok
    assert text in result.not_judged
    if name == "dropout":
        assert str(result) == f"streamkl: not judged: {text}"
    assert text or result.num_compared == 0
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], numbers)
    assert name != "an iterator" or len(list(BATCHES)) == 2


def test_what_raises_in_eager_raises():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        verify(lambda x: x @ x, torch.randn(3, 4))


def test_what_cannot_be_compared_is_listed():
    thing = Opaque()
    result = compared(lambda x: (x, thing), lambda x: (x, thing), torch.ones(2))
    assert not result.ok
    assert result.not_compared == ["output 1 is a Opaque"]

    def freed(y):
        loss = y.square().sum()
        loss.backward()
        return loss

    result = compared(freed, freed, torch.ones(2, requires_grad=True))
    assert "backward() through them itself" in result.not_compared[0]


# ------------------------------------------------------------------------------- wrong programs
@pytest.mark.parametrize("what", PLANTED)
def test_planted_wrong_programs_are_found(what):
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


@pytest.mark.parametrize(("factor", "is_right"), [(1.0, True), (1.01, False)])
def test_defined_values_are_compared_where_eager_is_nan(factor, is_right):
    def expected(x):
        kept = x[[0, 1, 3]]
        return F.kl_div(kept.log_softmax(-1), (2 * kept).softmax(-1), reduction="sum") * factor

    def divergence(x):
        return F.kl_div((x + MASK).log_softmax(-1), (2 * x + MASK).softmax(-1), reduction="sum")

    def of_logarithms(x):
        p = (2 * x + MASK).softmax(-1)
        return (p * (p.log() - (x + MASK).log_softmax(-1))).sum()

    x = vector().detach()
    assert divergence(x).isnan()
    result = compared(divergence, expected, x)
    assert not result.ok
    assert ("gives the defined value" in str(result)) is is_right
    assert bool(result.results[0].difference) is not is_right
    # where float64 with finite masks has no value either, nothing is claimed
    result = compared(of_logarithms, expected, x)
    assert not result.ok and "cannot be compared" in str(result)


# ------------------------------------------------------------------------------ state of a program
class Counting(nn.Module):
    of_class = 0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.steps, self.rate, self.cache, self.history = 0, 1.0, None, []
        self.by_name = {"loss": torch.zeros(4)}
        self.kinds = set()
        self.recent = collections.deque([0.0], maxlen=1)
        self.array = np.zeros(3)
        self.generator = random.Random(0)

    def forward(self, x):
        return self.layer(x).square().sum()


TOTAL = 0
GENERATOR = torch.Generator().manual_seed(0)


def _add_to_a_global(module, x, step):
    global TOTAL
    TOTAL += step


def _count_calls(module, x, step):
    _count_calls.calls = getattr(_count_calls, "calls", 0) + step


EFFECTS = {
    "a global": _add_to_a_global,
    "an attribute of a function": _count_calls,
    "an attribute": lambda module, x, n: setattr(module, "steps", module.steps + n),
    "a factor": lambda module, x, n: setattr(module, "rate", module.rate * (1.0 - 0.1 * n)),
    "a cache": lambda module, x, n: setattr(module, "cache", module.layer.weight.detach() * n),
    "a list": lambda module, x, n: module.history.append(x.sum() * n),
    "a dict": lambda module, x, n: module.by_name.update(loss=x.detach() * n),
    "a set": lambda module, x, n: module.kinds.add(f"kind {n}"),
    "a deque": lambda module, x, n: module.recent.append(float(n)),
    "an array": lambda module, x, n: np.add(module.array, n, out=module.array),
    "a buffer": lambda module, x, n: module.seen.add_(n),
    "a parameter": lambda module, x, n: setattr(
        module.layer, "weight", nn.Parameter(module.layer.weight.detach() * n)
    ),
    "a class": lambda module, x, n: setattr(Counting, "of_class", Counting.of_class + n),
    "a generator": lambda module, x, n: module.recent.append(
        sum(module.generator.random() for _ in range(n))
    ),
    "a generator of torch": lambda module, x, n: module.by_name.update(
        noise=torch.rand(n, generator=GENERATOR)
    ),
}


def _snapshot(module):
    plain = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    kept = {k: v.copy() if hasattr(v, "copy") else v for k, v in plain.items()}
    state = {k: (v, v.dtype, v.clone()) for k, v in module.state_dict(keep_vars=True).items()}
    own = GENERATOR.get_state().tolist(), module.generator.getstate(), Counting.of_class
    return kept, state, TOTAL, dict(vars(_count_calls)), own


@pytest.mark.parametrize("name", EFFECTS)
def test_state_is_compared_and_put_back(name):
    module, x = Counting(), torch.randn(2, 4)
    local = 0

    def right(y, step=1):
        nonlocal local
        local += step
        EFFECTS[name](module, y, step)
        return module(y)

    before = _snapshot(module)
    good = compared(right, right, x)
    bad = compared(right, functools.partial(right, step=2), x)
    after = _snapshot(module)
    assert good.ok, good
    assert good.side_effects
    assert not bad.ok, bad
    wrong = names(bad, differ=True)
    assert "local after" in wrong and len(wrong) >= 2, bad
    assert local == 0
    assert before[2:] == after[2:]
    for key, value in before[0].items():
        same = np.array_equal if isinstance(value, np.ndarray) else lambda a, b: a == b
        assert value is after[0][key] or same(value, after[0][key]), key
    for key, (tensor, dtype, numbers) in before[1].items():
        assert after[1][key][0] is tensor and tensor.dtype == dtype
        assert torch.equal(tensor, numbers)


def test_lists_and_dicts_of_arguments():
    def grown(items, table):
        items.append(items[0] * 2)
        table["mean"] = items[0].mean()
        return items[0].sum()

    def wrong(items, table):
        items.append(items[0] * 3)
        return items[0].sum()

    items, table = [torch.ones(3)], {"n": 1}
    assert compared(grown, grown, items, table).ok
    found = names(compared(grown, wrong, items, table), differ=True)
    assert found >= {"argument[0][0][1] after", "argument[0][1]['mean'] after"}
    assert len(items) == 1 and table == {"n": 1}


def test_tensors_that_share_memory_do_so_in_every_run():
    flat = torch.arange(6.0)
    view = flat[2:4]

    def written(x, y):
        y.add_(1.0)
        return x.sum()

    def same(x, y):
        assert x is y
        return x.sum()

    assert compared(written, written, flat, view).ok
    result = compared(written, lambda x, y: x.sum() + 0 * y.add_(1.0).sum(), flat, view)
    assert not result.ok  # x is read too early
    assert torch.equal(flat, torch.arange(6.0))
    assert compared(same, same, flat, flat).ok


# ------------------------------------------------------------------------------ training steps
def _divergence(x, y):
    log_p = y.log_softmax(-1)
    return (log_p.exp() * (log_p - x.log_softmax(-1))).sum(-1).mean()


def _training_step():
    """A module, its optimizer, and a step of a divergence times a factor."""
    torch.manual_seed(3)
    module = nn.Linear(16, 40)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    y = torch.randn(12, 40)

    def step(x, factor=1.0):
        optimizer.zero_grad()
        loss = _divergence(module(x), y) * factor
        loss.backward()
        optimizer.step()
        return loss.detach() / factor

    return module, optimizer, step


def test_a_training_step_with_its_optimizer():
    module, optimizer, step = _training_step()
    x = torch.randn(12, 16)
    step(x)
    state = {k: v.clone() for k, v in module.state_dict().items()}
    moments = [{k: (v, v.clone()) for k, v in s.items()} for s in optimizer.state.values()]
    result = compared(step, step, x)
    assert result.ok, result
    for text in ("weight after", "weight.grad after", "exp_avg"):
        assert any(text in name for name in names(result)), result
    # Adam's step is that of any multiple of a loss: the moments and the gradients tell
    assert not compared(step, functools.partial(step, factor=2.0), x).ok
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name])
    for entry, kept in zip(optimizer.state.values(), moments, strict=True):
        assert all(entry[k] is v and torch.equal(v, copy) for k, (v, copy) in kept.items())


def test_an_optimizer_that_computes_with_tensors_agrees():
    """A compiled AdamW has 1 - beta ** step in float32, where eager code has it in float64."""
    _, optimizer, step = _training_step()
    x = torch.randn(12, 16)

    def with_another_rate(x):
        group = optimizer.param_groups[0]
        rate, group["lr"] = group["lr"], group["lr"] * 1.001
        try:
            return step(x)
        finally:
            group["lr"] = rate

    result = verifying.verify(step, x, options={"streamkl.inner": "eager"})
    assert result.ok, result
    assert not compared(step, with_another_rate, x).ok


# ---------------------------------------------------------------------------------- right programs
def _in_parts(x):
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return (b @ b.mT + a @ a.mT).to(x.dtype)


def _by_parts(x):
    y = x.flip(-1)
    return (y.softmax(-1) * (y - x)).sum() - (y.logsumexp(-1) - x.logsumexp(-1)).sum()


OTHERWISE = {
    "softmax": (
        lambda x: x.softmax(-1),
        lambda x: (x - x.logsumexp(-1, keepdim=True)).exp(),
    ),
    "product": (lambda x: x @ x.mT, _in_parts),
    "divergence": (
        lambda x: F.kl_div(x.log_softmax(-1), x.flip(-1).softmax(-1), reduction="sum"),
        _by_parts,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", OTHERWISE)
def test_right_programs_that_round_otherwise_agree(what, dtype):
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


@pytest.mark.parametrize("seed", range(6))
def test_a_loss_of_bfloat16_that_is_off_by_five_percent(seed):
    torch.manual_seed(seed)
    x, y = ((2 * torch.randn(16, 100)).bfloat16().requires_grad_() for _ in range(2))

    def otherwise(x, y):
        return _divergence(x.float(), y.float()).bfloat16()

    def wrong(x, y):  # in its value alone
        loss = otherwise(x, y)
        return loss + 0.05 * loss.detach()

    assert compared(_divergence, otherwise, x, y).ok
    assert names(compared(_divergence, wrong, x, y), differ=True) == {"output 0"}


def test_what_is_compiled_inside_runs_as_it_is_written():
    """A compiled module inside of a step is no measure for itself."""

    def softmax(x):
        return x.softmax(-1)

    def wrong_backend(gm, _):
        return lambda *args: tuple(2 * x for x in gm(*args))

    inner = torch.compile(softmax, backend=wrong_backend)
    x = torch.randn(3, 4)
    assert torch.equal(inner(x), 2 * softmax(x))
    result = compared(lambda y: inner(y).sum(), lambda y: inner(y).sum(), x)
    assert not result.ok, result
    torch._dynamo.reset()


def test_operations_that_no_mode_may_see_have_moved_arguments(monkeypatch):
    def refuse(*_):
        raise NotImplementedError

    monkeypatch.setattr(PerturbRounding, "__torch_dispatch__", refuse)
    torch.manual_seed(0)
    right, other = OTHERWISE["softmax"]
    x = (4 * torch.randn(16, 40, dtype=torch.float64)).requires_grad_()
    assert compared(right, other, x).ok
    assert not compared(right, lambda y: other(y) * (1 + 1e-12), x).ok
