"""A hook of the documentation site: files outside docs/ are no pages of it, so links to them become their paths."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]*)\]\((\.\./[^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of every page."""

    def shown(found: re.Match[str]) -> str:
        text, path = found[1], found[2].removeprefix("../")
        return f"`{path}`" if text.strip("`/") == path.strip("/") else f"{text} (`{path}`)"

    return _OUTSIDE.sub(shown, markdown)
