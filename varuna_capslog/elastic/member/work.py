"""What a run must be able to do so that the runtime can move it between machines: the `Work` of one member.

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
    """How the vote on a step came out, alike on every member.

    Attributes:
        finite: loss and gradients are; the step may be applied.
        ballots: what each member gave, by rank.
        stop: a member wishes to stop after this step.
        scale: what the update multiplies gradients with, for those that follow layers; 0: the step is skipped.
    """

    finite: bool
    ballots: Sequence[bytes]
    stop: bool
    scale: float


@dataclass(frozen=True, slots=True)
class Opening:
    """A generation about to train.

    Attributes:
        number: of the generation; its plan is `plan-<number>.json`.
        base: the boundary that it goes on from.
        members: by rank.
        why: sentences for people: who left, who came.
        moved_bytes: state that changed owner.
        told: by rank, what each member's `knows` gave.
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
        """Its state now; without `copy` the live tensors."""

    def apply(self, update: Mapping[str, Tensor], step: int, scale: float) -> None:
        """The step that the owner applies with this update."""


class Work(Protocol):
    """One member's part of the run. Called by one thread. Methods with a body may be left out."""

    layer_bytes: tuple[int, ...]
    asked: bool = False
    """After `finish`: whether a person's wish ended the run."""
    proposes: bool = False
    """Whether `propose` gives plans that other members might not find alike."""

    def place(self, seats: Sequence[Seat], plan: Plan | None = None) -> MemberLayout | str:
        """See `recovery.Place`."""

    def propose(self, seats: Sequence[Seat]) -> Plan | None:
        """What these members shall run, for the record of a generation that this member founds; None where every
        member computes it alike.
        """
        return None

    def weigh(self, loss: Loss) -> Weighed | None:
        """After a loss, asked of the member that founds the next generation: new cuts at once, or first a small motion.
        None: there is no choice.
        """
        return None

    def rebalance(self, seats: Sequence[Seat]) -> tuple[Member, str] | None:
        """After each step, asked of the first voter: whether the speeds that were measured are worth another plan,
        which `propose` then gives; whose device was slowest, and why in words. None: the plan stays.
        """
        return None

    def look_ahead(self, seats: Sequence[Seat]) -> Iterator[Any]:
        """Searches for what generations that may follow these seats would run, in a thread of its own while training
        goes on; gives what it finds, for `learn` of other members, as JSON values.
        """
        return iter(())

    def learn(self, found: Any) -> None:
        """What another member's `look_ahead` has given. Raises CapslogError for what is no plan."""
        return

    def knows(self) -> Any:
        """What this member can tell joining members; picklable. Asked in another thread, ahead of `open`."""
        return None

    def pairs(self, layout: MemberLayout) -> Iterable[tuple[int, int]]:
        """The ordered pairs of ranks that exchange tensors over groups of their own in a generation of this layout."""
        return ()

    def begin_pairs(self, communicator: Communicator, pairs: Iterable[tuple[int, int]]) -> None:
        """Begins to open the groups of these pairs, ahead of `open`. Asked in another thread."""
        return

    def open(self, opening: Opening, communicator: Communicator, states: Mapping[int, LayerState]) -> None:
        """Begins a generation: builds this rank's part from the states of its layers, which it may keep."""

    def shelve(self) -> Mapping[int, LayerState]:
        """Ends a generation: the live states of its own layers at the last boundary; nothing where none is open."""

    def needs(self) -> int:
        """Bytes that this member's device must have for the plan that it trains by; 0: not known."""
        return 0

    def is_done(self, step: int) -> bool:
        """Whether the run ends with this step."""

    def between(self, stamp: Stamp, save: bool = False) -> Stamp | None:
        """What is due at a boundary before the next step (checkpoints, evaluation), together with all members.

        Args:
            save: a checkpoint is due, whatever the settings say; it is complete afterwards.

        Returns:
            The newest boundary of this generation of which a checkpoint has been completed. Raises PeerLost.
        """

    def compute(self, step: int) -> bool:
        """Forward, backward, sums; nothing of the state changes. Returns whether this rank's share is finite."""

    def vote(self, step: int, ballot: bytes) -> Outcome:
        """The vote on a step that was computed. Raises PeerLost."""

    def apply(self, step: int) -> None:
        """Applies the step that was voted, without communication."""

    def discard(self, step: int) -> str:
        """Drops a step that was voted down; returns why, in a sentence."""

    def state(self, layer: int, copy: bool) -> LayerState:
        """An own layer's state at the present boundary."""

    def update(self, layer: int) -> Mapping[str, Tensor]:
        """What a `Followed` needs for the step that was computed; read before `apply`."""
        raise AssertionError("no member follows a layer of this work")

    def follow(self, layer: int, state: LayerState) -> Followed:
        """Begins to follow another member's layer."""
        raise AssertionError("no member follows a layer of this work")

    def apply_to_copies(
        self, due: Sequence[tuple[Followed, Mapping[str, Tensor], int, float]]
    ) -> Callable[[], None] | None:
        """Begins `Followed.apply` of these copies, each with its update, step and scale.

        Returns:
            The wait for it, where it goes on beside the training; None: it is done.
        """
        for followed, update, step, scale in due:
            followed.apply(update, step, scale)
        return None

    def initial(self, layer: int) -> LayerState:
        """A layer before step 1."""

    def load(self, layer: int, stamp: Stamp) -> LayerState:
        """A layer from the checkpoint of this boundary. Raises CapslogError."""

    def persist(self, held: Mapping[tuple[int, Stamp], LayerState], record: Generation) -> None:
        """Writes what this member holds to disk, whatever it is, so that a later run can go on from it."""

    def finish(self, stamp: Stamp, stopped: bool) -> None:
        """The end of the run, together with all members: last checkpoint, last evaluation. Raises PeerLost."""

    def note(self, kind: str, **details: Any) -> None:
        """One line for people and one event of the run; only what concerns all is said by one member."""

    def close(self) -> None:
        """The member's part has ended, well or not: ends what is open."""
        return
