"""Four and eight processes: shards that are uneven or empty, meshes larger than what they share.

What two processes show is in the other files. Here is what needs more of them: several ranks
without anything, a vocabulary or a sequence of fewer entries than ranks, a mesh of 2 x n, errors
that name the last rank, and ranks that die while those that wait are not their neighbours.

    python -m pytest -m gpu -s tests/distributed/test_more_ranks.py

runs the same on four and eight GPUs, where there are as many.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from bench import sharded
from bench.measure import MIB
from tests.distributed import test_distributed_attention as attention
from tests.distributed import test_distributed_linear as linear
from tests.distributed import test_distributed_topk as topk
from tests.support.ranks import (
    TIMEOUT,
    Rank,
    checks_of,
    on_ranks,
    run_check,
    same_error,
    watched_collectives,
)
from torch_streamkl import linear_kl
from torch_streamkl.distributed import (
    attention_kl_context_parallel,
    shard_sequence,
)

MODULES = [sys.modules[__name__], linear, attention]
# of the files of two processes, what does not depend on their number
OF_ANY_NUMBER = [
    "every_divergence_of_every_kind", "every_option_at_once", "words_that_are_excluded",
    "shards_without_words", "words_in_another_order", "numbers_of_collectives",
    "chunks_of_tokens", "the_same_bits", "dtensors_gather_hidden_states_only",
    "dtensors_with_tokens_of_their_own", "dtensors_on_two_dimensions", "resharded_teacher",
    "ranks_that_disagree", "sequences_that_ranks_share", "ranges_that_ranks_gather",
    "packed_sequences", "context_parallel_reductions_and_sinks", "context_parallel_collectives",
]  # fmt: skip
VOCAB = linear.NUM_WORDS


def cuts_of(me: Rank, vocab: int) -> Iterator[slice]:
    """This rank's entries: unevenly, none on odd ranks, all on the last one, all on the first."""
    for shares in (
        range(1, me.size + 1),
        [1 - rank % 2 for rank in range(me.size)],
        [rank == me.size - 1 for rank in range(me.size)],
        [rank == 0 for rank in range(me.size)],
    ):
        ends = [vocab * x // sum(shares) for x in accumulate(shares)]
        yield slice(ends[me.rank - 1] if me.rank else 0, ends[me.rank])


# ------------------------------------------------------------------------------------ vocabulary
@on_ranks
def uneven_and_empty_shards(me: Rank) -> None:
    forms: list[dict[str, Any]] = [
        {"reduction": "mean"}, {"divergence": "js"}, {"reduction": "sum", "strategy": "recompute"},
    ]  # fmt: skip
    for cut in cuts_of(me, VOCAB):
        for options in forms:
            linear.Problem(me, {**options, "labels": linear.labels_of(me)}).check((cut, cut))


@on_ranks
def a_vocabulary_of_fewer_entries_than_ranks(me: Rank) -> None:
    vocab = me.size - 1
    for options in ({"reduction": "mean"}, {"divergence": "tv"}):
        linear.Problem(me, dict(options), vocab=(vocab, vocab)).check()
        problem = linear.Problem(me, dict(options), vocab=(vocab, vocab))
        inputs = linear._distributed(problem, me.mesh, [Replicate()], [Shard(0)])
        linear._check_dtensors(problem, inputs, linear_kl(**inputs, **options))


@on_ranks
def entries_of_a_cache_on_ranks_without_entries(me: Rank) -> None:
    for cut, tail in zip(cuts_of(me, topk.VOCAB), ("none", "bucket", "renormalize", "bucket"),
                         strict=True):  # fmt: skip
        topk.check(me, cut, tail=tail, reduction="mean")


@on_ranks
def a_mesh_of_two_dimensions(me: Rank) -> None:
    """2 x n: tokens over one, which do not divide by it, and the vocabulary over the other."""
    shape = (2, me.size // 2)
    mesh = init_device_mesh(me.device.type, shape, mesh_dim_names=("dp", "tp"))
    for tokens, hidden in (
        (linear.NUM_TOKENS, [Shard(0), Replicate()]),
        (3, [Shard(0), Shard(0)]),  # of the ranks that share a vocabulary, some have no token
    ):
        problem = linear.Problem(me, {"reduction": "mean", "labels": linear.labels_of(me)})
        for name in ("student_hidden", "teacher_hidden"):
            problem.tensors[name] = problem.tensors[name][:tokens]
        problem.options["labels"] = problem.options["labels"][:tokens]
        inputs = linear._distributed(problem, mesh, hidden, [Replicate(), Shard(0)])
        linear._check_dtensors(problem, inputs, linear_kl(**inputs, **problem.options))


# -------------------------------------------------------------------------------------- sequence
@on_ranks
def a_row_of_every_rank(me: Rank) -> None:
    """The shortest sequence that ranks can share, and one row less."""
    for balance, length in (("head_tail", 2 * me.size), (None, me.size)):
        problem = attention.Problem(me, 2, is_causal=True)
        problem.tensors = {name: x[:, :, :length] for name, x in problem.tensors.items()}
        problem.grad = problem.grad[:, :, :length]
        for method in ("gather", "ring"):
            attention._context_parallel(problem, load_balance=balance, method=method)
        shorter = problem.tensors["student_q"][:, :, 1:]
        same_error(
            me,
            functools.partial(shard_sequence, shorter, me.mesh, load_balance=balance),
            f"divide into {length} chunks over {me.size} ranks", f"length {length - 1}",
        )  # fmt: skip


@on_ranks
def heads_that_ranks_exchange(me: Rank) -> None:
    problem = attention.Problem(me, is_causal=True)
    few = {name: shard_sequence(x[:, :3], me.mesh) for name, x in problem.tensors.items()}
    same_error(
        me,
        lambda: attention_kl_context_parallel(**few, mesh=me.mesh, method="heads"),
        f"multiple of {me.size} heads, got 3 of student_q",
    )
    per_head = -(-me.size // attention.HEADS)
    problem.tensors = {name: x.repeat(1, per_head, 1, 1) for name, x in problem.tensors.items()}
    problem.grad = problem.grad.repeat(1, per_head, 1)
    attention._context_parallel(problem, method="heads")


# ----------------------------------------------------------------------------------------- costs
@contextlib.contextmanager
def counted_bytes(num_ranks: int) -> Iterator[list[float]]:
    """Bytes that this rank receives, as a ring of ranks sends them; integers left out."""
    received = [0.0]
    others = (num_ranks - 1) / num_ranks

    def count(name: str, x: Any, out: Any, *args: Any) -> None:
        whole = max(x.nbytes, out.nbytes)  # of a gather its result, of a scatter its input
        received[0] += {"all_reduce": 2 * others * whole}.get(name, others * whole)
        if name == "all_to_all" and 0 in args[0]:  # from one rank alone
            received[0] += (1 - others) * whole

    with watched_collectives(count):
        yield received


@on_ranks
def bytes_of_the_model_of_costs(me: Rank) -> None:
    """The arithmetic of bench/costs.py counts what `linear_kl` and each method exchange."""
    if me.device.type == "cuda":  # sizes that are measured there
        return
    for make, ours in (
        (sharded.vocabulary, ["streamkl"]), (sharded.sequence, ["gather", "heads", "ring"]),
    ):  # fmt: skip
        case = make(me.mesh, me.device)
        for name in ours:
            problem = case.make[name]()
            with counted_bytes(me.size) as received:
                problem.step()
            # a mean adds a number of each rank
            expected = pytest.approx(case.costs[name].received_mib, rel=1e-3)
            assert received[0] / MIB == expected, name


# ---------------------------------------------------------------------------------------- errors
@on_ranks
def ranks_that_die(me: Rank) -> None:
    """The last check: two ranks end; the others say so, far from them too, and do not wait."""
    if me.device.type == "cuda":
        return  # NCCL ends the process itself, which the other checks' results would not survive
    if me.rank in (1, me.size - 1):
        raise SystemExit
    parts = linear.Problem(me).shard((me.vocab(VOCAB),) * 2)
    start = time.monotonic()
    said = f"rank {me.rank} could not compare its arguments with the other {me.size - 1} ranks"
    with pytest.raises(RuntimeError, match=said):
        linear_kl(**parts, group=me.group)
    assert time.monotonic() - start < TIMEOUT.total_seconds() / 2
    raise SystemExit  # as an error ends a process: those that wait for this one hear of it


OWN = list(checks_of(sys.modules[__name__]))


def check(name: str, size: int, device: str = "cpu") -> None:
    """Runs a check of this file or of those of two ranks."""
    module = next(x.__name__ for x in MODULES if name in checks_of(x))
    run_check(module, name, size, device)


@pytest.mark.parametrize("name", ["ranks_that_disagree", *OWN])
def test_on_eight_ranks(name: str) -> None:
    check(name, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OF_ANY_NUMBER, *OWN])
def test_on_four_ranks(name: str) -> None:
    check(name, 4)


def _of_gpus(size: int) -> Any:
    is_missing = torch.cuda.device_count() < size
    return pytest.param(size, marks=pytest.mark.skipif(is_missing, reason=f"needs {size} GPUs"))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [_of_gpus(4), _of_gpus(8)])
@pytest.mark.parametrize("name", [*OF_ANY_NUMBER, *OWN])
def test_on_gpus(size: int, name: str) -> None:
    check(name, size, "cuda")
