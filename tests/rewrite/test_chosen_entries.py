"""What a reader found in programs at keys that a top-k names: each stands for its class."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.covering import every
from tests.support.losses import rows_of_kl
from tests.support.named_inputs import given

KEYS, ROWS = 7, 5
of_scores = given("q k r s data", {"z t": lambda q, k, r, s: (q @ k.mT * 0.3, r @ s.mT * 0.3)})


def operands(data=None):
    found = [torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (ROWS, KEYS, ROWS, KEYS)]
    return [*(x.requires_grad_(i < 2) for i, x in enumerate(found)), data]


def squares(z, t, ids):
    p, t = z.softmax(-1), t.softmax(-1)
    return (p.gather(-1, ids) - t.gather(-1, ids)).square()


def judge(program, inputs, fused):
    outcome = compare(program, inputs, verify="never", largest_score=8.0).check()
    assert fused is None or outcome.num_fused == fused, outcome.report
    return outcome


@pytest.mark.parametrize("count", [0, 2])
def test_the_mean_of_no_entry_has_no_gradient(count):
    """It is NaN, and eager code's gradient of it 0."""

    @of_scores
    def step(z, t):
        return squares(z, t, t.softmax(-1).topk(count, -1).indices).mean(-1)

    judge(step, operands(), int(count > 0))


def least_of_largest(t):
    return t.topk(2, -1).values[..., -1:]


