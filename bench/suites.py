"""Names the sets of cases: `python -m bench SUITE`."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench import heads, indexer, steps
from bench.attention import DIVERGENCES, DTYPES, MASKS, TOKENS, AttentionCase, Heads
from bench.case import Case

Build = Callable[[str, bool], list[Case]]  # of a device, and whether quickly


@dataclass(frozen=True)
class Suite:
    note: str
    build: Build
    providers: tuple[str, ...] | None = None  # where none is named; None: all usual ones


def _same(name: str, source: str, batch: int, seqlen: int, *sizes: int) -> AttentionCase:
    """Student and teacher with the same heads."""
    both = Heads(*sizes)
    return AttentionCase(name, source, both, both, batch, seqlen)


BERT = replace(
    _same("bert-base", "google-bert/bert-base-uncased", 8, 512, 12, 12, 64), mask="none"
)
MINILM = AttentionCase(
    "minilm-from-bert",
    "microsoft/MiniLM-L12-H384-uncased from google-bert/bert-base-uncased",
    Heads(12, 12, 32), Heads(12, 12, 64), 8, 512, "none",
)  # fmt: skip
LLAMA_8B = _same("llama-3-8b", "meta-llama/Meta-Llama-3-8B on both sides", 1, 8192, 32, 8, 128)
LLAMA_1B_8B = AttentionCase(
    "llama-1b-from-8b", "meta-llama/Llama-3.2-1B from meta-llama/Llama-3.1-8B",
    Heads(32, 8, 64), Heads(32, 8, 128), 1, 8192,
)  # fmt: skip
QWEN_7B = _same("qwen-2.5-7b", "Qwen/Qwen2.5-7B on both sides", 1, 8192, 28, 4, 128)
INDEXER = AttentionCase(
    "deepseek-indexer",
    "deepseek-ai/DeepSeek-V3.2-Exp: 128 heads of 192 averaged, learnt by one bilinear head of 128",
    Heads(1, 1, 128), Heads(128, 128, 192), 1, 4096, head_mean=True,
)  # fmt: skip
GEMMA_9B = replace(
    _same("gemma-2-9b", "google/gemma-2-9b on both sides, softcap 50", 1, 4096, 16, 8, 256),
    softcap=50.0,
)


def usual(device: str, quick: bool) -> list[Case]:
    """Real models' heads, sizes growing, that a device can run in reasonable time."""
    if device == "cuda" and quick:
        return [replace(LLAMA_8B, seqlen=2048), *heads.sizes_of(device, quick)]
    one_sequence = replace(BERT, batch=1)
    if quick:
        return [one_sequence, *heads.sizes_of(device, quick)]
    if device == "cuda":
        lengths = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
        return [
            *(replace(LLAMA_8B, seqlen=n) for n in lengths), *_mha(),
            replace(MINILM, batch=32), replace(BERT, batch=32), LLAMA_1B_8B, QWEN_7B, INDEXER,
            GEMMA_9B, *heads.sizes_of(device, quick),
        ]  # fmt: skip
    return [
        *(replace(one_sequence, seqlen=n) for n in (256, 512, 1024, 2048, 4096)),
        replace(MINILM, batch=2), replace(LLAMA_1B_8B, seqlen=1024),
        *heads.sizes_of(device, quick),
    ]  # fmt: skip


def _mha() -> list[Case]:
    """What attention kernels are usually quoted at: 32 heads with keys of their own."""
    return [
        replace(_same(f"mha-{dim}-{kind}", "Llama-2 heads", 1, 8192, 32, 32, dim), mask=mask)
        for dim in (128, 64)
        for kind, mask in (("causal", "causal"), ("full", "none"))
    ]


def short(device: str, quick: bool) -> list[Case]:
    """The heads of the training steps, alone and at the same lengths."""
    bert = replace(BERT, batch=32 if device == "cuda" else 1)
    lengths = (128,) if quick else (128, 512)
    llama = [] if quick else [replace(LLAMA_8B, seqlen=n) for n in (1024, 2048)]
    return [*(replace(bert, seqlen=n) for n in lengths), *llama]


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


