"""Seeds of random generators, from the integers that identify a draw."""

from __future__ import annotations

__all__ = ["mix", "mixed"]

_MASK = (1 << 64) - 1
_BEGIN = 0x9E3779B97F4A7C15


def mix(*numbers: int, after: int = _BEGIN) -> int:
    """Return a well-spread 63-bit number from integers (splitmix64: each input is added, then scrambled). after: state
    from `mixed` for the numbers before these, so that calls can share it: `mix(a, b) == mix(b, after=mixed(a))`.
    """
    return mixed(*numbers, after=after) >> 1


def mixed(*numbers: int, after: int = _BEGIN) -> int:
    """Return the 64-bit state after these numbers, from which `mix` can continue."""
    state = after
    for number in numbers:
        state = (state + (number & _MASK) * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
