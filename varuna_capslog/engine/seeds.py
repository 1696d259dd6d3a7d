"""Random numbers that depend on what is computed, never on where or when.

Engine rule 1: every layer draws from a generator seeded by (run seed, step, microbatch, layer), so dropout is the same
under any cut list, schedule, recomputation or number of replicas.
"""

from __future__ import annotations

import torch

__all__ = ["mix", "seed_layer"]

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """One well-spread 63-bit number from several integers (splitmix64 steps: each input is added, then scrambled)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + (number & _MASK) * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_layer(device: torch.device, seed: int, step: int, microbatch: int, layer: int) -> None:
    """Seeds the device's default generator for one layer on one microbatch."""
    value = mix(seed, step, microbatch, layer)
    # not torch.manual_seed: it also visits every other device and, before CUDA starts, records a stack trace
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)
    else:
        torch.default_generator.manual_seed(value)
