"""All interleavings of a few members and a few faults: a search over the states of the world.

Every event that could come next is tried from every reachable state: deliveries late, in any order or never; the
store's operation at any later time; a fault before and after every single action. `World` checks safety on the way.
Progress is checked afterwards on the graph: from every state there is a way, without further faults, to a state where a
group has trained to the end (or the run has ended in another permitted way). Under fair scheduling it is then reached.

Model of the transport: a message stays deliverable until it is delivered or can have no effect any more (so order is
free and loss is "never"), except across a cut, which lets nothing through until it heals. Rounds are delivered as
tallies, or value by value (`singly`).
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.rig.search.mail import Action, MailWorld, Scenario
from tests.rig.search.world import Transition
from varuna_capslog.membership import protocol
from varuna_capslog.membership.generation import Generation

__all__ = ["Exploration", "Scenario", "explore"]

_TELL = 100_000


@dataclass
class Exploration:
    """Result of a search: distinct states, transitions, and the first state without a way to the end, if any."""

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
    deep: bool = False,
    tell: Callable[[int, int], None] | None = None,
) -> Exploration:
    """Explore a scenario to its end, or until `most` states were found.

    State of the search: a world; transition: an action; visited worlds are identified by the numbers of their parts.

    Args:
        deep: depth first instead of breadth first: only the worlds along one way are kept, for searches of millions
            of states, but the path to a violation is not the shortest.
        tell: called after every 100,000 states with the numbers of states found and of those not yet visited.

    Raises:
        Violation: with the actions that lead there.
    """
    parts: dict[Any, int] = {}
    seen: dict[bytes, int] = {}
    came, picks = array("l"), array("H")  # of each state: its predecessor, and the number of the action that led here
    sources, targets = array("l"), array("l")
    good = array("l")

    def number(world: MailWorld) -> tuple[int, bool]:
        key = array("I", [parts.setdefault(part, len(parts)) for part in world.key()]).tobytes()
        count = len(seen)
        state = seen.setdefault(key, count)
        return state, state == count

    def trace(state: int) -> list[Action]:
        """Return the actions that lead to a state, by following them once more."""
        path: list[int] = []
        while state:
            path.append(picks[state])
            state = came[state]
        world, actions = first, []
        for pick in reversed(path):
            actions.append(_pick(world, pick))
            world = world.after(actions[-1])
        return actions

    first = MailWorld(scenario, transition, compare)
    first.begin()
    number(first)
    came.append(0)
    picks.append(0)
    queue = deque([(0, first)])
    transitions = told = 0
    while queue and len(seen) < most:
        if tell is not None and len(seen) // _TELL > told:
            told = len(seen) // _TELL
            tell(len(seen), len(queue))
        state, world = queue.pop() if deep else queue.popleft()
        if world.done():
            good.append(state)
        for pick, (action, fault) in enumerate(world.actions()):
            transitions += 1
            try:
                following = world.after(action)
            except AssertionError as error:
                path = "\n".join(map(_show, [*trace(state), action]))
                raise type(error)(f"{error}\nafter\n{path}") from error
            following_state, new = number(following)
            if new:
                came.append(state)
                picks.append(pick)
                queue.append((following_state, following))
            if not fault:
                sources.append(state)
                targets.append(following_state)
    complete = not queue
    stuck = _stuck(len(seen), sources, targets, good) if complete else []
    return Exploration(len(seen), transitions, complete, len(stuck), tuple(trace(stuck[0])) if stuck else ())


def _pick(world: MailWorld, number: int) -> Action:
    """Return the action of this number among those that could come next."""
    return next(itertools.islice(world.actions(), number, None))[0]


def _stuck(count: int, sources: array[int], targets: array[int], good: array[int]) -> list[int]:
    """Return the states from which no way without faults leads to a good one, by a backward search from good states."""
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
