"""A script's access to the run that it belongs to."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Elastic
from varuna_capslog.elastic.script import MemberScript, current_script


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.argv", ["before"])
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "s.py"


def part_of(tmp_path: Path) -> MemberScript:
    wish: Any = object()
    return MemberScript(tmp_path, wish, Elastic())


FINDS = "from varuna_capslog.elastic.script import current_script\n"


def test_a_script_finds_its_own_run_and_a_second_one_in_the_process_its_own(script: Path, tmp_path: Path) -> None:
    script.write_text(FINDS + "import sys\ncurrent_script().status = int(sys.argv[1])\n")
    first, second = part_of(tmp_path), part_of(tmp_path)
    assert first.run(str(script), ["5"], str(tmp_path)) is None
    assert current_script() is None, "the run has ended, and so has its part"
    assert second.run(str(script), ["6"], str(tmp_path)) is None
    assert (first.status, second.status) == (5, 6)
    script.write_text("raise SystemExit(3)\n")
    assert first.run(str(script), [], str(tmp_path)) == 3
    assert current_script() is None


def test_a_member_that_trains_in_another_thread_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would train alone beside the others, unnoticed."""
    monkeypatch.setenv("CAPSLOG_MEMBER", "a-1")
    errors: list[str] = []

    def call() -> None:
        try:
            current_script()
        except CapslogError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call, name="trainer")
    thread.start()
    thread.join()
    assert "this call came from the thread 'trainer'" in errors[0]
