"""A real elastic run for tests: members in processes of their own, faults at chosen points, and the results of an
uninterrupted run.

The test's process acts as the supervisor: it serves the store, has members forked by a fork server that has imported
everything, and writes the death of a member into the log as soon as the system reports it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.engine import cases
from tests.equality import assert_same
from tests.rig.drawing import PLANS, draw_for
from tests.rig.faults import VARIABLE, Fault
from varuna_capslog.base import files
from varuna_capslog.base.fork_server import PRELOADED, ForkServer
from varuna_capslog.base.processes import is_stopped
from varuna_capslog.base.secret import run_secret
from varuna_capslog.config.settings import Config
from varuna_capslog.elastic.store.opening import StoreGone, StoreServer, open_store
from varuna_capslog.engine.communicator import connect_group
from varuna_capslog.membership.generation import Generation
from varuna_capslog.model.workload import load_workload
from varuna_capslog.plans.plan import plan_path
from varuna_capslog.schedules import RunShape
from varuna_capslog.start.elastic_host import starting_point
from varuna_capslog.start.prepare import prepare_run
from varuna_capslog.training.checkpoint import latest_checkpoint

STEPS = 12
CUTS = {1: (0,), 2: (0, 5), 3: (0, 3, 8), 4: (0, 3, 6, 9)}
_ENTRY = "tests.elastic.checked:main"
_MODULES = (
    *PRELOADED,
    "varuna_capslog.elastic.member.runtime",
    "varuna_capslog.elastic.member.pipeline_work",
    "tests.rig.faults",
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "rich.progress",
    "torch.utils.tensorboard",
    "tests.engine.workload",
    "tests.elastic.backend",
)


def config_of(run_dir: Path, devices: int, replicas: int = 1, steps: int = STEPS, **sections: Any) -> Config:
    """Return the config of the tiny workload (BatchNorm, dropout, a head shared by three layers, three tensors in a
    cut) on `devices` devices per pipeline.
    """
    pipeline = {"devices": devices, "replicas": replicas, "cuts": list(CUTS[devices]), "timeout_seconds": 20.0}
    elastic = {"enabled": True, "patience_seconds": 0.3}
    return cases.run_config(
        str(run_dir),
        train={"max_steps": steps, "checkpoint_keep": 1} | sections.pop("train", {}),
        pipeline=pipeline | sections.pop("pipeline", {}),
        elastic=elastic | sections.pop("elastic", {}),
        **sections,
    )


@dataclass(frozen=True)
class Truth:
    """Expected results of a run by step and at its end, whichever members leave and join."""

    loss: dict[int, float]
    grad_norm: dict[int, float]
    final: dict[str, Any]


def truth_of(run_dir: Path, steps: int = STEPS, **sections: Any) -> Truth:
    """Run without interruption in one process; return the results."""
    torch.set_num_threads(1)  # as in the members: the bits depend on it
    config = cases.run_config(str(run_dir), train={"max_steps": steps} | sections.pop("train", {}), **sections)
    communicator = connect_group(torch.distributed.HashStore(), "alone", 0, 1)
    assert cases.train_run(communicator, config, (0,))["step"] == steps
    rows = files.read_jsonl(run_dir / "metrics.jsonl")
    return Truth(
        {row["step"]: row["loss"] for row in rows}, {row["step"]: row["grad_norm"] for row in rows}, final_of(run_dir)
    )


def final_of(run_dir: Path) -> dict[str, Any]:
    """Return the last checkpoint: "step", and each layer's state."""
    checkpoint, _ = latest_checkpoint(run_dir / "checkpoints")
    assert checkpoint is not None, f"no checkpoint in {run_dir}"
    return {"step": checkpoint.step} | {name: checkpoint.layer(name) for name in checkpoint.manifest["layers"]}


class Cradle:
    """Fork server that many runs share; each run receives the messages of its own members.

    more: further modules that the fork server imports.
    """

    def __init__(self, folder: Path, more: Sequence[str] = ()) -> None:
        self.folder = folder
        self._listeners: dict[str, Callable[[dict[str, Any]], None]] = {}
        self._count = 0
        self.open: list[Live] = []
        # no fork of the tests' process: members, forks of forks then, join too late for runs of 12 steps
        self._fork_server = ForkServer(_ENTRY, self._hear, folder / "fork-server.log", (*_MODULES, *more))

    def _hear(self, message: dict[str, Any]) -> None:
        listener = self._listeners.get(str(message.get("member")))
        if listener is not None:
            listener(message)

    def fork(self, order: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
        self._listeners[order["member"]] = tell
        self._fork_server.fork(order)

    def sweep(self) -> None:
        """End the runs that a failed test has left."""
        for live in list(self.open):
            live.close()

    def close(self) -> None:
        self.sweep()
        self._fork_server.close()


@dataclass
class Outcome:
    """Results of a run: statuses by member (minus a signal's number), its events and metrics, seconds that it took."""

    run_dir: Path
    status: dict[str, int]
    seconds: float
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    notes: dict[str, Any] = field(default_factory=dict)

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]

    def error_of(self, member: str) -> str:
        return str(files.read_json(self.run_dir / "workers" / f"{member}.error.json")["cause"])

    def accepted(self) -> dict[int, dict[str, Any]]:
        """Return the history without steps that were taken back: per step, the line of its newest generation."""
        newest_rows: dict[int, dict[str, Any]] = {}
        seen: set[tuple[int, int]] = set()
        for row in self.rows:
            key = (row["step"], row["generation"])
            assert key not in seen, f"step {key[0]} twice in generation {key[1]}"
            seen.add(key)
            if row["step"] not in newest_rows or row["generation"] > newest_rows[row["step"]]["generation"]:
                newest_rows[row["step"]] = row
        return newest_rows


