"""Injects faults into a script's run on one machine, and judges it: the result must be that of a run without faults.

The supervisor is an ordinary `Host`; another thread signals its workers and writes to its log. The judge runs the
script again without faults, and compares every loss and the state at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.rig.schedule import ScheduledFault, schedule
from tests.rig.tally import Hit
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread
from varuna_capslog.base.secret import run_secret
from varuna_capslog.elastic.host.host import Host
from varuna_capslog.elastic.store.opening import MembershipStore, StoreGone, open_store
from varuna_capslog.membership.entries import GenerationEntry, NoticeEntry, RequestEntry, Roster
from varuna_capslog.membership.generation import Member

__all__ = ["KINDS", "Disturber", "judge_script"]

KINDS: Mapping[str, float] = {"kill": 4.0, "stop": 1.0, "pause": 2.0, "notice": 3.0, "urgent": 1.0, "double": 2.0}
"""Fault classes and shares; see `schedule`."""

_HANG_SECONDS = 60.0
_LOOK_SECONDS = 0.01


class Disturber:
    """Injects faults into the workers of a host, one after the other; then stops the run.

    Args:
        faults: number of faults.
        mean_seconds: mean time between a recovery and the next fault.
        say: called with a line for every fault.

    Attributes:
        hits: the faults that happened.
        problem: reason why it gave up; None where it did not.
    """

    def __init__(self, run_dir: Path, faults: int, seed: int, mean_seconds: float, say: Callable[[str], None]) -> None:
        self._run_dir, self._count, self._say = run_dir, faults, say
        self._faults = schedule(seed, KINDS, mean_seconds)
        self._roster = Roster()
        self._members: dict[int, tuple[Member, ...]] = {}
        self._over = False
        self.hits: list[Hit] = []
        self.problem: str | None = None
        self._thread: OwnedThread | None = None

    def start(self, host: Host) -> None:
        """Begins, beside a host that is about to run."""
        self._thread = OwnedThread("chaos", self._run, partial(self._fail, host), host)
        self._thread.start()

    def end(self) -> None:
        """The run has ended."""
        self._over = True
        if self._thread is not None:
            self._thread.join(_HANG_SECONDS)

    def _fail(self, host: Host, error: CapslogError) -> None:
        self.problem = str(error)
        host.stop()

    def _run(self, host: Host) -> None:
        try:
            self._until(lambda: (self._run_dir / "workers" / "store.json").exists(), "its store")
            store = open_store(host.link.address, run_secret(self._run_dir))
            stop = store.follow(self._hear, lambda why: None)
            try:
                self._until(lambda: self._trains(host.options.num_workers), "its first step")
                for fault in self._faults:
                    if len(self.hits) >= self._count or self._over:
                        break
                    time.sleep(fault.after)
                    self._strike(store, fault)
                    store.append(RequestEntry(host.options.num_workers).to_json())
                    self._until(
                        lambda: self._trains(host.options.num_workers), f"{host.options.num_workers} workers again"
                    )
            finally:
                stop()
                store.close()
        except (CapslogError, StoreGone) as error:
            if not self._over:
                self.problem = str(error)
        if not self._over:
            host.stop()

    def _hear(self, entry: dict[str, Any]) -> None:
        log_entry = self._roster.take(entry)
        if isinstance(log_entry, GenerationEntry):
            self._members[log_entry.record.number] = log_entry.record.members

    def _newest(self) -> Mapping[str, Any]:
        path = self._run_dir / "metrics.jsonl"
        return (files.last_lines(path) or [{}])[-1] if path.exists() else {}

    def _trains(self, members: int) -> bool:
        return self._newest().get("world_size") == members

    def _until(self, done: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + _HANG_SECONDS
        while not done():
            if self._over:
                raise CapslogError("the run has ended")
            if time.monotonic() > until:
                raise CapslogError(f"the run did not come to {what} within {_HANG_SECONDS:g} s")
            time.sleep(_LOOK_SECONDS)

    def _signal(self, member: Member, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(files.read_json(self._run_dir / "workers" / f"{member}.json")["pid"]), number)

    def _strike(self, store: MembershipStore, fault: ScheduledFault) -> None:
        voters = self._members[max(self._members)]
        wanted = min(2 if fault.kind == "double" else 1, len(voters) - 1)
        names = [voters[index] for index in fault.pick(len(voters), wanted)]
        hit = Hit(fault.number, fault.kind, time.time(), tuple(names), generation=max(self._members))
        for name in names:
            match fault.kind:
                case "notice" | "urgent":
                    urgent = fault.kind == "urgent"
                    store.append(NoticeEntry(name, urgent, source="chaos").to_json())
                case "stop":
                    self._signal(name, signal.SIGSTOP)
                case "pause":
                    self._signal(name, signal.SIGSTOP)
                    time.sleep(min(fault.lasts, 0.5))
                    self._signal(name, signal.SIGCONT)
                case _:
                    self._signal(name, signal.SIGKILL)
                    time.sleep(fault.delay)
        gone = set() if fault.kind == "pause" else set(names)

        def recovered() -> bool:
            line = self._newest()
            return float(line.get("time", 0)) > hit.time and not gone & set(self._members.get(line["generation"], ()))

        self._until(recovered, f"a step after {fault.kind} of {', '.join(names)}")
        hit.recovered = float(self._newest()["time"]) - hit.time
        self.hits.append(hit)
        line = f"{len(self.hits):4d}  step {self._newest()['step']:6d}  {hit.kind:8s} {', '.join(names):24s}"
        self._say(f"{line} next step after {hit.recovered:.2f} s")


def judge_script(path: Path, arguments: Sequence[str], run_dir: Path) -> tuple[int, list[str]]:
    """Compare a run with the same script alone; return the number of steps, and sentences about what is wrong.

    Raises:
        CapslogError: the script fails alone, or the run left no state.
    """
    from varuna_capslog.elastic.script import TRUTH, read_state, saved_states
    from varuna_capslog.training.layer_state import digest

    rows, saved = files.read_jsonl(run_dir / "metrics.jsonl"), saved_states(run_dir)
    if not saved:
        raise CapslogError(f"{run_dir} holds no checkpoint: the run did not end as it should")
    last = saved[-1][0].step
    truth = run_dir / "truth.jsonl"
    truth.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        env={"OMP_NUM_THREADS": "1", **os.environ, TRUTH: json.dumps([str(truth.absolute()), last])},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise CapslogError(f"{path} alone failed with {done.returncode}: {done.stderr.strip()[-500:]}")
    *alone, end = files.read_jsonl(truth)
    accepted = {row["step"]: row["loss"] for row in rows}
    breaches = []
    if list(accepted) != list(range(1, last + 1)):
        breaches.append(f"the steps in metrics.jsonl are not 1 to {last}, each after the one before")
    for row in rows:
        expected = alone[row["step"] - 1]["loss"]
        if row["loss"] != expected:
            breaches.append(f"step {row['step']} in generation {row['generation']}: loss {row['loss']}, not {expected}")
            break
    state = read_state(saved[-1][1])
    if digest(state).hex() != end["state"]:
        breaches.append(f"the state after step {last} differs from that of the script alone")
    return last, breaches
