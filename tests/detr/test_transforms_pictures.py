"""Picture files: every kind becomes upright RGB of 8 bits, and an ambiguous file is refused with the missing setting's
name.
"""

import numpy as np
import pytest
from PIL import Image

from detr_pipeline.transforms import read_image
from varuna_capslog.base.errors import CapslogError


@pytest.mark.parametrize(
    ("mode", "suffix"), [("L", "png"), ("P", "png"), ("CMYK", "jpg"), ("RGBA", "png"), ("LA", "png"), ("1", "png")]
)
def test_every_colour_mode_becomes_rgb(tmp_path, mode, suffix):
    path = tmp_path / f"x.{suffix}"
    Image.new("RGB", (8, 6), "white").convert(mode).save(path)
    image = read_image(path)
    assert image.mode == "RGB"
    assert np.asarray(image).min() > 240


def test_sixteen_bit_grey_is_scaled_not_cut_off(tmp_path):
    Image.fromarray(np.array([[0, 0x4000, 0xFFFF]], dtype=np.uint16)).save(tmp_path / "x.png")
    assert np.asarray(read_image(tmp_path / "x.png"))[0, :, 0].tolist() == [0, 0x40, 0xFF]


def saved(folder, values, suffix="png"):
    Image.fromarray(values).save(folder / f"x.{suffix}")
    return folder / f"x.{suffix}"


def first_row(path, **options):
    return np.asarray(read_image(path, **options))[0, :, 0].tolist()


def test_twelve_bits_of_sixteen_are_asked_for_and_scaled(tmp_path):
    """Such pictures were read a sixteenth as bright, without a warning."""
    path = saved(tmp_path, np.array([[0, 0x400, 0xFFF]], dtype=np.uint16))
    with pytest.raises(CapslogError, match=r"x\.png holds 16 bits, but no value over 4095.*data\.picture_bits"):
        read_image(path)
    assert first_row(path, bits=12) == [0, 0x40, 0xFF]
    assert first_row(path, bits=16) == [0, 4, 15]
    with pytest.raises(CapslogError, match=r"values from 0 to 4095, which are not of data\.picture_bits=10 bits"):
        read_image(path, bits=10)


def test_whole_numbers_of_thirty_two_bits_are_asked_for(tmp_path):
    path = saved(tmp_path, np.array([[0, 100, 255]], dtype=np.int32), "tiff")
    with pytest.raises(CapslogError, match=r"32 bits, from 0 to 255,.*set data\.picture_bits"):
        read_image(path)
    assert first_row(path, bits=8) == [0, 100, 255]
    path = saved(tmp_path, np.array([[-5, 100]], dtype=np.int32), "tiff")
    with pytest.raises(CapslogError, match=r"values from -5 to 100"):
        read_image(path, bits=8)


def test_floating_point_is_refused(tmp_path):
    path = saved(tmp_path, np.array([[0.0, 0.5, 1.0]], dtype=np.float32), "tiff")
    with pytest.raises(CapslogError, match=r"x\.tiff has floating-point pixels.*convert it to 8 bits"):
        read_image(path)


@pytest.mark.parametrize(("high", "dark"), [(0xFFFF, False), (0x0FFF, True)])
def test_colours_of_sixteen_bits_are_bright_or_refused(tmp_path, high, dark):
    """Pillow cannot write such files, so this one is made by hand."""
    import struct
    import zlib

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    path = tmp_path / "x.png"
    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0" + struct.pack(">3H", high, high, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))
    if not dark:
        assert np.asarray(read_image(path))[0, 0].tolist() == [255, 255, 0]
        return
    with pytest.raises(CapslogError, match=r"almost black; convert it to 8 bits, or set data\.picture_bits=16"):
        read_image(path)
    assert np.asarray(read_image(path, bits=16))[0, 0].tolist() == [15, 15, 0]
    with pytest.raises(CapslogError, match=r"data\.picture_bits=12 cannot be taken"):
        read_image(path, bits=12)


def test_the_limit_of_pixels_is_a_key(tmp_path, monkeypatch):
    path = saved(tmp_path, np.zeros((10, 10, 3), dtype=np.uint8))
    with pytest.raises(CapslogError, match=r"10x10 pixels, more than data\.max_pixels=99; raise"):
        read_image(path, max_pixels=99)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60)  # Pillow warns from here on, and refuses twice as many
    assert read_image(path).size == (10, 10)
