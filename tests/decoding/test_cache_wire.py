"""Sums in the order of the ranks, and messages of several tensors, counted."""

from __future__ import annotations

import torch

from tests.decoding.worlds import on_ranks
from varuna_capslog.decoding.cache import Wire
from varuna_capslog.model.chain import TensorSpec

CPU = torch.device("cpu")


def test_sums_are_those_of_one_process_in_rank_order():
    """Also of 2 numbers, so that a rank has no slice; another order of such unlike numbers has other bits."""
    draw = torch.Generator().manual_seed(0)
    for shape in ((7,), (1, 2), (4, 3)):
        parts = [torch.randn(shape, generator=draw) * 10.0**rank for rank in range(3)]
        expected = (parts[0] + parts[1]) + parts[2]

        def add(communicator, parts=parts):
            wire = Wire(communicator, CPU)
            wire.phase = "sums"
            return wire.sum(parts[wire.rank]), wire.sent_bytes["sums"]

        results = on_ranks(3, add)
        assert all(torch.equal(total, expected) for total, _ in results)
        # 2 (N-1)/N of the numbers on the average rank
        assert sum(sent for _, sent in results) == 4 * 2 * 2 * expected.numel()


def test_messages_of_several_tensors():
    """Types of other sizes lie one after the other in a message, at places where they could not begin by themselves."""
    tensors = [
        torch.tensor([1.5], dtype=torch.bfloat16),
        torch.tensor([[2.0, 3.0]], dtype=torch.float64),
        torch.empty(0),
    ]

    def swap(communicator):
        wire = Wire(communicator, CPU)
        peer = 1 - wire.rank
        came = wire.exchange({peer: tensors}, {peer: [TensorSpec.of(tensor) for tensor in tensors]})
        nothing = wire.exchange({peer: []}, {peer: []})
        return came[peer], nothing, dict(wire.sent_bytes)

    for came, nothing, sent in on_ranks(2, swap):
        assert all(torch.equal(received, expected) for received, expected in zip(came, tensors, strict=True))
        assert list(nothing.values()) == [[]]
        assert sent == {"": 18}
