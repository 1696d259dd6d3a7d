"""DETR's augmentation in two steps: `plan` draws the transformation of sizes and boxes, `apply` transforms the pixels.

Every rank plans, so that sizes and targets of a minibatch are known before any file is opened; pixels are transformed
only where needed. Nothing here keeps state: equal generators give equal plans.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from pydantic import Field, model_validator
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Section

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "MAX_PIXELS",
    "MOST_PIXELS",
    "ORIENTATION",
    "AugmentConfig",
    "ImageRecipe",
    "apply",
    "has_more_bits",
    "largest_size",
    "opened_image",
    "plan",
    "read_image",
    "resized_size",
]


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_SLIVER = 25
"""Ratio of the sides above which a picture is a sliver, whose size may differ from that of DETR's code."""

Pixels = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, le=1)]


class AugmentConfig(Section):
    """Keys under `data.augment.`, in pixels; the defaults are those of the DETR paper (section A.4) and its code."""

    flip: Probability = 0.5
    """Probability of a horizontal flip (0 for pictures with writing)."""

    scales: tuple[Pixels, ...] = Field(default=tuple(range(480, 801, 32)), min_length=1)
    """The shorter side of a training image becomes one of these."""

    max_size: Pixels | None = 1333
    """Bound of the longer side; null means none."""

    crop: Probability = 0.5
    """Probability of cutting out a random part before the final resize."""

    crop_resize: tuple[Pixels, ...] = Field(default=(400, 500, 600), min_length=1)
    """The shorter side becomes one of these before the crop."""

    crop_size: tuple[Pixels, Pixels] = (384, 600)
    """Smallest and largest side of the crop."""

    val_scale: Pixels = 800
    """The shorter side of a validation image."""

    stretch: tuple[Pixels, Pixels] | None = None
    """The size [height, width] that every image gets in the end, whatever its shape was, as RT-DETR is trained. Then
    `scales`, `max_size` and `val_scale` have no effect. Null keeps each image's shape."""

    @model_validator(mode="after")
    def _ordered(self) -> AugmentConfig:
        if self.crop_size[0] > self.crop_size[1]:
            raise ValueError(f"crop_size={list(self.crop_size)} must be [smallest, largest]")
        return self


@dataclass(frozen=True, eq=False)
class ImageRecipe:
    """Transformation of an image.

    Attributes:
        flip: True: mirror the image first.
        resize: (h, w) before the crop, or None. crop: (top, left, h, w), or None. size: final (h, w).
        boxes: [n, 4] float64, centre x, centre y, width, height as fractions of the final size; in [0, 1].
        kept: [n] positions of these boxes among the image's boxes (a crop may lose boxes).
    """

    flip: bool
    resize: tuple[int, int] | None
    crop: tuple[int, int, int, int] | None
    size: tuple[int, int]
    boxes: NDArray[np.float64]
    kept: NDArray[np.int64]


def resized_size(height: int, width: int, scale: int, max_size: int | None) -> tuple[int, int]:
    """Return (h, w) with a shorter side of `scale`, or less where the longer side would exceed `max_size`.

    The rounding is that of DETR's code (`datasets/transforms.py`). torchvision's RandomShortestSize gives another size
    for about one image in forty. With DETR's rounding the longer side may exceed `max_size`, by as many pixels as half
    the ratio of the sides. The longer side of a sliver is cut to `max_size`.
    """
    short, long = min(height, width), max(height, width)
    if max_size is not None and long / short * scale > max_size:
        scale = max(1, round(max_size * short / long))
    longest = int(scale * long / short)
    if max_size is not None and long > _SLIVER * short:
        # DETR's code keeps the whole length where the shorter side cannot become less than a pixel
        longest = min(longest, max_size)
    return (scale, longest) if height < width else (longest, scale)


