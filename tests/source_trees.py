"""Syntax trees of source texts, parsed once for all the tests that read the whole tree."""

from __future__ import annotations

import ast
import functools

__all__ = ["tree_of"]


@functools.cache
def tree_of(text: str) -> ast.Module:
    """The tree of this text, which no test changes."""
    return ast.parse(text)
