"""COCO annotation files: read once, checked in one place, kept as flat arrays. No picture is read. Inside the project
classes are numbered 0..C-1; only `CocoIndex.category_ids` has the file's category ids.
"""

from __future__ import annotations

import gc
import json
import logging
import reprlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.files import expanded

__all__ = ["CocoIndex", "read_coco"]

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

# Annotation files round coordinates to two decimals, so a box at the border may overhang by a hundredth of a pixel.
_OVERHANG_PIXELS = 0.02

_MOST_BYTES = 8 << 30
"""Largest size of an annotation file, in bytes; the largest files in use have 3 GB."""
_MOST_SIDE = 1 << 28
"""Most pixels of an image's side, about as many as Pillow reads in a whole picture."""

# In a smaller image, boxes of one pixel are as common as boxes that are written as fractions.
_FEW_PIXELS = 8


@dataclass(frozen=True, eq=False)
class CocoIndex:
    """Checked COCO detection data set without its pixels.

    Attributes:
        path: the JSON file.
        image_ids, file_names: ids and names of the I images, in the file's order, including images without boxes.
        widths, heights: [I] pixels, as the file says.
        category_ids, names: ids and names of the C classes, ascending by id; a class number is a position in them.
        box_image: [A] position of each box's image, ascending; the A boxes include crowd regions.
        box_label: [A] class 0..C-1.
        boxes: [A, 4] corners x1 y1 x2 y2 in pixels, inside the image, never empty.
        areas: [A] the file's `area` (of the segmentation in COCO itself), else width * height.
        crowd: [A] True for regions that stand for many objects.
    """

    path: Path
    image_ids: tuple[int, ...]
    file_names: tuple[str, ...]
    widths: IntArray
    heights: IntArray
    category_ids: tuple[int, ...]
    names: tuple[str, ...]
    box_image: IntArray
    box_label: IntArray
    boxes: FloatArray
    areas: FloatArray
    crowd: BoolArray

    def __len__(self) -> int:
        return len(self.image_ids)

    @cached_property
    def _targets(self) -> tuple[FloatArray, IntArray, IntArray]:
        keep = ~self.crowd
        starts = np.searchsorted(self.box_image[keep], np.arange(len(self) + 1))
        return self.boxes[keep], self.box_label[keep], starts

    def targets(self, image: int) -> tuple[FloatArray, IntArray]:
        """Return an image's boxes [n, 4] (corners, pixels) and classes [n] to learn, without crowd regions."""
        boxes, labels, starts = self._targets
        part = slice(starts[image], starts[image + 1])
        return boxes[part], labels[part]

    def ground_truth(self) -> dict[str, Any]:
        """Return the data set in the form of pycocotools: original ids, crowd regions, every required field.

        Annotations are numbered from 1 whatever the file says: COCOeval stores the id of the matched annotation and
        reads 0 as "no match", so a file numbered from 0 would lose a true positive. Boxes are the checked boxes.
        """
        sizes = self.boxes[:, 2:] - self.boxes[:, :2]
        rows = zip(
            self.box_image.tolist(),
            self.box_label.tolist(),
            np.concatenate([self.boxes[:, :2], sizes], axis=1).tolist(),
            self.areas.tolist(),
            self.crowd.tolist(),
            strict=True,
        )
        return {
            "info": {},
            "images": [
                {"id": image_id, "file_name": name, "width": width, "height": height}
                for image_id, name, width, height in zip(
                    self.image_ids, self.file_names, self.widths.tolist(), self.heights.tolist(), strict=True
                )
            ],
            "categories": [{"id": id_, "name": name} for id_, name in zip(self.category_ids, self.names, strict=True)],
            "annotations": [
                {
                    "id": number,
                    "image_id": self.image_ids[image],
                    "category_id": self.category_ids[label],
                    "bbox": box,
                    "area": area,
                    "iscrowd": int(crowd),
                }
                for number, (image, label, box, area, crowd) in enumerate(rows, start=1)
            ],
        }


def read_coco(path: Path | str, strict: bool = False) -> CocoIndex:
    """Read and check a COCO JSON file; the last four files are cached as long as they do not change.

    Boxes without width or height are dropped and boxes over the border are clamped; one log line counts both.

    strict: refuse a file with such boxes instead.

    Raises:
        CapslogError: missing, unreadable or malformed file; missing fields; duplicate image, category or annotation id;
            unknown image or category id; a box that is not four finite numbers; boxes that are all fractions; an
            `iscrowd` that is no 0 or 1; with `strict`, boxes to drop or clamp.
    """
    path = expanded(path)
    try:
        stat = path.stat()
    except OSError as error:
        raise CapslogError(
            f"annotation file {path} cannot be read ({error.strerror}); check data.root and the data.*_json keys"
        ) from None
    return _read(path, stat.st_mtime_ns, stat.st_size, strict)


