"""Seeds are spread and depend on every number."""

from __future__ import annotations

from varuna_capslog.base.seeds import mix, mixed


def test_seeds_differ_in_every_argument() -> None:
    seeds = {mix(a, b, c, d) for a in range(5) for b in range(5) for c in range(5) for d in range(5)}
    assert len(seeds) == 5**4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_numbers_that_many_share_are_mixed_once() -> None:
    assert (
        mix(7, after=mixed(3, 5)) == mix(5, 7, after=mixed(3)) == mix(7, after=mixed(5, after=mixed(3))) == mix(3, 5, 7)
    )
