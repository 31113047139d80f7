"""Sites that are small enough are skipped where an option or a measurement says so."""

import pytest
import torch
import torch.nn.functional as F

from tests.support import quick
from tests.support.compiling import compile_rewritten
from torch_streamkl import inductor_options
from torch_streamkl.fx_passes.backend import collected
from torch_streamkl.fx_passes.planning import profitability

SKIPPED = "48 KiB of scores < 48.48 KiB (streamkl.min_mib)"
SKIPPED_PROGRAM = "48 KiB of products < 48.48 KiB (CPU threshold for custom losses)"
SIZE = 2 * (2 * 3 * 32 * 32) * 4 / 2**20  # MiB of both maps


def loss(q, k, teacher):
    wanted = (teacher @ teacher.mT).softmax(-1)
    got = (q @ k.mT).log_softmax(-1)
    return F.kl_div(got, wanted, reduction="batchmean")


def tensors(seqlen=32):
    return [torch.randn(2, 3, seqlen, 8).requires_grad_(i < 2) for i in range(3)]


def report_of(
    function=loss,
    dynamic=False,
    seqlen=32,
    **options,
):
    compiled = compile_rewritten(function, dynamic=dynamic, strict=True, **options)
    inputs = tensors(seqlen)
    with collected() as report:
        value = compiled(*inputs)
    torch.testing.assert_close(value, function(*inputs))
    return report


def test_smaller_than_the_option_is_left_and_reported():
    report = report_of(min_mib=SIZE * 1.01)
    assert [(site.fused, site.skipped) for site in report.sites] == [(False, SKIPPED)]
    assert report.num_unfused == 0  # strict
    assert f'{SKIPPED}. Force with {{"streamkl.min_mib": 0}}' in str(report)
    assert "0 of 1 loss fused" in str(report)


@pytest.mark.parametrize("least", [0, SIZE, None])
def test_others_are_fused(least):
    assert report_of(min_mib=least).num_fused == 1


def test_sizes_that_vary_are_fused():
    assert report_of(dynamic=True, min_mib=1e6).num_fused == 1


@pytest.mark.parametrize(("seqlen", "is_fused"), [(32, False), (300, True)])
def test_what_was_measured(seqlen, is_fused, monkeypatch):
    """On a CPU a step of less than 4 MiB is slower with the operator."""
    monkeypatch.setattr(profitability, "LEAST_MIB", quick.MEASURED_MIB)
    assert report_of(seqlen=seqlen).num_fused == is_fused


def test_without_the_option_the_device_decides(monkeypatch):
    monkeypatch.setattr(profitability, "LEAST_MIB", {"cpu": 1.0, "cuda": 0.0})
    assert report_of().num_fused == 0
    assert report_of(min_mib=0).num_fused == 1
    monkeypatch.setattr(profitability, "LEAST_MIB", {"cuda": 1.0})
    assert report_of().num_fused == 1


def attention(q, k, teacher):
    got = (q @ k.mT).softmax(-1)
    wanted = (teacher @ teacher.mT).softmax(-1)
    kl = (wanted * (wanted.clamp_min(1e-9).log() - got.clamp_min(1e-9).log())).sum(-1).mean()
    return kl + (got @ k).square().mean()


def test_small_attention_is_left_where_that_was_measured(monkeypatch):
    monkeypatch.setattr(profitability, "LEAST_ATTENTION_MIB", {"cpu": 1.0})
    report = report_of(attention)
    assert report.num_fused == 1
    assert "is skipped: 24 KiB of scores < 1 MiB (CPU threshold for attention)" in report.details()
    assert report.num_remaining > 0
    everything = report_of(attention, min_mib=0)
    assert everything.num_fused == 1
    assert everything.num_remaining == 0
    assert report_of(attention, dynamic=True).num_remaining == 0


