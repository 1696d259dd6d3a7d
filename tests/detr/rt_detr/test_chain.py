"""The chain gives the same outputs, losses and gradients as transformers' own RT-DETR with equal weights and batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.detr.rt_detr.tiny import ARCHITECTURE, CLASSES, MODEL, QUIET, inputs, targets

pytest.importorskip("transformers", minversion="5.0")

from detr_pipeline.rt_detr.chain import RtDetrModel, build_model, chain_of, own_names
from detr_pipeline.rt_detr.task import Groups, Noise, set_loss
from varuna_capslog.model.chain import Chain

COUNTS = [3, 0, 2]


def pair(**changes: Any) -> tuple[Any, Chain, Any]:
    """Return transformers' model, and a chain of another model with its weights."""
    section = RtDetrModel(**MODEL | {"architecture": ARCHITECTURE | changes})
    torch.manual_seed(3)
    theirs, copy = build_model(section, CLASSES), build_model(section, CLASSES)
    with torch.no_grad():
        for parameter in theirs.parameters():  # heads and offsets begin with zeros, which would hide much
            parameter += 0.02 * torch.randn_like(parameter)
    copy.load_state_dict(theirs.state_dict())
    return theirs, chain_of(copy), section


def their_labels(of: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    return [{"class_labels": target["labels"], "boxes": target["boxes"]} for target in of]


def close(ours: Tensor, theirs: Tensor, scale: float = 0.0) -> None:
    # rounding: 1.04e-5 on some processors, less on others
    bound = 2e-5 * max(float(theirs.detach().abs().max()), scale)
    assert float((ours - theirs).detach().abs().max()) <= bound, (float((ours - theirs).detach().abs().max()), bound)


@pytest.mark.parametrize("changes", [{}, {"num_denoising": 0}, {"normalize_before": True, "encoder_layers": 2}])
def test_training_step(changes: dict[str, Any]) -> None:
    theirs, chain, _ = pair(**QUIET | changes)
    config, of = theirs.config, targets(COUNTS)
    groups = Groups.of(max(COUNTS), config.num_denoising)
    values = inputs(of, groups, Noise(CLASSES, config.label_noise_ratio, config.box_noise_scale))
    theirs.train()
    result = theirs(values["images"], labels=their_labels(of))
    result.loss.backward()
    for layer in chain.layers:
        layer.module.train()
    outputs = chain.run({name: values[name] for name in chain.inputs})
    normalisers = {"boxes": float(sum(COUNTS)), "groups": float(groups.count), "most": float(groups.most)}
    parts = set_loss(outputs, of, normalisers, config)
    parts["loss"].backward()

    close(torch.stack([outputs[f"logits_{k}"] for k in range(3)], 1), result_of(theirs, "logits", result))
    close(outputs["boxes_enc"], result.enc_topk_bboxes)
    assert set(parts) - {"loss"} == set(result.loss_dict)
    for name, loss in result.loss_dict.items():
        close(parts[name], loss)
    close(parts["loss"], result.loss)
    names = own_names(theirs, chain)
    parameters = dict(theirs.named_parameters())
    largest = max(float(weight.grad.abs().max()) for weight in parameters.values() if weight.grad is not None)
    ours = chain.named_parameters()
    assert sorted({names[address] for address in ours}) == sorted(parameters)
    reached = 0
    for address, parameter in ours.items():
        gradient = parameters[names[address]].grad
        if gradient is None:
            assert parameter.grad is None
        else:
            close(parameter.grad, gradient, 1e-3 * largest)
            reached += bool(gradient.any())
    assert reached > 0.9 * len(ours)
    # running statistics of both have seen the same batch
    buffers = dict(theirs.named_buffers())
    for address, tensor in chain.named_tensors().items():
        if address not in ours:
            close(tensor.float(), buffers[names[address]].float())


def result_of(model: Any, kind: str, result: Any) -> Tensor:
    """Return all decoder layers' logits [B, K, D + Q, C]: in training the model returns only the last layer's."""
    with torch.no_grad():
        assert kind == "logits"
    logits = []
    for index, head in enumerate(model.model.decoder.class_embed):
        logits.append(head(result.intermediate_hidden_states[:, index]))
    return torch.stack(logits, 1)


def test_evaluation_and_what_is_seen() -> None:
    from transformers import RTDetrImageProcessor

    from detr_pipeline.rt_detr.task import best_places

    theirs, chain, _ = pair()
    theirs.eval()
    for layer in chain.layers:
        layer.module.eval()
    of = targets(COUNTS)
    none = Groups.of(max(COUNTS), 0)
    with torch.no_grad():
        values = inputs(of, none, Noise(CLASSES, 0.5, 1.0), (96, 64))
        outputs, result = chain.run(values), theirs(values["images"])
    close(outputs["logits_2"], result.logits)
    close(outputs["boxes_2"], result.pred_boxes)
    size = torch.tensor([120, 200])
    expected = RTDetrImageProcessor().post_process_object_detection(result, 0.0, size.expand(3, 2))
    for image, detections in enumerate(expected):
        scores, classes, corners = best_places(outputs["logits_2"][image], outputs["boxes_2"][image], size, CLASSES)
        close(scores, detections["scores"])
        assert classes.tolist() == detections["labels"].tolist()
        close(corners, detections["boxes"])


def test_shares_of_microbatches_add_up() -> None:
    """Two microbatches of a minibatch give transformers' loss of all three images, apart from batch norm."""
    theirs, chain, _ = pair(**QUIET)
    for layer in chain.layers:
        layer.module.eval()
    theirs.eval()
    of, groups = targets(COUNTS), Groups.of(3, 6)
    noise = Noise(CLASSES, 0.0, 1e-9)
    values = inputs(of, groups, noise)
    normalisers = {"boxes": float(sum(COUNTS)), "groups": float(groups.count), "most": float(groups.most)}
    losses = set_loss(chain.run(values), of, normalisers, theirs.config)
    shares: dict[str, Tensor] = {}
    for part in (slice(0, 2), slice(2, 3)):
        outputs = chain.run({name: tensor[part] for name, tensor in values.items()})
        for name, loss in set_loss(outputs, of[part], normalisers, theirs.config).items():
            shares[name] = shares.get(name, torch.zeros(())) + loss
    for name, loss in losses.items():
        close(shares[name], loss)
