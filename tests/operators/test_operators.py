"""Every operator of the library under opcheck; fakes against real outputs on generated inputs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._pytree import tree_map_only

from tests.operators.test_attention_operator import arguments_of, operator_arguments
from tests.support.covering import only
from tests.support.problems import CASES
from tests.support.row_cases import CASES as CASES_OF_ROWS
from tests.support.row_cases import EXAMPLES, Sizes
from tests.support.strategies import specs
from tests.support.subgraphs import bodies_as_written  # noqa: F401  # a fixture
from torch_streamkl import bounds
from torch_streamkl.attention import ops
from torch_streamkl.attention.gradients_op import attention_kl_with_gradients
from torch_streamkl.attention_topk import ops as chosen_ops
from torch_streamkl.double_backward import double_backward_factor, once
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.program.divergences import DIVERGENCES, named
from torch_streamkl.program.steps import Step
from torch_streamkl.registration import NAMESPACE, WITHOUT_AUTOGRAD
from torch_streamkl.rows import op as rows_op
from torch_streamkl.rows.losses import RowLoss
from torch_streamkl.rows.problem import RowProblem
from torch_streamkl.rows.program import Program
from torch_streamkl.stored_gradients import scale_stored
from torch_streamkl.topk import log_probs
from torch_streamkl.topk import ops as topk_ops
from torch_streamkl.topk.logits import entry_logits, entry_logits_backward

ALL = [True, True, True, True]
Arguments = tuple[Any, ...]


def detached(args: Arguments) -> Arguments:
    return tuple(x.detach() if isinstance(x, Tensor) else x for x in args)


def backward_of(args: Arguments, wanted: list[bool]) -> Arguments:
    """Arguments of the backward of a forward call."""
    args = detached(args)
    value, student_stats, teacher_stats = ops.attention_kl(*args)
    return (torch.ones_like(value), student_stats, teacher_stats, wanted, *args)


def linear_arguments(seed: int = 0, labels: bool = True, bias: bool = True) -> Arguments:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    heads = (randn(4, 3), randn(7, 3), randn(4, 5), randn(7, 5))
    biases = (randn(7), randn(7)) if bias else (None, None)
    return (*heads, *biases, torch.tensor([0, 6, -100, 2]) if labels else None)


def adapters(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A second head of rank 2 for the student, and one of rank 1 for the teacher."""
    shapes = ((4, 2), (7, 2), (4, 1), (7, 1))
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return dict(zip(linear_ops.ADAPTER_NAMES, tensors, strict=True))


def linear_backward(
    args: Arguments, wanted: list[bool], adapted: dict[str, Tensor] | None = None
) -> Arguments:
    value, hard, statistics = linear_ops.linear_kl(*args, **(adapted or {}))
    hard_grad = torch.ones_like(hard) if args[6] is not None else None
    return (torch.ones_like(value), hard_grad, statistics, wanted, *args)


def example_arguments(name: str, sizes: Sizes = Sizes(1, 4, 3, 7, 3)) -> Arguments:  # noqa: B008
    """An example of docs/guide/row-programs.md as it calls the operator."""
    seen: list[Arguments] = []
    original = RowProblem.of

    def spy(text: str, tensors: Any) -> RowProblem:
        seen.append((list(tensors), text, True, "torch"))
        return original(text, tensors)

    with mock.patch.object(RowProblem, "of", spy):
        EXAMPLES[name](**CASES_OF_ROWS[name](sizes).tensors)
    return seen[0]


def without_gradients(args: Arguments) -> Arguments:
    tensors, *rest = args
    return [x.detach() for x in tensors], *rest


def example_backward(args: Arguments) -> Arguments:
    tensors, text, *_ = without_gradients(args)
    saved = rows_op.row_program(tensors, text, True, "torch")
    grad_of = list(Program.of(text).outputs)
    wanted = [x.is_floating_point() for x in tensors]
    grads = [torch.ones_like(saved[i]) for i in grad_of]
    return (grads, grad_of, saved, wanted, tensors, text, "torch")


