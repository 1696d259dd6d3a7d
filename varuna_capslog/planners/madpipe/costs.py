"""MadPipe's model of the costs: a chain of layers, with seconds and bytes of one microbatch (Sec. 3 and 4.2.1)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.planners.seconds import Link
from varuna_capslog.profiles.record import Profile

__all__ = ["ChainCosts"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ChainCosts:
    """Costs of a chain of L layers, and the devices that it is planned for.

    forward, backward: [L] seconds of one microbatch.
    static: [L] bytes that a layer always holds: the paper's 3 W under two versions of the weights (2BW), else
        parameters, gradients and moments.
    saved: [L] bytes that each microbatch in flight holds; the paper's a_{i-1}.
    crossing: [L + 1] bytes that cross the cut before each layer in one direction, 0 at both ends; the paper's a_l.
    transfer: [L + 1] seconds of one such message.
    usable: bytes that every device may hold; None: no limit.
    shared: both directions between two devices share one link, as in the paper; it is then busy for C = 2 a / beta.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    static: tuple[float, ...]
    saved: tuple[float, ...]
    crossing: tuple[float, ...]
    transfer: tuple[float, ...]
    devices: int
    usable: float | None = None
    shared: bool = False

    @classmethod
    def of_profile(
        cls,
        profile: Profile,
        devices: int,
        usable: int | None = None,
        link: Link | None = None,
        two_versions: bool = False,
    ) -> ChainCosts:
        """Return the costs of a profile.

        two_versions: count two versions of the weights and a gradient, as under 2BW: three times the parameters.

        Raises CapslogError naming the first layer that lacks a number: its seconds; the bytes that it holds, where
        devices have a limit; the bytes across the cut behind it, where devices have a limit or the link takes time.
        """
        link = link or Link()
        limited, timed = usable is not None, link.seconds(1) != link.seconds(0)
        forward, backward = profile.column("forward_seconds"), profile.column("backward_seconds")
        held = profile.column("parameter_bytes" if two_versions else "static_bytes") if limited else []
        saved = profile.column("saved_bytes") if limited else []
        layers, crossing = profile.num_layers, [0] * (profile.num_layers + 1)
        if (limited or timed) and layers > 1 and devices > 1:
            crossing[1:layers] = profile.column("boundary_bytes")[:-1]
        return cls(
            tuple(forward),
            tuple(backward),
            tuple(3.0 * size if two_versions else float(size) for size in held or [0] * layers),
            tuple(float(size) for size in saved or [0] * layers),
            tuple(float(size) for size in crossing),
            (0.0, *(link.seconds(size) for size in crossing[1:layers]), 0.0),
            devices,
            usable,
            link.shared,
        )

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.forward)

    def merged(self, most: int) -> tuple[ChainCosts, list[int]]:
        """Merge neighbouring layers until at most `most` remain.

        Return the new chain, and the first layer of each of its layers, followed by L. Each step merges the two
        neighbours with the fewest seconds together.
        """
        bounds, seconds = list(range(self.num_layers + 1)), self.sums["seconds"]
        while len(bounds) - 1 > most:
            both = [float(seconds[bounds[at + 2]] - seconds[bounds[at]]) for at in range(len(bounds) - 2)]
            del bounds[both.index(min(both)) + 1]

        def together(row: Sequence[float]) -> tuple[float, ...]:
            return tuple(sum(row[first:end]) for first, end in itertools.pairwise(bounds))

        chain = dataclasses.replace(
            self,
            forward=together(self.forward),
            backward=together(self.backward),
            static=together(self.static),
            saved=together(self.saved),
            crossing=tuple(self.crossing[cut] for cut in bounds),
            transfer=tuple(self.transfer[cut] for cut in bounds),
        )
        return chain, bounds

    @cached_property
    def sums(self) -> dict[str, Floats]:
        """Running sums [L + 1] of seconds (forward and backward), static and saved, by name."""
        seconds = [forward + backward for forward, backward in zip(self.forward, self.backward, strict=True)]
        rows: dict[str, Sequence[float]] = {"seconds": seconds, "static": self.static, "saved": self.saved}
        return {name: np.concatenate([[0.0], np.cumsum(row)]) for name, row in rows.items()}

    def of(self, name: str, first: int, end: int) -> float:
        """Return the sum of seconds, static or saved over the layers first .. end-1."""
        return float(self.sums[name][end] - self.sums[name][first])

    def delay(self, cut: int) -> float:
        """Return the paper's C: seconds of an activation and its gradient over the cut before layer `cut`."""
        return 2.0 * self.transfer[cut]

    def link_load(self, cut: int) -> float:
        """Return the seconds for which a link is busy with one microbatch that crosses this cut."""
        return self.delay(cut) if self.shared else self.transfer[cut]

    def memory(self, first: int, end: int, in_flight: int) -> float:
        """Return M(k, l, g): bytes of a stage, with two buffers for each message over its cuts."""
        buffers = 2.0 * (self.crossing[first] + self.crossing[end])
        return self.of("static", first, end) + in_flight * self.of("saved", first, end) + buffers
