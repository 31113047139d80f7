# ruff: noqa: E501
"""Every form of the report's text, as it is read; `EXPECTTEST_ACCEPT=1` writes the new ones."""

import html
import json
import re

import expecttest
import torch

import torch_streamkl
from tests.support.compiling import compile_rewritten
from tests.support.user_losses import USER_LOSSES
from torch_streamkl.fx_passes.reporting import artifact
from torch_streamkl.fx_passes.reporting.report import (
    GraphBreak,
    Outside,
    Remaining,
    Report,
    Site,
)
from torch_streamkl.fx_passes.reporting.text import (
    NOTHING_LARGE,
    NOTHING_REMAINS,
    fused_text,
    headline,
)


def explained(name, min_mib=0.0):
    torch._dynamo.reset()
    loss = USER_LOSSES[name]
    options = {"streamkl.min_mib": min_mib}
    return torch_streamkl.explain(loss.fn, *loss.inputs(), options=options)


def without_lines(text):
    return re.sub(r"[\w/]*user_losses\.py:\d+", "loss.py:7", text)


class Forms(expecttest.TestCase):
    maxDiff = None

    def short(self, name, min_mib=0.0):
        return without_lines(str(explained(name, min_mib)))

    def test_fused(self):
        self.assertExpectedInline(
            self.short("generalized_jsd"),
            """\
streamkl: 1 of 1 loss fused, 420 KiB of logits not materialized
  1. fused      loss.py:7  linear_kl: js, beta=0.5; check passed
No score- or logit-sized tensor remains.""",
        )

    def test_fused_with_labels(self):
        self.assertExpectedInline(
            self.short("kl_and_cross_entropy"),
            """\
streamkl: 1 of 1 loss fused, 120 KiB of logits not materialized
  1. fused      loss.py:7  linear_kl: forward_kl + cross-entropy with labels in the same pass; check passed
No score- or logit-sized tensor remains.""",
        )

    def test_fused_with_a_warning(self):
        self.assertExpectedInline(
            self.short("swapped"),
            """\
streamkl: 1 of 1 loss fused, 120 KiB of logits not materialized
  1. fused      loss.py:7  linear_kl: sum of P*(logP - S); check passed; warning: kl_div expects log-probabilities as its input and gets probabilities: F.kl_div(input.log(), target)
No score- or logit-sized tensor remains.""",
        )

    def test_skipped(self):
        self.assertExpectedInline(
            self.short("reverse_kl", min_mib=4096),
            """\
streamkl: 0 of 1 loss fused, 1 skipped
  1. skipped    loss.py:7  linear_kl: reverse_kl: 60 KiB of logits < 4 GiB (streamkl.min_mib). Force with {"streamkl.min_mib": 0}
7 score- or logit-sized tensors remain, 210 KiB (report.details()); largest: [48 x 160] (30 KiB) loss.py:7: read by log_softmax""",
        )

    def test_not_fused(self):
        self.assertExpectedInline(
            self.short("dropout_before_the_loss"),
            """\
streamkl: 0 of 1 loss fused
  1. not fused  loss.py:7  dropout changes the probabilities after the softmax (loss.py:7). Hint: if the dropout is not intended (a teacher in training mode), call eval() or set p=0. A loss on probabilities with dropout cannot be fused
12 score- or logit-sized tensors remain, 384 KiB (report.details()); largest: [1 x 2 x 64 x 64] (32 KiB) loss.py:7: read by softmax""",
        )

    def test_graph_break(self):
        text = re.sub(r"; TORCH_LOGS=.*", "", self.short("branch_on_values"))
        self.assertExpectedInline(
            text,
            """\
streamkl: 0 of 1 loss fused
  1. not fused  loss.py:7  the input of kl_div is not made from scores in this graph: a graph break at loss.py:7 lies between: if s.isnan().any():. Hint: move the code that breaks the graph: after the loss, or before the matmuls
5 score- or logit-sized tensors remain, 127.5 KiB (report.details()); largest: [48 x 160] (30 KiB) loss.py:7: read by log_softmax
     log_softmax at loss.py:7 is read by the code after the graph break at loss.py:7
     softmax at loss.py:7 is read by the code after the graph break at loss.py:7""",
        )

    def test_no_loss(self):
        self.assertExpectedInline(
            self.short("universal_logit_distillation"),
            """\
streamkl: no distillation loss recognized
8 score- or logit-sized tensors remain, 240 KiB (report.details()); largest: [48 x 160] (30 KiB) loss.py:7: read by softmax
     softmax at loss.py:7 feeds sort at loss.py:7, which needs whole rows
     softmax at loss.py:7 feeds sort at loss.py:7, which needs whole rows
       Hint: such a loss cannot be fused, because its operation needs whole rows. To save memory, select the rows that count before the matmul""",
        )

    def test_nothing_large(self):
        torch._dynamo.reset()
        report = torch_streamkl.explain(torch.sin, torch.ones(3))
        self.assertExpectedInline(
            str(report),
            """\
streamkl: no distillation loss recognized
The program has no score- or logit-sized tensor: no product is much larger than its operands.""",
        )

    def test_details(self):
        text = without_lines(explained("kl_and_smoothed_labels").details())
        self.assertExpectedInline(
            text,
            """\
streamkl: 1 of 1 loss fused, 90 KiB of logits not materialized
  1. fused         loss.py:7
     code      kl = F.kl_div(logits.log_softmax(-1), (g @ v.T).softmax(-1), reduction="batchmean")
     form      linear_kl: forward_kl
     roles     student: matmul of h and w (loss.py:7), needs a gradient; teacher: matmul of g and v (loss.py:7), needs no gradient
     runs      as blocks of rows, compiled by Inductor, gradients in the forward, by chunks of tokens
     check     same value and gradients on random inputs
     saved     90 KiB
1 score- or logit-sized tensor remains, 30 KiB:
  read by losses:
     [48 x 160] (30 KiB) loss.py:7: read by cross_entropy
     matmul at loss.py:7 is also read by cross_entropy at loss.py:7, which is not fused
note: the cross-entropy at loss.py:7 keeps the student's logits: it has class weights, label smoothing or soft labels""",
        )

    def test_details_of_what_is_not_fused(self):
        text = without_lines(explained("dropout_before_the_loss").details())
        self.assertExpectedInline(
            text,
            """\
streamkl: 0 of 1 loss fused
  1. not fused     loss.py:7
     code      return (p * (p + 1e-8).log() - p * (s + 1e-8).log()).sum(-1).mean()
     reason    dropout changes the probabilities after the softmax (loss.py:7)
     at        s = F.dropout((q @ k.mT).softmax(-1), 0.1)
     hint      if the dropout is not intended (a teacher in training mode), call eval() or set p=0. A loss on probabilities with dropout cannot be fused
12 score- or logit-sized tensors remain, 384 KiB:
  read by losses:
     [1 x 2 x 64 x 64] (32 KiB) loss.py:7: read by softmax
     [1 x 2 x 64 x 64] (32 KiB) loss.py:7: read by add, mul
     [1 x 2 x 64 x 64] (32 KiB) loss.py:7: read by softmax
     [1 x 2 x 64 x 64] (32 KiB) loss.py:7: read by dropout
     [1 x 2 x 64 x 64] (32 KiB) loss.py:7: read by add (dropout changes the probabilities after the softmax)
     2 of [1 x 2 x 64 x 64] (32 KiB) loss.py:7: read by log
     2 of [1 x 2 x 64 x 64] (32 KiB) loss.py:7: read by mul
     2 of [1 x 2 x 64 x 64] (32 KiB) loss.py:7: read by sub
     [1 x 2 x 64 x 64] (32 KiB) loss.py:7: read by sum""",
        )

    def test_a_hint_follows_what_it_is_for(self):
        """Once, and not where a loss has said it. What has no hint comes last."""
        unread = ["a", "b. Hint: one", "c. Hint: two", "d. Hint: one", "e. Hint: said"]
        site = Site(False, "", "", "sort of scores", "a.py:2", hint="said of a loss")
        large = Remaining("m", (8, 8), "a.py:1", "read by sort", num_bytes=256)
        report = Report([site], elsewhere=[large], unrecognized=unread)
        groups = ["b", "d", "  Hint: one", "c", "  Hint: two", "a", "e"]
        assert report.details().splitlines()[-7:] == [f"     {line}" for line in groups]
        assert str(report).splitlines()[-5:] == [f"     {line}" for line in groups[:5]]

    def test_detached_values_are_no_losses(self):
        loss = Site(True, "linear_kl", "forward_kl", "", "a.py:1")
        value = Site(True, "row_program", "a sum", "", "a.py:2", is_loss=False)
        left = Site(False, "row_program", "", "", "a.py:3", skipped="4 KiB", is_loss=False)
        for sites, text in (
            ([loss, value], "1 of 1 loss and 1 of 1 detached value fused"),
            ([value, left], "1 of 2 detached values fused, 1 skipped"),
            ([left], "0 of 1 detached value fused, 1 skipped"),
            ([loss, loss], "2 of 2 losses fused"),
        ):
            assert headline(Report(sites)) == f"streamkl: {text}"
            assert text.startswith(fused_text(Report(sites)))
        assert fused_text(Report([])) == "no loss fused"

    def test_everything_else(self):
        self.assertExpectedInline(
            str(FULL),
            """\
streamkl: 1 of 2 losses fused, 1 GiB of scores not materialized
  1. fused      a.py:1  attention_kl: forward_kl, causal; check skipped: ~22 s > 1 s limit. Force with {"streamkl.verify": "always"}
  2. not fused  a.py:2  sort of scores (a.py:3). Hint: select rows
3 score- or logit-sized tensors remain, 1.031 MiB (report.details()); largest: [8 x s0 x 64] (1 MiB) a.py:3: read by sort; sort needs whole rows
     softmax at a.py:6 feeds matmul at a.py:6
The compiled function returns logits (768 B): a distillation loss outside of it is not fused. Hint: compile what computes the loss, such as compute_loss
graph break at a.py:7: print()
1 graph was not analysed: what else remains is not known.
what else remains is not known: ValueError: planted
analysis failed, graph left as it is: RuntimeError: planted""",
        )
        self.assertExpectedInline(
            FULL.details(),
            """\
streamkl: 1 of 2 losses fused, 1 GiB of scores not materialized
  1. fused         a.py:1
     code      kl(<q>)
     form      attention_kl: forward_kl, causal
     runs      as Triton kernels
     check     skipped: ~22 s > 1 s limit. Force with {"streamkl.verify": "always"}
     saved     1 GiB
  2. not fused     a.py:2
     code      kl_sorted()
     reason    sort of scores (a.py:3)
     at        s.sort(-1)
     hint      select rows
3 score- or logit-sized tensors remain, 1.031 MiB:
  read by losses:
     [8 x s0 x 64] (1 MiB) a.py:3: read by sort; sort needs whole rows
  not read by a recognized loss:
     2 of [64 x 64] (16 KiB) a.py:6: read by matmul
     softmax at a.py:6 feeds matmul at a.py:6
The compiled function returns logits (768 B): a distillation loss outside of it is not fused. Hint: compile what computes the loss, such as compute_loss
     logits [2 x 96], 768 B a.py:5
graph break at a.py:7: print()
note: the cross-entropy at a.py:4 keeps the logits
1 graph was not analysed: what else remains is not known.
what else remains is not known: ValueError: planted
analysis failed, graph left as it is: RuntimeError: planted""",
        )

    def test_html(self):
        self.assertExpectedInline(
            FULL._repr_html_().replace(html.escape(FULL.details()), "DETAILS"),
            """\
<div class='streamkl'><b>streamkl: 1 of 2 losses fused, 1 GiB of scores not materialized</b><table><thead><tr><th>loss</th><th>verdict</th><th>what</th></tr></thead><tbody><tr><td><code title='kl(&lt;q&gt;)'>a.py:1</code></td><td><span style='color:#1a7f37'>fused</span></td><td>attention_kl: forward_kl, causal; check skipped: ~22 s &gt; 1 s limit. Force with {&quot;streamkl.verify&quot;: &quot;always&quot;}</td></tr><tr><td><code title='kl_sorted()'>a.py:2</code></td><td><span style='color:#cf222e'>not fused</span></td><td>sort of scores (a.py:3). Hint: select rows</td></tr></tbody></table><details><summary>details</summary><pre>DETAILS</pre></details></div>""",
        )


