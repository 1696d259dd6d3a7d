"""Preparation before the first worker starts: which plan a run's folder gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.planning.asking import plan as search
from tests.start.test_choices import REPLICATED_MIDDLE, config_of
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.reading import Config
from varuna_capslog.membership.placing import state_bytes
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.model.workload import load_workload
from varuna_capslog.plans.parts import Shortfall
from varuna_capslog.plans.plan import Plan, latest_plan
from varuna_capslog.schedules import RunShape
from varuna_capslog.start import prepare as prepare_module
from varuna_capslog.start.choices import with_given_plan
from varuna_capslog.start.member_worker import capacity_of
from varuna_capslog.start.prepare import prepare_run, profile_run
from varuna_capslog.training.manifest import FORMAT

SHORT: dict[str, Any] = {"format": "varuna-capslog/plan/2", "num_layers": 11, "cuts": [0, 5]}


def config_for(folder: Path, plan: dict[str, Any]) -> Config:
    path = folder / "given.json"
    path.write_text(json.dumps(plan))
    sections = {"run_dir": str(folder / "run"), "profile": {"source": "estimated"}}
    return with_given_plan(config_of(path, **sections))


def prepare(folder: Path, plan: dict[str, Any]) -> None:
    prepare_run(config_for(folder, plan), show=False)


@pytest.mark.parametrize(("first", "second"), [(SHORT, REPLICATED_MIDDLE), (REPLICATED_MIDDLE, SHORT)])
def test_a_run_that_gets_a_plan_of_the_other_form_gets_a_new_plan_file(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """The comparison with the run's last plan ended in a KeyError, since the two forms have different keys."""
    for number, plan in enumerate((first, first, second, second)):
        prepare(tmp_path, plan)
        latest = latest_plan(tmp_path / "run")
        assert latest is not None
        assert latest[0] == number // 2
        assert latest[1].short == ("cuts" in plan)


def test_parts_of_layers_that_are_no_graphs_are_refused_before_the_run(tmp_path: Path) -> None:
    plan = {
        "format": "varuna-capslog/plan/2",
        "num_layers": 11,
        "schedule": "1f1b",
        "units": {"per_step": 4, "samples": 2},
        "stages": [{"layers": [[0, 11]], "ranks": [0], "memory": [[2, 4, "recompute", ["norms"]]]}],
    }
    message = r"pipeline.plan=.*: stages\[0\].memory: layer '.*' is a .*, and only a captured layer shows its parts"
    with pytest.raises(CapslogError, match=message):
        prepare(tmp_path, plan)
    assert not list((tmp_path / "run").glob("plan-*.json"))


# -- data


def of_pictures(folder: Path, **train: Any) -> Config:
    """A run over three pictures, of which the last is missing."""
    (folder / "img").mkdir(exist_ok=True)
    images = [{"id": number, "file_name": f"{number}.png", "width": 40, "height": 30} for number in range(3)]
    boxes = [{"id": number, "image_id": number, "category_id": 1, "bbox": [2, 2, 9, 9]} for number in range(3)]
    document = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "ant"}]}
    (folder / "a.json").write_text(json.dumps(document))
    for number in range(2):
        Image.new("RGB", (40, 30)).save(folder / "img" / f"{number}.png")
    data = {"root": str(folder), "train_json": "a.json", "train_images": "img"}
    sections = {"workload": "detr_pipeline:workload", "data": data, "run_dir": str(folder / "run")}
    return config_of(None, {"minibatch_size": 2, "microbatch_size": 2} | train, **sections)


def test_data_that_would_stop_the_run_are_found_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "profile_and_variants", lambda *_, **__: pytest.fail("a profile was made"))
    with pytest.raises(CapslogError, match=r"1 of the 3 pictures .* missing .* 2\.png \(image id 2\)"):
        prepare_run(of_pictures(tmp_path), show=False)
    with pytest.raises(CapslogError, match=r"the training data has 3 samples, fewer than train\.minibatch_size=4"):
        prepare_run(of_pictures(tmp_path, minibatch_size=4), show=False)
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_continued_with_renamed_categories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "profile_and_variants", lambda config, *_, **__: (config, None))
    monkeypatch.setattr(prepare_module, "_plan", lambda *_, **__: Plan.of_cuts(11, [0]))
    config = of_pictures(tmp_path)
    Image.new("RGB", (40, 30)).save(tmp_path / "img" / "2.png")
    facts = load_workload(config).data_facts()
    manifest = tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json"
    about = {"format": FORMAT, "step": 2, "layers": {}, "shared": {}}
    files.write_json(manifest, {**about, "data": {**facts, "category 1": "bee"}})
    with pytest.raises(CapslogError, match=r"step-00000002 was written .* category 1 was 'bee', and now it is 'ant'"):
        prepare_run(config, show=False)
    files.write_json(manifest, {**about, "data": facts})
    prepare_run(config, show=False)


# -- schedules whose plans say more than cuts


