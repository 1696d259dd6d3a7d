"""Interface between the runtime of one member and what it trains: `Work`.

`pipeline_work` implements it for our engine, `script` for any program with `state()`, `load()` and `step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.membership.generation import Generation, Member, MemberLayout, Stamp
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.small_motion import Loss, Weighed
from varuna_capslog.plans.plan import Plan
from varuna_capslog.training.layer_state import LayerState

__all__ = ["Followed", "LayerState", "Opening", "Outcome", "Work"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of the vote on a step, the same on every member.

    finite: loss and gradients are finite, so the step may be applied. ballots: bytes of each member's vote, by rank.
    stop: a member wants to stop after this step.
    scale: factor of the gradients in the update of layer copies; 0: the step is skipped.
    """

    finite: bool
    ballots: Sequence[bytes]
    stop: bool
    scale: float


@dataclass(frozen=True, slots=True)
class Opening:
    """A generation about to train.

    number: of the generation in the store. base: the boundary from which training continues. members: by rank.
    why: sentences for people on members that left or came. knowledge: the value of each member's `knows`, by rank.
    moved_bytes: layer state that was sent, or read from the checkpoint.
    """

    number: int
    base: Stamp
    layout: MemberLayout
    members: tuple[Member, ...]
    why: tuple[str, ...] = ()
    moved_bytes: int = 0
    knowledge: tuple[Any, ...] = ()


class Followed(Protocol):
    """Copy of a layer, to which the steps of the owner are applied."""

    def state(self, copy: bool) -> LayerState:
        """Return the present state; with `copy` False, the live tensors."""

    def apply(self, update: Mapping[str, Tensor], step: int, scale: float) -> None:
        """Apply the owner's step with this update (final gradients)."""


class Work(Protocol):
    """Training of one member. Called by one thread, except where noted. Methods with a body are optional."""

    layer_bytes: tuple[int, ...]
    asked: bool = False
    """After `finish`: True where a person's request ended the run."""
    proposes: bool = False
    """True where members might compute different plans for the same seats, so that one member proposes it."""

    def place(self, seats: Sequence[Seat], plan: Plan | None = None) -> MemberLayout | str:
        """See `recovery.Place`."""

    def propose(self, seats: Sequence[Seat]) -> Plan | None:
        """Return the plan for a generation that this member founds; None where every member computes the same plan."""
        return None

    def weigh(self, loss: Loss) -> Weighed | None:
        """Choose between new cuts and a small motion after a loss, at the founding member; None: there is no choice."""
        return None

    def rebalance(self, seats: Sequence[Seat]) -> tuple[Member, str] | None:
        """Decide whether measured device speeds justify another plan, which `propose` then returns. Called after each
        step at the first voter. Returns the member with the slowest device and the reason in words, or None.
        """
        return None

    def look_ahead(self, seats: Sequence[Seat]) -> Iterator[Any]:
        """Search plans of possible next generations beside training; yield JSON values for other members' `learn`."""
        return iter(())

    def learn(self, findings: Any) -> None:
        """Add a value of another member's `look_ahead`. Raises CapslogError for a value that is no plan."""
        return

    def knows(self) -> Any:
        """Return a picklable value that all members exchange ahead of `open`, for joining ones. In another thread."""
        return None

    def pairs(self, layout: MemberLayout) -> Iterable[tuple[int, int]]:
        """Return the ordered pairs of ranks that exchange tensors over their own groups in this layout's generation."""
        return ()

    def begin_pairs(self, communicator: Communicator, pairs: Iterable[tuple[int, int]]) -> None:
        """Begin to open the groups of these pairs, ahead of `open`. Called in another thread."""
        return

    def open(self, opening: Opening, communicator: Communicator, states: Mapping[int, LayerState]) -> None:
        """Begin a generation: build this rank's part from its layers' states, whose tensors it may keep."""

    def shelve(self) -> Mapping[int, LayerState]:
        """End the generation; return the live states of its layers at the last boundary. Empty if none is open."""

    def needs(self) -> int:
        """Return the bytes that this member's device needs for the present plan; 0: unknown."""
        return 0

    def is_done(self, step: int) -> bool:
        """True where the run ends with this step."""

    def between(self, stamp: Stamp, save: bool = False) -> Stamp | None:
        """Do the work due at a boundary before the next step (checkpoints, evaluation), together with all members.
        Returns the newest boundary of this generation with a complete checkpoint. Raises PeerLost. save: a checkpoint
        is due, whatever the settings say; it is complete afterwards.
        """

    def compute(self, step: int) -> bool:
        """Compute a step, but change no state. Returns False where this rank's loss or gradients are not finite."""

    def vote(self, step: int, ballot: bytes) -> Outcome:
        """Vote on a step that was computed. Raises PeerLost."""

    def apply(self, step: int) -> None:
        """Apply the step that the vote accepted, without communication."""

    def discard(self, step: int) -> str:
        """Drop a step that was voted down; return why, in a sentence."""

    def state(self, layer: int, copy: bool) -> LayerState:
        """Return the state of an own layer at the present boundary; with `copy` False, the live tensors."""

    def update(self, layer: int) -> Mapping[str, Tensor]:
        """Return the final gradients of the computed step, for `Followed.apply`. Called before `apply`."""
        raise AssertionError("no member follows a layer of this work")

    def follow(self, layer: int, state: LayerState) -> Followed:
        """Return a copy of another member's layer, which begins with this state."""
        raise AssertionError("no member follows a layer of this work")

    def apply_to_copies(
        self, due: Sequence[tuple[Followed, Mapping[str, Tensor], int, float]]
    ) -> Callable[[], None] | None:
        """Begin each (copy, update, step, scale); return a function that waits for the end, or None if all are done.
        Two threads may call that function.
        """
        for followed, update, step, scale in due:
            followed.apply(update, step, scale)
        return None

    def initial(self, layer: int) -> LayerState:
        """Return the state of a layer before step 1."""

    def load(self, layer: int, stamp: Stamp) -> LayerState:
        """Load a layer from the checkpoint of this boundary. Raises CapslogError."""

    def persist(self, held: Mapping[tuple[int, Stamp], LayerState], record: Generation) -> None:
        """Write all states that this member holds to disk, so that a later run can continue from them."""

    def finish(self, stamp: Stamp, stopped: bool) -> None:
        """End the run, together with all members: last checkpoint, last evaluation. Raises PeerLost."""

    def note(self, kind: str, **details: Any) -> None:
        """Write an event to events.jsonl; one member writes the events that concern all members."""

    def close(self) -> None:
        """Close all that is open, after the member's part has ended or failed."""
        return
