"""Adapts links for the site: files outside of docs/ become text, or links if repo_url is set."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def _outside(link: str, page: str) -> str | None:
    """The repository's path of a link that leaves docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") or not (ROOT / path).exists() else path


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    def adapted(match: re.Match[str]) -> str:
        picture, text, link, anchor = match.groups()
        path = _outside(link, page.file.src_uri)
        if path is None:
            return match[0]
        if picture:
            depth = page.file.src_uri.count("/")
            return f"![{text}]({'../' * depth}pictures/{posixpath.basename(path)})"
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor or ''})"
        return f"{text} (`{path}`)" if text.strip("`") not in (path, link) else f"`{path}`"

    return LINK.sub(adapted, markdown)


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """Add pictures of bench/ that pages show."""
    for page in list(files.documentation_pages()):
        for picture, _text, link, _anchor in LINK.findall(page.content_string):
            path = _outside(link, page.src_uri) if picture else None
            name = f"pictures/{posixpath.basename(link)}"
            if path is not None and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files
