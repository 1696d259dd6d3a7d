"""A picture as an object: a notebook draws it inline, a program saves it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from varuna_capslog.base import files
from varuna_capslog.base.extras import needed

__all__ = ["Picture", "drawn"]


@dataclass(frozen=True)
class Picture:
    """A PNG picture. png: the file's content."""

    png: bytes = field(repr=False)

    def save(self, path: Path | str) -> Path:
        """Writes the picture to a file and returns its path. Raises CapslogError where it cannot be written."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.whole_file(path) as file:
                file.write(self.png)
        except OSError as error:
            raise files.write_failure(f"{path} cannot be written", error) from error
        return path

    def _repr_png_(self) -> bytes:
        return self.png


def drawn(draw: Callable[[Path], object]) -> Picture:
    """Return the picture that `draw` writes to a path. Raises CapslogError where matplotlib is not installed."""
    with needed("a picture"), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        draw(path)
        return Picture(path.read_bytes())
