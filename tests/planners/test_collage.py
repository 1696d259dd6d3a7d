"""Collage's placement, compared with every cover, and its second level on a cost that is not a sum."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from tests.planning.test_variant_search import random_variants
from varuna_capslog.planners.collage import Bits, LayerPattern, evolved, patterns_of, placed, seconds_under


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


def test_patterns_of_a_profile_add_up_to_its_seconds() -> None:
    """Runs of a joined variant include the savings between neighbours; the least sum equals that of all choices."""
    for seed in range(5):
        profile = random_variants(random.Random(seed), 4, [1, 1, 2, 1])
        profile = type(profile)(**{**vars(profile), "conditions": {**profile.conditions, "joined_variants": ["v0"]}})
        placement = placed(4, [(0, 1), (1, 2), (2, 3)], patterns_of(profile))
        names = [(None, "v0"), (None, "v0"), (None, "v0", "v1"), (None, "v0")]
        totals = [
            sum(seconds_under(profile, {at: name for at, name in enumerate((a, b, c, d)) if name is not None}))
            for a in names[0]
            for b in names[1]
            for c in names[2]
            for d in names[3]
        ]
        assert placement.seconds == pytest.approx(min(totals), rel=1e-12)
        assert sum(seconds_under(profile, placement.chosen)) == pytest.approx(placement.seconds, rel=1e-12)


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
