"""Makes one rank's copy of a transformers model for decoding: new modules around the same weights.

The model's own forward runs. transformers lets a program register an attention function by name; ours passes queries,
keys and values to the function that the caller passes with the inputs. Where heads are divided, the copy has the rank's
part of the matrices in attention and feed-forward, in two forms: that of Llama (`self_attn.q_proj` ...,
`mlp.gate_proj` ...) and that of GPT-2 (`attn.c_attn` ..., `mlp.c_fc` ...).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.extras import needed
from varuna_capslog.decoding.cache import Wire
from varuna_capslog.decoding.choice import HEADS, DecoderShape, refuse_heads
from varuna_capslog.model.inference_model import attention_caches
from varuna_capslog.model.layer import TensorPiece

__all__ = ["rank_model", "shape_of"]

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(layer, q [B, H, S, D], k and v [B, K, S, D], scale) -> [B, H, S, D]."""

_NAME = "capslog_decoding"
_PLENTY = 1 << 40
"""Tokens, more than any window keeps."""
_HARMLESS = ("position_ids", "cache_position", "use_cache", "is_causal", "output_attentions")
"""Further arguments of an attention function that do not change the attention of one causal decoder."""


@dataclass(frozen=True)
class _Matrix:
    """A matrix that heads sharding divides.

    path: in a block; inputs: its inputs are divided, and the outputs of all ranks summed; groups: matrices of equal
    size that lie in it one after the other, each of which is divided.
    """

    path: str
    inputs: bool = False
    groups: int = 1


_FORMS = (
    (
        *(_Matrix(f"self_attn.{name}_proj") for name in "qkv"),
        _Matrix("self_attn.o_proj", inputs=True),
        *(_Matrix(f"mlp.{name}_proj") for name in ("gate", "up")),
        _Matrix("mlp.down_proj", inputs=True),
    ),
    (
        _Matrix("attn.c_attn", groups=3),
        _Matrix("attn.c_proj", inputs=True),
        _Matrix("mlp.c_fc"),
        _Matrix("mlp.c_proj", inputs=True),
    ),
)
"""The matrices in a block of Llama and in one of GPT-2."""


