"""Denoising queries: laid out as in transformers, noise within DINO's bounds, and dependent on the sample alone."""

from __future__ import annotations

import pytest
import torch
from torchvision.ops import box_convert

from detr_pipeline.rt_detr.chain import _apart
from detr_pipeline.rt_detr.task import Groups, Noise
from tests.detr.rt_detr.tiny import targets

COUNTS = [3, 0, 2]


def test_layout_is_that_of_transformers() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    from transformers.models.rt_detr.modeling_rt_detr import get_contrastive_denoising_training_group

    of, queries = targets(COUNTS), 4
    theirs = [{"class_labels": target["labels"], "boxes": target["boxes"]} for target in of]
    labels, _, mask, meta = get_contrastive_denoising_training_group(theirs, 5, queries, lambda x: x, 7, 0.0, 1e-9)
    groups = Groups.of(max(COUNTS), 7)
    noise = Noise(5, 0.0, 1e-9)
    assert torch.equal(torch.stack([noise.queries(groups, target, (0, 0))[0] for target in of]), labels.long())
    assert (groups.count, [groups.queries, queries]) == (meta["dn_num_group"], meta["dn_num_split"])
    for count, expected in zip(COUNTS, meta["dn_positive_idx"], strict=True):
        assert list(groups.positive(count)[0]) == expected.tolist()
    assert torch.equal(_apart(groups.of_query().expand(3, -1), torch.zeros(3, groups.queries + queries, 8)), mask)


@pytest.mark.parametrize(("most", "wanted", "expected"), [(3, 7, 2), (9, 7, 1), (0, 7, 0), (3, 0, 0)])
def test_number_of_groups(most: int, wanted: int, expected: int) -> None:
    assert Groups.of(most, wanted).count == expected


def test_noise_stays_within_its_bounds() -> None:
    groups, noise = Groups.of(4, 400), Noise(5, 0.5, 1.0)
    (of,) = targets([4])
    of["boxes"] = 0.3 * of["boxes"] + 0.35  # so that no box reaches the border
    of["boxes"][:, 2:] *= 0.3
    labels, boxes = noise.queries(groups, of, (1, 2, 3))
    negative = torch.arange(groups.queries) // 4 % 2 == 1
    true = of["boxes"].repeat(2 * groups.count, 1)
    moved = box_convert(boxes.sigmoid(), "cxcywh", "xyxy") - box_convert(true, "cxcywh", "xyxy")
    share = moved.abs() / (true[:, 2:] / 2).repeat(1, 2)  # relative to half the box's size
    turned = (boxes.sigmoid()[:, 2:] < 1e-4).any(1)  # a corner passed the opposite one: a box without size
    assert float(share[~negative].max()) <= 1 + 1e-3
    assert float(share[negative].max()) <= 2 + 1e-3
    assert float(share[negative & ~turned].min()) >= 1 - 1e-3
    assert 0.45 < float(share[~negative].mean()) < 0.55
    changed = (labels != of["labels"].repeat(2 * groups.count)).float().mean()
    assert 0.15 < float(changed) < 0.25  # a quarter drawn anew, a fifth of which get the same class again


def test_noise_depends_on_its_seed_alone() -> None:
    groups, noise = Groups.of(3, 12), Noise(5, 0.5, 1.0)
    (of,) = targets([2])
    torch.manual_seed(0)
    first = noise.queries(groups, of, (1, 2, 3))
    torch.manual_seed(1)
    again, other_seed = noise.queries(groups, of, (1, 2, 3)), noise.queries(groups, of, (1, 2, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1], other_seed[1])
    assert (first[0].view(-1, 3)[:, 2] == 5).all()  # the empty place of every group
