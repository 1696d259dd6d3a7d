"""Model of the links between machines: delay, bandwidth, queues, random loss and cuts.

It has no I/O and no clock of its own, so that tests can ask it about any moment; `shaper` moves the packets. Every
machine sends over its own line: packets leave it one after the other at the bandwidth, then all travel the same time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from tests.rig.relay import Way
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import parse_rate, parse_seconds

__all__ = ["Counts", "LinkShape", "Links"]

_QUEUE_SECONDS = 0.2
"""A packet that would have to wait longer for the line is dropped, as by a router whose buffer is full."""


@dataclass(frozen=True)
class LinkShape:
    """Delay, loss and bandwidth of every way between two machines.

    Attributes:
        delay_seconds: from one end to the other, so a round trip takes twice as long.
        loss: share of packets that never arrive, from 0 to below 1.
        bytes_per_second: bandwidth of a machine, to all others together; 0: no limit.

    Raises:
        CapslogError: a value is out of its range.
    """

    delay_seconds: float = 0.0
    loss: float = 0.0
    bytes_per_second: int = 0

    def __post_init__(self) -> None:
        if self.delay_seconds < 0 or self.bytes_per_second < 0:
            raise CapslogError(f"{self}: delay and bandwidth must not be negative")
        if not 0 <= self.loss < 1:
            raise CapslogError(f"loss is {self.loss:g}; it is a share of the packets, so give 0% to 99%, such as 0.5%")

    @classmethod
    def parse(cls, delay: str | None, loss: str | None, bandwidth: str | None) -> LinkShape:
        """From words such as 20ms, 0.5% and 100Mbit; None: as if there were no such limit."""
        share = 0.0
        if loss is not None:
            try:
                share = float(loss.removesuffix("%")) / (100 if loss.endswith("%") else 1)
            except ValueError:
                raise CapslogError(f"loss is {loss!r}; write a share of the packets such as 0.5% or 0.005") from None
        return cls(
            0.0 if delay is None else parse_seconds(delay, "delay"),
            share,
            0 if bandwidth is None else parse_rate(bandwidth, "bandwidth"),
        )


@dataclass
class Counts:
    """Numbers of packets so far: carried (and their bytes), lost by chance, dropped from a full queue, and dropped on a
    way that was cut."""

    carried: int = 0
    carried_bytes: int = 0
    lost: int = 0
    dropped: int = 0
    cut: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)


class Links:
    """All lines of a network.

    Args:
        seed: of the losses.
    """

    def __init__(self, shape: LinkShape, seed: int = 0) -> None:
        self.shape, self.counts = shape, Counts()
        self._dice = random.Random(seed)
        self._free_at: dict[str, float] = {}
        self._cut: set[Way] = set()
        self._later: dict[Way, float] = {}
        self._under_way: list[tuple[float, int, str, bytes]] = []
        self._number = itertools.count()

    def disturb(self, ways: Iterable[Way], delay: float | None = None) -> None:
        """Cuts these ways (None), or makes all that takes them later by `delay` seconds more."""
        if delay is None:
            self._cut.update(ways)
        else:
            self._later.update(dict.fromkeys(ways, delay))

    def heal(self, ways: Iterable[Way]) -> None:
        """Takes back all disturbances of these ways."""
        for way in ways:
            self._cut.discard(way)
            self._later.pop(way, None)

    def send(self, now: float, source: str, target: str, packet: bytes) -> None:
        """A packet leaves a machine, at `now` seconds of any clock that never goes back."""
        shape, way = self.shape, (source, target)
        if way in self._cut:
            self.counts.cut += 1
            return
        leaves = now
        if shape.bytes_per_second:
            leaves = max(now, self._free_at.get(source, 0.0))
            if leaves - now > _QUEUE_SECONDS:
                self.counts.dropped += 1
                return
            leaves += len(packet) / shape.bytes_per_second
            self._free_at[source] = leaves
        if shape.loss and self._dice.random() < shape.loss:  # it has taken its time on the line
            self.counts.lost += 1
            return
        arrives = leaves + shape.delay_seconds + self._later.get(way, 0.0)
        heapq.heappush(self._under_way, (arrives, next(self._number), target, packet))

    def arrived(self, now: float) -> list[tuple[str, bytes]]:
        """Return (target, packet) of all packets that have arrived by `now`, in their order."""
        arrivals = []
        while self._under_way and self._under_way[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._under_way)
            self.counts.carried += 1
            self.counts.carried_bytes += len(packet)
            arrivals.append((target, packet))
        return arrivals

    def next_arrival(self) -> float | None:
        """When the next packet comes through; None where none is under way."""
        return self._under_way[0][0] if self._under_way else None
