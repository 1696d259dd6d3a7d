"""Long histories: a run's state does not grow with its past. `benchmarks/scale` has a thousand members."""

from __future__ import annotations

import pytest

from tests.rig.search.churn import CHANGES, Sizes, draw_crowd, play_crowd
from tests.rig.search.histories import draw, play
from tests.rig.search.world import Violation
from varuna_capslog.membership import generation, protocol


def test_what_a_run_keeps_does_not_grow_with_its_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "LINEAGE_ENTRIES", 8)
    seen: list[Sizes] = []
    outcome = play_crowd(draw_crowd(0, members=40, changes=300), seen.append, every=50)
    assert outcome.ended == "trained"
    assert outcome.went_back < outcome.generations / 4, "it went on from the copies nearly always"
    assert set(outcome.faults) >= set(CHANGES) - {"late leave"}
    assert sum(outcome.faults.values()) >= 300
    early, late = seen[1:3], seen[3:]
    assert max(sizes.lineage for sizes in seen) == 8, "more were made than are kept"
    assert max(sizes.entry_bytes for sizes in late) < 1.1 * max(sizes.entry_bytes for sizes in early)
    assert max(sizes.state for sizes in late) <= 40, "holdings of a few boundaries, and what was heard of 40 members"


def test_a_long_history_finds_a_boundary_dropped_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_kept", lambda state, before: frozenset())
    with pytest.raises(Violation, match="rule 4"):
        play_crowd(draw_crowd(0, members=40, changes=300))


def test_histories_keep_the_rules_with_the_shortest_lineage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "LINEAGE_ENTRIES", 3)
    trained = [play(draw(seed)).ended for seed in range(75)].count("trained")
    assert trained > 55
