"""Defines LM-head cases: losses of a student's and a teacher's logits, and of cached teachers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import Case, Inputs, Loss, as_wide, blocks, mean_of, random_tensors
from bench.measure import usual_dtype
from torch_streamkl import linear_kl, linear_topk_kl, row_program

TOP = 64  # entries of a cached teacher
CHUNK = 512  # tokens whose teacher logits are in memory while its entries are chosen
PIECE_ELEMENTS = 2**27  # logits of one side in a piece of the gate: 1 GiB in float64
BETAS = {"forward_kl": 0.0, "js": 0.5, "reverse_kl": 1.0}  # of the generalised JS


# ------------------------------------------------------------------- losses, as people write them
# of the student's hidden states and head, the teacher's, its top ids and log-probabilities, labels
def _logits(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
    logits = as_wide(F.linear(hidden, weight))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def forward_kl(
    x: Tensor, w: Tensor, t: Tensor, u: Tensor, *_: Tensor, softcap: float | None = None
) -> Tensor:
    """KL(teacher || student), the mean over tokens in nats."""
    student = _logits(x, w, softcap).log_softmax(-1)
    teacher = _logits(t, u, softcap).softmax(-1)
    return F.kl_div(student, teacher, reduction="none").sum(-1).mean()


def _kl(log_s: Tensor, log_t: Tensor) -> Tensor:
    return F.kl_div(log_s, log_t, reduction="none", log_target=True)


def reverse_kl(x: Tensor, w: Tensor, t: Tensor, u: Tensor, *_: Tensor) -> Tensor:
    student, teacher = _logits(x, w).log_softmax(-1), _logits(t, u).log_softmax(-1)
    return _kl(teacher, student).sum(-1).mean()


def js(x: Tensor, w: Tensor, t: Tensor, u: Tensor, *_: Tensor) -> Tensor:
    """The mixture without a stack of both sides, which torch.compile would write to memory."""
    student, teacher = _logits(x, w).log_softmax(-1), _logits(t, u).log_softmax(-1)
    mixture = torch.logaddexp(student, teacher) - math.log(2)
    return (0.5 * _kl(mixture, teacher) + 0.5 * _kl(mixture, student)).sum(-1).mean()


def top(x: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
    """KL at the teacher's top entries, which are cached."""
    logits, (ids, log_p) = _logits(x, w), rest[2:4]
    log_s = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
    return (log_p.exp() * (log_p - log_s)).sum(-1).mean()


def ghost(x: Tensor, w: Tensor, t: Tensor, u: Tensor, ids: Tensor, *_: Tensor) -> Tensor:
    """KL at the teacher's top entries and of all others together."""
    p, s = (_logits(*side).log_softmax(-1).gather(-1, ids) for side in ((t, u), (x, w)))
    rest_p, rest_s = (1 - y.exp().sum(-1) for y in (p, s))
    return ((p.exp() * (p - s)).sum(-1) + rest_p * (rest_p.log() - rest_s.log())).mean()


