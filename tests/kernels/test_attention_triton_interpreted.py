"""The portable kernels without a GPU: Triton's interpreter against the naive code in float64.

The edge cases of test_attention_numerics.py run in it too.

The interpreter has to be chosen before a kernel is imported: test_in_the_interpreter.py does.
"""

import importlib
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.covering import only
from tests.support.denominators import check_denominators, denominators
from tests.support.feature_table import FEATURES
from tests.support.interpreter import inside, quiet
from tests.support.poison import padded, poisoned_memory
from tests.support.problems import CASES, Spec, build
from tests.support.strategies import specs
from tests.support.tolerances import budget, check, check_call
from torch_streamkl import attention_kl
from torch_streamkl.attention import heuristics, ops, plans
from torch_streamkl.attention.ops import problem_of
from torch_streamkl.attention.plans import NUM_STATE_FIELDS, clear_plans, plan_of
from torch_streamkl.attention.problem import RowStatistics
from torch_streamkl.attention.triton import launches as portable
from torch_streamkl.kernels import tiles
from torch_streamkl.kernels.arguments import Outputs
from torch_streamkl.program.divergences import named

pytestmark = quiet
slow = pytest.mark.slow
KL = named("forward_kl").text
IMPLS = ("triton", "reference")
# of every feature that reaches the kernels; those of other cases are the same, or below
FIRST = {cases[0] for cases in FEATURES.values()} - {"cross_entropy", "layout_bnhd", "reduction"}


@inside
@pytest.mark.parametrize("name", only(FIRST, CASES))
def test_feature(name: str) -> None:
    """On memory that holds NaN; contiguous tensors are those of the tests below."""
    with poisoned_memory():
        call = build(padded(CASES[name]))
        check_call(call, "triton")


@inside
@pytest.mark.parametrize("name", ["forward_kl", "js", "clamp_reached"])
def test_float16(name: str) -> None:
    call = build(replace(CASES[name], dtype=torch.float16))
    check_call(call, "triton")


@inside
@pytest.mark.parametrize("options", [{"is_causal": True}, {"window": (3, 0)}])
def test_a_tile_of_which_a_block_sees_one_key(options: dict[str, Any]) -> None:
    """Blocks have 16 rows and 16 keys here, and row 15 sees key 16, the first of a tile."""
    call = build(Spec(seqlen_q=32, seqlen_k=33, **options))
    check_call(call, "triton")


@inside
def test_padding_that_begins_and_ends_around_a_tile() -> None:
    """Tiles have 16 keys here; a batch element for each first and last key."""
    ends = [(i, j) for i in (0, 1, 15, 16, 17) for j in (1, 16, 17, 32, 33, 48) if i < j]
    call = build(Spec(batch=len(ends), seqlen_q=5, seqlen_k=48, mask="bool", score_size=3.0))
    keys = torch.arange(48)
    kept = torch.stack([(keys >= i) & (keys < j) for i, j in ends])
    call.options["attn_mask"] = kept[:, None, None, :]
    check_call(call, "triton")


