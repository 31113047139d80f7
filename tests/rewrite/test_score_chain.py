"""Scores are a chain of operations in the order written: each chain fuses right, or stays.

Random chains on attention maps and on language-model heads are compared with eager and float64,
values and gradients. Beside them are programs whose meaning hangs on the order of two operations.
"""

import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import comparing
from tests.support.comparing import refusals
from tests.support.covering import every
from tests.support.losses import rows_of_kl

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 2, 5, 7, 4
TOKENS, WIDTH, VOCAB = 6, 4, 9
INF = float("inf")
LOWEST = torch.finfo(torch.float32).min


def compare(program, inputs, **options):
    """Without the check at compile time, which would hide a rewrite that is wrong."""
    return comparing.compare(program, inputs, verify="never", **options)


@dataclass
class Beside:
    """Tensors that chains use next to the scores."""

    bias: Tensor
    rows: Tensor
    log_tau: Tensor
    tau: Tensor
    keep: Tensor


def causal(s):
    return torch.arange(s.shape[-1]) <= torch.arange(s.shape[-2])[:, None]


def added(fill):
    return lambda s, b: s + torch.full(s.shape[-2:], fill).triu(1)


POINTWISE = {
    "half": lambda s, b: s * 0.5,
    "times_3": lambda s, b: 3.0 * s,
    "negative": lambda s, b: s * -1.5,
    "neg": lambda s, b: -s,
    "zero": lambda s, b: s * 0.0,
    "plus_1": lambda s, b: s + 1.0,
    "minus_4": lambda s, b: s - 4.0,
    "5_minus": lambda s, b: 5.0 - s,
    "tanh": lambda s, b: torch.tanh(s),
    "softcap": lambda s, b: 2.0 * torch.tanh(s / 2.0),
    "bias": lambda s, b: s + b.bias[..., : s.shape[-1]],
    "minus_bias": lambda s, b: s - b.bias[..., : s.shape[-1]],
    "temperature": lambda s, b: s / b.log_tau.exp(),
    "negative_temperature": lambda s, b: s * b.tau,
    "rows": lambda s, b: s * b.rows,
    "isinf": lambda s, b: torch.where(s.isinf(), s, 0.0),
    "not_isinf": lambda s, b: torch.where(s.isinf(), 0.0, s),
    "isnan": lambda s, b: s.masked_fill(s.isnan(), 0.0),
    "isfinite": lambda s, b: torch.where(s.isfinite(), s, -9.0),
}
MASKS = {
    f"{name}_{fill:g}": (lambda s, b, mask=mask, fill=fill: s.masked_fill(~mask(s, b), fill))
    for name, mask in (("causal", lambda s, b: causal(s)), ("keep", lambda s, b: b.keep))
    for fill in (-INF, LOWEST, -1e9, -4.0, 0.0, 2.0)
}
MASKS |= {f"added_{fill:g}": added(fill) for fill in (-INF, LOWEST, -1e9, -1e4, -1.0)}
OF_MAPS = POINTWISE | MASKS


def without_word(s, b):
    s = s.clone()
    s[:, 2] = -INF
    return s


OF_HEADS = POINTWISE | {
    "without_word": without_word,
    "keep_-inf": lambda s, b: s.masked_fill(~b.keep[: s.shape[-1]], -INF),
    "pad": lambda s, b: F.pad(s, (0, 3), value=-INF),
    "pad_by_0": lambda s, b: F.pad(s, (0, 0), value=-INF),
    "crop": lambda s, b: F.pad(s, (0, -2), value=-INF),
}

LOSSES = {
    "kl": lambda s, t: rows_of_kl(s, t),
    "cross_entropy": lambda s, t: s.logsumexp(-1) - (t.softmax(-1) * s).sum(-1),
    "minus_lse": lambda s, t: (
        (t - t.logsumexp(-1, keepdim=True)).exp() * -(s - s.logsumexp(-1, keepdim=True))
    ).sum(-1),
    "js": lambda s, t: ((p := t.softmax(-1)) * (p.log() - (0.5 * (p + s.softmax(-1))).log())).sum(
        -1
    ),
    "shifted_expectation": lambda s, t: s.logsumexp(-1) - (t.softmax(-1) * (s + 5.0)).sum(-1),
}


