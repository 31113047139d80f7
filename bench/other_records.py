"""Tables of the measurements that have a record of their own kind, for RESULTS.md."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench import attention_matrix
from bench.table import markdown_lines

Record = dict[str, Any]


def load(folder: Path) -> dict[str, Record]:
    """The records that exist, in the order of their sections."""
    paths = {name: folder / f"{name}.json" for name in SECTIONS}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def render(records: dict[str, Record]) -> str:
    """A section for each record."""
    parts = []
    for name, record in records.items():
        title, body = SECTIONS[name]
        machine = ", ".join(f"{k} {v}" if k != "device" else v for k, v in _machine(record))
        command = f"    {record['command']}\n\n" if "command" in record else ""
        note = f"{record['note']}\n\n" if "note" in record else ""
        parts.append(f"## {title}\n\n{command}{machine}.\n\n{note}{body(record)}\n")
    return "\n".join(parts)


def _machine(record: Record) -> Iterable[tuple[str, str]]:
    return ((k, v) for k, v in record["machine"].items() if k not in ("transformers", "driver"))


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(markdown_lines(header, rows))


def _linear_gpu(record: Record) -> str:
    """Every case: providers beside each other, interleaved in one run."""
    parts = []
    for case, rows in record["cases"].items():
        compiled = rows.get("torch.compile", {}).get("ms")
        lines = []
        for name, row in rows.items():
            if "ms" not in row:
                lines.append((name, "out of memory", "", "", "", ""))
                continue
            share = f"{row['ms'] / compiled:.3f}" if compiled else ""
            errors = [row.get(f"{k}_grad_error") for k in ("hidden", "weight")]
            lines.append(
                (
                    name,
                    f"{row['ms']:.2f}",
                    f"{row['min_ms']:.2f} to {row['max_ms']:.2f}",
                    share,
                    f"{row['peak_gib']:.3f}",
                    ", ".join(f"{e:.1e}" for e in errors if e is not None),
                )
            )
        header = ("provider", "ms", "range", "of torch.compile", "peak GiB", "errors of dX, dW")
        parts.append(f"### {case}\n\n{_table(header, lines)}\n")
    return "\n".join(parts)


def _linear_cpu(record: Record) -> str:
    rows = [
        (name, f"{row['process_s']:.2f}", f"{row['peak_mib']:.1f}")
        for name, row in record["rows"].items()
    ]
    return f"{record['case']}.\n\n" + _table(("provider", "processor s", "peak MiB"), rows)


def _native(record: Record) -> str:
    overhead = record["overhead"]
    rows = [
        (name, *(f"{row[k]:.1f}" if k in row else "" for k in ("call_us", "kernels_us")))
        for name, row in overhead.items()
        if "call_us" in row
    ]
    text = _table(("small call", "host us a call", "its kernels us"), rows)
    text += f"\n\nAn empty kernel and its wait take {_wait_us(overhead):.1f} us on this machine."
    return f"{text}\n\n{_native_tests(record)}" if "tests" in record else text


def _native_tests(record: Record) -> str:
    left = sum(outcome == "no outcome" for outcome in record["tests"].values())
    text = f"Tests on the GPU: {record['summary']}"
    return text + (f", {left} had no turn in the time there was." if left else ".")


def _wait_us(overhead: Record) -> float:
    return float(overhead["empty_kernel"]["synchronised_us"])


def _compile_time(record: Record) -> str:
    rows = [
        (
            row["family"],
            "dynamic" if row["dynamic"] else "static",
            str(row["streamkl"]["fused"]),
            f"{row['streamkl']['rewrite']:.2f}",
            f"{row['inductor']['backend']:.1f}",
            f"{row['share_of_inductor']:.1%}",
        )
        for row in record["records"]
    ]
    header = ("pair", "shapes", "sites", "rewrite s", "plain Inductor s", "share")
    return _table(header, rows)


def _several_gpus(record: Record) -> str:
    rows = [
        (
            row["objective"],
            str(row["context"]),
            row["provider"],
            f"{row['step_ms']:.1f}",
            f"{row['peak_mib'] / 1024:.2f}",
            f"{row['loss_difference']:.1e}",
            f"{row['gradient_difference']:.1e}",
        )
        for row in record["rows"]
    ]
    header = (
        "KL of", "tokens a rank", "provider", "step ms", "peak GiB a rank",
        "loss off eager's", "gradients off eager's",
    )  # fmt: skip
    return f"{record['processes']} processes, a GPU each.\n\n{_table(header, rows)}"


def _sharded(record: Record) -> str:
    rows = [
        (
            row["case"],
            ", ".join(f"{value} {name}" for name, value in row["shape"].items()),
            row["provider"],
            f"{row['step_ms']:.1f}",
            f"{row['peak_mib'] / 1024:.2f}",
            f"{row['received_mib']:.1f}" if row["received_mib"] else "",
            f"{row['loss_difference']:.1e}",
            f"{row['gradient_difference']:.1e}",
        )
        for row in record["rows"]
    ]
    header = (
        "case", "shape", "provider", "step ms", "peak GiB a rank", "received MiB a rank",
        "loss off the first's", "gradients off the first's",
    )  # fmt: skip
    return f"{record['processes']} processes, a GPU each.\n\n{_table(header, rows)}"


def _forms(record: Record) -> str:
    return "\n".join(attention_matrix.beside_lines(attention_matrix.Matrix.of(record)))


def _row_programs(record: Record) -> str:
    rows = []
    for row in record["rows"]:
        plain, ours = (row["providers"][name] for name in ("inductor", "streamkl"))
        cells = [row["form"], str(row["size"]), f"{row['scores_mib']:.0f}"]
        for x in (plain, ours):
            is_timed = "step_ms" in x
            cells += (
                [f"{x['step_ms']:.1f}", f"{x['peak_mib']:.0f}"] if is_timed else [x["status"]] * 2
            )
        both = "step_ms" in plain and "step_ms" in ours
        ratio = f"{ours['step_ms'] / plain['step_ms']:.2f}" if both else ""
        rows.append((*cells, ratio, f"{ours.get('gradient_error', math.nan):.1e}"))
    header = (
        "form", "N", "products MiB", "inductor ms", "inductor peak MiB", "streamkl ms",
        "streamkl peak MiB", "ratio", "gradient error",
    )  # fmt: skip
    return _table(header, rows)


def _row_claims(record: Record) -> str:
    rows = []
    for row in record["rows"]:
        for provider, x in row["providers"].items():
            cells = [row["case"], str(row["size"]), provider]
            is_timed = "step_ms" in x
            cells += (
                [f"{x['forward_ms']:.2f}", f"{x['step_ms']:.2f}", f"{x['peak_mib']:.0f}"]
                if is_timed
                else [x["status"]] * 3
            )
            errors = (x.get(name, math.nan) for name in ("gradient_error", "gradient_budget"))
            rows.append((*cells, *(f"{e:.1e}" for e in errors)))
    header = (
        "case", "N or tokens", "what", "forward ms", "step ms", "peak MiB", "gradient error",
        "may be",
    )  # fmt: skip
    return _table(header, rows)


SECTIONS: dict[str, tuple[str, Callable[[Record], str]]] = {
    "linear_h200": ("linear_kl beside its peers", _linear_gpu),
    "linear_cpu": ("linear_kl on a CPU", _linear_cpu),
    "attention_native": ("attention_kl on a GPU: small calls, all tests", _native),
    "attention_native_rest": (
        "attention_kl on a GPU: the tests that had no turn",
        _native_tests,
    ),
    "hopper_native": (
        "attention_kl on a GPU: after the forward for Hopper and head-averaged teachers changed",
        _native,
    ),
    "hopper_forms": (
        "attention_kl on Hopper: masks, head_dims and key heads, beside cuDNN",
        _forms,
    ),
    "hopper_turns": (
        "attention_kl on Hopper: windows, a boolean mask and short rows by tiles of warp groups",
        _forms,
    ),
    "hopper_forms_before": ("The same machine and hour, before", _forms),
    "h200-several-gpus": (
        "A training step of the Llama pair on several GPUs, DistributedDataParallel",
        _several_gpus,
    ),
    "h200-sharded": ("Problems that several GPUs share: forward and backward", _sharded),
    "row_programs_cpu": ("Row programs beside torch.compile on a CPU", _row_programs),
    "h200-row-claims": (
        "Row programs on a GPU beside what they replace or are compared with",
        _row_claims,
    ),
    "compile_time_cpu": (
        "What the rewrite adds to compilation (pairs of 12 layers)",
        _compile_time,
    ),
}
