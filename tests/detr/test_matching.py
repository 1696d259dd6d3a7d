from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.ops import box_convert, generalized_box_iou

from detr_pipeline.matching import corners, generalised_iou, match
from tests.detr.tiny import outputs_of, targets_of, tiny_config
from varuna_capslog.base.errors import StepRefused

CONFIG = tiny_config(cost_class=1.5)


def cost_of(outputs: dict[str, torch.Tensor], target: dict[str, Any], layer: int, image: int) -> torch.Tensor:
    """[Q, n], from torchvision's and torch's own parts."""
    probabilities = outputs["logits"][layer, image].detach().softmax(-1)
    boxes = outputs["boxes"][layer, image].detach()
    overlap = generalized_box_iou(
        box_convert(boxes, "cxcywh", "xyxy"), box_convert(target["boxes"].to(boxes.dtype), "cxcywh", "xyxy")
    )
    distance = torch.cdist(boxes, target["boxes"].to(boxes.dtype), p=1)
    return 5 * distance - 1.5 * probabilities[:, target["labels"]] - 2 * overlap


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 4), min_size=1, max_size=3), st.integers(1, 5))
def test_least_cost_of_all_assignments(seed: int, counts: list[int], queries: int) -> None:
    outputs = outputs_of(len(counts), queries, layers=2, seed=seed, dtype=torch.float64)
    targets = targets_of(counts, seed)
    found = match(outputs["logits"], outputs["boxes"], targets, CONFIG)
    for layer in range(2):
        for image, target in enumerate(targets):
            chosen, boxes = found[layer][image]
            pairs = min(counts[image], queries)
            assert len(chosen) == len(boxes) == len(set(chosen)) == len(set(boxes)) == pairs
            cost = cost_of(outputs, target, layer, image)
            if queries >= counts[image]:
                each = (sum(cost[q, n] for n, q in enumerate(order)) for order in permutations(range(queries), pairs))
            else:
                each = (
                    sum(cost[q, n] for q, n in enumerate(order)) for order in permutations(range(counts[image]), pairs)
                )
            best = min(float(total) for total in each)
            assert abs(float(cost[list(chosen), list(boxes)].sum()) - best) < 1e-9


def test_giou_is_torchvisions() -> None:
    torch.manual_seed(0)
    a, b = torch.rand(40, 4) * 0.5 + 0.1, torch.rand(30, 4) * 0.5 + 0.1
    expected = generalized_box_iou(box_convert(a, "cxcywh", "xyxy"), box_convert(b, "cxcywh", "xyxy"))
    torch.testing.assert_close(generalised_iou(corners(a[:, None]), corners(b)), expected)
    assert expected.min() < 0 < expected.max()


def test_images_without_boxes_get_empty_matches() -> None:
    outputs = outputs_of(2)
    assert match(outputs["logits"], outputs["boxes"], targets_of([0, 0]), CONFIG) == [[((), ()), ((), ())]] * 3


def test_more_boxes_than_queries_leave_boxes_over() -> None:
    outputs = outputs_of(1, queries=3)
    for ((queries, boxes),) in match(outputs["logits"], outputs["boxes"], targets_of([8]), CONFIG):
        assert queries == (0, 1, 2)
        assert len(set(boxes)) == 3


def test_equal_costs_give_equal_matches_every_time() -> None:
    logits, boxes = torch.zeros(2, 2, 7, 6), torch.full((2, 2, 7, 4), 0.5)
    targets = targets_of([3, 3])
    targets[1] = targets[0]
    first = match(logits, boxes, targets, CONFIG)
    assert all(pairs == first[0][0] for layer in first for pairs in layer)
    assert all(match(logits, boxes, targets, CONFIG) == first for _ in range(5))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("counts", [[2, 2], [2, 0], [0, 0]])
@pytest.mark.parametrize("name", ["logits", "boxes"])
def test_non_finite_predictions_are_refused_by_name(value: float, counts: list[int], name: str) -> None:
    """scipy would say `matrix contains invalid numeric entries`, and nothing at all where an image has no boxes."""
    outputs = {key: tensor.detach().clone() for key, tensor in outputs_of(2).items()}
    outputs[name][1, 1, 4, 2] = value
    with pytest.raises(StepRefused, match=rf"{name} of decoder layer 1 for image 101 are not finite.*train\.lr"):
        match(outputs["logits"], outputs["boxes"], targets_of(counts), CONFIG)


def test_half_precision_is_matched_in_float32() -> None:
    outputs = {key: tensor.detach().bfloat16() for key, tensor in outputs_of(2).items()}
    wide = {key: tensor.float() for key, tensor in outputs.items()}
    targets = targets_of([4, 6])
    with torch.autocast("cpu", torch.bfloat16):
        narrow = match(outputs["logits"], outputs["boxes"], targets, CONFIG)
    assert narrow == match(wide["logits"], wide["boxes"], targets, CONFIG)


def test_shapes_alone_can_be_matched() -> None:
    targets = targets_of([2, 9])
    with FakeTensorMode():
        found = match(torch.empty(3, 2, 7, 6), torch.empty(3, 2, 7, 4), targets, CONFIG)
    assert [[len(queries) for queries, _ in layer] for layer in found] == [[2, 7]] * 3
