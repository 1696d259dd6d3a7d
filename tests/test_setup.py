"""What setup.py declares: everything that the code imports is installed with it."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("varuna_capslog", "detr_pipeline")
DISTRIBUTIONS = {"PIL": "pillow", "skopt": "scikit-optimize", "sklearn": "scikit-learn", "yaml": "PyYAML"}
"""Import name -> name of the distribution, where the two differ."""
OPTIONAL = {
    "varuna": "Microsoft's, from its git repository; the plugin says how to install it",
}


def imported(path: Path) -> set[str]:
    """The top-level packages that a module imports, also inside functions; not those for type checkers only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def declared() -> set[str]:
    """The distributions that setup.py requires, with those of its extra `bo`, in lower case."""
    (call,) = (
        node
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"
    )
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    lines = ast.literal_eval(keywords["install_requires"]) + ast.literal_eval(keywords["extras_require"])["bo"]
    return {re.split(r"[<>=;\[ ]", line)[0].lower() for line in lines}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_imported_package_is_declared(package: str) -> None:
    """`init_from=x.safetensors` imported a package that only the test extra brought along."""
    missing = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        for name in imported(path) - sys.stdlib_module_names - set(PACKAGES) - OPTIONAL.keys():
            if DISTRIBUTIONS.get(name, name).lower() not in declared():
                missing.setdefault(name, str(path.relative_to(ROOT)))
    assert missing == {}
