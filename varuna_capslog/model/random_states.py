"""States of random generators beside torch's own: Python's, numpy's, and those that a model keeps."""

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
    """The states of generators as they are now.

    Args:
        generators: by name; `GLOBAL`, and others that a model keeps.
    """

    def __init__(self, generators: Mapping[str, Any]) -> None:
        self._generators = dict(generators)
        self._states = {name: _state_of(one) for name, one in self._generators.items()}

    def drawn(self) -> list[str]:
        """The names of those that have given numbers since."""
        return [name for name, one in self._generators.items() if not _equal(_state_of(one), self._states[name])]

    def put_back(self, names: Collection[str] | None = None) -> None:
        """Lets them, or some of them, go on from where they were."""
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


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        with unset_fake_temporarily():
            return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, np.ndarray):
        return bool((one == other).all())
    return bool(one == other)


def seed_generators(generators: Mapping[str, Any], seed: int) -> None:
    """Lets generators begin anew from a seed."""
    for one in generators.values():
        if one is random or isinstance(one, random.Random):
            one.seed(seed)
        elif isinstance(one, np.random.Generator):
            one.bit_generator.state = type(one.bit_generator)(seed).state
        elif isinstance(one, torch.Generator):
            one.manual_seed(seed)
        else:
            one.seed(seed & 0xFFFFFFFF)


@contextmanager
def crafted_draws(high: bool) -> Iterator[None]:
    """While it is open, the next numbers of `random` and of numpy's global generator are the lowest, or highest, ones.

    Whatever is decided by comparing a draw with a probability goes the one way under the first, the other under the
    second, and whatever is made of a draw is another value. The states are put back.
    """
    before = RandomStates(GLOBAL)
    word = _HIGHEST if high else 0
    rest = random.Random(int(high))
    words = [word] * _CRAFTED + [rest.getrandbits(32) for _ in range(624 - _CRAFTED)]
    try:
        random.setstate((3, (*words, 0), None))
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), 0, 0, 0.0))  # noqa: NPY002 (users draw from it)
        yield
    finally:
        before.put_back()


_CRAFTED = 400
"""Words of the generator's state that are chosen; behind them code that waits for another number gets one."""
_HIGHEST = 0x12DD9BB3
"""The word of a Mersenne Twister's state that it makes 2^32 - 1 of (MT19937, Matsumoto and Nishimura 1998)."""
