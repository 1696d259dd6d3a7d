"""A made-up chain whose stages are run step by step, byte by byte: the oracle of the memory models.

A layer keeps `saved` between forward and backward (another amount at the front of a stage than behind its neighbour),
and needs `forward` and `backward` bytes more while it works. A stage also holds its input for the whole microbatch.
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
    """Layers, and the bytes that cross cut 0 .. L."""
    high = rng.choice([8, 10**9])
    # More bytes while at work than a layer in front could keep: then a pair's peak tells of its second layer.
    layers = [
        MadeUp(rng.randrange(high), rng.randrange(high), rng.randrange(high), rng.randrange(high), rng.randrange(high))
        for _ in range(num_layers)
    ]
    return layers, [rng.randrange(1, high) for _ in range(num_layers + 1)]


def run_stage(layers: list[MadeUp], boundaries: list[int], first: int, end: int) -> tuple[int, int, int]:
    """(peak, static, saved) of one microbatch through layers first .. end-1 and back."""
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
    """What profiling the chain with one microbatch in flight would give."""
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
"""M_i and M_a alone."""
