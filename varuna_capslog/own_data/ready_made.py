"""Ready-made data sets: a folder of pictures for classification, texts and files of tokens as sequences."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from varuna_capslog.base.errors import CapslogError, needed

__all__ = ["ImageFolder", "TextFile", "TokenFile", "write_text"]


# -- A folder of pictures as a data set for classification.


_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and deviation of ImageNet's pictures, by channel; torchvision's weights were trained with them."""


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Pictures in one folder per class: `root/cat/1.jpg`, `root/dog/2.jpg`.

    A sample is (float32[3, size, size], number of the class in the order of the folders' names), normalised as for
    torchvision's weights.

    Args:
        root: folder with one folder per class, each of which may have subfolders.
        size: pixels of a side; the shorter side is scaled to it and the middle is cut out.
        part: range of the pictures, as fractions of a fixed order that mixes the classes; (0, 0.9) and (0.9, 1) share
            no picture.
        augment: cut out a random square with at least a quarter of the middle's area, and mirror half of the pictures.

    Attributes:
        classes: the names of the folders.

    Raises:
        CapslogError: no such folder, or no picture in it.
    """

    def __init__(
        self, root: str | Path, size: int = 64, part: Sequence[float] = (0.0, 1.0), augment: bool = False
    ) -> None:
        with needed("a folder of pictures"):
            import PIL  # noqa: F401  # the extra detr brings it
        self.root, self.size, self.augment = Path(root), size, augment
        first, last = part
        if not 0 <= first < last <= 1 or size < 1:
            raise CapslogError(f"part={list(part)} and size={size}: give two rising fractions and a size above 0")
        if not self.root.is_dir():
            raise CapslogError(f"{root} is not a folder; give one that has a folder of pictures for each class")
        self.classes = sorted(folder.name for folder in self.root.iterdir() if folder.is_dir())
        pictures = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in (self.root / name).rglob("*")
            if path.suffix.lower() in _ENDINGS
        ]
        # sorted by a checksum of the name, so that each part mixes all classes, and is the same on every machine
        pictures.sort(
            key=lambda picture: (zlib.crc32(str(picture[0].relative_to(self.root)).encode()), str(picture[0]))
        )
        self.files = pictures[int(len(pictures) * first) : int(len(pictures) * last)]
        if not self.files:
            raise CapslogError(
                f"{root} holds {len(pictures)} pictures in {len(self.classes)} folders, and none of this part; put "
                f"those of each class into a folder of its own ({', '.join(_ENDINGS)})"
            )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        path, number = self.files[index]
        try:
            with Image.open(path) as opened:
                picture = opened.convert("RGB")
        except Exception as error:  # Pillow raises many kinds for a damaged file
            cause = " ".join(str(error).split())
            raise CapslogError(
                f"the picture {path} cannot be decoded ({type(error).__name__}: {cause}); mend or remove it"
            ) from error
        picture = picture.resize((self.size, self.size), Image.Resampling.BILINEAR, self._box(*picture.size))
        pixels = torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255).permute(2, 0, 1)
        if self.augment and torch.rand(()) < 0.5:
            pixels = pixels.flip(2)
        return (pixels - torch.tensor(_MEAN).view(3, 1, 1)) / torch.tensor(_DEVIATION).view(3, 1, 1), number

    def _box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Return the rectangle that is cut out: left, top, right and bottom in pixels of the file."""
        side = float(min(width, height))
        left, top = (width - side) / 2, (height - side) / 2
        if self.augment:
            scale, x, y = torch.rand(3).tolist()
            side *= 0.5 + 0.5 * scale
            left, top = x * (width - side), y * (height - side)
        return left, top, left + side, top + side


# -- Texts and files of tokens as data sets of sequences, and text that a trained language model continues.


_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")


class TokenFile(Dataset[dict[str, Tensor]]):
    """Consecutive sequences of equal length from a file that holds nothing but token numbers.

    A sample is {"input_ids": int64[length], "labels": int64[length]}. The file is mapped into memory, not read.

    Args:
        path: raw numbers, as `array.tofile` writes them.
        length: tokens of a sample; tokens that do not fill a last sample are left out.
        part: fractions of the file in which the samples lie: (0, 0.9) is all but the last tenth.
        dtype: of the numbers: uint8, uint16, uint32, int32 or int64.
        shifted: True: labels are the next tokens, for models whose loss compares position by position. Models of
            transformers shift the labels themselves.

    Raises:
        CapslogError: no such file, or not one sample in it.
    """

    def __init__(
        self,
        path: str | Path,
        length: int,
        part: Sequence[float] = (0.0, 1.0),
        dtype: str = "uint16",
        shifted: bool = False,
    ) -> None:
        self.path, self.length, self.dtype, self.shifted = Path(path), length, dtype, shifted
        if dtype not in _TYPES:
            raise CapslogError(f"the dtype {dtype!r} is not one of {', '.join(_TYPES)}")
        first, last = part
        if not 0 <= first < last <= 1 or length < 1:
            raise CapslogError(f"part={list(part)} and length={length}: give two rising fractions and a length above 0")
        try:
            count = self.path.stat().st_size // np.dtype(dtype).itemsize
        except OSError as error:
            raise CapslogError(f"{path} cannot be read: {error.strerror}; check the path") from error
        self._first = int(count * first)
        self._count = (int(count * last) - self._first - int(shifted)) // length
        if self._count < 1:
            problem = "is empty" if count == 0 else f"has {count} tokens, of which this part holds not one sample"
            raise CapslogError(f"{path} {problem}; a sample needs {length + int(shifted)}, so give a longer file")
        self._tokens: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        if self._tokens is None:
            self._tokens = np.memmap(self.path, np.dtype(self.dtype), "r")
        at = self._first + index * self.length
        tokens = torch.from_numpy(self._tokens[at : at + self.length + int(self.shifted)].astype(np.int64))
        inputs = tokens[: self.length]
        return {"input_ids": inputs, "labels": tokens[1:] if self.shifted else inputs.clone()}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_tokens": None}  # another process maps the file itself


class TextFile(TokenFile):
    """`TokenFile` of a text: its tokens are the bytes of UTF-8, so that a vocabulary has 256 entries."""

    def __init__(
        self, path: str | Path, length: int, part: Sequence[float] = (0.0, 1.0), shifted: bool = False
    ) -> None:
        super().__init__(path, length, part, "uint8", shifted)


def write_text(model: nn.Module, prompt: str, count: int, context: int, temperature: float = 0.8) -> str:
    """Continue a prompt with a language model over bytes, and return both.

    Args:
        model: takes int64[1, n] and returns scores [1, n, 256], or an object with them as `logits`.
        count: bytes to add.
        context: the most bytes that the model looks at.
        temperature: divisor of the scores before a byte is drawn; 0 takes the largest score.
    """
    tokens = list(prompt.encode())
    for _ in range(count):
        outputs = model(torch.tensor([tokens[-context:]]))
        scores = getattr(outputs, "logits", outputs)[0, -1].float()
        drawn = torch.multinomial(torch.softmax(scores / temperature, -1), 1) if temperature else scores.argmax()
        tokens.append(int(drawn))
    return bytes(tokens).decode("utf-8", "replace")
