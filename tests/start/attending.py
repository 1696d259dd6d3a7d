"""A small workload with attention: an embedding, two blocks of one kind, a head. Its attention is eager."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.workload import Workload
from varuna_capslog.variants.attention import EagerAttention


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.core, self.out = nn.Linear(8, 24), EagerAttention(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.into(x).chunk(3, -1))
        return x + self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


class Attending(Workload):
    name = "attending"

    def build_chain(self) -> Chain:
        layers = {"embed": nn.Linear(4, 8), "block.0": _Block(), "block.1": _Block(), "head": nn.Linear(8, 2)}
        return Chain([Layer(name, module) for name, module in layers.items()], ("x",), ("x",), self.name)

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        return {"loss": outputs["x"].square().mean()}

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((microbatch_size, 256, 4), torch.float32)}


def workload(config: Any) -> Workload:
    """Return the workload that a config names."""
    return Attending()
