"""The end of a test run says once per reason what was skipped, and names the tests that need data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUITE = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_of_varuna(number):
    pytest.skip("Varuna is not installed:\\n  see docs/varuna.md")

@pytest.mark.skipif(True, reason="needs CUDA")
def test_of_a_gpu():
    pass

@pytest.mark.parametrize("part", ["a", "b"])
def test_of_photographs(part):
    pytest.skip("CAPSLOG_DATA names no folder with bccd")

def test_that_runs():
    pass
"""


def test_skipped_tests_are_one_line_per_reason(tmp_path: Path) -> None:
    """128 skipped tests once printed over a hundred lines; the tests skipped for lack of data, which must be seen, were
    lost among them.
    """
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "test_module.py").write_text(
        "import pytest\npytest.importorskip('no_such_package', reason='no such')\n"
    )
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.skips", "-p", "no:cacheprovider", "-n", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    begin = next(number for number, line in enumerate(lines) if "skipped tests by reason" in line) + 1
    assert lines[begin : begin + 4] == [
        "   4  Varuna is not installed: see docs/varuna.md",
        "   2  CAPSLOG_DATA names no folder with bccd: test_suite.py::test_of_photographs[a], "
        "test_suite.py::test_of_photographs[b]",
        "   1  needs CUDA",
        "   1  no such",
    ]
    assert lines[begin + 4] == "1 passed, 8 skipped in " + lines[begin + 4].split(" in ")[1]
