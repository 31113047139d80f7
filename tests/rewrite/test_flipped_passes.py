"""What planning and passes ask of the new reading is what they ask of the old one.

Each function on the new reading runs beside the one that it takes the place of, on programs of the
tests that hold that one. These comparisons go with the old reading.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import torch_streamkl
from tests.corpus.naive_losses import BY_NAME
from tests.rewrite import test_data_dependent_rows as data_dependent
from tests.rewrite import test_nan_readers as nan_readers
from tests.rewrite import test_rewrite_forms as forms
from tests.support.both_readings import Read, pairs_of, watched
from tests.support.covering import every
from tests.support.subgraphs import inductor_without_code
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.analysis.interpreter import ScoreInterpreter
from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.domain.scores import Scores as ScoresOfOld
from torch_streamkl.fx_passes.fx_utils.nodes import name_of
from torch_streamkl.fx_passes.lowering.students import student_of
from torch_streamkl.fx_passes.passes.selected_counts import masks_of_counts
from torch_streamkl.fx_passes.passes.share_cross_entropy import _temperature
from torch_streamkl.fx_passes.passes.shared_logits import temperature_of
from torch_streamkl.fx_passes.planning.candidates import Candidate
from torch_streamkl.fx_passes.planning.readers import NO_READERS, Readers
from torch_streamkl.fx_passes.planning.special_values import (
    Scores,
    check_masked_logarithms,
    check_nan_readers,
    check_replaced,
)
from torch_streamkl.fx_passes.planning.worth import why_left
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.fx_passes.reporting.execution import SITE
from torch_streamkl.linear.ops import linear_kl

SELECTED = {  # how many masks select rows before the scores
    data_dependent.selected_values: 0,
    data_dependent.selected_logits: 1,
    data_dependent.gathered_rows: 0,
}
Rows = Callable[[Tensor, Tensor], Tensor]


def scores(read: Read, inner: fx.Node) -> Scores:
    found = tuple(read.matched(inner).closed.values())
    assert found, read.matched(inner)
    return Scores(inner, found, read.reading)


def by_nan_readers(
    read: Read,
    node: fx.Node,
    inner: fx.Node,
    elements: object,
    values: Mapping[fx.Node, object],
    outside: Readers = NO_READERS,
) -> None:
    check_nan_readers(node, scores(read, inner), outside)


def by_logarithms(
    read: Read, inner: fx.Node, elements: object, values: Mapping[fx.Node, object]
) -> None:
    loss = scores(read, inner)
    check_masked_logarithms(loss)
    check_replaced(loss)


LOSSES: list[tuple[Rows, float | None]] = [
    (nan_readers.kl_of_logs, -math.inf),
    (nan_readers.kl_of_logs, -1e38),
    (nan_readers.by_probabilities, None),
    (nan_readers.by_probabilities, -1e4),
    (nan_readers.clamped, -1e4),
    (nan_readers.underflowing, None),
    (nan_readers.variation, None),
]
READERS = {
    **nan_readers.READERS,
    **nan_readers.NUMBERS,
    **nan_readers.OF_INFINITY,
    **nan_readers.PASSES_ON,
}


@pytest.mark.parametrize("reader", every(2, READERS))
@pytest.mark.parametrize(("rows", "fill"), every(1, LOSSES))
def test_nan_readers(rows: Rows, fill: float | None, reader: str) -> None:
    def program(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        s, t = q @ k.mT, qt @ kt.mT
        if fill is not None:
            s, t = nan_readers.causal(s, fill), nan_readers.causal(t, fill)
        return READERS[reader](rows(s, t))

    pairs = pairs_of("check_nan_readers", by_nan_readers, program, *nan_readers.maps())
    assert pairs
    assert all(old == new for old, new in pairs), pairs


def added(x: Tensor) -> Tensor:
    row = torch.tensor([0.0, 0.0, -math.inf, 0.0, 0.0], dtype=x.dtype)[:, None]
    return x + row * torch.ones(5, 1, dtype=x.dtype)


@pytest.mark.parametrize("reader", ["isnan", "mean of squares"])
def test_a_value_per_row_is_added_before_the_softmax(reader: str) -> None:
    """The normal form of the loss does not have it, and eager code has NaN in its rows."""

    def program(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        return READERS[reader](nan_readers.kl_of_logs(added(q @ k.mT), qt @ kt.mT))

    pairs = pairs_of("check_nan_readers", by_nan_readers, program, *nan_readers.maps())
    assert pairs
    assert all(old == new for old, new in pairs), pairs
    assert (reader == "isnan") == isinstance(pairs[0][1], str)


@pytest.mark.parametrize("by_hand", [True, False])
def test_masked_logarithms(by_hand: bool) -> None:
    def program(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        mask = torch.where(torch.ones(5, 7).tril(2) > 0, 0.0, -1e4).to(q.dtype)
        p, s = (qt @ kt.mT).softmax(-1), q @ k.mT + mask
        return (p * (p.log() - (s.softmax(-1).log() if by_hand else s.log_softmax(-1)))).sum()

    pairs = pairs_of("check_masked_logarithms", by_logarithms, program, *nan_readers.maps())
    assert pairs
    assert all(old == new for old, new in pairs), pairs
    assert by_hand == isinstance(pairs[0][1], str)


def test_infinite_values_that_the_loss_replaces() -> None:
    """A bias of the student alone may hide a key that the teacher has: eager has infinity."""

    def program(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, bias: Tensor) -> Tensor:
        p, s = (qt @ kt.mT).softmax(-1), (q @ k.mT + bias).log_softmax(-1)
        return torch.nan_to_num(p * (p.log() - s), nan=0.0).sum()

    bias = torch.zeros(5, 7, dtype=torch.float64)
    found: list[Read] = []
    with contextlib.suppress(AssertionError):
        pairs_of("find_candidates", lambda read, *_: found.append(read), program,
                 *nan_readers.maps(), bias)  # fmt: skip
    (read,) = found
    end = next(n for n in reversed(read.trace.graph.nodes) if n.op == "call_function")
    loss = scores(read, end)
    with pytest.raises(torch_streamkl.fx_passes.fx_utils.errors.Unsupported, match="infinite"):
        check_replaced(loss)


@pytest.mark.parametrize(
    "name", every(3, ["linearard_ref", "fla_linear_kl_ref", "attn_js_window"])
)
def test_sizes(name: str) -> None:
    def left(read: Read, candidate: Candidate, device: str, given: float | None) -> str:
        forms = tuple(read.matched(candidate.inner).closed.values())
        return why_left(forms, device, given)

    case = BY_NAME[name]
    torch._dynamo.reset()
    with watched("why_left", left) as pairs, backend.collected():
        options = {"streamkl.min_mib": 1e6, "streamkl.inner": "eager"}
        torch.compile(case["fn"], backend="streamkl", options=options)(
            *case["make_inputs"](0, dtype=torch.float32)
        )
    assert pairs
    assert all(old and old == new for old, new in pairs), pairs


@pytest.mark.parametrize("loss", SELECTED, ids=lambda f: f.__name__)
def test_masks_of_row_counts(loss: data_dependent.Loss) -> None:
    def masks(read: Read, recognised: object) -> dict[str, fx.Node]:
        return masks_of_counts(read.trace, read.reading)

    torch._dynamo.reset()
    with (
        watched("symbols_of_counts", masks) as pairs,
        torch_streamkl.enable(),
        inductor_without_code(),
    ):
        data_dependent.run(loss)
    ((old, new),) = pairs
    assert isinstance(old, dict)
    assert isinstance(new, dict)
    assert len(old) == SELECTED[loss]
    for symbol, selection in old.items():
        assert new[symbol] is selection.tensors[0]


def temperatures(
    read: Read, graph: fx.Graph, trace: Trace, recognised: ScoreInterpreter, builder: object
) -> list[tuple[float | None, float | None]]:
    """By which number each call divides the logits of each cross-entropy, old and new."""
    found = []
    for inner in trace.graph.nodes:
        old, new = (x.get(inner.args[0]) if inner.args else None
                    for x in (recognised.values, read.reading.arrays))  # fmt: skip
        if name_of(inner) != "cross_entropy_loss" or not isinstance(old, ScoresOfOld):
            continue
        for call in (n for n in graph.nodes if n.target is linear_kl):
            site = next(x for x, node in trace.outer.items() if node.name == call.meta[SITE])
            ((form,),) = (x.calls for x in read.matched(site).closed.values())
            assert isinstance(new, Array)
            as_before = _temperature(call, old) if len(old.layout) == 2 else None
            found.append((as_before, temperature_of(student_of(form), new)
                          if len(new.dims) == 2 else None))  # fmt: skip
    return found


BEFORE_LABELS = {  # what is done to the logits before both losses
    "nothing": lambda s: s,
    "a softcap": lambda s: 30.0 * torch.tanh(s / 30.0),
    "a scale": lambda s: s * 0.25,
    "a number is added": lambda s: s + 1.5,
}


@pytest.mark.parametrize("before", every(2, BEFORE_LABELS))
@pytest.mark.parametrize("loss", every(3, [*forms.WITH_LABELS, *forms.WITH_OTHER_LABELS]))
def test_logits_of_labels(loss: str, before: str) -> None:
    of_labels = {**forms.WITH_LABELS, **forms.WITH_OTHER_LABELS}[loss]

    def step(xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, labels: Tensor) -> Tensor:
        s = BEFORE_LABELS[before](F.linear(xs, ws))
        soft = F.kl_div(
            (s / 2).log_softmax(-1), (F.linear(xt, wt) / 2).softmax(-1), reduction="none"
        ).sum(-1)
        return of_labels(s, labels) * 0.5 + 4 * soft.mean()

    pairs = pairs_of("share_cross_entropy", temperatures, step, *forms.hidden_inputs())
    ((_, found),) = pairs
    assert isinstance(found, list)
    assert len(found) == 1
    assert found[0][0] == pytest.approx(found[0][1]), found
