"""What the Hopper kernels share: wgmma, sums per thread, and the order of both.

NOTE [Matmuls under arithmetic]
A score matmul has nothing to wait for in the arithmetic on the scores before it, so a kernel
issues the matmuls of the next tile, reduces the current one, and then waits. Two things undo that.
ptxas serialises every wgmma (message C7514) when an accumulator is in flight across a loop's back
edge: loops are unrolled by two, each half with its own registers. And compilers move arithmetic
that nothing needs yet below the next wait, tile after tile: `before_wait` reads the sums first.

NOTE [Slots]
Tile i (in the forward: pair of tiles i) is in slot i % SLOTS of shared memory and
is the (i // SLOTS)-th user of its slot, whose barriers complete one phase a user. A slot is loaded
again when every warp group has released it. The descriptors of a slot should depend on the
iteration of a loop: those that do not are computed before the loop, and may be spilled.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma

from torch_streamkl.kernels.arguments import Sequence

# Triton 3.6 has it under the second name
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

NUM_WARPS = gl.constexpr(4)  # of a warp group
LANES = gl.constexpr(4)  # that share a row of a wgmma accumulator
GROUP_REGISTERS = gl.constexpr(480)  # of a thread, shared evenly by the warp groups that compute


def _pinned(n: int) -> str:
    """A pause that no numbers ask for, between n of them and what follows.

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
    """2^x in one instruction; results below 2^-126 are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


def _before_wait(n: int) -> str:
    """A pause that no numbers ask for reads n numbers, and returns them."""
    lines = [".reg .pred p;", f"setp.eq.f32 p, ${n}, 0fFF7FFFFF;"]
    lines += [f"setp.eq.and.f32 p, ${n + i}, 0fFF7FFFFF, p;" for i in range(1, n)]
    lines += ["@p nanosleep.u32 1;"]
    lines += [f"mov.f32 ${i}, ${n + i};" for i in range(n)]
    return "{ " + " ".join(lines) + " }"


WAIT_ONE, WAIT_TWO, WAIT_THREE = (gl.constexpr(_before_wait(2 * n)) for n in (1, 2, 3))


@gluon.jit
def before_wait(a):
    """a, computed by this point of the program: a pause that no number asks for reads it."""
    return gl.inline_asm_elementwise(
        WAIT_ONE, "=f,=f,f,f", [a], dtype=gl.float32, is_pure=False, pack=2
    )


@gluon.jit
def before_wait_pair(a, b):
    """As before_wait, for two."""
    return gl.inline_asm_elementwise(
        WAIT_TWO, "=f,=f,=f,=f,f,f,f,f", [a, b],
        dtype=(gl.float32, gl.float32), is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def before_wait_three(a, b, c):
    """As before_wait, for three."""
    return gl.inline_asm_elementwise(
        WAIT_THREE, "=f,=f,=f,=f,=f,=f,f,f,f,f,f,f", [a, b, c],
        dtype=(gl.float32, gl.float32, gl.float32), is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def pinned(x):
    """x [64, 64], computed by this point of the program: as before_wait, for a whole tile."""
    return gl.inline_asm_elementwise(PINNED, PINNED_OPERANDS, [x], gl.float32, False, 32)


@gluon.jit
def anew(i):
    """i, of which compilers know nothing: what depends on it is not computed before a loop."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def by_lane(x):
    """[M, N] accumulator -> [M, LANES, N / LANES]: the columns that each thread has."""
    y = gl.permute(gl.reshape(x, [x.shape[0], x.shape[1] // 8, LANES, 2]), (0, 2, 1, 3))
    return gl.reshape(y, [x.shape[0], LANES, x.shape[1] // 4])


@gluon.jit
def lane_sum(x):
    """[M, N] accumulator -> [M, LANES]: each thread sums its columns, no shuffles."""
    return gl.sum(by_lane(x), 2)


@gluon.jit
def bits(x):
    """float32 as unsigned integers: of negative numbers the lowest has the largest."""
    return x.to(gl.uint32, bitcast=True)


def _lowest(n: int) -> str:
    """Maxima of n unsigned integers of a thread's two rows and of those so far, in two chains.

    Of a tile's registers two are of one row, two of the other. A chain of maxima takes an
    instruction for two numbers, where a tree takes up to two.
    """
    lines = [f"max.u32 ${i}, ${n + i}, ${2 * n + i};" for i in (0, 2)]
    lines += [f"max.u32 ${i & 2}, ${i & 2}, ${n + i};" for i in range(n) if i not in (0, 2)]
    lines += [f"mov.b32 ${i}, ${i & 2};" for i in range(n) if i not in (0, 2)]
    return "{ " + " ".join(lines) + " }"


LOWEST = gl.constexpr(_lowest(32))
LOWEST_OPERANDS = gl.constexpr(",".join(["=&r"] * 32 + ["r"] * 64))


@gluon.jit
def lane_lowest(low, x):
    """As lane_sum, the lowest of `low` and a thread's columns; if none is below 0, one of them.

    Two maxima of unsigned integers are one instruction; two minima of floats are two.
    """
    before = gl.expand_dims(bits(low), 2) + gl.zeros_like(by_lane(bits(x)))
    before = gl.permute(gl.reshape(before, [64, LANES, 8, 2]), (0, 2, 1, 3))
    before = gl.convert_layout(gl.reshape(before, [64, 64]), x.type.layout)
    found = gl.inline_asm_elementwise(
        LOWEST, LOWEST_OPERANDS, [bits(x), before], gl.uint32, True, 32
    )
    found = by_lane(found)
    found, _ = gl.split(gl.reshape(found, [64, LANES, 8, 2]))
    found, _ = gl.split(gl.reshape(found, [64, LANES, 4, 2]))
    found, _ = gl.split(gl.reshape(found, [64, LANES, 2, 2]))
    found, _ = gl.split(found)
    found = gl.convert_layout(found, low.type.layout)
    return found.to(gl.float32, bitcast=True)


@gluon.jit
def slot_of(i, SLOTS: gl.constexpr):
    """Where tile (or pair) i is (NOTE [Slots])."""
    if SLOTS & (SLOTS - 1) == 0:
        return i & (SLOTS - 1)
    else:
        return i % SLOTS


@gluon.jit
def phase_of(i, SLOTS: gl.constexpr):
    """The phase of the barriers of slot_of(i) that completes for i."""
    return (i // SLOTS) & 1


@gluon.jit
def without_offset(seq):
    """The sequence, for a window whose bounds have the offset in them."""
    return Sequence(
        seq.start_q, seq.start_k, seq.num_rows, seq.num_keys, seq.num_valid, 0, seq.mask_offset
    )


@gluon.jit
def flat(tile):
    """[1, 1, rows, head_dim] of shared memory -> [rows, head_dim]."""
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def start_scores(a, tile, zero):
    """Issue a @ tile^T; `zero` gives the shape."""
    return warpgroup_mma(a, flat(tile).permute((1, 0)), zero, use_acc=False, is_async=True)
