"""The pages name what exists: modules, names in them, files, and the targets of links.

A page names a module as `varuna_capslog.room.module`, as `room/module.py`, or with a name in it, as
`room/module.function` or `room.function`. Other words in backticks (commands, keys, files of a run) are not looked at.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("varuna_capslog", "detr_pipeline")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "docs", "configs", "launch", "examples")
OTHERS = {"config", "elastic", "model"}
"""Rooms whose names are also sections of a config or files: `elastic.redundancy`, `config.yaml`."""
EXAMPLES = {"train.py", "pretrain.py", "my_train.py", "model.py", "my_model.py"}
"""Files of a reader's own."""


def pages(root: Path) -> list[Path]:
    """Return README, CONTRIBUTING, the pages of docs and the README of every benchmark."""
    candidates = [
        root / "README.md",
        root / "CONTRIBUTING.md",
        *root.glob("docs/*.md"),
        *root.glob("benchmarks/**/README.md"),
    ]
    return sorted(page for page in candidates if page.is_file())


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names that a module defines or imports: `name`, and `Class.name` for methods and attributes of its classes."""
    names: set[str] = set()

    def take(body: list[ast.stmt], before: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(before + node.name)
            if isinstance(node, ast.ClassDef):
                take(node.body, f"{before}{node.name}.")
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names.update(before + (alias.asname or alias.name) for alias in node.names)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(before + target.id for target in targets if isinstance(target, ast.Name))
            elif isinstance(node, (ast.If, ast.Try, ast.With)):  # `if TYPE_CHECKING:` of the facade
                take(node.body, before)

    take(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return frozenset(names)


def module_file(folder: Path, parts: list[str]) -> Path | None:
    """The file of a module or of a package's `__init__` below `folder`."""
    place = folder.joinpath(*parts)
    for path in (place.parent / f"{place.name}.py", place / "__init__.py"):
        if path.is_file():
            return path
    return None


def lacks(folder: Path, dotted: str) -> bool:
    """Return True if `dotted` is neither a module below `folder` nor a name in one."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        path = module_file(folder, parts[:count])
        if path is not None:
            return count < len(parts) and ".".join(parts[count:]) not in names_in(path)
    return True


def wrong_modules(root: Path, text: str) -> Iterator[str]:
    """Yield dotted names, and names imported from a module, that begin with a package of ours and do not exist."""
    for name in re.findall(rf"(?<![\w./-])((?:{'|'.join(PACKAGES)})(?:\.\w+)+)", text):
        if name.rpartition(".")[2] not in ("py", "md") and lacks(root, name):
            yield name
    for module, names in re.findall(rf"from ((?:{'|'.join(PACKAGES)})[\w.]*) import (\w+(?:, \w+)*)", text):
        for name in names.split(", "):
            if lacks(root, f"{module}.{name}"):
                yield f"{module}.{name}"


def wrong_paths(root: Path, page: Path, text: str) -> Iterator[str]:
    """Yield paths in backticks and commands that are not in the repository, in the library or beside the page."""
    library = root / "varuna_capslog"
    rooms = {path.name for path in library.iterdir() if path.is_dir()}
    places = (root, library, library / "elastic", page.parent)
    quoted = re.findall(r"`([^`\n]+)`", text)
    commands = re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]+\.(?:py|sh|yaml|md))\b", text)
    for path in dict.fromkeys([*quoted, *commands]):
        if "NAME" in path or not re.fullmatch(r"[\w-]+(?:[./][\w-]+)*/?", path):
            continue
        first, named = path.split("/")[0], re.fullmatch(r"([\w/]+/\w+)\.(\w+(?:\.\w+)?)", path)
        if named and first in rooms and named[2] != "py":
            if lacks(library, f"{named[1].replace('/', '.')}.{named[2]}"):
                yield path
        elif path.endswith(".py") and "/" not in path:
            if path not in EXAMPLES and not any(module.name == path for module in _modules(root)):
                yield path
        elif "/" not in path and "." in path and first.split(".")[0] in rooms - OTHERS:
            if lacks(library, path):
                yield path
        elif path.endswith(".py") or ("/" in path and first in (*FOLDERS, *rooms)):
            there = any((place / path).exists() or (place / f"{path}.py").exists() for place in places)
            if not there:
                yield path


@cache
def _modules(root: Path) -> tuple[Path, ...]:
    return tuple(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def wrong_links(page: Path, text: str) -> Iterator[str]:
    """Relative links whose file or heading is not there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            yield target


def wrong(root: Path, page: Path) -> list[str]:
    """Return a line for each module, path and link target that a page names and that does not exist."""
    text, where = page.read_text(encoding="utf-8"), page.relative_to(root)
    names = [*wrong_modules(root, text), *wrong_paths(root, page, text), *wrong_links(page, text)]
    return [f"{where} names {name}, which does not exist" for name in dict.fromkeys(names)]


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert wrong(ROOT, page) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("`varuna_capslog.plans.plan`", None),
        ("`varuna_capslog.plans.file`", "varuna_capslog.plans.file"),
        ("`varuna_capslog.plans.plan.Plan.cuts`", None),
        ("`varuna_capslog.plans.plan.Plan.cut`", "varuna_capslog.plans.plan.Plan.cut"),
        ("    from varuna_capslog.plans.plan import Plan, Cut", "varuna_capslog.plans.plan.Cut"),
        ("`plans/plan.py` and `plan.py`", None),
        ("`plans/file.py`", "plans/file.py"),
        ("`file.py`", "file.py"),
        ("`plans/plan.Plan`", None),
        ("`plans/plan.Cut`", "plans/plan.Cut"),
        ("`plans/` and `plans/file`", "plans/file"),
        ("`plans.LIMIT` and `plans.plan.Plan`", None),
        ("`plans.limit`", "plans.limit"),
        ("    python benchmarks/speed/speed.py", "benchmarks/speed/speed.py"),
        ("[a link](docs/page.md#a-heading), [another](https://example.org/page.md)", None),
        ("[a link](docs/other.md)", "docs/other.md"),
        ("[a link](docs/page.md#another-heading)", "docs/page.md#another-heading"),
    ],
)
def test_what_does_not_exist_is_named(tmp_path: Path, text: str, name: str | None) -> None:
    for path, content in (
        ("varuna_capslog/__init__.py", ""),
        ("varuna_capslog/plans/__init__.py", "LIMIT = 1\n"),
        ("varuna_capslog/plans/plan.py", "class Plan:\n    cuts: tuple[int, ...]\n"),
        ("docs/page.md", "# A heading\n"),
        ("README.md", text),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content, encoding="utf-8")
    expected = [] if name is None else [f"README.md names {name}, which does not exist"]
    assert wrong(tmp_path, tmp_path / "README.md") == expected


def test_samples_are_made_again_but_for_blocks_that_leave_lines_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    remade = importlib.import_module("_samples").remade
    page = "a\n```text\n$ one \\\n  x\nold\n\n$ two\nold\n```\n```text\n$ three\n...\n```\n```text\n$ fails\nold\n```\n"
    new = page.replace("x\nold", "x\nONE").replace("two\nold", "two\nTWO")
    printed = {"one \\\n  x": "ONE\n", "two": "TWO", "fails": None}
    assert remade(page, printed.__getitem__) == new
