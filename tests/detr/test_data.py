"""The data source: described without decoding, the same in every process, and clear errors for bad pictures."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from detr_pipeline import data
from detr_pipeline.coco_task import example_target
from detr_pipeline.data import (
    DATA_VARIABLE,
    CocoSource,
    DataConfig,
    class_names,
    image_sizes,
    largest_padded_size,
    open_index,
    prepare_image,
    sampled_padded_sizes,
)
from detr_pipeline.digits import DIGIT_NAMES, DigitsConfig, picture_sizes
from detr_pipeline.transforms import AugmentConfig
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import section
from varuna_capslog.model.workload import known_targets

SMALL = {"scales": (24, 32), "max_size": 60, "crop_resize": (30, 36), "crop_size": (20, 36), "val_scale": 32}
SHAPES = [(40, 30), (30, 44), (36, 36), (50, 25), (33, 41)]


@pytest.fixture
def folder(tmp_path):
    """Write five pictures with 1, 2, 0, 3 and 1 boxes of two classes with gapped ids."""
    rng = np.random.default_rng(0)
    images, annotations = [], []
    (tmp_path / "train").mkdir()
    for number, (width, height) in enumerate(SHAPES):
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "train" / f"{number}.png")
        images.append({"id": 10 + number, "file_name": f"{number}.png", "width": width, "height": height})
        for _ in range((1, 2, 0, 3, 1)[number]):
            x, y = rng.uniform(0, width - 12), rng.uniform(0, height - 12)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": 10 + number,
                    "category_id": int(rng.choice([3, 5])),
                    "bbox": [x, y, rng.uniform(6, 12), rng.uniform(6, 12)],
                }
            )
    document = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 5, "name": "bee"}, {"id": 3, "name": "ant"}],
    }
    (tmp_path / "train.json").write_text(json.dumps(document))
    return tmp_path


def config_of(folder, **changes):
    values = {
        "root": folder,
        "train_json": "train.json",
        "train_images": "train",
        "val_json": "train.json",
        "val_images": "train",
        "augment": SMALL,
    }
    return DataConfig(**{**values, **changes})


@pytest.fixture
def digits_root(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))
    return {"digits": {"train_images": 20, "val_images": 10}}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_loaded_tensors_are_what_the_description_says(folder):
    source = CocoSource(config_of(folder), "train", 0, 10)
    minibatch = source.minibatch([[0, 1], [3], [2, 4]], epoch=2)
    for microbatch, specs in enumerate(minibatch.inputs):
        loaded = source.load(minibatch, microbatch)
        assert set(loaded) == set(specs)
        for name, spec in specs.items():
            assert tuple(loaded[name].shape) == spec.shape
            assert loaded[name].dtype == spec.dtype
        for image, (height, width) in zip(loaded["images"], loaded["sizes"].tolist(), strict=True):
            assert image[:, :height, :width].abs().mean() > 0.1
            assert not image[:, height:].any()
            assert not image[:, :, width:].any()
    assert minibatch.sample_ids == [
        ["0.png (image id 10)", "1.png (image id 11)"],
        ["3.png (image id 13)"],
        ["2.png (image id 12)", "4.png (image id 14)"],
    ]


def test_padding_covers_the_minibatch_or_the_microbatch(folder):
    groups = [[0], [1, 3], [4]]
    for pad in ("minibatch", "microbatch"):
        source = CocoSource(config_of(folder, pad=pad), "train", 0, 10)
        minibatch = source.minibatch(groups, 0)
        valid = [source.load(minibatch, m)["sizes"] for m in range(3)]
        shapes = [spec["images"].shape[2:] for spec in minibatch.inputs]
        if pad == "minibatch":
            assert set(shapes) == {tuple(torch.cat(valid).max(0).values.tolist())}
        else:
            assert shapes == [tuple(sizes.max(0).values.tolist()) for sizes in valid]


def test_normalisers_count_what_a_matching_can_use(folder):
    source = CocoSource(config_of(folder), "val", 0, num_queries=2)
    assert source.minibatch([[0, 1], [2, 3]], 0).normalisers == {"boxes": 1 + 2 + 0 + 2, "queries": 8}
    assert source.minibatch([[2]], 0).normalisers == {"boxes": 0, "queries": 2}


def test_targets_stay_on_the_host_where_boxes_are_matched(folder):
    """A profile's targets stay there, too; on a GPU they would be read back image by image."""
    targets = CocoSource(config_of(folder), "val", 0, 10).minibatch([[0, 1]], 0).targets[0]
    for target in (*targets, example_target(3, 5)):
        assert known_targets([target], torch.device("meta"))[0] is target


