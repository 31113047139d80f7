"""Says of an operation why it is not fused: the rewrite does not read it, or no operator has it.

An operation that the rewrite does not read may be one of `torch_streamkl.row_program`, or have
another spelling that is read.
"""

from __future__ import annotations

import re

import torch
from torch import fx

from torch_streamkl.fx_passes.capture.retrace import Trace, node_of
from torch_streamkl.fx_passes.fx_utils.nodes import ancestors, name_of
from torch_streamkl.fx_passes.fx_utils.op_names import LOG_SOFTMAXES, SOFTMAXES
from torch_streamkl.fx_passes.reading.registry import names_of_rules
from torch_streamkl.fx_passes.reading.rules import MODULES
from torch_streamkl.rows.functions import OPERATION_NAMES

_DISTANCE = "d = (a - b).abs() and torch.where(d < {0}, d * d / 2{1}, {2})"
SPELLINGS = {
    "hardtanh": "x.clamp(low, high)",
    "relu6": "x.clamp(0, 6)",
    "min": "torch.minimum(a, b)",
    "max": "torch.maximum(a, b)",
    "leaky_relu": "torch.where(x > 0, x, slope * x)",
    "silu": "x * x.sigmoid()",
    "log10": "x.log() / math.log(10)",
    "layer_norm": "(x - x.mean(-1, keepdim=True)) * (x.var(-1, correction=0, keepdim=True) + "
    "eps).rsqrt()",
    "logit": "x.log() - (1 - x).log()",
    "subtract": "a - b",
    "absolute": "x.abs()",
    "negative": "-x",
    "addcmul": "x + value * a * b",
    "addcdiv": "x + value * a / b",
    "special_entr": "-torch.xlogy(x, x)",
    "smooth_l1_loss": _DISTANCE.format("beta", " / beta", "d - beta / 2"),
    "huber_loss": _DISTANCE.format("delta", "", "delta * (d - delta / 2)"),
    "dist": "((a - b) ** 2).sum().sqrt()",
    "linalg_vector_norm": "(x * x).sum(-1).sqrt()",
    "norm": "(x * x).sum(-1).sqrt()",
    "linalg_vecdot": "(a * b).sum(-1)",
    "vecdot": "(a * b).sum(-1)",
    "binary_cross_entropy": "-(p * log(q) + (1 - p) * log(1 - q)) with logarithms clamped at -100",
    "poisson_nll_loss": "s.exp() - p * s",
}
OF_PROGRAMS = ": the rewrite does not read it here, torch_streamkl.row_program has it"
OF_THIS = ": the rewrite does not read it here"
OF_NOBODY = ", and no fused operator has it"
_OTHER = ": the rewrite reads it in another spelling, {}"
CLAUSES = re.compile("(?:, and no fused operator|: the rewrite ).*")
_ELSEWHERE = {  # of torch.nn.functional: what is made of several operations, or is read
    "softmax", "log_softmax", "cross_entropy", "nll_loss", "kl_div", "normalize", "pad", "linear",
    "one_hot", "embedding", "logsigmoid", "softsign", "dropout", "rms_norm",
    "scaled_dot_product_attention", "tanh", "sigmoid", "relu", "relu_", "glu", "bilinear",
    "tanhshrink", "gumbel_softmax", "softmin",
}  # fmt: skip
_OPERATORS = "_operator"  # Python's, of which torch's operation says more


def why_not(name: str) -> str:
    """Returns how a sentence "x is applied to scores" ends."""
    if name in SPELLINGS:
        return _OTHER.format(SPELLINGS[name])
    if name in OPERATION_NAMES:
        return OF_PROGRAMS
    return OF_THIS if _is_read(name) else OF_NOBODY


def is_unread(node: fx.Node) -> bool:
    """Whether the rewrite surely does not read a call of the user's: a function of few names."""
    name = name_of(node)
    if name in ("min", "max"):
        return isinstance((*node.args, None)[1], fx.Node)
    of_functional = name not in _ELSEWHERE and hasattr(torch.nn.functional, name)
    return name in SPELLINGS or (of_functional and not _is_read(name))


def as_pattern(names: object) -> str:
    """Returns a pattern of the reasons that name one of these operations."""
    return f"^(?:{'|'.join(sorted(names))}) of "  # type: ignore[call-overload]


def _is_read(name: str) -> bool:
    """Whether an operation has a rule."""
    assert MODULES  # which register them
    return name.strip("_") in names_of_rules()


def in_users_terms(reason: str, node: fx.Node, trace: Trace) -> str:
    """Returns a reason "operation of scores" with the user's operation, not a part of it.

    What is computed of a softmax is called probabilities.
    """
    inner, origin = name_of(node) if node.op == "call_function" else "", node_of(trace, node)
    what = reason.removeprefix(f"{inner} of ")
    if not inner or what == reason or origin is None:
        return reason
    name = inner
    if origin.op == "call_method" or getattr(origin.target, "__module__", "") != _OPERATORS:
        name = name_of(origin).split(".")[-1] if origin.op.startswith("call") else inner
    if name in ("min", "max") and not isinstance((*origin.args, None)[1], fx.Node):
        name = f"{name} over a dimension"
    if what == "scores" and any(
        a.op == "call_function" and name_of(a) in SOFTMAXES | LOG_SOFTMAXES
        for a in ancestors(node) - {node}
    ):
        what = "attention or vocabulary probabilities"
    return f"{name} of {what}"
