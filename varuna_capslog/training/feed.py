"""Which samples make which step, and their tensors ahead of time.

The order is a pure function of (seed, step): resuming is asking for the next step. Every rank derives the description
of a minibatch itself; only ranks with a stage that takes inputs of the chain load tensors, in background threads.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.seeds import mix
from varuna_capslog.model.workload import DataSource, Minibatch

__all__ = ["Feed", "evaluation_groups"]

_SHUFFLE = 0x5348
_THREADS, _AHEAD = 2, 4
"""Threads that load, and microbatches that are loading or loaded before they are asked for."""


class Feed:
    """Training minibatches by step, counted from 1.

    Args:
        minibatch_size, microbatch_size: samples.
        local: global indices of the microbatches that this rank loads (empty: none), each as often as it is asked for.

    Raises:
        CapslogError: fewer samples than one minibatch.
    """

    def __init__(
        self, source: DataSource, minibatch_size: int, microbatch_size: int, seed: int, local: Sequence[int]
    ) -> None:
        self._source, self._seed = source, seed
        self._minibatch_size, self._microbatch_size = minibatch_size, microbatch_size
        self.steps_per_epoch = len(source) // minibatch_size
        if self.steps_per_epoch == 0:
            raise CapslogError(
                f"the training data has {len(source)} samples, fewer than train.minibatch_size={minibatch_size}; "
                "lower it"
            )
        self._asked = Counter(local)
        self._local = sorted(self._asked)
        self._described = functools.lru_cache(maxsize=4)(self._describe)
        self._ordered = functools.lru_cache(maxsize=1)(self._order)
        self._loads: dict[tuple[int, int], Future[dict[str, Tensor]]] = {}
        self._pool = ThreadPoolExecutor(_THREADS, "load") if self._local else None

    def epoch(self, step: int) -> int:
        """The epoch that a step belongs to, counted from 0."""
        return (step - 1) // self.steps_per_epoch

    def minibatch(self, step: int) -> Minibatch:
        """The description of a step's minibatch; the last few are kept."""
        return self._described(step)

    def _describe(self, step: int) -> Minibatch:
        epoch, at = self.epoch(step), (step - 1) % self.steps_per_epoch * self._minibatch_size
        samples = self._ordered(epoch)[at : at + self._minibatch_size]
        return self._source.minibatch(_split(samples, self._microbatch_size), epoch)

    def _order(self, epoch: int) -> list[int]:
        """All samples as this epoch shows them."""
        generator = torch.Generator().manual_seed(mix(self._seed, _SHUFFLE, epoch))
        order: list[int] = torch.randperm(len(self._source), generator=generator).tolist()
        return order

    def loader(self, step: int) -> Callable[[int], dict[str, Tensor]]:
        """A function that gives the inputs of this step's microbatches; the next ones are loaded meanwhile.

        A microbatch that several stages ask for is loaded once, and kept until the last of them has it.
        """
        left = self._asked.copy()

        def load(microbatch: int) -> dict[str, Tensor]:
            assert self._pool is not None
            position = self._local.index(microbatch)
            upcoming = ((step, index) for index in self._local[position:] if left[index])
            following = ((step + 1, index) for index in self._local)
            for key in [*upcoming, *following][:_AHEAD]:
                if key not in self._loads:
                    minibatch = self.minibatch(key[0])
                    self._loads[key] = self._pool.submit(self._source.load, minibatch, key[1])
            left[microbatch] -= 1
            loaded = self._loads[step, microbatch] if left[microbatch] else self._loads.pop((step, microbatch))
            return loaded.result()

        return load

    def close(self) -> None:
        """Stops the loading threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def evaluation_groups(count: int, microbatch_size: int, per_minibatch: int) -> list[list[list[int]]]:
    """The minibatches of an evaluation over `count` samples, each of at most `per_minibatch` microbatches.

    Which samples share a minibatch, and with it the padding of an image, does not depend on the layout.
    """
    size = microbatch_size * per_minibatch
    return [_split(list(range(start, min(start + size, count))), microbatch_size) for start in range(0, count, size)]


def _split(samples: Sequence[int], size: int) -> list[list[int]]:
    return [list(samples[at : at + size]) for at in range(0, len(samples), size)]
