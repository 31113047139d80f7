"""Defines training steps: students and teachers of transformers with random weights.

Losses are naive code, as people write it. No dropout is drawn, so that a step can be repeated.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import Case, Loss, Problem, Truth, total_error
from bench.measure import usual_dtype

VOCABULARY = 30522  # of BERT
NUM_LABELS = 2


def build(
    kind: str,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: str = "eager",
    **sizes: Any,
) -> Any:
    """A model of transformers by the name of its class."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    made_of = getattr(transformers, kind)
    config = made_of.config_class(**sizes)
    with torch.device(device):
        model = made_of._from_config(config, attn_implementation=attention, dtype=dtype)
        # Transformers installs the hooks that collect attention maps and hidden states at the
        # first such call, and that must happen outside of a compiled graph.
        outputs = {"output_attentions": attention == "eager", "output_hidden_states": True}
        with torch.no_grad():
            model(torch.zeros(1, 8, dtype=torch.long), **outputs)
    return model


def frozen(model: Any) -> Any:
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class StepCase(Case):
    """A student that learns from a teacher, each provider's own with the same weights.

    A subclass has ``models(device)``, student and teacher; ``batch(device)``; the naive
    ``loss_of(student, teacher)`` of a batch; and may have an optimiser.
    """

    batch_size: int = 1
    seqlen: int = 512

    family = "steps"
    is_shared = False

    @property
    def label(self) -> str:
        return f"{self.name} B={self.batch_size} N={self.seqlen}"

    @property
    def sweep(self) -> tuple[str, int]:
        return f"{self.name} B={self.batch_size}", self.seqlen

    def models(self, device: torch.device) -> tuple[Any, Any]:
        raise NotImplementedError

    def batch(self, device: torch.device) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def loss_of(self, student: Any, teacher: Any) -> Loss:
        raise NotImplementedError

    def optimizer(self, student: nn.Module) -> torch.optim.Optimizer | None:
        return None

    def problem(self, device: torch.device, sets: int = 1) -> Problem:
        student, teacher = self.models(device)
        optimizer = self.optimizer(student.train())
        problem = Problem(device, self.loss_of(student, teacher), [self.batch(device)], student)
        problem.teacher = teacher
        if optimizer is not None:
            problem.finish = optimizer.step
        if device.type == "cuda" and next(student.parameters()).dtype == torch.float32:
            problem.around = partial(torch.autocast, "cuda", torch.bfloat16)
        return problem

    def truth(self, problem: Problem) -> Truth:
        """Of the first step, in float64; all gradients together: some may be zero."""
        batch = problem.sets[0]
        wide = [copy.deepcopy(x).double() for x in (problem.model, problem.teacher)]
        exact = Problem(problem.device, self.loss_of(*wide), [batch], wide[0])
        loss, expected = exact.step()
        naive, gradients = replace(problem, finish=lambda: None).step()
        off, dtype = abs(float(naive) - float(loss)), usual_dtype(problem.device)
        return Truth.of((float(loss), expected), (off, gradients), dtype, total_error)


def kl_of_maps(
    teacher: Iterable[Tensor], student: Iterable[Tensor], mask: Tensor | None = None
) -> Tensor:
    """KL of each student layer's maps to those of the teacher's layer at the same depth, summed.

    Each is the mean over rows that the mask has.
    """
    teacher, student, total = tuple(teacher), tuple(student), 0.0
    every = len(teacher) // len(student)
    for of_teacher, of_student in zip(teacher[every - 1 :: every], student, strict=True):
        p, q = of_teacher.float(), of_student.float()
        kl = (p * (p.clamp_min(1e-12).log() - q.clamp_min(1e-12).log())).sum(-1)
        total = total + mean_of_rows(kl, mask)
    return total


def mean_of_rows(x: Tensor, mask: Tensor | None) -> Tensor:
    """Of ``[batch, heads, rows]``, rows that are padding left out."""
    if mask is None:
        return x.mean()
    rows = mask[:, None, :].to(torch.float32)
    return (x * rows).sum() / (rows.sum() * x.shape[1])


