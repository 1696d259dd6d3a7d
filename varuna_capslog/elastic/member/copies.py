"""Copies of layers that a member of our engine keeps for others, and the layers that its last generation trained.

At a change of members a layer may change its role: a copy becomes a layer that this member trains, and a layer that it
trained becomes a copy. Neither is copied in memory for that. Copies make their steps in a thread of their own, beside
the next forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from varuna_capslog.elastic.member.work import LayerState
from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.engine.options import EngineOptions
from varuna_capslog.model.chain import Chain
from varuna_capslog.training import layer_state

__all__ = ["LayerCopies"]


class LayerCopies:
    """The layer copies of one member. Called by its one thread.

    Args:
        chain: of the run.
        options: of its engines.
        device: where all lies.
    """

    def __init__(self, chain: Chain, options: EngineOptions, device: torch.device) -> None:
        self._chain, self._options, self._device = chain, options, device
        self._trained: dict[int, EngineLayer] = {}
        self._followers: WeakValueDictionary[int, layer_state.Follower] = WeakValueDictionary()
        # with as many threads inside torch as this one has: a kernel's bits may depend on that
        threads = torch.get_num_threads()
        self._beside = ThreadPoolExecutor(1, "copies", initializer=torch.set_num_threads, initargs=(threads,))

    def keep(self, layers: Iterable[EngineLayer]) -> None:
        """Keeps the layers that a generation's engine trained here, once it has ended."""
        self._trained = {layer.index: layer for layer in layers}

    def ready(self, states: Mapping[int, LayerState], copied: Collection[int]) -> dict[int, EngineLayer]:
        """The layers that the next engine can take as they are, since these states lie in them.

        Args:
            states: of all that it will have, by layer.
            copied: layers that this member will have copies of; other layers that it trained are let go.
        """
        layers = [*self._trained.values(), *(follower.layer for follower in self._followers.values())]
        self._trained = {index: layer for index, layer in self._trained.items() if index in copied}
        return {
            layer.index: layer
            for layer in layers
            if layer.index in states and layer_state.lies_in(states[layer.index], layer)
        }

    def let_go(self) -> None:
        """Frees the layers of the last generation that have not become copies: training goes on, and none will."""
        self._trained = {}

    def follow(self, index: int, state: LayerState) -> layer_state.Follower:
        """A copy of a layer, from this state on."""
        before = self._trained.pop(index, None)
        follower = layer_state.Follower(self._chain, index, self._options, self._device, state, before)
        self._followers[index] = follower
        return follower

    def apply(
        self, due: Sequence[tuple[layer_state.Follower, Mapping[str, Tensor], int, float]]
    ) -> Callable[[], None] | None:
        """See `Work.apply_to_copies`."""
        # a user's optimizer might not bear a thread of its own, and a GPU works beside this process anyway
        if self._device.type != "cpu" or ":" in self._options.recipe.optimizer:
            layer_state.apply_together(due)
            return None
        return self._beside.submit(layer_state.apply_together, due).result

    def close(self) -> None:
        """Ends the thread."""
        self._beside.shutdown()
