"""A folder of pictures per class: its pictures, its samples, and a picture that is damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.own_data import ImageFolder

Image = pytest.importorskip("PIL.Image", reason="Pillow, of the extra detr, is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, red in (("cat", 250), ("dog", 10)):
        (tmp_path / name).mkdir()
        for number in range(10):
            pixels = np.zeros((8, 12, 3), np.uint8)
            pixels[:, 2:10, 0], pixels[:, :, 1] = red, number
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    (tmp_path / "cat" / "notes.txt").write_text("no picture")
    return tmp_path


def test_parts_share_no_picture_and_have_all_classes(folder: Path) -> None:
    first, last = ImageFolder(folder, 8, (0, 0.7)), ImageFolder(folder, 8, (0.7, 1))
    assert first.classes == ["cat", "dog"]
    assert (len(first), len(last)) == (14, 6)
    assert len({path for path, _ in [*first.files, *last.files]}) == 20
    assert {number for _, number in last.files} == {0, 1}


def test_a_sample_is_the_middle_normalised(folder: Path) -> None:
    data = ImageFolder(folder, 8)
    path, number = data.files[0]
    pixels, label = data[0]
    assert (label, pixels.shape, pixels.dtype) == (number, (3, 8, 8), torch.float32)
    red, green = (250 if number == 0 else 10) / 255, int(path.stem) / 255
    assert torch.allclose(pixels[0], torch.tensor((red - 0.485) / 0.229), atol=1e-5)
    assert torch.allclose(pixels[1], torch.tensor((green - 0.456) / 0.224), atol=1e-5)


def test_augmentation_follows_the_random_numbers_of_torch(folder: Path) -> None:
    data = ImageFolder(folder, 8, augment=True)
    torch.manual_seed(1)
    first, second = data[0][0], data[0][0]
    torch.manual_seed(1)
    assert torch.equal(data[0][0], first)
    assert not torch.equal(first, second)


def test_a_damaged_picture_is_named(folder: Path) -> None:
    data = ImageFolder(folder, 8)
    data.files[3][0].write_bytes(data.files[3][0].read_bytes()[:40])
    with pytest.raises(CapslogError, match=rf"the picture {data.files[3][0]} cannot be decoded"):
        data[3]


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CapslogError, match="holds 0 pictures in 1 folders"):
        ImageFolder(tmp_path)
    with pytest.raises(CapslogError, match="absent is not a folder"):
        ImageFolder(tmp_path / "absent")
