"""Exchange between ranks that hold the same layers or parameters: gradients, and values that one rank updates."""

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

# -- The norm of one gradient, as one operator of any size: on fake tensors it is one step, not one for every piece


_ONE_PIECE = 1 << 20
_PIECE = {"cpu": 1 << 16}
_LARGE_PIECE = 1 << 22
"""Elements. Larger gradients are taken in pieces, since torch first copies what it takes to float64 in fresh memory. On
a CPU, that costs five times as much as the norm; a GPU takes larger pieces, of 32 MiB in float64."""


def norm_of(gradient: Tensor) -> Tensor:
    """Norm in float64, added in one order for each shape; of a complex gradient, over both parts."""
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    if gradient.numel() <= _ONE_PIECE:
        return torch.linalg.vector_norm(gradient, dtype=torch.float64)
    norm: Tensor = norm_in_pieces(gradient.reshape(-1))
    return norm


def piece_of(device_type: str) -> int:
    """Return the elements of one piece of a large gradient on such a device."""
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


# -- The gradients of one layer as one flat tensor, of which each rank that holds the layer adds one slice.


def gradient_type(parameter: nn.Parameter) -> torch.dtype:
    """Dtype of a parameter's gradient: the parameter's, or float32 for a 16-bit one that has a master."""
    return parameter.grad_dtype or parameter.dtype


class Slices:
    """Gradients of these parameters, by name, cut into `count` equal slices; the last ones may end in padding.

    A slice of a block travels as a row: its elements, and behind them, per parameter, 1 if the block has its gradient,
    else 0. Raises CapslogError for gradients of several dtypes.
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
        """Return [slices, blocks, row], of blocks in rising order; empties `blocks`."""
        first = next(iter(self._parameters.values()))
        rows = first.new_empty(self._count, len(blocks), self._width + len(self._parameters), dtype=self._dtype)
        for place, block in enumerate(sorted(blocks)):
            gradients = blocks.pop(block)
            flat = self._flat(gradients)
            rows[:, place, : self._width] = flat.view(self._count, self._width)
            rows[:, place, self._width :] = flat.new_tensor([float(name in gradients) for name in self._parameters])
        return rows

    def add(self, rows: Sequence[Tensor], place: int) -> tuple[Tensor, list[str]]:
        """Sum of one slice over all blocks, in their order, and the names of the parameters that have a gradient. A
        gradient that a block lacks is not added as zeros: -0.0 would become 0.0.
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
            parts = [row[low:high] for row, there in zip(rows, flags, strict=True) if there[number]]
            for position, part in enumerate(parts):
                total[low:high] = part if position == 0 else total[low:high] + part
        return total, present

    def unpack(self, flat: Tensor, present: Sequence[str]) -> dict[str, Tensor]:
        """Gradients by name, each in the layout of its parameter: parts of `flat`, which is all slices together."""
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
    """Strides of a gradient of this parameter: its own, or those without the gaps that it leaves in its memory."""
    return torch.empty_like(parameter, device="meta").stride()


# -- Adds the gradients that each layer accumulated to those of the whole minibatch, in one fixed order of additions.
#
# Engine rule 1: block v sums its microbatches in order; the blocks are added in index order; the uses of a shared
# parameter are added in layer order. Neither the cut list nor the number of replicas changes an addition, so nothing
# here is a ring: of a layer that several ranks hold, each of them gets all blocks of one slice, adds these in order,
# and sends the others the sum.


_BLOCK_TAG = 1 << 28
_SUM_TAG = 7 << 27
_SHARED_TAG = 1 << 29


@dataclass(frozen=True)
class _SharedUses:
    """Uses of a shared parameter, as one of its owners sees them.

    leaves: of the uses on this rank, by layer. sources: the rank that sends its gradient, for each other layer.
    held: layers whose gradients each of these ranks sends. receivers: ranks to which this one sends.
    """

    number: int
    layers: tuple[int, ...]
    leaves: Mapping[int, nn.Parameter]
    sources: Mapping[int, int]
    held: Mapping[int, Sequence[int]]
    receivers: Sequence[int]


class GradientBook:
    """Gradients of one rank's layers during a step. `layers`: all layers of this rank, in layer order."""

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
        """End an accumulation block on these layers: the gradients in `.grad` become the block's sum."""
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
        """Leave the minibatch's gradient in `.grad` of each trainable parameter (shared: of its first local leaf)."""
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
        """Sum of squares of each layer's gradients, on the host; a shared parameter counts under its first layer."""
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
        """Drop the blocks of a broken-off step."""
        for blocks in self._blocks.values():
            blocks.clear()

    def _added_by_all(self, layer: EngineLayer, blocks: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Sum of all blocks of a layer that several ranks hold; empties `blocks`, which are this rank's."""
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
        """Add all uses of each shared parameter in layer order; every owner does so."""
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
        """Gradients of the uses in layers that this rank does not hold, by layer; see `Layout.uses_from`."""
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
        """Trainable shared parameters that this rank holds."""
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
    """Gradients as a flat tensor, in the order of `parameters`; then per parameter 1 if it has one, else 0."""
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


# -- Layers whose optimizer moments only one of their holders keeps: it makes the update and sends the values.
#
# A replica that keeps no moments of a layer drops the layer's gradients once the step was voted for, and takes the
# bits of the parameters from the replica that does: the only thing that a step sends after its vote. Where a rank is
# lost meanwhile, the others end with `PeerLost`. An ordinary run then goes on from its checkpoint; elastic runs
# refuse such plans, since a member that is lost would take its share of the moments along.


_TAG = 5 << 28


def check_shared_updates(chain: Chain, layout: Layout) -> None:
    """Raise CapslogError where the moments of a parameter that several layers use are left to another replica."""
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
    """Layer of this rank: its trained parameters (or their masters), the rank that updates them, and those that take
    them.

    parameters: those with the larger elements first, so that each begins at a multiple of its own element size.
    """

    layer: int
    parameters: Sequence[nn.Parameter]
    keeper: int
    takers: Sequence[int]

    @property
    def bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)


class SharedUpdates:
    """Exchange of updated parameters among holders of one rank's layers. `taken`: layers that another rank updates."""

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
        """Send the values of one layer after the other from its keeper to the ranks that take them, as bits.

        A rank holds one layer's parameters a second time meanwhile. Raises PeerLost where another rank is gone; some
        layers here then have the new values and some the old ones.
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
    """Values in the order of the dimensions, [bytes] of uint8."""
    return parameter.detach().reshape(-1).contiguous().view(torch.uint8)