def test_describing_opens_no_picture(folder, monkeypatch):
    monkeypatch.setattr(data, "read_image", lambda *_: pytest.fail("a picture was opened"))
    source = CocoSource(config_of(folder), "train", 0, 10)
    source.minibatch([[0, 1], [2]], 0)
    largest_padded_size(config_of(folder), 2, 4)
    class_names(config_of(folder))


def test_a_sample_depends_on_seed_epoch_and_index_alone(folder):
    """Neither the grouping, the order nor the process that opened the data changes a sample."""
    first = CocoSource(config_of(folder), "train", 5, 10)
    second = CocoSource(config_of(folder), "train", 5, 10)
    apart = first.minibatch([[0], [1], [3], [4]], 1)
    together = second.minibatch([[4, 3], [1, 0]], 1)
    flat = [sample for group in together.targets for sample in group][::-1]
    reversed_images = torch.cat([second.load(together, 0)["images"], second.load(together, 1)["images"]]).flip(0)
    for position in range(4):
        target = apart.targets[position][0]
        for name in ("labels", "boxes", "orig_size"):
            assert torch.equal(target[name], flat[position][name])
        assert torch.equal(first.load(apart, position)["images"][0], reversed_images[position])
    others = [
        CocoSource(config_of(folder), "train", seed, 10).minibatch([[0], [1], [3], [4]], epoch)
        for seed, epoch in ((6, 1), (5, 2))
    ]
    for minibatch in others:
        assert [t[0]["boxes"].tolist() for t in minibatch.targets] != [t[0]["boxes"].tolist() for t in apart.targets]


def test_samples_of_one_epoch_are_augmented_differently(tmp_path):
    """Twenty equal pictures do not all get the same flip, size and crop."""
    images = [{"id": i, "file_name": "same.png", "width": 40, "height": 30} for i in range(20)]
    (tmp_path / "same.json").write_text(json.dumps({"images": images, "annotations": [], "categories": [{"id": 1}]}))
    (tmp_path / "train").mkdir()
    source = CocoSource(
        DataConfig(root=tmp_path, train_json="same.json", train_images="train", augment=SMALL), "train", 0, 5
    )
    plans = [plan for _, plan in source.minibatch([list(range(20))], 0).recipes[0]]
    assert len({(plan.flip, plan.resize, plan.crop, plan.size) for plan in plans}) > 5


def test_labels_stay_with_their_boxes_when_a_crop_loses_some(tmp_path):
    """Each class sits in its own corner, so that a label tells which box it must come with."""
    corners = {1: [0, 0, 4, 4], 2: [36, 0, 4, 4], 3: [0, 36, 4, 4], 4: [36, 36, 4, 4], 5: [18, 18, 4, 4]}
    document = {
        "images": [{"id": 1, "file_name": "x.png", "width": 40, "height": 40}],
        "categories": [{"id": id_} for id_ in corners],
        "annotations": [{"id": id_, "image_id": 1, "category_id": id_, "bbox": box} for id_, box in corners.items()],
    }
    (tmp_path / "x.json").write_text(json.dumps(document))
    (tmp_path / "train").mkdir()
    augment = {"crop": 1.0, "flip": 0.0, "scales": [40], "crop_resize": [40], "crop_size": [26, 30]}
    source = CocoSource(
        DataConfig(root=tmp_path, train_json="x.json", train_images="train", augment=augment), "train", 0, 5
    )
    lost = 0
    for epoch in range(30):
        minibatch = source.minibatch([[0]], epoch)
        target = minibatch.targets[0][0]
        assert len(target["labels"]) == len(target["boxes"])
        lost += 5 - len(target["labels"])
        crop_top, crop_left, height, width = minibatch.recipes[0][0][1].crop
        for label, (cx, cy, _, _) in zip(target["labels"].tolist(), target["boxes"].tolist(), strict=True):
            x, y, w, h = corners[label + 1]
            assert x - 1e-4 <= crop_left + cx * width <= x + w + 1e-4
            assert y - 1e-4 <= crop_top + cy * height <= y + h + 1e-4
    assert lost > 30


