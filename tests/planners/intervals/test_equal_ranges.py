"""Equal ranges, compared with every pair of segments; and the search that uses them, with one that does not."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np
import pytest

from tests.memory.machine import Model, profile_of
from tests.planners.intervals.stages import UNIT, random_handling
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planners.intervals import IntervalSearch
from varuna_capslog.planners.intervals.equal_ranges import EqualRanges
from varuna_capslog.planners.seconds import LayerSeconds
from varuna_capslog.profiles.record import Profile


def pattern(draw: random.Random, size: int) -> list[int]:
    """Draw the kind of every layer: runs of equal layers, or a short sequence of kinds that repeats."""
    kinds: list[int] = []
    while len(kinds) < size:
        unit = [draw.randrange(3) for _ in range(draw.randrange(1, 4))]
        kinds += unit * draw.randrange(1, 7)
    return kinds[:size]


def chain_of(draw: random.Random, kinds: list[int], device: str = "cuda") -> Profile:
    """Return a chain in which layers of one kind have equal bytes and seconds."""
    drawn = Model.random(draw, 3, even=True, scale=20_000)
    model = Model(**{f.name: [getattr(drawn, f.name)[kind] for kind in kinds] for f in fields(Model)})
    model = replace(model, cuts=[drawn.cuts[0]] * (len(kinds) + 1))
    seconds = [(draw.randrange(1, 40) * UNIT, draw.randrange(1, 40) * UNIT) for _ in range(3)]
    profile = profile_of(model, device)
    layers = [
        replace(layer, forward_seconds=seconds[kind][0], backward_seconds=seconds[kind][1])
        for layer, kind in zip(profile.layers, kinds, strict=True)
    ]
    return replace(profile, layers=tuple(layers), source="measured")


def without_copies(numbers: np.ndarray, seconds: np.ndarray, at_cuts: np.ndarray, firsts: np.ndarray) -> EqualRanges:
    return EqualRanges(*np.zeros((2, len(firsts)), dtype=np.intp))


def end_of(numbers: np.ndarray, at_cuts: list[bool], first: int, by: int) -> int:
    """Return the end of the longest range from `first` on whose segments all equal those `by` layers earlier."""
    end, size = first, len(numbers)
    same_cut = [False] * by + [at_cuts[cut] == at_cuts[cut - by] for cut in range(by, size + 1)]
    while same_cut[first] and end < size and same_cut[end + 1]:
        if any(numbers[at, end + 1] != numbers[at - by, end + 1 - by] for at in range(first, end + 1)):
            break
        end += 1
    return end


def test_the_longest_equal_range_of_all() -> None:
    draw = random.Random(3)
    for _ in range(60):
        size = draw.randrange(2, 14)
        kinds, at_cuts = pattern(draw, size), [draw.random() < 0.1 for _ in range(size + 1)]
        names = {(): 0}
        numbers = np.zeros((1, size, size + 1))
        for first in range(size):
            for end in range(first + 1, size + 1):
                numbers[0, first, end] = names.setdefault(tuple(kinds[first:end]), len(names))
        numbers[0, draw.randrange(size), size] += draw.choice([0, 0.5])  # a segment unlike its layers
        firsts = np.array([draw.random() < 0.8 for _ in range(size)])
        seconds = numbers * (1 + 1e-15)
        equal = EqualRanges.of(numbers, seconds, np.array([at_cuts], dtype=np.float64), firsts)

        for first in np.flatnonzero(firsts).tolist():
            reached = {by: end_of(numbers[0], at_cuts, first, by) for by in range(1, first + 1) if firsts[first - by]}
            longest = max(reached.values(), default=first)
            by = int(equal.distance[first])
            assert by == min((by for by, end in reached.items() if end == longest > first), default=0)
            assert not by or equal.until[first] == longest


@pytest.mark.parametrize("seed", range(3))
def test_a_search_that_copies_choices_of_equal_layers_gives_the_same_answers(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, copied, of = random.Random(seed), 0, EqualRanges.of
    for _ in range(6):
        size = draw.randrange(6, 15)
        profile = chain_of(draw, pattern(draw, size))
        handling = random_handling(draw, profile)
        at_once = not handling.recomputed and not handling.later and draw.random() < 0.7
        handling = replace(handling, at_once=at_once)
        ranges, seconds = RangeBytes(profile, "ranks", True), LayerSeconds.of_profile(profile)
        total = float(seconds.forward[-1] + seconds.backward[-1])
        labels = draw.choice([2, 5, 12])
        longest = draw.choice([np.inf, total / 2])
        borders = draw.choice([None, [0, *range(1, size, 2), size]])
        arguments = {"labels": labels, "limits": (longest, np.inf), "borders": borders}
        made: list[EqualRanges] = []
        with monkeypatch.context() as patch:
            patch.setattr(EqualRanges, "of", lambda *tables, made=made: made.append(of(*tables)) or made[-1])
            search = IntervalSearch(ranges, seconds, handling, **arguments)
        copied += int((made[0].until - np.arange(size)).clip(0).sum())
        with monkeypatch.context() as patch:
            patch.setattr(EqualRanges, "of", without_copies)
            usual = IntervalSearch(ranges, seconds, handling, **arguments)
        for in_flight in (1, 3):
            least = search.least(in_flight)
            assert (least == usual.least(in_flight)).all()
            for first, end in search._finished.ranges:
                budgets = [int(least[first, end]) + more for more in (-1, 0, 100_000, 3_000_000)]
                for budget in budgets:
                    assert search.cheapest(first, end, in_flight, budget) == usual.cheapest(
                        first, end, in_flight, budget
                    )
            budget = float(np.median(least[least < np.iinfo(np.int64).max // 8]))
            for ours, theirs in zip(search.seconds(in_flight, budget), usual.seconds(in_flight, budget), strict=True):
                assert (ours == theirs).all()
    assert copied > 10
