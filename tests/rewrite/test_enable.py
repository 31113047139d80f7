"""enable(): what trainers get that call torch.compile themselves, and that it can be undone."""

import contextlib
import importlib
import logging
import threading

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config
import torch._inductor.custom_graph_pass
from torch.utils import _config_module

import torch_streamkl
from tests.support.losses import kd
from tests.support.subgraphs import inductor_without_code
from torch_streamkl.fx_passes import backend, fallback
from torch_streamkl.fx_passes.capture.settings import CAPTURE
from torch_streamkl.fx_passes.inductor_passes import CustomGraphPass

INDUCTOR, DYNAMO = torch._inductor.config, torch._dynamo.config
PASSES = ("pre_grad_custom_pass", "joint_custom_pre_pass")
OWNERS = {
    **dict.fromkeys(PASSES, INDUCTOR),
    **dict.fromkeys(("capture_dynamic_output_shape_ops", "nested_graph_breaks"), DYNAMO),
}
TAKES_LISTS = hasattr(torch._inductor.custom_graph_pass, "get_custom_graph_passes")


def settings():
    return {name: getattr(owner, name) for name, owner in OWNERS.items()}


class Users(CustomGraphPass):
    def __init__(self):
        self.ran = 0

    def __call__(self, graph):
        self.ran += 1

    def uuid(self):
        return "a pass of the user"


@pytest.fixture(autouse=True)
def _nothing_enabled(request):
    torch._dynamo.reset()
    before = settings()
    has_code = "generates_code" in request.keywords
    # a graph of the cache is not analysed, so nothing would be reported
    with (
        contextlib.nullcontext() if has_code else inductor_without_code(),
        INDUCTOR.patch(force_disable_caches=True),
    ):
        yield
    torch_streamkl.disable()
    assert settings() == before


def loss(q, k, t):
    return kd(q @ k.mT, t @ t.mT)


def unfused(q, k, t):
    return loss(q, k, t) + kd((q @ k.mT).sort(-1).values, t @ t.mT)


def compiled(fn, **options):
    """The report of ``fn`` compiled by someone who does not know of us."""
    torch._dynamo.reset()
    given = [torch.randn(1, 2, 8, 4, requires_grad=i < 2) for i in range(3)]
    with backend.collected() as report:
        got = torch.compile(fn, **options)(*given)
    torch.testing.assert_close(got, fn(*given))
    torch.autograd.grad(got, given[:2])
    return report


def num_fused(fn, **options):
    return compiled(fn, **options).num_fused


def test_ordinary_compilations_are_rewritten_until_it_is_disabled():
    assert num_fused(loss) == 0
    torch_streamkl.enable()
    assert num_fused(loss) == 1
    torch_streamkl.disable()
    torch_streamkl.disable()
    assert num_fused(loss) == 0


def _options():
    found = INDUCTOR.pre_grad_custom_pass.ours
    assert INDUCTOR.joint_custom_pre_pass.ours == found
    return found


def test_twice_and_nested():
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


def test_an_error_inside_undoes_it():
    with pytest.raises(RuntimeError, match="inside"), torch_streamkl.enable():
        raise RuntimeError("inside")
    assert INDUCTOR.pre_grad_custom_pass is None


@pytest.mark.parametrize("as_list", [False, True])
def test_passes_of_the_user_stay(as_list):
    one, two = Users(), Users()
    users = [one, two] if as_list else one
    with INDUCTOR.patch(pre_grad_custom_pass=users, joint_custom_pre_pass=two):
        with torch_streamkl.enable():
            with torch_streamkl.enable():
                assert num_fused(loss) == 1
            assert (one.ran, two.ran) == (1, 1 + as_list)
        assert INDUCTOR.pre_grad_custom_pass == users
        assert INDUCTOR.joint_custom_pre_pass is two


@pytest.mark.parametrize(
    "replaced", [*([x] for x in (*PASSES, *CAPTURE)), list(PASSES)], ids="-".join
)
def test_what_the_user_replaces_meanwhile_stays_and_the_rest_is_put_back(replaced):
    before = settings()
    mine = {n: not CAPTURE[n] if n in CAPTURE else Users() for n in replaced}
    torch_streamkl.enable()
    for name, value in mine.items():
        setattr(OWNERS[name], name, value)
    torch_streamkl.disable()
    after = settings()
    for name, value in before.items():
        setattr(OWNERS[name], name, value)
    assert after == {**before, **mine}


def test_settings_of_the_user_are_put_back():
    with DYNAMO.patch({name: True for name in OWNERS if name not in PASSES}):
        before = settings()
        with torch_streamkl.enable():
            assert DYNAMO.capture_dynamic_output_shape_ops and DYNAMO.nested_graph_breaks
        assert settings() == before


