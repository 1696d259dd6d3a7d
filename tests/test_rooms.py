"""One direction: a room imports only rooms below it, nothing imports the tests, and there is no circle.

Imports inside functions count, and so do names of modules in strings (they are imported later); imports under
TYPE_CHECKING do not. The list of rooms is read from docs/architecture.md, so that the page cannot become untrue.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_trees import nodes_of

ROOT = Path(__file__).parents[1]
FACADE = ("varuna_capslog", "varuna_capslog.__main__")
"""Stands above all rooms: users import from it."""
AT_MOST = 22
"""Files at one level of a room, `__init__.py` included."""


def rooms() -> list[str]:
    """The rooms from the ground up, as docs/architecture.md lists them."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("## Rooms", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `([a-z_]+)(?:/|\.py)` \|", table, re.MULTILINE)


def modules(root: Path) -> dict[str, Path]:
    """Files of the library's, the workload's and the tests' modules below `root`, by dotted name."""
    paths = {}
    for package in ("varuna_capslog", "detr_pipeline", "tests"):
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            paths[name.removesuffix(".__init__")] = path
    return paths


def imports(name: str, path: Path, paths: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """Yield (module, line) of each module of `paths` that this one imports or names in a string."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for names, line in named_in(path.read_text(encoding="utf-8"), package):
        for longer, base in names:
            target = longer if longer in paths else base
            if target in paths and target != name:
                yield target, line


@functools.cache
def named_in(text: str, package: str) -> list[tuple[list[tuple[str, str]], int]]:
    """Return what each import or string of a module may name, with its line: pairs of a name and the module that it is
    in if it is no module itself.
    """
    nodes, names = nodes_of(text), []
    typing = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and any(of_checkers(part) for part in ast.walk(node.test))
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in nodes:
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            names.append(([(alias.name, alias.name) for alias in node.names], node.lineno))
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            names.append(([(f"{base}.{alias.name}", base) for alias in node.names], node.lineno))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.partition(":")[0]
            names.append(([(module, module)], node.lineno))
    return names


def of_checkers(node: ast.AST) -> bool:
    return "TYPE_CHECKING" in (getattr(node, "id", ""), getattr(node, "attr", ""))


def upward(root: Path, order: list[str]) -> list[str]:
    """Return a line for each import of a room that stands above the importing one, or that the list lacks."""
    paths, violations = modules(root), []

    def height(module: str) -> int:
        if module.startswith("tests."):
            return len(order) + 1
        if module in FACADE or not module.startswith("varuna_capslog"):
            return len(order)
        room = module.split(".")[1]
        assert room in order, f"{module} is in no room of docs/architecture.md"
        return order.index(room)

    for name, path in paths.items():
        for target, line in imports(name, path, paths):
            if target.startswith("detr_pipeline") and name.startswith("detr_pipeline"):
                continue
            below_facade = name.startswith("varuna_capslog") and name not in FACADE
            if height(target) > height(name) or (target in FACADE and below_facade):
                violations.append(f"{path.relative_to(root)}:{line} imports {target}, which stands above it")
    return violations


def circles(root: Path) -> list[str]:
    """Return a line for each import that is part of a circle of modules, with its file and line number."""
    paths = modules(root)
    graph = {
        name: {
            target: line
            for target, line in imports(name, path, paths)
            # a module does not import the package that it is in
            if not (name.startswith(target + ".") and paths[target].name == "__init__.py")
        }
        for name, path in paths.items()
    }

    def reached(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for target in graph[waiting.pop()]:
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        return seen

    below = {name: reached(name) for name in graph}
    return [
        f"{paths[name].relative_to(root)}:{line} imports {target}, which imports {name} again"
        for name, targets in graph.items()
        for target, line in targets.items()
        if name in below[target]
    ]


def test_no_room_imports_a_room_above_it():
    assert upward(ROOT, rooms()) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circles(ROOT) == []


def test_the_rooms_on_the_page_are_the_rooms_of_the_house():
    folder = ROOT / "varuna_capslog"
    there = {path.relative_to(folder).parts[0].removesuffix(".py") for path in folder.rglob("*.py")}
    there -= {"__init__", *(module.rpartition(".")[2] for module in FACADE)}
    assert there == set(rooms())


def test_no_level_of_a_room_has_too_many_files():
    crowded = {
        str(folder.relative_to(ROOT)): count
        for folder in (path for path in (ROOT / "varuna_capslog").rglob("*") if path.is_dir())
        if (count := len(list(folder.glob("*.py")))) > AT_MOST
    }
    assert crowded == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from varuna_capslog.start import prepare\n", ":1 imports varuna_capslog.start.prepare"),
        ("def f():\n    import varuna_capslog.cli\n", ":2 imports varuna_capslog.cli"),
        ("NAME = 'varuna_capslog.start.prepare:main'\n", ":1 imports varuna_capslog.start.prepare"),
        ("import varuna_capslog\n", ":1 imports varuna_capslog"),
        ("from tests.rig import toy\n", ":1 imports tests.rig.toy"),
        ("NAME = 'tests.rig.toy:workload'\n", ":1 imports tests.rig.toy"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import varuna_capslog.cli\n", None),
    ],
    ids=["module", "inside a function", "string", "facade", "tests", "string of a test", "types only"],
)
def test_an_upward_import_is_named_with_file_and_line(tmp_path, text, expected):
    for name in ("__init__", "cli", "start/prepare", "base/wrong"):
        path = tmp_path / "varuna_capslog" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if name == "base/wrong" else "")
    (tmp_path / "tests" / "rig").mkdir(parents=True)
    (tmp_path / "tests" / "rig" / "toy.py").touch()
    where = "varuna_capslog/base/wrong.py"
    violations = upward(tmp_path, ["base", "start", "cli"])
    assert violations == ([f"{where}{expected}, which stands above it"] if expected else [])


def test_a_circle_is_named_with_file_and_line(tmp_path):
    folder = tmp_path / "varuna_capslog" / "base"
    folder.mkdir(parents=True)
    (folder / "one.py").write_text("from varuna_capslog.base import two\n")
    (folder / "two.py").write_text("def f():\n    from varuna_capslog.base.one import x\n")
    assert circles(tmp_path) == [
        "varuna_capslog/base/one.py:1 imports varuna_capslog.base.two, which imports varuna_capslog.base.one again",
        "varuna_capslog/base/two.py:2 imports varuna_capslog.base.one, which imports varuna_capslog.base.two again",
    ]
