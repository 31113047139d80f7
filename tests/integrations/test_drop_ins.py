"""Losses of the libraries as installed, next to the one call of ours that replaces each.

The migration guide has these calls. Values and gradients are compared in float64.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_streamkl import linear_kl, linear_topk_kl

BATCH, SEQLEN, WIDTH, TEACHER_WIDTH, VOCAB, TOP = 2, 7, 8, 12, 61, 5
OPERANDS = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight")


def module(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name.partition('.')[0]} is not installed")


def heads() -> dict[str, Tensor]:
    sizes = (
        (BATCH, SEQLEN, WIDTH), (VOCAB, WIDTH), (BATCH, SEQLEN, TEACHER_WIDTH),
        (VOCAB, TEACHER_WIDTH),
    )  # fmt: skip
    made = zip(OPERANDS, sizes, strict=True)
    return {name: torch.randn(size, dtype=torch.float64) for name, size in made}


def counted() -> Tensor:
    return torch.arange(SEQLEN).expand(BATCH, SEQLEN) > torch.tensor([[1], [3]])


def leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: x.clone().requires_grad_(k.startswith("student")) for k, x in tensors.items()}


def check(theirs: Any, ours: Any, sums: torch.dtype = torch.float64) -> None:
    """Both are functions of the heads that return a scalar; ``sums`` is the type of theirs."""
    tensors, eps = heads(), torch.finfo(sums).eps
    a, b = leaves({k: x.to(sums) for k, x in tensors.items()}), leaves(tensors)
    expected, value = theirs(a), ours(b)
    close = {"rtol": 300 * eps, "atol": 30 * eps}
    torch.testing.assert_close(value.double(), expected.double(), **close)
    expected.backward()
    value.backward()
    for name in OPERANDS[:2]:
        torch.testing.assert_close(b[name].grad, a[name].grad.double(), **close)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_divergence_of_trls_distillation_trainer(beta: float) -> None:
    trl = module("trl.trainer.distillation_trainer")

    def theirs(x: dict[str, Tensor]) -> Tensor:
        loss: Tensor = trl._chunked_divergence_loss(
            x["student_hidden"], x["teacher_hidden"], x["student_weight"], x["teacher_weight"],
            counted().long(), beta, temperature=2.0, student_logit_scale=0.5,
            teacher_final_logit_softcapping=3.0,
        )[0]  # fmt: skip
        return loss

    def ours(x: dict[str, Tensor]) -> Tensor:
        return linear_kl(
            **x, divergence="js", beta=beta, temperature=2.0, row_mask=counted(),
            student_logit_scale=0.5, teacher_softcap=3.0, reduction="mean",
        )  # fmt: skip

    check(theirs, ours, torch.float32)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_trls_gkd(beta: float) -> None:
    trl = module("trl.experimental.gkd.gkd_trainer")
    labels = torch.zeros(BATCH, SEQLEN, dtype=torch.long).masked_fill(~counted(), -100)

    def theirs(x: dict[str, Tensor]) -> Tensor:
        logits = (x[f"{s}_hidden"] @ x[f"{s}_weight"].T for s in ("student", "teacher"))
        loss: Tensor = trl.GKDTrainer.generalized_jsd_loss(
            *logits, labels=labels, beta=beta, temperature=2.0
        )
        return loss

    def ours(x: dict[str, Tensor]) -> Tensor:
        return linear_kl(
            **x, divergence="js", beta=beta, temperature=2.0, row_mask=labels != -100,
            reduction="mean",
        )  # fmt: skip

    check(theirs, ours)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_trls_sdpo(tail: str, alpha: float) -> None:
    """Its entries are the student's own top-k."""
    trl = module("trl.experimental.sdpo.loss_utils")

    def theirs(x: dict[str, Tensor]) -> Tensor:
        s, t = (x[f"{n}_hidden"] @ x[f"{n}_weight"].T for n in ("student", "teacher"))
        rows: Tensor = trl.compute_topk_self_distillation_loss(
            s, t, distillation_topk=TOP, distillation_alpha=alpha,
            distillation_add_tail=tail == "bucket",
        )  # fmt: skip
        return rows[counted()].mean()

    def ours(x: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():  # a server has them
            ids = (x["student_hidden"] @ x["student_weight"].T).topk(TOP).indices
            logits = x["teacher_hidden"] @ x["teacher_weight"].T
            log_probs = logits.log_softmax(-1).gather(-1, ids)
        return linear_topk_kl(
            x["student_hidden"], x["student_weight"], ids, log_probs, tail=tail,
            divergence="js", beta=alpha, row_mask=counted(), reduction="mean",
        )  # fmt: skip

    check(theirs, ours)


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_trls_teacher_on_a_server(tail: str) -> None:
    """It pads with a log-probability of -inf and the id 0."""
    trl = module("trl.experimental.server_distillation.server_distillation_trainer")
    Trainer = trl.ServerDistillationTrainer
    labels = torch.zeros(BATCH, SEQLEN, dtype=torch.long).masked_fill(~counted(), -100)
    log_probs, ids = torch.randn(BATCH, SEQLEN, VOCAB).double().log_softmax(-1).topk(TOP)
    log_probs[:, ::2, -1], ids[:, ::2, -1] = -math.inf, 0
    result = {"topk_logprobs": log_probs, "topk_token_ids": ids}
    trainer = SimpleNamespace(
        loss_add_tail=tail == "bucket", _reduce_divergence_loss=Trainer._reduce_divergence_loss
    )

    def theirs(x: dict[str, Tensor]) -> Tensor:
        log_s = (x["student_hidden"] @ x["student_weight"].T).log_softmax(-1)
        loss: Tensor = Trainer._compute_server_forward_kl_loss(trainer, result, log_s, labels)
        return loss

    def ours(x: dict[str, Tensor]) -> Tensor:
        return linear_topk_kl(
            x["student_hidden"], x["student_weight"], ids, log_probs, tail=tail,
            row_mask=labels != -100, reduction="mean",
        )  # fmt: skip

    check(theirs, ours)


def test_ligers_chunked_jsd() -> None:
    """By its own arguments; its loss is that of tokens with labels."""
    liger = module("liger_kernel.chunked_loss.jsd_loss")
    labels = torch.randint(VOCAB, (BATCH, SEQLEN)).masked_fill(~counted(), -100)
    loss = liger.LigerFusedLinearJSDLoss(
        weight_hard_loss=0.3, weight_soft_loss=0.7, beta=0.4, temperature=2.0, compiled=False
    )

    def theirs(x: dict[str, Tensor]) -> Tensor:
        flat = [x[n].flatten(0, -2) if n.endswith("hidden") else x[n] for n in OPERANDS]
        value: Tensor = loss(*flat, labels.flatten())
        return value

    def ours(x: dict[str, Tensor]) -> Tensor:
        return linear_kl(
            **x, divergence="js", beta=0.4, temperature=2.0, labels=labels,
            hard_weight=0.3 / 0.7, reduction="mean",
        ) * 0.7  # fmt: skip

    check(theirs, ours, torch.float32)


def test_verls_and_nemos_losses_are_what_the_guide_says() -> None:
    """Their formulas, as they stand in their repositories, on whole logits."""
    log_t, ids = torch.randn(BATCH, SEQLEN, VOCAB).double().topk(TOP)

    def gathered(x: dict[str, Tensor]) -> Tensor:
        return (x["student_hidden"] @ x["student_weight"].T).gather(-1, ids)

    def nemo(x: dict[str, Tensor]) -> Tensor:
        s, t = gathered(x).log_softmax(-1), (log_t / 2.0).log_softmax(-1)
        return F.kl_div(s, t, log_target=True, reduction="none").sum(-1).mean()

    def verl(x: dict[str, Tensor]) -> Tensor:
        every = (x["student_hidden"] @ x["student_weight"].T).log_softmax(-1)
        p = (log_t - 9.0).exp()
        return (p * ((log_t - 9.0) - every.gather(-1, ids))).sum(-1).mean()

    def call(log_probs: Tensor, tail: Any) -> Any:
        return lambda x: linear_topk_kl(
            x["student_hidden"], x["student_weight"], ids, log_probs, tail=tail, reduction="mean"
        )

    check(nemo, call(log_t / 2.0, "renormalize"))
    check(verl, call(log_t - 9.0, "none"))
