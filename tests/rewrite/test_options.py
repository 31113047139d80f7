"""One set of options: every way into the rewrite takes the same, by the same rules."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, fx, nn

import torch_streamkl
from tests.support.option_table import PAGE, update
from tests.support.subgraphs import inductor_without_code
from torch_streamkl import RewriteOptions
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.options import NAMES, OptionValues, split_options

EAGER = {"streamkl.inner": "eager"}


def loss(q: Tensor, k: Tensor, t: Tensor) -> Tensor:
    student = (q @ k.mT).log_softmax(-1)
    return F.kl_div(student, (t @ t.mT).softmax(-1), reduction="batchmean")


def custom(q: Tensor, k: Tensor, t: Tensor) -> Tensor:
    """No divergence: skipped on a CPU below gigabytes."""
    weighted = (t @ t.mT).softmax(-1) * torch.arange(8.0)
    return (weighted * (q @ k.mT).log_softmax(-1)).sum(-1).mean()


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 8, 4, generator=generator) for _ in range(3)]


@pytest.fixture(autouse=True)
def _nothing_enabled() -> Iterator[None]:
    torch._dynamo.reset()
    with inductor_without_code(), torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch_streamkl.disable()


def by_backend(options: Any) -> int:
    with backend.collected() as report:
        torch.compile(loss, backend="streamkl", options=options)(*inputs())
    return report.num_fused


def by_inductor_options(options: Any) -> int:
    with backend.collected() as report:
        torch.compile(loss, options=torch_streamkl.inductor_options(options))(*inputs())
    return report.num_fused


def by_enable(options: Any) -> int:
    with torch_streamkl.enable(options), backend.collected() as report:
        torch.compile(loss)(*inputs())
    return report.num_fused


def by_explain(options: Any) -> int:
    return torch_streamkl.explain(loss, *inputs(), options=options).num_fused


def by_verify(options: Any) -> int:
    result = torch_streamkl.verify(loss, *inputs(), options=options)
    assert result.ok, result
    return result.report.num_fused


WAYS: dict[str, Callable[[Any], int]] = {
    "backend": by_backend,
    "inductor_options": by_inductor_options,
    "enable": by_enable,
    "explain": by_explain,
    "verify": by_verify,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_takes_the_same(way: str) -> None:
    inner = EAGER if way == "verify" else {}
    fused = {"streamkl.min_mib": 0, **inner}
    assert WAYS[way](fused) == 1
    assert WAYS[way]({**fused, "streamkl.min_mib": 1e6}) == 0
    torch._dynamo.reset()
    assert WAYS[way](split_options(fused)[0]) == 1


WRONG: dict[str, tuple[Any, str]] = {
    "another name": (
        {"streamkl.verfy": "auto"},
        "got 'streamkl.verfy'; did you mean 'streamkl.verify'",
    ),
    "no prefix": ({"strict": True}, "did you mean 'streamkl.strict'"),
    "an underscore": ({"streamkl_strict": True}, "did you mean 'streamkl.strict'"),
    "one of Inductor": ({"maxautotune": True}, "did you mean 'max_autotune'"),
    "nobody's": (
        {"zzz": True},
        "'zzz' is neither an option of the streamkl backend nor one of Inductor",
    ),
    "no name": ({3: True}, "names of options must be strings, got 3"),
    "1 as a flag": ({"streamkl.strict": 1}, "streamkl.strict must be False or True, got 1"),
    "0 as a flag": ({"streamkl.row_programs": 0}, "row_programs must be False or True, got 0"),
    "a flag as a number": (
        {"streamkl.min_mib": True},
        "min_mib must be a number of at least 0 or None, got True",
    ),
    "a text as a number": (
        {"streamkl.min_mib": "0"},
        "min_mib must be a number of at least 0 or None, got '0'",
    ),
    "NaN": (
        {"streamkl.min_mib": float("nan")},
        "min_mib must be a number of at least 0 or None, got nan",
    ),
    "a negative number": (
        {"streamkl.min_mib": -1},
        "min_mib must be a number of at least 0 or None, got -1",
    ),
    "no memory": (
        {"streamkl.verify_max_mib": 0},
        "verify_max_mib must be a number above 0 or None, got 0",
    ),
    "no time": (
        {"streamkl.verify_max_seconds": None},
        "verify_max_seconds must be a number above 0, got None",
    ),
    "an unknown mode": (
        {"streamkl.verify": "sometimes"},
        "verify must be 'auto' or 'always' or 'never', got 'sometimes'",
    ),
    "a list of modes": (
        {"streamkl.verify": ["auto"]},
        "verify must be 'auto' or 'always' or 'never', got ['auto']",
    ),
    "an unknown compiler": (
        {"streamkl.inner": "nvcc"},
        "inner must be 'inductor' or 'aot_eager' or 'eager', got 'nvcc'",
    ),
    "a list": (["streamkl.strict"], "options must be a dict or RewriteOptions, got list"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said_alike(what: str) -> None:
    options, message = WRONG[what]
    for way, call in WAYS.items():
        torch._dynamo.reset()
        with pytest.raises((ValueError, TypeError)) as raised:  # no BackendCompilerFailed
            call(options)
        assert message in str(raised.value), way
    given = options if isinstance(options, dict) else {}
    named = {str(name).removeprefix("streamkl."): x for name, x in given.items()}
    if named and named.keys() <= set(NAMES) and "must be" in message:
        for make in (RewriteOptions, torch_streamkl.enable, torch_streamkl.inductor_options):
            with pytest.raises(ValueError, match="must be") as raised:
                make(**named)
            assert message in str(raised.value)


def test_keywords() -> None:
    made = torch_streamkl.inductor_options({"streamkl.strict": True}, min_mib=0)
    assert made["pre_grad_custom_pass"].ours == RewriteOptions(strict=True, min_mib=0)
    for function in (torch_streamkl.enable, torch_streamkl.inductor_options):
        with pytest.raises(TypeError, match="no option 'min_mb'; did you mean 'min_mib'"):
            function(min_mb=0)  # type: ignore[call-arg]
    with torch_streamkl.enable(min_mib=0, row_programs=False), backend.collected() as report:
        torch.compile(custom)(*inputs())
    assert report.num_fused == 0
    torch._dynamo.reset()
    with torch_streamkl.enable(min_mib=0), backend.collected() as report:
        torch.compile(custom)(*inputs())
    assert report.num_fused == 1


def test_options_of_inductor() -> None:
    users = _Pass()
    given = {"streamkl.min_mib": 0, "max_autotune": True, "pre_grad_custom_pass": users}
    made = torch_streamkl.inductor_options(given)
    assert made["max_autotune"] is True
    assert made["pre_grad_custom_pass"].passes[0] is users
    assert torch_streamkl.explain(loss, *inputs(), options={"max_autotune": True}).sites
    with pytest.raises(ValueError, match=r"set torch\._inductor\.config\.max_autotune"):
        torch_streamkl.enable({"max_autotune": True})
    assert torch._inductor.config.pre_grad_custom_pass is None


def test_options_of_the_function_itself() -> None:
    def with_options(q: Tensor, k: Tensor, t: Tensor, options: Any = None) -> Tensor:
        return loss(q, k, t) * options["weight"]

    for call in (torch_streamkl.explain, torch_streamkl.verify):
        with pytest.raises(ValueError, match="'weight' is neither") as raised:
            call(with_options, *inputs(), options={"weight": 2.0})
        assert any("functools.partial" in note for note in raised.value.__notes__)
    bound = functools.partial(with_options, options={"weight": 2.0})
    assert torch_streamkl.explain(bound, *inputs(), options={"streamkl.min_mib": 0}).num_fused == 1


def test_strict_raises_its_own_error() -> None:
    def sorted_scores(q: Tensor, k: Tensor, t: Tensor) -> Tensor:
        return F.kl_div((q @ k.mT).sort(-1).values.log_softmax(-1), (t @ t.mT).softmax(-1))

    with pytest.raises(backend.UnfusedError, match="sort is applied to scores"):
        torch.compile(sorted_scores, backend="streamkl", options={"streamkl.strict": True})(
            *inputs()
        )
    with torch_streamkl.enable(strict=True), pytest.raises(backend.UnfusedError):
        torch.compile(sorted_scores)(*inputs())
    assert torch_streamkl.explain(sorted_scores, *inputs(), options=RewriteOptions(strict=True))


def test_the_types_are_those_of_the_options() -> None:
    assert get_type_hints(OptionValues) == get_type_hints(RewriteOptions)
    assert all(option.metadata["doc"] for option in fields(RewriteOptions))


def test_the_tables_of_the_docs_are_up_to_date() -> None:
    text = PAGE.read_text()
    assert text == update(text), "run: python -m tests.support.option_table"


# ------------------------------------------------------------------------------ what is no program
class _OnMeta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return loss(self.layer(x), x, x)


def _raises(x: Tensor) -> Tensor:
    raise KeyError("the user's own")


@pytest.mark.parametrize("call", [torch_streamkl.explain, torch_streamkl.verify])
def test_what_cannot_run(call: Any) -> None:
    x = inputs()[0]
    with pytest.raises(
        TypeError, match=r"\(fn, \*args\), got Tensor, a result: pass the function"
    ):
        call(loss(x, x, x))
    with pytest.raises(TypeError, match="got NoneType"):
        call(None, x)
    with pytest.raises(KeyError, match="the user's own"):
        call(_raises, x)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 't'"):
        call(loss, x, x)
    with pytest.raises(ValueError, match=r"must (all )?have values.* got layer\.weight on"):
        call(_OnMeta(), x)


def test_a_program_on_meta_is_explained() -> None:
    report = torch_streamkl.explain(_OnMeta(), torch.empty(1, 2, 8, 4, device="meta"))
    assert report.num_fused == 1
    with pytest.raises(ValueError, match="must have values, got argument 0 on the meta device"):
        torch_streamkl.verify(loss, *torch.empty(3, 1, 2, 8, 4, device="meta"))


# --------------------------------------------------------------------- passes in the place of ours
class _Pass(torch._inductor.custom_graph_pass.CustomGraphPass):
    ran = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.ran += 1

    def uuid(self) -> Any:
        return "a pass of the user"


@pytest.mark.parametrize("how", ["set later", "set to None", "in options", "next to ours"])
def test_a_pass_that_replaces_the_rewrite_is_named(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, mine = torch._inductor.config, None if how == "set to None" else _Pass()
    options: dict[str, Any] = {}
    if how == "next to ours":
        options = {**torch_streamkl.inductor_options(min_mib=0), "pre_grad_custom_pass": mine}
    else:
        torch_streamkl.enable(min_mib=0)
        options = {"pre_grad_custom_pass": mine} if how == "in options" else {}
    with config.patch(pre_grad_custom_pass=config.pre_grad_custom_pass):
        if how.startswith("set"):
            config.pre_grad_custom_pass = mine
        with caplog.at_level(logging.WARNING), backend.collected() as report:
            torch.compile(loss, options=options or None)(*inputs())
    assert report.num_fused == 0
    (note,) = report.notes
    name = "NoneType" if mine is None else "_Pass"
    assert note.startswith(f"pre_grad_custom_pass is {name} now, which replaced the rewrite")
    assert note in caplog.text
    assert mine is None or mine.ran == 1


@pytest.mark.parametrize("how", ["in the config", "in options"])
def test_both_passes_replaced_are_no_silence(how: str) -> None:
    """Nothing of ours is called then: Dynamo's count of graphs tells."""
    mine = {"pre_grad_custom_pass": _Pass(), "joint_custom_pre_pass": _Pass()}
    torch._dynamo.reset()
    patched = torch._inductor.config.patch(mine if how == "in the config" else {})
    with torch_streamkl.enable(), patched, torch_streamkl.reports() as report:
        product = torch.compile(torch.matmul, options=mine if how == "in options" else None)
        product(torch.ones(3, 4), torch.ones(4, 5))
    assert report.num_not_ours == 1
    assert "1 graph was compiled without the rewrite" in str(report)
    assert "joint_custom_pre_pass were replaced" in str(report)


def test_the_backend_needs_no_pass(caplog: pytest.LogCaptureFixture) -> None:
    mine = _Pass()
    with torch_streamkl.enable(), caplog.at_level(logging.WARNING):
        options = {"streamkl.min_mib": 0, "pre_grad_custom_pass": mine}
        assert by_backend(options) == 1
    assert mine.ran == 1
    assert "replaced the rewrite" not in caplog.text
