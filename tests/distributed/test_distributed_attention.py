"""`attention_kl` on two processes: DTensors, and sequences that ranks share."""

from __future__ import annotations

import functools
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
    names_of,
    on_ranks,
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


def _counts(comm: CommDebugMode) -> dict[str, int]:
    return {str(name).partition(".")[2]: n for name, n in comm.get_comm_counts().items() if n}


def _run(problem: Problem, inputs: dict[str, DTensor], function: Any, q: Any) -> dict[str, int]:
    weight = distribute_tensor(problem.grad, problem.me.mesh, [q])
    with CommDebugMode() as comm:
        value = function(**inputs, **problem.options)
        assert value.placements == (q,)
        (value * weight).sum().backward()
    counts = _counts(comm)
    problem.check(
        value.full_tensor().detach(), {name: x.grad.full_tensor() for name, x in inputs.items()}
    )
    return counts


@on_ranks
def batch_and_heads(me: Rank) -> None:
    lengths = torch.tensor([20, SEQLEN], device=me.device)
    mask = torch.rand(1, HEADS, SEQLEN, SEQLEN, device=me.device) < 0.9
    for dim in (0, 1):
        for kv_heads, options in (
            (HEADS, {"is_causal": True}),
            (2, {"key_lengths": lengths, "divergence": "js"}),
            (HEADS, {"attn_mask": mask}),
        ):
            problem = Problem(me, kv_heads, **options)
            inputs = problem.dtensors(Shard(dim), Shard(dim))
            assert _run(problem, inputs, attention_kl, Shard(dim)) == {}


@on_ranks
def one_head_of_keys(me: Rank) -> None:
    problem = Problem(me, kv_heads=1)
    inputs = problem.dtensors(Shard(1), Shard(1))
    key = problem.tensors["student_k"]
    inputs["student_k"] = distribute_tensor(key, me.mesh, [Replicate()]).requires_grad_()
    counts = _run(problem, inputs, attention_kl, Shard(1))
    assert set(counts) <= {"all_reduce"}, counts


@on_ranks
def queries(me: Rank) -> None:
    for k, expected in (
        (Replicate(), set()),
        (Shard(2), {"all_gather_into_tensor", "reduce_scatter_tensor"}),
    ):
        problem = Problem(me, divergence="jeffreys")
        inputs = problem.dtensors(Shard(2), k)
        counts = _run(problem, inputs, attention_kl, Shard(2))
        assert set(counts) - {"all_reduce"} == expected, counts
        assert all(n == 2 for name, n in counts.items() if name in expected), counts


@on_ranks
def attention_of_dtensors_compiled(me: Rank) -> None:
    for q, k in ((Shard(1), Shard(1)), (Shard(2), Shard(2))):
        torch._dynamo.reset()
        problem = Problem(me)
        inputs = problem.dtensors(q, k)
        compiled = torch.compile(attention_kl, backend="aot_eager", fullgraph=True)
        value = compiled(**inputs)
        assert value.placements == (q,)
        (value * distribute_tensor(problem.grad, me.mesh, [q])).sum().backward()
        gradients = {name: x.grad.full_tensor() for name, x in inputs.items()}
        problem.check(value.full_tensor().detach(), gradients)


@on_ranks
def other_gradients(me: Rank) -> None:
    """The same tensors with gradients of the student only, of both, and of the keys."""
    for wanted in (("student_q", "student_k"), ("student_q", "teacher_q"), ("teacher_k",)):
        problem = Problem(me)
        inputs = problem.dtensors(Shard(1), Shard(1))
        inputs = {k: x.detach().requires_grad_(k in wanted) for k, x in inputs.items()}
        value = attention_kl(**inputs)
        (value * distribute_tensor(problem.grad, me.mesh, [Shard(1)])).sum().backward()
        problem.check(value.full_tensor().detach(),
                      {name: inputs[name].grad.full_tensor() for name in wanted})  # fmt: skip


@on_ranks
def sinks(me: Rank) -> None:
    problem = Problem(me)
    sink = torch.randn(HEADS, device=me.device)
    problem.options["student_sink"] = sink
    for dim in (0, 1):
        inputs = problem.dtensors(Shard(dim), Shard(dim))
        given = distribute_tensor(sink, me.mesh, [Replicate()]).requires_grad_()
        value = attention_kl(**inputs, student_sink=given)
        problem.check(value.full_tensor().detach(), {})
        weight = distribute_tensor(problem.grad, me.mesh, [Shard(dim)])
        (value * weight).sum().backward()
        whole = sink.double().requires_grad_()
        doubles = {k: x.double() for k, x in problem.tensors.items()}
        truth = attention_kl(**doubles, student_sink=whole, impl="reference")
        (truth * problem.grad).sum().backward()
        torch.testing.assert_close(
            given.grad.full_tensor().double(), whole.grad, rtol=1e-2, atol=1e-2
        )