def applied(chain, steps, s, b):
    for name in chain:
        s = steps[name](s, b)
    return s


def tensors(seed, *shapes):
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=make) for shape in shapes]


def beside(bias, rows, num_keys, seed):
    keep = torch.rand(num_keys, generator=torch.Generator().manual_seed(seed)) > 0.3
    keep[0] = True  # under a causal mask, too, every query keeps a key
    tau = torch.tensor(0.3), torch.tensor(-0.7)
    return Beside(bias, 1.0 + rows.abs(), *tau, keep)


def of_maps(chains, loss, seed):
    shape = (BATCH, HEADS)
    shapes = [(*shape, n, DIM) for n in (QUERIES, KEYS, QUERIES, KEYS)]
    sq, sk, tq, tk, bias, rows = tensors(seed, *shapes, (QUERIES, KEYS), (QUERIES, 1))
    b = beside(bias, rows, KEYS, seed)
    trains_teacher = bool(seed % 2)

    def program(sq, sk, tq, tk, *values):
        b = Beside(*values)
        s = applied(chains[0], OF_MAPS, sq @ sk.mT, b)
        t = applied(chains[1], OF_MAPS, tq @ tk.mT, b)
        return LOSSES[loss](s, t).mean()

    inputs = [x.requires_grad_() for x in (sq, sk)]
    inputs += [x.requires_grad_(trains_teacher) for x in (tq, tk)]
    return program, [*inputs, *vars(b).values()]


def of_heads(chains, loss, seed):
    shapes = [(TOKENS, WIDTH), (VOCAB, WIDTH)] * 2
    x, w, y, v, bias, rows = tensors(seed, *shapes, (4 * VOCAB,), (TOKENS, 1))
    b = beside(bias, rows, 4 * VOCAB, seed)

    def program(x, w, y, v, *values):
        b = Beside(*values)
        s = applied(chains[0], OF_HEADS, F.linear(x, w), b)
        t = applied(chains[1], OF_HEADS, F.linear(y, v), b)
        shared = min(s.shape[-1], t.shape[-1])
        s, t = s[:, :shared], t[:, :shared]
        return LOSSES[loss](s, t).mean()

    inputs = [x.requires_grad_(), w.requires_grad_(), y, v]
    return program, [*inputs, *vars(b).values()]


def check(outcome):
    """Right, and fused or with a reason."""
    outcome.check()
    assert outcome.num_fused or outcome.reasons, "neither fused nor with a reason"


def random_chains(seed, steps):
    """A chain of up to six operations for each side, the same one three times out of four."""
    draw = random.Random(seed)
    names = sorted(steps)
    chains = [[draw.choice(names) for _ in range(draw.randint(0, 6))] for _ in range(2)]
    return [chains[0], chains[draw.randint(0, 3) == 0]], draw.choice(sorted(LOSSES))


@pytest.mark.parametrize("seed", every(6, range(40)))
def test_random_chain_on_maps(seed):
    chains, loss = random_chains(seed, OF_MAPS)
    check(compare(*of_maps(chains, loss, seed)))


@pytest.mark.parametrize("seed", every(6, range(40), 1))
def test_random_chain_on_heads(seed):
    chains, loss = random_chains(seed, OF_HEADS)
    check(compare(*of_heads(chains, loss, seed)))


@dataclass
class Case:
    """A chain (or one for each side), why no operator of divergences takes it, and the loss."""

    student: list[str]
    loss: str = "kl"
    reason: str = ""
    teacher: list[str] | None = None

    @property
    def chains(self):
        return [self.student, self.student if self.teacher is None else self.teacher]


