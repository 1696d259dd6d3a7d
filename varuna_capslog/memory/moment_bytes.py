"""The bytes of the optimizer's moments that wait in the host tier, by the layers of a rank; and of gradients.

`range_bytes` counts moments out of what a rank always holds, and `fold` into its host tier.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.costs import Bytes
from varuna_capslog.profiles.action_bytes import LEAST_MOMENT_BYTES
from varuna_capslog.profiles.conditions import kept_copies
from varuna_capslog.profiles.record import Profile

__all__ = ["MomentBytes", "likely_gradients"]


def likely_gradients(profile: Profile, static: Bytes) -> Bytes:
    """[L] bytes of the gradients of layers whose rows do not tell them: what is static is a parameter, its gradient and
    what is kept beside both.
    """
    if any(layer.parameter_bytes is None for layer in profile.layers):
        return np.zeros(len(static), dtype=np.int64)
    parameters = np.array([layer.parameter_bytes for layer in profile.layers], dtype=np.int64)
    parts = 1 + sum(kept_copies(profile.conditions))
    return np.clip((static - parameters) // parts, 0, parameters).astype(np.int64)


class MomentBytes:
    """What an optimizer keeps of each layer.

    sizes: [L], of each layer alone; None: not known. gradients: [L] bytes.
    """

    def __init__(self, sizes: Bytes | None, profile: Profile, gradients: Bytes) -> None:
        self._sizes, self._shared, self._gradients = sizes, profile.shared, gradients
        self._copies, _ = kept_copies(profile.conditions)

    @property
    def known(self) -> bool:
        """Whether the profile tells them."""
        return self._sizes is not None

    def of(self, layers: Collection[int], away: Collection[int]) -> dict[int, int]:
        """Layer -> the bytes of its moments, for those of a rank's layers whose moments wait elsewhere, rising. Those
        of a shared parameter are where the first of its uses on the rank is.

        Raises CapslogError where the profile does not tell them.
        """
        if not away:
            return {}
        if self._sizes is None:
            raise CapslogError(
                "the profile does not say what the optimizer keeps of each layer (moment_bytes), which a plan whose "
                "moments are not all on their device needs; profile again with `capslog profile`"
            )
        found = {layer: int(self._sizes[layer]) for layer in sorted(away)}
        for one in (one for one in self._shared if one.bytes >= LEAST_MOMENT_BYTES):
            for layer in [layer for layer in one.layers if layer in layers][1:]:
                if layer in found and self._gradients[layer] >= one.bytes:
                    found[layer] = max(0, found[layer] - int(self._copies * one.bytes))
        return found

    def at_update(self, layers: Collection[int], away: Collection[int], gradients: Bytes, work: Bytes) -> int:
        """The most of them and of gradients that is on the device while these layers are updated, one after the other
        and behind all others: the moments of two neighbours, and the gradients that are not used up yet.

        gradients: [L] bytes, of the parameters that have moments. work: [L], what the update of a layer needs besides.
        """
        rows = [(layer, size) for layer, size in self.of(layers, away).items() if size]
        left, before, most = sum(int(gradients[layer]) for layer, _ in rows), 0, 0
        for (layer, size), behind in zip(rows, [*(size for _, size in rows[1:]), 0], strict=False):
            most = max(most, left + size + max(before, behind) + int(work[layer]))
            left, before = left - int(gradients[layer]), size
        return most
