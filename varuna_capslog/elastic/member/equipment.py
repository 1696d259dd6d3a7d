"""What a member of an elastic run is equipped with where something else than the real thing takes its place.

The process that starts a member hands this down: faults at chosen points, a member that is watched, a store whose
connections go through a relay. An ordinary member has none of it and loads nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from varuna_capslog.elastic.member.pipeline_work import PipelineWork
    from varuna_capslog.elastic.member.runtime import Runtime
    from varuna_capslog.elastic.store.opening import MembershipStore
    from varuna_capslog.engine.observer import Observer

__all__ = ["Equipment"]


def _pass_by(point: str) -> None:
    """Nothing happens at any point."""


@dataclass(frozen=True)
class Equipment:
    """The parts of a member that may be replaced.

    Attributes:
        probe: called with the name of every point that the member comes to; see `RuntimeOptions`.
        observer: sees the work of the member's engines.
        work: builds what is trained, with the arguments of `PipelineWork`; None: `PipelineWork` itself.
        open_store: as `store.open_store`, which None stands for.
        runtime: the class of the runtime; None: `Runtime`.
    """

    probe: Callable[[str], None] = _pass_by
    observer: Observer | None = None
    work: Callable[..., PipelineWork] | None = None
    open_store: Callable[[str, str | None], MembershipStore] | None = None
    runtime: type[Runtime] | None = None