SKIPPED_CHECK = 'check skipped: ~22 s > 1 s limit. Force with {"streamkl.verify": "always"}'
FULL = Report(
    sites=[
        Site(True, "attention_kl", "forward_kl, causal", "", "a.py:1", "kl(<q>)", 2**30,
             runs="as Triton kernels", check=SKIPPED_CHECK),
        Site(False, "", "", "sort of scores", "a.py:2", "kl_sorted()", hint="select rows",
             unsupported_at="a.py:3", unsupported_code="s.sort(-1)"),
    ],
    remaining=[Remaining("s", (8, "s0", 64), "a.py:3", "read by sort", "sort needs whole rows",
                         2**20)],
    failures=["RuntimeError: planted"],
    outside=[Outside("logits", (2, 96), 768, "a.py:5")],
    notes=["the cross-entropy at a.py:4 keeps the logits"],
    not_analysed=1,
    elsewhere=[Remaining("t", (64, 64), "a.py:6", "read by matmul", "", 2**14)] * 2,
    unrecognized=["softmax at a.py:6 feeds matmul at a.py:6"],
    breaks=[GraphBreak("a.py:7", "print()", "a call of print")],
    not_scanned=["ValueError: planted"],
)  # fmt: skip


def test_json_has_everything_in_the_terms_of_the_report():
    found = json.loads(FULL.to_json(indent=1))
    assert (found["num_skipped"], found["num_fused"], found["num_unfused"]) == (0, 1, 1)
    assert found["remaining_bytes"] == 2**20 + 2 * 2**14
    assert not found["is_complete"]
    assert "node" not in found["sites"][0] and "name" not in found["remaining"][0]  # of a graph
    assert found["remaining"][0]["shape"] == [8, "s0", 64]
    breaks = [{"location": "a.py:7", "code": "print()", "reason": "a call of print"}]
    assert found["breaks"] == breaks
    assert json.loads(Report().to_json())["sites"] == []


