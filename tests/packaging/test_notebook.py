"""The notebook runs without Jupyter, and its committed outputs are those of today.

`python -m tests.support.notebook examples/quickstart.ipynb` writes them.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.notebook import code_cells, run

PATH = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def _text(outputs: list[dict[str, Any]]) -> str:
    shown = [x["text"] if "text" in x else x["data"]["text/plain"] for x in outputs]
    return "".join(line for lines in shown for line in lines)


def test_every_cell_runs() -> None:
    pytest.importorskip("matplotlib")
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        ran = [(_text(outputs), scope) for outputs, scope in run(code_cells(PATH))]
    committed = [_text(cell["outputs"]) for cell in code_cells(PATH)]
    scope = ran[-1][1]
    reports = [text for text, _ in ran if text.startswith("streamkl: ")]
    assert reports == [text for text in committed if text.startswith("streamkl: ")]
    assert "1 of 1 loss fused" in reports[0] and "needs whole rows" in reports[1]
    assert abs(scope["values"][0] / scope["values"][1] - 1) < 1e-5
    assert scope["difference"] < 1e-5
    eager, ours = scope["peaks"]["eager"], scope["peaks"]["streamkl"]
    assert ours[-1] * 8 < eager[-1]  # at 1024 tokens: rows and blocks against maps
    assert scope["error"] < 1e-6


def test_it_is_short_and_shows_its_outputs() -> None:
    cells = json.loads(PATH.read_text())["cells"]
    assert PATH.stat().st_size < 100_000
    assert sum(len(x["source"]) for x in cells if x["cell_type"] == "code") < 120
    pictures = [x for c in cells for x in c.get("outputs", ()) if "image/png" in x.get("data", {})]
    assert len(pictures) == 1
    paths = [str(Path.home()), str(PATH.parents[1]), "/tmp/"]
    assert not any(path in PATH.read_text() for path in paths)
