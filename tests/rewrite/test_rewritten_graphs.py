# ruff: noqa: E501
"""What the rewrite leaves of the main forms, as graphs: each snapshot is the whole program."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import fx

from tests.rewrite.test_rewrite_forms import hidden_inputs
from tests.support.programs import Program
from torch_streamkl.fx_passes.pipeline import rewrite


def rewritten(fn, inputs):
    """One line per node of the rewritten graph."""
    graphs = []

    def backend(gm, _):
        report = rewrite(gm)
        assert not report.failures
        graphs.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*inputs)
    (graph,) = graphs
    return "\n".join(_line(n) for n in graph.nodes if n.op not in ("placeholder",))


def _line(node):
    arguments = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
    target = (
        node.target
        if isinstance(node.target, str)
        else getattr(node.target, "__name__", str(node.target))
    )
    if node.op == "output":
        return f"return {_text(node.args[0])}"
    return f"{node.name} = {target}({', '.join(arguments)})"


def _text(x):
    if isinstance(x, fx.Node):
        return x.name.removeprefix("l_").rstrip("_")
    if isinstance(x, (tuple, list)):
        return "(" + ", ".join(_text(v) for v in x) + ")"
    return f"{x:.4g}" if isinstance(x, float) else str(x)


class Snapshots(TestCase):
    def test_writes_by_an_expanded_mask(self):
        """Without the masks, which are made of both probabilities."""

        def program(h, w, t, v):
            teacher, student = (
                torch.distributions.Categorical(logits=a @ b.mT) for a, b in ((t, v), (h, w))
            )
            return torch.distributions.kl_divergence(teacher, student)

        inputs = [torch.randn(n, 4) for n in (5, 7, 5, 7)]
        self.assertExpectedInline(
            rewritten(program, inputs),
            """\
linear_kl_default = linear_kl.default(h, w, t, v, student_scale=1, teacher_scale=1)
getitem = getitem(linear_kl_default, 0)
return (getitem)""",
        )

    def test_forward_kl(self):
        program = Program()
        self.assertExpectedInline(
            rewritten(program, program.inputs()),
            """\
attention_kl_default = attention_kl.default(args_0, args_1, args_2, args_3, teacher_scale=0.3536, student_scale=0.3536)
getitem = getitem(attention_kl_default, 0)
loss = mean(getitem)
return (loss)""",
        )

    def test_causal_mask_is_a_window(self):
        program = Program(mask="tril_min", spelling="log_ratio", reduction="batchmean")
        self.assertExpectedInline(
            rewritten(program, program.inputs()),
            """\
attention_kl_default = attention_kl.default(args_0, args_1, args_2, args_3, teacher_scale=0.3536, student_scale=0.3536, window_right=0)
getitem = getitem(attention_kl_default, 0)
sum_2 = sum(getitem)
loss = truediv(sum_2, 2)
return (loss)""",
        )

    def test_key_padding_stays_a_small_mask(self):
        program = Program(mask="pad_bool", spelling="clamp_both", reduction="masked_mean")
        self.assertExpectedInline(
            rewritten(program, program.inputs()),
            """\
unsqueeze = unsqueeze(args_4, 1)
unsqueeze_1 = unsqueeze(unsqueeze, 1)
attention_kl_default = attention_kl.default(args_0, args_1, args_2, args_3, functional=(max(P,0.0001)*(max(logP,-9.210340371976182)-max(logS,-9.210340371976182))), teacher_scale=0.3536, student_scale=0.3536, mask=unsqueeze_1)
getitem_3 = getitem(attention_kl_default, 0)
getitem_2 = getitem(args_4, (slice(None, None, None), None))
m = to(getitem_2, torch.float32)
mul_3 = mul(getitem_3, m)
sum_2 = sum(mul_3)
sum_3 = sum(m)
mul_4 = mul(sum_3, 4)
loss = truediv(sum_2, mul_4)
return (loss)""",
        )

    def test_attention_output_becomes_sdpa(self):
        program = Program(mask="tril_min", uses_values=True)
        self.assertExpectedInline(
            rewritten(program, program.inputs()),
            """\
