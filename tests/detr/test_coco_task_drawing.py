"""Drawn pictures: the right boxes in the right colours, and no picture lost to an extreme prediction."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor

from detr_pipeline.coco_task import _COLOURS, draw_detections, save_picture
from varuna_capslog.base.errors import CapslogError

NAMES = ("ant", "bee")


def has(picture, colour):
    return bool((np.asarray(picture) == np.array(ImageColor.getrgb(colour))).all(-1).any())


def grey(width=640, height=500):
    return Image.new("RGB", (width, height), (128, 128, 128))


def draw_one(picture, box):
    return draw_detections(picture, torch.ones(1), torch.tensor([0]), torch.tensor([box]), NAMES)


def test_only_boxes_above_the_threshold_are_drawn():
    boxes = torch.tensor([[10.0, 40, 100, 200], [300, 100, 500, 400]])
    picture = draw_detections(grey(), torch.tensor([0.9, 0.2]), torch.tensor([0, 1]), boxes, NAMES)
    assert has(picture, _COLOURS[0])
    assert not has(picture, _COLOURS[1])
    assert has(draw_detections(grey(), torch.tensor([0.9, 0.2]), torch.tensor([0, 1]), boxes, NAMES, 0.1), _COLOURS[1])


def test_the_line_is_where_the_box_is():
    picture = np.asarray(draw_one(grey(), [100.0, 200, 300, 400]))
    painted = (picture == np.array(ImageColor.getrgb(_COLOURS[0]))).all(-1)
    columns = np.flatnonzero(painted[250:350].any(0))
    assert columns.min() == pytest.approx(100, abs=2)
    assert columns.max() == pytest.approx(300, abs=2)
    assert not painted[250:350, 110:290].any()


def test_small_pictures_are_enlarged_with_their_boxes():
    picture = draw_one(grey(96, 64), [32.0, 16, 64, 48])
    assert picture.size == (720, 480)
    painted = (np.asarray(picture) == np.array(ImageColor.getrgb(_COLOURS[0]))).all(-1)
    columns = np.flatnonzero(painted[200:300].any(0))
    assert columns.min() == pytest.approx(240, abs=3)
    assert columns.max() == pytest.approx(480, abs=3)


def test_wild_boxes_do_not_stop_the_picture():
    boxes = torch.tensor([[500.0, 300, -50, 9000], [float("nan")] * 4, [5, 5, 5, 5]])
    assert draw_detections(grey(), torch.ones(3), torch.tensor([0, 1, 0]), boxes, NAMES).size == (640, 500)


def test_drawing_leaves_its_inputs_alone():
    image, boxes = grey(), torch.tensor([[10.0, 10, 900, 60]])
    draw_detections(image, torch.ones(1), torch.tensor([0]), boxes, NAMES)
    assert not has(image, _COLOURS[0])
    assert boxes.tolist() == [[10, 10, 900, 60]]


def test_saving_makes_the_folder_and_names_a_bad_suffix(tmp_path):
    for name in ("a/b.png", "a/b.jpg"):
        with Image.open(save_picture(grey(), tmp_path / name)) as file:
            assert file.size == (640, 500)
    with pytest.raises(CapslogError, match=r"b\.unknown cannot be written"):
        save_picture(grey(), tmp_path / "b.unknown")
