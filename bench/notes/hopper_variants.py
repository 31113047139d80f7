"""Experiments on an H200 (torch 2.11, Triton 3.6): variants of the Hopper forward, tiles of the portable kernels.

    OUT=... python bench/notes/hopper_variants.py [--only hopper|sweep|fp32] [--seconds 260]

Variants are texts of torch_streamkl/kernels/hopper_forward.py with replacements, loaded as modules. Each one is compiled and
checked in a process of its own with a time limit (a deadlock costs that, no more), then those that are right are timed in
turns in one process. The portable sweep uses torch_streamkl.tune. JSON goes to $OUT after every step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

DEVICE, HEADS, SEQLEN, JOBS = "cuda", 32, 8192, 14
SHAPES = ((128, True), (128, False), (64, True), (64, False))
COEFFICIENTS = {
    3: [0.9999280571937561, 0.6932609677314758, 0.2426111251115799, 0.0551716685295105],
    4: [
        0.9999992847442627,
        0.6931217908859253,
        0.240247443318367,
        0.05591785907745361,
        0.009570102207362652,
    ],
    5: [
        1.0000001192092896,
        0.6931469440460205,
        0.24022120237350464,
        0.05550713092088699,
        0.009675540961325169,
        0.0013276472454890609,
    ],
}


def hex_of(x: float) -> str:
    import struct

    return "0f" + struct.pack(">f", x).hex().upper()


def poly_asm(eighths: int, degree: int) -> str:
    """2^x of eight elements, `eighths` of them by Cody-Waite reduction and a polynomial, the rest by ex2."""
    lines = ["{ .reg .f32 x, t, f, p; .reg .b32 n;"]
    poly = {i * 8 // eighths for i in range(eighths)} if eighths else set()
    c = [hex_of(v) for v in COEFFICIENTS[degree]]
    magic = hex_of(12582912.0)
    minus = hex_of(-12582912.0)
    for i in range(8):
        out, inp = f"${i}", f"${i + 8}"
        if i not in poly:
            lines.append(f"ex2.approx.ftz.f32 {out}, {inp};")
            continue
        lines.append(f"max.f32 x, {inp}, {hex_of(-125.0)};")
        lines.append(
            f"min.f32 x, x, {hex_of(127.99)};"
        )  # so that what overflows fails the test of sums
        lines.append(f"add.rn.f32 t, x, {magic};")
        lines.append(f"add.rn.f32 p, t, {minus};")
        lines.append("sub.rn.f32 f, x, p;")
        lines.append(f"fma.rn.f32 p, f, {c[-1]}, {c[-2]};")
        for value in reversed(c[:-2]):
            lines.append(f"fma.rn.f32 p, p, f, {value};")
        lines.append("mov.b32 n, t; shl.b32 n, n, 23; mov.b32 t, p;")
        lines.append("{ .reg .b32 q; mov.b32 q, t; add.s32 q, q, n; mov.b32 " + out + ", q; }")
    lines.append("}")
    return " ".join(lines)


def exp2_function(name: str, eighths: int, degree: int) -> str:
    outs, ins = ",".join(["=f"] * 8), ",".join(["f"] * 8)
    return (
        f"@gluon.jit\ndef {name}(x):\n"
        f"    return gl.inline_asm_elementwise(\n        {poly_asm(eighths, degree)!r},\n"
        f"        {outs + ',' + ins!r}, [x], dtype=gl.float32, is_pure=True, pack=8,\n    )\n\n\n"
    )


def with_poly(text: str, o_eighths: int, w_eighths: int, degree: int) -> str:
    marker = "@gluon.jit\ndef sum_pairs("
    assert text.count(marker) == 1
    functions = exp2_function("exp2_o", o_eighths, degree) + exp2_function(
        "exp2_w", w_eighths, degree
    )
    text = text.replace(marker, functions + marker)
    assert text.count("lane_sum(exp2(o))") == 4 and text.count("ew = exp2(w)") == 4
    return text.replace("lane_sum(exp2(o))", "lane_sum(exp2_o(o))").replace(
        "ew = exp2(w)", "ew = exp2_w(w)"
    )


def with_groups(text: str, groups: int, registers: int) -> str:
    """More warp groups a program, each with fewer registers."""
    one = text[
        text.index(
            "            (reduce_rows, (\n                tiles, block, outputs, gl.constexpr(1)"
        ) :
    ]
    one = one[: one.index("            )),\n") + len("            )),\n")]
    more = "".join(one.replace("gl.constexpr(1)", f"gl.constexpr({i})") for i in range(1, groups))
    changes = [
        ("GROUPS = gl.constexpr(2)", f"GROUPS = gl.constexpr({groups})"),
        ("GROUP_REGISTERS = gl.constexpr(240)", f"GROUP_REGISTERS = gl.constexpr({registers})"),
        (one, more),
        ("[NUM_WARPS, 1]", "[" + "NUM_WARPS, " * (groups - 1) + "1]"),
        (
            "[GROUP_REGISTERS, LOADER_REGISTERS]",
            "[" + "GROUP_REGISTERS, " * (groups - 1) + "LOADER_REGISTERS]",
        ),
    ]
    for old, new in changes:
        # warp_specialize's lists are of the workers: a layout above has the text of the first, too
        if old == "[NUM_WARPS, 1]":
            head, _, tail = text.rpartition(old)
            text = head + new + tail
            continue
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    return text


def only_weight_in_registers(text: str) -> str:
    old = "        oq = oq.load(operand)\n"
    assert text.count(old) == 1
    return text.replace(old, "")


def only_other_in_registers(text: str) -> str:
    old = "        wq = wq.load(operand)\n"
    assert text.count(old) == 1
    return text.replace(old, "")


def without_after_issue(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if "= after_issue(" not in line)


def skipping(text: str) -> str:
    """Tiles that no row of a warp group may see are released without looking at them."""
    return replaced_in(
        text,
        [
            (
                "state, oq, wq, tiles, block, rows, count, zero,",
                "state, oq, wq, tiles, block, rows, first_tile, count, zero,",
            ),
            ("    for i in range(count):\n", "    for i in range(first_tile, count):\n"),
            (
                "    state = update_tiles(\n",
                """    skipped = 0
    if CAUSAL:
        visible = gl.minimum(block.seqlen_k, first + BLOCK_M + block.seqlen_k - block.seqlen_q)
        visible_tiles = gl.maximum((visible + BLOCK_N - 1) // BLOCK_N, 0)
        skipped = gl.maximum(block.num_tiles - visible_tiles, 0)
        num_masked = gl.maximum(num_masked, gl.minimum(skipped + 1, block.num_tiles))
        for i in range(skipped):
            slot = (i + block.num_tiles) & 1
            phase = (i >> 1) & 1
            mbarrier.wait(tiles.other_full.index(slot), phase)
            mbarrier.arrive(tiles.other_empty.index(slot), count=1)
            mbarrier.wait(tiles.weight_full.index(slot), phase)
            mbarrier.arrive(tiles.weight_empty.index(slot), count=1)
    state = update_tiles(
""",
            ),
            (
                "tiles, block, rows, num_masked, zero,",
                "tiles, block, rows, skipped, num_masked, zero,",
            ),
        ],
    )


def odd_tile_fast(text: str) -> str:
    """The tile that makes the rest even goes relative to the fixed bases, too: no maxima, no shuffles."""
    import re

    old = re.search(
        r"    num_masked = gl.minimum\(num_masked \+ \(\(block.num_tiles - num_masked\) & 1\), block.num_tiles\)\n",
        text,
    )
    assert old is not None
    text = text.replace(old.group(0), "    num_masked = gl.minimum(num_masked, block.num_tiles)\n")
    one = """@gluon.jit
def sum_one(
    oq, wq, tiles, block, start, stop, base_o, base_w, zero,
    C_WEIGHT: gl.constexpr, C_OTHER: gl.constexpr,
):  # fmt: skip
    sum_o = lane_sum(zero)
    sum_w = sum_o
    mom = sum_o
    for i in range(start, stop):
        slot = (i + block.num_tiles) & 1
        phase = (i >> 1) & 1
        mbarrier.wait(tiles.other_full.index(slot), phase)
        o = start_scores(oq, tiles.other_k.index(slot), zero)
        mbarrier.wait(tiles.weight_full.index(slot), phase)
        w = start_scores(wq, tiles.weight_k.index(slot), zero)
        o, w = warpgroup_mma_wait(0, deps=[o, w])
        mbarrier.arrive(tiles.other_empty.index(slot), count=1)
        mbarrier.arrive(tiles.weight_empty.index(slot), count=1)
        o = o * block.other_scale - gl.expand_dims(base_o, 1)
        w = w * block.weight_scale - gl.expand_dims(base_w, 1)
        sum_o += lane_sum(exp2(o))
        ew = exp2(w)
        sum_w += lane_sum(ew)
        mom += lane_sum(ew * moment(w, o, C_WEIGHT, C_OTHER))
    return sum_o, sum_w, mom


"""
    marker = "@gluon.jit\ndef sum_pairs("
    text = text.replace(marker, one + marker)
    assert (
        text.count("    sum_o = lane_sum(zero)\n    sum_w = sum_o\n    mom = sum_o\n    mbarrier")
        == 2
    )
    text = text.replace(
        "    sum_o = lane_sum(zero)\n    sum_w = sum_o\n    mom = sum_o\n    mbarrier",
        "    mbarrier",
    )
    for name in ("sum_pairs", "sum_halves"):
        start = text.index(f"def {name}(")
        head = text[start:]
        head = head.replace(
            "    zero,\n    C_WEIGHT",
            "    zero,\n    sum_o,\n    sum_w,\n    mom,\n    C_WEIGHT",
            1,
        )
        text = text[:start] + head
    old = "        if Q_IN_REGISTERS:\n            sum_o, sum_w, mom = sum_halves("
    assert text.count(old) == 1
    text = text.replace(
        old,
        """        first_pair = num_masked + ((block.num_tiles - num_masked) & 1)
        sum_o, sum_w, mom = sum_one(
            oq, wq, tiles, block, num_masked, first_pair, base_o, base_w, zero, C_WEIGHT, C_OTHER
        )
        if Q_IN_REGISTERS:
            sum_o, sum_w, mom = sum_halves(""",
    )
    call = "oq, wq, tiles, block, num_masked, base_o, base_w, zero, C_WEIGHT, C_OTHER\n"
    assert text.count(call) == 2
    return text.replace(
        call,
        "oq, wq, tiles, block, first_pair, base_o, base_w, zero, sum_o, sum_w, mom, C_WEIGHT, C_OTHER\n",
    )


def variants() -> dict[str, tuple]:
    """name: (change of the text, block_n, q_in_registers); block_m is 64."""
    found: dict[str, tuple] = {
        "pairs": (lambda t: t, 64, False),  # kept for D=64
        "halves": (lambda t: t, 64, True),  # kept for D=128
    }
    for mode, registers in (("pairs", False), ("halves", True)):
        for eighths in (1, 2, 3):
            for degree in (3, 5) if eighths != 3 else (3,):
                found[f"{mode} poly{degree} {eighths}/8"] = (
                    lambda t, e=eighths, d=degree: with_poly(t, e, e, d),
                    64,
                    registers,
                )
    found["pairs poly4 o1/8 w2/8"] = (lambda t: with_poly(t, 1, 2, 4), 64, False)
    found["halves poly4 o2/8 w1/8"] = (lambda t: with_poly(t, 2, 1, 4), 64, True)
    found["halves, queries of weight in registers"] = (only_weight_in_registers, 64, True)
    both = lambda t: odd_tile_fast(skipping(t))
    for mode, registers in (("pairs", False), ("halves", True)):
        found[f"{mode}, skipping"] = (skipping, 64, registers)
        found[f"{mode}, skipping, odd tile fast"] = (both, 64, registers)
        for eighths, degree in ((1, 5), (2, 4)):
            found[f"{mode}, skipping, odd tile fast, poly{degree} {eighths}/8"] = (
                lambda t, e=eighths, d=degree: both(with_poly(t, e, e, d)),
                64,
                registers,
            )
    three = lambda t: with_groups(t, 3, 160)
    found["3 groups of 32 keys, halves"] = (three, 32, True)
    found["3 groups of 32 keys, pairs, poly3 1/8"] = (
        lambda t: with_poly(three(t), 1, 1, 3),
        32,
        False,
    )
    found["4 groups of 32 keys, pairs"] = (lambda t: with_groups(t, 4, 120), 32, False)
    found["3 groups, halves"] = (three, 64, True)
    found["3 groups, halves, weight in registers"] = (
        lambda t: only_weight_in_registers(three(t)),
        64,
        True,
    )
    found["3 groups, halves, other in registers"] = (
        lambda t: only_other_in_registers(three(t)),
        64,
        True,
    )
    found["3 groups, halves, no after_issue"] = (lambda t: without_after_issue(three(t)), 64, True)
    found["3 groups, halves, poly3 1/8"] = (lambda t: with_poly(three(t), 1, 1, 3), 64, True)
    found["3 groups, halves, poly5 2/8"] = (lambda t: with_poly(three(t), 2, 2, 5), 64, True)
    found["3 groups of 32 keys, pairs"] = (three, 32, False)
    four = lambda t: with_groups(t, 4, 120)
    found["4 groups of 32 keys, halves"] = (four, 32, True)
    found["2 groups of 128 keys, halves"] = (lambda t: t, 128, True)
    return found


# by head_dim, those that spilled or were serialised when compiled for sm_90, and those without promise there
SKIP: dict[int, set[str]] = {
    64: {
        "2 groups of 128 keys, halves",
        "4 groups of 32 keys, halves",
        "halves poly5 2/8",
        "halves poly3 3/8",
        "pairs, skipping",
        "halves, skipping",
        "3 groups of 32 keys, halves",
    },
    128: {
        "2 groups of 128 keys, halves",
        "4 groups of 32 keys, halves",
        "4 groups of 32 keys, pairs",
        "3 groups, halves",
        "3 groups, halves, weight in registers",
        "3 groups, halves, other in registers",
        "3 groups, halves, no after_issue",
        "3 groups, halves, poly3 1/8",
        "3 groups, halves, poly5 2/8",
        "pairs poly5 2/8",
        "pairs poly3 3/8",
        "pairs poly4 o1/8 w2/8",
        "pairs, skipping",
        "pairs, skipping, odd tile fast",
        "pairs, skipping, odd tile fast, poly5 1/8",
        "pairs, skipping, odd tile fast, poly4 2/8",
    },
}


def load_variant(name: str):
    """The module of a variant, and a launch for it; hopper_attention uses both from now on."""
    from torch_streamkl import launch
    from torch_streamkl.kernels import hopper_attention, hopper_forward

    change, block_n, registers = variants()[name]
    text = change(Path(hopper_forward.__file__).read_text())
    return module_of(f"hopper {name}", text), launch.HopperLaunch(64, block_n, registers)


def module_of(name: str, text: str):
    """A module with this text, from a file: Triton reads the source of its functions."""
    slug = "".join(ch if ch.isalnum() else "_" for ch in name)
    folder = Path(tempfile.gettempdir()) / "streamkl_variants"
    folder.mkdir(exist_ok=True)
    path = folder / f"{slug}.py"
    if not path.exists() or path.read_text() != text:
        partial = folder / f"{slug}.{os.getpid()}"
        partial.write_text(text)
        partial.replace(path)
    if slug not in sys.modules:
        spec = importlib.util.spec_from_file_location(slug, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[slug] = module
        spec.loader.exec_module(module)
    return sys.modules[slug]


class Variant:
    def __init__(self, name: str) -> None:
        self.name = name
        self.module, self.tiles = load_variant(name)

    def forward(self, problem):
        from torch_streamkl.kernels import hopper_attention

        saved = hopper_attention.fwd, hopper_attention.hopper_launch
        hopper_attention.fwd, hopper_attention.hopper_launch = self.module, lambda _: self.tiles
        try:
            return hopper_attention.forward(problem)
        finally:
            hopper_attention.fwd, hopper_attention.hopper_launch = saved


def problem_of(
    head_dim, causal, n, m=0, heads=32, batch=1, seed=0, divergence="forward_kl", size=1.0
):
    import torch

    from torch_streamkl.functional import DIVERGENCES
    from torch_streamkl.ops import problem_of as build

    g = torch.Generator(DEVICE).manual_seed(seed)
    shapes = [(batch, heads, size, head_dim) for size in (n, m or n, n, m or n)]
    x = [torch.randn(s, generator=g, device=DEVICE).to(torch.bfloat16) for s in shapes]
    x[0], x[2] = x[0] * size, x[2] * size
    scale = head_dim**-0.5
    return build(
        *x,
        functional=DIVERGENCES[divergence],
        student_scale=scale,
        teacher_scale=scale,
        window_right=0 if causal else None,
    )[0]


def truth(problem):
    """Value, lse (log2 units) of student and teacher in float64, naive."""
    import torch

    q_s, k_s, q_t, k_t = (
        x.double()
        for x in (problem.student.q, problem.student.k, problem.teacher.q, problem.teacher.k)
    )
    n, m = q_s.shape[2], k_s.shape[2]
    s = q_s @ k_s.transpose(-1, -2) * problem.student.scale
    t = q_t @ k_t.transpose(-1, -2) * problem.teacher.scale
    if problem.window_right is not None:
        mask = torch.ones(n, m, dtype=torch.bool, device=DEVICE).tril(m - n)
        s, t = s.masked_fill(~mask, -torch.inf), t.masked_fill(~mask, -torch.inf)
    log_s, log_t = s.log_softmax(-1), t.log_softmax(-1)
    p, r = log_t.exp(), log_s.exp()
    if problem.functional.bilinear.has_teacher_moment:
        value = torch.where(p > 0, p * (log_t - log_s), 0.0).sum(-1)
    else:
        value = torch.where(r > 0, r * (log_s - log_t), 0.0).sum(-1)
    return value, s.logsumexp(-1) / math.log(2), t.logsumexp(-1) / math.log(2)


def check(name: str, head_dim: int) -> dict:
    """Errors on small sizes, and one run of what will be timed (which leaves its kernel in the cache)."""
    import torch

    variant = Variant(name)
    worst = {"value": 0.0, "lse": 0.0}
    # sizes whose kernels Triton specialises as those of 8192, one odd size, and scores that need the second launch
    sizes = [
        (2048, 2048, False, 1.0),
        (2048, 2048, True, 1.0),
        (200, 333, True, 1.0),
        (2048, 2048, False, 60.0),
    ]
    for n, m, causal, size in sizes:
        p = problem_of(head_dim, causal, n, m, heads=16, seed=n, size=size)
        poison = torch.full((5, 1, 16, n), math.nan, device=DEVICE)
        del poison
        value, stats = variant.forward(p)
        expected = truth(p)
        found = (value, stats.student_lse, stats.teacher_lse)
        for key, x, y in zip(("value", "lse", "lse"), found, expected):
            error = ((x.double() - y).abs() / y.abs().clamp_min(1.0)).max().item()
            worst[key] = max(worst[key], error if error == error else math.inf)
    for causal in (False, True):
        p = problem_of(head_dim, causal, SEQLEN)
        value, _ = variant.forward(p)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        worst[f"finite {causal}"] = bool(value.isfinite().all())
    return worst


def event_ms(call, repeats=5):
    import torch

    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(repeats):
        call()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / repeats


def cudnn_call(head_dim, causal):
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (
        torch.randn(1, 32, 8192, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def time_all(names: list[str], head_dim: int, rounds: int = 7) -> None:
    """Prints one JSON line a causality: medians of interleaved rounds."""
    from torch_streamkl.kernels import attention

    loaded = {name: Variant(name) for name in names}
    for causal in (False, True):
        problems = [problem_of(head_dim, causal, 8192, seed=seed) for seed in range(2)]
        calls = {name: (lambda p, v=v: v.forward(p)) for name, v in loaded.items()}
        calls["portable"] = attention.forward
        library = cudnn_call(head_dim, causal)
        calls["cudnn attention"] = lambda _: library()
        times = {name: [] for name in calls}
        for number in range(rounds + 1):
            p = problems[number % 2]
            for name, call in calls.items():
                taken = event_ms(lambda: call(p))
                if number:
                    times[name].append(taken)
        flop = 4 * 32 * 8192**2 * head_dim / (2 if causal else 1)
        result = {
            name: {
                "ms": statistics.median(t),
                "low": min(t),
                "high": max(t),
                "tflops": flop / statistics.median(t) * 1e-9,
            }
            for name, t in times.items()
        }
        print(json.dumps({"head_dim": head_dim, "causal": causal, "times": result}), flush=True)


# --------------------------------------------------------------------------------------------- portable sweep
def function_text(text: str, name: str) -> str:
    start = text.index(f"@triton.jit\ndef {name}(")
    stop = text.find("\n\n\n", start)
    return text[start:] if stop < 0 else text[start:stop]


def replaced_in(text: str, changes: list[tuple[str, str]]) -> str:
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def transposed_dk(text: str) -> str:
    """Scores with keys as rows: dS^T is the register operand of the dK matmul, and nothing is transposed on the way."""
    import re

    tile = replaced_in(
        function_text(text, "gradient_tile"),
        [
            ("def gradient_tile(", "def gradient_tile_t("),
            ("rows.offs[:, None]", "rows.offs[None, :]"),
            ("offs_n[None, :]", "offs_n[:, None]"),
            ("tl.dot(rows.qs, ks_trans", "tl.dot(ks_trans, tl.trans(rows.qs)"),
            ("tl.dot(rows.qt, kt_trans", "tl.dot(kt_trans, tl.trans(rows.qt)"),
            ("lse_t[:, None]", "lse_t[None, :]"),
            ("lse_s[:, None]", "lse_s[None, :]"),
            ("key_sum[:, None]", "key_sum[None, :]"),
        ],
    )
    over = function_text(text, "dk_over")
    new_over = replaced_in(
        over,
        [
            ("gradient_tile(", "gradient_tile_t("),
            ("tl.trans((d * grad[:, None]).to(q.dtype)), q", "(d * grad[None, :]).to(q.dtype), q"),
        ],
    )
    kernel = function_text(text, "dk_kernel")
    new_kernel, count = re.subn(r"(k[st]_trans = )tl\.trans\(\n\s*(.*)\n\s*\)", r"\1\2", kernel)
    assert count == 2, count
    return text.replace(over, tile + "\n\n\n" + new_over).replace(kernel, new_kernel)


class Backward:
    """attention_backward as it is, or a variant of it, in the launcher."""

    def __init__(self, variant: str) -> None:
        self.variant = variant

    def __enter__(self):
        from torch_streamkl.kernels import attention, attention_backward, plans

        plans.clear_plans()
        self.saved, attention.bwd = attention.bwd, attention_backward
        self.precision = plans.dot_precision
        if self.variant in ("ieee", "tf32x3"):
            plans.dot_precision = lambda _: self.variant
        if self.variant == "transposed":
            text = transposed_dk(Path(attention_backward.__file__).read_text())
            attention.bwd = module_of("backward_transposed", text)

    def __exit__(self, *_):
        from torch_streamkl.kernels import attention, plans

        attention.bwd, plans.dot_precision = self.saved, self.precision
        plans.clear_plans()


def first_run(variant, shape, kernel, tiles):
    from torch_streamkl import tune

    with Backward(variant):
        return tune._first_run(shape, kernel, tiles)


def first_runs(work, jobs, seconds):
    """Why each (shape, variant, kernel, tiles) cannot run, or "", in the order of the work."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    stop = time.time() + seconds
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    futures = [
        pool.submit(first_run, variant, shape, kernel, tiles)
        for shape, variant, kernel, tiles in work
    ]
    found = []
    for future in futures:
        try:
            found.append(future.result(timeout=max(0.1, stop - time.time())))
        except Exception as error:
            found.append(f"first run: {type(error).__name__} {error}"[:100])
    pool.shutdown(wait=False, cancel_futures=True)
    for process in list((pool._processes or {}).values()):
        process.terminate()
    return found


# (block_m, block_n, num_warps): stages. What spilled more than 300 bytes or did not fit when compiled for sm_90 is not here.
TILES = {
    ("dk", 128): {
        (64, 64, 4): (1, 2, 3),
        (32, 64, 4): (1, 3),
        (32, 128, 8): (1, 3),
        (128, 64, 8): (1, 2),
        (64, 32, 4): (1,),
    },
    ("dk", 64): {
        (64, 64, 4): (1, 2, 3),
        (32, 64, 4): (1, 3),
        (32, 128, 8): (1, 3),
        (64, 128, 8): (1, 3),
        (128, 64, 8): (1, 2),
    },
    ("dk transposed", 128): {
        (64, 64, 4): (1, 3),
        (32, 64, 4): (1, 2, 3),
        (32, 128, 8): (1, 2, 3),
        (64, 128, 8): (1, 3),
        (64, 64, 8): (3,),
    },
    ("dk transposed", 64): {
        (64, 64, 4): (1, 3),
        (32, 64, 4): (1, 2, 3),
        (32, 128, 8): (1, 2, 3),
        (64, 128, 8): (1, 2, 3),
        (64, 64, 8): (3,),
        (32, 128, 4): (1, 3),
    },
    ("dq", 128): {
        (64, 64, 4): (1, 2, 3),
        (64, 32, 4): (1, 2, 3),
        (64, 128, 4): (2, 3),
        (128, 32, 8): (2, 3),
        (128, 64, 8): (1, 2, 3),
        (128, 128, 8): (2,),
    },
    ("dq", 64): {
        (64, 64, 4): (1, 2, 3),
        (64, 32, 4): (1, 2, 3),
        (64, 128, 4): (2, 3),
        (128, 32, 8): (2, 3),
        (128, 64, 8): (1, 2, 3),
        (128, 128, 8): (1, 2),
        (128, 64, 4): (2,),
    },
    ("forward", 128): {
        (64, 32, 4): (2, 3),
        (64, 64, 4): (1, 2, 3),
        (64, 128, 4): (1, 2),
        (128, 32, 8): (2, 3),
        (128, 64, 8): (2, 3),
        (128, 128, 8): (1, 2),
    },
    ("forward", 64): {
        (64, 32, 4): (2, 3),
        (64, 64, 4): (1, 2, 3),
        (64, 128, 4): (1, 2),
        (128, 32, 8): (2, 3),
        (128, 64, 8): (2, 3),
        (128, 128, 8): (1, 2),
        (128, 64, 4): (2,),
    },
}


def candidates(kernel: str, head_dim: int, default):
    from torch_streamkl.launch import TritonLaunch

    default = replace(default, num_splits=1)
    found = [TritonLaunch(*t, n) for t, stages in TILES[kernel, head_dim].items() for n in stages]
    return [default, *(x for x in found if x != default)]


def sweep(out: Path, deadline: float) -> None:
    from torch_streamkl import tune

    tune.TIMED_MS = 25.0
    tune.ROUNDS = 3
    results = []
    kinds = [("", "dk"), ("transposed", "dk"), ("", "dq"), ("", "forward")]
    work = []
    for head_dim, causal in SHAPES:
        shape = tune.Shape(1, HEADS, HEADS, head_dim, head_dim, SEQLEN, causal, "bfloat16", DEVICE)
        defaults = tune.Workload(shape).defaults
        work += [
            (shape, v, k, x)
            for v, k in kinds
            for x in candidates(k + " transposed" * bool(v), head_dim, defaults[k])
        ]
    start = time.time()
    refusals = first_runs(work, JOBS, deadline - time.time())
    print(
        f"{len(work)} launches compiled in {time.time() - start:.0f} s, {sum(map(bool, refusals))} refused",
        flush=True,
    )
    for shape in dict.fromkeys(item[0] for item in work):
        workload = tune.Workload(shape)
        ready: dict = {kind: [] for kind in kinds}
        for (its_shape, variant, kernel, tiles), refusal in zip(work, refusals):
            if its_shape == shape:
                ready[variant, kernel].append((tiles, refusal))
        print(f"\n{shape}", flush=True)
        for (variant, kernel), launches in ready.items():
            try:
                with Backward(variant):
                    if variant:  # checked against the kernel as it is
                        with (
                            Backward(""),
                            tune.launch_table.replaced(
                                tune.launch_table.new_table(workload.device)
                            ),
                        ):
                            expected = workload.run(kernel)
                        found = workload.run(kernel)
                        error = tune.largest_error(found, expected)
                        print(
                            f"{variant} {kernel} against the kernel as it is: {error:.2e} of what is allowed",
                            flush=True,
                        )
                    trials, entry = tune.tune_kernel(workload, kernel, launches, tune.device_timer)
            except Exception as error:
                print(f"{variant} {kernel}: {type(error).__name__} {error}"[:300], flush=True)
                continue
            print(variant, tune.table_text(trials), flush=True)
            results.append(
                {
                    "shape": str(shape),
                    "variant": variant,
                    "kernel": kernel,
                    "kept": entry.as_json(),
                    "trials": [[tune.describe(t.launch), t.runtime_ms, t.remark] for t in trials],
                }
            )
            out.write_text(json.dumps(results, indent=1).replace("Infinity", "null"))


# --------------------------------------------------------------------------------------------- float32
FP32_SIZE = (8, 8, 4096)
FP32_TILES = {
    ("ieee", "forward", 64): [(32, 32, 4, 1), (32, 32, 8, 1), (64, 32, 8, 1)],
    ("ieee", "forward", 128): [(32, 32, 8, 1), (16, 32, 4, 1)],
    ("ieee", "dq", 64): [(32, 32, 4, 1), (32, 32, 8, 1), (64, 32, 8, 1)],
    ("ieee", "dq", 128): [(32, 32, 8, 1), (16, 32, 4, 1)],
    ("ieee", "dk", 64): [(32, 32, 4, 1), (32, 32, 8, 1), (32, 64, 8, 1), (16, 32, 4, 1)],
    ("ieee", "dk", 128): [(32, 32, 8, 1), (32, 16, 4, 1), (16, 16, 4, 1)],
    ("tf32x3", "forward", 64): [(64, 32, 4, 1), (64, 64, 4, 1), (64, 32, 4, 2), (128, 64, 8, 1)],
    ("tf32x3", "forward", 128): [(64, 32, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1)],
    ("tf32x3", "dq", 64): [(64, 32, 4, 1), (64, 64, 4, 1), (64, 32, 4, 2)],
    ("tf32x3", "dq", 128): [(64, 32, 4, 1), (64, 32, 8, 1), (32, 32, 4, 1)],
    ("tf32x3", "dk", 64): [(64, 64, 4, 1), (32, 64, 4, 1), (32, 64, 8, 1), (32, 32, 4, 1)],
    ("tf32x3", "dk", 128): [(32, 64, 8, 1), (32, 64, 4, 1), (32, 32, 8, 1), (32, 32, 4, 1)],
}


def fp32_errors() -> dict:
    """Largest error of a row against float64, relative to the row: eager float32 and both precisions."""
    import torch

    from torch_streamkl import attention_kl

    found: dict = {}
    for head_dim in (64, 128):
        generator = torch.Generator(DEVICE).manual_seed(3)
        x = [
            torch.randn(1, 4, SEQLEN // 8, head_dim, generator=generator, device=DEVICE)
            for _ in range(4)
        ]

        def results(tensors, impl):
            leaves = [t.clone().requires_grad_(i < 2) for i, t in enumerate(tensors)]
            value = attention_kl(*leaves, is_causal=True, impl=impl)
            return (value.detach(), *torch.autograd.grad(value.sum(), leaves[:2]))

        exact = results([t.double() for t in x], "reference")
        runs = {"eager float32": ("reference", "")}
        runs |= {name: ("triton", name) for name in ("ieee", "tf32x3")}
        for name, (impl, variant) in runs.items():
            with Backward(variant):
                got = results(x, impl)
            errors = []
            for a, b in zip(got, exact):
                a, b = (t.double().unsqueeze(-1) if t.ndim == 3 else t.double() for t in (a, b))
                size = b.norm(dim=-1)
                errors.append(
                    ((a - b).norm(dim=-1) / torch.maximum(size, size.square().mean().sqrt()))
                    .max()
                    .item()
                )
            found[f"{name} D={head_dim}"] = dict(zip(("value", "dq", "dk"), errors))
            print(
                f"float32 {name} D={head_dim}: " + ", ".join(f"{e:.2e}" for e in errors),
                flush=True,
            )
    return found


def fp32(out: Path, deadline: float) -> None:
    from torch_streamkl import tune
    from torch_streamkl.launch import TritonLaunch

    tune.TIMED_MS = 25.0
    tune.ROUNDS = 3
    results: dict = {"errors": {}, "trials": []}
    shapes = {
        dim: tune.Shape(1, *FP32_SIZE[:2], dim, dim, FP32_SIZE[2], False, "float32", DEVICE)
        for dim in (64, 128)
    }
    work = []
    for (variant, kernel, dim), tiles in FP32_TILES.items():
        default = replace(tune.Workload(shapes[dim]).defaults[kernel], num_splits=1)
        all_tiles = [default, *(TritonLaunch(*t) for t in tiles)]
        work += [(shapes[dim], variant, kernel, t) for t in dict.fromkeys(all_tiles)]
    start = time.time()
    refusals = first_runs(work, JOBS, deadline - time.time())
    print(f"{len(work)} float32 launches compiled in {time.time() - start:.0f} s", flush=True)
    try:
        results["errors"] = fp32_errors()
    except Exception as error:
        print(f"float32 errors: {type(error).__name__} {error}"[:300], flush=True)
    for dim, shape in shapes.items():
        workload = tune.Workload(
            shape
        )  # its results are what candidates are compared with: not for tf32x3's errors
        for variant, kernel, its_dim in FP32_TILES:
            if its_dim != dim:
                continue
            launches = [
                (t, why)
                for (s, v, k, t), why in zip(work, refusals)
                if (s, v, k) == (shape, variant, kernel)
            ]
            default_why = launches[0][1]
            if default_why:  # the default tiles of ieee need not fit tf32x3
                print(f"{variant} {kernel}: the default {default_why}", flush=True)
                launches = [item for item in launches if not item[1]]
            if not launches:
                continue
            try:
                with Backward(variant):
                    trials, entry = tune.tune_kernel(workload, kernel, launches, tune.device_timer)
            except Exception as error:
                print(f"{variant} {kernel}: {type(error).__name__} {error}"[:300], flush=True)
                continue
            flop = {"forward": 4, "dq": 6, "dk": 6}[kernel] * 8 * 4096**2 * dim
            best = min(t.runtime_ms for t in trials)
            print(
                f"D={dim} {variant} {tune.table_text(trials)}\n  best {flop / best * 1e-9:.1f} TFLOP/s",
                flush=True,
            )
            results["trials"].append(
                {
                    "dim": dim,
                    "variant": variant,
                    "kernel": kernel,
                    "trials": [[tune.describe(t.launch), t.runtime_ms, t.remark] for t in trials],
                }
            )
            out.write_text(json.dumps(results, indent=1).replace("Infinity", "null"))


# --------------------------------------------------------------------------------------------- the run
def hopper(out: Path, deadline: float) -> None:
    """Check in parallel processes, time in one process a head_dim."""
    results: dict = {"checks": {}, "times": []}
    names = list(variants())
    jobs = [(name, dim) for name in names for dim in (64, 128) if name not in SKIP[dim]]
    waiting, running = list(jobs), []
    passed: dict[int, list[str]] = {64: [], 128: []}
    while waiting or running:
        while waiting and len(running) < 14:
            name, dim = waiting.pop(0)
            process = subprocess.Popen(
                [sys.executable, __file__, "--check", name, "--dim", str(dim)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            running.append((process, name, dim, time.time()))
        time.sleep(0.2)
        for item in list(running):
            process, name, dim, started = item
            if process.poll() is None:
                if time.time() - started < 75 and time.time() < deadline:
                    continue
                process.kill()
            stdout, stderr = process.communicate()
            running.remove(item)
            lines = stdout.strip().split("\n")
            try:
                found = json.loads(lines[-1])
            except ValueError:
                error = (stderr.strip().split("\n") or [""])[-1][:200]
                found = {"error": error or "no answer in time"}
            results["checks"][f"{name} D={dim}"] = found
            good = found.get("value", math.inf) < 2e-4 and found.get("lse", math.inf) < 2e-4
            if good and found["finite False"] and found["finite True"]:
                passed[dim].append(name)
            print(f"D={dim} {name:45} {found}", flush=True)
            out.write_text(json.dumps(results, indent=1))
    for dim, chosen in passed.items():
        chosen.sort(key=names.index)
        command = [sys.executable, __file__, "--time", "|".join(chosen), "--dim", str(dim)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=60)
            stdout, stderr = run.stdout, run.stderr
        except subprocess.TimeoutExpired as error:
            stdout = error.stdout or ""
            stdout = stdout.decode() if isinstance(stdout, bytes) else stdout
            stderr = "timed out"
        if stderr:
            print(stderr[-800:], flush=True)
        for line in stdout.strip().split("\n"):
            if not line.startswith("{"):
                continue
            found = json.loads(line)
            results["times"].append(found)
            print(f"\nD={found['head_dim']} {'causal' if found['causal'] else 'full'}")
            for name, t in sorted(found["times"].items(), key=lambda item: item[1]["ms"]):
                print(
                    f"  {name:45} {t['ms']:.3f} ms ({t['low']:.3f}-{t['high']:.3f})  {t['tflops']:.0f} TFLOP/s"
                )
            sys.stdout.flush()
        out.write_text(json.dumps(results, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check")
    parser.add_argument("--time")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--only", choices=("hopper", "sweep", "fp32"))
    parser.add_argument("--seconds", type=float, default=260.0)
    options = parser.parse_args()
    if options.check:
        print(json.dumps(check(options.check, options.dim)), flush=True)
        return
    if options.time:
        time_all(options.time.split("|"), options.dim)
        return
    started = time.time()
    out = Path(os.environ.get("OUT", "."))
    if options.only in (None, "hopper"):
        hopper(out / "hopper_variants.json", started + options.seconds * 0.55)
        print(f"hopper done after {time.time() - started:.0f} s", flush=True)
    if options.only in (None, "sweep"):
        sweep(out / "portable_sweep.json", started + options.seconds * 0.9)
        print(f"sweep done after {time.time() - started:.0f} s", flush=True)
    if options.only == "fp32":
        fp32(out / "fp32_sweep.json", started + options.seconds * 0.9)
        print(f"fp32 done after {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
