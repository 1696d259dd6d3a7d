"""An allocation that failed in a step: what errors of torch say of it.

Other programs may take memory that a plan reckoned with. The member then gives the step up, lets plans reckon with less
on its device, and all make the step again (`training`, `membership/changes.tightened`).
"""

from __future__ import annotations

import re

from varuna_capslog.base.failures import is_out_of_memory

__all__ = ["TRIES", "lacking_bytes"]

TRIES = 3
"""So often a step fails for memory at one member before the run stops, with everything that is held on disk."""

_SIZE = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_UNKNOWN = 1 << 20
"""What is taken to lack where the error does not say."""


def lacking_bytes(error: BaseException) -> int | None:
    """Bytes of the allocation that failed on a device or in the memory of a CPU; None: the error is another one."""
    if not is_out_of_memory(error):
        return None
    found = _SIZE.search(str(error))
    return _UNKNOWN if found is None else max(1, round(float(found[1]) * _UNITS[found[2]]))
