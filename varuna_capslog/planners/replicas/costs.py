"""Inputs and results of the planners that replicate stages. The layers of a model are a graph, and the devices are
alike. A stage of r replicas divides the microbatches of a step among r devices. All stages keep their activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.seconds import Link
from varuna_capslog.profiles.record import Profile

__all__ = ["GraphCosts", "ReplicatedStage", "check_tensors", "rows_side_by_side"]

Floats = NDArray[np.float64]
Amount = TypeVar("Amount", float, Floats)


@dataclass(frozen=True)
class ReplicatedStage:
    """A stage: its layers in rising order, and the number of its replicas.

    devices: of each layer, counted from 0 in the stage, where devices share a stage without replicas; (): one device.
    """

    layers: tuple[int, ...]
    replicas: int = 1
    devices: tuple[int, ...] = ()

    @property
    def pieces(self) -> list[tuple[int, tuple[int, int]]]:
        """Device and range (first, end) of each run of neighbouring layers on one device, in order."""
        pieces: list[tuple[int, tuple[int, int]]] = []
        for layer, device in zip(self.layers, self.devices, strict=True):
            if pieces and pieces[-1][0] == device:
                pieces[-1] = device, (pieces[-1][1][0], layer + 1)
            else:
                pieces.append((device, (layer, layer + 1)))
        return pieces


@dataclass(frozen=True)
class GraphCosts:
    """Costs of a model of L layers, and the number of devices. seconds: [L] forward and backward of one microbatch.
    static: [L] bytes of parameters, gradients and moments. saved: [L] bytes that each microbatch in flight holds.
    parameters: [L] bytes that replicas exchange. These bytes are 0 where they are not needed. cuts: [L + 1]
    bytes that cross the cut before each layer, in the forward direction; 0 at both ends. edges: (layer that writes,
    layer that reads, bytes), each pair once; the last layer stands for the loss. usable: bytes that each device may
    hold; None: no limit. blocks: accumulation blocks that the step must have; None: the plan chooses. isolated,
    added: [L] bytes, M_i and M_a of CAPSlog; empty where they are not needed. rows: ranges (first, end) of layers side
    by side (`rows_side_by_side`), which the devices of a stage may share.
    """

    seconds: tuple[float, ...]
    static: tuple[int, ...]
    saved: tuple[int, ...]
    parameters: tuple[int, ...]
    cuts: tuple[int, ...]
    edges: tuple[tuple[int, int, int], ...]
    devices: int
    microbatches: int
    usable: int | None = None
    blocks: int | None = None
    link: Link = field(default_factory=Link)
    isolated: tuple[int, ...] = ()
    added: tuple[int | None, ...] = ()
    rows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_profile(
        cls,
        profile: Profile,
        devices: int,
        microbatches: int,
        usable: int | None = None,
        blocks: int | None = None,
        link: Link | None = None,
        peaks: bool = False,
    ) -> GraphCosts:
        """Return the costs of a profile. Raises CapslogError naming the first layer that lacks a number: its seconds;
        its bytes, where devices have a limit or `peaks` are compared; its messages' bytes, if the link has a bandwidth.
        """
        link = link or Link()
        timed = link.seconds(1) != link.seconds(0)

        def column(name: str, needed: bool) -> tuple[int, ...]:
            values = profile.column(name) if needed else [getattr(layer, name) or 0 for layer in profile.layers]
            return tuple(values)

        pairs = zip(profile.column("forward_seconds"), profile.column("backward_seconds"), strict=True)
        last = profile.num_layers - 1
        sizes = dict.fromkeys(profile.edges, 0)
        for tensor in profile.tensors:
            for reader in tensor.readers:
                if tensor.writer is not None and tensor.writer < min(reader, last):
                    sizes[tensor.writer, min(reader, last)] += tensor.bytes
        return cls(
            tuple(forward + backward for forward, backward in pairs),
            column("static_bytes", usable is not None),
            column("saved_bytes", usable is not None or peaks),
            column("parameter_bytes", timed or peaks),
            (0, *column("boundary_bytes", timed and devices > 1 and last > 0)[:-1], 0),
            tuple((writer, reader, size) for (writer, reader), size in sizes.items()),
            devices,
            microbatches,
            usable,
            blocks,
            link,
            tuple(profile.column("isolated_bytes")) if peaks else (),
            tuple(profile.column("added_bytes")) if peaks else (),
            rows_side_by_side(profile) if peaks else (),
        )

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.seconds)

    @property
    def most_replicas(self) -> int:
        """Most replicas of a stage: each takes at least one accumulation block."""
        return min(self.devices, self.blocks or self.microbatches)

    def share(self, replicas: int) -> float:
        """Return the fraction of a step's microbatches that the busiest of `replicas` replicas takes."""
        blocks = self.blocks or self.microbatches
        return -(-blocks // replicas) / blocks

    def exchange_seconds(self, parameter_bytes: Amount, replicas: int) -> Amount:
        """Return the seconds per microbatch that the gradient exchange at the end of a step adds, elementwise for an
        array. Each replica sends its gradients to all others, as in `planning/simulation`.
        """
        wire = parameter_bytes / (self.link.bandwidth or float("inf")) + self.link.latency_seconds
        return (replicas - 1) * wire / self.microbatches

    def holds(self, static: float, saved: float, in_flight: int) -> bool:
        """Return True where a device can hold a stage with `in_flight` microbatches in flight."""
        return self.usable is None or static + in_flight * saved <= self.usable

    @cached_property
    def sums(self) -> dict[str, Floats]:
        """Running sums [L + 1] of seconds, static, saved and parameters, by name."""
        names = ("seconds", "static", "saved", "parameters")
        return {name: np.concatenate([[0.0], np.cumsum(np.asarray(getattr(self, name), float))]) for name in names}

    def total(self, name: str, layers: Iterable[int]) -> float:
        """Return the sum of seconds, static, saved or parameters over `layers`."""
        column: Sequence[float] = getattr(self, name)
        return sum(column[layer] for layer in layers)


def rows_side_by_side(profile: Profile) -> tuple[tuple[int, int], ...]:
    """Return the ranges (first, end) of two or more neighbouring layers that read the same tensors and are read by the
    same layers, such as the parts of a layer that `splits` divides; () where the profile has no tensors.
    """
    reads, readers = [set[int]() for _ in profile.layers], [set[int]() for _ in profile.layers]
    for number, tensor in enumerate(profile.tensors):
        for reader in tensor.readers:
            if reader < profile.num_layers:
                reads[reader].add(number)
        if tensor.writer is not None:
            readers[tensor.writer].update(tensor.readers)
    rows, first = [], 0
    for layer in range(1, profile.num_layers + 1):
        alike = layer < profile.num_layers and (reads[layer], readers[layer]) == (reads[first], readers[first])
        if not alike:
            if layer > first + 1 and readers[first]:
                rows.append((first, layer))
            first = layer
    return tuple(rows)


def check_tensors(profile: Profile, planner: str) -> None:
    """Raise CapslogError for a profile without the graph of the layers."""
    if not profile.tensors:
        raise CapslogError(
            f"the profile has no tensors, by which planner {planner!r} knows which layers read from which; profile "
            "again, as capslog profile writes them, or choose planner pipedream"
        )
