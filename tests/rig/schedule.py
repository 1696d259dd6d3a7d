"""Draws the faults of a chaos run and their times, as a pure function of the seed.

A fault is drawn before its victims are known: it has the kind of fault, and numbers in 0..1 that the run maps to
members that exist at that moment.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError

__all__ = ["KINDS", "NETWORK", "POINTS", "STORE", "ScheduledFault", "schedule", "weights_of"]

KINDS: Mapping[str, float] = {
    "kill": 6.0,
    "stop": 2.0,
    "pause": 3.0,
    "notice": 5.0,
    "urgent": 2.0,
    "bulk": 2.0,
    "double": 4.0,
    "notice-kill": 3.0,
    "join-kill": 3.0,
    "before-apply": 3.0,
    "in-apply": 3.0,
    "in-step": 2.0,
    "in-change": 5.0,
    "in-leave": 4.0,
    "host": 1.0,
    "freeze": 1.0,
    "error": 1.0,
    "device": 1.0,
    "memory": 1.0,
    "slow": 1.0,
    "clock": 1.0,
}
"""Fault classes and their usual shares.

kill: SIGKILL of a worker. stop: SIGSTOP, for good. pause: SIGSTOP, SIGCONT after up to 3 s. notice, urgent: a worker is
to leave. bulk: 2 or 3 killed at once. double: another one is killed up to 0.2 s after the first. notice-kill: a worker
is killed up to 0.2 s after another one's notice. join-kill: a worker is killed up to 0.2 s after a newcomer has asked.
before-apply: killed or stopped between the vote and the step's becoming state. in-apply: inside that. in-step: while it
computes or votes. in-change: killed or stopped at a point of the change that the loss of another one brought about.
in-leave: the same for another one's notice. error, device: a worker ends by an error of its program or of its device
while it applies a step. memory: for want of memory before it computes one (where it lacks while a step is computed or
applied, that step is made again). host: a host's supervisor and with it all its workers are killed. freeze: all
processes of a host stand still for up to 6 s. slow: the work of a worker takes five times as long for up to 5 s, to
which a run with `elastic.rebalance` answers with other cuts. clock: the time of day of a host jumps
by up to twelve hours, forwards or backwards, and stays so.
"""

NETWORK: Mapping[str, float] = {"cut": 2.0, "half-open": 2.0, "delay": 2.0, "store-cut": 1.0}
"""The same for those that need a network that can be disturbed.

cut: a host hears nobody and is heard by nobody for up to 8 s, the store included. half-open: the same in one direction
between two hosts. delay: everything between two hosts takes up to 0.2 s longer, for up to 3 s. store-cut: a host hears
the other hosts but not the store.
"""

STORE = "store"
"""The store is lost for good: the run stops safely, and is started again. Counted apart."""

POINTS: Mapping[str, tuple[str, ...]] = {
    "before-apply": ("voted", "apply"),
    "in-apply": ("applying",),
    "in-step": ("compute", "computed", "vote"),
    "in-change": ("abort", "founding", "founded", "adopted", "gathered", "send", "received", "install", "installed"),
    "in-leave": ("prepare", "shadow sent", "prepared", "abort", "adopted", "gathered", "install", "installed"),
}
"""Points of a member's life (`Runtime`'s) at which the classes of this name strike."""


_LONGEST = {"freeze": 6.0, "slow": 5.0, "cut": 8.0, "half-open": 8.0, "store-cut": 8.0}
"""Seconds until a fault of these classes is taken back, at most; of others 3."""


@dataclass(frozen=True)
class ScheduledFault:
    """A fault that will be injected.

    Attributes:
        after: seconds between the recovery from the previous fault and this one.
        whom: numbers in 0..1 that choose the victims, as many as a fault may hit; see `pick`.
        count: number of victims, in classes where it varies.
        delay: seconds from the first fault to the second, in classes that have two.
        lasts: seconds until the fault is taken back, in classes whose faults are.
        size: seconds by which the network is slower.
        point: point of a member's life, in classes that have points.
        stops: by SIGSTOP instead of SIGKILL.
        rejoin: seconds until a lost worker is replaced.
    """

    number: int
    kind: str
    after: float
    whom: tuple[float, ...]
    count: int
    delay: float
    lasts: float
    size: float
    point: str
    stops: bool
    rejoin: float

    def pick(self, candidates: int, count: int) -> list[int]:
        """Choose the indices of `count` different candidates; of all candidates where there are fewer."""
        remaining = list(range(candidates))
        picked = []
        for share in self.whom[: min(count, candidates)]:
            picked.append(remaining.pop(min(int(share * len(remaining)), len(remaining) - 1)))
        return picked


def weights_of(text: str | None, network: bool) -> dict[str, float]:
    """Parse the shares of the fault classes to draw from: all, or those of `kill=3,notice` (default share: 1)."""
    weights = {**KINDS, **(NETWORK if network else {}), STORE: 0.0}
    if text is None:
        return weights
    chosen: dict[str, float] = {}
    for part in text.split(","):
        kind, _, share = part.strip().partition("=")
        if kind in NETWORK and not network:
            raise CapslogError(f"fault class {kind!r} needs the network disturbed; give --network relay")
        fields.choice(kind, "fault class", tuple(weights))
        try:
            chosen[kind] = float(share) if share else 1.0
        except ValueError:
            raise CapslogError(f"the share of fault class {kind!r} is {share!r}; give a number") from None
        if not 0.0 <= chosen[kind] < math.inf:
            raise CapslogError(f"the share of fault class {kind!r} is {share}; give a number, 0 or more")
    if not any(chosen.values()):
        raise CapslogError("all fault classes have share 0; give one of them more")
    return chosen


def schedule(seed: int, weights: Mapping[str, float], mean_seconds: float) -> Iterator[ScheduledFault]:
    """Faults without end, the same for the same arguments.

    Args:
        mean_seconds: of the exponentially distributed times between a recovery and the next fault.
    """
    if not 0.0 <= mean_seconds < math.inf:
        raise CapslogError(f"a mean of {mean_seconds} s between faults; give 0 or more")
    draw = random.Random(seed)
    kinds = sorted(kind for kind, share in weights.items() if share > 0.0)
    shares = [weights[kind] for kind in kinds]
    number = 0
    while True:
        kind = draw.choices(kinds, shares)[0]
        points = POINTS.get(kind, ("",))
        lasts = _LONGEST.get(kind, 3.0)
        yield ScheduledFault(
            number=number,
            kind=kind,
            after=draw.expovariate(1.0 / mean_seconds) if mean_seconds else 0.0,
            whom=tuple(draw.random() for _ in range(4)),
            count=draw.choice((2, 3)) if kind == "bulk" else 1,
            delay=draw.uniform(0.0, 0.2),
            lasts=draw.uniform(0.05, lasts),
            size=draw.uniform(0.02, 0.2),
            point=draw.choice(points),
            stops=draw.random() < 0.25,
            rejoin=draw.expovariate(1.0 / 0.5),
        )
        number += 1
