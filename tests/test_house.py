"""The house rules that can be counted: sizes of files, functions and classes, and tests beside what they test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_trees import nodes_of, programs

ROOT = Path(__file__).parents[1]
LINES = 800
PARAMETERS = 8
"""Without `self`. More belong into a dataclass of options."""
ATTRIBUTES = 23
"""Of an object: its fields, and what its methods set. More belong into objects of their own."""


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """(path, text) of every module of the library, the workload and the rig."""
    for path in programs(root):
        yield str(path.relative_to(root)), path.read_text(encoding="utf-8")


def long_files(root: Path) -> list[str]:
    return [path for path, text in sources(root) if len(text.splitlines()) > LINES]


def long_signatures(root: Path) -> list[str]:
    violations = []
    for path, text in sources(root):
        for node in nodes_of(text):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            names = [parameter.arg for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([name for name in names if name not in ("self", "cls")])
            if count > PARAMETERS:
                violations.append(f"{path}:{node.lineno} {node.name} has {count} parameters")
    return violations


def attributes(node: ast.ClassDef) -> set[str]:
    names = {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            names |= {inner.attr} if isinstance(inner.value, ast.Name) and inner.value.id == "self" else set()
    return names


def is_config(node: ast.ClassDef) -> bool:
    """Return True if the fields are keys of a config: users write them, and each has its own description."""
    return any(isinstance(base, ast.Name) and base.id == "Section" for base in node.bases)


def large_classes(root: Path) -> list[str]:
    return [
        f"{path}:{node.lineno} {node.name} has {count} attributes"
        for path, text in sources(root)
        for node in nodes_of(text)
        if isinstance(node, ast.ClassDef) and not is_config(node) and (count := len(attributes(node))) > ATTRIBUTES
    ]


WHOLE_RUNS = {
    "detr/test_against_huggingface.py",
    "elastic/script/test_script.py",
    "elastic/test_launchers.py",
    "elastic/test_live.py",
    "elastic/test_live_compiled.py",
    "elastic/test_live_hosts.py",
    "elastic/test_live_notices.py",
    "elastic/test_live_peaks.py",
    "elastic/test_live_strangers.py",
    "elastic/test_live_plans.py",
    "elastic/test_live_recipe.py",
    "elastic/test_live_types.py",
    "elastic/test_live_updates.py",
    "engine/test_captured.py",
    "engine/test_detr.py",
    "engine/test_graphs.py",
    "membership/test_placing_before_a_run.py",
    "memory/test_truth.py",
    "planning/test_doors.py",
    "start/test_direct_plans.py",
    "start/test_joint_runs.py",
    "start/test_layerwise_runs.py",
    "start/test_replicated_runs.py",
    "training/test_graphs.py",
    "varuna_plugin/test_mistakes.py",
    "varuna_plugin/test_morphing.py",
    "varuna_plugin/test_training.py",
}
"""Tests of several modules together: runs of several processes, models of others, real allocators."""


def strange_tests(root: Path) -> list[str]:
    """Tests in a folder of `tests/` whose name does not begin with that of a module or a package at the same place of
    the library, or of the rig: `test_fold.py` and `test_fold_exchange.py` test `fold.py`.
    """
    strange_paths = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        place = path.relative_to(root / "tests")
        if len(place.parts) == 1 or str(place) in WHOLE_RUNS:
            continue
        top, names = "varuna_capslog", place.parts[:-1]
        if names[0] == "detr":
            top, names = "detr_pipeline", names[1:]
        elif names[:2] == ("rig", "tests"):
            top, names = "tests/rig", names[2:]
        room, words = root.joinpath(top, *names), place.stem.removeprefix("test_").split("_")
        modules = [room / "_".join(words[:count]) for count in range(1, len(words) + 1)]
        if not any(module.is_dir() or module.with_suffix(".py").exists() for module in modules):
            strange_paths.append(str(place))
    return strange_paths


def test_tests_mirror_the_tree():
    assert strange_tests(ROOT) == []
    assert all((ROOT / "tests" / name).exists() for name in WHOLE_RUNS)


def test_no_file_is_long():
    assert long_files(ROOT) == []


def test_no_function_has_many_parameters():
    assert long_signatures(ROOT) == []


def test_no_class_has_many_attributes():
    assert large_classes(ROOT) == []


def test_a_test_of_no_module_is_noticed(tmp_path):
    for name in ("varuna_capslog/base/units.py", "tests/base/test_units.py", "tests/test_anything.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert strange_tests(tmp_path) == []
    for name in ("tests/base/test_units_of_rates.py", "tests/base/test_unitsof.py", "tests/base/test_sizes.py"):
        (tmp_path / name).touch()
    assert strange_tests(tmp_path) == ["base/test_sizes.py", "base/test_unitsof.py"]


def test_a_test_of_the_rig_mirrors_the_rig(tmp_path):
    for name in ("rig/search/world.py", "rig/tests/search/test_world.py", "rig/tests/search/test_worlds.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).touch()
    assert strange_tests(tmp_path) == ["rig/tests/search/test_worlds.py"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (long_files, "x = 1\n" * (LINES + 1)),
        (long_signatures, f"def f({', '.join(f'a{n}' for n in range(PARAMETERS + 1))}): ...\n"),
        (large_classes, "class C:\n    def f(self):\n" + "".join(f"        self.a{n} = 1\n" for n in range(30))),
    ],
    ids=["long file", "long signature", "large class"],
)
def test_each_rule_notices_a_breach(tmp_path, count, text):
    (tmp_path / "varuna_capslog").mkdir()
    assert count(tmp_path) == []
    (tmp_path / "varuna_capslog" / "wrong.py").write_text(text)
    assert len(count(tmp_path)) == 1
