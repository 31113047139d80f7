"""Maps every kind of reason to one hint that would make the loss fusable, and keeps its value.

`docs/reference/reasons.md` is this table. A hint never asks for another loss than the one that is
written. If only another one would fuse, the hint says so, or says what keeps the memory small.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch_streamkl.fx_passes.reporting.graph_breaks import (
    hint_for_several_processes,
    hints_about_breaks,
)
from torch_streamkl.fx_passes.reporting.operations import (
    SPELLINGS,
    as_pattern,
)
from torch_streamkl.rows.functions import OPERATION_NAMES

FORCE_SIZE = 'Force with {"streamkl.min_mib": 0}'
FORCE_CHECK = 'Force with {"streamkl.verify": "always"}'
ROW_PROGRAM = "torch_streamkl.row_program"
_OUTSIDE = "inputs of the compiled function|not made from scores in this graph|not made in this"
_YOUR_OWN = (
    f"{ROW_PROGRAM} computes sums over keys of your own functions (docs/guide/row-programs.md)"
)


@dataclass(frozen=True)
class Advice:
    """Maps a kind of reason, as a pattern of its text, to what to do."""

    reason: str  # as the docs show it
    pattern: str
    hint: str


ADVICE = (
    Advice(
        'streamkl.verify is "always", and the check cannot run',
        "^streamkl.verify is .always.",
        'set {"streamkl.verify": "auto"}: it fuses losses that cannot be checked, and the report '
        "says so",
    ),
    Advice(
        "a graph break lies between the logits and the loss",
        "graph break at ",
        "move the code that breaks the graph: after the loss, or before the matmuls",
    ),
    Advice(
        "only the logits or only the loss is in a checkpoint",
        "of the checkpoint (that|at)",
        "put the matmuls and the loss into the same checkpointed function, or both outside of it",
    ),
    Advice(
        "a hook on logits (register_hook)",
        "^register_hook|comes from register_hook",
        "register the hook on the hidden states, q or k instead, or write its effect into the "
        "loss: a fused loss has no gradient of logits or scores",
    ),
    Advice(
        "another operation than a matrix product makes the scores",
        "intermediate value of another|^einsum|no matrix product|that the rewrite does not read",
        "compute the scores by one matmul, and write softmax and sums over the last dimension. "
        "Between matmul and softmax, a fused loss may have a scale, softcap, mask or bias. Apply "
        "any other operation before the matmul or to the loss, if the value stays the same",
    ),
    Advice(
        "the loss is in a custom autograd.Function",
        "custom autograd.Function",
        "write the loss with torch operations, if autograd gives the gradient that you want",
    ),
    Advice(
        "logits or probabilities are inputs of the compiled function",
        _OUTSIDE,
        "compute hidden @ weight.T (or q @ k.mT) and the softmaxes of both sides inside of the "
        "compiled function",
    ),
    Advice(
        "the divergence leaves the graph before it is summed over the keys",
        "leaves the graph before it is summed",
        "sum over the keys (the last dimension) inside of the compiled function, and return "
        "per-row values or the loss",
    ),
    Advice(
        "the logarithm of a probability that may be 0 by underflow",
        "may underflow|next to its log-softmax",
        "if no probability is 0 by underflow, take logarithms by log_softmax in place of "
        "softmax(...).log(), powers by (a * log_softmax(...)).exp(), and give kl_div the "
        "log-softmax of its target with log_target=True: the same value",
    ),
    Advice(
        "a temperature that is computed from all logits",
        "^scores are scaled by what",
        "compute the temperature outside of the compiled function, or from the hidden states, q "
        "or k, and pass it as a tensor. One per row, such as a standard deviation or maximum over "
        "the last dimension, fuses as a row program",
    ),
    Advice(
        "a bias or gate that a matrix product of the same graph makes (an MLP of positions)",
        "^a (function|value) of another matrix product",
        "compute the bias or gate outside of the compiled function, and pass it as a tensor: its "
        "gradient flows",
    ),
    Advice(
        "a mask selects entries of each row (all logits but the label's)",
        "a mask selects single entries",
        "if every row keeps as many entries, fill the others before the softmax: "
        "logits.masked_fill(~mask, torch.finfo(logits.dtype).min) adds the same to a sum over the "
        "keys, and fuses. After the softmax, multiply by the mask instead",
    ),
    Advice(
        "a top-k is renormalized and scattered to a dense target",
        "probabilities are scattered",
        "sum over the k entries alone: (p * log_s.gather(-1, ids)).sum(-1) of the renormalized "
        "p of a top-k is the same sum, which fuses. So does (p * (p.log() - log_s.gather(-1, "
        "ids))).sum(-1), for a KL",
    ),
    Advice(
        "a column or slice of scores or probabilities is returned, written to or viewed again",
        "has strides",
        "read a copy of it, x[..., i].clone(): its elements lie next to each other, and not as "
        "far apart as the rows of scores that the loss does without",
    ),
    Advice(
        "entries of rows are gathered by ids (a cached or served top-k)",
        "^(gather|take_along_dim|index_select|index)\\b|single entries",
        f"if no row has an id twice, call {ROW_PROGRAM}(..., columns={{'ids': ids}}) "
        "(docs/guide/cached-teachers.md). Ids of a topk in the same graph fuse as they are. Whole "
        "rows may be selected, as in logits[mask]",
    ),
    Advice(
        "entries of a top-k of this graph, next to a value of as many (a bucket for the rest)",
        "(chosen|gathered) entries of rows (meet|are combined with) a tensor of as many",
        "torch_streamkl.linear_topk_kl(hidden, weight, ids, log_probs, tail='bucket') computes "
        "k entries and one for the rest. The loss as it is fuses if the teacher's ids and "
        "log-probabilities are inputs of the compiled function",
    ),
    Advice(
        "a maximum over the parts of a stack, such as several teachers",
        "along which nothing varies",
        "if the parts of a stack are compared, write torch.maximum(a, b): the same values",
    ),
    Advice(
        "an entry of a row that a mask of large finite numbers may hide",
        "a finite mask may hide",
        "if every row has a key that is not masked, mask with float('-inf') instead of a large "
        "number: the same value, which fuses",
    ),
    Advice(
        "argmax: a hard teacher",
        "^(argmax|argmin)\\b",
        "if these are labels, compute them outside of the compiled function, in chunks and under "
        "no_grad. Then pass them to cross_entropy, or as labels= to linear_kl",
    ),
    Advice(
        "sort, top-k, cumsum: whole rows in order",
        "^(sort|argsort|topk|kthvalue|argmax|argmin|cumsum|cumprod|logcumsumexp|msort|median"
        "|quantile|multinomial|the largest scores)\\b",
        "such a loss cannot be fused, because its operation needs whole rows. To save memory, "
        "select the rows that count before the matmul",
    ),
    Advice(
        "dropout changes probabilities",
        "^dropout|\\bdropout\\b",
        "if the dropout is not intended (a teacher in training mode), call eval() or set p=0. A "
        "loss on probabilities with dropout cannot be fused",
    ),
    Advice(
        "double softmax",
        "double softmax",
        "if the second softmax is not intended, take softmax and log_softmax of the scores",
    ),
    Advice(
        "keys are masked after the softmax",
        "applied after the softmax|after the softmax are",
        "if rows should sum to 1 over the remaining keys, mask the scores before the softmax. To "
        f"exclude whole rows, mask them after the sum. Otherwise use {ROW_PROGRAM}",
    ),
    Advice(
        "weights that vary along the keys",
        "vary along the keys multiply",
        f"{ROW_PROGRAM} takes such weights. Weights per batch, head or query fuse if they "
        "multiply the sum over the keys",
    ),
    Advice(
        "teacher and student are masked differently",
        "masked differently|masks that overlap|different values",
        "if both sides should see the same keys, use one mask and one fill value for both",
    ),
    Advice(
        "an in-place write to scores",
        "^in-place |^[\\w:.]+ writes .* in place|^\\w+_ of ",
        "use the out-of-place form, which gives the same values: t = t + m, masked_fill instead "
        "of masked_fill_, torch.where instead of t[mask] = x",
    ),
    Advice(
        "a target is filled in place (target[rows, ids] = p)",
        "wrote in place",
        "create it out of place: torch.zeros(...).scatter(-1, ids, p)",
    ),
    Advice(
        "a sum over the keys is written as a product (einsum, @)",
        "sum over the keys is written as a matrix product",
        "write (a * b).sum(-1), or (a * b).sum() over rows as well: the same value",
    ),
    Advice(
        "a slice or column of the scores is overwritten",
        "setitem at",
        "write it out of place: torch.where(mask, value, x) or x.masked_fill(mask, value) instead "
        "of x[..., i] = value",
    ),
    Advice(
        "a tensor is modified in place",
        "modified in place|written in place|overwritten|is written to",
        "write to a new tensor (x = x * a + b instead of x.mul_(a).add_(b)), or after backward(). "
        "A fused operator reads its inputs again in the backward, except for an LM-head loss that "
        "is one weighted sum of rows: an EMA teacher may be updated after that sum",
    ),
    Advice(
        "a bias or adapter needs a gradient",
        "needs a gradient",
        "detach the bias if it is a constant. If it belongs to an adapter of the LM head, use "
        "plain LoRA in the dtype of the head (autocast, or autocast_adapter_dtype=False), or put "
        "the adapter on other modules",
    ),
    Advice(
        "scores are a sum of several products (adapters)",
        "sum of products|multiplies the scores varies along the keys",
        "an LM head fuses with one LoRA adapter. Put further adapters on other modules, and DoRA, "
        "which has a magnitude per vocabulary entry",
    ),
    Advice(
        "a distribution is detached in one place and not in another",
        "detached in one place",
        "detach the distribution once, and use the detached tensor wherever you want no gradient",
    ),
    Advice(
        "an operation that is read in another spelling (hardtanh, huber_loss, silu)",
        as_pattern(SPELLINGS) + "|reads it in another spelling",
        "write it as the reason says: the same value",
    ),
    Advice(
        "an operation that row programs have and divergences have not (sin, relu, floor)",
        as_pattern(OPERATION_NAMES) + "|row_program has it$",
        _YOUR_OWN,
    ),
    Advice(
        "torch.vmap",
        "torch.vmap",
        "call the function on tensors with a batch dimension, without torch.vmap",
    ),
    Advice(
        "a transform of torch.func",
        "transform of torch.func|forward mode",
        "compile the loss alone, and differentiate it with backward()",
    ),
    Advice(
        "the loss is in the body of a higher-order operator",
        "in the body of",
        "return q and k, or the hidden states, from the body. Compute the loss outside of it",
    ),
    Advice(
        "gradients are asked for inside of the compiled code",
        "asks for gradients",
        "call backward() outside of the compiled function",
    ),
    Advice(
        "a plain tensor next to DTensors",
        "plain tensor next to DTensors",
        "if every rank has the same tensor, pass DTensor.from_local(x, mesh, [Replicate()])",
    ),
    Advice(
        "a number next to whole tensors of ranks",
        "is a number next to plain tensors",
        "multiply the DTensor by it, before full_tensor() or to_local()",
    ),
    Advice(
        "ranks add up parts of the softmax by hand (all_reduce)",
        "ranks add up",
        "call linear_kl(..., group=tp_group) with each rank's vocabulary shard: ranks exchange 24 "
        "bytes a token. Or write the loss on logits that are DTensors",
    ),
    Advice(
        "a DTensor would have to be gathered",
        "would gather it",
        "redistribute the tensor once, before the loss, to a placement of "
        "docs/reference/several-gpus.md",
    ),
    Advice(
        "ranks compile different graphs",
        "compiles another graph",
        "compile the same loss with the same options on all ranks that share DTensors",
    ),
    Advice(
        "a weight is a tensor subclass with operations of its own, as of torchao",
        "computed by a tensor subclass",
        "if it holds a quantized weight, torch.nn.functional.linear(hidden, weight.dequantize()) "
        "fuses; activations that it would quantize too stay as they are",
    ),
    Advice(
        "a tensor subclass",
        "tensor subclass",
        "pass plain tensors to the loss, such as the local tensors of a DTensor",
    ),
    Advice(
        "a size that the inputs do not have",
        "of unknown size|is not the size of any input",
        "keep that dimension static: dynamic=False, or torch._dynamo.mark_static",
    ),
    Advice(
        "sizes are read from tensors (.item(), .tolist(), nonzero)",
        "are read from tensors",
        "keep the padded sizes, and mask the positions beyond the lengths. Of entries that a "
        "fixed mask selects, such as a draft's vocabulary, compute the positions outside of the "
        "compiled function, ids = mask.nonzero()[:, 0], and index by ids",
    ),
    Advice(
        "a Python number that changes between calls",
        "a Python number that changes",
        "pass it as a tensor, torch.tensor(x). Or set torch._dynamo.config.specialize_float = "
        "True, which recompiles for each value",
    ),
    Advice(
        "probabilities are padded to another vocabulary size",
        "probabilities are padded",
        "if they are padded with zeros, pad the scores instead, with torch.finfo(dtype).min: "
        "their softmax is 0 there, and the loss fuses",
    ),
    Advice(
        "logits are padded to another vocabulary size",
        "padded to another|are padded with",
        "if the added entries should have probability 0, pad with float('-inf'). If you do not "
        "need them, drop the extra rows of the larger LM head instead",
    ),
    Advice(
        "keys are sliced away after the softmax",
        "only some of the keys|keys are selected",
        "multiply by a 0/1 weight per key instead of slicing: the same sum, which fuses as a row "
        "program",
    ),
    Advice(
        "columns or slices of the scores are joined (cat, stack)",
        "parts of the scores are joined",
        "index the scores once with a list of the columns, as in logits[:, [5, 9, 11]]: the same "
        "values, which fuse",
    ),
    Advice(
        "scores are sliced, reshaped or flattened so that their axes mix",
        "sliced|mixes the axes|flattened|another shape",
        "slice or reshape the hidden states, q or k before the matmul: the same scores",
    ),
    Advice(
        "the probabilities of both sides are averaged over heads",
        "probabilities of both sides are averaged",
        "streamkl.row_programs=True (the default) fuses it as a row program. Without it, only the "
        "mean over the heads of one side fuses",
    ),
    Advice(
        "NaN or infinity is read by the code after the loss",
        "and eager has|eager code has NaN",
        "return the per-row values, and run this operation on them outside of the compiled "
        "function: a fused sum may be a number where eager code has NaN",
    ),
    Advice(
        "the scores are also read by other code",
        "are also read by",
        "remove that reader (a metric, a returned tensor), or compute it outside of the step",
    ),
    Advice(
        "an entropy alone",
        "is an entropy",
        "streamkl.row_programs=True (the default) fuses it as a row program. Without it, an "
        "entropy fuses only together with a cross-entropy",
    ),
    Advice(
        "an operation that no operator has",
        "of scores$|of attention or vocabulary probabilities$|operator has it$|read it here$",
        "write the same value with operations of row_program (docs/reference/row-programs.md), if "
        "there is a way. Otherwise the loss stays unfused",
    ),
    Advice(
        "scores or probabilities change their type",
        "(are|is) (cast|rounded) to|become float64|narrower type",
        "keep scores and probabilities in the dtype of the matmul. Convert q, k or the hidden "
        "states before it, or the per-row values after the sum. A LoRA adapter of the head needs "
        "the head's dtype (autocast, or PEFT's autocast_adapter_dtype=False). If you want the "
        "rounding, the loss stays unfused",
    ),
    Advice(
        "a softmax over heads, over several dimensions, or over other ones than the sum",
        "softmax(es)? over|softmax is over|over different (dimensions|axes)",
        "take softmax and sum over one dimension of the matmul, the same for both sides. For a "
        "softmax over queries, swap the operands: k @ q.mT. A softmax over heads or over several "
        "dimensions cannot be fused",
    ),
    Advice(
        "infinite values or NaN are replaced by nan_to_num",
        "(infinite|NaN)( scores)? are replaced",
        "mask both sides with torch.finfo(dtype).min instead of -inf, and remove nan_to_num: "
        "nothing is infinite then, and masked keys add 0",
    ),
    Advice(
        "masks, biases, paddings and factors in another order than operators apply them",
        "mask|padded|bias|filled|infinite|softcap",
        "scale first, and mask last, directly before the softmax, with a boolean mask and one "
        f"fill value. If this changes the value, use {ROW_PROGRAM} (docs/guide/row-programs.md)",
    ),
    Advice(
        "scores are multiplied by the number 0",
        "multiplied by 0$",
        "pass the factor as a tensor, torch.tensor(0.0): the same value",
    ),
    Advice(
        "a loss over rows: a relation of tokens, a norm of a whole map, averages of a column",
        "comes before the sum over the keys",
        "if a value of each row is meant, compute it over the last dimension alone. What compares "
        "sums over rows, such as the values of one class in all tokens, cannot be fused",
    ),
    Advice(
        "a matrix product of probabilities (attention rollout, a map between vocabularies)",
        "^a matrix product of probabilities",
        "such a loss cannot be fused, because each entry of the product needs whole rows and "
        "columns. Where an attention is meant, multiply one after the other: a @ (b @ v)",
    ),
    Advice(
        "another combination of operations",
        r"^(?!the check|rank \d|.*DTensor|.*mesh|.*analysis failed|streamkl)",
        f"docs/reference/supported.md lists what fuses; {_YOUR_OWN}",
    ),
)


def advice_for(reason: str) -> Advice | None:
    """Returns the row of the table that a reason belongs to."""
    return next((x for x in ADVICE if re.search(x.pattern, reason)), None)


def hint_for(reason: str) -> str:
    """Returns advice in the user's terms, or an empty text."""
    found = advice_for(reason)
    hint = found.hint if found is not None else ""
    is_outside = bool(re.search(f"{_OUTSIDE}|graph break", reason))
    if is_outside or "leaves the graph" in reason:
        hint = "; ".join([hint, *hints_about_breaks(reason)])
    return hint + hint_for_several_processes() * is_outside