def test_classes_are_those_of_the_training_file(folder):
    """A validation file that lacks a class once shifted the numbers of all classes after it."""
    document = json.loads((folder / "train.json").read_text())
    document["categories"] = [{"id": 5, "name": "bee"}]
    document["annotations"] = [row for row in document["annotations"] if row["category_id"] == 5]
    (folder / "val.json").write_text(json.dumps(document))
    source = CocoSource(config_of(folder, val_json="val.json"), "val", 0, 10)
    labels = torch.cat([target["labels"] for target in source.minibatch([[0, 1, 2, 3, 4]], 0).targets[0]])
    assert len(labels)
    assert set(labels.tolist()) == {1}
    with pytest.raises(CapslogError, match=r"category 3 \(ant\), which the training file val\.json does not"):
        CocoSource(config_of(folder, train_json="val.json"), "val", 0, 10)


def test_an_id_that_means_another_category_in_validation_is_refused(folder):
    """A perfect detector scored 0.006 on a file that numbers the same names in another order."""
    document = json.loads((folder / "train.json").read_text())
    swapped = [{"id": 5, "name": "ant"}, {"id": 3, "name": "bee"}]
    (folder / "val.json").write_text(json.dumps({**document, "categories": swapped}))
    with pytest.raises(CapslogError, match=r"category 3 is 'ant' in .*train\.json and 'bee' in .*val\.json.*same ids"):
        CocoSource(config_of(folder, val_json="val.json"), "val", 0, 10)
    for same in ([{"id": 5, "name": "Bee "}, {"id": 3, "name": "ANT"}], [{"id": 5}, {"id": 3}]):
        (folder / "val.json").write_text(json.dumps({**document, "categories": same}))
        CocoSource(config_of(folder, val_json="val.json"), "val", 0, 10)


def test_boxes_of_validation_are_fractions_of_the_image(folder):
    source = CocoSource(config_of(folder), "val", 0, 10)
    target = source.minibatch([[3]], 0).targets[0][0]
    index = open_index(config_of(folder), "val")
    corners, labels = index.targets(3)
    width, height = SHAPES[3]
    assert target["orig_size"].tolist() == [height, width]
    assert target["image_id"] == 13
    centre, span = target["boxes"][:, :2].double().numpy(), target["boxes"][:, 2:].double().numpy()
    restored = np.concatenate([centre - span / 2, centre + span / 2], axis=1) * [width, height, width, height]
    assert np.allclose(restored, corners, atol=1e-4)
    assert target["labels"].tolist() == labels.tolist()


def test_a_category_id_of_a_billion_is_no_class_of_the_model(folder, tmp_path):
    """190 bytes of JSON with labels=original became a billion names."""
    document = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 8, "height": 8}],
        "categories": [{"id": 10**9, "name": "a"}],
        "annotations": [],
    }
    (tmp_path / "a.json").write_text(json.dumps(document))
    config = config_of(folder, labels="original", train_json=tmp_path / "a.json", val_json=None)
    with pytest.raises(CapslogError, match=r"ids from 0 to 99999, .* has 1000000000; set data\.labels=contiguous"):
        class_names(config)
    assert class_names(config.model_copy(update={"labels": "contiguous"})) == ((10**9,), ("a",))