def plan(
    rng: np.random.Generator | None, width: int, height: int, boxes: NDArray[np.float64], config: AugmentConfig
) -> ImageRecipe:
    """Draw a training augmentation: flip, then either one resize, or a resize, a crop and a resize.

    Args:
        rng: the sample's own generator; None: only the resize of evaluation and prediction.
        width, height: size of the image in pixels.
        boxes: [n, 4] corners in pixels, inside the image.
    """
    flip, resize, crop = False, None, None
    seen_height, seen_width, scale = height, width, config.val_scale
    if rng is not None:
        flip = bool(rng.random() < config.flip)
        if rng.random() < config.crop:
            resize = _size_before_crop(height, width, _choice(rng, config.crop_resize))
            seen_width, seen_height = (
                int(rng.integers(*_crop_range(side, config.crop_size), endpoint=True)) for side in reversed(resize)
            )
            row = int(rng.integers(0, resize[0] - seen_height, endpoint=True))
            column = int(rng.integers(0, resize[1] - seen_width, endpoint=True))
            crop = (row, column, seen_height, seen_width)
        scale = _choice(rng, config.scales)
    size = config.stretch or resized_size(seen_height, seen_width, scale, config.max_size)

    moved = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    kept = np.arange(len(moved))
    if flip:
        moved = moved[:, [2, 1, 0, 3]] * [-1, 1, -1, 1] + [width, 0, width, 0]
    if crop is not None and resize is not None:
        ratio = np.array([resize[1] / width, resize[0] / height] * 2)
        moved = moved * ratio - [crop[1], crop[0], crop[1], crop[0]]
        moved = np.clip(moved, 0, [seen_width, seen_height] * 2)
        kept = kept[(moved[:, 2:] > moved[:, :2]).all(axis=1)]
        moved = moved[kept]
    # The final resize scales image and box alike, so fractions of the cropped image are fractions of the final size.
    moved = moved / [seen_width, seen_height, seen_width, seen_height]
    centres, spans = (moved[:, :2] + moved[:, 2:]) / 2, moved[:, 2:] - moved[:, :2]
    return ImageRecipe(flip, resize, crop, size, np.concatenate([centres, spans], axis=1), kept)


def _size_before_crop(height: int, width: int, scale: int) -> tuple[int, int]:
    """Return (h, w) for the resize before a crop; without a bound a picture of 1 x 3000 would take 1.4 GiB."""
    return resized_size(height, width, scale, _SLIVER * scale)


def _choice(rng: np.random.Generator, values: Sequence[int]) -> int:
    return values[int(rng.integers(len(values)))]


def _crop_range(side: int, bounds: tuple[int, int]) -> tuple[int, int]:
    """Return smallest and largest crop along a side; an image smaller than the smallest crop is not cropped."""
    return min(bounds[0], side), min(bounds[1], side)


def apply(recipe: ImageRecipe, image: Image.Image) -> Tensor:
    """Return the pixels of an RGB image after the recipe: [3, h, w] float32, normalised with ImageNet's statistics."""
    if recipe.flip:
        image = F.horizontal_flip(image)
    if recipe.resize is not None:
        image = F.resize(image, list(recipe.resize))
    if recipe.crop is not None:
        image = F.crop(image, *recipe.crop)
    if (image.height, image.width) != recipe.size:
        image = F.resize(image, list(recipe.size))
    pixels = F.to_dtype(F.pil_to_tensor(image), torch.float32, scale=True)
    return F.normalize(pixels, list(IMAGENET_MEAN), list(IMAGENET_STD))


def largest_size(
    widths: NDArray[np.int64], heights: NDArray[np.int64], config: AugmentConfig, train: bool, alone: bool
) -> tuple[int, int]:
    """Return the largest (h, w) that images of these sizes can have after augmentation; some draw reaches it.

    The tallest and the widest size can always be drawn together: where both need the same image, one draw of it has
    both (the tests try every draw of every pair).

    Args:
        widths, heights: [I] pixels.
        train: True: with the training augmentation; False: with the validation resize.
        alone: True: the largest size by area of one image; False: the largest height and width, padded together.
    """
    if config.stretch is not None:
        return config.stretch
    sizes = set(zip(heights.tolist(), widths.tolist(), strict=True))
    if not train:
        reachable = _resized_sizes(sizes, [config.val_scale], config.max_size)
    else:
        reachable = set()
        if config.crop < 1:
            reachable |= _resized_sizes(sizes, config.scales, config.max_size)
        if config.crop > 0:
            before = {
                _size_before_crop(height, width, scale) for height, width in sizes for scale in config.crop_resize
            }
            reachable |= _resized_sizes(_reachable_crops(before, config.crop_size), config.scales, config.max_size)
    if alone:
        return max(reachable, key=lambda size: (size[0] * size[1], size))
    return max(height for height, _ in reachable), max(width for _, width in reachable)


def _resized_sizes(
    sizes: Iterable[tuple[int, int]], scales: Sequence[int], max_size: int | None
) -> set[tuple[int, int]]:
    return {resized_size(height, width, scale, max_size) for height, width in sizes for scale in scales}


def _reachable_crops(sizes: Iterable[tuple[int, int]], bounds: tuple[int, int]) -> list[tuple[int, int]]:
    reachable = np.zeros((bounds[1] + 1, bounds[1] + 1), dtype=np.bool_)
    for height, width in sizes:
        (low_h, high_h), (low_w, high_w) = _crop_range(height, bounds), _crop_range(width, bounds)
        reachable[low_h : high_h + 1, low_w : high_w + 1] = True
    return [(height, width) for height, width in np.argwhere(reachable).tolist()]


