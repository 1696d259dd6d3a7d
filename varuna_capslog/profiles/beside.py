"""Adds bytes that layers always hold besides (snapshots, copies, or waiting gradients) to a profile.

Searches then count these bytes without knowing what they are. This module imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from varuna_capslog.profiles.record import LayerProfile, Profile

__all__ = ["with_beside"]


def with_beside(profile: Profile, beside: Sequence[int]) -> Profile:
    """Return the profile with `beside[layer]` more bytes of each layer in every run; the same where all are 0."""
    if not any(beside):
        return profile

    def raised(size: int | None, first: int, end: int) -> int | None:
        return None if size is None else size + sum(beside[first:end])

    def layer(row: LayerProfile, at: int) -> LayerProfile:
        return dataclasses.replace(
            row,
            isolated_bytes=row.isolated_bytes + beside[at],
            added_bytes=raised(row.added_bytes, at, at + 1),
            static_bytes=raised(row.static_bytes, at, at + 1),
        )

    return dataclasses.replace(
        profile,
        layers=tuple(layer(row, at) for at, row in enumerate(profile.layers)),
        observations=tuple(
            dataclasses.replace(
                row,
                peak_bytes=row.peak_bytes + sum(beside[slice(*row.layers)]),
                static_bytes=raised(row.static_bytes, *row.layers),
            )
            for row in profile.observations
        ),
    )
