"""Data section of the config, and a COCO folder as a `DataSource`: minibatches described first, decoded later.

Every rank describes every minibatch from the annotation file alone; only ranks that hold the first stage open pictures.
A sample must never depend on another sample.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, model_validator
from torch import Tensor

from detr_pipeline.coco import CocoIndex, read_coco
from detr_pipeline.digits import DIGIT_NAMES, DigitsConfig, digits_dataset, picture_sizes
from detr_pipeline.transforms import (
    MAX_PIXELS,
    MOST_PIXELS,
    AugmentConfig,
    ImageRecipe,
    apply,
    largest_size,
    plan,
    read_image,
)
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.files import expanded
from varuna_capslog.config.settings import Section
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.model.workload import HostTargets, Minibatch

__all__ = [
    "DATA_VARIABLE",
    "CocoSource",
    "DataConfig",
    "Split",
    "class_names",
    "data_facts",
    "image_sizes",
    "input_specs",
    "largest_padded_size",
    "open_index",
    "prepare_image",
    "refuse_other_size",
    "sampled_padded_sizes",
]

DATA_VARIABLE = "CAPSLOG_DATA"
Split = Literal["train", "val"]
_MOST_CLASSES = 100_000
_NO_BOXES = np.zeros((0, 4))

# The digits are small, the mirror image of a digit may be no digit, and training on two cores must stay cheap.
_DIGITS_AUGMENT: dict[str, Any] = {
    "flip": 0.0,
    "scales": (64, 72, 80),
    "max_size": 112,
    "crop_resize": (72, 80, 88),
    "crop_size": (56, 88),
    "val_scale": 72,
}


class DataConfig(Section):
    """Keys under `data.`: where pictures and boxes lie, and how they are prepared."""

    root: Path | None = None
    """Folder that relative paths start from. A relative root that is not found from the current folder is taken from
    `$CAPSLOG_DATA`; null means `$CAPSLOG_DATA` itself. For the digits: where they are written (null: a cache)."""

    train_json: Path | None = None
    """COCO annotation file of the training split; null means the embedded digits."""

    train_images: Path | None = None
    """Folder of the training pictures."""

    val_json: Path | None = None
    """COCO annotation file of the validation split; null means no evaluation."""

    val_images: Path | None = None
    """Folder of the validation pictures."""

    strict: bool = False
    """Refuse boxes without size or over the border instead of dropping and clamping them."""

    picture_bits: Annotated[int, Field(ge=8, le=31)] | None = None
    """Bits that count in pictures of more than 8 bits, such as 12 of a camera's 16. Null takes 16, and refuses pictures
    that are almost black then, and those of 32 bits."""

    max_pixels: Annotated[int, Field(ge=1, le=MOST_PIXELS)] = MAX_PIXELS
    """Width times height of the largest picture that is opened."""

    labels: Literal["contiguous", "original"] = "contiguous"
    """`contiguous` numbers the classes 0..C-1; `original` uses the file's category ids as they are, gaps included (91
    classes for COCO), as weights trained by Facebook's DETR expect."""

    augment: AugmentConfig = Field(default_factory=AugmentConfig)
    """Sizes, flip and crop. Keys left out have the defaults of the DETR paper, or small ones for the digits."""

    pad: Literal["minibatch", "microbatch"] = "minibatch"
    """Which images are padded to one size: those of the whole minibatch (so that the result does not depend on the
    microbatch size), or those of each microbatch alone (less padding)."""

    digits: DigitsConfig = Field(default_factory=DigitsConfig)
    """The embedded data set."""

    @model_validator(mode="after")
    def _small_sizes_for_digits(self) -> DataConfig:
        if self.uses_digits:
            set_keys = {name: getattr(self.augment, name) for name in self.augment.model_fields_set}
            self.augment = AugmentConfig(**{**_DIGITS_AUGMENT, **set_keys})
        return self

    @model_validator(mode="after")
    def _files_come_together(self) -> DataConfig:
        for set_key, needs in (("train_json", "train_images"), ("val_json", "val_images"), ("val_json", "train_json")):
            if getattr(self, set_key) is not None and getattr(self, needs) is None:
                raise ValueError(f"data.{set_key} is set but data.{needs} is not; set both or neither")
        return self

    @property
    def uses_digits(self) -> bool:
        """True if the config uses the embedded data set."""
        return self.train_json is None

    def has_split(self, split: Split) -> bool:
        """Return False only for validation data that no key names."""
        return self.uses_digits or split == "train" or self.val_json is not None

    def files(self, split: Split) -> tuple[Path, Path]:
        """Return annotation file and picture folder of a split, both existing; the digits are written if missing.
        Raises CapslogError for an unset split, a relative path without a root, or a path that does not exist.
        """
        if self.uses_digits:
            folder = digits_dataset(self.root, self.digits)
            return folder / "annotations" / f"instances_{split}.json", folder / split
        if not self.has_split(split):
            raise CapslogError("data.val_json is not set: nothing to evaluate on; set it and data.val_images")
        return self._existing(f"{split}_json"), self._existing(f"{split}_images")

    def _existing(self, key: str) -> Path:
        key_path = expanded(getattr(self, key))
        path = key_path if key_path.is_absolute() else self._base(key, key_path) / key_path
        if not path.exists():
            raise CapslogError(
                f"data.{key}={key_path} was looked for at {path} and is not there; set data.{key}, data.root or the "
                f"environment variable {DATA_VARIABLE}"
            )
        return path

    def _base(self, key: str, relative_path: Path) -> Path:
        variable = os.environ.get(DATA_VARIABLE)
        if self.root is not None:
            root = expanded(self.root)
            return root if root.is_absolute() or root.exists() or not variable else expanded(variable) / root
        if not variable:
            raise CapslogError(
                f"data.{key}={relative_path} is relative, and neither data.root nor the environment variable "
                f"{DATA_VARIABLE} says where the data lies; set one of them"
            )
        return expanded(variable)


