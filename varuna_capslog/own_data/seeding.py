"""Random numbers of one sample: drawn from its own seed in any process, and no other random numbers change."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from varuna_capslog.base.seeds import mix

__all__ = ["seeded"]

_SAMPLE = 0x5341


@contextlib.contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seeds the CPU generator of torch, `random` and numpy's global generator from these numbers, and restores their
    states at the end. Only one thread of this process may be in here.
    """
    seed = mix(_SAMPLE, *numbers)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 (users draw from it)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