def test_original_labels_leave_the_gaps(folder):
    config = config_of(folder, labels="original")
    assert class_names(config)[0] == (0, 1, 2, 3, 4, 5)
    assert class_names(config)[1] == ("unused 0", "unused 1", "unused 2", "ant", "unused 4", "bee")
    contiguous = CocoSource(config_of(folder), "val", 0, 10).minibatch([[3]], 0).targets[0][0]["labels"]
    original = CocoSource(config, "val", 0, 10).minibatch([[3]], 0).targets[0][0]["labels"]
    assert class_names(config_of(folder)) == ((3, 5), ("ant", "bee"))
    assert original.tolist() == [(3, 5)[label] for label in contiguous.tolist()]


def test_largest_size_bounds_every_minibatch(folder):
    config = config_of(folder)
    source = CocoSource(config, "train", 0, 10)
    bound = largest_padded_size(config, 1, 5)
    shapes = [source.minibatch([[0, 1], [2, 3], [4]], epoch).inputs[0]["images"].shape[2:] for epoch in range(300)]
    assert all(h <= bound[0] and w <= bound[1] for h, w in shapes)
    assert max(h for h, _ in shapes) >= bound[0] - 1
    alone = largest_padded_size(config, 1, 1)
    areas = [np.prod(source.minibatch([[s]], e).inputs[0]["images"].shape) / 3 for s in range(5) for e in range(300)]
    assert alone[0] * alone[1] >= max(areas)
    separately = largest_padded_size(config_of(folder, pad="microbatch"), 1, 5)
    assert separately == alone


def test_largest_size_of_as_many_images_as_coco(tmp_path):
    rng = np.random.default_rng(0)
    sizes = rng.integers(300, 641, (118_000, 2)).tolist()
    images = [{"id": i, "file_name": f"{i}.jpg", "width": w, "height": h} for i, (w, h) in enumerate(sizes)]
    (tmp_path / "big.json").write_text(json.dumps({"images": images, "annotations": [], "categories": [{"id": 1}]}))
    config = DataConfig(root=tmp_path, train_json="big.json", train_images="train")
    (tmp_path / "train").mkdir()
    assert largest_padded_size(config, 1, 8) == (1334, 1334)


# Paths


def test_relative_paths_start_from_root_then_from_the_variable(folder, monkeypatch, tmp_path):
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    with pytest.raises(CapslogError, match=r"data\.train_json=train\.json is relative.*CAPSLOG_DATA"):
        config_of(folder, root=None).files("train")
    monkeypatch.setenv(DATA_VARIABLE, str(folder.parent))
    assert config_of(folder, root=folder.name).files("train") == (folder / "train.json", folder / "train")
    monkeypatch.setenv(DATA_VARIABLE, str(folder))
    assert config_of(folder, root=None).files("train") == (folder / "train.json", folder / "train")
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv(DATA_VARIABLE, "/nowhere")
    assert open_index(config_of(folder, root=Path(folder.name)), "train").path.samefile(folder / "train.json")
    absolute = config_of(folder, root="/nowhere", train_json=folder / "train.json", train_images=folder / "train")
    assert absolute.files("train") == (folder / "train.json", folder / "train")


def test_missing_files_are_named_with_the_key(folder):
    with pytest.raises(CapslogError, match=r"data\.train_images=pictures was looked for at .*pictures"):
        CocoSource(config_of(folder, train_images="pictures"), "train", 0, 10)
    with pytest.raises(CapslogError, match=r"data\.train_json=no\.json"):
        open_index(config_of(folder, train_json="no.json"), "train")


def test_no_validation_data_is_an_answer(folder):
    config = config_of(folder, val_json=None, val_images=None)
    assert config.has_split("train")
    assert not config.has_split("val")
    with pytest.raises(CapslogError, match=r"data\.val_json is not set"):
        CocoSource(config, "val", 0, 10)


