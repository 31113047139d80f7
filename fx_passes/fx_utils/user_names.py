"""Names inputs of Dynamo's graphs as the user's code names them: arguments and parameters.

Dynamo names a placeholder after its source: ``l_self_modules_lm_head_parameters_weight_`` for
``L['self']._modules['lm_head']._parameters['weight']``, which a user knows as
``self.lm_head.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import fx

_OF_SOURCES = (
    (r"^G\['__import_\w+'\]\.", ""),  # a global of another module than the compiled function
    (r"^[LG]\['(\w+)'\]", r"\1"),
    (r"^\w+(?:\.func)*\.keywords\['(\w+)'\]", r"\1"),  # of functools.partial
    (r"^\w+(?:\.func)+\b", "self"),
    (r"\._(modules|parameters|buffers)\['([^']+)'\]", r".\2"),
    (r"\.__self__\b", ""),
    (r"\._orig_mod\b|\._checkpoint_wrapped_module\b|\._fsdp_wrapped_module\b", ""),
)
_OF_NODES = (
    (r"^[lLgG]_(import_\w+?_(?=\w+_modules))?|_$", ""),
    (r"_(modules|parameters|buffers)_", "."),
)
_OF_DYNAMO = re.compile(r"[lLgG]_\w+")


def user_name(placeholder: fx.Node) -> str:
    """Returns the name of an input in the user's code, as far as Dynamo knows its source."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name  # of torch 2.11 a method
    rules = _OF_SOURCES if isinstance(name, str) else _OF_NODES
    text = name if isinstance(name, str) else placeholder.name
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


def with_user_names(text: str, placeholders: Iterable[fx.Node]) -> str:
    """Replaces Dynamo's names of inputs in a text."""
    names = {x.name: user_name(x) for x in placeholders if _OF_DYNAMO.fullmatch(x.name)}
    return re.sub(r"\b\w+\b", lambda found: names.get(found[0], found[0]), text)
