"""How one member takes part in an elastic run, whatever is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from varuna_capslog.elastic.member.timeouts import Timeouts
from varuna_capslog.membership.generation import INITIAL, Stamp

if TYPE_CHECKING:
    from varuna_capslog.elastic.member.pipeline_work import PipelineWork
    from varuna_capslog.elastic.member.runtime import Runtime
    from varuna_capslog.elastic.store.opening import MembershipStore
    from varuna_capslog.engine.executor import Observer

__all__ = ["Equipment", "RuntimeOptions"]


@dataclass(frozen=True)
class RuntimeOptions:
    """What `Runtime` depends on besides the member's name, its work and the store.

    Attributes:
        host: whose losses are losses of this member, too.
        address: of this host, as the others reach it.
        capacity: bytes of this member's device; 0: no limit.
        checkpoint: the newest complete one on disk.
        sync, shadows: see `state.Job`.
        probe: called at named points, for faults injected by tests.
        stop_wished: asked while the run waits, when there is no step whose vote could carry that wish.
    """

    host: str = "host"
    address: str = "127.0.0.1"
    capacity: int = 0
    checkpoint: Stamp = INITIAL
    sync: bool = True
    shadows: bool = True
    timeouts: Timeouts = field(default_factory=Timeouts)
    probe: Callable[[str], None] = lambda point: None
    stop_wished: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Equipment:
    """What a test or a measurement gives a member in place of the real things; an ordinary member has none of it.

    Attributes:
        probe: as in `RuntimeOptions`.
        observer: sees the work of the member's engines.
        work: builds what is trained, with the arguments of `PipelineWork`; None: `PipelineWork` itself.
        open_store: as `store.open_store`, which None stands for.
        runtime: the class of the runtime; None: `Runtime`.
    """

    probe: Callable[[str], None] = lambda point: None
    observer: Observer | None = None
    work: Callable[..., PipelineWork] | None = None
    open_store: Callable[[str, str | None], MembershipStore] | None = None
    runtime: type[Runtime] | None = None
