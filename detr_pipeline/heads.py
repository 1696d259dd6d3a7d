"""What turns decoder outputs into class scores and boxes: at the end of the chain, or inside every decoder layer.

`chain` chooses between the two. In the second case all decoder layers hold the very same `Heads` object, whose
parameters are then shared by several layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from detr_pipeline.transformer import DecoderLayer, FirstDecoderLayer

if TYPE_CHECKING:
    from detr_pipeline.config import ModelConfig

__all__ = ["FirstPredictingDecoderLayer", "Heads", "LastPredictingDecoderLayer", "PredictingDecoderLayer"]


class _BoxHead(nn.Module):
    """Three linear maps with ReLU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4)])

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.layers
        return last(F.relu(second(F.relu(first(x)))))


class Heads(nn.Module):
    """Decoder norm, then class scores and boxes.

    Called with hidden [..., width]; returns logits [..., C + 1], no-object last, and boxes [..., 4] as (cx, cy, w, h)
    in 0..1 of the unpadded image.
    """

    def __init__(self, config: ModelConfig, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_dim)
        self.class_embed = nn.Linear(config.hidden_dim, num_classes + 1)
        self.bbox_embed = _BoxHead(config.hidden_dim)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(hidden)
        # bfloat16 has 8 bits: a sigmoid rounded to it would place a box to 1/256 of the image at best.
        return self.class_embed(normed), self.bbox_embed(normed).to(hidden.dtype).sigmoid()


class FirstPredictingDecoderLayer(FirstDecoderLayer):
    """As `FirstDecoderLayer`, and predicts: returns hidden, query, logits [1, B, Q, C + 1], boxes [1, B, Q, 4]."""

    def __init__(self, config: ModelConfig, heads: Heads) -> None:
        super().__init__(config)
        self.heads = heads

    def forward(self, memory: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[override]
        hidden, query = super().forward(memory, valid)
        return hidden, query, *self.heads(hidden)


class PredictingDecoderLayer(DecoderLayer):
    """As `DecoderLayer`, and appends its predictions to those that come in; returns hidden, logits, boxes."""

    def __init__(self, config: ModelConfig, heads: Heads) -> None:
        super().__init__(config)
        self.heads = heads

    def forward(  # type: ignore[override]
        self, hidden: Tensor, memory: Tensor, valid: Tensor, query: Tensor, logits: Tensor, boxes: Tensor
    ) -> tuple[Tensor, ...]:
        hidden = super().forward(hidden, memory, valid, query)
        more_logits, more_boxes = self.heads(hidden)
        return hidden, torch.cat((logits, more_logits)), torch.cat((boxes, more_boxes))


class LastPredictingDecoderLayer(PredictingDecoderLayer):
    """As `PredictingDecoderLayer`, but no layer reads its hidden state: returns logits, boxes."""

    def forward(  # type: ignore[override]
        self, hidden: Tensor, memory: Tensor, valid: Tensor, query: Tensor, logits: Tensor, boxes: Tensor
    ) -> tuple[Tensor, ...]:
        return super().forward(hidden, memory, valid, query, logits, boxes)[1:]
