"""One set of options: every way into the rewrite takes the same, by the same rules."""

import functools
import logging
from dataclasses import fields
from typing import get_type_hints

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import nn

import torch_streamkl
from tests.support.losses import kd
from tests.support.option_table import PAGE, update
from tests.support.subgraphs import inductor_without_code
from torch_streamkl import RewriteOptions
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.options import NAMES, OptionValues, split_options


def loss(q, k, t):
    return kd(q @ k.mT, t @ t.mT)


def custom(q, k, t):
    """No divergence: skipped on a CPU below gigabytes."""
    weighted = (t @ t.mT).softmax(-1) * torch.arange(8.0)
    return (weighted * (q @ k.mT).log_softmax(-1)).sum(-1).mean()


def inputs():
    return list(torch.randn(3, 1, 2, 8, 4))


@pytest.fixture(autouse=True)
def _nothing_enabled():
    torch._dynamo.reset()
    with inductor_without_code(), torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch_streamkl.disable()


def fused(fn=loss, **options):
    torch._dynamo.reset()
    with backend.collected() as report:
        torch.compile(fn, **options)(*inputs())
    return report.num_fused


def by_enable(options):
    with torch_streamkl.enable(options):
        return fused()


def by_verify(options):
    result = torch_streamkl.verify(loss, *inputs(), options=options)
    assert result.ok, result
    return result.report.num_fused