@on_ranks
def placements_that_are_refused(me: Rank) -> None:
    problem = Problem(me)
    shards = problem.dtensors(Shard(2), Shard(2))

    def call(inputs: Any = shards, **options: Any) -> Any:
        return lambda: attention_kl(**inputs, **options)

    same_error(me, call(is_causal=True), "attention_kl_context_parallel", "student_q S(2)")
    same_error(me, call(window=(3, 3)), "attention_kl_context_parallel")
    same_error(me, call(problem.dtensors(Shard(3), Shard(3))), "student_q S(3)")
    same_error(me, call(problem.dtensors(Replicate(), Shard(2))), "student_k S(2)")
    partial = {k: DTensor.from_local(x.to_local(), me.mesh, [Partial()])
               for k, x in shards.items()}  # fmt: skip
    same_error(me, call(partial), "student_q P")
    mixed = {**shards, "teacher_k": problem.tensors["teacher_k"]}
    same_error(me, call(mixed), "teacher_k must be a DTensor")
    fewer = {name: x[:, :3] for name, x in problem.tensors.items()}
    heads = {name: distribute_tensor(x, me.mesh, [Shard(1)]) for name, x in fewer.items()}
    same_error(me, call(heads), "3 heads")
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
    lengths = torch.tensor([20, SEQLEN], device=me.device)
    for options in (
        {},
        {"is_causal": True},
        {"is_causal": True, "window": (5, None), "divergence": "js"},
        {"window": (4, 3), "divergence": "reverse_kl"},
        {"window": (None, 20)},
        {"is_causal": True, "key_lengths": lengths, "temperature": 2.0},
        {"key_lengths": lengths, "student_softcap": 3.0},
    ):
        for balance in ("head_tail", None):
            _context_parallel(Problem(me, 2, **options), load_balance=balance)
            if options.get("divergence") != "js":
                _context_parallel(Problem(me, 2, **options), load_balance=balance, method="ring")
        if me.size == 2:  # heads of keys for every rank
            _context_parallel(Problem(me, 2, **options), method="heads")


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
def keys_that_go_around(me: Rank) -> None:
    """Divergences, gradients of one side, grouped heads."""
    for divergence in ("reverse_kl", "cross_entropy", "jeffreys"):
        _context_parallel(Problem(me, 1, divergence=divergence, is_causal=True), method="ring")
    # rows all of whose keys are beyond a length
    lengths = torch.tensor([1, SEQLEN - 1], device=me.device)
    _context_parallel(Problem(me, key_lengths=lengths, window=(2, 2)), method="ring")
    truth = Problem(me, is_causal=True)
    names = ("student_q", "student_k")
    inputs = {
        name: shard_sequence(x, me.mesh).requires_grad_(name in names)
        for name, x in truth.tensors.items()
    }
    value = attention_kl_context_parallel(
        **inputs, is_causal=True, mesh=me.mesh, method="ring", reduction="mean"
    )
    value.backward()
    assert all((x.grad is not None) == (name in names) for name, x in inputs.items())


@on_ranks
def windows_that_go_around(me: Rank) -> None:
    """Of any size next to a chunk's."""
    for window in ((0, None), (3, None), (12, 1), (None, 12), (23, 23), (1, 0), (0, 0)):
        for balance in ("head_tail", None):
            _context_parallel(Problem(me, 2, window=window), method="ring", load_balance=balance)


