"""A run directory as plain records: the content of its files, and one sentence for each file that cannot be used.

Nothing that a crash can do to a run's files (a torn line, a step written twice, a file that is not there yet) stops the
reading.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AllowInfNan, BeforeValidator, Field, Strict, TypeAdapter, ValidationError, WrapValidator
from pydantic.dataclasses import dataclass as checked_dataclass

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import load_config
from varuna_capslog.config.settings import Config
from varuna_capslog.plans.plan import Plan, read_plan
from varuna_capslog.profiles.record import Profile, read_profile
from varuna_capslog.training.journal import goodness

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "CURVES_FILE",
    "MOST_CONFUSED",
    "SAME_OBJECT",
    "Detection",
    "DetectionCurves",
    "Evaluation",
    "Event",
    "MeasuredPeaks",
    "RunRecord",
    "Sample",
    "Shapes",
    "StepLine",
    "for_page",
    "one_box_per_object",
    "read_run",
    "read_sample",
    "shapes_of",
]

# -- Records that a detector's run leaves for its report: samples with the detected boxes, and the curves of its last
# evaluation. The files may come from strangers: content in another form than a run writes is refused.


T = TypeVar("T")

CURVES_FILE = "detection-curves.json"
"""File of a detector's last evaluation; see `DetectionCurves`."""
_MOST_RECORD_BYTES = 8 << 20
MOST_CONFUSED = 100
"""Largest number of classes of a confusion matrix that a run writes and a page can show."""
_Bounded = Annotated[float, Strict(), AllowInfNan(False), Field(ge=-1e6, le=1e6)]
_Share = Annotated[float, AllowInfNan(False), Field(ge=0, le=1)]
_Count = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
_Side = Annotated[int, Strict(), Field(ge=1, le=4096)]


@checked_dataclass(frozen=True)
class Detection:
    """Detected object of a sample: the corners x0 y0 x1 y1 of its box in pixels, its class and its score."""

    box: tuple[_Bounded, _Bounded, _Bounded, _Bounded]
    score: _Share
    name: str


@checked_dataclass(frozen=True)
class Sample:
    """Picture of `predictions/*.boxes.json`, as JPEG in base64, and its detections."""

    width: _Side
    height: _Side
    boxes: Annotated[tuple[Detection, ...], Field(max_length=2000)]
    jpeg: Annotated[str, Field(pattern="^[A-Za-z0-9+/]+={0,2}$")]
    name: str = ""


@checked_dataclass(frozen=True)
class Confusion:
    """Pairs of (true class, detected class) among detections of at least `score` that overlap by at least `overlap`.

    counts: a row per true class and a last row for nothing, a column per detected class and a last for missed objects.
    """

    classes: Annotated[tuple[str, ...], Field(max_length=MOST_CONFUSED)]
    score: _Share
    overlap: _Share
    counts: tuple[tuple[_Count, ...], ...]


@checked_dataclass(frozen=True)
class DetectionCurves:
    """Precision of each class by recall, at IoU 0.5, and the confusion, of the evaluation with this AP; the confusion
    is None for more than `MOST_CONFUSED` classes.
    """

    recall: tuple[_Share, ...]
    precision: Mapping[str, tuple[_Bounded, ...] | None]
    confusion: Confusion | None
    AP: _Bounded | None = None

    def __post_init__(self) -> None:
        size = len(self.confusion.classes) + 1 if self.confusion is not None else 0
        rows = self.confusion is None or [len(row) for row in self.confusion.counts] == [size] * size
        points = all(column is None or len(column) == len(self.recall) for column in self.precision.values())
        if not rows or not points:
            raise ValueError("its lists differ in length")


SAME_OBJECT = 0.4
"""IoU above which two boxes show the same object."""


def one_box_per_object(detections: Sequence[Detection]) -> list[Detection]:
    """Return the detections without those that overlap a detection of a higher score, of any class (non-maximum
    suppression). The result above any score equals the suppression of only the detections above that score.
    """
    kept: list[Detection] = []
    for detection in sorted(detections, key=lambda detection: -detection.score):
        if all(_overlap(detection.box, other.box) <= SAME_OBJECT for other in kept):
            kept.append(detection)
    return kept


