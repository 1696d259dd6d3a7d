"""Generations: their members, the boundaries on their past, and the stamp of every state of a layer.

The store holds exactly one `Generation`, the newest. Compare-and-set on its number replaces it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.plans.plan import Plan

__all__ = ["EMPTY", "INITIAL", "Generation", "Held", "Member", "MemberLayout", "Stamp"]

FORMAT = "varuna-capslog/generation/1"

Member = str
"""Name of one worker process, never used again: a worker that is started again is another member."""


class Stamp(NamedTuple):
    """Name of the boundary after optimizer step `step`, with the generation whose members voted on that step. Equal
    stamps mean equal state. The generation is part of the name since a step may be taken back and computed again in a
    later generation, with other bits on nondeterministic devices. Stamps sort by step.
    """

    step: int
    generation: int

    @classmethod
    def of_name(cls, name: str) -> Stamp | None:
        """Return the stamp in a file name `<step>-<generation>`; None for another form."""
        return cls(*map(int, name.split("-"))) if re.fullmatch("[0-9]{1,18}-[0-9]{1,18}", name) else None


LINEAGE_ENTRIES = 64
"""Most entries in `Generation.lineage`, so that the record does not grow with the run. Three would be enough: bases
rise, and no boundary older than the newest by more than two steps is needed.
"""

INITIAL = Stamp(0, 0)
"""Boundary before step 1, and the checkpoint of a run that has written none: the seed gives its state on every rank."""

Held = frozenset[tuple[int, Stamp]]
"""Training state that one member can send: (layer, boundary) pairs of layers that it trains, has trained or copies."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Membership of the run. A generation exists once the store has its record, which its founder wrote.

    Attributes:
        number: one more than its predecessor's.
        members: voters, in the order of ranks. Empty: the run is parked, with its state on disk.
        leaving: members that still send the layers they held, but neither vote nor own a layer.
        lineage: (generation, base) of each earlier generation that may have trained since `checkpoint`; base: the
            boundary from which it continued. Bases rise. Other states of older generations at the base's step or later
            were taken back and are void. Only the newest `LINEAGE_ENTRIES` are kept, without redundant ones.
        checkpoint: newest complete checkpoint on this generation's past that its founder knew of.
        reached: newest step that this or an earlier founder had applied; the boundary before it was settled.
        regress: True: where no member holds the settled steps, the run may go back to the checkpoint.
        forgotten: generation of the newest lineage entry dropped because there were too many, 0 for none. States of
            generations before it count as void: it is unknown which of them were taken back.
        plan: chosen by the founder, ranks in the order of `members`; None: every member computes the same plan.
        copies: in a small motion, the layers that each member held before and does not own now: the only copies before
            the next step; None: copies are placed as `redundancy` requires.
        motion: the founder's comparison after a loss, for people (`small_motion.Weighed.event_fields`).
    """

    number: int
    members: tuple[Member, ...]
    leaving: tuple[Member, ...] = ()
    lineage: tuple[tuple[int, Stamp], ...] = ()
    checkpoint: Stamp = INITIAL
    reached: int = 0
    regress: bool = False
    plan: Plan | None = field(default=None, hash=False)
    forgotten: int = 0
    copies: Mapping[Member, tuple[int, ...]] | None = field(default=None, hash=False)
    motion: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        everyone = self.members + self.leaving
        if len(set(everyone)) != len(everyone):
            raise CapslogError(f"generation {self.number} names a member twice: {', '.join(everyone)}")
        if self.plan is not None and self.plan.num_ranks > len(self.members):
            raise CapslogError(
                f"generation {self.number} has {len(self.members)} members, but a plan for {self.plan.num_ranks} ranks"
            )

    @property
    def participants(self) -> tuple[Member, ...]:
        """Participants of this generation's first round: its members and the leaving ones."""
        return self.members + self.leaving

    def continues(self, stamp: Stamp) -> bool:
        """True where the boundary lies on this generation's past: never taken back, not older than the checkpoint."""
        if stamp == self.checkpoint:
            return True
        if stamp.step <= self.checkpoint.step or stamp.generation < max(self.checkpoint.generation, self.forgotten):
            return False
        return all(
            stamp.step < base.step or stamp == base
            for generation, base in self.lineage
            if generation > stamp.generation
        )

    def successor(
        self,
        members: Sequence[Member],
        leaving: Sequence[Member] = (),
        base: Stamp | None = None,
        checkpoint: Stamp = INITIAL,
        reached: int = 0,
        regress: bool = False,
    ) -> Generation:
        """Return the record of the next generation.

        Args:
            base: boundary from which this generation continued; None if it never trained.
            reached: newest step that the founder applied; not read where `base` is None.
            checkpoint: newest that the founder knows; ignored where it does not lie on this generation's past.
        """
        lineage = self.lineage
        if base is not None:  # the new entry voids all that older entries with this base or a later one void
            lineage = (*(entry for entry in lineage if entry[1].step < base.step), (self.number, base))
        newest = checkpoint if self.continues(checkpoint) else self.checkpoint
        reached = self.reached if base is None else reached
        # States of generations before the checkpoint's count as older than the checkpoint: no entry must void them.
        lineage = tuple(entry for entry in lineage if entry[0] > newest.generation)
        left_out, lineage = lineage[:-LINEAGE_ENTRIES], lineage[-LINEAGE_ENTRIES:]
        forgotten = left_out[-1][0] if left_out else self.forgotten
        return Generation(
            self.number + 1, tuple(members), tuple(leaving), lineage, newest, reached, regress, forgotten=forgotten
        )

    def parked(self, checkpoint: Stamp = INITIAL) -> Generation:
        """Return the successor without members, for a host that *knows* that all voters have ended. A member outside
        may then found the next generation. The run may go back to the checkpoint: the settled steps are lost.
        """
        return self.successor((), checkpoint=checkpoint, regress=True)

    def to_json(self) -> dict[str, Any]:
        """Return the form in which the store keeps it."""
        value = dataclasses.asdict(dataclasses.replace(self, plan=None, copies=None, motion=None))
        del value["plan"], value["copies"], value["motion"]
        value["lineage"] = [[number, *base] for number, base in self.lineage]
        carried = {} if self.plan is None else {"plan": self.plan.to_json()}
        if self.copies is not None:
            carried["copies"] = {member: list(layers) for member, layers in self.copies.items()}
        if self.motion is not None:
            carried["motion"] = dict(self.motion)
        return {"format": FORMAT, **value, **carried}

    @classmethod
    def from_json(cls, value: Any, where: str = "generation") -> Generation:
        """Return the generation of a JSON value. Raises CapslogError that begins with `where`."""

        def stamp(pair: Any, name: str) -> Stamp:
            step, generation = fields.listed(pair, name, length=2)
            return Stamp(fields.whole(step, name), fields.whole(generation, name))

        def copied(copies: Any) -> dict[Member, tuple[int, ...]]:
            return {
                fields.text(member, "copies"): tuple(fields.whole(layer, "copies") for layer in layers)
                for member, layers in (
                    (member, fields.listed(row, "copies")) for member, row in fields.mapping(copies, "copies").items()
                )
            }

        def make() -> Generation:
            if not isinstance(value, Mapping) or value.get("format") != FORMAT:
                raise CapslogError(f"format is not {FORMAT!r}; the store belongs to another program or version")
            required = ["format", "number", "members", "leaving", "lineage", "checkpoint", "reached", "regress"]
            fields.refuse_unknown(value, [*required, "plan", "forgotten", "copies", "motion"])
            for key in required:
                if key not in value:
                    raise CapslogError(f"field {key!r} is missing")
            return cls(
                fields.whole(value["number"], "number"),
                tuple(fields.text(name, "members") for name in fields.listed(value["members"], "members")),
                tuple(fields.text(name, "leaving") for name in fields.listed(value["leaving"], "leaving")),
                tuple(
                    (fields.whole(number, "lineage"), stamp(base, "lineage"))
                    for number, *base in (
                        fields.listed(row, "lineage", length=3) for row in fields.listed(value["lineage"], "lineage")
                    )
                ),
                stamp(value["checkpoint"], "checkpoint"),
                fields.whole(value["reached"], "reached"),
                fields.boolean(value["regress"], "regress"),
                None if value.get("plan") is None else Plan.from_json(value["plan"], "plan"),
                fields.whole(value.get("forgotten", 0), "forgotten"),
                None if value.get("copies") is None else copied(value["copies"]),
                None if value.get("motion") is None else fields.mapping(value["motion"], "motion"),
            )

        return fields.within(where, make)