# what operators of divergences take; what they refuse is a row program, or stays
DIVERGENCES_OF_MAPS = [
    # a number that is added is the identity for a softmax, and for nothing else
    Case(["plus_1"]),
    Case(["plus_1"], "cross_entropy"),
    Case(["half", "5_minus"], "minus_lse"),
    Case(["causal_-inf", "plus_1"]),
    Case(["causal_-1e+09", "plus_1", "half"]),
    Case(["half"], "shifted_expectation"),
    Case(["softcap", "plus_1"]),
    Case(["plus_1", "temperature"]),
    Case(["plus_1", "rows"], "cross_entropy"),
    Case(["plus_1", "causal_0"]),
    Case(["plus_1", "causal_0", "half", "minus_4"]),
    Case(["plus_1", "causal_-inf"], teacher=["causal_-inf"]),
    # scales
    Case(["half", "softcap", "times_3"]),
    Case(["negative", "softcap", "negative"]),
    Case(["negative", "causal_-inf"]),
    Case(["causal_-inf", "neg", "neg"]),
    Case(["causal_-4", "negative"]),
    Case(["causal_2", "half", "neg"]),
    Case(["causal_-1e+09", "half"]),
    Case(["causal_-3.40282e+38", "times_3"]),
    Case(["causal_-3.40282e+38", "half"], teacher=["causal_-inf"]),
    # tensors that multiply
    Case(["causal_-inf", "temperature"]),
    Case(["causal_-3.40282e+38", "temperature"]),
    Case(["negative_temperature", "causal_-3.40282e+38"]),
    Case(["bias", "temperature"]),
    Case(["rows", "bias"]),
    # masks
    Case(["causal_-inf", "softcap"]),
    Case(["causal_-3.40282e+38", "softcap", "half"], "cross_entropy"),
    Case(["causal_-4", "softcap", "minus_4"]),
    Case(["softcap", "bias", "causal_-inf"]),
    Case(["bias", "causal_-4"]),
    Case(["causal_-inf", "bias", "minus_bias"], "cross_entropy"),
    Case(["causal_-4", "causal_-inf"]),
    Case(["causal_-inf", "causal_-4"]),
    Case(["causal_-inf", "keep_-inf"]),
    Case(["causal_-inf", "keep_-3.40282e+38"]),
    Case(["added_-inf", "added_-inf"], "js"),
    Case(["added_-3.40282e+38", "added_-3.40282e+38"]),
    Case(["added_-3.40282e+38", "half"]),
    Case(["added_-10000", "times_3"]),
    Case(["causal_-4", "added_-inf"]),
    Case(["causal_-inf", "added_-3.40282e+38"]),
    # what is finite, infinite, or not a number
    Case(["not_isinf"]),
    Case(["causal_-inf", "not_isinf"]),
    Case(["causal_-inf", "isfinite", "half"]),
    Case(["causal_-inf", "softcap", "not_isinf"]),
    Case(["causal_-4", "not_isinf"]),
    Case(["causal_-inf", "isnan"]),
    Case(["bias", "isnan"]),
]
PROGRAMS_OF_MAPS = [
    Case(["plus_1", "softcap"], reason="tanh of scores that a number was added to"),
    Case(["plus_1", "temperature", "causal_0"], reason="after a value per row was added"),
    Case(["plus_1", "causal_0"], teacher=["causal_0"], reason="masked with different values"),
    Case(["causal_-inf", "negative"], reason="masked scores have the value inf"),
    Case(["causal_-3.40282e+38", "neg"], reason="masked scores have the value 3.4"),
    Case(
        ["causal_-1e+09", "half"], teacher=["causal_-1e+09"], reason="masked with different values"
    ),
    Case(["causal_-3.40282e+38", "negative_temperature"], reason="that may be negative"),
    Case(["causal_-4", "temperature"], reason="after a finite mask value"),
    Case(["bias", "rows"], reason="no scalar after a bias"),
    Case(["softcap", "temperature"], reason="multiplied by a tensor after a softcap"),
    Case(["causal_-inf", "tanh"], teacher=["tanh", "causal_-inf"], reason="different values"),
    Case(["bias", "softcap"], reason="added to attention scores before a tanh"),
    Case(["causal_-4", "bias"], reason="after a finite mask value"),
    Case(["causal_-inf", "keep_-4"], reason="two masks with different values"),
    Case(["causal_-4", "plus_1", "keep_-4"], reason="two masks with different values"),
    Case(
        ["causal_-inf", "keep_-3.40282e+38"],
        teacher=["keep_-inf", "causal_-3.40282e+38"],
        reason="overlap in different ways",
    ),
    Case(["added_-1", "softcap"], reason="before a tanh"),
]
STAYS_OF_MAPS = [
    Case(["isinf"], reason="a mask that is computed from scores"),
    Case(["causal_-inf", "isinf"], reason="a mask that is computed from scores"),
    Case(["zero"], reason="multiplied by 0"),
    Case(["causal_-inf", "zero"], reason="multiplied by 0"),
    Case(["causal_-inf", "keep_-3.40282e+38"], "minus_lse", reason="two additive masks overlap"),
    Case(["bias", "not_isinf"], reason="infinite scores are replaced"),
]
DIVERGENCES_OF_HEADS = [
    Case(["bias", "softcap", "half"]),
    Case(["bias", "half", "softcap", "negative"]),
    Case(["half", "bias", "minus_4", "negative"]),
    Case(["softcap", "bias"]),
    Case(["without_word", "half"]),
    Case(["neg", "without_word"]),
    Case(["pad"], "js"),
    Case(["pad", "half"], teacher=["times_3", "pad"]),
    Case(["pad", "softcap"]),
    Case(["pad_by_0", "softcap"]),
    Case(["half", "crop", "minus_4"], teacher=["crop", "plus_1"]),
    Case(["crop", "pad"], teacher=["half", "crop", "pad"]),
]
PROGRAMS_OF_HEADS = [
    Case(["without_word", "neg"], reason="masked scores have the value inf"),
    Case(["pad", "neg"], reason="masked scores have the value inf"),
]
ORDERS = [
    (of_maps, "divergence", DIVERGENCES_OF_MAPS),
    (of_maps, "row_program", PROGRAMS_OF_MAPS),
    (of_maps, "stays", STAYS_OF_MAPS),
    (of_heads, "divergence", DIVERGENCES_OF_HEADS),
    (of_heads, "row_program", PROGRAMS_OF_HEADS),
]


