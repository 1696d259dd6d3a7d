"""The project's own files agree with each other: setup.py, licence, changelog, citation and the two lists of checks."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import yaml
from setuptools import find_packages

import varuna_capslog
from tests.source_trees import nodes_of
from varuna_capslog.base.errors import EXTRAS

ROOT = Path(__file__).parents[1]
PACKAGES = ("varuna_capslog", "detr_pipeline")
DISTRIBUTIONS = {"PIL": "pillow", "skopt": "scikit-optimize", "sklearn": "scikit-learn", "yaml": "PyYAML"}
"""Import name -> name of the distribution, where the two differ."""
OPTIONAL = {
    "huggingface_hub": "a requirement of transformers, which is declared",
    "peft": "used by --lora, which is refused with the command to install it",
    "torchao": "trains adamw8bit, which is refused with the command to install it",
    "varuna": "Microsoft's, from its git repository; the plugin says how to install it",
    "wandb": "used where train.loggers names it, which is refused with the command to install it",
}


def imported(path: Path) -> set[str]:
    """Return the top-level packages that a module imports, also inside functions; not those for type checkers only."""
    packages = set()
    for node in nodes_of(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            packages.add(node.module.split(".")[0])
    return packages


def requirements() -> dict[str, set[str]]:
    """Return the distributions that setup.py requires, by extra and under "core", in lower case."""
    (core, extras) = (
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("CORE", "EXTRAS")
    )
    lines = {"core": core, **extras}
    return {
        name: {re.split(r"[<>=;\[ ]", line)[0].lower() for line in lines_of_extra}
        for name, lines_of_extra in lines.items()
    }


def declared() -> set[str]:
    """The distributions of the package and all its extras."""
    return set().union(*requirements().values())


@pytest.mark.parametrize("package", PACKAGES)
def test_every_imported_package_is_declared(package: str) -> None:
    """`init_from=x.safetensors` imported a package that only the test extra brought along."""
    missing = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        for name in imported(path) - sys.stdlib_module_names - set(PACKAGES) - OPTIONAL.keys():
            if DISTRIBUTIONS.get(name, name).lower() not in declared():
                missing.setdefault(name, str(path.relative_to(ROOT)))
    assert missing == {}


def test_every_module_of_an_extra_is_known_where_it_may_be_missing() -> None:
    """The message about a missing module then names the extra that installs it."""
    of_setup = {name: distributions for name, distributions in requirements().items() if name != "core"}
    distributions_of_extra = {
        extra: {DISTRIBUTIONS.get(name, name).lower().replace("_", "-") for name in modules}
        for extra, modules in EXTRAS.items()
    }
    assert distributions_of_extra == of_setup


def test_the_core_needs_no_module_of_an_extra() -> None:
    """Its rooms import them where they are used; only code that draws imports the modules that draw."""
    modules = {name for names in EXTRAS.values() for name in names}
    paths = set()
    for path in sorted((ROOT / "varuna_capslog").rglob("*.py")):
        for node in nodes_of(path.read_text(encoding="utf-8"))[0].body:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.split(".")[0] in modules for name in names):
                paths.add(path.relative_to(ROOT / "varuna_capslog").as_posix())
    assert paths == {f"reports/{name}.py" for name in ("curves", "memory", "step", "style")}


def test_the_wheel_has_the_library_and_the_workload_alone() -> None:
    """`tests` is a package too, but the wheel does not contain its rig."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (include,) = (
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "include"
    )
    packages = find_packages(str(ROOT), include=include)
    assert {package.partition(".")[0] for package in packages} == set(PACKAGES)
    assert not any("rig" in package.split(".") for package in packages)


def test_version_and_licence_are_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changes = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert changes[:2] == ["Unreleased", varuna_capslog.__version__]
    assert citation["version"] == varuna_capslog.__version__
    assert citation["license"] == "MIT"
    assert 'license="MIT"' in (ROOT / "setup.py").read_text(encoding="utf-8")
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").startswith("MIT License\n\nCopyright (c) 2026 ")


def test_classifiers_name_only_pythons_that_the_tests_ran_on() -> None:
    """They named 3.10 and 3.12, on which nobody had run the tests. A version comes in here after a run of all tests."""
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text) == ["3.11", "3.13"]


def test_the_hooks_make_the_checks_of_ci() -> None:
    steps = re.findall(r"^step (.+)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert repository["repo"] == "local", "hooks of other repositories would be downloaded"
    assert sorted(hook["entry"] for hook in repository["hooks"]) == sorted(steps)


def test_every_path_that_contributors_are_sent_to_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    places = [ROOT, ROOT / "varuna_capslog", ROOT / "varuna_capslog" / "elastic"]
    paths = [path for path in re.findall(r"`([\w./-]+/[\w.-]+)`", text) if "NAME" not in path]
    assert len(paths) > 10
    assert [path for path in paths if not any((place / path).exists() for place in places)] == []
