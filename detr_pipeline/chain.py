"""DETR as a chain: its units in order, joined into layers as `model.cut_points` says.

These tensors cross the cuts: features `x` [B, C, h, w] or `memory` [B, h, w, C], `valid` [B, 2] (int64, rows and
columns of the map that belong to each image), and from the first decoder layer on `hidden` [K, B, Q, C] and `query`
[Q, C]; padding masks and position codes never do.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet
from torchvision.ops import FrozenBatchNorm2d

from detr_pipeline.transformer import DecoderLayer, EncoderLayer, FirstDecoderLayer, Heads, PredictingDecoderLayer
from varuna_capslog.base.errors import ConfigError
from varuna_capslog.model.chain import Chain, Layer

if TYPE_CHECKING:
    from detr_pipeline.config import ModelConfig

__all__ = [
    "FittingWeights",
    "build_chain",
    "fit",
    "from_reference",
    "load_into",
    "reference_names",
    "to_reference",
    "valid_cells",
]

# -- A torchvision ResNet as a list of units: stem, residual blocks, projection to the transformer's width.
#
# Weights are never downloaded; `model.weights` names a file.


_NORM_LAYERS: Mapping[str, Callable[[int], nn.Module]] = {
    "frozen": FrozenBatchNorm2d,
    "batch": nn.BatchNorm2d,
    "group": partial(nn.GroupNorm, 32),
}


def valid_cells(sizes: Tensor, padded: tuple[int, int], cells: tuple[int, int]) -> Tensor:
    """Return [B, 2] int64: rows and columns of the feature map, `cells` (h, w), that belong to each image.

    DETR resizes the pixel mask to the map by nearest neighbour; images lie in the upper left corner, so counting the
    sampled rows and columns inside the image gives the same result.

    sizes: [B, 2] int64, valid (h, w) of each image in pixels. padded: (H, W) of the padded images.
    """
    counts = []
    for axis in (0, 1):
        pixels = torch.arange(padded[axis], dtype=torch.float32, device=sizes.device)
        sampled = F.interpolate(pixels[None, None], size=cells[axis], mode="nearest")[0]
        counts.append((sampled < sizes[:, axis, None]).sum(1))
    return torch.stack(counts, 1)


class Stem(nn.Module):
    """Network up to and including the first residual block, and the size of each image on the last feature map.

    Called with images [B, 3, H, W] and their valid sizes [B, 2]; returns features [B, C, ceil(H/4), ceil(W/4)] and the
    valid rows and columns [B, 2] of the backbone's last map.
    """

    def __init__(self, network: resnet.ResNet, halvings: int) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu, self.maxpool = network.conv1, network.bn1, network.relu, network.maxpool
        self.block = network.layer1[0]
        self.halvings = halvings

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        padded = height, width = images.shape[-2], images.shape[-1]
        for _ in range(self.halvings):
            height, width = (height + 1) // 2, (width + 1) // 2  # every strided layer rounds up
        valid = valid_cells(sizes, padded, (height, width))
        return self.block(self.maxpool(self.relu(self.bn1(self.conv1(images))))), valid


class Projection(nn.Conv2d):
    """1x1 convolution to the transformer's width: [B, C, h, w] to memory [B, h, w, hidden]. Memory has the weights'
    dtype even under autocast, so that the transformer sums its residuals in full precision.
    """

    def __init__(self, channels: int, hidden_dim: int) -> None:
        super().__init__(channels, hidden_dim, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).permute(0, 2, 3, 1).to(self.weight.dtype, memory_format=torch.contiguous_format)


def backbone_units(config: ModelConfig) -> list[Layer]:
    """Return `backbone.stem` (with the first block), the other blocks `backbone.<stage>.<index>`, and `projection`."""
    stages = ["layer1", "layer2", "layer3", "layer4"][: int(config.last_layer[-1])]
    dilated = [config.dilation and stage == config.last_layer for stage in ("layer2", "layer3", "layer4")]
    network: resnet.ResNet = getattr(resnet, config.backbone)(
        weights=None, norm_layer=_NORM_LAYERS[config.norm], replace_stride_with_dilation=dilated
    )
    if config.freeze == "stem+layer1":
        for part in (network.conv1, network.bn1, network.layer1):
            part.requires_grad_(False)
    # conv1, the pooling, and every stage after layer1 that is not dilated halve the map once each.
    stem = Stem(network, halvings=len(stages) + 1 - config.dilation)
    units = [Layer("backbone.stem", stem, ("images", "sizes"), ("x", "valid"))]
    for stage in stages:
        for index, block in enumerate(getattr(network, stage)):
            if (stage, index) != ("layer1", 0):
                units.append(Layer(f"backbone.{stage}.{index}", block))
    channels = 2 ** (5 + len(stages)) * type(network.layer1[0]).expansion
    units.append(Layer("projection", Projection(channels, config.hidden_dim), ("x",), ("memory",)))
    return units


# -- DETR as a chain


INPUTS = ("images", "sizes")
OUTPUTS = ("logits", "boxes")
_BACKBONE = "backbone."
_STAGES = ("backbone.layer2.0", "backbone.layer3.0", "backbone.layer4.0")
# For each value of `model.cut_points`, prefixes of the names of units that are joined to the unit before.
_NOT_CUT_BEFORE = {
    "all": (),
    "instage": _STAGES,
    "heads_last": (*_STAGES, "heads"),
    # The frozen start stays whole: no gradient flows there and its activations are the largest of all.
    "paper": ("backbone.layer1.", "backbone.layer3.0", "backbone.layer4.0"),
}


class Joined(nn.Module):
    """Consecutive units as one layer; a module has its unit's name, underscores for dots. needed: names read later."""

    def __init__(self, units: Sequence[Layer], needed: frozenset[str]) -> None:
        super().__init__()
        self.unit_names = tuple(unit.name for unit in units)
        self._units = tuple(units)
        for unit in units:
            self.add_module(_child(unit.name), unit.module)
        reads: list[str] = []
        written: list[str] = []
        for unit in units:
            reads += [name for name in unit.reads if name not in written and name not in reads]
            written += [name for name in unit.writes if name not in written]
        self.reads = tuple(reads)
        self.writes = tuple(name for name in written if name in needed)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(self.reads, tensors, strict=True))
        for unit in self._units:
            values.update(unit(values))
        return tuple(values[name] for name in self.writes)


