"""Ground truth of a world, which no member can see; the rules are checked against it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from varuna_capslog.membership import messages as m
from varuna_capslog.membership.generation import INITIAL, Member, Stamp

__all__ = ["Damage", "GroundTruth"]


class Damage(NamedTuple):
    """A state in a member's memory that differs from the state of its stamp, and the layer's owners at that time."""

    holder: int
    layer: int
    stamp: Stamp
    owners: frozenset[int]


@dataclass
class GroundTruth:
    """Ground truth: facts that no member can see, such as the past of every state and all wished changes.

    Attributes:
        parents: the boundary that each boundary was made from.
        bases: the boundary at which each generation began.
        rounds: newest step of each generation that all have voted for.
        behind: number of votes of each generation that were completed after its successor was founded.
        settled: the newest boundary that all voters of the newest generation are known to have reached.
        protected: members of the newest generation that voted on a step and that copies were placed in.
        missed: protected members that are missing in later generations, which kept the existing copies.
        wished, hinted: the changes that any member was told of.
        asks: (member, change): this member knows that the change wants a checkpoint first.
        damaged: states that differ from those of their stamps.
    """

    parents: dict[Stamp, Stamp] = field(default_factory=dict)
    bases: dict[int, Stamp] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    behind: dict[int, int] = field(default_factory=dict)
    settled: Stamp = INITIAL
    protected: tuple[Member, ...] = ()
    missed: frozenset[Member] = frozenset()
    wished: frozenset[m.Change] = frozenset()
    hinted: frozenset[m.Change] = frozenset()
    asks: frozenset[tuple[int, m.Change]] = frozenset()
    damaged: frozenset[Damage] = frozenset()

    def copy(self) -> GroundTruth:
        """The same once more, to change."""
        parents, bases, rounds, behind = dict(self.parents), dict(self.bases), dict(self.rounds), dict(self.behind)
        return replace(self, parents=parents, bases=bases, rounds=rounds, behind=behind)

    def past(self, stamp: Stamp) -> set[Stamp]:
        """Return all states of a state's past, itself included."""
        ancestors = {stamp}
        while stamp in self.parents:
            stamp = self.parents[stamp]
            ancestors.add(stamp)
        return ancestors
