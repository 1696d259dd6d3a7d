"""Memory model of inference: weights, caches of keys and values, and the largest forward of one microbatch.

    M(l, m) = weights(l, m) + sequences * cache(l, m) + max of:  T(l)          while the first layer computes
                                                                 T(k | k-1)    while layer k computes, k = l+1 .. m-1

for layers l .. m-1: `composition` with nothing saved for a backward. With P and W the peak and the weights of a run of
one layer, or of two neighbours, T(l) = P[l] - W[l] and T(k | k-1) = P[k-1, k] - W[k-1, k], both with what crosses the
cut into the run. A parameter that several layers of a stage share counts once. A stage computes one microbatch at a
time, but always holds the caches of all sequences that are served together.
"""

from __future__ import annotations

import numpy as np

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.composition import compose, observed
from varuna_capslog.memory.costs import Bytes, RangeCosts, only_ranges
from varuna_capslog.profiles.conditions import CACHE_BYTES, PURPOSE
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["INFERENCE", "is_for_inference", "stage_costs"]

INFERENCE = "inference"
"""The name of this memory model, and the `purpose` of its profiles and plans."""


def is_for_inference(profile: Profile) -> bool:
    """True for a profile of inference, which holds only forwards."""
    return profile.conditions.get(PURPOSE) == INFERENCE


def stage_costs(profile: Profile, run: RunShape) -> RangeCosts:
    """Return the bytes of every stage, for all sequences of the run. Raises CapslogError for a profile of training."""
    if not is_for_inference(profile):
        raise CapslogError(
            f"memory model '{INFERENCE}' is for profiles of inference, but this one is of training; leave --memory out"
        )
    single, pair = observed(profile, INFERENCE, "none")
    sequences = run.microbatches * (run.microbatch_size or single[0].microbatch_size)
    caches = profile.conditions.get(CACHE_BYTES, [0] * profile.num_layers)
    if len(caches) != profile.num_layers:
        raise CapslogError(
            f"conditions.{CACHE_BYTES} has {len(caches)} numbers for {profile.num_layers} layers; give one per layer"
        )
    static = _sums([row.static_bytes or 0 for row in single]) - _counted_twice(profile)
    if sum(caches) * sequences >= 1 << 60:
        raise CapslogError(
            f"the caches of {sequences} sequences sum to more than 1 EiB, beyond what a search can add up; lower the "
            "batch or the sequence"
        )
    cached = _sums([size * sequences for size in caches])
    return RangeCosts(only_ranges(static + cached + compose(single, pair).transient))


def _sums(sizes: list[int]) -> Bytes:
    """Return [L, L + 1]: entry [first, end] is the sum of sizes first .. end-1."""
    running = np.append(0, np.cumsum(np.array(sizes, dtype=np.int64)))
    return only_ranges(running[None, :] - running[:-1, None], 0)


def _counted_twice(profile: Profile) -> Bytes:
    """Return [L, L + 1]: the bytes of shared parameters that a sum over a range's layers counts too often."""
    excess = np.zeros((profile.num_layers, profile.num_layers + 1), dtype=np.int64)
    for shared in profile.shared:
        uses = _sums([int(layer in shared.layers) for layer in range(profile.num_layers)])
        excess += shared.bytes * np.maximum(0, uses - 1)
    return excess
