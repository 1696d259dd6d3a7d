"""Collage's placement, compared with every cover, and its second level on a cost that is not a sum."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

import pytest

from tests.planning.test_variant_search import random_variants
from varuna_capslog.planners.collage import Bits, LayerPattern, evolved, patterns_of, placed, seconds_under
from varuna_capslog.profiles.conditions import JOINED
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiles.runs import PLAIN, alternatives_of
from varuna_capslog.start.collage_start import second_level


def covers(layers: frozenset[int], patterns: Sequence[LayerPattern]) -> Iterator[tuple[LayerPattern, ...]]:
    """Yield every cover of these layers."""
    if not layers:
        yield ()
        return
    first = min(layers)
    for pattern in patterns:
        if first in pattern.layers and pattern.layers <= layers:
            yield from ((pattern, *cover) for cover in covers(layers - pattern.layers, patterns))


@pytest.mark.parametrize("seed", range(30))
def test_no_cover_of_a_random_graph_is_cheaper(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randrange(2, 8)
    edges = [(a, b) for b in range(1, size) for a in draw.sample(range(b), min(b, draw.randrange(3)))]
    patterns = [LayerPattern(frozenset([at]), name, draw.randrange(1, 20)) for at in range(size) for name in "ab"]
    for _ in range(10):
        first = draw.randrange(size)
        layers = {first, *(reader for writer, reader in edges if writer == first and draw.random() < 0.7)}
        layers |= {reader for writer, reader in edges if writer in layers and draw.random() < 0.4}
        patterns.append(LayerPattern(frozenset(layers), "c", draw.randrange(1, 15 * len(layers))))
    switch = draw.choice([0, 0, 3])
    placement = placed(size, edges, patterns, switch)
    assert sorted(layer for pattern in placement.patterns for layer in pattern.layers) == list(range(size))
    assert sum(pattern.seconds + switch for pattern in placement.patterns) == placement.seconds
    all_covers = covers(frozenset(range(size)), patterns)
    assert placement.seconds == min(sum(pattern.seconds + switch for pattern in cover) for cover in all_covers)


def priced_profile(draw: random.Random, size: int) -> Profile:
    """Return layers with up to two variants; v0 is joined, and two layers in it take more or less than both alone."""
    profile = random_variants(draw, size, [draw.choice([1, 1, 1, 0, 2]) for _ in range(size)])
    rows = [
        dataclasses.replace(row, backward_seconds=draw.uniform(0.1, 2.0) * (row.backward_seconds or 0.0))
        if row.variant == "v0,v0"
        else row
        for row in profile.observations
    ]
    conditions = {**profile.conditions, JOINED: ["v0"]}
    return dataclasses.replace(profile, observations=tuple(rows), conditions=conditions)


def smallest_sum(profile: Profile) -> float:
    """Return the fewest seconds of all choices of variants, each with the prices of its neighbours."""
    alternatives = alternatives_of(profile)
    names = [(PLAIN, *alternatives.get(at, ())) for at in range(profile.num_layers)]
    choices = ({at: name for at, name in enumerate(row) if name != PLAIN} for row in itertools.product(*names))
    return min(sum(seconds_under(profile, choice)) for choice in choices)


@pytest.mark.parametrize("seed", range(12))
def test_level_1_has_the_price_of_its_choice_and_no_choice_is_cheaper(seed: int) -> None:
    draw = random.Random(seed)
    profile = priced_profile(draw, draw.randrange(2, 5))
    for edges in (profile.edges, [(0, at) for at in range(1, profile.num_layers)]):
        placement = placed(profile.num_layers, edges, patterns_of(profile), joined=["v0"])
        assert placement.seconds == pytest.approx(smallest_sum(profile), rel=1e-9)
        assert sum(seconds_under(profile, placement.chosen)) == pytest.approx(placement.seconds, rel=1e-9)


def test_two_layers_that_are_cheap_alone_and_dear_together() -> None:
    """Level 1 answered 2 seconds for both in channels-last, which take 12."""
    alone = [LayerPattern(frozenset([at]), name, cost) for at in (0, 1) for name, cost in (("plain", 5), ("last", 1))]
    placement = placed(2, [(0, 1)], [*alone, LayerPattern(frozenset([0, 1]), "last", 12)], joined=["last"])
    assert (placement.seconds, len(placement.chosen)) == (6, 1)


def test_level_2_may_take_back_what_level_1_gave() -> None:
    """Where level 1 gave the variant to every layer that can have it, level 2 had no bit to turn."""
    first, asked = {0: "last", 1: "last", 2: "sdpa"}, list[Mapping[int, str]]()

    def ratios(choices: Sequence[Mapping[int, str]]) -> list[float]:
        asked.extend(choices)
        return [1.0 - 0.2 * (choice == {0: "last", 1: "sdpa", 2: "sdpa"}) for choice in choices]

    best = second_level(ratios, first, {1: "sdpa", 2: "sdpa"}, [0, 1], "last", 0, 4)
    assert best == {0: "last", 1: "sdpa", 2: "sdpa"}
    assert first in asked


def test_the_second_level_finds_what_no_sum_shows_and_asks_for_no_string_twice() -> None:
    """Setting all bits in a run of neighbours pays off; setting single bits costs."""
    measured: list[Bits] = []

    def seconds(bits: Bits) -> float:
        return 10 + sum(bits) - 3 * sum(a and b for a, b in itertools.pairwise(bits[:4]))

    def measure(strings: Sequence[Bits]) -> list[float]:
        measured.extend(strings)
        return [seconds(bits) for bits in strings]

    best = evolved(6, measure, seed=0, rounds=8)
    assert seconds(best) <= min(seconds((False,) * 6), seconds((True,) * 6))
    assert best == (True, True, True, True, False, False)
    assert len(set(measured)) == len(measured) < 2**6
    again = evolved(6, lambda strings: [seconds(bits) for bits in strings], seed=0, rounds=8)
    assert again == best
