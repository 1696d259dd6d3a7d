"""All interleavings of a few members and a few faults: a breadth-first search over the states of the world.

Every event that could come next is tried from every state that can be reached: deliveries late, in any order or never;
the store's operation at any later time; a fault before and after every single action. Safety is what `World` checks on
the way. Progress is checked afterwards on the graph: from every state there is a way, without further faults, to one
where a group has trained to the end (or the run has ended as it may). Under fair scheduling it is then reached.

Model of the transport: what was sent stays deliverable until it is delivered or can have no effect any more (so order
is free and loss is "never"), except across a cut, which lets nothing through until it heals. Rounds are delivered as
tallies, or value by value (`singly`).
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any

from varuna_capslog.elastic import protocol
from varuna_capslog.elastic.generation import Generation
from varuna_capslog.elastic.rig.mail import Action, MailWorld, Scenario
from varuna_capslog.elastic.rig.world import Transition

__all__ = ["Exploration", "Scenario", "explore"]


@dataclass
class Exploration:
    """What was found: distinct states, transitions, and the first state without a way to the end, if any."""

    states: int
    transitions: int
    complete: bool
    stuck: int
    trace: tuple[Action, ...] = ()


def explore(
    scenario: Scenario,
    transition: Transition = protocol.step,
    compare: bool = True,
    most: int = 10_000_000,
) -> Exploration:
    """Explores a scenario to its end, or until `most` states were found.

    State of the search: a world; transition: one action; visited worlds are known by the numbers of their parts.

    Raises:
        Violation: with the actions that lead there.
    """
    parts: dict[Any, int] = {}
    seen: dict[tuple[int, ...], int] = {}
    came: list[tuple[int, Action]] = []
    sources, targets = array("l"), array("l")
    good = array("l")

    def number(world: MailWorld) -> tuple[int, bool]:
        key = tuple([parts.setdefault(part, len(parts)) for part in world.key()])
        found = seen.setdefault(key, len(seen))
        return found, found == len(seen) - 1 and found == len(came)

    def trace(state: int) -> tuple[Action, ...]:
        path: list[Action] = []
        while state:
            state, action = came[state]
            path.append(action)
        return tuple(reversed(path))

    first = MailWorld(scenario, transition, compare)
    first.begin()
    number(first)
    came.append((0, ()))
    queue = deque([(0, first)])
    transitions = 0
    while queue and len(seen) < most:
        at, world = queue.popleft()
        if world.done():
            good.append(at)
        for action, fault in world.actions():
            transitions += 1
            try:
                following = world.after(action)
            except AssertionError as error:
                path = "\n".join(map(_show, [*trace(at), action]))
                raise type(error)(f"{error}\nafter\n{path}") from error
            found, new = number(following)
            if new:
                came.append((at, action))
                queue.append((found, following))
            if not fault:
                sources.append(at)
                targets.append(found)
    complete = not queue
    stuck = _stuck(len(seen), sources, targets, good) if complete else []
    return Exploration(len(seen), transitions, complete, len(stuck), trace(stuck[0]) if stuck else ())


def _stuck(count: int, sources: array[int], targets: array[int], good: array[int]) -> list[int]:
    """States from which no way without faults leads to a good one: a search backwards from those."""
    import numpy as np
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order

    # one more node stands for "good": edges are turned round, so it reaches all that can reach it
    rows = np.concatenate([np.frombuffer(targets, dtype=np.int64), np.full(len(good), count)])
    columns = np.concatenate([np.frombuffer(sources, dtype=np.int64), np.frombuffer(good, dtype=np.int64)])
    graph = csr_matrix((np.ones(len(rows), dtype=np.int8), (rows, columns)), shape=(count + 1, count + 1))
    reached = breadth_first_order(graph, count, return_predecessors=False)
    lost = np.ones(count + 1, dtype=bool)
    lost[reached] = False
    return [int(state) for state in np.flatnonzero(lost)]


def _show(action: Action) -> str:
    return " ".join(
        f"generation {part.number} of {','.join(part.members)}" if isinstance(part, Generation) else str(part)
        for part in action
    )