WAYS = {
    "backend": lambda options: fused(backend="streamkl", options=options),
    "inductor_options": lambda options: fused(options=torch_streamkl.inductor_options(options)),
    "enable": by_enable,
    "explain": lambda x: torch_streamkl.explain(loss, *inputs(), options=x).num_fused,
    "verify": by_verify,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_takes_the_same(way):
    given = {"streamkl.min_mib": 0, **({"streamkl.inner": "eager"} if way == "verify" else {})}
    assert WAYS[way](given) == 1
    assert WAYS[way]({**given, "streamkl.min_mib": 1e6}) == 0
    torch._dynamo.reset()
    assert WAYS[way](split_options(given)[0]) == 1


LEAST = "min_mib must be a number of at least 0 or None, got "
MODES = "verify must be 'auto' or 'always' or 'never', got "
WRONG = [
    ({"streamkl.verfy": "auto"}, "got 'streamkl.verfy'; did you mean 'streamkl.verify'"),
    ({"streamkl_strict": True}, "did you mean 'streamkl.strict'"),
    ({"maxautotune": True}, "did you mean 'max_autotune'"),
    ({"zzz": True}, "'zzz' is neither an option of the streamkl backend nor one of Inductor"),
    ({3: True}, "names of options must be strings, got 3"),
    ({"streamkl.strict": 1}, "streamkl.strict must be False or True, got 1"),
    ({"streamkl.min_mib": True}, f"{LEAST}True"),
    ({"streamkl.min_mib": "0"}, f"{LEAST}'0'"),
    ({"streamkl.min_mib": float("nan")}, f"{LEAST}nan"),
    ({"streamkl.min_mib": -1}, f"{LEAST}-1"),
    ({"streamkl.verify_max_mib": 0}, "verify_max_mib must be a number above 0 or None, got 0"),
    ({"streamkl.verify_max_seconds": None}, "must be a number above 0, got None"),
    ({"streamkl.verify": "sometimes"}, f"{MODES}'sometimes'"),
    ({"streamkl.verify": ["auto"]}, f"{MODES}['auto']"),
    (
        {"streamkl.inner": "nvcc"},
        "inner must be 'inductor' or 'aot_eager' or 'eager', got 'nvcc'",
    ),
    (["streamkl.strict"], "options must be a dict or RewriteOptions, got list"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=str)
def test_what_is_wrong_is_said_alike(options, message):
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


def test_keywords():
    made = torch_streamkl.inductor_options({"streamkl.strict": True}, min_mib=0)
    assert made["pre_grad_custom_pass"].ours == RewriteOptions(strict=True, min_mib=0)
    for function in (torch_streamkl.enable, torch_streamkl.inductor_options):
        with pytest.raises(TypeError, match="no option 'min_mb'; did you mean 'min_mib'"):
            function(min_mb=0)
    for row_programs in (False, True):
        with torch_streamkl.enable(min_mib=0, row_programs=row_programs):
            assert fused(custom) == row_programs


def test_options_of_inductor():
    users = _Pass()
    given = {"streamkl.min_mib": 0, "max_autotune": True, "pre_grad_custom_pass": users}
    made = torch_streamkl.inductor_options(given)
    assert made["max_autotune"] is True
    assert made["pre_grad_custom_pass"].passes[0] is users
    assert torch_streamkl.explain(loss, *inputs(), options={"max_autotune": True}).sites
    with pytest.raises(ValueError, match=r"set torch\._inductor\.config\.max_autotune"):
        torch_streamkl.enable({"max_autotune": True})
    with pytest.raises(ValueError, match=r"streamkl\.inner must be 'inductor' in enable\(\)"):
        torch_streamkl.enable(inner="eager")
    assert torch._inductor.config.pre_grad_custom_pass is None


def test_options_of_the_function_itself():
    def with_options(q, k, t, options=None):
        return loss(q, k, t) * options["weight"]

    for call in (torch_streamkl.explain, torch_streamkl.verify):
        with pytest.raises(ValueError, match="'weight' is neither") as raised:
            call(with_options, *inputs(), options={"weight": 2.0})
        assert any("functools.partial" in note for note in raised.value.__notes__)
    bound = functools.partial(with_options, options={"weight": 2.0})
    assert torch_streamkl.explain(bound, *inputs(), options={"streamkl.min_mib": 0}).num_fused == 1


def sorted_scores(q, k, t):
    sorted_loss = F.kl_div((q @ k.mT).sort(-1).values.log_softmax(-1), (t @ t.mT).softmax(-1))
    return loss(q, k, t) + sorted_loss


def test_strict_raises_its_own_error():
    with pytest.raises(backend.UnfusedError, match="sort is applied to scores") as raised:
        fused(sorted_scores, backend="streamkl", options={"streamkl.strict": True})
    assert "1 of 2 losses fused" in str(raised.value)
    with torch_streamkl.enable(strict=True), pytest.raises(backend.UnfusedError):
        fused(sorted_scores)
    assert torch_streamkl.explain(sorted_scores, *inputs(), options=RewriteOptions(strict=True))


def test_the_types_are_those_of_the_options():
    assert get_type_hints(OptionValues) == get_type_hints(RewriteOptions)
    assert all(option.metadata["doc"] for option in fields(RewriteOptions))


def test_the_tables_of_the_docs_are_up_to_date():
    text = PAGE.read_text()
    assert text == update(text), "run: python -m tests.support.option_table"


# ------------------------------------------------------------------------------ what is no program
class _OnMeta(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, device="meta")

    def forward(self, x):
        return loss(self.layer(x), x, x)


def _raises(x):
    raise KeyError("the user's own")


@pytest.mark.parametrize("call", [torch_streamkl.explain, torch_streamkl.verify])
def test_what_cannot_run(call):
    x = inputs()[0]
    for fn, given, error, message in (
        (
            loss(x, x, x),
            (x,),
            TypeError,
            r"\(fn, \*args\), got Tensor, a result: pass the function",
        ),
        (None, (x,), TypeError, "got NoneType"),
        (_raises, (x,), KeyError, "the user's own"),
        (loss, (x, x), TypeError, "missing 1 required positional argument: 't'"),
        (_OnMeta(), (x,), ValueError, r"must (all )?have values.* got layer\.weight on"),
    ):
        with pytest.raises(error, match=message):
            call(fn, *given)


def test_a_program_on_meta_is_explained():
    report = torch_streamkl.explain(_OnMeta(), torch.empty(1, 2, 8, 4, device="meta"))
    assert report.num_fused == 1
    with pytest.raises(ValueError, match="must have values, got argument 0 on the meta device"):
        torch_streamkl.verify(loss, *torch.empty(3, 1, 2, 8, 4, device="meta"))


# --------------------------------------------------------------------- passes in the place of ours
class _Pass(torch._inductor.custom_graph_pass.CustomGraphPass):
    ran = 0

    def __call__(self, graph):
        self.ran += 1

    def uuid(self):
        return "a pass of the user"


@pytest.mark.parametrize("how", ["set later", "set to None", "in options", "next to ours"])
def test_a_pass_that_replaces_the_rewrite_is_named(how, caplog):
    config, mine = torch._inductor.config, None if how == "set to None" else _Pass()
    options = {}
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
def test_both_passes_replaced_are_no_silence(how):
    """Nothing of ours is called then: Dynamo's count of graphs tells."""
    mine = {"pre_grad_custom_pass": _Pass(), "joint_custom_pre_pass": _Pass()}
    patched = torch._inductor.config.patch(mine if how == "in the config" else {})
    with torch_streamkl.enable(), patched, torch_streamkl.reports() as report:
        product = torch.compile(torch.matmul, options=mine if how == "in options" else None)
        product(torch.ones(3, 4), torch.ones(4, 5))
    assert report.num_not_ours == 1
    assert "1 graph was compiled without the rewrite" in str(report)
    assert "joint_custom_pre_pass were replaced" in str(report)


def test_the_backend_needs_no_pass(caplog):
    mine = _Pass()
    with torch_streamkl.enable(), caplog.at_level(logging.WARNING):
        options = {"streamkl.min_mib": 0, "pre_grad_custom_pass": mine}
        assert WAYS["backend"](options) == 1
    assert mine.ran == 1
    assert "replaced the rewrite" not in caplog.text
