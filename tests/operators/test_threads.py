"""Operators in one thread while another one compiles, imports or is forked."""

from __future__ import annotations

import importlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_streamkl
from torch_streamkl import checks, compiler_marks, flop_counts, linear_kl
from torch_streamkl.program import graph

PACKAGE = Path(torch_streamkl.__file__).parent
LIMIT = 120.0  # seconds, of something that never happens


@pytest.fixture
def _another_thread_compiles() -> Iterator[None]:
    """A thread that Dynamo has begun a compilation in."""
    has_begun, may_end = threading.Event(), threading.Event()

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        has_begun.set()
        may_end.wait(LIMIT)
        return gm.forward

    step = torch.compile(torch.sin, backend=backend)
    thread = threading.Thread(target=step, args=(torch.ones(3),))
    thread.start()
    assert has_begun.wait(LIMIT)
    yield
    may_end.set()
    thread.join()


def _loss(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    w, xt, wt = (torch.randn(n, 8, generator=generator) for n in (20, 4, 20))
    return linear_kl(
        student_hidden=x, student_weight=w, teacher_hidden=xt, teacher_weight=wt, reduction="sum"
    )


@pytest.mark.usefixtures("_another_thread_compiles")
def test_a_second_derivative_raises() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(_loss(x), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated once"):
        gradient.square().sum().backward()


@pytest.mark.usefixtures("_another_thread_compiles")
def test_what_runs_is_no_compilation() -> None:
    assert not compiler_marks.is_compiling()
    assert checks.is_plain([torch.ones(2)])


def test_what_is_traced_is_one() -> None:
    seen = []

    def step(x: Tensor) -> Tensor:
        return x + 1 if compiler_marks.is_compiling() else x

    class Exported(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(compiler_marks.is_compiling())
            return x + 1

    x = torch.zeros(2)
    assert torch.compile(step, backend="eager", fullgraph=True)(x).sum() == 2
    torch.export.export(Exported(), (x,), strict=False)
    assert seen == [True]


def test_nothing_asks_torch_whether_some_thread_compiles() -> None:
    asking = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"torch\.compiler\.is_compiling\(", path.read_text())
    }
    assert asking == {"compiler_marks.py"}


def test_flops_while_another_thread_imports_the_counter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[str] = []
    has_begun, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(compiler_marks, "of_a_test", (has_begun, may_end), raising=False)
    source = """
from torch_streamkl.compiler_marks import of_a_test
of_a_test[0].set()
of_a_test[1].wait(60)
def register_flop_formula(operator):
    return lambda formula: formula(operator)
"""
    (tmp_path / "counter_of_a_test.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flop_counts, "_MODULE", "counter_of_a_test")
    monkeypatch.setattr(flop_counts, "_formulas", {"loss": registered.append})
    monkeypatch.setattr(flop_counts, "_waiting", ["loss"])
    importing = threading.Thread(target=importlib.import_module, args=("counter_of_a_test",))
    asking = threading.Thread(target=flop_counts.register)
    importing.start()
    assert has_begun.wait(LIMIT)
    asking.start()
    asking.join(0.2)  # it waits for the import
    may_end.set()
    asking.join()
    importing.join()
    assert registered == ["loss"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_expressions_in_a_process_that_is_forked_meanwhile() -> None:
    """A thread that the new process does not have was making one."""
    has_begun, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with graph._lock:
            has_begun.set()
            may_end.wait(LIMIT)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has_begun.wait(LIMIT)
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends it
        graph.const(0.123456)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    may_end.set()
    thread.join()
    assert status == 0
