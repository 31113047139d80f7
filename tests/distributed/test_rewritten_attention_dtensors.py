"""Naive divergences of attention maps of DTensors, rewritten on two processes.

The truth is the same code in float64 on whole tensors of one process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.torch_version import TorchVersion

from tests.distributed.test_rewritten_dtensors import AS_IT_IS, Case, all_close, kl, mesh_of, whole
from tests.support.ranks import Rank, keeping_graphs, largest_tensor, names_of, on_ranks, run_check
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.dtensors import rewriting

BATCH, HEADS, SEQLEN, HEAD_DIM = 2, 4, 16, 8
STUDENT, ALL = ("q_s", "k_s"), ("q_s", "k_s", "q_t", "k_t")
EVERYWHERE = [Replicate()]
BY_BATCH, BY_HEADS, BY_QUERIES = (Shard(0),), (Shard(1),), (Shard(2),)
# before, DTensor has no matmul of four dimensions but for the batch: no naive code to rewrite
ANY_DIMENSION = TorchVersion(torch.__version__) >= "2.13"
WAYS = (BY_BATCH, BY_HEADS) if ANY_DIMENSION else (BY_BATCH,)


@dataclass
class AttentionCase(Case):
    """A program of queries and keys (and values) of student and teacher."""

    wanted: tuple[str, ...] = ALL
    default: tuple[Any, ...] = WAYS[-1]
    options: dict[str, Any] = field(default_factory=lambda: dict(AS_IT_IS))
    kv_heads: int = HEADS
    has_values: bool = False

    def tensors(self, me: Rank) -> dict[str, Tensor]:
        torch.manual_seed(1)
        shapes = {
            "q_s": (BATCH, HEADS, SEQLEN, HEAD_DIM),
            "k_s": (BATCH, self.kv_heads, SEQLEN, HEAD_DIM),
            "q_t": (BATCH, HEADS, SEQLEN, 2 * HEAD_DIM),
            "k_t": (BATCH, self.kv_heads, SEQLEN, 2 * HEAD_DIM),
        }
        if self.has_values:
            shapes["v_s"] = shapes["k_s"]
        return {name: me.randn(*shape) for name, shape in shapes.items()}

    def placed(self, me: Rank, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        mesh = me.mesh if self.mesh is None else mesh_of(me, self.mesh)
        return {
            name: distribute_tensor(
                x.to(dtype or x.dtype), mesh, self.placements.get(name, self.default)
            )
            for name, x in self.tensors(me).items()
        }


def scores(q: Any, k: Any) -> Any:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


# ---------------------------------------------------------------------------- the forms of a loss
def of_maps(q_s: Any, k_s: Any, q_t: Any, k_t: Any) -> Any:
    return whole(kl(scores(q_s, k_s), scores(q_t, k_t)))


def of_rows(q_s: Any, k_s: Any, q_t: Any, k_t: Any) -> Any:
    return kl(scores(q_s, k_s), scores(q_t, k_t), "none").sum(-1)


def mean_of_all(q_s: Any, k_s: Any, q_t: Any, k_t: Any) -> Any:
    """Ranks have means of their own terms (Partial of an average)."""
    return whole(kl(scores(q_s, k_s), scores(q_t, k_t), "mean") * 3)


def of_whole_maps(q_s: Any, k_s: Any, q_t: Any, k_t: Any) -> Any:
    student, teacher = whole(scores(q_s, k_s).log_softmax(-1)), whole(scores(q_t, k_t).softmax(-1))
    return F.kl_div(student, teacher, reduction="batchmean")


def jensen_shannon(q_s: Any, k_s: Any, q_t: Any, k_t: Any) -> Any:
    p, q = scores(q_s, k_s).softmax(-1), scores(q_t, k_t).softmax(-1)
    m = (p + q) / 2
    return whole(((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)).mean())


def grouped(q_s: Any, k_s: Any, q_t: Any, k_t: Any) -> Any:
    return of_maps(q_s, k_s.repeat_interleave(2, 1), q_t, k_t.repeat_interleave(2, 1))


def causal(q_s: Any, k_s: Any, q_t: Any, k_t: Any) -> Any:
    allowed = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool, device=q_s.device).tril()
    if isinstance(q_s, DTensor):
        copies = [Replicate()] * q_s.device_mesh.ndim
        allowed = DTensor.from_local(allowed, q_s.device_mesh, copies, run_check=False)
    student, teacher = (
        torch.where(allowed, scores(q, k), -1e4) for q, k in ((q_s, k_s), (q_t, k_t))
    )
    return whole(kl(student, teacher))


def two_layers(q_s: Any, k_s: Any, v_s: Any, q_t: Any, k_t: Any) -> Any:
    teacher = scores(q_t, k_t).softmax(-1)
    first = scores(q_s, k_s).softmax(-1)
    second = scores(first @ v_s, k_s).softmax(-1)
    out = (second @ v_s).square().sum()
    losses = [F.kl_div(maps.log(), teacher, reduction="sum") for maps in (first, second)]
    return whole(losses[0] + losses[1] + out)


@on_ranks
def attention_forms(me: Rank) -> None:
    for program in (of_maps, of_rows, mean_of_all, of_whole_maps, causal):
        for default in WAYS:
            wanted = STUDENT if program is causal else ALL
            options = AS_IT_IS if default is WAYS[-1] else {}
            case = AttentionCase(program, wanted=wanted, default=default, options=options)
            report = case.fuses(me)
            name = "heads" if default is BY_HEADS else "batch"
            assert f"{name} shared by 2 ranks" in report.sites[0].runs, report.sites[0].runs
    AttentionCase(jensen_shannon).fuses(me, num_sites=1)
    AttentionCase(grouped, kv_heads=2).fuses(me)


@on_ranks
def shared_queries(me: Rank) -> None:
    if not ANY_DIMENSION:
        return
    keys = {"k_s": EVERYWHERE, "k_t": EVERYWHERE}
    for placements in (keys, {}):
        for program in (of_maps, of_rows):
            AttentionCase(program, placements, default=BY_QUERIES).fuses(me)


@on_ranks
def attention_on_two_mesh_dimensions(me: Rank) -> None:
    for mesh, placements in (
        ((1, me.size), (*EVERYWHERE, *BY_BATCH)),
        ((me.size, 1), (*BY_BATCH, *EVERYWHERE)),
    ):
        AttentionCase(of_maps, mesh=mesh, default=placements).fuses(me)


@on_ranks
def what_reads_the_values(me: Rank) -> None:
    """The attention that is left runs without its maps, on this rank's heads."""
    case = AttentionCase(two_layers, has_values=True, wanted=(*ALL, "v_s"))
    report = case.fuses(me, num_sites=2)
    assert not report.remaining, str(report)


