"""Steps of DETR and RT-DETR for the pool: a small model of every layout, several image sizes in one minibatch.

DETR's have dropout. RT-DETR's plain step is transformers' own model with its own loss, which draws other numbers than
ours, and therefore has neither dropout nor noise.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torchvision.models import resnet

from detr_pipeline.rt_detr.task import Groups, Noise, RtDetrWorkload
from tests.detr.rt_detr import tiny
from tests.engine.layouts import Cuts, layout_for
from tests.engine.shapes import SharedShapes
from varuna_capslog.config.settings import Config
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layers import seed_layer
from varuna_capslog.engine.pipeline import PipelineEngine, Ready
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import HostTargets, Minibatch, Workload, load_workload
from varuna_capslog.training.loop import verify_copies

CPU = torch.device("cpu")
SMALL = {
    "encoder_layers": 2,
    "decoder_layers": 3,
    "hidden_dim": 32,
    "attention_heads": 4,
    "feedforward": 64,
    "queries": 6,
    "dropout": 0.1,
    "num_classes": 5,
    "cut_points": "all",
}
MODELS: dict[str, dict[str, Any]] = {
    "dilated": SMALL | {"backbone": "resnet50", "dilation": True},
    "shared heads": SMALL
    | {"backbone": "resnet18", "last_layer": "layer3", "norm": "group", "freeze": "none", "heads": "every_decoder"},
    "batch norm": SMALL | {"backbone": "resnet18", "last_layer": "layer3", "norm": "batch", "freeze": "none"},
}
SIZES = ((64, 96), (96, 64), (64, 96), (80, 64))


MODELS["variants"] = SMALL | {"backbone": "resnet18", "last_layer": "layer3", "freeze": "none"}
MODELS["split"] = MODELS["variants"]
MODELS["split, shared heads"] = MODELS["split, keys"] = MODELS["shared heads"]
MODELS["rt-detr"] = tiny.MODEL | {"architecture": tiny.ARCHITECTURE | tiny.QUIET}
SECTIONS: dict[str, dict[str, Any]] = {
    "variants": {
        "variants": {"*coder.*": "chunked", "*layer*": "channels-last", "*stem": "channels-last"},
        "numerics": "close",
    },
    "split": {"splits": {"encoder.*": "tensor-2", "decoder.1": "tensor-4"}, "numerics": "close"},
    "split, shared heads": {"splits": {"encoder.*": "sequence-3", "decoder.*": "tensor-2"}, "numerics": "close"},
    "split, keys": {"splits": {"encoder.*": "tensor-2", "decoder.*": "sequence-3"}, "numerics": "close"},
    "rt-detr": {"workload": "detr_pipeline.rt_detr:workload", "data": {"augment": {"stretch": [64, 64]}}},
}


def short_resnet(**options: Any) -> resnet.ResNet:
    """Return a resnet50 with one block in each of its four parts."""
    return resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], **{k: v for k, v in options.items() if k != "weights"})


@functools.cache
def _built(name: str) -> tuple[Workload, Chain]:
    config = {"workload": "detr_pipeline:workload", "model": MODELS[name]} | SECTIONS.get(name, {})
    workload = load_workload(Config.model_validate(config))
    torch.manual_seed(0)
    with mock.patch.object(resnet, "resnet50", short_resnet):
        return workload, workload.chosen_chain()


def build(name: str) -> tuple[Workload, Chain]:
    """Return the workload and its chain, which a process builds once."""
    return copy.deepcopy(_built(name))


def minibatch(name: str) -> tuple[Minibatch, list[dict[str, Tensor]]]:
    """Four microbatches of one or two images, of DETR padded ones; one image has no boxes."""
    if name == "rt-detr":
        return _for_rt_detr()
    generator = torch.Generator().manual_seed(1)
    inputs, targets = [], []
    for index, (height, width) in enumerate(SIZES):
        count = 1 + index % 2
        images = torch.randn(count, 3, height, width, generator=generator)
        sizes = torch.tensor([[height, width], [height - 16, width - 24]][:count])
        for image, (rows, columns) in zip(images, sizes.tolist(), strict=True):
            image[:, rows:] = 0
            image[:, :, columns:] = 0
        inputs.append({"images": images, "sizes": sizes})
        boxes = [(index + image) % 3 for image in range(count)]
        targets.append(
            [
                HostTargets(
                    labels=torch.arange(n) % 5,
                    boxes=0.2 + 0.3 * torch.rand(n, 4, generator=generator),
                    image_id=index,
                )
                for n in boxes
            ]
        )
    total = sum(len(target["labels"]) for group in targets for target in group)
    images = sum(len(group) for group in targets)
    specs = [{name: TensorSpec.of(tensor) for name, tensor in values.items()} for values in inputs]
    normalisers = {"boxes": float(total), "queries": float(images * SMALL["queries"])}
    return Minibatch(specs, targets, normalisers, [[index] for index in range(4)]), inputs


def _for_rt_detr() -> tuple[Minibatch, list[dict[str, Tensor]]]:
    """Two images each, since torch 2.14 on a CPU differentiates a batch norm wrongly whose one image is flattened and
    transposed next (finite differences agree with the engine, which lays out gradients between layers, and not with
    plain autograd). Most boxes of a microbatch's image are two, so that transformers makes as many denoising groups.
    """
    targets = [tiny.targets(counts, seed) for seed, counts in enumerate([[2, 1], [1, 2], [2, 0], [2, 2]])]
    groups = Groups.of(2, tiny.ARCHITECTURE["num_denoising"])
    noise = Noise(tiny.CLASSES, tiny.QUIET["label_noise_ratio"], tiny.QUIET["box_noise_scale"])
    sizes = ((64, 64), (64, 96), (96, 64), (64, 64))
    inputs = [tiny.inputs(of, groups, noise, size) for of, size in zip(targets, sizes, strict=True)]
    specs = [{name: TensorSpec.of(tensor) for name, tensor in values.items()} for values in inputs]
    total = sum(len(target["labels"]) for group in targets for target in group)
    normalisers = {"boxes": float(total), "groups": float(groups.count), "most": float(groups.most)}
    return Minibatch(specs, targets, normalisers, [[index] for index in range(4)]), inputs


def of_transformers(name: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients, by the chain's addresses, of transformers' own RT-DETR with its own loss."""
    workload, chain = build(name)
    assert isinstance(workload, RtDetrWorkload)
    torch.manual_seed(0)
    model: Any = workload.build_model().train()
    batch, inputs = minibatch(name)
    total = 0.0
    for values, targets in zip(inputs, batch.targets, strict=True):
        labels = [{"class_labels": target["labels"], "boxes": target["boxes"]} for target in targets]
        share = sum(len(target["labels"]) for target in targets) / batch.normalisers["boxes"]
        loss = model(values["images"], labels=labels).loss * share
        loss.backward()
        total += float(loss.detach())
    parameters = dict(model.named_parameters())
    gradients = {
        address: parameters[parameter_name].grad
        for address, parameter_name in workload.own_names(chain).items()
        if parameter_name in parameters
    }
    return total, {address: gradient for address, gradient in gradients.items() if gradient is not None}