attention_kl_default = attention_kl.default(args_0, args_1, args_2, args_3, teacher_scale=0.3536, student_scale=0.3536, window_right=0)
getitem = getitem(attention_kl_default, 0)
loss = mean(getitem)
scaled_dot_product_attention = scaled_dot_product_attention(args_0, args_1, args_1, is_causal=True)
return (loss, scaled_dot_product_attention)""",
        )

    def test_grouped_heads_are_not_repeated(self):
        program = Program(producer="grouped", spelling="reverse", gradient="both")
        self.assertExpectedInline(
            rewritten(program, program.inputs()),
            """\
getitem = getitem(args_1, (slice(None, None, None), slice(0, 3, 2)))
getitem_4 = getitem(args_3, (slice(None, None, None), slice(0, 3, 2)))
attention_kl_default = attention_kl.default(args_2, getitem_4, args_0, getitem, teacher_scale=0.3536, student_scale=0.3536)
getitem_5 = getitem(attention_kl_default, 0)
loss = mean(getitem_5)
return (loss)""",
        )

    def test_language_model_heads(self):
        def loss(xs, ws, xt, wt, labels):
            s, t = F.linear(xs, ws) / 2, F.linear(xt, wt) / 2
            rows = F.kl_div(
                s.log_softmax(-1), t.log_softmax(-1), reduction="none", log_target=True
            ).sum(-1)
            keep = labels != -100
            return (rows * keep).sum() / keep.sum()

        self.assertExpectedInline(
            rewritten(loss, hidden_inputs()),
            """\
flatten = flatten(xs, 0, 1)
flatten_1 = flatten(xt, 0, 1)
keep = ne(labels, -100)
sum_3 = sum(keep)
ones = ones((24), dtype=torch.float32, device=cpu)
ones_1 = ones((), dtype=torch.float32, device=cpu)
ones_2 = ones((), dtype=torch.bool, device=cpu)
div = div(ones_1, sum_3)
abs_1 = abs(div)
ge = ge(abs_1, 1e-12)
logical_and = logical_and(ones_2, ge)
le = le(abs_1, 1e+12)
logical_and_1 = logical_and(logical_and, le)
where = where(logical_and_1, sum_3, 1)
where_1 = where(logical_and_1, 1, sum_3)
unflatten_1 = unflatten(ones, 0, (2, 12))
mul_1 = mul(unflatten_1, keep)
flatten_2 = flatten(mul_1)
div_1 = div(flatten_2, where)
linear_kl_sum_default = linear_kl_sum.default(student_hidden=flatten, student_weight=ws, teacher_hidden=flatten_1, teacher_weight=wt, student_scale=0.5, teacher_scale=0.5, row_weight=div_1, needs_grad=(True, True, False, False, False, False))
getitem_1 = getitem(linear_kl_sum_default, 0)
once_default = once.default(getitem_1, (xs, ws))
div_2 = div(once_default, where_1)
return (div_2)""",
        )

    def test_a_near_miss_is_the_same_graph(self):
        def loss(sq, sk, tq, tk, pad):
            elements = F.kl_div(
                (sq @ sk.transpose(-2, -1)).log_softmax(
                    -1
                ),  # .mT is traced in two ways by releases
                (tq @ tk.transpose(-2, -1)).softmax(-1),
                reduction="none",
            )
            return (elements.cumsum(-1) * pad[:, None, None, :]).sum()

        self.assertExpectedInline(
            rewritten(loss, Program().inputs()),
            """\
transpose = transpose(sk, -2, -1)
matmul = matmul(sq, transpose)
log_softmax = log_softmax(matmul, -1)
transpose_1 = transpose(tk, -2, -1)
matmul_1 = matmul(tq, transpose_1)
softmax = softmax(matmul_1, -1)
elements = kl_div(log_softmax, softmax, reduction=none)
cumsum = cumsum(elements, -1)
getitem = getitem(pad, (slice(None, None, None), None, None, slice(None, None, None)))
mul = mul(cumsum, getitem)
sum_1 = sum(mul)
return (sum_1)""",
        )


if __name__ == "__main__":
    pytest.main([__file__])
