"""A hook of the documentation site: it makes the page of config keys, and mends links that only a clone has.

Files outside docs/ are no pages, so links to them become their paths. In a clone, the page of config keys is the module
that makes it: links to `_keys.py` lead to the page.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from _keys import page  # mkdocs imports a hook with its folder on the path

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

_OUTSIDE = re.compile(r"\[([^\]]*)\]\((\.\./[^)]+)\)")
_KEYS = "config-keys.md"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the page of config keys; mkdocs calls this with the files of docs/."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, _KEYS, content=page()))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page with its links mended; mkdocs calls this for every page."""

    def shown(found: re.Match[str]) -> str:
        text, path = found[1], found[2].removeprefix("../")
        return f"`{path}`" if text.strip("`/") == path.strip("/") else f"{text} (`{path}`)"

    return _OUTSIDE.sub(shown, markdown.replace("](_keys.py)", f"]({_KEYS})"))
