"""Optimal checkpointing of a chain on one device, with nested and with flat segments, by dynamic programming.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova: Optimal checkpointing for heterogeneous chains (rotor), Theorem 1.
State: layers s .. t-1 whose input is held, and m bytes beside it. Transition C1: keep the input of layer r too, run
s .. r-1 keeping nothing, finish r .. t-1, then s .. r-1. C2: run layer s keeping everything, finish the others, then
its backward. Cost: seconds. O(L^3) transitions, each for all sizes of memory at once.

`flat` allows C1 only where layers s .. r-1 then keep everything: each layer runs at most twice, as with the memory
intervals of this library without nesting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Layers:
    """forward, backward: [L] seconds. cuts: [L + 1] bytes of what crosses; saved: [L] of all that a layer keeps, its
    outputs included and its inputs not. forward_more, backward_more: [L] that its work needs besides.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    cuts: Sequence[int]
    saved: Sequence[int]
    forward_more: Sequence[int]
    backward_more: Sequence[int]


def best_seconds(layers: Layers, limits: Sequence[int], flat: bool = False, slots: int = 1000) -> list[float]:
    """The fewest seconds of a forward and backward within each limit in bytes beside the chain's input; infinite where
    nothing fits. Memory is counted in `slots` parts of the largest limit, each tensor rounded up.
    """
    unit, size = max(limits) / slots, len(layers.forward)

    def parts(values: Sequence[int]) -> list[int]:
        return [int(np.ceil(value / unit)) for value in values]

    cuts, saved = parts(layers.cuts), parts(layers.saved)
    more_f, more_b = parts(layers.forward_more), parts(layers.backward_more)
    have = np.arange(slots + 1)
    ahead = np.concatenate([[0.0], np.cumsum(layers.forward)])

    def fits(need: int, values: Floats) -> Floats:
        return np.where(have >= need, values, np.inf)

    def with_less(values: Floats, held: int) -> Floats:
        """The values with `held` parts taken."""
        if held > slots:
            return np.full(slots + 1, np.inf)
        return np.concatenate([np.full(held, np.inf), values[: slots + 1 - held]])

    def everything(s: int, t: int) -> Floats:
        """Layers s .. t-1 that keep everything."""
        held, need = 0, 0
        for one in range(s, t):
            need = max(need, held + saved[one] + max(more_f[one], cuts[one + 1] + cuts[one] + more_b[one]))
            held += saved[one]
        return fits(need, np.full(slots + 1, sum(layers.forward[s:t]) + sum(layers.backward[s:t])))

    best: dict[tuple[int, int], Floats] = {}
    for length in range(1, size + 1):
        for s in range(size + 1 - length):
            t = s + length
            # C2: the gradient of the outputs of t-1 is there, or comes
            need = cuts[t] + saved[s] + more_f[s], cuts[s + 1] + saved[s] + cuts[s] + more_b[s]
            found = np.full(slots + 1, layers.forward[s] + layers.backward[s])
            if length > 1:
                found += with_less(best[s + 1, t], saved[s])
            found = fits(max(need), found)
            for r in range(s + 1, t):
                # C1: two neighbouring cuts are there while each layer before r runs
                bare = max(cuts[k] * (k > s) + cuts[k + 1] + more_f[k] for k in range(s, r))
                then = everything(s, r) if flat else best[s, r]
                found = np.minimum(
                    found, fits(cuts[t] + bare, ahead[r] - ahead[s] + with_less(best[r, t], cuts[r]) + then)
                )
            best[s, t] = found
    return [float(best[0, size][min(slots, int(limit / unit))]) for limit in limits]


def check() -> None:
    """Known answers: everything fits; and the binomial optimum of equal layers that keep nothing but their inputs."""
    equal = Layers([1.0] * 6, [2.0] * 6, [1] * 7, [1] * 6, [0] * 6, [0] * 6)
    assert best_seconds(equal, [100], slots=100) == [18.0]
    nested, flat = best_seconds(equal, [4, 5, 6, 7, 8, 9], slots=9), best_seconds(equal, [4, 5, 6, 7, 8, 9], True, 9)
    assert all(a <= b for a, b in zip(nested, flat, strict=True))
    assert nested == sorted(nested, reverse=True)


check()
