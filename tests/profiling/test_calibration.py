"""Measured profiles correct the seconds of estimates."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from tests.profiling.workloads import Megabytes
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiling.calibration import Calibration, MeasuredRun, corrected_speed, device_kind, learn
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import StageEstimator, estimated_profile
from varuna_capslog.profiling.estimation.operators import Work
from varuna_capslog.profiling.estimation.rates import CLASSES, GROUPS, RATES_VERSION, Speed, cpu_speed, speed_of

SPEED = cpu_speed("a processor", 1e11, 1e11, 1e10, 4e-6)
TRUTH = {"products": 2.0, "convolutions": 0.5, "memory": 3.0, "launches": 6.0}


def corrected(speed: Speed, factors: dict[str, float]) -> Speed:
    seconds = {kind: value * factors[CLASSES[kind].group] for kind, value in speed.seconds_of.items()}
    return dataclasses.replace(speed, seconds_of=seconds)


def made_up_runs(speed: Speed, classes: tuple[str, ...], count: int = 60) -> list[MeasuredRun]:
    """Return runs of random work whose seconds follow a speed within 2 %."""
    draw = random.Random(3)
    runs = []
    for _ in range(count):
        work: Work = {kind: draw.uniform(0.1, 1) * 1e-3 / speed.seconds_of[kind] for kind in classes}
        runs.append(MeasuredRun(work, speed.seconds(work) * draw.uniform(0.98, 1.02)))
    return runs


@pytest.mark.parametrize(
    ("classes", "seen"),
    [
        (("product float32", "convolution float32", "bytes", "launch"), set(GROUPS)),
        (("product float32", "bytes"), {"products", "memory"}),
    ],
)
def test_the_factors_are_those_by_which_the_device_differs(classes: tuple[str, ...], seen: set[str]) -> None:
    base = dict(SPEED.seconds_of)
    runs = made_up_runs(corrected(SPEED, TRUTH), classes)
    calibration = Calibration("a-cpu", base, 0.0, RATES_VERSION, {"model": runs})
    wanted = {group: TRUTH[group] if group in seen else 1.0 for group in GROUPS}
    assert calibration.factors() == pytest.approx(wanted, rel=0.15)
    assert calibration.error(calibration.uncorrected) > 0.2
    assert calibration.error(calibration.speed) < 0.1


def test_what_the_host_limits_corrects_the_host_and_not_the_device() -> None:
    plain = speed_of("cuda", "h200")
    runs: list[MeasuredRun] = [MeasuredRun({"bytes": 1e6, "launch": count}, 40e-6 * count) for count in range(5, 20)]
    calibration = Calibration("h200", plain.seconds_of, plain.host_seconds, RATES_VERSION, {"model": runs})
    assert calibration.factors() == dict.fromkeys(GROUPS, 1.0)
    assert calibration.speed.host_seconds == pytest.approx(40e-6)
    assert calibration.error(calibration.speed) < 0.01


def measured(factor: float) -> tuple[Profile, dict[tuple[int, int], dict[str, Work]]]:
    """Return a profile that looks measured on this device: the estimate's seconds, multiplied by `factor`."""
    estimator = StageEstimator(Megabytes(), RunConditions(microbatch_size=4), speed=speed_of("cpu", threads=1))
    profile = estimated_profile(estimator)
    rows = tuple(
        dataclasses.replace(
            row, forward_seconds=factor * row.forward_seconds, backward_seconds=factor * row.backward_seconds
        )
        for row in profile.observations
    )
    conditions = {**profile.conditions, "device_name": "Some CPU @ 3", "threads": 1}
    work = {row.layers: estimator.stage(*row.layers).work for row in rows}
    return dataclasses.replace(profile, source="measured", observations=rows, conditions=conditions), work


@pytest.fixture
def speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("varuna_capslog.profiling.cache.cpu_name", lambda: "Some CPU @ 3")
    return tmp_path / "varuna-capslog" / "speeds" / "some-cpu-3-1-threads.json"


def test_a_measured_profile_corrects_later_estimates_of_its_device_alone(speeds: Path) -> None:
    assert corrected_speed("cpu", threads=1).source == "measured here"
    calibration = learn(*measured(3.0))
    assert calibration is not None
    assert speeds.exists()
    speed = corrected_speed("cpu", threads=1)
    assert speed.source.startswith("measured profiles: 1, the newest of 20")
    work = max((run.work for run in calibration.runs), key=speed.seconds)
    assert speed.seconds(work) == pytest.approx(3 * speed_of("cpu", threads=1).seconds(work), rel=0.3)
    assert corrected_speed("cpu", threads=2).source == "measured here"
    assert corrected_speed("cuda", "h200").source == "data sheet"
    again = learn(*measured(5.0))
    assert again is not None
    assert len(again.models) == 1, "the newest profile of a model counts alone"
    assert corrected_speed("cpu", threads=1).seconds(work) > 1.4 * speed.seconds(work)


def test_a_file_that_cannot_be_used_corrects_nothing(speeds: Path, caplog: pytest.LogCaptureFixture) -> None:
    learn(*measured(3.0))
    kept = speeds.read_text()
    older = {**json.loads(kept), "rates_version": RATES_VERSION - 1}
    speeds.write_text(json.dumps(older))
    assert corrected_speed("cpu", threads=1).source == "measured here"
    assert not caplog.records, "of other classes of operators nothing is known"
    for broken in ("{", "[]", "{}", kept.replace('"launch"', '"lunch"'), kept.replace('"seconds":', '"seconds": -')):
        caplog.clear()
        speeds.write_text(broken)
        assert corrected_speed("cpu", threads=1).source == "measured here"
        assert "does not hold corrections of seconds" in caplog.text


def test_a_profile_of_a_few_layers_says_nothing(speeds: Path) -> None:
    profile, work = measured(3.0)
    assert learn(dataclasses.replace(profile, observations=profile.observations[:2]), work) is None
    assert not speeds.exists()


def test_corrections_are_kept_under_what_a_device_is_known_by() -> None:
    assert device_kind("cuda", "NVIDIA A100-SXM4-80GB") == "a100-80gb"
    assert device_kind("cuda", "NVIDIA A100") == "nvidia-a100"
    assert device_kind("xpu", "Intel(R) Data Center GPU Max 1550") == "intel-r-data-center-gpu-max-1550"
    assert device_kind("cpu", "AMD EPYC 7B13", 4) == "amd-epyc-7b13-4-threads"
