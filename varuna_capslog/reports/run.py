"""A run directory as plain records: the content of its files, and one sentence for each file that cannot be used.

The page and the pictures read a run only through here. Nothing here draws, and nothing a crash can do to a run's files
(a torn line, a step written twice, a file that is not there yet) stops the reading.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import load_config
from varuna_capslog.config.settings import Config
from varuna_capslog.plans.plan import Plan, read_plan
from varuna_capslog.profiles.record import Profile, read_profile

__all__ = ["Evaluation", "Event", "MeasuredPeaks", "RunRecord", "Shapes", "StepLine", "read_run", "shapes_of"]

T = TypeVar("T")
R = TypeVar("R", bound="StepLine | Evaluation")

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of every chain input, by name."""


@dataclass(frozen=True)
class StepLine:
    """One line of metrics.jsonl. A number that is missing or invalid is None.

    peak_bytes: measured peak per stage, on the steps where it was taken; peak_source says how, peak_input the shapes of
        the largest microbatch of the step.
    """

    step: int
    loss: float | None
    parts: Mapping[str, float]
    lr: float | None
    grad_norm: float | None
    step_seconds: float | None
    samples_per_second: float | None
    generation: int | None
    world_size: int | None
    peak_bytes: tuple[int, ...] | None
    peak_source: str | None
    peak_input: Shapes | None = None


@dataclass(frozen=True)
class MeasuredPeaks:
    """The largest measured peak of each stage.

    bytes, inputs: by stage; the input is that of the step whose peak it is, None where it is not recorded.
    source: how it was taken; None where that is not recorded.
    """

    bytes: list[int]
    inputs: list[Shapes | None]
    source: str | None


@dataclass(frozen=True)
class Evaluation:
    """One line of evaluations.jsonl: the scores that are numbers, in file order, and those per class."""

    step: int
    scores: Mapping[str, float]
    per_class: Mapping[str, float | None]

    @property
    def value(self) -> float:
        """The score that `best` is chosen by, the first one; -inf where there is none."""
        return next(iter(self.scores.values()), -math.inf)