@inside
def test_terms_of_keys_that_are_masked_do_not_count() -> None:
    """Of a squared difference of logarithms they are NaN: no probability is a factor of it."""
    tensors = [x.requires_grad_() for x in torch.randn(4, 1, 1, 20, 8)]
    found = []
    for impl in IMPLS:
        value, *_ = ops.attention_kl(
            *tensors, functional="((logP-logS)*(logP-logS))", window_right=0, impl=impl
        )
        found.append([value, *torch.autograd.grad(value.sum(), tensors)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@inside
def test_sums_in_the_order_of_registers() -> None:
    """The gradient of sums that lie as a wgmma accumulator does: NOTE [Order of sums]."""
    from torch_streamkl.attention.hopper import atomic

    heads, seqlen, head_dim, scale = 3, 150, 64, 0.5
    gradient = torch.randn(heads, 192, head_dim)
    # warp, half, row, column / 8, thread of a row, pair of columns
    tiles = gradient.view(heads, 3, 4, 2, 8, head_dim // 8, 4, 2)
    sums = tiles.permute(0, 1, 2, 5, 4, 6, 3, 7).reshape(heads * 3, -1).contiguous()
    out = torch.empty(1, heads, seqlen, head_dim)
    atomic.gradient_kernel[(heads * 3, 1, 1)](
        sums, out, out.stride(1), out.stride(2), scale, seqlen, 64, head_dim
    )
    assert torch.equal(out[0], gradient[:, :seqlen] * scale)


@inside
@pytest.mark.parametrize(
    ("name", "rows"),
    [("head_mean_groups", 64), pytest.param("head_mean_guards", 32, marks=slow)],
)
def test_head_mean_in_chunks(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean that does not fit its memory is made for some rows after the others."""
    from torch_streamkl.attention import head_mean_launches

    original, chunks = head_mean_launches.Launcher.chunks, []

    def counted(launcher: Any) -> Any:
        chunks.append(launcher.num_chunks)
        return original(launcher)

    call = build(replace(CASES[name], batch=2, seqlen_q=40, seqlen_k=20))
    whole = call.value_and_gradients("triton")
    monkeypatch.setattr(head_mean_launches, "MEAN_BYTES", 4 * rows * 32)  # 20 keys are two tiles
    monkeypatch.setattr(head_mean_launches.Launcher, "chunks", counted)
    found = call.value_and_gradients("triton")
    blocks = 2 * call.spec.heads * 2  # of 32 rows
    assert chunks == [blocks // (rows // 32)] * 2  # forward and backward
    for key, x in found.items():
        torch.testing.assert_close(x, whole[key], rtol=1e-5, atol=1e-6)
    check(found, budget(call))


# where a number of programs is chosen: module of `attention`, function, what it is chosen for
SHARES = [
    ("head_mean_launches", "head_mean_splits", replace(CASES["head_mean"], seqlen_q=33)),
    ("triton.launches", "key_splits", CASES["mqa"]),
    *(("heuristics", "_num_splits", x) for name, x in CASES.items() if name.startswith("split_")),
]


@inside
@pytest.mark.parametrize(("module", "function", "spec"), SHARES)
def test_shares_add_up(
    module: str, function: str, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What programs share a block of is what one program gives."""
    place, found = f"torch_streamkl.attention.{module}", []
    original = getattr(importlib.import_module(place), function)

    def counted(*arguments: Any, **options: Any) -> int:
        found.append(original(*arguments, **options))
        return found[-1]

    call = build(spec)
    clear_plans()
    monkeypatch.setattr(f"{place}.{function}", counted)
    shared = call.value_and_gradients("triton")
    assert max(found) > 1
    clear_plans()
    monkeypatch.setattr(f"{place}.{function}", lambda *_, **__: 1)
    for name, x in call.value_and_gradients("triton").items():
        torch.testing.assert_close(shared[name], x)
    clear_plans()
    check(shared, budget(call))


@inside
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=slow if name in ("gqa", "mqa_causal") else [])
        for name in CASES
        if name.startswith(("gqa", "mqa"))
    ],
)
def test_few_queries_of_a_group_are_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_streamkl.attention import pack_gqa

    original, found = pack_gqa.pack_gqa_heads, []
    monkeypatch.setattr(
        pack_gqa, "pack_gqa_heads", lambda problem: found.append(original(problem)) or found[-1]
    )
    build(CASES[name]).value_and_gradients("triton")
    sizes = {rows.student.q.shape[1:3] for rows in found if rows is not None}
    assert sizes == {"gqa_few_queries": {(2, 9)}, "mqa_one_query": {(1, 5)}}.get(name, set())


@inside
def test_any_call() -> None:
    sizes = st.sampled_from([1, 3, 15, 17, 20])

    @given(specs(dtypes=(torch.float32, torch.float16), sizes=sizes, max_heads=2, max_batch=2))
    @settings(max_examples=6, phases=[Phase.generate])
    def any_call(spec: Spec) -> None:
        call = build(spec)
        check_call(call, "triton")

    any_call()


@inside
def test_a_kept_plan_takes_the_tensors_of_the_call() -> None:
    """A plan is of metadata: it may keep no mask from the call that made it."""
    q, k, other = (torch.randn(1, 2, 20, 16) for _ in range(3))
    masks = [torch.randn(20, 20) > level for level in (-1.0, 0.0, 1.0)]
    for chosen in (None, *masks):
        results = (attention_kl(q, k, other, q, attn_mask=chosen, impl=impl) for impl in IMPLS)
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@inside
@pytest.mark.parametrize(
    ("name", "each"),
    [("forward_kl", 1), ("forward_kl", 4), ("window", 4), ("key_lengths", 3), ("varlen_causal", 3),
     ("varlen", 1)],
)  # fmt: skip
def test_only_blocks_with_nan_are_computed_again(
    name: str, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows the kernel for Hopper, whose rows may fail (forward.py)."""
    from torch_streamkl.attention.triton import forward as attention_forward

    forward, problems = portable.forward, []
    monkeypatch.setattr(portable, "forward", lambda p: (problems.append(p), forward(p))[1])
    build(replace(CASES[name], heads=2, seqlen_q=70)).run("triton")
    (p,) = problems
    value, stats = forward(p)
    found = [value, stats.student, stats.teacher]
    expected = [x.clone() for x in found]
    # the first and last rows of blocks of 16, of packed ones those of a sequence of rows 5 to 21
    marks, blocks_of_rows = [(0, 16), (1, 69), (1, 64)], [(0, 16, 32), (1, 64, 70)]
    if p.is_packed:
        marks, blocks_of_rows = [(0, 5), (1, 21)], [(0, 5, 21), (1, 21, 22)]
    repeated = torch.zeros(value.shape[-2:], dtype=torch.bool)
    for head, start, stop in blocks_of_rows:
        repeated[head, start:stop] = True
    for x in found:
        x.fill_(7.0)
    for head, row in marks:
        value[-1, head, row] = math.nan
    small = tiles.TritonLaunch(16, 16, 4, 1)
    plan, config = plans.plan_of(p), plans.config_of(p, small)
    blocks = tiles.ceil_div(p.longest[0], config.BLOCK_M)
    works = blocks * 2 * plan.num_sequences
    attention_forward.recompute_kernel[(tiles.ceil_div(works, each), 1, 1)](
        *plan.arguments(p), Outputs(*found, plan.stats_stride), blocks, 2, works,
        plan.inv_temperature, plan.fill, each, plan.form, plan.helper, config,
    )  # fmt: skip
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(
            x[..., -1, :, :][..., repeated], y[..., -1, :, :][..., repeated]
        )
        x[..., -1, :, :][..., repeated] = 7.0
        assert (x == 7.0).all()


PACKED_LENGTHS = [
    ([300, 70, 0, 129, 64], [300, 70, 5, 129, 64]),
    ([1], [700]),
    ([0, 0], [3, 0]),
    ([10] * 90, [20] * 90),
    ([200, 200], [130, 300]),
]


@inside
@pytest.mark.parametrize("bounds", [(None, None), (None, 0), (100, 7)])
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize(("of_q", "of_k"), PACKED_LENGTHS)
def test_table_of_packed_blocks(
    of_q: list[int], of_k: list[int], rows: bool, bounds: tuple[int | None, int | None]
) -> None:
    """Every block once, the longest first (NOTE [Blocks of packed sequences])."""
    from torch_streamkl.attention.hopper import packed

    offsets = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (of_q, of_k)]
    q, k = (torch.zeros(1, 1, max(sum(lengths), 1), 16) for lengths in (of_q, of_k))
    left, right = bounds
    problem = problem_of(
        q, k, q, k, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1],
        max_seqlen_q=max(of_q), max_seqlen_k=max(of_k), window_left=left, window_right=right,
    )[0]  # fmt: skip
    size = 64
    table = packed.new_table(problem, plans.plan_of(problem), size, rows)
    met = {}
    for sequence, (num_rows, num_keys) in enumerate(zip(of_q, of_k, strict=True)):
        pairs = torch.ones(num_rows, num_keys, dtype=torch.bool)
        place = torch.arange(num_rows)[:, None] + num_keys - num_rows
        if left is not None:
            pairs &= torch.arange(num_keys) >= place - left
        if right is not None:
            pairs &= torch.arange(num_keys) <= place + right
        for block, some in enumerate((pairs if rows else pairs.T).split(size)):
            if len(some):
                met[sequence, block] = int(some.any(0).sum())
    found = [tuple(entry) for entry in table.T.tolist()]
    assert sorted(found[: len(met)]) == sorted(met)
    assert all(sequence == -1 for sequence, _ in found[len(met) :])
    works = [met[entry] for entry in found[: len(met)]]
    # a whole block's keys are counted, of the last one of a sequence too
    assert all(a >= b - size for a, b in pairwise(works))


@inside
@pytest.mark.parametrize(
    ("clamp", "fill", "is_reached"),
    [
        (1e-30, None, False), (1e-3, None, True),
        # NOTE [Masked keys far below] in divergences/row_state.py
        (1e-30, -1e4, False), (1e-30, -3e38, False), (1e-30, -80.0, True),
    ],
)  # fmt: skip
def test_key_sum_says_whether_a_clamp_is_reached(
    clamp: float, fill: float | None, is_reached: bool
) -> None:
    """NOTE [Rows without a clamped key] in backward.py: even where P is 0 below it."""
    q, k = torch.randn(2, 1, 2, 40, 16).unbind(0)
    options: dict[str, Any] = {"functional": named("forward_kl", student_clamp=clamp).text}
    if fill is None:
        lowest = F.log_softmax(q @ k.mT, -1).amin(-1)
        assert ((lowest < math.log(clamp)) == is_reached).all()
    else:
        options |= {"mask": (torch.arange(40) < 30)[None, None, None], "mask_value": fill}
    for size in (0.5, 100.0):  # of the teacher's scores: the second leaves one key a row, P = 1
        problem = problem_of(q, k, size * q, k, **options)[0]
        _, stats = portable.forward(problem)
        assert ((stats.student_delta != -1.0) == is_reached).all()
        assert size == 0.5 or fill or (stats.student_delta + 1.0).abs().max() < 1e-4


@inside
@pytest.mark.filterwarnings("ignore:overflow")  # of the ratio that is not used then
def test_denominators_of_any_two_sizes() -> None:
    """As in test_attention_numerics.py; sums relative to a fixed base may be far apart."""
    from torch_streamkl.attention.hopper import split_kv as hopper_parts

    l_t, l_s, expected = denominators()
    n = len(l_t)
    problem = problem_of(*(torch.randn(1, 1, n, 16) for _ in range(4)), functional=KL)[0]
    plan = plan_of(problem)
    state = torch.zeros(1, NUM_STATE_FIELDS, n)
    state[0, 1], state[0, 3] = l_t, l_s
    value, stats = RowStatistics.allocate(problem)
    hopper_parts.combine_kernel[(1,)](
        state, n, state.numel(), 0, n, plan.outputs(value, stats),
        1, 1024, plan.form, plan.stage(problem, "forward").config,
    )  # fmt: skip
    check_denominators(value.flatten(), expected)


@inside
@pytest.mark.parametrize(("parts", "keys_of_part"), [(2, 32), (3, 16)])
@pytest.mark.parametrize(("divergence", "clamp"), [("forward_kl", 0.0), ("reverse_kl", 1e-7)])
def test_parts_of_rows_are_united(
    divergence: str, clamp: float, parts: int, keys_of_part: int
) -> None:  # fmt: skip
    """The kernel that ends the Hopper forward, on states that the portable kernel wrote.

    Rows below a clamp, and those that a part had doubts about, get NaN: computed again.
    """
    from torch_streamkl.attention.hopper import split_kv as hopper_parts
    from torch_streamkl.attention.triton import forward_splits
    from torch_streamkl.kernels.arguments import State

    q, k, q_t, k_t = (torch.randn(2, 3, n, 16) for n in (19, 37, 19, 37))
    functional = named(divergence, student_clamp=clamp, teacher_clamp=clamp)
    problem = problem_of(q, k, q_t, k_t, functional=functional.text)[0]
    plan = plan_of(problem)
    stage = plan.stage(problem, "forward")
    state = torch.empty(parts, NUM_STATE_FIELDS, 2, 3, 19)
    forward_splits.state_kernel[(stage.programs, parts)](
        *plan.arguments(problem), state, state.stride(1), state.stride(0), stage.num_blocks, 3,
        keys_of_part, plan.inv_temperature, plan.form, stage.config,
    )  # fmt: skip

    first_row, block = 29, 16
    last = state.flatten(2)[..., first_row:].contiguous()
    doubtful = 5
    last[-1, State._fields.index("l_t"), doubtful] = math.nan
    value, stats = RowStatistics.allocate(problem)
    for x in (value, stats.student, stats.teacher):
        x.fill_(-1.0)
    hopper_parts.combine_kernel[(-(-last.shape[2] // block),)](
        last, last.stride(1), last.stride(0), first_row, last.shape[2],
        plan.outputs(value, stats), parts, block, plan.form, stage.config,
    )  # fmt: skip

    log_s, log_t = (
        (a @ b.mT * problem.student.scale).double().log_softmax(-1)
        for a, b in ((q, k), (q_t, k_t))
    )
    own = log_t if divergence == "forward_kl" else log_s
    expected = (own.exp() * (own - (log_s if divergence == "forward_kl" else log_t))).sum(-1)
    below = (torch.minimum(log_s, log_t).amin(-1) < math.log(clamp)) if clamp else own[..., 0] > 0
    last_below = below.flatten()[first_row:]
    assert last_below.any() == bool(clamp) and not last_below.all()
    expected = expected.masked_fill(below, math.nan).flatten().float()
    expected[first_row + doubtful] = math.nan
    found = value.flatten()
    torch.testing.assert_close(found[first_row:], expected[first_row:], equal_nan=True)
    assert (found[:first_row] == -1).all()
    lse = torch.logsumexp((q @ k.mT * problem.student.scale).double(), -1).float()
    unit = heuristics.LSE_UNIT["triton"]
    torch.testing.assert_close(
        stats.student[0].flatten()[first_row:] * unit, lse.flatten()[first_row:]
    )


@inside
@pytest.mark.parametrize("made", ["strided", "expanded"])
def test_vectors_that_are_not_contiguous(made: str) -> None:
    """Kernels read lengths, slopes and sinks without strides."""
    inputs = [torch.randn(2, 2, n, 4) for n in (5, 6, 5, 6)]
    vectors = {
        "key_lengths": torch.tensor([5, 3]), "student_alibi_slopes": torch.tensor([0.5, 0.1]),
        "teacher_alibi_slopes": torch.tensor([0.2, 0.3]), "student_sink": torch.randn(2),
        "teacher_sink": torch.randn(2),
    }  # fmt: skip
    if made == "expanded":
        given = {name: x[:1].expand(2) for name, x in vectors.items()}
    else:
        given = {name: torch.stack([x, x + 100], -1)[:, 0] for name, x in vectors.items()}
    dense = {name: x.contiguous() for name, x in given.items()}
    outcomes = []
    for options in (given, dense):
        q, k = (x.clone().requires_grad_() for x in inputs[:2])
        value = attention_kl(q, k, *inputs[2:], **options, is_causal=True, impl="triton")
        outcomes.append([value, *torch.autograd.grad(value.sum(), (q, k))])
    for found, expected in zip(*outcomes, strict=True):
        assert torch.equal(found, expected)
