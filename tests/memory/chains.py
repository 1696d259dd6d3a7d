"""A synthetic chain whose stages are run step by step, byte by byte: the oracle of the memory models.

A layer keeps `saved` between forward and backward (the first layer of a stage another amount than a later one), and
needs `forward` and `backward` bytes more while it runs. A stage also holds its input for the whole microbatch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from varuna_capslog.profiles.record import LayerProfile, Observation, Profile, layers_of_runs
from varuna_capslog.profiles.runs import stage_runs


@dataclass(frozen=True)
class MadeUp:
    static: int
    saved_in_front: int
    saved_behind: int
    forward: int
    backward: int


def random_chain(rng: random.Random, num_layers: int) -> tuple[list[MadeUp], list[int]]:
    """Return random layers, and the bytes that cross each cut 0 .. L."""
    high = rng.choice([8, 10**9])
    # A layer may need more bytes at work than the layer before it keeps: then the second layer sets the pair's peak.
    layers = [
        MadeUp(rng.randrange(high), rng.randrange(high), rng.randrange(high), rng.randrange(high), rng.randrange(high))
        for _ in range(num_layers)
    ]
    return layers, [rng.randrange(1, high) for _ in range(num_layers + 1)]


def run_stage(layers: list[MadeUp], boundaries: list[int], first: int, end: int) -> tuple[int, int, int]:
    """Return (peak, static, saved) bytes of one microbatch's forward and backward through layers first .. end-1."""
    static = sum(layer.static for layer in layers[first:end])
    live = peak = static + boundaries[first]
    kept = [layers[first].saved_in_front, *(layer.saved_behind for layer in layers[first + 1 : end])]
    for layer, saved in zip(layers[first:end], kept, strict=True):
        peak = max(peak, live + saved + layer.forward)
        live += saved
    saved_bytes = live - static
    for layer, saved in zip(reversed(layers[first:end]), reversed(kept), strict=True):
        peak = max(peak, live + layer.backward)
        live -= saved
    return peak, static, saved_bytes


def profile_of(layers: list[MadeUp], boundaries: list[int], device: str = "cuda") -> Profile:
    """Return the profile that profiling the chain with one microbatch in flight would give."""
    rows = []
    for first, end in stage_runs(len(layers)):
        peak, static, saved = run_stage(layers, boundaries, first, end)
        rows.append(
            Observation(
                layers=(first, end),
                device=device,
                microbatch_size=1,
                input=[1],
                memory_action="recompute",
                peak_bytes=peak,
                static_bytes=static,
                saved_bytes=saved,
                boundary_in_bytes=boundaries[first],
                boundary_out_bytes=boundaries[end],
            )
        )
    names = [f"layer{number}" for number in range(len(layers))]
    return Profile(layers=layers_of_runs(names, rows), observations=tuple(rows))


SHORT = Profile(layers=(LayerProfile("a", 5), LayerProfile("b", 6, 2), LayerProfile("c", 4, 1)))
"""A profile with M_i and M_a alone."""