@dataclass(frozen=True)
class Event:
    """One line of events.jsonl; `time` is in seconds since 1970, `details` holds the keys that not every event has."""

    kind: str
    time: float | None
    step: int | None
    generation: int | None
    details: Mapping[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """What a run directory holds.

    plans: by generation; plan: the newest one, and its generation.
    steps, evaluations: rising in step, the last line of a step counts; last_step is the step of the last line.
    problems: by file name, why the file cannot be used (not written, not readable), or which part was left out.
    """

    run_dir: Path
    config: Config | None
    profile: Profile | None
    plan: Plan | None
    generation: int | None
    plans: Mapping[int, Plan]
    steps: tuple[StepLine, ...]
    last_step: int | None
    evaluations: tuple[Evaluation, ...]
    events: tuple[Event, ...]
    predictions: tuple[Path, ...]
    problems: Mapping[str, str]

    @property
    def layer_names(self) -> list[str] | None:
        """Names of the plan's layers (of the profile's where there is no plan), or None if no file has them."""
        if self.profile is None or (self.plan is not None and self.plan.num_layers != self.profile.num_layers):
            return None
        return [layer.name for layer in self.profile.layers]

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the highest first score, the earliest among equals."""
        return max(self.evaluations, key=lambda evaluation: evaluation.value, default=None)

    @property
    def steps_of_plan(self) -> list[StepLine]:
        """The steps that ran under the newest plan."""
        return [line for line in self.steps if None in (line.generation, self.generation) or self._is_newest(line)]

    def measured_peaks(self) -> MeasuredPeaks | None:
        """Largest measured peak of each stage of the newest plan; None if none was measured."""
        stages = None if self.plan is None else len(self.plan.cuts)
        rows = [line for line in self.steps_of_plan if line.peak_bytes and len(line.peak_bytes) == stages]
        if not rows:
            return None
        sources = sorted({line.peak_source for line in rows if line.peak_source})
        columns = list(zip(*(line.peak_bytes or () for line in rows), strict=True))
        inputs = [rows[column.index(max(column))].peak_input for column in columns]
        return MeasuredPeaks([max(column) for column in columns], inputs, ", ".join(sources) or None)

    def median_step_seconds(self) -> float | None:
        """Median seconds of a step under the newest plan; None where no step was timed."""
        seconds = [line.step_seconds for line in self.steps_of_plan if line.step_seconds is not None]
        return statistics.median(seconds) if seconds else None

    def reason(self, name: str) -> str:
        """Why the file whose name begins with `name` cannot be used, as the rest of a sentence without its stop."""
        for file, problem in self.problems.items():
            if file.startswith(name):
                return problem.rstrip(".")
        return f"{name} does not tell"

    def _is_newest(self, line: StepLine) -> bool:
        # A change of membership alone raises the generation and keeps the plan.
        return line.generation is not None and self.generation is not None and line.generation >= self.generation


def read_run(run_dir: Path) -> RunRecord:
    """Reads a run directory.

    Raises:
        CapslogError: there is no such folder, or it holds no file that a run writes.
    """
    if not run_dir.is_dir():
        raise CapslogError(f"{run_dir} is not a folder; give the run_dir of a training")
    plans = {
        int(found[1]): path for path in run_dir.glob("plan-*.json") if (found := re.fullmatch(r"plan-(\d+)", path.stem))
    }
    single = ("config.yaml", "profile.json", "metrics.jsonl", "evaluations.jsonl", "events.jsonl")
    if not plans and not any((run_dir / name).is_file() for name in single):
        raise CapslogError(
            f"{run_dir} holds no file of a run (no config.yaml, plan or metrics.jsonl); give the run_dir of a training"
        )
    problems: dict[str, str] = {}
    generation = max(plans, default=None)
    plan_path = run_dir / "plan-<generation>.json" if generation is None else plans[generation]
    newest = _whole(plan_path, read_plan, problems)
    every = {} if generation is None or newest is None else {generation: newest}
    for number, path in plans.items():
        if number != generation and (plan := _whole(path, read_plan, problems)) is not None:
            every[number] = plan
    lines = {name: _lines(run_dir / name, problems) for name in single if name.endswith(".jsonl")}
    steps = _records(lines["metrics.jsonl"], _step_line, "metrics.jsonl", problems)
    evaluations = _records(lines["evaluations.jsonl"], _evaluation, "evaluations.jsonl", problems)
    events = _records(lines["events.jsonl"], _event, "events.jsonl", problems)
    return RunRecord(
        run_dir=run_dir,
        config=_whole(run_dir / "config.yaml", load_config, problems),
        profile=_whole(run_dir / "profile.json", read_profile, problems),
        plan=newest,
        generation=generation,
        plans=every,
        steps=_last_of_each_step(steps),
        last_step=steps[-1].step if steps else None,
        evaluations=_last_of_each_step(evaluations),
        events=tuple(events),
        predictions=tuple(sorted((run_dir / "predictions").glob("*.png"), key=_natural)),
        problems=problems,
    )


def _whole(path: Path, read: Callable[[Path], T], problems: dict[str, str]) -> T | None:
    """The record of one file, or None and the reason among the problems."""
    if not path.is_file():
        problems[path.name] = f"{path.name} is missing"
        return None
    try:
        return read(path)
    except CapslogError as error:
        problems[path.name] = str(error)
        return None


def _lines(path: Path, problems: dict[str, str]) -> list[dict[str, Any]]:
    records = _whole(path, files.read_jsonl, problems)
    if records is None:
        return []
    torn = sum(bool(line.strip()) for line in path.read_bytes().split(b"\n")) - len(records)
    if torn > 0:
        problems[path.name] = f"{path.name}: {_count(torn, 'line')} torn by a crash left out"
    return records


def _records(
    lines: list[dict[str, Any]], make: Callable[[dict[str, Any]], T | None], name: str, problems: dict[str, str]
) -> list[T]:
    made = [record for line in lines if (record := make(line)) is not None]
    if len(made) < len(lines):
        before = f"{problems[name]}; " if name in problems else f"{name}: "
        problems[name] = f"{before}{_count(len(lines) - len(made), 'line')} without step or kind left out"
    return made


def _step_line(line: dict[str, Any]) -> StepLine | None:
    step = _whole_number(line.get("step"))
    if step is None:
        return None
    peaks = line.get("peak_bytes")
    whole = [_whole_number(peak) for peak in peaks] if isinstance(peaks, list) else []
    source = line.get("peak_source")
    return StepLine(
        step=step,
        loss=_number(line.get("loss")),
        parts=_numbers(line.get("parts")),
        lr=_number(line.get("lr")),
        grad_norm=_number(line.get("grad_norm")),
        step_seconds=_number(line.get("step_seconds")),
        samples_per_second=_number(line.get("samples_per_second")),
        generation=_whole_number(line.get("generation")),
        world_size=_whole_number(line.get("world_size")),
        peak_bytes=tuple(peak for peak in whole if peak is not None) if whole and None not in whole else None,
        peak_source=source if isinstance(source, str) else None,
        peak_input=shapes_of(line.get("peak_input")),
    )


def shapes_of(value: Any) -> Shapes | None:
    """The shapes that a JSON object of name -> list of sizes gives; None where it is none."""
    if not isinstance(value, dict) or not value or not all(isinstance(sizes, list) for sizes in value.values()):
        return None
    found = {name: tuple(map(_whole_number, sizes)) for name, sizes in value.items()}
    whole = {name: tuple(size for size in sizes if size is not None) for name, sizes in found.items()}
    return whole if whole == found else None


def _evaluation(line: dict[str, Any]) -> Evaluation | None:
    step = _whole_number(line.get("step"))
    if step is None:
        return None
    scores = line.get("scores")
    per_class = scores.get("per_class") if isinstance(scores, dict) else None
    return Evaluation(
        step=step,
        scores=_numbers(scores),
        per_class={name: _number(value) for name, value in per_class.items()} if isinstance(per_class, dict) else {},
    )


def _event(line: dict[str, Any]) -> Event | None:
    kind = line.get("kind")
    if not isinstance(kind, str):
        return None
    common = ("kind", "time", "step", "generation")
    return Event(
        kind=kind,
        time=_number(line.get("time")),
        step=_whole_number(line.get("step")),
        generation=_whole_number(line.get("generation")),
        details={key: value for key, value in line.items() if key not in common},
    )


def _last_of_each_step(lines: list[R]) -> tuple[R, ...]:
    """A resumed run repeats the steps after its checkpoint; its last line for a step belongs to its weights."""
    by_step = {line.step: line for line in lines}
    return tuple(by_step[step] for step in sorted(by_step))


def _numbers(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    return {name: number for name, entry in value.items() if (number := _number(entry)) is not None}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _whole_number(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number.is_integer() else None


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts sample-10 behind sample-9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
