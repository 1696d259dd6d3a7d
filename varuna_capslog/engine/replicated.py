"""Exchange between ranks with the same layers or parameters (data parallel replicas): gradients and updated values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.offload import laid_out
from varuna_capslog.model.chain import Chain, TensorSpec

__all__ = ["GradientBook", "SharedUpdates", "Slices", "check_shared_updates", "norm_in_pieces", "norm_of", "piece_of"]

# -- The norm of one gradient, as one operator for any size, so that on fake tensors pieces cost no time


_ONE_PIECE = 1 << 20
_PIECE = {"cpu": 1 << 16}
_LARGE_PIECE = 1 << 22
"""Elements. Norms of larger gradients are computed in pieces, since torch first copies its input to float64 in new
memory, which on a CPU takes five times as long as the norm. A GPU has larger pieces, of 32 MiB in float64."""


def norm_of(gradient: Tensor) -> Tensor:
    """Norm in float64, with one order of additions per shape; of a complex gradient, over both parts."""
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    if gradient.numel() <= _ONE_PIECE:
        return torch.linalg.vector_norm(gradient, dtype=torch.float64)
    norm: Tensor = norm_in_pieces(gradient.reshape(-1))
    return norm


def piece_of(device_type: str) -> int:
    """Return the number of elements of one piece of a large gradient on this type of device."""
    return _PIECE.get(device_type, _LARGE_PIECE)


@torch.library.custom_op("capslog::norm_in_pieces", mutates_args=())
def norm_in_pieces(gradient: Tensor) -> Tensor:
    """Norm of the norms of a flat gradient's pieces, in float64."""
    pieces = gradient.split(piece_of(gradient.device.type))
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


@norm_in_pieces.register_fake
def _(gradient: Tensor) -> Tensor:
    return gradient.new_empty((), dtype=torch.float64)


# -- The gradients of one layer as one flat tensor, of which each rank with the layer sums one slice.


def gradient_type(parameter: nn.Parameter) -> torch.dtype:
    """Dtype of a parameter's gradient: the parameter's, or float32 for a 16-bit one that has a master."""
    return parameter.grad_dtype or parameter.dtype


