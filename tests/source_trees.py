"""Syntax trees of source texts, parsed and walked once for all the tests that read the whole tree."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

__all__ = ["nodes_of", "programs"]


@functools.cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """All nodes of this text's tree as `ast.walk` orders them, in half its time; no test changes them."""
    nodes: list[ast.AST] = [ast.parse(text)]
    for node in nodes:  # which grows
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, ast.AST):
                nodes.append(value)
            elif isinstance(value, list):
                nodes += [part for part in value if isinstance(part, ast.AST)]
    return tuple(nodes)


def programs(root: Path) -> list[Path]:
    """Return the modules below `root` that the house rules apply to: the library, the workload and the rig."""
    rig = root / "tests" / "rig"
    return [
        path
        for folder in (root / "varuna_capslog", root / "detr_pipeline", rig)
        for path in sorted(folder.rglob("*.py"))
        if rig / "tests" not in path.parents
    ]
