"""Compiles row kernels (attention/compiled_rows.py) with Inductor: once per form, for all sizes.

The graph of a row kernel goes straight to Inductor, without Dynamo and AOTAutograd, so a call
takes microseconds. A second process finds the code on disk (cpu/stored.py).

NOTE [Row kernels and threads]
torch.fx says to the whole process that something is traced, and by which tracer. Dynamo's lock
keeps two compilations from overwriting what the other has to restore: without it, every later call
of a compiled function could raise. Another thread that calls a compiled function meanwhile asks
whether the trace belongs to a compilation, and raises if it does not: a release of torch that asks
has a context to say so. Dynamo holds its lock when a check runs our operators, so a lock of our
own beside it could be taken in the other order.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.cpu import stored

_log = logging.getLogger("torch_streamkl")

Inputs = dict[str, Tensor]
Body = Callable[[Any, Inputs], tuple[Tensor, ...]]
Run = Callable[[list[Tensor]], Any]
Described = dict[str, tuple[Tensor, str]]  # tensors, and what their dimensions are: see `find`
# Sizes that a body is traced and tuned with: no two alike, or they would be taken for one. What is
# 1 stays 1, and means that it broadcasts.
ROWS, KEYS, STRIDE = 520, 392, 448


@dataclass(frozen=True)
class Key:
    """Identifies a compiled body."""

    body: Body
    form: Hashable
    names: tuple[str, ...]
    layouts: tuple[tuple[torch.dtype, tuple[int, ...], bool], ...]
    num_threads: int


_runs: dict[Key, Run | None] = {}


def _example_shape(x: Tensor, spec: str) -> tuple[int, ...]:
    known = {"r": ROWS, "k": KEYS, "p": KEYS}
    return tuple(known.get(letter, x.shape[dim]) for dim, letter in enumerate(spec))


def find(body: Body, form: Hashable, inputs: Described) -> Run | None:
    """Returns the compiled row kernel for such inputs, and compiles it if needed; None if that
    fails.

    ``inputs`` are the tensors of one block by name, each with what its dimensions are: "r" rows,
    "k" keys, "p" keys in padded rows, anything else a fixed size. The kernel takes them in this
    order, contiguous but for padded rows.
    """
    layouts = tuple(
        (x.dtype, _example_shape(x, spec), spec[-1] == "p") for x, spec in inputs.values()
    )
    key = Key(body, form, tuple(inputs), layouts, torch.get_num_threads())
    try:
        return _runs[key]
    except KeyError:
        pass
    with _only_compilation():
        if key not in _runs:
            _runs[key] = _compiled_or_none(key)
        return _runs[key]


@contextlib.contextmanager
def _only_compilation() -> Iterator[None]:
    """Keeps other threads from compiling, as Dynamo does: NOTE [Row kernels and threads]."""
    from torch._dynamo.convert_frame import compile_lock

    session = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)
    with compile_lock, session():
        yield


def _compiled_or_none(key: Key) -> Run | None:
    try:
        return compile_body(key)
    except Exception as error:  # whatever is wrong with a compiler: there is another way
        said = str(error).strip().partition("\n")[0]
        _warn_once(
            "Inductor cannot compile the CPU's blocks, which run in eager mode instead: "
            f"{type(error).__name__}: {said}"
        )
        _log.debug("what Inductor said", exc_info=True)
        return None


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)


def compile_body(key: Key) -> Run:
    """Loads the code of a row kernel from disk; otherwise compiles it, and stores it there."""
    from torch._inductor import config

    # what the user set for graphs of theirs (passes, wrappers, tuning) is not meant for this one
    patches: dict[str, Any] = {
        "cpp_wrapper": False,
        "post_grad_custom_pre_pass": None,
        "post_grad_custom_post_pass": None,
        "size_asserts": True,
        "nan_asserts": False,
    }
    with config.patch(patches):
        path = stored.path_of(key.body, (key.form, key.names, key.layouts, key.num_threads))
        run: Run | None = None if path is None else stored.load(path)
        if run is None:
            run = _compile(key)
            if path is not None:
                stored.store(path, run)
    return run


def _compile(key: Key) -> Run:
    """Traces a function with symbolic sizes, and compiles it by Inductor."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    def traced(*tensors: Tensor) -> tuple[Tensor, ...]:
        return key.body(key.form, dict(zip(key.names, tensors, strict=True)))

    with torch.inference_mode(False), torch.no_grad():
        examples = [
            torch.zeros(ROWS, STRIDE, dtype=dtype, device="cpu")[:, :KEYS]
            if padded
            else torch.zeros(shape, dtype=dtype, device="cpu")
            for dtype, shape, padded in key.layouts
        ]
        graph = make_fx(traced, select_decomp_table(), tracing_mode="symbolic")(*examples)
        fakes = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
        # Inductor asks its cache of graphs only where a tracing context has the sizes, and only
        # for a module without attributes that cannot be pickled: make_fx leaves its ShapeEnv there
        with tracing(TracingContext(fakes[0].fake_mode)):
            run: Run = compile_fx_inner(torch.fx.GraphModule(graph, graph.graph), fakes)
    return run
