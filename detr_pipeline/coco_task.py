"""Base of the detectors' workloads: a COCO folder, its classes, sizes, evaluation and drawing. It knows no model;
`task` (DETR) and `rt_detr.task` convert a model's outputs to boxes.
"""

from __future__ import annotations

import os
import random
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from detr_pipeline.coco import CocoIndex
from detr_pipeline.data import (
    DataConfig,
    Split,
    class_names,
    data_facts,
    largest_padded_size,
    open_index,
    prepare_image,
    refuse_other_size,
    sampled_padded_sizes,
)
from detr_pipeline.transforms import ORIENTATION, has_more_bits, opened_image, read_image
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError, RunFinding, findings_of
from varuna_capslog.config.reading import section
from varuna_capslog.config.settings import Config
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import Evaluator, HostTargets, Workload
from varuna_capslog.reports.run import for_page

__all__ = ["PROFILE_BOXES", "CocoWorkload", "check_split", "draw_detections", "example_target", "save_picture"]

# -- Checks of a COCO folder before the first worker starts, for problems that would stop the run or spoil its training.
# Only headers of pictures are read, and at most those of a sample.


_SAMPLE = 1000
"""Most pictures whose headers are read."""
_SEED = 0
"""Seed of the sample: every check of a file reads the same pictures."""
_DECODED = 8
"""Most pictures of more than 8 bits that are decoded, since their headers do not say how many bits count."""
_SAME_SIZE = (2, 3, 4)
"""EXIF orientations that leave width and height as they are; 5 to 8 swap them."""


def check_split(config: DataConfig, split: Split) -> Iterator[RunFinding]:
    """Check a split; no pictures are decoded except a few of more than 8 bits.

    Findings stop the run if there is no box to learn from, if pictures are missing, too large, damaged or of another
    size, if a picture has several lists of boxes, or if `read_coco` refuses the file.
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
    """Yield a note about files that belong to several images; refuse such images if their boxes differ."""
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
    # listing folders is much faster than a look-up per file; a file with another spelling may still exist
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
    """Refuse unreadable pictures and sizes unlike the annotation file's; note orientations that sizes do not show."""
    wanted = random.Random(_SEED).sample(range(len(index)), min(_SAMPLE, len(index)))
    sample = sorted({*wanted} - {*missing})
    deep, turned, wrong = [], [], []
    for image in sample:
        path, name = folder / index.file_names[image], f"image id {index.image_ids[image]}"
        try:
            with opened_image(path, name, config.max_pixels) as file:
                orientation = file.getexif().get(ORIENTATION, 1)
                refuse_other_size(index, image, path, _upright_size(file, orientation))
                if orientation in _SAME_SIZE or (orientation in (5, 6, 7, 8) and file.width == file.height):
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


PROFILE_BOXES = 8
"""Boxes in every image of a profile."""
_DRAWN_SCORE = 0.5