class Slices:
    """Conversion of gradients of these parameters, by name, to `count` equal slices and back, with padding at the end.

    A slice of a block is sent as a row: its elements, then for each parameter 1 if the block has a gradient, else 0.
    Raises CapslogError for gradients of several dtypes.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], count: int) -> None:
        dtypes = {str(gradient_type(parameter)) for parameter in parameters.values()}
        if len(dtypes) > 1:
            raise CapslogError(
                f"several ranks hold a layer whose parameters are {' and '.join(sorted(dtypes))}; give all parameters "
                "of a layer one dtype, or set pipeline.replicas=1"
            )
        self._parameters, self._count = dict(parameters), count
        self._dtype = gradient_type(next(iter(parameters.values())))
        self._size = sum(parameter.numel() for parameter in parameters.values())
        self._width = math.ceil(self._size / count)

    def pack(self, blocks: dict[int, dict[str, Tensor]]) -> Tensor:
        """Return [slices, blocks, row] with the blocks in rising order; empties `blocks`."""
        first = next(iter(self._parameters.values()))
        rows = first.new_empty(self._count, len(blocks), self._width + len(self._parameters), dtype=self._dtype)
        for place, block in enumerate(sorted(blocks)):
            gradients = blocks.pop(block)
            flat = self._flat(gradients)
            rows[:, place, : self._width] = flat.view(self._count, self._width)
            rows[:, place, self._width :] = flat.new_tensor([float(name in gradients) for name in self._parameters])
        return rows

    def add(self, rows: Sequence[Tensor], place: int) -> tuple[Tensor, list[str]]:
        """Sum of one slice over all blocks, in their order, and the names of the parameters that have a gradient. Where
        a block has no gradient, no zeros are added, which would turn -0.0 into 0.0.
        """
        flags = torch.stack([row[self._width :] for row in rows]).bool().tolist()
        present = [name for name, *row_flags in zip(self._parameters, *flags, strict=True) if any(row_flags)]
        if all(row_flags == flags[0] for row_flags in flags):
            total = rows[0][: self._width].clone()
            for row in rows[1:]:
                total.add_(row[: self._width])
            return total, present
        total = torch.zeros_like(rows[0][: self._width])
        end = 0
        for number, parameter in enumerate(self._parameters.values()):
            begin, end = end, end + parameter.numel()
            low, high = (min(max(at - place * self._width, 0), self._width) for at in (begin, end))
            parts = [row[low:high] for row, has_gradient in zip(rows, flags, strict=True) if has_gradient[number]]
            for position, part in enumerate(parts):
                total[low:high] = part if position == 0 else total[low:high] + part
        return total, present

    def unpack(self, flat: Tensor, present: Sequence[str]) -> dict[str, Tensor]:
        """Gradients by name, as views of `flat` (all slices), each in the layout of its parameter."""
        gradients, at = {}, 0
        for name, parameter in self._parameters.items():
            if name in present:
                gradients[name] = flat.as_strided(parameter.shape, _dense(parameter), at)
            at += parameter.numel()
        return gradients

    def _flat(self, gradients: Mapping[str, Tensor]) -> Tensor:
        parts = []
        for name, parameter in self._parameters.items():
            if name in gradients:
                gradient = laid_out(gradients[name], _dense(parameter))
                parts.append(gradient.as_strided((gradient.numel(),), (1,)))
            else:
                parts.append(parameter.new_zeros(parameter.numel(), dtype=self._dtype))
        parts.append(parts[0].new_zeros(self._count * self._width - self._size))
        return torch.cat(parts)


def _dense(parameter: nn.Parameter) -> tuple[int, ...]:
    """Strides of a gradient: those of the parameter, without gaps between elements."""
    return torch.empty_like(parameter, device="meta").stride()


# -- Sums the gradients of each layer over the whole minibatch, in one fixed order of additions.
#
# Order of all sums: each block sums its microbatches in order, then the blocks are added in index order, then the uses
# of a shared parameter in layer order. Neither cuts nor the number of replicas may change an addition, so there is no
# ring all-reduce: each rank with a layer gets all blocks of one slice, adds them in order, and sends the sum on.


_BLOCK_TAG = 1 << 28
_SUM_TAG = 7 << 27
_SHARED_TAG = 1 << 29


@dataclass(frozen=True)
class _SharedUses:
    """Uses of a shared parameter, on a rank that has some of its layers.

    leaves: of the uses on this rank, by layer. sources: for each other layer, the rank that sends its gradient.
    held: for each of these ranks, the layers whose gradients it sends. receivers: ranks to which this rank sends.
    """

    number: int
    layers: tuple[int, ...]
    leaves: Mapping[int, nn.Parameter]
    sources: Mapping[int, int]
    held: Mapping[int, Sequence[int]]
    receivers: Sequence[int]


class GradientBook:
    """Sums of the gradients of one rank's layers in a step. layers: all layers of this rank, in layer order."""

    def __init__(self, chain: Chain, layers: Sequence[EngineLayer], communicator: Communicator, layout: Layout) -> None:
        self._layers = list(layers)
        self._communicator = communicator
        self._first_use = {shared.name: shared.layers[0] for shared in chain.shared}
        self._by_index = {layer.index: layer for layer in layers}
        # layer -> rank -> blocks for which the rank runs the layer
        self._owned = {
            index: {rank: layout.blocks_of(rank, index) for rank in layout.holders(index)} for index in self._by_index
        }
        self._shared = list(self._shared_here(chain, layout))
        # by layer; with several holders all blocks are kept until `finish`, with one holder only their sum so far
        self._blocks: dict[int, dict[int, dict[str, Tensor]]] = {layer.index: {} for layer in layers}

    def close_block(self, block: int, layers: Sequence[EngineLayer]) -> None:
        """Take the gradients of these layers from `.grad` as the sum of an accumulation block."""
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
        """Put the minibatch's gradients into `.grad` of trainable parameters (shared ones: of the first local leaf)."""
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
        """Sum of squares of each layer's gradients, on the CPU; a shared parameter counts for its first layer."""
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
        """Drop the blocks of an interrupted step."""
        for blocks in self._blocks.values():
            blocks.clear()

    def _added_by_all(self, layer: EngineLayer, blocks: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Sum of all blocks of a layer that several ranks have; empties `blocks`, those of this rank."""
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
        """Add all uses of each shared parameter in layer order; every rank with a use does this."""
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
        """Exchange gradients of uses; return those of layers that this rank lacks, by layer (`Layout.uses_from`)."""
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
        """Trainable shared parameters of this rank's layers."""
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
    """Add `block` to `total` in place; gradients that `total` lacks are moved there."""
    for name, gradient in block.items():
        accumulated = total.get(name)
        if accumulated is None:
            total[name] = gradient
        else:
            accumulated.add_(gradient)


def _pack(gradients: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """Gradients as a flat tensor, in the order of `parameters`; then for each parameter 1 if it has one, else 0."""
    flat = [
        gradients[name].reshape(-1)
        if name in gradients
        else torch.zeros_like(parameter, dtype=gradient_type(parameter)).reshape(-1)
        for name, parameter in parameters.items()
    ]
    first = next(iter(parameters.values()))
    has_gradient = [float(name in gradients) for name in parameters]
    present = torch.tensor(has_gradient, dtype=gradient_type(first), device=first.device)
    return torch.cat([*flat, present])


def _unpack(flat: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    present = flat[flat.numel() - len(parameters) :].tolist()
    gradients, at = {}, 0
    for (name, parameter), has_gradient in zip(parameters.items(), present, strict=True):
        if has_gradient:
            gradients[name] = flat[at : at + parameter.numel()].reshape(parameter.shape)
        at += parameter.numel()
    return gradients


# -- Layers whose optimizer moments only one replica keeps: it updates the parameters and sends their values.
#
# The other replicas drop the layer's gradients after the vote and receive the parameters bit for bit. A step has no
# other messages after its vote. If a rank is lost meanwhile, the others end with `PeerLost`; an ordinary run continues
# from its checkpoint. Elastic runs refuse such plans, since the moments would be lost with the member.


_TAG = 5 << 28


def check_shared_updates(chain: Chain, layout: Layout) -> None:
    """Raise CapslogError where another replica would keep the moments of a layer with a shared parameter."""
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
    """Layer of this rank that one rank, `keeper`, updates for the ranks `takers`.

    parameters: its trained parameters, or their masters, those with larger elements first, so that in a message each
    begins at a multiple of its element size.
    """

    layer: int
    parameters: Sequence[nn.Parameter]
    keeper: int
    takers: Sequence[int]

    @property
    def bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)


class SharedUpdates:
    """Exchange of updated parameters for one rank's layers. taken: layers that another rank updates."""

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
        """Send the parameters of one layer after another from its keeper to its takers, as bits.

        Needs memory for a second copy of one layer's parameters. Raises PeerLost where another rank is gone; then some
        layers of this rank have new values and some have old ones.
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
    """Contiguous bytes of a parameter, [bytes] of uint8."""
    return parameter.detach().reshape(-1).contiguous().view(torch.uint8)
