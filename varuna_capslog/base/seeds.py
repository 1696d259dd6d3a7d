"""Seeds of random generators: one number from the several that say what is drawn."""

from __future__ import annotations

__all__ = ["mix"]

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
