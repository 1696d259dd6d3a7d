"""Values that members cast in a round, events that the runtime feeds to the protocol, and effects that it must execute.

Events and effects of a generation have its number. `protocol.step` drops older events, so the runtime may deliver late,
twice or out of order; it must keep the promises of each class. After the effects it frees layers outside `State.held`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from varuna_capslog.membership.generation import INITIAL, Generation, Held, Member, MemberLayout, Stamp

__all__ = [
    "Abort",
    "Apply",
    "Ask",
    "Broken",
    "Cast",
    "Change",
    "Checkpointed",
    "CompareAndSet",
    "Compute",
    "Computed",
    "Contribution",
    "Copied",
    "Damaged",
    "Decided",
    "Discard",
    "Effect",
    "Enter",
    "Farewell",
    "GenerationEffect",
    "GenerationEvent",
    "Heard",
    "Hint",
    "Install",
    "LetLeave",
    "Load",
    "Persist",
    "Prepare",
    "Prepared",
    "Proof",
    "ProtocolEvent",
    "ReadStore",
    "Received",
    "Release",
    "SaveAll",
    "Send",
    "StoreLost",
    "StoreSays",
    "Suspects",
    "Tally",
    "Tick",
    "Tightened",
    "Value",
    "Vote",
    "Wait",
    "Wished",
]


# -- values of a round -----------------------------------------------------------------------------------------------

Change = tuple[str, Member]
"""A wished change: ("leave", member), ("join", member), or ("rebalance", member), whose speed needs another plan."""


class Proof(NamedTuple):
    """Digest of a layer's state at a boundary. owner: made by a member that trained the layer; False: from a copy."""

    layer: int
    stamp: Stamp
    owner: bool
    digest: str


@dataclass(frozen=True, slots=True)
class Contribution:
    """Value cast in round 0 of a generation: the state and the device of a participant.

    Attributes:
        held: all training state that it can send.
        host: members of one host are lost together. capacity: bytes of its device; 0 where the run has no capacities.
        checkpoint: the newest complete one that it knows of.
        voted: generation of its last vote on a step, and the boundary before that step. If all voters of the generation
            voted from there, the boundary is settled, even if no member has seen the outcome.
        proofs: of copies that it holds ahead of a change, and of trained layers with such copies elsewhere.
    """

    held: Held
    host: str
    capacity: int = 0
    checkpoint: Stamp = INITIAL
    voted: tuple[int, Stamp] = (0, INITIAL)
    proofs: frozenset[Proof] = frozenset()


@dataclass(frozen=True, slots=True)
class Vote:
    """Cast in round s: this member's share of step s is final.

    Attributes:
        finite: loss and gradients are finite. urgent: its deadline leaves no time for preparation.
        changes: wished changes that this member knows; hints: changes that may be wished later.
        prepared: changes for which every layer that must move here has been copied ahead.
        save: the change may not be finished in time, so a checkpoint must be written before it begins.
    """

    finite: bool = True
    changes: frozenset[Change] = frozenset()
    prepared: frozenset[Change] = frozenset()
    urgent: bool = False
    hints: frozenset[Change] = frozenset()
    save: bool = False


Value = Contribution | Vote


# -- events ----------------------------------------------------------------------------------------------------------


class ProtocolEvent:
    """Event that a member hears: input of `protocol.step`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class GenerationEvent(ProtocolEvent):
    """Event of one generation. A member in another drops it; `Heard` of a newer one makes it read the store."""

    generation: int


@dataclass(frozen=True, slots=True)
class Enter(ProtocolEvent):
    """This process is loaded and warm, and wants to take part. Fed once: a member that is left out later asks again."""


@dataclass(frozen=True, slots=True)
class StoreSays(ProtocolEvent):
    """Record in the store: the answer to ReadStore or to CompareAndSet (successful or not), or read from the log.
    Promise: records come from one store that loses nothing; a store that was started again, empty, is StoreLost.
    """

    record: Generation


@dataclass(frozen=True, slots=True)
class StoreLost(ProtocolEvent):
    """The store does not answer, or another store answers in its place."""


@dataclass(frozen=True, slots=True)
class Heard(GenerationEvent):
    """Value of one participant in a round, also of this member. Promise: the sender has cast it. Round 0 always comes
    value by value, with the sender's proofs (`Proof`), which the runtime adds in Cast: only it can read memory.
    """

    round: int
    sender: Member
    value: Value


@dataclass(frozen=True, slots=True)
class Tally(GenerationEvent):
    """A whole round at once: values of all participants (round 0) or members (steps), as a collective gives them.
    Promise: each of them was cast, and all members that get this tally get the same values. Some may not get it.
    """

    round: int
    values: Mapping[Member, Value]


@dataclass(frozen=True, slots=True)
class Computed(GenerationEvent):
    """This rank's gradients of the step are final (and summed over replicas); nothing was applied."""

    step: int
    finite: bool = True


@dataclass(frozen=True, slots=True)
class Copied(GenerationEvent):
    """Copies for the vote on `step` are here. Fed after the step has begun, and only to members with copies of layers
    that others own.

    sync: the owners' final gradients of `step` for every copy and shadow, and the copies at the boundary before it.
    async: every copy at the boundary before `step` (shadows as in sync).
    """

    step: int


@dataclass(frozen=True, slots=True)
class Received(GenerationEvent):
    """A layer that this rank now owns has arrived, verified, at the boundary `base`. Fed after Decided."""

    layer: int


@dataclass(frozen=True, slots=True)
class Damaged(GenerationEvent):
    """A layer arrived with another digest than its sender gave. It was not taken, and is sent again after a change."""

    layer: int