def open_index(config: DataConfig, split: Split) -> CocoIndex:
    """Return the checked annotation file of a split."""
    return read_coco(config.files(split)[0], config.strict)


def class_names(config: DataConfig) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return category id and name of every class of the model, in the order of its outputs. With `labels: original`
    these include ids that the file does not use, named `unused <id>`. The digits need no file.
    """
    if config.uses_digits:
        ids, names = tuple(range(1, len(DIGIT_NAMES) + 1)), DIGIT_NAMES
    else:
        index = open_index(config, "train")
        ids, names = index.category_ids, index.names
    if config.labels == "contiguous":
        return ids, names
    if min(ids) < 0 or max(ids) >= _MOST_CLASSES:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise CapslogError(
            f"data.labels=original needs category ids from 0 to {_MOST_CLASSES - 1}, each an output of the model, and "
            f"{config.train_json} has {wrong}; set data.labels=contiguous, or renumber the categories"
        )
    named = dict(zip(ids, names, strict=True))
    all_ids = tuple(range(max(ids) + 1))
    return all_ids, tuple(named.get(id_, f"unused {id_}") for id_ in all_ids)


def image_sizes(config: DataConfig, split: Split) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return heights and widths, [I] each, of a split's images; opens no picture, and for the digits no file."""
    if config.uses_digits:
        sizes = picture_sizes(config.digits, split == "train")
        return sizes[:, 0], sizes[:, 1]
    index = open_index(config, split)
    return index.heights, index.widths


def largest_padded_size(config: DataConfig, microbatch_size: int = 1, minibatch_size: int = 1) -> tuple[int, int]:
    """Return the largest (H, W) of a microbatch in training; opens files like `image_sizes`. See `largest_size`; its
    `alone` is True where no two images are padded together.
    """
    heights, widths = image_sizes(config, "train")
    together = minibatch_size if config.pad == "minibatch" else microbatch_size
    return largest_size(widths, heights, config.augment, train=True, alone=together <= 1)


def sampled_padded_sizes(
    config: DataConfig, microbatch_size: int, minibatch_size: int, count: int, seed: int
) -> list[tuple[int, int]]:
    """Return the padded (H, W) of a microbatch of each of `count` random minibatches; opens no picture.

    A minibatch holds different images (all images where there are fewer than `minibatch_size`), and minibatch k is
    augmented as training with this seed does in epoch k.
    """
    heights, widths = image_sizes(config, "train")
    together = minibatch_size if config.pad == "minibatch" else microbatch_size
    rng = np.random.default_rng(seed)
    sizes = []
    for number in range(count):
        samples = rng.choice(len(heights), min(together, len(heights)), replace=False).tolist()
        # boxes draw no random numbers, so sizes are the same without boxes
        sizes.append(
            _largest(
                plan(_generator("train", seed, number, i), int(widths[i]), int(heights[i]), _NO_BOXES, config.augment)
                for i in samples
            )
        )
    return sizes


