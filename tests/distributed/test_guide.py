"""The code of docs/guide/several-gpus.md runs on two processes, each block with what it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.ranks import Rank, on_ranks, on_two_ranks
from torch_streamkl import linear_kl

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "several-gpus.md"
NUM_TOKENS, NUM_WORDS, WIDTH = 8, 20, 16
IMPORTED = {
    "torch": torch, "F": F, "DTensor": DTensor, "Replicate": Replicate, "Shard": Shard,
    "fully_shard": fully_shard, "ColwiseParallel": ColwiseParallel,
    "parallelize_module": parallelize_module,
}  # fmt: skip
# as tests compile: small losses, too, and no generated code
OPTIONS = 'backend="streamkl", options={"streamkl.inner": "eager", "streamkl.min_mib": 0}'


def block(first: str) -> str:
    """The block of the page that has this text."""
    every = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = (x for x in every if first in x)
    return found.replace('backend="streamkl"', OPTIONS)


def run(code: str, **given: Any) -> dict[str, Any]:
    scope = {**IMPORTED, **given}
    exec(code, scope)
    return scope


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, NUM_WORDS, bias=False)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x).relu()
        return self.lm_head(x)


def sharded(me: Rank) -> Model:
    model = Model()
    weight = distribute_tensor(model.lm_head.weight.detach(), me.mesh, [Shard(0)])
    model.lm_head.weight = nn.Parameter(weight)
    return model


def hidden(me: Rank) -> torch.Tensor:
    return me.randn(NUM_TOKENS, WIDTH)


@on_ranks
def plain_tensors(me: Rank) -> None:
    own = me.vocab(NUM_WORDS)
    weight = me.randn(NUM_WORDS, WIDTH)[own].requires_grad_()
    run(
        block("group=tp_group"),
        student_hidden=hidden(me),
        student_weight_shard=weight,
        teacher_hidden=hidden(me),
        teacher_weight_shard=me.randn(NUM_WORDS, WIDTH)[own],
        labels=torch.randint(NUM_WORDS, (NUM_TOKENS,)),
        tp_group=me.group,
    )
    assert weight.grad is not None and weight.grad.shape == weight.shape


@on_ranks
def dtensors(me: Rank) -> None:
    """The block has two ways to place hidden states, and a call; the one before imports."""
    code = block("# tensor parallel")
    tensor_parallel, call = code.split("# FSDP2")[0], "loss" + code.partition("\nloss")[2]
    fsdp2 = code.split("loss = ")[0].split("# FSDP2")[1]
    for placed, placement in ((tensor_parallel, Replicate()), ("#" + fsdp2, Shard(0))):
        given: dict[str, Any] = {"mesh": me.mesh, "model": sharded(me), "teacher": sharded(me)}
        given["linear_kl"] = linear_kl
        teacher = DTensor.from_local(hidden(me), me.mesh, [placement])
        scope = run(placed + call, **given, hidden=hidden(me), teacher_hidden=teacher)
        assert scope["loss"].full_tensor() >= 0


@on_ranks
def moved_teacher(me: Rank) -> None:
    scope = run(block("reshard_vocab"), student=sharded(me), teacher=sharded(me))
    assert scope["teacher_weight"].shape[0] == len(range(*me.vocab(NUM_WORDS).indices(NUM_WORDS)))


@on_ranks
def naive_loss(me: Rank) -> None:
    placed = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    teacher = parallelize_module(Model(), me.mesh, {"lm_head": placed})
    scope = run(block("def loss(x)"), mesh=me.mesh, student=Model(), teacher=teacher)
    assert scope["loss"](hidden(me)) >= 0


@on_ranks
def sequences(me: Rank) -> None:
    names = ("student_q", "student_k", "teacher_q", "teacher_k")
    given: dict[str, Any] = {name: me.randn(1, 2, NUM_TOKENS, WIDTH) for name in names}
    given["cp_mesh"] = me.mesh
    scope = run(block("shard_sequence"), **given)
    assert scope["loss"].dim() == 0
    assert scope["shard_sequence"](me.randn(1, 2, 16, 4), me.mesh).shape == (1, 2, 8, 4)
    given |= {k: scope[k] for k in ("attention_kl_context_parallel",)}
    given["offsets"] = torch.tensor([0, 6, 2 * NUM_TOKENS], dtype=torch.int32)
    assert run(block("cu_seqlens=offsets"), **given)["rows"].shape == (1, 2, NUM_TOKENS)


@on_ranks
def every_layer(me: Rank) -> None:
    given = {"model": Model(), "mesh": me.mesh, "policy": MixedPrecisionPolicy()}
    scope = run(block("trace_fully_shard"), **given)
    scope["step"](hidden(me)).square().sum().backward()
    assert all(x.grad is not None for x in scope["model"].parameters())


test_on_two_ranks = on_two_ranks(__name__)
