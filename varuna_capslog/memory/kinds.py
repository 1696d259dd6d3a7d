"""Allocated bytes of a device by kind, for people: weights, gradients, optimizer states, activations."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from varuna_capslog.memory.range_bytes import likely_gradients
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import kept_copies
from varuna_capslog.profiles.record import Profile

__all__ = ["bytes_by_kind", "kinds_on"]


def kinds_on(plan: Plan, profile: Profile, place: int, of: str, peak_bytes: int) -> dict[str, int]:
    """Return `bytes_by_kind` of a plan's stage or rank, and {} where some optimizer states wait in the host tier.

    place, of: number of a "stage" or of a "rank". peak_bytes: allocated there.
    """
    stages = [stage for at, stage in enumerate(plan.stages) if (place in stage.ranks if of == "rank" else at == place)]
    if any(stage.moments_away for stage in stages):
        return {}
    layers = {layer for stage in stages for layer in stage.numbers}
    elsewhere = {layer for stage in stages for layer in stage.moments_elsewhere}
    return bytes_by_kind(profile, layers, peak_bytes, elsewhere)


def bytes_by_kind(
    profile: Profile, layers: Collection[int], peak_bytes: int, elsewhere: Collection[int] = ()
) -> dict[str, int]:
    """Return the bytes of a device that holds these layers, by kind; their sum is `peak_bytes`.

    elsewhere: layers, without shared parameters, whose optimizer states another replica keeps.

    A parameter of several layers counts once. Weights of 16 bits with masters have a kind of their own. The rest, what
    the forward saves, workspaces and messages, is one kind. Empty where the profile does not tell the parameters, or
    the peak is smaller than what they need.
    """
    chosen = [profile.layers[layer] for layer in sorted(layers)]
    if any(layer.parameter_bytes is None or layer.static_bytes is None for layer in profile.layers):
        return {}
    static = np.array([layer.static_bytes for layer in profile.layers], dtype=np.int64)
    each = likely_gradients(profile, static)
    weights, gradients = sum(layer.parameter_bytes or 0 for layer in chosen), int(each[sorted(layers)].sum())
    for shared in profile.shared:
        users = sorted({*shared.layers} & {*layers})
        twice = max(0, len(users) - 1) * shared.bytes
        weights -= twice
        if users and min(each[users]) >= shared.bytes:  # else it is not trained
            gradients -= twice
    states, copies = kept_copies(profile.conditions)
    stepped = gradients - int(each[sorted(elsewhere)].sum())
    low, kept = round(copies * gradients), round(states * stepped)
    kinds = {"weights": low, "masters": weights} if low else {"weights": weights}
    kinds |= {"gradients": gradients, "optimizer states": kept}
    rest = peak_bytes - sum(kinds.values())
    return {**kinds, "activations and workspaces": rest} if rest >= 0 else {}
