"""Interface through which the runtime moves a run between machines: the `Work` of one member.

`pipeline_work` is our engine, `script` any program with `state()`, `load()` and `step()`.
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
    """Outcome of the vote on a step, alike on every member.

    finite: loss and gradients are; the step may be applied. ballots: of each member, by rank.
    stop: a member wishes to stop after this step.
    scale: factor of the gradients in the update, for members that follow layers; 0: the step is skipped.
    """

    finite: bool
    ballots: Sequence[bytes]
    stop: bool
    scale: float


@dataclass(frozen=True, slots=True)
class Opening:
    """A generation about to train.

    number: of the generation; its plan is `plan-<number>.json`. base: the boundary that it goes on from.
    members: by rank. why: sentences for people: members that left and came.
    moved_bytes: state that changed owner. told: by rank, the value of each member's `knows`.
    """

    number: int
    base: Stamp
    layout: MemberLayout
    members: tuple[Member, ...]
    why: tuple[str, ...] = ()
    moved_bytes: int = 0
    told: tuple[Any, ...] = ()


class Followed(Protocol):
    """A copy of a layer that makes the same steps as its owner."""

    def state(self, copy: bool) -> LayerState:
        """Present state; without `copy` the live tensors."""

    def apply(self, update: Mapping[str, Tensor], step: int, scale: float) -> None:
        """Make the step that the owner applies with this update."""


class Work(Protocol):
    """The part of one member in the run. Called by one thread. Methods with a body may be left out."""

    layer_bytes: tuple[int, ...]
    asked: bool = False
    """After `finish`: whether a person's wish ended the run."""
    proposes: bool = False
    """Whether `propose` gives plans that other members might not find alike."""

    def place(self, seats: Sequence[Seat], plan: Plan | None = None) -> MemberLayout | str:
        """See `recovery.Place`."""

    def propose(self, seats: Sequence[Seat]) -> Plan | None:
        """Return the plan for the record of a generation founded here; None where every member computes it alike."""
        return None

    def weigh(self, loss: Loss) -> Weighed | None:
        """Choose between new cuts at once and a small motion, after a loss, at the founding member; None: no choice."""
        return None

    def rebalance(self, seats: Sequence[Seat]) -> tuple[Member, str] | None:
        """Decide after each step, at the first voter, whether the measured speeds are worth another plan, which
        `propose` then gives. Returns the member with the slowest device, and the reason in words; None: the plan stays.
        """
        return None

    def look_ahead(self, seats: Sequence[Seat]) -> Iterator[Any]:
        """Search plans of possible next generations beside the training; yield findings for others' `learn` (JSON)."""
        return iter(())

    def learn(self, findings: Any) -> None:
        """Take a finding of another member's `look_ahead`. Raises CapslogError for a value that is no plan."""
        return

    def knows(self) -> Any:
        """Return a picklable value for joining members. Called in another thread, ahead of `open`."""
        return None

    def pairs(self, layout: MemberLayout) -> Iterable[tuple[int, int]]:
        """Return the ordered pairs of ranks that exchange tensors over their own groups in this layout's generation."""
        return ()

    def begin_pairs(self, communicator: Communicator, pairs: Iterable[tuple[int, int]]) -> None:
        """Begin to open the groups of these pairs, ahead of `open`. Called in another thread."""
        return

    def open(self, opening: Opening, communicator: Communicator, states: Mapping[int, LayerState]) -> None:
        """Begin a generation: build this rank's part from the states of its layers, which it may keep."""

    def shelve(self) -> Mapping[int, LayerState]:
        """End a generation, return the live states of its own layers at the last boundary; none where none is open."""

    def needs(self) -> int:
        """Bytes that this member's device must have for the plan that it trains by; 0: not known."""
        return 0

    def is_done(self, step: int) -> bool:
        """True where the run ends with this step."""

    def between(self, stamp: Stamp, save: bool = False) -> Stamp | None:
        """Do the work due at a boundary before the next step (checkpoints, evaluation), together with all members.
        Returns the newest boundary of this generation with a complete checkpoint. Raises PeerLost. save: a checkpoint
        is due, whatever the settings say; it is complete afterwards.
        """

    def compute(self, step: int) -> bool:
        """Forward, backward, sums; nothing of the state changes. Returns whether this rank's share is finite."""

    def vote(self, step: int, ballot: bytes) -> Outcome:
        """Vote on a step that was computed. Raises PeerLost."""

    def apply(self, step: int) -> None:
        """Apply the step that was voted, without communication."""

    def discard(self, step: int) -> str:
        """Drop a step that was voted down; return why, in a sentence."""

    def state(self, layer: int, copy: bool) -> LayerState:
        """State of an own layer at the present boundary."""

    def update(self, layer: int) -> Mapping[str, Tensor]:
        """Return the update with which a `Followed` makes the step that was computed; read before `apply`."""
        raise AssertionError("no member follows a layer of this work")

    def follow(self, layer: int, state: LayerState) -> Followed:
        """Begin to follow another member's layer."""
        raise AssertionError("no member follows a layer of this work")

    def apply_to_copies(
        self, due: Sequence[tuple[Followed, Mapping[str, Tensor], int, float]]
    ) -> Callable[[], None] | None:
        """Begin `Followed.apply` of copies (update, step, scale); return the wait for it, or None where it is done."""
        for followed, update, step, scale in due:
            followed.apply(update, step, scale)
        return None

    def initial(self, layer: int) -> LayerState:
        """A layer before step 1."""

    def load(self, layer: int, stamp: Stamp) -> LayerState:
        """Load a layer from the checkpoint of this boundary. Raises CapslogError."""

    def persist(self, held: Mapping[tuple[int, Stamp], LayerState], record: Generation) -> None:
        """Write all states that this member holds to disk, so that a later run can go on from them."""

    def finish(self, stamp: Stamp, stopped: bool) -> None:
        """End the run, together with all members: last checkpoint, last evaluation. Raises PeerLost."""

    def note(self, kind: str, **details: Any) -> None:
        """Write an event of the run, with a line for people; one member writes the events that concern all."""

    def close(self) -> None:
        """Close all that is open; the member's part has ended, well or not."""
        return
