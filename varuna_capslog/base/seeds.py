"""Seeds of random generators: one number from the several that say what is drawn."""

from __future__ import annotations

__all__ = ["begun", "mix", "stirred"]

_MASK = (1 << 64) - 1
_BEGIN = 0x9E3779B97F4A7C15


def mix(*numbers: int) -> int:
    """One well-spread 63-bit number from several integers (splitmix64 steps: each input is added, then scrambled)."""
    return stirred(_BEGIN, *numbers) >> 1


def begun(*numbers: int) -> int:
    """What `mix` has made of its first numbers, for `stirred`: many share them."""
    return stirred(_BEGIN, *numbers)


def stirred(state: int, *numbers: int) -> int:
    """Goes on with more numbers: `mix(a, b) == stirred(begun(a), b) >> 1`."""
    for number in numbers:
        state = (state + (number & _MASK) * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
