"""Saves and restores states of random generators beside torch's own: Python's, numpy's, and those of a model."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

__all__ = ["GENERATORS", "GLOBAL", "RandomStates", "crafted_draws", "seed_generators"]

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
"""Kinds of generators that code may keep."""
GLOBAL: Mapping[str, Any] = {"random": random, "numpy.random": np.random}
"""Python's generator and numpy's."""


class RandomStates:
    """States of generators as they are now.

    Args:
        generators: by name; `GLOBAL`, and others that a model keeps.
    """

    def __init__(self, generators: Mapping[str, Any]) -> None:
        self._generators = dict(generators)
        self._states = {name: _state_of(generator) for name, generator in self._generators.items()}

    def drawn(self) -> list[str]:
        """Return the names of the generators that have given numbers since."""
        return [
            name for name, generator in self._generators.items() if not _equal(_state_of(generator), self._states[name])
        ]

    def put_back(self, names: Collection[str] | None = None) -> None:
        """Make all generators, or some of them, continue from their saved states."""
        for name, state in self._states.items():
            if names is None or name in names:
                _set_state(self._generators[name], state)


def _state_of(generator: Any) -> Any:
    if generator is np.random:
        return np.random.get_state(legacy=False)  # noqa: NPY002 (users draw from it)
    if generator is random or isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    with unset_fake_temporarily():
        return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if generator is np.random:
        np.random.set_state(state)  # noqa: NPY002
    elif generator is random or isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        with unset_fake_temporarily():
            generator.set_state(state)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        with unset_fake_temporarily():
            return torch.equal(first, second)
    if isinstance(first, dict):
        return all(_equal(value, second[key]) for key, value in first.items())
    if isinstance(first, np.ndarray):
        return bool((first == second).all())
    return bool(first == second)


def seed_generators(generators: Mapping[str, Any], seed: int) -> None:
    """Make generators begin anew from a seed."""
    for generator in generators.values():
        if generator is random or isinstance(generator, random.Random):
            generator.seed(seed)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        else:
            generator.seed(seed & 0xFFFFFFFF)


@contextmanager
def crafted_draws(high: bool) -> Iterator[None]:
    """Make the next numbers of `random` and of numpy's global generator the lowest, or highest, ones, for a while.

    A decision that compares a draw with a probability goes one way with the lowest and the other way with the highest
    numbers, and a value computed from a draw differs between the two. The states are put back.
    """
    before = RandomStates(GLOBAL)
    word = _HIGHEST if high else 0
    filler = random.Random(int(high))
    words = [word] * _CRAFTED + [filler.getrandbits(32) for _ in range(624 - _CRAFTED)]
    try:
        random.setstate((3, (*words, 0), None))
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), 0, 0, 0.0))  # noqa: NPY002 (users draw from it)
        yield
    finally:
        before.put_back()


_CRAFTED = 400
"""Words of the generator's state that are chosen; behind them, code that waits for another number gets one."""
_HIGHEST = 0x12DD9BB3
"""Word of a Mersenne Twister's state from which it makes 2^32 - 1 (MT19937, Matsumoto and Nishimura 1998)."""
