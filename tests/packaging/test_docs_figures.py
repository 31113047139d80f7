"""The figures of README and docs are those of records in bench/results/."""

from __future__ import annotations

import functools
import json
import math
import re
import subprocess
from pathlib import Path

import pytest

from bench import results, table
from bench.records import Record

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
PROGRAMS = {
    "key weights, renormalized": "key weights, renormalised",
    "MSE of attention probabilities": "MSE of maps", "entropy and z-loss": "entropy and z-loss",
}  # fmt: skip
# page, record, case, provider: sentences and cells with the figures in brackets
TEXTS: dict[str, dict[str, dict[str, dict[str, str]]]] = {
    "docs/guide/attention.md": {
        "h200-mha": {
            "mha-128-causal B=1 N=8192": {
                "streamkl": "tokens: (3.9 ms) and (133 MiB)",
                "inductor": "takes (23.4 ms) and (16.1 GiB)",
            },
        },
    },
    "docs/guide/lm-heads.md": {
        "h100-peers": {
            QWEN: {
                "direct": "tokens: (65.0 ms) and (1.5 GiB)",
                "inductor": "takes (68.0 ms) and (4.6 GiB)",
                "eager": "eager code (108 ms) and (23.2 GiB)",
            },
        },
    },
    "docs/guide/comparison.md": {
        "h100-heads": {
            QWEN: {
                "streamkl": "takes (67.6 ms) (forward KL)",
            },
        },
        "h100-peers-compiled": {
            f"{QWEN}, reverse_kl": {
                "streamkl": "(64.3 ms) (reverse KL)",
            },
        },
        "h100-peers-js": {
            f"{QWEN}, js": {
                "streamkl": "(72.2 ms) (JS)",
            },
        },
        "h100-entries": {
            f"{QWEN}, top 64": {
                "streamkl": "top 64 takes (40.7 ms) and (1.7 GiB)",
                "inductor": "takes (42.5 ms) and (7.0 GiB) (`h100",
            },
        },
    },
    "docs/guide/cached-teachers.md": {
        "h100-entries": {
            f"{QWEN}, top 64": {
                "streamkl": "tokens: (40.7 ms) and (1.7 GiB)",
                "inductor": "takes (42.5 ms) and (7.0 GiB)",
            },
        },
    },
    "docs/evidence/measured.md": {
        "h100-heads": {
            "qwen-0.6b-from-8b-head T=8192 V=151936": {
                "streamkl": "tokens: (32.2 ms) and (758 MiB)",
                "inductor": "takes (36.7 ms) and (4.6 GiB)",
            },
            "qwen-0.6b-from-8b-head T=64 V=151936": {
                "streamkl": "few tokens: (1.03 ms) with 64",
                "inductor": "takes (1.24 ms), 1.56",
            },
            "qwen-0.6b-from-8b-head T=256 V=151936": {
                "streamkl": "64 tokens, (1.14 ms) with 256",
                "inductor": "1.24 ms, (1.56 ms) and",
            },
            "qwen-0.6b-from-8b-head T=1024 V=151936": {
                "streamkl": "and (3.84 ms) with 1024",
                "inductor": "1.56 ms and (4.75 ms)",
            },
        },
        "h200-end-to-end-131072": {
            "llama-attention B=1 N=131072": {
                "streamkl": "takes (3.2 s) and (18.4 GiB)",
            },
        },
        "h200-end-to-end-8192": {
            "llama-attention B=1 N=8192": {
                "streamkl-graphs": "takes (25.1 ms) and (1.7 GiB)",
            },
        },
        "linear_h200": {
            "T=8192, V=152064": {
                "linear_kl": "takes (64.9 ms) and (1.57 GiB)",
                "linear_kl, 200 MiB": "takes (71.8 ms) and (1.30 GiB)",
            },
        },
    },
    "docs/guide/indexers.md": {
        "h100-chosen-keys": {
            "chosen keys N=4096": {
                "chosen": "| 4096 | (4.5 ms), (69 MiB) |",
                "all keys": "| (4.6 ms), (127 MiB) |",
                "torch": "| (772 ms), (222 MiB) |",
                "deterministic": "takes (8.2 ms) at N=4096",
            },
            "chosen keys N=32768": {
                "torch": "| (1.6 GiB), not timed |",
            },
        },
        "h100-chosen-32768": {
            "chosen keys N=32768": {
                "chosen": "| 32,768 | (36.4 ms), (553 MiB) |",
                "all keys": "| (313 ms), (697 MiB) |",
                "deterministic": "(74.7 ms) at N=32,768",
            },
        },
    },
    "docs/evidence/row-programs.md": {
        "h100-maps": {
            "maps, N=8192": {
                "weighted, renormalised": "N=8192 | (20.8 ms) |",
                "attention_kl, JS": "| (11.6 ms): `attention_kl`, Jensen",
                "MSE of maps": "softmaxes | (7.8 ms) |",
            },
        },
        "h100-row-claims": {
            "indexer, N=4096": {
                "program": "forward, (6.0 ms) with gradients, (179 MiB)",
            },
            "cached top 64, N=8192": {
                "program": "(68 ms), (1.3 GiB);",
                "program, mean": "(54 ms), (1.5 GiB) with",
                "inductor": "(44 ms), (7.0 GiB): compiled",
            },
        },
    },
    "docs/evidence/several-gpus.md": {
        "h100-four-vocabulary": {
            "vocabulary": {
                "one GPU": "comparison | (64.8 ms) | 1 | | (1.51 GiB)",
                "streamkl": "**(16.3 ms)** | 0.25 | 85 MiB | (0.74 GiB)",
                "five all-reduces": "(30.3 ms) | 0.47 | 84 MiB | (6.96 GiB)",
            },
            "mesh 2 x 2": {
                "FSDP2 x TP": "(21.3 ms) | 0.33 | 919 MiB | (3.44 GiB)",
            },
            "vocabulary 32768": {
                "one GPU": "comparison | (251.5 ms) | 1 | | (1.72 GiB)",
                "streamkl": "**(70.0 ms)** | 0.28 | 338 MiB | (0.96 GiB)",
                "five all-reduces": "(124.4 ms) | 0.49 | 337 MiB | (27.84 GiB)",
            },
            "mesh 2 x 2 32768": {
                "FSDP2 x TP": "(71.7 ms) | 0.28 | 1003 MiB | (3.57 GiB)",
            },
        },
        "h100-four-gather": {
            "sequence 131072": {
                "one GPU": "comparison | (913.3 ms) | 1 | | (1.33 GiB)",
                "gather": "(253.3 ms) | 0.28 | 576 MiB | (1.04 GiB)\n"
                "| 340 MiB | (1066 MiB) | 512 MiB of gathered",
                "heads": "**(231.6 ms)** | 0.25 | 726 MiB | (0.96 GiB)",
            },
        },
        "h100-four-sequence": {
            "sequence 131072": {
                "one GPU": "earlier run of one GPU, (917.6 ms).",
                "ring": "(242.9 ms) | 0.26 | 1280 MiB | (1.37 GiB)",
            },
            "sequence 524288": {
                "one GPU": "comparison | (15.3 s) | 1 | | (5.31 GiB)",
                "gather": "(3.90 s) | 0.25 | 2304 MiB | (5.04 GiB)",
                "heads": "**(3.69 s)** | 0.24 | 2904 MiB | (3.83 GiB)",
                "ring": "(3.83 s) | 0.25 | 5120 MiB | (5.48 GiB)",
            },
        },
        "h100-four-steps": {
            "layers": {
                "FSDP2, compiled layers": "| (85.7 ms), (26.98 GiB) |",
                "traced, streamkl": "**(23.7 ms)**, (0.73 GiB)",
            },
            "ddp": {
                "inductor": "| (36.5 ms), (8.47 GiB) |",
                "streamkl": "**(20.2 ms)**, (0.72 GiB)",
            },
            "fsdp cached": {
                "inductor": "| (100.6 ms), (8.73 GiB) |",
                "linear_topk_kl": "| (92.5 ms), (6.80 GiB) |",
            },
            "fsdp live": {
                "inductor": "| (256.4 ms), (10.03 GiB) |",
                "streamkl": "| (252.9 ms), (9.07 GiB) |",
            },
        },
        "h100-two-vocabulary": {
            "vocabulary": {
                "DTensor": "takes (108.8 ms) and (23.2 GiB)",
                "streamkl": "`linear_kl(group=)` (33.1 ms) and (1.0 GiB)",
            },
        },
        "h100-two-layers": {
            "layers": {
                "traced, streamkl": "every layer: (28.7 ms) and (0.55 GiB)",
                "FSDP2, compiled layers": "(85.9 ms) and (26.8 GiB) with compiled",
            },
        },
        "h100-two-more-tokens": {
            "vocabulary": {
                "one GPU": "comparison | (63.8 ms) | 1 | | (1.51 GiB)",
                "streamkl": "(34.8 ms) | 0.55 | 56 MiB | (1.00 GiB)",
            },
            "mesh 1 x 2": {
                "FSDP2 x TP": "(34.9 ms) | 0.54 | 56 MiB | (2.23 GiB)",
            },
            "vocabulary 32768": {
                "one GPU": "(257.5 ms) | 1 | | (1.72 GiB)",
                "streamkl": "(134.7 ms) | 0.52 | 225 MiB | (1.22 GiB)",
            },
            "mesh 1 x 2 32768": {
                "FSDP2 x TP": "(138.9 ms) | 0.52 | 225 MiB | (2.45 GiB)",
            },
        },
        "h100-two-sequence-131072": {
            "sequence 131072": {
                "one GPU": "(924.8 ms) | 1 | | (1.33 GiB)",
                "gather": "(492.0 ms) | 0.53 | 384 MiB | (1.64 GiB)",
                "heads": "(470.9 ms) | 0.51 | 968 MiB | (1.91 GiB)",
                "ring": "(484.9 ms) | 0.52 | 1024 MiB | (2.74 GiB)",
            },
        },
        "h100-two-fsdp": {
            "fsdp cached": {
                "inductor": "ed5fbf4418): (93.2 ms) and (8.7 GiB)",
                "linear_topk_kl": "`torch.compile`, (104.6 ms) and (6.8 GiB)",
            },
        },
    },
}
SHORT_STEPS = [  # of the table of short steps, in its order: record, student, whether with graphs
    ("h200-short-steps", "bert-4-layers", (False, False)),
    ("h100-short-steps", "bert-4-layers", (False, True, False, True)),
    ("h200-short-steps-tinybert", "tinybert", (False, True)),
    ("h100-short-steps-two-students", "tinybert", (False, True, False, True)),
    ("h100-short-steps", "minilm", (False, True, False, True)),
    ("h100-short-steps-two-students", "minilm", (False, False)),
]
FIGURE = re.compile(r"([\d.]+) (ms|s|MiB|GiB)")


