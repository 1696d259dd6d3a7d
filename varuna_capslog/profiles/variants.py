"""Rows of a profile for variants of layers, and the profile of one choice of variants. Rows of single layers have their
`variant`; rows of two layers both, as "sdpa,plain". Memory models read the rows of the layers as configured, with none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.profiles.conditions import JOINED
from varuna_capslog.profiles.record import Observation, Profile, layers_of_runs
from varuna_capslog.profiles.runs import stage_runs

__all__ = ["PLAIN", "alternatives_of", "compile_seconds", "text_of", "under", "variant_pairs"]

PLAIN = "plain"
"""Name in rows of two layers for the layer that is computed as configured."""


def text_of(names: Sequence[str]) -> str | None:
    """Return the `variant` of a row for layers with these names; None where all are as configured."""
    return None if all(name == PLAIN for name in names) else ",".join(names)


def variant_pairs(alternatives: Mapping[int, Sequence[str]], num_layers: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield first layer and names of the runs that `alternatives` (layer -> variants) need: single layers, pairs."""
    names_of_layer = {layer: (PLAIN, *alternatives.get(layer, ())) for layer in range(num_layers)}
    for first, end in stage_runs(num_layers):
        choices: list[tuple[str, ...]] = [()]
        for layer in range(first, end):
            choices = [(*names, name) for names in choices for name in names_of_layer[layer]]
        yield from ((first, names) for names in choices if text_of(names) is not None)


def alternatives_of(profile: Profile) -> dict[int, tuple[str, ...]]:
    """Return layer -> the variants that the profile has rows of, in their order there."""
    alternatives: dict[int, tuple[str, ...]] = {}
    for row in profile.observations:
        if row.variant is not None and row.layers[1] - row.layers[0] == 1:
            alternatives[row.layers[0]] = (*alternatives.get(row.layers[0], ()), row.variant)
    return dict(sorted(alternatives.items()))


def under(profile: Profile, chosen: Mapping[int, str]) -> Profile:
    """Return the profile of the same model with `chosen` variants (layer -> name), and without the rows of other
    variants. Raises CapslogError naming a run that the profile lacks.
    """
    rows: dict[tuple[tuple[int, int], str | None], Observation] = {}
    for row in profile.observations:
        if row.microbatch_size == profile.samples(1):
            rows.setdefault((row.layers, row.variant), row)
    chosen_rows = []
    for first, end in stage_runs(profile.num_layers):
        names = [chosen.get(layer, PLAIN) for layer in range(first, end)]
        wanted = rows.get(((first, end), text_of(names)))
        if wanted is None:
            raise CapslogError(
                f"the profile has no run of layers {[first, end]} as {', '.join(names)}; estimate it again with the "
                "same numerics"
            )
        chosen_rows.append(dataclasses.replace(wanted, variant=None))
    chosen_rows = _with_savings(profile, chosen, rows, chosen_rows)
    names, sizes = [layer.name for layer in profile.layers], [layer.parameter_bytes for layer in profile.layers]
    known_sizes = [size for size in sizes if size is not None]
    layers = layers_of_runs(names, chosen_rows, known_sizes if len(known_sizes) == len(sizes) else None)
    return dataclasses.replace(profile, layers=layers, observations=tuple(chosen_rows), by_degree=())


_Rows = Mapping[tuple[tuple[int, int], str | None], Observation]


def _with_savings(
    profile: Profile, chosen: Mapping[int, str], rows: _Rows, rows_of_choice: Sequence[Observation]
) -> list[Observation]:
    """Return the rows of a choice, with less time for each layer that follows a layer of the same joined variant. The
    layer saves a conversion: the time that the pair takes less than both layers alone, minus that of a plain pair.
    """
    joined, less = profile.conditions.get(JOINED, ()), dict[int, tuple[float, float]]()
    for layer in range(1, profile.num_layers):
        name = chosen.get(layer)
        if name is not None and name in joined and chosen.get(layer - 1) == name:
            spared, usual = _spared(rows, layer, name), _spared(rows, layer, PLAIN)
            less[layer] = spared[0] - usual[0], spared[1] - usual[1]
    return [
        dataclasses.replace(
            row,
            forward_seconds=max(0.0, (row.forward_seconds or 0.0) - less[row.layers[0]][0]),
            backward_seconds=max(0.0, (row.backward_seconds or 0.0) - less[row.layers[0]][1]),
        )
        if row.layers[1] - row.layers[0] == 1 and row.layers[0] in less
        else row
        for row in rows_of_choice
    ]


def _spared(rows: _Rows, layer: int, name: str) -> tuple[float, float]:
    """Forward and backward seconds by which this layer and the one before are faster together than alone."""
    alone = text_of([name])
    parts = rows[(layer - 1, layer), alone], rows[(layer, layer + 1), alone]
    pair = rows[(layer - 1, layer + 1), text_of([name, name])]
    forward = sum(row.forward_seconds or 0.0 for row in parts) - (pair.forward_seconds or 0.0)
    backward = sum(row.backward_seconds or 0.0 for row in parts) - (pair.backward_seconds or 0.0)
    return forward, backward


def compile_seconds(profile: Profile, names: Collection[str]) -> float:
    """Return the seconds of compilation before the runs in which all layers are plain or have these variants. torch
    caches code on disk, so of several runs of a layer only the first takes long.
    """
    rows = [row for row in profile.observations if row.variant is not None]
    return sum(row.compile_seconds or 0.0 for row in rows if set((row.variant or "").split(",")) <= {PLAIN, *names})
