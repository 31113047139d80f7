"""What happened, in a sentence, for every reason of docs/reference/reasons.md."""

from __future__ import annotations

from tests.support.reason_examples import OF_DIVERGENCES

EVENTS = {
    "a graph break lies between the logits and the loss":
        "Dynamo ended the graph after the logits. No graph holds both matmuls and loss.",
    "only the logits or only the loss is in a checkpoint":
        "A checkpointed function holds the logits without the loss, or the loss without the "
        "logits.",
    "a hook on logits (register_hook)":
        "The hook reads the gradient of logits or scores, which a fused loss never computes.",
    "another operation than a matrix product makes the scores":
        "The scores are not the result of one matmul of two tensors.",
    "the loss is in a custom autograd.Function":
        "The rewrite does not see the operations inside of the autograd.Function.",
    "logits or probabilities are inputs of the compiled function":
        "Code outside of the compiled function has already materialized the logits.",
    "the divergence leaves the graph before it is summed over the keys":
        "The compiled function returns one value for each query and key, or for each token and "
        "vocabulary entry.",
    "the logarithm of a probability that may be 0 by underflow":
        "Eager code has -inf where a probability underflows. A fused loss computes the logarithm "
        "from the scores, and what follows may tell both apart.",
    "entries of a top-k of this graph, next to a value of as many (a bucket for the rest)":
        "Entries at ids of a top-k are joined with the probability of all others.",
    "a maximum over the parts of a stack, such as several teachers":
        "A maximum is taken over the dimension that torch.stack has made.",
    "a temperature that is computed from all logits":
        "A standard deviation, maximum or other value of all rows scales the scores of each row.",
    "a bias or gate that a matrix product of the same graph makes (an MLP of positions)":
        "Entries of another matmul, or a function of them, are added to scores or multiply them.",
    "a loss over rows: a relation of tokens, a norm of a whole map, averages of a column":
        "Probabilities are summed over tokens, queries or heads first, and then over the keys.",
    "a matrix product of probabilities (attention rollout, a map between vocabularies)":
        "A matmul multiplies probabilities by a matrix, and the loss compares the results.",
    "a mask selects entries of each row (all logits but the label's)":
        "A boolean mask over tokens and vocabulary entries makes one list of what it selects.",
    "a top-k is renormalized and scattered to a dense target":
        "The target has k probabilities of a row, divided by their sum, and zeros elsewhere.",
    "entries of rows are gathered by ids (a cached or served top-k)":
        "The loss reads a few entries of each row, and the graph cannot tell whether an id "
        "repeats.",
    "an entry of a row that a mask of large finite numbers may hide":
        "The loss reads single log-probabilities of masked rows. If a mask of -1e9 hides a whole "
        "row, its logsumexp has no digits left for the number of keys.",
    "argmax: a hard teacher":
        "The target is an argmax of the teacher, and no fused loss reads the same logits or "
        "these labels.",
    "sort, top-k, cumsum: whole rows in order":
        "The operation needs a whole row at once. A fused operator reads a row block by block.",
    "dropout changes probabilities":
        "Dropout is applied to the probabilities that the loss compares.",
    "double softmax":
        "The loss takes a softmax of probabilities.",
    "keys are masked after the softmax":
        "A mask changes probabilities or terms of the sum, instead of scores.",
    "weights that vary along the keys":
        "Terms of the sum over the keys are multiplied by weights that differ between keys.",
    "teacher and student are masked differently":
        "The two sides exclude different keys, or fill them with different values.",
    "an in-place write to scores":
        "An in-place operation modifies the scores.",
    "a target is filled in place (target[rows, ids] = p)":
        "The target distribution is written into a tensor in place.",
    "a sum over the keys is written as a product (einsum, @)":
        "One einsum or matmul multiplies two tensors and sums over the keys.",
    "a slice or column of the scores is overwritten":
        "An assignment such as x[..., i] = value modifies a part of the scores.",
    "a column or slice of scores or probabilities is returned, written to or viewed again":
        "The code reads how the elements of a part of the scores lie in memory.",
    "a tensor is modified in place":
        "An operand of the loss, or of a tensor that the loss reads, is modified in place.",
    "a bias or adapter needs a gradient":
        "A tensor that is added to scores or logits requires a gradient that the operator does "
        "not compute.",
    "scores are a sum of several products (adapters)":
        "Several matmuls are added up to the logits, or a factor per vocabulary entry multiplies "
        "them.",
    "a distribution is detached in one place and not in another":
        "The loss reads one distribution twice, once detached and once with its gradient.",
    "an operation that is read in another spelling (hardtanh, huber_loss, silu)":
        "The rewrite has no rule for this operation. It knows an equivalent one, which the reason "
        "names.",
    "an operation that row programs have and divergences have not (sin, relu, floor)":
        "`attention_kl` and `linear_kl` do not compute this operation, but row programs do.",
    "torch.vmap":
        "torch.vmap maps the function that computes the loss.",
    "a transform of torch.func":
        "torch.func or forward-mode AD differentiates the loss inside of the graph.",
    "the loss is in the body of a higher-order operator":
        "The loss is in a branch or a loop body, such as that of torch.cond.",
    "gradients are asked for inside of the compiled code":
        "The compiled code calls torch.autograd.grad or backward() itself.",
    "a plain tensor next to DTensors":
        "One input of the loss is a plain tensor, which may differ between ranks.",
    "a number next to whole tensors of ranks":
        "A number that only the run knows scales whole logits, and may differ between ranks.",
    "ranks add up parts of the softmax by hand (all_reduce)":
        "The code all-reduces the softmax sums of each rank's vocabulary entries.",
    "a DTensor would have to be gathered":
        "No operator computes the loss with the placements of these DTensors.",
    "ranks compile different graphs":
        "Ranks that share DTensors did not compile the same loss and options.",
    "a weight is a tensor subclass with operations of its own, as of torchao":
        "The product is several operations inside of the subclass, on tensors that are no values "
        "of the graph.",
    "a tensor subclass":
        "An input is a tensor subclass, whose operations may differ from those of a plain tensor.",
    "a size that the inputs do not have":
        "With dynamic shapes, the operator needs a number that is no sum or product of sizes, "
        "such as `max(n, 3)`.",
    "sizes are read from tensors (.item(), .tolist(), nonzero)":
        "A size depends on the values of a tensor.",
    "a Python number that changes between calls":
        "Dynamo saw a second value of the number, and made it an input of the graph.",
    "probabilities are padded to another vocabulary size":
        "Probabilities of a smaller vocabulary get further entries after the softmax.",
    "logits are padded to another vocabulary size":
        "The padded entries take part in the softmax.",
    "keys are sliced away after the softmax":
        "The loss reads only a slice of the probabilities along the keys.",
    "columns or slices of the scores are joined (cat, stack)":
        "Several columns or slices of the scores are put together to other keys, at uneven steps.",
    "scores are sliced, reshaped or flattened so that their axes mix":
        "After a slice or reshape, one dimension holds parts of several dimensions of the scores.",
    "the probabilities of both sides are averaged over heads":
        "The loss compares means over heads on both sides.",
    "NaN or infinity is read by the code after the loss":
        "Code such as nan_to_num or isnan reads the loss, and eager code may have NaN there.",
    "the scores are also read by other code":
        "Other code reads the scores, so they are materialized in any case.",
    "an entropy alone":
        "The loss is an entropy: it does not compare two distributions.",
    "an operation that no operator has":
        "Neither the rewrite nor `row_program` has this operation.",
    "scores or probabilities change their type":
        "Scores or probabilities are cast or rounded between the matmul and the sum.",
    "a softmax over heads, over several dimensions, or over other ones than the sum":
        "Softmax and sum are not over one and the same dimension of the matmul.",
    "infinite values or NaN are replaced by nan_to_num":
        "nan_to_num replaces values between the scores and the sum.",
    "masks, biases, paddings and factors in another order than operators apply them":
        "The operators apply scale, biases and mask in this order. Your code has another order.",
    "scores are multiplied by the number 0":
        "The Python number 0 multiplies the scores, so they do not depend on the inputs.",
    'streamkl.verify is "always", and the check cannot run':
        "The check cannot run, for example because a shape depends on data.",
    "another combination of operations":
        "The rewrite has a rule for each operation, but not for this combination.",
}  # fmt: skip

# examples that fuse unless the option `streamkl.row_programs` is False
FUSED_BY_DEFAULT = OF_DIVERGENCES - {"keys are sliced away after the softmax"}
BY_DEFAULT = " With the default `streamkl.row_programs=True`, the tested program fuses."


def events():
    """What the page says."""
    return {
        reason: text + BY_DEFAULT * (reason in FUSED_BY_DEFAULT) for reason, text in EVENTS.items()
    }