@on_ranks
def no_maps_and_no_collectives(me: Rank) -> None:
    ours = backend.split_options({})[0]
    for default in WAYS:
        torch._dynamo.reset()
        graphs: list[torch.fx.GraphModule] = []
        keep = keeping_graphs(graphs)

        def rewritten(gm: Any, inputs: Any, keep: Any = keep) -> Any:
            backend.rewrite_and_report(gm, ours)
            return keep(gm, inputs)

        case = AttentionCase(two_layers, has_values=True, default=default)
        case.results(torch.compile(two_layers, backend=rewritten, fullgraph=True), case.placed(me))
        targets = [str(n.target) for graph in graphs for n in graph.graph.nodes]
        moved = [t for t in targets if "all_" in t or "scatter" in t]
        assert len(moved) == 1 and "all_reduce" in moved[0], moved  # the loss itself
        assert sum("torch_streamkl.attention_kl." in t for t in targets) == 2, targets
        assert largest_tensor(graphs) < BATCH * HEADS * SEQLEN * SEQLEN


@on_ranks
def local_heads(me: Rank) -> None:
    """Maps of a rank's own heads, as plain tensors: fused on every rank by itself."""

    def program(q_s: Any, k_s: Any, q_t: Any, k_t: Any) -> Any:
        own = (x.to_local() for x in (q_s, k_s, q_t, k_t))
        q, k, p, r = own
        return kl(scores(q, k), scores(p, r), "sum") * (1 + q_s.shape[-1])

    case = AttentionCase(program)
    torch._dynamo.reset()
    with backend.collected() as report:
        compiled = torch.compile(program, backend="streamkl", options=AS_IT_IS, fullgraph=True)
        ours = case.results(compiled, case.placed(me))
    assert report.num_fused == 1, str(report)
    double = case.placed(me, torch.float64)
    all_close(ours, case.results(program, double), case.results(program, case.placed(me)))