@lru_cache(maxsize=4)
def _read(path: Path, modified_ns: int, num_bytes: int, strict: bool) -> CocoIndex:
    # Python's cycle collector scans millions of fresh lists again and again, though they form no cycle. Without it, a
    # file of COCO's size is read in a third of the time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        try:
            # not `files.parse_json`, which takes 1.5 times as long: every value that is used is checked below
            document = json.loads(files.read_bytes(path, _MOST_BYTES))
        except CapslogError as error:
            raise CapslogError(f"annotation file {error}") from None
        except (ValueError, RecursionError) as error:
            raise CapslogError(f"annotation file {path} is not valid JSON: {error}") from None
        return _Checker(path, document, strict).index()
    finally:
        if was_on:
            gc.enable()


class _Checker:
    """Checks of a COCO file, in the order of its entries."""

    def __init__(self, path: Path, document: Any, strict: bool) -> None:
        self.path, self.strict = path, strict
        if not isinstance(document, dict):
            raise self.error("the top level must be an object with images, annotations and categories")
        self.images = self.rows(document, "images")
        self.categories = self.rows(document, "categories")
        self.annotations = self.rows(document, "annotations")

    def error(self, message: str) -> CapslogError:
        return CapslogError(f"{self.path}: {message}")

    def rows(self, document: dict[str, Any], key: str) -> list[dict[str, Any]]:
        rows = document.get(key)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise self.error(f"{key!r} must be a list of objects; is this a COCO detection file?")
        if not rows and key != "annotations":
            raise self.error(f"{key!r} is empty; a data set needs at least one entry there")
        return rows

    def column(self, key: str, rows: Sequence[dict[str, Any]], field: str) -> list[Any]:
        try:
            return [row[field] for row in rows]
        except KeyError:
            number = next(i for i, row in enumerate(rows) if field not in row)
            shown = reprlib.repr(rows[number].get("id"))
            raise self.error(f"{key}[{number}] (id {shown}) has no {field!r}; add it") from None

    def whole_numbers(self, key: str, rows: Sequence[dict[str, Any]], field: str) -> list[int]:
        values = self.column(key, rows, field)
        # `type is int` also refuses true/false, which Python counts as numbers.
        if not all(type(value) is int for value in values):
            number = next(i for i, value in enumerate(values) if type(value) is not int)
            shown = reprlib.repr(values[number])
            raise self.error(f"{key}[{number}] has {field}={shown}, which must be a whole number")
        return values

    def unique_ids(self, key: str, rows: Sequence[dict[str, Any]]) -> list[int]:
        ids = self.whole_numbers(key, rows, "id")
        if len(set(ids)) != len(ids):
            seen: set[int] = set()
            twice = next(id_ for id_ in ids if id_ in seen or seen.add(id_))  # type: ignore[func-returns-value]
            raise self.error(f"duplicate id {twice} in {key!r}; ids must be unique: renumber them")
        return ids

    def index(self) -> CocoIndex:
        image_ids = self.unique_ids("images", self.images)
        file_names = self.column("images", self.images, "file_name")
        self.refuse_first(
            np.array([not name or not _is_text(name) for name in file_names]),
            lambda i: f"image id {image_ids[i]} has file_name={reprlib.repr(file_names[i])}, which must be a file name",
        )
        widths, heights = (self.sides(side, file_names) for side in ("width", "height"))

        ids = self.unique_ids("categories", self.categories)
        by_id = sorted(zip(ids, self.categories, strict=True), key=lambda pair: pair[0])
        category_ids = tuple(id_ for id_, _ in by_id)
        given_names = [str(id_) if row.get("name") is None else row["name"] for id_, row in by_id]
        self.refuse_first(
            np.array([not _is_text(str(name) if type(name) in (int, float) else name) for name in given_names]),
            lambda i: f"category {category_ids[i]} has name={reprlib.repr(given_names[i])}, which must be text",
        )
        names = tuple(map(str, given_names))

        annotation_ids = self.unique_ids("annotations", self.annotations)
        box_image = self.positions("image_id", image_ids, "images")
        box_label = self.positions("category_id", category_ids, "categories")

        def where(i: int) -> str:
            return f"annotation id {annotation_ids[i]} of {file_names[box_image[i]]}"

        xywh = self.box_array(where)
        self.refuse_fractions(xywh, widths, heights)
        crowd = self.crowds(where)
        given_areas = [row.get("area") for row in self.annotations]
        numbers = [area if isinstance(area, (int, float)) else np.nan for area in given_areas]
        areas = self.as_floats(numbers, lambda i: f"{where(i)} has an area")

        # A box without size has none after clamping; a box wholly outside the image loses its size.
        with np.errstate(over="ignore"):  # a corner beyond the largest float is beyond the border, too
            corners = np.concatenate([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], axis=1)
        limits = np.stack([widths, heights, widths, heights], axis=1)[box_image].astype(np.float64)
        inside = np.clip(corners, 0.0, limits)
        empty = (xywh[:, 2:] <= 0).any(axis=1) | (inside[:, 2:] <= inside[:, :2]).any(axis=1)
        overhang = (np.abs(inside - corners) > _OVERHANG_PIXELS).any(axis=1) & ~empty
        self.report_repairs(empty, overhang, where)

        order = np.argsort(box_image, kind="stable")
        order = order[~empty[order]]
        spans = inside[:, 2:] - inside[:, :2]
        return CocoIndex(
            path=self.path,
            image_ids=tuple(image_ids),
            file_names=tuple(file_names),
            widths=widths,
            heights=heights,
            category_ids=category_ids,
            names=names,
            box_image=box_image[order],
            box_label=box_label[order],
            boxes=inside[order],
            areas=np.where(np.isfinite(areas), areas, spans.prod(axis=1))[order],
            crowd=crowd[order],
        )

    def positions(self, field: str, ids: Iterable[int], key: str) -> IntArray:
        position = {id_: i for i, id_ in enumerate(ids)}
        values = self.whole_numbers("annotations", self.annotations, field)
        try:
            return np.array([position[value] for value in values], dtype=np.int64)
        except KeyError:
            number = next(i for i, value in enumerate(values) if value not in position)
            raise self.error(
                f"annotation id {self.annotations[number]['id']} has {field}={values[number]}, which is not in "
                f"{key!r}; remove the annotation or add the missing entry"
            ) from None

    def box_array(self, where: Callable[[int], str]) -> FloatArray:
        values = self.column("annotations", self.annotations, "bbox")
        for i, value in enumerate(values):
            if not isinstance(value, list) or len(value) != 4 or not all(type(v) in (int, float) for v in value):
                shown = reprlib.repr(value)
                raise self.error(f"{where(i)} has bbox={shown}, which must be four numbers x, y, width, height")
        boxes = self.as_floats(values, lambda i: f"{where(i)} has a bbox").reshape(-1, 4)
        self.refuse_first(
            ~np.isfinite(boxes).all(axis=1),
            lambda i: f"{where(i)} has the non-finite bbox {values[i]}; remove the annotation or mend the box",
        )
        return boxes

    def as_floats(self, rows: Sequence[Any], describe: Callable[[int], str]) -> FloatArray:
        """Convert numbers, or lists of numbers, to floats; refuse whole numbers beyond the largest float."""
        try:
            return np.array(rows, dtype=np.float64)
        except OverflowError:
            wholes = [[v for v in (row if isinstance(row, list) else [row]) if isinstance(v, int)] for row in rows]
            number = next(i for i, row in enumerate(wholes) if any(abs(v) > sys.float_info.max for v in row))
            raise self.error(f"{describe(number)} beyond what a number can be; correct it") from None

    def sides(self, side: str, file_names: Sequence[str]) -> IntArray:
        """Return the widths or heights of the images."""
        sides = self.whole_numbers("images", self.images, side)
        self.refuse_first(
            np.array([not 1 <= pixels <= _MOST_SIDE for pixels in sides]),
            lambda i: f"image {file_names[i]} has {side}={sides[i]}, which must be pixels from 1 to {_MOST_SIDE}",
        )
        return np.array(sides, dtype=np.int64)

    def crowds(self, where: Callable[[int], str]) -> BoolArray:
        flags = [row.get("iscrowd") for row in self.annotations]
        self.refuse_first(
            np.array([value is not None and value not in (0, 1) for value in flags], dtype=np.bool_),
            lambda i: f"{where(i)} has iscrowd={reprlib.repr(flags[i])}, which must be 0 or 1, as a number",
        )
        return np.array([value == 1 for value in flags], dtype=np.bool_)

    def refuse_fractions(self, xywh: FloatArray, widths: IntArray, heights: IntArray) -> None:
        sides = np.concatenate([widths, heights])
        if not (xywh[:, 2:] > 0).all(axis=1).any() or sides.max() <= _FEW_PIXELS:
            return
        if xywh.min() >= 0 and xywh.max() <= 1:
            raise self.error(
                f"all {len(xywh)} boxes lie between 0 and 1, in images of up to {widths.max()}x{heights.max()} pixels, "
                "so they are fractions; bbox must be in pixels: multiply x and width by the image's width, y and "
                "height by its height"
            )

    def refuse_first(self, wrong: BoolArray | np.bool_, message: Callable[[int], str]) -> None:
        if wrong.any():
            raise self.error(message(int(np.argmax(wrong))))

    def report_repairs(self, empty: BoolArray, overhang: BoolArray, where: Callable[[int], str]) -> None:
        wrong = empty | overhang
        if not wrong.any():
            return
        counts = f"{int(empty.sum())} boxes without size and {int(overhang.sum())} boxes over the border"
        first = f"the first is {where(int(np.argmax(wrong)))}"
        if self.strict:
            raise self.error(f"{counts}, {first}; mend the file, or set data.strict=false to drop and clamp them")
        logger.warning("%s: dropped and clamped %s, %s", self.path, counts, first)


def _is_text(value: Any) -> bool:
    """Return True for text that a file name may hold: without NUL and halves of surrogate pairs."""
    try:
        return isinstance(value, str) and b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False
