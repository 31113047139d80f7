"""The figures of README and docs are those of records in bench/results/."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest

from bench import results
from bench.records import Record, Row

ROOT = Path(__file__).resolve().parents[2]
Claim = tuple[str, str, str, tuple[str, ...]]  # beginning of a line, record, case, providers
OF_GRAPHS = ("eager", "inductor", "streamkl")
README: list[Claim] = [
    ("attention KL, 32 heads of 128, causal, 8192 tokens", "h200-mha",
     "mha-128-causal B=1 N=8192", OF_GRAPHS),
    ("attention KL, Llama-3-8B heads, causal, 65,536 tokens", "h200-attention-cases",
     "llama-3-8b B=1 N=65536", OF_GRAPHS),
    ("step of a Llama pair, attention KL of two layers, 8192 tokens", "h200-end-to-end-8192",
     "llama-attention B=1 N=8192", OF_GRAPHS),
]  # fmt: skip
QWEN = "qwen-7b-from-32b-head T=8192 V=152064"
GEMMA = "gemma-2b-from-9b-head T=4096 V=256000"
GRAPHS = ("streamkl-graphs", "inductor-graphs")
MEASURED: list[Claim] = [
    ("attention KL, 32 heads of 128", "h200-mha", "mha-128-causal B=1 N=8192", OF_GRAPHS),
    ("the same, heads of 64", "h200-mha", "mha-64-causal B=1 N=8192", OF_GRAPHS),
    ("attention KL, Qwen-2.5-7B heads", "h200-suite", "qwen-2.5-7b B=1 N=8192", OF_GRAPHS),
    ("attention KL, one student head", "h200-indexer", "deepseek-indexer B=1 N=4096",
     ("", *OF_GRAPHS[1:])),
    ("attention KL, Llama-3-8B heads", "h200-attention-cases", "llama-3-8b B=1 N=65536",
     OF_GRAPHS),
    ("training step of a Llama pair", "h200-end-to-end-8192", "llama-attention B=1 N=8192",
     OF_GRAPHS),
    ("LM-head KL, Qwen 7B from 32B", "h200-suite", QWEN, OF_GRAPHS),
    ("LM-head KL, Gemma 2B from 9B", "h200-suite", GEMMA, OF_GRAPHS),
    ("BERT, 32 × 128", "h200-short-heads", "bert-base B=32 N=128",
     ("streamkl", "direct", "inductor", *GRAPHS)),
    ("Llama-3-8B, 2048", "h200-short-heads", "llama-3-8b B=1 N=2048",
     ("streamkl", "direct", "inductor", *GRAPHS)),
]  # fmt: skip
PROGRAMS: list[Claim] = [
    (name, "row_programs_cpu", f"compiled: {case}, N={n}", ("inductor", "streamkl"))
    for name, case, sizes in (
        ("key weights, renormalized", "key weights, renormalised", (256, 1024, 2048)),
        ("MSE of attention probabilities", "MSE of maps", (256, 1024, 2048)),
        ("entropy and z-loss", "entropy and z-loss", (256, 1024, 2048)),
    )
    for n in sizes
]
# sentences and cells: page, text with the figures in brackets, record, case, provider
TEXTS = (
    ("docs/guide/attention.md", "tokens: (3.9 ms) and (133 MiB)", *README[0][1:3], "streamkl"),
    ("docs/guide/attention.md", "takes (23.4 ms) and (16.1 GiB)", *README[0][1:3], "inductor"),
    ("docs/guide/lm-heads.md", "tokens: (65.0 ms) and (1.5 GiB)", "h100-peers", QWEN, "direct"),
    ("docs/guide/lm-heads.md", "takes (68.0 ms) and (4.6 GiB)", "h100-peers", QWEN, "inductor"),
    ("docs/guide/lm-heads.md", "eager code (108 ms) and (23.2 GiB)", "h100-peers", QWEN, "eager"),
    ("docs/guide/comparison.md", "takes (65.0 ms) (forward KL)", "h100-peers-compiled", QWEN,
     "streamkl"),
    ("docs/guide/comparison.md", "(64.3 ms) (reverse KL)", "h100-peers-compiled",
     f"{QWEN}, reverse_kl", "streamkl"),
    ("docs/guide/comparison.md", "(72.2 ms) (JS)", "h100-peers-js", f"{QWEN}, js", "streamkl"),
    ("docs/evidence/measured.md", "takes (3.2 s) and (18.4 GiB)", "h200-end-to-end-131072",
     "llama-attention B=1 N=131072", "streamkl"),
    ("docs/evidence/measured.md", "takes (25.1 ms) and (1.7 GiB)", "h200-end-to-end-8192",
     "llama-attention B=1 N=8192", "streamkl-graphs"),
    ("docs/evidence/measured.md", "takes (64.9 ms) and (1.57 GiB)", "linear_h200",
     "T=8192, V=152064", "linear_kl"),
    ("docs/evidence/measured.md", "takes (71.8 ms) and (1.30 GiB)", "linear_h200",
     "T=8192, V=152064", "linear_kl, 200 MiB"),
    ("docs/guide/indexers.md", "| 4096 | (4.5 ms), (69 MiB) |", "h100-chosen-keys",
     "chosen keys N=4096", "chosen"),
    ("docs/guide/indexers.md", "| (4.6 ms), (127 MiB) |", "h100-chosen-keys",
     "chosen keys N=4096", "all keys"),
    ("docs/guide/indexers.md", "| (772 ms), (222 MiB) |", "h100-chosen-keys",
     "chosen keys N=4096", "torch"),
    ("docs/guide/indexers.md", "| 32,768 | (36.4 ms), (553 MiB) |", "h100-chosen-32768",
     "chosen keys N=32768", "chosen"),
    ("docs/guide/indexers.md", "| (313 ms), (697 MiB) |", "h100-chosen-32768",
     "chosen keys N=32768", "all keys"),
    ("docs/guide/indexers.md", "| (1.6 GiB), not timed |", "h100-chosen-keys",
     "chosen keys N=32768", "torch"),
    ("docs/guide/indexers.md", "takes (8.2 ms) at N=4096", "h100-chosen-keys",
     "chosen keys N=4096", "deterministic"),
    ("docs/guide/indexers.md", "(74.7 ms) at N=32,768", "h100-chosen-32768",
     "chosen keys N=32768", "deterministic"),
    ("docs/evidence/row-programs.md", "N=8192 | (20.8 ms) |", "h100-maps", "maps, N=8192",
     "weighted, renormalised"),
    ("docs/evidence/row-programs.md", "| (11.6 ms): `attention_kl`, Jensen", "h100-maps",
     "maps, N=8192", "attention_kl, JS"),
    ("docs/evidence/row-programs.md", "softmaxes | (7.8 ms) |", "h100-maps", "maps, N=8192",
     "MSE of maps"),
    ("docs/evidence/row-programs.md", "forward, (6.0 ms) with gradients, (179 MiB)",
     "h100-row-claims", "indexer, N=4096", "program"),
    ("docs/evidence/row-programs.md", "(68 ms), (1.3 GiB);", "h100-row-claims",
     "cached top 64, N=8192", "program"),
    ("docs/evidence/row-programs.md", "(54 ms), (1.5 GiB) with", "h100-row-claims",
     "cached top 64, N=8192", "program, mean"),
    ("docs/evidence/row-programs.md", "(44 ms), (7.0 GiB): compiled", "h100-row-claims",
     "cached top 64, N=8192", "inductor"),
    ("docs/evidence/several-gpus.md", "comparison | (64.8 ms) | 1 | | (1.51 GiB)",
     "h100-four-vocabulary", "vocabulary", "one GPU"),
    ("docs/evidence/several-gpus.md", "**(16.3 ms)** | 0.25 | 85 MiB | (0.74 GiB)",
     "h100-four-vocabulary", "vocabulary", "streamkl"),
    ("docs/evidence/several-gpus.md", "(21.3 ms) | 0.33 | 919 MiB | (3.44 GiB)",
     "h100-four-vocabulary", "mesh 2 x 2", "FSDP2 x TP"),
    ("docs/evidence/several-gpus.md", "(30.3 ms) | 0.47 | 84 MiB | (6.96 GiB)",
     "h100-four-vocabulary", "vocabulary", "five all-reduces"),
    ("docs/evidence/several-gpus.md", "comparison | (251.5 ms) | 1 | | (1.72 GiB)",
     "h100-four-vocabulary", "vocabulary 32768", "one GPU"),
    ("docs/evidence/several-gpus.md", "**(70.0 ms)** | 0.28 | 338 MiB | (0.96 GiB)",
     "h100-four-vocabulary", "vocabulary 32768", "streamkl"),
    ("docs/evidence/several-gpus.md", "(71.7 ms) | 0.28 | 1003 MiB | (3.57 GiB)",
     "h100-four-vocabulary", "mesh 2 x 2 32768", "FSDP2 x TP"),
    ("docs/evidence/several-gpus.md", "(124.4 ms) | 0.49 | 337 MiB | (27.84 GiB)",
     "h100-four-vocabulary", "vocabulary 32768", "five all-reduces"),
    ("docs/evidence/several-gpus.md", "comparison | (913.3 ms) | 1 | | (1.33 GiB)",
     "h100-four-gather", "sequence 131072", "one GPU"),
    ("docs/evidence/several-gpus.md", "(253.3 ms) | 0.28 | 576 MiB | (1.04 GiB)",
     "h100-four-gather", "sequence 131072", "gather"),
    ("docs/evidence/several-gpus.md", "**(231.6 ms)** | 0.25 | 726 MiB | (0.96 GiB)",
     "h100-four-gather", "sequence 131072", "heads"),
    ("docs/evidence/several-gpus.md", "earlier run of one GPU, (917.6 ms).",
     "h100-four-sequence", "sequence 131072", "one GPU"),
    ("docs/evidence/several-gpus.md", "| 340 MiB | (1066 MiB) | 512 MiB of gathered",
     "h100-four-gather", "sequence 131072", "gather"),
    ("docs/evidence/several-gpus.md", "(242.9 ms) | 0.26 | 1280 MiB | (1.37 GiB)",
     "h100-four-sequence", "sequence 131072", "ring"),
    ("docs/evidence/several-gpus.md", "comparison | (15.3 s) | 1 | | (5.31 GiB)",
     "h100-four-sequence", "sequence 524288", "one GPU"),
    ("docs/evidence/several-gpus.md", "(3.90 s) | 0.25 | 2304 MiB | (5.04 GiB)",
     "h100-four-sequence", "sequence 524288", "gather"),
    ("docs/evidence/several-gpus.md", "**(3.69 s)** | 0.24 | 2904 MiB | (3.83 GiB)",
     "h100-four-sequence", "sequence 524288", "heads"),
    ("docs/evidence/several-gpus.md", "(3.83 s) | 0.25 | 5120 MiB | (5.48 GiB)",
     "h100-four-sequence", "sequence 524288", "ring"),
    ("docs/evidence/several-gpus.md", "| (85.7 ms), (26.98 GiB) |", "h100-four-steps", "layers",
     "FSDP2, compiled layers"),
    ("docs/evidence/several-gpus.md", "**(23.7 ms)**, (0.73 GiB)", "h100-four-steps", "layers",
     "traced, streamkl"),
    ("docs/evidence/several-gpus.md", "| (36.5 ms), (8.47 GiB) |", "h100-four-steps", "ddp",
     "inductor"),
    ("docs/evidence/several-gpus.md", "**(20.2 ms)**, (0.72 GiB)", "h100-four-steps", "ddp",
     "streamkl"),
    ("docs/evidence/several-gpus.md", "| (100.6 ms), (8.73 GiB) |", "h100-four-steps",
     "fsdp cached", "inductor"),
    ("docs/evidence/several-gpus.md", "| (92.5 ms), (6.80 GiB) |", "h100-four-steps",
     "fsdp cached", "linear_topk_kl"),
    ("docs/evidence/several-gpus.md", "| (256.4 ms), (10.03 GiB) |", "h100-four-steps",
     "fsdp live", "inductor"),
    ("docs/evidence/several-gpus.md", "| (252.9 ms), (9.07 GiB) |", "h100-four-steps",
     "fsdp live", "streamkl"),
    ("docs/evidence/several-gpus.md", "takes (108.8 ms) and (23.2 GiB)",
     "h100-two-vocabulary", "vocabulary", "DTensor"),
    ("docs/evidence/several-gpus.md", "`linear_kl(group=)` (33.1 ms) and (1.0 GiB)",
     "h100-two-vocabulary", "vocabulary", "streamkl"),
    ("docs/evidence/several-gpus.md", "every layer: (28.7 ms) and (0.55 GiB)",
     "h100-two-layers", "layers", "traced, streamkl"),
    ("docs/evidence/several-gpus.md", "(85.9 ms) and (26.8 GiB) with compiled",
     "h100-two-layers", "layers", "FSDP2, compiled layers"),
    ("docs/evidence/several-gpus.md", "comparison | (63.8 ms) | 1 | | (1.51 GiB)",
     "h100-two-more-tokens", "vocabulary", "one GPU"),
    ("docs/evidence/several-gpus.md", "(34.8 ms) | 0.55 | 56 MiB | (1.00 GiB)",
     "h100-two-more-tokens", "vocabulary", "streamkl"),
    ("docs/evidence/several-gpus.md", "(34.9 ms) | 0.54 | 56 MiB | (2.23 GiB)",
     "h100-two-more-tokens", "mesh 1 x 2", "FSDP2 x TP"),
    ("docs/evidence/several-gpus.md", "(257.5 ms) | 1 | | (1.72 GiB)",
     "h100-two-more-tokens", "vocabulary 32768", "one GPU"),
    ("docs/evidence/several-gpus.md", "(134.7 ms) | 0.52 | 225 MiB | (1.22 GiB)",
     "h100-two-more-tokens", "vocabulary 32768", "streamkl"),
    ("docs/evidence/several-gpus.md", "(138.9 ms) | 0.52 | 225 MiB | (2.45 GiB)",
     "h100-two-more-tokens", "mesh 1 x 2 32768", "FSDP2 x TP"),
    ("docs/evidence/several-gpus.md", "(924.8 ms) | 1 | | (1.33 GiB)",
     "h100-two-sequence-131072", "sequence 131072", "one GPU"),
    ("docs/evidence/several-gpus.md", "(492.0 ms) | 0.53 | 384 MiB | (1.64 GiB)",
     "h100-two-sequence-131072", "sequence 131072", "gather"),
    ("docs/evidence/several-gpus.md", "(470.9 ms) | 0.51 | 968 MiB | (1.91 GiB)",
     "h100-two-sequence-131072", "sequence 131072", "heads"),
    ("docs/evidence/several-gpus.md", "(484.9 ms) | 0.52 | 1024 MiB | (2.74 GiB)",
     "h100-two-sequence-131072", "sequence 131072", "ring"),
    ("docs/evidence/several-gpus.md", "ed5fbf4418): (93.2 ms) and (8.7 GiB)",
     "h100-two-fsdp", "fsdp cached", "inductor"),
    ("docs/evidence/several-gpus.md", "`torch.compile`, (104.6 ms) and (6.8 GiB)",
     "h100-two-fsdp", "fsdp cached", "linear_topk_kl"),
)  # fmt: skip
SHORT_STEPS = [  # of the table of short steps, in its order: record, case, with CUDA graphs
    ("h200-short-steps", "bert-4-layers B=32 N=128", False),
    ("h200-short-steps", "bert-4-layers B=32 N=512", False),
    ("h100-short-steps", "bert-4-layers B=32 N=128", False),
    ("h100-short-steps", "bert-4-layers B=32 N=128", True),
    ("h100-short-steps", "bert-4-layers B=32 N=512", False),
    ("h100-short-steps", "bert-4-layers B=32 N=512", True),
    ("h200-short-steps-tinybert", "tinybert B=32 N=512", False),
    ("h200-short-steps-tinybert", "tinybert B=32 N=512", True),
    ("h100-short-steps-two-students", "tinybert B=32 N=128", False),
    ("h100-short-steps-two-students", "tinybert B=32 N=128", True),
    ("h100-short-steps-two-students", "tinybert B=32 N=512", False),
    ("h100-short-steps-two-students", "tinybert B=32 N=512", True),
    ("h100-short-steps", "minilm B=32 N=128", False),
    ("h100-short-steps", "minilm B=32 N=128", True),
    ("h100-short-steps-two-students", "minilm B=32 N=128", False),
    ("h100-short-steps-two-students", "minilm B=32 N=512", False),
]
FIGURE = re.compile(r"([\d.]+) (ms|s|MiB|GiB)")


@functools.cache
def records() -> dict[str, Record]:
    return results.load()


def measured(record: str, case: str, provider: str) -> Row:
    row = records()[record].find(case, provider)
    assert row is not None, (record, case, provider)
    return row


def assert_figures(text: str, row: Row) -> None:
    """Texts such as "3.9 ms" and "133 MiB" are the exact numbers, rounded to their last digit."""
    if row.status == "oom":
        assert text.strip("* ") == "out of memory"
        return
    figures = FIGURE.findall(text)
    if not figures:  # a column of milliseconds
        figures = [(text.split()[0], "ms")]
    for number, unit in figures:
        exact = {"ms": row.ms(), "s": (row.ms() or 0) / 1e3, "MiB": row.peak_mib}.get(unit)
        exact = (row.peak_mib or 0) / 1024 if unit == "GiB" else exact
        assert exact is not None, (text, row)
        digits = len(number.partition(".")[2])
        assert abs(float(number) - exact) <= 0.5001 * 10**-digits, (text, exact)


PAGES = {"README.md": README, "docs/evidence/measured.md": MEASURED}


@pytest.mark.parametrize("page", PAGES)
def test_tables_have_the_figures_of_records(page: str) -> None:
    lines = (ROOT / page).read_text().splitlines()
    for begin, record, case, providers in PAGES[page]:
        line = next((x for x in lines if x.startswith(f"| {begin}")), None)
        assert line is not None, begin
        cells = line.strip("| ").split(" | ")[1:]
        for cell, provider in zip(cells, providers, strict=False):
            if provider:
                assert_figures(cell, measured(record, case, provider))


def test_short_steps_have_the_figures_of_records() -> None:
    text = (ROOT / "docs/evidence/measured.md").read_text()
    table = text.split("| student | tokens |")[1].split("\n\n")[0].splitlines()[2:]
    for line, (record, case, has_graphs) in zip(table, SHORT_STEPS, strict=True):
        *_, tokens, _where, graphs, ours, other = line.strip("|").split("|")
        assert case.endswith(f"N={tokens.strip()}")
        assert (graphs.strip() == "yes") == has_graphs
        for cell, provider in ((ours, "streamkl"), (other, "inductor")):
            name = provider + "-graphs" * has_graphs
            assert_figures(cell.strip(), measured(record, case, name))


def test_row_programs_have_the_figures_of_the_record() -> None:
    lines = (ROOT / "docs/evidence/row-programs.md").read_text().splitlines()
    for name, record, case, providers in PROGRAMS:
        n = case.rpartition("=")[2]
        (line,) = [x for x in lines if x.startswith(f"| {name} | {n} |")]
        cells = line.strip("| ").split(" | ")
        for i, provider in zip((3, 5), providers, strict=True):
            row = measured(record, case, provider)
            assert_figures(f"{cells[i]} ms, {cells[i + 1]} MiB", row)


@pytest.mark.parametrize(("page", "text", "record", "case", "provider"), TEXTS)
def test_sentences_have_the_figures_of_records(
    page: str, text: str, record: str, case: str, provider: str
) -> None:
    figures = [x for x in re.findall(r"\(([^()]*)\)", text) if FIGURE.fullmatch(x)]
    shown = text
    for figure in figures:
        shown = shown.replace(f"({figure})", figure)
    assert shown in (ROOT / page).read_text()
    row = measured(record, case, provider)
    for figure in figures:
        assert_figures(figure, row)


@pytest.mark.parametrize("page", results.PAGES)
def test_other_libraries_have_the_figures_of_records(page: str) -> None:
    text = (ROOT / page).read_text()
    lines = results.peers_table(records(), results.PAGES[page])
    assert text == results.between(text, "peers", lines), "python -m bench.results writes it"


def test_every_record_that_a_page_names_is_there() -> None:
    known = {p.stem for p in results.FOLDER.glob("*")}
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/notes/*.md")]
    for page in pages:
        for name in re.findall(r"results/([\w-]+)\.(?:json|png|csv)", page.read_text()):
            assert name in known, (page.name, name)


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


@pytest.mark.skipif(
    git("rev-parse", "--is-shallow-repository") != "false", reason="needs the history"
)
def test_commits_that_pages_name_exist() -> None:
    named = {
        (str(page.relative_to(ROOT)), match[0])
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for match in re.finditer(
            r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7}\b", page.read_text()
        )
    }
    assert len(named) > 10
    assert not [x for x in named if git("cat-file", "-t", x[1]) != "commit"]
