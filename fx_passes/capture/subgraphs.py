"""Finds the subgraphs of higher-order operators that may be rewritten."""

from __future__ import annotations

from torch import fx

from torch_streamkl.fx_passes.fx_utils.nodes import users_of_body


def is_plain_body(gm: fx.GraphModule, name: str) -> bool:
    """Returns whether a body runs as it is: checkpoints do; autograd functions and vmap do not."""
    users = users_of_body(gm, name)
    return (
        bool(users)
        and all("checkpoint" in str(u.target) or "wrap" in str(u.target) for u in users)
        and not any("autograd_function" in str(u.target) for u in users)
    )


def owner_of(gm: fx.GraphModule, name: str) -> str:
    """Returns the higher-order operator that runs a body."""
    users = users_of_body(gm, name)
    name = str(users[0].target) if users else "another operator"
    return "a custom autograd.Function" if "autograd_function" in name else f"the body of {name}"