# ------------------------------------------------------------------------- a pair of decoders
@dataclass(frozen=True)
class Llama:
    """A decoder's widths and depth; the head has weights of its own."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int

    def model(
        self, device: torch.device, seed: int, context: int, attention: str = "eager"
    ) -> Any:
        return build(
            "LlamaForCausalLM", seed, device, usual_dtype(device), attention,
            vocab_size=self.vocabulary, hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size, num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads, num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=context,
        )  # fmt: skip

    @property
    def num_parameters(self) -> int:
        """Of the layers and the embeddings, without the head."""
        kv = self.hidden_size * self.num_kv_heads // self.num_heads
        layer = self.hidden_size * (2 * self.hidden_size + 2 * kv + 3 * self.intermediate_size)
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.num_layers * layer + self.vocabulary * self.hidden_size + norms


LLAMAS = {  # students, whose teachers are twice as deep
    "cuda": Llama("llama-pair", 2048, 5632, 2, 32, 8, 32000),
    "cpu": Llama("small-llama-pair", 256, 704, 2, 8, 4, 8192),
}


@dataclass(frozen=True)
class LlamaStep(StepCase):
    """A step of a pair without an optimiser; float64 does not fit, losses stand side by side."""

    student: Llama = LLAMAS["cpu"]
    depth: int = 2  # layers of the teacher for each of the student

    is_exact = False
    fits_together = False

    def shape(self) -> str:
        return "KL of attention"

    def models(self, device: torch.device) -> tuple[Any, Any]:
        teacher = replace(self.student, num_layers=self.depth * self.student.num_layers)
        student = self.student.model(device, 1, self.seqlen)
        return student, frozen(teacher.model(device, 0, self.seqlen))

    def loss_of(self, student: Any, teacher: Any) -> Loss:
        # without logits the LM heads are left out: the bodies are called
        teacher, student = teacher.model, student.model

        def loss(ids: Tensor) -> Tensor:
            with torch.no_grad():
                t = teacher(input_ids=ids, output_attentions=True, use_cache=False)
            s = student(input_ids=ids, output_attentions=True, use_cache=False)
            # something for the rest of the network to learn
            rest = s.last_hidden_state.float().square().mean() * 1e-3
            return rest + kl_of_maps(t.attentions, s.attentions)

        return loss

    def batch(self, device: torch.device) -> tuple[Tensor, ...]:
        return (random_ids(self.student.vocabulary, self.batch_size, self.seqlen, device),)


def random_ids(
    vocabulary: int, batch: int, seqlen: int, device: torch.device, seed: int | None = None
) -> Tensor:
    generator = torch.Generator(device).manual_seed(seqlen if seed is None else seed)
    return torch.randint(vocabulary, (batch, seqlen), device=device, generator=generator)


# ---------------------------------------------------------------------------- pairs of encoders
class Batch(NamedTuple):
    """Token ids with padding on the right, and a label for each sequence."""

    ids: Tensor
    mask: Tensor
    labels: Tensor

    @staticmethod
    def of(batch: int, seqlen: int, device: torch.device, seed: int) -> Batch:
        """Random ids; lengths are between half of seqlen and seqlen."""
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(seqlen // 2, seqlen + 1, (batch, 1), generator=generator)
        lengths[0] = seqlen
        ids = torch.randint(VOCABULARY, (batch, seqlen), generator=generator)
        mask = (torch.arange(seqlen) < lengths).long()
        labels = torch.randint(NUM_LABELS, (batch,), generator=generator)
        return Batch(*(x.to(device) for x in (ids, mask, labels)))


@dataclass(frozen=True)
class ShortStep(StepCase):
    """A BERT student with an optimiser, its teacher and what it learns from it."""

    # "maps": attention maps of every layer; "relations": of the last one's q, k, v
    objective: str = "maps"
    hidden_size: int = 768
    num_layers: int = 4
    num_heads: int = 12
    teacher_layers: int = 12
    teacher_width: int = 768

    def shape(self) -> str:
        return f"KL of {self.objective}"

    def models(self, device: torch.device) -> tuple[nn.Module, nn.Module]:
        """Student and teacher, float32."""
        attention = "eager" if self.objective == "maps" else "sdpa"

        def model(width: int, layers: int, heads: int, seed: int) -> Any:
            return build(
                "BertForSequenceClassification", seed, device, attention=attention,
                vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers,
                num_attention_heads=heads, intermediate_size=4 * width, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0, num_labels=NUM_LABELS,
            )  # fmt: skip

        student = model(self.hidden_size, self.num_layers, self.num_heads, 1)
        return student, frozen(model(self.teacher_width, self.teacher_layers, 12, 0))

    def optimizer(self, student: nn.Module) -> torch.optim.Optimizer:
        on_gpu = next(student.parameters()).is_cuda
        return torch.optim.AdamW(student.parameters(), lr=1e-5, fused=on_gpu)

    def batch(self, device: torch.device) -> Batch:
        return Batch.of(self.batch_size, self.seqlen, device, self.seqlen)

    def loss_of(self, student: nn.Module, teacher: nn.Module) -> Loss:
        """The naive loss of a batch, that of the labels added."""
        of_maps = self.objective == "maps"
        options = {"output_attentions" if of_maps else "output_hidden_states": True}

        def loss(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                t = teacher(ids, mask, **options)
            s = student(ids, mask, **options)
            task = F.cross_entropy(s.logits.float(), labels)
            if of_maps:
                return task + kl_of_maps(t.attentions, s.attentions, mask)
            return task + relations_kl(student, s, teacher, t, mask)

        return loss


def relations_kl(student: Any, s: Any, teacher: Any, t: Any, mask: Tensor) -> Tensor:
    """KL of the last layer's query, key and value relations, each with as many heads."""
    keys = mask[:, None, None, :].bool()
    total = torch.zeros((), device=mask.device)
    for x, y in zip(_projections(student, s), _projections(teacher, t), strict=True):
        log_q, p = _scores(x, keys).log_softmax(-1), _scores(y, keys).softmax(-1)
        total = total + mean_of_rows(F.kl_div(log_q, p, reduction="none").sum(-1), mask)
    return total


def _projections(model: Any, outputs: Any) -> list[Tensor]:
    layer = model.bert.encoder.layer[-1].attention.self
    hidden = outputs.hidden_states[-2]
    shape = (*hidden.shape[:2], model.config.num_attention_heads, -1)
    return [
        project(hidden).view(shape).transpose(1, 2)
        for project in (layer.query, layer.key, layer.value)
    ]


def _scores(x: Tensor, keys: Tensor) -> Tensor:
    scores = (x @ x.transpose(-1, -2)).float() * x.shape[-1] ** -0.5
    return scores.masked_fill(~keys, torch.finfo(scores.dtype).min)
