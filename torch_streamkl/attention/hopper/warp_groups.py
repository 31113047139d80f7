"""Provides what the Hopper kernels share: wgmma, sums per thread, and pipeline stages.

NOTE [Matmuls under arithmetic]
A score matmul does not depend on the arithmetic on the scores before it. So a kernel issues the
matmuls of the next tile, reduces the current one, and then waits. Two things undo that. ptxas
serialises every wgmma (message C7514) if an accumulator is in flight across a loop's back edge:
loops are unrolled by two, each half with its own registers. And compilers move arithmetic that
nothing needs yet below the next wait, tile after tile: `before_wait` reads the sums first.

NOTE [Pairs at once]
If a forward has two passes, a pair that needs no mask is multiplied as one of 128 keys: half the
instructions that issue matmuls, half the barriers. The first pass has one matmul in flight, as
others have. In the second, two times 64 products leave a thread of three warp groups no registers
for it: while one warp group waits for its products, the others reduce theirs. The same holds for
causal forwards of one pass and head_dim 128, whose warp groups see different keys and do not wait
at the same time (launch.multiplies_pairs). For other forwards, one pass is faster with halves of
pairs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from torch_streamkl.kernels.arguments import Sequence

# before Triton 3.9 it has a line before its name
REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

NUM_WARPS = gl.constexpr(4)  # of a warp group
LANES = gl.constexpr(4)  # that share a row of a wgmma accumulator
GROUP_REGISTERS = gl.constexpr(480)  # of a thread, shared evenly by the warp groups that compute


def _pinned(n: int) -> str:
    """Writes asm of a pause that never happens, but needs n numbers before what follows.

    It reads two of every eight: the compiler leaves the others with them.
    """
    lines = [".reg .pred p; .reg .b32 a, b; mov.b32 a, 0; mov.b32 b, 0;"]
    lines += [
        f"lop3.b32 {'ab'[i // 8 % 2]}, {'ab'[i // 8 % 2]}, ${n + i}, ${n + i + 1}, 0x96;"
        for i in range(0, n, 8)
    ]
    lines += ["xor.b32 a, a, b; setp.eq.b32 p, a, 0x7f812345; @p nanosleep.u32 1;"]
    lines += [f"mov.b32 ${i}, ${n + i};" for i in range(n)]
    return "{ " + " ".join(lines) + " }"


PINNED = gl.constexpr(_pinned(32))
PINNED_OPERANDS = gl.constexpr(",".join(["=f"] * 32 + ["f"] * 32))


@gluon.jit
def exp2(x):
    """Computes 2^x in one instruction; results below 2^-126 are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


def _before_wait(n: int) -> str:
    """Writes asm of a pause that never happens, but reads n numbers, and returns them."""
    lines = [".reg .pred p;", f"setp.eq.f32 p, ${n}, 0fFF7FFFFF;"]
    lines += [f"setp.eq.and.f32 p, ${n + i}, 0fFF7FFFFF, p;" for i in range(1, n)]
    lines += ["@p nanosleep.u32 1;"]
    lines += [f"mov.f32 ${i}, ${n + i};" for i in range(n)]
    return "{ " + " ".join(lines) + " }"


WAIT_ONE, WAIT_TWO, WAIT_THREE = (gl.constexpr(_before_wait(2 * n)) for n in (1, 2, 3))


@gluon.jit
def log2(x):
    """Computes log2 of a positive number in one instruction, with a relative error of 2^-22."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    """Computes 1 / x of a number that is neither tiny nor huge, in one instruction."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def before_wait(a):
    """Returns a, computed by this point of the program: an empty instruction reads it here."""
    return gl.inline_asm_elementwise(
        WAIT_ONE, "=f,=f,f,f", [a], dtype=gl.float32, is_pure=False, pack=2
    )


