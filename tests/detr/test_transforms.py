"""Augmentation: sizes and boxes planned with numbers alone equal those of the pixels."""

from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms.v2 import functional as F

from detr_pipeline.transforms import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    AugmentConfig,
    apply,
    largest_size,
    plan,
    resized_size,
)

NO_BOXES = np.zeros((0, 4))


@pytest.mark.parametrize(
    ("given_hw", "scale", "max_size", "expected"),
    [
        ((480, 640), 800, 1333, (800, 1066)),
        ((640, 480), 800, 1333, (1066, 800)),
        ((500, 500), 800, 1333, (800, 800)),
        ((427, 640), 800, 1333, (800, 1199)),
        ((375, 1242), 800, 1333, (402, 1331)),
        ((360, 480), 400, None, (400, 533)),
        # The shorter side rounds up and the longer one follows it: one pixel above the bound.
        ((308, 640), 800, 1333, (642, 1334)),
    ],
)
def test_size_rule(given_hw, scale, max_size, expected):
    assert resized_size(*given_hw, scale, max_size) == expected


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 900))
def test_size_rule_keeps_the_shape_and_the_bound(height, width, scale):
    h, w = resized_size(height, width, scale, 1333)
    assert min(h, w) <= scale
    # A very thin picture keeps at least one pixel, whatever its length becomes.
    if min(h, w) > 1:
        assert max(h, w) <= 1333 * (1 + 0.5 / (min(h, w) - 0.5)) + 1
        assert max(h, w) / min(h, w) == pytest.approx(max(height, width) / min(height, width), rel=1 / min(h, w))
    assert (h < w) == (height < width) or h == w


@pytest.mark.parametrize(("height", "width"), [(1, 12_000), (3000, 1), (10, 8000), (2, 900)])
def test_slivers_keep_to_the_bound(height, width):
    """A validation picture of 1 x 12000 stayed as long, and one crop of 3000 x 1 took 1.4 GiB."""
    config, boxes = AugmentConfig(), np.array([[0.0, 0.0, width, height]])
    recipes = [plan(None, width, height, boxes, config)]
    recipes += [plan(np.random.default_rng(seed), width, height, boxes, config) for seed in range(40)]
    assert any(recipe.resize for recipe in recipes)
    for recipe in recipes:
        assert max(recipe.size) <= 1333 + 25 / 2  # a crop of it may be no sliver
        assert recipe.resize is None or max(recipe.resize) <= 25 * 600
        assert recipe.boxes.tolist() == [[0.5, 0.5, 1.0, 1.0]]
    widths, heights = np.array([width]), np.array([height])
    for train in (False, True):
        assert max(largest_size(widths, heights, config, train, alone=False)) <= 1333 + 25 / 2
    image = Image.new("RGB", (width, height), "white")
    assert apply(next(recipe for recipe in recipes if recipe.resize), image).min() > 1


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 900))
def test_ordinary_pictures_have_the_references_size(height, width, scale):
    """The rule is that of the reference's code, for all pictures up to 25 times as long as wide."""
    short, long = min(height, width), max(height, width)
    if long > 25 * short:
        return
    assert max(resized_size(height, width, scale, 25 * scale)) == int(scale * long / short)
    if long / short * scale > 1333:
        scale = max(1, round(1333 * short / long))
    assert sorted(resized_size(height, width, scale, 1333)) == sorted((scale, int(scale * long / short)))


def test_largest_size_agrees_with_planning_at_random():
    config = AugmentConfig(
        scales=(40, 48, 56), max_size=80, crop_resize=(30, 40, 50), crop_size=(24, 50), val_scale=56, crop=0.6
    )
    shapes = [(64, 48), (37, 61), (50, 50), (90, 30)]
    widths, heights = np.array([w for w, _ in shapes]), np.array([h for _, h in shapes])
    rng = np.random.default_rng(0)
    drawn = [plan(rng, *shapes[i % 4], NO_BOXES, config).size for i in range(8000)]
    bound = largest_size(widths, heights, config, train=True, alone=False)
    assert bound == (max(h for h, _ in drawn), max(w for _, w in drawn))
    area = np.prod(largest_size(widths, heights, config, train=True, alone=True))
    assert area == max(h * w for h, w in drawn)
    val = [plan(None, w, h, NO_BOXES, config).size for w, h in shapes]
    assert largest_size(widths, heights, config, train=False, alone=False) == tuple(map(max, zip(*val, strict=True)))


def test_largest_size_of_coco_is_known():
    rng = np.random.default_rng(0)
    widths, heights = rng.integers(300, 641, 118_000), rng.integers(300, 641, 118_000)
    together = largest_size(widths, heights, AugmentConfig(), train=True, alone=False)
    assert together[0] in (1333, 1334)
    assert together[1] in (1333, 1334)


