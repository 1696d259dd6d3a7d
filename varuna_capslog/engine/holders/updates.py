"""Layers whose optimizer's moments only one of their holders keeps: it makes the update and hands the values on.

A replica that keeps no moments of a layer drops the layer's gradients once the step was voted for, and takes the bits
of the parameters from the replica that does: the only thing that a step sends after its vote. Where a rank is lost
meanwhile, the others end with `PeerLost`. An ordinary run then goes on from its checkpoint; elastic runs refuse such
plans, since a member that is lost would take its share of the moments along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.engine.layout import Layout
from varuna_capslog.model.chain import Chain, TensorSpec

__all__ = ["SharedUpdates", "check_shared_updates"]

_TAG = 5 << 28


def check_shared_updates(chain: Chain, layout: Layout) -> None:
    """Raises CapslogError where the moments of a parameter that several layers use are left to another replica."""
    for shared in chain.shared:
        for number, stage in enumerate(layout.stages):
            for layer in sorted(stage.moments_elsewhere & frozenset(shared.layers)):
                raise CapslogError(
                    f"stages[{number}].moments leaves those of layer {layer} to another replica, but the layer shares "
                    f"{shared.name!r} with others, and every rank that holds such a parameter updates it; take the "
                    "layer out there"
                )


@dataclass(frozen=True)
class _Row:
    """A layer of this rank: its trained parameters (masters, of those that have some), the rank that updates them and
    the ranks that take their values.

    parameters: those with the larger elements first, so that each begins at a multiple of its own.
    """

    layer: int
    parameters: Sequence[nn.Parameter]
    keeper: int
    takers: Sequence[int]

    @property
    def bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)


class SharedUpdates:
    """The exchange of updated parameters among the holders of one rank's layers.

    Args:
        layers: all layers of this rank, in layer order.

    Attributes:
        taken: the layers of this rank that another one updates.
    """

    def __init__(self, layers: Sequence[EngineLayer], communicator: Communicator, layout: Layout) -> None:
        self._communicator = communicator
        self.taken = layout.moments_elsewhere(communicator.rank)
        self._rows: list[_Row] = []
        for layer in layers:
            takers = [rank for rank in layout.holders(layer.index) if layer.index in layout.moments_elsewhere(rank)]
            keeper = layout.reporter(layer.index)
            trained = [value for value in layer.values.values() if value.requires_grad]
            if trained and takers and communicator.rank in (keeper, *takers):
                ordered = sorted(trained, key=lambda parameter: -parameter.element_size())
                self._rows.append(_Row(layer.index, ordered, keeper, takers))

    def hand_on(self) -> None:
        """Sends the values of one layer after the other from its keeper to the ranks that take them, as bits.

        A rank holds one layer's parameters a second time meanwhile.

        Raises:
            PeerLost: another rank is gone; some layers here have the new values and some the old ones.
        """
        rank = self._communicator.rank
        for row in self._rows:
            device = row.parameters[0].device
            if rank == row.keeper:
                flat = torch.cat([_bits(parameter) for parameter in row.parameters])
                self._communicator.exchange(dict.fromkeys(row.takers, flat), {}, _TAG + row.layer, device)
                continue
            spec = TensorSpec((row.bytes,), torch.uint8)
            received = self._communicator.exchange({}, {row.keeper: spec}, _TAG + row.layer, device)[row.keeper]
            at = 0
            for parameter in row.parameters:
                value = received[at : at + parameter.nbytes].view(parameter.dtype).reshape(parameter.shape)
                at += parameter.nbytes
                with torch.no_grad():
                    parameter.copy_(value)


def _bits(parameter: nn.Parameter) -> Tensor:
    """The values in the order of the dimensions, [bytes] of uint8."""
    return parameter.detach().reshape(-1).contiguous().view(torch.uint8)
