"""The machines of a chaos run, and a loop that observes them.

`Machines` starts and ends hosts, replaces lost ones and observes; it injects no faults. `fault_injection` and
`preemptions` do, by calling its methods.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rig.drawing import PLANS, draw_for
from tests.rig.judge import Stepped
from tests.rig.machines.agenda import Agenda
from tests.rig.machines.host_process import ENTRY, MODULES
from tests.rig.machines.members import Members
from tests.rig.machines.network import MachineNetwork
from tests.rig.machines.records import Records
from tests.rig.machines.run_store import RunStore
from tests.rig.outcome import ChaosOptions
from tests.rig.watch import SEGMENT
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.fork_server import PRELOADED, ForkServer
from varuna_capslog.base.secret import run_secret
from varuna_capslog.config.settings import Config
from varuna_capslog.elastic.host.hooks import deadline_fields
from varuna_capslog.membership.entries import NoticeEntry, RequestEntry
from varuna_capslog.membership.generation import Generation, Member, Stamp
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.workload import load_workload
from varuna_capslog.plans.plan import Plan
from varuna_capslog.schedules import RunShape
from varuna_capslog.start.elastic_host import starting_point

__all__ = ["Machine", "Machines", "children_of", "machine_of"]

_LOOK_SECONDS = 0.005
_ASK_AGAIN_SECONDS = 0.7
_RESTART_SECONDS = 0.5


@dataclass
class Machine:
    """A machine. Its supervisor may end and be started again.

    Attributes:
        pid: process id of the supervisor; None while there is none, -1 while it is being forked.
        starts: number of supervisors since the run began.
        due: `time.monotonic` from which a new supervisor may be started; None while one runs.
    """

    name: str
    pid: int | None = None
    starts: int = 0
    due: float | None = None


class Machines:
    """All machines of a run, from a prepared folder on.

    Args:
        options: how many machines, called a, b, c, ..., with how many workers, on which network and with which store.

    Attributes:
        target: as many workers the run asks for, as long as `replaces` is set.
        replenish_at: `time.monotonic` before which nothing is replaced.
        replaces: whether lost workers and machines are replaced at all.
    """

    def __init__(self, config: Config, options: ChaosOptions) -> None:
        self.config, self.workers = config, options.workers
        self._plans = str(options.seed) if options.plans else None
        self.run_dir = Path(config.run_dir)
        self.by_name = {name: Machine(name) for name in (chr(ord("a") + number) for number in range(options.hosts))}
        self.target = options.hosts * options.workers
        self.replenish_at = 0.0
        self.replaces = True
        self.members = Members(self.run_dir)
        self.records = Records(self.run_dir)
        self.agenda = Agenda()
        self._first = Stamp(0, 0)
        self._requested = 0.0
        self._inbox: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        folder = self.run_dir / "chaos"
        folder.mkdir(parents=True, exist_ok=True)
        self._stack = contextlib.ExitStack()  # closed in reverse order
        host = "0.0.0.0" if options.network == "namespaces" else "127.0.0.1"
        secret = run_secret(self.run_dir, create=True)
        self.store = RunStore(options.store, folder, config.elastic.lease_seconds, secret, host)
        self._stack.callback(self.store.close)
        self.network = MachineNetwork(options.network, list(self.by_name), secret, options.links, options.seed)
        self._stack.callback(self.network.close)
        self._log = self._stack.enter_context((folder / "log.jsonl").open("a", encoding="utf-8", buffering=1))
        workload = config.workload.partition(":")[0]
        self._fork_server = ForkServer(
            "tests.rig.machines.host_process:main",
            lambda message: self._inbox.put((0, "supervisor", message)),
            folder / "fork-server.log",
            (*PRELOADED, "varuna_capslog.elastic.host.host", ENTRY.partition(":")[0], *MODULES, workload),
        )
        self._stack.callback(self._fork_server.close)  # supervisors die with it, and workers with their supervisors

    # -- begin and end of the run, and of its machines -----------------------------------------------------------------

    def begin(self) -> None:
        """A new store, and all machines; the first generation is founded when all have named their workers."""
        keys, self._first = starting_point(self.config)
        self.members.begin()
        self.records.begin(self._first.step)
        number = self.records.number
        self.store.begin(keys, lambda entry: self._inbox.put((number, "log", entry)))
        self.network.register_store(self.store.address)
        for machine in self.by_name.values():
            machine.starts = 0
            self.start(machine)

    def start(self, machine: Machine) -> None:
        """Forks a supervisor on this machine."""
        machine.starts += 1
        machine.due = None
        access = self.network.access(machine.name, self.store.address)
        order = {
            "namespace": access.namespace,
            "run_dir": str(self.run_dir),
            "workers": self.workers,
            "name": machine.name,
            "store": access.store,
            "environment": {
                SEGMENT: str(self.records.number),
                **({} if self._plans is None else {PLANS: self._plans}),
                **access.environment,
            },
        }
        name = f"{self.records.number}:{machine.name}:{machine.starts}"
        log = self.run_dir / "chaos" / f"host-{machine.name}.log"
        self._fork_server.fork({"member": name, "environment": {}, "log": str(log), "arguments": order})
        machine.pid = -1

    def stop(self, seconds: float) -> bool:
        """Has the run stop at a step's boundary; returns whether all machines ended in time."""
        self.replaces = False
        for name in self.by_name:
            self.signal(name, signal.SIGCONT, everything=True)
            self.signal(name, signal.SIGINT)
        return self.until_ended(seconds)

    def until_ended(self, seconds: float) -> bool:
        """Wait until no machine has a supervisor any more; False if that takes longer than `seconds`."""
        until = time.monotonic() + seconds
        while any(machine.pid is not None for machine in self.by_name.values()):
            if time.monotonic() > until:
                return False
            self.turn()
        self.turn(everything=True)
        return True

    def close(self) -> None:
        """Ends everything that is left."""
        self._stack.close()

    # -- what happens --------------------------------------------------------------------------------------------------

    def turn(self, everything: bool = False) -> list[Stepped]:
        """Process all messages, after waiting a moment for the first, and run the actions that are due.

        Args:
            everything: see `Records.read`.

        Returns:
            The steps that were applied since the last call.
        """
        with contextlib.suppress(queue.Empty):
            segment, kind, message = self._inbox.get(timeout=_LOOK_SECONDS)
            while True:
                if kind == "supervisor":
                    self._supervisor_says(message)
                elif segment == self.records.number:
                    self._take(message)
                segment, kind, message = self._inbox.get_nowait()
        self.agenda.run_due()
        self._replace()
        return self.records.read(everything)

    def _supervisor_says(self, message: Mapping[str, Any]) -> None:
        if "gone" in message:
            raise CapslogError(f"the rig's own fork server ended; see {self.run_dir / 'chaos' / 'fork-server.log'}")
        if "member" not in message:
            return
        segment, name, start = message["member"].split(":")
        machine = self.by_name[name]
        if int(segment) != self.records.number or int(start) != machine.starts:
            return
        if "signal" in message or "status" in message:
            machine.pid = None
            machine.due = time.monotonic() + _RESTART_SECONDS
        else:
            machine.pid = message["pid"]

    def _take(self, entry: dict[str, Any]) -> None:
        now = time.time()
        self._log.write(json.dumps({"segment": self.records.number, "time": now, **entry}) + "\n")
        self.members.take(entry, now, self.records.segment)
        roster = self.members.roster
        if roster.is_complete(len(self.by_name)):
            members = tuple(roster.members)
            self.store.found(Generation(1, members, checkpoint=Stamp(self._first.step, 0), plan=self._draw(members)))

    @functools.cached_property
    def _chain(self) -> Chain:
        """Chain that every member builds; its edges limit the plans that can be drawn."""
        return load_workload(self.config).chosen_chain()

    def _draw(self, members: Sequence[Member]) -> Plan | None:
        """Draw the plan of the first generation; None if plans are not drawn."""
        if self._plans is None:
            return None
        run = RunShape.of_config(self.config)
        return draw_for(run, self._chain, len(members), self._plans, "first", self.records.number)

    def _replace(self) -> None:
        """Start machines that are due again, and request the workers that the run lacks."""
        now, roster = time.monotonic(), self.members.roster
        if not self.replaces or now < self.replenish_at or self.store.is_lost:
            return
        for machine in self.by_name.values():
            if machine.pid is None and machine.due is not None and now >= machine.due:
                self.start(machine)
        lacks = roster.generation.number and len(roster.staying) < self.target
        if lacks and now - self._requested > _ASK_AGAIN_SECONDS:
            self._requested = now
            self.request(self.target)

    # -- what can be done to them --------------------------------------------------------------------------------------

    def signal(self, name: str, number: int, everything: bool = False) -> None:
        """Sends a signal to a machine's supervisor, or to all of its processes."""
        pid = self.by_name[name].pid
        if pid is None or pid < 0:
            return
        for process_id in (pid, *(children_of(pid) if everything else ())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, number)

    def request(self, devices: int) -> None:
        """Ask the run to have this number of workers."""
        self.store.append(RequestEntry(devices))

    def notice(self, member: Member, source: str, urgent: bool = False, deadline: float | None = None) -> None:
        """Announces that a member will be taken away.

        Args:
            source: of the notice.
            urgent: at once, without handing over its state.
            deadline: seconds until then; None: the member leaves when it is ready.
        """
        self.store.append(NoticeEntry(member, urgent, source=source, **deadline_fields(deadline)))

    def lose_store_server(self, number: int, seconds: float) -> None:
        """Kill one of etcd's servers; it comes back after `seconds`."""
        self.store.kill_server(number)
        self.agenda.later(seconds, lambda: self.store.start_server_again(number))

    def show_threads(self) -> None:
        """Have every worker write the stacks of its threads into its log."""
        for machine in self.by_name.values():
            for pid in children_of(machine.pid or 0):
                if self.members.has_process(pid):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGUSR2)


def machine_of(name: str) -> str:
    """The machine of a member or of a supervisor: a.2-7 runs on a."""
    return name.partition("-")[0].partition(".")[0]


def children_of(pid: int) -> list[int]:
    """Return the ids of all descendants of a process (Linux)."""
    descendants: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for task in tasks:
            with contextlib.suppress(OSError):
                children = [int(text) for text in Path(f"/proc/{parent}/task/{task}/children").read_text().split()]
                descendants += children
                waiting += children
    return descendants
