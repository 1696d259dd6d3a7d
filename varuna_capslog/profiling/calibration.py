"""Corrects the seconds of estimates by measured profiles of this machine's device.

`learn` stores the measured seconds of a profile's runs, and their work by operator class, per kind of device.
`corrected_speed` computes the factors of `rates.GROUPS` that fit best, and applies them to estimates of that kind. The
newest profile of each model counts. To forget all, delete the file in `speeds`, beside the folder of cached profiles.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from varuna_capslog.base import files
from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.gpus import GPUS, gpu_named
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiling import cache
from varuna_capslog.profiling.estimation.operators import Work
from varuna_capslog.profiling.estimation.rates import CLASSES, GROUPS, RATES_VERSION, Speed, speed_of

__all__ = ["Calibration", "corrected_speed", "device_kind", "learn"]

_log = logging.getLogger(__name__)

_LEAST_RUNS = 8
"""Smallest number of measured forwards and backwards with which estimates are corrected."""
_MODELS = 24
_SHEET_WEIGHT = 0.02
"""Weight of a factor of 1 (the data sheet), as a fraction of the weight of all measured runs."""
_SMALLEST, _LARGEST = 0.1, 30.0


@dataclass(frozen=True)
class MeasuredRun:
    """Forward or backward: its work by class, and the seconds that it took."""

    work: Work
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """Measured runs of one kind of device, and the corrections that follow from them.

    device: its kind in `GPUS`, or else a name (`device_kind`).
    base: seconds of a unit of each class before any correction.
    host_seconds: time of the host for each operator, 0 on a CPU.
    rates_version: `rates.RATES_VERSION` of `base` and `host_seconds`.
    models: digest of a model -> the runs of its newest profile.
    date: of the newest profile.
    """

    device: str
    base: Mapping[str, float]
    host_seconds: float
    rates_version: int
    models: Mapping[str, Sequence[MeasuredRun]] = field(default_factory=dict)
    date: str = ""

    @property
    def runs(self) -> list[MeasuredRun]:
        """All runs of all models."""
        return [run for runs in self.models.values() for run in runs]

    def parts(self, run: MeasuredRun) -> list[float]:
        """Return the seconds of a run in each of `GROUPS` before any correction."""
        seconds = dict.fromkeys(GROUPS, 0.0)
        for kind, amount in run.work.items():
            seconds[CLASSES[kind].group] += amount * self.base[kind]
        return list(seconds.values())

    def factors(self) -> dict[str, float]:
        """Return the factor of each group that minimises the weighted sum of squared relative errors of all runs; 1 for
        a group that no run has. The weight of a run is its fraction of its model's seconds.

        Coordinate descent on a quadratic of four bounded variables: it is convex, so the descent ends at the minimum.
        """
        rows, weights = [], []
        for runs in self.models.values():
            total = sum(run.seconds for run in runs)
            # the seconds of a run that the host limits say nothing about the device
            of_device = [run for run in runs if not self._is_of_host(run)]
            rows += [np.array(self.parts(run)) / run.seconds for run in of_device]
            weights += [run.seconds / total for run in of_device]
        if len(self.runs) < _LEAST_RUNS or not rows:
            return dict.fromkeys(GROUPS, 1.0)
        shares, weight = np.array(rows), np.array(weights)
        factors = np.ones(len(GROUPS))
        for _ in range(200):
            for place in np.flatnonzero(shares.any(axis=0)):
                column = shares[:, place]
                residual = 1.0 - shares @ factors + column * factors[place]
                # the data sheet's factor of 1 has a fraction of the weight of all runs
                sheet = _SHEET_WEIGHT * float(weight @ column**2)
                best = (float(weight * column @ residual) + sheet) / (float(weight @ column**2) + sheet)
                factors[place] = min(max(best, _SMALLEST), _LARGEST)
        return dict(zip(GROUPS, map(float, factors.round(4)), strict=True))

    def _is_of_host(self, run: MeasuredRun) -> bool:
        return self.host_seconds > 0 and sum(self.parts(run)) < run.seconds / 3

    @property
    def uncorrected(self) -> Speed:
        """Speed before any correction."""
        plain = Speed.of_gpu(self.device, GPUS[self.device]) if self.device in GPUS else Speed(self.device, {})
        return dataclasses.replace(plain, seconds_of=self.base, host_seconds=self.host_seconds)

    @property
    def speed(self) -> Speed:
        """Corrected speed."""
        factors = self.factors()
        seconds = {kind: value * factors[CLASSES[kind].group] for kind, value in self.base.items()}
        host = [
            run.seconds / run.work["launch"] for run in self.runs if self._is_of_host(run) and run.work.get("launch")
        ]
        host_seconds = statistics.median(host) if host else self.host_seconds
        source = f"measured profiles: {len(self.models)}, the newest of {self.date}"
        return dataclasses.replace(self.uncorrected, seconds_of=seconds, host_seconds=host_seconds, source=source)

    def error(self, speed: Speed) -> float:
        """Return the median relative error, over all runs, of the seconds by a speed."""
        return statistics.median(abs(speed.seconds(run.work) / run.seconds - 1) for run in self.runs)

    def with_profile(self, model: str, runs: Sequence[MeasuredRun], date: str) -> Calibration:
        """Return the calibration with a model's newest profile; beyond `_MODELS` models the oldest is dropped."""
        models = {key: value for key, value in self.models.items() if key != model} | {model: list(runs)}
        kept = dict(list(models.items())[-_MODELS:])
        return dataclasses.replace(self, models=kept, date=date)