@gluon.jit
def before_wait_pair(a, b):
    """Applies before_wait to two values."""
    return gl.inline_asm_elementwise(
        WAIT_TWO, "=f,=f,=f,=f,f,f,f,f", [a, b],
        dtype=(gl.float32, gl.float32), is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def before_wait_three(a, b, c):
    """Applies before_wait to three values."""
    return gl.inline_asm_elementwise(
        WAIT_THREE, "=f,=f,=f,=f,=f,=f,f,f,f,f,f,f", [a, b, c],
        dtype=(gl.float32, gl.float32, gl.float32), is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def pinned(x):
    """Returns x [64, 64], computed by this point: `before_wait` for a whole tile."""
    return gl.inline_asm_elementwise(PINNED, PINNED_OPERANDS, [x], gl.float32, False, 32)


@gluon.jit
def anew(i):
    """Returns i as a value that compilers know nothing of, so that its uses stay inside a loop."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def by_lane(x):
    """Reshapes an [M, N] accumulator to [M, LANES, N / LANES]: the columns that each
    thread has.
    """
    y = gl.permute(gl.reshape(x, [x.shape[0], x.shape[1] // 8, LANES, 2]), (0, 2, 1, 3))
    return gl.reshape(y, [x.shape[0], LANES, x.shape[1] // 4])


@gluon.jit
def lane_sum(x):
    """Sums an [M, N] accumulator to [M, LANES]: each thread sums its columns, no shuffles."""
    return gl.sum(by_lane(x), 2)


@gluon.jit
def add(x, y):
    """Adds x and y in the layout of x: threads have the same columns of a tile and of a pair."""
    return x + gl.convert_layout(y, x.type.layout)


@gluon.jit
def column_of(x, products):
    """Converts [rows] to a column that broadcasts to products of a tile or pair."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, products.type.layout)), 1)


@gluon.jit
def zero_of_pair(zero):
    """Makes a pair's products of zeros from a tile's."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, 2 * zero.shape[1], 16]
    )
    return gl.full([zero.shape[0], 2 * zero.shape[1]], 0.0, gl.float32, layout=layout)


@gluon.jit
def halves(x):
    """Splits products [64, 128] of a pair into those of its two tiles."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, 64, 16]
    )
    x, x_1 = gl.split(gl.permute(gl.reshape(x, [64, 2, 64]), (0, 2, 1)))
    return gl.convert_layout(x, layout), gl.convert_layout(x_1, layout)


@gluon.jit
def bits(x):
    """Reinterprets float32 as unsigned integers: of negative numbers the lowest has the
    largest.
    """
    return x.to(gl.uint32, bitcast=True)


def _lowest(n: int) -> str:
    """Computes maxima of n unsigned integers of a thread's two rows and of earlier ones.

    Of a tile's registers, two belong to one row and two to the other. A chain of maxima takes one
    instruction for two numbers; a tree takes up to two.
    """
    lines = [f"max.u32 ${i}, ${n + i}, ${2 * n + i};" for i in (0, 2)]
    lines += [f"max.u32 ${i & 2}, ${i & 2}, ${n + i};" for i in range(n) if i not in (0, 2)]
    lines += [f"mov.b32 ${i}, ${i & 2};" for i in range(n) if i not in (0, 2)]
    return "{ " + " ".join(lines) + " }"


LOWEST = gl.constexpr(_lowest(32))
LOWEST_OPERANDS = gl.constexpr(",".join(["=&r"] * 32 + ["r"] * 64))


@gluon.jit
def per_column(x, like):
    """Converts [64, LANES] to an accumulator whose columns have their thread's number."""
    zeros = gl.zeros_like(by_lane(like))
    x = gl.convert_layout(x, gl.SliceLayout(2, zeros.type.layout))
    x = gl.expand_dims(x, 2) + zeros
    x = gl.permute(gl.reshape(x, [64, LANES, 8, 2]), (0, 2, 1, 3))
    return gl.convert_layout(gl.reshape(x, [64, 64]), like.type.layout)


@gluon.jit
def of_first_column(x, like):
    """Returns an accumulator -> [64, LANES], in the layout of `like`: each thread's first
    columns.
    """
    x = by_lane(x)
    x, _ = gl.split(gl.reshape(x, [64, LANES, 8, 2]))
    x, _ = gl.split(gl.reshape(x, [64, LANES, 4, 2]))
    x, _ = gl.split(gl.reshape(x, [64, LANES, 2, 2]))
    x, _ = gl.split(x)
    return gl.convert_layout(x, like.type.layout)


@gluon.jit
def lane_lowest(low, x):
    """Reduces as lane_sum does, to the lowest of `low` and a thread's columns.

    If none is below 0, the result is one of them. Two maxima of unsigned integers are one
    instruction; two minima of floats are two.
    """
    before = per_column(bits(low), bits(x))
    found = gl.inline_asm_elementwise(
        LOWEST, LOWEST_OPERANDS, [bits(x), before], gl.uint32, True, 32
    )
    found = of_first_column(found, low)
    return found.to(gl.float32, bitcast=True)


def _signed_sum(n: int) -> str:
    """Adds sign(d) x of n numbers d and n numbers x to the sums of a thread's two rows."""
    lines = [".reg .pred p; .reg .b32 t;"]
    lines += [f"mov.f32 ${i}, ${3 * n + i};" for i in (0, 2)]
    lines += [
        f"setp.neu.f32 p, ${n + i}, 0f00000000; "
        f"lop3.b32 t, ${n + i}, 0x80000000, ${2 * n + i}, 0x6a; "  # (d & sign) ^ x
        f"@p add.f32 ${i & 2}, ${i & 2}, t;"
        for i in range(n)
    ]
    lines += [f"mov.b32 ${i}, ${i & 2};" for i in range(n) if i not in (0, 2)]
    return "{ " + " ".join(lines) + " }"


SIGNED = gl.constexpr(_signed_sum(32))
SIGNED_OPERANDS = gl.constexpr(",".join(["=&f"] * 32 + ["f"] * 96))


@gluon.jit
def lane_signed_sum(before, d, x):
    """Adds to `before` the sum of sign(d) x over a thread's columns: as lane_sum, sign(0) is 0."""
    if x.shape[1] == 128:
        d, d_1 = halves(d)
        x, x_1 = halves(x)
        before = lane_signed_sum(before, d_1, x_1)
    found = gl.inline_asm_elementwise(
        SIGNED, SIGNED_OPERANDS, [d, x, per_column(before, x)], gl.float32, True, 32
    )
    return of_first_column(found, before)


@gluon.jit
def stage_of(i, SLOTS: gl.constexpr):
    """Returns the pipeline stage of tile (or pair) i: NOTE [Pipeline stages] in pipeline.py."""
    if SLOTS & (SLOTS - 1) == 0:
        return i & (SLOTS - 1)
    else:
        return i % SLOTS


@gluon.jit
def phase_of(i, SLOTS: gl.constexpr):
    """Returns the phase of the barriers of stage_of(i) that completes for i."""
    return (i // SLOTS) & 1


@gluon.jit
def without_offset(seq):
    """Returns the sequence, for a window whose bounds have the offset in them."""
    return Sequence(
        seq.start_q, seq.start_k, seq.num_rows, seq.num_keys, seq.num_valid, 0, seq.mask_offset
    )


@gluon.jit
def flat(tile):
    """Views [1, 1, rows, head_dim] of shared memory as [rows, head_dim]."""
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def start_scores(a, tile, zero):
    """Issues a @ tile^T; `zero` gives the shape."""
    return warpgroup_mma(a, flat(tile).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def start_half(q, keys, i, half, zero, SLOTS: gl.constexpr):
    """Issues q @ the first keys of pair i (half 0), or the last (1).

    If a stage holds both as one tile, the matmul goes by 64 columns of the queries.
    """
    if keys.shape[3] == 64:
        return start_scores(q, keys.index(2 * stage_of(i, SLOTS) + half), zero)
    else:
        CHUNKS: gl.constexpr = keys.shape[4] // 64
        SHAPE: gl.constexpr = [keys.shape[0] * CHUNKS * 2, 1, 1, 64, 64]
        if REINTERPRETS:
            parts = keys.reinterpret(keys.dtype, SHAPE, keys.layout)
        else:
            parts = keys._reinterpret(keys.dtype, SHAPE, keys.layout)
        first = stage_of(i, SLOTS) * (2 * CHUNKS) + half
        x = start_scores(q.slice(0, 64, 1), parts.index(first), zero)
        if CHUNKS == 2:
            x = warpgroup_mma(
                q.slice(64, 64, 1), flat(parts.index(first + 2)).permute((1, 0)), x,
                use_acc=True, is_async=True,
            )  # fmt: skip
        return x


@gluon.jit
def start_pair(q, keys, i, zero, SLOTS: gl.constexpr):
    """Issues q @ the keys of pair i."""
    return start_scores(q, keys.index(stage_of(i, SLOTS)), zero)


@gluon.jit
def slots_of_pairs(x, D: gl.constexpr, SLOTS: gl.constexpr):
    """Returns shared memory for SLOTS pairs of tiles of a descriptor's rows: one tile each, or
    two.
    """
    ROWS: gl.constexpr = x.block_type.shape[2]
    return gl.allocate_shared_memory(
        x.dtype, [SLOTS * 128 // ROWS, 1, 1, ROWS, D], x.layout
    )  # fmt: skip
