"""What happened in a world, whatever its members believe. No member can see it; the rules are checked against it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from varuna_capslog.membership import messages as m
from varuna_capslog.membership.generation import INITIAL, Member, Stamp

__all__ = ["Damage", "Past"]


class Damage(NamedTuple):
    """A state in a member's memory that is not what its stamp says, and the members that trained the layer then."""

    holder: int
    layer: int
    stamp: Stamp
    owners: frozenset[int]


@dataclass
class Past:
    """The past of every state, and what was wished and by whom it is known.

    Attributes:
        parents: the boundary that each boundary was made from.
        bases: where each generation began.
        rounds: of each generation the newest step that all have voted for.
        behind: of each generation how many votes were completed after its successor was founded.
        settled: the newest boundary that all voters of the newest generation are known to have reached.
        protected: members of the newest generation that voted on a step and that copies were placed in.
        missed: those of them that later generations, which kept the copies they found, did without.
        wished, hinted: the changes that any member was told of.
        asks: (member, change): this member knows that the change wants a checkpoint first.
        damaged: states that are not what their stamps say.
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

    def copy(self) -> Past:
        """The same once more, to change."""
        parents, bases, rounds, behind = dict(self.parents), dict(self.bases), dict(self.rounds), dict(self.behind)
        return replace(self, parents=parents, bases=bases, rounds=rounds, behind=behind)

    def past(self, stamp: Stamp) -> set[Stamp]:
        """A state's whole past, itself included."""
        found = {stamp}
        while stamp in self.parents:
            stamp = self.parents[stamp]
            found.add(stamp)
        return found
