"""The profile file: both forms survive a round trip, and every mistake is named."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests import values
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.profiles.record import (
    LayerProfile,
    Observation,
    Profile,
    layers_of_runs,
    read_profile,
    write_profile,
)

SHORTEST: dict[str, Any] = {
    "format": "varuna-capslog/profile/1",
    "layers": [
        {"name": "stem", "isolated_bytes": 5},
        {"name": "body", "isolated_bytes": 5, "added_bytes": 1},
        {"name": "head", "isolated_bytes": 10, "added_bytes": -2},
    ],
}

FULL: dict[str, Any] = {
    "format": "varuna-capslog/profile/1",
    "model": "tiny",
    "source": "estimated",
    "conditions": {"device": "cuda", "microbatch_size": 1, "input": {"images": [3, 64, 64]}},
    "layers": [
        {
            "name": "stem",
            "isolated_bytes": 500,
            "added_bytes": None,
            "static_bytes": 400,
            "saved_bytes": 60,
            "transient_bytes": 100,
            "boundary_bytes": 20,
            "parameter_bytes": 100,
            "forward_seconds": 0.5,
            "backward_seconds": 1.25,
        },
        {"name": "head", "isolated_bytes": 300, "added_bytes": 250},
    ],
    "shared": [{"name": "query", "bytes": 40, "layers": [0, 1]}],
    "observations": [
        {
            "layers": [0, 2],
            "device": "cuda",
            "microbatch_size": 1,
            "input": [3, 64, 64],
            "parallel": {"kind": "tensor", "degree": 2},
            "memory_action": "recompute",
            "peak_bytes": 750,
            "static_bytes": 400,
            "saved_bytes": 60,
            "transient_bytes": 100,
            "boundary_in_bytes": 0,
            "boundary_out_bytes": 20,
            "forward_seconds": 0.5,
            "backward_seconds": 1.25,
        }
    ],
}


BRANCHES: dict[str, Any] = {
    **SHORTEST,
    "format": "varuna-capslog/profile/2",
    "layers": [
        SHORTEST["layers"][0] | {"input_seconds": 0.5, "weight_seconds": 0.25, "weight_bytes": 3},
        *SHORTEST["layers"][1:],
    ],
    "observations": [
        FULL["observations"][0] | {"variant": "sdpa", "input_seconds": 0.5, "weight_seconds": 0.75, "weight_bytes": 9}
    ],
    # x is read by both layers behind the stem, and written anew by the body; the input y is read by the head alone.
    "tensors": [
        {"name": "x", "bytes": 8, "gradient": True, "writer": 0, "readers": [1, 2]},
        {"name": "x", "bytes": 8, "gradient": True, "writer": 1, "readers": [2]},
        {"name": "y", "bytes": 4, "gradient": False, "writer": None, "readers": [2]},
        {"name": "out", "bytes": 2, "gradient": True, "writer": 2, "readers": [3]},
    ],
}


def test_names_and_two_numbers_are_a_profile() -> None:
    profile = Profile.from_json(SHORTEST)
    assert profile.num_layers == 3
    assert profile.column("isolated_bytes") == [5, 5, 10]
    assert profile.column("added_bytes") == [None, 1, -2]
    assert (profile.model, profile.source, profile.conditions) == (None, None, {})


@pytest.mark.parametrize("value", [SHORTEST, FULL, BRANCHES], ids=["short", "full", "branches"])
def test_round_trip_through_a_file(tmp_path: Path, value: dict[str, Any]) -> None:
    profile = Profile.from_json(value)
    path = tmp_path / "profile.json"
    write_profile(path, profile)
    assert read_profile(path) == profile
    assert read_profile(path).digest == profile.digest


def test_the_full_form_is_written_as_it_was_read() -> None:
    assert Profile.from_json(FULL).to_json() == FULL


def test_tensors_make_the_chain_one_order_of_a_graph() -> None:
    profile = Profile.from_json(BRANCHES)
    assert profile.to_json()["tensors"] == BRANCHES["tensors"]
    assert profile.edges == [(0, 1), (0, 2), (1, 2)]
    assert Profile.from_json(SHORTEST).edges == [(0, 1), (1, 2)]
    assert (profile.layers[0].weight_seconds, profile.layers[0].weight_bytes) == (0.25, 3)
    assert profile.observations[0].variant == "sdpa"


def test_a_profile_without_news_is_written_in_the_older_format() -> None:
    """Plans name the digest of a profile, so it must not change."""
    plain = {name: value for name, value in BRANCHES.items() if name not in ("tensors", "observations")}
    plain["layers"] = SHORTEST["layers"]
    assert Profile.from_json(plain).to_json()["format"] == "varuna-capslog/profile/1"
    assert Profile.from_json(plain).digest == Profile.from_json(SHORTEST).digest
    assert Profile.from_json(BRANCHES).to_json()["format"] == "varuna-capslog/profile/2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"readers": []}, "readers is []; it must hold layers behind the writer (0)"),
        ({"readers": [2, 1]}, "in rising order"),
        ({"readers": [0, 1]}, "readers is [0, 1]; it must hold layers behind the writer (0)"),
        ({"readers": [4]}, "tensors[0] (x) names layer 3, but the last layer is 2"),
        ({"writer": 1, "readers": [2]}, "tensors[1] (x) has the name and the writer of tensors[0]"),
        ({"gradient": 1}, "tensors[0]: gradient is 1; it must be true or false"),
        ({"reader": [1]}, "tensors[0]: unknown field 'reader'; did you mean 'readers'?"),
        ({"bytes": -1}, "tensors[0]: bytes is -1"),
    ],
)
def test_a_wrong_tensor_is_named(change: dict[str, Any], message: str) -> None:
    value = copy.deepcopy(BRANCHES)
    value["tensors"][0] |= change
    with pytest.raises(CapslogError) as error:
        Profile.from_json(value, where="p.json")
    assert str(error.value).startswith("p.json: ")
    assert message in str(error.value)


def test_the_digest_follows_the_content_and_not_the_spelling() -> None:
    value = copy.deepcopy(FULL)
    assert Profile.from_json(dict(reversed(value.items()))).digest == Profile.from_json(FULL).digest
    value["layers"][1]["added_bytes"] += 1
    assert Profile.from_json(value).digest != Profile.from_json(FULL).digest


def test_planners_hear_which_field_is_missing() -> None:
    with pytest.raises(CapslogError, match=r"no saved_bytes for layers\[1\] \(head\)"):
        Profile.from_json(FULL).column("saved_bytes")


changed = functools.partial(values.changed, FULL)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "a JSON object is needed"),
        (changed("format", to="varuna-capslog/plan/1"), "format is 'varuna-capslog/plan/1'"),
        (changed("format", to=...), "format is None"),
        (changed("modle", to="x"), "unknown field 'modle'; did you mean 'model'?"),
        (
            changed("layers", 1, "isolated_byte", to=1),
            "layers[1]: unknown field 'isolated_byte'; did you mean 'isolated_b",
        ),
        (changed("layers", 1, "zzz", to=1), "layers[1]: unknown field 'zzz'; known: name, isolated_bytes"),
        (changed("layers", to=...), "field 'layers' is missing"),
        (changed("layers", to={}), "layers is an object; it must be a list"),
        (changed("layers", to=[]), "layers is empty"),
        (changed("layers", 0, to=5), "layers[0]: a JSON object is needed here, not a number"),
        (changed("layers", 0, "name", to=...), "layers[0]: field 'name' is missing"),
        (changed("layers", 0, "name", to=""), "layers[0]: name is ''"),
        (changed("layers", 1, "name", to="stem"), "layers[1] (stem) has the name of layers[0]"),
        (changed("layers", 0, "isolated_bytes", to=1.5), "layers[0]: isolated_bytes is 1.5; it must be a whole number"),
        (changed("layers", 0, "isolated_bytes", to=True), "layers[0]: isolated_bytes is True"),
        (changed("layers", 0, "isolated_bytes", to="5"), "layers[0]: isolated_bytes is '5'"),
        (changed("layers", 0, "isolated_bytes", to=-1), "layers[0]: isolated_bytes is -1; it must be at least 0"),
        (changed("layers", 0, "isolated_bytes", to=None), "layers[0]: isolated_bytes is null"),
        (changed("layers", 0, "added_bytes", to=0), "added_bytes is 0; no layer precedes layer 0"),
        (changed("layers", 1, "added_bytes", to=None), "layers[1] (head): added_bytes is missing"),
        (changed("layers", 0, "saved_bytes", to=-4), "layers[0]: saved_bytes is -4"),
        (changed("layers", 0, "forward_seconds", to="fast"), "layers[0]: forward_seconds is 'fast'"),
        (changed("layers", 0, "backward_seconds", to=float("inf")), "layers[0]: backward_seconds is inf"),
        (
            changed("layers", 0, "backward_seconds", to=1e300),
            "is 1e+300; it must be a number of seconds from 0 to 1e+18",
        ),
        (changed("layers", to=[{}] * 100_001), "layers has 100001 entries; it may have at most 100000"),
        (changed("source", to="guessed"), "source is 'guessed'; it must be one of measured, estimated"),
        (changed("conditions", to=3), "conditions must be an object"),
        (changed("shared", 0, "layers", to=[1]), "shared[0]: layers is [1]; it must hold two or more"),
        (changed("shared", 0, "layers", to=[1, 0]), "shared[0]: layers is [1, 0]"),
        (changed("shared", 0, "layers", to=[0, 2]), "shared[0] (query) names layer 2, but the last layer is 1"),
        (changed("observations", 0, "layers", to=[0, 3]), "observations[0] names layer 2, but the last layer is 1"),
        (changed("observations", 0, "layers", to=[1, 1]), "observations[0]: layers is [1, 1]"),
        (changed("observations", 0, "peak_bytes", to=...), "observations[0]: field 'peak_bytes' is missing"),
        (changed("observations", 0, "peek_bytes", to=1), "did you mean 'peak_bytes'?"),
        (
            changed("observations", 0, "parallel", to={"kind": "none", "degree": 2}),
            "parallel.degree is 2 with kind none",
        ),
        (changed("observations", 0, "parallel", to={"kind": "expert"}), "parallel.kind is 'expert'"),
        (changed("observations", 0, "memory_action", to="swap"), "memory_action is 'swap'"),
        (changed("observations", 0, "microbatch_size", to=0), "microbatch_size is 0; it must be at least 1"),
    ],
)
def test_mistakes_are_named_with_the_file(tmp_path: Path, value: Any, message: str) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(CapslogError) as error:
        Profile.from_json(value, where=str(path))
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_reading_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(changed("source", to="guessed")))
    with pytest.raises(CapslogError, match=rf"^{path}: source"):
        read_profile(path)


def test_records_made_in_code_pass_the_same_checks() -> None:
    with pytest.raises(CapslogError, match=r"isolated_bytes is 1\.5"):
        LayerProfile("a", 1.5)  # type: ignore[arg-type]
    assert LayerProfile("a", 3.0).isolated_bytes == 3  # type: ignore[arg-type]


def run(first: int, end: int, peak: int, **parts: Any) -> Observation:
    return Observation(layers=(first, end), device="cpu", microbatch_size=1, input=[3], peak_bytes=peak, **parts)


RUNS = [
    run(0, 1, 10, static_bytes=4, boundary_out_bytes=2),
    run(1, 2, 20, forward_seconds=0.25),
    run(2, 3, 7),
    run(0, 2, 23),
    run(1, 3, 19),
]


def test_layers_from_single_and_pair_runs() -> None:
    layers = layers_of_runs(["a", "b", "c"], RUNS, parameter_bytes=[1, 2, 3])
    assert [(layer.name, layer.isolated_bytes, layer.added_bytes) for layer in layers] == [
        ("a", 10, None),
        ("b", 20, 13),
        ("c", 7, -1),
    ]
    assert (layers[0].static_bytes, layers[0].boundary_bytes, layers[1].forward_seconds) == (4, 2, 0.25)
    assert [layer.parameter_bytes for layer in layers] == [1, 2, 3]
    profile = Profile(layers=layers, observations=tuple(RUNS))
    assert Profile.from_json(profile.to_json()) == profile


def test_runs_that_cannot_be_combined_are_named() -> None:
    with pytest.raises(CapslogError, match=r"no run of layers \[1, 3\]; M_i and M_a of layer 2 \(c\)"):
        layers_of_runs(["a", "b", "c"], RUNS[:4])
    with pytest.raises(CapslogError, match=r"layers \[0, 1\] ran twice"):
        layers_of_runs(["a"], [RUNS[0], RUNS[0].__class__(**{**RUNS[0].__dict__, "peak_bytes": 11})])
    with pytest.raises(CapslogError, match="ran under"):
        layers_of_runs(["a", "b"], [RUNS[0], run(1, 2, 3, memory_action="recompute"), RUNS[3]])