@on_ranks
def packed_sequences(me: Rank) -> None:
    """Sequences that begin and end in chunks, at their bounds, and empty ones."""
    offsets = torch.tensor([0, 5, 5, 16, 27, 38, SEQLEN], device=me.device, dtype=torch.int32)
    mine = {"cu_seqlens": offsets, "max_seqlen": 11, "mesh": me.mesh}
    for options, methods in (
        ({}, ("gather", "ring", "heads")),
        ({"is_causal": True}, ("gather", "ring", "heads")),
        ({"is_causal": True, "divergence": "js"}, ("gather", "heads")),
        ({"is_causal": True, "window": (3, None)}, ("gather", "heads")),
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
    for method in ("gather", "heads"):
        for reduction in ("mean", "sum", "batchmean"):
            problem = Problem(me, is_causal=True, divergence="jeffreys")
            sink = torch.randn(HEADS, device=me.device)
            rows = torch.rand(BATCH, HEADS, SEQLEN, device=me.device) < 0.8
            ours = sink.clone().requires_grad_()
            value = attention_kl_context_parallel(
                **{name: shard_sequence(x, me.mesh) for name, x in problem.tensors.items()},
                **problem.options, student_sink=ours, mesh=me.mesh, method=method,
                row_mask=shard_sequence(rows, me.mesh), reduction=reduction,
            )  # fmt: skip
            value.backward()
            whole = sink.double().requires_grad_()
            truth = attention_kl(
                **{name: x.double() for name, x in problem.tensors.items()},
                **problem.options, student_sink=whole, row_mask=rows, reduction=reduction,
                impl="reference",
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
    is_last = me.rank == me.size - 1

    def call(given: Any = None, **options: Any) -> Any:
        given = {**inputs, **(given or {})}
        return lambda: attention_kl_context_parallel(**given, **{"mesh": me.mesh, **options})

    same_error(me, call(attn_mask=torch.ones(1)), "does not take attn_mask")
    same_error(me, call(cu_seqlens_q=torch.ones(1)), "does not take cu_seqlens_q")
    same_error(me, call(method="tree"), "'gather', 'heads', 'ring'")
    js = call(method="ring", divergence="js")
    same_error(me, js, "linear in log-probabilities", "method='gather'")
    sink = torch.zeros(HEADS, device=me.device)
    same_error(me, call(method="ring", student_sink=sink), "does not take student_sink")
    offsets = torch.tensor([0, SEQLEN], dtype=torch.int32, device=me.device)
    packed = {"cu_seqlens": offsets, "max_seqlen": SEQLEN}
    same_error(me, call(**packed), "batch size 1, got 2")
    one = {name: x[:1] for name, x in inputs.items()}
    same_error(me, call(one, **{**packed, "cu_seqlens": offsets.long()}), "cu_seqlens", "int")
    same_error(me, call(one, cu_seqlens=offsets), "max_seqlen must be", "got 0")
    same_error(me, call(one, **packed, window=(2, 2)), "method='heads' takes any")
    windowed = call(one, **packed, is_causal=True, window=(2, None), method="ring")
    same_error(me, windowed, "method='gather'")
    same_error(
        me, call(one, **{**packed, "max_seqlen": 30 + me.rank}), "max_seqlen", "30 (rank 0)"
    )
    fewer = {name: x[:, :3] for name, x in inputs.items()}
    same_error(me, call(fewer, method="heads"), "multiple of 2 heads, got 3")
    odd = {name: x[:, :, :-1] for name, x in inputs.items()}
    same_error(me, call(odd), "two chunks", "23 rows")
    same_error(me, call(odd if is_last else None, load_balance=None),
               "number of rows", "24 (rank 0)", "23 (rank")  # fmt: skip
    same_error(me, call(is_causal=is_last), "is_causal", "False", "True")
    same_error(me, call({"student_q": inputs["student_q"][0]} if is_last else None),
               "student_q must have 4 dimensions")  # fmt: skip
    same_error(me, lambda: shard_sequence(torch.ones(1, 1, 7), me.mesh), "got length 7")
    square = init_device_mesh(me.device.type, (1, me.size), mesh_dim_names=("data", "rows"))
    same_error(me, call(mesh=square), "mesh must be", "one dimension", f"shape (1, {me.size})")
    same_error(me, call(mesh="rows"), "mesh must be", "got str")
    on_mesh = {name: DTensor.from_local(x, me.mesh, [Shard(2)]) for name, x in inputs.items()}
    same_error(me, call(on_mesh), "this rank's rows, got a DTensor")
    double = {name: x.double() for name, x in inputs.items()}
    same_error(me, call(double if is_last else None), "dtype", "(rank 0)", "float64 (rank")
    other = call(reduction="mean" if is_last else "none")
    same_error(me, other, "same reduction", "none (rank 0)", "mean (rank")


ON_THREE_RANKS = [
    "sequences_that_ranks_share",
    "keys_that_go_around",
    "windows_that_go_around",
    "packed_sequences",
    "context_parallel_collectives",
    "ranges_that_ranks_gather",
]


@pytest.mark.parametrize("name", ON_THREE_RANKS)
def test_on_three_ranks(name: str) -> None:
    run_check(__name__, name, 3)


@pytest.mark.parametrize("name", names_of(__name__))
def test_on_two_ranks(name: str) -> None:
    run_check(__name__, name)
