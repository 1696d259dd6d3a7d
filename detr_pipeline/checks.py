"""Checks of a COCO folder before the first worker starts, for problems that would stop the run or spoil its training.
Only the headers of pictures are read, and of many pictures only those of a sample.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from detr_pipeline.coco import CocoIndex
from detr_pipeline.data import DataConfig, Split, open_index, refuse_other_size
from detr_pipeline.transforms import ORIENTATION, has_more_bits, opened_image, read_image
from varuna_capslog.base.errors import CapslogError, RunFinding, findings_of

__all__ = ["check_split"]

_SAMPLE = 1000
"""Pictures whose headers are read."""
_SEED = 0
"""Seed of the sample: every check of a file reads the same pictures."""
_DECODED = 8
"""Most pictures of more than 8 bits that are decoded, since their headers do not say how many bits count."""
_UNSEEN = (2, 3, 4)
"""Orientations that leave width and height as they are; 5 to 8 swap them."""


def check_split(config: DataConfig, split: Split) -> Iterator[RunFinding]:
    """Check a split; no pictures are decoded except a few of more than 8 bits.

    Findings stop the run where there is nothing to learn, where pictures are missing, too large, damaged or of another
    size, where a picture has several lists of boxes, and where `read_coco` refuses the file.
    """

    def checks() -> Iterator[RunFinding]:
        index, folder = open_index(config, split), config.files(split)[1]
        missing = _missing(index, folder)
        yield from findings_of(
            lambda: _without_boxes(index, split),
            lambda: _doubled(index),
            lambda: _of_missing(index, folder, split, missing),
            lambda: _of_large(index, config.max_pixels),
            lambda: _of_headers(index, folder, config, missing),
        )

    return findings_of(checks)


def _without_boxes(index: CocoIndex, split: Split) -> Iterator[RunFinding]:
    if not index.crowd.all():
        return
    why = f"all {len(index.crowd)} stand for crowds" if len(index.crowd) else "it has none that has a size"
    if split == "val":
        yield RunFinding(f"{index.path} has no box to find ({why}), so that every score will be empty")
        return
    raise CapslogError(f"{index.path} has no box to learn from ({why}); give another file as data.train_json")


def _doubled(index: CocoIndex) -> Iterator[RunFinding]:
    """Yield a note about file names that several images have; refuse them where their boxes differ."""
    images = defaultdict(list)
    for image, name in enumerate(index.file_names):
        images[name].append(image)
    doubled = {name: images_of_file for name, images_of_file in images.items() if len(images_of_file) > 1}
    for name, images_of_file in doubled.items():
        if len({_boxes(index, image) for image in images_of_file}) > 1:
            ids = ", ".join(str(index.image_ids[image]) for image in images_of_file[:3]) + (
                ", ..." if len(images_of_file) > 3 else ""
            )
            raise CapslogError(
                f"{index.path}: the {len(images_of_file)} images with the ids {ids} have one file, {name}, but "
                "different boxes, so that what one shows is background in another; join them, or give each its own "
                "file_name"
            )
    if doubled:
        files = f"{len(doubled)} files belong to several images each, with equal boxes, such as {next(iter(doubled))}"
        yield RunFinding(f"{index.path}: {files}")


def _boxes(index: CocoIndex, image: int) -> tuple[tuple[float, ...], ...]:
    boxes, labels = index.targets(image)
    return tuple(sorted((label, *box) for label, box in zip(labels.tolist(), boxes.tolist(), strict=True)))


def _missing(index: CocoIndex, folder: Path) -> list[int]:
    # listing folders is much faster than a look-up per file; a name of another spelling may still exist
    listed: dict[str, set[str]] = {}
    missing = []
    for image, name in enumerate(index.file_names):
        path = os.path.join(folder, name)
        parent, file = os.path.split(path)
        if parent not in listed:
            listed[parent] = set(os.listdir(parent)) if os.path.isdir(parent) else set()
        if file not in listed[parent] and not os.path.exists(path):
            missing.append(image)
    return missing


def _of_missing(index: CocoIndex, folder: Path, split: Split, missing: Sequence[int]) -> Iterator[RunFinding]:
    if missing:
        first = missing[0]
        raise CapslogError(
            f"{len(missing)} of the {len(index)} pictures of {index.path} are missing in {folder}, the first is "
            f"{index.file_names[first]} (image id {index.image_ids[first]}); check data.{split}_images and the file "
            "names"
        )
    yield RunFinding(f"{index.path}: all {len(index)} pictures are there", "fact")


def _of_large(index: CocoIndex, max_pixels: int) -> Sequence[RunFinding]:
    areas = index.widths * index.heights
    if (areas > max_pixels).any():
        first = int(areas.argmax())
        raise CapslogError(
            f"{index.path}: {int((areas > max_pixels).sum())} pictures have more than data.max_pixels={max_pixels} "
            f"pixels, the largest is {index.file_names[first]} with {index.widths[first]}x{index.heights[first]}; "
            "raise that, or make them smaller"
        )
    return ()


def _of_headers(index: CocoIndex, folder: Path, config: DataConfig, missing: Sequence[int]) -> Iterator[RunFinding]:
    """Refuse unreadable pictures and sizes unlike the annotation file; note orientations that no size shows."""
    wanted = random.Random(_SEED).sample(range(len(index)), min(_SAMPLE, len(index)))
    sample = sorted({*wanted} - {*missing})
    deep, turned, wrong = [], [], []
    for image in sample:
        path, name = folder / index.file_names[image], f"image id {index.image_ids[image]}"
        try:
            with opened_image(path, name, config.max_pixels) as file:
                orientation = file.getexif().get(ORIENTATION, 1)
                refuse_other_size(index, image, path, _upright_size(file, orientation))
                if orientation in _UNSEEN or (orientation in (5, 6, 7, 8) and file.width == file.height):
                    turned.append(index.file_names[image])
                if has_more_bits(file):
                    deep.append((path, name))
        except CapslogError as error:
            wrong.append(error)
    if len(wrong) > 1:
        raise CapslogError(f"of {len(sample)} pictures looked at, {len(wrong)} cannot be used; the first: {wrong[0]}")
    if wrong:
        raise wrong[0]
    for path, name in deep[:_DECODED]:
        read_image(path, name, config.picture_bits, config.max_pixels)
    yield RunFinding(f"{index.path}: the headers of {len(sample)} of {len(index)} pictures were read", "fact")
    if turned:
        yield RunFinding(
            f"{index.path}: of {len(sample)} pictures looked at, {len(turned)} have an EXIF orientation that "
            f"their sizes do not show, such as {turned[0]}; it is applied, so their boxes must be those of "
            "the upright picture"
        )


def _upright_size(file: Image.Image, orientation: int) -> tuple[int, int]:
    return (file.height, file.width) if orientation in (5, 6, 7, 8) else file.size
