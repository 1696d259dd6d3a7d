"""The stages of one step as a graph: where each runs, which microbatches it takes, and which stage hands on to which.

Generators, validator, lowering and simulator read it, and so does the engine. One pipeline of stages in order is the
plain case (`StageGraph.line`); equal pipelines, pipelines of unequal length and replicas of single stages differ only
in the route that each microbatch takes through the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from varuna_capslog.base.errors import CapslogError

__all__ = ["StageGraph"]


@dataclass(frozen=True)
class StageGraph:
    """The stages of one step, numbered from 0, and the way of every microbatch through them.

    A stage takes its microbatches in rising order, one per call, and its calls are counted from 0: where a stage takes
    microbatches 2 and 5 only, its call 1 is microbatch 5. An `Action` names the call.

    ranks: stage -> rank. Several stages may share a rank.
    routes: microbatch -> its stages, from the one that takes the inputs to the one that computes the loss.

    Raises CapslogError where a route is empty, names an unknown stage, or passes a stage twice.
    """

    ranks: tuple[int, ...]
    routes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for microbatch, route in enumerate(self.routes):
            if not route or len(set(route)) < len(route) or not set(route) <= set(range(len(self.ranks))):
                raise CapslogError(
                    f"microbatch {microbatch} takes the stages {list(route)}; it must pass one or more of the stages "
                    f"0 to {len(self.ranks) - 1}, each once"
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
        """stage -> the microbatches of its calls, rising."""
        found: list[list[int]] = [[] for _ in self.ranks]
        for microbatch, route in enumerate(self.routes):
            for stage in route:
                found[stage].append(microbatch)
        return found

    @cached_property
    def upstream(self) -> list[list[tuple[int, int] | None]]:
        """stage, call -> the stage and call that make its input; None where it takes the inputs of the step."""
        return self._neighbours(-1)

    @cached_property
    def downstream(self) -> list[list[tuple[int, int] | None]]:
        """stage, call -> the stage and call that take its output; None where it computes the loss."""
        return self._neighbours(1)

    @cached_property
    def depths(self) -> list[int]:
        """stage -> the most stages on a way from it to the loss, itself included; 0 for one without microbatches."""
        found = [0] * len(self.ranks)
        for route in dict.fromkeys(self.routes):
            for place, stage in enumerate(route):
                found[stage] = max(found[stage], len(route) - place)
        return found

    def edges(self) -> list[tuple[int, int]]:
        """(stage, next stage) of every pair between which microbatches travel, each once."""
        return list(dict.fromkeys(pair for route in dict.fromkeys(self.routes) for pair in pairwise(route)))

    def _neighbours(self, step: int) -> list[list[tuple[int, int] | None]]:
        """For each call the next stage of the route in one direction, and the number of its call."""
        call_of = [{microbatch: call for call, microbatch in enumerate(row)} for row in self.microbatches]
        place_of = {route: {stage: place for place, stage in enumerate(route)} for route in set(self.routes)}
        found: list[list[tuple[int, int] | None]] = []
        for stage, row in enumerate(self.microbatches):
            calls: list[tuple[int, int] | None] = []
            for microbatch in row:
                route = self.routes[microbatch]
                place = place_of[route][stage] + step
                other = route[place] if 0 <= place < len(route) else None
                calls.append(None if other is None else (other, call_of[other][microbatch]))
            found.append(calls)
        return found
