"""Defines row_program(): custom streamed reductions over keys or the vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_streamkl import checks, flop_counts
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
    reduction: str = "none",
    impl: str = "auto",
) -> Any:
    r"""Computes sums over keys, or the vocabulary, of a pointwise function of dot products.

    With x the dot products of each pair of operands, and per-row values that are themselves such
    sums or log-sum-exps,

    .. math:: F_i = \sum_j f(x_{ij}, R_i), \quad R_i = \sum_j e(x_{ij})
        \ \text{or} \ \log \sum_j \exp e(x_{ij})

    where f and e are whatever ``function`` computes. It is called once, with elements in place of
    tensors, and what it does is recorded, differentiated and run by blocks. So

    .. code-block:: python

        def kl(e):
            p, s = (e.t * scale).log_softmax("key"), (e.s * scale).log_softmax("key")
            return (p.exp() * (p - s)).sum("key")

        row_program(kl, dots={"t": (teacher_q, teacher_k), "s": (student_q, student_k)})

    computes what the same code computes on ``teacher_q @ teacher_k.mT`` and ``student_q @
    student_k.mT`` with -1 for ``"key"``, 1 for ``"head"`` and ``keepdim=True``, but for the three
    rules under Numerics: rows without keys, products with 0, and logarithms of probabilities.

    Args:
        function: takes elements by name (``e.t``) and returns one value of rows, or a dict of
            them: what ``.sum("key")`` and ``.logsumexp("key")`` give, and what is computed from
            that. ``.sum("key", block=size)`` gives the sum over each ``size`` consecutive keys
            (fewer in the last), and is returned as it is. Elements have arithmetic,
            comparisons, ``& | ^ ~``, ``torch.where``, ``softmax`` and ``log_softmax("key")``,
            ``sum`` and ``mean("head")``, and the usual pointwise functions as methods or of
            torch, with torch's arguments and type promotion; captured integers count as int64 and
            captured floats as the sums' dtype. ``e.key_index`` is the position of a key,
            ``e.row_index`` that of a query in its sequence, from 0: of LM heads along the last
            dimension of ``[...]``.
        dots: operands by name. Attention: ``[batch, heads, seqlen_q, head_dim]`` and ``[batch,
            kv_heads, seqlen_k, head_dim]`` where kv_heads divides heads; two dots may differ in
            heads if one is summed over them before they meet. LM heads: ``[..., hidden]`` and
            ``[vocab, hidden]``. One dtype, any strides.
        rows: tensors with one element per row, broadcastable to ``[batch, heads, seqlen_q]``, of
            LM heads ``[...]``: weights, labels, temperatures.
        keys: tensors with one element per key, ``[batch, heads, seqlen_k]`` with broadcasting, of
            LM heads ``[vocab]``: weights, an LM head's bias.
        pairs: dense tensors, ``[batch, heads, seqlen_q, seqlen_k]`` with broadcasting and not
            expanded, of LM heads ``[..., vocab]``: masks, biases, cached probabilities.
        columns: ids of keys in each row, ``[batch, heads, seqlen_q, k]`` or ``[..., k]``, as the
            condition whether a key is among them; or ``(ids, values)``, as the value of a key, 0
            at keys that are not among them and summed where an id is repeated. Ids outside the
            keys (-1, -100) belong to none.
        is_causal: query i sees keys up to i + seqlen_k - seqlen_q. This, ``window``,
            ``key_lengths`` and ``mask`` are of attention: LM heads refuse them.
        window: (left, right) keys around that position, None for no bound.
        key_lengths: ``[batch]``, the number of valid keys.
        mask: boolean, broadcastable to ``[batch, 1, seqlen_q, seqlen_k]``; True takes part. A
            mask for each head goes into ``pairs`` and ``torch.where``.
        reduction: ``"none"``; ``"sum"`` or ``"mean"`` over all rows of the one value that
            ``function`` returns. Of LM heads the gradients are then computed in the forward, from
            logits that are made once, and multiplied in the backward, where what ``function``
            computes from per-row values and needs a gradient are those values alone (and operands
            are not float16). Rows that do not count: multiply by a mask of ``rows``, and divide
            the sum by their number.
        impl: ``"auto"`` and ``"torch"`` (plain torch, bounded memory), ``"triton"`` (a GPU's
            kernels, written for the program) or ``"reference"`` (naive). A choice that cannot run
            raises.

    Returns:
        float32 (float64 for float64 operands) ``[batch, heads, seqlen_q]``, or of the shape of an
        LM head's rows; sums over blocks have ``ceil(keys / size)`` of them as a last dimension; a
        dict where ``function`` returns one. heads are those of what the value is computed from,
        whatever numbers it is multiplied by: 1 where that is sums over heads, and tensors with
        one head. A number with a reduction. A batch or sequence of length 0 gives no rows: a sum
        of 0 with gradients of 0, and a mean of NaN, as torch's.

    Raises:
        ValueError, TypeError, NotImplementedError: before anything runs: an operation that cannot
        be expressed, by name; tensors that do not fit; a gradient that is not defined.

    Numerics: elements and sums are float32. Keys that are not allowed take part in no sum; in a
    row without any, sums are 0, log-sum-exps -inf and gradients 0. A product is 0 where a factor
    is, also next to an infinity or NaN of a captured tensor, a quotient, a logarithm or a number:
    0 log 0 is 0, with its gradient. ``log(softmax(x))`` is ``log_softmax(x)``. Elsewhere
    infinities, NaN, ties and bounds are torch's; where torch's gradient is NaN next to inputs that
    are numbers, this one may be a number. Gradients go to the operands and to every captured
    tensor of numbers that requires one. Under autocast operands are cast as a matmul's are.
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
            f"reduction={reduction!r} takes a function that returns one value of rows, got a dict "
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
    values = dict(zip(traced.reductions, results, strict=True))
    finished = reference.of_rows(problem, traced.roots, values)
    if inputs.row_shape is not None:
        finished = [x.reshape(*inputs.row_shape, *x.shape[3:]) for x in finished]
    names = traced.names
    if reduction != "none":
        return finished[0].sum() if reduction == "sum" else finished[0].mean()
    return finished[0] if names is None else dict(zip(names, finished, strict=True))


