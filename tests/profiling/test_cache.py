"""Stored profiles are found again, and not found once anything they depend on has changed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.homeless import homeless
from tests.profiling.workloads import Equal, Megabytes
from varuna_capslog.model import sources
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.profiling import cache, calibration

CONDITIONS = {"device": "cpu", "microbatch_size": 2, "input": {"x": [2, 3]}, "model_digest": "sha256:0"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "varuna-capslog" / "profiles"


def profile(**conditions: Any) -> Profile:
    layers = (LayerProfile("a", 10), LayerProfile("b", 20, 5))
    return Profile(layers=layers, model="m", source="measured", conditions=CONDITIONS | conditions)


def test_what_was_stored_is_found_under_its_conditions_only(own_cache: Path) -> None:
    cache.store(profile())
    cache.store(profile(microbatch_size=4))
    assert cache.load(CONDITIONS) == profile()
    assert cache.load(CONDITIONS | {"microbatch_size": 4}) == profile(microbatch_size=4)
    assert cache.load(CONDITIONS | {"device": "cuda"}) is None
    assert len(list(own_cache.iterdir())) == 2


def test_what_a_profile_tells_of_its_model_is_no_condition_of_the_cache() -> None:
    """Models whose last layer holds several modules, or that are a single layer, were measured at every start."""
    told = profile(last_layer=["encoder.ln", "heads"], kept_whole=["its Python code branches on a tensor"])
    cache.store(told)
    assert cache.load(CONDITIONS) == told


@pytest.mark.parametrize("damage", ["", "{", '{"format": "varuna-capslog/profile/1"}', "other"])
def test_a_damaged_file_is_noted_ignored_and_replaced(
    own_cache: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    cache.store(profile())
    (file,) = own_cache.iterdir()
    if damage == "other":  # a complete profile of other conditions
        cache.store(profile(microbatch_size=4))
        (other_file,) = set(own_cache.iterdir()) - {file}
        damage = other_file.read_text()
    file.write_text(damage)
    with caplog.at_level(logging.WARNING):
        assert cache.load(CONDITIONS) is None
    assert str(file) in caplog.text
    cache.store(profile())
    assert cache.load(CONDITIONS) == profile()


def test_a_folder_that_cannot_be_written_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        cache.store(profile())
    assert "not kept" in caplog.text


def test_the_default_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == Path.home() / ".cache" / "varuna-capslog" / "profiles"


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenShift gives a container a uid without a passwd entry, and no HOME (pytorch/pytorch#140765)."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    homeless(monkeypatch)
    assert cache.folder() is None
    cache.store(profile())
    assert cache.load(profile().conditions) is None
    assert calibration._path("cpu") is None


def digest(*modules: nn.Module) -> str:
    return cache.model_digest(Equal(), Chain([Layer(f"layer.{i}", module) for i, module in enumerate(modules)]))


def test_equal_models_have_one_digest_whatever_their_weights() -> None:
    torch.manual_seed(0)
    first = digest(nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 3))
    torch.manual_seed(1)
    assert digest(nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 3)) == first
    with torch.device("meta"):
        assert digest(nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 3)) == first


def test_whatever_costs_depend_on_changes_the_digest() -> None:
    plain = nn.Conv2d(3, 3, 3, padding=2)
    frozen = nn.Conv2d(3, 3, 3, padding=2).requires_grad_(False)
    half = nn.Conv2d(3, 3, 3, padding=2, dtype=torch.bfloat16)
    variants = [
        plain,
        nn.Conv2d(3, 3, 3, padding=2, dilation=2),  # equal parameter shapes, but other output sizes
        nn.Conv2d(3, 3, 3, padding=2, padding_mode="reflect"),
        nn.Sequential(plain),
        frozen,
        half,
        nn.Sequential(plain, nn.Dropout(0.1)),
        nn.Sequential(plain, nn.Dropout(0.2)),
    ]
    assert len({digest(variant) for variant in variants}) == len(variants)
    shared = nn.Linear(3, 3)
    assert digest(shared, shared) != digest(shared, nn.Linear(3, 3))


def test_the_workloads_own_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.model_digest(Megabytes(), Megabytes().build_chain())
    changed = tmp_path / "changed.py"
    changed.write_text("# another loss")
    monkeypatch.setattr(sources.inspect, "getsourcefile", lambda kind: str(changed))
    assert cache.model_digest(Megabytes(), Megabytes().build_chain()) != before


def test_a_kept_profile_has_the_name_that_the_model_has_now(own_cache: Path) -> None:
    """After a function was imported as another module, workers refused its plan as one of another model."""
    assert cache.kept(CONDITIONS, "m", profile) == profile()
    again = cache.kept(CONDITIONS, "examples.m", lambda: pytest.fail("it is kept"))
    assert again.model == "examples.m"
    assert again.layers == profile().layers


class WithLoss(Equal):
    """The same model with a loss of its user."""

    def costs_depend_on(self) -> list[str]:
        return [self.loss_name]


def test_another_loss_of_the_users_is_another_model() -> None:
    workload = WithLoss(2)
    chain, digests = workload.build_chain(), set()
    for name in ("tests.own_data.samples:noted_loss", "tests.own_data.samples:named_loss", "tests.values:loss"):
        workload.loss_name = name
        digests.add(cache.model_digest(workload, chain))
    assert len(digests) == 3
