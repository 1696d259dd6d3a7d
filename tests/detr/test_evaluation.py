"""Scores: known numbers, perfect predictions, no predictions, and the conversion of outputs to detections."""

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from detr_pipeline.coco import read_coco
from detr_pipeline.data import DATA_VARIABLE, CocoSource, DataConfig
from detr_pipeline.evaluation import (
    STATISTICS,
    CocoEvaluator,
    _scorer,
    best_classes,
    coco_statistics,
    detection_curves,
    detections,
)
from varuna_capslog.base.errors import CapslogError

KNOWN = (
    0.5045806987,
    0.6969727247,
    0.5729816670,
    0.5856257209,
    0.5193996948,
    0.5013978986,
    0.3868127796,
    0.5936795763,
    0.5953529829,
    0.6398109626,
    0.5664205979,
    0.5642905983,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    config = DataConfig(root=tmp_path_factory.mktemp("digits"), digits={"train_images": 1, "val_images": 12})
    return CocoSource(config, "val", 0, 20)


def perfect_outputs(source, minibatch, microbatch, layers=2, queries=6):
    """Return logits and boxes whose last layer equals the targets; unused queries predict no-object."""
    targets = minibatch.targets[microbatch]
    classes = len(source.category_ids)
    logits = torch.zeros(layers, len(targets), queries, classes + 1)
    logits[..., classes] = 30.0
    boxes = torch.full((layers, len(targets), queries, 4), 0.5)
    for row, target in enumerate(targets):
        for query, (label, box) in enumerate(zip(target["labels"].tolist(), target["boxes"], strict=True)):
            logits[-1, row, query, classes] = 0.0
            logits[-1, row, query, label] = 30.0
            boxes[-1, row, query] = box
    return {"logits": logits, "boxes": boxes}


def collect_all(source, evaluator, outputs=perfect_outputs):
    minibatch = source.minibatch([[i, i + 1] for i in range(0, len(source), 2)], 0)
    results = []
    for microbatch in range(len(minibatch.inputs)):
        results += evaluator.collect(outputs(source, minibatch, microbatch), minibatch, microbatch)
    return results


def test_known_scores_of_a_hundred_coco_images():
    base = os.environ.get(DATA_VARIABLE)
    if not base or not (Path(base) / "coco-eval-100").is_dir():
        pytest.skip(f"{DATA_VARIABLE} names no folder with coco-eval-100")
    index = read_coco(Path(base) / "coco-eval-100/instances.json")
    predictions = json.loads((Path(base) / "coco-eval-100/detections.json").read_text())
    scores = coco_statistics(index, predictions)
    assert tuple(scores) == (*STATISTICS, "per_class")
    assert [scores[name] for name in STATISTICS] == pytest.approx(KNOWN, abs=1e-6)
    class_scores = [score for score in scores["per_class"].values() if score is not None]
    assert len(scores["per_class"]) == 80
    assert np.mean(class_scores) == pytest.approx(scores["AP"], abs=1e-12)


def test_the_truth_itself_scores_one(source, capsys):
    evaluator = CocoEvaluator(source.index, source.category_ids)
    values = evaluator.summarize(collect_all(source, evaluator))
    assert next(iter(values)) == "AP"
    assert values["AP"] == values["AP50"] == values["AR_100"] == pytest.approx(1.0)
    present = {source.names[label] for label in source.index.box_label}
    for name, value in values["per_class"].items():
        assert value == (pytest.approx(1.0) if name in present else None)
    assert capsys.readouterr().out == ""


def test_shifted_boxes_and_wrong_classes_score_less(source):
    evaluator = CocoEvaluator(source.index, source.category_ids)

    def shifted(*args):
        outputs = perfect_outputs(*args)
        outputs["boxes"] = outputs["boxes"] + torch.tensor([0.04, 0.0, 0.0, 0.0])
        return outputs

    def renamed(*args):
        outputs = perfect_outputs(*args)
        outputs["logits"][..., :-1] = outputs["logits"][..., :-1].roll(1, -1)
        return outputs

    near = evaluator.summarize(collect_all(source, evaluator, shifted))
    assert 0.1 < near["AP"] < 0.95
    assert near["AP"] < near["AP50"]
    assert evaluator.summarize(collect_all(source, evaluator, renamed))["AP"] < 0.2


def test_annotation_id_zero_counts_as_found(tmp_path):
    """pycocotools reads a match with annotation 0 as no match: two perfect detections once scored 0.5."""
    document = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 100, "height": 100}],
        "categories": [{"id": 1, "name": "x"}],
        "annotations": [
            {"id": 0, "image_id": 1, "category_id": 1, "bbox": [0, 0, 40, 40]},
            {"id": 1, "image_id": 1, "category_id": 1, "bbox": [50, 50, 40, 40]},
        ],
    }
    (tmp_path / "x.json").write_text(json.dumps(document))
    index = read_coco(tmp_path / "x.json")
    predictions = [
        {"image_id": 1, "category_id": 1, "bbox": row["bbox"], "score": 0.9} for row in document["annotations"]
    ]
    scores = coco_statistics(index, predictions)
    assert scores["AP"] == pytest.approx(1.0)
    assert scores["AP_large"] is None
    assert scores["AP_medium"] == pytest.approx(1.0)