def build_chain(config: ModelConfig, num_classes: int) -> Chain:
    """Return a DETR with fresh weights from torch's random state; the config's `num_classes` and `weights` have no
    effect here.

    num_classes: classes without no-object. Raises ConfigError where `cut_points` names an unknown layer.
    """
    units = backbone_units(config) + _transformer_units(config, num_classes)
    starts = sorted(_starts(units, config.cut_points))
    ends = [*starts[1:], len(units)]
    layers = [_joined(units, start, end) for start, end in zip(starts, ends, strict=True)]
    return Chain(layers, INPUTS, OUTPUTS, name=_name(config))


def units_of(layer: Layer) -> list[tuple[str, str]]:
    """Return the name of every unit in a layer of this chain, and the prefix of the unit's parameters in the layer."""
    if isinstance(layer.module, Joined):
        return [(name, f"{_child(name)}.") for name in layer.module.unit_names]
    return [(layer.name, "")]


def _child(unit: str) -> str:
    return unit.replace(".", "_")


def _name(config: ModelConfig) -> str:
    """Return the model's name as in the paper's table, such as rn50-d-e6, with other differences in size appended."""
    parts = [config.backbone.replace("resnet", "rn")]
    if config.last_layer != "layer4":
        parts.append(config.last_layer)
    if config.dilation:
        parts.append("d")
    parts.append(f"e{config.encoder_layers}")
    if config.decoder_layers != 6:
        parts.append(f"d{config.decoder_layers}")
    return "-".join(["detr", *parts])


