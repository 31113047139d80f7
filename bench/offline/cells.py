"""What bench/offline/matrix.py compiles: the cells of the matrix and the launches of each."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from bench.offline.compile import TARGETS, Launch, record_launches
from torch_streamkl.attention.ops import problem_of
from torch_streamkl.attention.problem import AttentionProblem, NeedsGrad, RowStatistics
from torch_streamkl.linear.problem import Head, LinearProblem, RowValues, RowWeights
from torch_streamkl.linear.problem import NeedsGrad as OfHeads
from torch_streamkl.program.divergences import DIVERGENCES, Functional, named
from torch_streamkl.rows.problem import RowProblem
from torch_streamkl.rows.tensors import Inputs, keys_of, normalised
from torch_streamkl.rows.trace import Tracer, trace

HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
}
VARIANTS = ("plain", "clamped", "js", "masks")
# of the kernels for Hopper, which are for sm_90 alone
HOPPER_VARIANTS = (*VARIANTS, "lengths", "window", "packed", "any order")
PADDING = "padding"  # a mask of keys, for the portable kernels of attention in two dtypes
EVERY_VARIANT = (*HOPPER_VARIANTS, PADDING)
# a head-averaged teacher has kernels of its own; few queries split keys over programs; LM heads,
# whole and as shards of the vocabulary, have rows of logits instead of a head_dim
OF_VOCAB = ("LM head", "row program of LM heads")
WORK = (
    "attention", "teacher", "few queries", "head mean", "hopper", "LM head",
    "row program", "row program of heads", "row program of LM heads",
)  # fmt: skip


@dataclass(frozen=True, order=True)
class Cell:
    """What is compiled together."""

    target: str
    work: str
    dtype: str
    head_dim: int
    variant: str


def can_run(cell: Cell) -> bool:
    """Whether our kernels take the cell's dtype on the target, and not as another one."""
    if cell.dtype == "tf32" and cell.target in ("gfx90a", "gfx950"):
        return False  # its products are those of fp32
    no_units = cell.dtype == "tf32" or (cell.dtype == "bf16" and cell.work not in OF_VOCAB)
    if cell.target == "sm_75" and (no_units or (cell.dtype == "fp16" and cell.head_dim > 128)):
        return False  # the blocked implementation runs it
    if cell.variant == PADDING:
        return cell.work == "attention" and cell.head_dim > 0 and cell.dtype in ("bf16", "fp32")
    if cell.work == "hopper":
        return (
            cell.target == "sm_90"
            and cell.dtype in ("bf16", "fp16")
            and cell.head_dim in (64, 80, 96, 128)
        )
    if cell.variant not in VARIANTS:
        return False
    if cell.work in OF_VOCAB and (cell.dtype == "tf32" or cell.head_dim > 0):
        return False
    if cell.work.startswith("row program"):
        return (cell.head_dim > 0 or cell.work in OF_VOCAB) and cell.variant in ("plain", "masks")
    if cell.work in OF_VOCAB:
        return True
    return cell.head_dim > 0 and (cell.work != "few queries" or cell.variant in ("plain", "js"))


def problem(cell: Cell) -> AttentionProblem:
    """A causal problem of 32 query heads and 8 key heads (32 averaged ones for "head mean")."""
    long = 4096 if cell.variant == "any order" else 1024  # small problems are summed in order
    seqlen_q, seqlen_k = (1, 8192) if cell.work == "few queries" else (long, long)
    head_mean = cell.work == "head mean"

    def empty(*shape: int, dtype: torch.dtype = DTYPES[cell.dtype]) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    heads = (1, 1, 32, 8) if head_mean else (32, 8, 32, 8)
    q, k, teacher_q, teacher_k = (
        empty(1, h, n, cell.head_dim) for h, n in zip(heads, (seqlen_q, seqlen_k) * 2, strict=True)
    )
    options: dict[str, Any] = {"window_right": 0}
    if cell.work == "hopper":
        options |= _hopper_options(cell, empty)
    elif cell.variant == PADDING:
        options = {"mask": empty(1, 1, 1, seqlen_k, dtype=torch.bool)}
    elif cell.variant == "masks":
        options["mask"] = empty(1, 1, seqlen_q, seqlen_k, dtype=torch.bool)
        for side, h in (("student", q.shape[1]), ("teacher", teacher_q.shape[1])):
            options[f"{side}_softcap"] = 30.0
            options[f"{side}_bias"] = empty(1, h, seqlen_q, seqlen_k, dtype=torch.float32)
    scale = cell.head_dim**-0.5
    return problem_of(
        q, k, teacher_q, teacher_k, functional=functional(cell), student_scale=scale,
        teacher_scale=scale, head_mean=head_mean, **options,
    )[0]  # fmt: skip


