"""Supervisor of one machine in an elastic run: starts and ends its workers, passes notices on, reports losses.

A loss is a `DeadEntry` in the log: of a worker here whose process ended (`Host._on_worker_exit`), also after `workers`
killed it as hung; or of each worker of another host that `leases` found silent (`Host._host_silent`). Of the
membership it decides only the first generation and a parked one. It never touches a tensor. No worker outlives it.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.failures import Failure, loss_cause
from varuna_capslog.base.processes import heard_signals
from varuna_capslog.base.supervisor import Interrupted, WorkerFailed, last_step, new_run, usable
from varuna_capslog.elastic.host import hooks
from varuna_capslog.elastic.host.leases import HostStore
from varuna_capslog.elastic.host.workers import SETTLE_SECONDS, HostOptions, HostWorker, HostWorkers
from varuna_capslog.elastic.notices.gather import Announcement, Gathering, auto_sources
from varuna_capslog.elastic.notices.interface import Kind
from varuna_capslog.membership import entries
from varuna_capslog.membership.entries import Roster
from varuna_capslog.membership.generation import Generation, Member

__all__ = ["Host", "HostEnd", "HostOptions"]

POLL_SECONDS = 0.05
HOPELESS = 3  # a device gets no further worker after this many in a row ended before they took part


@dataclass(frozen=True)
class HostEnd:
    """End of a host's part. how: "finished": the run has ended; "left": this host's workers have ended, and other hosts
    may continue the run. stopped: the run ended early on request.
    """

    how: Literal["finished", "left"]
    stopped: bool


class Host:
    """Starts, watches and ends the workers of this machine.

    Members are named `<host>-<counter>`. A worker gets CAPSLOG_MEMBER, CAPSLOG_HOST, CAPSLOG_STORE (its address),
    CAPSLOG_STORE_IDENTITY, CAPSLOG_RUN_DIR and CAPSLOG_LOCAL_RANK (the number of its device here), a log
    `workers/<member>.log`, and its process group; `workers/<member>.json` holds pid, host and member. A worker's exit
    status is 0 after the run's end or its release, and 130 after a request to stop; any other is a loss. `roster` has
    the content of the store's log so far; `workers` is set by `run`.
    """

    def __init__(self, options: HostOptions) -> None:
        self.options = options
        self.roster = Roster()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # for the thread of `run`
        self.link = HostStore(options, self.roster, self._take_entry, self._host_silent, self._calls.put)
        self._settling: dict[Member, float] = {}
        self._useless: dict[int, int] = {}
        self._founded = 0.0
        self._stop_requests = 0
        self._called_off = False  # by `options.look`
        self._noticed = False
        self._acknowledged = False
        self._resting = False  # workers of this host left by request; a later request may start others
        self._looked = 0.0

    # -- from any thread -----------------------------------------------------------------------------------------------

    def add_worker(self) -> None:
        """Start another worker, on the lowest device number that is free."""
        self._calls.put(self._start)

    def stop(self) -> None:
        """Ask the workers to stop at the next boundary, as Ctrl-C does; called again, kill them."""
        self._calls.put(self._stop_workers)

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> HostEnd:
        """Start the workers; return when this host has no more to do. Ctrl-C is heard only in the main thread.

        A host that serves the store stays until the other hosts have gone. A host whose workers left after a request
        for fewer devices stays until the run ends.

        Raises:
            WorkerFailed: all workers of this host have failed, and the run did not finish elsewhere.
            Interrupted: SIGINT came, here or to another host; the workers have ended.
            StoreGone: the store does not answer.
            CapslogError: the folder cannot be written, or workers cannot be started.
        """
        with contextlib.ExitStack() as stack:
            if self.options.serves:
                stack.enter_context(new_run(self.options.run_dir))
            else:
                with usable(self.options.folder):
                    self.options.folder.mkdir(parents=True, exist_ok=True)
            # SIGTERM is a preemption notice: one of `_listen`'s sources handles it
            stack.enter_context(heard_signals((signal.SIGINT,), lambda number: self.stop()))
            self.link.connect(stack)
            self.link.begin(stack)
            hear = lambda message: self._calls.put(partial(self._fork_server_said, message))  # noqa: E731
            self.workers = HostWorkers(self.options, self.link.name, self.roster, hear)
            stack.callback(self.workers.fork_server.close)
            for _ in range(self.options.num_workers):
                self._start()
            self._gathering = self._listen()
            stack.callback(self._gathering.stop)
            while not self._is_over():
                with contextlib.suppress(queue.Empty):
                    self._calls.get(timeout=POLL_SECONDS)()
                self._check_liveness()
                if not (self._called_off or self._stop_requests) and self.options.look():
                    self._called_off = True
                    self.workers.signal(signal.SIGINT)
            self.workers.say_losses(all_of_them=True)
            self.link.leave()
        return self._end()

    def _listen(self) -> Gathering:
        sources = self.options.sources
        if sources is None:
            file = self.options.run_dir / "notices" / self.link.name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)  # a notice that was meant for an earlier run
            sources = auto_sources(self.link.name, file=file)
        return Gathering(sources, lambda announcement: self._calls.put(partial(self._take_announcement, announcement)))

    def _is_over(self) -> bool:
        if self.workers.living() or self._settling:
            return False
        unneeded = self.roster.finished is not None or self._stop_requests or self._noticed or not self.link.answers
        if self._resting and self.roster.members and not unneeded:
            return False
        return not self.link.ends_with_us or self._stop_requests > 1 or set(self.roster.hosts) <= {self.link.name}

    def _end(self) -> HostEnd:
        finished, failed, run_dir = self.roster.finished, self.roster.failed_for_all, self.options.run_dir
        if failed is not None:
            member, cause = str(failed["member"]), f"{failed['cause']}; then the same command {self._resume_hint()}"
            failure = Failure(-1, cause, str(failed["kind"]), wall_seconds(), member=member)
            raise WorkerFailed(failure, self.workers.log(member), everywhere=True)
        if self._stop_requests:
            how = "stopped cleanly" if finished is not None else "stopped"
            how = "killed in the middle of a step" if finished is None and self._stop_requests > 1 else how
            step = last_step(run_dir) if finished is None else finished.step
            reached = f" after step {step}" if step else ""
            goes_on = f"continues the run in {run_dir}" if finished is not None else self._resume_hint()
            raise Interrupted(f"interrupted: {how}{reached}; the same command {goes_on}")
        if finished is not None and finished.asked and not self._called_off:
            how = f"interrupted: stopped cleanly after step {finished.step}, as asked on another host"
            raise Interrupted(f"{how}; the same command continues the run in {run_dir}")
        failures = self.workers.failures
        well = len(self.workers.by_member) > len(failures)
        if finished is None and failures and not well:
            raise self.workers.root(self._founded)
        stopped = finished is not None and finished.stopped
        return HostEnd("left" if finished is None else "finished", stopped)

    def _resume_hint(self) -> str:
        """Words on the effect of the same command after an end without a final checkpoint."""
        run_dir = self.options.run_dir
        if (run_dir / "held").exists() or any((run_dir / "checkpoints").glob("step-*")):
            return f"continues the run in {run_dir} from what was last saved"
        return f"begins the run in {run_dir} anew, since nothing of it was saved"

    # -- events --------------------------------------------------------------------------------------------------------

    def _fork_server_said(self, message: Mapping[str, Any]) -> None:
        for worker, status in self.workers.note_exits(message):
            self._on_worker_exit(worker, status)

    def _on_worker_exit(self, worker: HostWorker, status: int) -> None:
        """Report a failed or killed worker to the log at once; exit status 0 or 130 is judged later by `_settle`."""
        if worker.verdict is None and status in (0, 130):
            self._settling[worker.member] = time.monotonic() + SETTLE_SECONDS
            return
        failure = self.workers.failure(worker, status, self._stop_requests)
        self.link.tell(entries.DeadEntry(worker.member, failure.sentence(), self.link.name, loss_cause(failure)))
        self.workers.say_losses()
        self._replace(worker, lost=status < 0 or worker.expelled_since is not None)

    def _replace(self, worker: HostWorker, lost: bool) -> None:
        """Start another worker on a lost worker's device, unless it failed by itself: another would fail, too."""
        useless = 0 if self.roster.was_named(worker.member) else self._useless.get(worker.slot, 0) + 1
        self._useless[worker.slot] = useless
        wanted = self.options.settings.replace_lost and lost and self.roster.finished is None
        if not wanted or self.workers.server_gone or self._stop_requests or self._noticed:
            return
        if useless >= HOPELESS:
            where = f"device {worker.slot} of {self.link.name}"
            self.options.say(f"{where} stays empty: {useless} workers ended before they took part")
            return
        self._start(worker.slot)

    def _take_entry(self, value: dict[str, Any]) -> None:
        self.link.write_event(value)
        entry = self.roster.take(value)
        if self.options.serves and self.roster.is_complete(self.options.hosts):
            self._write_first_generation()
        ends = isinstance(entry, entries.DeadEntry | entries.LeftEntry | entries.GenerationEntry)
        if ends and self.roster.has_no_voter_left and not self._stop_requests:
            self._park()
        self.workers.take(entry)
        match entry:
            case entries.GenerationEntry():
                self._founded = wall_seconds()
                self.link.run_begins()
            case entries.RequestEntry(devices):
                start, leave = self.roster.share(self.link.name, devices)
                self._resting = bool(leave) or self._resting
                for _ in range(start):
                    self._start()
                for member in leave:
                    self.link.tell(entries.NoticeEntry(member, source="request"))
            case entries.HostsEntry(self.link.name, "lost"):
                # Another host found this host silent: it was too slow, or cut off. Its devices can be used again.
                self.link.explain_absence()
                self.link.tell_here()
            case entries.AnnounceEntry(self.link.name):
                self._gathering.hear(hooks.notice_of(entry, self.link.name))

    def _write_first_generation(self) -> None:
        """Write the first generation, with all members that begin together: none trains alone while others load."""
        self.link.write_generation(0, Generation(1, tuple(self.roster.members), checkpoint=self.options.first))

    def _park(self) -> None:
        """Write a generation without members: all voters have ended, and the next members load a checkpoint."""
        lost = self.roster.generation
        self.options.say(f"all {len(lost.members)} member(s) are lost; whoever comes goes on from the last checkpoint")
        self.link.write_generation(lost.number, lost.parked(self.roster.checkpoint))

    def _take_announcement(self, announcement: Announcement) -> None:
        notice = announcement.of(self.link.name)
        if notice is None:
            return
        remaining = None if notice.deadline is None else notice.deadline.remaining(time.monotonic())
        deadline = hooks.deadline_fields(remaining)
        self.options.say(f"notice from {notice}")
        if notice.kind is Kind.HINT:  # a hint changes no membership
            for worker in self.workers.living():
                self.link.tell(entries.HintEntry(worker.member, source=notice.source, **deadline))
            return
        self._noticed, urgent = True, notice.kind is Kind.NOW
        for worker in self.workers.living():
            self.link.tell(entries.NoticeEntry(worker.member, urgent, source=notice.source, **deadline))

    def _host_silent(self, host: str, why: str) -> None:
        if host not in self.roster.hosts:
            return
        why = f"host {host} {why}"
        self.options.say(why)
        for member, where in tuple(self.roster.members.items()):
            if where == host:
                self.link.tell(entries.DeadEntry(member, why, self.link.name, "host"))
        self.link.tell(entries.HostsEntry(host, "lost"))

    def _stop_workers(self) -> None:
        self._stop_requests += 1
        if self._stop_requests == 1:
            self.options.say("stopping at the end of this step; Ctrl-C again kills the workers at once")
        self.workers.signal(signal.SIGINT if self._stop_requests == 1 else signal.SIGKILL)

    # -- periodic checks -----------------------------------------------------------------------------------------------

    def _check_liveness(self) -> None:
        now = time.monotonic()
        if now - self._looked < POLL_SECONDS:
            return
        self._looked = now
        for member, until in list(self._settling.items()):
            if now >= until:
                del self._settling[member]
                self._settle(member)
        self.workers.say_losses()
        self.workers.say_absent(now)
        self.workers.kill_hung(now)
        if self._noticed and not self._acknowledged and not self.workers.living():
            self._acknowledged = True
            self._gathering.host_left()

    def _settle(self, member: Member) -> None:
        """Report a worker with exit status 0 or 130: lost if the newest generation has it as a member, else left."""
        roster = self.roster
        if roster.finished is not None:
            return
        if member in roster.generation.members and member not in roster.dead:
            why = f"worker {member} ended before the run did"
            self.link.tell(entries.DeadEntry(member, why, self.link.name, "failed"))
        else:
            self.link.tell(entries.LeftEntry(member))

    def _start(self, slot: int | None = None) -> None:
        slot = self.workers.free_slot() if slot is None else slot
        member = self.link.new_member()
        if member is not None:
            self.link.tell(entries.WorkerEntry(member, self.link.name, slot))
            self.workers.start(member, slot, self.link.variables())