def check(outcome: Outcome, truth: Truth, steps: int = STEPS) -> None:
    """Check that the accepted history has every step once, bitwise as without interruption."""
    accepted = outcome.accepted()
    assert sorted(accepted) == list(range(1, steps + 1)), describe(outcome)
    for row in outcome.rows:  # steps that were taken back gave the same numbers, too
        step = row["step"]
        assert (row["loss"], row["grad_norm"]) == (truth.loss[step], truth.grad_norm[step]), (row, describe(outcome))
    assert_same(final_of(outcome.run_dir), truth.final)


def describe(outcome: Outcome) -> str:
    """Return a description of the run for a failed assertion."""
    lines = [f"statuses {outcome.status} after {outcome.seconds:.1f} s"]
    lines += [json.dumps(event) for event in outcome.events]
    lines += [f"{row['step']}@{row['generation']}" for row in outcome.rows]
    for path in sorted((outcome.run_dir / "workers").glob("*.log")):
        text = path.read_text()
        if text:
            lines.append(f"{path.name}: {text[-2000:]}")
    return "\n".join(lines)


class Live:
    """Live run. Members are called m0, m1, ... in the order of their ranks; each is on a host of its own.

    Args:
        members: number of members that begin together; by default that of the config.
        faults: see `rig.faults`.
        hosts: by member, for members that share a host.
        resumes: the folder holds a run that is to go on.
        late: number of the first members that only `start_late` starts.
        first: the number of the first member's name.
        plans: the seed of the plans that every founder draws, the first generation's included; None: no plan is drawn.

    Attributes:
        around: variables for the members on top of these; see `checked`.
    """

    around: Mapping[str, str] = {}

    def __init__(
        self,
        cradle: Cradle,
        config: Config,
        members: int | None = None,
        faults: Sequence[Fault] = (),
        hosts: dict[str, str] | None = None,
        resumes: bool = False,
        late: int = 0,
        first: int = 0,
        plans: str | None = None,
    ) -> None:
        self._plans = {} if plans is None else {PLANS: plans}
        self.run_dir = Path(config.run_dir)
        self._cradle, self._config = cradle, config
        self._faults = json.dumps([fault.to_json() for fault in faults])
        self._hosts = hosts or {}
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._first = self._count = first
        self._prefix = f"{cradle._count}"
        cradle._count += 1
        self.pids: dict[str, int] = {}
        self.status: dict[str, int] = {}
        self.log: list[dict[str, Any]] = []
        self.quiet: set[str] = set()
        self._began = time.monotonic()
        (self.run_dir / "workers").mkdir(parents=True, exist_ok=True)
        if not resumes:
            prepare_run(config, show=False)
        keys, stamp = starting_point(config)
        secret = run_secret(self.run_dir, create=True)
        self.server = StoreServer(secret)
        port = self.server.port
        self.store = open_store(f"127.0.0.1:{port}", secret, self.server.identity)
        self._port = port
        cradle.open.append(self)
        for key, value in keys.items():
            self.store.put(key, value)
        self._unfollow = self.store.follow(self.log.append, lambda why: None)
        size = members or config.world_size
        self._late = [f"m{first + number}" for number in range(size - late, size)]
        names = [self._fork() for _ in range(size - late)] + self._late
        self._count += late
        drawn = None
        if plans is not None:
            chain = load_workload(config).build_chain()
            drawn = draw_for(RunShape.of_config(config), chain, len(names), plans)
        self.store.compare_and_set(0, Generation(1, tuple(names), checkpoint=stamp, plan=drawn))

    # -- members -------------------------------------------------------------------------------------------------------

    def start_late(self) -> None:
        """Start the members of the first generation that were held back."""
        for member in self._late:
            self._fork(member)

    def _fork(self, name: str | None = None) -> str:
        member = name or f"m{self._count}"
        self._count += name is None
        environment = {
            "CAPSLOG_MEMBER": member,
            "CAPSLOG_HOST": self._hosts.get(member, f"host-{member}"),
            "CAPSLOG_STORE": f"127.0.0.1:{self._port}",
            "CAPSLOG_STORE_IDENTITY": self.server.identity,
            "CAPSLOG_RUN_DIR": str(self.run_dir),
            "CAPSLOG_LOCAL_RANK": "0",
            VARIABLE: self._faults,
            **self._plans,
            "RES_OPTIONS": "timeout:1 attempts:5",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **{name: value.format(port=self._port) for name, value in self.around.items()},
        }
        log = str(self.run_dir / "workers" / f"{member}.log")
        order = {"environment": environment, "log": log, "arguments": [str(self.run_dir)]}
        self._cradle.fork({"member": f"{self._prefix}-{member}", **order}, self._inbox.put)
        return member

    def _look(self, seconds: float) -> None:
        """Take a message of the fork server, and write a loss into the log."""
        try:
            message = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return
        member = message["member"].partition("-")[2]
        if "signal" in message or "status" in message:
            self.status[member] = -message["signal"] if "signal" in message else message["status"]
            if self.status[member] in (0, 130):
                self.tell("left", member)
            elif member not in self.quiet:
                self.tell("dead", member, why=f"ended with {self.status[member]}")
        else:
            self.pids[member] = message["pid"]

    def _until(self, done: Callable[[], bool], seconds: float, awaited: str) -> None:
        until = time.monotonic() + seconds
        while not done():
            if time.monotonic() > until:
                text = describe(self._outcome())
                self.close()
                raise AssertionError(f"{awaited} did not come within {seconds:g} s\n{text}")
            self._look(0.005)

    # -- actions of a test ---------------------------------------------------------------------------------------------

    def tell(self, kind: str, member: str, **more: Any) -> None:
        """Append an entry to the log, unless the store is gone."""
        with contextlib.suppress(StoreGone):
            self.store.append({"kind": kind, "member": member, **more})

    def leave(self, *members: str, urgent: bool = False) -> None:
        for member in members:
            self.tell("notice", member, urgent=urgent, deadline=None, source="test")

    def join(self) -> str:
        return self._fork()

    def signal(self, member: str, number: int) -> None:
        self._until(lambda: member in self.pids, 20.0, f"the process of {member}")
        os.kill(self.pids[member], number)

    def shake(self, generation: int) -> None:
        """Declare a generation broken: all members meet again in the next one."""
        self.tell("broken", "nobody", generation=generation)

    def until(self, done: Callable[[], bool], awaited: str, seconds: float = 180.0) -> None:
        """Wait until `done`, and write losses into the log meanwhile."""
        self._until(done, seconds, awaited)

    def is_stopped(self, member: str) -> bool:
        """Return True while a signal has stopped the member's process."""
        return member in self.pids and is_stopped(self.pids[member])

    def tasks(self, member: str) -> tuple[int, int]:
        """Return the numbers of threads and of descriptors of the member's process."""
        process = f"/proc/{self.pids[member]}"
        return len(os.listdir(f"{process}/task")), len(os.listdir(f"{process}/fd"))

    def lose_store(self) -> None:
        self.server.close()

    def when(self, name: str, seconds: float = 180.0) -> None:
        """Wait until a member stands at the "wait" fault of this name."""
        self._until((self.run_dir / "faults" / f"{name}.here").exists, seconds, f"the point {name!r}")

    def go(self, name: str) -> None:
        (self.run_dir / "faults" / f"{name}.go").touch()

    def reaches(self, step: int, seconds: float = 180.0) -> None:
        """Waits until a step is in the metrics."""
        path = self.run_dir / "metrics.jsonl"
        self._until(
            lambda: path.exists() and any(row["step"] >= step for row in files.read_jsonl(path)),
            seconds,
            f"step {step}",
        )

    def until_planned(self, generation: int) -> None:
        """Wait for the generation's plan file: its first member writes it beside the training, or dies before."""
        path = plan_path(self.run_dir, generation)
        self._until(path.exists, 60.0, path.name)

    def heard(self, kind: str, member: str | None = None) -> bool:
        """Return True if the log has an entry of this kind, of any member by default."""
        return any(entry["kind"] == kind and member in (None, entry.get("member")) for entry in list(self.log))

    def until_asked(self, member: str) -> None:
        """Wait until a member has asked to join."""
        self._until(lambda: self.heard("ask", member) or member in self.status, 60.0, f"the wish of {member}")
        assert self.heard("ask", member), describe(self._outcome())

    def generation(self) -> Generation:
        return self.store.read()

    def finish(self, seconds: float = 240.0) -> Outcome:
        """Wait until all members have ended; return the outcome."""
        self._until(lambda: len(self.status) == self._count - self._first, seconds, "the end of all members")
        outcome = self._outcome()
        self.close()
        return outcome

    def _outcome(self) -> Outcome:
        lines = [
            files.read_jsonl(path) if path.exists() else []
            for path in (self.run_dir / "metrics.jsonl", self.run_dir / "events.jsonl")
        ]
        return Outcome(self.run_dir, dict(self.status), time.monotonic() - self._began, *lines)

    def close(self) -> None:
        """Kill the remaining members and close the store."""
        if self not in self._cradle.open:
            return
        self._cradle.open.remove(self)
        for member, pid in self.pids.items():
            if member not in self.status:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 5.0
        self.quiet.update(self.pids)
        while len(self.status) < len(self.pids) and time.monotonic() < until:
            self._look(0.05)
        self._unfollow()
        self.store.close()
        self.server.close()
