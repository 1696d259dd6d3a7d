"""The stages of one step as a graph: rank and microbatches of each stage, and the edges along which tensors travel.

One pipeline of stages in order is the plain case (`StageGraph.line`). Equal pipelines, pipelines of unequal length and
replicas of single stages differ in the route of each microbatch through the stages. Where tensors go straight from the
stage that writes them to the stages that read them, stages of parallel branches wait for different stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError

__all__ = ["Edge", "StageGraph"]

Edge = tuple[int, int]
"""A stage, and a stage that reads its outputs."""


@dataclass(frozen=True)
class StageGraph:
    """Stages of one step, numbered from 0, and the route of every microbatch through them.

    A stage takes its microbatches in rising order, `grain` of them per call, and its calls are counted from 0: where a
    stage takes microbatches 2 and 5 only, one per call, its call 1 is microbatch 5. An `Action` names the call.

    ranks: stage -> rank; several stages may share a rank. grains: stage -> microbatches of a call; default: 1.
    routes: microbatch -> its stages, each after the stages whose outputs it reads.
    pairs: (maker, reader of its outputs), for every microbatch that passes both. None: all neighbours on a route.

    Raises CapslogError where a route is empty, names an unknown stage, or passes a stage twice, where a pair leads
    backwards on a route, where a grain does not divide its stage's microbatches, and where a stage takes more
    microbatches than `fields.MOST_MICROBATCHES`, or all stages together more than `fields.MOST_CALLS`.
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
        stages = set(range(len(self.ranks)))
        for route in dict.fromkeys(self.routes):
            if not route or len(set(route)) < len(route) or not set(route) <= stages:
                raise CapslogError(
                    f"microbatch {self.routes.index(route)} takes the stages {list(route)}; it must pass one or more "
                    f"of the stages 0 to {len(self.ranks) - 1}, each once"
                )
        for route in dict.fromkeys(self.routes):
            places = {stage: place for place, stage in enumerate(route)}
            for maker, reader in self.pairs or ():
                if places.get(maker, -1) > places.get(reader, len(route)):
                    raise CapslogError(
                        f"stage {reader} takes what stage {maker} makes, but comes before it on the route "
                        f"{list(route)}; order the stages of a route so that none waits for a later one"
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
        """Make one pipeline: every microbatch passes all stages in order. ranks: stage -> rank, in any order; default:
        stage s on rank s. Raises CapslogError unless there is at least one stage and one microbatch, one rank per
        stage, and ranks 0 .. n - 1 without a gap (a rank without a stage would wait for ever in the step's
        collectives).
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
        return cls.of(placement, (tuple(range(num_stages)),) * num_microbatches)

    @staticmethod
    @lru_cache(maxsize=256)
    def of(
        ranks: tuple[int, ...],
        routes: tuple[tuple[int, ...], ...],
        pairs: frozenset[Edge] | None = None,
        grains: tuple[int, ...] = (),
    ) -> StageGraph:
        """Make the graph of these fields, cached, since searches need the same graphs and their calls many times."""
        return StageGraph(ranks, routes, pairs, grains)

    @property
    def num_ranks(self) -> int:
        """Number of ranks; the list of a rank without a stage is empty."""
        return max(self.ranks) + 1

    @cached_property
    def microbatches(self) -> list[list[int]]:
        """stage -> the microbatches that it takes, rising."""
        rows: list[list[int]] = [[] for _ in self.ranks]
        for microbatch, route in enumerate(self.routes):
            for stage in route:
                rows[stage].append(microbatch)
        return rows

    @cached_property
    def calls(self) -> list[list[tuple[int, ...]]]:
        """stage -> call -> its microbatches, rising."""
        return [
            [tuple(row[first : first + grain]) for first in range(0, len(row), grain)]
            for row, grain in zip(self.microbatches, self.grains, strict=True)
        ]

    @cached_property
    def upstream(self) -> list[list[tuple[tuple[int, int], ...]]]:
        """stage, call -> the stages and calls that make its inputs; empty where it reads only inputs of the step."""
        return self._neighbours(backwards=True)

    @cached_property
    def downstream(self) -> list[list[tuple[tuple[int, int], ...]]]:
        """stage, call -> the stages and calls that read its outputs; empty where it computes the loss."""
        return self._neighbours(backwards=False)

    @cached_property
    def depths(self) -> list[int]:
        """stage -> stages on the longest path from it to the loss, with itself; 0 for a stage without microbatches."""
        depths = [0] * len(self.ranks)
        for route in dict.fromkeys(self.routes):
            after = self._after(route)
            lengths: dict[int, int] = {}
            for stage in reversed(route):
                lengths[stage] = 1 + max((lengths[reader] for reader in after[stage]), default=0)
                depths[stage] = max(depths[stage], lengths[stage])
        return depths

    @cached_property
    def edges(self) -> list[Edge]:
        """Pairs (stage, stage that reads its outputs) between which microbatches travel, each once."""
        return list(dict.fromkeys(edge for route in dict.fromkeys(self.routes) for edge in self.edges_of(route)))

    def edges_of(self, route: tuple[int, ...]) -> list[Edge]:
        """Return the edges of one route."""
        return [(maker, reader) for maker, readers in self._after(route).items() for reader in readers]

    def lines(self) -> list[tuple[int, ...]]:
        """Return every path from a stage that reads from no other stage to a stage that sends to none, each once."""
        paths: dict[tuple[int, ...], None] = {}
        for route in dict.fromkeys(self.routes):
            after = self._after(route)
            taking = {reader for readers in after.values() for reader in readers}
            unfinished: list[tuple[int, ...]] = [(stage,) for stage in reversed(route) if stage not in taking]
            while unfinished:
                path = unfinished.pop()
                unfinished += [(*path, reader) for reader in reversed(after[path[-1]])]
                if not after[path[-1]]:
                    paths[path] = None
        return list(paths)

    def _after(self, route: tuple[int, ...]) -> dict[int, list[int]]:
        """Return stage of a route -> the stages that read its outputs, in the order of the route."""
        if self.pairs is None:
            return {maker: [reader] for maker, reader in pairwise(route)} | {route[-1]: []}
        return {maker: [reader for reader in route if (maker, reader) in self.pairs] for maker in route}

    def _neighbours(self, backwards: bool) -> list[list[tuple[tuple[int, int], ...]]]:
        """Return, for each call, the calls on the other side of its edges that have one of its microbatches."""
        call_of = [
            {microbatch: place // grain for place, microbatch in enumerate(row)}
            for row, grain in zip(self.microbatches, self.grains, strict=True)
        ]
        neighbours: list[list[set[tuple[int, int]]]] = [[set() for _ in calls] for calls in self.calls]
        edges = {route: self.edges_of(route) for route in set(self.routes)}
        for microbatch, route in enumerate(self.routes):
            for edge in edges[route]:
                stage, neighbour = reversed(edge) if backwards else edge
                neighbours[stage][call_of[stage][microbatch]].add((neighbour, call_of[neighbour][microbatch]))
        return [[tuple(sorted(row)) for row in calls] for calls in neighbours]


def _too_many(count: int, taker: str) -> CapslogError:
    return CapslogError(
        f"{taker} takes {count} microbatches in a step; at most {fields.MOST_MICROBATCHES} can be scheduled: take "
        "fewer and larger ones"
    )
