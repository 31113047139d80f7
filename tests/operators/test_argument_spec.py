"""Operators' arguments follow from the fields of their problem: a new option is one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.interpreter import outside
from torch_streamkl.attention import ops
from torch_streamkl.attention.problem import AttentionProblem
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.spec import Spec, option

pytestmark = outside
ROOT = Path(__file__).parents[2]
LINE = '    sharpness: float = 2.5  # an option of this test\n    impl: str = "auto"\n'
# what a program sees of an option that it does not know of
PROGRAM = """
import torch
import torch.distributed as dist
from torch_streamkl import attention_kl
from torch_streamkl.attention import bound_op, ops
from torch_streamkl.attention.problem import AttentionProblem

dist.init_process_group("fake", rank=0, world_size=2)
from torch_streamkl.distributed import ring, ring_ops, sharding

seen, kept = [], AttentionProblem.__init__
def made(self, *args, **kwargs):
    kept(self, *args, **kwargs)
    seen.append(self.sharpness)
AttentionProblem.__init__ = made

def given_and_default(call):
    seen.clear()
    call({}), call({"sharpness": 4.0})
    return {2.5, 4.0} == set(seen)

for op in (ops.attention_kl, ops.attention_kl_backward, ring_ops.attention_kl_ring):
    assert "float sharpness=2.5" in str(op._schema), op
assert "sharpness" in sharding.ARGUMENTS
x = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(4)]
value = attention_kl(*x)  # a direct call
assert given_and_default(lambda more: ops.attention_kl(*x, **more)[0].sum().backward())
torch.testing.assert_close(ops.attention_kl(*x, student_scale=8**-0.5, teacher_scale=8**-0.5,
                                            sharpness=4.0)[0], value)
bound = bound_op.BoundOp(tuple(ops.SPEC.arguments[name].default for name in ops.SPEC.option_names))
seen.clear()
bound.forward(*(t.detach() for t in x), *(None,) * (ops.NUM_TENSORS - 4))
assert set(seen) == {2.5}
seen.clear()
made_ring = ring_ops._ring_of(*x, sharpness=4.0, group_name="0")
block = next(made_ring.blocks(0, 0, 1))
assert made_ring.call(block, (x[1], x[3]))[0].sharpness == 4.0
torch.func.vmap(lambda q: ops.attention_kl(q, *x[1:], sharpness=4.0)[0])(torch.stack([x[0]] * 3))
"""


def test_a_new_option_is_one_line(tmp_path: Path) -> None:
    """Of the problem: schemas, autograd, vmap, bound calls, sharding and the ring follow."""
    for folder in ("torch_streamkl", "fx_passes"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.pyc"))
    file = tmp_path / "torch_streamkl" / "attention" / "problem.py"
    text = file.read_text()
    assert text.count(LINE.splitlines(keepends=True)[1]) == 1
    file.write_text(text.replace(LINE.splitlines(keepends=True)[1], LINE))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True,
        cwd=tmp_path, timeout=300, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]


@dataclass
class Side:
    x: Tensor
    y: Tensor | None = None
    size: float = 1.0
    late: Tensor | None = None


@dataclass
class Problem:
    student: Side
    teacher: Side
    functional: Functional  # type: ignore[name-defined] # noqa: F821
    fill: float = option(-1.0, "float?", None)
    mask: Tensor | None = None
    hidden: int = 7


SPEC = Spec(Problem, Side, last=("late",), without=("hidden",))


def test_the_order_of_arguments() -> None:
    assert SPEC.schema == (
        "Tensor student_x, Tensor teacher_x, Tensor? student_y=None, Tensor? teacher_y=None, "
        "Tensor? mask=None, str functional='(P*(logP-logS))', float student_size=1.0, "
        "float teacher_size=1.0, float? fill=None, Tensor? student_late=None, "
        "Tensor? teacher_late=None"
    )
    assert SPEC.positions("mask", "fill") == (4, 8)


def test_the_problem_of_arguments() -> None:
    x, y, z = (torch.zeros(n) for n in (1, 2, 3))
    p = SPEC.problem(x, y, None, z, functional="(S*logS)", student_size=3.0, teacher_late=x)
    assert p.student == Side(x, None, 3.0, None) and p.teacher.y is z and p.teacher.late is x
    assert (p.functional.text, p.fill, p.hidden) == ("(S*logS)", -1.0, 7)
    assert SPEC.problem(x, y, fill=0.5).fill == 0.5
    with pytest.raises(KeyError, match="hidden"):
        SPEC.problem(x, y, hidden=1)


def test_no_argument_is_lost() -> None:
    """Of the operators, every field of their problems but a shard's place."""
    names = {a.name for a in ops.attention_kl._schema.arguments}
    assert {"mask", "student_sink", "teacher_bias", "impl", "deterministic"} < names
    assert isinstance(ops.problem_of(*[torch.zeros(1, 1, 2, 4)] * 4)[0], AttentionProblem)
    names = {a.name for a in linear_ops.linear_kl._schema.arguments}
    assert "vocab_start" not in names and "teacher_adapter_weight" in names
