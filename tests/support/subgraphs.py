"""What Inductor would compile, run without it: bodies of compiled blocks, and whole graphs."""

import contextlib
import functools

import pytest
import torch._inductor.compile_fx
import torch._inductor.config
from functorch.compile import make_boxed_func

from torch_streamkl.cpu import compiled


def _as_written(body, form, inputs):
    for x, spec in inputs.values():
        assert x.dim() == len(spec)
    names = list(inputs)
    return lambda tensors: body(form, dict(zip(names, tensors, strict=True)))


@pytest.fixture
def bodies_as_written(monkeypatch):
    """Nothing is compiled; a body gets the inputs that a compiled one would."""
    monkeypatch.setattr(compiled, "find", _as_written)


@contextlib.contextmanager
def inductor_without_code():
    """Inside, Inductor's graphs are interpreted: its passes run, ours too, and no compiler."""

    def interpreted(gm, *_, **__):
        return make_boxed_func(gm.forward)

    compile_fx = torch._inductor.compile_fx.compile_fx
    without_code = functools.partial(compile_fx, inner_compile=interpreted)
    with (
        pytest.MonkeyPatch.context() as patch,
        torch._inductor.config.patch(force_disable_caches=True),  # they hold what was generated
    ):
        patch.setattr(torch._inductor.compile_fx, "compile_fx", without_code)
        patch.setattr(compiled, "find", _as_written)
        yield
