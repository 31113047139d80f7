"""`attention_kl` on two processes: DTensors, and sequences that ranks share."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from bench.measure import MIB, peak_mib
from tests.support.ranks import (
    Rank,
    close,
    counted_collectives,
    keeping_graphs,
    largest_tensor,
    on_ranks,
    on_two_ranks,
    run_check,
    same_error,
)
from torch_streamkl import attention_kl, attention_kl_varlen
from torch_streamkl.attention import ops
from torch_streamkl.distributed import attention_kl_context_parallel, shard_sequence
from torch_streamkl.distributed.sequence import ranges_of_sequence

BATCH, HEADS, SEQLEN, HEAD_DIM = 2, 4, 48, 16  # divides into chunks of 2, 3, 4 and 8 ranks


class Problem:
    """Whole tensors of a call, the same on every rank."""

    def __init__(self, me: Rank, kv_heads: int = HEADS, **options: Any) -> None:
        self.me, self.options = me, options
        self.tensors = {
            "student_q": me.randn(BATCH, HEADS, SEQLEN, HEAD_DIM),
            "student_k": me.randn(BATCH, kv_heads, SEQLEN, HEAD_DIM),
            "teacher_q": me.randn(BATCH, HEADS, SEQLEN, HEAD_DIM),
            "teacher_k": me.randn(BATCH, HEADS, SEQLEN, HEAD_DIM),
        }
        self.grad = torch.rand(BATCH, HEADS, SEQLEN).to(me.device)

    def whole(self, dtype: torch.dtype, impl: str) -> dict[str, Tensor]:
        inputs = {k: x.detach().to(dtype).requires_grad_() for k, x in self.tensors.items()}
        value = attention_kl(**inputs, **self.options, impl=impl)
        (value * self.grad).sum().backward()
        return {"value": value.detach(), **{k: x.grad for k, x in inputs.items()}}

    def dtensors(self, q: Any, k: Any) -> dict[str, DTensor]:
        mesh = self.me.mesh
        return {
            name: distribute_tensor(
                x.clone(), mesh, [q if name.endswith("q") else k]
            ).requires_grad_()
            for name, x in self.tensors.items()
        }

    def check(self, value: Tensor, gradients: dict[str, Tensor]) -> None:
        truth = self.whole(torch.float64, "reference")
        single = self.whole(self.me.dtype, "auto")
        close(value, truth["value"], single["value"], what="value")
        for name, grad in gradients.items():
            close(grad, truth[name], single[name], what=f"{name} {self.options}")


def _run(
    problem: Problem,
    inputs: dict[str, DTensor],
    q: Any,
    function: Any = attention_kl,
    mode: Any = CommDebugMode,  # in which nothing is compiled
) -> dict[str, int]:
    """The collectives of a call whose value and gradients are right."""
    weight = distribute_tensor(problem.grad, problem.me.mesh, [q])
    with mode() as comm:
        value = function(**inputs, **problem.options)
        assert value.placements == (q,)
        (value * weight).sum().backward()
    gradients = {name: x.grad.full_tensor() for name, x in inputs.items() if x.grad is not None}
    problem.check(value.full_tensor().detach(), gradients)
    assert list(gradients) == [name for name, x in inputs.items() if x.requires_grad]
    counts = comm.get_comm_counts() if comm is not None else {}
    return {str(name).partition(".")[2]: n for name, n in counts.items() if n}


@on_ranks
def batch_and_heads(me: Rank) -> None:
    lengths = torch.tensor([20, SEQLEN], device=me.device)
    mask = torch.rand(1, HEADS, SEQLEN, SEQLEN, device=me.device) < 0.9
    for kv_heads, dim, options in (
        (HEADS, 0, {"is_causal": True}),
        (2, 1, {"key_lengths": lengths, "divergence": "js"}),
        (HEADS, 0, {"attn_mask": mask}),
        (HEADS, 1, {"attn_mask": mask}),
    ):
        problem = Problem(me, kv_heads, **options)
        assert _run(problem, problem.dtensors(Shard(dim), Shard(dim)), Shard(dim)) == {}
    problem = Problem(me, kv_heads=1)
    inputs = problem.dtensors(Shard(1), Shard(1))
    key = problem.tensors["student_k"]
    inputs["student_k"] = distribute_tensor(key, me.mesh, [Replicate()]).requires_grad_()
    assert set(_run(problem, inputs, Shard(1))) <= {"all_reduce"}
    # gradients of the student only, of both, and of the keys
    for wanted in (("student_q", "student_k"), ("student_q", "teacher_q"), ("teacher_k",)):
        problem = Problem(me)
        inputs = problem.dtensors(Shard(1), Shard(1))
        inputs = {k: x.detach().requires_grad_(k in wanted) for k, x in inputs.items()}
        _run(problem, inputs, Shard(1))


@on_ranks
def queries(me: Rank) -> None:
    for k, moved in (
        (Replicate(), set()),
        (Shard(2), {"all_gather_into_tensor", "reduce_scatter_tensor"}),
    ):
        problem = Problem(me, divergence="jeffreys")
        counts = _run(problem, problem.dtensors(Shard(2), k), Shard(2))
        assert set(counts) - {"all_reduce"} == moved, counts
        assert all(n == 2 for name, n in counts.items() if name in moved), counts
    torch._dynamo.reset()
    compiled = torch.compile(attention_kl, backend="aot_eager", fullgraph=True)
    inputs = problem.dtensors(Shard(2), Shard(2))
    _run(problem, inputs, Shard(2), compiled, contextlib.nullcontext)


@on_ranks
def placements_that_are_refused(me: Rank) -> None:
    problem = Problem(me)
    shards = problem.dtensors(Shard(2), Shard(2))

    partial = {k: DTensor.from_local(x.to_local(), me.mesh, [Partial()])
               for k, x in shards.items()}  # fmt: skip
    fewer = {
        name: distribute_tensor(x[:, :3], me.mesh, [Shard(1)])
        for name, x in problem.tensors.items()
    }
    for given, texts in (
        ({"is_causal": True}, ("attention_kl_context_parallel", "student_q S(2)")),
        ({"window": (3, 3)}, ("attention_kl_context_parallel",)),
        (problem.dtensors(Shard(3), Shard(3)), ("student_q S(3)",)),
        (problem.dtensors(Replicate(), Shard(2)), ("student_k S(2)",)),
        (partial, ("student_q P",)),
        ({"teacher_k": problem.tensors["teacher_k"]}, ("teacher_k must be a DTensor",)),
        (fewer, ("3 heads",)),
    ):
        same_error(me, functools.partial(attention_kl, **{**shards, **given}), *texts)
    # operators called by themselves are refused too, after a call that was not
    operands = [shards[name] for name in ("student_q", "student_k", "teacher_q", "teacher_k")]
    with pytest.raises((NotImplementedError, RuntimeError), match="placed alike"):
        ops.attention_kl(*operands)
    keys = problem.dtensors(Shard(2), Replicate())
    operands = [keys[name] for name in ("student_q", "student_k", "teacher_q", "teacher_k")]
    ops.attention_kl(*operands)
    with pytest.raises((NotImplementedError, RuntimeError), match="counts from the last query"):
        ops.attention_kl(*operands, *(None,) * 11, "(P*(logP-logS))", 1.0, 1.0, 0.0, 0.0, 1.0,
                         None, None, 0)  # fmt: skip


# ---------------------------------------------------------------------------- context parallel
def _context_parallel(problem: Problem, function: Any = None, **more: Any) -> None:
    me, mesh = problem.me, problem.me.mesh
    balance = {"load_balance": more.get("load_balance", "head_tail")}
    inputs = {
        name: shard_sequence(x, mesh, **balance).requires_grad_()
        for name, x in problem.tensors.items()
    }
    function = function or attention_kl_context_parallel
    value = function(**inputs, **problem.options, **more, mesh=mesh)
    (value * shard_sequence(problem.grad, mesh, **balance)).sum().backward()
    truth = problem.whole(torch.float64, "reference")
    single = problem.whole(me.dtype, "auto")
    results = {"value": value.detach(), **{name: x.grad for name, x in inputs.items()}}
    for name, got in results.items():
        parts = [shard_sequence(x[name], mesh, **balance) for x in (truth, single)]
        close(got, *parts, what=f"{name} {problem.options} {more}")


@on_ranks
def sequences_that_ranks_share(me: Rank) -> None:
    """Divergences, lengths beyond which some rows have no key, windows next to a chunk's size."""
    lengths, short = (torch.tensor(n, device=me.device) for n in ([20, SEQLEN], [1, SEQLEN - 1]))
    for methods, rows in (
        (
            ("gather", "ring", "heads"),
            [
                {},
                {"is_causal": True},
                {"window": (4, 3), "divergence": "reverse_kl"},
                {"window": (None, 20)},
                {"is_causal": True, "key_lengths": lengths, "temperature": 2.0},
                {"key_lengths": lengths, "student_softcap": 3.0},
            ],
        ),
        (
            ("gather", "heads"),
            [
                {"is_causal": True, "window": (5, None), "divergence": "js"},
                {"key_lengths": lengths, "window": (3, 2)},
            ],
        ),
        (
            ("ring",),
            [
                {"is_causal": True, "divergence": "cross_entropy"},
                {"is_causal": True, "divergence": "jeffreys"},
                {"key_lengths": short, "window": (2, 2)},
                *({"window": x} for x in ((0, None), (12, 1), (None, 12), (23, 23), (0, 0))),
            ],
        ),
    ):
        for options, method in itertools.product(rows, methods):
            for balance in ("head_tail", None) if method != "heads" else ("head_tail",):
                if method != "heads" or me.size == 2:  # heads of keys for every rank
                    problem = Problem(me, 2, **options)
                    _context_parallel(problem, load_balance=balance, method=method)
    truth = Problem(me, 1, is_causal=True)
    inputs = {name: shard_sequence(x, me.mesh).requires_grad_(name.startswith("student"))
              for name, x in truth.tensors.items()}  # fmt: skip
    attention_kl_context_parallel(
        **inputs, is_causal=True, mesh=me.mesh, method="ring", reduction="mean"
    ).backward()
    assert all((x.grad is not None) == x.requires_grad for x in inputs.values())


