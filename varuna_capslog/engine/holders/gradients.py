"""Adds the gradients that each layer accumulated to those of the whole minibatch, in one fixed order of additions.

Engine rule 1: block v sums its microbatches in order; the blocks are added in index order; the uses of a shared
parameter are added in layer order. Neither the cut list nor the number of replicas changes an addition, so nothing here
is a ring: of a layer that several ranks hold, each of them gets all blocks of one slice, adds these in order, and tells
the others the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.holders.slices import Slices, gradient_type
from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.engine.layout import Layout
from varuna_capslog.model.chain import Chain, TensorSpec

__all__ = ["GradientBook", "norm_of"]

_BLOCK_TAG = 1 << 28
_SUM_TAG = 7 << 27
_SHARED_TAG = 1 << 29
_ONE_PIECE = 1 << 20
_PIECE = 1 << 16
"""Elements. A CPU takes the norm of a larger gradient in pieces: torch converts all of one to float64 first, in fresh
memory, which costs five times as much as the norm."""


@dataclass(frozen=True)
class _SharedUses:
    """The uses of a shared parameter, as one of its owners sees them.

    leaves: of the uses on this rank, by layer.
    sources: for each layer that this rank does not hold, the rank that sends its gradient.
    held: the layers whose gradients each of these ranks sends.
    receivers: the ranks to which this one sends.
    """

    number: int
    layers: tuple[int, ...]
    leaves: Mapping[int, nn.Parameter]
    sources: Mapping[int, int]
    held: Mapping[int, Sequence[int]]
    receivers: Sequence[int]


class GradientBook:
    """The gradients of one rank's layers during a step.

    Args:
        layers: all layers of this rank, in layer order.
    """

    def __init__(self, chain: Chain, layers: Sequence[EngineLayer], communicator: Communicator, layout: Layout) -> None:
        self._layers = list(layers)
        self._communicator = communicator
        self._first_use = {shared.name: shared.layers[0] for shared in chain.shared}
        self._by_index = {layer.index: layer for layer in layers}
        # layer -> rank -> the blocks for which it holds the layer
        self._owned = {
            index: {rank: layout.blocks_of(rank, index) for rank in layout.holders(index)} for index in self._by_index
        }
        self._shared = list(self._shared_here(chain, layout))
        # several holders: every block is kept until all are added in order; one holder: they are added as they end
        self._blocks: dict[int, dict[int, dict[str, Tensor]]] = {layer.index: {} for layer in layers}

    def close_block(self, block: int, layers: Sequence[EngineLayer]) -> None:
        """Ends an accumulation block on these layers: the gradients in `.grad` become the block's sum."""
        for layer in layers:
            gradients = {}
            for name, parameter in layer.parameters.items():
                if parameter.grad is not None:
                    gradients[name] = parameter.grad
                    parameter.grad = None
            kept = self._blocks[layer.index]
            if len(self._owned[layer.index]) > 1 or not kept:
                kept[block] = gradients
            else:
                _add_block(next(iter(kept.values())), gradients)

    def finish(self) -> None:
        """Leaves the minibatch's gradient in `.grad` of each trainable parameter (shared: of its first local leaf)."""
        for layer in self._layers:
            blocks, self._blocks[layer.index] = self._blocks[layer.index], {}
            if len(self._owned[layer.index]) > 1:
                total = self._added_by_all(layer, blocks)
            else:
                total = next(iter(blocks.values()), {})
            for name, gradient in total.items():
                layer.parameters[name].grad = gradient
        self._add_uses()

    def squared_norms(self, layers: Sequence[int]) -> dict[int, Tensor]:
        """Sum of squares of the gradients of each of these layers, in float64, by layer; on the host.

        A shared parameter counts under its first layer only (engine rule 1).
        """
        squares = []
        for layer in map(self._by_index.__getitem__, layers):
            counted = {name: self._first_use[address] == layer.index for name, address in layer.shared.items()}
            norms = [
                norm_of(parameter.grad)
                for name, parameter in layer.parameters.items()
                if parameter.grad is not None and counted.get(name, True)
            ]
            if norms:
                squares.append(torch.stack(norms).square().sum())
            else:
                squares.append(torch.zeros((), dtype=torch.float64, device=layer.device))
        return dict(zip(layers, torch.stack(squares).cpu(), strict=True))

    def forget(self) -> None:
        """Drops the blocks of a broken-off step."""
        for blocks in self._blocks.values():
            blocks.clear()

    def _added_by_all(self, layer: EngineLayer, blocks: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
        """The sum of all blocks of a layer that several ranks hold; empties `blocks`, which are this rank's."""
        trainable = {name: p for name, p in layer.parameters.items() if p.requires_grad}
        if not trainable:
            return {}
        owned, rank = self._owned[layer.index], self._communicator.rank
        ranks = sorted(owned)
        place, peers = ranks.index(rank), [peer for peer in ranks if peer != rank]
        sliced = Slices(trainable, len(ranks))
        mine = sliced.pack(blocks)
        outgoing = {peer: mine[ranks.index(peer)] for peer in peers}
        wanted = {peer: TensorSpec((len(owned[peer]), *mine.shape[2:]), mine.dtype) for peer in peers}
        arrived = self._communicator.exchange(outgoing, wanted, _BLOCK_TAG + layer.index, layer.device)
        del outgoing
        arrived[rank] = mine[place]
        rows = {block: row for peer, slices in arrived.items() for block, row in zip(owned[peer], slices, strict=True)}
        del mine, arrived
        part, present = sliced.add([rows[block] for block in sorted(rows)], place)
        del rows
        specs = dict.fromkeys(peers, TensorSpec(tuple(part.shape), part.dtype))
        parts = self._communicator.exchange(dict.fromkeys(peers, part), specs, _SUM_TAG + layer.index, layer.device)
        parts[rank] = part
        return sliced.unpack(torch.cat([parts[holder] for holder in ranks]), present)

    def _add_uses(self) -> None:
        """Adds all uses of each shared parameter in layer order; every owner does so."""
        for shared in self._shared:
            uses: dict[int, Tensor | None] = {index: leaf.grad for index, leaf in shared.leaves.items()}
            if shared.sources or shared.receivers:
                uses.update(self._remote_uses(shared))
            total: Tensor | None = None
            for index in shared.layers:
                gradient = uses[index]
                if gradient is not None:
                    total = gradient.clone() if total is None else total.add_(gradient)
            for leaf in shared.leaves.values():
                leaf.grad = None
            next(iter(shared.leaves.values())).grad = total

    def _remote_uses(self, shared: _SharedUses) -> dict[int, Tensor | None]:
        """The gradients of the uses in layers that this rank does not hold, by layer; see `Layout.uses_from`."""
        leaves = {str(index): leaf for index, leaf in shared.leaves.items()}
        template = next(iter(leaves.values()))
        packed = _pack({index: leaf.grad for index, leaf in leaves.items() if leaf.grad is not None}, leaves)
        specs = {
            peer: TensorSpec(((template.numel() + 1) * len(uses),), gradient_type(template))
            for peer, uses in shared.held.items()
        }
        gradients: dict[int, Tensor | None] = {}
        tag = _SHARED_TAG + shared.number
        outgoing = dict.fromkeys(shared.receivers, packed)
        arrived = self._communicator.exchange(outgoing, specs, tag, template.device)
        for peer, flat in arrived.items():
            theirs = _unpack(flat, {str(index): template for index in shared.held[peer]})
            gradients.update(
                {index: theirs.get(str(index)) for index, source in shared.sources.items() if source == peer}
            )
        return gradients

    def _shared_here(self, chain: Chain, layout: Layout) -> Iterator[_SharedUses]:
        """The trainable shared parameters that this rank holds."""
        own_rank = self._communicator.rank
        for number, shared in enumerate(chain.shared):
            leaves = {
                index: self._by_index[index].parameters[name] for index, name in shared.uses if index in self._by_index
            }
            if not leaves or not next(iter(leaves.values())).requires_grad:
                continue
            sources_by_rank = layout.uses_from(shared.layers)
            receivers = [rank for rank, theirs in sources_by_rank.items() if own_rank in theirs.values()]
            sources = sources_by_rank[own_rank]
            held = {
                peer: [index for index in shared.layers if index in layout.layers_of(peer)]
                for peer in set(sources.values())
            }
            yield _SharedUses(number, tuple(shared.layers), leaves, sources, held, receivers)


def _add_block(total: dict[str, Tensor], block: dict[str, Tensor]) -> None:
    """total += block, in place; takes ownership of gradients that `total` lacks."""
    for name, gradient in block.items():
        accumulated = total.get(name)
        if accumulated is None:
            total[name] = gradient
        else:
            accumulated.add_(gradient)


def _pack(gradients: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """The gradients as a flat tensor, in the order of `parameters`; then per parameter 1 if it has one, else 0."""
    flat = [
        gradients[name].reshape(-1)
        if name in gradients
        else torch.zeros_like(parameter, dtype=gradient_type(parameter)).reshape(-1)
        for name, parameter in parameters.items()
    ]
    first = next(iter(parameters.values()))
    there = [float(name in gradients) for name in parameters]
    present = torch.tensor(there, dtype=gradient_type(first), device=first.device)
    return torch.cat([*flat, present])


def _unpack(flat: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    present = flat[flat.numel() - len(parameters) :].tolist()
    gradients, at = {}, 0
    for (name, parameter), there in zip(parameters.items(), present, strict=True):
        if there:
            gradients[name] = flat[at : at + parameter.numel()].reshape(parameter.shape)
        at += parameter.numel()
    return gradients


def norm_of(gradient: Tensor) -> Tensor:
    """The norm in float64, added in one order for each shape; of a complex gradient, over both parts."""
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    if gradient.device.type != "cpu" or gradient.numel() <= _ONE_PIECE:
        return torch.linalg.vector_norm(gradient, dtype=torch.float64)
    pieces = gradient.reshape(-1).split(_PIECE)
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces])
    )