def _overlap(box: Sequence[float], other: Sequence[float]) -> float:
    """Return the intersection of two boxes (corners x0 y0 x1 y1) over their union."""
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    both = max(0.0, width) * max(0.0, height)
    areas = sum((x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in (box, other))
    return both / (areas - both) if areas > both else 0.0


_LONGEST_SIDE = 640
"""Pixels of the longer side of a picture in a page."""


def for_page(picture: Image.Image) -> tuple[Image.Image, str]:
    """Return a picture in RGB, at most as large as a page shows, and its JPEG in base64."""
    shown = picture.convert("RGB")
    shown.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    buffer = io.BytesIO()
    shown.save(buffer, "JPEG", quality=85)
    return shown, base64.b64encode(buffer.getvalue()).decode()


def read_sample(path: Path) -> Sample:
    """Return the record of a sample. Raises CapslogError where the file holds none."""
    record = _validated(TypeAdapter(Sample), path)
    return dataclasses.replace(record, name=path.name.removesuffix(".boxes.json"))


def read_curves(path: Path) -> DetectionCurves:
    """Return the curves of a detector's last evaluation. Raises CapslogError where the file has none."""
    return _validated(TypeAdapter(DetectionCurves), path)


def _validated(adapter: TypeAdapter[T], path: Path) -> T:
    try:
        return adapter.validate_python(files.parse_json(files.read_bytes(path, _MOST_RECORD_BYTES), str(path)))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise CapslogError(
            f"{path.name} is not as a run writes it (see {where or 'its lists'}), and left out"
        ) from error


# -- The run directory


R = TypeVar("R", bound="StepLine | Evaluation")


def _valid_or_none(value: Any, validate: Callable[[Any], T]) -> T | None:
    try:
        return validate(value)
    except ValidationError:
        return None


def _integer(value: Any) -> Any:
    """Convert a whole number that is written with a decimal point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


_PREDICTIONS = "predictions"
_MOST_TEXT_BYTES = 1 << 20
"""Limit of a text file of `predictions/`, which the page holds as a whole."""
_OR_NONE = WrapValidator(_valid_or_none)
# an axis from -1e308 to 1e308 is longer than the largest float, and no picture can be drawn
_Finite = Annotated[float, Strict(), AllowInfNan(False), Field(ge=-1e100, le=1e100)]
_Number = Annotated[_Finite | None, _OR_NONE]
_Whole = Annotated[int, Strict(), Field(gt=-(2**63), lt=2**63), BeforeValidator(_integer)]
_WholeOrNone = Annotated[_Whole | None, _OR_NONE]
_Numbers = Annotated[Mapping[str, _Number], BeforeValidator(_object)]
_NUMBERS: TypeAdapter[Mapping[str, float | None]] = TypeAdapter(_Numbers)


def _known_numbers(value: Any) -> dict[str, float]:
    return {name: number for name, number in _NUMBERS.validate_python(value).items() if number is not None}


_KnownNumbers = Annotated[Mapping[str, float], BeforeValidator(_known_numbers)]
_Busy = Annotated[tuple[_Finite, ...] | None, _OR_NONE]
_Peaks = Annotated[Annotated[tuple[_Whole, ...], Field(min_length=1)] | None, _OR_NONE]

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of every chain input, by name."""
_Shapes = Annotated[Annotated[Mapping[str, tuple[_Whole, ...]], Field(min_length=1)] | None, _OR_NONE]
_SHAPES: TypeAdapter[Shapes | None] = TypeAdapter(_Shapes)


def shapes_of(value: Any) -> Shapes | None:
    """Return the shapes of a JSON object of name -> list of sizes; None where it is not one."""
    return _SHAPES.validate_python(value)


@checked_dataclass(frozen=True)
class StepLine:
    """Line of metrics.jsonl. A value that is missing or invalid is None; a line without a step is refused.

    waited_seconds: longest time that a rank waited for data. busy_seconds: work of each rank.
    time: end of the step, in seconds since 1970.
    peak_bytes: measured peak per stage, on the steps where it was taken; peak_source is the method, peak_input the
        shapes of the largest microbatch of the step.
    """

    step: _Whole
    loss: _Number = None
    parts: _KnownNumbers = field(default_factory=dict)
    lr: _Number = None
    grad_norm: _Number = None
    step_seconds: _Number = None
    waited_seconds: _Number = None
    samples_per_second: _Number = None
    busy_seconds: _Busy = None
    time: _Number = None
    generation: _WholeOrNone = None
    peak_bytes: _Peaks = None
    peak_source: Annotated[str | None, _OR_NONE] = None
    peak_input: _Shapes = None


@dataclass(frozen=True)
class MeasuredPeaks:
    """Largest measured peak of each stage.

    bytes, inputs: by stage; the input is that of the step with the peak, None where it is not recorded.
    source: the method of measurement; None where it is not recorded.
    """

    bytes: list[int]
    inputs: list[Shapes | None]
    source: str | None


@checked_dataclass(frozen=True)
class Evaluation:
    """Line of evaluations.jsonl: the scores that are numbers, in file order, and those per class."""

    step: _Whole
    scores: _KnownNumbers
    per_class: _Numbers
    generation: _WholeOrNone = None

    @property
    def value(self) -> float:
        """Value by which `best` is chosen: the first score, negated where lower is better; -inf without scores."""
        return next((goodness(name, value) for name, value in self.scores.items()), -math.inf)


@checked_dataclass(frozen=True)
class Event:
    """Line of events.jsonl; `time` is in seconds since 1970, `details` holds the keys that not every event has."""

    kind: str
    time: _Number = None
    step: _WholeOrNone = None
    generation: _WholeOrNone = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """Content of a run directory.

    plans: by generation. plan, generation: the newest plan and its generation.
    steps, evaluations: by rising step, the last line of each step. last_step: the step of the last line in the file.
    every_step: all lines of steps as they were written, including steps that were repeated later.
    samples, predictions, texts: the trained model's output on samples: pictures with detections, drawn pictures without
        such a record, and texts.
    curves: precision by recall of the last evaluation; None where there is no such file.
    problems: by file name, the reason why the file cannot be used (not written, not readable), or the part left out.
    """

    run_dir: Path
    config: Config | None
    profile: Profile | None
    plan: Plan | None
    generation: int | None
    plans: Mapping[int, Plan]
    steps: tuple[StepLine, ...]
    every_step: tuple[StepLine, ...]
    last_step: int | None
    evaluations: tuple[Evaluation, ...]
    events: tuple[Event, ...]
    samples: tuple[Sample, ...]
    predictions: tuple[Path, ...]
    texts: tuple[str, ...]
    curves: DetectionCurves | None
    problems: Mapping[str, str]

    @property
    def layer_names(self) -> list[str] | None:
        """Names of the plan's layers (of the profile's where there is no plan), or None if no file has them."""
        if self.profile is None or (self.plan is not None and self.plan.num_layers != self.profile.num_layers):
            return None
        return [layer.name for layer in self.profile.layers]

    @property
    def model(self) -> str | None:
        """Name of the model; None where neither plan nor profile has it."""
        return (self.plan and self.plan.model) or (self.profile and self.profile.model) or None

    @property
    def best(self) -> Evaluation | None:
        """Evaluation with the best first score, the earliest among equals."""
        return max(self.evaluations, key=lambda evaluation: evaluation.value, default=None)

    @property
    def steps_of_plan(self) -> list[StepLine]:
        """Steps that ran under the newest plan."""
        return [line for line in self.steps if None in (line.generation, self.generation) or self._is_newest(line)]

    def measured_peaks(self) -> MeasuredPeaks | None:
        """Largest measured peak of each stage of the newest plan; None if none was measured."""
        stages = None if self.plan is None else len(self.plan.stages)
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

    def waited_share(self) -> float | None:
        """Share of the step time, without first steps, in which the slowest rank waited for data, if measured."""
        timed = [line for line in self.steps if None not in (line.step_seconds, line.waited_seconds)]
        later = [line for before, line in itertools.pairwise(timed) if line.generation == before.generation]
        seconds = sum(line.step_seconds or 0 for line in later)
        return sum(line.waited_seconds or 0 for line in later) / seconds if seconds > 0 else None

    @property
    def samples_per_second(self) -> float | None:
        """Median samples per second of the last 100 steps; None where it was not recorded."""
        rates = [line.samples_per_second for line in self.steps[-100:] if line.samples_per_second is not None]
        return statistics.median(rates) if rates else None

    def reason(self, name: str) -> str:
        """Return the reason why a file, given by the begin of its name, cannot be used: a clause without full stop."""
        for file, problem in self.problems.items():
            if file.startswith(name):
                return problem.rstrip(".")
        return f"{name} does not tell"

    def _is_newest(self, line: StepLine) -> bool:
        # A change of membership alone raises the generation and keeps the plan.
        return line.generation is not None and self.generation is not None and line.generation >= self.generation


def read_run(run_dir: Path) -> RunRecord:
    """Read a run directory. Raises CapslogError where it is no folder, or holds no file that a run writes."""
    if not run_dir.is_dir():
        raise CapslogError(f"{run_dir} is not a folder; give the run_dir of a training")
    plans = {
        int(match[1]): path for path in run_dir.glob("plan-*.json") if (match := re.fullmatch(r"plan-(\d+)", path.stem))
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
    all_plans = {} if generation is None or newest is None else {generation: newest}
    for number, path in plans.items():
        if number != generation and (plan := _whole(path, read_plan, problems)) is not None:
            all_plans[number] = plan
    lines = {name: _lines(run_dir / name, problems) for name in single if name.endswith(".jsonl")}
    steps = _records(lines["metrics.jsonl"], StepLine, "metrics.jsonl", problems)
    evaluations = _records(list(map(_scored, lines["evaluations.jsonl"])), Evaluation, "evaluations.jsonl", problems)
    events = _records(list(map(_detailed, lines["events.jsonl"])), Event, "events.jsonl", problems)
    boxes = _predictions(run_dir, "boxes.json", problems)
    samples = [sample for path in boxes if (sample := _whole(path, read_sample, problems)) is not None]
    drawn = [path for path in _predictions(run_dir, "png", problems) if path.stem not in {s.name for s in samples}]
    return RunRecord(
        run_dir=run_dir,
        config=_whole(run_dir / "config.yaml", load_config, problems),
        profile=_whole(run_dir / "profile.json", read_profile, problems),
        plan=newest,
        generation=generation,
        plans=all_plans,
        steps=_last_of_each_step(steps),
        every_step=tuple(steps),
        last_step=steps[-1].step if steps else None,
        evaluations=_last_of_each_step(evaluations),
        events=tuple(events),
        texts=tuple(filter(None, (_whole(path, _text, problems) for path in _predictions(run_dir, "txt", problems)))),
        samples=tuple(samples),
        predictions=tuple(drawn),
        curves=_whole(run_dir / CURVES_FILE, read_curves, problems),
        problems=problems,
    )


def _whole(path: Path, read: Callable[[Path], T], problems: dict[str, str]) -> T | None:
    """Return the record of a file; or None, with the reason added to the problems."""
    if not path.is_file():
        problems[path.name] = f"{path.name} is missing"
        return None
    if _leads_away(path):
        problems[path.name] = f"{path.name} is a link out of the run's folder, and left out"
        return None
    try:
        return read(path)
    except CapslogError as error:
        problems[path.name] = str(error)
        return None


def _leads_away(path: Path) -> bool:
    """True where a file in the folder of a run, or in its `predictions/`, is a link to a file outside of it.

    A user who makes and shares a report of another user's run must not share files of their own.
    """
    folder = path.parent.parent if path.parent.name == _PREDICTIONS else path.parent
    return not path.resolve().is_relative_to(folder.resolve())


def _predictions(run_dir: Path, ending: str, problems: dict[str, str]) -> list[Path]:
    """Return the files of `predictions/` that lie in the run's folder."""
    named = sorted((run_dir / _PREDICTIONS).glob(f"*.{ending}"), key=_natural)
    paths = [path for path in named if path.is_file() and not _leads_away(path)]
    if len(paths) < len(named):
        away = _count(len(named) - len(paths), "file")
        problems[f"{_PREDICTIONS}/*.{ending}"] = (
            f"{_PREDICTIONS}: {away} left out that are links out of the run's folder, or no files"
        )
    return paths


def _text(path: Path) -> str:
    return files.read_bytes(path, _MOST_TEXT_BYTES).decode(errors="replace")


def _lines(path: Path, problems: dict[str, str]) -> list[dict[str, Any]]:
    records = _whole(path, files.read_jsonl, problems)
    if records is None:
        return []
    torn = sum(bool(line.strip()) for line in path.read_bytes().split(b"\n")) - len(records)
    if torn > 0:
        problems[path.name] = f"{path.name}: {_count(torn, 'line')} left out that a crash tore, or that are no objects"
    return records


def _records(lines: list[dict[str, Any]], kind: type[T], name: str, problems: dict[str, str]) -> list[T]:
    made, adapter = [], TypeAdapter(kind)
    for line in lines:
        with contextlib.suppress(ValidationError):
            made.append(adapter.validate_python(line))
    if len(made) < len(lines):
        before = f"{problems[name]}; " if name in problems else f"{name}: "
        problems[name] = f"{before}{_count(len(lines) - len(made), 'line')} without step or kind left out"
    return made


def _scored(line: dict[str, Any]) -> dict[str, Any]:
    return line | {"per_class": _object(line.get("scores")).get("per_class")}


def _detailed(line: dict[str, Any]) -> dict[str, Any]:
    common = ("kind", "time", "step", "generation")
    return line | {"details": {key: value for key, value in line.items() if key not in common}}


def _last_of_each_step(lines: list[R]) -> tuple[R, ...]:
    """Return the last line of each step. A resumed run repeats the steps after its checkpoint, and the last line of a
    step belongs to the run's weights.
    """
    by_step = {line.step: line for line in lines}
    return tuple(by_step[step] for step in sorted(by_step))


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key that puts sample-10 after sample-9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