FILTERS = {
    "-inf": lambda t: t.masked_fill(t < least_of_largest(t), -torch.inf).softmax(-1),
    "-1e9": lambda t: t.masked_fill(t < least_of_largest(t), -1e9).softmax(-1),
    "where": lambda t: torch.where(t >= least_of_largest(t), t, -torch.inf).softmax(-1),
    "probabilities": lambda t: t.softmax(-1) * (t >= least_of_largest(t)),
    "entries": lambda t: t.softmax(-1) - least_of_largest(t),
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_topk_filter_needs_ids_that_the_code_leaves_out(name):
    @of_scores
    def step(z, t):
        return -(FILTERS[name](t) * z.log_softmax(-1)).sum(-1).mean()

    judge(step, operands(), 1)


@pytest.mark.parametrize("is_later", [False, True])
def test_ids_that_the_code_writes_to_are_others(is_later):
    @of_scores
    def step(z, t):
        top = t.topk(2, -1)
        least = top.values[..., -1:]
        if not is_later:
            top.indices.zero_()
        p = t.masked_fill(t < least, -torch.inf).softmax(-1)
        loss = -(p * z.log_softmax(-1)).sum(-1).mean()
        return loss + top.indices.zero_().sum() if is_later else loss

    outcome = judge(step, operands(), 0)
    assert "a result of topk is written to in place" in str(outcome.report)


def wide(x, *dims):
    return x.expand(2, 3, ROWS, *dims)


PAIRS = {
    "entries and keys": lambda p, t, x, y: (x[..., None] - p[..., None, :]).abs().sum((-1, -2)),
    "keys and entries": lambda p, t, x, y: (t[..., None] * x[..., None, :]).exp().sum(-1).sum(-1),
    "in a loss": lambda p, t, x, y: F.l1_loss(
        wide(x[..., None], 2, KEYS), wide(t[..., None, :], 2, KEYS)
    ),
    "two keys in a loss": lambda p, t, x, y: F.mse_loss(
        wide(p[..., None], KEYS, KEYS), wide(t[..., None, :], KEYS, KEYS)
    ),
    "two entries": lambda p, t, x, y: (x[..., None] - y[..., None, :]).abs().sum((-1, -2)),
}


@pytest.mark.parametrize("name", every(2, PAIRS))
def test_pairs_of_entries_and_keys(name):
    """An entry is not met only by the key that it is."""

    @of_scores
    def step(z, t):
        ids = t.topk(2, -1).indices
        p, t = z.softmax(-1), t.softmax(-1)
        return PAIRS[name](p, t, p.gather(-1, ids), t.gather(-1, ids))

    judge(step, operands(), 0)


@of_scores
def of_data(z, t, data):
    return squares(z, t, data.topk(2, -1).indices).sum(-1)


@pytest.mark.parametrize(("length", "sites"), [(KEYS - 2, 1), (KEYS, 1), (KEYS + 2, 0)])
def test_ids_of_other_keys(length, sites):
    """Of more keys than there are, eager code raises where one is out of range."""
    data = torch.arange(float(length)).flip(0).expand(2, 3, ROWS, length).contiguous()
    judge(of_data, operands(data), sites)


def test_ids_out_of_range_raise_as_in_eager_code():
    data = torch.arange(KEYS + 2.0).expand(2, 3, ROWS, KEYS + 2).contiguous()
    with pytest.raises(RuntimeError, match="out of bounds"):
        compile_rewritten(of_data, verify="never")(*operands(data))


def test_ids_of_the_largest_rows():
    """In a row of them one may be there twice, and counts twice."""

    @of_scores
    def step(z, t):
        return squares(z, t, t.softmax(-1).topk(ROWS, -2).indices).sum(-1)

    judge(step, operands(), 0)


def heads(tokens=6):
    return [torch.randn(n, 4, dtype=torch.float64) for n in (tokens, 11, tokens, 11)]


def test_given_entries_that_are_padded_have_no_part_in_the_divergence():
    """A padded entry has the probability 0: 0 log 0 is 0 in `kl_div`, and a number comes first."""
    make = torch.Generator().manual_seed(0)
    logs = torch.rand(6, 3, generator=make, dtype=torch.float64).log()
    ids = torch.stack([torch.randperm(11, generator=make)[:3] for _ in range(6)])
    kept = logs >= -0.5
    assert kept.any() and not kept.all()

    def step(h, w, *_):
        p = logs.masked_fill(logs < -0.5, -math.inf).exp()
        return F.kl_div((h @ w.mT).log_softmax(-1).gather(-1, ids), p, reduction="sum")

    h, w, *_ = inputs = heads()
    found = judge(step, inputs, 1).compiled.outputs[0]
    own = (h @ w.mT).log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(found, (logs.exp() * (logs - own))[kept].sum())


@pytest.mark.parametrize("fill", [None, -1e4])
def test_logarithms_of_probabilities_at_labels(fill):
    """Where a mask makes one 0, eager code has -inf, and a score minus the log-sum-exp -1e4."""
    labels = torch.tensor([3, 1, 10, 3, 0, 2])

    def step(h, w, *_):
        s = h @ w.mT
        if fill is not None:
            s = s.masked_fill(torch.arange(6)[:, None] == torch.arange(11), fill)
        return s.softmax(-1).log().gather(-1, labels[:, None]).sum()

    outcome = judge(step, heads(), int(fill is None))
    assert outcome.compiled.outputs[0].isneginf().equal(outcome.eager.outputs[0].isneginf())


@pytest.mark.parametrize("tokens", [11, 6])
def test_labels_of_as_many_tokens_as_vocabulary_entries(tokens):
    """The sum over keys that finds a label is inside of one over as many tokens."""
    labels = torch.arange(tokens).flip(0) % 11

    def step(h, w, t, u):
        s = h @ w.mT
        loss = F.cross_entropy(s + (torch.arange(11) == 0), labels, reduction="sum")
        return loss + ((t @ u.mT).softmax(-1) * s).sum()

    assert judge(step, heads(tokens), None).num_fused


def test_labels_of_logits_that_the_divergence_masks():
    """The cross-entropy is of all entries, where those of the divergence lack one."""
    labels = torch.tensor([1, 0, 3, 1, 7, 10])

    def step(h, w, t, u):
        s, absent = h @ w.mT, torch.arange(11) == 1
        p, q = (x.masked_fill(absent, -math.inf).softmax(-1) for x in (s, t @ u.mT))
        return F.cross_entropy(s, labels) + (p * q).sum()

    outcome = judge(step, heads(), None)
    assert outcome.num_fused and outcome.compiled.outputs[0].isfinite(), outcome.report


TOKENS, VOCAB = 48, 40


def peaked():
    """Tokens with nearly all probability at one entry, which is one of their ids."""
    make = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, 64, generator=make) for n in (TOKENS, VOCAB))
    ids = torch.randint(VOCAB, (TOKENS, 3), generator=make)
    ids[:, 0] = (h @ w.mT).argmax(-1)
    ids[::5, 2] = ids[::5, 0]  # an id may stand twice
    return [h.requires_grad_(), w.requires_grad_(), torch.randn(VOCAB, generator=make), ids]


