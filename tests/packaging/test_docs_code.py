"""Code of README and docs runs, prints what is shown, and its graphs are those of today.

python -m tests.packaging.test_docs_code  # write the graphs into docs/how-it-works/overview.md
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import torch_streamkl
from bench.table import between
from torch_streamkl.fx_passes.backend import rewrite_and_report
from torch_streamkl.fx_passes.options import RewriteOptions
from torch_streamkl.fx_passes.reporting.report import Report

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OVERVIEW = DOCS / "how-it-works" / "overview.md"
README = (ROOT / "README.md").read_text()
VIEWS = {"permute", "flatten", "unsqueeze", "reshape", "getattr", "mT"}


# ------------------------------------------------------------------------------------------ guide
def run(page: str) -> dict[str, Any]:
    """What the blocks of a page of the guide define, one after the other."""
    scope: dict[str, Any] = {}
    for block in re.findall(
        r"```python\n(.*?)```", (DOCS / "guide" / page).read_text(), re.DOTALL
    ):
        exec(block, scope)
    return scope


@pytest.mark.parametrize("page", ["attention.md", "cached-teachers.md", "indexers.md"])
def test_the_code_of_a_page_runs(page: str) -> None:
    assert run(page)


class OfMaps(NamedTuple):
    attentions: list[Tensor]


class OfLogits(NamedTuple):
    logits: Tensor


class Maps(nn.Module):
    """Two layers that return their attention probabilities, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, output_attentions: bool) -> OfMaps:
        return OfMaps([(f(x) @ x.mT).softmax(-1) for f in self.layers])


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(30, 8), nn.Linear(8, 30, bias=False)

    def forward(self, ids: Tensor) -> OfLogits:
        return OfLogits(self.lm_head(self.embedding(ids)))


def _inputs(page: str) -> dict[str, Any]:
    """What a page's blocks take for the reader's, and the arguments of their step."""
    ids, randn = torch.randint(30, (16,)), torch.randn
    if page == "guide/quickstart.md":
        student, teacher = Logits(), Logits()

        def step(ids: Tensor) -> Tensor:
            log_s, t = student(ids).logits.log_softmax(-1), teacher(ids).logits.softmax(-1)
            return F.kl_div(log_s, t, reduction="batchmean")

        models = {"student": student, "teacher": teacher, "torch_streamkl": torch_streamkl}
        return {**models, "step": step, "batch": ids, "inputs": (ids,), "arguments": (ids,)}
    if page == "guide/attention.md":
        return {"student": Maps(), "teacher": Maps(), "arguments": (randn(1, 2, 12, 8),)}
    if page == "reference/row-programs.md":
        return {"arguments": (*(randn(1, 2, 12, 8) for _ in range(4)), torch.rand(12))}
    return {
        "attention_topk_kl": torch_streamkl.attention_topk_kl,  # which the first block imports
        "index_q": randn(12, 1, 2, 8),
        "index_k": randn(12, 1, 8),
        "weights": randn(12, 1, 2),
        "query": randn(12, 1, 4, 8),
        "key": randn(12, 1, 1, 8),
        "topk_indices": torch.randint(12, (1, 12, 3)),
        "softmax_scale": 0.3,
        "loss_coeff": 0.01,
    }


OF_YOURS = (
    "guide/quickstart.md", "guide/attention.md", "guide/indexers.md", "reference/row-programs.md",
)  # fmt: skip


