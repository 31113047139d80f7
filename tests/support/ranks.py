"""Checks that run on several processes: one group of processes for all checks of a file.

A file defines functions that take a `Rank` and are marked with ``@on_ranks``. `outcomes` starts
the processes once, every process runs all of them in order, and a test looks at what became of one
check on every rank. A check that does not end takes its processes with it, and new ones run the
checks after it. Processes print what they do (``pytest -s`` shows it).
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import importlib
import os
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, distributed
from torch._dynamo.backends.common import aot_autograd

from tests.support import quick
from torch_streamkl.distributed import collectives

TIMEOUT = datetime.timedelta(seconds=60)  # of a collective: nobody waits longer for a lost rank
CHECK_SECONDS = 240  # a process that is still at one check ends itself
IMPORTED = [
    "functorch.compile", "torch._inductor.compile_fx", "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp", "torch_streamkl.fx_passes.backend", "tests.support.ranks",
]  # fmt: skip
MAX_STARTS = 5  # of new processes, after checks that did not end
PASSED = ""


@dataclass(frozen=True)
class Rank:
    """One process of a check."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype  # of the inputs

    @property
    def group(self) -> distributed.ProcessGroup:
        return distributed.group.WORLD

    @property
    def mesh(self) -> Any:
        """One object for all checks: compiled graphs of DTensors mix up meshes that are equal."""
        return _mesh(self.device.type, self.size, self.group)

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        """The same numbers on every rank and device."""
        return (torch.randn(shape) * scale).to(self.device, self.dtype)

    def vocab(self, vocab_size: int, uneven: bool = False) -> slice:
        """This rank's vocabulary entries as DTensor cuts them, or unevenly."""
        if uneven:
            cuts = [0, *(vocab_size // 3 + i for i in range(self.size - 1)), vocab_size]
            return slice(cuts[self.rank], cuts[self.rank + 1])
        step = -(-vocab_size // self.size)
        return slice(min(self.rank * step, vocab_size), min((self.rank + 1) * step, vocab_size))


@functools.cache
def _mesh(device: str, size: int, group: distributed.ProcessGroup) -> Any:
    return distributed.device_mesh.init_device_mesh(device, (size,))


Check = Callable[[Rank], None]


def on_ranks(check: Check) -> Check:
    check.runs_on_ranks = True  # type: ignore[attr-defined]
    return check


def checks_of(module: Any) -> dict[str, Check]:
    """The module's checks, in the order in which it defines them."""
    return {name: x for name, x in vars(module).items() if hasattr(x, "runs_on_ranks")}


def outcomes(
    modules: list[str], device: str = "cpu", size: int = 2, names: list[str] | None = None
) -> dict[str, list[str]]:
    """What became of each check (or of these) on every rank: nothing, or the error."""
    if names is None:
        names = [name for module in modules for name in checks_of(importlib.import_module(module))]
    found = {name: ["did not run"] * size for name in names}
    left = list(names)
    for _ in range(MAX_STARTS):
        for name, results in _of_new_processes(modules, left, device, size).items():
            found[name] = results
            left.remove(name)
        if not left:
            break
    return found


def _of_new_processes(
    modules: list[str], names: list[str], device: str, size: int
) -> dict[str, list[str]]:
    """Outcomes of the checks that were begun."""
    with tempfile.TemporaryDirectory() as folder:
        # a process that ended itself says so by what is missing
        with contextlib.suppress(torch.multiprocessing.ProcessExitedException):
            start(_process, (size, device, modules, names, folder), size, device)
        files = [Path(folder) / f"{rank}.pt" for rank in range(size)]
        found = [torch.load(file) if file.exists() else {} for file in files]
    begun = [name for name in names if any(name in of_rank for of_rank in found)]
    return {name: [of_rank.get(name, "did not run") for of_rank in found] for name in begun}


def start(function: Any, arguments: tuple[Any, ...], size: int, device: str) -> None:
    """Start processes and wait for them.

    Those without a GPU are forked from one that has imported what all of them need and has done
    nothing else: otherwise each spends five seconds on it.
    """
    if device == "cpu":
        torch.multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    method = "forkserver" if device == "cpu" else "spawn"
    torch.multiprocessing.start_processes(function, arguments, nprocs=size, start_method=method)


def assert_passed(found: dict[str, list[str]], name: str) -> None:
    for rank, error in enumerate(found[name]):
        if error != PASSED:
            pytest.fail(f"rank {rank}:\n{error}", pytrace=False)


def _process(
    rank: int, size: int, device: str, modules: list[str], names: list[str], folder: str
) -> None:
    torch.set_num_threads(1)
    loaded = [importlib.import_module(module) for module in modules]
    quick.guards_are_not_timed()
    quick.devices_that_are_not_here_have_no_seed()
    quick.compilations_collect_no_garbage()
    quick.sites_are_fused_whatever_their_size()
    quick.what_stays_is_no_garbage()
    # NVLink multicast is not available in every container, and small messages gain nothing by it
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    me = Rank(rank, size, torch.device(device, rank if on_gpu else None), dtype)
    store = distributed.FileStore(f"{folder}/store", size)
    store.set_timeout(TIMEOUT)
    found: dict[str, str] = {}
    starts, group_is_good = 0, False
    for name, check in (pair for module in loaded for pair in checks_of(module).items()):
        if name not in names:
            continue
        faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)
        if not group_is_good:
            _start_group(me, distributed.PrefixStore(f"group{starts}", store))
            starts += 1
        torch.manual_seed(0)
        torch._dynamo.reset()
        found[name] = "did not end"
        torch.save(found, f"{folder}/{rank}.pt")
        start = time.monotonic()
        try:
            check(me)
            found[name] = PASSED
        except SystemExit:  # a check about a rank that goes without a vocabulary entry
            found[name] = PASSED
            torch.save(found, f"{folder}/{rank}.pt")
            store.set(f"{name}/{rank}", "True")
            os._exit(0)
        except Exception:
            found[name] = traceback.format_exc()
            _end_group()  # the others must not wait
        torch.save(found, f"{folder}/{rank}.pt")
        seconds = time.monotonic() - start
        said = f"rank {rank}: {name} {seconds:.1f} s {found[name] or 'passed'}\n"
        print(said, end="", flush=True)  # in one piece
        group_is_good = _all_passed(me, store, name, found[name] == PASSED)
        if not group_is_good and found[name] == PASSED:
            _end_group()
    faulthandler.cancel_dump_traceback_later()
    _end_group()


def _start_group(me: Rank, store: distributed.Store) -> None:
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if me.device.type == "cuda" else "gloo",
        store=store,
        rank=me.rank,
        world_size=me.size,
        timeout=TIMEOUT,
    )


def _end_group() -> None:
    with contextlib.suppress(Exception):
        distributed.destroy_process_group()


def _all_passed(me: Rank, store: distributed.Store, name: str, passed: bool) -> bool:
    """Whether every rank did; ranks wait for each other through the store."""
    store.set(f"{name}/{me.rank}", str(passed))
    try:
        return all(store.get(f"{name}/{rank}") == b"True" for rank in range(me.size))
    except Exception:  # a rank is gone
        return False


@contextlib.contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """How often each collective of ours ran; the few integers of `agreement.py` left out."""
    counts: Counter[str] = Counter()
    names = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
    originals = {name: getattr(collectives, name) for name in names}

    def counting(name: str) -> Any:
        def call(x: Tensor, *args: Any) -> Tensor:
            if x.is_floating_point():
                counts[name] += 1
            return originals[name](x, *args)

        return call

    for name in names:
        setattr(collectives, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(collectives, name, original)


def keeping_graphs(graphs: list[torch.fx.GraphModule]) -> Any:
    """A backend that keeps the graphs of forward and backward, and runs them as they are."""

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )


def largest_tensor(graphs: list[torch.fx.GraphModule]) -> int:
    """Elements of the largest tensor in any of the graphs."""
    values = [node.meta.get("val") for graph in graphs for node in graph.graph.nodes]
    return max(x.numel() for x in values if isinstance(x, Tensor))


def same_error(me: Rank, call: Callable[[], Any], *vocab: str) -> None:
    """Every rank raises, and every rank's message has the vocabulary entries."""
    try:
        call()
        message = "nothing was raised"
    except (ValueError, TypeError, NotImplementedError) as error:
        message = f"{type(error).__name__}: {error}"
    messages: list[Any] = [None] * me.size
    distributed.all_gather_object(messages, message)
    for text in messages:
        assert all(vocab_entry in text for vocab_entry in vocab), messages


def close(
    got: Tensor, expected: Tensor, same_dtype: Tensor, num_roundings: float = 8.0, what: str = ""
) -> None:
    """At most twice the error of one process in the same dtype, and a few roundings."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    finite = expected.isfinite()
    assert torch.equal(got.isfinite(), finite), (
        f"{what}: {int((got.isfinite() != finite).sum())} of {got.numel()} are finite in one and "
        f"not in the other (one process: {int((same_dtype.isfinite() != finite).sum())})"
    )
    if not finite.any():
        return
    error, single = ((x.double() - expected)[finite].abs().max() for x in (got, same_dtype))
    rounding = torch.finfo(got.dtype).eps
    size = 1 + expected[finite].abs().max()
    assert error <= 2 * single + num_roundings * rounding * size, (
        f"{what}: error {error:.2e}, one process {single:.2e}, size {size:.2e}"
    )
