"""The row kernels of linear_topk_kl without a GPU: Triton's interpreter against float64.

The interpreter has to be chosen before a kernel is imported: test_in_the_interpreter.py does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.offline.compile import check_frontend, record_launches
from tests.operators.test_linear_topk_kl import entries, formula, head, leaves
from tests.support.interpreter import inside, outside, quiet
from torch_streamkl import linear_topk_kl
from torch_streamkl.linear.problem import Head
from torch_streamkl.program.divergences import named
from torch_streamkl.topk.problem import Tail, TopkProblem
from torch_streamkl.topk.triton import rows as kernels

pytestmark = quiet


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tail", ["none", "bucket"])
def test_rows(tail: str, dtype: torch.dtype) -> None:
    """At most twice the error of plain torch in the same dtype, and a few roundings."""
    more = {"temperature": 2.0, "logit_scale": 0.7, "softcap": 4.0}
    for options in ({"reduction": "mean"}, {"reduction": "none", **more}):
        options = {"tail": tail, "divergence": "js", **options}
        tensors, given = head(5, 16, 150, dtype), entries(5, 150, 6)
        if options["reduction"] == "none":
            del tensors["bias"]
        results = {}
        for impl in ("triton", "torch", "truth"):
            mine = leaves(tensors, torch.float64 if impl == "truth" else dtype)
            value = _value(impl, mine, given, options)
            value.sum().backward()
            results[impl] = [value.detach(), *(x.grad for x in mine.values())]
        for got, same, want in zip(*results.values(), strict=True):
            error, plain = ((x.double() - want).abs().max() for x in (got, same))
            eps = torch.finfo(got.dtype).eps
            assert error <= 2 * plain + 8 * eps * (1 + want.abs().max())


def _value(impl: str, mine: dict[str, Any], given: Any, options: dict[str, Any]) -> Any:
    ids, log_probs = given
    if impl != "truth":
        return linear_topk_kl(**mine, ids=ids, log_probs=log_probs, impl=impl, **options)
    kept = {k: x for k, x in options.items() if k != "reduction"}
    rows = formula(mine, ids, log_probs, **kept)
    return rows.mean() if options["reduction"] == "mean" else rows


@inside
def test_rows_that_do_not_count_and_ids_that_are_everywhere() -> None:
    """Infinite logits of a masked row; a bucket without another entry."""
    tensors = leaves(head(4, 8, 20, torch.float32))
    log_probs, ids = torch.randn(4, 20).log_softmax(-1).topk(20)
    with torch.no_grad():
        tensors["hidden"][2] = 1e30
        tensors["weight"][3] = 1e30
    value = linear_topk_kl(
        **tensors,
        ids=ids,
        log_probs=log_probs,
        tail="bucket",
        row_mask=torch.tensor([True, True, False, True]),
        impl="triton",
        reduction="mean",
    )
    value.backward()
    assert value.isfinite()
    assert all(x.grad.isfinite().all() for x in tensors.values())
    assert not tensors["hidden"].grad[2].any()


@outside
@pytest.mark.parametrize("tail", ["none", "bucket"])
def test_the_kernels_compile(tail: Tail) -> None:
    """The interpreter runs code that compilers refuse, such as Triton 3.6's tl.zeros here."""
    given = Head(torch.empty(4, 8), torch.empty(1000, 8), softcap=5.0)
    ids = torch.zeros(4, 2, dtype=torch.long)
    problem = TopkProblem(given, ids, torch.zeros(4, 2), named("forward_kl"), tail)
    with record_launches("sm_90") as launches:
        logits = torch.empty(4, 1000, dtype=torch.bfloat16)
        kernels.log_sums(problem, logits)
        kernels.gradient_(problem, logits, torch.empty(3, 4))
    assert len(launches) == 2
    for launch in launches:
        check_frontend(launch, "sm_90")
