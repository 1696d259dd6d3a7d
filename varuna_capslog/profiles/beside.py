"""A profile whose layers always hold some bytes more: snapshots, copies, or gradients that wait.

Searches count these bytes so without knowing what they are. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from varuna_capslog.profiles.record import LayerProfile, Profile

__all__ = ["with_beside"]


def with_beside(profile: Profile, beside: Sequence[int]) -> Profile:
    """The profile of layers that hold so many bytes more, by layer, in every run; the same where all are 0."""
    if not any(beside):
        return profile

    def raised(size: int | None, first: int, end: int) -> int | None:
        return None if size is None else size + sum(beside[first:end])

    def layer(one: LayerProfile, at: int) -> LayerProfile:
        return dataclasses.replace(
            one,
            isolated_bytes=one.isolated_bytes + beside[at],
            added_bytes=raised(one.added_bytes, at, at + 1),
            static_bytes=raised(one.static_bytes, at, at + 1),
        )

    return dataclasses.replace(
        profile,
        layers=tuple(layer(one, at) for at, one in enumerate(profile.layers)),
        observations=tuple(
            dataclasses.replace(
                row,
                peak_bytes=row.peak_bytes + sum(beside[slice(*row.layers)]),
                static_bytes=raised(row.static_bytes, *row.layers),
            )
            for row in profile.observations
        ),
    )
