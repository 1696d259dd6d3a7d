"""What the chaos rig reads of its members."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from varuna_capslog.rig import sites
from varuna_capslog.rig.judge import Segment
from varuna_capslog.rig.watch import records_folder


def test_a_member_that_was_silent_for_long_is_heard_within_a_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    records_folder(tmp_path).mkdir(parents=True)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(sites, "time", SimpleNamespace(monotonic=lambda: clock.now))
    field: Any = SimpleNamespace(
        run_dir=tmp_path, number=1, segment=Segment(), step=0, step_times=[], _seen_steps=set(),
        _tails={}, _wrote={}, _listed=0.0, _read_all=0.0,
    )  # fmt: skip

    def steps_at(now: float) -> list[int]:
        clock.now = now
        return [stepped.step for stepped in sites.Field._read(field)]

    def write(step: int) -> None:
        line = {"kind": "step", "member": "m", "generation": 1, "step": step, "loss": 1.0, "grad_norm": 1.0}
        with open(records_folder(tmp_path) / "1-m.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "digests": {}, "time": clock.now}) + "\n")

    write(1)
    assert steps_at(100.0) == [1]
    write(2)
    assert steps_at(100.01) == [2], "who writes is read at every look"
    assert steps_at(104.0) == []
    write(3)
    assert steps_at(104.5) == [], "and who is silent now and then"
    assert steps_at(105.1) == [3]
    assert field.step == 3
