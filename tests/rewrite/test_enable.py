"""enable(): what trainers get that call torch.compile themselves, and that it can be undone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config
import torch._inductor.custom_graph_pass
from torch import Tensor, fx

import torch_streamkl
from tests.support.subgraphs import inductor_without_code
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.capture.settings import CAPTURE
from torch_streamkl.fx_passes.inductor_passes import CustomGraphPass

SETTINGS = ("capture_dynamic_output_shape_ops", "nested_graph_breaks")
TAKES_LISTS = hasattr(torch._inductor.custom_graph_pass, "get_custom_graph_passes")


def settings() -> list[object]:
    inductor, dynamo = torch._inductor.config, torch._dynamo.config
    values: list[object] = [inductor.pre_grad_custom_pass, inductor.joint_custom_pre_pass]
    return values + [getattr(dynamo, name) for name in SETTINGS]


class Users(CustomGraphPass):
    def __init__(self) -> None:
        self.ran = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.ran += 1

    def uuid(self) -> Any:
        return "a pass of the user"


@pytest.fixture(autouse=True)
def _nothing_enabled(request: pytest.FixtureRequest) -> Iterator[None]:
    torch._dynamo.reset()
    before = settings()
    has_code = "generates_code" in request.keywords
    # a graph of the cache is not analysed, so nothing would be reported
    with (
        contextlib.nullcontext() if has_code else inductor_without_code(),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        yield
    torch_streamkl.disable()
    assert settings() == before


def loss(q: Tensor, k: Tensor, t: Tensor) -> Tensor:
    wanted = (t @ t.mT).softmax(-1)
    got = (q @ k.mT).log_softmax(-1)
    return torch.nn.functional.kl_div(got, wanted, reduction="batchmean")


def unfused(q: Tensor, k: Tensor, t: Tensor) -> Tensor:
    return loss(q, k, t) + torch.nn.functional.kl_div(
        (q @ k.mT).sort(-1).values.log_softmax(-1), (t @ t.mT).softmax(-1)
    )


def inputs() -> list[Tensor]:
    return [torch.randn(1, 2, 8, 4, requires_grad=i < 2) for i in range(3)]


def num_fused(fn: Any, **options: Any) -> int:
    """Of ``fn`` compiled by someone who does not know of us."""
    torch._dynamo.reset()
    given = inputs()
    with backend.collected() as report:
        got = torch.compile(fn, **options)(*given)
    torch.testing.assert_close(got, fn(*given))
    got.backward()
    assert given[0].grad is not None
    return report.num_fused


def test_ordinary_compilations_are_rewritten_until_it_is_disabled() -> None:
    assert num_fused(loss) == 0
    torch_streamkl.enable()
    assert num_fused(loss) == 1
    torch_streamkl.disable()
    torch_streamkl.disable()
    assert num_fused(loss) == 0


def test_twice_and_nested() -> None:
    before = settings()
    torch_streamkl.enable()
    torch_streamkl.enable(deterministic=False)
    assert not _options().deterministic
    assert num_fused(loss) == 1
    with torch_streamkl.enable(strict=True):
        assert _options().strict and _options().deterministic
        with torch_streamkl.enable():
            assert not _options().strict
            torch_streamkl.disable()
            assert settings() == before
        assert _options().strict
    assert not _options().strict and not _options().deterministic
    torch_streamkl.disable()
    assert settings() == before


def _options() -> torch_streamkl.RewriteOptions:
    found = torch._inductor.config.pre_grad_custom_pass.ours
    assert torch._inductor.config.joint_custom_pre_pass.ours == found
    return found


def test_an_error_inside_undoes_it() -> None:
    with pytest.raises(RuntimeError, match="inside"), torch_streamkl.enable():
        raise RuntimeError("inside")
    assert torch._inductor.config.pre_grad_custom_pass is None


@pytest.mark.parametrize("as_list", [False, True])
def test_passes_of_the_user_stay(as_list: bool) -> None:
    one, two = Users(), Users()
    users = [one, two] if as_list else one
    with torch._inductor.config.patch(pre_grad_custom_pass=users, joint_custom_pre_pass=two):
        with torch_streamkl.enable():
            with torch_streamkl.enable():
                assert num_fused(loss) == 1
            assert one.ran == 1
            assert two.ran == 1 + as_list
        assert torch._inductor.config.pre_grad_custom_pass == users
        assert torch._inductor.config.joint_custom_pre_pass is two


REPLACED = ["pre_grad_custom_pass", "joint_custom_pre_pass", *CAPTURE]


@pytest.mark.parametrize("replaced", [*([x] for x in REPLACED), REPLACED[:2]], ids="-".join)
def test_what_the_user_replaces_meanwhile_stays_and_the_rest_is_put_back(
    replaced: list[str],
) -> None:
    inductor, dynamo = torch._inductor.config, torch._dynamo.config
    owners = {n: dynamo if n in SETTINGS else inductor for n in (*REPLACED, *SETTINGS)}
    before = {n: getattr(owner, n) for n, owner in owners.items()}
    mine = {n: not CAPTURE[n] if n in CAPTURE else Users() for n in replaced}
    torch_streamkl.enable()
    for name, value in mine.items():
        setattr(owners[name], name, value)
    torch_streamkl.disable()
    after = {n: getattr(owner, n) for n, owner in owners.items()}
    for name, value in before.items():
        setattr(owners[name], name, value)
    assert after == {**before, **mine}


def test_what_was_patched_around_it_is_not_enabled_afterwards() -> None:
    """The passes went with the patch; a later block ends without them."""
    with torch._inductor.config.patch(pre_grad_custom_pass=None, joint_custom_pre_pass=None):
        torch_streamkl.enable()
    with torch_streamkl.enable():
        pass
    assert torch._inductor.config.pre_grad_custom_pass is None
    assert torch._inductor.config.joint_custom_pre_pass is None


@pytest.mark.skipif(not TAKES_LISTS, reason="Inductor of torch 2.11 takes one pass, not a list")
def test_a_pass_that_the_user_adds_meanwhile_stays() -> None:
    added = Users()
    with torch_streamkl.enable():
        config = torch._inductor.config
        config.pre_grad_custom_pass = [config.pre_grad_custom_pass, added]
        assert num_fused(loss) == 1
    assert added.ran == 1
    assert torch._inductor.config.pre_grad_custom_pass == [added]
    torch._inductor.config.pre_grad_custom_pass = None


def test_a_list_of_the_user_runs_behind_our_backend_too() -> None:
    """Inductor of torch 2.11 takes no list by itself; enable() makes one of it that it takes."""
    one, two = Users(), Users()
    with torch._inductor.config.patch(pre_grad_custom_pass=[one, two]), torch_streamkl.enable():
        assert num_fused(loss, backend="streamkl") == 1
        assert (one.ran, two.ran) == (1, 1)


def test_settings_of_the_user_are_put_back() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        with torch_streamkl.enable():
            assert all(getattr(torch._dynamo.config, name) for name in CAPTURE)
        assert torch._dynamo.config.capture_dynamic_output_shape_ops
    with torch_streamkl.enable():
        torch._dynamo.config.capture_dynamic_output_shape_ops = False
    assert not torch._dynamo.config.capture_dynamic_output_shape_ops
    with torch._dynamo.config.patch(nested_graph_breaks=True), torch_streamkl.enable():
        assert torch._dynamo.config.nested_graph_breaks


def test_options_that_do_not_exist() -> None:
    before = settings()
    with pytest.raises(ValueError, match=r"streamkl\.strict must be False or True, got 'yes'"):
        torch_streamkl.enable(strict="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"streamkl\.verify"):
        torch_streamkl.enable(verify="sometimes")
    with pytest.raises(ValueError, match=r"streamkl\.inner must be 'inductor' in enable\(\)"):
        torch_streamkl.enable(inner="eager")
    assert settings() == before


def test_strict_and_explain(caplog: pytest.LogCaptureFixture) -> None:
    with torch_streamkl.enable(strict=True):
        assert num_fused(loss) == 1
        with pytest.raises(Exception, match="sort is applied to scores"):
            num_fused(unfused)
    caplog.clear()
    with torch_streamkl.enable(explain=True), caplog.at_level(logging.WARNING):
        assert num_fused(unfused) == 1
    assert "1 of 2 losses fused" in caplog.text


@pytest.mark.parametrize("front_end", ["backend", "inductor_options"])
def test_the_other_ways_in_are_not_doubled(front_end: str) -> None:
    with torch_streamkl.enable(strict=True):
        if front_end == "backend":
            options: dict[str, Any] = {"backend": "streamkl"}
        else:
            options = {"options": torch_streamkl.inductor_options()}
        torch._dynamo.reset()
        given = inputs()
        with backend.collected() as report:
            got = torch.compile(unfused, **options)(*given)
    torch.testing.assert_close(got, unfused(*given))
    assert (report.num_fused, len(report.sites)) == (1, 2)


def selected(q: Tensor, k: Tensor, t: Tensor) -> Tensor:
    """Rows that a mask selects: their number depends on the data."""
    wanted = (t @ t.mT).softmax(-1)
    got = (q @ k.mT).log_softmax(-1)
    rows = (wanted * (wanted.log() - got)).sum(-1)
    return rows[q.detach()[..., 0] > 0].mean()


def test_selected_rows_stay_in_one_graph() -> None:
    with torch_streamkl.enable():
        torch._dynamo.reset()
        given = inputs()
        got = torch.compile(selected, fullgraph=True)(*given)
    torch.testing.assert_close(got, selected(*given))


def one_mask_twice(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    """torch 2.13 merges the masks and not the numbers of rows: "AssertionError: u8 -> u0"."""
    return (s[keep.flatten()].softmax(-1) * t[keep.flatten()].softmax(-1)).sum()


def a_condition_twice(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    labels = keep.flatten().long()
    a, b = s[labels != 0].log_softmax(-1), t[labels != 0].softmax(-1)
    return torch.nn.functional.kl_div(a, b, reduction="batchmean")


def running_sums(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    """AOTAutograd asks whether there is more than one row."""
    return s[keep.flatten()].cumsum(0).mean() + t.mean()


def deviation_beside_a_loss(s: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    a, b = (s @ s.mT).log_softmax(-1), (t @ t.mT).softmax(-1)
    loss = torch.nn.functional.kl_div(a, b, reduction="batchmean")
    return loss + torch.masked_select(s, keep.view(-1, 1)).std()


@pytest.mark.parametrize(
    "fn",
    [
        # Inductor refuses these where it generates code, AOTAutograd the others before
        pytest.param(one_mask_twice, marks=pytest.mark.generates_code),
        pytest.param(a_condition_twice, marks=pytest.mark.generates_code),
        running_sums,
        deviation_beside_a_loss,
    ],
)
def test_what_compiles_without_it_compiles_with_it(fn: Any) -> None:
    """Data-dependent shapes that AOTAutograd or Inductor refuses are traced with graph breaks."""
    keep = torch.tensor([[True, False, True], [True, True, False]])
    s, mine = (torch.randn(6, 8).requires_grad_() for _ in range(2))
    mine.data.copy_(s.data)
    t = torch.randn(6, 8)
    with torch_streamkl.enable():
        got = torch.compile(fn)(s, t, keep)
        assert torch._dynamo.config.capture_dynamic_output_shape_ops
        with inductor_without_code():
            assert num_fused(loss) == 1
    want = fn(mine, t, keep)
    torch.testing.assert_close(got, want)
    got.backward()
    want.backward()
    torch.testing.assert_close(s.grad, mine.grad)
    assert not hasattr(torch._inductor.compile_fx.compile_fx, "restart")  # nothing stays wrapped


def test_other_errors_of_a_compilation_are_not_hidden() -> None:
    def fails(graph: fx.Graph) -> None:
        raise RuntimeError("of the user's pass")

    fails.uuid = lambda: None  # type: ignore[attr-defined]
    with (
        torch._inductor.config.patch(joint_custom_pre_pass=fails),
        torch_streamkl.enable(),
        pytest.raises(Exception, match="of the user's pass"),
    ):
        num_fused(running_sums_of_all)


def running_sums_of_all(q: Tensor, k: Tensor, t: Tensor) -> Tensor:
    return q.cumsum(0).mean() + k.mean() + t.mean()
