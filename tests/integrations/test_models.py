"""Distils models of transformers by attention and by logits, and writes the table of the docs.

``python -m tests.integrations.test_models`` writes the table into docs/reference/libraries.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integrations.libraries import needs, optional
from tests.support.compiling import compile_rewritten
from torch_streamkl.fx_passes.backend import collected
from torch_streamkl.fx_passes.passes import softcapped
from torch_streamkl.fx_passes.reporting.report import Report

transformers = optional("transformers")
pytestmark = needs("transformers")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "libraries.md"
BEGIN, END = "<!-- models:begin -->", "<!-- models:end -->"
VOCAB, TOKENS, LAYERS = 160, 24, 2
SIZES = {
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": VOCAB, "pad_token_id": 0,
    "max_position_embeddings": 64, "attn_implementation": "eager",
}  # fmt: skip


def text_model(name: str, **options: Any) -> Callable[[int], nn.Module]:
    def make(width: int) -> nn.Module:
        config = getattr(transformers, f"{name.split('For')[0].removesuffix('Model')}Config")
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, **SIZES, **options}
        return getattr(transformers, name)(config(**sizes))  # type: ignore[no-any-return]

    return make


def image_model(name: str) -> Callable[[int], nn.Module]:
    def make(width: int) -> nn.Module:
        config = getattr(transformers, f"{name}Config")(
            hidden_size=width, intermediate_size=2 * width, num_hidden_layers=LAYERS,
            num_attention_heads=4, image_size=32, patch_size=8, attn_implementation="eager",
        )  # fmt: skip
        return getattr(transformers, f"{name}Model")(config)  # type: ignore[no-any-return]

    return make


def whisper(width: int) -> nn.Module:
    config = transformers.WhisperConfig(
        d_model=width, encoder_layers=1, decoder_layers=LAYERS, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=width, decoder_ffn_dim=width,
        vocab_size=VOCAB, num_mel_bins=8, max_source_positions=20, max_target_positions=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)  # type: ignore[no-any-return]


GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
MODELS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "BERT, attention": (text_model("BertModel"), "attentions"),
    "BERT, logits": (text_model("BertForMaskedLM"), "logits"),
    "ModernBERT, attention": (text_model("ModernBertModel"), "attentions"),
    "ModernBERT, logits": (text_model("ModernBertForMaskedLM"), "logits"),
    "Llama, attention": (text_model("LlamaModel", **GROUPED), "attentions"),
    "Llama, logits": (text_model("LlamaForCausalLM", **GROUPED), "logits"),
    "Qwen3, attention": (text_model("Qwen3Model", **GROUPED), "attentions"),
    "Qwen3, logits": (text_model("Qwen3ForCausalLM", **GROUPED), "logits"),
    "Gemma2, attention": (text_model("Gemma2Model", **GROUPED), "attentions"),
    "Gemma2, logits": (text_model("Gemma2ForCausalLM", **GROUPED), "logits"),
    "ViT, attention": (image_model("ViT"), "attentions"),
    "DeiT, attention": (image_model("DeiT"), "attentions"),
    "Whisper, cross-attention": (whisper, "cross_attentions"),
    "Whisper, logits": (whisper, "logits"),
}


def batch(name: str) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (2, TOKENS), generator=make)
    if name.startswith("Whisper"):
        return {
            "input_features": torch.randn(2, 8, 40, generator=make), "decoder_input_ids": ids
        }  # fmt: skip
    if "iT" in name:
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=make)}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def divergence(name: str, got: Any, wanted: Any) -> Tensor:
    kind = MODELS[name][1]
    if kind == "logits":
        s, t = got.logits.log_softmax(-1), wanted.logits.softmax(-1)
        return F.kl_div(s, t, reduction="batchmean")
    pairs = zip(getattr(got, kind), getattr(wanted, kind), strict=True)
    losses = [F.kl_div(s.clamp_min(1e-12).log(), t, reduction="batchmean") for s, t in pairs]
    return torch.stack(losses).mean()


def distilled(name: str) -> Report:
    """A step compiled next to eager's, loss and gradients; the report."""
    make, kind = MODELS[name]
    torch.manual_seed(0)
    student, teacher = make(32).eval(), make(64).eval().requires_grad_(False)
    options = {} if kind == "logits" else {"output_attentions": True}
    if name.startswith(("Llama", "Qwen", "Gemma", "Whisper")):
        options["use_cache"] = False

    def step(**inputs: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(**inputs, **options)
        return divergence(name, student(**inputs, **options), wanted)

    inputs = batch(name)
    expected = step(**inputs)  # transformers installs its hooks
    parameters = [p for p in student.parameters() if p.requires_grad]
    grads = torch.autograd.grad(expected, parameters, allow_unused=True)
    compiled = compile_rewritten(step, inner="aot_eager")
    with collected() as report:
        got = compiled(**inputs)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    ours = torch.autograd.grad(got, parameters, allow_unused=True)
    assert [x is None for x in ours] == [x is None for x in grads]
    pairs = [(a, b) for a, b in zip(ours, grads, strict=True) if a is not None and b is not None]
    size = sum(float(b.square().sum()) for _, b in pairs) ** 0.5
    apart = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
    assert apart <= 1e-4 * size, (apart, size)
    return report


# what is left next to a fused divergence, and why
LEFT = {"Gemma2, attention": "of the softcapped attention; none on a GPU, by FlexAttention"}


def row(name: str, report: Report) -> str:
    left = f"{report.num_remaining}"
    if name in LEFT:
        left += f": {LEFT[name]}"
    return f"| {name} | {report.num_fused} of {len(report.sites)} | {left} |"


# An LM head reads what any encoder gives, Qwen3's attention is made like Llama's, and DeiT's like
# ViT's; test_libraries.py has attention of Llama, test_examples.py of ViT, and the test below of
# Gemma2. Whisper's cross-attention takes longest. `make test-integrations` has them all.
ALIKE = (
    "Whisper, cross-attention",
    "BERT, attention", "Llama, attention", "Gemma2, attention", "ViT, attention",
    "DeiT, attention", "Qwen3, attention",
    "ModernBERT, logits", "Llama, logits", "Qwen3, logits", "Gemma2, logits", "Whisper, logits",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in ALIKE)) for x in MODELS]
)
def test_model(name: str) -> None:
    report = distilled(name)
    sites = LAYERS if "logits" not in name else 1
    assert report.num_fused == len(report.sites) == sites, report
    assert (report.num_remaining > 0) == (name in LEFT), report
    told = any("FlexAttention has no backward on a CPU" in note for note in report.notes)
    assert told == (name in LEFT), report
    if transformers.__version__.startswith("5.23."):
        assert row(name, report) in PAGE.read_text(), "python -m tests.integrations.test_models"


@pytest.mark.slow  # tests/rewrite/test_softcapped_attention.py has its parts
def test_softcapped_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU gets, with FlexAttention run as it is: nothing is left of Gemma2's maps."""
    monkeypatch.setattr(softcapped, "_why_not_on_cpu", lambda: "")
    report = distilled("Gemma2, attention")
    assert report.num_fused == LAYERS
    assert not report.remaining, report


def write_table() -> None:
    rows = [row(name, distilled(name)) for name in MODELS]
    title = (
        f"| transformers {transformers.__version__} | losses fused "
        "| score- or logit-sized tensors left |"
    )
    table = "\n".join([BEGIN, title, "| --- | --- | --- |", *rows, END])
    text = PAGE.read_text()
    if BEGIN in text:
        text = text[: text.index(BEGIN)] + table + text[text.index(END) + len(END) :]
    else:
        text = text.rstrip() + "\n\n## Models of transformers\n\n" + table + "\n"
    PAGE.write_text(text)


if __name__ == "__main__":
    write_table()
