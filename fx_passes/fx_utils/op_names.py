"""Lists operations by their names (`nodes.name_of`), in one place for all stages."""

from __future__ import annotations

MATMULS = {
    "matmul", "bmm", "mm", "einsum", "baddbmm", "addmm", "linear", "__matmul__", "__rmatmul__",
}  # fmt: skip
# of a network, besides its matmuls
LAYERS = {
    "embedding", "scaled_dot_product_attention", "multi_head_attention_forward", "layer_norm",
    "rms_norm", "group_norm", "batch_norm", "conv1d", "conv2d", "conv3d", "conv_transpose2d",
}  # fmt: skip
SOFTMAXES = {"softmax", "_softmax"}
LOG_SOFTMAXES = {"log_softmax", "_log_softmax", "logsumexp"}
OF_ROWS = {"softmax", "log_softmax", "logsumexp"}  # as users call them
PRODUCTS, QUOTIENTS = {"mul", "multiply"}, {"truediv", "div", "divide", "true_divide"}
DIFFERENCES = {"sub", "subtract"}
# views that keep the order of the elements, and such that do not
RESHAPES = {"reshape", "view", "unsqueeze", "squeeze", "flatten", "unflatten"}
PERMUTATIONS = {"transpose", "permute", "t"}
SWAPS = PERMUTATIONS | {"swapaxes", "swapdims"}
PARTS = {"getitem", "getattr", "chunk", "split"}
COPIES = {"contiguous", "clone"}
DTYPES = {"to", "float", "double", "half", "bfloat16"}
CASTS = DTYPES | {"_to_copy", "contiguous", "detach"}
OPERAND_VIEWS = (
    DTYPES | SWAPS | PARTS
    | {"contiguous", "unsqueeze", "expand", "reshape", "view", "repeat_interleave"}
)  # fmt: skip
# which need whole rows in order
STREAMED = "argmax"  # an operator finds it in one pass, next to what it computes
ORDERED = {"topk", "sort", "argsort", "kthvalue", "argmax", "argmin", "cumsum", "multinomial"}
