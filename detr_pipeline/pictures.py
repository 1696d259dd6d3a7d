"""Picture files: opened, with one sentence for each problem, and read as upright RGB of 8 bits.

`data` and `checks` call this module; it knows no annotation file. Facts that a file leaves open, such as how many of
its 16 bits count, must be configured and are never guessed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from varuna_capslog.base.errors import CapslogError

__all__ = ["MAX_PIXELS", "MOST_PIXELS", "ORIENTATION", "has_more_bits", "opened_image", "read_image"]

MAX_PIXELS, MOST_PIXELS = 178_956_970, 357_913_940
"""Default limit of a picture, and the limit beyond which Pillow refuses it; 512 MiB and 1 GiB as RGB."""
ORIENTATION = 0x0112
"""The EXIF tag."""
_IN_16_BITS = ("PNG", "PPM")
"""Formats whose grey pictures Pillow may hold in 32 bits although the values have 16."""
_DARK_BITS = 14
"""A picture of 16 bits that needs no more is a quarter as bright as it could be."""
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # `max_pixels` decides


@contextmanager
def opened_image(path: Path, name: str = "", max_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """Yield a picture whose header was read, while the file is open.

    Args:
        name: how the error calls the picture besides its path.
        max_pixels: a larger one is refused before it takes memory.

    Raises:
        CapslogError: the file is missing, too large, or cannot be decoded, also by code inside the `with`.
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
    """Read a picture as upright RGB: EXIF orientation applied; grey, palette, CMYK and transparent ones converted.

    Args:
        name: how the error calls the picture besides its path.
        bits: those that count in a picture of more than 8; None: 16, and one that is dark by them is refused.
        max_pixels: a larger one is refused.

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
    """Return whether an opened picture, not yet decoded, has more than 8 bits of each colour."""
    return file.mode[0] in "IF" or ";16" in str(getattr(file, "tile", ""))


def _called(path: Path, name: str) -> str:
    return f"image {path}" + (f" ({name})" if name else "")


def _of_grey(values: np.ndarray, wide: bool, bits: int | None, called: str) -> Image.Image:
    """Convert whole numbers of 16 or 32 bits (`wide`) to a grey picture of the upper 8 of the bits that count."""
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