def matrix(device: str, quick: bool) -> list[Case]:
    """Every head_dim, length, mask and dtype, not the full product of them."""
    if device == "cpu" or quick:
        small = [cell(16, mask, "fp32", 256) for mask in MASKS]
        small += [cell(16, "none", "fp32", 256, divergence=x) for x in DIVERGENCES]
        made = [*small, cell(16, "causal", "bf16", 256, 24, kv=2), cell(16, "none", queries=8)]
        return list(dict.fromkeys(replace(c, batch=1) for c in made))
    dims, both = (64, 128, 32, 96, 192, 256), ("none", "causal")
    cells = [cell(d, mask, seqlen=n) for n in (8192, 512, 2048) for d in dims for mask in both]
    cells += [cell(d, mask, dtype) for d in (64, 128) for mask in MASKS for dtype in DTYPES]
    cells += [
        cell(s, mask, teacher_dim=t) for s, t in ((64, 128), (32, 64), (128, 64)) for mask in both
    ]
    cells += [cell(128, "causal", kv=n) for n in (8, 1)]
    cells += [
        cell(128, mask, kv=n, teacher_kv=m) for mask in both for n, m in ((8, 32), (32, 8), (8, 4))
    ]
    cells += [cell(128, "none", seqlen=131072, kv=8, queries=n) for n in (1, 16, 64)]
    cells += [cell(128, "causal", seqlen=131072, heads=8)]
    cells += [cell(128, "none", divergence=x) for x in DIVERGENCES]
    cells += [cell(128, "causal", divergence="clamps")]
    cells += [cell(d, mask, seqlen=32768) for d in dims for mask in both]
    cells += [cell(d, mask) for d in (40, 80, 112, 160) for mask in both]
    return list(dict.fromkeys(cells))


def programs(device: str, quick: bool) -> list[Case]:
    """Row programs next to what they replace or are compared with."""
    maps = _same("maps", "small", 1, 64, 2, 2, 16)
    if device == "cuda" and not quick:
        maps = _same("maps", "32 heads of 128", 1, 8192, 32, 32, 128)
    formulas = ("forward_kl", "js", "squares", "weighted")
    return [
        *(
            replace(maps, name=name, mask=mask, divergence=x, has_programs=x != "js")
            for name, mask in (("maps", "none"), ("maps, causal", "causal"))
            for x in formulas
        ),
        *indexer.programs(device, quick),
        *heads.programs(device, quick),
    ]


def compiled(device: str, quick: bool) -> list[Case]:
    """Naive code of row programs in graphs, from small sizes on."""
    maps = [
        replace(_same("compiled", "8 heads of 64", 1, n, 8, 8, 64), mask="none", divergence=of)
        for n in ((256,) if quick else (256, 1024, 2048))
        for of in ("weighted", "squares")
    ]
    return [*maps, *heads.compiled(device, quick)]


GRAPHS = ("inductor-graphs", "streamkl-graphs")
SUITES: dict[str, Suite] = {
    "usual": Suite("attention and LM heads of real models, sizes growing", usual),
    "peers": Suite(
        "LM heads: other libraries next to ours", heads.peers,
        ("eager", "inductor", "streamkl", "direct", "trl", "liger_fused", "liger_chunked",
         "liger_kl", "nitrobrew"),
    ),
    "matrix": Suite("attention_kl by head_dim, mask, dtype and length", matrix, ("direct",)),
    "programs": Suite("row programs next to what they replace", programs, ("inductor", "direct")),
    "chosen": Suite(
        "an indexer's KL over the chosen keys of a query, next to that over all keys",
        indexer.chosen_keys, (),
    ),
    "compiled": Suite(
        "row programs in graphs, from small sizes on", compiled,
        ("inductor", "streamkl[streamkl.min_mib=0.0]"),
    ),
    "steps": Suite(
        "training steps of pairs of models", steps.steps, ("inductor", "streamkl", *GRAPHS)
    ),
    "short": Suite(
        "the KLs of short training steps alone", short,
        ("inductor", "direct", "streamkl", *GRAPHS),
    ),
    "shared": Suite("problems that several GPUs share", lambda *_: []),
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
