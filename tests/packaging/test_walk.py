"""A loss goes through the stages in the order of docs/how-it-works/architecture.md."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_streamkl
from tests.packaging.test_architecture import ROOT, STAGES
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.validation import check

PASSES = Path(backend.__file__).resolve().parent
PAGE = (ROOT / "docs" / "how-it-works" / "architecture.md").read_text()
HELPERS = {"fx_utils", "options", "ddp"}  # every stage may call them
OF_INDUCTOR = 8  # the hop that is left out here: it takes a compilation
MOST_FILES = 120  # that one loss runs through, of those without helpers


def divergence(q_s: Tensor, k_s: Tensor, q_t: Tensor, k_t: Tensor) -> Tensor:
    future = torch.ones(q_s.shape[-2], k_s.shape[-2], dtype=torch.bool).triu(1)
    student = (q_s @ k_s.mT).masked_fill(future, -torch.inf).log_softmax(-1)
    teacher = (q_t @ k_t.mT).masked_fill(future, -torch.inf).softmax(-1)
    return F.kl_div(student, teacher, reduction="batchmean")


def squared_error(q_s: Tensor, k_s: Tensor, q_t: Tensor, k_t: Tensor) -> Tensor:
    maps = ((q @ k.mT).softmax(-1) for q, k in ((q_s, k_s), (q_t, k_t)))
    student, teacher = (x.unflatten(-1, (6, 4)).sum(-1) for x in maps)  # blocks of keys
    return (student - teacher).square().sum(-1).mean()


class Walk:
    """Records the functions of the rewrite that run, their files, and which stage calls which."""

    def __init__(self) -> None:
        self.files: list[str] = []  # in the order in which they are entered
        self.functions: list[tuple[str, str]] = []  # with their files, in the same order
        self.calls: set[tuple[str, str]] = set()  # of stages

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = _file(frame.f_code.co_filename)
        if event != "call" or not file or frame.f_code.co_name.startswith("<"):
            return
        if file not in self.files:
            self.files.append(file)
        function = file, frame.f_code.co_qualname
        if function not in self.functions:
            self.functions.append(function)
        caller = frame.f_back
        while caller is not None and not _file(caller.f_code.co_filename):
            caller = caller.f_back
        if caller is not None:
            self.calls.add((_stage(_file(caller.f_code.co_filename)), _stage(file)))


@functools.cache
def _file(path: str) -> str:
    """The path inside of fx_passes/, empty for other code."""
    return Path(path).relative_to(PASSES).as_posix() if Path(path).is_relative_to(PASSES) else ""


def _stage(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


@functools.cache
def _walk(loss: Any) -> Walk:
    options = {"streamkl.min_mib": 0, "streamkl.inner": "eager", "streamkl.verify": "always"}
    inputs = [torch.randn(1, 2, 24, 8, requires_grad=i < 2) for i in range(4)]
    torch._dynamo.reset()
    walk = Walk()
    checked_again = mock.patch.object(check, "passed_before", return_value=False)
    with torch_streamkl.reports() as report, checked_again:
        sys.setprofile(walk)
        try:
            torch.compile(loss, backend="streamkl", dynamic=False, options=options)(*inputs)
        finally:
            sys.setprofile(None)
    assert report.num_fused and not report.num_unfused
    return walk


def _hops(name: str = "walk") -> list[list[str]]:
    """The files of each hop; the first one is where a reader comes in."""
    table = PAGE.split(f"<!-- {name}:begin -->")[1].split(f"<!-- {name}:end -->")[0]
    rows = [line.split("|") for line in table.splitlines() if re.match(r"\| \d", line)]
    assert [int(row[1]) for row in rows] == list(range(1, len(rows) + 1))
    return [_named(row[3]) for row in rows]


def _report() -> list[str]:
    """The files of the report, which is no hop."""
    (row,) = (line for line in PAGE.splitlines() if line.startswith("| none |"))
    return _named(row)


def _named(text: str) -> list[str]:
    return re.findall(r"`([\w/]+\.py)`", text)


@pytest.mark.parametrize("loss", [divergence, squared_error])
def test_a_loss_goes_through_the_stages_in_their_order(loss: Any) -> None:
    walk, hops = _walk(loss), _hops()[: OF_INDUCTOR - 1]
    hops.insert(-1, _report())  # before the check
    if loss is squared_error:  # what the page says of it
        of_programs = PAGE.split("A **row program**")[1].split("\n\n")[1]
        assert set(_named(of_programs)) <= set(walk.files)
        hops = [hop[:1] for number, hop in enumerate(hops, 1) if number not in (4, 5)]
    entered = [walk.files.index(hop[0]) for hop in hops]
    assert entered == sorted(entered), [hop[0] for hop in hops]
    assert {file for hop in hops for file in hop} <= set(walk.files)
    assert f"So there are {len(_hops())} hops." in PAGE
    known = {_stage(file) for hop in [*_hops(), _report()] for file in hop} | HELPERS
    assert {_stage(file) for file in walk.files} <= known
    assert sum(_stage(file) not in HELPERS for file in walk.files) <= MOST_FILES


def test_a_reader_opens_these_functions() -> None:
    listed = PAGE.split("<!-- functions:begin -->")[1].split("<!-- functions:end -->")[0]
    named = re.findall(r"\d\. `([\w/]+\.py)`: `([\w.]+)`", listed)
    assert len(named) == len(_hops())
    entered = list(map(_walk(divergence).functions.index, named))
    assert entered == sorted(entered)


@pytest.mark.parametrize("loss", [divergence, squared_error])
def test_no_stage_calls_a_later_one(loss: Any) -> None:
    """fx_utils walks graphs by functions that it is given."""
    for caller, called in _walk(loss).calls:
        later = STAGES.index(called) > STAGES.index(caller)
        assert not later or caller == "fx_utils", (caller, called)


CALL = """
import sys
import torch
from torch_streamkl.attention import ops

files = {}

def entered(frame, event, _):
    name = frame.f_code.co_name  # annotations are functions in Python 3.14
    if event == "call" and name[0] != "<" and name != "__annotate__":
        files.setdefault(frame.f_code.co_filename)

inputs = [torch.randn(1, 2, 32, 16) for _ in range(4)]
sys.setprofile(entered)
ops.attention_kl(*inputs, teacher_scale=0.1, student_scale=0.1, window_right=0, impl="triton")
sys.setprofile(None)
print(*files, sep="\\n")
"""


def test_a_call_goes_down_to_its_kernel() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CALL], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    package = ROOT / "torch_streamkl"
    found = [Path(x) for x in done.stdout.splitlines()]
    files = [x.relative_to(package).as_posix() for x in found if x.is_relative_to(package)]
    hops = _hops("call")
    entered = [files.index(hop[0]) for hop in hops]
    assert entered == sorted(entered), [hop[0] for hop in hops]
    assert {file for hop in hops for file in hop} <= set(files)