EMPTY = Generation(0, ())
"""Record of a store before the first generation: no members. Any member that asks to join may found the next one."""


@dataclass(frozen=True, slots=True)
class MemberLayout:
    """Layout of a generation: the layers that each member owns and copies.

    Attributes:
        owned: layers that a member trains, rising; replicas own the same layers. A member without layers still votes.
        copied: layers that a member keeps copies of for others.
        problem: a sentence where the copies do not give the redundancy that the run requires.
        plan: ranks in the order of the generation's members; None for a layout without stages.
    """

    num_layers: int
    owned: Mapping[Member, tuple[int, ...]]
    copied: Mapping[Member, tuple[int, ...]]
    problem: str | None = None
    plan: Plan | None = None
    _holders: dict[int, set[Member]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for member in dict.fromkeys((*self.owned, *self.copied)):
            for layer in self.holds(member):
                self._holders.setdefault(layer, set()).add(member)

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        members: Sequence[Member],
        copied: Mapping[Member, tuple[int, ...]],
        problem: str | None = None,
    ) -> MemberLayout:
        """Return the layout of a plan; the plan's rank r is `members[r]`."""
        owned: dict[int, list[int]] = {}
        for stage in plan.stages:
            for rank in stage.ranks:
                owned.setdefault(rank, []).extend(stage.numbers)
        of_member = {members[rank]: tuple(sorted(layers)) for rank, layers in sorted(owned.items())}
        return cls(plan.num_layers, of_member, copied, problem, plan)

    def with_copies(self, copied: Mapping[Member, tuple[int, ...]], problem: str | None) -> MemberLayout:
        """Return a layout with the same owners and only these copies."""
        return dataclasses.replace(self, copied=dict(copied), problem=problem)

    def holds(self, member: Member) -> tuple[int, ...]:
        """Layers that a member owns, then those that it copies."""
        return (*self.owned.get(member, ()), *self.copied.get(member, ()))

    def covers(self, members: Collection[Member]) -> bool:
        """True where these members together hold every layer, copies counted."""
        return len(self._holders) == self.num_layers and not any(map(set(members).isdisjoint, self._holders.values()))

    def __hash__(self) -> int:
        return hash((self.num_layers, tuple(sorted(self.owned.items())), tuple(sorted(self.copied.items()))))