def _by_name(argument: str, given: object) -> dict[Any, Any]:
    """The tensors of one argument."""
    if given is None and argument != "dots":
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{argument} must be a dict of tensors by name, got {type(given).__name__}"
        )
    return dict(given)


_known: dict[Any, Traced] = {}
MAX_KNOWN = 1024


def _traced(
    function: Callable[[Any], Any],
    inputs: tensors.Normalised,
    tracer: Tracer,
    constants: Container[str],
) -> Traced:
    """The program of a function, which is traced once where that is known to be enough."""
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
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        found = _known[key] = trace(function, *names, tracer, constants, seqlen)
    return found


def _loss(traced: Traced, problem: RowProblem, reduction: str) -> RowLoss | None:
    """Returns what each row adds, if gradients to the program's values are all that it needs."""
    if not op.has_sum(problem):
        return None
    learned = tuple([x.requires_grad for x in problem.captures])
    return _loss_of(traced, reduction, problem.num_rows, learned)


@functools.lru_cache(maxsize=256)
def _loss_of(
    traced: Traced, reduction: str, num_rows: int, learned: tuple[bool, ...]
) -> RowLoss | None:
    """Makes the loss of a traced program; None if a captured tensor in it needs a gradient."""
    (root,) = traced.roots
    numbers = dict(zip(traced.reductions, traced.program.outputs, strict=True))

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        return row_value(numbers[x], x.head) if x in numbers else with_args(x, args)

    if reduction == "mean":
        root = root * (1.0 / num_rows)
    if any(x.op == "capture" and learned[x.value] for x in walk([root], is_inside)):
        return None
    return RowLoss.of_node(rebuilt([root], change, is_inside)[root], is_literal=False)


def _constants(inputs: tensors.Normalised) -> set[str]:
    """Dots and captured tensors that need no gradient: no derivative is gathered for them."""
    count = 2 * len(inputs.dot_names)
    pairs = zip(inputs.tensors[:count:2], inputs.tensors[1:count:2], strict=True)
    needs = [q.requires_grad or k.requires_grad for q, k in pairs]
    needs += [x.requires_grad for x in inputs.tensors[count:]]
    names = [*inputs.dot_names, *inputs.capture_names]
    # of ids and values the name is the values', which come last
    return {name for name, need in dict(zip(names, needs, strict=False)).items() if not need}
