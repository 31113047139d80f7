"""Records the lines at which Dynamo ended graphs: no loss is recognised across such a line."""

from __future__ import annotations

import linecache
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from torch_streamkl.fx_passes.capture.settings import HAS_NESTED_GRAPH_BREAKS
from torch_streamkl.fx_passes.fx_utils.nodes import FRAME, in_torch
from torch_streamkl.fx_passes.fx_utils.torch_names import counters
from torch_streamkl.fx_passes.reporting.report import GraphBreak
from torch_streamkl.fx_passes.reporting.text import shown

_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")
_MAX_KNOWN = 256
# by the lines of all functions that were running: the code after a break is known by those
_KNOWN: dict[tuple[str, int], GraphBreak] = {}
# by called functions in which their callers' graphs ended: they are compiled alone then
_CALLED: dict[tuple[str, str], GraphBreak] = {}
# Dynamo's reasons for breaks of programs before, how often each
_EARLIER: Counter[str] = Counter()


def break_after(gm: fx.GraphModule) -> GraphBreak | None:
    """Returns the graph break that ended a graph of Dynamo's, None for a whole function."""
    cause: Any = getattr(gm, "compile_subgraph_reason", None)
    if cause is None or not getattr(cause, "graph_break", False):
        return None
    frames = [f for f in getattr(cause, "user_stack", None) or () if not in_torch(f.filename)]
    reason = str(getattr(cause, "reason", "")).strip().splitlines()
    if not frames:
        return None
    inner = frames[-1]
    code = (inner.line or "").strip()
    found = GraphBreak(f"{inner.filename}:{inner.lineno}", code, reason[0] if reason else "")
    while len(_KNOWN) >= _MAX_KNOWN:
        _KNOWN.pop(next(iter(_KNOWN)))
    for frame in frames:
        _KNOWN[frame.filename, frame.lineno or 0] = found
    while len(_CALLED) >= _MAX_KNOWN:
        _CALLED.pop(next(iter(_CALLED)))
    for frame in frames[1:]:
        _CALLED[frame.filename, frame.name] = found
    return found


def break_before(node: fx.Node) -> GraphBreak | None:
    """Returns the graph break after which a node's code goes on, None where there was none.

    A break inside of a function that the compiled one calls also comes before: Dynamo compiles
    such a function apart from its caller.
    """
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    for file, _, function in reversed(frames):
        resumed = _RESUMED.match(function)
        if resumed is not None:
            line = int(resumed[2])
            known = _KNOWN.get((file, line))
            return known or GraphBreak(f"{file}:{line}", linecache.getline(file, line).strip(), "")
    return _CALLED.get(_outer_frame(node))


def called_apart(node: fx.Node) -> str:
    """Returns the function of a node that Dynamo compiles apart from its caller, or "".

    It does so with functions that have a graph break in them. Code after a break is not meant.
    """
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    if any(_RESUMED.match(function) for _, _, function in frames):
        return ""
    outer = _outer_frame(node)
    return outer[1] if outer in _CALLED else ""


def _outer_frame(node: fx.Node) -> tuple[str, str]:
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    return next(((file, name) for file, _, name in frames if not in_torch(file)), ("", ""))


def reason_in(text: str) -> str | None:
    """Returns Dynamo's reason for the graph break whose place a text names, None where it names
    none.
    """
    known = (*_KNOWN.values(), *_CALLED.values())
    return next((x.reason for x in known if f"graph break at {shown(x.location)} " in text), None)


def forget() -> None:
    """Forgets all graph breaks, because code is compiled anew."""
    _KNOWN.clear()
    _CALLED.clear()
    _begin()


def _begin() -> None:
    _EARLIER.clear()
    _EARLIER.update(counters["graph_break"])


@contextmanager
def of_one_program() -> Iterator[None]:
    """Lets hints know nothing of breaks in programs that were traced before this one."""
    earlier = _EARLIER.copy()
    _begin()
    try:
        yield
    finally:
        _EARLIER.clear()
        _EARLIER.update(earlier)


def is_nested(text: str) -> bool:
    """Whether a text names a graph break inside of a function that the compiled one calls."""
    return any(f"graph break at {shown(x.location)} " in text for x in _CALLED.values())


# ------------------------------------------------------------------------ hints


# What broke graphs, in Dynamo's terms, and what keeps them whole.
_BREAKS = (
    (
        "requires_grad_",
        "requires_grad_() of an intermediate tensor breaks the graph: if "
        "enable_input_require_grads() calls it, use checkpointing with use_reentrant=False, and "
        "call model.disable_input_require_grads()",
    ),
    (
        "torchao",
        "PEFT's DoRA layers break the graph, and no operator has their magnitude per vocabulary "
        "entry: use LoraConfig(use_dora=False) for the LM head",
    ),
    (
        "capture_dynamic_output_shape_ops|[Dd]ynamic shape operator",
        "rows that a mask selects break the graph: torch_streamkl.enable(), or "
        "torch._dynamo.config.capture_dynamic_output_shape_ops = True, keeps them in it",
    ),
    (
        "use_cache=True",
        "a warning of transformers breaks the graph: model.config.use_cache = False",
    ),
    (
        r"Tensor\.backward\(\)",
        "backward() breaks the graph, and in a loop Dynamo compiles what the loop calls apart: "
        "compile a function that returns the loss, and call backward() outside of it",
    ),
)
_ANY_BREAK = (
    "TORCH_LOGS=graph_breaks shows every break; for a break inside of a called function, "
    + "torch_streamkl.enable(), or " * HAS_NESTED_GRAPH_BREAKS
    + "torch._dynamo.config.nested_graph_breaks = True, keeps the caller's graph whole"
)

_SEVERAL_PROCESSES = (
    ". On several ranks, fully_shard breaks the graph at every module that it is applied to: "
    "compile torch_streamkl.distributed.trace_fully_shard(model), or apply it to the outermost "
    "module alone. For a loss on logits it is enough that both bodies run before both LM heads, "
    "and that the heads have no fully_shard call of their own. If a note says that the graphs of "
    "DistributedDataParallel are split first, set torch._dynamo.config.optimize_ddp = False"
)


def hints_about_breaks(reason: str) -> Iterator[str]:
    """Yields what to do about the graph break that a reason names, or about all that there were.

    Where the operation is known that makes what is compared, no graph break is the reason.
    """
    named = reason_in(reason)
    if named is not None:
        yield from (text for pattern, text in _BREAKS if re.search(pattern, named))
        if is_nested(reason):
            yield _ANY_BREAK
        return
    if re.search("no matrix product|of the checkpoint|it is an output", reason):
        return
    # of all programs since Dynamo's last reset: explain() alone knows when its own begins
    breaks = "\n".join(counters["graph_break"] - _EARLIER)
    if breaks:
        yield from (text for pattern, text in _BREAKS if re.search(pattern, breaks))
        yield _ANY_BREAK


def hint_for_several_processes() -> str:
    """Says how graphs stay whole on several ranks, if there are any; empty on one."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return _SEVERAL_PROCESSES * distributed