@functools.cache
def records() -> dict[str, Record]:
    return results.load()


def assert_figures(text: str, record: str, case: str, provider: str) -> None:
    """Texts such as "3.9 ms" and "133 MiB" are the exact numbers, rounded to their last digit."""
    row = records()[record].find(case, provider)
    assert row is not None, (record, case, provider)
    if row.status == "oom":
        assert text.strip("* ") == "out of memory"
        return
    ms, mib = row.ms() or math.nan, row.peak_mib or math.nan
    exact = {"ms": ms, "s": ms / 1e3, "MiB": mib, "GiB": mib / 1024}
    # or a column of milliseconds
    for number, unit in FIGURE.findall(text) or [(text.split()[0], "ms")]:
        digits = len(number.partition(".")[2])
        assert abs(float(number) - exact[unit]) <= 0.5001 * 10**-digits, (text, exact)


def cells_of(page: str, begin: str) -> list[str]:
    """The cells of the line of a table, after those that it begins with."""
    (line,) = [x for x in (ROOT / page).read_text().splitlines() if x.startswith(f"| {begin}")][:1]
    return line.strip("| ").split(" | ")[1:]


PAGES = {"README.md": README, "docs/evidence/measured.md": MEASURED}


@pytest.mark.parametrize("page", PAGES)
def test_tables_have_the_figures_of_records(page: str) -> None:
    for begin, record, case, providers in PAGES[page]:
        for cell, provider in zip(cells_of(page, begin), providers, strict=False):
            if provider:
                assert_figures(cell, record, case, provider)


