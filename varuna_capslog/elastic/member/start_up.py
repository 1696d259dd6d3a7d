"""Start-up and failure of a member's process, whatever it trains, and the boundary at which its run begins.

A member reads its settings from environment variables set by the host, and from three keys of the store. A resumed run
counts its generations from 1 in the store; in the run's files the numbers continue (`Beginning.first`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.failures import StopWish, leave, report_failure
from varuna_capslog.base.secret import Secret, run_secret
from varuna_capslog.elastic.network import address_towards
from varuna_capslog.elastic.store.opening import MembershipStore, open_store
from varuna_capslog.membership.changes import Phase, State
from varuna_capslog.membership.entries import Roster
from varuna_capslog.membership.generation import INITIAL, Member, Stamp

__all__ = [
    "Beginning",
    "MemberStart",
    "RuntimeOptions",
    "Timeouts",
    "WaitingTime",
    "enter",
    "fail",
    "local_rank",
    "report_failures",
]


# -- Time limits for a member's waits for the others, and the clock that runs against them.
#
# The protocol has no clock; `Runtime._limit_passed` feeds it an event when a limit has passed.


@dataclass(frozen=True)
class Timeouts:
    """Seconds that a member waits.

    Attributes:
        peer: for any message of the data path, and for layers.
        change: until a member founds a generation without knowing who is lost; retry: between further attempts.
        gather: for the others' values in the first round; at least three steps, since no member interrupts its step.
    """

    peer: float = 30.0
    change: float = 1.0
    retry: float = 0.3
    gather: float = 5.0

    @property
    def holders(self) -> float:
        """Limit for members to come whose layers otherwise only the checkpoint has: three times `change`."""
        return 3 * self.change

    def without_events(self, usual_seconds: float) -> float:
        """Limit for work during which a member reads no events. usual_seconds: of its steps; 0: not known."""
        return max(self.gather, 3 * usual_seconds) if usual_seconds else self.peer


class WaitingTime:
    """Wait of one member for the next event. All times are `time.monotonic`'s."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._since = time.monotonic()
        self._ended = 0.0
        self._lacks_since = 0.0  # since when settled layers are missing, over all generations since then

    def restart(self, state: State) -> None:
        """Restart the wait: the phase or the generation has changed."""
        self._since, self._ended = time.monotonic(), 0.0
        if state.phase is Phase.RUN:
            self._lacks_since = 0.0
        elif state.phase is Phase.WAIT and state.regress:
            self._lacks_since = self._lacks_since or self._since

    def limit_passed(self) -> None:
        """Record that the limit has passed and was handled."""
        self._ended = time.monotonic()

    def ends(self, state: State, usual_seconds: float, computed_at: float, roster: Roster) -> float:
        """Return the time at which the present limit passes if nothing happens.

        In WAIT with `regress` the run waits for former members that may hold the missing settled layers. If none can
        come back, the limit has passed at once; new members do not prolong it. usual_seconds: of a step; 0 before the
        first one; computed_at: when this member's last computation ended.
        """
        limits, since = self._timeouts, self._since
        first = retry = limits.retry
        match state.phase:
            case Phase.CHANGE:
                first = limits.change
            case Phase.WAIT if state.regress:
                first = retry = limits.holders if roster.astray else 0.0
                since = self._lacks_since
            case Phase.WAIT:
                first = retry = limits.holders
            case Phase.GATHER:
                first = retry = min(limits.peer, max(limits.gather, 3 * usual_seconds))
            case Phase.INSTALL:
                first = limits.peer
            case Phase.RUN:
                first, since = limits.peer, max(since, computed_at)
        return since + first if self._ended <= since else self._ended + retry


# -- Start-up and failure of a member's process


_WAIT_SECONDS = 10.0


