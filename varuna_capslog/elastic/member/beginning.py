"""Where an elastic run begins: written by the host that begins it, read by every member when it comes.

The store carries it as three keys. A run that goes on counts its generations anew in the store; in the run's files they
follow those that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.store.opening import MembershipStore
from varuna_capslog.membership.generation import INITIAL, Member, Stamp

__all__ = ["Beginning", "MemberStart"]

_WAIT_SECONDS = 10.0


@dataclass(frozen=True)
class Beginning:
    """The first generation and boundary of a run.

    Attributes:
        first: what generation 1 of the store is called in the run's files.
        step: of the boundary.
        path: the checkpoint of that boundary; None at the beginning of training.
    """

    first: int = 1
    step: int = 0
    path: Path | None = None

    @property
    def stamp(self) -> Stamp:
        """The boundary, as generation 1 knows it."""
        return Stamp(self.step, 0)

    def keys(self) -> dict[str, str]:
        """What the store must hold before the first worker looks."""
        return {
            "first-plan": str(self.first),
            "resumed-step": str(self.step),
            "resumed-path": "" if self.path is None else str(self.path.absolute()),
        }

    @classmethod
    def read(cls, store: MembershipStore) -> Beginning:
        """What `keys` has put there. Raises CapslogError where it does not come within ten seconds."""

        found = []
        for key, what in (("first-plan", "plan"), ("resumed-step", "boundary"), ("resumed-path", "checkpoint")):
            value = store.get(key, _WAIT_SECONDS)
            if value is None:
                raise CapslogError(
                    f"the store does not say which {what} the run begins with: the host that began the run has not "
                    "come so far; start anew"
                )
            found.append(value)
        first, step, path = found
        return cls(int(first), int(step), Path(path) if path else None)


@dataclass(frozen=True)
class MemberStart:
    """What a member brings to its work, whatever is trained.

    Attributes:
        me: its name, never used before.
        offset: generation n of the store is n + offset in the run's files.
        resumed: where the checkpoint lies with which the run begins; nothing at the beginning of training.
        stop_wished: asked once per step; True on any member ends the run after that step.
        checkpoint: the boundary that the run begins with.
    """

    me: Member
    run_dir: Path
    offset: int = 0
    resumed: Mapping[Stamp, Path] = field(default_factory=dict)
    stop_wished: Callable[[], bool] = lambda: False
    checkpoint: Stamp = INITIAL