@pytest.mark.parametrize("page", OF_YOURS)
def test_blocks_with_your_own_tensors_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Inductor, and whatever the size: the steps that blocks define are called, too."""
    compiled = torch.compile
    options = {"streamkl.inner": "eager", "streamkl.min_mib": 0, "streamkl.strict": True}

    def compile_quickly(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **{**kwargs, "backend": "streamkl", "options": options})

    monkeypatch.setattr(torch, "compile", compile_quickly)
    scope: dict[str, Any] = {"torch": torch, "F": F, **_inputs(page)}
    try:
        for block in re.findall(r"```py\n(.*?)```", _dedented(DOCS / page), re.DOTALL):
            exec(block, scope)
    finally:
        torch_streamkl.disable()
    step = scope.get("step") or scope.get("weighted")
    value = step(*scope["arguments"]) if step is not None else scope["loss"]
    assert value.isfinite()


def _dedented(path: Path) -> str:
    """A page whose blocks in lists begin at the first column."""
    return re.sub(r"^ {3}(?=\S)", "", path.read_text(), flags=re.MULTILINE)


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
    kl = F.kl_div((student / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="batchmean")
    maps = ("student_q", "student_k", "teacher_q", "teacher_k")
    q_s, k_s, q_t, k_t = (scope[name].double() for name in maps)
    above = torch.ones(64, 64, dtype=torch.bool).triu(1)
    s, t = ((q @ k.mT * 32**-0.5).masked_fill(above, -1e300) for q, k in ((q_s, k_s), (q_t, k_t)))
    of_maps = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)
    expected = {
        "liger": js(student, teacher)[scope["labels"] != -100].mean(),
        "trl": js(student / 2, teacher / 2)[scope["labels"] != -100].mean(),
        "nitrobrew": kl, "flex": of_maps.mean(),
    }  # fmt: skip
    for name, value in expected.items():
        torch.testing.assert_close(scope[name].double(), value, rtol=1e-5, atol=1e-6)


def test_losses_by_code_and_by_operator_agree() -> None:
    scope = run("lm-heads.md")
    inputs = (torch.randn(n, w) for n, w in ((8, 16), (50, 16), (8, 24), (50, 24)))
    given = tuple(inputs)
    torch.testing.assert_close(scope["soft_loss_by_operator"](*given), scope["soft_loss"](*given))


def test_methods_of_the_report_that_are_documented_exist() -> None:
    methods = re.findall(r"`report\.(\w+)\(", (DOCS / "reference" / "report.md").read_text())
    assert {"details", "to_json", "to_dict"} <= set(methods)
    assert all(hasattr(Report(), name) for name in methods)


# ---------------------------------------------------------------------------------------- scripts
def _section(name: str, page: str) -> str:
    return page.split(f"<!-- {name}:begin -->\n")[1].split(f"<!-- {name}:end -->")[0]


# A script after the other in a process, which takes seconds to import what it needs.
RUN = """
import contextlib, runpy, sys, torch
for script in sys.argv[1:]:
    torch._dynamo.reset()
    with open(script + ".out", "w") as out, contextlib.redirect_stdout(out):
        runpy.run_path(script, run_name="__main__")
"""


def test_scripts_print_what_is_shown(tmp_path: Path) -> None:
    """Of the README, an example and operators; of the reference, a report of an unfused loss."""
    unfused = _section("unfused", (DOCS / "reference" / "supported.md").read_text())
    shown = re.fullmatch(r"```py\n(.*?)```\n```\n(.*?)```\n", unfused, re.DOTALL)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    assert len(blocks) == 2
    scripts = {"example": blocks[0], "operators": blocks[1], "unfused": shown[1]}
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    paths = [str(tmp_path / f"{name}.py") for name in scripts]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *paths], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    outputs = [Path(f"{path}.out").read_text().replace(f"{tmp_path}/", "") for path in paths]
    example, operators, of_unfused = outputs
    assert _section("example", README) == f"```\n{example}```\n"
    assert of_unfused == shown[2]
    found = re.match(r"loss ([\d.]+), uncompiled ([\d.]+)\n", example)
    assert found is not None and found[1] == found[2]
    assert "check passed" in example  # a size that is checked
    assert re.fullmatch(r"torch.Size\(\[1, 8, 256\]\) tensor\([\d.]+\)\n", operators)
    assert len(README.splitlines()) <= 110  # two screens


# ----------------------------------------------------------------------------------------- graphs
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
    return "\n".join(lines)


def with_graphs(page: str) -> str:
    """The page with the graph of the README's loss before and after the rewrite."""
    found = re.search(r"^def loss\(.*?(?=^\S)", README, re.DOTALL | re.MULTILINE)
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
    for name, text in made.items():
        page = between(page, name, ("```", text, "```"))
    return page


def test_the_graphs_are_those_of_today() -> None:
    assert OVERVIEW.read_text() == with_graphs(OVERVIEW.read_text())


if __name__ == "__main__":
    OVERVIEW.write_text(with_graphs(OVERVIEW.read_text()))
