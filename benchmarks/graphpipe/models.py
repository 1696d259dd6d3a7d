"""GraphPipe's three models (thesis, Sec. 3.10.3) as profiles: layers of a roofline of a V100, nothing is run.

A layer's forward takes the longer of its FLOPs at 14 TFLOP/s and its bytes at 800 GB/s (weights, inputs and outputs),
and 20 us to start its kernels; its backward twice that. Parameters have a gradient and two moments beside them (Adam,
float32); embeddings, whose gradients are sparse, have nothing beside them. What the text leaves open is said below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from varuna_capslog.profiles.record import LayerProfile, Profile, TensorRecord

__all__ = ["MINIBATCH", "MODELS", "candle_uno", "case_study", "dlrm", "mmt"]

FLOPS, BANDWIDTH, START = 14e12, 800e9, 20e-6
FLOAT = 4


@dataclass(frozen=True)
class Layer:
    """FLOPs of the forward, values saved and values passed on, each per sample; parameters; copies of them kept."""

    flops: float
    saved: int
    output: int
    parameters: int
    copies: int = 4


def dense(width: int = 4096, inputs: int | None = None) -> Layer:
    """A feed-forward layer and its activation."""
    weights = (inputs or width) * width
    return Layer(2.0 * weights, 2 * width, width, weights)


def transformer(hidden: int = 1024, heads: int = 16, sequence: int = 256, inner: int = 4096) -> Layer:
    """A transformer layer, of which autograd saves 17 values per token and feature, and 2.5 per score."""
    weights = 4 * hidden * hidden + 2 * hidden * inner
    flops = sequence * (2.0 * weights + 4.0 * sequence * hidden)
    saved = sequence * (17 * hidden + int(2.5 * heads * sequence))
    return Layer(flops, saved, sequence * hidden, weights)


def embedding(rows: int = 1_000_000, width: int = 64, bag: int = 100) -> Layer:
    """Return an embedding table; the vectors of a bag are passed on concatenated."""
    return Layer(0.0, 0, bag * width, rows * width, 1)


def graph(branches: Sequence[Sequence[Layer]], behind: Sequence[Layer], samples: int, name: str) -> Profile:
    """Return the profile of branches and the layers behind their join, for microbatches of `samples`."""
    layers, tensors, ends = list[Layer](), list[TensorRecord](), list[int]()
    for branch in branches:
        for place, layer in enumerate(branch):
            if place:
                tensors.append(_tensor(len(layers) - 1, layers[-1], samples, (len(layers),)))
            layers.append(layer)
        ends.append(len(layers) - 1)
    tensors += [_tensor(end, layers[end], samples, (len(layers),)) for end in ends]
    for place, layer in enumerate(behind):
        if place:
            tensors.append(_tensor(len(layers) - 1, layers[-1], samples, (len(layers),)))
        layers.append(layer)
    rows = []
    for number, layer in enumerate(layers):
        weights = FLOAT * layer.parameters
        moved = weights * (layer.copies > 1) + 3 * FLOAT * samples * layer.output
        forward = max(layer.flops * samples / FLOPS, moved / BANDWIDTH) + START
        crossing = sum(tensor.bytes for tensor in tensors if (tensor.writer or 0) <= number < tensor.readers[-1])
        static, saved = weights * layer.copies, FLOAT * samples * layer.saved
        rows.append(
            LayerProfile(
                f"{number}",
                static + saved,
                static + saved if number else None,
                static,
                saved,
                saved,
                crossing,
                weights,
                forward,
                2 * forward,
            )
        )
    conditions = {"device": "cuda", "microbatch_size": samples}
    return Profile(tuple(rows), name, "estimated", conditions, tensors=tuple(tensors))


def _tensor(writer: int, layer: Layer, samples: int, readers: tuple[int, ...]) -> TensorRecord:
    return TensorRecord(f"out{writer}", FLOAT * samples * layer.output, True, writer, readers)


def join(width: int) -> Layer:
    """Return a layer without parameters that adds or concatenates the branches' outputs."""
    return Layer(0.0, width, width, 0)


def mmt(samples: int) -> Profile:
    """Multi-modal transformer: four branches of eight layers, joined at the end. The head is not counted."""
    return graph([[transformer()] * 8] * 4, [join(4 * 256 * 1024)], samples, "MMT")


def dlrm(samples: int) -> Profile:
    """Seven branches of four layers, seven embeddings. Open in the text: the interaction is a join to 4096 values, and
    two layers of 4096 follow it.
    """
    branches = [[dense()] * 4] * 7 + [[embedding()]] * 7
    return graph(branches, [join(4096), dense(), dense()], samples, "DLRM")


def candle_uno(samples: int, branches: int = 7) -> Profile:
    """Branches of four layers of 4096. Open in the text: they are joined to 4096 values, and nothing follows."""
    return graph([[dense()] * 4] * branches, [join(4096)], samples, f"CANDLE-Uno, {branches} branches")


def case_study(samples: int) -> Profile:
    """Sec. 3.7.4: two branches of four blocks, each attention and two dense layers; the widths are those of MMT."""
    return graph([[transformer()] * 4] * 2, [join(2 * 256 * 1024)], samples, "case study")


MODELS = {"MMT": mmt, "DLRM": dlrm, "CANDLE-Uno": candle_uno}
MINIBATCH = {
    "MMT": {4: 64, 8: 128, 16: 256, 32: 512},
    "DLRM": {4: 256, 8: 512, 16: 1024, 32: 2048},
    "CANDLE-Uno": {4: 4096, 8: 8192, 16: 16384, 32: 32768},
}
"""Samples of a step by the number of devices, as printed."""
