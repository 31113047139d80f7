"""Checks that run on several processes: one group of processes for all checks of a session.

A file defines functions that take a `Rank` and are marked with ``@on_ranks``. A test runs one of
them by `run_check`, on processes that stay for the next one: torch is imported, and the first
program compiled, once. A check that fails or does not end takes its processes with it, and new
ones run the checks after it. Processes print what they do (``pytest -s`` shows it).
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import functools
import importlib
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

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
PASSED = ""


@dataclass(frozen=True)
class Rank:
    """One process of a check."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype  # of the inputs

    @property
    def group(self):
        return distributed.group.WORLD

    @property
    def mesh(self):
        """One object for all checks: compiled graphs of DTensors mix up meshes that are equal."""
        return _mesh(self.device.type, self.size, self.group)

    def randn(self, *shape, scale=1.0):
        """The same numbers on every rank and device."""
        return (torch.randn(shape) * scale).to(self.device, self.dtype)

    def vocab(self, vocab_size, uneven=False):
        """This rank's vocabulary entries as DTensor cuts them, or unevenly."""
        if uneven:
            cuts = [0, *(vocab_size // 3 + i for i in range(self.size - 1)), vocab_size]
            return slice(cuts[self.rank], cuts[self.rank + 1])
        step = -(-vocab_size // self.size)
        return slice(min(self.rank * step, vocab_size), min((self.rank + 1) * step, vocab_size))


@functools.cache
def _mesh(device, size, group):
    return distributed.device_mesh.init_device_mesh(device, (size,))


Check = Callable[[Rank], None]


def on_ranks(check):
    check.runs_on_ranks = True  # type: ignore[attr-defined]
    return check


def slowly_on_ranks(check):
    """Of a check that only `make test-slow` runs."""
    check.is_slow = True  # type: ignore[attr-defined]
    return on_ranks(check)


def checks_of(module):
    """The module's checks, in the order in which it defines them."""
    return {name: x for name, x in vars(module).items() if hasattr(x, "runs_on_ranks")}


def names_of(module):
    """Parameters of a test of all checks of a module."""
    return [
        pytest.param(name, marks=[pytest.mark.slow] if hasattr(x, "is_slow") else [])
        for name, x in checks_of(sys.modules[module]).items()
    ]


def run_check(module, name, size=2, device="cpu"):
    """Fails with the first rank's error on which a check does not pass."""
    for rank, error in enumerate(Processes.of(device, size).outcomes(module, name)):
        if error != PASSED:
            pytest.fail(f"rank {rank}:\n{error}", pytrace=False)


def on_two_ranks(module):
    """The test of all checks of a module."""

    @pytest.mark.parametrize("name", names_of(module))
    def test_on_two_ranks(name):
        run_check(module, name)

    return test_on_two_ranks


class Processes:
    """One process a rank, which run checks until one of them does not pass."""

    running: ClassVar[Processes | None] = None
    seconds: ClassVar[float] = 0.0  # of CPU time, of all checks so far

    @classmethod
    def of(cls, device, size):
        """Those that run, if they are as many; there is one group at a time."""
        if cls.running is None or (cls.running.device, cls.running.size) != (device, size):
            cls.end()
            cls.running = cls(device, size)
            atexit.register(cls.end)
        return cls.running

    @classmethod
    def end(cls):
        if cls.running is not None:
            cls.running._end()
            cls.running = None

    def __init__(self, device, size):
        self.device, self.size = device, size
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context_of(device).Pipe()
            arguments = (rank, size, device, self.folder.name, theirs)
            self.processes.append(
                context_of(device).Process(target=_process, args=arguments, daemon=True)
            )
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def outcomes(self, module, name):
        """What became of a check on every rank: nothing, or the error."""
        found = ["did not end"] * self.size
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # it has ended
                pipe.send((module, name))
        is_whole = True
        for rank, pipe in enumerate(self.pipes):
            try:
                if pipe.poll(CHECK_SECONDS + TIMEOUT.total_seconds()):
                    found[rank], stays, seconds = pipe.recv()
                    is_whole = is_whole and stays
                    Processes.seconds += seconds
            except (EOFError, OSError):
                pass
        if not is_whole or any(error != PASSED for error in found):
            Processes.end()
        return found

    def _end(self):
        for pipe in self.pipes:
            pipe.close()  # a process that waits for the next check ends
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()


def context_of(device):
    """How processes are started.

    Those without a GPU are forked from one that has imported what all of them need and has done
    nothing else: otherwise each spends five seconds on it.
    """
    context = torch.multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    if device == "cpu":
        context.set_forkserver_preload(IMPORTED)
    return context


def start(function, arguments, size, device):
    """Starts processes of one function and waits for them."""
    method = context_of(device).get_start_method()
    torch.multiprocessing.start_processes(function, arguments, nprocs=size, start_method=method)


def _process(rank, size, device, folder, pipe):
    torch.set_num_threads(1)
    quick.guards_are_not_timed()
    quick.devices_that_are_not_here_have_no_seed()
    quick.compilations_collect_no_garbage()
    quick.sites_are_fused_whatever_their_size()
    quick.instruction_sets_are_not_tried_out()
    quick.inductor_writes_scalar_code()
    quick.what_stays_is_no_garbage()
    # NVLink multicast is not available in every container, and small messages gain nothing by it
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    me = Rank(rank, size, torch.device(device, rank if on_gpu else None), dtype)
    _start_group(me, f"{folder}/store")
    with contextlib.suppress(EOFError):
        while True:
            module, name = pipe.recv()
            faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)
            start, used = time.monotonic(), time.process_time()
            error, stays = _outcome(me, checks_of(importlib.import_module(module))[name])
            waited, seconds = time.monotonic() - start, time.process_time() - used
            said = f"rank {rank}: {name} {waited:.1f} s, {seconds:.1f} s of them computing: "
            said += f"{error or 'passed'}\n"
            print(said, end="", flush=True)  # in one piece
            faulthandler.cancel_dump_traceback_later()
            pipe.send((error, stays, seconds))
            if not stays:
                os._exit(0)
    _end_group()


def _outcome(me, check):
    """The error, if there is one, and whether the process goes on."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    try:
        check(me)
    except SystemExit:  # a check about a rank that goes without a vocabulary entry
        return PASSED, False
    except Exception:
        _end_group()  # the others must not wait
        return traceback.format_exc(), False
    return PASSED, True


def _start_group(me, path):
    store = distributed.FileStore(path, me.size)
    store.set_timeout(TIMEOUT)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if me.device.type == "cuda" else "gloo",
        store=store,
        rank=me.rank,
        world_size=me.size,
        timeout=TIMEOUT,
    )


def _end_group():
    with contextlib.suppress(Exception):
        distributed.destroy_process_group()


@contextlib.contextmanager
def counted_collectives():
    """How often each collective of ours ran; the few integers of `agreement.py` left out."""
    counts = Counter()
    with watched_collectives(lambda name, *_: counts.update([name])):
        yield counts


@contextlib.contextmanager
def watched_collectives(seen):
    """Calls ``seen(name, x, result, *args)`` after each collective of ours on numbers."""
    names = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
    originals = {name: getattr(collectives, name) for name in names}

    def watched(name):
        def call(x, *args):
            result = originals[name](x, *args)
            if x.is_floating_point():
                seen(name, x, result, *args)
            return result

        return call

    for name in names:
        setattr(collectives, name, watched(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(collectives, name, original)


def keeping_graphs(graphs):
    """A backend that keeps the graphs of forward and backward, and runs them as they are."""

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )


def largest_tensor(graphs):
    """Elements of the largest tensor in any of the graphs."""
    values = [node.meta.get("val") for graph in graphs for node in graph.graph.nodes]
    return max(x.numel() for x in values if isinstance(x, Tensor))


def same_error(me, call, *vocab):
    """Every rank raises, and every rank's message has the vocabulary entries."""
    try:
        call()
        message = "nothing was raised"
    except (ValueError, TypeError, NotImplementedError) as error:
        message = f"{type(error).__name__}: {error}"
    messages = [None] * me.size
    distributed.all_gather_object(messages, message)
    for text in messages:
        assert all(vocab_entry in text for vocab_entry in vocab), messages


def close(got, expected, same_dtype, num_roundings=8.0, what=""):
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
