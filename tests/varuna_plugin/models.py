"""Small models with Varuna CutPoints that have every feature that the plugin must handle, and their oracle.

A model takes the CutPoint class as an argument: Varuna's on the pipeline, `PlainCut` in the one process that is the
oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DIM = 8


class PlainCut(nn.Module):
    """A CutPoint where nothing is cut, with the attributes that the plugin uses; `on_cross` is called each time."""

    on_cross: Callable[[], None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.barrier_event = self.boundary_func = self.cp_func = None

    def forward(self, *inputs: Any) -> Any:
        if self.cp_func is not None:
            return self.cp_func(*inputs)
        if PlainCut.on_cross is not None:
            PlainCut.on_cross()
        return inputs[0] if len(inputs) == 1 else inputs


class Block(nn.Module):
    """Attention with a mask; `project` may belong to several blocks."""

    def __init__(self, project: nn.Module, dropout: float) -> None:
        super().__init__()
        self.query = nn.Linear(DIM, DIM, bias=False)
        self.project, self.norm, self.dropout = project, nn.LayerNorm(DIM), nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (self.query(x) @ x.transpose(1, 2) / DIM**0.5).masked_fill(mask[:, None], -1e9)
        return self.norm(x + self.dropout(self.project(scores.softmax(-1) @ x)))


class Model(nn.Module):
    """Pieces: conv | conv with BatchNorm | tokens + root parameter | block | block | ... | last block, head and loss.

    All blocks share one Linear. At each cut from the second on (activation, bool mask) cross; images may have any size.
    """

    def __init__(
        self,
        cut: type[nn.Module],
        dropout: float = 0.0,
        norm: bool = True,
        inplace: bool = False,
        blocks: int = 3,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, DIM, 3, padding=1)
        self.conv = nn.Conv2d(DIM, DIM, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(DIM) if norm else nn.GroupNorm(2, DIM)
        self.position = nn.Parameter(torch.randn(1, 1, DIM) * 0.1)
        self.register_buffer("scale", torch.tensor(0.5))
        shared = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(shared, dropout) for _ in range(blocks))
        self.head = nn.Linear(DIM, 4)
        self.cuts = nn.ModuleList(cut() for _ in range(2 + blocks))
        self.inplace = inplace
        self.stem.requires_grad_(not frozen)

    def forward(self, images: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
        x = self.cuts[0](self.stem(images))
        # glue code that is not a module: stages must be able to run it
        x = x.mul_(2.0).relu_() if self.inplace else (x * 2.0).relu()
        x = self.norm(self.conv(x))
        mask = x.mean(1).flatten(1) > 1.0
        x, mask = self.cuts[1](x, mask)
        batch, channels, height, width = x.shape
        x = x.reshape(batch, channels, height * width).transpose(1, 2) * self.scale + self.position
        for cut, block in zip(self.cuts[2:], self.blocks, strict=True):
            x, mask = cut(x, mask)
            x = block(x, mask)
        logits = self.head(x).mean(1)
        labels = torch.stack([target["label"] for target in targets])
        weights = torch.stack([target["weight"] for target in targets])
        return (F.cross_entropy(logits, labels, reduction="none") * weights).mean()


def batch(size: int, height: int, width: int, seed: int = 0) -> dict[str, Any]:
    """Images and one dictionary of targets per image, as detection has them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "images": torch.randn(size, 3, height, width, generator=generator),
        "targets": [
            {"label": torch.randint(4, (), generator=generator), "weight": torch.rand((), generator=generator) + 0.5}
            for _ in range(size)
        ],
    }


def get_batch(size: int, device: Any = None) -> dict[str, Any]:
    """Varuna's `get_batch_fn`."""
    return batch(size, 8, 8)


class OneTensor(nn.Module):
    """A model that unpatched Varuna can hold: one float tensor at each of three cuts, nothing shared, no buffers."""

    def __init__(self, cut: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.cuts = nn.ModuleList(cut() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer, cut in zip(self.layers, self.cuts, strict=False):
            x = cut(layer(x).relu())
        return self.layers[3](x).square().mean()


def one_tensor_batch(size: int, device: Any = None) -> dict[str, Tensor]:
    return {"x": torch.randn(size, DIM, generator=torch.Generator().manual_seed(0))}
