"""Embedded data set: real handwritten digits, scattered over small canvases and written in COCO format on first use, so
that every command runs without a download. The 1,797 digits are the test part of the UCI "Optical Recognition of
Handwritten Digits" data that scikit-learn bundles; train and val share no digit.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, model_validator

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.files import cache_home, expanded
from varuna_capslog.config.settings import Section

__all__ = ["DIGIT_NAMES", "DigitsConfig", "default_digits_root", "digits_dataset", "picture_sizes"]

DIGIT_NAMES: tuple[str, ...] = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Part of the folder's name: raise it whenever the same parameters would give other pictures.
_VERSION = 1
_PLACEMENT_TRIES = 30
_MOST_OVERLAP = 0.05
_INK = 0.25


class DigitsConfig(Section):
    """Keys under `data.digits.`; each changes the pictures and therefore their folder."""

    train_images: int = Field(default=3000, ge=1)
    """Number of training pictures."""

    val_images: int = Field(default=200, ge=1)
    """Number of validation pictures."""

    canvas: tuple[int, int] = (64, 96)
    """Smallest and largest side of a picture, pixels."""

    digit: tuple[int, int] = (22, 40)
    """Smallest and largest side of the square that a digit is scaled to, pixels."""

    most_digits: int = Field(default=4, ge=1)
    """A picture holds 1 to this many digits, fewer where no free place is found."""

    seed: int = Field(default=0, ge=0)
    """Of everything drawn."""

    @model_validator(mode="after")
    def _digits_fit(self) -> DigitsConfig:
        if not 8 <= self.digit[0] <= self.digit[1] <= self.canvas[0] <= self.canvas[1]:
            raise ValueError(
                f"digit={list(self.digit)} and canvas={list(self.canvas)} must be [smallest, largest] with "
                "8 <= digit <= canvas"
            )
        return self


def default_digits_root() -> Path:
    """Return the user's cache folder: `$XDG_CACHE_HOME/varuna-capslog`, else `~/.cache/varuna-capslog`; without a home,
    a temporary folder of this user alone. Raises CapslogError where that folder is not this user's alone.
    """
    home = cache_home()
    if home is not None:
        return home / "varuna-capslog"
    folder = Path(tempfile.gettempdir()) / f"varuna-capslog-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()  # another user may have made it first, or a link of this name
        ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022
    except OSError:
        ours = False
    if not ours:
        raise CapslogError(f"{folder} is no folder of this user alone; set data.root or XDG_CACHE_HOME to another one")
    return folder


def digits_dataset(root: Path | str | None = None, config: DigitsConfig | None = None) -> Path:
    """Return the folder of the data set, which is written first if it does not exist.

    It holds `train/*.png`, `val/*.png`, `annotations/instances_train.json` and `annotations/instances_val.json`. Equal
    parameters give equal pictures. The folder appears only when complete; only one of several processes writes it.

    root: parent folder; None: `default_digits_root()`. Raises CapslogError without scikit-learn, or if writing fails.
    """
    config = config or DigitsConfig()
    root = expanded(root) if root is not None else default_digits_root()
    key = hashlib.sha256(json.dumps([_VERSION, config.model_dump(mode="json")]).encode()).hexdigest()[:10]
    folder = root / f"digits-{key}"
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".digits-{key}.lock"):
            if not folder.is_dir():
                _write_atomically(folder, config)
    except OSError as error:
        raise CapslogError(
            f"the digits data set cannot be written to {folder} ({error}); set data.root or XDG_CACHE_HOME to a folder "
            "with free space and write permission"
        ) from error
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        # Some network file systems have no locks; the rename at the end keeps the data set complete even then.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_atomically(folder: Path, config: DigitsConfig) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(unfinished, config)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(folder: Path, config: DigitsConfig) -> None:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise CapslogError(
            "the embedded digits data set needs scikit-learn: install it, or set data.train_json and data.train_images"
        ) from None
    bundle = load_digits()
    pictures = (bundle.images / 16.0).astype(np.float32)
    labels: NDArray[np.int64] = bundle.target
    order = np.random.default_rng([config.seed, 0]).permutation(len(pictures))
    # A fifth of the digits is for val alone.
    border = len(order) * 4 // 5
    (folder / "annotations").mkdir()
    first_image = first_annotation = 1
    for split, part, count in (
        ("train", order[:border], config.train_images),
        ("val", order[border:], config.val_images),
    ):
        (folder / split).mkdir()
        document: dict[str, Any] = {
            "info": {"description": f"handwritten digits on canvases, {split}"},
            "images": [],
            "annotations": [],
            "categories": [{"id": value + 1, "name": name} for value, name in enumerate(DIGIT_NAMES)],
        }
        for number in range(count):
            rng = _generator(config, first_image + number)
            canvas, placed = _picture(rng, pictures, labels, part, config)
            name = f"{number:06d}.png"
            Image.fromarray(canvas).save(folder / split / name)
            document["images"].append(
                {"id": first_image + number, "file_name": name, "width": canvas.shape[1], "height": canvas.shape[0]}
            )
            for label, (x, y, width, height) in placed:
                document["annotations"].append(
                    {
                        "id": first_annotation,
                        "image_id": first_image + number,
                        "category_id": label + 1,
                        "bbox": [x, y, width, height],
                        "area": width * height,
                        "iscrowd": 0,
                    }
                )
                first_annotation += 1
        first_image += count
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(document))


def picture_sizes(config: DigitsConfig, train: bool) -> NDArray[np.int64]:
    """Return [I, 2] height and width, in pixels, of every picture of a split, in order; no picture is drawn."""
    first, count = (1, config.train_images) if train else (1 + config.train_images, config.val_images)
    sizes = [_canvas(_generator(config, image_id), config) for image_id in range(first, first + count)]
    return np.array(sizes, dtype=np.int64)


def _generator(config: DigitsConfig, image_id: int) -> np.random.Generator:
    return np.random.default_rng([config.seed, 1, image_id])


def _canvas(rng: np.random.Generator, config: DigitsConfig) -> tuple[int, int]:
    """Return height and width, the first numbers that a picture's generator draws."""
    height, width = rng.integers(config.canvas[0], config.canvas[1], size=2, endpoint=True).tolist()
    return height, width