def _hopper_options(cell: Cell, empty: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """What a variant has next to causal rows; biases and softcaps it has not."""
    offsets = empty(5, dtype=torch.int32)
    options: dict[str, dict[str, Any]] = {
        "masks": {"mask": empty(1, 1, 1024, 1024, dtype=torch.bool)},
        "lengths": {"key_lengths": empty(1, dtype=torch.int32)},
        "window": {"window_left": 255},
        "any order": {"deterministic": False},
        "packed": {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        | {"max_seqlen_q": 1024, "max_seqlen_k": 1024},
    }
    return options.get(cell.variant, {})


def functional(cell: Cell) -> str:
    """The divergence of a variant."""
    if cell.variant == "clamped":
        return named("forward_kl", student_clamp=1e-12, teacher_clamp=1e-12).text
    return named("js").text if cell.variant == "js" else DIVERGENCES["forward_kl"]


def lm_head(cell: Cell) -> LinearProblem:
    """Rows of 152,064 vocabulary entries; with "masks" also labels, a temperature, biases and
    softcaps.
    """
    tokens, vocab, more = 512, 152064, cell.variant == "masks"

    def head(width: int) -> Head:
        hidden, weight = (
            torch.empty(n, width, dtype=DTYPES[cell.dtype], device="cuda") for n in (tokens, vocab)
        )
        bias = torch.empty(vocab, device="cuda") if more else None
        return Head(hidden, weight, bias, softcap=30.0 if more else 0.0)

    labels = torch.empty(tokens, dtype=torch.int64, device="cuda") if more else None
    temperature = 2.0 if more else 1.0
    kl = Functional.of(functional(cell))
    return LinearProblem(head(3584), head(5120), kl, temperature, labels)


def _launch_lm_head(cell: Cell) -> None:
    from torch_streamkl.linear.triton import launches as row_kernels
    from torch_streamkl.linear.triton import shards as shard_kernels

    p = lm_head(cell)
    logits = [torch.empty(512, 152064, dtype=DTYPES[cell.dtype], device="cuda") for _ in range(2)]
    each = torch.empty(512, device="cuda")
    weights = RowWeights(each, None if p.labels is None else each)
    out, both = RowValues.allocate(p), OfHeads(student_hidden=True, student_weight=True)
    row_kernels.values(p, *logits, out)
    row_kernels.values(p, *logits, out, weights, both)
    row_kernels.gradient(p, *logits, out, weights, both)
    if p.functional.bilinear is not None:
        shard_kernels.state(p, *logits, torch.empty(8, 512, device="cuda"))
        shard_kernels.merged(p, torch.empty(4, 8, 512, device="cuda"), 152064, out)
    else:
        shard_kernels.sums(p, *logits, out, torch.empty(3, 512, device="cuda"))


def _scores(e: Any, more: bool) -> Any:
    """The teacher's, with a mask and a bias of pairs where there is more."""
    return torch.where(e.hidden, -torch.inf, e.t + e.bias) if more else e.t


def _weighted(e: Any, more: bool) -> Any:
    """KL weighted by key."""
    p = _scores(e, more).softmax("key") * e.weight
    return (p * (p.log() - e.s.log_softmax("key"))).sum("key")


def _of_heads(e: Any, more: bool) -> Any:
    """An indexer's KL to the sum of the heads' probabilities."""
    p = _scores(e, more).softmax("key").sum("head") * (1 / 32)
    s = (e.w * e.s.relu()).sum("head")
    s = (s + e.bias if more else s).log_softmax("key")
    return (p * ((p + 1e-10).log() - s)).sum("key")


def _of_vocab(e: Any, more: bool) -> Any:
    """The log-probability of a label, the entropy, and a KL; or a KL over given columns."""
    if more:
        t = torch.where(e.top, e.t, -torch.inf).log_softmax("key")
        s = torch.where(e.top, e.s + e.bias, -torch.inf).log_softmax("key")
        return torch.where(e.top, t.exp() * (t - s), 0.0).sum("key")
    s, t = e.s.log_softmax("key"), e.t.log_softmax("key")
    label = torch.where(e.key_index == e.label, s, 0.0).sum("key")
    return label + (s.exp() * s).sum("key") + (t.exp() * (t - s)).sum("key")


class Sizes(NamedTuple):
    """Of the row programs' tensors."""

    rows: int = 1024
    keys: int = 1024
    heads: int = 32
    kv_heads: int = 8
    tokens: int = 512
    vocab: int = 152064
    width: int = 3584
    top: int = 64


def row_program_of(
    work: str, more: bool, head_dim: int, sizes: Sizes, empty: Callable[..., torch.Tensor]
) -> tuple[Callable[[Any], Any], dict[str, Any]]:
    """A function and its tensors; ``more`` adds dense ones or columns.

    ``empty(*shape, dtype=None)`` makes a tensor, without a dtype one of those that are multiplied.
    """
    n, m, heads, kv_heads, tokens, vocab, width, top = sizes
    f32, ids = torch.float32, torch.int64
    if work == "row program of LM heads":
        dots = {name: (empty(tokens, width), empty(vocab, width)) for name in ("s", "t")}
        function = partial(_of_vocab, more=more)
        if not more:
            return function, {"dots": dots, "rows": {"label": empty(tokens, dtype=ids)}}
        columns, keys = {"top": empty(tokens, top, dtype=ids)}, {"bias": empty(vocab, dtype=f32)}
        return function, {"dots": dots, "columns": columns, "keys": keys}
    q, k = empty(1, heads, n, head_dim), empty(1, kv_heads, m, head_dim)
    given: dict[str, Any] = {}
    if more:
        hidden = empty(1, 1, n, m, dtype=torch.bool)
        given["pairs"] = {"hidden": hidden, "bias": empty(1, 1, n, m, dtype=f32)}
    if work == "row program":
        given |= {"dots": {"s": (q, k), "t": (q, k)}}
        given |= {"keys": {"weight": empty(1, 1, m, dtype=f32)}}
        return partial(_weighted, more=more), given
    given |= {"dots": {"t": (q, k), "s": (q, empty(1, 1, m, head_dim))}}
    given |= {"rows": {"w": empty(1, heads, n, dtype=f32)}}
    return partial(_of_heads, more=more), given


def _launch_row_program(cell: Cell) -> None:
    from torch_streamkl.rows.triton import blocks as by_maps
    from torch_streamkl.rows.triton import launches as in_tiles

    def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or DTYPES[cell.dtype], device="meta")

    more = cell.variant == "masks"
    function, tensors = row_program_of(cell.work, more, cell.head_dim, Sizes(), empty)
    names = ("rows", "keys", "pairs", "columns")
    parts = [tensors.get(name, {}) for name in names]
    given = normalised(Inputs(tensors["dots"], *parts, None, None))
    is_causal = cell.work not in OF_VOCAB
    keys = keys_of(given, is_causal, (None, None))
    tracer = Tracer(given.dot_heads, given.captures, keys, given.num_heads)
    program = trace(function, given.dot_names, given.capture_names, tracer).program
    on_gpu = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        for x in given.tensors
    ]
    p = RowProblem.of(program.text, on_gpu)
    module: Any = next((x for x in (in_tiles, by_maps) if not x.why_unsupported(p, True)), None)
    if module is None:
        return  # plain torch computes it
    result = module.forward(p, True)
    grads = [torch.empty(p.row_shape(0), device="cuda") for _ in program.outputs]
    module.backward(p, result, grads, [True] * 4 + [False] * len(given.captures))


