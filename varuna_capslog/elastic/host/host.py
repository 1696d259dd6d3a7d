"""The supervisor of one machine in a run whose members come and go, and the one authority on who died there.

It serves or joins the store, has its workers forked by a nursery, tells the log who ended, kills who is stopped or
hangs, watches the other hosts' leases, and passes notices on. It decides nothing about the membership and never
touches a tensor. No worker outlives it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.failures import Failure, read_failure, root_cause
from varuna_capslog.base.processes import is_stopped, last_line, signal_group, signal_name, write_unless_there
from varuna_capslog.base.supervisor import Interrupted, WorkerFailed, reserve
from varuna_capslog.config.settings import Elastic
from varuna_capslog.elastic.host import hooks
from varuna_capslog.elastic.host.event_writer import Chronicle
from varuna_capslog.elastic.host.fork_server import PRELOADED, Nursery
from varuna_capslog.elastic.host.leases import Leases
from varuna_capslog.elastic.host.roster import Roster
from varuna_capslog.elastic.notices import Announcement, Gathering, Kind, Listener, auto_sources, listen
from varuna_capslog.elastic.store.torch_store import MembershipStore, StoreGone, StoreServer, open_store, serve_store
from varuna_capslog.membership import entries
from varuna_capslog.membership.generation import INITIAL, Generation, Member, Stamp

__all__ = ["Host", "HostEnd"]

POLL_SECONDS = 0.05
SETTLE_SECONDS = 0.3  # by then the log's entries from before a worker's end have been heard
FAREWELL_SECONDS = 60.0  # so long a worker may take to end after the run has finished
HOPELESS = 3  # so many workers in a row that ended before they took part: no further one is started in their place

_QUIET = {
    # torch asks for the name of every peer; a lost answer costs 1 s instead of 5
    "RES_OPTIONS": "timeout:1 attempts:5",
    # a lost peer or store is told in one sentence, not by C++ stacks
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class HostEnd:
    """How a host's part ended.

    Attributes:
        how: "finished": the run has ended; "left": all its workers were told to leave, and others may go on.
        stopped: the run ended early since somebody asked for it.
        failures: of workers that were lost on the way, oldest first.
    """

    how: Literal["finished", "left"]
    stopped: bool
    failures: tuple[Failure, ...]


@dataclass
class _Worker:
    """One process: `pid` is None until the nursery has forked it; `verdict` says why it was killed by us."""

    member: Member
    slot: int
    pid: int | None = None
    ended: bool = False
    verdict: str | None = None
    stopped_since: float | None = None
    expelled_since: float | None = None


class Host:
    """Starts, watches and ends the workers of this machine.

    Members are named `<host>-<counter>`. A worker gets CAPSLOG_MEMBER, CAPSLOG_HOST, CAPSLOG_STORE (host:port),
    CAPSLOG_STORE_IDENTITY, CAPSLOG_RUN_DIR and CAPSLOG_LOCAL_RANK (the number of its device here), a log
    `workers/<member>.log`, and its process group; `workers/<member>.json` holds pid, host and member. Status 0 says
    that the run has finished or that it was released, 130 that it was asked to stop; all else is a loss.

    Args:
        run_dir: the run's folder; on every host, and the same where checkpoints are to be found again.
        entry: "module:function" that a worker runs.
        arguments: what it is called with (any JSON value); default: [run_dir].
        num_workers: devices of this host.
        name: of this host in the run; default: the system's. A second host of that name is told apart by a number.
        store: address of the run's store; None: this host begins the run, and locks its folder.
        serve_at: name or address under which other hosts reach this one's store, and its port (0: any free one); or
            the address of a store in etcd (see `store_etcd`), which needs no host to serve it.
        keys: put into the store before the first worker starts, where this host serves it.
        first: the boundary that the run begins with.
        hosts: that begin the run together. The one that serves the store founds the first generation once all of them
            have named their workers; whoever comes later joins.
        environment: variables for workers on top of this process's own.
        settings: the config's section.
        say: prints one line for the user.
        sources: of notices; None: what `auto_sources` finds, and the file `run_dir/notices/<host>`.
        modules: imported ahead for the workers, besides the entry's.
    """

    def __init__(
        self,
        run_dir: Path,
        entry: str = "varuna_capslog.start.member_worker:main",
        arguments: Any = None,
        num_workers: int = 1,
        *,
        name: str | None = None,
        store: str | None = None,
        serve_at: str = "127.0.0.1:0",
        keys: Mapping[str, str] | None = None,
        first: Stamp = INITIAL,
        hosts: int = 1,
        environment: Mapping[str, str] | None = None,
        settings: Elastic | None = None,
        say: Callable[[str], None] = lambda line: None,
        sources: Sequence[Listener] | None = None,
        modules: Sequence[str] = PRELOADED,
    ) -> None:
        if num_workers < 1:
            raise CapslogError(f"num_workers={num_workers}; a host needs at least one worker")
        self.run_dir = Path(run_dir)
        self.folder = self.run_dir / "workers"
        self.entry = entry
        self.arguments = [str(run_dir)] if arguments is None else arguments
        self.num_workers = num_workers
        self.name = name or socket.gethostname()
        self.address = store or serve_at
        self.serves = store is None
        self.keys = dict(keys or {})
        self.first, self.hosts = first, hosts
        self.environment = {**_QUIET, **os.environ, **(environment or {})}
        self.settings = settings or Elastic()
        self.say = say
        self.sources = sources
        self.modules = tuple(modules)
        self.roster = Roster()
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._workers: dict[Member, _Worker] = {}
        self._failures: list[Failure] = []
        self._said: set[str] = set()
        self._unsaid: list[tuple[float, str]] = []
        self._settling: dict[Member, float] = {}
        self._breaks: dict[int, float] = {}
        self._untold: list[entries.Entry] = []
        self._useless: dict[int, int] = {}
        self._founded = 0.0
        self._ended_at: float | None = None
        self._asked = 0
        self._noticed = False
        self._resting = False  # a request told workers of this host to leave; a later one may want them back
        self._acknowledged = False
        self._store_answers = True
        self._holds_store = False
        self._follows = False
        self._nursery_gone = False
        self._watched = 0.0

    # -- from any thread -----------------------------------------------------------------------------------------------

    def add_worker(self) -> None:
        """Start one worker more, on the lowest device number that is free."""
        self._inbox.put(("add", None))

    def stop(self) -> None:
        """As Ctrl-C: ask the workers to stop at the next boundary; called again, kill them."""
        self._inbox.put(("signal", None))

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> HostEnd:
        """Starts the workers; returns when this host has no more to do. Call it from the main thread for Ctrl-C.

        A host that serves the store stays until the others have gone; one whose workers left since a request wanted
        fewer devices stays until the run ends.

        Raises:
            WorkerFailed: all workers of this host have failed, and the run did not finish elsewhere.
            Interrupted: SIGINT came, here or to another host; the workers have ended.
            StoreGone: the store to be joined does not answer.
            CapslogError: the folder cannot be written, or workers cannot be started.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._own_folder())
            stack.enter_context(self._heard_signals())
            self._open_store(stack)
            self._nursery = Nursery(
                self.entry, lambda what: self._inbox.put(("nursery", what)), self._log("nursery"), self.modules,
                {**self.environment, "CAPSLOG_RUN_DIR": str(self.run_dir)},
            )  # fmt: skip
            stack.callback(self._nursery.close)
            for _ in range(self.num_workers):
                self._start()
            self._gathering = self._listen()
            stack.callback(self._gathering.stop)
            while not self._is_over():
                with contextlib.suppress(queue.Empty):
                    self._happened(*self._inbox.get(timeout=POLL_SECONDS))
                self._watch()
            self._say_losses(all_of_them=True)
            self._unfollow()  # before the last entry, which wakes the thread that waits for it
            self._tell(entries.HostsEntry(self.name, "gone"))
        return self._end()

    def _open_store(self, stack: contextlib.ExitStack) -> None:
        identity = None
        if self.serves and "://" in self.address:
            from varuna_capslog.elastic.store.etcd_store import begin_run

            identity = begin_run(self.address, self.settings.lease_seconds)
        elif self.serves:
            self._holds_store = True
            host, _, port = self.address.rpartition(":")
            server: StoreServer
            server, number = serve_store(int(port))
            stack.callback(server.close)
            self.address, identity = f"{host}:{number}", server.identity
        self.store: MembershipStore = open_store(self.address, identity)
        stack.callback(self.store.close)
        known = (self.address, self.store.identity)
        hooks.tell_where(self.run_dir, *known, self.serves)
        stack.callback(hooks.forget, *known)
        if self.serves:
            for key, value in self.keys.items():
                self.store.put(key, value)
        number = self.store.count(f"host/{self.name}")
        if number > 1:
            self.name = f"{self.name}.{number}"
        first = self.store.get("first-plan", 0.0 if self.serves else 0.3)
        self._chronicle = Chronicle(self.run_dir, self.name, 0 if first is None else int(first) - 1)
        others = lambda: [host for host in tuple(self.roster.hosts) if host != self.name]  # noqa: E731
        self._leases = Leases(
            self.store,
            self.name,
            self.settings.lease_seconds,
            others,
            lambda host: self._inbox.put(("silent", host)),
            lambda answers: self._inbox.put(("store", answers)),
        )
        self._leases.start()
        stack.callback(self._leases.stop)
        self._tell(entries.HostsEntry(self.name, "here", self.num_workers))
        self._follow()

    def _follow(self) -> None:
        self._follows = True
        self._unfollow = self.store.follow(
            lambda entry: self._inbox.put(("log", entry)),
            lambda why: self._inbox.put(("unheard", why)),
            self.roster.taken,
        )

    def _listen(self) -> Gathering:
        sources = self.sources
        if sources is None:
            file = self.run_dir / "notices" / self.name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)  # what was said to an earlier run is not for this one
            sources = auto_sources(self.name, file=file)
        return listen(sources, lambda announcement: self._inbox.put(("announced", announcement)))

    def _is_over(self) -> bool:
        if self._living() or self._settling:
            return False
        unneeded = self.roster.finished is not None or self._asked or self._noticed or not self._store_answers
        if self._resting and self.roster.members and not unneeded:
            return False
        return not self._holds_store or self._asked > 1 or set(self.roster.hosts) <= {self.name}

    def _end(self) -> HostEnd:
        finished, failed = self.roster.finished, self._failed_for_all()
        if failed is not None:
            member, cause = str(failed["member"]), f"{failed['cause']}; then the same command {self._whence()}"
            failure = Failure(-1, cause, str(failed["kind"]), time.time(), member=member)
            raise WorkerFailed(failure, self._log(member), everywhere=True)
        if self._asked:
            how = "stopped cleanly" if finished is not None else "stopped"
            how = "killed in the middle of a step" if finished is None and self._asked > 1 else how
            step = self._chronicle.last_step() if finished is None else finished.step
            reached = f" after step {step}" if step else ""
            goes_on = f"continues the run in {self.run_dir}" if finished is not None else self._whence()
            raise Interrupted(f"interrupted: {how}{reached}; the same command {goes_on}")
        if finished is not None and finished.asked:
            how = f"interrupted: stopped cleanly after step {finished.step}, as asked on another host"
            raise Interrupted(f"{how}; the same command continues the run in {self.run_dir}")
        well = len(self._workers) > len(self._failures)
        if finished is None and self._failures and not well:
            # what happened before the newest generation began was survived
            last = [one for one in self._failures if one.time >= self._founded] or self._failures
            root = root_cause(last)
            alike = len(last) > 1 and all(one.cause == root.cause for one in last)
            raise WorkerFailed(root, self._log(str(root.member)), everywhere=alike)
        stopped = finished is not None and finished.stopped
        return HostEnd("left" if finished is None else "finished", stopped, tuple(self._failures))

    def _failed_for_all(self) -> Mapping[str, Any] | None:
        """What a member met that would stop every other one, too."""
        return None if self.roster.finished is None else self.roster.finished.failure

    def _whence(self) -> str:
        """What the same command does after an end that could not be prepared."""
        if (self.run_dir / "held").exists() or any((self.run_dir / "checkpoints").glob("step-*")):
            return f"continues the run in {self.run_dir} from what was last saved"
        return f"begins the run in {self.run_dir} anew, since nothing of it was saved"

    # -- what happens --------------------------------------------------------------------------------------------------

    def _happened(self, kind: str, what: Any) -> None:
        match kind:
            case "nursery":
                self._nursery_says(what)
            case "log":
                self._logged(what)
            case "announced":
                self._announced(what)
            case "silent":
                self._host_silent(what)
            case "signal":
                self._signalled()
            case "add":
                self._start()
            case "store" if not what:
                self._store_lost("the store does not answer")
            case "store":
                self._store_back()
            case "unheard":  # all that was heard before is taken by now
                self._follows = False
                self._store_lost(what)

    def _nursery_says(self, what: Mapping[str, Any]) -> None:
        if "gone" in what:
            self._nursery_gone = True
            for worker in self._living():
                worker.verdict = worker.verdict or f"was lost with its nursery (see {self._log('nursery')})"
                self._ended(worker, -signal.SIGKILL)
        elif "member" in what:
            worker = self._workers[what["member"]]
            if "signal" in what or "status" in what:
                self._ended(worker, -what["signal"] if "signal" in what else what["status"])
                return
            worker.pid = what["pid"]
            known = {"member": worker.member, "pid": worker.pid, "host": self.name}
            write_unless_there(self.folder / f"{worker.member}.json", known)
            if self._asked:
                signal_group(worker.pid, signal.SIGINT if self._asked == 1 else signal.SIGKILL)

    def _ended(self, worker: _Worker, status: int) -> None:
        """Tells the log at once of a loss; of an end as it should be once it is clear what it meant."""
        worker.ended = True
        if worker.verdict is None and status in (0, 130):
            self._settling[worker.member] = time.monotonic() + SETTLE_SECONDS
            return
        failure = self._failure(worker, status)
        self._tell(entries.DeadEntry(worker.member, failure.sentence(), self.name))
        self._failures.append(failure)
        if self._asked < 2 and failure.sentence() not in self._said:
            self._said.add(failure.sentence())  # what all have agreed on, all of them report
            # the log may tell that it is everybody's failure: then it is the end's sentence
            self._unsaid.append((time.monotonic() + SETTLE_SECONDS * (failure.kind != "signal"), failure.sentence()))
            self._say_losses()
        self._replace(worker, lost=status < 0 or worker.expelled_since is not None)

    def _say_losses(self, all_of_them: bool = False) -> None:
        unsaid, self._unsaid = self._unsaid, []
        for due, sentence in unsaid if self._failed_for_all() is None else ():
            if all_of_them or time.monotonic() >= due:
                self.say(sentence)
            else:
                self._unsaid.append((due, sentence))

    def _failure(self, worker: _Worker, status: int) -> Failure:
        if worker.verdict is not None:
            return Failure(worker.slot, worker.verdict, "signal", time.time(), member=worker.member)
        if status < 0:
            cause = "was killed as asked" if self._asked > 1 else f"was killed by {signal_name(-status)}"
            return Failure(worker.slot, cause, "signal", time.time(), member=worker.member)
        reported = read_failure(self.folder / f"{worker.member}.error.json", worker.slot, None, worker.member)
        cause = f"exit status {status}: {last_line(self._log(worker.member))}"
        return reported or Failure(worker.slot, cause, "exit", time.time(), member=worker.member)

    def _replace(self, worker: _Worker, lost: bool) -> None:
        """What failed by itself would fail again; what was lost leaves a device behind."""
        useless = 0 if self.roster.was_named(worker.member) else self._useless.get(worker.slot, 0) + 1
        self._useless[worker.slot] = useless
        if not self.settings.replace_lost or not lost or self._nursery_gone or self._asked or self._noticed:
            return
        if self.roster.finished is not None:
            return
        if useless >= HOPELESS:
            self.say(f"device {worker.slot} of {self.name} stays empty: {useless} workers ended before they took part")
            return
        self._start(worker.slot)

    def _logged(self, value: dict[str, Any]) -> None:
        self._chronicle.take(value, self.roster)
        entry = self.roster.take(value)
        if self.serves and self.roster.is_complete(self.hosts):
            self._found()
        if (
            isinstance(entry, entries.DeadEntry | entries.LeftEntry | entries.GenerationEntry)
            and self.roster.is_bereft
            and not self._asked
        ):
            self._park()
        match entry:
            case entries.GenerationEntry():
                self._founded = time.time()
            case entries.FinishedEntry():
                self._ended_at = time.monotonic()
            case entries.BrokenEntry(generation):
                self._breaks.setdefault(generation, time.monotonic())
            case entries.DeadEntry(member):
                worker = self._workers.get(member)
                if worker is not None and not worker.ended:
                    # Others shun it from now on; it hears so itself and goes.
                    worker.expelled_since = worker.expelled_since or time.monotonic()
            case entries.RequestEntry(devices):
                start, leave = self.roster.share(self.name, devices)
                self._resting = bool(leave) or self._resting
                for _ in range(start):
                    self._start()
                for member in leave:
                    self._tell(entries.NoticeEntry(member, source="request"))
            case entries.HostsEntry(self.name, "lost"):
                # It was too slow, or cut off for a while: its devices are to be had again.
                self._tell(entries.HostsEntry(self.name, "here", self.num_workers))
            case entries.AnnounceEntry(self.name):
                self._gathering.hear(hooks.notice_of(entry, self.name))

    def _found(self) -> None:
        """The first generation: all who begin together, so that nobody trains alone while the others load."""
        first = Generation(1, tuple(self.roster.members), checkpoint=self.first)
        with contextlib.suppress(StoreGone):
            self.store.compare_and_set(0, first)

    def _park(self) -> None:
        """All voters have ended, so that nobody trains: whoever asks to come may go on from the last checkpoint."""
        lost = self.roster.generation
        self.say(f"all {len(lost.members)} member(s) are lost; whoever comes goes on from the last checkpoint")
        with contextlib.suppress(StoreGone):
            self.store.compare_and_set(lost.number, lost.parked(self.roster.checkpoint))

    def _announced(self, announcement: Announcement) -> None:
        notice = announcement.of(self.name)
        if notice is None:
            return
        deadline = hooks.wall_time_of(notice.deadline)
        if notice.kind is Kind.HINT:  # it changes no membership
            self.say(f"notice from {notice}")
            for worker in self._living():
                self._tell(entries.HintEntry(worker.member, deadline=deadline, source=notice.source))
            return
        self._noticed = True
        self.say(f"notice from {notice}")
        for worker in self._living():
            self._tell(entries.NoticeEntry(worker.member, notice.kind is Kind.NOW, deadline, notice.source))

    def _host_silent(self, host: str) -> None:
        if host not in self.roster.hosts:
            return
        why = f"host {host} does not answer for {self.settings.lease_seconds:g} s"
        self.say(why)
        for member, where in tuple(self.roster.members.items()):
            if where == host:
                self._tell(entries.DeadEntry(member, why, self.name))
        self._tell(entries.HostsEntry(host, "lost"))

    def _signalled(self) -> None:
        self._asked += 1
        if self._asked == 1:
            self.say("stopping at the end of this step; Ctrl-C again kills the workers at once")
        for worker in self._living():
            if worker.pid is not None:
                signal_group(worker.pid, signal.SIGINT if self._asked == 1 else signal.SIGKILL)

    # -- what must be looked at ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        now = time.monotonic()
        if now - self._watched < POLL_SECONDS:
            return
        self._watched = now
        for member, until in list(self._settling.items()):
            if now >= until:
                del self._settling[member]
                self._settle(self._workers[member])
        self._say_losses()
        if is_stopped(self._nursery.pid):  # it has no reason to be, and tells nothing while it is
            signal_group(self._nursery.pid, signal.SIGCONT)
        for worker in self._living():
            if worker.pid is None or worker.verdict is not None:
                continue
            if self._ended_at is not None and now - self._ended_at > FAREWELL_SECONDS:
                self._condemn(worker, f"did not end within {FAREWELL_SECONDS:g} s after the run and was killed")
            stopped = is_stopped(worker.pid)
            worker.stopped_since = (worker.stopped_since or now) if stopped else None
            if worker.stopped_since is not None and now - worker.stopped_since > self.settings.stopped_seconds:
                self._condemn(worker, "was stopped (SIGSTOP, or a debugger) and killed")
            elif worker.expelled_since is not None and now - worker.expelled_since > self.settings.hang_seconds:
                self._condemn(worker, "was taken for dead by another host and killed")
        for generation, since in list(self._breaks.items()):
            if now - since > self.settings.hang_seconds:
                del self._breaks[generation]
                patience = f"{self.settings.hang_seconds:g} s after generation {generation} broke"
                for worker in self._living():
                    if worker.member in self.roster.silent(generation):
                        self._condemn(worker, f"did not answer within {patience} and was killed")
        if self._noticed and not self._acknowledged and not self._living():
            self._acknowledged = True
            self._gathering.host_left()

    def _condemn(self, worker: _Worker, verdict: str) -> None:
        """The nursery tells of the end, and only then it is told dead."""
        if worker.verdict is None and worker.pid is not None:
            worker.verdict = verdict
            signal_group(worker.pid, signal.SIGKILL)

    def _settle(self, worker: _Worker) -> None:
        """Tells of a worker that has ended without a failure: as lost, where the newest generation trains with it."""
        roster, member = self.roster, worker.member
        if roster.finished is not None:
            return
        if member in roster.generation.members and member not in roster.dead:
            why = f"worker {member} ended before the run did"
            self._tell(entries.DeadEntry(member, why, self.name))
        else:
            self._tell(entries.LeftEntry(member))

    # -- the store -----------------------------------------------------------------------------------------------------

    def _tell(self, entry: entries.Entry) -> None:
        """Append to the log; while the store is lost, keep it for later."""
        if self._store_answers:
            try:
                self.store.append(entry.to_json())
                return
            except StoreGone as error:
                self._store_lost(str(error))
        self._untold.append(entry)

    def _store_lost(self, why: str) -> None:
        if self._store_answers and self.roster.finished is None:
            self.say(f"{why}; the run goes on, and stops safely at the next change")
        self._store_answers = False
        if self.roster.finished is not None:
            self.roster.hosts.clear()  # its host has gone home

    def _store_back(self) -> None:
        if not self._store_answers:
            self.say("the store answers again")
            self._store_answers = True
            untold, self._untold = self._untold, []
            for entry in untold:
                self._tell(entry)
        if not self._follows:
            self._follow()

    # -- workers -------------------------------------------------------------------------------------------------------

    def _living(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if not worker.ended]

    def _start(self, slot: int | None = None) -> None:
        taken = {worker.slot for worker in self._living()}
        slot = next(number for number in range(len(taken) + 1) if number not in taken) if slot is None else slot
        try:
            member = f"{self.name}-{self.store.count(f'members/{self.name}')}"
        except StoreGone as error:
            self._store_lost(str(error))  # nobody could join without it
            return
        self._workers[member] = _Worker(member, slot)
        self._tell(entries.WorkerEntry(member, self.name, slot))
        environment = {
            "CAPSLOG_MEMBER": member,
            "CAPSLOG_HOST": self.name,
            "CAPSLOG_STORE": self.address,
            "CAPSLOG_STORE_IDENTITY": self.store.identity,
            "CAPSLOG_RUN_DIR": str(self.run_dir),
            "CAPSLOG_LOCAL_RANK": str(slot),
        }
        log = str(self._log(member))
        self._nursery.fork({"member": member, "environment": environment, "log": log, "arguments": self.arguments})

    def _log(self, name: str) -> Path:
        return self.folder / f"{self.name}.nursery.log" if name == "nursery" else self.folder / f"{name}.log"

    # -- this process --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _own_folder(self) -> Iterator[None]:
        if not self.serves:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CapslogError(f"{self.folder} cannot be used: {error.strerror}; choose another run_dir") from error
            yield
            return
        with reserve(self.run_dir):
            for suffix in ("json", "log"):
                for stale in self.folder.glob(f"*.{suffix}"):
                    stale.unlink()
            yield

    @contextlib.contextmanager
    def _heard_signals(self) -> Iterator[None]:
        """Ctrl-C; SIGTERM is a notice, which the listeners hear."""

        def hear(number: int, frame: FrameType | None) -> None:
            self._inbox.put(("signal", number))

        try:
            before = signal.signal(signal.SIGINT, hear)
        except ValueError:  # not the main thread: the caller keeps the signal
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
