"""The errors a user can meet, one class per kind of answer.

Everything the command line prints in one sentence derives from `CapslogError`; anything else that escapes is a defect
of ours. A message names the value, the rule it breaks and the next action.
"""

from __future__ import annotations

__all__ = ["CapslogError", "ConfigError", "DiskFailed", "DoesNotFit", "HostTierFailed", "PeerLost", "StepRefused"]


class CapslogError(ValueError):
    """A mistake in a config, a file or a cluster that the user can correct.

    Attributes:
        exit_status: of the command.
        kind: of a worker's failure, as its report names it; see `failures.Failure`.
    """

    exit_status = 2
    kind = "user"


class ConfigError(CapslogError):
    """A config key or value that breaks a rule; the message begins with the file or the override it came from."""


class DiskFailed(CapslogError):
    """The run's folder cannot be written (full, over quota, read-only), or a checkpoint cannot be written.

    This stops every member of a run, because all members share the folder.
    """

    kind = "disk"


class DoesNotFit(CapslogError):
    """No plan keeps every stage within its device's memory. Exit status 3."""

    exit_status = 3
    kind = "does_not_fit"


class HostTierFailed(CapslogError):
    """A copy to or from the host tier failed, or did not end in time."""


class StepRefused(CapslogError):
    """A training step whose loss or gradients are not finite; nothing of it was applied. Exit status 4."""

    exit_status = 4
    kind = "step_refused"


class PeerLost(CapslogError):
    """Another rank closed its connection or did not answer in time; the cause is in that rank's own message."""

    exit_status = 5
    kind = "peer"

    def __init__(self, message: str, peer: int | None) -> None:
        super().__init__(message)
        self.peer = peer
