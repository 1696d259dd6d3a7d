"""Fault injection of a chaos run: a method for each kind of fault in members, machines, network and store."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.rig import faults
from tests.rig.judge import NetworkPartition
from tests.rig.machines.machines import Machines, machine_of
from tests.rig.machines.network import STORE_HOST
from tests.rig.recovery import Hung, Recovery
from tests.rig.schedule import ScheduledFault
from tests.rig.tally import Hit
from tests.rig.watch import arm
from varuna_capslog.membership.generation import Member

__all__ = ["READY_SECONDS", "Strikes"]


READY_SECONDS = 200.0
"""Longest wait for a run that begins, or begins again."""

_FIRE_SECONDS = 10.0
_SLOWER = 5.0
_CLOCK_HOURS = 12.0
_OF_ONE = ("kill", "stop", "pause", "slow", "clock", "notice", "urgent", "error", "device", "memory")
"""Classes that hit one member."""


class Strikes:
    """Lets faults happen to a run.

    Args:
        say: called with a line before something that takes long.

    Attributes:
        store_losses: how often the store was lost, and the run begun again.
    """

    def __init__(self, machines: Machines, recovery: Recovery, say: Callable[[str], None]) -> None:
        self._machines, self._recovery, self._say = machines, recovery, say
        self._members, self._records = machines.members, machines.records
        self.store_losses = 0

    def wait_until_ready(self, fault: ScheduledFault) -> None:
        """Waits until the run trains with as many members as this fault needs, and one more; all but one at most."""
        most = self._machines.target
        wanted = min(most, {"bulk": fault.count + 1, "kill": 2}.get(fault.kind, 3))
        until = time.monotonic() + 20.0

        def ready() -> bool:
            voters, step_times = self._members.voters(), self._records.step_times
            trains = bool(step_times) and time.time() - step_times[-1] < 2.0
            enough = len(voters) >= (wanted if time.monotonic() < until else 2)
            spread = len({machine_of(member) for member in voters}) > 1 or fault.kind not in ("host", "freeze")
            return trains and enough and (spread or time.monotonic() > until)

        self._recovery.until(ready, f"where {fault.kind} can strike", 20.0 + self._recovery.hang_seconds)

    def strike(self, fault: ScheduledFault) -> Hit | None:
        """Lets a fault happen and waits until the run has recovered. None where it found no victim.

        Raises:
            Hung: the run has not recovered.
        """
        machines, members = self._machines, self._members
        machines.replenish_at = time.monotonic() + fault.rejoin
        voters = members.voters()
        wanted = fault.count if fault.kind == "bulk" else 1 if fault.kind in _OF_ONE else 2
        names = [voters[index] for index in fault.pick(len(voters), min(wanted, max(1, len(voters) - 1)))]
        if not names:
            return None
        hit = Hit(fault.number, fault.kind, time.time(), generation=members.roster.generation.number)
        match fault.kind:
            case "kill" | "bulk":
                return self._lose(hit, names)
            case "stop":
                return self._lose(hit, names, signal.SIGSTOP, "hung")
            case "slow":
                return self._slow(hit, names[0], fault.lasts)
            case "clock":
                return self._clock(hit, machine_of(names[0]), (2 * fault.whom[3] - 1) * _CLOCK_HOURS)
            case "error" | "device" | "memory":
                return self._fail(hit, names[0])
            case "double":
                return self._twice(hit, names, fault.delay)
            case "pause":
                return self._pause(hit, names[0], fault.lasts)
            case "notice" | "urgent":
                machines.notice(names[0], "chaos", urgent=fault.kind == "urgent")
                return self._recovery.recover(hit, names)
            case "notice-kill":
                machines.notice(names[0], "chaos")
                machines.agenda.later(fault.delay, lambda: members.signal(names[-1], signal.SIGKILL))
                hit.causes = {names[-1]: "killed"}
                return self._recovery.recover(hit, names)
            case "join-kill":
                return self._join_kill(hit, fault, names)
            case "before-apply" | "in-apply" | "in-step" | "in-change" | "in-leave":
                return self._at_point(hit, fault, names)
            case "host" if len({machine_of(member) for member in voters}) == 1:
                return None  # no worker would be left to go on
            case "host":
                return self._host(hit, machine_of(names[0]))
            case "freeze":
                return self._freeze(hit, machine_of(names[0]), fault.lasts)
            case "store" if machines.store.is_cluster:
                return self._store_server(hit, names[0], fault)
            case "store":
                return self._store(hit, names[0])
            case _:
                return self._network(hit, fault, names)

    # -- members -------------------------------------------------------------------------------------------------------

    def _lose(self, hit: Hit, names: list[Member], number: int = signal.SIGKILL, cause: str = "killed") -> Hit:
        for name in names:
            self._members.signal(name, number)
        hit.causes = dict.fromkeys(names, cause)
        return self._recovery.recover(hit, names)

    def _slow(self, hit: Hit, name: Member, seconds: float) -> Hit:
        folder = self._machines.run_dir / "chaos"
        faults.slow_down(folder, name, _SLOWER)
        self._machines.agenda.later(seconds, lambda: faults.slow_down(folder, name, 1.0))
        hit.victims, hit.note = (name,), f"for {seconds:.1f} s"
        return self._recovery.recover(hit, [], until=hit.time + seconds)

    def _fail(self, hit: Hit, name: Member) -> Hit | None:
        """An error in the member's program, of the kind that the class says."""
        do, cause = ("raise", "failed") if hit.kind == "error" else (hit.kind, hit.kind)
        hit.causes = {name: cause}
        # a step that lacks memory where it is computed or applied is made again, and no member is lost
        point = "compute" if hit.kind == "memory" else "applying"
        fired = self._fired(self._arm(faults.Fault(name, point, do)))
        if fired is None:
            return None
        hit.time = fired
        return self._recovery.recover(hit, [name])

    def _arm(self, fault: faults.Fault) -> Path:
        """Lets a fault wait for its member; the file is there until it happens."""
        return arm(self._machines.run_dir, str(self._records.number), fault)

    def _fired(self, armed: Path, over: Callable[[], bool] = lambda: False) -> float | None:
        """When it happened, in seconds since 1970; None, and it is taken back, where it does not until it is over."""
        until = time.monotonic() + _FIRE_SECONDS
        while armed.exists() and not over() and time.monotonic() < until:
            self._recovery.turn()
        if armed.exists():
            armed.unlink(missing_ok=True)
            return None
        return armed.with_suffix(".fired").stat().st_ctime

    def _twice(self, hit: Hit, names: list[Member], delay: float) -> Hit:
        self._members.signal(names[0], signal.SIGKILL)
        self._machines.agenda.later(delay, lambda: self._members.signal(names[-1], signal.SIGKILL))
        hit.note, hit.causes = f"{1000 * delay:.0f} ms apart", dict.fromkeys(names, "killed")
        return self._recovery.recover(hit, names)

    def _pause(self, hit: Hit, name: Member, seconds: float) -> Hit:
        self._members.signal(name, signal.SIGSTOP)
        self._machines.agenda.later(seconds, lambda: self._members.signal(name, signal.SIGCONT))
        hit.victims, hit.note, hit.causes = (name,), f"for {seconds:.1f} s", {name: "hung"}
        return self._recovery.recover(hit, [], until=hit.time + seconds)

    def _join_kill(self, hit: Hit, fault: ScheduledFault, names: list[Member]) -> Hit:
        requested = self._members.asked
        before = set(requested)
        self._members.signal(names[0], signal.SIGKILL)
        self._machines.replenish_at = 0.0
        until = time.monotonic() + _FIRE_SECONDS
        while set(requested) <= before and time.monotonic() < until:
            self._recovery.turn()
        self._recovery.wait(fault.delay)
        hit.time = time.time()
        for name in names[1:]:
            self._members.signal(name, signal.SIGKILL)
        hit.causes = dict.fromkeys(names, "killed")
        return self._recovery.recover(hit, names)

    def _at_point(self, hit: Hit, fault: ScheduledFault, names: list[Member]) -> Hit | None:
        do = "stop" if fault.stops else "kill"
        armed = self._arm(faults.Fault(names[0], fault.point, do))
        changes = fault.kind in ("in-change", "in-leave")
        hit.causes = {names[0]: "hung" if fault.stops else "killed"}
        if fault.kind == "in-change":
            hit.causes |= dict.fromkeys(names[1:], "killed")
        for name in names[1:] if changes else ():
            if fault.kind == "in-change":
                self._members.signal(name, signal.SIGKILL)
            else:
                self._machines.notice(name, "chaos")

        def passed() -> bool:
            """Return True once the change has ended without this fault: not every member reaches every point of one."""
            newer = self._members.roster.generation.number > hit.generation
            return changes and newer and self._is_past(hit, names[1:])

        fired, hit.note = self._fired(armed, passed), f"{do} at {fault.point!r}"
        if fired is None:
            if not changes:
                return None
            names, hit.note = names[1:], f"{names[0]} did not come to {fault.point!r}"
        elif not changes:
            hit.time, names = fired, names[:1]
        return self._recovery.recover(hit, names)

    def _is_past(self, hit: Hit, gone: list[Member]) -> bool:
        """Return True once a generation without the members that are gone has made a step."""
        last = self._records.segment.stepped[-1]
        return last.time > hit.time and not set(gone) & set(self._members.of(last.generation))

    # -- machines ------------------------------------------------------------------------------------------------------

    def _members_on(self, machine: str) -> list[Member]:
        return [member for member in self._members.roster.members if machine_of(member) == machine]

    def _host(self, hit: Hit, machine: str) -> Hit:
        victims = self._members_on(machine)
        hit.causes = dict.fromkeys(victims, "host")
        self._machines.signal(machine, signal.SIGKILL)
        return self._recovery.recover(hit, victims)

    def _freeze(self, hit: Hit, machine: str, seconds: float) -> Hit:
        machines = self._machines
        machines.signal(machine, signal.SIGSTOP, everything=True)
        machines.agenda.later(seconds, lambda: machines.signal(machine, signal.SIGCONT, everything=True))
        hit.victims, hit.note = tuple(self._members_on(machine)), f"for {seconds:.1f} s"
        hit.causes = dict.fromkeys(hit.victims, "hung")
        return self._recovery.recover(hit, [], until=hit.time + seconds, excused=frozenset(hit.victims))

    def _clock(self, hit: Hit, machine: str, hours: float) -> Hit:
        faults.set_clock(self._machines.run_dir / "chaos", machine, 3600 * hours)
        hit.note = f"{machine} {hours:+.1f} h"
        return self._recovery.recover(hit, [], until=hit.time)

    # -- store and network ---------------------------------------------------------------------------------------------

    def _store(self, hit: Hit, name: Member) -> Hit:
        """Lose the store. No generation can follow: all members write their state to disk and end; the run restarts."""
        machines, records = self._machines, self._records
        before = records.step
        self._say("      the store is lost")
        machines.replaces = False
        machines.store.lose()
        self._recovery.wait(0.2)
        self._members.signal(name, signal.SIGKILL)
        if not machines.until_ended(self._recovery.hang_seconds):
            raise Hung("the run did not stop after the loss of the store and a member")
        machines.replaces = True
        steps = len(records.step_times)
        machines.begin()
        self._recovery.until(lambda: len(records.step_times) > steps, "a step after its new start", READY_SECONDS)
        self.store_losses += 1
        hit.victims = (name,)
        hit.recovered = records.step_times[-1] - hit.time
        first = records.segment.first
        hit.note = f"began again at step {first}, {before - first} step(s) back"
        return hit

    def _store_server(self, hit: Hit, name: Member, fault: ScheduledFault) -> Hit:
        """Kill one of three etcd servers and a member: the others elect a leader; the member is replaced as usual."""
        self._recovery.until(lambda: self._machines.store.is_whole, "a whole store", READY_SECONDS)
        number = int(fault.whom[2] * 3) % 3
        hit.time = time.time()
        self._machines.lose_store_server(number, fault.lasts)
        self._members.signal(name, signal.SIGKILL)
        hit.note = f"server {number} for {fault.lasts:.1f} s"
        return self._recovery.recover(hit, [name])

    def _network(self, hit: Hit, fault: ScheduledFault, names: list[Member]) -> Hit | None:
        network = self._machines.network
        away = machine_of(names[0])
        peers = [name for name in self._machines.by_name if name != away]
        if not peers:
            return None
        peer = machine_of(names[-1])
        peer = peer if peer != away else peers[int(fault.whom[2] * len(peers)) % len(peers)]
        delay = None
        if fault.kind == "cut":
            ways = {way for name in (*peers, STORE_HOST) for way in ((away, name), (name, away))}
        elif fault.kind == "store-cut":
            ways = {(away, STORE_HOST), (STORE_HOST, away)}
        elif fault.kind == "half-open":
            ways = {(away, peer)}
        else:
            ways, delay = {(away, peer), (peer, away)}, fault.size
        victims = frozenset(self._members_on(away))
        hit.causes = dict.fromkeys(self._members_on(away), "network")
        network.disturb(ways, delay)
        hit.time = time.time()
        healed: list[float] = []

        def heal() -> None:
            healed.append(time.time())
            network.heal(ways)

        self._machines.agenda.later(fault.lasts, heal)
        sign, whom = ("|" if delay is None else "~"), (peer if len(ways) <= 2 else "all")
        hit.note = f"{away} {sign} {whom} for {fault.lasts:.1f} s"
        if fault.kind in ("cut", "half-open"):
            recovered_hit = self._recovery.recover(hit, [], until=hit.time + fault.lasts, excused=victims)
        else:
            recovered_hit = self._recovery.recover(hit, [], until=hit.time)
        self._recovery.until(lambda: bool(healed), "the end of a disturbance", 30.0)
        if fault.kind == "cut":
            self._records.segment.partitions.append(NetworkPartition(hit.time, healed[0], victims))
        return recovered_hit
