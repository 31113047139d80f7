"""Naive divergences of attention maps of DTensors, rewritten on two processes.

The truth is the same code in float64 on whole tensors of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.torch_version import TorchVersion

from tests.distributed.test_rewritten_dtensors import AS_IT_IS, Case, failing, kl, whole
from tests.support.ranks import (
    Rank,
    keeping_graphs,
    largest_tensor,
    on_ranks,
    on_two_ranks,
)
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

    def usual(self, name: str, mesh: Any) -> Any:
        return self.default


def scores(q: Any, k: Any) -> Any:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


# ---------------------------------------------------------------------------- the forms of a loss
def of_scores(loss: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The program of a loss of both sides' scores."""

    def program(q_s: Any, k_s: Any, q_t: Any, k_t: Any) -> Any:
        return loss(scores(q_s, k_s), scores(q_t, k_t))

    return program


def jensen_shannon(s: Any, t: Any) -> Any:
    p, q = s.softmax(-1), t.softmax(-1)
    m = (p + q) / 2
    return whole(((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)).mean())


def of_whole_maps(s: Any, t: Any) -> Any:
    return F.kl_div(whole(s.log_softmax(-1)), whole(t.softmax(-1)), reduction="batchmean")


def causal(s: Any, t: Any) -> Any:
    allowed = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool, device=s.device).tril()
    if isinstance(s, DTensor):
        copies = [Replicate()] * s.device_mesh.ndim
        allowed = DTensor.from_local(allowed, s.device_mesh, copies, run_check=False)
    return whole(kl(torch.where(allowed, s, -1e4), torch.where(allowed, t, -1e4)))


of_maps = of_scores(lambda s, t: whole(kl(s, t)))
of_rows = of_scores(lambda s, t: kl(s, t, "none").sum(-1))
# ranks have means of their own terms (Partial of an average)
mean_of_all = of_scores(lambda s, t: whole(kl(s, t, "mean") * 3))


def grouped(q_s: Any, k_s: Any, q_t: Any, k_t: Any) -> Any:
    return of_maps(q_s, k_s.repeat_interleave(2, 1), q_t, k_t.repeat_interleave(2, 1))


def two_layers(q_s: Any, k_s: Any, v_s: Any, q_t: Any, k_t: Any) -> Any:
    teacher = scores(q_t, k_t).softmax(-1)
    first = scores(q_s, k_s).softmax(-1)
    second = scores(first @ v_s, k_s).softmax(-1)
    out = (second @ v_s).square().sum()
    losses = [F.kl_div(maps.log(), teacher, reduction="sum") for maps in (first, second)]
    return whole(losses[0] + losses[1] + out)


of_causal = of_scores(causal)
FORMS = (of_maps, of_rows, mean_of_all, of_scores(of_whole_maps), of_causal)


@on_ranks
def attention_forms(me: Rank) -> None:
    for i, program in enumerate(FORMS):
        default = WAYS[i % len(WAYS)]
        wanted = STUDENT if program is of_causal else ALL  # eager's gradient to a target is NaN
        report = AttentionCase(program, wanted=wanted, default=default).fuses(me)
        name = "heads" if default is BY_HEADS else "batch"
        assert f"{name} shared by 2 ranks" in report.sites[0].runs, report.sites[0].runs
    AttentionCase(of_scores(jensen_shannon), default=WAYS[0], options={}).fuses(me)
    AttentionCase(grouped, kv_heads=2, options={}).fuses(me)


@on_ranks
def shared_queries(me: Rank) -> None:
    if not ANY_DIMENSION:
        return
    keys = {"k_s": EVERYWHERE, "k_t": EVERYWHERE}
    for program, placements in ((of_maps, keys), (of_rows, {})):
        AttentionCase(program, placements, default=BY_QUERIES).fuses(me)


@on_ranks
def attention_on_two_mesh_dimensions(me: Rank) -> None:
    for mesh, placements in (
        ((1, me.size), (*EVERYWHERE, *BY_BATCH)),
        ((me.size, 1), (*BY_BATCH, *EVERYWHERE)),
    ):
        AttentionCase(of_maps, mesh=mesh, default=placements).fuses(me)


@on_ranks
def no_maps_and_no_collectives(me: Rank) -> None:
    """The attention that is left runs without its maps, on this rank's heads."""
    ours = backend.split_options({})[0]
    case = AttentionCase(two_layers, has_values=True, wanted=(*ALL, "v_s"))
    report = case.fuses(me, num_sites=2)
    assert not report.remaining, str(report)
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

    AttentionCase(program).fuses_on_dtensors(me)


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

    def causal_queries(s: Any, t: Any) -> Any:
        allowed = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool, device=s.device).tril()
        return kl(torch.where(allowed, whole(s), -1e4), torch.where(allowed, whole(t), -1e4))

    AttentionCase(plain_mask, wanted=STUDENT).stays(me, "is a plain tensor next to DTensors")
    if ANY_DIMENSION:
        case = AttentionCase(of_scores(causal_queries), wanted=STUDENT, default=BY_QUERIES)
        case.stays(me, "counts from the last query")


# ------------------------------------------------------------------------------------- agreement
@on_ranks
def a_rank_that_cannot_put_back(me: Rank) -> None:
    """What one rank cannot put back stays on all of them, and the reason names it."""
    is_first = [me.rank == 1]

    def fails(original: Any, *args: Any) -> None:
        if is_first[0]:
            is_first[0] = False
            raise rewriting.DoesNotFit("of a test", frozenset())
        original(*args)

    with failing(rewriting.Restore, "run", fails):
        AttentionCase(of_maps).stays(me, "rank 1: of a test")


test_on_two_ranks = on_two_ranks(__name__)
