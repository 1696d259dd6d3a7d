"""Steps that run out of memory: reads the errors of torch and of the host tier.

Other programs may take memory that a plan counted on. The member then gives the step up, lets plans count on less
memory of its device, and all make the step again (`training`, `membership/changes.tightened`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from varuna_capslog.base.errors import HostTierFailed
from varuna_capslog.base.failures import is_out_of_memory
from varuna_capslog.base.units import format_bytes

__all__ = ["TRIES", "Lack", "lack_of"]

TRIES = 3
"""So often a step fails for memory at one member before the run stops, with everything that is held on disk."""

_SIZE = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_UNKNOWN = 1 << 20
"""Bytes that are taken to be missing where the error does not say."""


@dataclass(frozen=True)
class Lack:
    """The memory that a step lacked.

    bytes: of the allocation that failed on a device, or in the memory of a CPU; 0 where a copy to or from the host tier
        failed, which is tried again by the same plan.
    why: the error's words in that case.
    """

    bytes: int
    why: str | None = None

    def told(self, member: str, step: int) -> str:
        """A sentence without an end stop."""
        if self.why is not None:
            return f"{member} could not make step {step}, since {self.why}"
        return f"{member} lacked {format_bytes(self.bytes)} in step {step}"


def lack_of(error: BaseException) -> Lack | None:
    """The memory that a step lacked, from its error; None: the error has another cause."""
    if isinstance(error, HostTierFailed):
        return Lack(0, str(error))
    if not is_out_of_memory(error):
        return None
    match = _SIZE.search(str(error))
    return Lack(_UNKNOWN if match is None else max(1, round(float(match[1]) * _UNITS[match[2]])))
