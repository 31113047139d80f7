"""Tables of the measurements that have a record of their own kind, for RESULTS.md.

A section is a title, columns and the rows of a record. A column is a heading and a format of the
row's fields; where a field is missing the cell is empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench import attention_matrix
from bench.table import markdown_lines

Record = dict[str, Any]
Columns = dict[str, str]


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


def _table(columns: Columns, rows: Iterable[Record]) -> str:
    cells = [tuple(_cell(x, row) for x in columns.values()) for row in rows]
    return "\n".join(markdown_lines(tuple(columns), cells))


def _cell(template: str, row: Record) -> str:
    try:
        return template.format_map(row)
    except KeyError:
        return ""


def _linear_gpu(record: Record) -> str:
    """Every case: providers beside each other, interleaved in one run."""
    columns = {
        "provider": "{name}", "ms": "{ms:.2f}", "range": "{min_ms:.2f} to {max_ms:.2f}",
        "of torch.compile": "{share:.3f}", "peak GiB": "{peak_gib:.3f}",
        "errors of dX, dW": "{errors}",
    }  # fmt: skip
    parts = []
    for case, rows in record["cases"].items():
        compiled = rows.get("torch.compile", {}).get("ms")
        shown = []
        for name, row in rows.items():
            errors = (row.get(f"{k}_grad_error") for k in ("hidden", "weight"))
            row = row | {"name": name, "errors": ", ".join(f"{e:.1e}" for e in errors if e)}
            has_ratio = compiled and "ms" in row
            shown.append(row | {"share": row["ms"] / compiled} if has_ratio else row)
        parts.append(f"### {case}\n\n{_table(columns, shown)}\n")
    return "\n".join(parts)


def _linear_cpu(record: Record) -> str:
    columns = {
        "provider": "{name}", "processor s": "{process_s:.2f}", "peak MiB": "{peak_mib:.1f}"
    }  # fmt: skip
    rows = ({"name": name, **row} for name, row in record["rows"].items())
    return f"{record['case']}.\n\n" + _table(columns, rows)


def _native(record: Record) -> str:
    overhead = record["overhead"]
    columns = {
        "small call": "{name}", "host us a call": "{call_us:.1f}",
        "its kernels us": "{kernels_us:.1f}",
    }  # fmt: skip
    rows = ({"name": name, **row} for name, row in overhead.items() if "call_us" in row)
    wait = overhead["empty_kernel"]["synchronised_us"]
    text = _table(columns, rows)
    text += f"\n\nAn empty kernel and its wait take {wait:.1f} us on this machine."
    return f"{text}\n\n{_native_tests(record)}" if "tests" in record else text


def _native_tests(record: Record) -> str:
    left = sum(outcome == "no outcome" for outcome in record["tests"].values())
    text = f"Tests on the GPU: {record['summary']}"
    return text + (f", {left} had no turn in the time there was." if left else ".")


def _compile_time(record: Record) -> str:
    columns = {
        "pair": "{family}", "shapes": "{shapes}", "sites": "{streamkl[fused]}",
        "rewrite s": "{streamkl[rewrite]:.2f}", "plain Inductor s": "{inductor[backend]:.1f}",
        "share": "{share_of_inductor:.1%}",
    }  # fmt: skip
    rows = record.get("records") or record["rows"]
    shapes = {True: "dynamic", False: "static"}
    return _table(columns, ({**row, "shapes": shapes[row["dynamic"]]} for row in rows))


OF_RANKS = {"step ms": "{step_ms:.1f}", "peak GiB a rank": "{peak_gib:.2f}"}


def _on_ranks(record: Record, columns: Columns) -> str:
    rows = []
    for row in record["rows"]:
        shape = ", ".join(f"{value} {name}" for name, value in row.get("shape", {}).items())
        more = {"sizes": shape, "peak_gib": row["peak_mib"] / 1024}
        received = row.get("received_mib")
        rows.append(row | more | ({"received": received} if received else {}))
    return f"{record['processes']} processes, a GPU each.\n\n{_table(columns, rows)}"


def _several_gpus(record: Record) -> str:
    columns = {"KL of": "{objective}", "tokens a rank": "{context}", "provider": "{provider}"}
    columns |= OF_RANKS | {
        "loss off eager's": "{loss_difference:.1e}",
        "gradients off eager's": "{gradient_difference:.1e}",
    }
    return _on_ranks(record, columns)


def _sharded(record: Record) -> str:
    columns = {"case": "{case}", "shape": "{sizes}", "provider": "{provider}"} | OF_RANKS
    columns |= {
        "received MiB a rank": "{received:.1f}",
        "loss off the first's": "{loss_difference:.1e}",
        "gradients off the first's": "{gradient_difference:.1e}",
    }
    return _on_ranks(record, columns)


def _forms(record: Record) -> str:
    return "\n".join(attention_matrix.beside_lines(attention_matrix.Matrix.of(record)))


def _row_programs(record: Record) -> str:
    columns = {
        "form": "{form}", "N": "{size}", "products MiB": "{scores_mib:.0f}",
        "inductor ms": "{plain[ms]}", "inductor peak MiB": "{plain[mib]}",
        "streamkl ms": "{ours[ms]}", "streamkl peak MiB": "{ours[mib]}", "ratio": "{ratio:.2f}",
        "gradient error": "{ours[error]:.1e}",
    }  # fmt: skip
    rows = []
    for row in record["rows"]:
        plain, ours = (row["providers"][name] for name in ("inductor", "streamkl"))
        both = "step_ms" in plain and "step_ms" in ours
        ratio = {"ratio": ours["step_ms"] / plain["step_ms"]} if both else {}
        rows.append(row | {"plain": _timed(plain, 1), "ours": _timed(ours, 1)} | ratio)
    return _table(columns, rows)


def _timed(x: Record, digits: int) -> Record:
    """What a provider took, or why it took nothing."""
    errors = {name: x.get(f"gradient_{name}", math.nan) for name in ("error", "budget")}
    if "step_ms" not in x:
        return errors | dict.fromkeys(("forward", "ms", "mib"), x["status"])
    times = {"forward": f"{x['forward_ms']:.{digits}f}", "ms": f"{x['step_ms']:.{digits}f}"}
    return errors | times | {"mib": f"{x['peak_mib']:.0f}"}


def _row_claims(record: Record) -> str:
    columns = {
        "case": "{case}", "N or tokens": "{size}", "what": "{name}", "forward ms": "{forward}",
        "step ms": "{ms}", "peak MiB": "{mib}", "gradient error": "{error:.1e}",
        "may be": "{budget:.1e}",
    }  # fmt: skip
    return _table(
        columns,
        (
            row | {"name": name} | _timed(x, 2)
            for row in record["rows"]
            for name, x in row["providers"].items()
        ),
    )


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
    "hopper_forms_before": ("The same machine and hour, before", _forms),
    "hopper_turns": (
        "attention_kl on Hopper: windows, a boolean mask and short rows by tiles of warp groups",
        _forms,
    ),
    "hopper_wide": (
        "attention_kl on Hopper: head_dim 192 and 256, biases, few queries",
        _forms,
    ),
    "hopper_biases_packed": (
        "attention_kl on Hopper: an additive mask, packed and short rows, with tables of blocks",
        _forms,
    ),
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
