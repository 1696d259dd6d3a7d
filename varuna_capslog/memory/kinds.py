"""Allocated bytes of a device by kind, for people: weights, gradients, optimizer states, activations."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from varuna_capslog.memory.range_bytes import likely_gradients
from varuna_capslog.profiles.conditions import kept_copies
from varuna_capslog.profiles.record import Profile

__all__ = ["bytes_by_kind"]


def bytes_by_kind(profile: Profile, layers: Collection[int], peak_bytes: int) -> dict[str, int]:
    """Return the bytes of a device that holds these layers, by kind; their sum is `peak_bytes`.

    A parameter of several layers counts once. Weights of 16 bits with masters have a kind of their own. The rest, what
    the forward saves, workspaces and messages, is one kind. Empty where the profile does not tell the parameters.
    """
    chosen = [profile.layers[layer] for layer in sorted(layers)]
    if any(layer.parameter_bytes is None or layer.static_bytes is None for layer in profile.layers):
        return {}
    static = np.array([layer.static_bytes for layer in profile.layers], dtype=np.int64)
    twice = sum(max(0, len({*shared.layers} & {*layers}) - 1) * shared.bytes for shared in profile.shared)
    weights = sum(layer.parameter_bytes or 0 for layer in chosen) - twice
    gradients = max(0, int(likely_gradients(profile, static)[sorted(layers)].sum()) - twice)
    states, copies = kept_copies(profile.conditions)
    low, kept = round(copies * gradients), round(states * gradients)
    kinds = {"weights": low, "masters": weights} if low else {"weights": weights}
    kinds |= {"gradients": gradients, "optimizer states": kept}
    return {**kinds, "activations and workspaces": max(0, peak_bytes - sum(kinds.values()))}
