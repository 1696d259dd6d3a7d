"""A layout of some devices as the placement of copies sees it: ways through the stages, bytes of the ranks.

A `Candidate` of equal pipelines and a plan of any stages are both read as a `Choice`. Pure; no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from varuna_capslog.membership.candidates import Candidate
from varuna_capslog.membership.generation import Member
from varuna_capslog.plans.plan import Plan
from varuna_capslog.schedules import Edge

__all__ = ["Choice"]

Way = list[tuple[int, tuple[int, ...]]]
"""The stages that serve one block, in the order of the chain: rank and layers of each."""


@dataclass(frozen=True)
class Choice:
    """A choice for the members in the order of their ranks.

    Attributes:
        ways: every way through the stages once.
        rank_bytes: bytes of each rank's device, with what lies beside training, 0 for a rank without stages; None where
            they are not known.
        links: (rank, rank that reads its stages' outputs) where tensors go straight to the stages that read them; None
            where the stages of a way hand on to each other in their order.
    """

    ways: list[Way]
    rank_bytes: tuple[int, ...] | None
    links: frozenset[Edge] | None = None

    @classmethod
    def of_candidate(cls, candidate: Candidate, num_layers: int) -> Choice:
        """Return the choice of equal pipelines, one after the other."""
        stages, ends = len(candidate.cuts), [*candidate.cuts[1:], num_layers]
        layers = [tuple(range(first, end)) for first, end in zip(candidate.cuts, ends, strict=True)]
        ways = [
            [(replica * stages + stage, layers[stage]) for stage in range(stages)]
            for replica in range(candidate.replicas)
        ]
        return cls(ways, None if candidate.stage_bytes is None else candidate.stage_bytes * candidate.replicas)

    @classmethod
    def of_plan(cls, plan: Plan, beside: Sequence[int], one_memory: bool = False, edges: Iterable[Edge] = ()) -> Choice:
        """Return the choice of a plan of any stages; the bytes are those that the plan predicts.

        Args:
            beside: bytes on the device beside training, per layer that a rank holds.
            one_memory: the host tier is the device's own memory.
            edges: of the chain's graph, which direct routes follow.
        """
        layers = [tuple(stage.numbers) for stage in plan.stages]
        ranks = plan.placement()
        ways = [[(ranks[number], layers[number]) for number in path] for path in plan.paths()]
        held: list[int] = []
        for rank in range(plan.num_ranks):
            numbers = [number for number, at in enumerate(ranks) if at == rank]
            sizes = [plan.stages[number].bytes for number in numbers]
            if plan.ranks and (told := plan.ranks[rank].bytes) is not None:
                sizes = [told + ((plan.ranks[rank].host_bytes or 0) if one_memory else 0)]
            told_sizes = [size for size in sizes if size is not None]
            if len(told_sizes) == len(sizes):
                held.append(sum(told_sizes) + sum(beside[layer] for number in numbers for layer in layers[number]))
        links = None
        if plan.routes == "direct":
            links = frozenset((ranks[writer], ranks[reader]) for writer, reader in plan.stage_graph(edges).edges)
        return cls(ways, tuple(held) if len(held) == plan.num_ranks else None, links)

    def of_members(
        self, members: Sequence[Member]
    ) -> tuple[list[list[tuple[Member, Sequence[int]]]], list[tuple[Member, Member]] | None]:
        """`ways` and `links` with the members in the places of their ranks."""
        ways: list[list[tuple[Member, Sequence[int]]]] = [
            [(members[rank], layers) for rank, layers in way] for way in self.ways
        ]
        links = None if self.links is None else [(members[writer], members[reader]) for writer, reader in self.links]
        return ways, links

    @property
    def used(self) -> set[int]:
        """The ranks that have stages."""
        return {rank for way in self.ways for rank, _ in way}

    def fits(self, usable: Sequence[int]) -> bool:
        """Return True if each rank fits the bytes that its device can use, or where no bytes are known."""
        return self.rank_bytes is None or all(
            held <= limit for held, limit in zip(self.rank_bytes, usable, strict=False)
        )