def test_what_was_patched_around_it_is_not_enabled_afterwards():
    """The passes went with the patch; a later block ends without them."""
    with INDUCTOR.patch(pre_grad_custom_pass=None, joint_custom_pre_pass=None):
        torch_streamkl.enable()
    with torch_streamkl.enable():
        pass
    assert INDUCTOR.pre_grad_custom_pass is None and INDUCTOR.joint_custom_pre_pass is None


@pytest.mark.skipif(not TAKES_LISTS, reason="Inductor of torch 2.11 takes one pass, not a list")
def test_a_pass_that_the_user_adds_meanwhile_stays():
    added = Users()
    with torch_streamkl.enable():
        INDUCTOR.pre_grad_custom_pass = [INDUCTOR.pre_grad_custom_pass, added]
        assert num_fused(loss) == 1
    assert added.ran == 1
    assert INDUCTOR.pre_grad_custom_pass == [added]
    INDUCTOR.pre_grad_custom_pass = None


def test_a_list_of_the_user_runs_next_to_our_backend_too():
    """Inductor of torch 2.11 takes no list by itself; enable() makes one of it that it takes."""
    one, two = Users(), Users()
    with INDUCTOR.patch(pre_grad_custom_pass=[one, two]), torch_streamkl.enable():
        assert num_fused(loss, backend="streamkl") == 1
        assert (one.ran, two.ran) == (1, 1)


def test_explain(caplog):
    with torch_streamkl.enable(explain=True), caplog.at_level(logging.WARNING):
        assert num_fused(unfused) == 1
    assert "1 of 2 losses fused" in caplog.text


@pytest.mark.parametrize("front_end", ["backend", "inductor_options"])
def test_the_other_ways_in_are_not_doubled(front_end):
    with torch_streamkl.enable(strict=True):
        options = {"backend": "streamkl"}
        if front_end == "inductor_options":
            options = {"options": torch_streamkl.inductor_options()}
        report = compiled(unfused, **options)
    assert (report.num_fused, len(report.sites)) == (1, 2)


def selected_rows(s, t, keep):
    rows = keep.flatten()
    a, b = (s @ s.mT).log_softmax(-1), (t @ t.mT).softmax(-1)
    return (b * (b.log() - a)).sum(-1)[rows].mean()


def one_mask_twice(s, t, keep):
    """torch 2.13 merges the masks and not the numbers of rows: "AssertionError: u8 -> u0"."""
    return (s[keep.flatten()].softmax(-1) * t[keep.flatten()].softmax(-1)).sum()


def deviation_beside_a_loss(s, t, keep):
    """AOTAutograd asks whether there is more than one row."""
    return loss(s, s, t) + torch.masked_select(s, keep.view(-1, 1)).std()


@pytest.mark.parametrize(
    "fn",
    [
        # Inductor refuses it where it generates code, AOTAutograd the next before
        pytest.param(one_mask_twice, marks=pytest.mark.generates_code),
        deviation_beside_a_loss,
        selected_rows,
    ],
)
def test_what_compiles_without_it_compiles_with_it(fn):
    """Data-dependent shapes that AOTAutograd or Inductor refuse are traced with graph breaks."""
    keep = torch.tensor([[True, False, True], [True, True, False]])
    s, t = torch.randn(6, 8, requires_grad=True), torch.randn(6, 8)
    with torch_streamkl.enable():
        got = torch.compile(fn, fullgraph=fn is selected_rows)(s, t, keep)
        assert DYNAMO.capture_dynamic_output_shape_ops
        with inductor_without_code():
            assert num_fused(loss) == 1
    want = fn(s, t, keep)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(x, s) for x in (got, want)))
    assert not hasattr(torch._inductor.compile_fx.compile_fx, "restart")  # nothing stays wrapped


def test_other_errors_of_a_compilation_are_not_hidden():
    def fails(graph):
        raise RuntimeError("of the user's pass")

    fails.uuid = lambda: None
    with (
        INDUCTOR.patch(joint_custom_pre_pass=fails),
        torch_streamkl.enable(),
        pytest.raises(Exception, match="of the user's pass"),
    ):
        num_fused(lambda q, k, t: q.cumsum(0).mean() + k.mean() + t.mean())


def test_disable_leaves_what_another_thread_has_enabled():
    """What is traced again without data-dependent shapes is so in both threads."""
    module = importlib.import_module(fallback.MODULE)
    own = getattr(module, fallback.ENTRY)
    has_begun, may_end = threading.Event(), threading.Event()

    def train():
        with torch_streamkl.enable():
            has_begun.set()
            may_end.wait(60)

    thread = threading.Thread(target=train)
    thread.start()
    assert has_begun.wait(60)
    wrapped = getattr(module, fallback.ENTRY)
    torch_streamkl.enable()
    torch_streamkl.disable()
    is_left = getattr(module, fallback.ENTRY) is wrapped
    may_end.set()
    thread.join()
    # without ContextVar, settings are those of the process
    assert wrapped is own or is_left == hasattr(_config_module, "ContextVar")
    assert getattr(module, fallback.ENTRY) is own