def _transformer_units(config: ModelConfig, num_classes: int) -> list[Layer]:
    units = [
        Layer(f"encoder.{index}", EncoderLayer(config), ("memory", "valid"), ("memory",))
        for index in range(config.encoder_layers)
    ]
    last = config.decoder_layers - 1
    context = ("hidden", "memory", "valid", "query")
    if config.heads == "last":
        units.append(Layer("decoder.0", FirstDecoderLayer(config), ("memory", "valid"), ("hidden", "query")))
        units += [Layer(f"decoder.{index}", DecoderLayer(config), context, ("hidden",)) for index in range(1, last + 1)]
        units.append(Layer("heads", Heads(config, num_classes), ("hidden",), OUTPUTS))
        return units
    heads = Heads(config, num_classes)
    units.append(
        Layer("decoder.0", FirstDecoderLayer(config, heads), ("memory", "valid"), ("hidden", "query", *OUTPUTS))
    )
    for index in range(1, last + 1):
        decoder = PredictingDecoderLayer(config, heads, index == last)
        writes = OUTPUTS if index == last else ("hidden", *OUTPUTS)
        units.append(Layer(f"decoder.{index}", decoder, (*context, *OUTPUTS), writes))
    return units


def _starts(units: Sequence[Layer], cut_points: str | Sequence[str]) -> set[int]:
    """Return the positions of the units that begin a layer. The projection always stays with the last residual block: a
    cut behind the projection sends an eighth of the bytes (256 of 2048 channels), and all encoder layers are alike.
    """
    names = [unit.name for unit in units]
    everywhere = {index for index, name in enumerate(names) if name != "projection"}
    if not isinstance(cut_points, str):
        return {0, *(_position(names, everywhere, name) for name in cut_points)}
    return {index for index in everywhere if not names[index].startswith(_NOT_CUT_BEFORE[cut_points])}