def test_nothing_found_scores_zero(source):
    values = coco_statistics(source.index, [])
    assert values["AP"] == values["AR_100"] == 0
    assert values["AP_large"] is None


def test_no_object_anywhere_is_unknown_not_zero(tmp_path):
    document = {
        "images": [{"id": 1, "file_name": "a", "width": 9, "height": 9}],
        "categories": [{"id": 1, "name": "x"}],
    }
    (tmp_path / "x.json").write_text(json.dumps({**document, "annotations": []}))
    values = coco_statistics(read_coco(tmp_path / "x.json"), [])
    assert all(values[name] is None for name in STATISTICS)
    assert values["per_class"] == {"x": None}


def test_outputs_become_pixels_and_original_ids(tmp_path):
    document = {
        "images": [{"id": 4, "file_name": "a.jpg", "width": 200, "height": 100}],
        "categories": [{"id": 18, "name": "dog"}, {"id": 90, "name": "brush"}],
        "annotations": [],
    }
    (tmp_path / "x.json").write_text(json.dumps(document))
    (tmp_path / "pictures").mkdir()
    config = DataConfig(
        root=tmp_path, train_json="x.json", train_images="pictures", val_json="x.json", val_images="pictures"
    )
    source = CocoSource(config, "val", 0, 3)
    minibatch = source.minibatch([[0]], 0)
    evaluator = CocoEvaluator(source.index, source.category_ids, tmp_path / "out/detections.json")
    logits = torch.tensor([[0.0, 2.0, 9.0], [3.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    boxes = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.25, 0.5, 0.1, 0.2], [1.0, 1.0, 0.2, 0.2]])
    results = evaluator.collect(
        {"logits": logits.expand(2, 1, 3, 3).bfloat16(), "boxes": boxes.expand(2, 1, 3, 4)}, minibatch, 0
    )
    assert json.loads(json.dumps(results)) == results
    assert results[0]["image_id"] == 4
    assert results[0]["category_ids"][:2] == [90, 18]
    assert results[0]["boxes"][0] == pytest.approx([50, 25, 100, 50])
    assert results[0]["boxes"][1] == pytest.approx([40, 40, 20, 20])
    assert results[0]["scores"] == pytest.approx(
        [np.exp(2) / (1 + np.exp(2) + np.exp(9)), np.exp(3) / (np.exp(3) + np.e + 1), 1 / 3], rel=1e-5
    )
    evaluator.summarize(results)
    written = json.loads((tmp_path / "out/detections.json").read_text())
    assert written == detections(results)
    assert set(written[0]) == {"image_id", "category_id", "bbox", "score"}
    assert len(written) == 3
    curves = json.loads((tmp_path / "out/detection-curves.json").read_text())
    assert curves["AP"] is None
    assert curves["precision"] == {"dog": None, "brush": None}, "no object of them"
    assert curves["confusion"]["counts"] == [[0, 0, 0], [0, 0, 0], [1, 0, 0]], "only the score of the dog reaches 0.5"


