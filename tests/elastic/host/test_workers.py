"""What a host says of its workers. The fork server is a stand-in: no process is started."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from varuna_capslog.elastic.host.options import HostOptions
from varuna_capslog.elastic.host.workers import JOIN_SECONDS, HostWorkers
from varuna_capslog.membership.entries import GenerationEntry, Roster
from varuna_capslog.membership.generation import Generation


def test_workers_that_do_not_join_are_named_once(tmp_path: Path) -> None:
    """A device that was asked for and never came showed in no line of the run."""
    said: list[str] = []
    server: Any = SimpleNamespace(settle=lambda *_: None, fork=lambda order: None)
    roster = Roster()
    workers = HostWorkers(HostOptions(tmp_path, say=said.append, fork_server=server), "h", roster, lambda _: None)
    for slot, member in enumerate(("w1", "w2")):
        workers.start(member, slot, {})
    roster.take(GenerationEntry(Generation(1, ("w1",))).to_json())
    now = time.monotonic()
    workers.say_absent(now)
    assert not said, "there is still time"
    for _ in range(2):
        workers.say_absent(now + JOIN_SECONDS + 1)
    assert said == [
        "worker w2 (device 1 of h) has not joined the run, 60 s after it was asked for; its output is in "
        f"{workers.log('w2')}"
    ]
