"""Exchanges messages between ranks that decode together, counted where they are handed to the communicator.

The count is of the tensors themselves and uses no formula. A sum is made of gathered parts in the order of the ranks,
so that it has the same bits in every run and on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.model.chain import TensorSpec

__all__ = ["Wire"]

_TAGS = 1 << 20


class Wire:
    """Exchanges between the ranks of a communicator.

    Args:
        device: of this rank's tensors.

    Attributes:
        sent_bytes: by phase.
        phase: phase in `sent_bytes` that sent bytes are added to.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator, self._device = communicator, device
        self.rank, self.degree = communicator.rank, communicator.world_size
        self.sent_bytes: Counter[str] = Counter()
        self.phase = ""
        self._exchanges = 0

    @property
    def peers(self) -> list[int]:
        """All other ranks."""
        return [rank for rank in range(self.degree) if rank != self.rank]

    def exchange(
        self, given: Mapping[int, Sequence[Tensor]], wanted: Mapping[int, Sequence[TensorSpec]]
    ) -> dict[int, list[Tensor]]:
        """Send a message to each rank of `given`, receive one from each of `wanted`; empty messages are not sent.

        Returns:
            The received tensors by rank.
        """
        if not given and not wanted:
            return {}
        messages = {peer: _packed(tensors) for peer, tensors in given.items()}
        sizes = {peer: sum(spec.num_bytes for spec in specs) for peer, specs in wanted.items()}
        self.sent_bytes[self.phase] += sum(message.nbytes for message in messages.values())
        self._exchanges += 1
        received = self._communicator.exchange(
            messages,
            {peer: TensorSpec((size,), torch.uint8) for peer, size in sizes.items()},
            self._exchanges % _TAGS,
            self._device,
        )
        return {peer: _unpacked(received[peer], specs) for peer, specs in wanted.items()}

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts of one shape: each rank adds one slice of them and sends it to all."""
        if self.degree == 1:
            return part
        slices = part.reshape(-1).tensor_split(self.degree)
        slice_spec = TensorSpec.of(slices[self.rank])
        parts = self.exchange(
            {peer: [slices[peer]] for peer in self.peers}, {peer: [slice_spec] for peer in self.peers}
        )
        parts[self.rank] = [slices[self.rank]]
        total = parts[0][0]
        for rank in range(1, self.degree):
            total = total + parts[rank][0]
        sums = self.exchange(
            {peer: [total] for peer in self.peers}, {peer: [TensorSpec.of(slices[peer])] for peer in self.peers}
        )
        sums[self.rank] = [total]
        return torch.cat([sums[rank][0] for rank in range(self.degree)]).view(part.shape)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def _unpacked(message: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    parts = message.split([spec.num_bytes for spec in specs])
    # each copy is aligned for its dtype
    return [part.clone().view(spec.dtype).view(spec.shape) for part, spec in zip(parts, specs, strict=True)]
