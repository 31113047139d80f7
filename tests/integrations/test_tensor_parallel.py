"""Models of transformers with ``tp_plan="auto"`` on two processes; their code knows nothing of us.

The truth is the same models and code without torch.compile.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from tests.integrations.libraries import needs, optional
from tests.support.compiling import compile_rewritten
from tests.support.ranks import Rank, on_ranks, on_two_ranks
from torch_streamkl.fx_passes import backend

transformers: Any = optional("transformers")
NUM_WORDS = 49  # vocabulary entries that two ranks do not share evenly
pytestmark = [needs("transformers", "accelerate"), pytest.mark.slow]


def _models(me: Rank) -> tuple[Any, Any]:
    """Student and teacher, from files as users load them."""
    os.environ |= {"RANK": str(me.rank), "LOCAL_RANK": str(me.rank), "WORLD_SIZE": str(me.size)}
    folder: list[Any] = [None]
    if me.rank == 0:
        import tempfile

        folder = [tempfile.mkdtemp()]
        for seed, name in enumerate(("student", "teacher")):
            torch.manual_seed(seed)
            config = transformers.AutoConfig.for_model(
                "llama", vocab_size=NUM_WORDS, hidden_size=32, intermediate_size=64,
                num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            )  # fmt: skip
            model = transformers.AutoModelForCausalLM.from_config(config)
            model.save_pretrained(Path(folder[0]) / name)
    distributed.broadcast_object_list(folder, 0)
    student, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder[0]) / name, tp_plan="auto", attn_implementation="eager", use_cache=False
        )
        for name in ("student", "teacher")
    )
    assert isinstance(student.lm_head.weight, DTensor)
    return student.train(), teacher.eval().requires_grad_(False)


def logits(student: Any, teacher: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        target = teacher(ids).logits
    output = student(ids, labels=ids)
    target, made = target[:, :-1] / 2, output.logits[:, :-1] / 2
    return output.loss + F.kl_div(made.log_softmax(-1), target.softmax(-1), reduction="batchmean")


def maps(student: Any, teacher: Any, ids: Tensor) -> Tensor:
    """A rank's own heads."""
    with torch.no_grad():
        target = teacher(ids, output_attentions=True).attentions
    made = student(ids, output_attentions=True).attentions
    losses = [F.kl_div((s + 1e-9).log(), t, reduction="batchmean")
              for s, t in zip(made, target, strict=True)]  # fmt: skip
    return torch.stack(losses).sum()


def _same_as_eager(me: Rank, loss: Any, num_sites: int) -> backend.Report:
    ids = (torch.arange(24).view(2, 12) * 7 % NUM_WORDS).to(me.device)
    results = []
    with torch._dynamo.config.patch(nested_graph_breaks=True), backend.collected() as report:
        for run in (loss, compile_rewritten(loss, inner="aot_eager")):
            student, teacher = _models(me)
            for model in (student, teacher):  # installs what captures the maps
                with torch.no_grad():
                    model(ids[:, :2], output_attentions=True)
            value = run(student, teacher, ids)
            value.backward()
            results.append((value.detach(), dict(student.named_parameters())))
    assert report.num_fused == num_sites and not report.num_unfused, str(report)
    (expected, truth), (value, ours) = results
    torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5)
    for name, x in truth.items():
        if x.grad is not None:
            torch.testing.assert_close(ours[name].grad, x.grad, atol=1e-5, rtol=1e-4)
    return report


@on_ranks
def logits_of_tp_plan(me: Rank) -> None:
    report = _same_as_eager(me, logits, 1)
    assert "vocabulary sharded over 2 ranks" in report.sites[0].runs, report.sites[0].runs


@on_ranks
def maps_of_tp_plan(me: Rank) -> None:
    _same_as_eager(me, maps, 2)


test_on_two_ranks = on_two_ranks(__name__)
