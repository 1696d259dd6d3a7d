"""Scores of a detector: converts outputs to COCO detections, and computes pycocotools' twelve numbers without prints.
No detection is filtered: no threshold and no suppression of near duplicates, as in DETR's paper. Only the confusion
matrix, for people, has a threshold.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, tensor
from torchvision.ops import box_convert, box_iou

from detr_pipeline.coco import CocoIndex
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.reports.run import CURVES_FILE, MOST_CONFUSED

__all__ = [
    "STATISTICS",
    "CocoEvaluator",
    "DetectionsOf",
    "best_classes",
    "coco_statistics",
    "corners_of",
    "detection_curves",
    "detections",
    "detections_of_queries",
    "refuse_too_few",
]

logger = logging.getLogger(__name__)

STATISTICS = (
    "AP",
    "AP50",
    "AP75",
    "AP_small",
    "AP_medium",
    "AP_large",
    "AR_1",
    "AR_10",
    "AR_100",
    "AR_small",
    "AR_medium",
    "AR_large",
)

DetectionsOf = Callable[[Mapping[str, Tensor], int, Tensor, int], tuple[Tensor, Tensor, Tensor]]
"""Maps a model's outputs, an image's place in the microbatch, its size [2] (h, w) and the number of classes of the data
to scores [N], classes [N] and corners in pixels [N, 4], float32 on the CPU."""


def corners_of(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Convert (cx, cy, w, h) [..., N, 4], fractions of `sizes` [..., 2] (h, w), to corners x1 y1 x2 y2 in pixels,
    float32 on the CPU.
    """
    height, width = sizes.cpu().float().unbind(-1)
    scale = width.new_empty((*width.shape, 4))
    scale[..., 0::2], scale[..., 1::2] = width[..., None], height[..., None]
    return box_convert(boxes.detach().float().cpu(), "cxcywh", "xyxy") * scale[..., None, :]


