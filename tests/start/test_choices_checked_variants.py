"""A variant that breaks its promise is named, the plain layer is used, and every rank is told the same."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.detr.test_task import tiny_workload
from tests.elastic.backend import nudged
from tests.start.attending import Attending
from varuna_capslog.config.reading import dump_config
from varuna_capslog.model.workload import load_workload
from varuna_capslog.profiling.variant_check import check_variants
from varuna_capslog.start.choices import load_run_config, with_checked_variants
from varuna_capslog.variants import registry
from varuna_capslog.variants.attention import EagerAttention, put_in
from varuna_capslog.variants.registry import Variant, known_variants, register
from varuna_capslog.variants.wrapped import compiled


class _Louder(EagerAttention):
    """A thousandth too large."""

    def forward(self, *tensors: Any) -> torch.Tensor:
        return super().forward(*tensors) * 1.001


class _Raising(EagerAttention):
    def forward(self, *tensors: Any) -> torch.Tensor:
        raise RuntimeError("no kernel for this device")


@pytest.fixture
def louder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(known_variants()))
    register(Variant("louder", "close", lambda layer: put_in(layer, _Louder)))
    register(Variant("frank", "loose", lambda layer: put_in(layer, _Louder)))
    register(Variant("raising", "close", lambda layer: put_in(layer, _Raising)))


def checked(folder: Path, variants: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    plain, told = {"attention": "eager", "dropout": 0.1}, list[str]()
    config = tiny_workload(folder, plain, variants=variants, numerics="loose").config
    path = folder / "config.yaml"
    path.write_text(dump_config(config))
    loaded = load_run_config(path, say=told.append)
    load_workload(loaded).chosen_chain()
    assert dump_config(loaded).splitlines()[:5] == dump_config(config).splitlines()[:5]
    return loaded.variants, told


def test_variants_that_pass_are_left_as_they_are(tmp_path: Path, louder: None) -> None:
    chosen = {"encoder.*": "chunked", "decoder.0": "sdpa", "decoder.1*": "frank"}
    assert checked(tmp_path, chosen) == (chosen, [])


def test_a_variant_that_fails_is_named_once_and_the_plain_layer_used(tmp_path: Path, louder: None) -> None:
    variants, told = checked(tmp_path, {"*": "louder", "encoder.*": "chunked"})
    config = tiny_workload(tmp_path, {"attention": "eager"}).config
    names = [layer.name for layer in load_workload(config).build_chain().layers]
    encoder = [f"#{number}" for number, name in enumerate(names) if name.startswith("encoder.")]
    assert variants == dict.fromkeys(encoder, "chunked")
    assert all("variant 'louder' of layer 'decoder." in line for line in told)
    assert "promises results within 1e-5, but " in told[0]
    assert told[0].endswith("; the plain layer is used")
    assert len(set(told)) == len(told) > 0


def test_a_variant_that_cannot_run_is_named_with_its_reason(tmp_path: Path, louder: None) -> None:
    variants, told = checked(tmp_path, {"encoder.*": "raising"})
    assert variants == {}
    assert "it cannot be checked: no kernel for this device" in told[0]


def test_a_compiled_layer_is_checked_by_its_code(louder: None) -> None:
    """The layer's module is the plain one: only what torch.compile makes of it, here 1.001 times too large, differs."""
    register(Variant("nudged", "close", functools.partial(compiled, backend=nudged.__name__)))
    register(Variant("eagerly", "close", functools.partial(compiled, backend="aot_eager")))
    model = Attending()
    checks = check_variants(model.build_chain(), {0: "nudged", 3: "eagerly"}, model.profile_inputs(1))
    assert {check.variant: check.fault.partition(" differs by ")[0] for check in checks} == {
        "nudged": "output 0",
        "eagerly": "",
    }


def test_without_variants_nothing_is_built(tmp_path: Path) -> None:
    config = tiny_workload(tmp_path).config
    assert with_checked_variants(config) is config