def test_short_steps_have_the_figures_of_records() -> None:
    text = (ROOT / "docs/evidence/measured.md").read_text()
    lines = text.split("| student | tokens |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [(record, case, x) for record, case, graphs in SHORT_STEPS for x in graphs]
    for line, (record, student, has_graphs) in zip(lines, rows, strict=True):
        *_, tokens, _where, graphs, ours, other = (x.strip() for x in line.strip("|").split("|"))
        assert (graphs == "yes") == has_graphs
        for cell, provider in ((ours, "streamkl"), (other, "inductor")):
            name = provider + "-graphs" * has_graphs
            assert_figures(cell, record, f"{student} B=32 N={tokens}", name)


def test_row_programs_have_the_figures_of_the_record() -> None:
    for name, case in PROGRAMS.items():
        for n in (256, 1024, 2048):
            _n, _mib, *cells = cells_of("docs/evidence/row-programs.md", f"{name} | {n} |")
            for i, provider in ((0, "inductor"), (2, "streamkl")):
                figures = f"{cells[i]} ms, {cells[i + 1]} MiB"
                assert_figures(figures, "row_programs_cpu", f"compiled: {case}, N={n}", provider)


def test_the_long_run_has_the_figures_of_its_record() -> None:
    found = json.loads((results.FOLDER / "long_run.json").read_text())["verdict"]
    assert found["is_within_band"] and found["resumed_off_by"] <= 0.001
    page = (ROOT / "docs/evidence/long-run.md").read_text()
    for name, apart, held_out in (
        ("eager code", "", "eager"), ("eager code, other seed", "band_of_two_seeds", "other_seed"),
        ("torch_streamkl, same seed", "distance_of_plugin", "plugin"),
    ):  # fmt: skip
        cell = f" {found[apart]:.3f}" if apart else ""
        assert f"| {name} |{cell} | {found[f'held_out_{held_out}']:.4f} |\n" in page


def test_the_run_at_size_has_the_figures_of_its_record() -> None:
    record = "h100-two-at-size"
    names = {"inductor": "naive code with `torch.compile`", "linear_topk_kl": "`linear_topk_kl`"}
    for row in records()[record].rows:
        assert (row.loss_error or 0.0) < 3.5e-4  # "by 0.03 % at most"
        begin = f"{names[row.provider]} |"
        *_, tokens, with_weights, above = cells_of("docs/evidence/several-gpus.md", begin)
        assert float(tokens.replace(",", "")) == round(row.more["tokens_per_s"], -2)
        assert with_weights == f"{row.more['peak_with_weights_mib'] / 1024:.1f} GiB"
        assert_figures(f"113 ms, {above}", record, "at size", row.provider)


@pytest.mark.parametrize(("page", "record"), [(p, r) for p, x in TEXTS.items() for r in x])
def test_sentences_have_the_figures_of_records(page: str, record: str) -> None:
    text = (ROOT / page).read_text()
    for case, providers in TEXTS[page][record].items():
        for provider, parts in providers.items():
            for part in parts.splitlines():
                figures = [x for x in re.findall(r"\(([^()]*)\)", part) if FIGURE.fullmatch(x)]
                shown = part
                for figure in figures:
                    shown = shown.replace(f"({figure})", figure)
                    assert_figures(figure, record, case, provider)
                assert shown in text


@pytest.mark.parametrize("page", results.PAGES)
def test_other_libraries_have_the_figures_of_records(page: str) -> None:
    text = (ROOT / page).read_text()
    lines = results.peers_table(records(), results.PAGES[page])
    assert text == table.between(text, "peers", lines), "python -m bench.results writes it"


def test_every_record_that_a_page_names_is_there() -> None:
    known = {p.stem for p in results.FOLDER.glob("*")}
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/notes/*.md")]
    for page in pages:
        named = re.findall(r"results/([\w-]+)\.(?:json|png|csv)", page.read_text())
        assert set(named) <= known, page.name


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


@pytest.mark.skipif(
    git("rev-parse", "--is-shallow-repository") != "false", reason="needs the history"
)
def test_commits_that_pages_name_exist() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    commit = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7}\b")
    named = {name for page in pages for name in commit.findall(page.read_text())}
    assert len(named) > 10
    assert not [name for name in named if git("cat-file", "-t", name) != "commit"]
