"""Code of the documentation runs, and its graphs are those of today.

python -m tests.packaging.test_docs_code  # write the graphs into docs/how-it-works/overview.md
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from torch_streamkl.fx_passes.backend import rewrite_and_report
from torch_streamkl.fx_passes.options import RewriteOptions
from torch_streamkl.fx_passes.reporting.report import Report

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide"
OVERVIEW = ROOT / "docs" / "how-it-works" / "overview.md"
VIEWS = {"permute", "flatten", "unsqueeze", "reshape", "getattr"}


def run(page: str) -> dict[str, Any]:
    """What the blocks of a page define, one after the other."""
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (GUIDE / page).read_text(), re.DOTALL):
        exec(block, scope)
    return scope


@pytest.mark.parametrize(
    "page", ["attention.md", "cached-teachers.md", "indexers.md", "lm-heads.md"]
)
def test_the_code_of_a_page_runs(page: str) -> None:
    assert run(page)


def js(student: Tensor, teacher: Tensor) -> Tensor:
    """Jensen-Shannon divergence with beta 0.5 of rows of logits."""
    s, t = student.softmax(-1), teacher.softmax(-1)
    middle = ((s + t) / 2).log()
    return (t * (t.log() - middle) + s * (s.log() - middle)).sum(-1) / 2


def test_losses_of_other_libraries_have_the_values_of_naive_code() -> None:
    scope = run("migrating.md")
    named = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight")
    xs, ws, xt, wt = (scope[name].detach().double() for name in named)
    student, teacher = xs @ ws.T, xt @ wt.T
    counts = scope["labels"] != -100
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(
        scope["liger"].double(), js(student, teacher)[counts].mean(), **close
    )
    at_two = js(student / 2, teacher / 2)[counts].mean()
    torch.testing.assert_close(scope["trl"].double(), at_two, **close)
    kl = F.kl_div((student / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="batchmean")
    torch.testing.assert_close(scope["nitrobrew"].double(), kl, **close)
    q_s, k_s, q_t, k_t = (
        scope[name].double() for name in ("student_q", "student_k", "teacher_q", "teacher_k")
    )
    above = torch.ones(64, 64, dtype=torch.bool).triu(1)
    s = (q_s @ k_s.mT * 32**-0.5).masked_fill(above, -1e300).log_softmax(-1)
    t = (q_t @ k_t.mT * 32**-0.5).masked_fill(above, -1e300).softmax(-1)
    rows = F.kl_div(s, t, reduction="none").sum(-1)
    torch.testing.assert_close(scope["flex"].double(), rows.mean(), **close)


def test_losses_by_code_and_by_operator_agree() -> None:
    scope = run("lm-heads.md")
    xs, ws, xt, wt = (torch.randn(n, w) for n, w in ((8, 16), (50, 16), (8, 24), (50, 24)))
    naive, ours = (scope[name](xs, ws, xt, wt) for name in ("soft_loss", "soft_loss_by_operator"))
    torch.testing.assert_close(ours, naive)


def _listed(graph: fx.Graph) -> str:
    """A line for each operation that is no view; operands are named by what they view."""
    source: dict[fx.Node, str] = {}
    lines = []

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return source[value]
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    for node in graph.nodes:
        name = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
        if node.op == "placeholder":
            source[node] = node.name.removeprefix("l_").removesuffix("_")
        elif node.op == "output":
            lines.append(f"return {source[node.args[0][0]]}")
        elif name in VIEWS:
            source[node] = source[node.args[0]]
        else:
            source[node] = node.name.removesuffix("_default")
            shown = [*map(text, node.args), *(f"{k}={text(v)}" for k, v in node.kwargs.items())]
            value = node.meta.get("example_value")
            shape = f"  # {list(value.shape)}" if isinstance(value, Tensor) else ""
            lines.append(f"{source[node]} = {name}({', '.join(shown)}){shape}")
    return "\n".join(lines) + "\n"


def graphs() -> dict[str, str]:
    """The graph of the README's loss before and after the rewrite."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"^def loss\(.*?(?=^\S)", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    scope: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(found[0], str(ROOT / "README.md"), "exec"), scope)
    made: dict[str, str] = {}

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        made["before"] = _listed(gm.graph)
        rewrite_and_report(gm, RewriteOptions(min_mib=0, verify="never"))
        made["after"] = _listed(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    q_s, k_s = (torch.randn(1, 8, 256, 64, requires_grad=True) for _ in range(2))
    q_t, k_t = (torch.randn(1, 8, 256, 64) for _ in range(2))
    torch.compile(scope["loss"], backend=backend)(q_s, k_s, q_t, k_t)
    return made


def with_graphs(page: str) -> str:
    for name, text in graphs().items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        head, rest = page.split(begin)
        page = f"{head}{begin}```\n{text}```\n{end}{rest.split(end, 1)[1]}"
    return page


def test_the_graphs_are_those_of_today() -> None:
    assert OVERVIEW.read_text() == with_graphs(OVERVIEW.read_text())


def test_methods_of_the_report_that_are_documented_exist() -> None:
    text = (ROOT / "docs" / "reference" / "report.md").read_text()
    methods = set(re.findall(r"`report\.(\w+)\(", text))
    assert methods >= {"details", "to_json", "to_dict"}
    assert all(hasattr(Report(), name) for name in methods)


if __name__ == "__main__":
    OVERVIEW.write_text(with_graphs(OVERVIEW.read_text()))
