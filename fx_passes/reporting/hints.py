"""What would make a site fusable, for the common reasons why it was not."""

from __future__ import annotations

import re

import torch

from torch_streamkl.fx_passes.capture.settings import MENDS_NESTED_BREAKS
from torch_streamkl.fx_passes.fx_utils.torch_names import counters

_ELSEWHERE = "not made from scores in this graph|not made in this graph"
_SEVERAL_PROCESSES = (
    "; fully_shard breaks graphs at every module that it is applied to: compile "
    "torch_streamkl.distributed.trace_fully_shard(model), or apply it to the outermost module "
    "alone; for logits it is enough that both bodies run before both LM heads, which that "
    'alone shards; DistributedDataParallel splits them, but for backend="streamkl" or with '
    "torch._dynamo.config.optimize_ddp = False"
)
_REMEDIES = (
    (
        _ELSEWHERE,
        "compute the scores and softmaxes of both sides in the compiled function of the KL",
    ),
    (
        "leaves the graph before it is summed",
        "sum over the keys in the compiled function and return row values or the loss",
    ),
    ("^dropout", "take the KL on the probabilities before their dropout, or set its p to 0"),
    ("double softmax", "take softmax and log_softmax of the scores, not of probabilities"),
    (
        "applied after the softmax|after the softmax are",
        "mask the scores before the softmax, and whole rows after the sum over keys",
    ),
    (
        "vary along the keys",
        "weights may vary over batch, heads and queries: multiply the row values after the sum",
    ),
    ("masked differently", "apply the same mask to teacher and student"),
    ("different values", "mask teacher and student with the same value, -inf where possible"),
    (
        "modified in place",
        "write to a copy, or take the KL after the write: a fused operator reads its inputs again "
        "in the backward, but for an LM head whose loss is one weighted sum of rows; a teacher "
        "that follows its student is updated behind that sum, or behind backward()",
    ),
    (
        "needs a gradient",
        "detach the bias if it is a constant; where an adapter of the LM head trains it, make it "
        "plain LoRA of the type of the head (autocast, or autocast_adapter_dtype=False), or put "
        "the adapter on other modules",
    ),
    (
        "sum of products|multiplies the scores varies along the keys",
        "one LoRA adapter of an LM head fuses; several at a time, or a magnitude per word as of "
        "DoRA, do not: put them on other modules",
    ),
    (
        "detached in one place",
        "detach the distribution once and use that tensor wherever no gradient is wanted",
    ),
    ("torch.vmap", "call the function with a batch dimension instead of mapping it"),
    ("transform of torch.func", "compile the loss and differentiate it with backward()"),
    ("in the body of", "take the KL outside of it, of what the body returns"),
    ("asks for gradients", "call backward() outside of the compiled function"),
    (
        "plain tensor beside DTensors",
        "DTensor.from_local(x, mesh, [Replicate()]) says that every rank has the same",
    ),
    (
        "ranks add up",
        "linear_kl(..., group=tp_group) takes the words that each rank has, and ranks exchange 24 "
        "bytes a token; or write the loss on logits that are DTensors",
    ),
    ("would gather it", "cut or place the tensor once, before the loss"),
    ("compiles another graph", "ranks that share DTensors must compile the same loss and options"),
    ("tensor subclass", "take the KL of plain tensors, such as the local parts of a DTensor"),
    (
        "of unknown size|is not the size of any input",
        "keep that dimension static: dynamic=False, or torch._dynamo.mark_static",
    ),
    (
        "are read from tensors",
        "keep the sizes that tensors have, and mask what is beyond the lengths",
    ),
    (
        "class weights, label smoothing",
        "write the loss as -(p * logits.log_softmax(-1)).sum(-1), with weights per row",
    ),
    ("padded to another", "drop the extra rows of the larger LM head instead of padding logits"),
    (
        "single entries|gathered by index|composite operation",
        "select whole rows, logits[mask] or logits[positions], by tensors; keys are left out by a "
        "mask of -inf",
    ),
    ("only some of the keys|keys are selected", "mask the other keys with -inf"),
    (
        "rows are selected of",
        "select rows of the logits themselves, in the order that the hidden states have",
    ),
    ("student's probabilities are averaged", "average the teacher's heads only"),
    (
        "of scores$|of attention or vocabulary probabilities$",
        "apply it to q or k before the scores, or to the row values after the sum over keys",
    ),
    ("is an entropy", "an entropy alone stays as it is; together with a cross-entropy it fuses"),
)


# What broke graphs, in Dynamo's words, and what keeps them whole.
_BREAKS = (
    (
        "requires_grad_",
        "requires_grad_() of an intermediate tensor breaks the graph: where "
        "enable_input_require_grads() calls it, checkpointing with use_reentrant=False does not "
        "need it: model.disable_input_require_grads()",
    ),
    (
        "torchao",
        "DoRA's layers of PEFT break the graph, and a magnitude per word of an LM head is no part "
        "of the operators: LoraConfig(use_dora=False) for the LM head",
    ),
    (
        "capture_dynamic_output_shape_ops|[Dd]ynamic shape operator",
        "rows that a mask selects break the graph: torch_streamkl.enable(), or "
        "torch._dynamo.config.capture_dynamic_output_shape_ops = True, keeps them in it",
    ),
    (
        "use_cache=True",
        "a warning of transformers breaks the graph: model.config.use_cache = False",
    ),
)
_ANY_BREAK = (
    "TORCH_LOGS=graph_breaks shows what splits it, and for a break inside of a called function "
    + "torch_streamkl.enable(), or " * MENDS_NESTED_BREAKS
    + "torch._dynamo.config.nested_graph_breaks = True, keeps its caller's part together"
)


def remedy_for(reason: str) -> str:
    """Advice in the user's terms, empty where there is none."""
    advice = next((text for pattern, text in _REMEDIES if re.search(pattern, reason)), "")
    if re.search(f"{_ELSEWHERE}|leaves the graph", reason):
        advice = "; ".join([advice, *_about_breaks()])
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return advice + _SEVERAL_PROCESSES * (distributed and bool(re.search(_ELSEWHERE, reason)))


def _about_breaks() -> list[str]:
    """What to do about the graph breaks that there were, if there were any."""
    breaks = "\n".join(counters["graph_break"])
    if not breaks:
        return []
    return [text for pattern, text in _BREAKS if re.search(pattern, breaks)] + [_ANY_BREAK]