def planned(folder: Path, **pipeline: Any) -> Plan:
    sections = {"run_dir": str(folder / "run"), "profile": {"source": "estimated"}}
    return prepare_run(config_of(None, pipeline=pipeline, **sections), show=False)


def test_interleaved_stages_go_round_the_devices(tmp_path: Path) -> None:
    plan = planned(tmp_path, schedule="interleaved", devices=2, replicas=2, capacity="1GiB")
    assert plan.placement() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert plan.fits
    assert all(rank.bytes for rank in plan.ranks)
    deeper = planned(tmp_path, schedule="interleaved", devices=2, stages_per_rank=3, recompute=False)
    assert deeper.placement() == [0, 1, 0, 1, 0, 1]


def test_1f1b_star_has_the_limits_of_its_stages_in_the_plan(tmp_path: Path) -> None:
    plan = planned(tmp_path, schedule="1f1b-star", devices=3)
    limits = [stage.in_flight for stage in plan.stages]
    assert limits[-1] == 1
    assert None not in limits
    assert limits == sorted(limits, reverse=True)
    latest = latest_plan(tmp_path / "run")
    assert latest is not None
    assert latest[1].stages == plan.stages


def test_split_backwards_are_folded_and_rehearsed(tmp_path: Path) -> None:
    """Without a capacity they had no bytes."""
    free = planned(tmp_path, schedule="zb-h1", recompute=False)
    assert (free.fits, free.memory_model) == (True, "ranks")
    plan = planned(tmp_path, schedule="zb-h1", recompute=False, capacity="1GiB")
    assert (plan.fits, plan.cuts) == (True, free.cuts)
    assert plan.peak_bytes == pytest.approx(free.peak_bytes, rel=0.03)
    with pytest.raises(DoesNotFit, match=r"stage \d needs .*, \d+ B too much"):
        planned(tmp_path, schedule="zb-h1", recompute=False, capacity=f"{(plan.peak_bytes or 0) - 1}B")


@pytest.mark.parametrize("schedule", ["gpipe", "kfkb"])
def test_limits_that_a_schedule_cannot_keep_are_refused_before_any_worker(tmp_path: Path, schedule: str) -> None:
    """They were refused at the first step."""
    stages = [REPLICATED_MIDDLE["stages"][0] | {"in_flight": 1}, *REPLICATED_MIDDLE["stages"][1:]]
    with pytest.raises(CapslogError, match=r"given.json: stage 0 takes 4 microbatches and may have 1 in flight, but"):
        prepare(tmp_path, REPLICATED_MIDDLE | {"schedule": schedule, "stages": stages})


def test_an_unknown_optimizer_is_refused_before_any_worker_also_with_given_cuts(tmp_path: Path) -> None:
    """The workers refused it: without a capacity, given cuts need no profile, which would have asked."""
    config = config_of(None, run_dir=str(tmp_path / "run"), train={"optimizer": "adamv"}, pipeline={"cuts": [0, 5]})
    with pytest.raises(CapslogError, match=r"unknown train\.optimizer .adamv.; did you mean"):
        prepare_run(config, show=False)


def test_too_many_stages_for_the_layers(tmp_path: Path) -> None:
    with pytest.raises(CapslogError, match=r"4 devices with 3 stages each, but only 11 layers.*stages_per_rank"):
        planned(tmp_path, schedule="interleaved", devices=4, stages_per_rank=3)
    with pytest.raises(CapslogError, match=r"2 stages per device, but pipeline.stages_per_rank is 3"):
        config_of(None, pipeline={"cuts": [0, 2, 4, 6], "stages_per_rank": 3})


# -- a given plan of any stages, in an elastic run


def given_ranks(folder: Path, capacities: list[int | None], **sections: Any) -> Config:
    path, ranks = folder / "given.json", [{"capacity_bytes": size} for size in capacities]
    path.write_text(json.dumps(REPLICATED_MIDDLE | {"ranks": ranks}))
    settings = {"run_dir": str(folder / "run"), "profile": {"source": "estimated"}}
    return with_given_plan(config_of(path, **settings, **sections))


def test_a_given_plan_of_an_elastic_run_is_judged_with_its_snapshots(tmp_path: Path) -> None:
    """Only plans of one pipeline were judged so; any other plan began, and its members did not run it."""
    roomy = given_ranks(tmp_path, [1 << 20] * 3)
    profile, held = profile_run(roomy, show=False), prepare_run(roomy, show=False).ranks[1].bytes
    states, headroom = state_bytes(profile), Headroom.of(profile)
    assert held is not None
    assert states is not None
    need = headroom.device(held + sum(states[0][3:8]))
    elastic = {"elastic": {"enabled": True, "redundancy": 0}}
    fitting = prepare_run(given_ranks(tmp_path, [1 << 20, need, 1 << 20], **elastic), show=False)
    assert fitting.fits is True
    assert "protection takes up to" in fitting.notes[0]
    less: list[int | None] = [1 << 20, need - 1, 1 << 20]
    assert prepare_run(given_ranks(tmp_path, less), show=False).fits is True
    sentence = f"with elastic.enabled: rank 1 needs {format_bytes(need)} of {format_bytes(need - 1)} where a snapshot"
    with pytest.raises(DoesNotFit, match=f"{sentence} .*; add devices or capacity, or set elastic.enabled to false"):
        prepare_run(given_ranks(tmp_path, less, **elastic), show=False)
    latest = latest_plan(tmp_path / "run")
    assert latest is not None
    assert latest[1].fits is False
    assert latest[1].shortfall == Shortfall(None, 1, rank=1)