def plain(name: str, seed: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the unsplit model, one autograd graph per microbatch."""
    workload, chain = build(name)
    batch, inputs = minibatch(name)
    total, device = 0.0, torch.device("cpu")
    for layer in chain.layers:
        layer.module.train()
    for index, values in enumerate(inputs):
        seed_layer(device, seed, 1, index, 0)
        outputs = chain.run(values, lambda done, index=index: seed_layer(device, seed, 1, index, done + 1))
        loss = workload.loss(outputs, batch.targets[index], batch.normalisers)["loss"]
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in chain.named_parameters().items() if p.grad is not None}


Shapes = dict[tuple[tuple[str, TensorSpec], ...], list[dict[str, TensorSpec]]]
"""The specs of all cuts, by those of a microbatch."""


class Traced(ShapeTable):
    """Shapes that another process has traced: tracing takes several times as long as the step."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes

    def boundaries(self, inputs: Mapping[str, TensorSpec]) -> list[dict[str, TensorSpec]]:
        return self._shapes[tuple(sorted(inputs.items()))]


def step(
    communicator: Communicator,
    name: str,
    layout: Cuts,
    options: dict[str, Any],
    shapes: Shapes | None = None,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """Make one step on the pipeline; return gradients before clipping, weights after it, and the shapes that it met.

    Args:
        shapes: shapes at the boundaries; None: they are traced.
        device: device of this rank; the returned tensors lie on the CPU.
    """
    workload, chain = build(name)
    settings = EngineOptions(**({"num_microbatches": 4, "num_blocks": 2, "seed": 7, "clip_norm": 0.1} | options))
    placed = layout_for(layout, len(chain), settings.num_blocks)
    ready = Ready(SharedShapes(chain, device.type) if shapes is None else Traced(shapes))
    engine = PipelineEngine(chain, workload.loss, placed, settings, communicator, device, ready)
    batch, inputs = minibatch(name)
    gradients: dict[str, Tensor] = {}

    def keep() -> None:
        gradients.update(
            {name: p.grad.clone().cpu() for name, p in engine.optimizer.parameters.items() if p.grad is not None}
        )

    result = train_step(engine, 1, batch, inputs.__getitem__, before_commit=keep)
    verify_copies(engine)
    state = {
        f"{layer.name}.{n}": p.detach().clone().cpu() for layer in engine.layers for n, p in layer.parameters.items()
    }
    met: Shapes = {tuple(sorted(inputs.items())): engine.table.boundaries(inputs) for inputs in batch.inputs}
    return {"loss": result.parts["loss"], "gradients": gradients, "state": state, "shapes": met}
