"""The machines of a chaos run and what can be seen of them: hosts, the store, the members' lines as they are written.

`Field` starts and ends hosts and keeps an eye on everything; it does no harm. What is done to it is up to `chaos`.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import queue
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Config
from varuna_capslog.elastic.host.fork_server import PRELOADED, Nursery
from varuna_capslog.elastic.host.roster import Roster
from varuna_capslog.elastic.store.etcd_store import begin_run
from varuna_capslog.elastic.store.torch_store import MembershipStore, StoreGone, StoreServer, open_store, serve_store
from varuna_capslog.membership.entries import AskEntry, BrokenEntry, GenerationEntry, RequestEntry
from varuna_capslog.membership.generation import Generation, Member, Stamp
from varuna_capslog.rig.etcd_servers import EtcdServers
from varuna_capslog.rig.judge import Segment, Stepped, read_segment
from varuna_capslog.rig.namespaces import Namespaces
from varuna_capslog.rig.relay import Line, Relay, Way
from varuna_capslog.rig.relayed import VARIABLE
from varuna_capslog.rig.site import MODULES
from varuna_capslog.rig.watch import SEGMENT, records_folder
from varuna_capslog.start.elastic_host import starting_point

__all__ = ["Field", "Site", "children_of", "machine_of"]

STORE_HOST = "store"
_LOOK_SECONDS = 0.005
_ASK_AGAIN_SECONDS = 0.7
_LIST_SECONDS = 0.05
_READ_ALL_SECONDS = 1.0
_SILENT_SECONDS = 3.0


@dataclass
class Site:
    """One machine. Its supervisor may end and be started again; `pid` is None while there is none."""

    name: str
    pid: int | None = None
    starts: int = 0
    due: float | None = None


class Field:
    """All machines of a run, from a prepared folder on.

    Args:
        hosts: machines, called a, b, c, ...
        workers: of each.
        network: "loopback"; "relay": all that hosts say to each other goes through one; "namespaces": every machine has
            a network namespace of its own, and this process is in one, see `namespaces.enter`.
        store: "tcp", or "etcd": a cluster of three servers.
    """

    def __init__(
        self, config: Config, hosts: int, workers: int, network: str, store: str, say: Callable[[str], None]
    ) -> None:
        self.config, self.workers, self.say = config, workers, say
        self.run_dir = Path(config.run_dir)
        self.sites = {name: Site(name) for name in [chr(ord("a") + number) for number in range(hosts)]}
        self.target = hosts * workers
        self.roster = Roster()
        self.segment = Segment()
        self.segments: list[Segment] = []
        self.asked: dict[Member, float] = {}
        self.step_times: list[float] = []
        self.joins = 0
        self.step = 0
        self.replenish_at = 0.0
        self.replaces = True
        self._seen_steps: set[tuple[int, int]] = set()
        self._members: dict[int, tuple[Member, ...]] = {}
        self._known: set[Member] = set()
        self._inbox: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._tails: dict[str, int] = {}
        self._wrote: dict[str, float] = {}
        self._listed = self._read_all = 0.0
        self._requested = 0.0
        self._stack = contextlib.ExitStack()
        self._relay = self._line = None
        if network == "relay":
            self._relay = Relay()
            self._stack.callback(self._relay.close)
            self._line = Line(self._relay.address)
            self._stack.callback(self._line.close)
        self._spaces: Namespaces | None = None
        if network == "namespaces":
            self._spaces = Namespaces(list(self.sites), STORE_HOST)
            self._stack.callback(self._spaces.close)
        log = self.run_dir / "chaos" / "nursery.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = self._stack.enter_context(log.with_name("log.jsonl").open("a", encoding="utf-8", buffering=1))
        self._nursery = Nursery(
            "varuna_capslog.rig.site:main",
            lambda what: self._inbox.put((0, "site", what)),
            log,
            (*PRELOADED, "varuna_capslog.elastic.host.host", "varuna_capslog.elastic.notices", *MODULES[:1]),
        )
        self._stack.callback(self._nursery.close)
        self.etcd: EtcdServers | None = None
        if store == "etcd":
            self.etcd = EtcdServers(log.parent, 3)
            self._stack.callback(self.etcd.close)
        self.server: StoreServer | None = None
        self.store: MembershipStore | None = None

    # -- segments ------------------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Of the segment, from 1."""
        return len(self.segments)

    def begin(self) -> None:
        """A store, and all machines; the first generation is founded when all have named their workers."""
        keys, first = starting_point(self.config)
        if self.etcd is not None:
            self._address = self.etcd.address(f"chaos/{len(self.segments)}")
            self.store = open_store(self._address, begin_run(self._address, self.config.elastic.lease_seconds))
        else:
            self.server, port = serve_store()
            self._address = f"127.0.0.1:{port}"
            self.store = open_store(self._address, self.server.identity)
        for key, value in keys.items():
            self.store.put(key, value)
        folder = self.run_dir / "workers"
        for stale in folder.glob("*.json"):
            stale.unlink()
        self.roster, self.segment = Roster(), Segment(first.step, broken=set())
        self.segments.append(self.segment)
        self.asked.clear()
        self._seen_steps.clear()
        self._members.clear()
        self._known.clear()
        self._first = first
        number = self.number
        self.store.follow(lambda entry: self._inbox.put((number, "log", entry)), lambda why: None)
        if self._line is not None:
            self._line.register(STORE_HOST, self._address)
        for site in self.sites.values():
            site.starts = 0
            self.start(site)

    def lose_store(self) -> None:
        """The store ends, and with it what it knew."""
        assert self.server is not None
        assert self.store is not None
        self.store.close()
        self.server.close()
        self.server = self.store = None

    def lose_store_server(self, number: int, seconds: float) -> None:
        """One of the store's servers is killed, and comes back after so many seconds."""
        assert self.etcd is not None
        etcd = self.etcd
        etcd.kill(number)
        self.later(seconds, lambda: etcd.start_again(number))

    @property
    def store_is_whole(self) -> bool:
        """Whether the store could lose a server."""
        return self.etcd is None or all(self.etcd.answers(number) for number in range(len(self.etcd.ports)))

    def start(self, site: Site) -> None:
        """A supervisor on this machine."""
        site.starts += 1
        site.due = None
        address = self._address
        environment = {SEGMENT: str(self.number)}
        if self._line is not None and self._relay is not None:
            address = self._line.through(site.name, address)
            environment[VARIABLE] = f"{site.name}@{self._relay.address}"
        if self._spaces is not None:
            port = self._address.rpartition(":")[2]
            address = f"{self._spaces.gateway(site.name)}:{port}"
        order = {
            "namespace": None if self._spaces is None else self._spaces.path(site.name),
            "run_dir": str(self.run_dir),
            "workers": self.workers,
            "name": site.name,
            "store": address,
            "environment": environment,
        }
        name = f"{self.number}:{site.name}:{site.starts}"
        log = self.run_dir / "chaos" / f"host-{site.name}.log"
        self._nursery.fork({"member": name, "environment": {}, "log": str(log), "arguments": order})
        site.pid = -1  # on its way

    # -- what happens --------------------------------------------------------------------------------------------------

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        """Have something done in so many seconds, by `turn`."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._count), do))

    def turn(self) -> list[Stepped]:
        """Looks at everything once, after a moment; returns the steps that were applied since."""
        with contextlib.suppress(queue.Empty):
            segment, kind, what = self._inbox.get(timeout=_LOOK_SECONDS)
            while True:
                self._happened(segment, kind, what)
                segment, kind, what = self._inbox.get_nowait()
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        self._keep_up(now)
        return self._read()

    def _happened(self, segment: int, kind: str, what: Any) -> None:
        if kind == "site":
            self._site_says(what)
        elif segment == self.number:
            self._logged(what)

    def _site_says(self, what: Mapping[str, Any]) -> None:
        if "gone" in what:
            raise CapslogError(f"the rig's own nursery ended; see {self.run_dir / 'chaos' / 'nursery.log'}")
        if "member" not in what:
            return
        segment, name, start = what["member"].split(":")
        site = self.sites[name]
        if int(segment) != self.number or int(start) != site.starts:
            return
        if "signal" in what or "status" in what:
            site.pid = None
            site.due = time.monotonic() + 0.5
        else:
            site.pid = what["pid"]

    def _logged(self, entry: dict[str, Any]) -> None:
        now = time.time()
        self._log.write(json.dumps({"segment": self.number, "time": now, **entry}) + "\n")
        match self.roster.take(entry):
            case GenerationEntry(record):
                self.segment.founded.append((record, now))
                self._members[record.number] = record.members
                new = set(record.members) - self._known
                self._known |= new
                self.joins += len(new) if record.number > 1 else 0
            case AskEntry(member):
                self.asked.setdefault(member, now)
            case BrokenEntry(generation) if self.segment.broken is not None:
                self.segment.broken.add(generation)
        if self.roster.is_complete(len(self.sites)) and self.store is not None:
            with contextlib.suppress(StoreGone):
                self.store.compare_and_set(
                    0, Generation(1, tuple(self.roster.members), checkpoint=Stamp(self._first.step, 0))
                )

    def _keep_up(self, now: float) -> None:
        """Machines come back, and the run asks for as many workers as it began with."""
        if not self.replaces or now < self.replenish_at or self.store is None:
            return
        for site in self.sites.values():
            if site.pid is None and site.due is not None and now >= site.due:
                self.start(site)
        lacks = self.roster.generation.number and len(self.roster.staying) < self.target
        if lacks and now - self._requested > _ASK_AGAIN_SECONDS:
            self._requested = now
            with contextlib.suppress(StoreGone):
                self.store.append(RequestEntry(self.target).to_json())

    def _read(self) -> list[Stepped]:
        folder = records_folder(self.run_dir)
        now = time.monotonic()
        if now - self._listed > _LIST_SECONDS:
            self._listed = now
            with contextlib.suppress(FileNotFoundError):
                for name in os.listdir(folder):
                    if name.startswith(f"{self.number}-"):
                        self._tails.setdefault(name, 0)
        lines: list[dict[str, Any]] = []
        everyone = now - self._read_all > _READ_ALL_SECONDS
        if everyone:
            self._read_all = now
        for name, at in self._tails.items():
            if not everyone and now - self._wrote.get(name, now) > _SILENT_SECONDS:
                continue  # most have ended long ago: of thousands, every one would be opened at each look
            with open(folder / name, "rb") as file:
                file.seek(at)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._tails[name] = at + whole
            if whole or name not in self._wrote:
                self._wrote[name] = now
            lines += [json.loads(line) for line in data[:whole].splitlines()]
        if not lines:
            return []
        before = len(self.segment.stepped)
        read_segment(lines, self.segment)
        found = self.segment.stepped[before:]
        for one in sorted(found, key=lambda one: one.time):
            if (one.step, one.generation) not in self._seen_steps:
                self._seen_steps.add((one.step, one.generation))
                self.step_times.append(one.time)
            self.step = max(self.step, one.step)
        return found

    # -- who is there --------------------------------------------------------------------------------------------------

    def members_of(self, generation: int) -> tuple[Member, ...]:
        """The voters of a generation of this segment; () where the log has not told of it yet."""
        return self._members.get(generation, ())

    def pid_of(self, member: Member) -> int | None:
        """Of a member's process."""
        try:
            return int(files.read_json(self.run_dir / "workers" / f"{member}.json")["pid"])
        except (CapslogError, KeyError, ValueError):
            return None

    def voters(self) -> list[Member]:
        """Those of the newest generation that are neither dead nor told to leave, in a fixed order."""
        roster = self.roster
        return sorted(
            member
            for member in roster.generation.members
            if member not in roster.dead and member not in roster.noticed and self.pid_of(member) is not None
        )

    # -- what can be done to them --------------------------------------------------------------------------------------

    def signal(self, member: Member, number: int) -> None:
        """Sends a signal to a member that is not known to be dead."""
        pid = self.pid_of(member)
        if pid is not None and member not in self.roster.dead:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def signal_site(self, name: str, number: int, everything: bool = False) -> None:
        """Sends a signal to a machine's supervisor, or to all of its processes."""
        pid = self.sites[name].pid
        if pid is None or pid < 0:
            return
        for one in (pid, *(children_of(pid) if everything else ())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, number)

    def tell(self, entry: dict[str, Any]) -> None:
        """An entry of the log; nothing where the store is gone."""
        if self.store is not None:
            with contextlib.suppress(StoreGone):
                self.store.append(entry)

    def disturb(self, ways: set[Way], delay: float | None = None) -> None:
        """See `Line.disturb`; namespaces cannot delay."""
        if self._spaces is not None:
            assert delay is None
            self._spaces.disturb(ways)
            return
        assert self._line is not None
        self._line.disturb(ways, delay)

    def heal(self, ways: set[Way]) -> None:
        """See `Line.heal`."""
        if self._spaces is not None:
            self._spaces.heal(ways)
            return
        assert self._line is not None
        self._line.heal(ways)

    # -- the end -------------------------------------------------------------------------------------------------------

    def stop(self, seconds: float) -> bool:
        """Has the run stop at a step's boundary; returns whether all machines ended in time."""
        self.replaces = False
        for name in self.sites:
            self.signal_site(name, signal.SIGCONT, everything=True)
            self.signal_site(name, signal.SIGINT)
        return self.until_ended(seconds)

    def until_ended(self, seconds: float) -> bool:
        """Waits until no machine has a supervisor any more; False after so long."""
        until = time.monotonic() + seconds
        while any(site.pid is not None for site in self.sites.values()):
            if time.monotonic() > until:
                return False
            self.turn()
        self._listed = self._read_all = 0.0  # all files once more, those that were silent for long as well
        self.turn()
        return True

    def show_threads(self) -> None:
        """Has every worker write into its log what it is doing."""
        for name in self.sites:
            for pid in children_of(self.sites[name].pid or 0):
                with contextlib.suppress(OSError):
                    if "nursery" in Path(f"/proc/{pid}/cmdline").read_text() and self._is_worker(pid):
                        os.kill(pid, signal.SIGUSR2)

    def _is_worker(self, pid: int) -> bool:
        return any(self.pid_of(member) == pid for member in self.roster.members)

    def close(self) -> None:
        """Ends everything that is left."""
        self._stack.close()  # hosts die with the nursery, workers with their hosts
        if self.store is not None:
            self.store.close()
        if self.server is not None:
            self.server.close()


def machine_of(name: str) -> str:
    """The machine of a member or of a supervisor: a.2-7 runs on a."""
    return name.partition("-")[0].partition(".")[0]


def children_of(pid: int) -> list[int]:
    """All processes below one (Linux)."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        try:
            tasks = os.listdir(f"/proc/{one}/task")
        except OSError:
            continue
        for task in tasks:
            with contextlib.suppress(OSError):
                children = [int(text) for text in Path(f"/proc/{one}/task/{task}/children").read_text().split()]
                found += children
                waiting += children
    return found
