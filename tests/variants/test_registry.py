"""Patterns, numerical classes, users' own variants, and one sentence per mistake."""

from __future__ import annotations

import pytest
from torch import nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.variants import registry
from varuna_capslog.variants.attention import ChunkedAttention, EagerAttention, SdpaAttention
from varuna_capslog.variants.registry import Variant, apply_variants, known_variants, register


def layers() -> list[tuple[str, nn.Module]]:
    return [
        ("stem", nn.Linear(2, 2)),
        ("encoder.0", nn.Sequential(EagerAttention())),
        ("encoder.1", nn.Sequential(EagerAttention())),
        ("decoder.0", nn.Sequential(EagerAttention(), EagerAttention())),
    ]


def kinds(named_layers: list[tuple[str, nn.Module]]) -> list[type]:
    return [type(module[0]) for _, module in named_layers if isinstance(module, nn.Sequential)]


def test_the_last_pattern_that_matches_counts() -> None:
    named_layers = layers()
    chosen = apply_variants(named_layers, {"*": "chunked", "encoder.1": "sdpa"}, "close")
    assert chosen == {1: "chunked", 2: "sdpa", 3: "chunked"}
    assert kinds(named_layers) == [ChunkedAttention, SdpaAttention, ChunkedAttention]


def test_a_layer_can_be_chosen_by_its_number() -> None:
    assert apply_variants(layers(), {"encoder.*": "chunked", "#2": "sdpa"}, "close") == {1: "chunked", 2: "sdpa"}


def test_what_a_layer_is_already_is_allowed_in_every_class() -> None:
    assert apply_variants(layers(), {"encoder.*": "eager"}) == {1: "eager", 2: "eager"}


@pytest.mark.parametrize(
    ("choices", "numerics", "sentence"),
    [
        ({"encoder.*": "chunkd"}, "close", r"unknown variant 'chunkd'; did you mean 'chunked'\?"),
        ({"encodr.*": "sdpa"}, "close", r"the pattern 'encodr\.\*', which matches no layer; .* mean 'encoder\.\*'"),
        ({"*block*": "sdpa"}, "close", r"'\*block\*', which matches no layer; the layers are called stem, encoder\.0"),
        ({"#4": "sdpa"}, "close", r"'#4', which matches no layer"),
        ({"stem": "sdpa"}, "close", "gives 'stem' the variant 'sdpa', which none of these layers has a place for"),
        ({"encoder.1": "sdpa"}, "same", "layer 'encoder.1' .* within 1e-5, .*numerics=same .*set numerics=close"),
    ],
)
def test_one_sentence_per_mistake(choices: dict[str, str], numerics: str, sentence: str) -> None:
    with pytest.raises(CapslogError, match=sentence):
        apply_variants(layers(), choices, numerics)


def test_users_add_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(known_variants()))

    def counted(layer: nn.Module) -> int | None:
        return 1 if isinstance(layer, nn.Linear) else None

    variant = Variant("own", "loose", counted)
    register(variant)
    register(variant)
    assert apply_variants(layers(), {"*": "own"}, "loose") == {0: "own"}
    with pytest.raises(CapslogError, match="numerics=close allows results within 1e-5 at most; set numerics=loose"):
        apply_variants(layers(), {"*": "own"}, "close")
    with pytest.raises(CapslogError, match="there is a variant 'own' already"):
        register(Variant("own", "same", counted))
    with pytest.raises(CapslogError, match="numerics of variant 'x' is 'near'; it must be one of same, close, loose"):
        Variant("x", "near", counted)


class _Point:
    name = "wrong"

    def load(self) -> object:
        return 3


def test_an_entry_point_that_is_no_variant_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [_Point()])
    registry._load_entry_points.cache_clear()
    try:
        with pytest.raises(CapslogError, match=r"the entry point 'wrong' of varuna_capslog\.variants gives int"):
            known_variants()
    finally:
        registry._load_entry_points.cache_clear()
