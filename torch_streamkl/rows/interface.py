"""Defines row_program(): custom streamed reductions over keys or the vocabulary.

A user's function is traced with symbolic elements (`trace.py`), differentiated (`derive.py`) and
run by the operator (`op.py`). What it computes from per-row values stays ordinary torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from torch_streamkl import checks, flop_counts
from torch_streamkl.caches import Bounded
from torch_streamkl.compiler_marks import disable
from torch_streamkl.double_backward import differentiable_once
from torch_streamkl.program.graph import Node
from torch_streamkl.program.steps import is_inside, row_value
from torch_streamkl.program.walks import rebuilt, walk, with_args
from torch_streamkl.registration import without_autocast
from torch_streamkl.rows import derive, op, reference, tensors, trace_cache
from torch_streamkl.rows.losses import RowLoss
from torch_streamkl.rows.problem import RowProblem
from torch_streamkl.rows.tensors import Columns, Inputs
from torch_streamkl.rows.trace import POSITIONS, Traced, Tracer, trace

REDUCTIONS = ("none", "sum", "mean")


# a graph break: Dynamo would trace the elements' recording instead of the tensors' code
@disable
def row_program(
    function: Callable[[Any], Any],
    *,
    dots: Mapping[str, tuple[Tensor, Tensor]],
    rows: Mapping[str, Tensor] | None = None,
    keys: Mapping[str, Tensor] | None = None,
    pairs: Mapping[str, Tensor] | None = None,
    columns: Mapping[str, Columns] | None = None,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: Literal["none", "sum", "mean"] = "none",
    impl: Literal["auto", "triton", "torch", "reference"] = "auto",
) -> Any:
    r"""Computes sums over keys, or the vocabulary, of your own pointwise function of dot products.

    You write the function as if the ``[seqlen_q, seqlen_k]`` scores or ``[tokens, vocab]`` logits
    were there. They are never materialized. The function is called once with symbolic elements.
    Its operations are recorded, differentiated, and run block by block. With x_ij the dot products
    of each pair of operands, it may compute

    .. math:: F_i = \sum_j f(x_{ij}, R_i), \quad R_i = \sum_j e(x_{ij})
        \ \text{or} \ \log \sum_j \exp e(x_{ij})

    where f and e are pointwise, and the per-row values R may be used by later sums. For example,

    .. code-block:: python

        def kl(e):
            p, s = (e.t * scale).log_softmax("key"), (e.s * scale).log_softmax("key")
            return (p.exp() * (p - s)).sum("key")

        row_program(kl, dots={"t": (teacher_q, teacher_k), "s": (student_q, student_k)})

    equals this naive code, with ``"key"`` for the last dimension and ``"head"`` for dimension 1:

    .. code-block:: python

        p = (teacher_q @ teacher_k.mT * scale).log_softmax(-1)
        s = (student_q @ student_k.mT * scale).log_softmax(-1)
        (p.exp() * (p - s)).sum(-1)

    Numerics, below, lists the intended differences to naive code.

    Args:
        function: takes one argument e, and returns a per-row value or a dict of them. The
            attributes of e are elements: the dot products and tensors by their names, such as
            ``e.t``. Also ``e.key_index`` and ``e.row_index``, the positions of key and query, from
            0 (for LM heads, ``e.row_index`` counts along the last of the leading dimensions).
            Elements support arithmetic, comparisons, ``& | ^ ~``, ``torch.where``,
            ``softmax("key")``, ``log_softmax("key")``, ``sum("head")``, ``mean("head")``, and the
            usual pointwise functions, as methods or from torch, with torch's type promotion.
            ``.sum("key")`` and ``.logsumexp("key")`` reduce elements to per-row values, which may
            be combined. ``.sum("key", block=size)`` sums each ``size`` consecutive keys. Return
            its value unchanged.
        dots: the two operands of each dot product, by name. For attention: ``[batch, heads,
            seqlen_q, head_dim]`` and ``[batch, kv_heads, seqlen_k, head_dim]``, where kv_heads
            divides heads. Two products may have different numbers of heads, if the function
            sums one over its heads before it combines them. For LM heads: ``[..., hidden_size]``
            and ``[vocab_size, hidden_size]``. All operands have one dtype (float16, bfloat16,
            float32 or float64), and any strides.
        rows: tensors with one element per row, such as labels and temperatures. They broadcast to
            ``[batch, heads, seqlen_q]``, or for LM heads to ``[...]``.
        keys: tensors with one element per key, such as weights or an LM head's bias. They
            broadcast to ``[batch, heads, seqlen_k]``, or have the shape ``[vocab_size]``.
        pairs: dense tensors, such as biases or cached probabilities. They broadcast to ``[batch,
            heads, seqlen_q, seqlen_k]`` and are not expanded, or have the shape ``[...,
            vocab_size]``.
        columns: ids of keys in each row, such as a cached top-k: ``[batch, heads, seqlen_q, k]``,
            where each of the first three may be 1, and then broadcasts; or exactly ``[..., k]``
            for LM heads. The element is True at the keys that are among the ids. For a pair
            ``(ids, values)`` of one shape, the element is the value of the key, and 0 at all other
            keys. The values of a repeated id are added. Ids outside of the keys, such as -1, are
            ignored.
        is_causal: True lets query i see the keys up to i + seqlen_k - seqlen_q. LM heads refuse
            this, ``window``, ``key_lengths`` and ``mask``.
        window: ``(left, right)``: query i sees the keys from i + seqlen_k - seqlen_q - left to i +
            seqlen_k - seqlen_q + right. None is no bound.
        key_lengths: ``[batch]``, the number of valid keys, from 0 to seqlen_k. On a CPU another
            number raises. A GPU takes the nearest of these, and does not wait.
        mask: boolean, broadcasts to ``[batch, 1, seqlen_q, seqlen_k]``, True for keys that take
            part. A mask that differs between heads goes into ``pairs`` and ``torch.where``.
        reduction: ``"none"``, or ``"sum"`` or ``"mean"`` over all rows of the one value that
            ``function`` returns. For LM heads, a reduction computes the gradients in the forward,
            and the logits once. It does not do so for float16 operands, or if a per-row tensor
            needs a gradient and is used after the last sum. To exclude rows, multiply by a mask
            from ``rows`` and divide the sum by their number.
        impl: ``"auto"``; ``"triton"``, kernels written for the program; ``"torch"``, plain torch
            with bounded memory; or ``"reference"``, the naive code. If a choice other than
            ``"auto"`` cannot run, the call raises.

    Returns:
        float32 (float64 for float64 operands) ``[batch, heads, seqlen_q]``, or ``[...]`` for LM
        heads; a dict of them if ``function`` returns a dict; a scalar with a reduction. Sums over
        blocks have a last dimension of ``ceil(keys / size)``. heads is 1 if every input has one
        head or is summed over its heads.

    Raises:
        ValueError, TypeError, NotImplementedError: before anything runs. The message names
            the unsupported operation, the tensor that does not fit, or the gradient that is not
            defined.

    Numerics:
        - Elements and sums are float32. Under autocast, operands are cast as those of a matmul
          are.
        - Excluded keys are in no sum. In a row without keys, sums are 0, log-sum-exps -inf, and
          gradients 0; torch's softmax is NaN there.
        - A product is 0 if one factor is 0, even if the other is infinite or NaN. So 0 log 0 is 0,
          with a gradient of 0.
        - ``log(softmax(x))`` is ``log_softmax(x)``, and does not underflow.
        - Otherwise, infinities, NaN, ties and the bounds of a clamp give torch's results. One
          exception: if torch's gradient is NaN for finite inputs, this gradient may be a number.
        - Gradients go to operands and captured float tensors that require one. If there is no row,
          a sum is 0 with gradients 0, and a mean is NaN. A second derivative raises.

    Source: the forward and backward rules are derived in `torch_streamkl/rows/derive.py`; the
    online log-sum-exp is FlashAttention's.
    """
    checks.one_of("impl", impl, op.IMPLEMENTATIONS)
    checks.one_of("reduction", reduction, REDUCTIONS)
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    inputs = tensors.normalised(
        Inputs(
            _by_name("dots", dots),
            _by_name("rows", rows),
            _by_name("keys", keys),
            _by_name("pairs", pairs),
            _by_name("columns", columns),
            key_lengths,
            mask,
        )
    )
    tracer = Tracer(
        inputs.dot_heads,
        inputs.captures,
        tensors.keys_of(inputs, is_causal, window),
        inputs.num_heads,
    )
    is_differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in inputs.tensors)
    constants = _constants(inputs) if is_differentiated else ()
    traced = _traced(function, inputs, tracer, constants)
    if reduction != "none" and traced.names is not None:
        raise ValueError(
            f"reduction={reduction!r} takes a function that returns one per-row value, got a dict "
            f"of {', '.join(traced.names)}; add them up in the function"
        )
    program = traced.program
    if reduction != "none" and program.has_blocks:
        raise ValueError(
            f"reduction={reduction!r} adds up per-row values, got sums over blocks of keys"
        )
    problem = RowProblem.of(program.text, inputs.tensors)
    if reduction != "none" and impl != "reference" and is_differentiated:
        loss = _loss(traced, problem, reduction)
        if loss is not None:
            checks.refuse_transforms("row_program")
            flop_counts.register()
            needs_grad = [x.requires_grad for x in inputs.tensors]
            arguments = (
                inputs.tensors,
                problem.captures,
                program.text,
                loss.text,
                needs_grad,
                impl,
            )
            total: Tensor = op.row_program_sum(*arguments)[0]
            return differentiable_once(total, inputs.tensors)
    if impl == "triton":
        op.check_kernels(problem, is_differentiated)
    if impl == "reference" or not problem.batch or not problem.num_rows:
        results = without_autocast(reference.forward, problem)
    else:
        if is_differentiated:  # whatever has no derivative is an error before anything runs
            derive.forward_plan(program, True)
        checks.refuse_transforms("row_program")
        flop_counts.register()
        every = op.row_program(inputs.tensors, program.text, is_differentiated, impl)
        results = [every[c] for c in program.outputs]
    of_number = dict(zip(program.outputs, results, strict=True))
    values = {x: of_number[c] for x, c in traced.numbers.items()}
    finished = reference.of_rows(problem, traced.roots, values)
    if inputs.row_shape is not None:
        finished = [x.reshape(*inputs.row_shape, *x.shape[3:]) for x in finished]
    names = traced.names
    if reduction != "none":
        return finished[0].sum() if reduction == "sum" else finished[0].mean()
    return finished[0] if names is None else dict(zip(names, finished, strict=True))


def _by_name(argument: str, given: object) -> dict[Any, Any]:
    """Returns an argument as a dict of tensors by name; raises if it is none."""
    if given is None and argument != "dots":
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{argument} must be a dict of tensors by name, got {type(given).__name__}"
        )
    return dict(given)


_known: Bounded[Traced] = Bounded()


def _traced(
    function: Callable[[Any], Any],
    inputs: tensors.Normalised,
    tracer: Tracer,
    constants: Container[str],
) -> Traced:
    """Traces a function into a program, or finds it in the cache if its trace cannot differ."""
    names = inputs.dot_names, inputs.capture_names
    rows = inputs.row_shape or ()
    seqlen = rows[-1] if len(rows) > 1 else None
    own = trace_cache.key_of(function, frozenset([*names[0], *names[1], *POSITIONS]))
    if own is None:
        return trace(function, *names, tracer, constants, seqlen)
    is_constant = [name in constants for each in names for name in each]
    metadata = tracer.dot_heads, tracer.captures, tracer.keys, *tracer.num_heads.items()
    key = (own, *metadata, *map(tuple, names), *is_constant, seqlen)
    found = _known.get(key)
    if found is None:
        found = _known[key] = trace(function, *names, tracer, constants, seqlen)
    return found


def _loss(traced: Traced, problem: RowProblem, reduction: str) -> RowLoss | None:
    """Returns what each row adds to a reduction, if it needs gradients of the program's values
    alone.
    """
    if not op.has_sum(problem):
        return None
    learned = tuple([x.requires_grad for x in problem.captures])
    return _loss_of(traced, reduction, problem.num_rows, learned)


@functools.lru_cache(maxsize=256)
def _loss_of(
    traced: Traced, reduction: str, num_rows: int, learned: tuple[bool, ...]
) -> RowLoss | None:
    """Builds that loss from a traced program; None if it uses a tensor that needs a gradient."""
    (root,) = traced.roots
    numbers = traced.numbers

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        return row_value(numbers[x], x.head) if x in numbers else with_args(x, args)

    if reduction == "mean":
        root = root * (1.0 / num_rows)
    if any(x.op == "capture" and learned[x.value] for x in walk([root], is_inside)):
        return None
    return RowLoss.of_node(rebuilt([root], change, is_inside)[root], is_literal=False)


def _constants(inputs: tensors.Normalised) -> set[str]:
    """Names dots and captured tensors that need no gradient, so that none is derived for them."""
    count = 2 * len(inputs.dot_names)
    pairs = zip(inputs.tensors[:count:2], inputs.tensors[1:count:2], strict=True)
    needs = [q.requires_grad or k.requires_grad for q, k in pairs]
    needs += [x.requires_grad for x in inputs.tensors[count:]]
    names = [*inputs.dot_names, *inputs.capture_names]
    # of ids and values the name is the values', which come last
    return {name for name, need in dict(zip(names, needs, strict=False)).items() if not need}