def detections_of_queries(
    outputs: Mapping[str, Tensor], image: int, size: Tensor, num_classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `best_classes` of a DETR's last decoder layer, from `logits` [K, B, Q, C+1] and `boxes` [K, B, Q, 4]."""
    logits, boxes = outputs["logits"][-1, image], outputs["boxes"][-1, image]
    refuse_too_few(logits.shape[-1] - 1, num_classes)
    return best_classes(logits, boxes, size, num_classes)


def refuse_too_few(outputs: int, num_classes: int) -> None:
    """Raise CapslogError for a model of fewer classes than the data has."""
    if outputs < num_classes:
        raise CapslogError(
            f"the model tells {outputs} classes apart, but the data has {num_classes}; set model.num_classes to null "
            "or to at least that many"
        )


def best_classes(
    logits: Tensor, boxes: Tensor, sizes: Tensor, num_classes: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return every query's best class other than no-object: scores (probabilities) [..., Q], classes [..., Q], corners
    x1 y1 x2 y2 in pixels [..., Q, 4]; float32 on the CPU.

    Args:
        logits: [..., Q, C+1], no-object last.
        boxes: [..., Q, 4] centre x, centre y, width, height as fractions of the image.
        sizes: [..., 2] (h, w) of the image.
        num_classes: number of the data's classes; outputs of further classes are ignored. None: all C.
    """
    scores, classes = logits.detach().float().cpu().softmax(-1)[..., :-1][..., :num_classes].max(-1)
    return scores, classes, corners_of(boxes, sizes)


class CocoEvaluator:
    """Evaluator of detections on the data set of an annotation file, `index`.

    Args:
        category_ids: category id of every class, in the order of the model's outputs.
        detections_path: file for all detections in COCO's result format; `detection-curves.json` is written beside it.
            None: neither is written.
        detections_of: converts the model's outputs to detections.
    """

    def __init__(
        self,
        index: CocoIndex,
        category_ids: Sequence[int],
        detections_path: Path | None = None,
        detections_of: DetectionsOf = detections_of_queries,
    ) -> None:
        self.index, self.category_ids, self.detections_path = index, tuple(category_ids), detections_path
        self._detections_of = detections_of

    def collect(self, outputs: Mapping[str, Tensor], minibatch: Minibatch, microbatch: int) -> list[dict[str, Any]]:
        """Return an entry per image: its id, and all detections' category ids, boxes (x, y, width, height) and scores.
        Called on the rank of the last layer. Raises CapslogError where the model has fewer classes than the data.
        """
        results = []
        for image, target in enumerate(minibatch.targets[microbatch]):
            scores, classes, corners = self._detections_of(outputs, image, target["orig_size"], len(self.category_ids))
            results.append(
                {
                    "image_id": target["image_id"],
                    "category_ids": [self.category_ids[label] for label in classes.tolist()],
                    "boxes": box_convert(corners, "xyxy", "xywh").tolist(),
                    "scores": scores.tolist(),
                }
            )
        return results

    def summarize(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the twelve COCO numbers and the AP of every class; None without an object of the kind. An image with
        two results counts once; an image without a result counts as missed, with a warning.
        """
        results_by_image = {result["image_id"]: result for result in results}
        missing = len(self.index) - len(results_by_image)
        if missing:
            logger.warning("%d of %d images were not evaluated and count as missed", missing, len(self.index))
        coco_detections = detections(results_by_image.values())
        scorer = _scorer(self.index, coco_detections)
        scores = _statistics(self.index, scorer)
        if self.detections_path is not None:
            files.write_text(self.detections_path, json.dumps(coco_detections))
            curves = detection_curves(self.index, scorer, coco_detections)
            files.write_json(self.detections_path.with_name(CURVES_FILE), {"AP": scores["AP"], **curves})
        return scores


def detections(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert the entries of `CocoEvaluator.collect` to COCO's result format, one dict per box."""
    return [
        {"image_id": result["image_id"], "category_id": category_id, "bbox": box, "score": score}
        for result in results
        for category_id, box, score in zip(result["category_ids"], result["boxes"], result["scores"], strict=True)
    ]


def coco_statistics(index: CocoIndex, detections_found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Score detections in COCO's result format with pycocotools' defaults for boxes.

    Returns the names of `STATISTICS` with their values, then `per_class`, {name: AP}. None stands for pycocotools' -1:
    no object of that kind. Raises CapslogError for a detection of an unknown image or category, or with a box or score
    that is not finite.
    """
    return _statistics(index, _scorer(index, detections_found))


def _scorer(index: CocoIndex, detections_found: Sequence[Mapping[str, Any]]) -> COCOeval:
    """Return pycocotools' scorer after it has scored the detections."""
    _check(index, detections_found)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = _indexed(index.ground_truth())
        # loadRes fails on an empty list, so that case is a result without annotations.
        answer = (
            truth.loadRes([dict(detection) for detection in detections_found])
            if detections_found
            else _indexed({**truth.dataset, "annotations": []})
        )
        scorer = COCOeval(truth, answer, "bbox")
        scorer.evaluate()
        scorer.accumulate()
        scorer.summarize()
    return scorer


def _statistics(index: CocoIndex, scorer: COCOeval) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: None if value == -1 else value for name, value in zip(STATISTICS, scorer.stats.tolist(), strict=True)
    }
    # [IoU threshold, recall, class, area (0: all), detections (last: 100)]
    precision = scorer.eval["precision"][:, :, :, 0, -1]
    values["per_class"] = {
        name: _mean_of_known(precision[:, :, position]) for position, name in enumerate(_unique_names(index))
    }
    return values


_CONFUSED_SCORE, _CONFUSED_OVERLAP = 0.5, 0.5
"""Lowest score of a detection, and lowest IoU of a match, in the confusion matrix."""


def detection_curves(
    index: CocoIndex, scorer: COCOeval, detections_found: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the curves and the confusion matrix that the report shows of a detector.

    recall [101] and precision {class: [101], or None without an object} at IoU 0.5, as pycocotools interpolates them;
    confusion {classes, score, overlap, counts}: counts [C+1][C+1], true classes down, detected classes across; the last
    row counts detections of nothing, the last column missed objects; None for more than 100 classes.
    """
    at_half = scorer.eval["precision"][0, :, :, 0, -1]
    names = _unique_names(index)
    precision = {
        name: None if column.max() < 0 else [round(value, 4) for value in column.tolist()]
        for name, column in zip(names, at_half.T, strict=True)
    }
    confusion = None
    if len(names) <= MOST_CONFUSED:
        counts = _confused(index, scorer.cocoGt, detections_found)
        limits = {"score": _CONFUSED_SCORE, "overlap": _CONFUSED_OVERLAP}
        confusion = {"classes": names, **limits, "counts": counts}
    recall = [round(float(share), 2) for share in scorer.params.recThrs]
    return {"recall": recall, "precision": precision, "confusion": confusion}


def _confused(index: CocoIndex, truth: COCO, detections_found: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Count pairs of (true class, detected class). In each image, in the order of falling scores, a detection takes the
    free object of the largest overlap, whatever its class. Crowds are no objects here.
    """
    place = {category: number for number, category in enumerate(index.category_ids)}
    nothing = len(place)
    counts = [[0] * (nothing + 1) for _ in range(nothing + 1)]
    sure: dict[int, list[Mapping[str, Any]]] = {}
    for detection in sorted(detections_found, key=lambda detection: -detection["score"]):
        if detection["score"] >= _CONFUSED_SCORE and detection["category_id"] in place:
            sure.setdefault(detection["image_id"], []).append(detection)
    for image in index.image_ids:
        objects = [entry for entry in truth.imgToAnns[image] if not entry.get("iscrowd")]
        free = set(range(len(objects)))
        guesses = sure.get(image, [])
        overlaps = _overlaps([entry["bbox"] for entry in guesses], [entry["bbox"] for entry in objects])
        for guess, row in zip(guesses, overlaps, strict=True):
            best = max((other for other in free if row[other] >= _CONFUSED_OVERLAP), key=row.__getitem__, default=None)
            true = nothing if best is None else place[objects[best]["category_id"]]
            counts[true][place[guess["category_id"]]] += 1
            free.discard(-1 if best is None else best)
        for missed in free:
            counts[place[objects[missed]["category_id"]]][nothing] += 1
    return counts


def _overlaps(boxes: list[list[float]], others: list[list[float]]) -> list[list[float]]:
    """Return the IoU of every box (x, y, width, height) with every box of `others`."""
    corners = [box_convert(tensor(some).view(-1, 4), "xywh", "xyxy") for some in (boxes, others)]
    overlaps: list[list[float]] = box_iou(*corners).tolist()
    return overlaps


def _check(index: CocoIndex, detections_found: Sequence[Mapping[str, Any]]) -> None:
    images, categories = set(index.image_ids), set(index.category_ids)
    for detection in detections_found:
        if detection["image_id"] not in images:
            raise CapslogError(f"a detection names image id {detection['image_id']}, which is not in {index.path}")
        if not np.isfinite([*detection["bbox"], detection["score"]]).all():
            raise CapslogError(
                f"a detection of image id {detection['image_id']} is not finite: bbox={detection['bbox']}, "
                f"score={detection['score']}; the model has diverged"
            )
    # With gapped labels a model may detect a class that the file does not have, which is neither right nor wrong.
    # pycocotools leaves such detections out, and so do we, but with a log line.
    foreign = sum(detection["category_id"] not in categories for detection in detections_found)
    if foreign:
        logger.info("%d detections are of categories that %s does not have; they do not count", foreign, index.path)


def _indexed(dataset: dict[str, Any]) -> COCO:
    coco = COCO()
    coco.dataset = dataset
    coco.createIndex()
    return coco


def _mean_of_known(values: np.ndarray) -> float | None:
    valid = values[values > -1]
    return float(valid.mean()) if valid.size else None


def _unique_names(index: CocoIndex) -> list[str]:
    """Return the names of the classes; a name that two categories share gets the id appended."""
    return [
        name if index.names.count(name) == 1 else f"{name} ({id_})"
        for id_, name in zip(index.category_ids, index.names, strict=True)
    ]