def _generator(split: Split, seed: int, epoch: int, sample: int) -> np.random.Generator | None:
    """Return the generator of a training image's augmentation; None for validation, which has none."""
    return np.random.default_rng([seed, epoch, sample]) if split == "train" else None


def input_specs(count: int, size: Sequence[int]) -> dict[str, TensorSpec]:
    """Return specs of a microbatch of `count` images that are padded to `size` (H, W)."""
    return {
        "images": TensorSpec((count, 3, *size)),
        "sizes": TensorSpec((count, 2), torch.int64),
    }


def data_facts(config: DataConfig) -> dict[str, Any]:
    """Return facts of the training data that must be the same when a run is continued; the digits need no file."""
    ids, names = class_names(config)
    facts = {f"category {id_}": name for id_, name in zip(ids, names, strict=True)}
    if config.uses_digits:
        return {"number of samples": config.digits.train_images, **facts}
    files = "\n".join(Path(name).name for name in open_index(config, "train").file_names)
    digest = hashlib.sha256(files.encode("utf-8", "surrogatepass")).hexdigest()
    return {"number of samples": files.count("\n") + 1, **facts, "digest of the file names": digest[:16]}


def _refuse_renamed(train: CocoIndex, val: CocoIndex) -> None:
    """Raise CapslogError where an id has another name in the validation file; unnamed categories have their id."""
    trained = dict(zip(train.category_ids, train.names, strict=True))
    for id_, name in zip(val.category_ids, val.names, strict=True):
        train_name = trained.get(id_, name)
        if str(id_) not in (name, train_name) and name.strip().casefold() != train_name.strip().casefold():
            raise CapslogError(
                f"category {id_} is {train_name!r} in {train.path} and {name!r} in {val.path}; the scores would be "
                "those of other categories: give both files the same ids"
            )