def test_half_a_split_and_unknown_keys_are_refused():
    with pytest.raises(CapslogError, match=r"data\.train_images is not"):
        section(DataConfig, {"train_json": "a"}, "data")
    with pytest.raises(CapslogError, match=r"did you mean data\.augment\.flip"):
        section(DataConfig, {"augment": {"flp": 1}}, "data")


def test_the_digits_are_the_default_and_their_sizes_small(digits_root):
    config = section(DataConfig, digits_root, "data")
    assert config.uses_digits
    assert config.augment.flip == 0
    assert class_names(config) == (tuple(range(1, 11)), DIGIT_NAMES)
    bound = largest_padded_size(config, 1, 8)
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).glob("varuna-capslog/digits-*"))
    source = CocoSource(config, "train", 0, 10)
    assert len(source) == 20
    height, width = source.load(source.minibatch([[0, 1, 2]], 0), 0)["images"].shape[2:]
    assert (height, width) <= bound
    assert len(CocoSource(config, "val", 0, 10)) == 10


def test_the_resolved_config_reads_back_equal_and_keys_given_win(digits_root):
    config = section(DataConfig, {**digits_root, "augment": {"scales": [50]}}, "data")
    assert config.augment.scales == (50,)
    assert config.augment.val_scale == 72
    assert section(DataConfig, config.model_dump(mode="json"), "data") == config


# Pictures


def test_a_truncated_picture_is_named_with_its_id(folder):
    path = folder / "train/1.png"
    path.write_bytes(path.read_bytes()[:600])
    source = CocoSource(config_of(folder), "train", 0, 10)
    minibatch = source.minibatch([[0, 1]], 0)
    with pytest.raises(CapslogError, match=r"train/1\.png \(image id 11\) cannot be decoded"):
        source.load(minibatch, 0)


@pytest.mark.parametrize("content", [b"", b"not a picture", b"\x89PNG\r\n\x1a\n"])
def test_a_file_that_is_no_picture_is_named(folder, content):
    (folder / "train/0.png").write_bytes(content)
    source = CocoSource(config_of(folder), "train", 0, 10)
    with pytest.raises(CapslogError, match=r"0\.png \(image id 10\) cannot be decoded"):
        source.load(source.minibatch([[0]], 0), 0)


def test_a_missing_picture_is_named(folder):
    (folder / "train/0.png").unlink()
    source = CocoSource(config_of(folder), "train", 0, 10)
    with pytest.raises(CapslogError, match=r"0\.png \(image id 10\) is missing"):
        source.load(source.minibatch([[0]], 0), 0)


def test_another_size_than_the_annotation_file_says_is_refused(folder):
    Image.new("RGB", (30, 40)).save(folder / "train/0.png")
    source = CocoSource(config_of(folder), "train", 0, 10)
    with pytest.raises(CapslogError, match=r"0\.png \(image id 10\) is 30x40 .* says 40x30"):
        source.load(source.minibatch([[0]], 0), 0)


def test_the_exif_orientation_is_applied(folder):
    """A picture stored lying on its side is turned upright before its size is compared and its boxes are used."""
    upright = np.zeros((30, 40, 3), dtype=np.uint8)
    upright[:15] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn by 90 degrees clockwise to show"
    Image.fromarray(np.rot90(upright)).save(folder / "train/0.png", exif=exif)
    source = CocoSource(config_of(folder), "val", 0, 10)
    image = source.load(source.minibatch([[0]], 0), 0)["images"][0]
    assert image[:, :10].min() > 1
    assert image[:, -10:].max() < -1


def test_a_foreign_picture_is_prepared_as_in_validation(folder):
    inputs, image = prepare_image(folder / "train/0.png", config_of(folder))
    source = CocoSource(config_of(folder), "val", 0, 10)
    assert equal(inputs, source.load(source.minibatch([[0]], 0), 0))
    assert image.size == SHAPES[0]


# Real photographs


