"""A folder of pictures as a data set for classification."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.extras import needed

__all__ = ["ImageFolder"]

_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and deviation of ImageNet's pictures, by channel; torchvision's weights were trained with them."""


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Pictures in one folder per class: `root/cat/1.jpg`, `root/dog/2.jpg`.

    A sample is (float32[3, size, size], number of the class in the order of the folders' names), normalised as for
    torchvision's weights.

    Args:
        root: the folder of the classes' folders, which may have folders of their own.
        size: pixels of a side; the shorter side is scaled to it and the middle is cut out.
        part: which pictures, as fractions of all of them in an order of its own: (0, 0.9) and (0.9, 1) share none.
        augment: instead cut out a random piece, of a quarter of the area or more, and mirror half of them.

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
        # sorted by a sum of the name, so that each part has pictures of all classes, on every machine the same
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
            told = " ".join(str(error).split())
            raise CapslogError(
                f"the picture {path} cannot be decoded ({type(error).__name__}: {told}); mend or remove it"
            ) from error
        picture = picture.resize((self.size, self.size), Image.Resampling.BILINEAR, self._box(*picture.size))
        pixels = torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255).permute(2, 0, 1)
        if self.augment and torch.rand(()) < 0.5:
            pixels = pixels.flip(2)
        return (pixels - torch.tensor(_MEAN).view(3, 1, 1)) / torch.tensor(_DEVIATION).view(3, 1, 1), number

    def _box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """The rectangle that is cut out: left, top, right and bottom in pixels of the file."""
        side = float(min(width, height))
        left, top = (width - side) / 2, (height - side) / 2
        if self.augment:
            scale, x, y = torch.rand(3).tolist()
            side *= 0.5 + 0.5 * scale
            left, top = x * (width - side), y * (height - side)
        return left, top, left + side, top + side