def _picture(
    rng: np.random.Generator,
    pictures: NDArray[np.float32],
    labels: NDArray[np.int64],
    part: NDArray[np.int64],
    config: DigitsConfig,
) -> tuple[NDArray[np.uint8], list[tuple[int, tuple[int, int, int, int]]]]:
    """Return a picture, a grey canvas [h, w], and its digits as (digit, (x, y, width, height) of the ink)."""
    height, width = _canvas(rng, config)
    canvas = np.full((height, width), rng.uniform(0.0, 0.3), dtype=np.float32)
    placed: list[tuple[int, tuple[int, int, int, int]]] = []
    for _ in range(int(rng.integers(1, config.most_digits, endpoint=True))):
        source = int(rng.choice(part))
        side = int(rng.integers(config.digit[0], config.digit[1], endpoint=True))
        scaled = Image.fromarray(pictures[source]).resize((side, side), Image.Resampling.BICUBIC)
        ink = np.clip(np.asarray(scaled), 0.0, 1.0)
        rows, columns = np.flatnonzero((ink > _INK).any(axis=1)), np.flatnonzero((ink > _INK).any(axis=0))
        ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        box_height, box_width = ink.shape
        for _ in range(_PLACEMENT_TRIES):
            x = int(rng.integers(0, width - box_width, endpoint=True))
            y = int(rng.integers(0, height - box_height, endpoint=True))
            box = (x, y, box_width, box_height)
            if all(_overlap(box, placed_box) <= _MOST_OVERLAP for _, placed_box in placed):
                spot = canvas[y : y + box_height, x : x + box_width]
                np.maximum(spot, spot + (rng.uniform(0.7, 1.0) - spot) * ink, out=spot)
                placed.append((int(labels[source]), box))
                break
    return np.rint(canvas * 255).astype(np.uint8), placed


def _overlap(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> float:
    """Return the shared area as a fraction of the smaller box."""
    across = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    down = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    return max(across, 0) * max(down, 0) / min(a[2] * a[3], b[2] * b[3])
