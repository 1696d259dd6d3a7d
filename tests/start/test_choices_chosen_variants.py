"""Variants that the planner chooses: in the config of the run and in its plan, kept when the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from varuna_capslog.config.reading import Config, dump_config, load_config, section
from varuna_capslog.engine.layout import layout_of
from varuna_capslog.model.workload import load_workload
from varuna_capslog.plans.plan import latest_plan, write_plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiles.runs import alternatives_of
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.measure import profile_workload
from varuna_capslog.start import prepare
from varuna_capslog.start.choices import load_run_config
from varuna_capslog.start.prepare import estimate_memo, prepare_run, profile_and_variants
from varuna_capslog.variants import registry
from varuna_capslog.variants.attention import EagerAttention, SdpaAttention, put_in
from varuna_capslog.variants.registry import Variant, known_variants, register


class _Wrong(SdpaAttention):
    """Attention as cheap as `sdpa` whose outputs are a thousandth too large."""

    def forward(self, *tensors: Any) -> torch.Tensor:
        return super().forward(*tensors) * 1.001


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only attention, so that the search is short."""
    variants = known_variants()
    monkeypatch.setattr(registry, "_registered", {name: variants[name] for name in ("eager", "sdpa")})


def config_of(folder: Path, numerics: str, capacity: str | None = "1MiB", source: str = "estimated") -> Config:
    """Return the config of a run. By default the maps of eager attention do not fit, at any speed of the machine."""
    values = {
        "workload": "tests.start.attending:workload",
        "train": {"minibatch_size": 4, "microbatch_size": 1},
        "pipeline": {"planner": "budget", "devices": 2, "schedule": "1f1b", "capacity": capacity},
        "profile": {"source": source},
        "run_dir": str(folder / "run"),
        "device": "cpu",
        "numerics": numerics,
    }
    return section(Config, values, "")


def test_the_planner_chooses_and_the_run_keeps_its_choice(tmp_path: Path, few: None) -> None:
    plan = prepare_run(config_of(tmp_path, "close"), show=False)
    assert set(plan.variants.values()) == {"sdpa"}
    assert any("variants (close): sdpa for 2 of 4 layers (block.0 to block.1); it fits" in note for note in plan.notes)
    written = load_config(tmp_path / "run" / "config.yaml")
    assert written.variants == {f"#{layer}": name for layer, name in plan.variants.items()}
    planned = latest_plan(tmp_path / "run")
    assert planned is not None
    layout_of(planned[1], written)
    for number, layer in enumerate(load_workload(written).chosen_chain().layers):
        kinds = {type(part) for part in layer.module.modules()}
        assert (SdpaAttention in kinds) == (str(number) in plan.variants)
        assert EagerAttention not in kinds or str(number) not in plan.variants
    # the plan, given to a config that allows it, decides the variants there; one that does not is told what to set
    path = tmp_path / "given.json"
    write_plan(path, planned[1])
    for numerics in ("close", "same"):
        config = config_of(tmp_path, numerics)
        config.pipeline.plan, config.run_dir = path, tmp_path / "other"
        (tmp_path / "config.yaml").write_text(dump_config(config))
        if numerics == "close":
            assert load_run_config(tmp_path / "config.yaml").variants == written.variants
        else:
            with pytest.raises(Exception, match="numerics=same allows the same bits at most; set numerics=close"):
                load_run_config(tmp_path / "config.yaml")
    # a run that goes on does not choose again: here it has chosen for one layer alone
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    written.variants = dict([*written.variants.items()][:1])
    (tmp_path / "run" / "config.yaml").write_text(dump_config(written))
    again = prepare_run(config_of(tmp_path, "close", None), show=False)
    assert {f"#{layer}": name for layer, name in again.variants.items()} == written.variants


def test_the_planner_chooses_by_a_measured_profile(tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner once chose by estimates alone, and said so."""
    requests = list[tuple[str | None, int]]()

    def measured(config: Config, show: bool, memo: None, variants: str | None = None) -> Profile:
        requests.append((variants, len(config.variants)))
        conditions = RunConditions(recompute=False)
        return profile_workload(load_workload(config), conditions, variants=variants)

    monkeypatch.setattr(prepare, "profile_run", measured)
    told = list[str]()
    chosen, profile = profile_and_variants(
        config_of(tmp_path, "close", source="measured"), False, None, say=told.append
    )
    assert chosen.variants == {"#1": "sdpa", "#2": "sdpa"}
    assert "sdpa for 2 of 4 layers (block.0 to block.1); it fits, and without them" in told[0]
    # the predictions of the plan come from runs that did not decide the choice
    assert requests == [("close", 0), (None, 2)]
    assert alternatives_of(profile) == {}


def test_the_default_chooses_nothing(tmp_path: Path, few: None) -> None:
    plan = prepare_run(config_of(tmp_path, "same", None), show=False)
    assert plan.variants == {}
    assert load_config(tmp_path / "run" / "config.yaml").variants == {}


def test_a_choice_that_fails_its_check_is_named_and_left_out(tmp_path: Path, few: None) -> None:
    variants = known_variants()
    registry._registered.clear()
    registry._registered["eager"] = variants["eager"]
    register(Variant("wrong", "close", lambda layer: put_in(layer, _Wrong)))
    config, told = config_of(tmp_path, "close"), list[str]()
    assert profile_and_variants(config, False, estimate_memo(config), say=told.append)[0].variants == {}
    assert told
    assert all("variant 'wrong' of layer" in line and line.endswith("; the plain layer is used") for line in told)
