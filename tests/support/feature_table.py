"""The feature table of the docs: every feature by implementation, each cell backed by a test.

python -m tests.support.feature_table          # rewrite the section of docs/reference/features.md
"""

from pathlib import Path

from tests.support.problems import CASES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "features.md"
BEGIN, END = "<!-- features:begin -->", "<!-- features:end -->"

ON_GPU = "Triton, GPU tests"
FILES = {
    "reference": "tests/operators/test_attention_reference.py",
    "CPU (plain torch)": "tests/operators/test_attention_streaming.py",
    "Triton": "tests/kernels/test_attention_triton_interpreted.py",
    ON_GPU: "tests/kernels/test_attention_cuda.py",
}

# feature -> cases of problems.CASES that show it
FEATURES = {
    "forward KL": ("forward_kl",),
    "reverse KL": ("reverse_kl",),
    "soft cross-entropy": ("cross_entropy",),
    "Jeffreys": ("jeffreys",),
    "generalized Jensen-Shannon (`beta`)": ("js",),
    "total variation": ("tv",),
    "`eps` before the log, exact": ("eps",),
    "lower `clamp` before the log, exact": ("clamp_reached", "clamp_not_reached"),
    "causal, bottom-right aligned": ("causal", "causal_more_rows_than_keys"),
    "sliding window": ("window", "window_causal"),
    "boolean mask, any broadcast": ("mask_bool", "mask_bool_per_head"),
    "mask of keys, padding": (
        "mask_padding",
        "mask_padding_right",
        "mask_padding_left",
        "mask_padding_holes",
    ),
    "additive mask": ("mask_additive",),
    "`masked_fill` with a finite value": ("mask_filled",),
    "key lengths": ("key_lengths",),
    "query-row validity": ("row_mask",),
    "packed sequences": ("varlen", "varlen_causal", "varlen_window"),
    "softcap per side": ("softcap",),
    "temperature": ("temperature", "temperature_softcap"),
    "scale per side, learned scale": ("scale", "scale_tensor"),
    "bias per side": ("bias",),
    "ALiBi slopes": ("alibi",),
    "attention sinks": ("sink", "sink_student", "sink_teacher_two_pass"),
    "GQA, MQA, other groups per side": (
        "gqa",
        "mqa",
        "mqa_causal",
        "gqa_few_queries",
        "mqa_one_query",
    ),
    "head-averaged teacher": (
        "head_mean",
        "head_mean_groups",
        "head_mean_guards",
        "head_mean_filled",
    ),
    "known `teacher_lse`": ("teacher_lse",),
    "[B, N, H, D] layout": ("layout_bnhd",),
    "any strides, no copies": ("strides", "strides_padded"),
    "other head_dim per side": ("head_dims",),
    "few rows, long keys": (
        "split_keys",
        "split_keys_two_pass",
        "split_keys_clamp",
        "split_keys_padding",
    ),
    "reductions": ("reduction",),
}


DTYPES_ON_GPU = ("bfloat16", "float16", "float32")


def ids_of(implementation, feature):
    """Ids of the tests after a cell."""
    cases = FEATURES[feature]
    if implementation == ON_GPU:
        cases = tuple(f"{case}-{dtype}" for case in cases for dtype in DTYPES_ON_GPU)
    return [f"{FILES[implementation]}::test_feature[{case}]" for case in cases]


def section():
    """The Markdown between the markers."""
    lines = [
        BEGIN,
        "# Features of `attention_kl`",
        "",
        "What does `attention_kl` support, and which implementation is tested with it?",
        "[The API](api.md#operators) has the arguments. [Tuning](../guide/tuning.md) says which",
        "features have Hopper kernels.",
        "",
        '- "yes (2)": two tests of this feature pass in the file that the column links to. Each',
        "  compares values and gradients of both sides with textbook code in float64.",
        "- The second column has the names of the tests' cases (`tests/support/problems.py`).",
        "- The Triton column runs in Triton's interpreter, in float32 and float16.",
        "- The last column needs a GPU: bfloat16, float16 and float32.",
        "",
        "| feature | cases | "
        + " | ".join(f"[{name}](../../{file})" for name, file in FILES.items())
        + " |",
        "| --- | --- |" + " --- |" * len(FILES),
    ]
    for feature, cases in FEATURES.items():
        counts = {name: len(ids_of(name, feature)) for name in FILES}
        names = ", ".join(f"`{case}`" for case in cases)
        cells = [f"{n} tests" if name == ON_GPU else f"yes ({n})" for name, n in counts.items()]
        lines.append(f"| {feature} | {names} | {' | '.join(cells)} |")
    return "\n".join([*lines, END])


def update(text):
    """The page's text with the section up to date, at the end if it was not there."""
    if BEGIN not in text:
        return text.rstrip("\n") + "\n\n" + section() + "\n"
    head, rest = text.split(BEGIN, 1)
    return head + section() + rest.split(END, 1)[1]


if __name__ == "__main__":
    assert set(CASES) == {case for cases in FEATURES.values() for case in cases}
    PAGE.write_text(update(PAGE.read_text()))
