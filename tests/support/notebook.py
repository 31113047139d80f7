"""Runs the code cells of a notebook without Jupyter, and writes what they give into it.

`python -m tests.support.notebook examples/quickstart.ipynb` writes the outputs.
"""

import ast
import base64
import contextlib
import io
import json
import linecache
import sys
import types
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def code_cells(path):
    """Returns the code cells of a notebook, in order."""
    return [x for x in json.loads(path.read_text())["cells"] if x["cell_type"] == "code"]


def run(cells):
    """Yields the outputs of every cell and the names that it and those before it define."""
    module = types.ModuleType("notebook")  # as which compiled code finds its names
    sys.modules[module.__name__] = module
    try:
        for number, cell in enumerate(cells, 1):
            yield _run("".join(cell["source"]), f"In [{number}]", vars(module)), vars(module)
    finally:
        del sys.modules[module.__name__]


def _run(source, name, scope):
    body = ast.parse(source)
    lines = source.splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(body, name, "exec"), scope)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), scope)
    outputs = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    shown = _shown(value)
    if shown:
        outputs.append({"data": shown, "metadata": {}, "output_type": "display_data"})
    return outputs


def _shown(value):
    """What a notebook shows of the value of a cell's last expression."""
    if value is None:
        return {}
    shown = {"text/plain": str(value).splitlines(keepends=True)}
    html = value._repr_html_() if hasattr(value, "_repr_html_") else None
    if html is not None:
        shown["text/html"] = html.splitlines(keepends=True)
    if hasattr(value, "savefig"):
        picture = io.BytesIO()
        value.savefig(picture, format="png", dpi=80, metadata={"Software": None})
        shown["image/png"] = base64.b64encode(picture.getvalue()).decode()
    return shown


def write_outputs(path):
    """Runs a notebook and writes its outputs into it."""
    notebook = json.loads(path.read_text())
    cells = [x for x in notebook["cells"] if x["cell_type"] == "code"]
    for number, (cell, (outputs, _)) in enumerate(zip(cells, run(cells), strict=True), 1):
        cell["outputs"], cell["execution_count"] = outputs, number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write_outputs(Path(sys.argv[1]))