def example_sum(args: Arguments, wanted: bool = True) -> Arguments:
    """The sum of a program's outputs times a tensor of rows."""
    tensors, text, *_ = args
    nodes: list[Step] = []
    for c in Program.of(text).outputs:
        count = len(nodes)
        more = Step("reduction", value=c), Step("capture"), Step("mul", (count, count + 1))
        nodes += [*more, Step("add", (count - 1, count + 2))] if count else more
    flags = [wanted and x.is_floating_point() for x in tensors]
    weights = [torch.rand(1, 1, tensors[0].shape[2])]
    return tensors, weights, text, RowLoss(tuple(nodes), True).text, flags, "torch"


def topk_arguments(tail: str) -> Arguments:
    """Tensors and options of `linear_topk`."""
    given = torch.randn(5, 8), torch.randn(31, 8), torch.randn(31)
    ids = torch.stack([torch.randperm(31)[:3] for _ in range(5)])
    log_probs = torch.randn(5, 31).log_softmax(-1).gather(1, ids)
    options = (named("js").text, tail, 2.0, 0.7, 3.0, 0, "auto", False, "", -1)
    return (*(x.requires_grad_() for x in given), ids, log_probs, *options)


def topk_backward(arguments: Arguments) -> Arguments:
    value, _, entry_grad, factors, _ = topk_ops.linear_topk(*detached(arguments))
    return torch.rand_like(value), entry_grad, factors, [True] * 3, *detached(arguments)


def chosen_arguments(has_heads: bool) -> Arguments:
    """Tensors and options of `attention_topk`; one head without weights has known log-sum-exps."""
    heads = 3 if has_heads else 1
    q, k = torch.randn(2, heads, 5, 8), torch.randn(2, 7, 8)
    weights = torch.rand(2, heads, 5).requires_grad_() if has_heads else None
    teacher = torch.randn(2, 4, 5, 6), torch.randn(2, 2, 7, 6)
    lse = None if has_heads else torch.randn(2, 4, 5)
    ranges = torch.tensor([0, 6], dtype=torch.int32)[:, None, None].expand(2, 2, 5).contiguous()
    learned = q.requires_grad_(), k.requires_grad_(), weights
    rest = *teacher, torch.randint(-1, 7, (2, 5, 4)), lse, ranges if has_heads else None
    return (*learned, *rest, 0.7, 0.3, "auto", False, False)


def chosen_backward(arguments: Arguments) -> Arguments:
    given = list(detached(arguments))
    value, stats, lse = chosen_ops.attention_topk(*given)
    given[chosen_ops.LSE] = lse if given[chosen_ops.LSE] is None else given[chosen_ops.LSE]
    return torch.rand_like(value), stats, [True, True, given[2] is not None], *given


