"""Values that members cast in a round, events that the runtime feeds to the protocol, and effects that it must execute.

Every event and effect of a generation names it. `protocol.step` drops older events, so the runtime may deliver late,
twice or out of order; it must keep the promises at each class. After the effects it frees layers outside `State.held`.
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
    "Bid",
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
"""A wished change: ("leave", member), ("join", member), or ("rebalance", member): its speed asks for another plan."""


class Proof(NamedTuple):
    """Digest of a layer's state at a boundary. owner: by a member that trained it; False: by a copy's holder."""

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
        voted: generation and boundary of its last vote on a step. Where all voters of that generation voted from there,
            the boundary is settled, whether or not any member has seen the outcome.
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
        changes: membership changes known to be wished; hints: changes that may be wished later.
        prepared: changes for which every layer that must move here has been copied ahead.
        save: a change may be cut off on its way: a checkpoint is to be written before it begins.
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
    """Event of one generation. A member of another drops it, or asks the store (`Heard` of a newer one)."""

    generation: int


@dataclass(frozen=True, slots=True)
class Enter(ProtocolEvent):
    """This process is loaded and warm, and wants to take part. Fed once; also after it was put aside."""


@dataclass(frozen=True, slots=True)
class StoreSays(ProtocolEvent):
    """Record in the store: answer to ReadStore and CompareAndSet (taken or not), or a watch. Promise: records come from
    one store that forgets nothing; a store that was started anew, empty, is lost.
    """

    record: Generation


@dataclass(frozen=True, slots=True)
class StoreLost(ProtocolEvent):
    """The store does not answer, or it is another one than before."""


@dataclass(frozen=True, slots=True)
class Heard(GenerationEvent):
    """Value of a participant in a round, this member's included. Promise: only what that member cast. Round 0 is always
    heard value by value, with the sender's proofs (`Proof`), which the runtime adds in Cast: only it can read memory.
    """

    round: int
    sender: Member
    value: Value


@dataclass(frozen=True, slots=True)
class Tally(GenerationEvent):
    """A whole round at once: values of all participants (round 0) or members (steps), as a collective gives them.
    Promise: each of them cast, and all members that get this tally get the same values. The others may not get it.
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
    """Copies for the vote on `step` are here. Fed once the step has begun, only where this member follows others'
    layers.

    sync: the owners' final gradients of `step` for every copy and shadow, and the copies at the boundary before it.
    async: every copy at the boundary before `step` (shadows as in sync).
    """

    step: int


@dataclass(frozen=True, slots=True)
class Received(GenerationEvent):
    """A layer that this rank now owns is here, verified, at the base. Fed once the first round is decided here."""

    layer: int


@dataclass(frozen=True, slots=True)
class Damaged(GenerationEvent):
    """A layer's digest was not its sender's. It was not taken, and comes again only after a change."""

    layer: int


@dataclass(frozen=True, slots=True)
class Broken(GenerationEvent):
    """Communication of the generation failed here, whichever member caused it; no further tally of it will come."""


@dataclass(frozen=True, slots=True)
class Suspects(ProtocolEvent):
    """Members that the failure detector (supervisors, leases) takes for lost now; replaces earlier ones. Fed again
    after each change, as only participants of the member's generation count. Safety never depends on it, but it must
    become right some time.
    """

    members: frozenset[Member]


@dataclass(frozen=True, slots=True)
class Tick(ProtocolEvent):
    """A time limit has passed in a waiting phase (CHANGE, OUTSIDE, SERVE): ask or propose again. The first in CHANGE
    comes later than dead members are usually detected; later ones may come quicker.
    """


@dataclass(frozen=True, slots=True)
class Wished(ProtocolEvent):
    """A change is wished: this member leaves, a warm one outside joins, or the plan changes. urgent: no time to
    prepare; save: perhaps none for the change either, and only leaving members hold some layers: a checkpoint first.
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
    """Shadows: these layers are here, at the boundary where this step begins, and Copied keeps them current."""

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
    """An effect of one generation, which its member was in when the protocol answered it."""

    generation: int


@dataclass(frozen=True, slots=True)
class ReadStore(Effect):
    """Ask the store for its record."""


@dataclass(frozen=True, slots=True)
class CompareAndSet(Effect):
    """Replace the record if its number is still `expected`; answer with the store's record. The runtime may add a plan
    for the record's members where not all of them would compute the same one.
    """

    expected: int
    record: Generation


@dataclass(frozen=True, slots=True)
class Cast(GenerationEffect):
    """Give this value in a round, to all of the generation's participants (round 0) or members (steps)."""

    round: int
    value: Value


@dataclass(frozen=True, slots=True)
class Compute(GenerationEffect):
    """Begin this step: forward, backward, sums. Nothing of the state at the boundary before it may change."""

    step: int


@dataclass(frozen=True, slots=True)
class Apply(GenerationEffect):
    """The vote succeeded: apply the step to owned and followed layers, and keep their state at `before` as well. First
    effect of its tally: without memory for it, the runtime takes the tally back and feeds Tightened.
    """

    step: int
    before: Stamp


@dataclass(frozen=True, slots=True)
class Discard(GenerationEffect):
    """All voted the step down: drop its gradients and end the run, the state as before the step."""

    step: int


@dataclass(frozen=True, slots=True)
class Send(GenerationEffect):
    """Send a layer at a boundary to its new owner."""

    layer: int
    stamp: Stamp
    target: Member


@dataclass(frozen=True, slots=True)
class Load(GenerationEffect):
    """Load a layer from the checkpoint of this boundary (INITIAL: initialise it from the seed)."""

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
    """All own layers are here: build this rank's stage at the boundary `base` and open the generation's groups."""

    base: Stamp
    layout: MemberLayout


@dataclass(frozen=True, slots=True)
class Abort(GenerationEffect):
    """End all communication of the generation at once: nothing of it is answered again."""


@dataclass(frozen=True, slots=True)
class Ask(Effect):
    """Ask these members to be let in (they get Wished)."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Prepare(GenerationEffect):
    """Begin to copy layers ahead for these changes; Prepared when all that come here have come. hinted: they may never
    be made, so no vote waits for the copies, and no event says when they are there.
    """

    changes: frozenset[Change]
    hinted: bool = False


@dataclass(frozen=True, slots=True)
class SaveAll(GenerationEffect):
    """Write a checkpoint together with all members, before Compute. The change comes next, also where that fails."""


@dataclass(frozen=True, slots=True)
class Bid(GenerationEffect):
    """Tell these members that they may go (they get Farewell)."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Persist(Effect):
    """Write all that is held to disk, by layer and stamp, before anything else; then say why."""

    why: str


@dataclass(frozen=True, slots=True)
class Wait(Effect):
    """Say that the run waits, and for what."""

    why: str


@dataclass(frozen=True, slots=True)
class Release(Effect):
    """This member has no part in the run any more: the process may end, the host may be given back."""
