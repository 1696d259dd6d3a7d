"""The bytes of a device by kind, counted by hand."""

from __future__ import annotations

from varuna_capslog.memory.range_bytes import bytes_by_kind
from varuna_capslog.profiles.record import LayerProfile, Profile, SharedParameter


def profile_of(copies: float) -> Profile:
    """Return two layers of 100 B of weights each, of which 60 B are one parameter; gradient and two moments beside."""
    rows = tuple(
        LayerProfile(
            f"layer{number}",
            1000,
            1000 if number else None,
            static_bytes=round((4 + copies) * 100),
            parameter_bytes=100,
        )
        for number in range(2)
    )
    shared = (SharedParameter("table", 60, (0, 1)),)
    return Profile(rows, shared=shared, conditions={"optimizer_copies": 2, "weight_copies": copies})


def test_a_parameter_of_several_layers_counts_once() -> None:
    profile = profile_of(0)
    assert bytes_by_kind(profile, [0], 1000) == {
        "weights": 100, "gradients": 100, "optimizer states": 200, "activations and workspaces": 600,
    }  # fmt: skip
    assert bytes_by_kind(profile, [0, 1], 1000) == {
        "weights": 140, "gradients": 140, "optimizer states": 280, "activations and workspaces": 440,
    }  # fmt: skip


def test_masters_stand_beside_weights_of_16_bits() -> None:
    kinds = bytes_by_kind(profile_of(0.5), [1], 1000)
    assert (kinds["weights"], kinds["masters"], sum(kinds.values())) == (50, 100, 1000)
    assert bytes_by_kind(profile_of(0.5), [1], 300) == {}  # less than the parameters alone need