class CocoWorkload(Workload):
    """Workload of a detector. num_classes: from the `model` section; None: from the data file. Raises ConfigError."""

    def __init__(self, config: Config, num_classes: int | None) -> None:
        self.config = config
        self.data: DataConfig = section(DataConfig, config.data, "data")
        self._given_classes = num_classes

    @cached_property
    def num_classes(self) -> int:
        """Number of classes, without no-object."""
        return self._given_classes or len(class_names(self.data)[0])

    def check(self) -> Iterator[RunFinding]:
        """Check the files of both splits for problems that stop a run or spoil its training; see `check_split`."""
        if self.data.uses_digits:
            return
        splits: tuple[Split, ...] = ("train", "val") if self.data.has_split("val") else ("train",)
        for split in splits:
            yield from check_split(self.data, split)
        self.val_data()  # compares the categories of both files

    def data_facts(self) -> Mapping[str, Any]:
        """Return the facts of `data.data_facts`."""
        return self._facts

    @cached_property
    def _facts(self) -> Mapping[str, Any]:
        return data_facts(self.data)  # 0.2 s for a hundred thousand pictures, and a start calls it more than once

    @abstractmethod
    def input_specs(self, microbatch_size: int, size: Sequence[int]) -> dict[str, TensorSpec]:
        """Return specs of a training microbatch of images padded to `size` (H, W)."""

    @abstractmethod
    def detections_of(
        self, outputs: Mapping[str, Tensor], image: int, size: Tensor, num_classes: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the model's detections on an image, in the form of `detr_pipeline.evaluation.DetectionsOf`."""

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        """Return specs of images of `profile.image_size`, else of the largest padded size that training can have."""
        size = self.config.profile.image_size or largest_padded_size(
            self.data, microbatch_size, self.config.train.minibatch_size
        )
        return self.input_specs(microbatch_size, size)

    def sampled_inputs(self, microbatch_size: int, count: int, seed: int = 0) -> list[dict[str, TensorSpec]]:
        """Return specs of the padded sizes of random training minibatches, or of `profile.image_size` alone."""
        if self.config.profile.image_size is not None:
            return [self.profile_inputs(microbatch_size)]
        minibatch_size = self.config.train.minibatch_size
        sizes = sampled_padded_sizes(self.data, microbatch_size, minibatch_size, count, seed)
        return [self.input_specs(microbatch_size, size) for size in sizes]

    def evaluator(self) -> Evaluator | None:
        """Return the evaluator of COCO's twelve numbers and every class's AP. It writes the run's `detections.json`."""
        if not self.data.has_split("val"):
            return None
        from detr_pipeline.evaluation import CocoEvaluator

        index, ids = open_index(self.data, "val"), class_names(self.data)[0]
        return CocoEvaluator(index, ids, self.config.run_dir / "detections.json", self.detections_of)

    def sample_files(self, count: int) -> list[Path]:
        """Return the first pictures of the validation split."""
        if not self.data.has_split("val"):
            return []
        folder = self.data.files("val")[1]
        return [folder / name for name in open_index(self.data, "val").file_names[:count]]

    @torch.no_grad()
    def predict(self, chain: Chain, images: Sequence[Path], out: Path) -> list[Path]:
        """Draw the detections of a trained chain on every picture, as `<out>/<name>.png`, and write the boxes and the
        bare picture into `<out>/<name>.boxes.json`, for the report.

        Raises:
            CapslogError: a picture is missing or cannot be decoded.
        """

        names = class_names(self.data)[1]
        device = next(iter(chain.named_parameters().values())).device
        for layer in chain.layers:
            layer.module.eval()
        written = []
        for path in images:
            inputs, picture = prepare_image(path, self.data)
            outputs = chain.run({name: tensor.to(device) for name, tensor in self.inference_inputs(inputs).items()})
            size = torch.tensor([picture.height, picture.width])
            scores, classes, boxes = self.detections_of(outputs, 0, size, self.num_classes)
            drawn = draw_detections(picture, scores, classes, boxes, names, _DRAWN_SCORE)
            written.append(save_picture(drawn, out / f"{Path(path).stem}.png"))
            files.write_json(
                out / f"{Path(path).stem}.boxes.json", detections_record(picture, scores, classes, boxes, names)
            )
        return written

    def inference_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the chain's inputs for a picture, from the inputs of `prepare_image`."""
        return inputs


def example_target(count: int, num_classes: int) -> HostTargets:
    """Return a target with `count` boxes, for profiles."""
    boxes = torch.linspace(0.2, 0.6, count * 4).view(count, 4)
    return HostTargets(labels=torch.arange(count) % num_classes, boxes=boxes)


# -- Pictures for people: boxes with names and scores.
#
# `CocoWorkload.predict` draws them for `capslog predict` and the report. The threshold affects the picture, never the
# scores.


_COLOURS = (
    "#e6194b",
    "#0082c8",
    "#f58231",
    "#911eb4",
    "#00a0a0",
    "#d02090",
    "#b8860b",
    "#4363ff",
    "#ff6f91",
    "#8080ff",
)
_SHORTEST_DRAWN = 480


def draw_detections(
    image: Image.Image,
    scores: Tensor,
    classes: Tensor,
    boxes: Tensor,
    names: Sequence[str],
    threshold: float = 0.5,
) -> Image.Image:
    """Return a copy of the RGB picture with every box whose score reaches the threshold, high scores on top. Small
    pictures are enlarged first, so that names can be read.

    Args:
        scores, classes: [Q].
        boxes: [Q, 4] corners in pixels of `image`.
        names: names of the classes.
    """
    chosen = (scores >= threshold).nonzero().flatten()
    chosen = chosen[scores[chosen].argsort()]
    colours = [_COLOURS[c % len(_COLOURS)] for c in classes[chosen].tolist()]
    canvas, factor = _enlarged(image)
    corners = _drawable(boxes[chosen] * factor, canvas)
    pen = ImageDraw.Draw(canvas)
    line = max(2, round(min(canvas.size) / 240))
    for box, colour in zip(corners.to(torch.int64).tolist(), colours, strict=True):
        pen.rectangle(box, outline=colour, width=line)
    # Names are on a filled strip at each box's top edge: torchvision's labels are unreadable on busy pictures.
    font = ImageFont.load_default(max(11, round(min(canvas.size) / 34)))
    labels = [f"{names[c]} {s:.2f}" for c, s in zip(classes[chosen].tolist(), scores[chosen].tolist(), strict=True)]
    for (x_min, y_min, _, _), label, colour in zip(corners.tolist(), labels, colours, strict=True):
        x0, y0, x1, y1 = pen.textbbox((0, 0), label, font=font)
        wide, high = x1 - x0 + 4, y1 - y0 + 4
        x = min(max(x_min, 0), max(canvas.width - wide, 0))
        y = y_min - high if y_min >= high else y_min
        pen.rectangle((x, y, x + wide, y + high), fill=colour)
        pen.text((x + 2 - x0, y + 2 - y0), label, fill="white", font=font)
    return canvas


_LEAST_SHOWN = 0.05
"""Lowest score of a detection in a record."""


def detections_record(
    image: Image.Image, scores: Tensor, classes: Tensor, boxes: Tensor, names: Sequence[str]
) -> dict[str, Any]:
    """Return a picture with its detections: width and height in pixels, boxes (x1, y1, x2, y2 in these pixels) with
    scores and names, the highest score first, and the picture as JPEG in base64.
    """
    shown, jpeg = for_page(image)
    order = [place for place in scores.argsort(descending=True).tolist() if scores[place] >= _LEAST_SHOWN]
    corners = _drawable(boxes[order] * (shown.width / image.width), shown)
    rows = zip(corners.tolist(), scores[order].tolist(), classes[order].tolist(), strict=True)
    return {
        "width": shown.width,
        "height": shown.height,
        "boxes": [{"box": box, "score": score, "name": names[number]} for box, score, number in rows],
        "jpeg": jpeg,
    }


def save_picture(picture: Image.Image, path: Path) -> Path:
    """Save in the format of the suffix (PNG, JPEG, ...), make the folder, and return the path. Raises CapslogError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():  # in a stranger's run folder a link may lead to any file of the user's
            path.unlink()
        picture.save(path)
    except (OSError, ValueError) as error:
        raise CapslogError(
            f"the picture {path} cannot be written ({error}); try a name ending in .png or .jpg"
        ) from error
    return path


def _enlarged(image: Image.Image) -> tuple[Image.Image, float]:
    image = image.convert("RGB")
    factor = max(1.0, _SHORTEST_DRAWN / min(image.size))
    if factor == 1.0:
        return image, factor
    return image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC), factor


def _drawable(boxes: Tensor, image: Image.Image) -> Tensor:
    """Return finite corners, in order and inside the picture, so that no prediction stops the drawing."""
    corners = boxes.detach().float().cpu().nan_to_num(0.0, 0.0, 0.0)
    corners[:, 0::2] = corners[:, 0::2].sort(dim=1).values.clamp(0, image.width - 1)
    corners[:, 1::2] = corners[:, 1::2].sort(dim=1).values.clamp(0, image.height - 1)
    return corners
