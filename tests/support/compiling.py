"""How tests compile a program with the rewrite."""

from __future__ import annotations

import torch


def named(**options):
    """Our options by name, as torch.compile takes them."""
    return {f"streamkl.{name}": value for name, value in options.items()}


def compile_rewritten(fn, *, inner="eager", dynamic=None, fullgraph=False, **options):
    """Compiles with options by name, after Dynamo forgot what it had compiled."""
    torch._dynamo.reset()
    given = named(inner=inner, **options)
    return torch.compile(
        fn, backend="streamkl", dynamic=dynamic, fullgraph=fullgraph, options=given
    )
