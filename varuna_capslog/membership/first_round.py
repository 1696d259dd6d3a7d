"""Which copies made ahead of a change are trusted: each is compared with its owner before a generation relies on it.

Pure functions on the values of a first round. Every participant has the same values, so every one leaves out the same
copies. `protocol.step` calls this before it decides; `rig.world`'s rule 9 says what must hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from varuna_capslog.membership.generation import Member, Stamp
from varuna_capslog.membership.wire import Contribution, Proof

__all__ = ["distrusted", "without"]


def distrusted(
    values: Mapping[Member, Contribution], valid: Callable[[Stamp], bool] = lambda stamp: True
) -> frozenset[tuple[Member, int]]:
    """(member, layer) of copies that are not to be used, at whatever boundary.

    A copy is left out where an owner stands at the same boundary with another digest. It is also left out where the
    only owners to compare with stand one step before or after it, because one of the two missed the last vote: nothing
    is lost by that, since such an owner holds the newest boundary that all members are known to have reached. Where no
    owner takes part, no participant can judge the copy, and it is used.

    Args:
        valid: whether a stamp lies on the generation's lineage; proofs of states that were taken back say nothing.
    """
    owners: dict[int, list[Proof]] = {}
    for value in values.values():
        for proof in value.proofs:
            if proof.owner and valid(proof.stamp):
                owners.setdefault(proof.layer, []).append(proof)
    return frozenset(
        (member, proof.layer)
        for member, value in values.items()
        for proof in value.proofs
        if not proof.owner and not _is_trusted(proof, owners.get(proof.layer, []))
    )


def _is_trusted(copy: Proof, owners: Collection[Proof]) -> bool:
    alike = [owner.digest == copy.digest for owner in owners if owner.stamp == copy.stamp]
    return all(alike) if alike else not any(abs(owner.stamp.step - copy.stamp.step) == 1 for owner in owners)


def without(
    values: Mapping[Member, Contribution], left_out: Collection[tuple[Member, int]]
) -> dict[Member, Contribution]:
    """The values without these copies, in the same order."""
    if not left_out:
        return dict(values)
    return {
        member: replace(value, held=frozenset(entry for entry in value.held if (member, entry[0]) not in left_out))
        for member, value in values.items()
    }