# ------------------------------------------------------------------------------- what stays, why
@on_ranks
def attention_that_does_not_fit(me: Rank) -> None:
    rule = "attention_kl on DTensors may share"
    AttentionCase(of_maps, {"q_t": EVERYWHERE, "k_t": EVERYWHERE}).stays(me, rule)
    if ANY_DIMENSION:
        AttentionCase(of_maps, default=(Shard(3),)).stays(me, rule)

    def plain_mask(q_s: Any, k_s: Any, q_t: Any, k_t: Any) -> Any:
        kept = whole(k_s).sum((1, 3)).sort(-1).values[:, None, None] < 99  # which is not read
        student, teacher = whole(scores(q_s, k_s)), whole(scores(q_t, k_t))
        return kl(torch.where(kept, student, -1e4), torch.where(kept, teacher, -1e4))

    def causal_queries(q_s: Any, k_s: Any, q_t: Any, k_t: Any) -> Any:
        allowed = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool, device=q_s.device).tril()
        student, teacher = whole(scores(q_s, k_s)), whole(scores(q_t, k_t))
        return kl(torch.where(allowed, student, -1e4), torch.where(allowed, teacher, -1e4))

    AttentionCase(plain_mask, wanted=STUDENT).stays(me, "is a plain tensor next to DTensors")
    if ANY_DIMENSION:
        case = AttentionCase(causal_queries, wanted=STUDENT, default=BY_QUERIES)
        case.stays(me, "counts from the last query")


# ------------------------------------------------------------------------------------- agreement
@on_ranks
def a_rank_that_cannot_put_back(me: Rank) -> None:
    """What one rank cannot put back stays on all of them, and the reason names it."""
    original = rewriting.Restore.run

    def failing(self: Any) -> None:
        if me.rank == 1 and not failing.done:  # type: ignore[attr-defined]
            failing.done = True  # type: ignore[attr-defined]
            raise rewriting.DoesNotFit("of a test", frozenset())
        original(self)

    failing.done = False  # type: ignore[attr-defined]
    rewriting.Restore.run = failing  # type: ignore[method-assign]
    try:
        AttentionCase(of_maps).stays(me, "rank 1: of a test")
    finally:
        rewriting.Restore.run = original  # type: ignore[method-assign]


@on_ranks
def a_rank_that_fails_late(me: Rank) -> None:
    original = rewriting.Restore.run

    def failing(self: Any) -> None:
        if me.rank == 1:
            raise IndexError("of a test")
        original(self)

    rewriting.Restore.run = failing  # type: ignore[method-assign]
    case = AttentionCase(of_maps)
    try:
        with backend.collected() as report:
            compiled = torch.compile(of_maps, backend="streamkl", options=AS_IT_IS)
            case.results(compiled, case.placed(me))
    finally:
        rewriting.Restore.run = original  # type: ignore[method-assign]
    assert not report.num_fused
    if me.rank == 0:
        assert "rank 1: IndexError: of a test" in str(report), str(report)


@pytest.mark.parametrize("name", names_of(__name__))
def test_on_two_ranks(name: str) -> None:
    run_check(__name__, name)
