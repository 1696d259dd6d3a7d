"""Weights files: Facebook's DETR state dict <-> addresses of our chain, and torchvision's ResNet files. Only tensors
are unpickled, and nothing is ever downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from detr_pipeline.chain import units_of
from varuna_capslog.model.chain import Chain

__all__ = ["FittingWeights", "fit", "from_reference", "load_into", "reference_names", "to_reference"]

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
        found: {address: tensor}.
        skipped: one line per entry that is of another shape (heads for other classes), without a place in this chain,
            or missing from the file. A bare ResNet's classifier and the parts that it cannot have do not count.
        wanted: tensors of the chain that a file of this kind can have.
    """

    found: dict[str, Tensor]
    skipped: list[str]
    wanted: int

    def told(self) -> str:
        """Return a sentence on the number of tensors that fit, and some that do not."""
        shown = "; ".join(self.skipped[:_SHOWN_SKIPS]) + ("; ..." if len(self.skipped) > _SHOWN_SKIPS else "")
        return f"it fits {len(self.found)} of {self.wanted} tensors, and {len(self.skipped)} are left out ({shown})"


def fit(chain: Chain, state: Mapping[str, Tensor]) -> FittingWeights:
    """Return weights for the chain's addresses from Facebook's layout.

    Args:
        chain: may be on the meta device and is not changed.
        state: may be a panoptic model's (`detr.` before every name) or a bare ResNet's as torchvision writes it.
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
    """Return the fitting and the skipped weights of `fit`."""
    both = fit(chain, state)
    return both.found, both.skipped


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
