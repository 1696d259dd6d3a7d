"""Callbacks of a run: what they are called with, how they end it, how their faults come out. The run is its files."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import varuna_capslog as capslog
from tests.starters import starter_of
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.supervisor import Supervisor
from varuna_capslog.start.callbacks import Callbacks

TRAINS_UNTIL_ASKED = """
import json, os, signal, sys, time
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
step = 0
while not asked and step < 400:
    step += 1
    if os.environ["RANK"] == "0":
        with open(sys.argv[1] + "/metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step}) + "\\n")
    time.sleep(0.02)
sys.exit(130 if asked else 0)
"""


def write(run_dir: Path, step: int, *, generation: int = 1) -> None:
    files.append_jsonl(run_dir / "metrics.jsonl", {"step": step, "loss": 1.0})
    files.append_jsonl(run_dir / "evaluations.jsonl", {"step": step, "scores": {"AP": 0.5}})
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / "manifest.json", {"step": step, "generation": generation, "time": 0.0})


def test_each_is_called_once_with_what_is_new(tmp_path: Path) -> None:
    write(tmp_path, 1)  # of an earlier run
    seen: list[Any] = []
    functions = {name: lambda row, name=name: seen.append((name, row)) for name in ("on_step", "on_evaluation")}
    functions["on_checkpoint"] = lambda row: seen.append(("on_checkpoint", row["step"], Path(row["path"]).name))
    with Callbacks(tmp_path, functions) as callbacks:
        assert not callbacks.look()
        write(tmp_path, 2)
        assert not callbacks.look()
        assert not callbacks.look()
        write(tmp_path, 3)  # the end of the run: called without another look
    assert seen == [
        *[
            call
            for step in (2, 3)
            for call in (
                ("on_step", {"step": step, "loss": 1.0}),
                ("on_evaluation", {"step": step, "scores": {"AP": 0.5}}),
                ("on_checkpoint", step, f"step-{step:08d}"),
            )
        ]
    ]


def test_a_checkpoint_that_is_written_again_is_told_again(tmp_path: Path) -> None:
    write(tmp_path, 1)
    seen: list[int] = []
    with Callbacks(tmp_path, {"on_checkpoint": lambda row: seen.append(row["generation"])}):
        write(tmp_path, 1, generation=2)
    assert seen == [2]


def test_stop_ends_the_run_without_an_error(tmp_path: Path) -> None:
    steps: list[int] = []

    def on_step(row: dict[str, Any]) -> object:
        steps.append(row["step"])
        return capslog.STOP if row["step"] == 3 else None

    with Callbacks(tmp_path, {"on_step": on_step}) as callbacks:
        command = [sys.executable, "-S", "-c", TRAINS_UNTIL_ASKED, str(tmp_path)]
        Supervisor(tmp_path, starter_of(command), 2, look=callbacks.look).run()
    assert steps == [row["step"] for row in files.read_jsonl(tmp_path / "metrics.jsonl")]
    assert 3 <= len(steps) < 400


def look_once(run_dir: Path, on_step: Any) -> None:
    with Callbacks(run_dir, {"on_step": on_step}) as callbacks:
        write(run_dir, 1)
        write(run_dir, 2)
        assert callbacks.look()


def test_an_exception_ends_the_run_and_is_raised_after_it(tmp_path: Path) -> None:
    def on_step(row: dict[str, Any]) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        look_once(tmp_path, on_step)
    assert caught.value.__notes__ == [
        "raised by on_step for step 1",
        f"the run in {tmp_path} has ended after step 2; the same call continues it",
    ]


def test_another_return_value_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CapslogError, match=r"on_step returned False; return capslog\.STOP to end the run, or nothing"):
        look_once(tmp_path, lambda row: False)


def test_what_cannot_be_called_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(CapslogError, match="on_step=5 cannot be called"):
        Callbacks(tmp_path, {"on_step": 5})  # type: ignore[dict-item]


def test_ctrl_c_breaks_a_callback_off_and_stops_the_run(tmp_path: Path) -> None:
    heard: list[int] = []
    calls: list[int] = []

    def slow(row: dict[str, Any]) -> None:
        calls.append(row["step"])
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with Callbacks(tmp_path, {"on_step": slow}) as callbacks:
            write(tmp_path, 1)
            assert not callbacks.look()
            write(tmp_path, 2)
            assert not callbacks.look()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (heard, calls) == ([signal.SIGINT], [1]), "it was called for every step made so far while the run stopped"
