"""The recipes of docs/recipes.md run in an empty folder each, and print what the page shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMAND = f"""#!/bin/sh
exec "{sys.executable}" -c "from varuna_capslog.cli import program; program()" "$@"
"""
STARTED = ("Unequal GPUs",)
"""Recipes whose commands are new processes, as a user's are; those of others are forks."""
SECONDS = 500
"""Longest time of one recipe."""

STABLE = {
    "Unequal GPUs": ("3 stages of 12 layers", "0-8 │", "9-10 │"),
    "A Hugging Face model from its config.json": ("2 stages of 6 layers", "0-2 │", "3-5 │"),
    "LoRA": ("fits: True", "0-9 │"),
    "Your own data": ("step 1 of 32, epoch 1 ", "step 32: accuracy "),
    "A model that does not fit one card": ("1 False (0,) does not fit", "2 True (0, 5)", "3 True (0, 3, 6)"),
    "Spot machines": ("vm-3 is to leave", "generation 1: vm-3 left; cuts [0, 3]", "status 143"),
    "Slurm": ("--nproc 4 configs/tiny.yaml", "srun --nodes=2 --ntasks=2"),
    "Kubernetes": ("completions: 3", "nvidia.com/gpu: '1'"),
    "Export to Megatron": ("Et*2|t*2L", "--pipeline-model-parallel-size 2"),
    "Compare planners": ("│ varuna  │ 466.65 MiB", "│ exact   │ 337.45 MiB", "│ budget  │ "),
}
"""Parts of the output that depend on no clock; the page shows them, and the recipe prints them."""

PACKAGES = {
    "A Hugging Face model from its config.json": ("transformers",),
    "LoRA": ("transformers", "peft"),
    "Export to Megatron": ("transformers",),
}
"""Packages that a recipe needs besides the core."""


@cache
def recipes() -> dict[str, str]:
    """Return the text below each heading of the page."""
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", page, re.MULTILINE))


def blocks(heading: str) -> list[tuple[str, str]]:
    """Return language and content of each fenced block of a recipe."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", recipes()[heading], re.MULTILINE | re.DOTALL)


def finished(command: list[str], folder: Path, tools: Path) -> tuple[int, str]:
    """Run a command in a folder, with `tools` on PATH; return its exit status and all that it printed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "CAPSLOG"))}
    paths = {"PATH": str(tools), "PYTHONPATH": str(ROOT)}
    paths = {name: os.pathsep.join(filter(None, (path, os.environ.get(name)))) for name, path in paths.items()}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**inherited, **paths, "PYTHON": sys.executable, "COLUMNS": "80", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that what the recipe left in the background can be ended, too
    )
    try:
        printed, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        pytest.fail(f"{command[0]} took more than {SECONDS} s and printed: {printed}")
    return process.returncode, printed


def test_every_recipe_is_checked() -> None:
    assert list(recipes()) == list(STABLE)


@pytest.mark.parametrize("heading", STABLE)
def test_a_recipe_is_short(heading: str) -> None:
    text = recipes()[heading].strip().splitlines()
    assert len(text) <= 30
    assert [line for line in blocks(heading)[0][1].splitlines() if len(line) > 88] == []


@pytest.mark.parametrize("heading", STABLE)
def test_a_recipe_prints_what_the_page_shows(heading: str, tmp_path: Path, programs: Path) -> None:
    for package in PACKAGES.get(heading, ()):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    (language, recipe), (_, shown) = blocks(heading)
    folder = tmp_path / "recipe"
    folder.mkdir()
    if language == "python":
        (folder / "my_train.py").write_text(recipe, encoding="utf-8")
        command = [str(programs / "python"), "my_train.py"]
    else:
        command = ["bash", "-e", "-c", recipe]
    tools = programs
    if heading in STARTED:
        tools = tmp_path / "bin"
        tools.mkdir()
        (tools / "capslog").write_text(COMMAND, encoding="utf-8")
        (tools / "capslog").chmod(0o755)
    status, printed = finished(command, folder, tools)
    assert status == 0, printed
    for part in STABLE[heading]:
        assert part in shown
        assert part in printed, printed
