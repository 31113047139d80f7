"""Converts reStructuredText of docstrings (math, code blocks) to Markdown, for mkdocstrings."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

# the directive, what stands on its line, and the indented block below
DIRECTIVE = re.compile(
    r"^(?P<indent> *)\.\. (?P<name>math|code-block)::[ ]*(?P<line>[^\n]*)\n"
    r"(?P<block>(?:(?P=indent) +[^\n]*\n|[ ]*\n)*)",
    re.MULTILINE,
)


def as_markdown(text: str) -> str:
    def fenced(match: re.Match[str]) -> str:
        block = textwrap.dedent(match["block"]).strip("\n")
        if match["name"] == "math":
            return f"\n$$\n{match['line']} {block}\n$$\n\n"
        return f"\n```{match['line']}\n{block}\n```\n\n"

    text = DIRECTIVE.sub(fenced, text.replace("``", "`") + "\n")
    # an indented block after "::" is code
    text = re.sub(r"::\n\n((?:    [^\n]*\n|\n)+)", r":\n\n\1", text)
    return text.rstrip("\n")


class MarkdownDocstrings(griffe.Extension):
    """Changes every docstring when it is read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
