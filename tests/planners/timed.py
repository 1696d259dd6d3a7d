"""Random chains with seconds for tests of planners that minimise time, and exhaustive oracles."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.costs import full_matrix, peaks_of
from varuna_capslog.planners.seconds import LayerSeconds, Link
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.schedules import StageSeconds, make_schedule, simulate


class Positional:
    """Stage costs that depend on the position: the layers' bytes, and waiting bytes for every stage behind."""

    position_free = False

    def __init__(self, layer_bytes: Sequence[int], waiting: Sequence[int]) -> None:
        self.layer_bytes, self.waiting = list(layer_bytes), list(waiting)
        self.num_layers = len(layer_bytes)

    def stage_bytes(self, first: int, end: int, stage: int = 0, stages: int = 1) -> int:
        return sum(self.layer_bytes[first:end]) + (stages - 1 - stage) * sum(self.waiting[first:end])

    def matrix(self, stage: int = 0, stages: int = 1) -> NDArray[np.int64]:
        return full_matrix(self, stage, stages)

    def peaks(self, cuts: Sequence[int]) -> list[int]:
        return peaks_of(self, cuts)


def cut_lists(num_layers: int, stages: int) -> Iterator[list[int]]:
    """Yield every cut list."""
    for inner_cuts in itertools.combinations(range(1, num_layers), stages - 1):
        yield [0, *inner_cuts]


def chain(rng: random.Random, num_layers: int) -> Profile:
    """Draw a chain whose layers differ by orders of magnitude in time, memory and boundary bytes."""
    layers = []
    for number in range(num_layers):
        forward = rng.choice([0.01, rng.random(), 5 * rng.random()])
        layers.append(
            LayerProfile(
                f"l{number}",
                isolated_bytes=rng.randint(5, 20),
                added_bytes=rng.randint(1, 12) if number else None,
                parameter_bytes=rng.randint(0, 3),
                boundary_bytes=rng.randint(1, 60),
                forward_seconds=forward,
                backward_seconds=forward * rng.uniform(1, 3),
                # halves of any sum; every fourth layer has none
                input_seconds=None if number % 4 == 3 else 1.0 + number % 3,
                weight_seconds=None if number % 4 == 3 else 2.0,
            )
        )
    return Profile(tuple(layers), model="random", conditions={"microbatch_size": 1})


def simulated(
    profile: Profile,
    cuts: Sequence[int],
    schedule: str,
    microbatches: int,
    recompute: bool,
    link: Link | None = None,
    speeds: Sequence[float] | None = None,
) -> float:
    """Return the step seconds of a cut list by `schedules.simulate` and plain sums over the layers."""
    ends = [*cuts[1:], profile.num_layers]
    speeds = speeds or [1.0] * len(cuts)
    forward, backward = (
        [sum(column[first:end]) / speed for first, end, speed in zip(cuts, ends, speeds, strict=True)]
        for column in (profile.column("forward_seconds"), profile.column("backward_seconds"))
    )
    halves = [
        layer.backward_seconds
        * (0.5 if layer.input_seconds is None else layer.input_seconds / (layer.input_seconds + 2))
        for layer in profile.layers
    ]
    inputs = [sum(halves[first:end]) / speed for first, end, speed in zip(cuts, ends, speeds, strict=True)]
    link = link or Link()
    sizes = [0, *(profile.layers[cut - 1].boundary_bytes or 0 for cut in cuts[1:])]
    actions = make_schedule(schedule, len(cuts), microbatches, recompute=recompute)
    # The engine skips a forward of the last stage that recomputation repeats.
    bare = [*forward[:-1], 0.0]
    timeline = simulate(
        actions,
        StageSeconds(
            forward,
            backward,
            bare_forward=bare,
            transfer=[link.seconds(size) for size in sizes],
            handover=[link.handover_seconds(size) for size in sizes],
            other={"I": inputs, "W": [full - half for full, half in zip(backward, inputs, strict=True)]},
        ),
    )
    return timeline.step_seconds


def seconds_of(profile: Profile, link: Link | None = None) -> LayerSeconds:
    """Return the chain's seconds as the planners use them."""
    return LayerSeconds.of_profile(profile, link)
