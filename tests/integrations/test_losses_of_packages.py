"""Losses of speculators, lightly and sentence-transformers as installed, compiled as they are.

Only the modules of the losses are loaded: the packages import networks that they do not need.
Their float32 is float64 in the truth that values and gradients are compared with.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.libraries import optional
from tests.support.comparing import Outcome, compare
from tests.support.covering import every, only
from torch_streamkl.fx_passes.capture.settings import CAPTURE

TOKENS, HIDDEN, TEACHER_HIDDEN, VOCAB = 12, 8, 12, 40
WHOLE = ("linear_kl", 0)


def bare(name: str, *inner: str) -> Any:
    """A package's module without the code of the packages around it, or a skip."""
    top = name.partition(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip(f"{top} is not installed")
    for package in (top, *(f"{top}.{x}" for x in inner)):
        if package not in sys.modules:
            module = ModuleType(package)
            module.__spec__ = (
                spec if package == top else importlib.machinery.ModuleSpec(package, None)
            )
            folder = package.partition(".")[2].replace(".", "/")
            module.__path__ = [f"{x}/{folder}" for x in spec.submodule_search_locations]
            sys.modules[package] = module
    return importlib.import_module(name)


def heads(rows: tuple[int, ...] = (1, TOKENS), teacher: tuple[int, ...] = ()) -> list[Tensor]:
    """Hidden states and LM heads of student and teacher."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((*rows, HIDDEN), (VOCAB, HIDDEN), (*(teacher or rows), TEACHER_HIDDEN),
             (VOCAB, TEACHER_HIDDEN))  # fmt: skip
    h, w, g, v = (torch.randn(size, generator=generator) for size in sizes)
    return [h.requires_grad_(), w.requires_grad_(), g, v]


def judged(program: Callable[..., Any], inputs: list[Tensor], **config: Any) -> Outcome:
    with torch._dynamo.config.patch(config):
        return compare(program, inputs).check()


# ------------------------------------------------------------------------ speculators
MASK = (torch.arange(TOKENS) > 2)[None]
POSITIONS = torch.arange(TOKENS)[None] % 3
DRAFTS = {
    "kl_div": {"linear_kl"}, "rkl": {"linear_kl"}, "jsd": {"linear_kl"}, "tv": {"linear_kl"},
    "nla": {"linear_kl"}, "lk_hybrid": {"linear_kl"},
}  # fmt: skip


def draft_losses() -> Any:
    bare("speculators.losses")
    return importlib.import_module("speculators.losses.utils")


@pytest.mark.parametrize("name", only({"kl_div", "jsd", "lk_hybrid"}, DRAFTS))
def test_losses_of_drafts(name: str) -> None:
    """Its eager implementation: the fused one takes logits, and needs a GPU."""
    utils = draft_losses()
    ((loss, _),) = utils.resolve_loss_config(name, "eager").values()
    decay = partial(utils.dflash_loss_decay, gamma=4.0)

    def program(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        value: Tensor = utils.loss_function(
            h @ w.T, g @ v.T, MASK, POSITIONS, loss_fn=loss, decay_fn=decay
        )
        return value

    outcome = judged(program, heads()).check_fused()
    assert outcome.kinds == DRAFTS[name], outcome.report


def test_labels_of_the_teacher_are_no_divergence() -> None:
    """Its cross-entropy has the argmax of the teacher's logits as labels."""
    utils = draft_losses()
    ((loss, _),) = utils.resolve_loss_config("ce", "eager").values()
    outcome = judged(lambda h, w, g, v: loss(h @ w.T, g @ v.T), heads())
    text = str(outcome.report)
    assert not outcome.num_fused and "feeds argmax" in text, text
    assert "cross-entropy with labels alone, no teacher's distribution" in text, text


def test_several_losses_of_drafts() -> None:
    """`compound_loss` with two terms; what each is returns as well."""
    utils = draft_losses()
    config = utils.resolve_loss_config('{"kl_div": 0.4, "tv": 0.6}', "eager")

    def program(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Any:
        total, terms = utils.compound_loss(h @ w.T, g @ v.T, MASK, POSITIONS, config)
        return total, terms["kl_div_loss"], terms["tv_loss"]

    judged(program, heads()).check_fused(2)


def test_a_step_of_eagle_three() -> None:
    """Its metrics compare the places of both largest logits, which are values of the same program.

    They select rows by a mask, which breaks the graph unless Dynamo captures sizes of data.
    """
    bare("speculators.losses")
    metrics = bare("speculators.models.eagle3.metrics", "models", "models.eagle3")
    utils = draft_losses()
    config = utils.resolve_loss_config("kl_div", "eager")

    def program(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        loss: Tensor = metrics.compute_metrics(
            h @ w.T, g @ v.T, MASK, None, 1, 0.8, config
        )[0]  # fmt: skip
        return loss

    outcome = judged(program, heads())
    assert "graph break at" in str(outcome.report), outcome.report
    assert not outcome.num_fused, outcome.report
    outcome = judged(program, heads(), **CAPTURE).check_fused(3)
    assert outcome.kinds == {"row_program"}, outcome.report


# ------------------------------------------------------------------------ lightly
VIEWS, TEACHER_VIEWS, BATCH = 3, 2, 6
OF_DINO = ("loss", "models", "models.modules")


def views(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [y @ weight.T for y in x]


def chunks(x: Tensor, weight: Tensor) -> list[Tensor]:
    return list((x.flatten(0, 1) @ weight.T).chunk(x.shape[0]))


def dino(dtype: torch.dtype, **given: Any) -> Any:
    module = bare("lightly.loss.dino_loss", *OF_DINO)
    loss = module.DINOLoss(VOCAB, **given).to(dtype)
    loss.center.copy_(torch.linspace(-0.5, 0.5, VOCAB))
    return loss


def of_views(logits: Any, kept: list[Any], is_split: bool, **given: Any) -> Any:
    """A step of a new loss module, of the type of the hidden states."""
    modules = {dtype: dino(dtype) for dtype in (torch.float32, torch.float64)}
    kept += modules.values()
    for x in modules.values() if is_split else ():
        x.update_center = lambda t: None

    def step(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        value: Tensor = modules[h.dtype](logits(g, v), logits(h, w), **given)
        return value

    def restored(*x: Tensor) -> Tensor:
        with torch.no_grad():
            for y in modules.values():
                y.center.copy_(torch.linspace(-0.5, 0.5, VOCAB))
        return step(*x)

    return step if is_split else restored


@pytest.mark.parametrize(
    ("logits", "given"),
    every(2, [(views, {}), (chunks, {}), (views, {"teacher_temp": 0.07}), (chunks, {"epoch": 3})]),
)
def test_dino(logits: Any, given: dict[str, Any]) -> None:
    """With its center updated after the step, all pairs of views are one call."""
    outcome = judged(
        of_views(logits, [], True, **given), heads((VIEWS, BATCH), (TEACHER_VIEWS, BATCH))
    ).check_fused(1)
    assert outcome.kinds == {"linear_kl"}, outcome.report


def test_dino_that_updates_its_center_in_the_step() -> None:
    """The teacher's probabilities of the backward would be those of the new center."""
    outcome = judged(of_views(views, [], False), heads((VIEWS, BATCH), (TEACHER_VIEWS, BATCH)))
    assert not outcome.num_fused, outcome.report
    (reason,) = outcome.reasons
    assert "center is modified in place after the scores are computed" in reason, reason


def test_patches_of_ibot() -> None:
    """Its patch loss weighs rows that a mask selects, which Dynamo has to capture."""
    module = bare("lightly.loss.ibot_loss", *OF_DINO)
    losses = {d: module.IBOTPatchLoss(VOCAB).to(d) for d in (torch.float32, torch.float64)}
    for loss in losses.values():
        loss.center.update = lambda t: None
    mask = torch.zeros(2, 3, 4, dtype=torch.bool)
    mask[0, 0, :], mask[1, 1, :2] = True, True

    def program(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        value: Tensor = losses[h.dtype](g @ v.T, h @ w.T, mask)
        return value

    outcome = judged(program, heads((BATCH,)), **CAPTURE)
    assert outcome.kinds == {"linear_kl"} and outcome.num_fused == 1, outcome.report
    assert outcome.report.num_remaining == 0, outcome.report


# ------------------------------------------------------------------------ sentence-transformers
DOCUMENTS = 3


@contextmanager
def stand_ins(**modules: tuple[str, ...]) -> Iterator[None]:
    """Modules that the package imports, and its losses do not call, where they are missing."""
    made = []
    for name, names in modules.items():
        name = name.replace("__", ".")
        if optional(name) is None:
            module = ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__dict__.update(dict.fromkeys(names), __path__=[])
            sys.modules[name] = module
            made.append(name)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def sentence_losses() -> Any:
    name = "sentence_transformers"
    if importlib.util.find_spec(name) is None or optional("transformers") is None:
        pytest.skip(f"{name} is not installed")
    importlib.import_module("transformers").PreTrainedModel  # noqa: B018  # with what is there
    importlib.import_module("transformers").Trainer  # noqa: B018
    with stand_ins(
        scipy=(), scipy__sparse=("coo_matrix", "csr_matrix"), sklearn=(),
        scipy__stats=("pearsonr", "spearmanr"), sklearn__metrics=("pairwise_distances",),
        sklearn__metrics__pairwise=(
            "paired_cosine_distances", "paired_euclidean_distances", "paired_manhattan_distances",
        ),
    ):  # fmt: skip
        return importlib.import_module(f"{name}.sentence_transformer.losses")


def distill_kl(losses: Any) -> Any:
    loss = losses.DistillKLDivLoss(None, temperature=2.0)
    loss._checked_teacher_scale = True  # asked for once, before the first step, in eager code
    return loss


def margin_mse(losses: Any) -> Any:
    return losses.MarginMSELoss(None)


@pytest.mark.slow  # the package takes seconds to import
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("made", "said"),
    [
        (distill_kl, "it is an input of the compiled function"),
        (margin_mse, "no distillation loss recognized"),
    ],
)
def test_losses_of_sentences(made: Any, said: str) -> None:
    """A score is of one pair, and no product: there is nothing as large as what a loss fuses.

    The teacher's scores are labels.
    """
    loss = made(sentence_losses())
    assert isinstance(loss, nn.Module)

    def program(h: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        value: Tensor = loss.compute_loss_from_embeddings(
            list((h @ w.T).chunk(DOCUMENTS + 1)), labels
        )
        return value

    generator = torch.Generator().manual_seed(0)
    rows, labels = 4 * (DOCUMENTS + 1), torch.randn(4, DOCUMENTS, generator=generator)
    h, w = (torch.randn(size, generator=generator) for size in ((rows, HIDDEN), (6, HIDDEN)))
    outcome = judged(program, [h.requires_grad_(), w.requires_grad_(), labels])
    assert not outcome.num_fused and said in str(outcome.report), outcome.report
