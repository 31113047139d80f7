"""The tables of options in the docs, made from `RewriteOptions` and the thresholds of the rewrite.

python -m tests.support.option_table          # rewrite the tables of docs/reference/options.md
"""

import re
from dataclasses import fields
from pathlib import Path

from tests.support.quick import (
    MEASURED_ATTENTION_MIB,
    MEASURED_MIB,
    MEASURED_PROGRAM_MIB,
    MEASURED_TWICE_MIB,
)
from torch_streamkl.fx_passes.options import PREFIX, RewriteOptions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "options.md"
THRESHOLDS = {
    "divergence of attention or of an LM head": MEASURED_MIB,
    "other loss, as a row program": MEASURED_PROGRAM_MIB,
    "divergence of an LM head whose logits other code reads": MEASURED_TWICE_MIB,
    "`softmax(QK^T) @ V` next to a fused loss, as fused attention": MEASURED_ATTENTION_MIB,
}


def options():
    lines = ["| option | default | values | |", "| --- | --- | --- | --- |"]
    for option in fields(RewriteOptions):
        values = option.metadata["rule"].text.replace("'", '"')
        values = re.sub(r'"\w+"|None|False|True', lambda m: f"`{m[0]}`", values)
        default = repr(option.default).replace("'", '"')
        text = option.metadata["doc"]
        lines.append(f"| `{PREFIX}{option.name}` | `{default}` | {values} | {text} |")
    return "\n".join(lines)


def thresholds():
    lines = ["| `min_mib=None` | GPU | CPU | other devices |", "| --- | --- | --- | --- |"]
    for kind, least in THRESHOLDS.items():
        cells = (f"{least.get(device, 0.0):g}" for device in ("cuda", "cpu", "other"))
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def update(text):
    """The page with its tables as they are now."""
    for name, table in {"options": options(), "thresholds": thresholds()}.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        head, _, rest = text.partition(begin)
        tail = rest.partition(end)[2]
        text = f"{head}{begin}\n{table}\n{end}{tail}"
    return text


if __name__ == "__main__":
    PAGE.write_text(update(PAGE.read_text()))
