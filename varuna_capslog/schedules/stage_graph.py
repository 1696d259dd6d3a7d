"""The stages of one step as a graph: where each runs, which microbatches it takes, and which stage hands on to which.

Generators, validator, lowering and simulator read it, and so does the engine. One pipeline of stages in order is the
plain case (`StageGraph.line`). Equal pipelines, pipelines of unequal length and replicas of single stages differ in the
route that each microbatch takes through the stages; where tensors go straight from the stage that writes them to those
that read them, stages of parallel branches differ in what they wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError

__all__ = ["Edge", "StageGraph"]

Edge = tuple[int, int]
"""A stage, and one that takes what it makes."""


@dataclass(frozen=True)
class StageGraph:
    """The stages of one step, numbered from 0, and the way of every microbatch through them.

    A stage takes its microbatches in rising order, `grain` of them per call, and its calls are counted from 0: where a
    stage takes microbatches 2 and 5 only, one per call, its call 1 is microbatch 5. An `Action` names the call.

    ranks: stage -> rank. Several stages may share a rank.
    routes: microbatch -> its stages, in an order in which each stands behind those that it takes something from.
    pairs: those of stages of which the second takes what the first makes, for every microbatch that passes both.
        None: each stage of a route hands on to the next one of the route.
    grains: stage -> microbatches of a call; default: 1.

    Raises CapslogError where a route is empty, names an unknown stage, or passes a stage twice, where a pair leads
    backwards on a route, where a grain does not divide the microbatches of its stage, and where there are more
    microbatches than `fields.MOST_MICROBATCHES` and `fields.MOST_CALLS`.
    """

    ranks: tuple[int, ...]
    routes: tuple[tuple[int, ...], ...]
    pairs: frozenset[Edge] | None = None
    grains: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (calls := sum(map(len, self.routes))) > fields.MOST_CALLS:
            raise CapslogError(
                f"the {len(self.routes)} microbatches of a step pass {calls} stages together; at most "
                f"{fields.MOST_CALLS} can be scheduled: take fewer and larger ones"
            )
        known = set(range(len(self.ranks)))
        for route in dict.fromkeys(self.routes):
            if not route or len(set(route)) < len(route) or not set(route) <= known:
                raise CapslogError(
                    f"microbatch {self.routes.index(route)} takes the stages {list(route)}; it must pass one or more "
                    f"of the stages 0 to {len(self.ranks) - 1}, each once"
                )
        for route in dict.fromkeys(self.routes):
            places = {stage: place for place, stage in enumerate(route)}
            for one, other in self.pairs or ():
                if places.get(one, -1) > places.get(other, len(route)):
                    raise CapslogError(
                        f"stage {other} takes what stage {one} makes, but comes before it on the route {list(route)}; "
                        "order the stages of a route so that none waits for a later one"
                    )
        if not self.grains:
            object.__setattr__(self, "grains", (1,) * len(self.ranks))
        for stage, (grain, row) in enumerate(zip(self.grains, self.microbatches, strict=True)):
            if len(row) > fields.MOST_MICROBATCHES:
                raise _too_many(len(row), f"stage {stage}")
            if grain < 1 or len(row) % grain:
                raise CapslogError(
                    f"stage {stage} takes {len(row)} microbatches, {grain} per call; choose a grain that divides them"
                )

    @classmethod
    def line(cls, num_stages: int, num_microbatches: int, ranks: Sequence[int] | None = None) -> StageGraph:
        """One pipeline: every microbatch passes all stages in order.

        ranks: stage -> rank; default: stage s on rank s. Several stages may share a rank, in any order.

        Raises CapslogError unless there is at least one stage and one microbatch, one rank per stage, and the ranks are
        0, 1, ..., n - 1 without a gap (a rank without a stage would wait for ever in the step's collectives).
        """
        if num_stages < 1 or num_microbatches < 1:
            raise CapslogError(
                f"{num_stages} stages and {num_microbatches} microbatches: a schedule needs at least one of each"
            )
        if num_microbatches > fields.MOST_MICROBATCHES:
            raise _too_many(num_microbatches, "a pipeline")
        placement = tuple(range(num_stages) if ranks is None else ranks)
        if len(placement) != num_stages:
            raise CapslogError(
                f"placement {list(placement)} names {len(placement)} ranks for {num_stages} stages; give one rank per "
                "stage"
            )
        if set(placement) != set(range(len(set(placement)))):
            raise CapslogError(
                f"placement {list(placement)} leaves a rank without a stage; use ranks 0, 1, ... without a gap"
            )
        return cls(placement, (tuple(range(num_stages)),) * num_microbatches)

    @property
    def num_ranks(self) -> int:
        """Ranks 0 .. n - 1 have a list of actions each; that of a rank without a stage is empty."""
        return max(self.ranks) + 1

    @cached_property
    def microbatches(self) -> list[list[int]]:
        """stage -> the microbatches that it takes, rising."""
        found: list[list[int]] = [[] for _ in self.ranks]
        for microbatch, route in enumerate(self.routes):
            for stage in route:
                found[stage].append(microbatch)
        return found

    @cached_property
    def calls(self) -> list[list[tuple[int, ...]]]:
        """stage -> call -> its microbatches, rising."""
        return [
            [tuple(row[first : first + grain]) for first in range(0, len(row), grain)]
            for row, grain in zip(self.microbatches, self.grains, strict=True)
        ]

    @cached_property
    def upstream(self) -> list[list[tuple[tuple[int, int], ...]]]:
        """stage, call -> the stages and calls that make what it takes; empty where it takes inputs of the step only."""
        return self._neighbours(backwards=True)

    @cached_property
    def downstream(self) -> list[list[tuple[tuple[int, int], ...]]]:
        """stage, call -> the stages and calls that take what it makes; empty where it computes the loss."""
        return self._neighbours(backwards=False)

    @cached_property
    def depths(self) -> list[int]:
        """stage -> the most stages on a way from it to the loss, itself included; 0 for one without microbatches."""
        found = [0] * len(self.ranks)
        for route in dict.fromkeys(self.routes):
            after = self._after(route)
            lengths: dict[int, int] = {}
            for stage in reversed(route):
                lengths[stage] = 1 + max((lengths[other] for other in after[stage]), default=0)
                found[stage] = max(found[stage], lengths[stage])
        return found

    @cached_property
    def edges(self) -> list[Edge]:
        """(stage, stage that takes what it makes) of every pair between which microbatches travel, each once."""
        return list(dict.fromkeys(edge for route in dict.fromkeys(self.routes) for edge in self.edges_of(route)))

    def edges_of(self, route: tuple[int, ...]) -> list[Edge]:
        """Those of one route."""
        return [(one, other) for one, others in self._after(route).items() for other in others]

    def lines(self) -> list[tuple[int, ...]]:
        """Every way from a stage that takes nothing of another one to a stage that hands nothing on, each once."""
        found: dict[tuple[int, ...], None] = {}
        for route in dict.fromkeys(self.routes):
            after = self._after(route)
            taking = {other for others in after.values() for other in others}
            ways: list[tuple[int, ...]] = [(stage,) for stage in reversed(route) if stage not in taking]
            while ways:
                way = ways.pop()
                ways += [(*way, other) for other in reversed(after[way[-1]])]
                if not after[way[-1]]:
                    found[way] = None
        return list(found)

    def _after(self, route: tuple[int, ...]) -> dict[int, list[int]]:
        """stage of a route -> the stages of the route that take what it makes, in the order of the route."""
        if self.pairs is None:
            return {one: [other] for one, other in pairwise(route)} | {route[-1]: []}
        return {one: [other for other in route if (one, other) in self.pairs] for one in route}

    def _neighbours(self, backwards: bool) -> list[list[tuple[tuple[int, int], ...]]]:
        """For each call the calls on the other side of its edges that have one of its microbatches."""
        call_of = [
            {microbatch: place // grain for place, microbatch in enumerate(row)}
            for row, grain in zip(self.microbatches, self.grains, strict=True)
        ]
        found: list[list[set[tuple[int, int]]]] = [[set() for _ in calls] for calls in self.calls]
        edges = {route: self.edges_of(route) for route in set(self.routes)}
        for microbatch, route in enumerate(self.routes):
            for edge in edges[route]:
                here, there = reversed(edge) if backwards else edge
                found[here][call_of[here][microbatch]].add((there, call_of[there][microbatch]))
        return [[tuple(sorted(row)) for row in calls] for calls in found]


def _too_many(count: int, taker: str) -> CapslogError:
    return CapslogError(
        f"{taker} takes {count} microbatches in a step; at most {fields.MOST_MICROBATCHES} can be scheduled: take "
        "fewer and larger ones"
    )
