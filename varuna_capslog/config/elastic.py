"""The keys of a config's `elastic` section: how a run continues when devices leave or join."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from varuna_capslog.config.section import Section

__all__ = ["Elastic"]


class Elastic(Section):
    """Settings of a run whose devices leave or join while it trains."""

    enabled: bool = False
    """Whether the run may change its members while it trains; otherwise the loss of a worker ends it."""

    redundancy: int = Field(1, ge=0)
    """Simultaneous losses of hosts that are survived without going back to a checkpoint. The state of each
    layer is on redundancy + 1 hosts, or on as many workers if there are too few hosts; 0 keeps no copies."""

    protection: Literal["sync", "async"] = "sync"
    """sync: copies make each step together with their owners, and a loss costs at most the step under way. async:
    copies follow in the background, and a loss costs at most two steps."""

    hang_seconds: float = Field(10.0, gt=0)
    """How long a worker may take to notice a fault that others have seen, before it is ended and counts as lost. A
    worker notices between two messages, so this must exceed the longest forward or backward of a microbatch."""

    stopped_seconds: float = Field(1.0, gt=0)
    """How long a worker's process may stand still (stopped by a signal or a debugger) before it counts as lost."""

    lease_seconds: float = Field(3.0, gt=0)
    """How long a host may be silent before the others count all its workers as lost. It sends a
    sign four times as often."""

    patience_seconds: float = Field(1.0, gt=0)
    """How long a change waits for missing workers before it goes on without them. It waits three times
    as long for lost layers before the run goes back to a checkpoint, unless all workers that had them are known to have
    ended. Losses should usually be noticed sooner than this."""

    replace_lost: bool = False
    """Whether a host starts a new worker on the device of a lost one."""

    shadows: bool = True
    """Whether a planned change is prepared by copying layers while training goes on; otherwise the step waits."""

    small_motion: Literal["auto", "always", "never"] = "auto"
    """How a run goes on after a loss. never: new cuts at once, and the next step waits for the layers and copies that
    move. always: those that hold copies of the lost layers train them, hardly anything moves, and new cuts and the
    lacking copies follow beside the training. auto: whichever is expected to lose less time. Needs shadows."""

    rebalance: bool = False
    """Whether a worker that turns out slower than its plan, for whatever reason, is given fewer layers while the run
    trains. The planner must weigh time."""

    min_devices: int = Field(1, gt=0)
    """With fewer devices than this the run waits, all state kept, until more have joined."""
