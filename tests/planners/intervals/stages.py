"""Random chains whose parts hold tensors together, and every choice of memory intervals of a stage."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tests.memory import chains
from tests.memory.machine import Model
from tests.memory.machine import profile_of as told_profile
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.memory.treatment import treated
from varuna_capslog.planners.intervals import Handling, again_seconds, combined_seconds
from varuna_capslog.planners.intervals.choice import bytes_of
from varuna_capslog.planners.seconds import LayerSeconds
from varuna_capslog.plans.parts import INTERVAL_KINDS, MemoryInterval
from varuna_capslog.profiles.record import Profile, TensorRecord

UNIT = 1 / 64
"""Seconds of all layers are multiples of it, so that sums in any order are the same to the last bit."""


def random_profile(draw: random.Random, size: int) -> Profile:
    """A chain: one of four without `tensors`, the others with some that several layers read; one of three frozen in
    front."""
    if draw.random() < 0.25:
        profile = chains.profile_of(*chains.random_chain(draw, size))
    else:
        model = Model.random(draw, size, draw.random() < 0.5, draw.choice([1, 20_000]))
        profile = told_profile(model, draw.choice(["cpu", "cuda"]))
        profile = replace(profile, tensors=_tensors(draw, size, profile.tensors))
    seconds = [(draw.randrange(1, 40) * UNIT, draw.randrange(1, 40) * UNIT) for _ in range(size)]
    layers = [
        replace(layer, forward_seconds=forward, backward_seconds=backward)
        for layer, (forward, backward) in zip(profile.layers, seconds, strict=True)
    ]
    return replace(profile, layers=tuple(layers))


def _tensors(draw: random.Random, size: int, given: Sequence[TensorRecord]) -> tuple[TensorRecord, ...]:
    """With more of them, each read by up to three layers or the loss; no gradient where a frozen layer writes."""
    found, scale = list(given), max(one.bytes for one in given)
    for number in range(draw.randrange(4)):
        writer = draw.randrange(-1, size)
        count = min(size - writer, draw.randrange(1, 4))
        readers = tuple(sorted(draw.sample(range(writer + 1, size + 1), count)))
        with_gradient = writer >= 0 and draw.random() < 0.7
        found.append(
            TensorRecord(
                f"more{number}", draw.randrange(1, 3 * scale), with_gradient, writer if writer >= 0 else None, readers
            )
        )
    frozen = draw.randrange(size) if draw.random() < 1 / 3 else 0
    return tuple(
        replace(one, gradient=one.gradient and one.writer is not None and one.writer >= frozen) for one in found
    )


def random_handling(draw: random.Random, profile: Profile) -> Handling:
    """Any list, and copies that take about as long as the layers."""
    told = all(row.action_bytes is not None for row in profile.observations)
    size = max(one.saved_bytes or 0 for one in profile.observations) + 1
    return Handling(
        recomputed=draw.random() < 0.5,
        later=draw.random() < 0.5,
        split=told and draw.random() < 0.3,
        calls=draw.randrange(1, 5),
        waiting_blocks=draw.randrange(3),
        host_bandwidth=draw.choice([None, 2.0 ** (size.bit_length() + draw.randrange(-2, 3))]),
        copies_beside=draw.random() < 0.5,
    )


def all_choices(first: int, end: int) -> Iterator[tuple[MemoryInterval, ...]]:
    """Every kind and every border; pieces that are kept and touch are one piece."""
    if first == end:
        yield ()
        return
    for border in range(first + 1, end + 1):
        for rest in all_choices(border, end):
            for kind in INTERVAL_KINDS:
                yield (MemoryInterval(first, border, kind), *rest)
            if border == end or (rest and rest[0].first == border):
                yield rest


@dataclass(frozen=True)
class Choice:
    """seconds of one call; bytes by the calls in flight, from 1."""

    seconds: float
    bytes: tuple[int, ...]
    intervals: tuple[MemoryInterval, ...]


def weighed(
    profile: Profile, ranges: RangeBytes, first: int, end: int, handling: Handling, in_flight: int
) -> list[Choice]:
    """All choices of a stage, by `treated` and sums over the layers."""
    seconds = LayerSeconds.of_profile(profile)
    own = sum((layer.forward_seconds or 0) + (layer.backward_seconds or 0) for layer in profile.layers[first:end])
    found = []
    for intervals in all_choices(first, end):
        one = treated(ranges, ((first, end),), intervals, handling.recomputed, handling.later, split=handling.split)
        compute = own + again_seconds(ranges, seconds, first, end, intervals)
        sizes = tuple(bytes_of(one, ranges, first, end, count + 1, handling) for count in range(in_flight))
        found.append(Choice(float(combined_seconds(handling, compute, one.host)), sizes, intervals))
    return found
