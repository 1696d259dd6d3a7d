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
    """Estimate the gradient bytes of each layer, [L], where the rows do not tell them.

    The static bytes are taken as parameters, their gradients and the copies that the optimizer keeps.
    """
    if any(layer.parameter_bytes is None for layer in profile.layers):
        return np.zeros(len(static), dtype=np.int64)
    parameters = np.array([layer.parameter_bytes for layer in profile.layers], dtype=np.int64)
    parts = 1 + sum(kept_copies(profile.conditions))
    return np.clip((static - parameters) // parts, 0, parameters).astype(np.int64)


class MomentBytes:
    """The bytes of each layer's optimizer moments.

    sizes: [L], of each layer alone; None: not known. gradients: [L] bytes.
    """

    def __init__(self, sizes: Bytes | None, profile: Profile, gradients: Bytes) -> None:
        self._sizes, self._shared, self._gradients = sizes, profile.shared, gradients
        self._copies, _ = kept_copies(profile.conditions)

    @property
    def known(self) -> bool:
        """True where the profile tells the moments' bytes."""
        return self._sizes is not None

    def of(self, layers: Collection[int], away: Collection[int]) -> dict[int, int]:
        """Return layer -> the bytes of its moments, in rising order, for the layers in `away`.

        layers: all layers of the rank. away: those whose moments are not on the device. The moments of a shared
        parameter belong to the first layer of the rank that uses it.

        Raises CapslogError where the profile does not tell them.
        """
        if not away:
            return {}
        if self._sizes is None:
            raise CapslogError(
                "the profile does not say what the optimizer keeps of each layer (moment_bytes), which a plan whose "
                "moments are not all on their device needs; profile again with `capslog profile`"
            )
        moment_bytes = {layer: int(self._sizes[layer]) for layer in sorted(away)}
        for parameter in (parameter for parameter in self._shared if parameter.bytes >= LEAST_MOMENT_BYTES):
            for layer in [layer for layer in parameter.layers if layer in layers][1:]:
                if layer in moment_bytes and self._gradients[layer] >= parameter.bytes:
                    moment_bytes[layer] = max(0, moment_bytes[layer] - int(self._copies * parameter.bytes))
        return moment_bytes

    def at_update(self, layers: Collection[int], away: Collection[int], gradients: Bytes, work: Bytes) -> int:
        """Return the peak bytes of moments and gradients on the device while the `away` layers are updated.

        They are updated one after the other, after all other layers: the moments of two neighbours and the gradients
        that are not used up yet are on the device at a time.

        gradients: [L] bytes, of the parameters that have moments. work: [L] additional bytes of each layer's update.
        """
        rows = [(layer, size) for layer, size in self.of(layers, away).items() if size]
        gradients_left, before, most = sum(int(gradients[layer]) for layer, _ in rows), 0, 0
        for (layer, size), behind in zip(rows, [*(size for _, size in rows[1:]), 0], strict=False):
            most = max(most, gradients_left + size + max(before, behind) + int(work[layer]))
            gradients_left, before = gradients_left - int(gradients[layer]), size
        return most