def weighted(q, k, teacher):
    """No divergence of the operators: a row program."""
    wanted, got = (teacher @ teacher.mT).softmax(-1), (q @ k.mT).log_softmax(-1)
    weight = torch.linspace(0.5, 1.5, k.shape[-2])
    return (F.kl_div(got, wanted, reduction="none") * weight).sum(-1).mean()


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_row_programs_have_a_least_size_of_their_own(dynamic, monkeypatch):
    """Also of sizes that vary: they count as they are when the graph is compiled."""
    monkeypatch.setattr(profitability, "LEAST_PROGRAM_MIB", {"cpu": SIZE * 1.01})
    assert report_of(dynamic=dynamic).num_fused == 1  # a divergence
    report = report_of(weighted, dynamic=dynamic)
    assert [(site.fused, site.skipped) for site in report.sites] == [(False, SKIPPED_PROGRAM)]
    assert report.num_unfused == 0  # strict
    for fuses in ({"cpu": SIZE}, {"cuda": 1e6}):
        monkeypatch.setattr(profitability, "LEAST_PROGRAM_MIB", fuses)
        assert report_of(weighted, dynamic=dynamic).num_fused == 1
    monkeypatch.setattr(profitability, "LEAST_PROGRAM_MIB", {"cpu": SIZE * 1.01})
    assert report_of(weighted, dynamic=dynamic, min_mib=0).num_fused == 1


def test_row_programs_can_be_turned_off():
    report = report_of(row_programs=False)
    assert report.num_fused == 1
    with pytest.raises(Exception, match="vary along the keys"):
        report_of(weighted, row_programs=False)
    options = inductor_options(row_programs=False)
    assert options["pre_grad_custom_pass"].ours.row_programs is False


def kl(student, teacher):
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def with_logits(h, weight, teacher):
    logits = h @ weight.T
    return kl(logits, teacher @ weight.T), logits


def with_both_read(h, weight, teacher):
    student, teacher = h @ weight.T, teacher @ weight.T
    return kl(student, teacher), student.std(), teacher.std()


def with_labels(h, weight, teacher):
    student = h @ weight.T
    labels = teacher[:, 0].long() % len(weight)
    return kl(student, teacher @ weight.T) + F.cross_entropy(student, labels)


def after_a_metric(h, weight, teacher):
    """One program computes both, which has the name of the metric."""
    student = h @ weight.T
    log_p = student.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1).mean().detach()
    return kl(student, teacher @ weight.T), entropy, student.topk(5, -1).values.sum()


@pytest.mark.parametrize(
    ("loss", "readers"),
    [
        (with_logits, "the caller"), (with_both_read, "std"), (with_labels, ""),
        (after_a_metric, "topk"),
    ],
)  # fmt: skip
def test_logits_that_stay_are_not_computed_twice(loss, readers, monkeypatch):
    """Unless that saves others that are large, or the option says so."""
    monkeypatch.setattr(profitability, "LEAST_TWICE_MIB", quick.MEASURED_TWICE_MIB)
    sizes = (40, 8), (64, 8), (40, 8)
    inputs = [torch.randn(n).requires_grad_(i < 2) for i, n in enumerate(sizes)]

    def fused(**options):
        torch._dynamo.reset()
        given = {f"streamkl.{name}": value for name, value in options.items()}
        compiled = torch.compile(
            loss, backend="streamkl", options={**given, "streamkl.inner": "eager"}
        )
        with collected() as report:
            torch.testing.assert_close(compiled(*inputs), loss(*inputs))
        assert report.num_unfused == 0
        return report.num_fused, "".join(site.skipped for site in report.sites)

    is_fused, why = fused()
    assert is_fused == (not readers)
    assert why.startswith(f"{readers} also reads") == bool(readers)
    assert fused(min_mib=0) == (1 + (loss is after_a_metric), "")
    monkeypatch.setattr(profitability, "LEAST_TWICE_MIB", {"cpu": 40 * 64 * 4 / 2**20})
    assert bool(fused()[0]) == (loss is not with_both_read)  # of which no other logits go away