def test_the_names_of_json_are_those_of_attributes():
    whole = FULL.to_dict()
    parts = [(getattr(FULL, x)[-1], whole[x][-1]) for x in ("sites", "remaining", "outside")]
    for record, found in ((FULL, whole), *parts):
        for name, value in found.items():
            mine = getattr(record, name)
            plain = isinstance(mine, (str, int, bool))
            assert value == mine if plain else len(value) == len(mine), name


def test_an_empty_report_is_not_complete():
    """Nothing was analysed, so nothing is known to be complete."""
    assert Report().is_empty and not Report().is_complete
    for report in (Report(num_graphs=1), Report(num_graphs=1, notes=["a note"])):
        assert report.is_complete and not report.is_empty
    assert not Report(num_graphs=1, not_scanned=["planted"]).is_complete
    assert not Report(num_cached=2).is_complete


def test_extend_takes_everything():
    report = Report()
    report.extend(FULL)
    assert report == FULL


def test_what_was_not_analysed_is_not_known():
    with torch_streamkl.reports() as report:
        torch.compile(torch.cos, backend="eager")(torch.randn(3))
    for said in (str(report), report.details()):
        assert said.startswith("streamkl: no graph was analysed")
        assert NOTHING_REMAINS not in said
    with torch_streamkl.reports() as outer, torch_streamkl.reports() as inner:
        compile_rewritten(torch.sin)(torch.randn(3))  # a graph without a loss
    for report in (outer, inner):
        assert report.num_graphs == 1 and NOTHING_LARGE in str(report)


def test_what_a_cache_had_is_said():
    report = Report(num_cached=2)
    assert str(report).startswith(
        "streamkl: no graph was analysed: 2 graphs were found in a cache"
    )
    report = Report(num_cached=1, num_not_ours=1)
    assert "1 graph was found in a cache" in str(report)
    assert "1 graph was compiled without the rewrite" in str(report)


def test_tlparse_gets_an_artifact(monkeypatch):
    stored = []

    def trace(kind, metadata_fn, payload_fn):
        stored.append((kind, metadata_fn(), json.loads(payload_fn())))

    monkeypatch.setattr(torch._logging, "trace_structured", trace)
    report = Report()
    artifact.store(report)
    ((kind, metadata, payload),) = stored
    assert (kind, metadata["name"]) == ("artifact", artifact.NAME)
    assert payload["sites"] == []
    monkeypatch.delattr(torch._logging, "trace_structured")
    artifact.store(report)  # a torch without it
