"""Records that a detector's run leaves for its report: samples with the detected boxes, and the curves of its last
evaluation. The files may be a stranger's: what is not as a run writes it is refused.
"""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import AllowInfNan, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "CURVES_FILE",
    "MOST_CONFUSED",
    "SAME_OBJECT",
    "Confusion",
    "Detection",
    "DetectionCurves",
    "Sample",
    "for_page",
    "one_box_per_object",
    "read_curves",
    "read_sample",
]

T = TypeVar("T")

CURVES_FILE = "detection-curves.json"
"""File of a detector's last evaluation; see `DetectionCurves`."""
_MOST_RECORD_BYTES = 8 << 20
MOST_CONFUSED = 100
"""Classes of the largest matrix of confusion that a run writes and a page can show."""
_Finite = Annotated[float, Strict(), AllowInfNan(False), Field(ge=-1e6, le=1e6)]
_Share = Annotated[float, AllowInfNan(False), Field(ge=0, le=1)]
_Count = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
_Side = Annotated[int, Strict(), Field(ge=1, le=4096)]


@checked_dataclass(frozen=True)
class Detection:
    """Detected object of a sample: the corners x0 y0 x1 y1 of its box in pixels, its class and its score."""

    box: tuple[_Finite, _Finite, _Finite, _Finite]
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

    counts: a row per true class and one for nothing, a column per detected class and one for missed objects.
    """

    classes: Annotated[tuple[str, ...], Field(max_length=MOST_CONFUSED)]
    score: _Share
    overlap: _Share
    counts: tuple[tuple[_Count, ...], ...]


@checked_dataclass(frozen=True)
class DetectionCurves:
    """Precision of each class by recall, at IoU 0.5, and the confusion, of an evaluation that had this AP; no confusion
    where there are more than `MOST_CONFUSED` classes.
    """

    recall: tuple[_Share, ...]
    precision: Mapping[str, tuple[_Finite, ...] | None]
    confusion: Confusion | None
    AP: _Finite | None = None

    def __post_init__(self) -> None:
        size = len(self.confusion.classes) + 1 if self.confusion is not None else 0
        rows = self.confusion is None or [len(row) for row in self.confusion.counts] == [size] * size
        points = all(column is None or len(column) == len(self.recall) for column in self.precision.values())
        if not rows or not points:
            raise ValueError("its lists differ in length")


SAME_OBJECT = 0.4
"""IoU above which two boxes show the same object."""


def one_box_per_object(detections: Sequence[Detection]) -> list[Detection]:
    """Return the detections without those that overlap a surer one, of whatever class (non-maximum suppression). At
    every threshold of the score, those of the answer that reach it are the suppressed list of that threshold.
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
    """Return a picture in RGB, made smaller where it is larger than a page shows, and its JPEG in base64."""
    shown = picture.convert("RGB")
    shown.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    buffer = io.BytesIO()
    shown.save(buffer, "JPEG", quality=85)
    return shown, base64.b64encode(buffer.getvalue()).decode()


def read_sample(path: Path) -> Sample:
    """Return the record of a sample. Raises CapslogError where the file is none."""
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