def shape_of(model: nn.Module) -> DecoderShape:
    """Return the sizes of a model of transformers, which may lie on the meta device.

    Raises:
        CapslogError: its attention is not known to attend to all earlier tokens with keys and values alone, or its
            layers have neither the form of Llama's nor that of GPT-2's.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        raise CapslogError(
            f"a {type(model).__name__} is no model of transformers; decoding over ranks takes those of the form of "
            "Llama or GPT-2"
        )
    blocks = _blocks(model)
    if not blocks:
        _refuse(config, "its layers have neither the form of Llama's nor that of GPT-2's")
    if not getattr(model, "_supports_attention_backend", False):
        _refuse(config, "transformers does not let others attend for it")
    for key in ("attn_logit_softcapping", "kv_lora_rank", "add_cross_attention", "is_encoder_decoder"):
        if getattr(config, key, None):
            _refuse(config, f"its config says {key}={getattr(config, key)}")
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        _refuse(config, f"its position codes depend on the longest request (rope_type {kind})")
    kept = set((attention_caches(model, _PLENTY, 1) or {}).values())
    if len(kept) != 1 or min(kept) % (2 * _PLENTY):
        _refuse(config, "some of its layers do not keep all tokens")
    (_, first), *_ = blocks
    inner = next(_sizes(part)[0] for spec, part in first if spec.path.startswith("mlp.") and not spec.inputs)
    heads, size = config.num_attention_heads, getattr(config, "head_dim", None)
    size = size or config.hidden_size // heads
    divided = sum(part.weight.numel() for _, parts in blocks for _, part in parts)
    output: Any = model.get_output_embeddings()  # type: ignore[operator]
    return DecoderShape(
        layers=len(blocks),
        width=config.hidden_size,
        heads=heads,
        kv_heads=min(kept) // (2 * _PLENTY) // size,
        head_dim=size,
        inner=inner,
        itemsize=output.weight.element_size(),
        divided=divided,
        output=output.weight.numel(),
        rest=sum(parameter.numel() for parameter in model.parameters()) - divided - output.weight.numel(),
    )


def rank_model(model: nn.Module, shape: DecoderShape, wire: Wire, shard: str) -> nn.Module:
    """Return the model as a rank runs it, which attends by the function that its forward gets as `capslog_attend`.

    The model itself stays as it is; the copy has its parameters, except those that are divided.

    Raises:
        CapslogError: transformers is not installed; the degree does not divide heads or columns.
    """
    with needed("decoding over ranks"):
        from transformers import AttentionInterface
    refused = refuse_heads(shape, wire.degree) if shard == HEADS else None
    if refused is not None:
        raise CapslogError(f"{refused}; choose another number of ranks, or shard='sequence'")
    AttentionInterface.register(_NAME, _attend)
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    rank_copy: Any = copy.deepcopy(model, shared)
    rank_copy.config._attn_implementation = _NAME
    if shard == HEADS and wire.degree > 1:
        for block, parts in _blocks(rank_copy):
            for spec, matrix in parts:
                block.set_submodule(spec.path, _divided(spec, matrix, wire))
            attention: Any = getattr(block, "attn", None)
            if attention is not None:
                attention.split_size //= wire.degree
    return rank_copy.eval()


class _SummedOverRanks(nn.Module):
    """A matrix whose inputs are divided: the ranks' outputs are summed."""

    def __init__(self, part: nn.Linear, bias: Tensor | None, wire: Wire) -> None:
        super().__init__()
        self.part, self._bias, self._wire = part, bias, wire

    def forward(self, x: Tensor) -> Tensor:
        total = self._wire.sum(self.part(x))
        return total if self._bias is None else total + self._bias


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    capslog_attend: Attend,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function as transformers calls it: returns [B, S, H, D]."""
    strange = [name for name, value in others.items() if value is not None and name not in _HARMLESS]
    if strange:
        raise CapslogError(
            f"{type(module).__name__} attends with {', '.join(strange)}, which decoding over ranks does not know; use "
            "transformers' generate"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    return capslog_attend(layer, query, key, value, scale).transpose(1, 2), None


def _blocks(model: nn.Module) -> list[tuple[nn.Module, list[tuple[_Matrix, Any]]]]:
    """Return every block with its matrices; blocks of other forms are left out."""
    blocks = []
    for module in model.modules():
        for form in _FORMS:
            parts = [(spec, _at(module, spec.path)) for spec in form]
            if all(part is not None for _, part in parts):
                blocks.append((module, parts))
    return blocks


def _at(module: nn.Module, path: str) -> nn.Module | None:
    part: Any = module
    for name in path.split("."):
        part = getattr(part, name, None)
    return part if getattr(getattr(part, "weight", None), "ndim", 0) == 2 else None


def _sizes(matrix: Any) -> tuple[int, int]:
    """Return (outputs, inputs) of an nn.Linear, or of transformers' Conv1D, whose weight is transposed."""
    rows, columns = matrix.weight.shape
    return (columns, rows) if hasattr(matrix, "nf") else (rows, columns)


def _divided(spec: _Matrix, matrix: Any, wire: Wire) -> nn.Module:
    """Return the rank's part of a matrix."""
    size = _sizes(matrix)[1 if spec.inputs else 0]
    group, part = size // spec.groups, size // spec.groups // wire.degree
    firsts = [index * group + wire.rank * part for index in range(spec.groups)]
    ranges = tuple((first, first + part) for first in firsts)
    weight = matrix.weight.detach()
    weight = weight.t() if hasattr(matrix, "nf") else weight
    piece = TensorPiece("weight", size, int(spec.inputs), ranges).of(weight).contiguous()
    bias = None if matrix.bias is None else matrix.bias.detach()
    if spec.inputs:
        return _SummedOverRanks(_linear(piece, None), bias, wire)
    return _linear(piece, None if bias is None else TensorPiece("bias", size, 0, ranges).of(bias))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def _refuse(config: Any, why: str) -> None:
    raise CapslogError(
        f"decoding a {config.model_type} over ranks is not known: {why}; use transformers' generate on one device"
    )
