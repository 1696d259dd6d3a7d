"""Keeps optimizer state of some parameters in the host tier between the updates.

The optimizer brings the moments of one layer after the other back for its update; copies run beside the updates of the
neighbours, so that the device holds those of two layers at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.engine.host.tier import HostRegion, HostTier, Wait
from varuna_capslog.profiles.action_bytes import LEAST_MOMENT_BYTES

__all__ = ["HostMoments", "leaves"]


def leaves(value: object) -> bool:
    """True for optimizer state that is large enough to be offloaded to the host tier."""
    return isinstance(value, Tensor) and value.nbytes >= LEAST_MOMENT_BYTES


@dataclass(frozen=True)
class _Form:
    """The layout of a tensor on its region."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def on(self, data: Tensor) -> Tensor:
        return data.view(self.dtype).as_strided(self.size, self.stride)


class HostMoments:
    """The moments of the trained parameters of some layers.

    Args:
        tier: gives the memory, all of it now, so that no later update can fail for want of it.
        sizes: parameter -> bytes of its optimizer state by key (`Recipe.kept`).

    Raises:
        CapslogError: the tier is full.
    """

    def __init__(self, tier: HostTier, sizes: Mapping[nn.Parameter, Mapping[str, int]]) -> None:
        self._tier = tier
        self._regions: dict[nn.Parameter, dict[str, HostRegion]] = {
            parameter: {key: tier.hold(size) for key, size in rows.items() if size >= LEAST_MOMENT_BYTES}
            for parameter, rows in sizes.items()
        }
        self._forms: dict[nn.Parameter, dict[str, _Form]] = {parameter: {} for parameter in sizes}
        self._others: dict[nn.Parameter, dict[str, Any]] = {parameter: {} for parameter in sizes}
        self._leaving: list[tuple[Wait, Tensor]] = []
        self._on_their_way: dict[nn.Parameter, tuple[dict[str, Tensor], list[Wait]]] = {}

    def __contains__(self, parameter: object) -> bool:
        """True where the moments of the parameter wait here."""
        return parameter in self._regions

    def staying(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The state of a parameter that is not offloaded, by key."""
        return self._others[parameter]

    def live(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The state of a parameter that waits here, by key, without a copy: tensors on the host's memory."""
        self.settle()
        self._tier.finish()
        moments = dict(self._others[parameter])
        for key, form in self._forms[parameter].items():
            data = self._regions[parameter][key].data
            assert data is not None, "an estimate has no moments to read"
            moments[key] = form.on(data)
        return moments

    def leave(self, parameter: nn.Parameter, moments: Mapping[str, Any]) -> None:
        """Begins to copy the state of a parameter to the tier ({}: it has none), until `settle`."""
        regions, forms = self._regions[parameter], self._forms[parameter]
        forms.clear()
        self._others[parameter] = {key: value for key, value in moments.items() if not leaves(value)}
        for key, value in moments.items():
            if not leaves(value):
                continue
            if value.untyped_storage().nbytes() != value.nbytes:
                value = value.clone()
            region = regions.get(key)
            if region is None or region.size != value.nbytes:
                if region is not None:
                    self._tier.give_back(region)
                region = regions[key] = self._tier.hold(value.nbytes)
            forms[key] = _Form(value.dtype, value.size(), value.stride())
            self._leaving.append((self._tier.copy_out(value, region, beside=True), value))

    def settle(self) -> None:
        """Waits until all copies to the tier have ended, and frees their sources."""
        while self._leaving:
            wait, _ = self._leaving.pop(0)
            wait()

    def call(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begins to copy the moments of these parameters back, for `take`."""
        for parameter in parameters:
            regions = self._regions[parameter]
            copies = {key: self._tier.come_back(regions[key], beside=True) for key in self._forms[parameter]}
            tensors = {key: self._forms[parameter][key].on(data) for key, (data, _) in copies.items()}
            self._on_their_way[parameter] = tensors, [wait for _, wait in copies.values()]

    def take(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The state of a parameter that was called, on the device."""
        tensors, waits = self._on_their_way.pop(parameter)
        for wait in waits:
            wait()
        return {**self._others[parameter], **tensors}