@pytest.mark.parametrize(
    ("scores", "kind", "case"),
    every(3, [(scores, kind, case) for scores, kind, cases in ORDERS for case in cases]),
    ids=lambda x: "-".join([*x.student, x.loss]) if isinstance(x, Case) else "",
)
def test_order(scores, kind, case):
    given = scores(case.chains, case.loss, 1)
    outcome = compare(*given)
    check(outcome)
    if kind == "divergence":
        assert outcome.num_fused == 1 and "row_program" not in outcome.kinds, outcome.report
        return
    is_program = kind == "row_program"
    assert outcome.kinds == ({kind} if is_program else set()), outcome.report
    reasons = refusals(*given) if is_program else outcome.reasons
    assert any(case.reason in reason for reason in reasons), outcome.report


SLICES = {
    "narrow_from_the_end": lambda s: s.narrow(2, -3, 3),
    "narrow_from_the_end_of_the_keys": lambda s: s.narrow(-1, -4, 3),
    "slice_before_the_start": lambda s: s[:, :, -100:],
    "slice_behind_the_end": lambda s: s[:, :, -2:100],
    "slice_of_keys": lambda s: s[..., -100:4],
    "select": lambda s: s.select(1, -1),
    "split": lambda s: s.split([2, 3], 2)[1],
    "chunk": lambda s: s.chunk(2, -1)[1],
    "tensor_split": lambda s: s.tensor_split([-2], 2)[1],
}