def launches_of(cell: Cell) -> list[Launch]:
    """What our launchers would run, the choice of tiles included."""
    from torch_streamkl.attention import head_mean_launches
    from torch_streamkl.attention.hopper import launches as hopper
    from torch_streamkl.attention.triton import launches as portable

    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if cell.dtype == "tf32" else "highest")
    try:
        with record_launches(cell.target) as launches:
            if cell.work == "LM head":
                _launch_lm_head(cell)
                return launches
            if cell.work.startswith("row program"):
                _launch_row_program(cell)
                return launches
            p = problem(cell)
            _, stats = RowStatistics.allocate(p)
            grad = torch.empty(p.student.q.shape[:3], device="cuda")
            student, teacher = (
                NeedsGrad(True, True, False, False),
                NeedsGrad(False, False, True, True),
            )
            module, has_forward, wanted = {
                "attention": (portable, True, student),
                "teacher": (portable, False, teacher),
                "few queries": (portable, True, None),
                "head mean": (head_mean_launches, True, NeedsGrad(True, True, True, True)),
                "hopper": (hopper, True, student),
            }[cell.work]
            if has_forward:
                module.forward(p)
            if wanted:
                module.backward(p, stats, grad, wanted)
    finally:
        torch.set_float32_matmul_precision(precision)
    return launches


