"""Annotation files: errors that are refused, errors that are repaired, and the parsed result."""

import json
import logging
import os

import numpy as np
import pytest

from detr_pipeline.coco import read_coco
from varuna_capslog.base.errors import CapslogError


def document(**changes):
    """Return two classes with gapped ids and three images, the last without a box."""
    base = {
        "images": [
            {"id": 7, "file_name": "a.jpg", "width": 40, "height": 20},
            {"id": 3, "file_name": "b.jpg", "width": 30, "height": 30},
            {"id": 9, "file_name": "c.jpg", "width": 10, "height": 10},
        ],
        "categories": [{"id": 18, "name": "dog"}, {"id": 2, "name": "cat"}],
        "annotations": [
            {"id": 5, "image_id": 3, "category_id": 18, "bbox": [1, 2, 3, 4]},
            {"id": 0, "image_id": 7, "category_id": 2, "bbox": [10, 5, 20, 10], "area": 77.5, "iscrowd": 0},
            {"id": 2, "image_id": 7, "category_id": 18, "bbox": [0, 0, 40, 20], "iscrowd": 1},
        ],
    }
    return {**base, **changes}


@pytest.fixture
def write(tmp_path):
    def writer(value):
        path = tmp_path / "instances.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    return writer


def with_annotation(**fields):
    rows = document()["annotations"]
    rows[1] = {**rows[1], **fields}
    return document(annotations=rows)


def test_classes_are_contiguous_inside_and_original_ids_stay_outside(write):
    index = read_coco(write(document()))
    assert index.category_ids == (2, 18)
    assert index.names == ("cat", "dog")
    boxes, labels = index.targets(1)
    assert labels.tolist() == [1]
    assert boxes.tolist() == [[1, 2, 4, 6]]
    assert {row["category_id"] for row in index.ground_truth()["annotations"]} == {2, 18}


def test_crowd_regions_are_not_learned_but_stay_in_the_ground_truth(write):
    index = read_coco(write(document()))
    assert index.targets(0)[0].tolist() == [[10, 5, 30, 15]]
    crowd = [row for row in index.ground_truth()["annotations"] if row["iscrowd"]]
    assert [row["image_id"] for row in crowd] == [7]


def test_an_image_without_boxes_stays(write):
    index = read_coco(write(document()))
    assert len(index) == 3
    assert [len(index.targets(image)[1]) for image in range(3)] == [1, 1, 0]
    boxes, labels = index.targets(2)
    assert boxes.shape == (0, 4)
    assert labels.shape == (0,)
    assert len(read_coco(write(document(annotations=[])))) == 3


def test_ground_truth_fills_missing_fields_and_numbers_from_one(write):
    truth = read_coco(write(document())).ground_truth()
    assert "info" in truth
    rows = truth["annotations"]
    assert sorted(row["id"] for row in rows) == [1, 2, 3]
    assert {(row["category_id"], row["iscrowd"], row["area"]) for row in rows} == {
        (2, 0, 77.5),
        (18, 1, 800.0),
        (18, 0, 12.0),
    }


def test_boxes_without_size_are_dropped_and_others_clamped_with_one_line(write, caplog):
    rows = [
        {"id": 1, "image_id": 7, "category_id": 2, "bbox": [1, 1, 2, 2]},
        {"id": 2, "image_id": 3, "category_id": 2, "bbox": [5, 5, 0, 4]},
        {"id": 3, "image_id": 7, "category_id": 2, "bbox": [30, -5, 20, 10]},
        {"id": 4, "image_id": 7, "category_id": 2, "bbox": [50, 5, 5, 5]},
        {"id": 5, "image_id": 7, "category_id": 2, "bbox": [5, 5, 5, -5]},
        {"id": 6, "image_id": 7, "category_id": 2, "bbox": [30, 10, 10.01, 10]},
    ]
    path = write(document(annotations=rows))
    with caplog.at_level(logging.WARNING):
        index = read_coco(path)
    assert index.targets(0)[0].tolist() == [[1, 1, 3, 3], [30, 0, 40, 5], [30, 10, 40, 20]]
    assert len(caplog.messages) == 1
    for part in (str(path), "3 boxes without size", "1 boxes over the border", "annotation id 2 of b.jpg"):
        assert part in caplog.messages[0]
    with pytest.raises(CapslogError, match=r"annotation id 2 of b\.jpg.*data\.strict"):
        read_coco(path, strict=True)


