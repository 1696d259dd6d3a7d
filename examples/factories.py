"""A language model of one factory per layer, of which no process builds more than its own layers:

capslog train examples/factories.yaml

Embedding and output projection are one tied parameter, although no process may ever have both layers.
"""

from __future__ import annotations

import functools

from torch import nn

from varuna_capslog import Chain, LayerFactory

__all__ = ["model"]

VOCABULARY = 512


def model(layers: int = 4, dim: int = 64) -> Chain:
    """Tokens [B, T] to logits [B, T, V]."""
    block = functools.partial(nn.TransformerEncoderLayer, dim, 4, 4 * dim, batch_first=True, norm_first=True)
    return Chain.from_factories(
        [
            LayerFactory("embedding", functools.partial(nn.Embedding, VOCABULARY, dim)),
            *(LayerFactory(f"block.{k}", block) for k in range(layers)),
            LayerFactory("head", functools.partial(nn.Linear, dim, VOCABULARY, bias=False)),
        ],
        inputs=("x",),
        outputs=("x",),
        name="factories",
        tied=[("embedding.weight", "head.weight")],
    )
