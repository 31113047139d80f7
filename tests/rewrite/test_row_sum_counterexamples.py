"""Random code between an LM head's row values and the loss: fused or not, it is eager's."""

import random

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare

IN_FORWARD = "gradients in the forward"
NUMBERS = ("2.0", "-0.5", "3", "0.125")
SPECIALIZED = (
    "a",
    "mask",
    "c",
    "one",
    "labels",
    "wide",
)  # of rows, batch, one number, integers, bf16
# of a value x, another y, known tensors k and booleans b, numbers n
STEPS = (
    "{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} * {k}", "{k} * {x}", "{x} + {k}", "{k} - {x}",
    "{x} / ({k} + 2)", "{k} / ({x}.abs() + 1)", "{n} * {x}", "{x} / {n}", "{n} - {x}", "-{x}",
    "{x}.abs()", "({x} * 0.1).exp()", "({x}.abs() + 0.5).log()", "({x}.abs() + 0.5).sqrt()",
    "{x} ** 2", "{x} ** 3", "({x}.abs() + 0.5) ** -0.5", "{x}.square()",
    "torch.where({b}, {x}, {n})",
    "torch.where({b}, {x}, {y})", "torch.where({b}, {k}, {x})", "{x}.masked_fill({b}, {n})",
    "{x}.masked_fill({b}, 0.0)", "{x}.float()", "{x}.contiguous()", "{x}.reshape(-1).view(2, 7)",
    "{x}.unsqueeze(-1).squeeze(-1)", "torch.mul({x}, {y})", "torch.add({x}, {y}, alpha=0.5)",
    "{x}.detach() * {y}", "{x}.clamp(min=-3.0)", "torch.minimum({x}, {y})", "{x}.t().t()",
    "{x}.flip(1)", "{x} * {x}.detach().mean()", "{x}.clone().mul_({k})", "{x}.add({y})",
    "({x} / {x}.detach().abs().max())", "{x}.roll(1, 0)", "({x} * {k}).cumsum(-1)",
)  # fmt: skip
SUMS = (
    "{x}.sum()", "{x}.mean()", "{x}.sum((0, 1))", "({x} * mask).sum() / mask.sum()",
    "{x}.mean(dim=(0, 1))", "torch.sum({x})", "{x}.sum(-1).mean()", "{x}.sum() / 14",
    "{x}.reshape(-1).sum(0)", "{x}.mean(-1).sum()", "{x}.flatten().mean()", "{x}.sum(1)[0]",
    "{x}[mask > 0].sum()", "{x}.float().mean()", "{x}.sum(dtype=torch.float64).float()",
)  # fmt: skip
TOTALS = (
    "{s}", "{s} * 2", "{s} + {r}", "{s} - 0.1 * {r}", "{s} * {r}", "({s} + {r}) / 3",
    "-{s} + 2.0", "{s} + one * {r}", "{s} / {r}", "{s}.neg() * 2", "{s} + {s}",
)  # fmt: skip
RESULTS = ("{t}", "{t}", "{t}", "{t}, {x}", "{t}, {s}.detach()", "({t}).sigmoid()", "{t}, {t} * 2")


VALUES = {
    "chosen": "logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)",
    "entropy": "-(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)",
    "total": "logits.logsumexp(-1)",
}


def program(seed):
    """The text of a loss."""
    draw = random.Random(seed)
    values = draw.choice((["entropy"], ["chosen", "entropy"], ["entropy", "total"]))
    lines = []

    def filled(step, **more):
        x, y = values[-1], draw.choice(values)
        k, b = draw.choice(SPECIALIZED), draw.choice(("mask > 0", "labels == 3", "~(mask > 0)"))
        return step.format(**({"x": x, "y": y, "k": k, "b": b, "n": draw.choice(NUMBERS)} | more))

    for i in range(draw.randint(1, 4)):
        lines.append(f"x{i} = {filled(draw.choice(STEPS[:30] * 3 + STEPS))}")
        values.append(f"x{i}")
    s, r = (draw.choice(SUMS[:6] * 3 + SUMS) for _ in range(2))
    total = draw.choice(TOTALS[:4] * 4 + TOTALS)
    lines += [f"s = {filled(s, x=values[-1])}", *[f"r = {filled(r)}"] * ("{r}" in total)]
    lines.append(f"t = {total.format(s='s', r='r')}")
    lines.append(f"return {filled(draw.choice(RESULTS), t='t', s='s')}")
    text = "\n    ".join(lines)
    used = [f"{name} = {code}" for name, code in VALUES.items() if name in text]
    head = "def loss(h, w, labels, mask, a, c, one, wide):\n    logits = F.linear(h, w)\n    "
    return head + "\n    ".join([*used, *lines])


def inputs():
    make = torch.Generator().manual_seed(0)
    h, w = (torch.randn(*n, 12, generator=make) * 12**-0.5 for n in ((2, 7), (61,)))
    labels = torch.randint(61, (2, 7), generator=make)
    a, c, one = (torch.rand(n, generator=make) + 0.1 for n in ((2, 7), (2, 1), ()))
    mask = (torch.rand(2, 7, generator=make) > 0.3).float()
    return [h.requires_grad_(), w.requires_grad_(), labels, mask, a, c, one, a.flip(0).bfloat16()]


def outcome_of(seed):
    scope = {"F": F, "torch": torch}
    exec(program(seed), scope)
    dynamic = True if seed % 5 == 0 else None
    return compare(scope["loss"], inputs(), dynamic=dynamic)


@pytest.mark.parametrize("num_seeds", [15, pytest.param(30, marks=pytest.mark.slow)])
def test_random_row_losses(num_seeds):
    moved = 0
    for seed in range(num_seeds):
        outcome = outcome_of(seed)
        assert not outcome.mismatch(), f"seed {seed}\n{program(seed)}\n{outcome.mismatch()}"
        moved += any(IN_FORWARD in site.runs for site in outcome.report.sites)
    assert num_seeds // 6 <= moved < num_seeds  # both happen


def test_a_metric_that_reads_another():
    """Both move after the sum, in the order in which they stand."""
    shapes = (5, 5), (12, 5), (5, 3), (12, 3)
    h, w, th, tw = (torch.randn(n, dtype=torch.float64) for n in shapes)

    def step(h, w, th, tw):
        z = F.linear(th, tw)
        rows = z.log_softmax(-1).sum(-1)
        with torch.no_grad():
            products = z * F.linear(h, w)
        return (rows - products.sum(-1) / 5).detach() + rows.sum() / 5

    outcome = compare(step, [h, w, th, tw.requires_grad_()], verify="never").check()
    assert all(site.fused for site in outcome.report.sites) and not outcome.report.failures
    assert any(IN_FORWARD in site.runs for site in outcome.report.sites), outcome.report