def test_a_sound_file_is_read_without_a_word_also_strictly(write, caplog):
    with caplog.at_level(logging.INFO):
        read_coco(write(document()), strict=True)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "top level"),
        ({"images": []}, "'images' is empty"),
        ({**document(), "annotations": None}, "'annotations' must be a list"),
        (with_annotation(bbox=[1, 2, float("nan"), 4]), r"annotation id 0 of a\.jpg has the non-finite bbox"),
        (with_annotation(bbox=[1, 2, float("inf"), 4]), r"annotation id 0 of a\.jpg has the non-finite bbox"),
        (with_annotation(bbox=[1, 2, 3]), "must be four numbers"),
        (with_annotation(bbox=[1, 2, None, 3]), "must be four numbers"),
        (with_annotation(image_id=4), r"annotation id 0 has image_id=4, which is not in 'images'"),
        (with_annotation(category_id=1), r"annotation id 0 has category_id=1, which is not in 'categories'"),
        (with_annotation(category_id="2"), r"annotations\[1\] has category_id='2'.*whole number"),
        (with_annotation(id=5), "duplicate id 5 in 'annotations'"),
        (with_annotation(iscrowd="1"), r"annotation id 0 of a\.jpg has iscrowd='1', which must be 0 or 1"),
        (with_annotation(iscrowd=2), r"iscrowd=2, which must be 0 or 1"),
        (document(images=[document()["images"][0]] * 2), "duplicate id 7 in 'images'"),
        (document(categories=[{"id": 2}, {"id": 2}]), "duplicate id 2 in 'categories'"),
        (document(images=[{"id": 1, "file_name": "x.jpg", "width": 3}]), "has no 'height'"),
        (document(images=[{"id": 1, "file_name": "x.jpg", "width": 3, "height": 0}]), r"x\.jpg has height=0"),
        (
            document(images=[{"id": 1, "file_name": "x.jpg", "width": 10**30, "height": 3}]),
            r"x\.jpg has width=10+, which",
        ),
        (
            document(images=[{"id": 1, "file_name": "x.jpg", "width": 3, "height": 2**63}]),
            r"x\.jpg has height=9223372036",
        ),
        (document(images=[{"id": 1, "file_name": "a\0b", "width": 3, "height": 3}]), "which must be a file name"),
        (document(images=[{"id": 1, "file_name": "\ud800", "width": 3, "height": 3}]), "which must be a file name"),
        (document(images=[{"id": 1, "file_name": [["x"]], "width": 3, "height": 3}]), "which must be a file name"),
        (
            document(categories=[{"id": 2, "name": "\ud800"}, {"id": 18}]),
            "category 2 has name='.ud800', which must be text",
        ),
        (document(categories=[{"id": 2, "name": {"a": 1}}, {"id": 18}]), "category 2 has name={'a': 1}, which must be"),
        (with_annotation(area=10**400), r"annotation id 0 of a\.jpg has an area beyond what a number can be"),
        (with_annotation(bbox=[1, 2, 10**400, 4]), r"annotation id 0 of a\.jpg has a bbox beyond what a number can be"),
        ('{"images": ' + "9" * 5000 + "}", "not valid JSON: Exceeds the limit"),
        ('{"images": ' + "[" * 5000, "not valid JSON"),
    ],
)
def test_refused(write, value, message):
    path = write(value)
    with pytest.raises(CapslogError, match=message) as caught:
        read_coco(path)
    assert str(path) in str(caught.value)


def test_boxes_of_any_size_are_clamped_without_a_warning(write, recwarn):
    index = read_coco(write(with_annotation(bbox=[1e308, 2, 1e308, 3])))
    assert len(index.boxes) == 2, "it lies outside"
    index = read_coco(write(with_annotation(bbox=[-(10**300), 2, 2 * 10**300, 3])))
    assert index.boxes.tolist() == [[0, 2, 40, 5], [0, 0, 40, 20], [1, 2, 4, 6]]
    assert not recwarn.list


def test_boxes_as_fractions_are_refused(write):
    """Fractions were learned as boxes of half a pixel."""
    rows = document()["annotations"]
    fractions = [{**row, "bbox": [0.25, 0.5, 0.5, 0.5]} for row in rows]
    with pytest.raises(CapslogError, match=r"all 3 boxes lie between 0 and 1, in images of up to 40x30.*multiply"):
        read_coco(write(document(annotations=fractions)))
    fractions[0]["bbox"] = [0.25, 0.5, 3, 0.5]
    assert len(read_coco(write(document(annotations=fractions))).boxes) == 3
    small = [{**row, "width": 4, "height": 4} for row in document()["images"]]
    unit_boxes = [{**row, "bbox": [0, 0, 1, 1]} for row in rows]
    assert len(read_coco(write(document(images=small, annotations=unit_boxes))).boxes) == 3


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CapslogError, match=r"nowhere\.json cannot be read .*data\.root"):
        read_coco(tmp_path / "nowhere.json")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(CapslogError, match=r"annotation file .*pipe\.json is a pipe"):
        read_coco(tmp_path / "pipe.json")


def test_a_changed_file_is_read_again(write):
    assert len(read_coco(write(document())).names) == 2
    assert read_coco(write(document(categories=[*document()["categories"], {"id": 1}]))).names == ("1", "cat", "dog")


def test_boxes_are_grouped_by_image_whatever_the_order_in_the_file(write):
    rng = np.random.default_rng(0)
    owners = rng.choice([7, 3, 9], size=60).tolist()
    rows = [
        {"id": 100 + i, "image_id": owner, "category_id": 2, "bbox": [0, 0, 1 + i / 10, 1]}
        for i, owner in enumerate(owners)
    ]
    index = read_coco(write(document(annotations=rows)))
    for position, image_id in enumerate(index.image_ids):
        expected = [1 + i / 10 for i, owner in enumerate(owners) if owner == image_id]
        assert index.targets(position)[0][:, 2].tolist() == pytest.approx(expected)