# -- Picture files: opened, with one sentence for each problem, and read as upright RGB of 8 bits.
#
# `data` and `coco_task` call these functions, which know no annotation file. Facts that a picture file leaves open,
# such as how many of its 16 bits count, must be configured and are never guessed.


MAX_PIXELS, MOST_PIXELS = 178_956_970, 357_913_940
"""Default limit of a picture's pixels, and Pillow's own limit; 512 MiB and 1 GiB as RGB."""
ORIENTATION = 0x0112
"""EXIF tag of the orientation."""
_IN_16_BITS = ("PNG", "PPM")
"""Formats whose grey pictures Pillow may hold in 32 bits although the values have 16."""
_DARK_BITS = 14
"""Bits that all values of a dark 16-bit picture fit into: at most a quarter of the possible brightness."""
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # `max_pixels` decides


@contextmanager
def opened_image(path: Path, name: str = "", max_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """Yield a picture whose header was read, while the file is open. name: added to the path in errors. Raises
    CapslogError: the file is missing, has more than `max_pixels`, or cannot be decoded, also inside the `with`.
    """
    called = _called(path, name)
    try:
        with Image.open(path) as file:
            if file.width * file.height > max_pixels:
                raise CapslogError(
                    f"{called} has {file.width}x{file.height} pixels, more than data.max_pixels={max_pixels}; raise "
                    "that, or make the picture smaller"
                )
            yield file
    except CapslogError:
        raise
    except FileNotFoundError:
        raise CapslogError(f"{called} is missing; check the picture folder and the file names") from None
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise CapslogError(f"{called} cannot be decoded ({error}); replace it or take it out of the data") from error


def read_image(path: Path, name: str = "", bits: int | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read a picture as upright RGB: EXIF orientation applied; grey, palette, CMYK and transparent pictures converted.

    Args:
        name, max_pixels: as in `opened_image`.
        bits: number of bits that count in a picture of more than 8 bits; None: 16, and a dark picture is refused.

    Raises:
        CapslogError: as `opened_image`; pixels whose brightest value is not known.
    """
    with opened_image(path, name, max_pixels) as file:
        deep = has_more_bits(file)
        in_16_bits = file.format in _IN_16_BITS
        upright = ImageOps.exif_transpose(file)
        if upright.mode == "F":
            raise CapslogError(
                f"{_called(path, name)} has floating-point pixels, and no file says which of them is white; convert it "
                "to 8 bits"
            )
        if upright.mode.startswith("I"):
            wide = upright.mode == "I" and not in_16_bits
            return _of_grey(np.asarray(upright), wide, bits, _called(path, name)).convert("RGB")
        rgb = upright.convert("RGB")
        if deep and bits is None:
            # Pillow gives only the upper 8 bits of colours
            high = max(top for _, top in rgb.getextrema())  # type: ignore[misc]
            _refuse_dark((high << 8) + 255 if high else 0, "convert it to 8 bits", _called(path, name))
        elif deep and bits != 16:
            raise CapslogError(
                f"{_called(path, name)} holds 16 bits of each colour, of which data.picture_bits={bits} cannot be "
                "taken; convert it to 8 bits"
            )
        return rgb


def has_more_bits(file: Image.Image) -> bool:
    """Return True if an opened picture, not yet decoded, has more than 8 bits per colour."""
    return file.mode[0] in "IF" or ";16" in str(getattr(file, "tile", ""))


def _called(path: Path, name: str) -> str:
    return f"image {path}" + (f" ({name})" if name else "")


def _of_grey(values: np.ndarray, wide: bool, bits: int | None, called: str) -> Image.Image:
    """Convert integers of 16 bits, or 32 (`wide`), to a grey picture of the upper 8 of the bits that count."""
    low, high = int(values.min()), int(values.max())
    if bits is None:
        if wide:
            raise CapslogError(
                f"{called} holds whole numbers of 32 bits, from {low} to {high}, and does not say which is white; set "
                "data.picture_bits to the bits that count, such as 12, or convert it to 8 bits"
            )
        _refuse_dark(high, "set data.picture_bits to the bits that count, such as 12", called)
        bits = 16
    if low < 0 or high >> bits:
        raise CapslogError(
            f"{called} has values from {low} to {high}, which are not of data.picture_bits={bits} bits; set another "
            "number, or convert it to 8 bits"
        )
    return Image.fromarray((values.astype(np.uint32) >> (bits - 8)).astype(np.uint8))


def _refuse_dark(high: int, remedy: str, called: str) -> None:
    if high and not high >> _DARK_BITS:
        raise CapslogError(
            f"{called} holds 16 bits, but no value over {high}, so that it would be almost black; {remedy}, or set "
            "data.picture_bits=16 if it is so dark"
        )
