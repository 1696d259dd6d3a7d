"""Padded sizes from annotations alone: what they say must be what really transformed pictures have."""

from __future__ import annotations

import os
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detr_pipeline.data import (
    DATA_VARIABLE,
    CocoSource,
    DataConfig,
    image_sizes,
    largest_padded_size,
    open_index,
    sampled_padded_sizes,
)
from detr_pipeline.digits import DigitsConfig, picture_sizes
from detr_pipeline.task import DetrWorkload
from detr_pipeline.transforms import AugmentConfig, largest_size, resized_size
from varuna_capslog.config.reading import Config, section

SMALL_DIGITS = DigitsConfig(train_images=24, val_images=6)


def bccd() -> DataConfig:
    """The blood cell pictures with a small augmentation, where the outside data is."""
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
    """The oracle: pictures that were really opened, transformed and padded; (H, W) of the first microbatch."""
    source = CocoSource(config, "train", seed, 10)
    minibatch = source.minibatch(groups, epoch)
    return tuple(source.load(minibatch, 0)["images"].shape[2:])


@pytest.mark.parametrize("pad", ["minibatch", "microbatch"])
@pytest.mark.parametrize("data", ["digits", "bccd"])
def test_sampled_sizes_are_those_of_transformed_pictures(data, pad, tmp_path):
    config = (bccd() if data == "bccd" else digits(tmp_path)).model_copy(update={"pad": pad})
    seed, microbatch, minibatch = 3, 2, 4
    found = sampled_padded_sizes(config, "train", microbatch, minibatch, count=5, seed=seed)
    rng = np.random.default_rng(seed)
    together = minibatch if pad == "minibatch" else microbatch
    total = len(image_sizes(config, "train")[0])
    for epoch, size in enumerate(found):
        samples = rng.choice(total, together, replace=False).tolist()
        groups = [samples[at : at + microbatch] for at in range(0, together, microbatch)]
        assert size == opened(config, groups, epoch, seed)
    assert found == sampled_padded_sizes(config, "train", microbatch, minibatch, count=5, seed=seed)
    assert found != sampled_padded_sizes(config, "train", microbatch, minibatch, count=5, seed=4)
    largest = largest_padded_size(config, "train", microbatch, minibatch)
    assert all(h <= largest[0] and w <= largest[1] for h, w in found)


def test_sizes_of_the_digits_need_no_file(tmp_path, monkeypatch):
    config = digits(tmp_path)
    heights, widths = image_sizes(config, "train")
    assert list(tmp_path.iterdir()) == []
    assert picture_sizes(SMALL_DIGITS, train=False).shape == (6, 2)
    for split, expected in (("train", (heights, widths)), ("val", picture_sizes(SMALL_DIGITS, train=False).T)):
        index = open_index(config, split)  # writes them
        assert np.array_equal(index.heights, expected[0])
        assert np.array_equal(index.widths, expected[1])


def every_size(height, width, config):
    """All final sizes of one image, by trying every draw."""
    sizes = (
        {resized_size(height, width, scale, config.max_size) for scale in config.scales} if config.crop < 1 else set()
    )
    if config.crop > 0:
        for before in config.crop_resize:
            h, w = resized_size(height, width, before, None)
            low, high = config.crop_size
            for crop in product(range(min(low, h), min(high, h) + 1), range(min(low, w), min(high, w) + 1)):
                sizes |= {resized_size(*crop, scale, config.max_size) for scale in config.scales}
    return sizes


pictures = st.lists(st.tuples(st.integers(3, 60), st.integers(3, 60)), min_size=2, max_size=3)


@settings(max_examples=60, deadline=None)
@given(pictures, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([None, 20, 44]), st.sampled_from([6, 16, 21]))
def test_the_largest_size_is_the_exact_maximum(shapes, crop, max_size, resize):
    """Against every possible pair of draws of every pair of images."""
    config = AugmentConfig(scales=(13, 26), max_size=max_size, crop_resize=(resize,), crop_size=(9, 18), crop=crop)
    heights, widths = (np.array(column) for column in zip(*shapes, strict=True))
    sizes = [every_size(h, w, config) for h, w in shapes]
    best_alone = max(h * w for of_one in sizes for h, w in of_one)
    assert np.prod(largest_size(widths, heights, config, train=True, alone=True)) == best_alone
    padded = {(max(a[0], b[0]), max(a[1], b[1])) for one, other in combinations(sizes, 2) for a in one for b in other}
    found = largest_size(widths, heights, config, train=True, alone=False)
    assert found in padded
    assert np.prod(found) == max(h * w for h, w in padded)


def detr(tmp_path, **profile) -> DetrWorkload:
    values = {
        "workload": "detr_pipeline:workload",
        "run_dir": str(tmp_path / "run"),
        "data": {"root": str(tmp_path), "digits": {"train_images": 24, "val_images": 6}},
        "train": {"minibatch_size": 4, "microbatch_size": 2},
        "profile": profile,
    }
    return DetrWorkload(section(Config, values, ""))


def test_the_workload_samples_inputs(tmp_path):
    workload = detr(tmp_path)
    specs = workload.sampled_inputs(2, count=6, seed=1)
    sizes = sampled_padded_sizes(workload.data, "train", 2, 4, 6, 1)
    assert [spec["images"].shape for spec in specs] == [(2, 3, h, w) for h, w in sizes]
    assert all(spec["sizes"].shape == (2, 2) for spec in specs)
    assert list(tmp_path.iterdir()) == []


def test_a_given_image_size_is_the_only_one(tmp_path):
    workload = detr(tmp_path, image_size=[64, 96])
    assert workload.sampled_inputs(2, count=6) == [workload.profile_inputs(2)]
