"""No code of ours replaces methods of a class, ours or torch's, nor keeps a switch or a run's state in a module."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.source_trees import nodes_of, programs

ROOT = Path(__file__).resolve().parents[1]
FILES = programs(ROOT)

STATE_OF_THE_PROCESS = {
    ("options.py", "_current"),  # Varuna's classes are patched for the whole process: see its module
}


def assigned(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, ast.Attribute]]:
    """Every `something.name = ...`, and `setattr` or `delattr` of a class, with its line."""
    for node in nodes:
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else []
        for target in targets:
            if isinstance(target, ast.Attribute):
                yield node.lineno, target
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            yield node.lineno, ast.Attribute(node.args[0], "?")


def is_class_or_module(value: ast.expr, modules: set[str]) -> bool:
    if isinstance(value, ast.Attribute):
        return value.attr[:1].isupper()
    return isinstance(value, ast.Name) and (value.id in modules or (value.id[:1].isupper() and not value.id.isupper()))


def modules_of(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names that imports bind to modules, of other packages and of ours."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            folder = ROOT.joinpath(*(node.module or "").split("."))
            ours = [
                alias
                for alias in node.names
                if (folder / alias.name).exists() or (folder / f"{alias.name}.py").exists()
            ]
            names |= {alias.asname or alias.name for alias in ours}
    return names - {"sys"}  # a script of the user's gets its own sys.argv


def patches_in(text: str) -> list[int]:
    nodes = nodes_of(text)
    modules = modules_of(nodes)
    return sorted(line for line, target in assigned(nodes) if is_class_or_module(target.value, modules))


PATCHES = """
from torch import nn
from tests.rig import faults
nn.Module.to = None
class Stage:
    pass
Stage.keep = 1
stage = Stage()
stage.keep = Stage().keep = 1
faults.main = 1
setattr(Stage, "keep", 1)
"""


def test_patches_are_found() -> None:
    assert [PATCHES.splitlines()[line - 1] for line in patches_in(PATCHES)] == [
        "nn.Module.to = None",
        "Stage.keep = 1",
        "faults.main = 1",
        'setattr(Stage, "keep", 1)',
    ]


def test_no_class_or_module_is_patched() -> None:
    places = [f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in patches_in(path.read_text())]
    # the operators of a phantom are made in a loop, right below its class
    assert [where for where in places if "varuna_plugin/tracing.py" not in where] == []


def test_no_module_keeps_the_state_of_a_run() -> None:
    globals_of_files = {
        (path.name, name)
        for path in FILES
        for node in nodes_of(path.read_text())
        if isinstance(node, ast.Global)
        for name in node.names
    }
    assert globals_of_files <= STATE_OF_THE_PROCESS
