"""The first round of a generation, value by value: who holds what, and whether copies made ahead are as they should be.

A shadow is compared with its owner before anybody relies on it. Everybody compares the same values, so that all leave
the same ones out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from varuna_capslog.membership.generation import Generation, Member, Stamp
from varuna_capslog.membership.messages import Contribution

__all__ = ["FirstRound", "Proof"]


class Proof(NamedTuple):
    """A layer's digest at a boundary, by its owner or by one that holds it ahead of a change."""

    layer: int
    stamp: Stamp
    owner: bool
    digest: str

    @classmethod
    def read(cls, row: Iterable[Any]) -> Proof:
        """From JSON's list."""
        layer, stamp, owner, digest = row
        return cls(int(layer), Stamp(*stamp), bool(owner), str(digest))


class FirstRound:
    """The values of one generation's first round, as far as they are here."""

    def __init__(self) -> None:
        self._values: dict[Member, tuple[Contribution, tuple[Proof, ...]]] = {}

    def add(self, member: Member, value: Contribution, proofs: Iterable[Proof]) -> None:
        """What a participant cast."""
        self._values[member] = value, tuple(proofs)

    def is_complete(self, record: Generation) -> bool:
        """Whether all participants' values are here."""
        return set(self._values) == set(record.participants)

    def missing(self, record: Generation) -> set[Member]:
        """Participants that have not cast."""
        return set(record.participants) - set(self._values)

    def damaged(self) -> frozenset[tuple[Member, int]]:
        """(member, layer) of shadows that are not their owner's state at the same boundary."""
        owners: dict[tuple[int, Stamp], set[str]] = {}
        for _, proofs in self._values.values():
            for proof in proofs:
                if proof.owner:
                    owners.setdefault((proof.layer, proof.stamp), set()).add(proof.digest)
        return frozenset(
            (member, proof.layer)
            for member, (_, proofs) in self._values.items()
            for proof in proofs
            if not proof.owner and owners.get((proof.layer, proof.stamp), {proof.digest}) != {proof.digest}
        )

    def values(self, record: Generation, damaged: Collection[tuple[Member, int]]) -> dict[Member, Contribution]:
        """All values in the order of participants, without what is damaged."""
        return {
            member: replace(value, held=frozenset(entry for entry in value.held if (member, entry[0]) not in damaged))
            for member in record.participants
            for value in (self._values[member][0],)
        }
