"""Random schedules for the tests of this room, their text, and an oracle for waiting that shares no code with it."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable

from hypothesis import strategies as st

from varuna_capslog.schedules import SCHEDULES, Action, Schedule, from_strings, to_strings


def format_csv(schedule: Iterable[Iterable[Action]]) -> str:
    """Return a line per rank, actions separated by commas; a rank without work is an empty line."""
    return "".join(",".join(row) + "\n" for row in to_strings(schedule))


def parse_csv(text: str) -> Schedule:
    """The inverse of `format_csv`. Blanks around an action and empty cells (idle time in a drawn table) are skipped."""
    return from_strings([[cell.strip() for cell in line.split(",") if cell.strip()] for line in text.splitlines()])


@st.composite
def shapes(draw: st.DrawFn, max_stages: int = 8, max_microbatches: int = 12) -> tuple[int, int, list[int]]:
    """(stages, microbatches, placement), every rank with at least one stage, in any order."""
    num_stages = draw(st.integers(1, max_stages))
    num_ranks = draw(st.integers(1, num_stages))
    extra_ranks = draw(
        st.lists(st.integers(0, num_ranks - 1), min_size=num_stages - num_ranks, max_size=num_stages - num_ranks)
    )
    placement = draw(st.permutations([*range(num_ranks), *extra_ranks]))
    return num_stages, draw(st.integers(1, max_microbatches)), list(placement)


names = st.sampled_from(SCHEDULES)


def halves(seconds: list[float]) -> dict[str, list[float]]:
    """Split these backward seconds evenly into input and weight halves."""
    return {"I": [0.5 * duration for duration in seconds], "W": [0.5 * duration for duration in seconds]}


def scrambled(num_stages: int, num_microbatches: int, placement: list[int], seed: int) -> Schedule:
    """A schedule that is right for every rank by itself and usually deadlocks between ranks."""
    generator = random.Random(seed)
    schedule: Schedule = [[] for _ in range(max(placement) + 1)]
    for rank, actions in enumerate(schedule):
        stages = [stage for stage in range(num_stages) if placement[stage] == rank]
        forwards = dict.fromkeys(stages, 0)
        backwards = dict.fromkeys(stages, 0)
        while any(backwards[stage] < num_microbatches for stage in stages):
            ready = [
                Action(stage, "F", forwards[stage])
                for stage in stages
                if forwards[stage] < min(num_microbatches, forwards.get(stage - 1, num_microbatches))
            ] + [
                Action(stage, "B", backwards[stage])
                for stage in stages
                if backwards[stage] < min(forwards[stage], backwards.get(stage + 1, num_microbatches))
            ]
            action = generator.choice(ready)
            (forwards if action.kind == "F" else backwards)[action.stage] += 1
            actions.append(action)
    return schedule


def has_cycle(edges: dict[Hashable, set[Hashable]]) -> bool:
    """True if the graph (node -> nodes it waits for) has a cycle. Removes, in rounds, nodes that wait for none."""
    waiting = {node: set(targets) for node, targets in edges.items()}
    while True:
        done = [node for node, targets in waiting.items() if not targets & waiting.keys()]
        if not done:
            return bool(waiting)
        for node in done:
            del waiting[node]


def compute_edges(schedule: Schedule, num_stages: int) -> dict[Hashable, set[Hashable]]:
    """Map each action to those it waits for: the previous one on its rank, and the neighbour's that makes its input."""
    edges: dict[Hashable, set[Hashable]] = {}
    for actions in schedule:
        before: Action | None = None
        for action in actions:
            edges[action] = set() if before is None else {before}
            if action.kind == "F" and action.stage > 0:
                edges[action].add(Action(action.stage - 1, "F", action.microbatch))
            if action.kind in "BI" and action.stage < num_stages - 1:
                edges[action].add(Action(action.stage + 1, action.kind, action.microbatch))
            before = action
    return edges
