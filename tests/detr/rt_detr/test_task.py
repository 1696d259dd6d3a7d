"""RT-DETR as a workload: data, loss, evaluation and drawing fit together, and invalid combinations are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.detr.rt_detr.tiny import ARCHITECTURE, CLASSES, MODEL
from varuna_capslog.base.errors import CapslogError, ConfigError
from varuna_capslog.config.settings import Config
from varuna_capslog.model.workload import load_workload

pytest.importorskip("transformers", minversion="5.0")

from detr_pipeline.rt_detr.task import RtDetrSource, RtDetrWorkload


def task(tmp_path: Path, model: dict[str, Any] | None = None, stretch: Any = (64, 96)) -> RtDetrWorkload:
    data = {"root": str(tmp_path / "data"), "digits": {"train_images": 6, "val_images": 3}}
    config = Config(
        workload="detr_pipeline.rt_detr:workload",
        model=(MODEL | {"num_classes": None} if model is None else model),
        data=data | {"augment": {"stretch": stretch}},
        run_dir=tmp_path / "run",
    )
    workload = load_workload(config)
    assert isinstance(workload, RtDetrWorkload)
    return workload


def test_from_pictures_to_scores(tmp_path: Path) -> None:
    """A training minibatch in two microbatches, then evaluation of another data set and a drawing."""
    workload = task(tmp_path)
    torch.manual_seed(0)
    chain, source = workload.build_chain(), workload.train_data()
    assert isinstance(source, RtDetrSource)
    minibatch = source.minibatch([[0, 1], [2, 3]], epoch=1)
    counts = [len(target["labels"]) for group in minibatch.targets for target in group]
    assert minibatch.normalisers["boxes"] == sum(counts)
    assert minibatch.normalisers["most"] == max(counts)
    for index in range(2):
        inputs = source.load(minibatch, index)
        assert {name: tuple(value.shape) for name, value in inputs.items()} == {
            name: spec.shape for name, spec in minibatch.inputs[index].items()
        }
        assert inputs["images"].shape == (2, 3, 64, 96)
        parts = workload.loss(chain.run(inputs), minibatch.targets[index], minibatch.normalisers)
        assert parts["loss"].isfinite()
        assert {"loss_vfl", "loss_bbox_aux_2", "loss_giou_dn_2"} <= set(parts)
    again = source.minibatch([[3], [0, 1, 2]], epoch=1)
    ours, theirs = source.load(minibatch, 1), source.load(again, 0)
    assert torch.equal(ours["images"][1], theirs["images"][0])
    assert torch.equal(ours["dn_boxes"][1], theirs["dn_boxes"][0])  # noise depends on the sample, not on its microbatch

    data, evaluator = workload.val_data(), workload.evaluator()
    assert data is not None
    assert evaluator is not None
    val = data.minibatch([[0, 1, 2]], 0)
    assert val.inputs[0]["dn_boxes"].shape == (3, 0, 4)
    for layer in chain.layers:
        layer.module.eval()
    with torch.no_grad():
        outputs = chain.run(data.load(val, 0))
    scores = evaluator.summarize(evaluator.collect(outputs, val, 0))
    assert 0 <= scores["AP"] <= 1
    (drawn,) = workload.predict(chain, workload.sample_files(1), tmp_path / "drawn")
    assert drawn.stat().st_size > 0


def test_perfect_outputs_score_one(tmp_path: Path) -> None:
    """Boxes at their places, with their classes: faults of `detections_of` or the stretched pictures would cost AP."""
    workload = task(tmp_path)
    data, evaluator = workload.val_data(), workload.evaluator()
    assert data is not None
    assert evaluator is not None
    val = data.minibatch([[0, 1, 2]], 0)
    logits, boxes = torch.full((3, 10, 10), -9.0), torch.full((3, 10, 4), 0.5)
    for image, target in enumerate(val.targets[0]):
        for place, (label, box) in enumerate(zip(target["labels"].tolist(), target["boxes"], strict=True)):
            logits[image, place, label], boxes[image, place] = 9.0, box
    results = evaluator.collect({"logits_2": logits, "boxes_2": boxes}, val, 0)
    assert evaluator.summarize(results)["AP"] == pytest.approx(1)


@pytest.mark.parametrize("denoising", [6, 0])
def test_the_profilers_targets_go_through_the_loss(tmp_path: Path, denoising: int) -> None:
    workload = task(tmp_path, MODEL | {"architecture": ARCHITECTURE | {"num_denoising": denoising}})
    inputs = {name: spec.zeros() for name, spec in workload.profile_inputs(2).items()}
    targets, normalisers = workload.profile_targets(2)
    parts = workload.loss(workload.build_chain().run(inputs), targets, normalisers)
    assert parts["loss"].isfinite()
    assert ("loss_vfl_dn_0" in parts) == bool(denoising)


def test_weights_go_out_and_in_again(tmp_path: Path) -> None:
    """Names are transformers', as `capslog export --format hf` writes them."""
    from varuna_capslog.training.stored_layers import write_weights

    workload = task(tmp_path, MODEL)
    torch.manual_seed(0)
    chain = workload.build_chain()
    write_weights(workload, chain, tmp_path / "hf", "hf")
    again = task(tmp_path, {"folder": str(tmp_path / "hf"), "num_classes": CLASSES}).build_chain()
    ours, theirs = chain.named_tensors(), again.named_tensors()
    assert not [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
    fewer = task(tmp_path, {"folder": str(tmp_path / "hf"), "num_classes": 2}).build_chain().named_tensors()
    assert fewer["decoder.0.class_embed.weight"].shape[0] == 2
    assert torch.equal(fewer["decoder.0.bbox_embed.layers.0.weight"], ours["decoder.0.bbox_embed.layers.0.weight"])
    write_weights(workload, chain, tmp_path / "one.safetensors", "safetensors")
    weights, skipped = workload.import_weights(tmp_path / "one.safetensors")
    assert skipped == []
    assert not [name for name, tensor in chain.named_parameters().items() if not torch.equal(tensor, weights[name])]


@pytest.mark.parametrize(
    ("model", "stretch", "message"),
    [
        (MODEL, None, "RT-DETR knows no padding"),
        (MODEL, (64, 100), r"data.augment.stretch is \[64, 100\]"),
        ({"architecture": {"num_querys": 3}}, (64, 64), "did you mean 'num_queries'"),
        ({"backbone": {"depth": [1]}}, (64, 64), "did you mean 'depths'"),
        ({"architecture": {"auxiliary_loss": False}}, (64, 64), "auxiliary_loss is False, which is not supported"),
        ({"architecture": {"encoder_in_channels": [1, 2, 3]}}, (64, 64), "gives maps of"),
        ({"architecture": {"d_model": "wide"}}, (64, 64), "refused by transformers"),
        ({"folder": "/nowhere"}, (64, 64), "model.folder=/nowhere cannot be read"),
        ({"folder": "/nowhere", "backbone": {"depths": [1]}}, (64, 64), "remove them, or the folder"),
    ],
)
def test_what_is_refused(tmp_path: Path, model: dict[str, Any], stretch: Any, message: str) -> None:
    with pytest.raises((ConfigError, CapslogError), match=message):
        task(tmp_path, model, stretch).build_chain()