def device_kind(device: str, name: str, threads: int | None = None) -> str:
    """Return the key of a device's corrections: its kind in `GPUS`, or its `name`, from torch or of the processor, in
    small letters. `device`: its type. `threads`: of a CPU.
    """
    if device != "cpu":
        try:
            return gpu_named(name)
        except CapslogError:
            pass
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return plain if threads is None else f"{plain}-{threads}-threads"


def corrected_speed(device: str, gpu: str = "", threads: int | None = None) -> Speed:
    """Return the speed for estimates of a device: `rates.speed_of`, corrected if profiles of its kind were measured.

    gpu: kind of GPU (`base.gpus`); "" for no particular kind, without corrections.
    threads: of a worker on a CPU; None: those of this process.
    """
    kind = gpu if device != "cpu" else device_kind("cpu", cache.cpu_name(), threads or torch.get_num_threads())
    calibration = _read(kind) if kind else None
    if calibration is None or len(calibration.runs) < _LEAST_RUNS:
        return speed_of(device, gpu, threads)
    return calibration.speed


def learn(profile: Profile, work_of_runs: Mapping[tuple[int, int], Mapping[str, Work]]) -> Calibration | None:
    """Add a measured profile to the corrections of its device, and store them; return None if it has too few runs.
    `work_of_runs`: layers (first, end) of a run -> its work by class, forward "F" and backward "B".
    """
    conditions = profile.conditions
    device = str(conditions["device"])
    threads = int(conditions.get("threads", 1)) if device == "cpu" else None
    kind = device_kind(device, str(conditions.get("device_name", device)), threads)
    runs = []
    for row in profile.observations:
        work = work_of_runs.get(row.layers)
        if work is None or row.variant is not None:
            continue
        measured = (("F", row.forward_seconds), ("B", row.backward_seconds))
        runs += [MeasuredRun(dict(work[half]), seconds) for half, seconds in measured if seconds and work[half]]
    if len(runs) < _LEAST_RUNS:
        return None
    calibration = _read(kind)
    if calibration is None:
        plain = speed_of(device, kind if kind in GPUS else "", threads)
        calibration = Calibration(kind, plain.seconds_of, plain.host_seconds, RATES_VERSION)
    calibration = calibration.with_profile(
        str(conditions["model_digest"]), runs, str(datetime.fromtimestamp(wall_seconds(), UTC).date())
    )
    path = _path(kind)
    if path is None:
        return calibration
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, dataclasses.asdict(calibration))
    except (CapslogError, OSError) as error:
        _log.warning("what the profile says of this device's speed is not kept: %s", error)
    return calibration


def _path(kind: str) -> Path | None:
    profiles = cache.folder()
    return None if profiles is None else profiles.parent / "speeds" / f"{kind}.json"


def _read(kind: str) -> Calibration | None:
    """Return the stored calibration of a kind of device, if made with the current rates; log an invalid file."""
    path = _path(kind)
    if path is None or not path.exists():
        return None
    try:
        value = files.read_json(path)
        # a calibration with other classes of operators cannot be used
        return _calibration(value) if value["rates_version"] == RATES_VERSION else None
    except (CapslogError, KeyError, TypeError, ValueError) as error:
        _log.warning("%s does not hold corrections of seconds (%s); delete it, or measure a profile again", path, error)
        return None


def _calibration(value: Any) -> Calibration:
    models = {
        str(digest): [
            MeasuredRun({kind: float(row["work"][kind]) for kind in row["work"]}, float(row["seconds"])) for row in rows
        ]
        for digest, rows in value["models"].items()
    }
    base = {str(kind): float(seconds) for kind, seconds in value["base"].items()}
    unknown = {kind for runs in models.values() for run in runs for kind in run.work} - set(CLASSES)
    if unknown or any(run.seconds <= 0 for runs in models.values() for run in runs):
        raise ValueError(f"classes {sorted(unknown)} are unknown, or seconds are not above 0")
    host_seconds, version = float(value["host_seconds"]), int(value["rates_version"])
    return Calibration(str(value["device"]), base, host_seconds, version, models, str(value["date"]))