@on_ranks
def ranges_that_ranks_gather(me: Rank) -> None:
    """Rows of the whole sequence; gradients are summed over ranks and ranges, and never padded."""
    seqlen = 64 * me.size
    for balance in ("head_tail", None):
        # two ranges of every rank, which overlap and end anywhere
        bounds = [((0, seqlen // 2 - 3 * r - 1), (5 + r, seqlen - r)) for r in range(me.size)]
        whole = me.randn(2, 3, seqlen, 128)
        weights = [[me.randn(2, 3, b - a, 128) for a, b in ranges] for ranges in bounds]
        expected = torch.zeros(whole.shape, dtype=torch.float64, device=me.device)
        for ranges, given in zip(bounds, weights, strict=True):
            for (start, stop), weight in zip(ranges, given, strict=True):
                expected[:, :, start:stop] += weight
        x = shard_sequence(whole, me.mesh, load_balance=balance).requires_grad_()
        how = (me.group.group_name, me.size, balance)
        found = ranges_of_sequence(x, *how, bounds[me.rank])
        for (start, stop), got in zip(bounds[me.rank], found, strict=True):
            assert torch.equal(got, whole[:, :, start:stop])
        peak = peak_mib(
            functools.partial(torch.autograd.backward, found, weights[me.rank]), me.device
        )
        mine = shard_sequence(expected, me.mesh, load_balance=balance)
        close(x.grad, mine, mine.to(me.dtype), what="gradient of ranges")
        # the sum of all ranges, which gloo copies once more, and this rank's part
        mib = whole.numel() * whole.element_size() / MIB
        assert peak <= mib * (2 + 1 / me.size) + 0.1, (peak, mib)
        (only,) = ranges_of_sequence(x, *how, ((1, 3),))
        (gradient,) = torch.autograd.grad(only.sum(), x)
        sums = torch.zeros(seqlen, dtype=me.dtype, device=me.device)
        sums[1:3] = me.size
        sums = shard_sequence(sums, me.mesh, dim=0, load_balance=balance)
        assert torch.equal(gradient, sums[:, None].expand_as(gradient))


def of_squared_gradients(value: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    inputs = tuple(given.values())
    first = torch.autograd.grad(value, inputs, create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)


@on_ranks
def second_derivatives_of_gathered_keys(me: Rank) -> None:
    """Those of impl="reference", of which a rank's part is that of the whole sequence's."""
    names = ("student_q", "student_k", "teacher_q", "teacher_k")
    whole = {name: me.randn(1, 2, 8 * me.size, 4).double() for name in names}
    for balance in ("head_tail", None):
        for options in ({"is_causal": True}, {"window": (3, 2)}):
            leaves = {k: x.clone().requires_grad_() for k, x in whole.items()}
            value = attention_kl(**leaves, impl="reference", **options).sum()
            expected = of_squared_gradients(value, leaves)
            mine = {
                k: shard_sequence(x, me.mesh, load_balance=balance).requires_grad_()
                for k, x in whole.items()
            }
            value = attention_kl_context_parallel(
                **mine, mesh=me.mesh, load_balance=balance, impl="reference", **options
            ).sum()
            for got, x in zip(of_squared_gradients(value, mine), expected, strict=True):
                x = shard_sequence(x, me.mesh, load_balance=balance)
                torch.testing.assert_close(got, x, rtol=1e-10, atol=1e-12)


@on_ranks
def keys_that_change_after_the_forward(me: Rank) -> None:
    """Ranks exchange copies: gradients are those of the numbers that the forward saw."""

    def changing(**given: Any) -> Tensor:
        value = attention_kl_context_parallel(**given)
        with torch.no_grad():
            given["student_k"].mul_(2.0)
        return value

    _context_parallel(Problem(me, 2, is_causal=True), function=changing, method="gather")
    if me.size == 2:
        _context_parallel(Problem(me, 2), function=changing, method="heads")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # its own rows
        _context_parallel(Problem(me, 2), function=changing, method="ring")


@on_ranks
def packed_sequences(me: Rank) -> None:
    """Sequences that begin and end in chunks, at their bounds, and empty ones."""
    offsets = torch.tensor([0, 5, 5, 16, 27, 38, SEQLEN], device=me.device, dtype=torch.int32)
    mine = {"cu_seqlens": offsets, "max_seqlen": 11, "mesh": me.mesh}
    for options, methods in (
        ({}, ("gather", "ring", "heads")),
        ({"is_causal": True}, ("gather", "ring", "heads")),
        ({"is_causal": True, "window": (3, None), "divergence": "js"}, ("gather", "heads")),
        ({"window": (3, 2)}, ("heads",)),
    ):
        torch.manual_seed(0)
        problem = Problem(me, 2, **options)
        tensors = {name: x[:1] for name, x in problem.tensors.items()}
        weight = problem.grad[:1]
        whole = [
            _packed(tensors, weight, offsets, dtype, impl, options)
            for dtype, impl in ((torch.float64, "reference"), (me.dtype, "auto"))
        ]
        mask = torch.rand(1, HEADS, SEQLEN, device=me.device) < 0.7
        masked = [torch.where(mask, x["value"], 0.0) for x in whole]
        reduction = "batchmean" if options else "mean"
        reduced = [x.sum() / (len(offsets) - 1) if options else x.mean() for x in masked]
        for method in methods:
            if method == "heads" and me.size != 2:
                continue
            for balance in ("head_tail", None):
                how = {"load_balance": balance}
                inputs = {
                    name: shard_sequence(x, me.mesh, **how).requires_grad_()
                    for name, x in tensors.items()
                }
                value = attention_kl_context_parallel(
                    **inputs, **options, **mine, **how, method=method
                )
                (value * shard_sequence(weight, me.mesh, **how)).sum().backward()
                results = {"value": value.detach(), **{k: x.grad for k, x in inputs.items()}}
                for name, got in results.items():
                    parts = [shard_sequence(x[name], me.mesh, **how) for x in whole]
                    close(got, *parts, what=f"{name} {method} {balance} {options}")
                counted = {
                    "row_mask": shard_sequence(mask, me.mesh, **how), "reduction": reduction,
                }  # fmt: skip
                value = attention_kl_context_parallel(
                    **inputs, **options, **mine, **how, **counted, method=method
                )
                close(value.detach(), *reduced, what=f"{reduction} {method} {options}")


def _packed(
    tensors: dict[str, Tensor], weight: Tensor, offsets: Tensor, dtype: Any, impl: str,
    options: dict[str, Any],
) -> dict[str, Tensor]:  # fmt: skip
    """Value and gradients of one process."""
    inputs = {k: x.detach().to(dtype).requires_grad_() for k, x in tensors.items()}
    value = attention_kl_varlen(
        *(x[0].transpose(0, 1) for x in inputs.values()),
        cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=11, max_seqlen_k=11,
        impl=impl, **options,
    )[None]  # fmt: skip
    (value * weight).sum().backward()
    return {"value": value.detach(), **{k: x.grad for k, x in inputs.items()}}


@on_ranks
def context_parallel_reductions_and_sinks(me: Rank) -> None:
    for method, reduction in itertools.product(("gather", "heads"), ("mean", "sum", "batchmean")):
        problem = Problem(me, is_causal=True, divergence="jeffreys")
        sink = torch.randn(HEADS, device=me.device)
        rows = torch.rand(BATCH, HEADS, SEQLEN, device=me.device) < 0.8
        given = {**problem.options, "reduction": reduction}
        ours = sink.clone().requires_grad_()
        value = attention_kl_context_parallel(
            **{name: shard_sequence(x, me.mesh) for name, x in problem.tensors.items()},
            **given, student_sink=ours, mesh=me.mesh, method=method,
            row_mask=shard_sequence(rows, me.mesh),
        )  # fmt: skip
        value.backward()
        whole = sink.double().requires_grad_()
        truth = attention_kl(
            **{name: x.double() for name, x in problem.tensors.items()},
            **given, student_sink=whole, row_mask=rows, impl="reference",
        )  # fmt: skip
        truth.backward()
        limit = 1e-4 if me.dtype == torch.float32 else 0.05
        for got, expected in ((value, truth), (ours.grad, whole.grad)):
            torch.testing.assert_close(got.double(), expected, rtol=limit, atol=limit)


@on_ranks
def context_parallel_collectives(me: Rank) -> None:
    """Keys are gathered once a side and their gradients reduced once; no map in any graph."""
    problem = Problem(me, is_causal=True)
    inputs = {name: shard_sequence(x, me.mesh).requires_grad_()
              for name, x in problem.tensors.items()}  # fmt: skip
    for method, expected in (
        ("gather", {"all_gather": 2, "reduce_scatter": 2}),
        ("heads", {"all_to_all": 10}),  # four tensors and the values, and back
        # keys of both sides as one, twice, and their gradients once more
        ("ring", {"all_to_all": 3 * me.size - 2}),
    ):
        if method == "heads" and me.size != 2:
            continue
        with counted_collectives() as counts:
            value = attention_kl_context_parallel(
                **inputs, **problem.options, mesh=me.mesh, method=method
            )
            value.sum().backward()
        assert counts == expected, counts


@on_ranks
def context_parallel_compiled(me: Rank) -> None:
    for method in ("gather", "heads", "ring"):
        torch._dynamo.reset()
        graphs: list[torch.fx.GraphModule] = []
        function = torch.compile(
            attention_kl_context_parallel, backend=keeping_graphs(graphs), fullgraph=True
        )
        _context_parallel(Problem(me, is_causal=True), function, method=method)
        # rows, keys and head_dim of one tensor, and never rows x keys
        assert len(graphs) == 2
        assert largest_tensor(graphs) <= BATCH * HEADS * SEQLEN * HEAD_DIM


@on_ranks
def context_parallel_refusals(me: Rank) -> None:
    problem = Problem(me)
    inputs = {name: shard_sequence(x, me.mesh) for name, x in problem.tensors.items()}
    sink = torch.zeros(HEADS, device=me.device)
    offsets = torch.tensor([0, SEQLEN], dtype=torch.int32, device=me.device)
    packed = {"cu_seqlens": offsets, "max_seqlen": SEQLEN}
    one = {name: x[:1] for name, x in inputs.items()} | packed
    fewer = {name: x[:, :3] for name, x in inputs.items()}
    odd = {name: x[:, :, :-1] for name, x in inputs.items()}
    double = {name: x.double() for name, x in inputs.items()}
    on_mesh = {name: DTensor.from_local(x, me.mesh, [Shard(2)]) for name, x in inputs.items()}
    square = init_device_mesh(me.device.type, (1, me.size), mesh_dim_names=("data", "rows"))
    ring: dict[str, Any] = {"method": "ring"}
    refused: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"attn_mask": torch.ones(1)}, ("does not take attn_mask",)),
        ({"cu_seqlens_q": torch.ones(1)}, ("does not take cu_seqlens_q",)),
        ({"is_casual": True}, ("TypeError", "'is_casual'; did you mean 'is_causal'?")),
        ({"method": "tree"}, ("'gather', 'heads', 'ring'",)),
        (ring | {"divergence": "js"}, ("log-probabilities, got divergence='js'; method",)),
        (ring | {"teacher_eps": 0.5}, ("got teacher_eps=0.5; method='gather' takes any",)),
        (ring | {"student_sink": sink}, ("does not take student_sink",)),
        (packed, ("batch size 1, got 2",)),
        (one | {"cu_seqlens": offsets.long()}, ("cu_seqlens", "int")),
        (one | {"max_seqlen": 0}, ("max_seqlen must be", "got 0")),
        (one | {"window": (2, 2)}, ("method='heads' takes any",)),
        (one | ring | {"is_causal": True, "window": (2, None)}, ("method='gather'",)),
        (one | {"max_seqlen": SEQLEN + me.rank}, ("max_seqlen", f"{SEQLEN} (rank 0)")),
        (fewer | {"method": "heads"}, (f"multiple of {me.size} heads, got 3",)),
        (odd, ("two chunks", "23 rows")),
        ({"mesh": square}, ("mesh must be", "one dimension", f"shape (1, {me.size})")),
        ({"mesh": "rows"}, ("mesh must be", "got str")),
        (on_mesh, ("this rank's rows, got a DTensor",)),
    ]
    if me.device.type == "cpu":  # a GPU's values are not read
        lengths = torch.full((BATCH,), SEQLEN + 1)
        refused += [
            ({"key_lengths": lengths}, (f"key_lengths must be in [0, {SEQLEN}]",)),
            (one | {"cu_seqlens": offsets // 2}, ("cu_seqlens must", f"the total {SEQLEN}")),
            (one | {"max_seqlen": 3}, (f"max_seqlen must be at least {SEQLEN}", "got 3")),
        ]
    of_last: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        (odd, ("number of rows", "24 (rank 0)", "23 (rank")),
        ({"is_causal": True}, ("is_causal", "False (rank 0)", f"True (rank {me.size - 1})")),
        ({"student_q": inputs["student_q"][0]}, ("student_q must have 4 dimensions",)),
        (double, ("dtype", "(rank 0)", "float64 (rank")),
        ({"reduction": "mean"}, ("same reduction", "none (rank 0)", "mean (rank")),
    ]
    call = functools.partial(attention_kl_context_parallel, **inputs, mesh=me.mesh)
    for given, texts in refused:
        same_error(me, functools.partial(call, **given), *texts)
    for given, texts in of_last:
        given = given if me.rank == me.size - 1 else {}
        same_error(me, functools.partial(call, load_balance=None, **given), *texts)
    same_error(me, lambda: shard_sequence(torch.ones(1, 1, 7), me.mesh), "got length 7")


ON_THREE_RANKS = [
    "sequences_that_ranks_share", "packed_sequences", "context_parallel_collectives",
    "ranges_that_ranks_gather",
]  # fmt: skip


@pytest.mark.parametrize("name", ON_THREE_RANKS)
def test_on_three_ranks(name: str) -> None:
    run_check(__name__, name, 3)


test_on_two_ranks = on_two_ranks(__name__)