@dataclass(frozen=True, slots=True)
class Broken(GenerationEvent):
    """Communication of the generation failed here, whichever member caused it; no further tally of it will come."""


@dataclass(frozen=True, slots=True)
class Suspects(ProtocolEvent):
    """Members that the failure detector (supervisors, leases) now considers lost; replaces earlier sets. Fed again
    after each change, as only participants of the member's generation count. It may be wrong without harm to safety,
    but the run makes progress only once it is right.
    """

    members: frozenset[Member]


@dataclass(frozen=True, slots=True)
class Tick(ProtocolEvent):
    """A time limit has passed in a waiting phase: read the store or propose again (CHANGE, WAIT); see `changes.tick`.
    The first in CHANGE comes later than dead members are usually detected; the next ones may come sooner.
    """


@dataclass(frozen=True, slots=True)
class Wished(ProtocolEvent):
    """A change is wished: a member leaves, a warm one outside joins, or the plan changes. urgent: there is no time to
    prepare. save: perhaps none for the change either, and only leaving members hold some layers: a checkpoint first.
    """

    change: Change
    urgent: bool = False
    save: bool = False


@dataclass(frozen=True, slots=True)
class Hint(ProtocolEvent):
    """A change that may be wished later: its copies may be made ahead, but the membership stays as it is."""

    change: Change


@dataclass(frozen=True, slots=True)
class Prepared(GenerationEvent):
    """Shadow copies of these layers are here, at the boundary where this step begins; Copied now includes them."""

    changes: frozenset[Change]
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Checkpointed(ProtocolEvent):
    """A checkpoint of all layers at this boundary is complete on disk."""

    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Tightened(GenerationEvent):
    """A step lacked memory: plans now count on `capacity` bytes of this device (0: no limit known).
    voted: this happened in Apply; the boundary before is unchanged, and nothing else of the tally was executed.
    """

    capacity: int
    voted: bool = False


@dataclass(frozen=True, slots=True)
class Farewell(GenerationEvent):
    """The generation has taken its first step without the leaving members: they may go."""


# -- effects, carried out in the order given ---------------------------------------------------------------------------


class Effect:
    """Output of `protocol.step`: something that the runtime must do."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class GenerationEffect(Effect):
    """Effect of the generation that the member was in when the protocol returned it."""

    generation: int


@dataclass(frozen=True, slots=True)
class ReadStore(Effect):
    """Read the store's record; the answer is StoreSays."""


@dataclass(frozen=True, slots=True)
class CompareAndSet(Effect):
    """Replace the record if its number is still `expected`; the answer is StoreSays. The runtime may add a plan for the
    record's members where not all of them would compute the same one.
    """

    expected: int
    record: Generation


@dataclass(frozen=True, slots=True)
class Cast(GenerationEffect):
    """Send this value of a round to all of the generation's participants (round 0) or members (steps)."""

    round: int
    value: Value


@dataclass(frozen=True, slots=True)
class Compute(GenerationEffect):
    """Begin this step: forward, backward, gradient sums. The state at the boundary before it must not change."""

    step: int


@dataclass(frozen=True, slots=True)
class Apply(GenerationEffect):
    """The vote succeeded: apply the step to owned layers and copies, and keep their state at `before` as well. This is
    the first effect of a tally: where memory is lacking, the runtime takes the tally back and feeds Tightened.
    """

    step: int
    before: Stamp


@dataclass(frozen=True, slots=True)
class Discard(GenerationEffect):
    """The step was voted down: drop its gradients and end the run, with the state before the step."""

    step: int


@dataclass(frozen=True, slots=True)
class Send(GenerationEffect):
    """Send a layer at a boundary to its new owner."""

    layer: int
    stamp: Stamp
    target: Member


@dataclass(frozen=True, slots=True)
class Load(GenerationEffect):
    """Load a layer from the checkpoint of this boundary (INITIAL: initialize it from the seed)."""

    layer: int
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Decided(GenerationEffect):
    """The first round is complete: all participants have the same values, and make the same decision.

    values: of all participants in order, without untrusted copies (see `recovery.distrusted`).
    distrusted: layers of these copies. moved_bytes: sent, or read from the checkpoint, before training goes on.
    """

    values: Mapping[Member, Contribution]
    distrusted: frozenset[int] = frozenset()
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Install(GenerationEffect):
    """All own layers are here: build this rank's stages at the boundary `base` and open the generation's groups."""

    base: Stamp
    layout: MemberLayout


@dataclass(frozen=True, slots=True)
class Abort(GenerationEffect):
    """End all communication of the generation at once: no message of it is answered again."""


@dataclass(frozen=True, slots=True)
class Ask(Effect):
    """Ask these members to let this one join (they get Wished)."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Prepare(GenerationEffect):
    """Begin to copy layers ahead for these changes; feed Prepared when all layers that come here have arrived.
    hinted: the changes may never be made, so no vote waits for the copies, and Prepared is not fed.
    """

    changes: frozenset[Change]
    hinted: bool = False


@dataclass(frozen=True, slots=True)
class SaveAll(GenerationEffect):
    """Write a checkpoint together with all members, before Compute. The change follows the next vote in any case."""


@dataclass(frozen=True, slots=True)
class LetLeave(GenerationEffect):
    """Tell these members that they may leave (they get Farewell)."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Persist(Effect):
    """Write all held states to disk, by layer and stamp, before the next effect; then write the event with `why`."""

    why: str


@dataclass(frozen=True, slots=True)
class Wait(Effect):
    """Write the event that the run waits, and for what."""

    why: str


@dataclass(frozen=True, slots=True)
class Release(Effect):
    """This member has no part in the run any more: the process may end, the host may be given back."""
