"""Optimal checkpointing of a chain on one device, with nested and with flat segments, by dynamic programming.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova: Optimal checkpointing for heterogeneous chains (rotor), Theorem 1.
State: layers s .. t-1 whose input is kept, and m bytes besides. Transition C1: keep the input of layer r too, run
s .. r-1 keeping nothing, finish r .. t-1, then s .. r-1. C2: run layer s keeping everything, finish the others, then
its backward. Cost: seconds. O(L^3) transitions, each for all sizes of memory at once.

`flat` allows C1 only if layers s .. r-1 then keep everything: each layer runs at most twice, as with the memory
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
    """Costs of a chain. forward, backward: [L] seconds. cuts: [L + 1] bytes of the tensors that cross; saved: [L] bytes
    that a layer keeps, with its outputs but not its inputs. forward_more, backward_more: [L] further bytes that its
    forward and backward need.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    cuts: Sequence[int]
    saved: Sequence[int]
    forward_more: Sequence[int]
    backward_more: Sequence[int]


def best_seconds(layers: Layers, limits: Sequence[int], flat: bool = False, slots: int = 1000) -> list[float]:
    """Return the fewest seconds of a forward and backward within each limit, in bytes besides the chain's input;
    infinite if nothing fits. Memory is counted in `slots` parts of the largest limit, each tensor rounded up.
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
        """Return the values for `held` fewer parts of memory."""
        if held > slots:
            return np.full(slots + 1, np.inf)
        return np.concatenate([np.full(held, np.inf), values[: slots + 1 - held]])

    def everything(s: int, t: int) -> Floats:
        """Return the seconds of layers s .. t-1 that keep everything."""
        held, need = 0, 0
        for layer in range(s, t):
            need = max(need, held + saved[layer] + max(more_f[layer], cuts[layer + 1] + cuts[layer] + more_b[layer]))
            held += saved[layer]
        return fits(need, np.full(slots + 1, sum(layers.forward[s:t]) + sum(layers.backward[s:t])))

    best: dict[tuple[int, int], Floats] = {}
    for length in range(1, size + 1):
        for s in range(size + 1 - length):
            t = s + length
            # C2: the gradient of the outputs of t-1 is in memory, or arrives
            need = cuts[t] + saved[s] + more_f[s], cuts[s + 1] + saved[s] + cuts[s] + more_b[s]
            seconds = np.full(slots + 1, layers.forward[s] + layers.backward[s])
            if length > 1:
                seconds += with_less(best[s + 1, t], saved[s])
            seconds = fits(max(need), seconds)
            for r in range(s + 1, t):
                # C1: two neighbouring cuts are in memory while each layer before r runs
                bare = max(cuts[k] * (k > s) + cuts[k + 1] + more_f[k] for k in range(s, r))
                then = everything(s, r) if flat else best[s, r]
                seconds = np.minimum(
                    seconds, fits(cuts[t] + bare, ahead[r] - ahead[s] + with_less(best[r, t], cuts[r]) + then)
                )
            best[s, t] = seconds
    return [float(best[0, size][min(slots, int(limit / unit))]) for limit in limits]


def check() -> None:
    """Check known answers: everything fits; the binomial optimum of equal layers that keep only their inputs."""
    equal = Layers([1.0] * 6, [2.0] * 6, [1] * 7, [1] * 6, [0] * 6, [0] * 6)
    assert best_seconds(equal, [100], slots=100) == [18.0]
    nested, flat = best_seconds(equal, [4, 5, 6, 7, 8, 9], slots=9), best_seconds(equal, [4, 5, 6, 7, 8, 9], True, 9)
    assert all(a <= b for a, b in zip(nested, flat, strict=True))
    assert nested == sorted(nested, reverse=True)


check()
