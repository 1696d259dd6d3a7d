"""Checks of a data set before its run: nothing to learn, conflicting boxes, missing pictures."""

import json

import numpy as np
import pytest
from PIL import Image

from detr_pipeline import coco_task, workload
from detr_pipeline.data import DataConfig
from varuna_capslog.base.errors import CapslogError, settle
from varuna_capslog.config.settings import Config


def image(number, **changes):
    return {"id": number, "file_name": f"{number}.png", "width": 16, "height": 12, **changes}


def box(number, picture, **changes):
    return {"id": number, "image_id": picture, "category_id": 1, "bbox": [2, 2, 5, 5], **changes}


def check_split(config, split):
    """Return the notes, or raise the first error."""
    return settle(coco_task.check_split(config, split))


@pytest.fixture
def data(tmp_path):
    """Write a data set of three pictures; changes replace lists of its annotation file."""
    (tmp_path / "img").mkdir()
    for number in range(3):
        Image.new("RGB", (16, 12), "white").save(tmp_path / "img" / f"{number}.png")

    def written(**changes):
        document = {
            "images": [image(number) for number in range(3)],
            "annotations": [box(number, number) for number in range(3)],
            "categories": [{"id": 1, "name": "ant"}],
        }
        (tmp_path / "a.json").write_text(json.dumps({**document, **changes}))
        return DataConfig(root=tmp_path, train_json="a.json", train_images="img", val_json="a.json", val_images="img")

    return written


def test_a_sound_set_is_silent(data):
    assert check_split(data(), "train") == check_split(data(), "val") == []


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "it has none that has a size"),
        ([box(1, 1, bbox=[2, 2, 0, 5])], "it has none that has a size"),
        ([box(1, 1, iscrowd=1)], "all 1 stand for crowds"),
    ],
)
def test_nothing_to_learn_is_refused_and_nothing_to_find_is_said(data, rows, why):
    with pytest.raises(CapslogError, match=rf"a\.json has no box to learn from \({why}\)"):
        check_split(data(annotations=rows), "train")
    assert f"no box to find ({why})" in check_split(data(annotations=rows), "val")[0]


def test_one_file_with_several_lists_of_boxes_is_refused(data):
    images = [image(0), image(1, file_name="0.png"), image(2)]
    with pytest.raises(CapslogError, match=r"2 images with the ids 0, 1 have one file, 0\.png, but different boxes"):
        check_split(data(images=images, annotations=[box(1, 0), box(2, 1, bbox=[1, 1, 3, 3])]), "train")
    (note,) = check_split(data(images=images), "train")
    assert "1 files belong to several images each, with equal boxes, such as 0.png" in note


def test_missing_pictures_are_counted(data, tmp_path):
    (tmp_path / "img" / "sub").mkdir()
    (tmp_path / "img" / "1.png").rename(tmp_path / "img" / "sub" / "1.png")
    with pytest.raises(CapslogError, match=r"1 of the 3 pictures .* the first is 1\.png \(image id 1\).*train_images"):
        check_split(data(), "train")
    images = [image(0), image(1, file_name="sub/1.png"), image(2, file_name="sub/../2.png")]
    assert check_split(data(images=images), "train") == []
    with pytest.raises(CapslogError, match=r"3 of the 3 pictures"):
        check_split(data(images=[image(number, file_name=f"..\\{number}.png") for number in range(3)]), "val")


def test_pictures_too_large_or_of_another_size_are_found(data):
    with pytest.raises(CapslogError, match=r"3 pictures have more than data\.max_pixels=100 .*largest is 0\.png"):
        check_split(data().model_copy(update={"max_pixels": 100}), "train")
    with pytest.raises(CapslogError, match=r"1\.png \(image id 1\) is 16x12 pixels .* says 12x16"):
        check_split(data(images=[image(0), image(1, width=12, height=16), image(2)]), "train")


@pytest.mark.parametrize(("orientation", "size", "said"), [(1, 16, 0), (3, 16, 1), (6, 12, 1)])
def test_an_orientation_that_no_size_shows_is_said(data, tmp_path, orientation, size, said):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (size, 12)).save(tmp_path / "img" / "1.png", exif=exif)
    lines = check_split(data(images=[image(0), image(1, width=size), image(2)]), "train")
    assert len(lines) == said
    assert all("of 3 pictures looked at, 1 have an EXIF orientation" in line and "1.png" in line for line in lines)


def test_everything_is_found_and_not_the_first_alone(data, tmp_path, monkeypatch):
    """A user mended a file name, waited, and was then told of the next error; now one call reports all, and how many
    pictures it read.
    """
    (tmp_path / "img" / "0.png").write_bytes(b"no picture")
    (tmp_path / "img" / "2.png").unlink()
    config = data(images=[image(0), image(1, width=12), image(2)], annotations=[box(1, 1, iscrowd=1)])
    findings = list(coco_task.check_split(config, "train"))
    assert [finding.kind for finding in findings] == ["stops", "stops", "stops"]
    assert "no box to learn from" in findings[0].text
    assert "1 of the 3 pictures" in findings[1].text
    assert "of 2 pictures looked at, 2 cannot be used; the first: image" in findings[2].text
    Image.new("RGB", (16, 12)).save(tmp_path / "img" / "0.png")
    Image.new("RGB", (16, 12)).save(tmp_path / "img" / "2.png")
    monkeypatch.setattr(coco_task, "_SAMPLE", 2)
    facts = [finding.text.partition(": ")[2] for finding in coco_task.check_split(data(), "train")]
    assert facts == ["all 3 pictures are there", "the headers of 2 of 3 pictures were read"]


def test_pixels_of_an_unknown_range_are_found(data, tmp_path):
    Image.fromarray(np.full((12, 16), 4000, dtype=np.uint16)).save(tmp_path / "img" / "2.png")
    with pytest.raises(CapslogError, match=r"2\.png \(image id 2\) holds 16 bits, but no value over 4000"):
        check_split(data(), "train")
    assert check_split(data().model_copy(update={"picture_bits": 12}), "train") == []


def test_a_workload_checks_both_files_and_knows_the_facts(data, tmp_path):
    section = data().model_dump(mode="json", exclude_defaults=True)
    config = Config(workload="detr_pipeline:workload", model={}, data=section, run_dir=tmp_path / "run")
    task = workload(config)
    assert settle(task.check()) == []
    facts = task.data_facts()
    assert facts.pop("digest of the file names")
    assert facts == {"number of samples": 3, "category 1": "ant"}
    (tmp_path / "v.json").write_text((tmp_path / "a.json").read_text().replace("ant", "bee"))
    config.data["val_json"] = "v.json"
    with pytest.raises(CapslogError, match=r"category 1 is 'ant' in .*a\.json and 'bee' in .*v\.json"):
        settle(workload(config).check())