def name_of(launch: Launch) -> str:
    """The kernel, whose side it is of where it takes either, what it writes of rows of logits."""
    student, config = launch.args.get("STUDENT"), launch.args.get("CONFIG")
    name = launch.kernel.__name__.removesuffix("_kernel")
    if name == "row":
        parts = {"values": config.VALUES, "gradient": config.STUDENT.GRAD}  # type: ignore[union-attr]
        return " ".join([name, *(part for part, is_there in parts.items() if is_there)])
    return name if student is None else f"{name} {'student' if student else 'teacher'}"


def tiles_of(launch: Launch) -> tuple[int, int, int, int]:
    """Rows and keys of a tile, warps and stages; 0 where a kernel has none."""
    config, options = launch.args.get("CONFIG"), launch.options
    config = config or getattr(launch.args.get("TASK"), "CONFIG", None)  # of Hopper's forward
    blocks = (getattr(config, name, launch.args.get(name, 0)) for name in ("BLOCK_M", "BLOCK_N"))
    return (*blocks, options["num_warps"], options.get("num_stages", 0))


def kernels_of(cell: Cell) -> dict[str, Launch]:
    """The different kernels of a cell by name; what has one name twice has numbers."""
    found: dict[str, Launch] = {}
    for launch in launches_of(cell):
        name = name_of(launch)
        alike = [x for n, x in found.items() if n.rstrip(" 23456789") == name]
        if not any(constants_of(x) == constants_of(launch) for x in alike):
            found[f"{name} {len(alike) + 1}" if alike else name] = launch
    return found


def constants_of(launch: Launch) -> tuple[Any, ...]:
    values = [launch.args[p.name] for p in launch.kernel.params if p.is_constexpr]
    return (launch.kernel, *values)


# What differs between two of these is no number that a kernel is compiled for (two targets have
# one set of instructions, 16 bits are 16 bits, and both head_dims are padded to 128): kernels take
# the same of a GPU, and tests/kernels/test_offline_matrix.py holds those that were compiled
# against it.
TWINS: dict[str, dict[Any, Any]] = {
    "target": {"sm_103": "sm_100", "sm_89": "sm_86"},
    "dtype": {"fp16": "bf16"},
    "head_dim": {96: 80},
}


def twin(cell: Cell) -> Cell:
    """The cell whose kernels say what this one's take; itself where it has to be compiled."""
    changed = {
        name: values[getattr(cell, name)]
        for name, values in TWINS.items()
        if getattr(cell, name) in values
        and can_run(replace(cell, **{name: values[getattr(cell, name)]}))
    }
    return replace(cell, **changed)


def cells(work: Sequence[str] = WORK, targets: Sequence[str] = tuple(TARGETS)) -> list[Cell]:
    """Shuffled, the same way each time: what was compiled when time ran out is a sample.

    Those with a twin come last.
    """
    every = [
        Cell(target, w, dtype, dim, variant)
        for w, variant, dim, dtype, target in itertools.product(
            WORK, EVERY_VARIANT, (0, *HEAD_DIMS), DTYPES, TARGETS
        )
    ]
    random.Random(0).shuffle(every)
    every.sort(key=lambda cell: twin(cell) != cell)
    return [c for c in every if can_run(c) and c.work in work and c.target in targets]