class CocoSource:
    """A split as a `DataSource`: `train` with augmentation, `val` without.

    Inputs of a microbatch of B images: `images` [B, 3, H, W] float32, zero beyond each image, and `sizes` [B, 2] int64,
    the valid (h, w). Targets: one dict per image with `labels` [n] int64, `boxes` [n, 4] float32 (centre x, centre y,
    width, height as fractions of the valid size), `orig_size` [2] int64 (h, w of the file) and `image_id`. Normalisers:
    `boxes`, the number of boxes that a matching can use, and `queries`, the number of predictions. Recipes: per
    microbatch, one pair of sample and `ImageRecipe` per image.

    Args:
        seed: seed of the augmentation, at least 0.
        num_queries: predictions per image; a matching uses at most that many boxes.

    `index` is the annotation file; `category_ids` and `names` are in the order of the model's outputs.

    Raises:
        CapslogError: as `DataConfig.files` and `read_coco`, or for a category that is missing in the training file, or
            has another name there.
    """

    def __init__(self, config: DataConfig, split: Split, seed: int, num_queries: int) -> None:
        self.config, self.split, self.seed, self.num_queries = config, split, seed, num_queries
        self.index = index = open_index(config, split)
        self.images = config.files(split)[1]
        # The training file alone defines the classes: a validation file may lack some.
        self.category_ids, self.names = class_names(config)
        position = {id_: i for i, id_ in enumerate(self.category_ids)}
        if split == "val" and not config.uses_digits:
            _refuse_renamed(open_index(config, "train"), index)
        for id_, name in zip(index.category_ids, index.names, strict=True):
            if id_ not in position:
                raise CapslogError(
                    f"{index.path} has the category {id_} ({name}), which the training file {config.train_json} "
                    "does not have; a model cannot learn it: use one list of categories for both"
                )
        self._class_of_label = np.array([position[id_] for id_ in index.category_ids], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.index)

    def minibatch(self, groups: Sequence[Sequence[int]], epoch: int) -> Minibatch:
        """Plan every sample of the minibatch and describe its microbatches; open no picture.

        Args:
            groups: sample positions per microbatch.
            epoch: seed, epoch and sample determine the augmentation, on every rank and in every order.
        """
        recipes = [[(sample, self._plan(sample, epoch)) for sample in group] for group in groups]
        sizes = [_largest(recipe for _, recipe in group) for group in recipes]
        if self.config.pad == "minibatch":
            sizes = [_largest(recipe for group in recipes for _, recipe in group)] * len(groups)
        targets = [[self._target(sample, recipe) for sample, recipe in group] for group in recipes]
        usable = sum(min(len(target["labels"]), self.num_queries) for group in targets for target in group)
        return Minibatch(
            inputs=[input_specs(len(group), size) for group, size in zip(groups, sizes, strict=True)],
            targets=targets,
            normalisers={"boxes": float(usable), "queries": float(self.num_queries * sum(map(len, groups)))},
            sample_ids=[
                [f"{self.index.file_names[sample]} (image id {self.index.image_ids[sample]})" for sample in group]
                for group in groups
            ],
            recipes=recipes,
        )

    def load(self, minibatch: Minibatch, microbatch: int) -> dict[str, Tensor]:
        """Return one microbatch, decoded. Raises CapslogError for a missing, damaged or wrongly sized picture."""
        recipes: list[tuple[int, ImageRecipe]] = minibatch.recipes[microbatch]
        images = torch.zeros(minibatch.inputs[microbatch]["images"].shape)
        for slot, (sample, recipe) in zip(images, recipes, strict=True):
            pixels = self._decode(sample, recipe)
            slot[:, : pixels.shape[1], : pixels.shape[2]] = pixels
        return {"images": images, "sizes": torch.tensor([recipe.size for _, recipe in recipes], dtype=torch.int64)}

    def _plan(self, sample: int, epoch: int) -> ImageRecipe:
        boxes, _ = self.index.targets(sample)
        width, height = int(self.index.widths[sample]), int(self.index.heights[sample])
        return plan(_generator(self.split, self.seed, epoch, sample), width, height, boxes, self.config.augment)

    def _target(self, sample: int, recipe: ImageRecipe) -> HostTargets:
        _, labels = self.index.targets(sample)
        return HostTargets(
            labels=torch.from_numpy(self._class_of_label[labels[recipe.kept]]),
            boxes=torch.from_numpy(recipe.boxes).to(torch.float32),
            orig_size=torch.tensor([int(self.index.heights[sample]), int(self.index.widths[sample])]),
            image_id=self.index.image_ids[sample],
        )

    def _decode(self, sample: int, recipe: ImageRecipe) -> Tensor:
        path = self.images / self.index.file_names[sample]
        name = f"image id {self.index.image_ids[sample]}"
        image = read_image(path, name, self.config.picture_bits, self.config.max_pixels)
        refuse_other_size(self.index, sample, path, image.size)
        return apply(recipe, image)


def refuse_other_size(index: CocoIndex, image: int, path: Path, size: tuple[int, int]) -> None:
    """Raise CapslogError if `size`, the upright picture's (width, height), is not that of the annotation file."""
    expected = (int(index.widths[image]), int(index.heights[image]))
    if size != expected:
        raise CapslogError(
            f"image {path} (image id {index.image_ids[image]}) is {size[0]}x{size[1]} pixels with its EXIF "
            f"orientation, but {index.path} says {expected[0]}x{expected[1]}; its boxes cannot be trusted: correct the "
            "file"
        )


def prepare_image(path: Path, config: DataConfig) -> tuple[dict[str, Tensor], Image.Image]:
    """Return the chain inputs of any picture file, after the validation resize, and the picture."""
    image = read_image(path, "", config.picture_bits, config.max_pixels)
    recipe = plan(None, image.width, image.height, _NO_BOXES, config.augment)
    return {"images": apply(recipe, image)[None], "sizes": torch.tensor([recipe.size])}, image


def _largest(recipes: Iterable[ImageRecipe]) -> tuple[int, int]:
    sizes = [recipe.size for recipe in recipes]
    return max(h for h, _ in sizes), max(w for _, w in sizes)