def test_the_capacities_of_a_given_plan_are_those_of_its_devices(tmp_path: Path) -> None:
    """The capacities were forgotten at the first change: members said that their devices had no limit."""
    sizes = [1 << 20, 2 << 20, 3 << 20]
    config = given_ranks(tmp_path, [*sizes])
    assert [capacity_of(config.pipeline.capacity, device) for device in range(3)] == [min(sizes)] * 3
    assert config.pipeline.capacity == sizes
    assert given_ranks(tmp_path, [*sizes], pipeline={"capacity": "5MiB"}).pipeline.capacity == 5 << 20
    assert given_ranks(tmp_path, [None, 5, 5]).pipeline.capacity is None
    with pytest.raises(CapslogError, match=r"ranks\[1\].capacity_bytes is not given, .*; give every rank one, or set"):
        given_ranks(tmp_path, [5, None, 5], elastic={"enabled": True})


# -- the profile that a plan was made for


OTHER = "sha256:" + 64 * "0"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder for profiles that only this module's tests write: another estimate has other seconds."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def fitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str) -> dict[str, Any]:
    """A plan that fits by the profile of the config that it is given to."""
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    config = config_for(tmp_path, SHORT)
    plan = search(profile_run(config, show=False), 2, capacity=2**30, run=RunShape.of_config(config))
    assert plan.fits
    return plan.to_json()


def test_a_plan_that_fits_by_the_profile_of_the_run_is_taken(tmp_path: Path, fitting: dict[str, Any]) -> None:
    prepare(tmp_path, fitting)
    assert files.read_json(tmp_path / "run" / "plan-0.json") == fitting


def test_a_plan_that_fits_by_another_profile_is_refused(tmp_path: Path, fitting: dict[str, Any]) -> None:
    """The bytes that it states hold for another model, device or size; the run's folder gets nothing."""
    with pytest.raises(CapslogError, match=f"given.json: fits is true by the profile {OTHER}, but the profile of this"):
        prepare(tmp_path, fitting | {"profile_digest": OTHER})
    assert not (tmp_path / "run").exists()


def test_a_plan_of_another_profile_that_promises_nothing_is_judged_by_that_of_the_run(
    tmp_path: Path, fitting: dict[str, Any]
) -> None:
    """It may come from a machine that measured the same model."""
    foreign_plan = fitting | {"profile_digest": OTHER, "fits": None}
    prepare(tmp_path, foreign_plan)
    assert files.read_json(tmp_path / "run" / "plan-0.json") == foreign_plan
    with pytest.raises(DoesNotFit):
        prepare(tmp_path, foreign_plan | {"capacity_bytes": 10})


def test_a_run_that_is_profiled_anew_goes_on_with_its_plan(tmp_path: Path, fitting: dict[str, Any]) -> None:
    """No two measurements give one digest, and the machine that goes on with a run may have to measure again."""
    foreign_plan = fitting | {"profile_digest": OTHER}
    files.write_json(tmp_path / "run" / "plan-0.json", foreign_plan)
    files.write_json(tmp_path / "run" / "plan-1.json", SHORT)  # the devices have changed since
    prepare(tmp_path, foreign_plan)
    assert files.read_json(tmp_path / "run" / "plan-2.json") == foreign_plan


# -- the host tier


def test_a_host_tier_that_is_too_small_is_said_before_any_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    """A plan without a capacity was not profiled, and the first step ended when the tier was full."""
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    first, second = {"layers": [[0, 5]], "ranks": [0]}, {"layers": [[5, 11]], "ranks": [1]}
    offloads = {"memory": [[0, 4, "offload"]]}
    full = {key: REPLICATED_MIDDLE[key] for key in ("format", "num_layers", "units", "schedule")}
    config = config_for(tmp_path, full | {"stages": [first | offloads, second]})
    enough = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"host_capacity": 2**30})})
    plan = prepare_run(enough, show=False)
    size = plan.ranks[0].host_bytes
    assert size is not None
    small = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"host_capacity": size - 1})})
    sentence = (
        r"rank 0 needs .* that its host tier may hold \(pipeline.host_capacity\), 1 B too much; raise it, or offload"
    )
    with pytest.raises(DoesNotFit, match=sentence):
        prepare_run(small, show=False)
