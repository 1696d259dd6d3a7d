"""Losses and scores that a config may name, and the form of a model's outputs for a user's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn import functional as F

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.causality import makers_of
from varuna_capslog.model.chain import Chain
from varuna_capslog.variants.chunked_loss import chunked_cross_entropy

__all__ = ["COUNTS", "IGNORED", "LOSSES", "METRICS", "counted_by_model", "returned"]


class Outputs(dict[str, Tensor]):
    """Outputs of a model that names them: `outputs.logits` is `outputs["logits"]`."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the model has no output {name!r}; it has {', '.join(self)}") from None


def returned(outputs: Mapping[str, Tensor]) -> Any:
    """Return the outputs as the model returned them: one tensor, a tuple, or `Outputs` where they have names."""
    if set(outputs) <= {"output", "x"} and len(outputs) == 1:
        return next(iter(outputs.values()))
    if all(name.isdigit() for name in outputs):
        return tuple(outputs.values())
    return Outputs(outputs)


def _scores_and_classes(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    scores = _main(outputs)
    classes = _target(batch)
    if scores.dim() < 2 or classes.is_floating_point():
        raise CapslogError(
            f"classes are compared here, but the model returned a tensor of shape {list(scores.shape)} and the batch's "
            f"target is of {classes.dtype}; name a function of your own as loss or metric"
        )
    return scores.reshape(-1, scores.shape[-1]), classes.reshape(-1)


def _main(outputs: Any) -> Tensor:
    if isinstance(outputs, Mapping):
        scores = outputs.get("logits", next(iter(outputs.values())))
    else:
        scores = outputs[0] if isinstance(outputs, tuple) else outputs
    return scores


def _target(batch: Any) -> Tensor:
    target = None
    if isinstance(batch, Mapping):
        target = next((batch[name] for name in ("labels", "label", "target") if name in batch), None)
    elif isinstance(batch, (tuple, list)):
        target = batch[-1]
    if not isinstance(target, Tensor):
        raise CapslogError(
            "the batch has no target: its last entry, or its entry labels, label or target, must be a tensor; name a "
            "function of your own as loss or metric"
        )
    return target


def _cross_entropy(outputs: Any, batch: Any) -> Tensor:
    return F.cross_entropy(*_scores_and_classes(outputs, batch))


def _chunked_cross_entropy(outputs: Any, batch: Any) -> Tensor:
    return chunked_cross_entropy(*_scores_and_classes(outputs, batch))


def _mse(outputs: Any, batch: Any) -> Tensor:
    return F.mse_loss(_main(outputs), _target(batch))


def _accuracy(outputs: Any, batch: Any) -> dict[str, float]:
    scores, classes = _scores_and_classes(outputs, batch)
    return {"accuracy": float((scores.argmax(-1) == classes).float().mean())}


def counted_part(batch: Any) -> float:
    """Return the part of a batch's targets that cross entropy does not ignore; 1 where they have no values."""
    classes = _target(batch)
    if isinstance(classes, FakeTensor):
        return 1.0
    with unset_fake_temporarily():  # an estimate has the values of its first batch
        return float((classes != IGNORED).sum()) / max(classes.numel(), 1)


IGNORED = -100
"""Default `ignore_index` of torch's `cross_entropy`."""
LOSSES = {"cross_entropy": _cross_entropy, "chunked_cross_entropy": _chunked_cross_entropy, "mse": _mse}
COUNTS = {"cross_entropy": counted_part, "chunked_cross_entropy": counted_part}
"""Part of a batch's targets over which a loss takes its mean, by the loss's name."""
METRICS = {"accuracy": _accuracy}


# -- the targets of a loss that the model computes itself


class _NotOfOneInput(Exception):
    """The targets of a model's loss are not made of one of its inputs alone."""


def counted_by_model(chain: Chain) -> Callable[[Mapping[str, Tensor]], float] | None:
    """Return a function from the inputs of a captured model to the part of its targets that its own loss counts, of
    those that it would count if none were ignored. None where that loss is not torch's `cross_entropy` alone.

    What the loss compares with is read from the graph: decoders of transformers shift their labels, others do not.
    """
    last = chain.layers[-1]
    if not isinstance(last.module, fx.GraphModule) or "loss" not in last.writes:
        return None
    graph = last.module.graph
    written: Any = graph.output_node().args[0]
    loss = written if isinstance(written, fx.Node) else written[last.writes.index("loss")]
    if loss.target is not torch.ops.aten.cross_entropy_loss.default:
        return None
    names = ("self", "target", "weight", "reduction", "ignore_index")
    arguments: dict[str, Any] = dict(zip(names, loss.args, strict=False)) | loss.kwargs
    if arguments.get("weight") is not None or arguments.get("reduction", 1) != 1:
        return None
    inputs = {
        node: name
        for node, name in zip(graph.find_nodes(op="placeholder"), last.reads, strict=True)
        if name in chain.inputs
    }
    try:
        name, targets_of = _targets_of(arguments["target"], inputs)
    except _NotOfOneInput:
        return None
    ignored = int(arguments.get("ignore_index", IGNORED))

    def count(labels: Tensor) -> int:
        return int((targets_of(labels) != ignored).sum())

    def part(tensors: Mapping[str, Tensor]) -> float:
        labels = tensors[name]
        if isinstance(labels, FakeTensor) or labels.is_floating_point():
            return 1.0
        with torch.no_grad(), unset_fake_temporarily():  # an estimate has the values of its first batch
            labels = labels.cpu()
            return count(labels) / max(1, count(torch.full_like(labels, int(ignored == 0))))

    return part


def _targets_of(targets: fx.Node, inputs: Mapping[fx.Node, str]) -> tuple[str, fx.GraphModule]:
    """Return the name of the input of which the targets are made, and the graph that makes them, on the CPU."""
    makers, graph, copies = makers_of([targets], _is_device), fx.Graph(), dict[fx.Node, Any]()
    names = [name for node, name in inputs.items() if node in makers]
    if len(names) != 1:
        raise _NotOfOneInput
    for node in targets.graph.nodes:
        if node not in makers:
            continue
        if node in inputs:
            copies[node] = graph.placeholder("labels")
        elif _is_device(node):
            copies[node] = torch.device("cpu")
        elif not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
            raise _NotOfOneInput
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[targets])
    return names[0], fx.GraphModule(nn.Module(), graph)


def _is_device(node: fx.Node) -> bool:
    """True for a tensor's device, whatever the tensor."""
    return bool(node.target is getattr and node.args[1] == "device")
