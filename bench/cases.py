"""Named shapes from real models, for both families: attention maps and LM heads."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import naive

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # student's two, then the teacher's two
Piece = tuple[Inputs, float]  # a slice of the inputs and its share of the rows
PIECE_ELEMENTS = 2**27  # scores or logits of one side in a piece: 1 GiB in float64
GATE_ELEMENTS = 2**31  # beyond that the gate looks at one group of heads


@dataclass(frozen=True)
class Heads:
    """Attention heads of one side."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        shared = "" if self.num_kv_heads == self.num_heads else f" ({self.num_kv_heads} kv)"
        return f"{self.num_heads} heads{shared} of {self.head_dim}"


@dataclass(frozen=True)
class AttentionCase:
    """Attention KL: the maps of one layer of a student and a teacher."""

    name: str
    source: str  # where the shape comes from
    batch: int
    seqlen: int
    student: Heads
    teacher: Heads
    is_causal: bool = True
    softcap: float | None = None
    head_mean: bool = False  # the target is the mean of the teacher's heads

    family = "attention"
    axis = "seqlen"

    @property
    def label(self) -> str:
        return f"{self.name} B={self.batch} N={self.seqlen}"

    @property
    def sweep(self) -> tuple[str, int]:
        """The curve that the case is a point of, and its place on it."""
        return f"{self.name} B={self.batch}", self.seqlen

    def shape(self) -> str:
        sides = f"student {self.student}, teacher {self.teacher}"
        return sides + (", causal" if self.is_causal else "")

    def naive(self) -> Callable[..., Tensor]:
        return partial(
            naive.attention_kl,
            is_causal=self.is_causal,
            softcap=self.softcap,
            head_mean=self.head_mean,
        )

    def make_inputs(self, device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        shapes = [
            (self.batch, heads, self.seqlen, side.head_dim)
            for side in (self.student, self.teacher)
            for heads in (side.num_heads, side.num_kv_heads)
        ]
        return _random(shapes, [1.0] * 4, device, dtype, seed)

    def flops(self) -> tuple[float, float]:
        """Forward: the score matmuls. Backward: those again, and the student's dq and dk."""
        pairs = self.batch * self.seqlen**2 * (0.5 if self.is_causal else 1.0)
        student = 2.0 * pairs * self.student.num_heads * self.student.head_dim
        teacher = 2.0 * pairs * self.teacher.num_heads * self.teacher.head_dim
        return student + teacher, 3 * student + teacher

    def pieces(self, inputs: tuple[Tensor, ...], block: int | None = None) -> Iterator[Piece]:
        """Blocks of queries and the keys they see; their weighted losses add up to the whole's."""
        student_q, student_k, teacher_q, teacher_k = inputs
        batch, rows = student_q.shape[0], student_q.shape[2]
        widest = max(student_q.shape[1], teacher_q.shape[1])
        block = min(rows, block or max(1, PIECE_ELEMENTS // (widest * rows)))
        for b in range(batch):
            for first in range(0, rows, block):
                last = min(first + block, rows)
                keys = last if self.is_causal else rows
                queries_of = (slice(b, b + 1), slice(None), slice(first, last))
                keys_of = (slice(b, b + 1), slice(None), slice(keys))
                piece = (
                    student_q[queries_of], student_k[keys_of],
                    teacher_q[queries_of], teacher_k[keys_of],
                )  # fmt: skip
                yield piece, (last - first) / (batch * rows)

    def gated(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the gate looks at: everything, or in large cases the heads on the first keys.

        ``tensors`` are inputs, or gradients of the student's two. The rows of one group of heads
        do not depend on the other heads: its gradients are the whole's up to the number of groups.
        """
        if self.gates_everything:
            return tensors
        return tuple(x[:, : max(1, x.shape[1] // self._num_groups)] for x in tensors)

    @property
    def _num_groups(self) -> int:
        return min(self.student.num_kv_heads, self.teacher.num_kv_heads)

    @property
    def gates_everything(self) -> bool:
        scores = self.batch * max(self.student.num_heads, self.teacher.num_heads) * self.seqlen**2
        return scores <= GATE_ELEMENTS or self.head_mean

    @property
    def gate_scale(self) -> float:
        """The whole's gradient over that of the gated part alone (the loss is a mean)."""
        return 1.0 if self.gates_everything else 1.0 / self._num_groups


@dataclass(frozen=True)
class LinearCase:
    """LM-head KL: hidden states and output embeddings of a student and a teacher."""

    name: str
    source: str
    tokens: int
    vocabulary: int
    student_width: int
    teacher_width: int
    softcap: float | None = None

    family = "linear"
    axis = "vocabulary"
    gates_everything = True
    gate_scale = 1.0

    @property
    def label(self) -> str:
        return f"{self.name} T={self.tokens} V={self.vocabulary}"

    @property
    def sweep(self) -> tuple[str, int]:
        return f"{self.name} T={self.tokens}", self.vocabulary

    def shape(self) -> str:
        return f"student {self.student_width}, teacher {self.teacher_width}"

    def naive(self) -> Callable[..., Tensor]:
        return partial(naive.linear_kl, softcap=self.softcap)

    def make_inputs(self, device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        student, teacher = self.student_width, self.teacher_width
        rows = (self.tokens, self.vocabulary)
        shapes = [(n, width) for width in (student, teacher) for n in rows]
        # logits of standard deviation 2, as far apart as those of two trained models
        scales = [1.0, 2.0 * student**-0.5, 1.0, 2.0 * teacher**-0.5]
        return _random(shapes, scales, device, dtype, seed)

    def flops(self) -> tuple[float, float]:
        """Least work. Forward: two logits matmuls. Backward: the student's dhidden and dweight."""
        student = 2.0 * self.tokens * self.vocabulary * self.student_width
        teacher = 2.0 * self.tokens * self.vocabulary * self.teacher_width
        return student + teacher, 2 * student

    def pieces(self, inputs: tuple[Tensor, ...], block: int | None = None) -> Iterator[Piece]:
        """Chunks of tokens; their weighted losses add up to the whole's."""
        s_hidden, s_weight, t_hidden, t_weight = inputs
        rows = s_hidden.shape[0]
        block = min(rows, block or max(1, PIECE_ELEMENTS // s_weight.shape[0]))
        for first in range(0, rows, block):
            last = min(first + block, rows)
            piece = (s_hidden[first:last], s_weight, t_hidden[first:last], t_weight)
            yield piece, (last - first) / rows

    def gated(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tensors


Case = AttentionCase | LinearCase


def _random(
    shapes: list[tuple[int, ...]], scales: list[float], device: torch.device, dtype: torch.dtype,
    seed: int,
) -> Inputs:  # fmt: skip
    generator = torch.Generator(device).manual_seed(seed)
    a, b, c, d = (
        torch.randn(shape, generator=generator, device=device).mul_(scale).to(dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    )
    return a.requires_grad_(), b.requires_grad_(), c, d


# ------------------------------------------------------------------------------------ shapes
def _same(name: str, source: str, batch: int, seqlen: int, *heads: int, **more: Any) -> Any:
    """Student and teacher with the same heads."""
    both = Heads(*heads)
    return AttentionCase(name, source, batch, seqlen, both, both, **more)


BERT_BASE: AttentionCase = _same(
    "bert-base", "google-bert/bert-base-uncased", 8, 512, 12, 12, 64, is_causal=False
)
MINILM = AttentionCase(
    "minilm-from-bert",
    "microsoft/MiniLM-L12-H384-uncased from google-bert/bert-base-uncased",
    8, 512, Heads(12, 12, 32), Heads(12, 12, 64), is_causal=False,
)  # fmt: skip
LLAMA_8B: AttentionCase = _same(
    "llama-3-8b", "meta-llama/Meta-Llama-3-8B on both sides", 1, 8192, 32, 8, 128
)
LLAMA_1B_8B = AttentionCase(
    "llama-1b-from-8b", "meta-llama/Llama-3.2-1B from meta-llama/Llama-3.1-8B",
    1, 8192, Heads(32, 8, 64), Heads(32, 8, 128),
)  # fmt: skip
QWEN_7B = _same("qwen-2.5-7b", "Qwen/Qwen2.5-7B on both sides", 1, 8192, 28, 4, 128)
INDEXER = AttentionCase(
    "deepseek-indexer",
    "deepseek-ai/DeepSeek-V3.2-Exp: 128 heads of 192 averaged, learnt by one bilinear head of 128",
    1, 4096, Heads(1, 1, 128), Heads(128, 128, 192), head_mean=True,
)  # fmt: skip
GEMMA_9B = _same(
    "gemma-2-9b", "google/gemma-2-9b on both sides, softcap 50", 1, 4096, 16, 8, 256, softcap=50.0
)

# tokens, vocabulary, and the widths of student and teacher
GPT2_HEAD = LinearCase(
    "distilgpt2-head", "distilbert/distilgpt2 from openai-community/gpt2", 512, 50257, 768, 768
)
SMOLLM_HEAD = LinearCase(
    "smollm2-head", "HuggingFaceTB/SmolLM2-135M from HuggingFaceTB/SmolLM2-360M",
    512, 49152, 576, 960,
)  # fmt: skip
LLAMA_HEAD = LinearCase(
    "llama-1b-from-8b-head", "meta-llama/Llama-3.2-1B from meta-llama/Llama-3.1-8B",
    4096, 128256, 2048, 4096,
)  # fmt: skip
QWEN_HEAD = LinearCase(
    "qwen-7b-from-32b-head", "Qwen/Qwen2.5-7B from Qwen/Qwen2.5-32B", 8192, 152064, 3584, 5120
)
GEMMA_HEAD = LinearCase(
    "gemma-2b-from-9b-head", "google/gemma-2-2b from google/gemma-2-9b, softcap 30",
    4096, 256000, 2304, 3584, softcap=30.0,
)  # fmt: skip


def suite(device: str, quick: bool = False) -> list[Case]:
    """The cases that a device can run in reasonable time."""
    one_sequence = replace(BERT_BASE, batch=1)
    if device == "cuda":
        if quick:
            return [replace(LLAMA_8B, seqlen=2048), replace(QWEN_HEAD, tokens=1024)]
        return [
            *(replace(LLAMA_8B, seqlen=n) for n in (1024, 2048, 4096, 8192, 16384, 32768, 65536)),
            QWEN_HEAD,
            replace(QWEN_HEAD, tokens=256),  # few tokens
            replace(QWEN_HEAD, tokens=65536),
            *_mha(),
            replace(MINILM, batch=32),
            replace(BERT_BASE, batch=32),
            LLAMA_1B_8B,
            QWEN_7B,
            INDEXER,
            GEMMA_9B,
            LLAMA_HEAD,
            GEMMA_HEAD,
            *_vocabularies(4096, (32000, 65536, 131072, 262144)),
        ]
    if quick:
        head = replace(SMOLLM_HEAD, tokens=128, vocabulary=16384)
        return [replace(one_sequence, seqlen=512), head]
    return [
        *(replace(one_sequence, seqlen=n) for n in (256, 512, 1024, 2048, 4096)),
        replace(MINILM, batch=2),
        replace(LLAMA_1B_8B, seqlen=1024),
        GPT2_HEAD,
        SMOLLM_HEAD,
        *_vocabularies(256, (8192, 16384, 32768, 65536)),
    ]


def _mha() -> list[AttentionCase]:
    """What attention kernels are usually quoted at: 32 heads with keys of their own."""
    return [
        _same(f"mha-{dim}-{kind}", "Llama-2 heads", 1, 8192, 32, 32, dim, is_causal=is_causal)
        for dim in (128, 64)
        for kind, is_causal in (("causal", True), ("full", False))
    ]


def _vocabularies(tokens: int, sizes: tuple[int, ...]) -> list[Case]:
    large, small = ("Llama-3.2-1B and 3.1-8B", 2048, 4096), ("SmolLM2-135M and 360M", 576, 960)
    names, *widths = large if tokens > 1024 else small
    source = f"growing vocabulary at the widths of {names}"
    return [LinearCase("vocabulary-sweep", source, tokens, size, *widths) for size in sizes]


def select(cases: list[Case], patterns: list[str]) -> list[Case]:
    """Cases whose label matches one of the shell patterns; all of them without patterns."""
    wanted = [f"*{p}*" for p in patterns or [""]]
    chosen = [c for c in cases if any(fnmatch.fnmatch(c.label, w) for w in wanted)]
    if not chosen:
        raise ValueError(
            f"no case matches {', '.join(patterns)}; cases are {', '.join(c.label for c in cases)}"
        )
    return chosen
