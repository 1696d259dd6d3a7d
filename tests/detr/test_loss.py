from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torchvision.ops import box_convert, generalized_box_iou

from detr_pipeline.loss import generalised_iou, match, set_loss
from tests.detr.tiny import CLASSES, normalisers_of, outputs_of, targets_of, tiny_chain, tiny_config, two_sizes
from varuna_capslog.base.errors import CapslogError, StepRefused

CONFIG = tiny_config()
WEIGHTED = tiny_config(cost_class=1.5)


def slow_loss(outputs: dict[str, Tensor], targets: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Compute DETR's criterion on a whole minibatch, one decoder layer and image at a time, from torch's own
    functions.
    """
    matches = match(outputs["logits"], outputs["boxes"], targets, CONFIG)
    weight = torch.tensor([1.0] * CLASSES + [0.1], dtype=outputs["logits"].dtype)
    last = len(matches) - 1
    parts: dict[str, Tensor] = {}
    boxes_in_all = max(sum(len(chosen) for chosen, _ in matches[0]), 1)
    for layer, images in enumerate(matches):
        wanted = torch.full(outputs["logits"].shape[1:3], CLASSES)
        distance, giou = torch.zeros(()), torch.zeros(())
        for image, (chosen, boxes) in enumerate(images):
            for query, box in zip(chosen, boxes, strict=True):
                wanted[image, query] = targets[image]["labels"][box]
                a, b = outputs["boxes"][layer, image, query], targets[image]["boxes"][box]
                distance = distance + F.l1_loss(a, b.to(a.dtype), reduction="sum")
                pair = [box_convert(c[None].to(a.dtype), "cxcywh", "xyxy") for c in (a, b)]
                giou = giou + 1 - generalized_box_iou(*pair)[0, 0]
        suffix = "" if layer == last else f"_{layer}"
        logits = outputs["logits"][layer].flatten(0, 1)
        parts[f"loss_class{suffix}"] = F.cross_entropy(logits, wanted.flatten(), weight)
        parts[f"loss_boxes{suffix}"] = 5 * distance / boxes_in_all
        parts[f"loss_giou{suffix}"] = 2 * giou / boxes_in_all
    return parts | {"loss": torch.stack([part.double() for part in parts.values()]).sum()}


@pytest.mark.parametrize("counts", [[2, 3], [0, 4], [9, 1], [0, 0]])
def test_loss_is_the_references(counts: list[int]) -> None:
    outputs, targets = outputs_of(2, dtype=torch.float64), targets_of(counts)
    losses = set_loss(outputs, targets, normalisers_of(targets, 7), CONFIG)
    expected = slow_loss(outputs, targets)
    assert set(losses) == set(expected) | {"class_error", "cardinality_error"}
    for name, loss in expected.items():
        torch.testing.assert_close(losses[name].double(), loss.double(), msg=name, atol=1e-10, rtol=1e-10)


def test_loss_is_hugging_faces() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    from transformers import DetrConfig
    from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

    outputs, targets = outputs_of(3, layers=1), targets_of([2, 0, 4])
    theirs = DetrConfig(num_labels=CLASSES, auxiliary_loss=False)
    labels = [{"class_labels": target["labels"], "boxes": target["boxes"]} for target in targets]
    total, parts, _ = ForObjectDetectionLoss(
        outputs["logits"][0], labels, torch.device("cpu"), outputs["boxes"][0], theirs
    )
    ours = set_loss(outputs, targets, normalisers_of(targets, 7), CONFIG)
    torch.testing.assert_close(ours["loss"], total)
    torch.testing.assert_close(ours["loss_class"], parts["loss_ce"])
    torch.testing.assert_close(ours["loss_boxes"], 5 * parts["loss_bbox"])
    torch.testing.assert_close(ours["loss_giou"], 2 * parts["loss_giou"])
    torch.testing.assert_close(ours["cardinality_error"], parts["cardinality_error"])


@pytest.mark.parametrize("split", [[1, 1, 1, 1], [2, 2], [1, 3], [3, 1]])
@pytest.mark.parametrize("counts", [[2, 0, 5, 9], [0, 0, 0, 1], [0, 0, 0, 0]])
def test_microbatches_add_up_to_the_minibatch(split: list[int], counts: list[int]) -> None:
    outputs, targets = outputs_of(4, dtype=torch.float64), targets_of(counts)
    normalisers = normalisers_of(targets, 7)
    losses = set_loss(outputs, targets, normalisers, CONFIG)
    gradients = torch.autograd.grad(losses["loss"], list(outputs.values()))
    total: dict[str, Tensor] = dict.fromkeys(losses, torch.zeros((), dtype=torch.float64))
    start = 0
    for size in split:
        part = slice(start, start + size)
        share = set_loss({n: v[:, part] for n, v in outputs.items()}, targets[part], normalisers, CONFIG)
        total = {name: total[name] + share[name] for name in total}
        start += size
    for name, loss in losses.items():
        torch.testing.assert_close(total[name], loss.double(), msg=name, atol=1e-12, rtol=1e-12)
    for mine, expected in zip(torch.autograd.grad(total["loss"], list(outputs.values())), gradients, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-13, rtol=1e-12)


def test_equal_images_cost_the_same_in_one_microbatch_or_two() -> None:
    chain = tiny_chain()
    single = {name: tensor[:1] for name, tensor in two_sizes().items()}
    double = {name: torch.cat((tensor, tensor)) for name, tensor in single.items()}
    targets = targets_of([3]) * 2
    normalisers = normalisers_of(targets, 7)
    together = set_loss(chain.run(double), targets, normalisers, CONFIG)
    apart = set_loss(chain.run(single), targets[:1], normalisers, CONFIG)
    for name in together:
        torch.testing.assert_close(together[name], 2 * apart[name], msg=name, atol=1e-5, rtol=1e-5)


def test_given_matches_are_used() -> None:
    outputs, targets = outputs_of(2), targets_of([2, 3])
    normalisers = normalisers_of(targets, 7)
    matches = match(outputs["logits"], outputs["boxes"], targets, CONFIG)
    best = set_loss(outputs, targets, normalisers, CONFIG)
    assert torch.equal(set_loss(outputs, targets, normalisers, CONFIG, matches)["loss"], best["loss"])
    swapped = [[(queries, boxes[::-1]) for queries, boxes in layer] for layer in matches]
    assert set_loss(outputs, targets, normalisers, CONFIG, swapped)["loss_boxes"] > best["loss_boxes"]


def test_errors_count_matched_queries_and_objects() -> None:
    targets = targets_of([2, 1])
    logits = torch.full((1, 2, 7, CLASSES + 1), -5.0)
    logits[..., -1] = 5.0  # every query says no-object ...
    boxes = torch.full((1, 2, 7, 4), 0.9)
    for image, target in enumerate(targets):
        count = len(target["labels"])
        boxes[0, image, :count] = target["boxes"]
        logits[0, image, :count].scatter_(-1, target["labels"][:, None], 9.0)  # ... but for the right ones
    logits[0, 1, 0] = logits[0, 1, 1]  # and the second image misses its only object.
    parts = set_loss({"logits": logits, "boxes": boxes}, targets, normalisers_of(targets, 7), CONFIG)
    torch.testing.assert_close(parts["class_error"], torch.tensor(100 / 3))
    torch.testing.assert_close(parts["cardinality_error"], torch.tensor(0.5))
    assert not parts["class_error"].requires_grad


def test_half_precision_outputs_are_judged_in_float32() -> None:
    wide, targets = outputs_of(2), targets_of([2, 3])
    normalisers = normalisers_of(targets, 7)
    narrow = {name: tensor.detach().bfloat16().requires_grad_() for name, tensor in wide.items()}
    with torch.autocast("cpu", torch.bfloat16):
        parts = set_loss(narrow, targets, normalisers, CONFIG)
    parts["loss"].backward()
    assert all(part.dtype == torch.float32 for part in parts.values() if part.is_floating_point())
    rounded = {name: tensor.detach().float() for name, tensor in narrow.items()}
    torch.testing.assert_close(parts["loss"], set_loss(rounded, targets, normalisers, CONFIG)["loss"], rtol=0, atol=0)


def test_a_label_without_an_output_is_refused() -> None:
    targets = targets_of([2, 3])
    targets[1]["labels"][1] = CLASSES
    with pytest.raises(CapslogError, match=r"image 101 has a box of class 5.*0\.\.4.*model\.num_classes"):
        set_loss(outputs_of(2), targets, normalisers_of(targets, 7), CONFIG)


def test_a_diverged_model_is_refused() -> None:
    outputs, targets = outputs_of(1), targets_of([2])
    with torch.no_grad():
        outputs["boxes"][2, 0, 0, 0] = float("nan")
    with pytest.raises(StepRefused, match="boxes of decoder layer 2 for image 100"):
        set_loss(outputs, targets, normalisers_of(targets, 7), CONFIG)


def test_a_profiler_without_values_can_run_it() -> None:
    targets = targets_of([2, 3])
    with FakeTensorMode(allow_non_fake_inputs=True):
        outputs = {
            "logits": torch.empty(3, 2, 7, CLASSES + 1, requires_grad=True),
            "boxes": torch.empty(3, 2, 7, 4, requires_grad=True),
        }
        set_loss(outputs, targets, normalisers_of(targets, 7), CONFIG)["loss"].backward()
        assert outputs["boxes"].grad is not None


def cost_of(outputs: dict[str, torch.Tensor], target: dict[str, Any], layer: int, image: int) -> torch.Tensor:
    """Return the cost [Q, n], from torchvision's and torch's own parts."""
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
    matches = match(outputs["logits"], outputs["boxes"], targets, WEIGHTED)
    for layer in range(2):
        for image, target in enumerate(targets):
            chosen, boxes = matches[layer][image]
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
    giou = generalised_iou(box_convert(a[:, None], "cxcywh", "xyxy"), box_convert(b, "cxcywh", "xyxy"))
    torch.testing.assert_close(giou, expected)
    assert expected.min() < 0 < expected.max()


def test_images_without_boxes_get_empty_matches() -> None:
    outputs = outputs_of(2)
    assert match(outputs["logits"], outputs["boxes"], targets_of([0, 0]), WEIGHTED) == [[((), ()), ((), ())]] * 3


def test_more_boxes_than_queries_leave_boxes_over() -> None:
    outputs = outputs_of(1, queries=3)
    for ((queries, boxes),) in match(outputs["logits"], outputs["boxes"], targets_of([8]), WEIGHTED):
        assert queries == (0, 1, 2)
        assert len(set(boxes)) == 3


def test_equal_costs_give_equal_matches_every_time() -> None:
    logits, boxes = torch.zeros(2, 2, 7, 6), torch.full((2, 2, 7, 4), 0.5)
    targets = targets_of([3, 3])
    targets[1] = targets[0]
    first = match(logits, boxes, targets, WEIGHTED)
    assert all(pairs == first[0][0] for layer in first for pairs in layer)
    assert all(match(logits, boxes, targets, WEIGHTED) == first for _ in range(5))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("counts", [[2, 2], [2, 0], [0, 0]])
@pytest.mark.parametrize("name", ["logits", "boxes"])
def test_non_finite_predictions_are_refused_by_name(value: float, counts: list[int], name: str) -> None:
    """scipy would only say `matrix contains invalid numeric entries`, and nothing where an image has no boxes."""
    outputs = {key: tensor.detach().clone() for key, tensor in outputs_of(2).items()}
    outputs[name][1, 1, 4, 2] = value
    with pytest.raises(StepRefused, match=rf"{name} of decoder layer 1 for image 101 are not finite.*train\.lr"):
        match(outputs["logits"], outputs["boxes"], targets_of(counts), WEIGHTED)


def test_half_precision_is_matched_in_float32() -> None:
    outputs = {key: tensor.detach().bfloat16() for key, tensor in outputs_of(2).items()}
    wide = {key: tensor.float() for key, tensor in outputs.items()}
    targets = targets_of([4, 6])
    with torch.autocast("cpu", torch.bfloat16):
        narrow = match(outputs["logits"], outputs["boxes"], targets, WEIGHTED)
    assert narrow == match(wide["logits"], wide["boxes"], targets, WEIGHTED)


def test_shapes_alone_can_be_matched() -> None:
    targets = targets_of([2, 9])
    with FakeTensorMode():
        matches = match(torch.empty(3, 2, 7, 6), torch.empty(3, 2, 7, 4), targets, WEIGHTED)
    assert [[len(queries) for queries, _ in layer] for layer in matches] == [[2, 7]] * 3