LINEAR = linear_arguments()
ENTRIES: Arguments = (
    torch.randn(5, 8, requires_grad=True), torch.randn(31, 8, requires_grad=True),
    torch.randint(31, (5, 3)),
)  # fmt: skip
# weights of keys, sums over heads, columns of ids, their values, labels
VARIANTS_OF_ROWS = ("weighted_keys", "indexer", "top_k_with_ghost", "cached_top_k", "dkd")
OF_HEADS = VARIANTS_OF_ROWS[2:]
FUNCTIONALS = {
    **DIVERGENCES,
    "js": named("js").text,
    "clamped": named("forward_kl", student_clamp=1e-3).text,
}
NO_MORE: dict[str, Any] = {}
GQA = operator_arguments("gqa")[0]
SAMPLES: dict[str, tuple[Any, Arguments, dict[str, Any]]] = {
    **{
        f"attention_kl_backward {name}": (
            ops.attention_kl_backward, backward_of(operator_arguments(name)[0], ALL), NO_MORE,
        )
        for name in CASES
    },
    **{
        f"attention_kl {name}": (ops.attention_kl, operator_arguments(name)[0], NO_MORE)
        for name in ("gqa", *list(CASES)[::4])
    },
    "attention_kl_with_gradients": (
        attention_kl_with_gradients, (None, ALL, *detached(GQA)), NO_MORE,
    ),
    "attention_kl_with_gradients weighted": (
        attention_kl_with_gradients,
        (torch.rand(1, 4, 1), [True, False] * 2, *detached(GQA)), NO_MORE,
    ),
    "linear_kl plain": (linear_ops.linear_kl, linear_arguments(1, False, False), NO_MORE),
    "linear_kl of bfloat16": (
        linear_ops.linear_kl,
        tuple(x.bfloat16() if x is not None else x for x in linear_arguments(1, False)), NO_MORE,
    ),
    "linear_kl adapted": (linear_ops.linear_kl, LINEAR, adapters()),
    **{
        f"linear_kl {name}": (linear_ops.linear_kl, LINEAR, {"functional": text})
        for name, text in FUNCTIONALS.items()
    },
    "linear_kl_backward": (
        linear_ops.linear_kl_backward, linear_backward(LINEAR, [True] * 6), NO_MORE,
    ),
    "linear_kl_backward of the student": (
        linear_ops.linear_kl_backward, linear_backward(LINEAR, [True, True, *[False] * 4]),
        NO_MORE,
    ),
    "linear_kl_backward adapted": (
        linear_ops.linear_kl_backward, linear_backward(LINEAR, [True] * 10, adapters()),
        adapters(),
    ),
    "linear_kl_sum adapted": (
        linear_ops.linear_kl_sum, (*LINEAR, None, None, [True] * 10), adapters(),
    ),
    "linear_kl_sum": (linear_ops.linear_kl_sum, (*LINEAR, None, None, [True] * 6), NO_MORE),
    "linear_kl_sum weighted": (
        linear_ops.linear_kl_sum, (*LINEAR, torch.rand(4), torch.rand(4), [True] * 6), NO_MORE,
    ),
    "row_program_sum without gradients": (
        rows_op.row_program_sum,
        example_sum(without_gradients(example_arguments("dkd")), wanted=False), NO_MORE,
    ),
    **{
        f"{operator._schema.name.split('::')[1]} {name}": (
            operator, make(example_arguments(name)), NO_MORE
        )
        for operator, make, names in (
            (rows_op.row_program, lambda x: x, VARIANTS_OF_ROWS),
            (rows_op.row_program_backward, example_backward, VARIANTS_OF_ROWS),
            (rows_op.row_program_sum, example_sum, OF_HEADS),
        )
        for name in names
    },
    **{
        f"linear_topk {tail}": (topk_ops.linear_topk, topk_arguments(tail), NO_MORE)
        for tail in ("none", "bucket", "renormalize")
    },
    **{
        f"linear_topk_backward {tail}": (
            topk_ops.linear_topk_backward, topk_backward(topk_arguments(tail)), NO_MORE,
        )
        for tail in ("bucket", "renormalize")
    },
    "linear_topk_sum": (
        topk_ops.linear_topk_sum, (torch.rand(5), [True] * 3, *topk_arguments("bucket")), NO_MORE,
    ),
    **{
        f"{operator._schema.name.split('::')[1]} {'of heads' if has_heads else 'of one head'}": (
            operator, make(chosen_arguments(has_heads)), NO_MORE
        )
        for operator, make in (
            (chosen_ops.attention_topk, lambda x: x),
            (chosen_ops.attention_topk_backward, chosen_backward),
        )
        for has_heads in (True, False)
    },
    "entry_logits": (entry_logits, ENTRIES, NO_MORE),
    "entry_logits_backward": (
        entry_logits_backward, (torch.rand(5, 3), [True, True], *detached(ENTRIES)), NO_MORE,
    ),
    "entry_log_probs": (log_probs.entry_log_probs, (*ENTRIES, 0.7), NO_MORE),
    "entry_log_probs_backward": (
        log_probs.entry_log_probs_backward,
        (torch.rand(5, 3), torch.rand(2, 5), [True, True], *detached(ENTRIES), 0.7), NO_MORE,
    ),
    "entry_log_probs_with_gradients": (
        log_probs.entry_log_probs_with_gradients,
        (torch.rand(3), [True, True], *detached(ENTRIES), 0.7), NO_MORE,
    ),
    "checked_ids": (bounds.checked_ids, (torch.tensor([[0, 4, 2]]), 5, 1), NO_MORE),
    "once": (once, (torch.rand((), requires_grad=True), [torch.rand(3), torch.rand(0)]), NO_MORE),
    "scale_stored": (scale_stored, (torch.rand(3, 2), torch.rand(())), NO_MORE),
    "double_backward_factor": (
        double_backward_factor, (torch.rand(()), [torch.rand(3), torch.rand(0)]), NO_MORE,
    ),
}  # fmt: skip


