"""Seconds of any stage of a profile, and step times of many cut lists at once, as `schedules.simulate` returns them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import (
    Message,
    Recv,
    RunShape,
    SendInstruction,
    StageGraph,
    graph_keeping_forwards,
    in_turn,
    lower,
    schedule_of,
)

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config

__all__ = ["LayerSeconds", "Link", "StepPlayer", "step_player"]

Floats = NDArray[np.float64]
Cuts = NDArray[np.intp]
_OfCuts = tuple[Floats, Floats, Floats, Floats, Floats]
_FEW = 4
"""Up to this number of lists, simulating each alone is faster than numpy operations on such short vectors."""


@dataclass(frozen=True)
class Link:
    """Link between two neighbouring stages: bytes per second (None: no limit) and seconds per message. There is a link
    per ordered pair of stages, as in `schedules.simulate`: messages of one direction go one after the other.

    copy_bandwidth: bytes per second at which the sending rank itself copies its message, during which it cannot compute
    (gloo: into host memory and the socket); it then also spends `latency_seconds`. None: sending costs the rank no
    time.
    node_devices: devices per node, for planner `capture`, which treats links within and between nodes alike; None: all.

    Only a simulated step (`planning/simulation`) uses the other fields. shared: both directions between two ranks share
    one link, on which messages go one after the other. host_bandwidth: bytes per second of the copies between a rank
    and its host tier; None: they take no time. copies_beside: such copies overlap with the computation, else they take
    their rank's time; None: they overlap unless the profile's device is a CPU.
    """

    bandwidth: float | None = None
    latency_seconds: float = 0.0
    copy_bandwidth: float | None = None
    shared: bool = False
    host_bandwidth: float | None = None
    copies_beside: bool | None = None
    node_devices: int | None = None

    def __post_init__(self) -> None:
        if self.bandwidth is not None and not 0 < self.bandwidth < float("inf"):
            raise CapslogError(f"bandwidth is {self.bandwidth}; give bytes per second above 0, or none for no limit")
        fields.seconds(self.latency_seconds, "latency_seconds")
        if self.copy_bandwidth is not None and not 0 < self.copy_bandwidth < float("inf"):
            raise CapslogError(f"copy_bandwidth is {self.copy_bandwidth}; give bytes per second above 0, or none")
        if self.host_bandwidth is not None and not 0 < self.host_bandwidth < float("inf"):
            raise CapslogError(f"host_bandwidth is {self.host_bandwidth}; give bytes per second above 0, or none")

    @classmethod
    def of_config(cls, config: Config) -> Link:
        """Return the link of a run's config."""
        pipeline = config.pipeline
        return cls(
            pipeline.bandwidth,
            pipeline.latency,
            host_bandwidth=pipeline.host_bandwidth,
            node_devices=pipeline.node_devices if pipeline.parallel is None else None,
        )

    def seconds(self, count: int) -> float:
        """Return the seconds of a message of `count` bytes."""
        return self.latency_seconds + (0.0 if self.bandwidth is None else count / self.bandwidth)

    def handover_seconds(self, count: int) -> float:
        """Return the seconds of the sending device for `count` bytes, during which it cannot compute."""
        return 0.0 if self.copy_bandwidth is None else self.latency_seconds + count / self.copy_bandwidth


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one microbatch on a device of speed 1, as running sums over the layers: [L + 1].

    forward, backward: entry k sums layers 0 .. k-1. Recomputation takes as long as the forward. inputs: the input half
    of `backward` where backwards are split (`LayerProfile.input_part`). transfer, handover: no sums; entry k: seconds
    of a message over the cut before layer k, and seconds for which its sender cannot compute; 0 at both ends.
    """

    forward: Floats
    backward: Floats
    inputs: Floats
    transfer: Floats
    handover: Floats

    @classmethod
    def of_profile(cls, profile: Profile, link: Link | None = None) -> LayerSeconds:
        """Make the sums; `link` None means transfers that take no time. Raises CapslogError naming the first layer that
        lacks its seconds, or boundary_bytes where a bandwidth needs it.
        """
        link = link or Link()
        transfer, handover = np.zeros((2, profile.num_layers + 1))
        sizes_matter = (link.seconds(1), link.handover_seconds(1)) != (link.seconds(0), link.handover_seconds(0))
        for cut in range(1, profile.num_layers):
            size = profile.layers[cut - 1].boundary_bytes
            if size is None and sizes_matter:
                profile.column("boundary_bytes")  # names the layer
            transfer[cut], handover[cut] = link.seconds(size or 0), link.handover_seconds(size or 0)
        forward, backward = (_running(profile.column(f"{name}_seconds")) for name in ("forward", "backward"))
        return cls(forward, backward, _running([layer.input_part for layer in profile.layers]), transfer, handover)

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return len(self.forward) - 1

    def of_ranges(self) -> tuple[Floats, Floats]:
        """Return [L, L + 1]: the forward of layers first .. end-1, and their forward and backward together."""
        forward = self.forward[None, :] - self.forward[:-1, None]
        return forward, forward + self.backward[None, :] - self.backward[:-1, None]

    def of_ways(self, run: RunShape) -> tuple[Floats, Floats, int]:
        """Return three values for stages of layers first .. end-1: [L, L + 1] seconds that a stage adds to a
        microbatch's round trip to the loss; [L, L + 1] seconds that it adds at least to the step of the stages behind
        it; and the number of transfers that it adds to this step. Where backwards are split, the way back consists of
        input halves, and a stage may end before the stages behind it.
        """
        forward, both = self.of_ranges()
        if not run.splits_backwards:
            return both, both, 2
        return forward + self.inputs[None, :] - self.inputs[:-1, None], forward, 1

    def of_cuts(self, cuts: Cuts, speeds: Sequence[float] | None = None) -> _OfCuts:
        """Return forward, backward and its input half [K, S], transfer and handover seconds [K, S - 1] of K cut lists
        [K, S]. speeds: of the device of each stage; its seconds are those of speed 1 divided by it.
        """
        ends = np.concatenate([cuts[:, 1:], np.full((len(cuts), 1), self.num_layers)], axis=1)
        scale = 1.0 if speeds is None else np.asarray(speeds, dtype=np.float64)
        sums = (self.forward, self.backward, self.inputs)
        forward, backward, inputs = ((running[ends] - running[cuts]) / scale for running in sums)
        return forward, backward, inputs, self.transfer[cuts[:, 1:]], self.handover[cuts[:, 1:]]


class StepPlayer:
    """Simulates one step of a schedule for many lists of stage seconds at once. The order in which `schedules.simulate`
    processes a schedule does not depend on the seconds, so it is computed once, and each of its steps is one numpy
    operation on a vector with one entry per cut list.
    """

    def __init__(self, run: RunShape, stages: int, keeps: bool = False) -> None:
        """Lower the schedule. keeps: nothing recomputes, even under a schedule that otherwise always does."""
        microbatches = run.microbatches
        graph, again = StageGraph.line(stages, microbatches), [run.recomputes and not keeps] * stages
        actions = schedule_of(run.schedule, graph, again, k=run.k)
        self.stages, self.microbatches = stages, microbatches
        # Nothing reads the outputs of the last stage before their recomputation, so the engine skips this forward.
        keeping = graph_keeping_forwards(actions)
        left_out = {
            action for action in actions[-1] if action.kind == "F" and (stages - 1, action.microbatch) not in keeping
        }
        self.forwards = [sum(action.kind in "FR" and action not in left_out for action in row) for row in actions]
        """For each stage, the number of forwards that it runs, recomputations included."""
        self._order: list[tuple[str, int, int, int]] = []
        numbers: dict[Message, int] = {}
        for rank, instruction in in_turn(lower(actions)):
            if isinstance(instruction, Recv):
                self._order.append(("recv", rank, numbers[instruction.message], 0))
            elif isinstance(instruction, SendInstruction):
                number = numbers[instruction.message] = len(numbers)
                self._order.append(("send", rank, number, instruction.peer))
            elif instruction not in left_out:
                self._order.append((instruction.kind, rank, 0, 0))
        self._num_messages = len(numbers)

    def step_seconds(
        self, forward: Floats, backward: Floats, inputs: Floats, transfer: Floats, handover: Floats
    ) -> Floats:
        """Return the step seconds [K] of K lists of stage seconds, in the shapes of `LayerSeconds.of_cuts`. O(stages x
        microbatches) numpy operations on K numbers each.
        """
        count = len(forward)
        if count <= _FEW:
            parts = forward, backward, inputs, transfer, handover
            rows = ([part[number : number + 1] for part in parts] for number in range(count))
            return np.array([self.seconds_of_one(row) for row in rows])
        # lists of rows, since indexing a row of an array takes longer than most of the operations here
        kinds = {"F": forward, "R": forward, "B": backward, "I": inputs, "W": backward - inputs}
        of_kind = {kind: list(np.ascontiguousarray(part.T)) for kind, part in kinds.items()}
        transfers, handovers = list(np.ascontiguousarray(transfer.T)), list(np.ascontiguousarray(handover.T))
        costs_sender = bool(handover.any())
        clock = list(np.zeros((self.stages, count)))
        # time at which the link to the next (0) and the previous stage (1) is free: the last arrival on it
        links = [list(np.zeros((self.stages, count))) for _ in range(2)]
        arrival: list[Floats] = [clock[0]] * self._num_messages
        maximum = np.maximum
        for kind, rank, number, peer in self._order:
            now = clock[rank]
            if kind == "recv":
                maximum(now, arrival[number], out=now)
            elif kind == "send":
                direction, cut = (0, rank) if peer > rank else (1, peer)
                link = maximum(links[direction][rank], now)
                link += transfers[cut]
                if costs_sender:
                    now += handovers[cut]
                    maximum(link, now, out=link)
                arrival[number] = links[direction][rank] = link
            else:
                now += of_kind[kind][rank]
        return np.asarray(np.max(clock, axis=0))

    def seconds_of_one(self, stages: Sequence[Floats]) -> float:
        """Return `step_seconds` of the first cut list of `stages` (`LayerSeconds.of_cuts`), several times faster."""
        forward, backward, inputs, transfers, handovers = (part[0].tolist() for part in stages)
        weights = [total - half for total, half in zip(backward, inputs, strict=True)]
        of_kind = {"F": forward, "R": forward, "B": backward, "I": inputs, "W": weights}
        clock = [0.0] * self.stages
        links = [[0.0] * self.stages, [0.0] * self.stages]
        arrival = [0.0] * self._num_messages
        for kind, rank, number, peer in self._order:
            if kind == "recv":
                if arrival[number] > clock[rank]:
                    clock[rank] = arrival[number]
            elif kind == "send":
                direction, cut = (0, rank) if peer > rank else (1, peer)
                free = max(links[direction][rank], clock[rank]) + transfers[cut]
                clock[rank] += handovers[cut]
                arrival[number] = links[direction][rank] = max(free, clock[rank])
            else:
                clock[rank] += of_kind[kind][rank]
        return max(clock)


@lru_cache(maxsize=256)
def step_player(run: RunShape, stages: int, keeps: bool = False) -> StepPlayer:
    """Return the player of a run's schedule with stage s on rank s; made once per process."""
    return StepPlayer(run, stages, keeps)


def _running(seconds: Sequence[float]) -> Floats:
    """Return the running sums, with each layer rounded to 2^-48 of the whole chain: then all sums and differences are
    exact, and ranges of equal layers have equal seconds wherever they begin.
    """
    rows = np.asarray(seconds, dtype=np.float64)
    unit = 2.0 ** (np.frexp(np.abs(rows).sum())[1] - 48)
    return np.concatenate([[0.0], np.cumsum(np.round(rows / unit) * unit)])
