"""Every operator on a GPU that is not the current one: the same numbers as where it is.

Needs two GPUs: ``pytest tests/kernels/test_other_devices.py -vv -s``. Most of the time is
compilation, so parts of it (``-k``) run side by side in processes of their own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.kernels import device_cases
from tests.kernels.device_cases import (
    COMPILED,
    STEPS,
    Results,
    compiled_inputs,
    forget,
    judged,
    normal,
    same,
    unrecorded,
    watched_replays,
)
from torch_streamkl import attention_kl

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
pytestmark = [pytest.mark.gpu, two_gpus]
# of the tensors, and the current one
PLACES = [("cuda:1", "cuda:0"), ("cuda:0", "cuda:1")]
places = pytest.mark.parametrize(("device", "current"), PLACES, ids=lambda x: x[-1])
# the second call is recorded, the third issues that; a recording serves either current device
IS_OTHER = (True, True, True, False, True)


@pytest.fixture(autouse=True)
def _says_how_long(request: pytest.FixtureRequest) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"{request.node.name}: {time.perf_counter() - start:.1f} s", flush=True)


@contextlib.contextmanager
def current_device(device: str) -> Iterator[None]:
    """Makes a device the current one; what runs inside must leave it so."""
    index = torch.device(device).index
    with torch.cuda.device(index):
        yield
        assert torch.cuda.current_device() == index


@contextlib.contextmanager
def nothing_on(device: str) -> Iterator[None]:
    """Inside, nothing may be allocated on a device."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield
    assert torch.cuda.max_memory_allocated(device) <= before, f"memory of {device}"


@places
@pytest.mark.parametrize("name", STEPS)
def test_operator(name: str, device: str, current: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, replays = STEPS[name], watched_replays(monkeypatch)
    with current_device(device):
        expected = unrecorded(case, device, len(IS_OTHER), monkeypatch)
    with nothing_on(current):
        for seed, is_other in enumerate(IS_OTHER):
            with current_device(current if is_other else device):
                same(case.step(seed, device), expected[seed], case)
    assert all(replays)
    assert case.is_recorded in (None, bool(replays))
    if device == "cuda:1":
        with current_device("cuda:0"):
            on_first = case.step(0, "cuda:0")
        for x, y in zip(expected[0], on_first, strict=True):
            torch.testing.assert_close(x.cpu(), y.cpu(), equal_nan=True)


@places
def test_current_stream_of_the_device(device: str, current: str) -> None:
    """Launches go to the stream that is current on the tensors' device."""
    side = torch.cuda.Stream(device)
    forget()
    inputs = normal(0, device, *[(1, 2, 256, 64)] * 4)
    wanted = attention_kl(*inputs, impl="triton")
    torch.cuda.synchronize(device)
    for _ in range(3):
        with torch.cuda.stream(side), torch.cuda.device(current):
            late = [torch.zeros_like(x) for x in inputs]
            with torch.cuda.device(device):
                torch.cuda._sleep(20_000_000)
            for x, y in zip(late, inputs, strict=True):
                x.copy_(y)
            found = attention_kl(*late, impl="triton")
        side.synchronize()
        assert torch.equal(found, wanted)


def test_two_threads() -> None:
    """Each on its own device at once, as under nn.DataParallel."""
    names = ["attention-triton-forward_kl", "attention-hopper-causal", "linear-mean"]
    names += ["rows-indexer", "rows-heads_mean"]

    def work(device: str) -> list[Results]:
        with torch.cuda.device(torch.device(device).index):
            found = []
            for name in names:
                try:
                    found += [STEPS[name].step(seed, device) for seed in range(4)]
                except NotImplementedError:
                    continue
            return found

    forget()
    expected = {device: work(device) for device, _ in PLACES}
    forget()
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(expected, pool.map(work, expected), strict=True))
    for device, results in expected.items():
        for x, y in zip(found[device], results, strict=True):
            same(x, y, STEPS[names[0]])


def value_and_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> Results:
    value = function(*inputs)
    trained = [x for x in inputs if x.requires_grad]
    return [value.detach(), *torch.autograd.grad(value * 1.7, trained)]


def check_against_eager(
    function: Callable[..., Tensor], inputs: list[Tensor], found: Results
) -> None:
    eager = value_and_gradients(function, inputs)
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    exact = value_and_gradients(function, wide)
    for i, (error, allowed) in enumerate(judged(found, eager, exact)):
        assert error <= allowed, (i, error, allowed)


@places
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str, device: str, current: str) -> None:
    """A fused loss is right, and its check passes, whatever device is the current one."""
    function = COMPILED[name][0]
    torch._dynamo.reset()
    forget()
    compiled = torch.compile(
        function,
        backend="streamkl",
        fullgraph=True,
        options={"streamkl.strict": True, "streamkl.verify": "always", "streamkl.min_mib": 0},
    )
    for seed, is_other in enumerate(IS_OTHER):
        inputs = compiled_inputs(name, seed, device)
        with current_device(current if is_other else device):
            found = value_and_gradients(compiled, inputs)
        check_against_eager(function, inputs, found)


def test_cpp_wrapper() -> None:
    """Inductor's C++ launches the portable kernels on the device of the graph."""
    torch._dynamo.reset()
    inputs = compiled_inputs("head", 0, "cuda:1")
    options = {"streamkl.strict": True, "cpp_wrapper": True, "streamkl.min_mib": 0}
    function = device_cases.head_loss
    try:
        with current_device("cuda:0"):
            torch.compile(function, options={"cpp_wrapper": True})(*inputs)
    except Exception as error:
        pytest.skip(f"Inductor's C++ does not compile here: {error}")
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="streamkl", fullgraph=True, options=options)
    for _ in range(2):
        with current_device("cuda:0"):
            found = value_and_gradients(compiled, inputs)
        check_against_eager(function, inputs, found)
