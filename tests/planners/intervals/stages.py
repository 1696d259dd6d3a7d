"""Random chains whose parts share tensors, and every choice of memory intervals of a stage."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tests.memory import chains
from tests.memory.machine import Model
from tests.memory.machine import profile_of as told_profile
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.memory.segments import treated
from varuna_capslog.planners.intervals import Handling, again_seconds, combined_seconds
from varuna_capslog.planners.intervals.tables import bytes_of
from varuna_capslog.planners.seconds import LayerSeconds
from varuna_capslog.plans.parts import INTERVAL_KINDS, MemoryInterval
from varuna_capslog.profiles.record import Profile, TensorRecord

UNIT = 1 / 64
"""Seconds of all layers are multiples of UNIT, so that sums in any order are equal to the last bit."""


def random_profile(draw: random.Random, size: int) -> Profile:
    """Draw a chain: a quarter without `tensors`, the others with tensors that several layers read, and a third of these
    with frozen first layers."""
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


def _tensors(draw: random.Random, size: int, tensors: Sequence[TensorRecord]) -> tuple[TensorRecord, ...]:
    """Add tensors, each read by up to three layers or the loss; tensors of frozen layers have no gradient."""
    records, scale = list(tensors), max(tensor.bytes for tensor in tensors)
    for number in range(draw.randrange(4)):
        writer = draw.randrange(-1, size)
        count = min(size - writer, draw.randrange(1, 4))
        readers = tuple(sorted(draw.sample(range(writer + 1, size + 1), count)))
        with_gradient = writer >= 0 and draw.random() < 0.7
        records.append(
            TensorRecord(
                f"more{number}", draw.randrange(1, 3 * scale), with_gradient, writer if writer >= 0 else None, readers
            )
        )
    frozen = draw.randrange(size) if draw.random() < 1 / 3 else 0
    return tuple(
        replace(record, gradient=record.gradient and record.writer is not None and record.writer >= frozen)
        for record in records
    )


def random_handling(draw: random.Random, profile: Profile) -> Handling:
    """Draw a handling for any kind of list, with copies that take about as long as the layers."""
    told = all(row.action_bytes is not None for row in profile.observations)
    size = max(row.saved_bytes or 0 for row in profile.observations) + 1
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
    """Yield intervals of every kind with every border; adjacent kept pieces count as one piece."""
    if first == end:
        yield ()
        return
    for border in range(first + 1, end + 1):
        for later in all_choices(border, end):
            for kind in INTERVAL_KINDS:
                yield (MemoryInterval(first, border, kind), *later)
            if border == end or (later and later[0].first == border):
                yield later


@dataclass(frozen=True)
class Choice:
    """A choice of intervals. seconds: per call. bytes: by the calls in flight, from 1."""

    seconds: float
    bytes: tuple[int, ...]
    intervals: tuple[MemoryInterval, ...]


def weighed(
    profile: Profile, ranges: RangeBytes, first: int, end: int, handling: Handling, in_flight: int
) -> list[Choice]:
    """Return all choices of a stage, by `treated` and sums over the layers."""
    seconds = LayerSeconds.of_profile(profile)
    layer_seconds = sum(
        (layer.forward_seconds or 0) + (layer.backward_seconds or 0) for layer in profile.layers[first:end]
    )
    choices = []
    for intervals in all_choices(first, end):
        treatment = treated(
            ranges, ((first, end),), intervals, handling.recomputed, handling.later, split=handling.split
        )
        compute = layer_seconds + again_seconds(ranges, seconds, first, end, intervals)
        sizes = tuple(bytes_of(treatment, ranges, first, end, count + 1, handling) for count in range(in_flight))
        choices.append(Choice(float(combined_seconds(handling, compute, treatment.host)), sizes, intervals))
    return choices
