"""What the rewrite adds to compilation: `python -m bench.compile_time --json FILE`.

A transformers pair of 12 layers each with a KL in every layer is compiled in a process of its own
with cold caches, once by plain Inductor and once by the backend. The share is the time in
rewrite() over the time that plain Inductor needs for the same program, tracing by Dynamo left out
of both; what the checks of the rewrite take of it is given by itself.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.models import build, kl_of_maps
from bench.records import Program, Rows

SEQLEN = 32
SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12,
    "num_attention_heads": 4, "max_position_embeddings": 4 * SEQLEN,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, int]]] = {
    "bert": ("BertModel", SIZES),
    "llama": ("LlamaModel", SIZES | {"num_key_value_heads": 2}),
}
COLUMNS = {
    "pair": "{family}", "shapes": "{shapes}", "sites": "{streamkl[fused]}",
    "rewrite s": "{streamkl[rewrite]:.2f}", "plain Inductor s": "{inductor[backend]:.1f}",
    "share": "{share_of_inductor:.1%}", "checks alone": "{share_of_checks:.1%}",
}  # fmt: skip


def make_step(family: str) -> Callable[[Tensor], Tensor]:
    kind, sizes = FAMILIES[family]
    teacher, student = (build(kind, seed, **sizes).eval() for seed in range(2))
    teacher.requires_grad_(False)

    def step(ids: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(input_ids=ids, output_attentions=True)
        got = student(input_ids=ids, output_attentions=True)
        loss = F.mse_loss(got.last_hidden_state, wanted.last_hidden_state)
        return loss + kl_of_maps(wanted.attentions, got.attentions)

    return step


def compile_once(family: str, dynamic: bool, backend: str) -> dict[str, Any]:
    """Seconds of the parts of one cold compilation, forward and backward."""
    from torch_streamkl.fx_passes import backend as front_end
    from torch_streamkl.fx_passes.validation import refusal

    seconds: dict[str, float] = {"rewrite": 0.0, "check": 0.0, "backend": 0.0}
    sites: list[int] = []

    def timed(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = fn(*args, **kwargs)
            seconds[name] += time.perf_counter() - start
            return result

        return run

    front_end.rewrite = timed("rewrite", front_end.rewrite)
    refusal.check = timed("check", refusal.check)
    front_end.REPORTS.append(lambda report: sites.append(report.num_fused))
    inner = torch._dynamo.lookup_backend(backend)
    whole = timed("backend", inner)
    step = torch.compile(make_step(family), backend=whole, dynamic=dynamic or None)
    ids = torch.zeros(2, SEQLEN, dtype=torch.long)
    if dynamic:
        torch._dynamo.mark_dynamic(ids, 1)
    start = time.perf_counter()
    step(ids).backward()
    return {**seconds, "first_step": time.perf_counter() - start, "fused": sum(sites)}


def in_new_process(family: str, dynamic: bool, backend: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        variables = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
        variables["TORCHINDUCTOR_CACHE_DIR"] = cache
        processes = multiprocessing.get_context("spawn")
        with mock.patch.dict(os.environ, variables), ProcessPoolExecutor(1, processes) as pool:
            return pool.submit(compile_once, family, dynamic, backend).result()


def main(argv: list[str] | None = None) -> int:
    parser = Program("bench.compile_time", __doc__, devices=False)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    options, head = parser.begin(argv)
    title = "What the rewrite adds to compilation (pairs of 12 layers)"
    record = Rows(title, COLUMNS, head, options.json)
    for family, dynamic in itertools.product(options.families, (False, True)):
        plain = in_new_process(family, dynamic, "inductor")
        ours = in_new_process(family, dynamic, "streamkl")
        share, share_of_checks = (ours[k] / plain["backend"] for k in ("rewrite", "check"))
        what = {"family": family, "shapes": "dynamic" if dynamic else "static"}
        shares = {"share_of_inductor": share, "share_of_checks": share_of_checks}
        record.add(what | {"inductor": plain, "streamkl": ours} | shares)
    return 0


if __name__ == "__main__":
    sys.exit(main())
