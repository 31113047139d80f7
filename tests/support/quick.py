"""What a process that tests does not do: it takes time and proves nothing, or leaves it out."""

from __future__ import annotations

import gc
import logging
import os

import torch._dynamo.guards
import torch._inductor.config
import torch.mtia
import torch.xpu

from torch_streamkl.fx_passes.planning import profitability

MEASURED_MIB = dict(profitability.LEAST_MIB)
MEASURED_PROGRAM_MIB = dict(profitability.LEAST_PROGRAM_MIB)
MEASURED_ATTENTION_MIB = dict(profitability.LEAST_ATTENTION_MIB)
MEASURED_TWICE_MIB = dict(profitability.LEAST_TWICE_MIB)


def guards_are_not_timed():
    """Dynamo empties the processor's caches at every compilation to time its guards for a log."""
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def nothing_is_traced():
    """pytest gives loggers that do not propagate its handlers, torch.__trace among them, for whose
    handlers torch prints every graph, guard and event of a compilation.
    """
    log = logging.getLogger("torch.__trace")
    add_handler = log.addHandler

    def add_other_handlers(handler):
        if not type(handler).__module__.startswith("_pytest."):
            add_handler(handler)

    log.addHandler = add_other_handlers  # type: ignore[method-assign]


def devices_that_are_not_here_have_no_seed():
    """torch keeps their seeds until they are used, each with a printed stack."""
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


def compilations_collect_no_garbage():
    """Dynamo collects after every one; what is garbage goes when there is more of it."""
    torch._dynamo.config.run_gc_after_compile = False


def sites_are_fused_whatever_their_size():
    """Tests are of tiny shapes: those of the choice by size give the option."""
    profitability.LEAST_MIB.clear()
    profitability.LEAST_PROGRAM_MIB.clear()
    profitability.LEAST_ATTENTION_MIB.clear()
    profitability.LEAST_TWICE_MIB.clear()


def instruction_sets_are_not_tried_out():
    """Inductor compiles a program for each, wherever its caches are empty."""
    torch._inductor.config.cpp.vec_isa_ok = True
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # of processes that tests start


def inductor_writes_scalar_code():
    """A loop with vector instructions takes a compiler twice as long, and what we test is around
    it. Tests of loops that we write are marked `vectorized`; `make test-slow` compiles all so.
    """
    if not os.environ.get("STREAMKL_VECTORIZED"):
        torch._inductor.config.cpp.simdlen = 1


def what_stays_is_no_garbage():
    """Modules and what earlier tests left stay to the end; Dynamo's every reset searched them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