@pytest.mark.parametrize(
    ("masked", "dynamic"),
    # symbolic sizes count in the slice, which the mask's value does not see
    [
        ("", False),
        ("causal_-3.40282e+38", False),
        ("causal_-1e+09", False),
        ("causal_-1e+09", True),
    ],
)
@pytest.mark.parametrize("name", every(2, SLICES))
def test_part_of_scores(name, masked, dynamic):
    """Starts are counted from the end, and limited to the dimension, as torch does."""
    shapes = [(BATCH, HEADS, n, DIM) for n in (QUERIES, KEYS, QUERIES, KEYS)]
    mask = OF_MAPS[masked] if masked else lambda s, b: s

    def program(*operands):
        sq, sk, tq, tk = operands
        s, t = (SLICES[name](mask(q @ k.mT, None)) for q, k in ((sq, sk), (tq, tk)))
        return LOSSES["kl"](s, t).mean()

    sq, sk, tq, tk = tensors(3, *shapes)
    inputs = [sq.requires_grad_(), sk.requires_grad_(), tq, tk]
    check(compare(program, inputs, dynamic=dynamic))


@pytest.mark.parametrize("vocab_size", [5, 9, 13])
@pytest.mark.parametrize("dynamic", [False, True])
def test_padding_to_the_other_s_words(vocab_size, dynamic):
    """A negative width crops."""

    def program(x, w, y, v):
        s, t = F.linear(x, w), F.linear(y, v)
        t = F.pad(t, (0, s.shape[-1] - t.shape[-1]), value=-INF)
        return rows_of_kl(s, t).mean()

    x, w, y, v = tensors(4, (TOKENS, WIDTH), (VOCAB, WIDTH), (TOKENS, WIDTH), (vocab_size, WIDTH))
    inputs = [x.requires_grad_(), w.requires_grad_(), y, v]
    check(compare(program, inputs, dynamic=dynamic))


def capped(z):
    return 3.0 * torch.tanh(z / 3.0)


# what the divergence is of, and what the cross-entropy is of
HARD = {
    "temperature": (lambda z, b: z / 2.0, lambda z, b: z),
    "shifted": (lambda z, b: (z + 3.0) / 2.0, lambda z, b: z),
    "softcap": (lambda z, b: capped(z) / 2.0, lambda z, b: capped(z)),
    "biased": (lambda z, b: (z + b.bias) / 2.0, lambda z, b: z + b.bias),
    "biased_and_capped": (
        lambda z, b: torch.tanh((z + b.bias) / 3.0) / 4.0,
        lambda z, b: capped(z + b.bias) - 1.0,
    ),
    "negative": (lambda z, b: z / -2.0, lambda z, b: z),
    "biased_behind": (lambda z, b: z / 2.0 + b.bias, lambda z, b: z + b.bias),
    "learned": (lambda z, b: z * b.log_tau.exp(), lambda z, b: z),
}


@pytest.mark.parametrize("name", every(2, HARD))
def test_labels_beside_a_temperature(name):
    """The cross-entropy of logits that the divergence has divided by a temperature."""
    divided, before = HARD[name]
    x, w, y, v, bias, rows = tensors(
        5, (TOKENS, WIDTH), (VOCAB, WIDTH), (TOKENS, WIDTH), (VOCAB, WIDTH), (VOCAB,), (TOKENS, 1)
    )
    b = beside(bias, rows, VOCAB, 5)
    labels = torch.arange(TOKENS)

    def program(x, w, y, v, *values):
        b = Beside(*values)
        s, t = F.linear(x, w), F.linear(y, v)
        soft = LOSSES["kl"](divided(s, b), divided(t, b)).mean()
        return soft + F.cross_entropy(before(s, b), labels)

    inputs = [x.requires_grad_(), w.requires_grad_(), y, v, *vars(b).values()]
    outcome = compare(program, inputs).check()
    assert outcome.num_fused == 1, outcome.report