@dataclass(frozen=True)
class Beginning:
    """First generation and boundary of a run, which the host that begins it writes and every member reads.

    first: number of the store's generation 1 in the run's files. step: of the boundary. path: of its checkpoint;
    None at the beginning of training.
    """

    first: int = 1
    step: int = 0
    path: Path | None = None

    @property
    def stamp(self) -> Stamp:
        """Boundary, as generation 1 knows it."""
        return Stamp(self.step, 0)

    def keys(self) -> dict[str, str]:
        """Keys and values that the store must hold before the first worker reads them."""
        return {
            "first-plan": str(self.first),
            "resumed-step": str(self.step),
            "resumed-path": "" if self.path is None else str(self.path.absolute()),
        }

    @classmethod
    def read(cls, store: MembershipStore) -> Beginning:
        """Read the values of `keys`. Raises CapslogError where they do not come within ten seconds."""

        values = []
        for key, name in (("first-plan", "plan"), ("resumed-step", "boundary"), ("resumed-path", "checkpoint")):
            value = store.get(key, _WAIT_SECONDS)
            if value is None:
                raise CapslogError(
                    f"the store does not say which {name} the run begins with: the host that began the run has not "
                    "come so far; start anew"
                )
            values.append(value)
        first, step, path = values
        return cls(int(first), int(step), Path(path) if path else None)


@dataclass(frozen=True)
class MemberStart:
    """Identity of a member and facts about its run, whatever it trains.

    Attributes:
        me: its name, never used before. offset: generation n of the store is n + offset in the run's files.
        checkpoint: the boundary that the run begins with. resumed: path of the checkpoint by that boundary; empty at
            the beginning of training.
        stop_wished: called once per step, and while the run waits and has no vote; True on any member ends the run
            after that step.
        host: its loss is a loss of this member, too. address: of this host, as the others reach it.
        secret: of the run; default: a new one that no other member knows.
    """

    me: Member
    run_dir: Path
    offset: int = 0
    resumed: Mapping[Stamp, Path] = field(default_factory=dict)
    stop_wished: Callable[[], bool] = lambda: False
    checkpoint: Stamp = INITIAL
    host: str = "host"
    address: str = "127.0.0.1"
    secret: Secret = field(default_factory=Secret.new)


@dataclass(frozen=True)
class RuntimeOptions:
    """Options of a member's part in a run. capacity: bytes of its device; 0: no limit. sync, shadows: see
    `changes.Job`. probe: called at named points, for faults injected by tests.
    """

    capacity: int = 0
    sync: bool = True
    shadows: bool = True
    timeouts: Timeouts = field(default_factory=Timeouts)
    probe: Callable[[str], None] = lambda point: None


def enter(
    run_dir: Path,
    stop_wished: Callable[[], bool],
    opener: Callable[[str, Secret, str | None], MembershipStore] = open_store,
) -> tuple[MemberStart, MembershipStore]:
    """Open the store and read where the run begins. Raises StoreGone where the store does not answer; CapslogError
    where it does not say where the run begins, or the run's secret cannot be used.
    """
    place, secret = os.environ["CAPSLOG_STORE"], run_secret(run_dir)
    store = opener(place, secret, os.environ.get("CAPSLOG_STORE_IDENTITY"))
    beginning = Beginning.read(store)
    start = MemberStart(
        os.environ["CAPSLOG_MEMBER"],
        run_dir,
        beginning.first - 1,
        {} if beginning.path is None else {beginning.stamp: beginning.path},
        stop_wished,
        beginning.stamp,
        os.environ.get("CAPSLOG_HOST", "host"),
        os.environ.get("CAPSLOG_ADDRESS") or address_towards(place) or "127.0.0.1",
        secret,
    )
    return start, store


def report_failures(run_dir: Path, part: Callable[[StopWish], int]) -> int:
    """Run a member's whole part; a failure goes into `workers/<member>.error.json`. Returns the exit status."""
    me, wish = os.environ["CAPSLOG_MEMBER"], StopWish()
    try:
        return part(wish)
    except Exception as error:
        return _report(run_dir, me, error)


def fail(start: MemberStart, error: Exception) -> NoReturn:
    """Report the failure and end this process, from any thread."""
    leave(_report(start.run_dir, start.me, error))


def _report(run_dir: Path, me: Member, error: Exception) -> int:
    where = {"rank": -1, "member": me, "stage": None, "step": None, "microbatch": None, "peer": None}
    return report_failure(run_dir, me, me, error, where)


def local_rank() -> int:
    """Number of this member's device on its host."""
    return int(os.environ.get("CAPSLOG_LOCAL_RANK", "0"))
