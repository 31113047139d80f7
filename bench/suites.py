"""Names the sets of cases: `python -m bench SUITE`."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench import heads
from bench.attention import DIVERGENCES, DTYPES, MASKS, TOKENS, AttentionCase, Heads
from bench.case import Case
from bench.heads import HeadCase
from bench.indexer import IndexerCase
from bench.steps import LLAMAS, LlamaStep, ShortStep


@dataclass(frozen=True)
class Suite:
    """The cases by device; those of `--quick` where a device has none of its own."""

    note: str
    providers: tuple[str, ...] | None = None  # where none is named; None: all usual ones
    quick: Sequence[Case] = ()
    cpu: Sequence[Case] = ()
    cuda: Sequence[Case] = ()

    def build(self, device: str, quick: bool) -> list[Case]:
        of_device = self.cuda if device == "cuda" else self.cpu
        return list(self.quick if quick or not of_device else of_device)


def sized(case: Case, *tokens: int) -> list[Case]:
    return [case.resized(n) for n in tokens]


# --------------------------------------------------------------------------------- attention maps
def same_heads(name: str, source: str, batch: int, seqlen: int, *sizes: int) -> AttentionCase:
    """Student and teacher with the same heads."""
    both = Heads(*sizes)
    return AttentionCase(name, source, both, both, batch, seqlen)


BERT = replace(
    same_heads("bert-base", "google-bert/bert-base-uncased", 1, 512, 12, 12, 64), mask="none"
)
MINILM = AttentionCase(
    "minilm-from-bert",
    "microsoft/MiniLM-L12-H384-uncased from google-bert/bert-base-uncased",
    Heads(12, 12, 32), Heads(12, 12, 64), 2, 512, "none",
)  # fmt: skip
LLAMA_8B = same_heads(
    "llama-3-8b", "meta-llama/Meta-Llama-3-8B on both sides", 1, 8192, 32, 8, 128
)
LLAMA_1B_8B = AttentionCase(
    "llama-1b-from-8b", "meta-llama/Llama-3.2-1B from meta-llama/Llama-3.1-8B",
    Heads(32, 8, 64), Heads(32, 8, 128), 1, 8192,
)  # fmt: skip
QWEN_7B = same_heads("qwen-2.5-7b", "Qwen/Qwen2.5-7B on both sides", 1, 8192, 28, 4, 128)
INDEXER = AttentionCase(
    "deepseek-indexer",
    "deepseek-ai/DeepSeek-V3.2-Exp: 128 heads of 192 averaged, learnt by one bilinear head of 128",
    Heads(1, 1, 128), Heads(128, 128, 192), 1, 4096, head_mean=True,
)  # fmt: skip
GEMMA_9B = replace(
    same_heads("gemma-2-9b", "google/gemma-2-9b on both sides, softcap 50", 1, 4096, 16, 8, 256),
    softcap=50.0,
)
MHA = [  # what attention kernels are usually quoted at: 32 heads with keys of their own
    replace(same_heads(f"mha-{dim}-{kind}", "Llama-2 heads", 1, 8192, 32, 32, dim), mask=mask)
    for dim in (128, 64)
    for kind, mask in (("causal", "causal"), ("full", "none"))
]


# ---------------------------------------------------------------------------------------- LM heads
def vocabularies(head: HeadCase, tokens: int, *sizes: int) -> list[Case]:
    source = f"growing vocabulary at the widths of {head.name}"
    grown = replace(head, name="vocabulary-sweep", source=source, tokens=tokens)
    return [replace(grown, vocabulary=n) for n in sizes]


def by_loss(cases: Sequence[HeadCase], *losses: str) -> list[Case]:
    return [replace(head, loss=loss) for head in cases for loss in losses]


TINY = replace(heads.SMOLLM, tokens=64, vocabulary=2048)  # where a case shows that it runs
PEER_HEADS = [replace(h, tokens=n) for n in (8192, 32768) for h in (heads.QWEN, heads.QWEN_SMALL)]
PEER_LOSSES = (*heads.BETAS, "top 64")


# ------------------------------------------------------------------------------------------ matrix
def cell(
    dim: int, mask: str, dtype: str = "bf16", seqlen: int = TOKENS, teacher_dim: int = 0,
    heads: int = 32, kv: int = 0, teacher_kv: int = 0, **more: Any,
) -> AttentionCase:  # fmt: skip
    heads = 8 if dtype == "fp32" else heads  # as full a GPU, in a quarter of the time
    kv = kv or heads
    sides = Heads(heads, kv, dim), Heads(heads, teacher_kv or kv, teacher_dim or dim)
    more |= {"mask": mask, "dtype": dtype, "in_matrix": True}
    return AttentionCase("matrix", "", *sides, max(1, TOKENS // seqlen), seqlen, **more)


DIMS, BOTH = (64, 128, 32, 96, 192, 256), ("none", "causal")
# every head_dim, length, mask and dtype, not the full product of them
MATRIX = [
    *(cell(d, mask, seqlen=n) for n in (8192, 512, 2048, 32768) for d in DIMS for mask in BOTH),
    *(cell(d, mask, dtype) for d in (64, 128) for mask in MASKS for dtype in DTYPES),
    *(cell(s, mask, teacher_dim=t) for s, t in ((64, 128), (32, 64), (128, 64)) for mask in BOTH),
    *(cell(128, "causal", kv=n) for n in (8, 1)),
    *(cell(128, mask, kv=n, teacher_kv=m) for mask in BOTH for n, m in ((8, 32), (32, 8), (8, 4))),
    *(cell(128, "none", seqlen=131072, kv=8, queries=n) for n in (1, 16, 64)),
    cell(128, "causal", seqlen=131072, heads=8),
    *(cell(128, "none", divergence=x) for x in DIVERGENCES),
    cell(128, "causal", divergence="clamps"),
    *(cell(d, mask) for d in (40, 80, 112, 160) for mask in BOTH),
]
SMALL_MATRIX = [
    replace(c, batch=1)
    for c in (
        *(cell(16, mask, "fp32", 256) for mask in MASKS),
        *(cell(16, "none", "fp32", 256, divergence=x) for x in DIVERGENCES),
        cell(16, "causal", "bf16", 256, 24, kv=2), cell(16, "none", queries=8),
    )
]  # fmt: skip


# ------------------------------------------------------------------------------------ row programs
def maps(source: str, *sizes: int) -> list[Case]:
    case = same_heads("maps", source, 1, *sizes)
    return [
        replace(case, name=name, mask=mask, divergence=x)
        for name, mask in (("maps", "none"), ("maps, causal", "causal"))
        for x in ("forward_kl", "js", "squares", "weighted")
    ]


def compiled(*sizes: int) -> list[Case]:
    """Small maps and heads in graphs: from which size on a program is worth its operator."""
    return [
        *(
            replace(same_heads("compiled", "8 heads of 64", 1, n, 8, 8, 64), mask="none",
                    divergence=x)
            for n in sizes for x in ("weighted", "squares")
        ),
        *(
            HeadCase("compiled", "a head of 16 N entries", n, 16 * n, 512, 16, loss=x)
            for n in sizes for x in ("entropy and z-loss", "policy")
        ),
    ]  # fmt: skip


DEEPSEEK = "DeepSeek-V3.2-Exp"
PROGRAM_LOSSES = tuple(heads.PROGRAMS)


# ---------------------------------------------------------------------------------- training steps
_BERT = "google-bert/bert-base-uncased"
STUDENTS = (
    ShortStep("bert-4-layers", f"{_BERT}, every third layer"),
    ShortStep("tinybert", f"huawei-noah/TinyBERT_General_4L_312D from {_BERT}", hidden_size=312),
    ShortStep("minilm", f"nreimers/MiniLM-L6-H384-uncased from {_BERT}", objective="relations",
              hidden_size=384, num_layers=6),
)  # fmt: skip


def steps(device: str, *seqlens: int) -> list[Case]:
    """BERT students at two lengths, then a pair of decoders without an optimiser."""
    short = [replace(x, batch_size=32, seqlen=n) for n in (128, 512) for x in STUDENTS]
    llama = LLAMAS[device]
    pair = LlamaStep("llama-attention", llama.name, student=llama)
    # every layer of both is compared
    deep = replace(pair, name="llama-all-layers", depth=1, student=replace(llama, num_layers=4))
    return [*short, *sized(pair, *seqlens), deep]


# ------------------------------------------------------------------------------------------ suites
GRAPHS = ("inductor-graphs", "streamkl-graphs")
SUITES: dict[str, Suite] = {
    "usual": Suite(
        "attention and LM heads of real models, sizes growing",
        quick=[BERT, replace(heads.SMOLLM, tokens=128, vocabulary=16384)],
        cpu=[*sized(BERT, 256, 512, 1024, 2048, 4096), MINILM, replace(LLAMA_1B_8B, seqlen=1024),
             heads.GPT2, heads.SMOLLM,
             *vocabularies(heads.SMOLLM, 256, 8192, 16384, 32768, 65536)],
        cuda=[*sized(LLAMA_8B, 1024, 2048, 4096, 8192, 16384, 32768, 65536), *MHA,
              replace(MINILM, batch=32), replace(BERT, batch=32), LLAMA_1B_8B, QWEN_7B, INDEXER,
              GEMMA_9B, *sized(heads.QWEN, 8192, 256, 65536), heads.LLAMA, heads.GEMMA,
              *vocabularies(heads.LLAMA, 4096, 32000, 65536, 131072, 262144)],
    ),
    "peers": Suite(
        "LM heads: other libraries next to ours",
        ("eager", "inductor", "streamkl", "direct", "trl", "liger_fused", "liger_chunked",
         "liger_kl", "nitrobrew"),
        quick=by_loss([TINY], *PEER_LOSSES),
        cuda=by_loss([*PEER_HEADS, heads.QWEN_TINY], *PEER_LOSSES),
    ),
    "matrix": Suite("attention_kl by head_dim, mask, dtype and length", ("direct",),
                    quick=list(dict.fromkeys(SMALL_MATRIX)), cuda=list(dict.fromkeys(MATRIX))),
    "programs": Suite(
        "row programs next to what they replace",
        ("inductor", "direct", "direct[reduction=none]", "program", "program[reduction=none]"),
        quick=[*maps("small", 64, 2, 2, 16), IndexerCase("indexer", DEEPSEEK, 64, heads=4),
               *by_loss([TINY], *PROGRAM_LOSSES)],
        cuda=[*maps("32 heads of 128", 8192, 32, 32, 128),
              *sized(IndexerCase("indexer", DEEPSEEK), 4096, 16384),
              *by_loss([heads.QWEN], *PROGRAM_LOSSES)],
    ),
    "chosen": Suite(
        "an indexer's KL over the chosen keys of a query, next to that over all keys",
        ("direct", "direct[deterministic=True]", "direct[impl=torch]"),
        quick=[IndexerCase("chosen keys", DEEPSEEK, 64, heads=4, top=16)],
        cuda=sized(IndexerCase("chosen keys", DEEPSEEK, top=2048), 4096, 32768),
    ),
    "compiled": Suite(
        "row programs in graphs, from small sizes on",
        ("inductor", "streamkl[streamkl.min_mib=0.0]"),
        quick=compiled(256), cpu=compiled(256, 1024, 2048), cuda=compiled(256, 1024, 2048),
    ),
    "steps": Suite(
        "training steps of pairs of models", ("inductor", "streamkl", *GRAPHS),
        quick=[replace(STUDENTS[1], seqlen=16, num_layers=2, teacher_layers=4)],
        cpu=steps("cpu", 512, 1024, 2048, 4096), cuda=steps("cuda", 8192, 16384, 131072),
    ),
    "short": Suite(
        "the KLs of short training steps alone", ("inductor", "direct", "streamkl", *GRAPHS),
        quick=sized(BERT, 128), cpu=[*sized(BERT, 128, 512), *sized(LLAMA_8B, 1024, 2048)],
        cuda=[*sized(replace(BERT, batch=32), 128, 512), *sized(LLAMA_8B, 1024, 2048)],
    ),
    "shared": Suite("problems that several GPUs share"),
}  # fmt: skip


def cases(options: argparse.Namespace, device: torch.device) -> list[Case]:
    """Returns the chosen cases of the chosen suite."""
    made = SUITES[options.suite].build(device.type, options.quick)
    if options.sizes:
        made = list(dict.fromkeys(c.resized(n) for n in options.sizes for c in made))
    return select(made, options.cases)


def select(made: list[Case], patterns: list[str]) -> list[Case]:
    """Returns the cases by label, or by a shell pattern of a part of it; all without patterns."""
    labels = {c.label for c in made}
    wanted = [p if p in labels else f"*{p}*" for p in patterns or [""]]
    chosen = [c for c in made if any(fnmatch.fnmatch(c.label, w) for w in wanted)]
    if not chosen:
        known = ", ".join(c.label for c in made)
        raise ValueError(f"no case matches {', '.join(patterns)}; cases are {known}")
    return chosen
