"""docs/reference/reasons.md is the table of hints, and every row has a program that gets it.

`python -m tests.report.test_reasons` writes the table.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import torch_streamkl
from tests.support.losses import kd
from tests.support.reason_events import EVENTS, FUSED_BY_DEFAULT, events
from tests.support.reason_examples import (
    EXAMPLES,
    OF_DIVERGENCES,
    ON_RANKS,
    SETTINGS,
    Setting,
)
from tests.support.user_losses import USER_LOSSES
from torch_streamkl.fx_passes.reporting.hints import ADVICE, advice_for, hint_for
from torch_streamkl.fx_passes.reporting.wording import as_sentence

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reference" / "reasons.md"
BEGIN, END = "<!-- reasons:begin -->\n", "<!-- reasons:end -->\n"
_USERS = {loss.fn: loss for loss in USER_LOSSES.values()}


def table():
    names = {reason: f"`{fn.__name__}`" for reason, fn in EXAMPLES.items()}
    names |= {reason: f"`{name}`" for reason, (name, _) in ON_RANKS.items()}
    happened = events()
    lines = ["| reason | what happened | what to do | tested by |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {x.reason} | {happened[x.reason]} | {_said(x.hint)}. | {names[x.reason]} |"
        for x in ADVICE
    ]
    return "\n".join(lines) + "\n"


def _said(hint):
    """A hint in a cell: with a capital, unless it begins with code."""
    said = hint[0].upper() + hint[1:] if re.match("[a-z]+ ", hint) else hint
    return said.replace("|", "\\|")


@pytest.mark.parametrize("reason", EXAMPLES)
@pytest.mark.filterwarnings("ignore")
def test_the_example_gets_its_row(reason):
    fn = EXAMPLES[reason]
    options = {"streamkl.inner": "eager"}
    options["streamkl.row_programs"] = reason not in OF_DIVERGENCES
    setting = SETTINGS.get(reason, Setting())
    options |= setting.options
    if not all(hasattr(torch._dynamo.config, name) for name in setting.config):
        pytest.skip("this torch has no such setting")
    if "register_hook" in reason and torch.__version__ < (2, 13):
        pytest.skip("Dynamo of torch 2.11 traces a hook as a custom autograd.Function")
    is_of_heads = next(iter(inspect.signature(fn).parameters)) == "h"
    usual = USER_LOSSES["cosine" if is_of_heads else "gram"]
    inputs = setting.inputs or _USERS.get(fn, usual).inputs
    torch._dynamo.reset()
    with torch_streamkl.reports() as report, torch._dynamo.config.patch(setting.config):
        compiled = torch.compile(fn, backend="streamkl", options=options, **setting.compile)
        for more in setting.calls:
            compiled(*inputs(), *more)
    left = [site for site in report.sites if not site.fused]
    # single entries compare no distributions: the report names them below the losses
    reasons = [site.reason for site in left] or report.unrecognized
    rows = [advice_for(x) for x in reasons]
    assert reason in [row.reason for row in rows if row is not None], report
    assert all(site.hint.startswith(hint_for(site.reason)[:20]) for site in left)


def test_every_row_has_a_program():
    assert {row.reason for row in ADVICE} == set(EXAMPLES) | set(ON_RANKS) == set(EVENTS)


@pytest.mark.parametrize("reason", sorted(FUSED_BY_DEFAULT))
def test_the_example_fuses_as_a_row_program(reason):
    fn = EXAMPLES[reason]
    is_of_heads = next(iter(inspect.signature(fn).parameters)) == "h"
    inputs = USER_LOSSES["cosine" if is_of_heads else "gram"].inputs()
    torch._dynamo.reset()
    report = torch_streamkl.explain(fn, *inputs)
    assert (report.num_fused, report.num_unfused) == (1, 0), report


@pytest.mark.parametrize("reason", ON_RANKS)
def test_the_check_on_ranks_asserts_the_reason(reason):
    """Those checks have several ranks."""
    name, said = ON_RANKS[reason]
    row = advice_for(said)
    assert row is not None and row.reason == reason
    files = ("test_rewritten_dtensors.py", "test_agreement.py", "test_numbers_of_a_rank.py")
    text = "".join((TESTS / "distributed" / file).read_text() for file in files)
    _, _, check = text.partition(f"\ndef {name}(")
    assert said in check.partition("\n\n\n")[0]


def test_the_page_is_the_table():
    text = PAGE.read_text()
    assert text.partition(BEGIN)[2].partition(END)[0] == table()


def test_every_reason_of_the_sources_has_a_hint():
    """Of losses: what keeps a check from running has none, nor has a failed check."""
    reasons = set()
    for file in (TESTS.parent / "fx_passes").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            raised = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if raised in ("Unsupported", "NoForm", "NotClosed") and node.args:
                if isinstance(node.args[0], ast.Constant):
                    reasons.add(node.args[0].value)
    assert len(reasons) > 100
    without = {x for x in reasons if not hint_for(x) or not hint_for(as_sentence(x))}
    assert all("mesh" in x or "DTensor" in x for x in without), without
    assert not hint_for("the check failed: the value is off")


def test_no_hint_asks_for_another_loss_without_saying_so():
    for row in ADVICE:
        changes = re.search(r"mask the other keys|average the teacher's heads only", row.hint)
        assert not changes, row


class _Halved(torch.autograd.Function):
    """The same value with half of its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] / 2


MAKERS = {
    "gelu": lambda h, w: F.gelu(h @ w.mT),
    "cdist": lambda h, w: -torch.cdist(h, w),
    "einsum": lambda h, w: torch.einsum("td,vd,d->tv", h, w, torch.ones(4)),
    "a custom autograd.Function": lambda h, w: _Halved.apply(h @ w.mT),
    "the checkpoint": lambda h, w: checkpoint(F.linear, h, w, use_reentrant=False),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_what_makes_the_scores_is_named(maker):
    """No product is called none, and no graph break of other code is a reason."""

    def loss(h, w, r, u):
        return kd(MAKERS[maker](h, w), r @ u.mT)

    def broken(h, w, r, u):
        print(end="")
        return h[h[:, 0] > 0].sum()

    inputs = [torch.randn(n, 4, requires_grad=i < 2) for i, n in enumerate((5, 9, 5, 9))]
    torch_streamkl.explain(broken, *inputs)
    (site,) = torch_streamkl.explain(loss, *inputs).sites
    assert not site.fused
    assert f"{maker} at {__file__}" in site.reason.replace("tests/", f"{TESTS}/", 1), site
    assert "matmul" not in site.reason and "enable()" not in site.hint
    assert "autograd gives" not in site.hint


def main():
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
