"""Small layers exchange their gradients in one message, to the bits of each layer alone and of one rank's sums."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from varuna_capslog.engine.layers import take_layers
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.replicated import GradientBook
from varuna_capslog.memory import fold
from varuna_capslog.model.chain import Chain, Layer, TensorSpec

RANKS, BLOCKS, WIDTHS = 3, 6, (3, 5, 4, 2, 7)


class Meeting:
    """Exchanges of threads that stand for ranks. counts: by rank."""

    def __init__(self) -> None:
        self.mail: dict[tuple[int, int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        self.counts = [0] * RANKS

    def of(self, rank: int) -> Any:
        return Seat(self, rank)


class Seat:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def exchange(
        self, outgoing: Mapping[int, Tensor], wanted: Mapping[int, TensorSpec], tag: int, device: torch.device
    ) -> dict[int, Tensor]:
        self.meeting.counts[self.rank] += 1
        for peer, tensor in outgoing.items():
            self.meeting.mail[self.rank, peer, tag].put(tensor.clone())
        arrived = {peer: self.meeting.mail[peer, self.rank, tag].get(timeout=20) for peer in wanted}
        for peer, spec in wanted.items():
            assert (tuple(arrived[peer].shape), arrived[peer].dtype) == (spec.shape, spec.dtype)
        return arrived


def chain() -> Chain:
    layers = [Layer(f"layer.{index}", nn.Linear(width, width)) for index, width in enumerate(WIDTHS)]
    layers[2].module.requires_grad_(False)
    layers[3].module.to(torch.float64)
    return Chain(layers)


def gradients(block: int, index: int) -> dict[str, Tensor]:
    """Gradients of a block; of some blocks the bias has none."""
    generator = torch.Generator().manual_seed(100 * block + index)
    width, dtype = WIDTHS[index], torch.float64 if index == 3 else torch.float32
    made = {"weight": torch.randn(width, width, generator=generator, dtype=dtype)}
    if (block + index) % 3:
        made["bias"] = 1e3 * torch.randn(width, generator=generator, dtype=dtype)
    return made


def summed(bundle_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Gradients of every rank after the exchange, by parameter, and the number of its exchanges."""
    monkeypatch.setattr(fold, "BUNDLE_BYTES", bundle_bytes)
    meeting, layout = Meeting(), Layout.pipelines((0,), len(WIDTHS), None, RANKS, BLOCKS)

    def run(rank: int) -> dict[str, Tensor]:
        model = chain()
        layers = take_layers(model, range(len(WIDTHS)), torch.device("cpu"))
        book = GradientBook(model, layers, meeting.of(rank), layout)
        for block in layout.blocks_of(rank, 0):
            for layer in layers:
                for name, gradient in gradients(block, layer.index).items() if layer.index != 2 else ():
                    layer.parameters[name].grad = gradient
            book.close_block(block, layers)
        book.finish()
        return {
            f"{layer.index}/{name}": parameter.grad
            for layer in layers
            for name, parameter in layer.parameters.items()
            if parameter.grad is not None
        }

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS))), meeting.counts


# two dtypes, so at least two bundles; one of the five layers is frozen
@pytest.mark.parametrize(("bundle_bytes", "exchanges"), [(1, 8), (200, 6), (1 << 20, 4)])
def test_sums_do_not_depend_on_the_bundles(bundle_bytes: int, exchanges: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, counts = summed(bundle_bytes, monkeypatch)
    expected: dict[str, Tensor] = {}
    for index in (0, 1, 3, 4):
        for block in range(BLOCKS):
            for name, gradient in gradients(block, index).items():
                key = f"{index}/{name}"
                expected[key] = expected[key] + gradient if key in expected else gradient
    assert counts == [exchanges] * RANKS
    for mine in found:
        assert mine.keys() == expected.keys()
        assert all(torch.equal(mine[key], expected[key]) for key in expected)


def test_bundles_are_of_the_same_holders_and_no_larger_than_a_mebibyte() -> None:
    two, three = {0: (0, 1), 1: (2, 3)}, {0: (0,), 1: (1,), 2: (2, 3)}
    holders = {0: two, 1: three, 2: two, 3: two, 4: three, 5: two}
    half = fold.BUNDLE_BYTES // 2
    sizes = dict.fromkeys(holders, half) | {5: 3 * half}
    assert fold.bundles(sizes, holders) == [[0, 2], [1, 4], [3], [5]]
    del sizes[2]
    assert fold.bundles(sizes, holders) == [[0, 3], [1, 4], [5]]