def test_curves_and_confusion_of_a_detector_that_errs(source):
    """The mean precision at IoU 0.5 is AP50; an object counts once in its row, a sure detection once in its column."""

    def shifted(source, minibatch, microbatch):
        outputs = perfect_outputs(source, minibatch, microbatch)
        for row in outputs["logits"][-1]:
            row[0] = row[0].roll(1)  # a wrong class, or no-object
            row[-1, 2] = 31.0  # a detection of nothing: the box of an unused query
        return outputs

    results = collect_all(source, evaluator := CocoEvaluator(source.index, source.category_ids), shifted)
    found = detections(results)
    scores = evaluator.summarize(results)
    curves = detection_curves(source.index, _scorer(source.index, found), found)
    known = [column for column in curves["precision"].values() if column is not None]
    assert len(curves["recall"]) == 101
    assert np.mean(known) == pytest.approx(scores["AP50"], abs=1e-4)
    counts = np.array(curves["confusion"]["counts"])
    truth = [entry["category_id"] for entry in source.index.ground_truth()["annotations"]]
    assert counts[:-1].sum(1).tolist() == [truth.count(category) for category in source.category_ids]
    sure = [detection["category_id"] for detection in found if detection["score"] >= 0.5]
    assert counts[:, :-1].sum(0).tolist() == [sure.count(category) for category in source.category_ids]
    assert counts[-1, 2] > 0, "detections of nothing"
    assert 0 < np.trace(counts[:-1, :-1]) < len(truth)


def test_best_classes_keep_leading_dimensions():
    scores, classes, corners = best_classes(
        torch.randn(2, 5, 4), torch.rand(2, 5, 4), torch.tensor([[10, 20], [30, 40]])
    )
    assert (scores.shape, classes.shape, corners.shape) == ((2, 5), (2, 5), (2, 5, 4))
    assert int(classes.max()) <= 2


def test_an_image_that_comes_twice_counts_once(source):
    evaluator = CocoEvaluator(source.index, source.category_ids)
    results = collect_all(source, evaluator)
    assert evaluator.summarize(results + results[:3]) == evaluator.summarize(results)


def test_images_that_never_came_are_counted_aloud(source, caplog):
    evaluator = CocoEvaluator(source.index, source.category_ids)
    with caplog.at_level(logging.WARNING):
        values = evaluator.summarize(collect_all(source, evaluator)[:6])
    assert values["AP"] < 0.9
    assert "6 of 12 images were not evaluated" in caplog.text


def test_bad_detections_and_models_are_refused(source):
    good = {"image_id": source.index.image_ids[0], "category_id": 1, "bbox": [0, 0, 1, 1], "score": 0.5}
    with pytest.raises(CapslogError, match="image id 999999"):
        coco_statistics(source.index, [{**good, "image_id": 999999}])
    with pytest.raises(CapslogError, match="not finite"):
        coco_statistics(source.index, [{**good, "score": float("nan")}])
    evaluator = CocoEvaluator(source.index, source.category_ids)
    minibatch = source.minibatch([[0]], 0)
    with pytest.raises(CapslogError, match=r"9 classes .* 10; set model\.num_classes"):
        evaluator.collect({"logits": torch.zeros(1, 1, 3, 10), "boxes": torch.zeros(1, 1, 3, 4)}, minibatch, 0)


def test_outputs_without_a_class_are_never_named(source):
    """A head with 91 outputs on data of ten classes: the unused outputs have no category that could be written."""
    evaluator = CocoEvaluator(source.index, source.category_ids)
    logits = torch.zeros(1, 1, 3, 92)
    logits[..., 40], logits[..., 4] = 9.0, 5.0
    results = evaluator.collect({"logits": logits, "boxes": torch.zeros(1, 1, 3, 4)}, source.minibatch([[0]], 0), 0)
    assert results[0]["category_ids"] == [5, 5, 5]
    assert results[0]["scores"][0] == pytest.approx(np.exp(5) / (np.exp(9) + np.exp(5) + 90), rel=1e-5)
