"""Random histories: any number of members, faults of every kind at random moments, deliveries in random order.

A history is a function of its seed. It drives the same protocol and the same `World` as the explorer, for sizes and
lengths that no search reaches. When its faults are over, everything heals, and the run must reach its end.
"""

from __future__ import annotations

import random

from tests.rig.search.places import with_pipeline
from tests.rig.search.random_history import History, HistoryOutcome, RandomHistory
from tests.rig.search.world import Transition, Violation
from varuna_capslog.membership import messages as m
from varuna_capslog.membership import protocol
from varuna_capslog.membership.changes import State

__all__ = ["Stuck", "begin", "draw", "play", "take"]

LOSSY = ("tally", "received", "copied", "cas", "watch", "asked", "bye")


class Stuck(AssertionError):
    """Faults have ended and everything has healed, but training does not go on."""


def draw(
    seed: int,
    members: int | None = None,
    ladder: bool = False,
    damage: bool = False,
    plans: bool = False,
    motions: bool = False,
) -> History:
    """A history from a seed: sizes, rules and chances of every kind.

    Args:
        ladder: with the whole ladder of notices, and more often with shadows; other histories than without.
        damage: with damaged copies and layers, and more often with shadows; other histories than without.
        plans: with plans of any rectangles, drawn by the founders; other histories than without.
        motions: with `plans`, and small motions after losses.
    """
    dice = random.Random(seed)
    count = members or dice.choice((2, 3, 3, 4, 4, 5, 6, 8))
    sync = dice.random() < 0.5
    return History(
        seed=seed,
        members=count,
        num_layers=dice.choice((count, count + 1, 2 * count)),
        redundancy=dice.choice((0, 1, 1, 2)),
        sync=sync,
        shadows=dice.random() < (0.7 if ladder or damage else 0.3),
        fewest=dice.choice((1, 1, max(1, count // 2))),
        replicas=dice.choice((1, 1, 2)),
        faults=dice.choice((1, 2, 2, 3, 4, 6)),
        steps=dice.choice((2, 3, 4, 6)),
        loss=dice.choice((0.0, 0.0, 0.02)),
        double=dice.choice((0.0, 0.1)),
        early=dice.choice((0.0, 0.0, 0.01)),
        store_may_die=dice.random() < 0.1,
        ladder=ladder,
        damage=damage,
        plans=plans,
        motions=motions,
    )


def play(history: History, transition: Transition = protocol.step, compare: bool = True) -> HistoryOutcome:
    """Plays a history to its end.

    Raises:
        Violation: a rule is broken.
        Stuck: nothing goes on although everything has healed.
    """
    world = RandomHistory(history, transition, compare)
    begin(world)
    try:
        _run(world)
    except (Violation, Stuck) as error:
        raise type(error)(f"{error}; {history}") from error
    world.outcome.generations = world.record.number
    world.outcome.step = max((stamp.step for _, stamp in set().union(*world.memory)), default=0)
    world.outcome.went_back = sum(
        record.regress and number in world.truth.bases for number, record in world.records.items()
    )
    return world.outcome


def begin(world: RandomHistory) -> None:
    """The first members found the first generation."""
    history = world.history
    names = [f"m{number:04d}" for number in range(history.members)]
    for number, name in enumerate(names):
        world.add(State(name, f"h{number:04d}"))
    record = world.record.successor(names)
    world.record = world.records[1] = with_pipeline(record, history.num_layers) if history.motions else record
    for i in range(history.members):
        world.feed(i, m.Enter())
        world.feed(i, m.StoreSays(world.record))


def take(world: RandomHistory, lossy: bool = False) -> None:
    """Make a delivery, drawn from all that are under way.

    Args:
        lossy: the delivery may be lost.
    """
    history, dice = world.history, world.dice
    position = dice.randrange(len(world.pool))
    world.pool[position], world.pool[-1] = world.pool[-1], world.pool[position]
    mail = world.pool.pop()
    world.outcome.events += 1
    if history.double and dice.random() < history.double and mail[0] not in ("compute", "prepared"):
        world.pool.append(mail)
    if lossy and history.loss and mail[0] in LOSSY and dice.random() < history.loss:
        if mail[0] in ("tally", "received", "copied"):
            world.pool.append(("broken", mail[1], mail[2] if mail[0] == "tally" else mail[3]))
        return
    world.deliver(mail)
    world.spoil()
    if lossy and history.early and dice.random() < history.early:
        i = dice.randrange(len(world.states))
        if world.alive[i] and i not in world.hung:
            world.feed(i, m.Tick())


def _run(world: RandomHistory) -> None:
    history, dice, outcome = world.history, world.dice, world.outcome
    expected = history.members * (3 * history.steps + 6)
    moments = sorted(dice.randrange(expected) for _ in range(history.faults))
    quiet = 0
    for _ in range(200 * expected + 20_000):
        while moments and outcome.events >= moments[0]:
            moments.pop(0)
            world.strike()
        if not world.pool:
            if not moments:
                if world.cut or world.hung:
                    world.heal()
                    continue
                outcome.ended = world.done()
                if outcome.ended:
                    return
            elif dice.random() < 0.5:
                world.heal()
            quiet += 1
            if quiet > 200 + 20 * len(moments):
                break
            outcome.events += 1 + (moments[0] - outcome.events if moments else 0) // 2
            world.wake()
            continue
        quiet = max(0, quiet - 1) if world.record.number == outcome.generations else quiet
        take(world, lossy=bool(moments))
    raise Stuck(f"after {outcome.events} events nobody trains: {[state.phase.value for state in world.states]}")