def paint(width, height, box):
    """Return a black picture with one white rectangle, whose box can be read back from the pixels."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    x1, y1, x2, y2 = box
    pixels[y1:y2, x1:x2] = 255
    return Image.fromarray(pixels)


@pytest.mark.parametrize("seed", range(12))
def test_planned_box_is_where_the_pixels_are(seed):
    """The white rectangle of the transformed picture, measured on its pixels, is the planned box to about a pixel."""
    config = AugmentConfig(
        scales=(200, 240), max_size=400, crop_resize=(150, 200), crop_size=(120, 200), crop=seed % 2, flip=0.5
    )
    box = (60, 40, 130, 120)
    recipe = plan(np.random.default_rng(seed), 200, 160, np.array([box], dtype=float), config)
    shown = apply(recipe, paint(200, 160, box))
    assert tuple(shown.shape) == (3, *recipe.size)
    white = (shown[0] * IMAGENET_STD[0] + IMAGENET_MEAN[0]) > 0.5
    if not len(recipe.kept):
        assert not white.any()
        return
    rows, columns = white.any(1).nonzero().flatten(), white.any(0).nonzero().flatten()
    h, w = recipe.size
    measured = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
    cx, cy, bw, bh = recipe.boxes[0]
    planned = [(cx - bw / 2) * w, (cy - bh / 2) * h, (cx + bw / 2) * w, (cy + bh / 2) * h]
    assert np.allclose(measured, planned, atol=1.6)


def test_crop_clamps_boxes_and_drops_lost_ones():
    config = AugmentConfig(scales=(64,), crop_resize=(64,), crop_size=(32, 32), crop=1.0, flip=0.0)
    boxes = np.array([[0, 0, 64, 64], [0, 0, 4, 4], [60, 60, 64, 64]], dtype=float)
    losses = set()
    for seed in range(40):
        recipe = plan(np.random.default_rng(seed), 64, 64, boxes, config)
        assert recipe.kept[0] == 0
        assert recipe.boxes[0].tolist() == [0.5, 0.5, 1, 1]
        assert (recipe.boxes[:, 2:] > 0).all()
        low, high = recipe.boxes[:, :2] - recipe.boxes[:, 2:] / 2, recipe.boxes[:, :2] + recipe.boxes[:, 2:] / 2
        assert (low > -1e-12).all()
        assert (high < 1 + 1e-12).all()
        losses.add(len(boxes) - len(recipe.kept))
    assert losses >= {1, 2}


def test_validation_is_the_plain_resize_in_torchvision():
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (45, 60, 3), dtype=np.uint8))
    recipe = plan(None, 60, 45, np.array([[6.0, 9.0, 30.0, 45.0]]), AugmentConfig(val_scale=90))
    assert recipe.size == (90, 120)
    assert recipe.boxes.tolist() == [[0.3, 0.6, 0.4, 0.8]]
    expected = F.pil_to_tensor(image.resize((120, 90), Image.Resampling.BILINEAR)).float() / 255
    expected = (expected - torch.tensor(IMAGENET_MEAN)[:, None, None]) / torch.tensor(IMAGENET_STD)[:, None, None]
    assert torch.allclose(apply(recipe, image), expected, atol=1e-6)


def test_defaults_are_the_papers():
    config = AugmentConfig()
    assert config.scales == (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
    assert (config.max_size, config.crop_resize, config.crop_size) == (1333, (400, 500, 600), (384, 600))


def test_an_image_smaller_than_the_crop_is_taken_whole():
    config = AugmentConfig(scales=(48,), crop_resize=(20,), crop_size=(30, 40), crop=1.0, flip=0.0)
    recipe = plan(np.random.default_rng(0), 20, 20, NO_BOXES, config)
    assert recipe.crop == (0, 0, 20, 20)


def test_reversed_crop_bounds_are_refused():
    with pytest.raises(ValueError, match="smallest, largest"):
        AugmentConfig(crop_size=(5, 4))


def every_size(height, width, config):
    """Return all final sizes of an image, by trying every draw."""
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
    """The reference is every possible pair of draws of every pair of images."""
    config = AugmentConfig(scales=(13, 26), max_size=max_size, crop_resize=(resize,), crop_size=(9, 18), crop=crop)
    heights, widths = (np.array(column) for column in zip(*shapes, strict=True))
    sizes = [every_size(h, w, config) for h, w in shapes]
    best_alone = max(h * w for image_sizes in sizes for h, w in image_sizes)
    assert np.prod(largest_size(widths, heights, config, train=True, alone=True)) == best_alone
    padded = {
        (max(a[0], b[0]), max(a[1], b[1])) for first, second in combinations(sizes, 2) for a in first for b in second
    }
    largest = largest_size(widths, heights, config, train=True, alone=False)
    assert largest in padded
    assert np.prod(largest) == max(h * w for h, w in padded)