def test_photographs_of_blood_cells():
    base = os.environ.get(DATA_VARIABLE)
    if not base or not (Path(base) / "bccd").is_dir():
        pytest.skip(f"{DATA_VARIABLE} names no folder with the bccd photographs")
    config = DataConfig(
        root=Path(base) / "bccd",
        train_json="annotations/instances_train.json",
        train_images="train",
        val_json="annotations/instances_val.json",
        val_images="val",
        strict=True,
        augment={"scales": (96, 120), "max_size": 160, "crop_resize": (110,), "crop_size": (80, 110), "val_scale": 120},
    )
    train, val = CocoSource(config, "train", 0, 100), CocoSource(config, "val", 0, 100)
    assert (len(train), len(val)) == (205, 44)
    assert sum(len(train.index.targets(image)[1]) for image in range(205)) == 2804
    assert class_names(config) == ((1, 2, 3), ("RBC", "WBC", "Platelets"))
    for source in (train, val):
        minibatch = source.minibatch([[0, 1], [2, 3]], 0)
        for microbatch in (0, 1):
            images = source.load(minibatch, microbatch)["images"]
            assert images.isfinite().all()
            assert images.std() > 0.1


SMALL_DIGITS = DigitsConfig(train_images=24, val_images=6)


def bccd() -> DataConfig:
    """Return the config of the blood cell pictures with a small augmentation, or skip without the outside data."""
    root = os.environ.get(DATA_VARIABLE)
    if not root or not (Path(root) / "bccd").is_dir():
        pytest.skip(f"set {DATA_VARIABLE} to a folder that holds bccd")
    augment = AugmentConfig(
        scales=(96, 112, 128), max_size=180, crop_resize=(90, 100, 110), crop_size=(60, 110), val_scale=112
    )
    folder = Path(root) / "bccd"
    return DataConfig(root=folder, train_json="annotations/instances_train.json", train_images="train", augment=augment)


def digits(tmp_path: Path) -> DataConfig:
    return DataConfig(root=tmp_path, digits=SMALL_DIGITS)


def opened(config: DataConfig, groups, epoch, seed=0):
    """Return (H, W) of the first microbatch, from pictures that are really opened, transformed and padded; the
    reference.
    """
    source = CocoSource(config, "train", seed, 10)
    minibatch = source.minibatch(groups, epoch)
    return tuple(source.load(minibatch, 0)["images"].shape[2:])


@pytest.mark.parametrize("pad", ["minibatch", "microbatch"])
@pytest.mark.parametrize("data", ["digits", "bccd"])
def test_sampled_sizes_are_those_of_transformed_pictures(data, pad, tmp_path):
    config = (bccd() if data == "bccd" else digits(tmp_path)).model_copy(update={"pad": pad})
    seed, microbatch, minibatch = 3, 2, 4
    sizes = sampled_padded_sizes(config, microbatch, minibatch, count=5, seed=seed)
    rng = np.random.default_rng(seed)
    together = minibatch if pad == "minibatch" else microbatch
    total = len(image_sizes(config, "train")[0])
    for epoch, size in enumerate(sizes):
        samples = rng.choice(total, together, replace=False).tolist()
        groups = [samples[at : at + microbatch] for at in range(0, together, microbatch)]
        assert size == opened(config, groups, epoch, seed)
    assert sizes == sampled_padded_sizes(config, microbatch, minibatch, count=5, seed=seed)
    assert sizes != sampled_padded_sizes(config, microbatch, minibatch, count=5, seed=4)
    largest = largest_padded_size(config, microbatch, minibatch)
    assert all(h <= largest[0] and w <= largest[1] for h, w in sizes)


def test_sizes_of_the_digits_need_no_file(tmp_path, monkeypatch):
    config = digits(tmp_path)
    heights, widths = image_sizes(config, "train")
    assert list(tmp_path.iterdir()) == []
    assert picture_sizes(SMALL_DIGITS, train=False).shape == (6, 2)
    for split, expected in (("train", (heights, widths)), ("val", picture_sizes(SMALL_DIGITS, train=False).T)):
        index = open_index(config, split)  # writes the sizes
        assert np.array_equal(index.heights, expected[0])
        assert np.array_equal(index.widths, expected[1])
