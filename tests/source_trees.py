"""Syntax trees of source texts, parsed and walked once for all the tests that read the whole tree."""

from __future__ import annotations

import ast
import functools

__all__ = ["nodes_of"]


@functools.cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """All nodes of this text's tree, the tree itself first; no test changes them."""
    return tuple(ast.walk(ast.parse(text)))
