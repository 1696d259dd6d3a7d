"""From the gradients each layer accumulated to the gradients of the whole minibatch, in one fixed order of additions.

Engine rule 1: block v sums its microbatches in order; the blocks are added in index order; the uses of a shared
parameter are added in layer order. Neither the cut list nor the number of replicas changes an addition, so nothing here
is a ring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.engine.layout import Layout
from varuna_capslog.model.chain import Chain, TensorSpec

__all__ = ["GradientBook"]

_BLOCK_TAG = 1 << 28
_SHARED_TAG = 1 << 29


class GradientBook:
    """The gradients of one rank's layers during a step.

    Args:
        layers: all layers of this rank, in layer order.
    """

    def __init__(self, chain: Chain, layers: Sequence[EngineLayer], communicator: Communicator, layout: Layout) -> None:
        self._layers = list(layers)
        self._communicator, self._layout = communicator, layout
        self._shared = chain.shared
        self._by_index = {layer.index: layer for layer in layers}
        self._holders = {layer.index: layout.holders(layer.index) for layer in layers}
        # several holders: every block is kept until all are added in order; one holder: they are added as they end
        self._blocks: dict[int, dict[int, dict[str, Tensor]]] = {layer.index: {} for layer in layers}

    def close_block(self, block: int, layers: Sequence[EngineLayer]) -> None:
        """Ends an accumulation block on these layers: what `.grad` holds becomes the block's sum."""
        for layer in layers:
            found = {}
            for name, parameter in layer.parameters.items():
                if parameter.grad is not None:
                    found[name] = parameter.grad
                    parameter.grad = None
            kept = self._blocks[layer.index]
            if len(self._holders[layer.index]) > 1 or not kept:
                kept[block] = found
            else:
                _add_block(next(iter(kept.values())), found)

    def finish(self) -> None:
        """Leaves the minibatch's gradient in `.grad` of each trainable parameter (shared: of its first local leaf)."""
        for layer in self._layers:
            blocks, self._blocks[layer.index] = self._blocks[layer.index], {}
            if len(self._holders[layer.index]) > 1:
                self._collect_blocks(layer, blocks)
            total: dict[str, Tensor] = {}
            for block in sorted(blocks):
                _add_block(total, blocks[block])
            for name, gradient in total.items():
                layer.parameters[name].grad = gradient
        self._add_uses()

    def squared_norms(self, layers: Sequence[int]) -> dict[int, Tensor]:
        """Sum of squares of the gradients of each of these layers, in float64, by layer; on the host.

        A shared parameter counts under its first layer only (engine rule 1).
        """
        first_use = {shared.name: shared.layers[0] for shared in self._shared}
        found = []
        for layer in map(self._by_index.__getitem__, layers):
            counted = {name: first_use[address] == layer.index for name, address in layer.shared.items()}
            norms = [
                torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
                for name, parameter in layer.parameters.items()
                if parameter.grad is not None and counted.get(name, True)
            ]
            if norms:
                found.append(torch.stack(norms).square().sum())
            else:
                found.append(torch.zeros((), dtype=torch.float64, device=layer.device))
        return dict(zip(layers, torch.stack(found).cpu(), strict=True))

    def forget(self) -> None:
        """Drops the blocks of a broken-off step."""
        for blocks in self._blocks.values():
            blocks.clear()

    def _collect_blocks(self, layer: EngineLayer, blocks: dict[int, dict[str, Tensor]]) -> None:
        """Adds the blocks of the layer's other holders to those of this rank."""
        trainable = {name: p for name, p in layer.parameters.items() if p.requires_grad}
        if not trainable:
            return
        size = sum(parameter.numel() for parameter in trainable.values()) + len(trainable)
        spec = TensorSpec((size,), next(iter(trainable.values())).dtype)
        rank, tag = self._communicator.rank, _BLOCK_TAG + layer.index
        owned = {peer: self._layout.blocks_of(peer, layer.index) for peer in self._holders[layer.index]}
        mine = owned.pop(rank)
        for turn in range(max(len(mine), *map(len, owned.values()))):
            packed = _pack(blocks[mine[turn]], trainable) if turn < len(mine) else None
            wanted = {peer: spec for peer, theirs in owned.items() if turn < len(theirs)}
            for peer, flat in self._communicator.exchange(packed, owned, wanted, tag, layer.device).items():
                blocks[owned[peer][turn]] = _unpack(flat, trainable)

    def _add_uses(self) -> None:
        """Shared parameters: every owner adds all uses in layer order."""
        for number, shared in enumerate(self._shared):
            local = [(index, name) for index, name in shared.uses if index in self._by_index]
            if not local:
                continue
            leaves = {index: self._by_index[index].parameters[name] for index, name in local}
            if not next(iter(leaves.values())).requires_grad:
                continue
            uses: dict[int, Tensor | None] = {index: leaf.grad for index, leaf in leaves.items()}
            uses.update(self._remote_uses(number, shared.layers, leaves))
            total: Tensor | None = None
            for index in shared.layers:
                gradient = uses[index]
                if gradient is not None:
                    total = gradient.clone() if total is None else total.add_(gradient)
            for leaf in leaves.values():
                leaf.grad = None
            leaves[local[0][0]].grad = total

    def _remote_uses(
        self, number: int, layers: Sequence[int], leaves: Mapping[int, nn.Parameter]
    ) -> dict[int, Tensor | None]:
        """The gradients of the uses in layers that this rank does not hold, by layer; see `Layout.uses_from`."""
        sources = self._layout.uses_from(layers)
        wanted = sources[self._communicator.rank]
        receivers = [rank for rank, theirs in sources.items() if self._communicator.rank in theirs.values()]
        if not wanted and not receivers:
            return {}
        template = next(iter(leaves.values()))
        packed = _pack(
            {str(i): leaf.grad for i, leaf in leaves.items() if leaf.grad is not None},
            {str(i): leaf for i, leaf in leaves.items()},
        )
        held = {peer: [i for i in layers if i in self._layout.layers_of(peer)] for peer in set(wanted.values())}
        specs = {peer: TensorSpec(((template.numel() + 1) * len(uses),), template.dtype) for peer, uses in held.items()}
        found: dict[int, Tensor | None] = {}
        tag = _SHARED_TAG + number
        for peer, flat in self._communicator.exchange(packed, receivers, specs, tag, template.device).items():
            theirs = _unpack(flat, {str(i): template for i in held[peer]})
            found.update({i: theirs.get(str(i)) for i, source in wanted.items() if source == peer})
        return found


def _add_block(total: dict[str, Tensor], block: dict[str, Tensor]) -> None:
    """total += block, in place; takes ownership of gradients that `total` lacks."""
    for name, gradient in block.items():
        known = total.get(name)
        if known is None:
            total[name] = gradient
        else:
            known.add_(gradient)


def _pack(gradients: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """One flat tensor: the gradients in the order of `parameters`, then per parameter 1 if it has one, else 0."""
    flat = [
        gradients[name].reshape(-1) if name in gradients else torch.zeros_like(parameter).reshape(-1)
        for name, parameter in parameters.items()
    ]
    first = next(iter(parameters.values()))
    present = torch.tensor([float(name in gradients) for name in parameters], dtype=first.dtype, device=first.device)
    return torch.cat([*flat, present])


def _unpack(flat: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    present = flat[flat.numel() - len(parameters) :].tolist()
    found, at = {}, 0
    for (name, parameter), there in zip(parameters.items(), present, strict=True):
        if there:
            found[name] = flat[at : at + parameter.numel()].reshape(parameter.shape)
        at += parameter.numel()
    return found