def _position(names: Sequence[str], everywhere: set[int], wanted: str) -> int:
    layers = {names[index]: index for index in sorted(everywhere)}
    layers[f"{names[names.index('projection') - 1].removeprefix(_BACKBONE)}-projection"] = names.index("projection") - 1
    if wanted in layers:
        return layers[wanted]
    near = difflib.get_close_matches(wanted, layers, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known layers: {', '.join(layers)}"
    raise ConfigError(f"model.cut_points names the layer {wanted!r}, which this model has not; {hint}")


def _joined(units: Sequence[Layer], start: int, end: int) -> Layer:
    """Join the units start..end-1 into one layer. Learning rates are chosen by the word `backbone` in addresses, so the
    name of a layer that has other parts, too, must not contain that word.
    """
    if end - start == 1:
        return units[start]
    needed = frozenset(OUTPUTS).union(*(unit.reads for unit in units[end:]))
    module = Joined(units[start:end], needed)
    first, last = units[start].name, units[end - 1].name
    all_backbone = first.startswith(_BACKBONE) and last.startswith(_BACKBONE)
    name = f"{first.removeprefix(_BACKBONE)}-{last.removeprefix(_BACKBONE)}"
    return Layer(_BACKBONE + name if all_backbone else name, module, module.reads, module.writes)


# -- Weights files: Facebook's DETR state dict <-> addresses of our chain, and torchvision's ResNet files. Only tensors
# are unpickled, and weights are never downloaded.


_BODY = "backbone.0.body."
_COUNTER = "num_batches_tracked"
_SHOWN_SKIPS = 3


def reference_names(chain: Chain) -> dict[str, str]:
    """Return the name in Facebook's layout of every address that has one (BatchNorm's batch counters have none)."""
    names = {}
    state = chain.named_tensors()
    for layer in chain.layers:
        for unit, prefix in units_of(layer):
            unit_prefix = f"{layer.name}.{prefix}"
            for address in state:
                if address.startswith(unit_prefix) and not address.endswith(_COUNTER):
                    names[address] = _reference_name(unit, address[len(unit_prefix) :])
    return names


def _reference_name(unit: str, name: str) -> str:
    kind, _, index = unit.partition(".")
    if kind == "backbone":
        if index != "stem":
            return f"{_BODY}{index}.{name}"
        return _BODY + (f"layer1.0.{name.removeprefix('block.')}" if name.startswith("block.") else name)
    if kind == "projection":
        return f"input_proj.{name}"
    if name.startswith("query_embed."):
        return name
    if kind == "heads" or name.startswith("heads."):
        name = name.removeprefix("heads.")
        return f"transformer.decoder.{name}" if name.startswith("norm.") else name
    return f"transformer.{kind}.layers.{index}.{name}"


def to_reference(chain: Chain) -> dict[str, Tensor]:
    """Return the chain's weights in Facebook's layout, detached, on the CPU."""
    names = reference_names(chain)
    state = chain.named_tensors()
    return {name: state[address].detach().cpu() for address, name in names.items()}


@dataclass(frozen=True)
class FittingWeights:
    """Tensors that a weights file and a chain have in common.

    Attributes:
        tensors: {address: tensor}.
        skipped: one line per entry that has another shape (heads for other classes), has no place in this chain, or is
            missing from the file. A bare ResNet's classifier, and parts that no ResNet has, are not listed.
        wanted: number of the chain's tensors that a file of this kind can have.
    """

    tensors: dict[str, Tensor]
    skipped: list[str]
    wanted: int

    def summary(self) -> str:
        """Return a sentence with the number of tensors that fit, and examples that do not fit."""
        shown = "; ".join(self.skipped[:_SHOWN_SKIPS]) + ("; ..." if len(self.skipped) > _SHOWN_SKIPS else "")
        return f"it fits {len(self.tensors)} of {self.wanted} tensors, and {len(self.skipped)} are left out ({shown})"


def fit(chain: Chain, state: Mapping[str, Tensor]) -> FittingWeights:
    """Return weights for the chain's addresses from Facebook's layout.

    Args:
        chain: may be on the meta device and is not changed.
        state: state dict of a DETR, of a panoptic model (`detr.` before every name), or of a torchvision ResNet.
    """
    state, bare = _normalised(state)
    names = reference_names(chain)
    ours = chain.named_tensors()
    fitting, skipped, wanted = {}, [], 0
    for address, name in names.items():
        if bare and not name.startswith(_BODY):
            continue
        wanted += 1
        if name not in state:
            skipped.append(f"{name}: not in the file")
        elif state[name].shape != ours[address].shape:
            skipped.append(f"{name}: {list(state[name].shape)} in the file, {list(ours[address].shape)} in the model")
        else:
            fitting[address] = state[name]
    placed = set(names.values())
    skipped += [f"{name}: no place in the model" for name in state if name not in placed]
    return FittingWeights(fitting, skipped, wanted)


def from_reference(chain: Chain, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights that `fit` finds, and the entries that it skips."""
    fitting = fit(chain, state)
    return fitting.tensors, fitting.skipped


def _normalised(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
    bare = "conv1.weight" in state or all(name.startswith(_BODY) for name in state)
    if "conv1.weight" in state:
        state = {_BODY + name: tensor for name, tensor in state.items() if not name.startswith("fc.")}
    elif any(name.startswith("detr.") for name in state):
        state = {name.removeprefix("detr."): tensor for name, tensor in state.items()}
    return {name: tensor for name, tensor in state.items() if not name.endswith(_COUNTER)}, bare


@torch.no_grad()
def load_into(chain: Chain, weights: Mapping[str, Tensor]) -> None:
    """Copy weights by address into a chain that has memory (not on the meta device)."""
    state = chain.named_tensors()
    for address, tensor in weights.items():
        state[address].copy_(tensor)