def _of_each_operator() -> set[str]:
    """The first three samples of each."""
    names: dict[Any, list[str]] = {}
    for name, (operator, _, _) in SAMPLES.items():
        names.setdefault(operator, []).append(name)
    return {name for samples in names.values() for name in samples[:3]}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", only(_of_each_operator(), SAMPLES))
def test_opcheck(name: str) -> None:
    operator, args, kwargs = SAMPLES[name]
    opcheck(operator, args, kwargs)


OF_COMPILED_GRAPHS = ("attention_kl gqa", "attention_kl_backward gqa", "linear_kl plain",
                      "linear_kl_backward", "linear_kl_sum", "attention_kl_with_gradients",
                      "attention_kl_with_gradients weighted")  # fmt: skip


@pytest.mark.usefixtures("bodies_as_written")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", OF_COMPILED_GRAPHS)
def test_opcheck_without_autograd(name: str) -> None:
    operator, args, kwargs = SAMPLES[name]
    opcheck(WITHOUT_AUTOGRAD[operator], detached(args), kwargs)


def test_no_operator_is_left_out() -> None:
    schemas = torch._C._jit_get_all_schemas()
    registered = {s.name for s in schemas if s.name.startswith(f"{NAMESPACE}::")}
    sampled = {operator._schema.name for operator, _, _ in SAMPLES.values()}
    registered = {
        name
        for name in registered
        if not {"sharded", "ring"} & set(name.split("::")[1].split("_"))
    }  # test_sharded_operators
    sampled |= {WITHOUT_AUTOGRAD[operator]._schema.name for operator, _, _ in SAMPLES.values()}
    assert registered == sampled


def check_fake(operator: Any, args: Arguments, named: dict[str, Any] | None = None) -> None:
    """What the fake says of the outputs is what they are."""
    given = (args, named or {})
    real = operator(*args, **given[1])
    with FakeTensorMode() as mode:
        fakes, options = tree_map_only(Tensor, mode.from_tensor, given)
        told = operator(*fakes, **options)
    for x, y in zip(told, real, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            found, expected = ((z.shape, z.dtype, z.device, z.stride()) for z in (x, y))
            assert found == expected


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES = st.sampled_from([1, 2, 5, 17])


def test_fakes_of_attention() -> None:
    @given(specs(dtypes=DTYPES, sizes=SIZES), st.tuples(*[st.booleans()] * 4))
    @settings(max_examples=50)
    def any_call(spec: Any, wanted: tuple[bool, ...]) -> None:
        args = detached(arguments_of(spec))
        check_fake(ops.attention_kl, args)
        check_fake(ops.attention_kl_backward, backward_of(args, list(wanted)))

    any_call()


@pytest.mark.parametrize("num_tokens", [5, 0])
@pytest.mark.parametrize("tail", ["none", "bucket", "renormalize"])
def test_fakes_of_entries(tail: str, num_tokens: int) -> None:
    """Hidden states and weight with contiguous columns."""
    hidden, weight, bias, ids, log_probs, *options = detached(topk_arguments(tail))
    hidden, weight = (x.T.contiguous().T for x in (hidden[:num_tokens], weight))
    ids, log_probs = ids[:num_tokens], log_probs[:num_tokens]
    args = (hidden, weight, bias, ids, log_probs, *options)
    check_fake(topk_ops.linear_topk, args)
    check_fake(topk_ops.linear_topk_backward, topk_backward(args))
    check_fake(topk_ops.linear_topk_sum, (torch.rand(num_tokens), [True] * 3, *args))
    grad = torch.rand(ids.shape)
    check_fake(entry_logits_backward, (grad, [True, True], hidden, weight, ids))
