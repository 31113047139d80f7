"""Generates Triton source for a row program: sums over keys, gradients of both operands.

Every kernel walks tiles [BLOCK_M, BLOCK_N] of rows and keys of one head: first those that need a
mask, then those that need none, then again those that need one. The walk is the same for all
programs; writer.py writes what a tile computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_streamkl.program.graph import ARGMAX, BLOCK_SUM, LOGSUMEXP, MAX, SUM
from torch_streamkl.program.steps import Step, used_by
from torch_streamkl.rows.derive import HEAD_OPERATIONS, BackwardPlan, forward_plan
from torch_streamkl.rows.program import COLUMNS, VALUES, Program
from torch_streamkl.rows.triton.writer import LOG2E, Source, Writer

LOWEST = -0x7F800001  # -inf among the integers of lanes.first_largest
LOW, HIGH = "float('-inf')", "float('inf')"


def why_unsupported(program: Program, plan: BackwardPlan | None) -> str:
    """Explains why a program has no kernels that compute its dot products; empty if it has."""
    kinds = {c.kind for c in program.captures}
    if kinds & {COLUMNS, VALUES}:
        return "columns"
    nodes = list(program.nodes)
    if plan is not None:
        nodes += [plan.nodes[i] for i in used_by(plan.nodes, [x for x in plan.dots if x])]
    if any(node.op in HEAD_OPERATIONS for node in nodes):
        return "sums over heads"
    return ""


def _start(w: Writer, block: str, positions: str) -> None:
    """Writes the code that maps a program id to a block and a head, the longest blocks first.

    NOTE [Order of programs] in kernels/row_state.py.
    """
    w.take("num_blocks", "num_heads")
    is_bounded = w.program.keys.right is not None
    w.line(f"block, bh = tile_coordinates(tl.program_id(0), num_blocks, {is_bounded})")
    if is_bounded and positions == "m":
        w.line("block = num_blocks - 1 - block")
    w.line(f"start = block * {block}")
    w.line(f"{positions} = start + tl.arange(0, {block})")
    w.line("batch = (bh // num_heads).to(tl.int64)")
    w.line("head = (bh % num_heads).to(tl.int64)")
    w.bind_sequence("batch")


def sums_kernel(
    program: Program,
    nodes: Sequence[Step],
    slots: Mapping[int, tuple[int, str]],
    is_exact: bool,
) -> Source:
    """Writes one pass over the keys: slots are reductions or Jacobians, as their node and kind."""
    w = Writer(program, nodes, [node for node, _ in slots.values()], is_exact)
    _start(w, "BLOCK_M", "m")
    w.bind("batch", "head")
    w.load_rows(is_checked=True)
    for slot, (_, kind) in slots.items():
        if kind == BLOCK_SUM:
            w.take(f"out{slot}", *(f"out{slot}_{s}" for s in "bhm"))
            place = f"batch * out{slot}_b + head * out{slot}_h + m.to(tl.int64) * out{slot}_m"
            w.line(f"to{slot} = out{slot} + {place}")
            w.line(f"carried{slot} = tl.zeros([BLOCK_M], tl.float32)")
            continue
        if kind == ARGMAX:
            w.line(f"best{slot} = tl.full([BLOCK_M], {LOWEST}, tl.int32)")
            w.line(f"place{slot} = tl.zeros([BLOCK_M], tl.int32)")
            continue
        if kind != MAX:
            w.line(f"sum{slot} = tl.zeros([BLOCK_M, LANES], tl.float32)")
        if kind != SUM:
            w.line(f"peak{slot} = tl.full([BLOCK_M, LANES], {LOW}, tl.float32)")
    w.bounds("keys_of_rows", "start")
    for low, high, is_masked in w.loops(program.keys.left is not None):
        w.line(f"for j in tl.range({low}, {high}, BLOCK_N):")
        w.log_normalizer = 2
        _tile_of_keys(w, is_masked)
        for slot, (node, kind) in slots.items():
            _accumulate(w, slot, node, kind, is_masked)
        w.log_normalizer = 1
    for slot, (_, kind) in slots.items():
        if kind == BLOCK_SUM:
            given = f"to{slot}, carried{slot}, m < num_rows, stop, num_keys"
            w.line(f"store_last_block({given}, BLOCK_N, {block_size(program, slot)})")
            continue
        w.take(f"out{slot}", f"out{slot}_b", f"out{slot}_h")
        if kind == LOGSUMEXP:
            w.line(f"top{slot}, mass{slot} = merged_lanes(peak{slot}, sum{slot})")
            value = f"tl.where(mass{slot} == 0.0, {LOW}, top{slot} + tl.log(mass{slot}))"
        elif kind == ARGMAX:
            value = f"place{slot}"
        else:
            value = f"tl.sum(sum{slot}, 1)" if kind == SUM else f"tl.max(peak{slot}, 1)"
        place = f"batch * out{slot}_b + head * out{slot}_h + m"
        w.line(f"tl.store(out{slot} + {place}, {value}, mask=m < num_rows)")
        if kind == LOGSUMEXP:
            w.take(f"outp{slot}", f"outs{slot}")
            w.line(f"tl.store(outp{slot} + {place}, top{slot}, mask=m < num_rows)")
            w.line(f"tl.store(outs{slot} + {place}, tl.log(mass{slot}), mask=m < num_rows)")
    name = "row_program_sums" if w.leaves("dot") else "row_program_sums_of_maps"
    return w.source(name, "LANES", "WIDTH")


def _tile_of_keys(w: Writer, is_masked: bool) -> None:
    """Writes the elements of the keys from j on."""
    # a loop that is not empty begins at a tile's first key (scores.tiles), which the compiler
    # cannot know: without it materialized nodes and pairs are loaded element by element
    w.line("n = tl.multiple_of(j + tl.arange(0, BLOCK_N), BLOCK_N)")
    w.load_columns(is_masked)
    if is_masked:
        w.keep()
    w.elements(is_masked)


def block_size(program: Program, slot: int) -> int:
    """Returns the keys of the blocks that a reduction, or a Jacobian after them, is summed
    over.
    """
    count = len(program.reductions)
    if slot < count:
        return program.reductions[slot].size
    return forward_plan(program, True).jacobians[slot - count].size


def _accumulate(w: Writer, slot: int, node: int, kind: str, is_masked: bool) -> None:
    """Add a tile to a sum, a maximum, or a log-sum-exp relative to its largest element so far."""
    if kind == SUM:
        w.line(f"sum{slot} += lane_sums({w.kept(node, '0.0', is_masked)}, LANES, WIDTH)")
        return
    if kind == BLOCK_SUM:
        given = f"to{slot}, {w.kept(node, '0.0', is_masked)}, carried{slot}, m < num_rows"
        size = block_size(w.program, slot)
        w.line(f"carried{slot} = store_blocks({given}, j, num_keys, {size})")
        return
    if kind == ARGMAX:
        given = f"best{slot}, place{slot}, {w.kept(node, LOW, is_masked)}, n[None, :] + first_key"
        w.line(f"best{slot}, place{slot} = first_largest({given})")
        return
    score = w.scaled(node) if kind == LOGSUMEXP else None
    is_folded = score is not None and score.factor > 0.0
    if score is None or not is_folded:
        x, factor = w.kept(node, LOW, is_masked), 1.0
    else:  # the largest dot product is that of the largest score
        x, factor = f"tl.where(keep, {score.dot}, {LOW})" if is_masked else score.dot, score.factor
    w.line(f"y{slot} = {x}")
    w.line(f"new{slot} = tl.maximum(peak{slot}, lane_maxima(y{slot}, LANES, WIDTH) * {factor!r})")
    if kind == LOGSUMEXP:
        w.line(f"base{slot} = tl.where(tl.abs(new{slot}) == {HIGH}, 0.0, new{slot})")
        w.line(f"sum{slot} *= tl.math.exp2((peak{slot} - base{slot}) * {LOG2E!r})")
        # elements that a mask may have made alike, and large, are subtracted as they are
        scale = f" * {LOG2E!r}" if is_folded else ""
        w.line(f"shift{slot} = over_lanes(base{slot}{scale}, BLOCK_N, LANES, WIDTH)")
        terms = f"tl.math.exp2((y{slot} - shift{slot}) * {LOG2E!r})"
        if is_folded:
            terms = f"tl.math.exp2(y{slot} * {factor * LOG2E!r} - shift{slot})"
        w.line(f"sum{slot} += lane_sums({terms}, LANES, WIDTH)")
    w.line(f"peak{slot} = new{slot}")


def rows_kernel(
    program: Program,
    nodes: Sequence[Step],
    roots: Mapping[int, int],
    sums: Mapping[int, int],
    is_exact: bool,
) -> Source:
    """Writes the kernel of gradients to row operands, for dots whose gradients are these nodes;
    and sums of some.
    """
    every = [*roots.values(), *sums.values(), *_dots_of(nodes, list(roots))]
    w = Writer(program, nodes, every, is_exact)
    _start(w, "BLOCK_M", "m")
    w.bind("batch", "head")
    w.load_rows(is_checked=True)
    for i in roots:
        w.line(f"da{i} = tl.zeros([BLOCK_M, DIM{i}], tl.float32)")
    for slot in sums:
        w.line(f"sum{slot} = tl.zeros([BLOCK_M], tl.float32)")
    w.bounds("keys_of_rows", "start")
    for low, high, is_masked in w.loops(program.keys.left is not None):
        w.line(f"for j in tl.range({low}, {high}, BLOCK_N):")
        w.log_normalizer = 2
        _tile_of_keys(w, is_masked)
        for i, node in roots.items():
            w.line(f"x{i} = {w.kept(node, '0.0', is_masked)}.to(b{i}_x.dtype)")
            w.line(f"da{i} = tl.dot(x{i}, b{i}_x, da{i}, input_precision=PRECISION)")
        for slot, node in sums.items():
            w.line(f"sum{slot} += tl.sum({w.kept(node, '0.0', is_masked)}, 1)")
        w.log_normalizer = 1
    for i in roots:
        _store(w, f"da{i}", i, "m", "num_rows")
    for slot in sums:
        w.take(f"out{slot}", f"out{slot}_b", f"out{slot}_h")
        place = f"batch * out{slot}_b + head * out{slot}_h + m"
        w.line(f"tl.store(out{slot} + {place}, sum{slot}, mask=m < num_rows)")
    return w.source("row_program_rows")


def columns_kernel(
    program: Program, nodes: Sequence[Step], dot: int, node: int, is_exact: bool
) -> Source:
    """Writes the kernel of the gradient to a dot's column operand, summed over the heads that
    share it.

    Or over a share of them, each with its place; ADD adds to what is there, of other rows.
    """
    w = Writer(program, nodes, [node, *_dots_of(nodes, [dot])], is_exact)
    _start(w, "BLOCK_N", "n")
    w.take(f"group{dot}", "num_splits")
    w.line("share = head % num_splits")
    w.line("head = head // num_splits")
    w.line(f"members = group{dot} // num_splits")
    w.line(f"db{dot} = tl.zeros([BLOCK_N, DIM{dot}], tl.float32)")
    # without the option address arithmetic is hoisted out of this loop until registers spill
    w.line("for member in tl.range(0, members, num_stages=1, disable_licm=True):")
    w.log_normalizer = 2
    w.line(f"h = head * group{dot} + share * members + member")
    w.bind("batch", "h")
    w.load_columns(is_checked=True)
    w.bounds("rows_of_keys", "start")
    keys = program.keys
    for low, high, is_masked in w.loops(keys.left is not None or keys.right is not None):
        w.line(f"for i in tl.range({low}, {high}, BLOCK_M):")
        w.log_normalizer = 3
        w.line("m = i + tl.arange(0, BLOCK_M)")
        w.load_rows(is_masked)
        if is_masked:
            w.keep()
        w.elements(is_masked)
        w.line(f"x = {w.kept(node, '0.0', is_masked)}.to(a{dot}_x.dtype)")
        w.line(f"db{dot} = tl.dot(tl.trans(x), a{dot}_x, db{dot}, input_precision=PRECISION)")
        w.log_normalizer = 2
    w.log_normalizer = 1
    w.take(f"db{dot}_share")
    _store(w, f"db{dot}", dot, "n", "num_keys", f" + share * db{dot}_share", "ADD")
    return w.source("row_program_columns", "ADD")


def maps_kernel(
    program: Program,
    nodes: Sequence[Step],
    roots: Sequence[int],
    is_exact: bool,
    is_summed: bool,
    has_one_key_head: bool = False,
) -> Source:
    """Writes the kernel that materializes elements of a tile: summed over heads, or 0 where a key
    takes no part.

    Tiles of sums that no row has a key in are not written. Keys that all heads share are loaded
    once.
    """
    w = Writer(program, nodes, roots, is_exact)
    w.take("num_blocks", "num_tiles", "num_heads")
    w.line("tile = tl.program_id(0)")
    w.line("batch = (tile // num_tiles // num_blocks).to(tl.int64)")
    w.line("start = tile // num_tiles % num_blocks * BLOCK_M")
    w.line("first_n = tile % num_tiles * BLOCK_N")
    w.line("m = start + tl.arange(0, BLOCK_M)")
    w.line("n = first_n + tl.arange(0, BLOCK_N)")
    w.bind_sequence("batch")
    if is_summed:
        w.bounds("keys_of_rows", "start")
        w.line("if (first_n < first) | (first_n >= stop):")
        w.line("    return")
        for i in roots:
            w.line(f"total{i} = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)")
        if has_one_key_head:
            w.line("head = batch * 0")
            w.bind("batch", "head")
            w.load_column_operands(is_checked=True)
        w.line("for h in tl.range(0, num_heads):")
        w.log_normalizer = 2
        w.line("head = batch * 0 + h")
    else:
        w.line("head = batch * 0")
    w.bind("batch", "head")
    w.load_rows(is_checked=True)
    w.load_columns(is_checked=True, has_operands=has_one_key_head)
    w.elements(is_checked=True)
    if is_summed:
        for i in roots:
            w.line(f"total{i} += {w.name(i)}")
        w.log_normalizer = 1
    else:
        w.keep()
        for i in roots:
            w.line(f"total{i} = {w.kept(i, '0.0', is_masked=True)}")
        # the tensor may be one that was read: by every thread, before any of them overwrites it
        w.line("tl.debug_barrier()")
    w.line("inside = (m[:, None] < num_rows) & (n[None, :] < num_keys)")
    for i in roots:
        w.take(f"to{i}", f"to{i}_b", f"to{i}_m")
        place = f"to{i} + batch * to{i}_b + m.to(tl.int64)[:, None] * to{i}_m + n[None, :]"
        w.line(f"tl.store({place}, total{i}.to(to{i}.dtype.element_ty), mask=inside)")
    return w.source("row_program_sum_of_heads" if is_summed else "row_program_elements")


def _dots_of(nodes: Sequence[Step], dots: Sequence[int]) -> list[int]:
    """Lists the nodes of dots whose operands a gradient multiplies, computed or not."""
    return [i for i, n in enumerate(nodes) if n.op == "dot" and int(n.value) in dots]


def _store(
    w: Writer, name: str, dot: int, positions: str, count: str, more: str = "", add: str = ""
) -> None:
    w.take(f"{name}_out", *(f"{name}_{s}" for s in "bhmd"))
    w.line(f"to = {positions}.to(tl.int64)[:, None]")
    w.line(f"dims = tl.arange(0, DIM{dot})[None, :]")
    w.line(f"base = {name}_out + batch * {name}_b + head * {name}_h{more}")
    w.line(f"places = base + to * {name}_m + dims * {name}_d")
    w.line(f"inside = (to < {count}) & (dims < SIZE{dot})")
    if add:
        w.line(f"if {add}:")
        w.line(f"    {name} += tl.load(places, mask=inside, other=0.0)")
    w.line(f"tl.store(places, {name}.to({name}_out.dtype.element_ty), mask=inside)")
