"""Libraries as installed, unmodified: what a KL on their attention maps or logits becomes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.comparing import compare
from tests.support.covering import every
from tests.support.modules import compare_step

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
SIZES = {"vocab_size": 260, "num_attention_heads": 4, "max_position_embeddings": 64}


def _bert(num_layers: int, width: int) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=num_layers, **SIZES
    )
    return transformers.BertModel._from_config(config, attn_implementation="eager")


def _decoder(family: str, num_layers: int, width: int) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_key_value_heads=2,
        **SIZES,
    )
    return getattr(transformers, f"{family}ForCausalLM")._from_config(
        config, attn_implementation="eager"
    )


def _pair(family: str) -> tuple[nn.Module, nn.Module]:
    """A frozen teacher with twice the layers and width, and a student."""
    models = []
    for seed, num_layers, width in ((0, 4, 64), (1, 2, 32)):
        torch.manual_seed(seed)
        build = (
            _bert(num_layers, width) if family == "Bert" else _decoder(family, num_layers, width)
        )
        # the first call with output_attentions installs hooks, which would break the graph
        build.eval()(input_ids=torch.zeros(1, 4, dtype=torch.long), output_attentions=True)
        models.append(build)
    return models[0].requires_grad_(False), models[1]


def _step(
    family: str, teacher: nn.Module, student: nn.Module, ids: Tensor, mask: Tensor | None
) -> Tensor:
    """Attention maps of mapped layers, on probabilities, with the clamp that masking needs."""
    options = {"output_attentions": True, "output_hidden_states": True}
    if mask is not None:
        options["attention_mask"] = mask
    if family != "Bert":
        options["use_cache"] = False
    with torch.no_grad():
        wanted = teacher(input_ids=ids, **options)
    got = student(input_ids=ids, **options)
    # rows of padding count here too: they have uniform attention, and gradients
    loss = got.hidden_states[-1].square().mean() * 0.1
    for i in range(2):
        p, q = wanted.attentions[2 * i + 1], got.attentions[i]
        rows = (p * (p.clamp_min(1e-12).log() - q.clamp_min(1e-12).log())).sum(-1)
        loss = loss + (rows if mask is None else rows * mask[:, None, :]).mean()
    return loss


@pytest.mark.parametrize(
    ("family", "padding"),
    [
        pytest.param("Bert", "none", marks=pytest.mark.slow),
        pytest.param("Bert", "right", marks=pytest.mark.slow),
        pytest.param("Llama", "none", marks=pytest.mark.slow),
        ("Llama", "left"),
        pytest.param("Qwen2", "left", marks=pytest.mark.slow),
    ],
)
def test_transformers_attention(family: str, padding: str) -> None:
    """Both sites fuse, nothing score-sized remains, loss and all gradients are eager's."""
    ids = torch.randint(0, 260, (2, 33), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[1, :9] = 0  # with a causal mask the first rows have no key at all
    elif padding == "right":
        mask[1, 20:] = 0
    mask = None if padding == "none" else mask

    def make_step(
        teacher: nn.Module, student: nn.Module
    ) -> Callable[[Tensor, Tensor | None], Tensor]:
        return lambda ids, mask: _step(family, teacher, student, ids, mask)

    outcome = compare_step(make_step, _pair(family), (ids, mask)).check()
    assert outcome.num_graphs == 1
    assert outcome.report.num_fused == 2, outcome.report
    assert outcome.report.num_remaining == 0, outcome.report


# ------------------------------------------------------------------------- losses of libraries
ROWS, STUDENT, TEACHER, VOCABULARY = 12, 8, 16, 40


def _torchtune(name: str) -> Callable[..., Tensor]:
    losses = pytest.importorskip(
        "torchtune.modules.loss", reason="torchtune is not installed", exc_type=ImportError
    )
    loss = getattr(losses, name)()

    def run(hs: Tensor, ws: Tensor, ht: Tensor, wt: Tensor, labels: Tensor) -> Tensor:
        return loss(hs @ ws.T, ht @ wt.T, labels, normalize=False)

    return run


def _trl(beta: float) -> Callable[..., Tensor]:
    trainer = pytest.importorskip(
        "trl.experimental.gkd.gkd_trainer", reason="TRL is not installed", exc_type=ImportError
    )
    loss = trainer.GKDTrainer.generalized_jsd_loss

    def run(hs: Tensor, ws: Tensor, ht: Tensor, wt: Tensor, labels: Tensor) -> Tensor:
        return loss(hs @ ws.T, ht @ wt.T, beta=beta, temperature=2.0)

    return run


def _liger(beta: float) -> Callable[..., Tensor]:
    losses = pytest.importorskip(
        "liger_kernel.chunked_loss.jsd_loss", reason="Liger is not installed", exc_type=ImportError
    )
    loss = losses.LigerFusedLinearJSDFunction.distillation_loss_fn

    def run(hs: Tensor, ws: Tensor, ht: Tensor, wt: Tensor, labels: Tensor) -> Tensor:
        return loss(hs @ ws.T, ht @ wt.T, beta=beta, target=labels)

    return run


LOSSES = {
    "torchtune ForwardKLLoss": lambda: _torchtune("ForwardKLLoss"),
    "torchtune ReverseKLLoss": lambda: _torchtune("ReverseKLLoss"),
    "torchtune SymmetricKLLoss": lambda: _torchtune("SymmetricKLLoss"),
    "TRL generalized_jsd_loss, beta 0": lambda: _trl(0),
    "TRL generalized_jsd_loss, beta 1": lambda: _trl(1),
    "TRL generalized_jsd_loss, beta 0.5": lambda: _trl(0.5),
    "Liger JSD, beta 0": lambda: _liger(0),
    "Liger JSD, beta 1": lambda: _liger(1),
    "Liger JSD, beta 0.5": lambda: _liger(0.5),
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
    outcome = compare(LOSSES[name](), [*inputs, labels], inner="aot_eager").check()
    print(f"{name}: {outcome.num_fused} of {len(outcome.report.sites)} {outcome.reasons}")
    assert outcome.num_fused == len(outcome.report.sites) > 0, outcome.report
    assert outcome.report.num_remaining == 0, outcome.report