def policy(x: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
    """Log-probabilities of labels, and an entropy bonus."""
    logs = _logits(x, w).log_softmax(-1)
    chosen = logs.gather(-1, rest[4][:, None]).squeeze(-1)
    return (-chosen + 0.1 * (logs.exp() * logs).sum(-1)).mean()


def entropy(x: Tensor, w: Tensor, *_: Tensor) -> Tensor:
    """An entropy bonus and the squared log-sum-exp."""
    s = F.linear(x, w)
    logs = s.log_softmax(-1)
    return (logs.exp() * logs).sum(-1).mean() + 1e-4 * s.logsumexp(-1).square().mean()


LOSSES: dict[str, Loss] = {
    "forward_kl": forward_kl, "reverse_kl": reverse_kl, "js": js, "top 64": top,
    "top 64 and ghost": ghost, "policy": policy, "entropy and z-loss": entropy,
}  # fmt: skip


# ------------------------------------------------------------------------------------ row programs
def _kl_program(e: Any) -> Any:
    p, s = e.t.log_softmax("key"), e.s.log_softmax("key")
    return (p.exp() * (p - s)).sum("key")


def _top_program(e: Any) -> Any:
    s = e.s.log_softmax("key")
    return torch.where(e.top, e.log_p.exp() * (e.log_p - s), 0.0).sum("key")


def _ghost_program(e: Any) -> Any:
    p, s = e.t.log_softmax("key"), e.s.log_softmax("key")
    kl = torch.where(e.top, p.exp() * (p - s), 0.0).sum("key")
    rest_p, rest_s = (torch.where(e.top, 0.0, x.exp()).sum("key") for x in (p, s))
    return kl + rest_p * (rest_p.log() - rest_s.log())


def _policy_program(e: Any) -> Any:
    s = e.s.log_softmax("key")
    chosen = torch.where(e.key_index == e.label, s, 0.0).sum("key")
    return -chosen + 0.1 * (s.exp() * s).sum("key")


PROGRAMS: dict[str, tuple[Any, str]] = {  # and the sides and tensors that they read
    "forward_kl": (_kl_program, "s t"), "top 64": (_top_program, "s top log_p"),
    "top 64 and ghost": (_ghost_program, "s t top"), "policy": (_policy_program, "s label"),
}  # fmt: skip
KINDS = {"s": "dots", "t": "dots", "top": "columns", "log_p": "columns", "label": "rows"}


@dataclass(frozen=True)
class HeadCase(Case):
    """Hidden states and output embeddings of a student and a teacher."""

    tokens: int = 0
    vocabulary: int = 0
    student_width: int = 0
    teacher_width: int = 0
    loss: str = "forward_kl"
    softcap: float | None = None

    family = "heads"
    size = "tokens"

    @property
    def label(self) -> str:
        of = "" if self.loss == "forward_kl" else f", {self.loss}"
        return f"{self.name} T={self.tokens} V={self.vocabulary}{of}"

    @property
    def sweep(self) -> tuple[str, int]:
        return f"{self.name} T={self.tokens}, {self.loss}", self.vocabulary

    def shape(self) -> str:
        return f"student {self.student_width}, teacher {self.teacher_width}"

    def naive(self) -> Loss:
        softcap = {} if self.softcap is None else {"softcap": self.softcap}
        return partial(LOSSES[self.loss], **softcap)

    def flops(self) -> tuple[float, float]:
        """Forward: logits. Backward: the student's gradients."""
        student, teacher = (
            2.0 * self.tokens * self.vocabulary * n
            for n in (self.student_width, self.teacher_width)
        )
        has_teacher = self.loss in BETAS or self.loss == "top 64 and ghost"
        return student + teacher * has_teacher, 2 * student

    def _inputs(self, device: torch.device, seed: int) -> Inputs:
        """Logits have standard deviation 2, as far apart as those of two trained models."""
        widths = (self.student_width, self.teacher_width)
        shapes = [(n, width) for width in widths for n in (self.tokens, self.vocabulary)]
        scales = [y for width in widths for y in (1.0, 2.0 * width**-0.5)]
        x, w, t, u = random_tensors(shapes, device, usual_dtype(device), seed, scales)
        generator = torch.Generator(device).manual_seed(seed)
        labels = torch.randint(self.vocabulary, (self.tokens,), generator=generator, device=device)
        k = min(TOP, self.vocabulary)
        ids = torch.zeros(self.tokens, k, dtype=torch.long, device=device)
        log_p = torch.zeros(self.tokens, k, device=device)
        if self.loss.startswith("top"):
            for i in range(0, self.tokens, CHUNK):
                logs = _logits(t[i : i + CHUNK], u).log_softmax(-1)
                log_p[i : i + CHUNK], ids[i : i + CHUNK] = logs.topk(k)
        return x, w, t, u, ids, log_p, labels

    def pieces(
        self, inputs: Inputs, block: int | None = None
    ) -> Iterator[tuple[Loss, Inputs, float]]:
        """Chunks of tokens."""
        block = block or max(1, PIECE_ELEMENTS // self.vocabulary)
        for rows, share in blocks(self.tokens, block):
            piece = tuple(x if i in (1, 3) else x[rows] for i, x in enumerate(inputs))
            yield self.naive(), piece, share

    def direct(self, options: dict[str, Any]) -> Loss:
        if self.loss == "top 64":
            return mean_of(lambda *x, **given: linear_topk_kl(*x[:2], *x[4:6], **given), **options)
        if self.loss not in BETAS:
            return super().direct(options)
        softcaps = dict.fromkeys(("student_softcap", "teacher_softcap"), self.softcap)
        given = {"divergence": self.loss} | (softcaps if self.softcap is not None else {})
        return mean_of(lambda *x, **more: linear_kl(*x[:4], **more), **given, **options)

    def program(self, options: dict[str, Any]) -> Loss:
        if self.loss not in PROGRAMS:
            return super().program(options)
        of, names = PROGRAMS[self.loss]

        def call(*inputs: Tensor, **given: Any) -> Tensor:
            x, w, t, u, ids, log_p, labels = inputs
            known = {"s": (x, w), "t": (t, u), "top": ids, "log_p": (ids, log_p), "label": labels}
            for name in names.split():
                given.setdefault(KINDS[name], {})[name] = known[name]
            return row_program(of, **given)

        return mean_of(call, **options)


# ------------------------------------------------------------------------------------------ shapes
# by tokens, vocabulary, and the widths of student and teacher
GPT2 = HeadCase(
    "distilgpt2-head", "distilbert/distilgpt2 from openai-community/gpt2", 512, 50257, 768, 768
)
SMOLLM = HeadCase(
    "smollm2-head", "HuggingFaceTB/SmolLM2-135M from HuggingFaceTB/SmolLM2-360M",
    512, 49152, 576, 960,
)  # fmt: skip
LLAMA = HeadCase(
    "llama-1b-from-8b-head", "meta-llama/Llama-3.2-1B from meta-llama/Llama-3.1-8B",
    4096, 128256, 2048, 4096,
)  # fmt: skip
QWEN = HeadCase(
    "qwen-7b-from-32b-head", "Qwen/Qwen2.5-7B from Qwen/Qwen2.5-32B", 8192, 152064, 3584, 5120
)
QWEN_SMALL = HeadCase(
    "qwen-1.7b-from-8b-head", "Qwen/Qwen3-1.7B from Qwen/Qwen3-8B", 8192, 151936, 2048, 4096
)
QWEN_TINY = HeadCase(
    "qwen-0.6b-from-8b-head", "Qwen/Qwen3-0.6B from Qwen/Qwen3-8B", 8192, 151936, 1024, 4096
)
GEMMA = HeadCase(
    "gemma-2b-from-9b-head", "google/gemma-2-2b from google/gemma-2-9b, softcap 30",
    4096, 256000, 2304, 3584, softcap=30.0,
)  # fmt: skip
