"""A seeded slice of the random histories (benchmarks/morph/protocol has the long runs), and defects they have shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.rig.search.histories import draw, play
from tests.rig.search.random_history import DAMAGE, FAULTS, LADDER
from tests.rig.search.world import Violation
from varuna_capslog.membership import messages as m
from varuna_capslog.membership import protocol, recovery
from varuna_capslog.membership.changes import Job, State, Step


def test_a_slice_of_histories() -> None:
    ends: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in range(200):
        outcome = play(draw(seed))
        ends[outcome.ended] += 1
        faults += outcome.faults
    assert ends["trained"] > 150
    assert set(faults) == set(FAULTS)


def test_a_slice_of_histories_with_the_ladder_of_notices() -> None:
    faults: Counter[str] = Counter()
    for seed in range(100):
        outcome = play(draw(seed, ladder=True))
        assert outcome.ended
        faults += outcome.faults
    assert set(faults) == {*FAULTS, *LADDER}


def test_a_slice_of_histories_with_damage() -> None:
    faults: Counter[str] = Counter()
    for seed in range(100):
        outcome = play(draw(seed, damage=True))
        assert outcome.ended
        faults += outcome.faults
    assert set(faults) == {*FAULTS, *DAMAGE}


@pytest.mark.parametrize("kind", ["", "ladder", "damage"])
def test_a_slice_of_histories_with_plans_of_any_rectangles(kind: str) -> None:
    """Founders draw the members' plans: rectangles that no member could compute by itself. Some wish for another plan
    for the same members.
    """
    ends: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in range(75):
        outcome = play(draw(seed, plans=True, **({kind: True} if kind else {})))
        ends[outcome.ended] += 1
        faults += outcome.faults
    assert faults["rebalance"] > 20
    assert "" not in ends
    assert ends["trained"] > 60


def test_a_slice_of_histories_with_small_motions() -> None:
    motions, ends = 0, Counter[str]()
    for seed in range(100):
        history = draw(seed, plans=True, motions=True, damage=seed % 2 == 0)
        outcome = play(replace(history, redundancy=1 + seed % 2, members=3 + seed % 4, num_layers=6, steps=6))
        motions += outcome.motions
        ends[outcome.ended] += 1
    assert motions > 40
    assert "" not in ends
    assert ends["trained"] > 80


def test_a_hundred_members() -> None:
    history = replace(draw(5, members=100), fewest=1, store_may_die=False)
    outcome = play(history)
    assert outcome.ended == "trained"
    assert outcome.step == history.steps


def test_a_history_is_a_function_of_its_seed() -> None:
    assert play(draw(11)) == play(draw(11))


@pytest.mark.parametrize(
    ("seed", "story"),
    [
        (458, "of two last ones that left together one died, and the other waited for it for ever"),
        (1623, "one that was leaving waited for a store that was lost"),
        (857713, "one that left and asked to come back was named twice"),
        (42433, "a newcomer that gave up was let in after it had gone, and the one leaving waited for it"),
    ],
)
def test_defects_of_the_past(seed: int, story: str) -> None:
    assert play(draw(seed)).ended, story


@pytest.mark.parametrize(
    ("seed", "story"),
    [
        (46, "a checkpoint that was to come before a leave was forgotten with the generation"),
        (1926, "one that was under way was forgotten with the generation"),
        (145, "one that was asked for after the vote was forgotten with its outcome"),
    ],
)
def test_defects_of_the_past_with_the_ladder_of_notices(seed: int, story: str) -> None:
    assert play(draw(seed, ladder=True)).ended, story


def test_histories_find_a_checkpoint_that_only_one_writes() -> None:
    def saves_alone(job: Job, state: State, event: m.ProtocolEvent) -> Step:
        new, effects = protocol.step(job, state, event)
        return new, tuple(effect for effect in effects if state.wishes.save or not isinstance(effect, m.SaveAll))

    def play_some() -> None:
        for seed in range(100):
            play(draw(seed, ladder=True), saves_alone)

    with pytest.raises(Violation, match="rule 8"):
        play_some()


def test_histories_find_a_damaged_copy_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "distrusted", lambda values, valid: frozenset())

    def play_some() -> None:
        for seed in range(400):
            play(draw(seed, damage=True))

    with pytest.raises(Violation, match="rule 9"):
        play_some()


def test_histories_find_a_boundary_dropped_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_kept", lambda state, before: frozenset())

    def play_some() -> None:
        for seed in range(400):
            play(draw(seed))

    with pytest.raises(Violation, match="rule 4"):
        play_some()
