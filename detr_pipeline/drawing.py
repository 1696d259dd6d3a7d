"""Pictures for people: boxes with names and scores.

`task` calls it for `capslog predict` and the report. It only draws; the threshold affects the picture, never the
scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from varuna_capslog.base.errors import CapslogError

__all__ = ["draw_detections", "save_picture"]

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
    """Return a copy of the picture with every box whose score reaches the threshold, the best on top.

    Small pictures are enlarged first, so that names can be read.

    Args:
        image: RGB.
        scores, classes: [Q].
        boxes: [Q, 4] corners in pixels of `image`.
        names: of the classes.
        threshold: smallest score that is drawn.
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
    # Names on a filled strip at each box's top edge: torchvision's own are unreadable on busy pictures.
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


def save_picture(picture: Image.Image, path: Path) -> Path:
    """Save in the format of the suffix (PNG, JPEG, ...), make the folder, and return the path.

    Raises:
        CapslogError: the suffix is unknown or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():  # in a stranger's run folder it may lead to any file of the user's
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
    """Return corners in order and inside the picture, so that a wild prediction does not stop the drawing."""
    corners = boxes.detach().float().cpu().nan_to_num(0.0, 0.0, 0.0)
    corners[:, 0::2] = corners[:, 0::2].sort(dim=1).values.clamp(0, image.width - 1)
    corners[:, 1::2] = corners[:, 1::2].sort(dim=1).values.clamp(0, image.height - 1)
    return corners
