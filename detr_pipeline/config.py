"""Model section of a DETR config, with the defaults of the paper's R50 model (Carion et al., ECCV 2020) and its
published code. Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from varuna_capslog.config.settings import Section

__all__ = ["ModelConfig"]

Positive = Annotated[int, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]


class ModelConfig(Section):
    """Keys under `model.`."""

    backbone: Literal["resnet18", "resnet34", "resnet50", "resnet101"] = "resnet50"
    """The torchvision network that makes image features."""

    last_layer: Literal["layer3", "layer4"] = "layer4"
    """Stage of the backbone whose output is used; layer3 halves the stride and doubles each side of the feature map."""

    dilation: bool = False
    """Dilate the last used stage instead of striding it (the paper's DC5); needs resnet50 or resnet101."""

    norm: Literal["frozen", "batch", "group"] = "frozen"
    """Normalisation of the backbone: frozen statistics (only sensible with weights), BatchNorm, or GroupNorm."""

    freeze: Literal["none", "stem+layer1"] = "stem+layer1"
    """Backbone parts that are not trained."""

    weights: Path | None = None
    """File with torchvision ResNet weights or a whole DETR in Facebook's layout; null starts from random weights."""

    encoder_layers: Positive = 6
    """Transformer encoder layers."""

    decoder_layers: Positive = 6
    """Transformer decoder layers."""

    hidden_dim: Annotated[int, Field(gt=0, multiple_of=4)] = 256
    """Width of the transformer."""

    attention_heads: Positive = 8
    """Heads of every attention; divides hidden_dim."""

    feedforward: Positive = 2048
    """Width inside the feed-forward blocks."""

    queries: Positive = 100
    """Predictions per image."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Dropout rate of the transformer."""

    attention: Literal["eager", "sdpa"] = "sdpa"
    """eager keeps the attention maps in memory as the paper's DETR does; sdpa uses torch's fused kernels."""

    cut_points: Literal["heads_last", "paper", "all", "instage"] | list[str] = "all"
    """Where the model may be cut. all: every boundary; instage: not between two ResNet stages; heads_last: instage,
    heads kept with the last decoder layer; paper: stem and layer1 in one piece, each later stage's first block kept
    with the block before; or a list of names: cut before these layers of `all`."""

    heads: Literal["last", "every_decoder"] = "last"
    """Class and box heads once after the decoder, or inside every decoder layer (one set of parameters for all of
    them)."""

    num_classes: Positive | None = None
    """Classes told apart; the model gets one output more, for no-object. null takes the number from the data file."""

    auxiliary_loss: bool = True
    """Predict and judge after every decoder layer, not only after the last."""

    cost_class: Weight = 1.0
    """Weight of the class probability in the matching cost."""

    cost_boxes: Weight = 5.0
    """Weight of the boxes' L1 distance in the matching cost."""

    cost_giou: Weight = 2.0
    """Weight of the generalised IoU in the matching cost."""

    loss_class: Weight = 1.0
    """Weight of the classification loss."""

    loss_boxes: Weight = 5.0
    """Weight of the boxes' L1 loss."""

    loss_giou: Weight = 2.0
    """Weight of the generalised IoU loss."""

    no_object: Annotated[float, Field(gt=0)] = 0.1
    """Weight of queries without an object in the classification loss."""

    @model_validator(mode="after")
    def _agree(self) -> ModelConfig:
        if self.dilation and self.backbone in ("resnet18", "resnet34"):
            raise ValueError(
                f"model.dilation=true needs bottleneck blocks, which model.backbone={self.backbone} has not; "
                "choose resnet50 or resnet101, or set model.dilation=false"
            )
        if self.hidden_dim % self.attention_heads:
            raise ValueError(
                f"model.attention_heads={self.attention_heads} does not divide model.hidden_dim={self.hidden_dim}; "
                "choose numbers that divide"
            )
        if self.heads == "every_decoder" and not self.auxiliary_loss:
            raise ValueError(
                "model.heads=every_decoder predicts after every decoder layer, which model.auxiliary_loss=false "
                "forbids; set model.heads=last"
            )
        if self.cost_class == self.cost_boxes == self.cost_giou == 0:
            raise ValueError(
                "model.cost_class, cost_boxes and cost_giou are all 0: nothing to match by; set one of them"
            )
        return self
