"""The supervisor of one machine in a run whose members come and go, and the one authority on which workers died there.

It serves or joins the store, has its workers forked by a nursery, tells the log which of them ended, kills those that
are stopped or hang, watches the other hosts' leases, and passes notices on. It decides nothing about the membership and
never touches a tensor. No worker outlives it.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.failures import Failure
from varuna_capslog.base.supervisor import Interrupted, WorkerFailed, reserve
from varuna_capslog.elastic.host import hooks
from varuna_capslog.elastic.host.event_writer import EventWriter
from varuna_capslog.elastic.host.losses import SETTLE_SECONDS, Losses
from varuna_capslog.elastic.host.options import HostOptions
from varuna_capslog.elastic.host.store_link import HostStore
from varuna_capslog.elastic.host.watch import WorkerWatch
from varuna_capslog.elastic.host.workers import HostWorker, HostWorkers
from varuna_capslog.elastic.notices.auto import auto_sources
from varuna_capslog.elastic.notices.gather import Announcement, Gathering, listen
from varuna_capslog.elastic.notices.interface import Kind
from varuna_capslog.membership import entries
from varuna_capslog.membership.generation import Generation, Member
from varuna_capslog.membership.roster import Roster

__all__ = ["Host", "HostEnd", "HostOptions"]

POLL_SECONDS = 0.05
HOPELESS = 3  # so many workers in a row that ended before they took part: no further one is started in their place


@dataclass(frozen=True)
class HostEnd:
    """How a host's part ended.

    Attributes:
        how: "finished": the run has ended; "left": all its workers have left by request, and others may go on.
        stopped: the run ended early on request.
        failures: of workers that were lost on the way, oldest first.
    """

    how: Literal["finished", "left"]
    stopped: bool
    failures: tuple[Failure, ...]


class Host:
    """Starts, watches and ends the workers of this machine.

    Members are named `<host>-<counter>`. A worker gets CAPSLOG_MEMBER, CAPSLOG_HOST, CAPSLOG_STORE (host:port),
    CAPSLOG_STORE_IDENTITY, CAPSLOG_RUN_DIR and CAPSLOG_LOCAL_RANK (the number of its device here), a log
    `workers/<member>.log`, and its process group; `workers/<member>.json` holds pid, host and member. Status 0 says
    that the run has finished or that it was released, 130 that it was asked to stop; all else is a loss.

    Attributes:
        link: the run's store.
        roster: what the store's log says so far.
        workers: the processes; from `run` on.
    """

    def __init__(self, options: HostOptions) -> None:
        self.options = options
        self.roster = Roster()
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.link = HostStore(options, self.roster, lambda kind, what: self._inbox.put((kind, what)))
        self._watch = WorkerWatch(options.settings, self.roster)
        self._losses = Losses(options, self.roster)
        self._settling: dict[Member, float] = {}
        self._useless: dict[int, int] = {}
        self._founded = 0.0
        self._asked = 0
        self._noticed = False
        self._acknowledged = False
        self._resting = False  # workers of this host left by request; a later request may want them back
        self._looked = 0.0

    @property
    def address(self) -> str:
        """Of the run's store, as workers reach it."""
        return self.link.address

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
            self.link.connect(stack)
            first = self.link.store.get("first-plan", 0.0 if self.options.serves else 0.3)
            offset = 0 if first is None else int(first) - 1
            self._chronicle = EventWriter(self.options.run_dir, self.link.name, offset)
            self.link.begin(stack)
            self.workers = HostWorkers(self.options, self.link.name, lambda what: self._inbox.put(("nursery", what)))
            stack.callback(self.workers.close)
            for _ in range(self.options.num_workers):
                self._start()
            self._gathering = self._listen()
            stack.callback(self._gathering.stop)
            while not self._is_over():
                with contextlib.suppress(queue.Empty):
                    self._happened(*self._inbox.get(timeout=POLL_SECONDS))
                self._look()
            self._losses.say(all_of_them=True)
            self.link.leave()
        return self._end()

    def _listen(self) -> Gathering:
        sources = self.options.sources
        if sources is None:
            file = self.options.run_dir / "notices" / self.link.name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)  # what was said to an earlier run is not for this one
            sources = auto_sources(self.link.name, file=file)
        return listen(sources, lambda announcement: self._inbox.put(("announced", announcement)))

    def _is_over(self) -> bool:
        if self.workers.living() or self._settling:
            return False
        unneeded = self.roster.finished is not None or self._asked or self._noticed or not self.link.answers
        if self._resting and self.roster.members and not unneeded:
            return False
        return not self.link.ends_with_us or self._asked > 1 or set(self.roster.hosts) <= {self.link.name}

    def _end(self) -> HostEnd:
        finished, failed, run_dir = self.roster.finished, self.roster.failed_for_all, self.options.run_dir
        if failed is not None:
            member, cause = str(failed["member"]), f"{failed['cause']}; then the same command {self._whence()}"
            failure = Failure(-1, cause, str(failed["kind"]), time.time(), member=member)
            raise WorkerFailed(failure, self.workers.log(member), everywhere=True)
        if self._asked:
            how = "stopped cleanly" if finished is not None else "stopped"
            how = "killed in the middle of a step" if finished is None and self._asked > 1 else how
            step = self._chronicle.last_step() if finished is None else finished.step
            reached = f" after step {step}" if step else ""
            goes_on = f"continues the run in {run_dir}" if finished is not None else self._whence()
            raise Interrupted(f"interrupted: {how}{reached}; the same command {goes_on}")
        if finished is not None and finished.asked:
            how = f"interrupted: stopped cleanly after step {finished.step}, as asked on another host"
            raise Interrupted(f"{how}; the same command continues the run in {run_dir}")
        failures = self._losses.failures
        well = len(self.workers.by_member) > len(failures)
        if finished is None and failures and not well:
            raise self._losses.root(self._founded, self.workers)
        stopped = finished is not None and finished.stopped
        return HostEnd("left" if finished is None else "finished", stopped, tuple(failures))

    def _whence(self) -> str:
        """What the same command does after an end that could not be prepared."""
        run_dir = self.options.run_dir
        if (run_dir / "held").exists() or any((run_dir / "checkpoints").glob("step-*")):
            return f"continues the run in {run_dir} from what was last saved"
        return f"begins the run in {run_dir} anew, since nothing of it was saved"

    # -- what happens --------------------------------------------------------------------------------------------------

    def _happened(self, kind: str, what: Any) -> None:
        match kind:
            case "nursery":
                for worker, status in self.workers.heard(what):
                    self._ended(worker, status)
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
                self.link.lost("the store does not answer")
            case "store":
                self.link.back()
            case "unheard":
                self.link.unheard(what)

    def _ended(self, worker: HostWorker, status: int) -> None:
        """Tells the log at once of a loss; of an end as it should be once it is clear what it meant."""
        if worker.verdict is None and status in (0, 130):
            self._settling[worker.member] = time.monotonic() + SETTLE_SECONDS
            return
        failure = self._losses.failure(worker, status, self.workers, killed_as_asked=self._asked > 1)
        self.link.tell(entries.DeadEntry(worker.member, failure.sentence(), self.link.name))
        self._losses.add(failure, aloud=self._asked < 2)
        self._replace(worker, lost=status < 0 or worker.expelled_since is not None)

    def _replace(self, worker: HostWorker, lost: bool) -> None:
        """What failed by itself would fail again; what was lost leaves a device behind."""
        useless = 0 if self.roster.was_named(worker.member) else self._useless.get(worker.slot, 0) + 1
        self._useless[worker.slot] = useless
        wanted = self.options.settings.replace_lost and lost and self.roster.finished is None
        if not wanted or self.workers.nursery_gone or self._asked or self._noticed:
            return
        if useless >= HOPELESS:
            where = f"device {worker.slot} of {self.link.name}"
            self.options.say(f"{where} stays empty: {useless} workers ended before they took part")
            return
        self._start(worker.slot)

    def _logged(self, value: dict[str, Any]) -> None:
        self._chronicle.take(value, self.roster)
        entry = self.roster.take(value)
        if self.options.serves and self.roster.is_complete(self.options.hosts):
            self._found()
        ends = isinstance(entry, entries.DeadEntry | entries.LeftEntry | entries.GenerationEntry)
        if ends and self.roster.is_bereft and not self._asked:
            self._park()
        self._watch.take(entry, self.workers)
        match entry:
            case entries.GenerationEntry():
                self._founded = time.time()
            case entries.RequestEntry(devices):
                start, leave = self.roster.share(self.link.name, devices)
                self._resting = bool(leave) or self._resting
                for _ in range(start):
                    self._start()
                for member in leave:
                    self.link.tell(entries.NoticeEntry(member, source="request"))
            case entries.HostsEntry(self.link.name, "lost"):
                # It was too slow, or cut off for a while: its devices are to be had again.
                self.link.tell_here()
            case entries.AnnounceEntry(self.link.name):
                self._gathering.hear(hooks.notice_of(entry, self.link.name))

    def _found(self) -> None:
        """The first generation: all who begin together, so that none trains alone while the others load."""
        self.link.found(0, Generation(1, tuple(self.roster.members), checkpoint=self.options.first))

    def _park(self) -> None:
        """All voters have ended, so that none trains: a worker that asks to come may go on from the last checkpoint."""
        lost = self.roster.generation
        self.options.say(f"all {len(lost.members)} member(s) are lost; whoever comes goes on from the last checkpoint")
        self.link.found(lost.number, lost.parked(self.roster.checkpoint))

    def _announced(self, announcement: Announcement) -> None:
        notice = announcement.of(self.link.name)
        if notice is None:
            return
        deadline = hooks.wall_time_of(notice.deadline)
        self.options.say(f"notice from {notice}")
        if notice.kind is Kind.HINT:  # it changes no membership
            for worker in self.workers.living():
                self.link.tell(entries.HintEntry(worker.member, deadline=deadline, source=notice.source))
            return
        self._noticed = True
        for worker in self.workers.living():
            self.link.tell(entries.NoticeEntry(worker.member, notice.kind is Kind.NOW, deadline, notice.source))

    def _host_silent(self, host: str) -> None:
        if host not in self.roster.hosts:
            return
        why = f"host {host} does not answer for {self.options.settings.lease_seconds:g} s"
        self.options.say(why)
        for member, where in tuple(self.roster.members.items()):
            if where == host:
                self.link.tell(entries.DeadEntry(member, why, self.link.name))
        self.link.tell(entries.HostsEntry(host, "lost"))

    def _signalled(self) -> None:
        self._asked += 1
        if self._asked == 1:
            self.options.say("stopping at the end of this step; Ctrl-C again kills the workers at once")
        self.workers.signal(signal.SIGINT if self._asked == 1 else signal.SIGKILL)

    # -- what must be looked at ----------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < POLL_SECONDS:
            return
        self._looked = now
        for member, until in list(self._settling.items()):
            if now >= until:
                del self._settling[member]
                self._settle(member)
        self._losses.say()
        self.workers.wake_nursery()
        for worker, verdict in self._watch.verdicts(now, self.workers.living()):
            self.workers.kill(worker, verdict)
        if self._noticed and not self._acknowledged and not self.workers.living():
            self._acknowledged = True
            self._gathering.host_left()

    def _settle(self, member: Member) -> None:
        """Tells of a worker that has ended without a failure: as lost, where the newest generation trains with it."""
        roster = self.roster
        if roster.finished is not None:
            return
        if member in roster.generation.members and member not in roster.dead:
            why = f"worker {member} ended before the run did"
            self.link.tell(entries.DeadEntry(member, why, self.link.name))
        else:
            self.link.tell(entries.LeftEntry(member))

    def _start(self, slot: int | None = None) -> None:
        slot = self.workers.free_slot() if slot is None else slot
        member = self.link.new_member()
        if member is not None:
            self.link.tell(entries.WorkerEntry(member, self.link.name, slot))
            self.workers.start(member, slot, self.link.variables())

    # -- this process --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _own_folder(self) -> Iterator[None]:
        folder = self.options.folder
        if not self.options.serves:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CapslogError(f"{folder} cannot be used: {error.strerror}; choose another run_dir") from error
            yield
            return
        with reserve(self.options.run_dir):
            for suffix in ("json", "log"):
                for stale in folder.glob(f"*.{suffix}"):
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
