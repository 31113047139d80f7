"""Libraries as installed, unmodified: what a KL on their attention maps or logits becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.comparing import compare
from tests.support.covering import every
from tests.support.modules import compare_step

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
SIZES = {"vocab_size": 260, "num_attention_heads": 4, "max_position_embeddings": 64}


def _llama(seed: int, num_layers: int, width: int) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=num_layers,
        num_key_value_heads=2, **SIZES,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
    # the first call with output_attentions installs hooks, which would break the graph
    model.eval()(input_ids=torch.zeros(1, 4, dtype=torch.long), output_attentions=True)
    return model


def _step(teacher: nn.Module, student: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Attention maps of mapped layers, on probabilities, with the clamp that masking needs."""
    options = {
        "output_attentions": True, "output_hidden_states": True, "use_cache": False,
        "attention_mask": mask,
    }  # fmt: skip
    with torch.no_grad():
        wanted = teacher(input_ids=ids, **options)
    got = student(input_ids=ids, **options)
    # rows of padding count here too: they have uniform attention, and gradients
    loss = got.hidden_states[-1].square().mean() * 0.1
    for i in range(2):
        p, q = wanted.attentions[2 * i + 1], got.attentions[i]
        rows = (p * (p.clamp_min(1e-12).log() - q.clamp_min(1e-12).log())).sum(-1)
        loss = loss + (rows * mask[:, None, :]).mean()
    return loss


def test_attention_with_padding() -> None:
    """Both sites fuse, nothing score-sized remains, loss and all gradients are eager's.

    test_models.py has other models.
    """
    ids = torch.randint(0, 260, (2, 33), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0  # with a causal mask the first rows have no key at all

    def make_step(teacher: nn.Module, student: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda ids, mask: _step(teacher, student, ids, mask)

    # a frozen teacher with twice the layers and width, and a student
    pair = _llama(0, 4, 64).requires_grad_(False), _llama(1, 2, 32)
    outcome = compare_step(make_step, pair, (ids, mask)).check()
    assert outcome.num_graphs == 1
    assert outcome.report.num_fused == 2, outcome.report
    assert outcome.report.num_remaining == 0, outcome.report


# ------------------------------------------------------------------------- losses of libraries
ROWS, STUDENT, TEACHER, VOCABULARY = 12, 8, 16, 40


def _loss(module: str, name: str, **options: Any) -> Callable[..., Tensor]:
    """A function of logits and labels, by its place in a package."""
    top = module.partition(".")[0]
    found = pytest.importorskip(module, reason=f"{top} is not installed", exc_type=ImportError)
    for part in name.split("."):
        found = getattr(found, part)
    loss: Any = found() if top == "torchtune" else found

    def run(hs: Tensor, ws: Tensor, ht: Tensor, wt: Tensor, labels: Tensor) -> Tensor:
        of_labels = {"torchtune": (labels,), "trl": ()}.get(top)
        given = {"target": labels} if of_labels is None else {}
        value: Tensor = loss(hs @ ws.T, ht @ wt.T, *(of_labels or ()), **given, **options)
        return value

    return run


TRL = "trl.experimental.gkd.gkd_trainer", "GKDTrainer.generalized_jsd_loss"
LIGER = (
    "liger_kernel.chunked_loss.jsd_loss", "LigerFusedLinearJSDFunction.distillation_loss_fn"
)  # fmt: skip
LOSSES: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    **{
        f"torchtune {name}": (("torchtune.modules.loss", name), {"normalize": False})
        for name in ("ForwardKLLoss", "ReverseKLLoss", "SymmetricKLLoss")
    },
    **{f"TRL, beta {x}": (TRL, {"beta": x, "temperature": 2.0}) for x in (0, 1, 0.5)},
    **{f"Liger, beta {x}": (LIGER, {"beta": x}) for x in (0, 1, 0.5)},
}


@pytest.mark.parametrize("name", every(2, LOSSES))
def test_losses_on_logits(name: str) -> None:
    """Logits of the same graph go into the library's own code: fused or not, eager's results."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, STUDENT), (VOCABULARY, STUDENT), (ROWS, TEACHER), (VOCABULARY, TEACHER))
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    labels = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    labels[:3] = -100
    for x in inputs[:2]:
        x.requires_grad_()
    place, options = LOSSES[name]
    compare(_loss(*place, **options), [*inputs, labels], inner="aot_eager").check_fused()
