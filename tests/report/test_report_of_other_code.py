"""What strict asks for, and what a report says, of code that is unlike a divergence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torch_streamkl
from tests.support.allocations import measure
from tests.support.user_losses import USER_LOSSES
from torch_streamkl.fx_passes.reporting.report import Report

OPTIONS: dict[str, Any] = {"streamkl.min_mib": 0.0, "streamkl.inner": "eager"}


def explained(fn: Any, name: str = "cosine") -> Report:
    """``name`` is a loss that has the inputs: LM heads, or "gram" for queries and keys."""
    torch._dynamo.reset()
    return torch_streamkl.explain(fn, *USER_LOSSES[name].inputs(), options=OPTIONS)


# ------------------------------------------------------- strict: what compares distributions


def regularizers(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
    rows = [F.gelu((a @ b.T).softmax(-1)).sum(-1) for a, b in ((h, w), (g, v))]
    return (rows[0] + rows[1]).mean()


def log_ratios_of_written_logits(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
    s, t = h @ w.T, g @ v.T
    s[:, ::2] = -1e4
    t[:, ::2] = -1e4
    of_label = [x.log_softmax(-1).gather(-1, torch.ones(len(h), 1).long()) for x in (s, t)]
    return -F.logsigmoid(of_label[0] - of_label[1]).mean()


def entropy_by_hand(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
    s = h @ w.T
    e = (s - s.amax(-1, keepdim=True)).exp()
    return F.gelu(e / e.sum(-1, keepdim=True) * s.log_softmax(-1)).sum(-1).mean()


def assigned_by_sinkhorn(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        plan = torch.exp(g @ v.T / 5).t()
        for _ in range(2):
            plan = plan / plan.sum(1, keepdim=True)
            plan = plan / plan.sum(0, keepdim=True)
    return -(plan.t() * (h @ w.T).log_softmax(-1)).sum(-1).mean()


def sorted_in_a_checkpoint(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
    def loss(a: Tensor, b: Tensor) -> Tensor:
        p, q = (x.softmax(-1).sort(-1).values for x in (a @ w.T, b @ v.T))
        return (p - q).abs().sum(-1).mean()

    return checkpoint(loss, h, g, use_reentrant=False)


COMPARES = {
    regularizers: False,
    log_ratios_of_written_logits: False,
    entropy_by_hand: False,
    assigned_by_sinkhorn: True,
    sorted_in_a_checkpoint: True,
}


@pytest.mark.parametrize("loss", COMPARES, ids=lambda f: f.__name__)
def test_which_code_compares_two_distributions(loss: Any) -> None:
    report = explained(loss)
    raises = bool(report.num_unfused or report.unfused_comparisons)
    assert raises == COMPARES[loss], report
    assert not report.num_fused


# ------------------------------------------------------- what a report says


def test_a_body_s_tensors_have_a_reason() -> None:
    text = str(explained(sorted_in_a_checkpoint))
    assert "feeds sort at" in text and "which needs whole rows" in text
    assert "returned by the compiled function" not in text


def test_what_is_overwritten_is_not_written_into_another_tensor() -> None:
    def loss(q: Tensor, k: Tensor, r: Tensor, u: Tensor) -> Tensor:
        a, b = q @ k.mT, r @ u.mT
        a[a < 0] = 0
        b[b < 0] = 0
        return (a.sort(-1).values - b.sort(-1).values).square().mean()

    text = str(explained(loss, "gram"))
    assert "is overwritten in place at" in text and "masked_fill instead of masked_fill_" in text
    assert "another tensor" not in text


def test_a_hook_on_probabilities_is_a_hook() -> None:
    if torch.__version__ < (2, 13):
        pytest.skip("Dynamo of torch 2.11 traces a hook as a custom autograd.Function")

    def loss(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        s = (h @ w.T).log_softmax(-1)
        s.register_hook(lambda grad: grad.clamp(-1, 1))
        return F.kl_div(s, (g @ v.T).softmax(-1), reduction="batchmean")

    (site,) = explained(loss).sites
    assert "comes from register_hook at" in site.reason
    assert "register the hook on the hidden states" in site.hint


def test_inputs_of_a_checkpointed_function_have_names() -> None:
    def loss(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        def of_both(a: Tensor, b: Tensor) -> Tensor:
            s, t = (a @ w.T).log_softmax(-1), (b @ v.T).softmax(-1)
            return F.kl_div(s, t, reduction="batchmean")

        return checkpoint(of_both, h, g, use_reentrant=False)

    (site,) = explained(loss).sites
    assert "student: matmul of h and a view (" in site.roles, site.roles
    assert "teacher: matmul of g and a view (" in site.roles, site.roles


def test_a_flattened_map_of_one_sample_is_as_large_as_scores() -> None:
    def loss(q: Tensor, k: Tensor, r: Tensor, u: Tensor) -> Tensor:
        a, b = ((x @ y.mT).softmax(-1).pow(2).mean(1).flatten(1) for x, y in ((q, k), (r, u)))
        return (F.normalize(a) - F.normalize(b)).pow(2).mean()

    given = USER_LOSSES["gram"]
    report, shapes = measure(loss, given.inputs(), given.large)
    flat = (1, shapes[0][-1] ** 2)
    assert flat in shapes
    assert flat in [x.shape for x in report.elsewhere]


def test_an_attribute_has_its_name() -> None:
    def loss(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        s = h @ w.T
        return F.cross_entropy(s, torch.ones(len(h)).long()) + s.T.sort(-1).values.mean()

    text = explained(loss).details()
    assert "T" in text and "getattr" not in text


def test_a_loop_s_tensors_are_of_one_iteration() -> None:
    scan = pytest.importorskip("torch._higher_order_ops.scan").scan

    def loss(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        def body(total: Tensor, given: Any) -> Any:
            s, t = (given[0] @ w.T).log_softmax(-1), (given[1] @ v.T).softmax(-1)
            value = F.kl_div(s, t, reduction="sum")
            return total + value, value.clone()

        return scan(body, torch.zeros(()), (h.view(4, 12, -1), g.view(4, 12, -1)))[0]

    report = explained(loss)
    assert len(report.elsewhere) == 4, report
    assert all("one in every iteration of scan" in x.reason for x in report.elsewhere), report