def not_chosen(z, ids):
    """A focal weight: NaN if a probability is above 1."""
    return ((1 - z.softmax(-1).gather(-1, ids)) ** 1.5).sum(-1)


def logs(z, ids):
    return z.log_softmax(-1).gather(-1, ids)


def both_logs(z, ids):
    """Of two rows of ids at once, and of two temperatures."""
    return logs(z, ids) + logs(z, ids.flip(0)) + logs(z / 2, ids)


of_peaks = given(
    "h w b ids",
    {"z": lambda h, w: (h @ w.mT,), "peaks": lambda h, w: (h @ w.mT * 3,)},
)
AT_PEAKS = {
    "scaled": lambda peaks, ids: not_chosen(peaks, ids),
    "bias": lambda peaks, b, ids: not_chosen(peaks + b, ids),
    "softcap": lambda z, ids: not_chosen(30 * torch.tanh(z / 30) * 5, ids),
    "temperature of rows": lambda z, b, ids: not_chosen(z / (1.1 + b[ids[:, :1]] % 1), ids),
    "mask": lambda peaks, b, ids: not_chosen(peaks.masked_fill(b > 1, -math.inf), ids),
    "by hand": lambda z, ids: (
        (1 - z.gather(-1, ids).sub(z.logsumexp(-1, True)).exp()) ** 1.5
    ).sum(-1),
    "sequences": lambda h, w, ids: not_chosen(
        h.view(4, -1, 64) @ w.mT * 3, ids.view(4, TOKENS // 4, -1)
    ),
    "ids of all tokens": lambda peaks, ids: (
        (1 - peaks.softmax(-1)[:, ids[:9, 0]]).pow(1.5).sum(-1)
    ),
    "ids from the end": lambda peaks, ids: (
        (1 - peaks.softmax(-1)[torch.arange(TOKENS)[:, None], ids - VOCAB]) ** 1.5
    ).sum(-1),
    "two dimensions of ids": lambda peaks, ids: (
        (
            1
            - peaks.softmax(-1)[
                torch.arange(TOKENS)[:, None, None], torch.stack([ids, ids.flip(0)], -1)
            ]
        )
        .pow(1.5)
        .sum((-1, -2))
    ),
    "every id": lambda peaks, ids: not_chosen(peaks, (torch.arange(VOCAB) + ids[:, :1]) % VOCAB),
    "no ids": lambda peaks, ids: not_chosen(peaks, ids[:, :0]),
    "one id": lambda peaks, ids: not_chosen(peaks, ids[:, :1]),
    "of a loss": lambda peaks, ids: (-logs(peaks, ids) + 1e-8).sqrt().sum(-1),
    "a number apart": lambda z, ids: (1 + 1e-6 - z.softmax(-1).gather(-1, ids)).log().sum(-1),
    "log1p": lambda z, ids: (1e-6 - z.softmax(-1).gather(-1, ids)).log1p().sum(-1),
    "the others": lambda z, ids: (2 + 1e-6 - z.softmax(-1).gather(-1, ids[:, ::2]).sum(-1)).log(),
    "several": lambda z, ids: ((1 - both_logs(z, ids).exp()) ** 1.5).sum(-1),
    # of a product that is written twice
    "next to all keys": lambda h, w, ids: (
        not_chosen(h @ w.mT * 3, ids) + (h @ w.mT * 3).softmax(-1).square().sum(-1)
    ),
    "next to labels": lambda peaks, ids: (
        not_chosen(peaks, ids) + F.cross_entropy(peaks, ids[:, 0], reduction="none")
    ),
    "next to logits": lambda z, ids: (z.gather(-1, ids) + logs(z, ids)).sum(-1),
    "focal": lambda peaks, ids: (
        -((1 - peaks.softmax(-1).gather(-1, ids)) ** 2.5 * logs(peaks, ids))
    ).sum(-1),
    "without gradient": lambda peaks, ids: (
        (1 - peaks.detach().softmax(-1).gather(-1, ids)) ** 1.5 * logs(peaks, ids)
    ).sum(-1),
}


@pytest.mark.parametrize("name", AT_PEAKS)
def test_probabilities_of_entries_are_at_most_1(name):
    """They are normalised by products of their own: NOTE [Log-probabilities of entries]."""
    outcome = compare(of_peaks(AT_PEAKS[name]), peaked(), verify="never").check()
    assert outcome.num_fused and all(x.fused for x in outcome.report.sites), outcome.report
    for x, y in zip(outcome.compiled.tensors(), outcome.eager.tensors(), strict=True):
        assert x is None or x.isfinite().equal(y.isfinite())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_of_entries_themselves(dtype):
    """Of two ids, the sum of both is 1 at most, but for a rounding."""
    h, w, _, ids = peaked()
    h, w, ids = h.detach().to(dtype), w.detach().to(dtype), ids[:, [0, 1]]
    ids[:, 1] = (ids[:, 0] + 1) % VOCAB

    def step(h, w):
        log = (h @ w.mT * 3).log_softmax(-1).gather(-1, ids)
        return log.sum(-1), log.exp().square().sum(-1), log.exp().sum(-1)

    outcome = compare(step, [h, w], verify="never")
    assert outcome.num_fused, outcome.report
    log, squares, total = outcome.compiled.outputs
    assert (log <= 0).all() and (squares <= 1 + 2e-7).all() and (total <= 1 + 2e-7).all()


def test_rows_without_a_probability_are_those_of_eager_code():
    """A row of which a mask leaves no key, or none of the ids, and one that holds infinity."""
    h, w, _, ids = peaked()
    hide = torch.zeros(TOKENS, VOCAB, dtype=torch.bool)
    hide[3] = True
    hide[4, ids[4]] = True
    hide[5] = True
    hide[5, ids[5]] = False
    with torch.no_grad():
        h[7, 0] = math.inf

    def step(h, w):
        return (h @ w.mT).masked_fill(hide, -math.inf).softmax(-1).gather(-1, ids).square().sum(-1)

    outcome = compare(step, [h, w], verify="never")
    found, expected = outcome.compiled.outputs[0], outcome.eager.outputs[0]
    assert outcome.num_fused == 1
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found.isnan().nonzero().flatten().tolist() == [3, 7] and found[4] == 0


def few(z, ids):
    return logs(z, ids).sum(-1) + z.softmax(-1).square().sum(-1)


def many(z, ids):
    return few(z, (torch.arange(20) + ids[:, :1]) % VOCAB)


# one pass over the logits with few ids; every key would be compared with many ids
@pytest.mark.parametrize(
    ("loss", "kind", "is_beside"),
    [
        (AT_PEAKS["scaled"], "entry_log_probs", False),
        (AT_PEAKS["bias"], "row_program", False),
        (AT_PEAKS["several"], "row_program", False),
        (few, "row_program", False),
        (many, "row_program", True),
    ],
)
def test_operators_of_entries(loss, kind, is_beside):
    outcome = compare(of_peaks(loss), peaked(), verify="never").check()
    assert outcome.kinds == {kind}
    assert any("and entry_log_probs" in x.form for x in outcome.report.sites) == is_beside


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_sums_of_entries_that_the_code_reads_are_no_other_losses(is_dynamic):
    """The user's code sums what it reads, or what asserts the number of rows that data decide."""

    @of_peaks
    def step(z, ids):
        entries = logs(z, ids)
        mean = entries[ids[:, 0] > 3].mean() if is_dynamic else entries.mean()
        return mean, *(() if is_dynamic else (entries.sum(-1).exp(), entries))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compare(step, peaked(), verify="never").check_fused(1, remaining=None)


LAST = torch.full((TOKENS, 1), VOCAB - 3)  # of a slice, and of what the slice lacks
SLICED = {
    "the largest of the last": lambda z, ids: (
        z[:, 2:].log_softmax(-1).gather(-1, z[:, 2:].detach().topk(1, -1).indices)
    ),
    "labels of the last": lambda z, ids: (
        F.cross_entropy(z[:, 2:], LAST[:, 0], reduction="none")
        + z[:, 2:].softmax(-1).square().sum(-1)
    ),
    "ignored labels": lambda z, ids: (
        F.cross_entropy(z[:, 2:], ids[:, 0].where(ids[:, 0] < 30, -100), reduction="none")
        + z[:, 2:].softmax(-1).square().sum(-1)
    ),
    "labels of the first": lambda z, ids: (
        F.cross_entropy(z[:, :-2], LAST[:, 0], reduction="none")
        + z[:, :-2].softmax(-1).square().sum(-1)
    ),
    "an entry beyond": lambda z, ids: (
        z.gather(-1, LAST + 2).sum(-1)
        - z[:, :19].logsumexp(-1)
        + z[:, :19].softmax(-1).square().sum(-1)
    ),
    "a diagonal": lambda z, ids: (
        z[:, 2:][torch.arange(VOCAB - 2), torch.arange(VOCAB - 2)]
        - z[: VOCAB - 2, 2:].logsumexp(-1)
        + z[: VOCAB - 2, 2:].softmax(-1).square().sum(-1)
    ),
    "from the last": lambda z, ids: (
        F.cross_entropy(z.flip(-1), ids[:, 0], reduction="none")
        + z.flip(-1).softmax(-1).square().sum(-1)
    ),
}


@pytest.mark.parametrize("name", SLICED)
def test_single_keys_of_slices(name):
    """Positions count from the first key of a slice, and an entry may be none of its keys."""
    outcome = compare(of_peaks(SLICED[name]), peaked(), verify="never").check()
    # as of a padded vocabulary
    assert outcome.num_fused or name != "labels of the first", outcome.report


@pytest.mark.parametrize("reduced", [lambda x: x.mean(), lambda x: x.sum(), lambda x: x.sum(-1)])
def test_no_tokens(reduced):
    step = of_peaks(lambda h, w, ids: reduced(logs(h[:0] @ w.mT, ids[:0])))
    compare(step, peaked(), verify="never").check()


@pytest.mark.parametrize("fill", [-1e4, -math.inf])
def test_ignored_labels_of_sequences_read_nothing(fill):
    """Their logits are flattened for the labels alone, and have a mask of the vocabulary."""
    h, w, b, ids = peaked()
    labels = ids[:, 0].where(ids[:, 0] % 3 > 0, -100).masked_fill((b > 1)[ids[:, 0]], -100)

    def step(h, w):
        z = (h.view(4, -1, 64) @ w.mT).masked_fill(b > 1, fill)
        hard = F.cross_entropy(z.flatten(0, 1), labels, reduction="none")
        return hard + z.softmax(-1).square().sum(-1).flatten()

    assert compare(step, [h, w], verify="never").check().num_fused


TRAINED_LEVELS = {
    "added": lambda z, ids, level: z + torch.zeros_like(z).scatter(-1, ids, level),
    "written": lambda z, ids, level: z.scatter(-1, ids, level),
}


@pytest.mark.parametrize("name", TRAINED_LEVELS)
def test_a_trained_number_at_ids_that_are_the_same(name):
    """Torch's gradient of a number that is scattered counts every id, also the same one twice."""
    ids = torch.tensor([0, 3, 3]).expand(2, 3, ROWS, 3)

    def step(q, k, r, s, level):
        z, t = q @ k.mT * 0.3, r @ s.mT * 0.3
        z = TRAINED_LEVELS[name](z, ids, level.expand(ids.shape))
        return rows_of_kl(z, t)

    level = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    compare(step, [*operands()[:4], level], verify="never").check()


OVER_ROWS = {
    "gather": lambda z, ids: z.log_softmax(-2).gather(-1, ids),
    "probabilities": lambda z, ids: z.softmax(-2).gather(-1, ids),
    "take_along_dim": lambda z, ids: z.log_softmax(-2).take_along_dim(ids, -1),
    "two indices": lambda z, ids: z.log_softmax(-2)[torch.arange(ROWS)[:, None], ids],
    "a diagonal": lambda z, ids: z[:, :ROWS].log_softmax(-2).diagonal()[:, None].expand(ids.shape),
    "keys and rows": lambda z, ids: z.log_softmax(-1).log_softmax(-2).gather(-1, ids),
}


@pytest.mark.parametrize("name", OVER_ROWS)
def test_entries_of_what_is_normalized_over_rows(name):
    """The ids of a row are not those of the rows that its normalizer sums."""
    h, w, g, v = (torch.randn(n, 3, dtype=torch.float64) for n in (ROWS, KEYS, ROWS, KEYS))
    ids = torch.arange(ROWS * 3).view(ROWS, 3) * 5 % KEYS

    def step(h, w, g, v):
        p = (g @ v.mT).gather(-1, ids).softmax(-1)
        return (p * OVER_ROWS[name](h @ w.mT, ids)).sum(-1)

    trained = [h.requires_grad_(), w.requires_grad_(), g, v]
    compare(step, trained, verify="never", largest_score=8.0).check()


CONDITIONS = {
    "of each entry": lambda e, ids: e > 0.01,
    "several": lambda e, ids: (e > 0.01) & (e < 0.5),
    "of their mean": lambda e, ids: e > e.mean(),
    "a choice": lambda e, ids: torch.where(e > 0.01, ids, 0),
    "counted": lambda e, ids: (e > 0.01).sum(-1),
    "any": lambda e, ids: (e > 0.01).any(-1),
    "all counted": lambda e, ids: torch.count_nonzero(e > 0.01),
}


@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.parametrize("of", ["softmax", "log_softmax"])
def test_conditions_on_entries_that_the_code_reads(of, name):
    """They are made of entries as they are, not of entries as truths or integers."""

    @of_peaks
    def step(z, h, ids):
        e = getattr(z * 0.1, of)(-1).gather(-1, ids)
        return CONDITIONS[name](e if of == "softmax" else e.exp(), ids), h.sum()

    compare(step, peaked(), verify="never").check()


WRITTEN_THROUGH = {
    "detached": lambda e: (e.detach().mul_(2.0), e.sum()),
    "returned": lambda e: (e.detach().mul_(2.0), e),
    "two views": lambda e: (e.detach().add_(1.0), e.view(-1)),
    "under no_grad": lambda e: (scaled_without_gradient(e.flatten()), e.reshape(-1).square()),
    "of one sum": lambda e: ((z := e.detach()).sub_(z.mean()), e.exp().sum()),
}


def scaled_without_gradient(x):
    with torch.no_grad():
        return x.mul_(0.5)


@pytest.mark.parametrize("name", WRITTEN_THROUGH)
@pytest.mark.parametrize("of", ["softmax", "log_softmax"])
def test_entries_that_a_view_writes_to(of, name):
    """What the code makes views of is one tensor, however many of them it reads."""

    @of_peaks
    def step(z, ids):
        return WRITTEN_THROUGH[name](getattr(z * 0.1, of)(-1).gather(-1, ids))

    compare(step, peaked(), verify="never").check()
