"""``logits[:, vocabulary entry] = -inf``: vocabulary entries left out fuse, and any other write
keeps the user's value.
"""

import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.losses import rows_of_kl
from tests.support.table import Table

NEG_INF = float("-inf")


def make_inputs(dtype=torch.float32):
    make = torch.Generator().manual_seed(0)
    shapes = ((6, 8), (37, 8), (6, 12), (37, 12))
    found = [torch.randn(*s, generator=make).to(dtype) for s in shapes]
    return [*(x.requires_grad_(i < 2) for i, x in enumerate(found)), torch.arange(6)]


def kl(s, t):
    lt, ls = t.log_softmax(-1), s.log_softmax(-1)
    p = lt.exp()
    return (p * torch.where(p > 0, lt - ls, torch.zeros_like(lt))).sum(-1).mean()


def logits(xs, ws, xt, wt):
    return xs @ ws.mT / 2.0, F.linear(xt, wt)


# kinds: what sites become, any of KINDS; None: the value is the user's, whatever fuses
KINDS = {"attention_kl", "linear_kl", "row_program"}
PROGRAMS = Table("xs ws xt wt y", {"s t": logits}, kinds=None, sites=1)


@PROGRAMS(kinds=KINDS)
def one_entry(s, t):
    s[:, 3] = NEG_INF
    t[:, 3] = NEG_INF
    return kl(s, t)


@PROGRAMS(kinds=KINDS)
def the_last_entries(s, t):
    s[..., -5:] = NEG_INF
    t[..., 32:] = NEG_INF
    return kl(s / 1.5, t / 1.5)


@PROGRAMS(kinds=KINDS)
def several_entries(s, t):
    for x in (s, t):
        x[..., 0] = NEG_INF
        x[:, 10:13] = NEG_INF
    return kl(s, t)


@PROGRAMS(kinds=KINDS, sites=2)
def clones_of_logits_that_are_used(s, t):
    kept, out = s.clone(), t.clone()
    kept[:, 3] = NEG_INF
    out[:, 3].fill_(NEG_INF)
    return kl(kept, out) + kl(s, t)


@PROGRAMS(kinds=KINDS)
def operator_and_is_no_write(s, t, y):
    """Named with an underscore because ``and`` is a keyword: the mask code of transformers."""
    hard = F.cross_entropy(s, y)
    counted = (y != 0) & (y != 1)
    return hard + (rows_of_kl(s, t) * counted).sum()


# ------------------------------------------------------------------ the value stays the user's
@PROGRAMS()
def another_entry_on_each_side(s, t):
    s[:, 3] = NEG_INF
    t[:, 4] = NEG_INF
    return kl(s, t).nan_to_num(), s.exp()


@PROGRAMS(kinds={"attention_kl"})
def on_one_side_only(s, t):
    t[:, 3] = NEG_INF
    return kl(s, t)


@PROGRAMS(kinds={"row_program"})
def a_finite_number(s, t):
    s[:, 3], t[:, 3] = -2.0, -2.0
    return kl(s, t)


@PROGRAMS(kinds=set(), sites=0)
def every_other_entry(s, t):
    for x in (s, t):
        x[:, ::2] = NEG_INF
    return kl(s, t)


@PROGRAMS(kinds={"row_program"})
def entries_of_some_tokens(s, t):
    for x in (s, t):
        x[:2, 3] = NEG_INF
    return kl(s, t)


@PROGRAMS(kinds={"row_program"})
def before_a_softcap(s, t):
    s[:, 3], t[:, 3] = NEG_INF, NEG_INF
    return kl(5 * torch.tanh(s / 5), 5 * torch.tanh(t / 5))


@PROGRAMS()
def read_through_another_view(s, t):
    early = s.view(2, 3, -1)
    s[:, 3], t[:, 3] = NEG_INF, NEG_INF
    return kl(early, t.view(2, 3, -1))


@PROGRAMS()
def probabilities_from_before(s, t):
    before, p = s.log_softmax(-1), t.softmax(-1)
    s[:, 3], t[:, 3] = NEG_INF, NEG_INF
    return F.kl_div(before, p, reduction="batchmean") + kl(s, t)


@PROGRAMS()
def two_clones_of_equal_logits(s, t):
    first, second, wanted = s.clone(), s.clone(), t.clone()
    first[:, 3], wanted[:, 3] = NEG_INF, NEG_INF
    second[:, 4] = NEG_INF
    return kl(first, wanted) + second.log_softmax(-1)[:, 3].sum()


@PROGRAMS()
def the_logits_are_returned(s, t):
    s[:, 3], t[:, 3] = NEG_INF, NEG_INF
    return kl(s, t), s


@PROGRAMS()
def a_view_is_scaled_and_its_base_returned(s, t):
    flat = s.view(-1, s.shape[-1])
    flat.mul_(0.5)
    return kl(flat, t), s


@PROGRAMS()
def times_a_negative_number(s, t):
    s[:, 3], t[:, 3] = -s[:, 4].detach(), -t[:, 4]
    return kl(-s, -t)


@PROGRAMS.parametrized()
def test_equals_eager(row):
    outcome = compare(row.program, make_inputs()).check()
    if row.kinds is None:
        return
    assert outcome.num_fused == row.sites, str(outcome.report)
    assert row.kinds is KINDS or outcome.kinds == row.kinds, str(outcome.report)
    assert outcome.report.num_remaining == 0 or not row.sites, str(outcome.report)
    if not row.sites:
        assert any("modified in place" in r for r in outcome.reasons), outcome.reasons


def test_an_entry_left_out_of_a_narrow_type_and_of_any_number():
    program = PROGRAMS.of_inputs(one_entry)
    for dtype, options in (
        (torch.bfloat16, {}),
        (torch.float32, {"dynamic": True}),
        (torch.float32, {"dynamic": True, "inner": "aot_eager"}),
    ):
        outcome = compare(program, make_inputs(dtype), **options).check()
        assert outcome.num_fused == 1, str(outcome.report)


def test_keys_of_attention():
    def program(q, k, t):
        s, wanted = q @ k.mT, t @ t.mT
        s[..., 2], wanted[..., 2] = NEG_INF, NEG_INF
        return kl(s, wanted)

    inputs = [torch.randn(2, 3, 6, 4, requires_grad=grad) for grad in (True, True, False)]
    outcome = compare(program, inputs).check()
    assert outcome.kinds == {"attention_kl"}, str(outcome.report)
    assert "entries left out" in outcome.report.sites[0].form
