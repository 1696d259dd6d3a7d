"""All interleavings of three members and two faults; the search also finds rules that are broken on purpose."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.rig.search.explore import Scenario, explore
from tests.rig.search.mail import MailWorld
from tests.rig.search.places import make_job
from tests.rig.search.world import Transition, Violation
from tests.sweeps import some
from varuna_capslog.membership import changes, messages, protocol, recovery
from varuna_capslog.membership.changes import Job, Phase, State, Step

LEAVE_OF_TWO = {"leaves": 1, "members": 2, "processes": 2, "job": make_job(2, 0, shadows=True), "redundancy": 0}
"""One of two gets a notice, and its layer is copied ahead; nobody else has a copy."""

MOTIONS = {"plans": True, "motions": True}
"""After a loss the lost stages are handed out, and no copy is made anew before the next step."""


SCENARIOS: dict[str, tuple[Mapping[str, Any], int]] = {
    "crash and store": ({"faults": 2, "kinds": ("crash", "store")}, 9_000),
    "join": ({"faults": 1, "kinds": ("crash",), "steps": 1, "members": 2}, 3_000),
    "leave": ({"faults": 0, "leaves": 1}, 1_000),
    "leave with shadows": ({"faults": 0, "leaves": 1, "job": make_job(3, shadows=True)}, 1_500),
    "hint": ({"faults": 0, "hints": 1, "job": make_job(3, shadows=True)}, 800),
    "checkpoint first": ({"faults": 0, "late": 1}, 1_500),
    "crash and checkpoint": (
        {"faults": 1, "kinds": ("crash",), "members": 2, "processes": 2, "late": 1, "job": make_job(2)},
        1_000,
    ),
    "one and a newcomer": ({"faults": 1, "kinds": ("crash",), "members": 1, "processes": 2, "job": make_job(2)}, 300),
    "damage": ({"faults": 1, "kinds": ("damage",)} | LEAVE_OF_TWO, 400),
    "damage and hiccup": ({"faults": 2, "kinds": ("damage", "hiccup"), "once": True} | LEAVE_OF_TWO, 3_000),
    "starved update and crash": (
        {"faults": 2, "kinds": ("crash", "starve"), "members": 2, "processes": 2, "job": make_job(2)},
        1_500,
    ),
    "starved update, async": (
        {"faults": 1, "kinds": ("starve",), "job": make_job(3, sync=False), "stale": True},
        1_500,
    ),
    "value by value": ({"faults": 1, "kinds": ("crash",), "steps": 1, "singly": True}, 3_000),
    "leave with drawn plans": ({"faults": 0, "leaves": 1, "plans": True, "job": make_job(4, shadows=True)}, 1_500),
    "async, one that only keeps copies": (
        {"faults": 1, "kinds": ("crash",), "plans": True, "job": make_job(1, sync=False)},
        3_000,
    ),
    "async": ({"faults": 2, "kinds": ("crash",), "job": make_job(3, sync=False)}, 7_000),
    "crash or hiccup with drawn plans": (
        {"faults": 1, "kinds": ("crash", "hiccup"), "steps": 1, "plans": True, "job": make_job(4)},
        5_000,
    ),
    "2 crashes with small motions": ({"faults": 2, "kinds": ("crash",), "job": make_job(2)} | MOTIONS, 8_000),
}
"""What happens -> the scenario, and states that it has at least."""


@pytest.mark.parametrize("name", some(SCENARIOS, 12))
def test_every_interleaving_keeps_the_rules_and_leads_on(name: str) -> None:
    options, least = SCENARIOS[name]
    exploration = explore(Scenario(**options))
    assert exploration.complete
    assert exploration.stuck == 0, "\n".join(map(str, exploration.trace))
    assert exploration.states > least  # it did look


# -- rules broken on purpose are found ---------------------------------------------------------------------------------


def goes_on_voting(job: Job, state: State, event: messages.ProtocolEvent) -> Step:
    """Founds the next generation and goes on answering its own."""
    new, effects = protocol.step(job, state, event)
    if isinstance(event, messages.Suspects) and state.phase is Phase.RUN and new.phase is Phase.CHANGE:
        return replace(new, phase=Phase.RUN), tuple(e for e in effects if not isinstance(e, messages.Abort))
    return new, effects


def comes_back(job: Job, state: State, event: messages.ProtocolEvent) -> Step:
    """Answers its old generation again after it has heard of the new one."""
    if isinstance(event, messages.StoreSays) and state.phase is Phase.CHANGE and not state.wishes.planned:
        return replace(state, phase=Phase.RUN), ()
    return protocol.step(job, state, event)


def majority_is_enough(job: Job, state: State) -> Step:
    """A vote is won when more than half are for it."""
    heard = {h.sender: h.value for h in state.heard if (h.generation, h.round) == (state.record.number, state.round)}
    if not state.cast or not state.round or 2 * len(heard) <= len(state.record.members):
        return complete(job, state)
    values = {member: heard.get(member, messages.Vote()) for member in state.record.members}
    return protocol._tally(job, state, state.round, values)


complete = protocol._complete


def votes_before_its_copies(state: State) -> Step:
    """Does not wait for the receipt of the copies."""
    return protocol._cast(state, finite=True) if state.computed and not state.cast else (state, ())


def takes_a_hint_for_a_wish(state: State, change: messages.Change) -> Step:
    """Changes the membership because it may have to be changed."""
    return changes.wish(state, change, urgent=False)


def does_not_wait_for_the_checkpoint(job: Job, state: State, votes: Any) -> Step:
    """Begins the change though a vote wants a checkpoint first."""
    return voted(job, state, votes._replace(save=False))


voted = protocol._voted


def saves_alone(job: Job, state: State, event: messages.ProtocolEvent) -> Step:
    """Only a member that got the notice writes its share of the checkpoint; in a live run it waits for the others."""
    new, effects = protocol.step(job, state, event)
    return new, tuple(e for e in effects if state.wishes.save or not isinstance(e, messages.SaveAll))


def forgets_the_checkpoint(job: Job, state: State, event: messages.ProtocolEvent) -> Step:
    """Protocol that forgets, with the generation, the checkpoint that was to be written before a change."""
    new, effects = protocol.step(job, state, event)
    return (
        new if new.record.number == state.record.number else replace(new, wishes=replace(new.wishes, save=False))
    ), effects


def takes_what_arrives_damaged(job: Job, state: State, event: messages.ProtocolEvent) -> Step:
    """Protocol that goes on with a layer that arrived damaged."""
    damaged = isinstance(event, messages.Damaged)
    return protocol.step(job, state, messages.Received(event.generation, event.layer) if damaged else event)


def compares_at_one_boundary(copy: messages.Proof, owners: Collection[messages.Proof]) -> bool:
    """Trusts a copy where its owner stands at another boundary, because one of them missed the last vote."""
    return all(owner.digest == copy.digest for owner in owners if owner.stamp == copy.stamp)


HINT = {"faults": 0, "hints": 1, "job": make_job(3, shadows=True)}
LATE = {"faults": 0, "late": 1}
CRASH = {"faults": 1, "kinds": ("crash",)}
DAMAGE = {"faults": 1, "kinds": ("damage",)} | LEAVE_OF_TWO
DAMAGE_AND_HICCUP = {"faults": 2, "kinds": ("damage", "hiccup"), "once": True, "steps": 3} | LEAVE_OF_TWO


@pytest.mark.parametrize(
    ("rule", "options", "transition", "compare", "patch"),
    [
        ("rule 2", CRASH, protocol.step, False, None),
        ("rule 1", CRASH, goes_on_voting, True, None),
        ("rule 1", CRASH, comes_back, True, None),
        (
            "rule 4",
            {"faults": 1, "kinds": ("hiccup",), "job": make_job(3, 0), "redundancy": 0},
            protocol.step,
            True,
            (protocol, "_kept", lambda state, before: frozenset()),
        ),
        ("rule 1", CRASH | {"singly": True}, protocol.step, True, (protocol, "_complete", majority_is_enough)),
        ("rule 3", CRASH, protocol.step, True, (protocol, "_cast_if_ready", votes_before_its_copies)),
        (
            "rule 4",
            {"faults": 2, "kinds": ("crash",)},
            protocol.step,
            True,
            (recovery.Boundary, "loses_settled", lambda boundary, reached, voted: False),
        ),
        ("rule 1", {"faults": 0, "leaves": 1}, protocol.step, True, (State, "votes", property(lambda state: True))),
        ("rule 7", HINT, protocol.step, True, (changes, "hint", takes_a_hint_for_a_wish)),
        ("rule 8", LATE, protocol.step, True, (protocol, "_voted", does_not_wait_for_the_checkpoint)),
        ("rule 8", LATE, saves_alone, True, None),
        ("rule 8", {"faults": 1, "kinds": ("hiccup",), "late": 1}, forgets_the_checkpoint, True, None),
        ("rule 9", DAMAGE, protocol.step, True, (recovery, "distrusted", lambda values, valid: frozenset())),
        (
            "rule 9",
            DAMAGE_AND_HICCUP,
            protocol.step,
            True,
            (recovery, "_is_trusted", compares_at_one_boundary),
        ),
        ("rule 10", DAMAGE | {"job": make_job(2, 0)}, takes_what_arrives_damaged, True, None),
    ],
    ids=[
        "the store does not compare",
        "goes on voting after it stopped",
        "comes back to the old generation",
        "drops the boundary before too early",
        "a majority is enough",
        "votes before its copies are there",
        "goes back in silence",
        "those that leave vote",
        "takes a hint for a wish",
        "does not wait for the checkpoint",
        "saves alone",
        "forgets the checkpoint",
        "trusts every copy",
        "trusts a copy whose owner stands at another boundary",
        "takes what arrives damaged",
    ],
)
def test_the_search_finds_a_broken_protocol(
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    options: Mapping[str, Any],
    transition: Transition,
    compare: bool,
    patch: tuple[Any, str, Callable[..., Any]] | None,
) -> None:
    if patch is not None:
        monkeypatch.setattr(*patch)
    with pytest.raises(Violation, match=rule):
        explore(Scenario(**options), transition, compare)


@pytest.mark.parametrize("deep", [False, True])
def test_the_search_finds_a_protocol_that_stands_still_and_a_way_there(
    monkeypatch: pytest.MonkeyPatch, deep: bool
) -> None:
    tick = changes.tick
    monkeypatch.setattr(changes, "tick", lambda state: (state, ()) if state.at.step else tick(state))
    scenario = Scenario(faults=1, kinds=("hiccup",))
    exploration = explore(scenario, deep=deep)
    assert exploration.stuck > 0
    assert len(exploration.trace) > 3, "a step is made before"
    world = MailWorld(scenario, protocol.step, True)
    world.begin()
    for action in exploration.trace:
        world = world.after(action)
    assert not leads_on(world)


def leads_on(first: MailWorld) -> bool:
    """Return True if a world can reach a good end without further faults."""
    seen, stack = {first.key()}, [first]
    while stack:
        world = stack.pop()
        if world.done():
            return True
        for following in [world.after(action) for action, fault in world.actions() if not fault]:
            if following.key() not in seen:
                seen.add(following.key())
                stack.append(following)
    return False


def test_depth_first_finds_the_same_states() -> None:
    scenario = Scenario(faults=1, kinds=("crash",), members=1, processes=2, job=make_job(2))
    assert explore(scenario, deep=True) == explore(scenario)
